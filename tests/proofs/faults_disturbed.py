"""One operation, disturbed by one fault, and everything that must hold then."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from tests.faulty_files import Call, Fault, FaultyFiles, View, changed_directories, serve_views, view
from tokcap import FileStore
from tokcap.errors import DurabilityError
from tokcap.store import base, root

from .faults_operations import ROLLOUTS, Operation, entry

__all__ = (
    "ERRORS",
    "SHORT",
    "WAYS",
    "Expected",
    "OtherProcess",
    "Run",
    "Way",
    "check_poison",
    "disturb",
    "faults",
    "open_store",
    "unrepeated_syncs",
)

ANOTHER_BOOT = "00000000-0000-4000-8000-000000000000"
ERRORS = (
    errno.ENOSPC,
    errno.EIO,
    errno.EMFILE,
    errno.EDQUOT,
    errno.EROFS,
    errno.EXDEV,
    errno.EINTR,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EMLINK,
    errno.EACCES,
)
SHORT = 0


# ---- how operations get to the file system


@dataclass(frozen=True)
class Way:
    """Through which of the store's threads operations go."""

    name: str
    file_system: str
    """The store works as on a file system of this type, wherever it is."""
    in_kernel: bool = False
    """Syncs that may run at the same time are started together and done later, as the kernel does them."""
    in_thread: bool = False
    """Whoever calls is not the main thread, and does the work itself."""

    def __str__(self) -> str:
        return self.name


WAYS = (
    Way("one thread", "tmpfs"),
    Way("threads", "ext4"),
    Way("kernel syncs", "ext4", in_kernel=True),
    Way("caller", "ext4", in_thread=True),
)


@contextlib.contextmanager
def as_on(file_system: str) -> Iterator[None]:
    """Stores that are made inside work as on a file system of this type."""

    def open_root(*arguments: Any, **options: Any) -> str:
        root.open_root(*arguments, **options)
        return file_system

    with patch.object(base, "open_root", open_root):
        yield


def open_store(directory: str, files: FaultyFiles | None = None, **options: Any) -> FileStore:
    return FileStore(directory, files=files, sweep_every_s=0, **options)


def perform(operation: Operation, store: FileStore, way: Way) -> object:
    """What it returns. In the way's thread."""
    if not way.in_thread:
        return operation.act(store)
    outcome: list[tuple[object, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((operation.act(store), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


# ---- who looks


class OtherProcess:
    """Looks at stores from outside, also as a later boot does."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_views, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def views(self, directory: str, boot_id: str = "") -> dict[str, View]:
        self._connection.send((directory, ROLLOUTS, boot_id))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return {rollout: normal(seen) for rollout, seen in answer.items()}

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._connection.send(None)
        self._process.join()
        self._connection.close()


def normal(seen: View) -> View:
    """An open rollout of which nothing is said yet counts as absent."""
    return replace(seen, state="absent") if seen == View("open") else seen


def views(store: FileStore) -> dict[str, View]:
    return {rollout: normal(view(store, rollout)) for rollout in ROLLOUTS}


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


def await_threads() -> None:
    """Until the threads of closed stores are gone, and the descriptors that they had."""
    for thread in threading.enumerate():
        if thread.name.startswith(("tokcap-committer", "tokcap-sync", "tokcap-worker", "tokcap-freeze")):
            thread.join(10)


# ---- one run


class Expected:
    """What is seen before and after an operation that nothing disturbs, and which calls it makes."""

    def __init__(self, operation: Operation, directory: str, way: Way = WAYS[0]) -> None:
        files = FaultyFiles(in_kernel=way.in_kernel)
        with as_on(way.file_system), open_store(directory, files, segment_bytes=4000) as store:
            prepared = operation.prepare(store)
            self.before = views(store)
            files.trace.clear()
            with files.hearing_signals():
                perform(operation, store, way)
                self.trace = list(files.trace)
            close(prepared)
        with open_store(directory) as store:
            self.after = views(store)


def close(prepared: object) -> None:
    if isinstance(prepared, FileStore):
        prepared.close_now()


def faults(trace: Sequence[Call], everything: bool) -> Iterator[Fault]:
    """For each call: it fails once, its kind fails from then on, everything does, everything of rollout `r` does; each
    write is short, or it and all after it are."""
    for number in range(1, len(trace) + 1):
        for position, error in enumerate(ERRORS):
            if everything or position == number % len(ERRORS):
                yield Fault(number, error)
        for error in ERRORS if everything else (errno.ENOSPC, errno.EIO)[number % 2 : number % 2 + 1]:
            yield Fault(number, error, "kind")
        yield Fault(number, errno.EIO, "everything")
    if everything:
        for number in range(1, sum(call.kind == "pwritev" for call in trace) + 1):
            yield Fault(number, SHORT, kinds=["pwritev"])
            yield Fault(number, SHORT, "kind", ["pwritev"])
    for number in range(1, sum(call.is_in("r") for call in trace) + 1):
        if everything or number % 3 == 1:
            yield Fault(number, (errno.EIO, errno.ENOSPC)[number % 2], "everything", rollout="r")


def check_poison(trace: list[Call]) -> None:
    """After a failed sync nothing is written to that file any more, nor is it synced again."""
    failed: dict[int, str] = {}
    for call in trace:
        if call.kind in ("fdatasync", "pwritev", "acknowledge", "write_space"):
            assert call.inode not in failed, f"{call} after the sync of it failed"
        if call.kind == "fdatasync" and call.error:
            failed[call.inode] = call.path
        if call.kind == "unlink":
            failed = {inode: path for inode, path in failed.items() if path != call.path}


@dataclass
class Run:
    """Raises `AssertionError`, or whatever it met, if something doesn't hold."""

    operation: Operation
    fault: Fault
    expected: Expected
    directory: str
    other_process: OtherProcess
    way: Way = WAYS[0]
    hits: list[Call] = field(default_factory=list)
    failure: BaseException | None = None
    parts: Mapping[str, BaseException | None] = field(default_factory=dict)

    def go(self) -> None:
        self.files = FaultyFiles(in_kernel=self.way.in_kernel)
        with self.files.hearing_signals(), as_on(self.way.file_system):
            store = open_store(self.directory, self.files, segment_bytes=4000)
            prepared = self.operation.prepare(store)
            try:
                self.disturb(store)
                self.check_error()
                self.check_seen()
                self.check_others_go_on(store, "later")
                self.retry(store)
                check_poison(self.files.trace)
            finally:
                store.close_now()
                close(prepared)

    def disturb(self, store: FileStore) -> None:
        self.files.trace.clear()
        with self.files.failing(self.fault) as plan:
            try:
                result = perform(self.operation, store, self.way)
                if self.operation.in_parts and isinstance(result, Mapping):
                    self.parts = result
                    self.failure = next((error for error in result.values() if error is not None), None)
            except Exception as error:
                self.failure = error
            self.hits = plan.hits
            if self.fault.rollout:
                self.check_others_go_on(store, "meanwhile")
        # Threads take turns as they like: there may be fewer calls than there were.
        operation = self.operation
        takes_turns = self.way.name == "threads" or operation.in_parts or operation.polls or operation.ends_store
        assert self.hits or self.fault.error == SHORT or takes_turns

    def check_error(self) -> None:
        assert self.failure is None or self.fault.error != SHORT, "a short write was not continued"
        if self.failure is None:
            unsynced = [call for call in self.hits if call.kind == "fdatasync" or self.is_sync_of_a_record(call)]
            assert not unsynced, f"{unsynced[0]}, and nobody was told"
        for error in (self.failure, *self.parts.values()):
            if error is None:
                continue
            assert isinstance(error, DurabilityError), f"{error!r} is not a DurabilityError"
            assert error.errno in {call.error for call in self.hits}
            assert "; " in str(error), "it doesn't say what to do"
            if self.operation.names_rollout:
                assert "rollout r:" in str(error), str(error)
        for rollout, error in self.parts.items():
            assert error is None or f"rollout {rollout}:" in str(error), str(error)

    def check_seen(self) -> None:
        for reader, seen in self.readers():
            for rollout in ROLLOUTS:
                allowed = self.allowed(rollout, reader)
                shown = without_what_came_later(seen[rollout])
                if self.is_of_calls_that_fail_alone(rollout):
                    allowed = [self.as_far_as(rollout, shown)]
                assert shown in allowed, f"{reader} sees {rollout} as {shown}, not as {allowed}"

    def readers(self) -> Iterator[tuple[str, dict[str, View]]]:
        with open_store(self.directory, read_only=True) as another:
            yield "another object", views(another)
        yield "another process", self.other_process.views(self.directory)
        yield "a later boot", self.other_process.views(self.directory, ANOTHER_BOOT)

    def allowed(self, rollout: str, reader: str) -> list[View]:
        before, after = self.expected.before[rollout], self.expected.after[rollout]
        if self.operation.best_effort:
            return [before, after, replace(before, late=0)]  # a tombstone goes after its notes
        if self.failure is None or (rollout in self.parts and self.parts[rollout] is None):
            return [after]
        if not self.operation.writes_records:
            return [before, after]
        if reader == "a later boot" and self.fault.reach == "everything":
            return [before, after]  # nothing could be said about it any more
        return [before]

    def is_of_calls_that_fail_alone(self, rollout: str) -> bool:
        """Nobody said which: what queued up in the meantime is a batch of its own."""
        return (
            self.failure is not None
            and self.operation.in_parts
            and self.operation.writes_records
            and rollout not in self.parts
        )

    def as_far_as(self, rollout: str, shown: View) -> View:
        """How a rollout must look of which these calls are there: of each of them all choices."""
        before, after = self.expected.before[rollout], self.expected.after[rollout]
        there = shown.calls | before.calls
        return replace(
            before if there == before.calls else after,
            entries=frozenset(one for one in after.entries if one[0] in there),
            outcomes=frozenset(one for one in after.outcomes if one[0] in there),
        )

    def is_sync_of_a_record(self, call: Call) -> bool:
        return call.kind == "fsync" and self.operation.writes_records

    def check_others_go_on(self, store: FileStore, call: str) -> None:
        if not self.operation.ends_store:
            store.put_now(entry("other", call))

    def retry(self, store: FileStore) -> None:
        if not self.operation.ends_store:
            perform(self.operation, store, self.way)
            store.sweep_now(10_000)
            assert leftovers(self.directory) == []
        else:
            with open_store(self.directory) as another:
                another.sweep_now(10_000)
        store.close_now()
        for reader, seen in self.readers():
            assert {**seen, "other": None} == {**self.expected.after, "other": None}, reader
            assert "o" in seen["other"].calls
            assert self.operation.ends_store or "later" in seen["other"].calls


def unrepeated_syncs(operation: Operation, directory: str) -> list[str]:
    """A sync of a directory that failed once may succeed afterwards without doing anything: what it was to publish has
    to be done again before it. Which syncs don't care."""
    with open_store(f"{directory}/expected", expected := FaultyFiles()) as store:
        operation.prepare(store)
        expected.trace.clear()
        operation.act(store)
        syncs = [call for call in expected.trace if call.kind == "fsync"]
    problems: list[str] = []
    for number in range(1, len(syncs) + 1):
        files = FaultyFiles()
        with open_store(f"{directory}/{number}", files) as store:
            prepared = operation.prepare(store)
            files.trace.clear()
            with files.failing(Fault(number, errno.EIO, kinds=["fsync"])) as plan, contextlib.suppress(DurabilityError):
                operation.act(store)
            operation.act(store)
            close(prepared)
        if plan.hit is None:
            continue  # what was counted was a sync of the preparation, by a thread that was late
        failed = next(place for place, call in enumerate(files.trace) if call is plan.hit)
        before = {path for call in files.trace[:failed] for path in changed_directories(call)}
        changed: set[str] = set()
        for call in files.trace[failed + 1 :]:
            changed |= changed_directories(call)
            if call.kind == "fsync" and call.path == plan.hit.path and call.path in before and call.path not in changed:
                problems.append(f"{operation}: {call} can't make up for the one that failed")
    return problems


def without_what_came_later(seen: View) -> View:
    """As it was before others went on."""
    return replace(
        seen,
        entries=frozenset(one for one in seen.entries if one[0] != "meanwhile"),
        outcomes=frozenset(one for one in seen.outcomes if one[0] != "meanwhile"),
    )


def disturb(
    operation: Operation, fault: Fault, expected: Expected, directory: str, other_process: OtherProcess, way: Way
) -> tuple[list[Call], str]:
    """Run it in a new directory: the calls that were made to fail, and what did not hold; empty if everything did."""
    opened = descriptors()
    run = Run(operation, fault, expected, directory, other_process, way)
    problem = ""
    try:
        run.go()
        if descriptors() > opened:
            gc.collect()
            await_threads()
        assert descriptors() <= opened, "descriptors are left open"
    except Exception as error:
        problem = f"{operation}, {way}: {fault}: {', '.join(map(str, run.hits[:3]))}: {type(error).__name__}: {error}"
    shutil.rmtree(directory, ignore_errors=True)
    return run.hits, problem
