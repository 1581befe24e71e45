"""One rollout from its source to a `Delivery`, whatever goes wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from ..errors import RetiredError, StaleAttemptError
from ..foreign import error_text, uncancelled
from ..protocol import TokenCaptureSnapshot, TokenSource
from ..trajectory import Build, build, group_of
from .freezing import freeze, in_thread
from .handover import Delivery, Retire

__all__ = ("GroupOf", "How", "ScoredOf", "Wanted", "read_again", "read_rollout")

logger = logging.getLogger("tokcap.delivery")

_PAUSES_S = (0.2, 1.0)
"""Between two tries to freeze what is busy or can't be reached just now."""

ScoredOf = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
GroupOf = Callable[[str, Mapping[str, Any]], str]


class How(msgspec.Struct, frozen=True):
    """What a consumer wants of every rollout."""

    models: str | Collection[str] | None = None
    strict: bool = False
    scored: ScoredOf | None = None
    group_of: GroupOf = group_of


class Wanted(msgspec.Struct, frozen=True):
    """A rollout that is to be read."""

    rollout_id: str
    wait_open_s: float
    record: Mapping[str, Any] | None = None
    resumed: bool = False
    error: str = ""
    """Why its id can't be."""
    snapshot_id: str = ""
    """The incarnation that is meant, if it is known."""


async def read_rollout(
    retire: Retire, source: TokenSource, wanted: Wanted, how: How, claim: Callable[[str, str, int], bool]
) -> Delivery | None:
    """Freeze and build; None if it is retired already, or if `claim` says that somebody has this snapshot already.

    `claim` is called with the rollout id, the snapshot id and the version.
    """
    if wanted.error:
        return Delivery(retire, "", reason="no_rollout_id", error=wanted.error, record=wanted.record)
    try:
        snapshot = await _freeze(source, wanted)
    except RetiredError:
        logger.info("rollout %s was consumed before", wanted.rollout_id)
        return None
    except StaleAttemptError:
        logger.info("rollout %s was reset before it could be frozen", wanted.rollout_id)
        return None
    except Exception as error:
        return await _unreadable(retire, wanted, how, error)
    try:
        pair = (snapshot.snapshot_id, snapshot.version)
    except Exception as error:  # of a snapshot that asks somewhere else for them
        _close(snapshot)
        return await _unreadable(retire, wanted, how, error)
    if not claim(wanted.rollout_id, *pair):
        _close(snapshot)
        return None
    return await _read(retire, snapshot, pair, wanted, how)


async def _freeze(source: TokenSource, wanted: Wanted) -> TokenCaptureSnapshot:
    for pause_s in _PAUSES_S:
        try:
            return await uncancelled(freeze(source, wanted.rollout_id, wanted.wait_open_s, wanted.snapshot_id))
        except OSError as error:  # `BusyError` and every timeout, too
            logger.info("rollout %s can't be frozen now, again in %g s: %r", wanted.rollout_id, pause_s, error)
        await asyncio.sleep(pause_s)
    return await uncancelled(freeze(source, wanted.rollout_id, wanted.wait_open_s, wanted.snapshot_id))


async def read_again(retire: Retire, source: Any, delivery: Delivery, how: How) -> Delivery | None:
    """The newer version of what was handed over; None if there is none, or if it can't be read now, which is logged."""
    rollout_id = delivery.rollout_id
    try:
        # A look, where the source has one: to freeze would close the door to a new attempt after a reset.
        look = getattr(source, "read", None)
        snapshot: TokenCaptureSnapshot = await uncancelled(
            look(rollout_id) if callable(look) else source.freeze(rollout_id)
        )
    except Exception as error:
        logger.warning("rollout %s: what replaces version %d can't be read: %r", rollout_id, delivery.version, error)
        return None
    try:
        pair = (snapshot.snapshot_id, snapshot.version)
    except Exception as error:
        _close(snapshot)
        logger.warning("rollout %s: what replaces version %d can't be read: %r", rollout_id, delivery.version, error)
        return None
    if pair[0] != delivery.snapshot_id or pair[1] <= delivery.version:
        _close(snapshot)
        logger.warning(
            "rollout %s: version %d was not retired, and there is no newer one", rollout_id, delivery.version
        )
        return None
    return await _read(retire, snapshot, pair, Wanted(rollout_id, 0.0, delivery.record, delivery.resumed), how)


async def _read(
    retire: Retire, snapshot: TokenCaptureSnapshot, pair: tuple[str, int], wanted: Wanted, how: How
) -> Delivery:
    try:
        built = await in_thread(lambda: _build(snapshot, wanted, how))
    except Exception as error:
        return await _unreadable(retire, wanted, how, error, pair)
    finally:
        _close(snapshot)
    return Delivery(
        retire,
        wanted.rollout_id,
        snapshot_id=built.snapshot_id,
        version=built.version,
        build=built,
        group=built.group,
        record=wanted.record,
        resumed=wanted.resumed,
    )


def _build(snapshot: TokenCaptureSnapshot, wanted: Wanted, how: How) -> Build:
    meta: Mapping[str, Any] = getattr(snapshot, "meta", {})
    witnesses: dict[str, Any] = {}
    if wanted.record is not None and isinstance(wanted.record.get("response"), Mapping):
        witnesses["response"] = wanted.record["response"]
    if how.scored is not None:
        witnesses.update(how.scored(wanted.rollout_id, meta) or {})
    group = how.group_of(wanted.rollout_id, meta)
    return build(snapshot, models=how.models, strict=how.strict, group=group, **witnesses)


async def _unreadable(
    retire: Retire, wanted: Wanted, how: How, error: Exception, pair: tuple[str, int] = ("", 0)
) -> Delivery:
    logger.warning("rollout %s can't be read, its evidence is kept: %r", wanted.rollout_id, error)
    group = ""
    with contextlib.suppress(Exception):  # a function of the caller, which may be what failed
        group = await in_thread(lambda: how.group_of(wanted.rollout_id, {}))
    return Delivery(
        retire,
        wanted.rollout_id,
        snapshot_id=pair[0],
        version=pair[1],
        error=error_text(error),
        group=group,
        record=wanted.record,
        resumed=wanted.resumed,
    )


def _close(snapshot: TokenCaptureSnapshot) -> None:
    with contextlib.suppress(Exception):
        snapshot.close()
