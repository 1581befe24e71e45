"""The conformance kit passes a correct store, and finds every broken one by the checks that are meant for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest

from tokcap.conformance import Report, check, check_names

from . import broken_stores as broken
from .memory_store import MemoryState, MemoryStore, crash

CONTROLS = {
    "factories_give_a_new_instance_each_time",
    "empty_prompts_and_generations_come_back",
    "token_ids_keep_their_full_range",
    "a_returned_put_is_visible_to_other_instances",
    "a_chain_written_by_several_sinks_comes_back_exact",
    "a_put_after_a_mark_makes_the_call_recorded",
    "concurrent_identical_puts_store_one_entry",
    "freeze_twice_gives_the_same_snapshot",
    "retire_of_an_open_rollout_is_false_and_keeps_the_evidence",
    "reset_of_an_absent_rollout_is_a_no_op",
}
"""What most broken stores still do right: they must fail where they are broken and not everywhere."""

SLOW = {
    "a_big_entry_comes_back_exact",
    "a_chain_of_512_calls_comes_back_exact",
    "a_cancelled_put_is_whole_or_absent",
    "freeze_among_concurrent_puts_divides_them_cleanly",
    "a_put_in_flight_at_a_crash_is_whole_or_absent",
    "a_put_in_flight_at_a_crash_can_be_repeated",
    "a_put_many_in_flight_at_a_crash_is_whole_or_absent",
    "a_crash_during_freeze_leaves_the_rollout_open_or_frozen",
    "a_crash_during_retire_leaves_the_rollout_frozen_or_retired",
}
"""Left out of a run for a broken store that they are not aimed at."""


class Case(NamedTuple):
    """A broken store, the checks that are aimed at it, and a word that one of the failures must say."""

    store: type[MemoryStore]
    aimed: set[str]
    says: str
    exact: bool = False
    """True: of all checks (but the slow ones), these and no others fail."""


CASES = [
    # ---- puts
    Case(
        broken.DropsOneOfTen,
        {"concurrent_puts_of_several_sinks_are_all_kept", "concurrent_chains_of_several_sinks_are_all_kept"},
        "108 entries; missing: ('call-",
    ),
    Case(
        broken.AcknowledgesBeforeDurable,
        {
            "a_crash_keeps_every_acknowledged_put",
            "a_crash_keeps_begun_calls_open",
            "a_put_in_flight_at_a_crash_is_whole_or_absent",
            "a_put_many_in_flight_at_a_crash_is_whole_or_absent",
        },
        "crash the sink",
        exact=True,
    ),
    Case(
        broken.GluesRecordsAfterACrash,
        {"a_put_in_flight_at_a_crash_is_whole_or_absent", "a_put_in_flight_at_a_crash_can_be_repeated"},
        "missing: ('call-10', 0)",
        exact=True,
    ),
    Case(
        broken.LeavesItsLockBehind,
        {"a_put_in_flight_at_a_crash_is_whole_or_absent", "a_put_in_flight_at_a_crash_can_be_repeated"},
        "expected: an end within",
    ),
    Case(broken.CancelsTheWholeBatch, {"a_cancelled_put_is_whole_or_absent"}, "nobody cancelled return", exact=True),
    Case(
        broken.WritesInTwoSteps,
        {
            "a_cancelled_put_is_whole_or_absent",
            "a_snapshot_is_never_torn",
            "put_many_is_visible_as_a_whole",
            "a_put_in_flight_at_a_crash_is_whole_or_absent",
            "a_put_in_flight_at_a_crash_can_be_repeated",
            "a_put_many_in_flight_at_a_crash_is_whole_or_absent",
            "a_crash_in_one_rollout_leaves_others_usable",
        },
        "nobody put: ('big', 0)",
    ),
    Case(
        broken.PutsChoicesOneByOne,
        {"put_many_is_visible_as_a_whole", "a_put_many_in_flight_at_a_crash_is_whole_or_absent"},
        "missing: ('call-0', 1)",
        exact=True,
    ),
    Case(
        broken.IgnoresChoiceIndex,
        {
            "choices_of_one_call_are_separate_entries",
            "put_many_stores_every_choice",
            "a_conflict_in_one_choice_leaves_the_others",
            "a_call_stays_open_until_all_choices_are_stored",
        },
        "ConflictError",
    ),
    Case(
        broken.SharesRolloutsByPrefix,
        {"unusual_valid_ids_are_kept_apart", "rollouts_are_isolated_from_each_other"},
        "100 entries",
        exact=True,
    ),
    Case(
        broken.CachesChainsAcrossRollouts,
        {"equal_chains_of_two_rollouts_do_not_depend_on_each_other"},
        "0 entries; missing: ('call-0', 0)",
        exact=True,
    ),
    Case(broken.FoldsCase, {"unusual_valid_ids_are_kept_apart"}, "ConflictError", exact=True),
    Case(
        broken.RefusesIdenticalPuts,
        {
            "an_identical_put_is_a_no_op",
            "concurrent_identical_puts_store_one_entry",
            "an_identical_put_after_freeze_is_a_no_op",
            "put_many_stores_every_choice",
        },
        "UNIQUE constraint failed",
    ),
    # ---- values
    Case(broken.RefusesNan, {"non_finite_log_probs_come_back"}, "not JSON compliant"),
    Case(broken.CannotReadNan, {"non_finite_log_probs_come_back"}, "JSON is malformed"),
    Case(
        broken.PadsUnknownWithZero,
        {"non_finite_log_probs_come_back", "any_field_that_differs_is_a_conflict", "an_identical_put_is_a_no_op"},
        "differs at 2 of 4 positions, first at 0: 0.0 instead of nan",
        exact=True,
    ),
    Case(broken.ClipsPositive, {"positive_log_probs_are_kept"}, "0.0 instead of 1e-07"),
    Case(
        broken.StoresSingleFloats,
        {"log_probs_keep_every_bit", "any_field_that_differs_is_a_conflict"},
        "instead of -0.1",
    ),
    Case(
        broken.FlattensExperts,
        {"every_field_comes_back_exact", "routed_experts_keep_dtype_and_shape"},
        "routed_experts is uint8 (24,) instead of uint8 (2, 3, 4)",
    ),
    Case(
        broken.RoundsBigIntegers,
        {"big_integers_and_lone_surrogates_come_back"},
        "extra is",
        exact=True,
    ),
    Case(broken.RefusesSurrogates, {"big_integers_and_lone_surrogates_come_back"}, "UnicodeEncodeError", exact=True),
    Case(
        broken.TruncatesLongPrompts,
        {"a_big_entry_comes_back_exact", "a_snapshot_is_never_torn"},
        "prompt_token_ids is int32 (50000,) instead of int32 (200000,)",
        exact=True,
    ),
    Case(
        broken.AssumesThatPromptsExtend,
        {
            "drifted_prompts_come_back_exact",
            "retries_of_the_same_prompt_come_back_exact",
            "prompts_that_extend_earlier_calls_come_back_exact",
        },
        "prompt_token_ids differs",
    ),
    Case(
        broken.KeepsReferences,
        {"later_changes_by_the_caller_do_not_reach_the_store"},
        "change the caller's",
        exact=True,
    ),
    Case(
        broken.SharesItsCache,
        {"changes_by_a_reader_do_not_reach_the_next_reader"},
        "output_items is [] instead of",
        exact=True,
    ),
    Case(broken.HandsOutWritableArrays, {"arrays_of_a_snapshot_are_read_only"}, "int32, writeable", exact=True),
    # ---- conflicts
    Case(
        broken.LastWriterWins,
        {
            "a_conflicting_put_raises_and_marks_the_call",
            "the_kept_entry_does_not_depend_on_the_order",
            "a_crash_keeps_a_conflict",
        },
        "expected: ConflictError\nseen: no error",
    ),
    Case(
        broken.FirstWriterWins,
        {
            "a_conflicting_put_raises_and_marks_the_call",
            "concurrent_conflicting_puts_mark_the_call",
            "a_conflicting_put_after_freeze_moves_the_version",
        },
        "expected: ConflictError\nseen: no error",
    ),
    Case(
        broken.KeepsTheFirstOfAConflict,
        {"the_kept_entry_does_not_depend_on_the_order"},
        "the same content in both snapshots",
        exact=True,
    ),
    Case(
        broken.ComparesTokensOnly, {"any_field_that_differs_is_a_conflict"}, "again with another log-prob", exact=True
    ),
    Case(
        broken.DropsBothOfAConflict,
        {"a_conflicting_put_raises_and_marks_the_call", "a_conflict_in_one_choice_leaves_the_others"},
        "one entry of call call-1",
    ),
    Case(
        broken.ConflictSpoilsTheRollout,
        {"a_conflict_leaves_other_calls_unharmed"},
        "did: await kit.put_in_order(one, after",
    ),
    # ---- freeze
    Case(
        broken.DoesNotFence,
        {
            "freeze_fences_new_puts",
            "freeze_among_concurrent_puts_divides_them_cleanly",
            "freeze_of_an_absent_rollout_fences_late_writers",
            "a_crash_keeps_a_freeze",
        },
        "expected: FrozenError\nseen: no error",
    ),
    Case(
        broken.FencesTooLate,
        {
            "freeze_among_concurrent_puts_divides_them_cleanly",
            "freeze_just_before_the_last_put_is_exact",
            "put_many_is_visible_as_a_whole",
            "a_snapshot_is_never_torn",
        },
        "missing: ('agent-",
        exact=True,
    ),
    Case(
        broken.FencesItsOwnProcess,
        {"freeze_fences_new_puts", "freeze_among_concurrent_puts_divides_them_cleanly", "a_crash_keeps_a_freeze"},
        "put a new call through the writer's sink",
    ),
    Case(
        broken.FreezeNeedsARollout,
        {"freeze_of_an_absent_rollout_fences_late_writers"},
        "expected: FrozenError\nseen: no error",
        exact=True,
    ),
    Case(broken.NewIdentityPerFreeze, {"freeze_twice_gives_the_same_snapshot"}, "freeze again through"),
    Case(broken.RacesInFreeze, {"concurrent_freezes_agree"}, "through four sources at once", exact=True),
    Case(
        broken.LeavesAHalfMadeSnapshot,
        {"a_crash_during_freeze_leaves_the_rollout_open_or_frozen", "concurrent_freezes_agree"},
        "FileExistsError",
        exact=True,
    ),
    # ---- retire
    Case(
        broken.IgnoresTheVersion,
        {
            "another_version_retires_nothing",
            "a_version_is_stale_as_soon_as_a_late_mark_returned",
            "late_puts_and_stale_retires_after_retire_change_nothing",
        },
        "expected: False\nseen: True",
    ),
    Case(
        broken.IgnoresTheSnapshotId,
        {
            "a_foreign_snapshot_id_retires_nothing",
            "an_earlier_life_cannot_retire_a_later_one",
            "late_puts_and_stale_retires_after_retire_change_nothing",
        },
        "retire the old pair",
        exact=True,
    ),
    Case(
        broken.RetiresWhateverIsThere,
        {"retire_of_an_open_rollout_is_false_and_keeps_the_evidence", "retire_of_an_absent_rollout_is_false"},
        "retire without a freeze",
    ),
    Case(
        broken.RetiresOnce,
        {"an_exact_retire_succeeds_and_repeats", "concurrent_retires_agree"},
        "expected: True\nseen: False",
    ),
    Case(
        broken.RetiresInTwoSteps,
        {"a_crash_during_retire_leaves_the_rollout_frozen_or_retired"},
        "start retire, crash its source",
        exact=True,
    ),
    Case(
        broken.LeavesNoTombstone,
        {"a_retired_rollout_refuses_put_and_freeze", "a_retired_rollout_refuses_begin_call"},
        "expected: RetiredError\nseen: no error",
    ),
    Case(
        broken.SnapshotsDieWithRetire,
        {"a_snapshot_stays_readable_after_retire", "a_snapshot_stays_readable_after_reset"},
        "FileNotFoundError",
    ),
    # ---- marks and versions
    Case(
        broken.KeepsMarksInMemory,
        {
            "mark_incomplete_makes_the_call_lost",
            "a_mark_without_a_call_id_makes_the_rollout_incomplete",
            "a_crash_keeps_acknowledged_marks",
        },
        "outcome lost",
    ),
    Case(
        broken.RevivedByLateMarks,
        {
            "marks_after_retirement_are_accepted_and_revive_nothing",
            "settlements_after_retirement_are_accepted_and_revive_nothing",
        },
        "mark_incomplete, freeze\nexpected: RetiredError",
        exact=True,
    ),
    Case(
        broken.RefusesLateMarks,
        {
            "marks_after_retirement_are_accepted_and_revive_nothing",
            "settlements_after_retirement_are_accepted_and_revive_nothing",
        },
        "RetiredError: the rollout was retired",
        exact=True,
    ),
    Case(
        broken.LosesLateMarks,
        {"a_late_mark_moves_the_version", "a_version_is_stale_as_soon_as_a_late_mark_returned"},
        "version 2",
    ),
    Case(
        broken.VersionStandsStill,
        {"a_late_mark_moves_the_version", "a_conflicting_put_after_freeze_moves_the_version"},
        "version 2",
    ),
    Case(broken.VersionMovesWithEveryMark, {"a_late_mark_that_changes_nothing_keeps_the_version"}, "repeat that mark"),
    Case(
        broken.VersionMovesAtTheNextFreeze,
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
        broken.MarksBeatRecords,
        {"a_mark_after_the_put_leaves_the_call_recorded", "outcomes_hold_by_precedence"},
        "seen: ['lost']",
        exact=True,
    ),
    # ---- calls and attempts
    Case(
        broken.ForgetsIntents,
        {"an_open_call_makes_the_snapshot_incomplete", "a_crash_keeps_begun_calls_open"},
        "outcome open",
    ),
    Case(
        broken.FirstChoiceEndsACall,
        {"a_call_stays_open_until_all_choices_are_stored", "a_settlement_ends_a_call_with_missing_choices"},
        "outcome open\nseen: ['recorded']",
        exact=True,
    ),
    Case(
        broken.AbortedIsALoss,
        {"no_generation_and_aborted_do_not_make_it_incomplete", "an_aborted_call_keeps_its_entry"},
        "snapshot.incomplete is True",
    ),
    Case(broken.TakesLostForNothing, {"a_call_settled_as_lost_makes_it_incomplete"}, "seen: ['no_generation']"),
    Case(broken.LosesSettlementsInACrash, {"a_crash_keeps_acknowledged_settlements"}, "settle three calls", exact=True),
    Case(
        broken.StragglersJoinTheNewAttempt,
        {"a_put_of_an_earlier_attempt_is_refused", "marks_and_settlements_of_an_earlier_attempt_are_refused"},
        "expected: StaleAttemptError\nseen: no error",
        exact=True,
    ),
    Case(
        broken.DerivesTheSnapshotId,
        {"an_earlier_life_cannot_retire_a_later_one", "a_reset_rollout_starts_from_nothing"},
        "retire the old pair",
    ),
    # ---- interface
    Case(broken.RepairsIds, {"invalid_ids_are_refused"}, r"freeze('call\n')", exact=True),
    Case(broken.PutsWithoutACoroutine, {"sink_and_source_have_the_protocol_methods"}, "call put"),
    Case(broken.ClosesOnce, {"close_is_idempotent"}, "already closed"),
]


def run(
    store: type[MemoryStore],
    *,
    only: Collection[str] | None = None,
    timeout_s: float = 10.0,
    with_crash: bool = True,
) -> Report:
    """One run of the kit on a store of its own."""
    state = MemoryState()
    checking = check(
        lambda: store(state),
        lambda: store(state),
        crash=crash if with_crash else None,
        only=only,
        timeout_s=timeout_s,
    )
    return asyncio.run(checking)


def test_the_memory_store_passes_every_check() -> None:
    report = run(MemoryStore)
    assert report.ok, str(report)
    assert report.passed == list(check_names())
    assert not report.skipped


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.store.__name__)
def test_a_broken_store_fails_the_checks_aimed_at_it(case: Case) -> None:
    assert case.store.__doc__, "says which bug it mimics"
    only = case.aimed | (set(check_names()) - SLOW if case.exact else _unharmed(case.store))
    report = run(case.store, only=only, timeout_s=0.4 if case.store is broken.LeavesItsLockBehind else 10.0)
    assert set(report.failed) == case.aimed, str(report)
    assert not report.ok
    for text in report.failed.values():
        assert text.startswith("did: ")
        for part in ("\nexpected: ", "\nseen: ", "\nrule: "):
            assert part in text
    assert any(case.says in text for text in report.failed.values()), str(report)


def _unharmed(store: type[MemoryStore]) -> set[str]:
    if store is broken.PutsWithoutACoroutine:
        return {"a_mark_alone_makes_a_rollout", "invalid_ids_are_refused"}
    harmed = {
        broken.IgnoresChoiceIndex: set[str](),
        broken.AssumesThatPromptsExtend: {
            "empty_prompts_and_generations_come_back",
            "token_ids_keep_their_full_range",
        },
        broken.ClosesOnce: {"a_chain_written_by_several_sinks_comes_back_exact"},
    }
    return CONTROLS - harmed.get(store, set())


CRASH_CHECKS = {name for name in check_names() if name.startswith("a_crash_") or "_in_flight_at_a_crash_" in name}


class PlainSink:
    """A sink with nothing but the three methods that a sink must have."""

    def __init__(self, store: MemoryStore) -> None:
        self.put = store.put
        self.mark_incomplete = store.mark_incomplete
        self.close = store.close


class PlainSource:
    """A source with nothing but the three methods that a source must have."""

    def __init__(self, store: MemoryStore) -> None:
        self.freeze = store.freeze
        self.retire = store.retire
        self.close = store.close


def test_without_a_crash_hook_the_crash_checks_are_skipped_by_name_and_never_passed() -> None:
    report = run(MemoryStore, with_crash=False)
    assert report.ok, str(report)
    assert len(CRASH_CHECKS) >= 10
    assert set(report.skipped) == CRASH_CHECKS
    assert not CRASH_CHECKS & set(report.passed)
    assert all("crash=" in reason for reason in report.skipped.values())
    assert "skipped a_crash_keeps_every_acknowledged_put: " in str(report)


def test_checks_of_optional_methods_are_skipped_if_the_sink_lacks_them() -> None:
    state = MemoryState()
    report = asyncio.run(check(lambda: PlainSink(MemoryStore(state)), lambda: PlainSource(MemoryStore(state))))
    assert report.ok, str(report)
    for name, method in {
        "an_open_call_makes_the_snapshot_incomplete": "begin_call",
        "outcomes_hold_by_precedence": "settle_call",
        "put_many_is_visible_as_a_whole": "put_many",
        "a_put_of_an_earlier_attempt_is_refused": "reset",
    }.items():
        assert f"needs {method}" in report.skipped[name]
    assert set(report.passed) | set(report.skipped) == set(check_names())
    assert set(report.skipped) > CRASH_CHECKS


def test_reset_is_found_on_the_sink_too() -> None:
    state = MemoryState()
    name = "a_put_of_an_earlier_attempt_is_refused"
    checking = check(lambda: MemoryStore(state), lambda: PlainSource(MemoryStore(state)), only=[name])
    assert asyncio.run(checking).passed == [name]


def test_factories_may_be_coroutine_functions_and_storage_may_be_used_before() -> None:
    state = MemoryState()

    async def opened() -> MemoryStore:
        await asyncio.sleep(0)
        return MemoryStore(state)

    only = {"concurrent_puts_of_several_sinks_are_all_kept", "a_crash_keeps_every_acknowledged_put"}
    for _ in range(2):
        report = asyncio.run(check(opened, opened, crash=crash, only=only))
        assert set(report.passed) == only, str(report)


@pytest.mark.parametrize(
    ("store", "seen"),
    [
        (broken.HangsOnMarks, "seen: waits at"),
        (broken.SwallowsCancellation, "seen: waits at"),
        (broken.BlocksTheLoop, "event loop has been blocked"),
    ],
)
def test_a_store_that_hangs_fails_its_check_and_not_the_kit(store: type[MemoryStore], seen: str) -> None:
    began = time.monotonic()
    report = run(store, only=["mark_incomplete_makes_the_call_lost", "freeze_fences_new_puts"], timeout_s=0.2)
    assert time.monotonic() - began < 8.0
    assert report.passed == ["freeze_fences_new_puts"], str(report)
    text = report.failed["mark_incomplete_makes_the_call_lost"]
    assert 'did: await other.mark_incomplete(rollout, "call-2")' in text
    assert seen in text


def test_a_factory_that_fails_fails_the_checks_with_its_error() -> None:
    def refuse() -> MemoryStore:
        raise ConnectionRefusedError("nobody listens")

    only = ["an_identical_put_is_a_no_op", "put_many_stores_every_choice"]
    report = asyncio.run(check(refuse, refuse, only=only))
    assert list(report.failed) == only
    assert all("ConnectionRefusedError: nobody listens" in text for text in report.failed.values())


def test_a_factory_that_gives_one_instance_only_is_found() -> None:
    store = MemoryStore(MemoryState())
    report = asyncio.run(check(lambda: store, lambda: store, only=["factories_give_a_new_instance_each_time"]))
    assert "the same MemoryStore twice" in report.failed["factories_give_a_new_instance_each_time"]


def test_a_crash_hook_that_fails_fails_the_crash_checks() -> None:
    async def no_crash(instance: Any) -> None:
        raise RuntimeError("can't kill it")

    state = MemoryState()
    name = "a_crash_keeps_a_freeze"
    report = asyncio.run(check(lambda: MemoryStore(state), lambda: MemoryStore(state), crash=no_crash, only=[name]))
    assert "RuntimeError: can't kill it" in report.failed[name]


def test_the_kit_runs_outside_the_main_thread() -> None:
    reports: list[Report] = []
    thread = threading.Thread(target=lambda: reports.append(run(MemoryStore, only=["freeze_fences_new_puts"])))
    thread.start()
    thread.join(timeout=20.0)
    assert [report.passed for report in reports] == [["freeze_fences_new_puts"]]


def test_an_unknown_check_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no such check: freeze_is_nice"):
        run(MemoryStore, only=["freeze_is_nice"])


def test_a_report_of_nothing_is_not_ok() -> None:
    assert not Report().ok
    assert not Report(skipped={"a": "b"}).ok
    assert Report(passed=["a"], skipped={"b": "c"}).ok
    assert not Report(passed=["a"], failed={"b": "did: c"}).ok
    assert str(Report(passed=["a"], failed={"b": "did: c\nseen: d"}, skipped={"e": "f"})).splitlines() == [
        "1 checks passed, 1 failed, 1 skipped",
        "FAILED b",
        "    did: c",
        "    seen: d",
        "skipped e: f",
    ]


def test_check_names_are_unique_and_every_case_aims_at_existing_ones() -> None:
    names = check_names()
    assert len(names) == len(set(names)) > 90
    assert {name for case in CASES for name in case.aimed} | CONTROLS <= set(names)


def test_no_check_is_content_with_a_store_that_keeps_nothing() -> None:
    report = run(broken.KeepsNothing, timeout_s=1.0)
    assert set(report.passed) == {
        "factories_give_a_new_instance_each_time",
        "sink_and_source_have_the_protocol_methods",
    }
