"""What happens to calls, as events: each answer that was recorded, each call that ended without one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from ..errors import CorruptError, RetiredError, TokcapError
from ..ids import check_rollout_id
from ..protocol import CallRecord, Outcome
from ..store import FileStore, RolloutStat, Snapshot
from ..store.layout import Layout
from ..store.records import decode_pieces
from ..store.root import boot_id
from .fingerprint import see
from .row import proper
from .view import mean_of

__all__ = ("CallEvent", "clock", "events_of", "last_calls")

_TEXT = 200
"""Bytes of an answer's text."""


class CallEvent(msgspec.Struct, frozen=True):
    """One choice of a call that was recorded, or a call that was settled without one."""

    rollout_id: str
    snapshot_id: str
    model_call_id: str
    choice_index: int
    outcome: Outcome
    prompt: int
    """Ids of the prompt; 0 without a record."""
    sampled: int
    unknown_log_probs: int
    """Sampled ids without a log-prob."""
    mean_log_prob: float | None
    """Of the others, natural log."""
    text: str
    """The beginning of the answer, if the engine told the bytes of its tokens."""
    detail: str
    took_s: float | None
    at: float
    """Unix seconds when it ended, as near as can be told: by the clock of this boot, else the last change on disk."""

    @property
    def key(self) -> tuple[str, str, int, Outcome]:
        """What is told once."""
        return self.snapshot_id, self.model_call_id, self.choice_index, self.outcome


def last_calls(store: FileStore, count: int, *, unreadable: dict[str, str] | None = None) -> list[CallEvent]:
    """The calls that ended last, in order. Reads the rollouts that changed last, and no more of them than it needs.

    unreadable: gets what was met and can't be read, rollouts or directories of the store, and why.
    """
    if not count:
        return []
    layout, boot, now = Layout(store.directory), boot_id(), clock()
    failed = {} if unreadable is None else unreadable
    changed: list[tuple[float, str]] = []
    rollouts = os.open(layout.rollouts, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for shard in os.listdir(rollouts):
            try:
                names = os.listdir(f"{layout.rollouts}/{shard}")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                failed[f"rollouts/{shard}"] = proper(str(error))
                continue
            for name in names:
                try:
                    changed.append((see(rollouts, f"{shard}/{check_rollout_id(name)}").changed_at, name))
                except FileNotFoundError:
                    continue
                except (TokcapError, OSError) as error:
                    failed[name] = proper(str(error))
    finally:
        os.close(rollouts)
    found: list[CallEvent] = []
    for changed_at, name in sorted(changed, reverse=True):
        if len(found) >= count and changed_at < found[-count].at:
            break
        try:
            stat, snapshot = store.look_now(name, weigh=False)
        except RetiredError:
            continue
        except TokcapError as error:
            failed[name] = proper(str(error))
            continue
        if snapshot is not None:
            with snapshot:
                found.extend(events_of(stat, snapshot, changed_at, boot, now))
            found.sort(key=lambda event: event.at)
    return found[-count:]


def clock() -> float:
    """What makes unix seconds of CLOCK_BOOTTIME."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def events_of(stat: RolloutStat, snapshot: Snapshot, changed_at: float, boot: str, clock: float) -> Iterator[CallEvent]:
    """Every call of a rollout that has ended, one for each choice that is recorded."""
    records = {record.model_call_id: record for record in snapshot.calls}
    entries = snapshot.entries
    answered = set()
    for index in entries.chosen:
        node = entries.nodes[index]
        try:
            stored = entries.load(node)
            text = _text(stored.head.pieces)
        except CorruptError:
            continue
        head = stored.head
        record = records.get(head.model_call_id)
        if record is None or record.outcome == "open":  # choices that are still missing
            continue
        answered.add(head.model_call_id)
        known = stored.log_probs.astype(np.float64)
        known = known[known == known]
        yield CallEvent(
            stat.rollout_id,
            stat.snapshot_id,
            head.model_call_id,
            head.choice_index,
            record.outcome,
            node.prompt,
            head.generated,
            head.generated - len(known),
            mean_of(known),
            text,
            record.detail,
            *_times(record, changed_at, boot, clock),
        )
    for record in snapshot.calls:
        if record.model_call_id and record.model_call_id not in answered and record.outcome != "open":
            yield CallEvent(
                stat.rollout_id,
                stat.snapshot_id,
                record.model_call_id,
                0,
                record.outcome,
                0,
                0,
                0,
                None,
                "",
                record.detail,
                *_times(record, changed_at, boot, clock),
            )


def _times(record: CallRecord, changed_at: float, boot: str, clock: float) -> tuple[float | None, float]:
    took = None
    if record.ended_at is not None and record.begun_at is not None:
        took = record.ended_at - record.begun_at
    return took, record.ended_at + clock if record.ended_at is not None and record.boot_id == boot else changed_at


def _text(pieces: msgspec.Raw) -> str:
    found = b""
    for piece in decode_pieces(bytes(pieces)) or ():
        found += piece
        if len(found) >= _TEXT:
            break
    return found[:_TEXT].decode("utf-8", "replace")
