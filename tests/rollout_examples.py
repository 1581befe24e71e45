"""Rollouts made by hand or by chance, as the snapshots that a store would hand out.

The vocabulary is tiny, so that prompts collide: most of what is generated has shared prefixes, equal answers and
several calls with one prompt. Names, clocks and the order of the entries say nothing about the order of the calls.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from hypothesis import strategies as st

from tokcap import CallRecord, FileStore, TokenCaptureSnapshot, TokenEntry
from tokcap.entry import content_digest
from tokcap.errors import ClosedError, ConflictError
from tokcap.protocol import Delivered, Outcome

__all__ = (
    "ROLLOUT",
    "SHAPES",
    "Example",
    "Made",
    "call",
    "chains",
    "drifting_rollouts",
    "example",
    "gapped_rollouts",
    "missing",
    "questions",
    "renamed",
    "reordered",
    "retried_rollouts",
    "rollouts",
    "samples",
    "snapshot_of",
)

ROLLOUT = "rollout"

_INCOMPLETE = ("lost", "open", "conflict")


class Example:
    """A snapshot that never was in a store."""

    def __init__(self, entries: Iterable[TokenEntry], calls: Iterable[CallRecord], *, rollout_id: str = "") -> None:
        self._entries: tuple[TokenEntry, ...] | None = tuple(entries)
        self.calls = tuple(calls)
        self.rollout_id = rollout_id or next((entry.rollout_id for entry in self._entries), ROLLOUT)
        self.snapshot_id = "0123456789abcdef" * 2
        self.version = 1

    @property
    def entries(self) -> Sequence[TokenEntry]:
        if self._entries is None:
            raise ClosedError(f"the snapshot of rollout {self.rollout_id} is closed")
        return self._entries

    @property
    def incomplete(self) -> bool:
        return any(record.outcome in _INCOMPLETE for record in self.calls)

    def close(self) -> None:
        self._entries = None

    def __enter__(self) -> Example:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """As code that makes it again, so that a failing example can become a test."""
        records = {record.model_call_id: record for record in self.calls}
        entries = self._entries or ()
        there = {entry.model_call_id for entry in entries}
        lines = [f"    call({_shown(entry, records.get(entry.model_call_id))})," for entry in entries]
        lines += [
            f"    missing({_shown_record(record)})," for record in self.calls if record.model_call_id not in there
        ]
        return "\n".join(["example(", *lines, ")"])


class Made(msgspec.Struct, frozen=True):
    """One call with its entries; several with the same id are one call."""

    record: CallRecord
    entries: tuple[TokenEntry, ...] = ()


def call(
    model_call_id: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    log_probs: Sequence[float | None] | None = None,
    *,
    begun: float | None = None,
    ended: float | None = None,
    boot: str | None = None,
    delivered: Delivered = "unknown",
    outcome: Outcome = "recorded",
    model: str = "m",
    choice: int = 0,
    **fields: Any,
) -> Made:
    """One choice of a call. Without `boot` a call with times has one, the same for all."""
    boot = boot if boot is not None else "" if begun is None and ended is None else "boot"
    known = [-0.5] * len(generation) if log_probs is None else log_probs
    fields.setdefault("finish_reason", "aborted" if outcome == "aborted" else "stop")
    entry = TokenEntry(ROLLOUT, model_call_id, prompt, generation, known, choice_index=choice, model=model, **fields)
    return Made(CallRecord(model_call_id, outcome, boot, begun, ended, delivered), (entry,))


def samples(model_call_id: str, prompt: Sequence[int], generations: Sequence[Sequence[int]], **facts: Any) -> Made:
    """One call with several choices."""
    made = [call(model_call_id, prompt, ids, choice=i, **facts) for i, ids in enumerate(generations)]
    return Made(made[0].record, tuple(entry for one in made for entry in one.entries))


def missing(
    model_call_id: str = "",
    outcome: Outcome = "lost",
    *,
    begun: float | None = None,
    ended: float | None = None,
    boot: str | None = None,
    delivered: Delivered = "unknown",
) -> Made:
    """A call without entries."""
    boot = boot if boot is not None else "" if begun is None and ended is None else "boot"
    return Made(CallRecord(model_call_id, outcome, boot, begun, ended, delivered))


def example(*made: Made) -> Example:
    """Put calls together. What is said of one id must agree."""
    records: list[CallRecord] = []
    for one in made:
        if one.record.model_call_id and one.record in records:
            continue
        if one.record.model_call_id in [record.model_call_id for record in records if record.model_call_id]:
            raise ValueError(f"two different records of call {one.record.model_call_id}")
        records.append(one.record)
    return Example([entry for one in made for entry in one.entries], records)


def reordered(given: Example, chance: random.Random) -> Example:
    """The same rollout, its entries and calls in another order."""
    entries, calls = list(given.entries), list(given.calls)
    chance.shuffle(entries)
    chance.shuffle(calls)
    return Example(entries, calls, rollout_id=given.rollout_id)


def renamed(given: Example, names: Mapping[str, str]) -> Example:
    """The same rollout under other call ids."""
    entries = [_changed(entry, model_call_id=names[entry.model_call_id]) for entry in given.entries]
    calls = [
        msgspec.structs.replace(record, model_call_id=names.get(record.model_call_id, record.model_call_id))
        for record in given.calls
    ]
    return Example(entries, calls, rollout_id=given.rollout_id)


def snapshot_of(given: Example, directory: Path) -> TokenCaptureSnapshot:
    """The same rollout through a real store. Its clock is that of the store, everything else is as given.

    Entries and outcomes come back as they are, so calls that hold entries of some of their choices only must be
    `lost` or `open`, and a call that is not must have an entry, unless it is `aborted` or `no_generation`.
    """
    store = FileStore(directory)
    try:
        for record in given.calls:
            entries = [entry for entry in given.entries if entry.model_call_id == record.model_call_id]
            _store(store, given.rollout_id, record, entries)
        return store.freeze_now(given.rollout_id)
    finally:
        store.close_now()


def _store(store: FileStore, rollout_id: str, record: CallRecord, entries: list[TokenEntry]) -> None:
    name = record.model_call_id
    if not name:
        store.mark_incomplete_now(rollout_id)
        return
    whole = record.outcome not in ("lost", "open")
    store.begin_call_now(rollout_id, name, max(len(entries) + (not whole), 1))
    store.put_many_now(entries)
    if record.outcome == "conflict":
        with contextlib.suppress(ConflictError):  # which is how a store says that it has noted it
            store.put_now(_other_content(entries[0]))
    elif record.outcome in ("aborted", "lost", "no_generation"):
        store.settle_call_now(rollout_id, name, record.outcome)
    if record.delivered != "unknown":
        store.note_delivery_now(rollout_id, name, record.delivered)


def _other_content(entry: TokenEntry) -> TokenEntry:
    """Another content for the same call, which a store keeps as evidence only: the smaller digest is shown."""
    for number in range(1000):
        other = _changed(entry, extra={"other": number})
        if content_digest(other) > content_digest(entry):
            return other
    raise AssertionError("a digest with no larger one among a thousand")


def _changed(entry: TokenEntry, **changes: Any) -> TokenEntry:
    fields: dict[str, Any] = {field: getattr(entry, field) for field in TokenEntry.__struct_fields__}
    return TokenEntry(**{**fields, **changes})


# ---- by chance

SHAPES = (
    "root",
    "extend",
    "drift",
    "compact",
    "continue_partly",
    "retry",
    "repeat",
    "recut",
    "samples",
    "silent",
    "missing",
)
"""What the next call of a generated rollout can be, seen from some call before it:

- root: a conversation of its own (sub-agent, title generation)
- extend: its whole sequence and more, or nothing more
- drift: its sequence with one id replaced, left out or put in, anywhere
- compact: the beginning of its prompt, then something else
- continue_partly: its prompt, some of its sampled ids, then something else
- retry: its prompt, another answer
- repeat: its prompt and its answer
- recut: its sequence, cut elsewhere
- samples: its prompt, several choices
- silent: its whole sequence, nothing sampled
- missing: a call without entries
"""

_ODD_LOG_PROBS = (None, -9999.0, -12000.0, math.inf, -math.inf, 1e-6, 0.01, 3.0)


class _Draft(msgspec.Struct):
    prompt: list[int]
    answers: list[list[int]]
    model: str
    missing: bool = False


def _ids(low: int = 0, high: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=low, max_size=high)


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    shapes: Sequence[str] = SHAPES,
    max_calls: int = 8,
    branching: bool = True,
    several_models: bool = True,
    odd_log_probs: bool = True,
    outcomes: Sequence[Outcome] = ("aborted", "conflict"),
    clocks: Sequence[str] = ("none", "one", "some"),
) -> Example:
    """A rollout of one to `max_calls` calls. Without branching each looks at the one before it.

    clocks: `none` (no call has times), `one` (all count from one boot), `some` (several boots, and times unknown).
    """
    drafts: list[_Draft] = []
    models = draw(st.sampled_from((("m",), ("m",), ("m", "n")))) if several_models else ("m",)
    for _ in range(draw(st.integers(1, max_calls))):
        drafts.append(_next_draft(draw, drafts, shapes, models, branching))
    clock = draw(st.sampled_from(clocks))
    deliveries = draw(st.booleans())
    odd = odd_log_probs and draw(st.booleans())
    names = draw(st.permutations([f"c{i}" for i in range(len(drafts))]))
    made = [
        _made(draw, draft, names[i], times, outcomes, deliveries, odd)
        for i, (draft, times) in enumerate(zip(drafts, _times(draw, len(drafts), clock), strict=True))
    ]
    return reordered(example(*made), draw(st.randoms(use_true_random=False)))


def _next_draft(
    draw: st.DrawFn, drafts: list[_Draft], shapes: Sequence[str], models: Sequence[str], branching: bool
) -> _Draft:
    model = draw(st.sampled_from(models))
    shape = draw(st.sampled_from((*shapes, "extend", "extend")))
    if shape == "missing":
        return _Draft([], [], model, missing=True)
    before = [draft for draft in drafts if not draft.missing]
    answers = [draw(_ids(1))]
    if shape == "root" or not before:
        # Mostly with something in common: system prompts are alike.
        return _Draft([1, *draw(_ids())] if draw(st.booleans()) else draw(_ids()), answers, model)
    # Mostly the last one, or there would be no long chains.
    draft = draw(st.sampled_from(before)) if branching and draw(st.booleans()) else before[-1]
    prompt, answer = draft.prompt, draw(st.sampled_from(draft.answers))
    model = draft.model if draw(st.integers(0, 3)) else model
    if shape == "retry":
        return _Draft(prompt, answers, model)
    if shape == "repeat":
        return _Draft(prompt, [answer], model)
    if shape == "samples":
        return _Draft(prompt, draw(st.lists(_ids(0, 2), min_size=2, max_size=3)), model)
    if shape == "silent":
        return _Draft(prompt + answer + draw(_ids()), [[]], model)
    if shape == "recut":
        sequence = prompt + answer
        cut = draw(st.integers(0, len(sequence)))
        return _Draft(sequence[:cut], [sequence[cut:]], model)
    if shape == "drift":
        start = _drifted(draw, prompt + answer)
    elif shape == "compact":
        start = prompt[: draw(st.integers(0, len(prompt)))]
    elif shape == "continue_partly":
        start = prompt + answer[: draw(st.integers(0, len(answer)))]
    else:
        start = prompt + answer
    return _Draft(start + draw(_ids(0 if shape in ("extend", "drift") else 1)), answers, model)


def _drifted(draw: st.DrawFn, ids: list[int]) -> list[int]:
    if not ids:
        return []
    at = draw(st.integers(0, len(ids) - 1))
    instead = draw(st.sampled_from(([], [(ids[at] + 1) % 4], [ids[at], 0], [3, 3])))
    return [*ids[:at], *instead, *ids[at + 1 :]]


def _times(draw: st.DrawFn, count: int, clock: str) -> list[tuple[str, float | None, float | None]]:
    """Boot, begin and end of each call. No two instants are equal, as with a real clock."""
    times: list[tuple[str, float | None, float | None]] = []
    now = 0
    for i in range(count):
        now += draw(st.integers(0, 2))
        begun, ended = now + 2 * i / 1024, now + draw(st.integers(0, 3)) + (2 * i + 1) / 1024
        boot = "boot" if clock == "one" else draw(st.sampled_from(("boot", "boot", "reboot", "")))
        if clock == "none" or not boot:
            times.append(("", None, None))
        elif clock == "one":
            times.append((boot, begun, ended))
        else:
            known = draw(st.sampled_from(((True, True), (True, True), (True, False), (False, True), (False, False))))
            times.append((boot, begun if known[0] else None, ended if known[1] else None))
    return times


def _made(
    draw: st.DrawFn,
    draft: _Draft,
    name: str,
    times: tuple[str, float | None, float | None],
    outcomes: Sequence[Outcome],
    deliveries: bool,
    odd: bool,
) -> Made:
    boot, begun, ended = times
    delivered: Delivered = (
        draw(st.sampled_from(("full", "full", "partly", "no", "unknown"))) if deliveries else "unknown"
    )
    if draft.missing:
        outcome: Outcome = draw(st.sampled_from(("lost", "open", "no_generation", "aborted")))
        if outcome == "lost" and draw(st.booleans()):
            return missing(begun=None, ended=ended, boot=boot)
        return missing(name, outcome, begun=begun, ended=None if outcome == "open" else ended, boot=boot)
    outcome = draw(st.sampled_from(("recorded",) * 6 + tuple(outcomes)))
    if len(draft.answers) > 1 and draw(st.integers(0, 3)) == 0:
        outcome = draw(st.sampled_from(("lost", "open")))  # one more choice was asked for
    fields: dict[str, Any] = {}
    if odd and draw(st.integers(0, 3)) == 0:
        fields["policy_versions"] = [("v2", 0, 1)]
    if odd and draw(st.integers(0, 3)) == 0:
        fields["sampling"] = {"logprobs_mode": "raw_logprobs"}
    entries: list[TokenEntry] = []
    record = CallRecord(name, outcome, boot, begun, ended, delivered)
    for choice, ids in enumerate(draft.answers):
        one = call(name, draft.prompt, ids, _log_probs(draw, len(ids), odd), choice=choice, model=draft.model, **fields)
        entries += one.entries
    return Made(record, tuple(entries))


def _log_probs(draw: st.DrawFn, count: int, odd: bool) -> list[float | None]:
    if not odd:
        return [-0.5] * count
    one = st.sampled_from((-0.5, -0.5, -0.25, -0.875, -1.125, *_ODD_LOG_PROBS))
    return draw(st.lists(one, min_size=count, max_size=count))


def chains() -> st.SearchStrategy[Example]:
    """One conversation in which each call extends the last, nothing odd about it."""
    return rollouts(shapes=("extend",), branching=False, several_models=False, odd_log_probs=False, outcomes=())


def drifting_rollouts() -> st.SearchStrategy[Example]:
    """Conversations and sub-agents, drifted, compacted and forked, without retries."""
    shapes = ("root", "extend", "extend", "drift", "compact", "recut")
    return rollouts(shapes=shapes, several_models=False, odd_log_probs=False, outcomes=())


def retried_rollouts() -> st.SearchStrategy[Example]:
    """Retries, samples, repeats and aborted calls, of which some are continued."""
    shapes = ("extend", "continue_partly", "retry", "retry", "repeat", "samples")
    return rollouts(shapes=shapes, several_models=False, odd_log_probs=False, outcomes=("aborted",))


def gapped_rollouts() -> st.SearchStrategy[Example]:
    """Conversations of which calls are lost or still open."""
    shapes = ("root", "extend", "extend", "retry", "samples", "missing")
    return rollouts(shapes=shapes, several_models=False, odd_log_probs=False, outcomes=("conflict",))


@st.composite
def questions(
    draw: st.DrawFn, given: st.SearchStrategy[Example] | None = None
) -> tuple[Example, list[str] | None, tuple[str, int] | None]:
    """A rollout, the models to select, and the scored call: what `judge` takes."""
    rollout = draw(given if given is not None else rollouts())
    models = draw(st.sampled_from((None, None, None, ["m"], ["n"], ["m", "n"], ["other"])))
    keys = sorted((entry.model_call_id, entry.choice_index) for entry in rollout.entries)
    scored = draw(st.sampled_from([None, *keys])) if keys else None
    return rollout, models, scored


def _shown(entry: TokenEntry, record: CallRecord | None) -> str:
    parts = [
        repr(entry.model_call_id),
        repr(entry.prompt_token_ids.tolist()),
        repr(entry.generation_token_ids.tolist()),
        "[" + ", ".join(map(_shown_float, entry.generation_log_probs.tolist())) + "]",
    ]
    if entry.choice_index:
        parts.append(f"choice={entry.choice_index}")
    parts.append(f"model={entry.model!r}")
    parts += [f"{name}={value!r}" for name in ("policy_versions", "sampling") if (value := getattr(entry, name))]
    return ", ".join(parts + (_facts(record) if record is not None else []))


def _shown_record(record: CallRecord) -> str:
    return ", ".join([repr(record.model_call_id), *_facts(record)])


def _facts(record: CallRecord) -> list[str]:
    facts = {
        "outcome": record.outcome,
        "boot": record.boot_id,
        "begun": record.begun_at,
        "ended": record.ended_at,
        "delivered": record.delivered,
    }
    return [f"{name}={value!r}" for name, value in facts.items()]


def _shown_float(value: float) -> str:
    return repr(value) if math.isfinite(value) else "None" if math.isnan(value) else f"float('{value}')"
