"""From a snapshot to the records of an export."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ..entry import TokenEntry
from ..inspection.view import CallKey, CallView, RolloutView
from ..protocol import CallRecord
from ..store import Snapshot
from ..trajectory import Build, Trajectory, build
from .schema import Level, Record

__all__ = ("Asked", "records_of")


class Asked(msgspec.Struct, frozen=True):
    """What is exported of each rollout."""

    by: Level = "trajectory"
    untrained: bool = False
    """Also trajectories of which nothing is trained."""
    models: tuple[str, ...] | None = None
    strict: bool = False
    exclude_not_behaviour: bool = False


def records_of(snapshot: Snapshot, asked: Asked) -> Iterator[Record]:
    """The records of one rollout, made one by one while the snapshot is open. What can't be read raises before this
    returns, so that no rollout is written by halves."""
    built = build(
        snapshot,
        models=asked.models,
        strict=asked.strict,
        exclude_not_behaviour=asked.exclude_not_behaviour,
    )
    identity = {
        "rollout_id": built.rollout_id,
        "snapshot_id": built.snapshot_id,
        "version": built.version,
        "group": built.group,
        "meta": built.meta,
    }
    if asked.by == "call":
        places = {(entry.model_call_id, entry.choice_index): at for at, entry in enumerate(snapshot.entries)}
        return _calls(snapshot, RolloutView(snapshot, built), places, identity)
    wanted: Sequence[Trajectory] = built.trajectories if asked.untrained else built.trained
    if asked.by == "rollout":
        return iter([_rollout(snapshot, built, wanted, identity)])
    return (_trajectory(trajectory, identity) for trajectory in wanted)


def _trajectory(trajectory: Trajectory, identity: Record) -> Record:
    return {
        **identity,
        **trajectory.as_dict(),
        "flags": list(trajectory.flags),
        "policy_versions": _spans(trajectory.policy_versions),
    }


def _spans(spans: Collection[Any]) -> list[Any]:
    return [list(span) if isinstance(span, tuple) else span for span in spans]


def _rollout(snapshot: Snapshot, built: Build, wanted: Sequence[Trajectory], identity: Record) -> Record:
    offsets = np.cumsum([0, *map(len, wanted)], dtype=np.int64)
    token_ids, loss_mask = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.bool_)
    log_probs = np.empty(offsets[-1], np.float64)
    told = []
    for trajectory, start, end in zip(wanted, offsets[:-1], offsets[1:], strict=True):
        token_ids[start:end] = trajectory.token_ids
        loss_mask[start:end] = trajectory.loss_mask
        log_probs[start:end] = trajectory.log_probs
        told.append(
            {
                "index": trajectory.index,
                "trained": trajectory.trained,
                "flags": list(trajectory.flags),
                "policy_versions": _spans(trajectory.policy_versions),
            }
        )
    return {
        **identity,
        "finished": snapshot.finished,
        "incomplete": snapshot.incomplete,
        "masked": built.masked,
        "reasons": list(built.reasons),
        "metrics": {name: value for name, value in built.metrics.items() if value},
        "token_ids": token_ids,
        "loss_mask": loss_mask,
        "log_probs": log_probs,
        "trajectory_offsets": offsets,
        "trajectories": told,
    }


def _calls(snapshot: Snapshot, view: RolloutView, places: dict[CallKey, int], identity: Record) -> Iterator[Record]:
    told = {record.model_call_id: record for record in snapshot.calls if record.model_call_id}
    nameless = (record for record in snapshot.calls if not record.model_call_id)
    for call in view.calls:
        record = told.get(call.model_call_id) or next(nameless, None) or CallRecord(call.model_call_id, call.outcome)
        yield {
            **identity,
            "model_call_id": call.model_call_id,
            "choice_index": call.choice_index,
            "outcome": call.outcome,
            "verdict": call.verdict,
            **_of_ledger(record),
            **_of_entry(view, call, snapshot.entries[places[call.key]] if call.key in places else None),
            "detail": call.detail,
        }


def _of_ledger(record: CallRecord) -> Record:
    return {
        "boot_id": record.boot_id,
        "begun_at": np.nan if record.begun_at is None else record.begun_at,
        "ended_at": np.nan if record.ended_at is None else record.ended_at,
        "delivered": record.delivered,
        "retry_count": record.retry_count,
        "idempotency_key": record.idempotency_key,
    }


def _of_entry(view: RolloutView, call: CallView, entry: TokenEntry | None) -> Record:
    if entry is None:
        return _NOTHING
    experts = entry.routed_experts
    pieces = entry.pieces
    return {
        # Copies, as a view would keep a file of the snapshot open for as long as a part is not finished.
        "recorded": True,
        "prompt_token_ids": entry.prompt_token_ids.copy(),
        "generation_token_ids": entry.generation_token_ids.copy(),
        "generation_log_probs": entry.generation_log_probs.copy(),
        "loss_mask": view.loss_mask(call.key),
        "model": entry.model,
        "response_id": entry.response_id,
        "finish_reason": entry.finish_reason,
        "created_at": entry.created_at,
        "output_items": entry.output_items,
        "token_item_index": entry.token_item_index,
        "policy_versions": _spans(entry.policy_versions),
        "sampling": entry.sampling,
        "extra": entry.extra,
        "pieces": None if pieces is None else [base64.b64encode(piece).decode() for piece in pieces],
        "routed_experts": b"" if experts is None else experts.tobytes(),
        "routed_experts_dtype": "" if experts is None else experts.dtype.str,
        "routed_experts_shape": None if experts is None else list(experts.shape),
        "entry_schema_version": entry.schema_version,
    }


_NOTHING: Record = {
    "recorded": False,
    "prompt_token_ids": np.empty(0, np.int32),
    "generation_token_ids": np.empty(0, np.int32),
    "generation_log_probs": np.empty(0, np.float64),
    "loss_mask": np.empty(0, np.bool_),
    "model": "",
    "response_id": "",
    "finish_reason": "",
    "created_at": np.nan,
    "output_items": [],
    "token_item_index": None,
    "policy_versions": [],
    "sampling": {},
    "extra": {},
    "pieces": None,
    "routed_experts": b"",
    "routed_experts_dtype": "",
    "routed_experts_shape": None,
    "entry_schema_version": 0,
}
"""Of a call without a record."""
