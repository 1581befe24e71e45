"""The state table of a store as a pure function: a state and an operation give the next state and a result.

States are values, so that several of them can be followed at once: after a process was killed in the middle of an
operation, or while operations that ran at the same time are put into an order that explains their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tokcap import TokenEntry
from tokcap.entry import content_digest

__all__ = ("UNKNOWN", "Call", "Life", "Operation", "Raised", "Seen", "State", "exactly_equal", "linearize", "step")

Digest = bytes


class Operation(msgspec.Struct, frozen=True):
    """Something to be done to one rollout."""

    name: str
    rollout_id: str
    call: str = ""
    entries: tuple[TokenEntry, ...] = ()
    word: str = ""
    """An outcome, a delivery, or a snapshot id."""
    number: int = 1
    """Choices, or a version."""
    digests: tuple[bytes, ...] = ()
    meta: dict[str, Any] = {}

    def __str__(self) -> str:
        shown = [self.name, self.rollout_id, self.call, self.word, str(self.number)]
        shown += [f"{e.model_call_id}/{e.choice_index}={content_digest(e).hex()[:6]}" for e in self.entries]
        return " ".join(filter(None, shown))


class Raised(msgspec.Struct, frozen=True):
    """The result of an operation that was refused."""

    error: str
    message: str = ""


class Seen(msgspec.Struct, frozen=True):
    """Everything that a snapshot shows, in a form that travels between processes."""

    snapshot_id: str
    version: int
    incomplete: bool
    finished: bool
    meta: dict[str, Any]
    entries: tuple[TokenEntry, ...]
    calls: dict[str, tuple[object, ...]]


UNKNOWN = Raised("unknown: its process was killed")


class Call(msgspec.Struct, frozen=True):
    """All that the log says of one call."""

    choices: int = 1
    begun: bool = False
    contents: dict[int, tuple[Digest, ...]] = {}
    """Choice -> every different content, in the order in which they came."""
    settled: frozenset[str] = frozenset()
    delivered: str = "unknown"
    retry_count: int = 0
    idempotency_key: str = ""
    digests: tuple[bytes, ...] = ()

    @property
    def outcome(self) -> str:
        stored = len(self.contents)
        if any(len(contents) > 1 for contents in self.contents.values()):
            return "conflict"
        if "aborted" in self.settled:
            return "aborted"
        if stored and stored >= self.choices:
            return "recorded"
        if "lost" in self.settled or (stored and "no_generation" in self.settled):
            return "lost"
        return "no_generation" if "no_generation" in self.settled else "open"

    def __hash__(self) -> int:
        contents = frozenset(self.contents.items())
        return hash((self.choices, self.begun, contents, self.settled, self.delivered, self.idempotency_key))

    def shown(self) -> tuple[object, ...]:
        ended = bool(self.contents or self.settled) and self.outcome != "open"
        return (
            self.outcome,
            self.delivered,
            self.retry_count,
            self.idempotency_key,
            self.digests,
            self.begun,
            ended,
        )

    def with_content(self, choice: int, digest: Digest) -> Call:
        contents = {**self.contents, choice: (*self.contents.get(choice, ()), digest)}
        return msgspec.structs.replace(self, contents=contents)

    def with_settled(self, outcome: str) -> Call:
        return msgspec.structs.replace(self, settled=self.settled | {outcome})


class Life(msgspec.Struct, frozen=True):
    """One incarnation."""

    number: int
    snapshot_id: str = ""
    """Empty until somebody has seen it."""
    calls: dict[str, Call] = {}
    version: int = 0
    retired: bool = False
    notes: tuple[tuple[str, str, str], ...] = ()
    """(kind, call, word), said after the freeze."""
    finish: dict[str, Any] | None = None

    def __hash__(self) -> int:
        return hash((self.number, self.version, self.retired, frozenset(self.calls.items()), self.notes))

    def with_call(self, name: str, call: Call) -> Life:
        return msgspec.structs.replace(self, calls={**self.calls, name: call})

    def next_version(self) -> Life:
        """A new version takes in what was only noted so far."""
        life = msgspec.structs.replace(self, version=self.version + 1)
        for kind, name, word in life.notes:
            if kind == "settle":
                life = life.with_call(name, life.calls.get(name, Call()).with_settled(word))
            elif name in life.calls:
                life = life.with_call(name, msgspec.structs.replace(life.calls[name], delivered=word))
        return life

    def noted(self, kind: str, call: str, word: str) -> Life:
        said = [note for note in self.notes if note[:2] == (kind, call)]
        if (said[-1:] == [(kind, call, word)]) if kind == "deliver" else (kind, call, word) in said:
            return self
        # Of different calls the order says nothing; sorting keeps states equal that mean the same.
        notes = sorted((*self.notes, (kind, call, word)), key=lambda n: n if n[0] == "settle" else (*n[:2], ""))
        return msgspec.structs.replace(self, notes=tuple(notes))


class State(msgspec.Struct, frozen=True):
    """One rollout id."""

    life: Life | None = None
    lives: int = 0
    attempts: dict[tuple[str, str], int] = {}
    """(store object, call) -> number of the life in which it began."""

    def __hash__(self) -> int:
        return hash((self.life, self.lives, frozenset(self.attempts.items())))

    def with_life(self, life: Life | None) -> State:
        return msgspec.structs.replace(self, life=life, lives=max(self.lives, life.number if life else 0))

    def present(self) -> Life:
        return self.life or Life(self.lives + 1)

    def forget(self, who: str) -> State:
        """A store object was closed or died: it remembers no calls any more."""
        attempts = {key: number for key, number in self.attempts.items() if key[0] != who}
        return msgspec.structs.replace(self, attempts=attempts)


class Refused(Exception):  # noqa: N818 - control flow of the model; carries the state that a refusal leaves behind
    def __init__(self, state: State, error: str) -> None:
        self.state, self.error = state, error


class Snapshot:
    """Expected: a snapshot of this life."""

    def __init__(self, life: Life | None) -> None:
        self.life = life


Outcome = tuple[State, object]


def step(state: State, who: str, operation: Operation, result: object, *, strict: bool = False) -> State | None:
    """The next state if the operation can have had this result in this state, else None.

    `strict`: the store object takes only puts of calls that have begun.
    """
    try:
        after, expected = _OPERATIONS[operation.name](state, who, operation, strict)
    except Refused as refused:
        after, expected = refused.state, Raised(refused.error)
    if result is UNKNOWN:
        return after
    if isinstance(expected, Raised) or isinstance(result, Raised):
        same = isinstance(expected, Raised) and isinstance(result, Raised) and expected.error == result.error
        return after if same else None
    if isinstance(expected, Snapshot):
        return _matched(after, expected.life, result) if isinstance(result, Seen) else None
    return after if expected == result else None


def _matched(state: State, life: Life | None, seen: Seen) -> State | None:
    if life is None:
        # A writer that has only begun, or died before its first record was durable, leaves an identity and no more.
        return state if seen == Seen(seen.snapshot_id, 0, False, False, {}, (), {}) else None
    if life.snapshot_id and life.snapshot_id != seen.snapshot_id:
        return None
    outcomes = [call.outcome for call in life.calls.values()]
    expected = (
        life.version,
        any(outcome in ("lost", "open", "conflict") for outcome in outcomes),
        life.finish is not None,
        life.finish or {},
        {name: call.shown() for name, call in life.calls.items()},
        {(n, c): min(digests) for n, call in life.calls.items() for c, digests in call.contents.items()},
    )
    entries = {(e.model_call_id, e.choice_index): content_digest(e) for e in seen.entries}
    shown = (seen.version, seen.incomplete, seen.finished, seen.meta, seen.calls, entries)
    if shown != expected or len(entries) != len(seen.entries):
        return None
    return state.with_life(msgspec.structs.replace(life, snapshot_id=seen.snapshot_id))


# ---- operations


def _check_attempt(state: State, who: str, call: str) -> None:
    began = state.attempts.get((who, call))
    if began is not None and (state.life is None or state.life.number != began):
        raise Refused(state, "StaleAttemptError")


def _put(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    name = operation.entries[0].model_call_id
    _check_attempt(state, who, name)
    life = state.present()
    if life.retired:
        raise Refused(state, "RetiredError")
    call = life.calls.get(name, Call())
    if strict and not life.version and not call.begun:
        raise Refused(state, "StaleAttemptError")
    changed, refused, other = call, False, False
    for entry in operation.entries:
        digest, known = content_digest(entry), changed.contents.get(entry.choice_index, ())
        if known[:1] == (digest,):
            continue
        if life.version:
            refused = True
            other |= bool(known) and digest not in known
            if known and digest not in known:
                changed = changed.with_content(entry.choice_index, digest)
            continue
        refused |= bool(known)
        if digest not in known:
            changed = changed.with_content(entry.choice_index, digest)
    if not life.version:
        after = state.with_life(life.with_call(name, changed))
        if refused:
            raise Refused(after, "ConflictError")
        return after, None
    if other and call.outcome != "conflict":
        state = state.with_life(life.with_call(name, changed).next_version())
    if refused:
        raise Refused(state, "FrozenError")
    return state, None


def _begin(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    life = state.present()
    if life.retired:
        raise Refused(state, "RetiredError")
    if life.version:
        raise Refused(state, "FrozenError")
    call = life.calls.get(operation.call, Call())
    if not call.begun:
        call = msgspec.structs.replace(
            call,
            begun=True,
            choices=operation.number,
            retry_count=operation.number - 1,
            idempotency_key=operation.word,
            digests=operation.digests,
        )
    state = state.with_life(life.with_call(operation.call, call))
    attempts = {**state.attempts, (who, operation.call): life.number}
    return msgspec.structs.replace(state, attempts=attempts), None


def _settle(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    _check_attempt(state, who, operation.call)
    life, word = state.present(), operation.word
    call = life.calls.get(operation.call)
    after = (call or Call()).with_settled(word)
    if life.retired:
        life = life.noted("settle", operation.call, word)
    elif call is not None and word in call.settled:
        pass
    elif not life.version:
        life = life.with_call(operation.call, after)
    elif call is not None and call.outcome == after.outcome:
        life = life.noted("settle", operation.call, word)
    else:
        life = life.with_call(operation.call, after).next_version()
    return state.with_life(life), None


def _deliver(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    _check_attempt(state, who, operation.call)
    life = state.life
    if life is None:
        return state, None
    call = life.calls.get(operation.call)
    if life.retired:
        return state.with_life(life.noted("deliver", operation.call, operation.word)), None
    if call is None:
        return state, None
    if life.version:
        said = [note[2] for note in life.notes if note[:2] == ("deliver", operation.call)]
        if [call.delivered, *said][-1] != operation.word:
            life = life.noted("deliver", operation.call, operation.word)
        return state.with_life(life), None
    return state.with_life(
        life.with_call(operation.call, msgspec.structs.replace(call, delivered=operation.word))
    ), None


def _finish(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    life = state.present()
    if life.retired:
        raise Refused(state, "RetiredError")
    if life.version and life.finish != operation.meta:
        raise Refused(state, "FrozenError")
    return state.with_life(msgspec.structs.replace(life, finish=operation.meta)), None


def _freeze(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    life = state.present()
    if life.retired:
        raise Refused(state, "RetiredError")
    life = msgspec.structs.replace(life, version=life.version or 1)
    return state.with_life(life), Snapshot(life)


def _retire(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    life = state.life
    if life is None or not life.version or (life.snapshot_id, life.version) != (operation.word, operation.number):
        return state, False
    return state.with_life(msgspec.structs.replace(life, retired=True, calls={}, finish=None)), True


def _reset(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    return state.with_life(None), None


def _sweep(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    swept = state.life is not None and state.life.retired
    return (state.with_life(None), 1) if swept else (state, 0)


def _read(state: State, who: str, operation: Operation, strict: bool) -> Outcome:
    if state.life is not None and state.life.retired:
        raise Refused(state, "RetiredError")
    return state, Snapshot(state.life)


_OPERATIONS: Mapping[str, Callable[[State, str, Operation, bool], Outcome]] = {
    "put": _put,
    "begin": _begin,
    "settle": _settle,
    "deliver": _deliver,
    "finish": _finish,
    "freeze": _freeze,
    "retire": _retire,
    "reset": _reset,
    "sweep": _sweep,
    "read": _read,
}


# ---- operations that ran at the same time


def linearize(
    states: Sequence[State], done: Sequence[tuple[str, Operation, object]], strict: frozenset[str] = frozenset()
) -> list[State]:
    """Every state in which some order of these operations can end that explains each result.

    An operation whose process was killed (`UNKNOWN`) may have happened or not.
    """
    found: dict[State, None] = {}
    visited: set[tuple[frozenset[int], State]] = set()

    def follow(state: State, left: frozenset[int]) -> None:
        if (left, state) in visited:
            return
        visited.add((left, state))
        if all(done[position][2] is UNKNOWN for position in left):
            found[state] = None
        for position in left:
            who, operation, result = done[position]
            after = step(state, who, operation, result, strict=who in strict)
            if after is not None:
                follow(after, left - {position})

    for state in states:
        follow(state, frozenset(range(len(done))))
    return list(found)


def exactly_equal(one: TokenEntry, other: TokenEntry) -> bool:
    """Ids by value, log-probs by bits, everything shown in the contract's types."""
    arrays = (
        (one.prompt_token_ids, other.prompt_token_ids, np.dtype(np.int32)),
        (one.generation_token_ids, other.generation_token_ids, np.dtype(np.int32)),
        (one.generation_log_probs, other.generation_log_probs, np.dtype(np.float64)),
    )
    return one == other and all(
        a.dtype == b.dtype == dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and not a.flags.writeable
        for a, b, dtype in arrays
    )
