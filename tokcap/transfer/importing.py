"""What both imports share: a rollout is planned whole, compared with what the store has, and only then written."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from ..entry import TokenEntry, identical
from ..errors import ConflictError, FrozenError, InvalidIdError, RetiredError, StaleAttemptError, TokcapError
from ..ids import check_rollout_id
from ..protocol import Outcome, SettledOutcome
from ..store import FileStore

__all__ = ("Imported", "ImportedRollout", "Plan", "PlannedCall", "Told", "import_plans", "opened")

Status = Literal["imported", "unchanged", "refused", "skipped"]


class ImportedRollout(msgspec.Struct, frozen=True):
    """What became of one rollout of the source."""

    rollout_id: str
    status: Status
    """imported: written, or completed after an interrupted import. unchanged: the store has all of it. refused: the
    store has something else under this id, and keeps it. skipped: there is nothing to import."""
    calls: int = 0
    entries: int = 0
    outcomes: dict[str, int] = {}
    """Calls by outcome, as planned."""
    frozen: bool = False
    lost: dict[str, str] = {}
    """Calls of which there is no exact record, and why; under "" one that has no usable id."""
    reason: str = ""
    """Why it was refused or skipped."""


Told = Callable[[ImportedRollout], None]
"""Told of each rollout as soon as it is done."""


class Imported(msgspec.Struct):
    """What an import did, counted."""

    imported: int = 0
    unchanged: int = 0
    calls: int = 0
    """Of the rollouts that are in the store now."""
    entries: int = 0
    outcomes: dict[str, int] = {}
    frozen: int = 0
    lost: int = 0
    refused: dict[str, str] = {}
    """Rollouts that were left alone, and why."""
    skipped: dict[str, str] = {}

    def add(self, rollout: ImportedRollout) -> None:
        """Count one rollout."""
        if rollout.status in ("refused", "skipped"):
            told = self.refused if rollout.status == "refused" else self.skipped
            told[rollout.rollout_id] = rollout.reason
            return
        if rollout.status == "imported":
            self.imported += 1
        else:
            self.unchanged += 1
        self.calls += rollout.calls
        self.entries += rollout.entries
        self.frozen += rollout.frozen
        self.lost += len(rollout.lost)
        for outcome, count in rollout.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count


class PlannedCall(msgspec.Struct):
    """What is to be said of one call, in this order: that it began, its entries, how it ended."""

    model_call_id: str
    """Empty for a lost call that has no usable id."""
    entries: list[TokenEntry] = []
    """Several of one choice with different contents make a conflict."""
    begins: bool = False
    """Whether the source is where it was called from, so that an intent of it belongs into the store."""
    choices: int = 1
    request_digests: tuple[bytes, ...] = ()
    settled: SettledOutcome | None = None
    detail: str = ""

    @property
    def outcome(self) -> Outcome:
        """What the store will say of it."""
        by_choice: dict[int, TokenEntry] = {}
        for entry in self.entries:
            if not identical(by_choice.setdefault(entry.choice_index, entry), entry):
                return "conflict"
        if self.settled == "aborted":
            return "aborted"
        if self.entries and (len(by_choice) >= self.choices or self.settled is None):
            return "recorded" if len(by_choice) >= self.choices else "open"
        return self.settled or "open"


class Plan(msgspec.Struct):
    """A rollout as it is to be in the store."""

    rollout_id: str
    calls: list[PlannedCall] = []
    meta: dict[str, Any] | None = None
    """Of its `finish` note; None: nobody finishes it."""
    freeze: bool = False
    meta_key: str = ""
    """A meta with nothing but this key was noted by an earlier import, and may be replaced."""

    @property
    def lost(self) -> dict[str, str]:
        """Calls that are lost, and why."""
        return {call.model_call_id: call.detail for call in self.calls if call.outcome == "lost"}

    def told(self, status: Status, *, frozen: bool = False, reason: str = "") -> ImportedRollout:
        """What is reported of it."""
        outcomes: dict[str, int] = defaultdict(int)
        for call in self.calls:
            outcomes[call.outcome] += 1
        entries = sum(len(call.entries) for call in self.calls)
        return ImportedRollout(
            self.rollout_id, status, len(self.calls), entries, dict(outcomes), frozen, self.lost, reason
        )


@contextmanager
def opened(store: FileStore | str | os.PathLike[str], group: str | int | None = None) -> Iterator[FileStore]:
    """The store to write into: a directory is made if it is missing, and closed at the end.

    group: as for `FileStore`, if a directory is given.
    """
    if isinstance(store, FileStore):
        yield store
        return
    with FileStore(store, group=group) as made:
        yield made


def import_plans(
    store: FileStore | str | os.PathLike[str],
    plans: Iterable[Plan | ImportedRollout],
    told: Told | None,
    group: str | int | None = None,
) -> Imported:
    """Write every plan; what a source has to say of rollouts without one is passed on."""
    done = Imported()
    with opened(store, group) as into:
        for plan in plans:
            found = plan if isinstance(plan, ImportedRollout) else _import(into, plan)
            done.add(found)
            if told is not None:
                told(found)
    return done


def _import(store: FileStore, plan: Plan, *, again: bool = True) -> ImportedRollout:
    """again: look once more if another process changed it meanwhile, which may have imported the same."""
    try:
        check_rollout_id(plan.rollout_id)
    except InvalidIdError as error:
        return plan.told("refused", reason=str(error))
    if not plan.calls:
        return plan.told("skipped", reason="it has no model calls")
    why, complete = "", False
    try:
        present = store.stat_now(plan.rollout_id)
        if present.state not in ("absent", "retired"):
            why, complete = _compare(store, plan)
    except TokcapError as error:
        return plan.told("refused", reason=f"what is here can't be read: {error}")
    is_noted = plan.meta is None or (present.finished and present.meta == plan.meta)
    if present.state == "retired":
        why = "it was consumed and retired here; `tokcap reset` forgets it"
    elif present.state == "open" and not why and not is_noted and present.finished and not _is_ours(plan, present.meta):
        why = "its owner finished it here, with another meta"
    elif present.state == "frozen" and not why and not complete:
        why = "it is frozen here, with a part of these calls only"
    if why:
        return plan.told("refused", reason=why)
    if present.state == "frozen":
        return plan.told("unchanged", frozen=True, reason="" if is_noted else "it is frozen here, without that meta")
    try:
        if not complete:
            _write(store, plan)
        if not is_noted:
            store.finish_now(plan.rollout_id, plan.meta)
        if plan.freeze:
            store.freeze_now(plan.rollout_id).close()
    except (ConflictError, FrozenError, RetiredError, StaleAttemptError) as error:
        if again:
            return _import(store, plan, again=False)
        return plan.told("refused", reason=f"another process changed it meanwhile: {error}")
    same = complete and is_noted and not plan.freeze
    return plan.told("unchanged" if same else "imported", frozen=plan.freeze)


def _is_ours(plan: Plan, meta: dict[str, Any]) -> bool:
    """Whether nobody but an earlier import noted it."""
    return set(meta) == {plan.meta_key}


def _compare(store: FileStore, plan: Plan) -> tuple[str, bool]:
    """Why the store has another rollout under this id, or nothing; and whether it has all of this one."""
    planned = {call.model_call_id: call for call in plan.calls}
    with store.read_now(plan.rollout_id) as snapshot:
        if snapshot.damage:
            return f"it is damaged here: {snapshot.damage[0]}", False
        found: dict[str, set[int]] = defaultdict(set)
        for entry in snapshot.entries:
            call = planned.get(entry.model_call_id)
            if call is None or not any(identical(entry, other) for other in call.entries):
                return f"it is here already, with another content of call {entry.model_call_id}", False
            found[entry.model_call_id].add(entry.choice_index)
        outcomes: dict[str, Outcome] = {}
        for record in snapshot.calls:
            call = planned.get(record.model_call_id)
            name = record.model_call_id or "without an id"
            if call is None:
                return f"it is here already, with a call {name} that isn't in the source", False
            if record.outcome not in (call.outcome, "open", "lost") and not (
                call.outcome == "conflict" and record.outcome == "recorded"
            ):
                return f"it is here already, and call {name} is {record.outcome}, not {call.outcome}", False
            outcomes[record.model_call_id] = record.outcome
    complete = all(
        outcomes.get(call.model_call_id) == call.outcome
        and found[call.model_call_id] == {entry.choice_index for entry in call.entries}
        for call in plan.calls
    )
    return "", complete


def _write(store: FileStore, plan: Plan) -> None:
    """Everything that is planned. What is there already stays as it is: each statement is a no-op when repeated."""
    for call in plan.calls:
        if not call.model_call_id:
            store.mark_incomplete_now(plan.rollout_id)
            continue
        if call.begins:
            store.begin_call_now(
                plan.rollout_id, call.model_call_id, call.choices, request_digests=call.request_digests
            )
        if call.settled == "aborted":  # first, as capture says it: a part of an answer never counts as the whole
            store.settle_call_now(plan.rollout_id, call.model_call_id, "aborted", call.detail)
        _put(store, call.entries, call.outcome == "conflict")
        if call.settled is not None and call.settled != "aborted":
            store.settle_call_now(plan.rollout_id, call.model_call_id, call.settled, call.detail)


def _put(store: FileStore, entries: Sequence[TokenEntry], conflict: bool) -> None:
    if not conflict:
        store.put_many_now(entries)
        return
    for entry in entries:
        try:
            store.put_now(entry)
        except ConflictError:  # which is what is to be stored
            continue
