"""The conformance kit passes a correct store, and finds every broken one by the checks that are meant for it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import Collection
from typing import Any, cast

import pytest

from tokcap.conformance import Report, check, check_names

from . import (
    broken_stores_calls,
    broken_stores_interface,
    broken_stores_puts,
    broken_stores_states,
    broken_stores_values,
)
from .broken_stores import Case
from .broken_stores_interface import (
    BlocksTheLoop,
    ClosesOnce,
    HangsOnMarks,
    KeepsNothing,
    PutsWithoutACoroutine,
    SwallowsCancellation,
)
from .broken_stores_puts import IgnoresChoiceIndex, LeavesItsLockBehind
from .broken_stores_values import AssumesThatPromptsExtend
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


BROKEN = (broken_stores_puts, broken_stores_values, broken_stores_states, broken_stores_calls, broken_stores_interface)
CASES = [case for module in BROKEN for case in module.CASES]


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
    report = run(case.store, only=only, timeout_s=0.4 if case.store is LeavesItsLockBehind else 10.0)
    assert set(report.failed) == case.aimed, str(report)
    assert not report.ok
    for text in report.failed.values():
        assert text.startswith("did: ")
        for part in ("\nexpected: ", "\nseen: ", "\nrule: "):
            assert part in text
    assert any(case.says in text for text in report.failed.values()), str(report)


def _unharmed(store: type[MemoryStore]) -> set[str]:
    if store is PutsWithoutACoroutine:
        return {"a_mark_alone_makes_a_rollout", "invalid_ids_are_refused"}
    harmed = {
        IgnoresChoiceIndex: set[str](),
        AssumesThatPromptsExtend: {
            "empty_prompts_and_generations_come_back",
            "token_ids_keep_their_full_range",
        },
        ClosesOnce: {"a_chain_written_by_several_sinks_comes_back_exact"},
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
        (HangsOnMarks, "seen: waits at"),
        (SwallowsCancellation, "seen: waits at"),
        (BlocksTheLoop, "event loop has been blocked"),
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


@pytest.mark.parametrize("kind", ["sink", "source"])
@pytest.mark.parametrize("only", [None, ["an_identical_put_is_a_no_op", "put_many_stores_every_choice"]])
def test_a_factory_that_fails_is_one_failure(kind: str, only: list[str] | None) -> None:
    opened: list[MemoryStore] = []

    def refuse() -> MemoryStore:
        raise ConnectionRefusedError("nobody listens")

    def make() -> MemoryStore:
        opened.append(MemoryStore(MemoryState()))
        return opened[-1]

    factories = (refuse, make) if kind == "sink" else (make, refuse)
    report = asyncio.run(check(*factories, only=only))
    assert not report.ok
    assert (report.passed, report.skipped) == ([], {})
    assert list(report.failed) == ["factories_give_a_new_instance_each_time"]
    text = report.failed["factories_give_a_new_instance_each_time"]
    assert text.startswith(f"did: call the {kind} factory for the first time\nexpected: no error\n")
    assert "seen: ConnectionRefusedError: nobody listens\n" in text
    assert "no check was run" in text
    assert all(store.closed for store in opened)


def test_a_factory_that_hangs_is_one_failure() -> None:
    async def hang() -> MemoryStore:
        await asyncio.Event().wait()
        raise AssertionError

    began = time.monotonic()
    report = asyncio.run(check(hang, hang, timeout_s=0.2))
    assert time.monotonic() - began < 5.0
    assert list(report.failed) == ["factories_give_a_new_instance_each_time"]
    assert "expected: an end within 0.2 s\nseen: waits at" in report.failed["factories_give_a_new_instance_each_time"]


def test_a_factory_that_fails_later_fails_the_checks_that_call_it_then() -> None:
    state, calls = MemoryState(), itertools.count()

    def refuse_later() -> MemoryStore:
        if next(calls) > 3:
            raise ConnectionRefusedError("too many clients")
        return MemoryStore(state)

    only = ["freeze_of_an_absent_rollout_fences_late_writers", "an_identical_put_is_a_no_op"]
    report = asyncio.run(check(refuse_later, refuse_later, only=only))
    assert set(report.failed) == set(only)
    assert all("ConnectionRefusedError: too many clients" in text for text in report.failed.values())


def test_an_instance_in_place_of_a_factory_is_refused() -> None:
    class CallableStore(MemoryStore):
        def __call__(self) -> MemoryStore:
            return self

    state = MemoryState()

    def make() -> MemoryStore:
        return MemoryStore(state)

    for store in (MemoryStore(state), CallableStore(state)):
        given = cast(Any, store)
        with pytest.raises(TypeError, match="pass a function that makes a sink, not a sink"):
            asyncio.run(check(given, make))
        with pytest.raises(TypeError, match="pass a function that makes a source, not a source"):
            asyncio.run(check(make, given))


def test_a_class_is_a_factory() -> None:
    state = MemoryState()

    class OnThisState(MemoryStore):
        def __init__(self) -> None:
            super().__init__(state)

    only = ["a_returned_put_is_visible_to_other_instances"]
    assert asyncio.run(check(OnThisState, functools.partial(MemoryStore, state), only=only)).passed == only


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


def test_every_check_has_a_broken_store_aimed_at_it() -> None:
    aimed = {name for case in CASES for name in case.aimed}
    assert [name for name in check_names() if name not in aimed] == []


def test_every_case_has_a_store_of_its_own() -> None:
    names = [case.store.__name__ for case in CASES]
    assert len(names) == len(set(names))


def test_no_check_is_content_with_a_store_that_keeps_nothing() -> None:
    report = run(KeepsNothing, timeout_s=1.0)
    assert set(report.passed) == {
        "factories_give_a_new_instance_each_time",
        "sink_and_source_have_the_protocol_methods",
    }
