"""What a store does when the file system fails: at every call, in every way, once and for good."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.faulty_files import (
    SYNCING,
    Call,
    Fault,
    FaultyFiles,
    View,
    booted_as,
    changed_directories,
    serve_views,
    view,
)
from tokcap import FileStore, TokenEntry
from tokcap.errors import ConflictError, DurabilityError, FrozenError, TokcapError

ROLLOUTS = ("r", "s", "other")
ANOTHER_BOOT = "00000000-0000-4000-8000-000000000000"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT, errno.EROFS, errno.EXDEV, errno.EINTR)
SHORT = 0


def entry(rollout: str, call: str, *, choice: int = 0, tokens: int = 6, first: int = 7) -> TokenEntry:
    return TokenEntry(
        rollout,
        call,
        np.arange(tokens, dtype=np.int32),
        np.array([first, 8, 9], np.int32),
        np.array([-0.5, -0.25, np.nan]),
        choice_index=choice,
        output_items=[{"type": "message", "text": f"{rollout} {call} {choice}"}],
    )


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory in memory if there is one: what is tested doesn't depend on how long a sync takes."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="tokcap-faults-", dir=memory)
    yield path
    shutil.rmtree(path)


class OtherProcess:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_views, args=(theirs,), daemon=True)
        self._process.start()

    def views(self, directory: str, boot_id: str = "") -> dict[str, View]:
        self._connection.send((directory, ROLLOUTS, boot_id))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return {rollout: normal(seen) for rollout, seen in answer.items()}

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


@pytest.fixture(scope="module")
def other_process() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.end()


def normal(seen: View) -> View:
    """An open rollout of which nothing is said yet counts as absent."""
    return replace(seen, state="absent") if seen == View("open") else seen


def views(store: FileStore) -> dict[str, View]:
    return {rollout: normal(view(store, rollout)) for rollout in ROLLOUTS}


def open_store(directory: str, files: FaultyFiles | None = None, **options: Any) -> FileStore:
    return FileStore(directory, files=files, sweep_every_s=0, **options)


def leftovers(directory: str) -> list[str]:
    """What only a crash or a failure leaves."""
    return [
        os.path.join(folder, name)
        for folder, folders, names in os.walk(directory)
        for name in folders + names
        if name.startswith(("tmp-", "probe-", "FORMAT-")) or name.endswith(".trash")
    ]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- the operations


@dataclass(frozen=True)
class Scenario:
    name: str
    prepare: Callable[[FileStore], object]
    act: Callable[[FileStore], object]
    names_rollout: bool = True
    """Its errors name the rollout."""
    writes_records: bool = False
    """What it adds is in the log of an open rollout: a failed sync leaves nothing of it."""


def _put(*entries: TokenEntry) -> Callable[[FileStore], None]:
    def put(store: FileStore) -> None:
        for one in entries:
            store.put_now(one)

    return put


def _then(*steps: Callable[[FileStore], object]) -> Callable[[FileStore], None]:
    def run(store: FileStore) -> None:
        for step in steps:
            step(store)

    return run


def _freeze(store: FileStore) -> None:
    store.freeze_now("r").close()


def _retire(store: FileStore) -> None:
    stat = store.stat_now("r")
    assert store.retire_now("r", snapshot_id=stat.snapshot_id, version=stat.version)


def _conflict(store: FileStore) -> None:
    with contextlib.suppress(ConflictError):
        store.put_now(entry("r", "a", first=1))


def _late_conflict(store: FileStore) -> None:
    with contextlib.suppress(FrozenError):
        store.put_now(entry("r", "a", first=1))


BEGUN = _put(entry("other", "o"), entry("r", "a"), entry("r", "b", tokens=9))
FROZEN = _then(BEGUN, lambda store: store.begin_call_now("r", "c"), _freeze)
RETIRED = _then(BEGUN, _freeze, _retire)
LARGE = _then(BEGUN, _put(entry("r", "large", tokens=60_000)))

SCENARIOS = [
    Scenario("first put", _put(entry("other", "o")), _put(entry("r", "a")), writes_records=True),
    Scenario("later put", BEGUN, _put(entry("r", "c")), writes_records=True),
    Scenario("asynchronous put", BEGUN, lambda store: asyncio.run(store.put(entry("r", "c"))), writes_records=True),
    Scenario(
        "put_many",
        BEGUN,
        lambda store: store.put_many_now(
            [entry("r", "c"), entry("r", "c", choice=1), entry("s", "d"), entry("r", "e"), entry("s", "f")]
        ),
        names_rollout=False,
        writes_records=True,
    ),
    Scenario("begin", BEGUN, lambda store: store.begin_call_now("r", "c"), writes_records=True),
    Scenario("settle", BEGUN, lambda store: store.settle_call_now("r", "c", "aborted", "why"), writes_records=True),
    Scenario("finish", BEGUN, lambda store: store.finish_now("r", {"reward": 1.0}), writes_records=True),
    Scenario("delivery", BEGUN, lambda store: store.note_delivery_now("r", "a", "full"), writes_records=True),
    Scenario("conflict", BEGUN, _conflict, writes_records=True),
    Scenario(
        "rotation",
        _then(BEGUN, *[_put(entry("r", f"more{i}", tokens=900)) for i in range(2)]),
        _put(entry("r", "c")),
        writes_records=True,
    ),
    Scenario("freeze", BEGUN, _freeze),
    Scenario("freeze of a large rollout", LARGE, _freeze),
    Scenario("freeze of nothing", _put(entry("other", "o")), _freeze),
    Scenario("freeze again", FROZEN, _freeze),
    Scenario("late mark", FROZEN, lambda store: store.mark_incomplete_now("r", "c")),
    Scenario("late conflict", FROZEN, _late_conflict),
    Scenario("late delivery", FROZEN, lambda store: store.note_delivery_now("r", "a", "partly")),
    Scenario("retire", _then(BEGUN, _freeze), _retire),
    Scenario("retire again", RETIRED, _retire),
    Scenario("mark of a retired rollout", RETIRED, lambda store: store.mark_incomplete_now("r", "c")),
    Scenario("reset of an open rollout", BEGUN, lambda store: store.reset_now("r")),
    Scenario("reset of a frozen rollout", FROZEN, lambda store: store.reset_now("r")),
    Scenario("reset of a retired rollout", RETIRED, lambda store: store.reset_now("r")),
    Scenario("sweep", RETIRED, lambda store: store.sweep_now(0), names_rollout=False),
    Scenario("close", BEGUN, lambda store: store.close_now(), names_rollout=False),
]


def by_name(scenario: Scenario) -> str:
    return scenario.name


class Expected:
    """What is seen before and after an operation that nothing disturbs, and how many calls it makes."""

    def __init__(self, scenario: Scenario, directory: str) -> None:
        files = FaultyFiles()
        with open_store(directory, files, segment_bytes=4000) as store:
            scenario.prepare(store)
            self.before = views(store)
            files.trace.clear()
            scenario.act(store)
            self.trace = list(files.trace)
        with open_store(directory) as store:
            self.after = views(store)


def faults(calls: int, everything: bool) -> Iterator[Fault]:
    """For each call: it fails once, from then on, and everything fails from then on."""
    for number in range(1, calls + 1):
        for position, error in enumerate(ERRORS):
            if everything or position == number % len(ERRORS):
                yield Fault(number, error)
        for error in ERRORS if everything else (errno.ENOSPC, errno.EIO)[number % 2 : number % 2 + 1]:
            yield Fault(number, error, "kind")
        yield Fault(number, errno.EIO, "everything")


def check_poison(trace: list[Call]) -> None:
    """After a failed sync nothing is written to that file any more, nor is it synced again."""
    failed: dict[int, str] = {}
    for call in trace:
        if call.kind in ("fdatasync", "pwritev", "acknowledge"):
            assert call.inode not in failed, f"{call} after the sync of it failed"
        if call.kind == "fdatasync" and call.error:
            failed[call.inode] = call.path
        if call.kind == "unlink":
            failed = {inode: path for inode, path in failed.items() if path != call.path}


class Run:
    """One operation, disturbed by one fault, and everything that must hold then."""

    def __init__(
        self, scenario: Scenario, fault: Fault, expected: Expected, directory: str, other_process: OtherProcess
    ) -> None:
        self.scenario, self.fault, self.expected = scenario, fault, expected
        self.directory, self.other_process = directory, other_process
        self.files = FaultyFiles()
        self.hits: list[Call] = []
        self.failure: BaseException | None = None

    def go(self) -> None:
        store = open_store(self.directory, self.files, segment_bytes=4000)
        self.scenario.prepare(store)
        self.files.trace.clear()
        with self.files.failing(self.fault) as plan:
            try:
                self.scenario.act(store)
            except Exception as error:
                self.failure = error
        self.hits = plan.hits
        assert self.hits or self.fault.error == SHORT
        self.check_error()
        self.check_seen()
        self.check_others_go_on(store)
        self.retry(store)
        check_poison(self.files.trace)

    def check_error(self) -> None:
        error = self.failure
        if error is None:
            return
        assert isinstance(error, DurabilityError), f"{error!r} is not a DurabilityError"
        assert error.errno in {call.error for call in self.hits}
        assert "; " in str(error), "it doesn't say what to do"
        if self.scenario.names_rollout:
            assert "rollout r:" in str(error), str(error)

    def check_seen(self) -> None:
        for reader, seen in self.readers():
            for rollout in ROLLOUTS:
                allowed = self.allowed(rollout, reader)
                assert seen[rollout] in allowed, f"{reader} sees {rollout} as {seen[rollout]}, not as {allowed}"

    def readers(self) -> Iterator[tuple[str, dict[str, View]]]:
        with open_store(self.directory, read_only=True) as another:
            yield "another object", views(another)
        yield "another process", self.other_process.views(self.directory)
        yield "a later boot", self.other_process.views(self.directory, ANOTHER_BOOT)

    def allowed(self, rollout: str, reader: str) -> list[View]:
        before, after = self.expected.before[rollout], self.expected.after[rollout]
        if self.failure is None and self.scenario.name != "sweep":
            return [after]
        if not self.scenario.writes_records:
            return [before, after]
        if self.scenario.name == "put_many" and not self.sync_failed(rollout):
            return [before, after]
        if reader == "a later boot" and self.fault.reach == "everything":
            return [before, after]  # nothing could be said about it any more
        return [before]

    def sync_failed(self, rollout: str) -> bool:
        return any(call.kind in SYNCING and f"/{rollout}/" in f"{call.path}/" for call in self.hits)

    def check_others_go_on(self, store: FileStore) -> None:
        if self.scenario.name != "close":
            store.put_now(entry("other", "later"))

    def retry(self, store: FileStore) -> None:
        if self.scenario.name != "close":
            self.scenario.act(store)
            store.sweep_now(10_000)
            assert leftovers(self.directory) == []
        else:
            open_store(self.directory).sweep_now(10_000)
        store.close_now()
        for reader, seen in self.readers():
            assert {**seen, "other": None} == {**self.expected.after, "other": None}, reader
            assert "o" in seen["other"].calls
            assert self.scenario.name == "close" or "later" in seen["other"].calls


@pytest.mark.parametrize("scenario", SCENARIOS, ids=by_name)
def test_an_operation_survives_a_fault_at_every_call(
    scenario: Scenario, directory: str, other_process: OtherProcess, request: pytest.FixtureRequest
) -> None:
    expected = Expected(scenario, f"{directory}/expected")
    problems: list[str] = []
    gc.collect()
    for number, fault in enumerate(faults(len(expected.trace), request.config.getoption("--torture"))):
        opened = descriptors()
        run = Run(scenario, fault, expected, f"{directory}/{number}", other_process)
        try:
            run.go()
            assert descriptors() <= opened, "descriptors are left open"
        except Exception as problem:
            problems.append(f"{fault}: {', '.join(map(str, run.hits[:3]))}: {type(problem).__name__}: {problem}")
        shutil.rmtree(f"{directory}/{number}")
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:40])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=by_name)
def test_short_writes_are_continued(scenario: Scenario, directory: str, other_process: OtherProcess) -> None:
    expected = Expected(scenario, f"{directory}/expected")
    writes = [call for call in expected.trace if call.kind == "pwritev"]
    for number in range(1, len(writes) + 1):
        for fault in Fault(number, SHORT, kinds=["pwritev"]), Fault(number, SHORT, "kind", ["pwritev"]):
            run = Run(scenario, fault, expected, f"{directory}/{number}", other_process)
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


LOOKS: list[tuple[str, Callable[[FileStore], object]]] = [
    ("read of an open rollout", lambda store: view(store, "r")),
    ("read of a frozen rollout", lambda store: view(store, "frozen")),
    ("read of a retired rollout", lambda store: view(store, "retired")),
    ("list", lambda store: sorted(store.rollouts())),
    ("usage", lambda store: list(store.usage_now())),  # which leaves out what it can't read
]


@pytest.mark.parametrize("look", [look for _, look in LOOKS], ids=[name for name, _ in LOOKS])
def test_a_look_that_fails_shows_no_damage(look: Callable[[FileStore], object], directory: str) -> None:
    with open_store(f"{directory}/s") as store:
        for rollout in "r", "frozen", "retired":
            _put(entry(rollout, "a"), entry(rollout, "large", tokens=60_000))(store)
            store.settle_call_now(rollout, "b", "aborted")
        store.freeze_now("frozen").close()
        with store.freeze_now("retired") as snapshot:
            pass
        assert store.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=1)
        store.mark_incomplete_now("retired", "c")
    files = FaultyFiles()
    opened = descriptors()
    with open_store(f"{directory}/s", files, read_only=True) as store:
        files.trace.clear()
        expected = look(store)
        for number in range(1, len(files.trace) + 1):
            for error in ERRORS:
                for reach in "once", "kind":
                    with files.failing(Fault(number, error, reach)):
                        try:
                            assert look(store) == expected
                        except TokcapError as failure:
                            assert isinstance(failure, DurabilityError)
                            assert failure.errno == error
    gc.collect()
    assert descriptors() <= opened


@pytest.mark.parametrize("state", ["missing", "empty", "in use"])
def test_opening_a_store_survives_a_fault_at_every_call(state: str, directory: str) -> None:
    def prepare(root: str) -> None:
        if state != "missing":
            os.makedirs(root, 0o700)
        if state == "in use":
            with open_store(root) as store:
                store.put_now(entry("r", "a"))

    prepare(f"{directory}/expected/s")
    files = FaultyFiles()
    open_store(f"{directory}/expected/s", files).close_now()
    calls = len(files.trace)
    opened = descriptors()
    for number in range(1, calls + 1):
        for error in ERRORS:
            for reach in "once", "kind":
                files = FaultyFiles()
                root = f"{directory}/{number}-{error}-{reach}/s"
                prepare(root)
                with files.failing(Fault(number, error, reach)) as plan:
                    try:
                        open_store(root, files).close_now()
                    except TokcapError as failure:
                        assert isinstance(failure, OSError)
                        assert failure.errno == error
                        assert root in str(failure)
                with open_store(root) as store:
                    store.put_now(entry("r", "b"))
                    assert view(store, "r").calls == ({"a", "b"} if state == "in use" else {"b"})
                assert leftovers(root) == [] or "unlink" in {call.kind for call in plan.hits}
                assert descriptors() <= opened
                shutil.rmtree(os.path.dirname(root))


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
    scenario
    for scenario in SCENARIOS
    if scenario.name.split()[0] in ("freeze", "late", "retire", "mark", "reset", "sweep")
    and scenario.name != "freeze of nothing"
]


@pytest.mark.parametrize("scenario", RENAMING, ids=by_name)
def test_what_a_failed_sync_was_to_publish_is_done_again_before_the_next_sync(
    scenario: Scenario, directory: str
) -> None:
    with open_store(f"{directory}/expected", expected := FaultyFiles()) as store:
        scenario.prepare(store)
        expected.trace.clear()
        scenario.act(store)
        syncs = [call for call in expected.trace if call.kind == "fsync"]
    for number in range(1, len(syncs) + 1):
        files = FaultyFiles()
        with open_store(f"{directory}/{number}", files) as store:
            scenario.prepare(store)
            files.trace.clear()
            with files.failing(Fault(number, errno.EIO, kinds=["fsync"])) as plan, contextlib.suppress(DurabilityError):
                scenario.act(store)
            scenario.act(store)
            assert plan.hit is not None
            failed = next(place for place, call in enumerate(files.trace) if call is plan.hit)
            before = {path for call in files.trace[:failed] for path in changed_directories(call)}
            changed: set[str] = set()
            for call in files.trace[failed + 1 :]:
                changed |= changed_directories(call)
                if call.kind == "fsync" and call.path == plan.hit.path and call.path in before:
                    assert call.path in changed, f"{call} can't make up for the one that failed"
