"""The reference model: the state table of a store, in memory, as plainly as possible.

`MemoryState` is the shared storage. Each `MemoryStore` is one instance on it, as a process would be: it remembers only
which incarnation its calls began in. Between two `_turn`s of the event loop everything happens at once, so that an
operation is either done or not.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast, get_args

from tokcap import CallRecord, TokenEntry
from tokcap.entry import canonical_contents, identical
from tokcap.errors import (
    ClosedError,
    ConflictError,
    FrozenError,
    InvalidOutcomeError,
    RetiredError,
    StaleAttemptError,
)
from tokcap.ids import check_model_call_id, check_rollout_id
from tokcap.protocol import Outcome, SettledOutcome

PRECEDENCE: tuple[Outcome, ...] = ("conflict", "aborted", "recorded", "lost", "no_generation", "open")
INCOMPLETE = ("lost", "open", "conflict")


@dataclass
class Call:
    """All that was said of one model call."""

    choices: int = 1
    contents: dict[int, list[TokenEntry]] = field(default_factory=dict)
    """Choice -> every different content that was put for it, the one with the smallest digest first."""
    settled: set[Outcome] = field(default_factory=set)
    detail: str = ""

    @property
    def outcome(self) -> Outcome:
        said = set(self.settled)
        if any(len(contents) > 1 for contents in self.contents.values()):
            said.add("conflict")
        if self.contents and len(self.contents) >= self.choices:
            said.add("recorded")
        elif self.contents:
            said.discard("no_generation")  # some choices are there, so something was sampled
        return min(said, key=PRECEDENCE.index, default="open")

    def holds(self, entry: TokenEntry) -> bool:
        return any(identical(entry, stored) for stored in self.contents.get(entry.choice_index, ()))

    def add(self, entry: TokenEntry) -> bool:
        """Keep one more content; True if it is the only one of its choice."""
        contents = self.contents.setdefault(entry.choice_index, [])
        contents.append(copied(entry))
        contents.sort(key=digest)
        return len(contents) == 1


@dataclass
class Rollout:
    """One incarnation of a rollout id."""

    snapshot_id: str = field(default_factory=lambda: secrets.token_hex(16))
    calls: dict[str, Call] = field(default_factory=dict)
    """The key of unnamed lost calls is empty."""
    version: int = 0
    """0: open."""
    retired: bool = False
    late_notes: list[tuple[str, str]] = field(default_factory=list)
    """What was said after retirement."""

    def call(self, model_call_id: str) -> Call:
        return self.calls.setdefault(model_call_id, Call())

    def outcomes(self) -> dict[str, Outcome]:
        return {name: call.outcome for name, call in self.calls.items()}

    def entries(self) -> tuple[TokenEntry, ...]:
        return tuple(
            copied(contents[0]) for call in self.calls.values() for contents in call.contents.values() if contents
        )


@dataclass
class MemoryState:
    """The shared storage."""

    rollouts: dict[str, Rollout] = field(default_factory=dict)


class MemorySnapshot:
    """One frozen rollout; a copy, so nothing that happens later can reach it."""

    def __init__(self, rollout_id: str, rollout: Rollout) -> None:
        outcomes = rollout.outcomes()
        self.rollout_id = rollout_id
        self.incomplete = any(outcome in INCOMPLETE for outcome in outcomes.values())
        self.snapshot_id = rollout.snapshot_id
        self.version = rollout.version
        self.calls = tuple(
            CallRecord(name, outcome, detail=rollout.calls[name].detail) for name, outcome in outcomes.items()
        )
        self._entries: tuple[TokenEntry, ...] | None = rollout.entries()

    @property
    def entries(self) -> Sequence[TokenEntry]:
        if self._entries is None:
            raise ClosedError(f"the snapshot of {self.rollout_id} was closed")
        return self._entries

    def close(self) -> None:
        self._entries = None

    def __enter__(self) -> MemorySnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryStore:
    """One instance on a shared `MemoryState`: a sink and a source with all optional methods."""

    def __init__(self, state: MemoryState) -> None:
        self.state = state
        self.begun: dict[tuple[str, str], str] = {}
        """(rollout, call) -> the incarnation in which this instance began it."""
        self.closed = ""

    # ---- sink

    async def put(self, entry: TokenEntry) -> None:
        await self.put_many([entry])

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        group = list(entries)
        await self._turn()
        if group:
            self._put(group)
        await self._turn()

    def _put(self, group: list[TokenEntry]) -> None:
        """All of the group or nothing, except that a conflict is always noted."""
        rollout_id, call_id = group[0].rollout_id, group[0].model_call_id
        if any((entry.rollout_id, entry.model_call_id) != (rollout_id, call_id) for entry in group):
            raise ValueError("put_many takes the choices of one call")
        self._refuse_stale(rollout_id, call_id)
        rollout = self._present(rollout_id)
        self._refuse_retired(rollout, rollout_id)
        stored = rollout.calls.get(call_id, Call())
        fresh = [entry for entry in group if not stored.holds(entry)]
        if not fresh:
            return
        if rollout.version:
            before = rollout.outcomes()
            for entry in fresh:
                if entry.choice_index in stored.contents:
                    stored.add(entry)
            self._move_version(rollout, before)
            raise FrozenError(f"rollout {rollout_id} is frozen; call {call_id} was not stored")
        call = rollout.call(call_id)
        added = [call.add(entry) for entry in fresh]
        if not all(added):
            raise ConflictError(f"rollout {rollout_id}, call {call_id}: another content is stored")

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        check_model_call_id(model_call_id, rollout_id=check_rollout_id(rollout_id))
        await self._turn()
        rollout = self._present(rollout_id)
        self._refuse_retired(rollout, rollout_id)
        if rollout.version:
            raise FrozenError(f"rollout {rollout_id} is frozen; call {model_call_id} must not begin")
        rollout.call(model_call_id).choices = choices
        self.begun[rollout_id, model_call_id] = rollout.snapshot_id
        await self._turn()

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        check_model_call_id(model_call_id, rollout_id=check_rollout_id(rollout_id))
        if outcome not in get_args(SettledOutcome):
            raise InvalidOutcomeError(f"settle_call takes {get_args(SettledOutcome)}, not {outcome!r}")
        await self._say(rollout_id, model_call_id, outcome, detail)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        check_rollout_id(rollout_id)
        if model_call_id:
            check_model_call_id(model_call_id, rollout_id=rollout_id)
        await self._say(rollout_id, model_call_id, "lost", "")

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        await self._turn()
        self._refuse_stale(rollout_id, model_call_id)
        rollout = self._present(rollout_id)
        if rollout.retired:
            self._note_late(rollout, model_call_id, outcome)
        else:
            before = rollout.outcomes()
            call = rollout.call(model_call_id)
            call.settled.add(outcome)
            call.detail = call.detail or detail
            self._move_version(rollout, before)
        await self._turn()

    def _note_late(self, rollout: Rollout, model_call_id: str, outcome: Outcome) -> None:
        rollout.late_notes.append((model_call_id, outcome))

    # ---- source

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        check_rollout_id(rollout_id)
        await self._turn()
        rollout = self._present(rollout_id)
        self._refuse_retired(rollout, rollout_id)
        rollout.version = rollout.version or 1
        snapshot = MemorySnapshot(rollout_id, rollout)
        await self._turn()
        return snapshot

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        check_rollout_id(rollout_id)
        await self._turn()
        rollout = self.state.rollouts.get(rollout_id)
        exact = (
            rollout is not None
            and rollout.version > 0
            and (snapshot_id, version) == (rollout.snapshot_id, rollout.version)
        )
        if exact:
            rollout = cast(Rollout, rollout)
            rollout.retired = True
            rollout.calls.clear()
        await self._turn()
        return exact

    async def reset(self, *rollout_ids: str) -> None:
        for rollout_id in rollout_ids:
            check_rollout_id(rollout_id)
        await self._turn()
        for rollout_id in rollout_ids:
            self.state.rollouts.pop(rollout_id, None)
        await self._turn()

    # ---- the instance

    async def close(self) -> None:
        self.closed = self.closed or "closed"

    async def crash(self) -> None:
        """Die as by `kill -9`: no operation in flight returns any more."""
        self.closed = "crashed"

    async def _turn(self) -> None:
        """Let others run; what follows is one atomic step."""
        self._refuse_closed()
        await asyncio.sleep(0)
        self._refuse_closed()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ClosedError(f"this store has {self.closed}")

    def _present(self, rollout_id: str) -> Rollout:
        return self.state.rollouts.setdefault(rollout_id, Rollout())

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        incarnation = self.begun.get((rollout_id, model_call_id))
        current = self.state.rollouts.get(rollout_id)
        if incarnation is not None and (current is None or current.snapshot_id != incarnation):
            raise StaleAttemptError(f"rollout {rollout_id} was reset since call {model_call_id} began")

    def _refuse_retired(self, rollout: Rollout, rollout_id: str) -> None:
        if rollout.retired:
            raise RetiredError(f"rollout {rollout_id} was consumed and retired")

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        if rollout.version and rollout.outcomes() != before:
            rollout.version += 1


def copied(entry: TokenEntry) -> TokenEntry:
    """An entry that shares nothing writable with the given one."""
    return TokenEntry(**{name: getattr(entry, name) for name in TokenEntry.__struct_fields__})


def digest(entry: TokenEntry) -> bytes:
    """Of the content alone, so that it doesn't depend on the rollout or on the order of the puts."""
    hashed = hashlib.blake2b(canonical_contents(entry))
    for array in (entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs, entry.routed_experts):
        hashed.update(b"none" if array is None else repr((array.dtype.str, array.shape)).encode() + array.tobytes())
    hashed.update(repr(entry.pieces).encode())
    return hashed.digest()


async def crash(instance: object) -> None:
    """The crash hook of the conformance kit."""
    await cast(MemoryStore, instance).crash()
