"""What a store does when the file system fails: at every call, in every way, once and for good."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faulty_files import Call, Fault, FaultyFiles, booted_as, view
from tests.proofs.faults_around import AROUND
from tests.proofs.faults_disturbed import (
    ANOTHER_BOOT,
    ERRORS,
    SHORT,
    WAYS,
    Expected,
    OtherProcess,
    Run,
    Way,
    check_poison,
    descriptors,
    disturb,
    faults,
    open_store,
    unrepeated_syncs,
)
from tests.proofs.faults_looks import LOOKS, STATES, disturb_look, disturb_opening
from tests.proofs.faults_operations import OPERATIONS, Operation, entry
from tokcap.errors import DurabilityError
from tokcap.store import base as base_module
from tokcap.store import root as root_module
from tokcap.store import serving as serving_module
from tokcap.store.publication import Publication
from tokcap.store.rollout import Rollout


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory in memory if there is one: what is tested doesn't depend on how long a sync takes."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="tokcap-faults-", dir=memory)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def other_process() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.end()


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_an_operation_survives_a_fault_at_every_call(
    operation: Operation, directory: str, other_process: OtherProcess, request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("--torture")
    chance = random.Random(operation.name)
    problems: list[str] = []
    for way in WAYS:
        expected = Expected(operation, f"{directory}/expected", way)
        shutil.rmtree(f"{directory}/expected")
        planned = list(faults(expected.trace, every))
        if not every:
            # Every second call once through the first way; of all else a sample.
            always = [fault for fault in planned if fault.reach == "once"][::2] if way is WAYS[0] else []
            rest = [fault for fault in planned if fault not in always]
            planned = always + chance.sample(rest, min(6 if way is WAYS[0] else 3, len(rest)))
        for fault in planned:
            _, problem = disturb(operation, fault, expected, f"{directory}/run", other_process, way)
            problems += [problem] if problem else []
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:40])


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_short_writes_are_continued(operation: Operation, directory: str, other_process: OtherProcess) -> None:
    expected = Expected(operation, f"{directory}/expected")
    writes = [call for call in expected.trace if call.kind == "pwritev"]
    for number in range(1, len(writes) + 1):
        for fault in Fault(number, SHORT, kinds=["pwritev"]), Fault(number, SHORT, "kind", ["pwritev"]):
            run = Run(operation, fault, expected, f"{directory}/{number}", other_process)
            run.go()
            assert run.failure is None
            shutil.rmtree(f"{directory}/{number}")


def test_a_write_that_accepts_nothing_is_an_error(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(directory) as store:
        store.put_now(entry("r", "a"))
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(DurabilityError, match=r"rollout r: can't write .*accepted no bytes"):
            store.put_now(entry("r", "b"))
        monkeypatch.undo()
        monkeypatch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(DurabilityError, match=r"rollout r: can't sync .*accepted no bytes"):
            store.put_now(entry("r", "b"))
        monkeypatch.undo()
        store.put_now(entry("r", "b"))
        assert view(store, "r").calls == {"a", "b"}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "writing"])
def test_a_look_that_fails_shows_no_damage(look: str, read_only: bool, directory: str) -> None:
    injected, problems = disturb_look(look, directory, ERRORS if read_only else ERRORS[:3], read_only=read_only)
    assert injected > 10 and not problems, problems[:20]


@pytest.mark.parametrize("state", STATES)
def test_opening_a_store_survives_a_fault_at_every_call(state: str, directory: str) -> None:
    injected, problems = disturb_opening(state, directory, ERRORS[:5])
    assert injected > 10 and not problems, problems[:20]


def test_a_file_system_that_can_not_be_told_just_now_is_not_taken_for_a_good_one(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    root = f"{directory}/s"
    monkeypatch.setattr(root_module, "open", full, raising=False)
    monkeypatch.setattr(base_module, "boot_id", lambda: ANOTHER_BOOT)
    with pytest.raises(DurabilityError, match="too many open files") as caught:
        open_store(root)
    assert caught.value.errno == errno.EMFILE and root in str(caught.value)
    monkeypatch.undo()
    with open_store(root) as store:
        store.put_now(entry("r", "a"))


# ---- failed syncs


@pytest.mark.parametrize("first", [True, False], ids=["first put", "later put"])
def test_a_sync_that_fails_once_and_then_succeeds_acknowledges_nothing(first: bool, directory: str) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        if not first:
            store.put_now(entry("r", "a"))
        with files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])), pytest.raises(DurabilityError) as caught:
            store.put_now(entry("r", "b"))
        assert caught.value.errno == errno.EIO
        assert "b" not in view(store, "r").calls
        with booted_as(ANOTHER_BOOT), open_store(directory) as later:
            assert "b" not in view(later, "r").calls
            later.freeze_now("r").close()
            assert "b" not in view(later, "r").calls
        check_poison(files.trace)


@pytest.mark.parametrize("sync_threads", [1, 4])
def test_a_batch_whose_sync_fails_fails_for_everybody_in_it(sync_threads: int, directory: str) -> None:
    class Slow(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.gate = threading.Event()
            self.gate.set()

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            assert self.gate.wait(30)

    files = Slow()
    store = open_store(directory, files, sync_threads=sync_threads)
    store.put_now(entry("r", "a"))
    files.gate.clear()
    names = [f"b{number}" for number in range(8)]

    async def together() -> list[BaseException | None]:
        files.trace.clear()
        first = asyncio.create_task(store.put(entry("r", "first")))
        while not any(call.kind == "fdatasync" for call in files.trace):
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(store.put(entry("r", name))) for name in names]
        await asyncio.sleep(0.05)
        with files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])):
            files.gate.set()
            await first
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    errors = asyncio.run(together())
    assert all(isinstance(error, DurabilityError) and error.errno == errno.EIO for error in errors)
    assert len([call for call in files.trace if call.error]) == 1
    for boot in "", ANOTHER_BOOT:
        with booted_as(boot), open_store(directory) as other:
            assert view(other, "r").calls == {"a", "first"}

    async def again() -> None:
        await asyncio.gather(*(store.put(entry("r", name)) for name in names))

    asyncio.run(again())
    check_poison(files.trace)
    store.close_now()
    with open_store(directory) as other:
        assert view(other, "r").calls == {"a", "first", *names}


@pytest.mark.parametrize("tries", [1, 3])
def test_a_store_closed_after_the_fault_is_over_leaves_no_doubt(tries: int, directory: str) -> None:
    files = FaultyFiles()
    store = open_store(directory, files)
    store.put_now(entry("r", "a"))
    for _ in range(tries):
        with files.failing(Fault(1, errno.EIO, "everything", ["fdatasync"])), pytest.raises(DurabilityError):
            store.put_now(entry("r", "b"))
    store.close_now()
    with booted_as(ANOTHER_BOOT), open_store(directory) as later:
        assert view(later, "r").calls == {"a"}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["pwritev", "fdatasync", "create", "fsync"])
def test_trying_again_and_again_doesn_t_pile_up_files(kind: str, error: int, directory: str) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        store.put_now(entry("r", "a"))
        with files.failing(Fault(1, error, "kind", [kind])):
            for number in range(40):
                with contextlib.suppress(DurabilityError):
                    store.put_now(entry("r", f"b{number}", tokens=number))
                with contextlib.suppress(DurabilityError):
                    store.put_now(entry("s", f"b{number}", tokens=number))
        names = [name for _, _, names in os.walk(f"{directory}/rollouts") for name in names]
        assert len(names) <= 6
        store.put_now(entry("r", "c"))
        store.put_now(entry("s", "c"))
        assert {"a", "c"} <= view(store, "r").calls
        assert "c" in view(store, "s").calls


def test_segments_in_which_nothing_counts_are_no_damage(directory: str) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        for call in "a", "b", "c":
            with files.failing(Fault(1, errno.EIO, "kind", ["fdatasync", "unlink"])) as plan:
                plan.hit = Call("unlink", "")
                with files.failing(Fault(1, errno.EIO, "once", ["fdatasync"])), pytest.raises(DurabilityError):
                    store.put_now(entry("r", call))
        store.put_now(entry("r", "a"))
        store.begin_call_now("r", "open")
        store.freeze_now("r").close()
        store.mark_incomplete_now("r", "open")
        seen = view(store, "r")
        assert seen.calls == {"a"}
        assert seen.damage == ()
        assert seen.outcomes == {("a", "recorded"), ("open", "lost")}


RENAMING = [
    operation
    for operation in OPERATIONS
    if not operation.writes_records and not operation.in_parts and not operation.polls and not operation.ends_store
]


@pytest.mark.parametrize("operation", RENAMING, ids=str)
def test_what_a_failed_sync_was_to_publish_is_done_again_before_the_next_sync(
    operation: Operation, directory: str
) -> None:
    assert unrepeated_syncs(operation, directory) == []


# ---- around operations


@pytest.mark.parametrize("around", AROUND)
def test_a_fault_costs_a_consumer_or_a_sweep_only_time(around: str, directory: str) -> None:
    runs, injected, problems = AROUND[around](directory, ERRORS, 0.04, 6)
    assert runs > 10 and injected > 10 and not problems, problems[:20]


def test_what_does_not_expire_is_said_after_all_others(directory: str) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        for rollout in "a", "b", "c":
            store.put_now(entry(rollout, "call"))
        with (
            files.failing(Fault(1, errno.EIO, "everything", rollout="b")),
            pytest.raises(DurabilityError, match=r"every rollout|rollout b") as caught,
        ):
            store.expire_now(-1)
        assert caught.value.errno == errno.EIO
        assert [rollout for rollout, _ in store.rollouts()] == ["b"]
        assert store.expire_now(-1) == 1


def test_a_freeze_that_waits_says_what_it_could_not_do(directory: str) -> None:
    raised = 0
    for kind in "fcntl", "close":
        for number in range(1, 8):
            files = FaultyFiles()
            with open_store(f"{directory}/{kind}-{number}", files) as store, files.hearing_signals():
                store.put_now(entry("r", "a"))
                opened = descriptors()
                with files.failing(Fault(number, errno.EIO, "once", [kind])):
                    try:
                        store.freeze_now("r", wait_open_s=0.001).close()
                    except DurabilityError as error:
                        assert re.search(r"rollout r: .*; ", str(error))
                        raised += 1
                assert descriptors() <= opened + 2  # of the fence and the segment, for the next operation
                with store.freeze_now("r") as snapshot:
                    assert len(snapshot.entries) == 1
    assert raised


def test_closing_a_store_does_not_fail_for_a_file_that_says_nothing(directory: str) -> None:
    files = FaultyFiles()
    store = open_store(directory, files)
    store.begin_call_now("r", "a")
    with files.failing(Fault(1, errno.EIO, "kind", ["close"])):
        store.close_now()
    assert os.listdir(f"{directory}/writers") == []


def test_the_error_of_a_freeze_keeps_no_file_open(directory: str) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        for call in "a", "b":
            store.put_now(entry("r", call, tokens=400_000))
        opened = descriptors()
        errors: list[DurabilityError] = []
        for kind in "link", "rename", "fsync":
            with files.failing(Fault(1, errno.EIO, "once", [kind])), pytest.raises(DurabilityError) as caught:
                store.freeze_now("r")
            errors.append(caught.value)
        assert descriptors() <= opened and len(errors) == 3


# ---- what this sees


def problems_of(name: str, directory: str, other_process: OtherProcess, way: Way = WAYS[0]) -> list[str]:
    """Of one operation, with one error at every call."""
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    expected = Expected(operation, f"{directory}/expected", way)
    planned = [Fault(number, errno.EIO) for number in range(1, len(expected.trace) + 1)]
    runs = (disturb(operation, fault, expected, f"{directory}/run", other_process, way) for fault in planned)
    return [problem for _, problem in runs if problem]


def no_error(*_: object) -> None:
    return


def suppressed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with contextlib.suppress(OSError):
            return function(*arguments)

    return call


def unlinking(rollout: Rollout) -> None:
    """The whole segment goes with the batch that failed."""
    assert rollout.log is not None and rollout.log.segment is not None
    path = rollout.log.segment.path
    rollout.drop()
    os.unlink(path)


MUTANTS: dict[str, tuple[str, Any, str, Callable[[Any], Any], str]] = {
    "a failed sync is not noticed": ("later put", Rollout, "sync", suppressed, "nobody was told"),
    "a failed sync of names is not noticed": ("first put", Rollout, "_sync_names", suppressed, "nobody was told"),
    "no end is stated": ("later put", Rollout, "_abandon", lambda _: no_error, "a later boot sees r as"),
    "a segment is removed": ("later put", Rollout, "_abandon", lambda _: unlinking, "sees r as"),
    "errors come as they are": (
        "later put",
        serving_module,
        "durability_error",
        lambda _: lambda error, *_: error,
        "is not a DurabilityError",
    ),
    "descriptors stay": ("freeze", Publication, "close", lambda _: no_error, "descriptors are left open"),
}
"""What is broken: the operation that shows it, what is replaced, and what is found."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_store_that_is_wrong_is_found(
    mutant: str, directory: str, other_process: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, attribute, change, expected = MUTANTS[mutant]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    problems = problems_of(name, f"{directory}/wrong", other_process)
    monkeypatch.undo()
    gc.collect()
    assert any(re.search(expected, problem) for problem in problems), problems


def test_a_segment_that_is_written_on_after_its_sync_failed_is_found(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    with open_store(directory, files) as store:
        store.put_now(entry("r", "a"))
        monkeypatch.setattr(Rollout, "_abandon", no_error)
        monkeypatch.setattr(Rollout, "drop", no_error)
        with files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])), pytest.raises(DurabilityError):
            store.put_now(entry("r", "b"))
        store.put_now(entry("r", "c"))
        monkeypatch.undo()
        with pytest.raises(AssertionError, match="after the sync of it failed"):
            check_poison(files.trace)


@pytest.mark.parametrize(
    ("name", "owner", "attribute"), [("freeze", Publication, "undo"), ("freeze of nothing", Rollout, "unmake")]
)
def test_a_store_that_only_syncs_again_is_found(
    name: str, owner: Any, attribute: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    monkeypatch.setattr(owner, attribute, no_error)
    assert unrepeated_syncs(operation, directory)
