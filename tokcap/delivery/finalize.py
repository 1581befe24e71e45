"""From a finished record to one that carries the tokens of its scored chain (rules 23 to 26)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import InvalidIdError, RetiredError
from ..foreign import error_text
from ..protocol import TokenCaptureSnapshot, TokenSource
from ..trajectory import Rebuild, rebuild_response
from ..trajectory.response import OnDrift, check_on_drift
from .alignment import aligned_output, prompts_extend
from .freezing import freeze, in_thread
from .identity import rollout_id_of
from .native import carries_native_ids, equal_capture, native_items

__all__ = ("CAPTURE_KEY", "MASK_KEY", "Finalized", "finalize_rollout")

logger = logging.getLogger("tokcap.delivery")

MASK_KEY = "mask_sample"
"""Of a record: True keeps it out of the loss."""

CAPTURE_KEY = "_ng_token_capture"
"""Of a record: metrics, reasons, and the pair that was read."""


class Finalized(msgspec.Struct, frozen=True):
    """What became of one record."""

    rollout_id: str
    """Empty if the record names none, or none that can be."""
    snapshot_id: str = ""
    version: int = 0
    """Of the snapshot that was read; 0 if none was."""
    masked: bool = False
    reasons: tuple[str, ...] = ()
    """Why it is masked (`tokcap.trajectory.REASONS`)."""
    metrics: dict[str, Any] = {}
    """`tokcap.trajectory.METRICS`, and `error` if there was one."""
    native: bool = False
    """Whether the record brought token ids of its own, which were left as they are."""

    @property
    def retirable(self) -> bool:
        """Whether the snapshot may go once the record is handed over: something was read, and it isn't masked."""
        return not self.masked and self.version > 0


class _How(msgspec.Struct, frozen=True):
    models: str | Collection[str] | None
    call_id: str
    response_id: str
    choice_index: int | None
    on_drift: OnDrift
    strict: bool


async def finalize_rollout(
    record: dict[str, Any],
    source: TokenSource | None,
    *,
    models: str | Collection[str] | None = None,
    call_id: str = "",
    response_id: str = "",
    choice_index: int | None = None,
    wait_open_s: float = 5.0,
    on_drift: OnDrift = "last_segment",
    strict: bool = False,
) -> Finalized | None:
    """Freeze the rollout of a finished record and put the captured tokens into its `response.output`.

    record: changed in place. `response.output` is replaced if the build is not masked: the items of the scored chain,
        carriers with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`; tool results and what else
        isn't the model's stay in place. A record without a response gets the rebuilt one. `mask_sample` becomes True if
        it is masked, and is never removed; `_ng_token_capture` has metrics and reasons. Nothing else is touched.
    source: None if a framework reads by itself (`tokcap.config.process_source` says so): nothing is done, None.
    call_id, response_id, choice_index: what is known of the scored answer (the record's response is a witness, too);
        models, on_drift, strict: as in `tokcap.trajectory.rebuild_response`.
    wait_open_s: how long calls that are still open may take to finish, if the source can wait.

    A record that brought token ids itself is left as it is if they equal the capture, or if nothing was captured; it is
    masked if they differ.

    Retires nothing: hand the record over durably, then `retire_rollout(finalized, source)`. Never raises because of
    what was recorded or because the source fails: the record is masked then. Raises `InvalidOptionError` for an
    `on_drift` that isn't one. Cancelled, it has changed nothing in the record.
    """
    check_on_drift(on_drift)
    if source is None:
        return None
    how = _How(models, call_id, response_id, choice_index, on_drift, strict)
    try:
        rollout_id = rollout_id_of(record)
    except InvalidIdError as error:
        return _mask(record, Finalized("", masked=True, reasons=("no_rollout_id",), metrics={"error": str(error)}))
    if rollout_id is None:
        if carries_native_ids(record.get("response")):
            return Finalized("", native=True)  # nothing can have been captured for it
        return _mask(record, Finalized("", masked=True, reasons=("no_rollout_id",)))
    try:
        snapshot = await freeze(source, rollout_id, wait_open_s)
    except RetiredError as error:
        if carries_native_ids(record.get("response")):
            # Finalized and handed over before: what it was compared with is gone, and with good reason.
            return Finalized(rollout_id, native=True)
        return _mask(record, _unreadable(rollout_id, error))
    except Exception as error:
        return _mask(record, _unreadable(rollout_id, error))
    try:
        finalized, response = await in_thread(lambda: _judge(record.get("response"), snapshot, how))
    except Exception as error:
        return _mask(record, _unreadable(rollout_id, error, snapshot))
    finally:
        with contextlib.suppress(Exception):
            snapshot.close()
    if finalized.masked:
        return _mask(record, finalized)
    if not finalized.native:
        _deliver(record, finalized, response)
    return finalized


def _unreadable(rollout_id: str, error: Exception, snapshot: TokenCaptureSnapshot | None = None) -> Finalized:
    pair = ("", 0) if snapshot is None else (snapshot.snapshot_id, snapshot.version)
    return Finalized(rollout_id, *pair, True, ("unreadable",), {"error": error_text(error)})


def _judge(
    response: object, snapshot: TokenCaptureSnapshot, how: _How
) -> tuple[Finalized, Mapping[str, Any] | list[Any] | None]:
    """What to do with the record, and what to put in: a whole response, or the output of the one that is there."""
    witness = response if isinstance(response, Mapping) else None
    natives = native_items(witness) if witness is not None else []
    if natives and not snapshot.incomplete and not snapshot.entries:
        pair = (snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
        return Finalized(*pair, native=True), None
    rebuilt = _rebuild(snapshot, how, witness)
    reasons = rebuilt.reasons
    placed: Mapping[str, Any] | list[Any] | None = None
    if natives:
        if "several_conversations" in reasons and not how.call_id:
            rebuilt = _rebuild_of_native(snapshot, how, witness, natives) or rebuilt
            reasons = rebuilt.reasons
        if not equal_capture(natives, snapshot.entries, rebuilt.calls):
            reasons = (*reasons, "native_ids_differ")
    elif not rebuilt.masked:
        placed = _place(witness, rebuilt) if response is None or witness is not None else None
        if placed is None:
            reasons = (*reasons, "not_aligned")
    metrics = _plain(rebuilt.metrics)
    if reasons:
        metrics["delivered"], metrics["delivered_fraction"] = 0, 0.0
    finalized = Finalized(
        rebuilt.rollout_id, rebuilt.snapshot_id, rebuilt.version, bool(reasons), reasons, metrics, bool(natives)
    )
    return finalized, placed


def _rebuild(
    snapshot: TokenCaptureSnapshot, how: _How, witness: Mapping[str, Any] | None, key: tuple[str, int] | None = None
) -> Rebuild:
    call_id, choice_index = (how.call_id, how.choice_index) if key is None else key
    return rebuild_response(
        snapshot,
        models=how.models,
        call_id=call_id,
        choice_index=choice_index,
        response_id=how.response_id,
        response=witness,
        on_drift=how.on_drift,
        strict=how.strict,
    )


def _rebuild_of_native(
    snapshot: TokenCaptureSnapshot,
    how: _How,
    witness: Mapping[str, Any] | None,
    natives: Sequence[Mapping[str, Any]],
) -> Rebuild | None:
    """Of several conversations, that of the call whose ids the record's last carrier has."""
    for entry in snapshot.entries:
        key = (entry.model_call_id, entry.choice_index)
        if equal_capture(natives[-1:], (entry,), (key,)):
            return _rebuild(snapshot, how, witness, key)
    return None


def _place(response: Mapping[str, Any] | None, rebuilt: Rebuild) -> Mapping[str, Any] | list[Any] | None:
    if response is None:
        return rebuilt.response
    output = response.get("output")
    if output is not None and not isinstance(output, (list, tuple)):
        return None
    placed = aligned_output(output or (), rebuilt.items, named=bool({*rebuilt.spoke} - {"content"}))
    return placed if placed is not None and prompts_extend(placed) else None


def _deliver(record: dict[str, Any], finalized: Finalized, placed: Mapping[str, Any] | list[Any] | None) -> None:
    if isinstance(placed, list):
        if not isinstance(record["response"], dict):  # a mapping that can't be changed
            record["response"] = dict(record["response"])
        record["response"]["output"] = placed
    else:
        record["response"] = placed
    _tell(record, finalized)


def _mask(record: dict[str, Any], finalized: Finalized) -> Finalized:
    record[MASK_KEY] = True
    _tell(record, finalized)
    logger.warning(
        "rollout %s is masked, its evidence is kept: %s",
        finalized.rollout_id or "(without an id)",
        ", ".join(finalized.reasons) + (f" ({finalized.metrics['error']})" if "error" in finalized.metrics else ""),
    )
    return finalized


def _tell(record: dict[str, Any], finalized: Finalized) -> None:
    record[CAPTURE_KEY] = {
        **finalized.metrics,
        "reasons": list(finalized.reasons),
        "snapshot_id": finalized.snapshot_id,
        "version": finalized.version,
    }


def _plain(value: Any) -> Any:
    """As JSON can say it: whole numbers and text stay, a number that isn't finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, str, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
