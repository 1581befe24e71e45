"""Which rollouts are finished, by the notes that their owners leave in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ..errors import ClosedError
from ..foreign import uncancelled
from .looks import Look, Mine, looks_at

__all__ = ("Finished", "follow")

logger = logging.getLogger("tokcap.delivery")

_REST = 4
"""Between two rounds it rests at least this many times as long as a round took."""


class Finished(msgspec.Struct, frozen=True):
    """A rollout to be frozen."""

    rollout_id: str
    snapshot_id: str = ""
    """Its incarnation: a new attempt, after a reset, is another rollout."""
    idle: bool = False
    """No note says that it is finished; nothing was written to it for long."""
    resumed: bool = False
    """It was frozen already when following began."""


class _Known(msgspec.Struct):
    snapshot_id: str
    stamp: Any = None
    since: float = 0.0
    """When this stamp was seen first; CLOCK_MONOTONIC."""
    told: bool = False


async def follow(source: Any, mine: Mine, *, idle_s: float | None, poll_s: float) -> AsyncGenerator[Finished, None]:
    """Every rollout that is finished and not retired, each incarnation once; never ends by itself.

    Those that were frozen before, by a consumer that ended before it was done with them, come, too. A rollout that was
    reset while it waited to be taken doesn't come, or a new attempt would be frozen. A look that fails is logged, and
    made again after `poll_s`.
    """
    looks = looks_at(source)
    known: dict[str, _Known] = {}
    resuming = True
    failure = ""
    while True:
        began = time.monotonic()
        found: list[tuple[str, Look, Finished]] = []
        try:
            present = await uncancelled(looks.all(mine))
            failure = ""
        except ClosedError:
            raise
        except Exception as error:
            if repr(error) != failure:  # not again at every look
                failure = repr(error)
                logger.warning("can't see which rollouts are finished, looking again: %s", failure)
            await asyncio.sleep(max(poll_s, _REST * (time.monotonic() - began)))
            continue
        for rollout_id, seen in present:
            one = known.get(rollout_id)
            if one is None or one.snapshot_id != seen.snapshot_id:
                one = known[rollout_id] = _Known(seen.snapshot_id)
            if one.told:
                continue
            if seen.state == "frozen":
                found.append((rollout_id, seen, Finished(rollout_id, seen.snapshot_id, resumed=resuming)))
            elif one.stamp != seen.stamp:
                one.stamp, one.since = seen.stamp, time.monotonic()
                try:
                    if await looks.is_finished(rollout_id):
                        found.append((rollout_id, seen, Finished(rollout_id, seen.snapshot_id)))
                        one.stamp = None  # should it not be taken now, it is looked at again
                except ClosedError:
                    raise
                except Exception as error:
                    one.stamp = None
                    logger.warning("rollout %s can't be read: %s", rollout_id, error)
            elif idle_s is not None and time.monotonic() - one.since >= idle_s:
                found.append((rollout_id, seen, Finished(rollout_id, seen.snapshot_id, idle=True)))
        for gone in known.keys() - {rollout_id for rollout_id, _ in present}:
            del known[gone]
        resuming = False
        took = time.monotonic() - began
        for rollout_id, seen, finished in found:
            if await _still(looks.one(rollout_id), seen, finished.idle):
                known[rollout_id].told = True
                yield finished
        await asyncio.sleep(max(poll_s, _REST * took))


async def _still(looking: Any, before: Look, idle: bool) -> bool:
    """Whether a rollout is what it was, however long it took until somebody could take it."""
    try:
        now: Look = await looking
    except Exception:
        return False
    if now.snapshot_id != before.snapshot_id or now.state not in ("open", "frozen"):
        return False
    return not idle or now.stamp == before.stamp
