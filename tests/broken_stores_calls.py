"""Broken stores that forget or misread marks, intents, settlements and versions."""

from __future__ import annotations

from typing import Any, get_args

from tokcap import TokenEntry
from tokcap.errors import FrozenError, RetiredError
from tokcap.protocol import Outcome, SettledOutcome

from .broken_stores import Case
from .memory_store import Call, MemorySnapshot, MemoryStore, Rollout


class KeepsMarksInMemory(MemoryStore):
    """mark_incomplete notes the loss in a set of this process and writes it down when it is closed."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.begun.setdefault((rollout_id, model_call_id), "marked")

    def _refuse_stale(self, rollout_id: str, model_call_id: str) -> None:
        if self.begun.get((rollout_id, model_call_id)) != "marked":
            super()._refuse_stale(rollout_id, model_call_id)

    async def close(self) -> None:
        for (rollout_id, call), incarnation in self.begun.items():
            if incarnation == "marked" and not self.closed:
                self._present(rollout_id).call(call).settled.add("lost")
        await super().close()


class RevivedByLateMarks(MemoryStore):
    """A mark after retirement opens the rollout again: it is delivered twice."""

    def _note_late(self, rollout: Rollout, model_call_id: str, outcome: Outcome) -> None:
        rollout.retired = False
        rollout.version = 0
        rollout.call(model_call_id).settled.add(outcome)


class RefusesLateMarks(MemoryStore):
    """A mark after retirement raises, in the error path of a server that has an error already."""

    def _note_late(self, rollout: Rollout, model_call_id: str, outcome: Outcome) -> None:
        raise RetiredError("the rollout was retired")


class LosesLateMarks(MemoryStore):
    """The fence of freeze swallows marks as well: a loss that is noticed late is never seen."""

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        if not self.state.rollouts.get(rollout_id, Rollout()).version:
            await super()._say(rollout_id, model_call_id, outcome, detail)


class VersionStandsStill(MemoryStore):
    """A late mark is stored, but the version that nobody saw it in can be retired with it."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        pass


class VersionMovesWithEveryMark(MemoryStore):
    """A repeated mark makes a new version: two consumers that retry chase each other for ever."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        if rollout.version:
            rollout.version += 1


class VersionMovesAtTheNextFreeze(MemoryStore):
    """A late mark takes effect when somebody freezes again; until then the old version is retired, mark and all."""

    def _move_version(self, rollout: Rollout, before: dict[str, Outcome]) -> None:
        if rollout.version and rollout.outcomes() != before:
            rollout.late_notes.append(("", "pending"))

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        rollout = self._present(rollout_id)
        if rollout.version and rollout.late_notes and not rollout.retired:
            rollout.version += len(rollout.late_notes)
            rollout.late_notes.clear()
        return await super().freeze(rollout_id)


class MarksBeatRecords(MemoryStore):
    """The last word counts: a mark after a put throws a healthy call away."""

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        rollout = self.state.rollouts.get(rollout_id)
        if rollout is not None and not rollout.version and model_call_id in rollout.calls:
            rollout.calls[model_call_id].choices = 99
        await super()._say(rollout_id, model_call_id, outcome, detail)


class MarksNeedARollout(MemoryStore):
    """mark_incomplete is an UPDATE: where no put has made a row, it changes none, and that is no error."""

    async def _say(self, rollout_id: str, model_call_id: str, outcome: Outcome, detail: str) -> None:
        if rollout_id in self.state.rollouts:
            await super()._say(rollout_id, model_call_id, outcome, detail)


class MarksAreFinal(MemoryStore):
    """The first word counts: a call that was given up stays lost, and an answer that came after all is dropped."""

    def _put(self, group: list[TokenEntry]) -> None:
        rollout = self.state.rollouts.get(group[0].rollout_id, Rollout())
        call = rollout.calls.get(group[0].model_call_id, Call())
        if rollout.version or "lost" not in call.settled:
            super()._put(group)


# ---- calls


class ForgetsIntents(MemoryStore):
    """begin_call is only logged: a call whose put and mark both failed leaves no trace."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        if self.state.rollouts.get(rollout_id, Rollout()).version:
            raise FrozenError(f"rollout {rollout_id} is frozen")


class FirstChoiceEndsACall(MemoryStore):
    """begin_call ignores choices: two of three answers look like all."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await super().begin_call(rollout_id, model_call_id)


class AbortedIsALoss(MemoryStore):
    """A client that went away, or a 429 with a retry, makes the whole rollout incomplete."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        snapshot = await super().freeze(rollout_id)
        if any(call.outcome in ("aborted", "no_generation") for call in snapshot.calls):
            snapshot.incomplete = True
        return snapshot


class LosesSettlementsInACrash(MemoryStore):
    """settle_call is fire and forget: a killed process takes the statement with it."""

    async def crash(self) -> None:
        await super().crash()
        for rollout in self.state.rollouts.values():
            for call in rollout.calls.values():
                call.settled -= {"no_generation", "aborted"}


class TakesLostForNothing(MemoryStore):
    """settle_call stores what it is told, and only mark_incomplete makes a snapshot incomplete."""

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        await super().settle_call(rollout_id, model_call_id, "no_generation" if outcome == "lost" else outcome, detail)


class BeginsFromNothing(MemoryStore):
    """begin_call makes the record of the call anew: repeated, it throws away the answer that was stored meanwhile."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await super().begin_call(rollout_id, model_call_id, choices)
        self.state.rollouts[rollout_id].calls[model_call_id] = Call(choices)


class TakesAnyOutcome(MemoryStore):
    """What settle_call doesn't know, a typing error for example, counts as nothing generated."""

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        known = outcome if outcome in get_args(SettledOutcome) else "no_generation"
        await super().settle_call(rollout_id, model_call_id, known, detail)


CASES = [
    Case(
        KeepsMarksInMemory,
        {
            "mark_incomplete_makes_the_call_lost",
            "a_mark_without_a_call_id_makes_the_rollout_incomplete",
            "a_crash_keeps_acknowledged_marks",
        },
        "outcome lost",
    ),
    Case(
        RevivedByLateMarks,
        {
            "marks_after_retirement_are_accepted_and_revive_nothing",
            "settlements_after_retirement_are_accepted_and_revive_nothing",
        },
        "mark_incomplete, freeze\nexpected: RetiredError",
        exact=True,
    ),
    Case(
        RefusesLateMarks,
        {
            "marks_after_retirement_are_accepted_and_revive_nothing",
            "settlements_after_retirement_are_accepted_and_revive_nothing",
        },
        "RetiredError: the rollout was retired",
        exact=True,
    ),
    Case(
        LosesLateMarks,
        {"a_late_mark_moves_the_version", "a_version_is_stale_as_soon_as_a_late_mark_returned"},
        "version 2",
    ),
    Case(
        VersionStandsStill,
        {"a_late_mark_moves_the_version", "a_conflicting_put_after_freeze_moves_the_version"},
        "version 2",
    ),
    Case(VersionMovesWithEveryMark, {"a_late_mark_that_changes_nothing_keeps_the_version"}, "repeat that mark"),
    Case(
        VersionMovesAtTheNextFreeze,
        {
            "a_version_is_stale_as_soon_as_a_late_mark_returned",
            "a_conflicting_put_after_freeze_moves_the_version",
            "a_late_settlement_moves_the_version",
            "a_crash_keeps_acknowledged_marks",
        },
        "retire the version that was frozen before the mark",
        exact=True,
    ),
    Case(
        MarksBeatRecords,
        {"a_mark_after_the_put_leaves_the_call_recorded", "outcomes_hold_by_precedence"},
        "seen: ['lost']",
        exact=True,
    ),
    Case(
        ForgetsIntents,
        {"an_open_call_makes_the_snapshot_incomplete", "a_crash_keeps_begun_calls_open"},
        "outcome open",
    ),
    Case(
        FirstChoiceEndsACall,
        {"a_call_stays_open_until_all_choices_are_stored", "a_settlement_ends_a_call_with_missing_choices"},
        "outcome open\nseen: ['recorded']",
        exact=True,
    ),
    Case(
        AbortedIsALoss,
        {"no_generation_and_aborted_do_not_make_it_incomplete", "an_aborted_call_keeps_its_entry"},
        "snapshot.incomplete is True",
    ),
    Case(LosesSettlementsInACrash, {"a_crash_keeps_acknowledged_settlements"}, "settle three calls", exact=True),
    Case(TakesLostForNothing, {"a_call_settled_as_lost_makes_it_incomplete"}, "seen: ['no_generation']"),
    Case(
        MarksNeedARollout,
        {
            "a_mark_alone_makes_a_rollout",
            "a_call_settled_as_lost_makes_it_incomplete",
            "a_crash_keeps_acknowledged_marks",
            "a_crash_keeps_acknowledged_settlements",
        },
        "did: mark_incomplete in a new rollout, freeze",
    ),
    Case(
        MarksAreFinal,
        {"a_put_after_a_mark_makes_the_call_recorded", "outcomes_hold_by_precedence"},
        "did: mark_incomplete of a call, put its entry, freeze",
        exact=True,
    ),
    Case(
        BeginsFromNothing,
        {"a_begun_and_answered_call_is_recorded"},
        "begin_call twice, put and begin_call again",
        exact=True,
    ),
    Case(
        TakesAnyOutcome,
        {"an_unknown_outcome_is_refused"},
        "did: settle_call with outcome 'recorded'\nexpected: ValueError\nseen: no error",
        exact=True,
    ),
]
