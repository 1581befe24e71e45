"""Syncs that the kernel does in the background: the same promises as with threads that wait, at any number at once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faulty_files import Fault, FaultyFiles, booted_as, view
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError
from tokcap.store import syncs as syncs_module
from tokcap.store.files import Files
from tokcap.store.inbox import BellInbox
from tokcap.store.root import file_system_of
from tokcap.store.syncs import KernelSyncs, Sync

ROLLOUTS = [f"r{number}" for number in range(9)]


def entry(rollout_id: str, call: str) -> TokenEntry:
    return TokenEntry(rollout_id, call, np.arange(300, dtype=np.int32), [7, 8], [-0.5, -1.0])


@pytest.fixture
def bell() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def kernel(bell: int) -> Iterator[KernelSyncs]:
    syncs = KernelSyncs.open(4, bell)
    if syncs is None:
        pytest.skip("this kernel, or its sandbox, has no io_submit")
    yield syncs
    syncs.close()


def collect(kernel: KernelSyncs, bell: int, count: int) -> dict[Any, OSError | None]:
    done: dict[Any, OSError | None] = {}
    while len(done) < count:
        os.eventfd_read(bell)
        done.update(kernel.finished())
    return done


def test_files_and_directories_are_synced_and_each_ticket_comes_back_once(
    kernel: KernelSyncs, bell: int, tmp_path: Path
) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x" * 5000)
        file.flush()
        directory = os.open(tmp_path, os.O_RDONLY)
        assert kernel.start([Sync(file.fileno(), False, "file"), Sync(directory, True, "directory")]) == 2
        assert collect(kernel, bell, 2) == {"file": None, "directory": None}
        os.close(directory)
    assert kernel.in_flight == 0 and kernel.finished() == []


def test_no_more_are_taken_than_there_is_room_for(kernel: KernelSyncs, bell: int, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        syncs = [Sync(file.fileno(), False, number) for number in range(6)]
        for _ in range(3):
            assert kernel.start(syncs) == 4
            assert kernel.in_flight == 4
            assert kernel.start(syncs) == 0
            assert set(collect(kernel, bell, 4)) == {0, 1, 2, 3}


def test_what_the_kernel_refuses_is_left_to_the_caller(kernel: KernelSyncs, bell: int, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        closed = os.dup(file.fileno())
        os.close(closed)
        assert kernel.start([Sync(file.fileno(), False, "a"), Sync(closed, False, "b"), Sync(closed, False, "c")]) == 1
        assert collect(kernel, bell, 1) == {"a": None}
        assert kernel.start([Sync(closed, False, "b")]) == 0
        assert kernel.in_flight == 0


def test_a_collection_that_is_interrupted_is_repeated(
    kernel: KernelSyncs, bell: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody rings again for what was done before."""
    collect_now = syncs_module._call_at_once
    interrupted: list[ctypes.c_long] = []

    def interrupting(number: ctypes.c_long, *arguments: Any) -> int:
        if not interrupted:
            interrupted.append(number)
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(collect_now(number, *arguments))

    monkeypatch.setattr(syncs_module, "_call_at_once", interrupting)
    with open(tmp_path / "file", "wb") as file:
        assert kernel.start([Sync(file.fileno(), False, "a")]) == 1
        os.eventfd_read(bell)
        assert kernel.finished() == [("a", None)]
    assert interrupted


def test_closing_waits_for_what_is_in_flight(bell: int, tmp_path: Path) -> None:
    kernel = KernelSyncs.open(8, bell)
    if kernel is None:
        pytest.skip("this kernel, or its sandbox, has no io_submit")
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        kernel.start([Sync(file.fileno(), False, number) for number in range(8)])
        assert {ticket for ticket, error in kernel.close() if error is None} == set(range(8))


def test_a_processor_whose_calls_are_not_known_has_none(bell: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    assert KernelSyncs.open(8, bell) is None


def test_whoever_puts_or_rings_wakes_the_reader() -> None:
    inbox: BellInbox[int] = BellInbox()
    taken: list[list[int]] = []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take() for _ in range(2)))
    inbox.put(1)
    inbox.put(2)
    reader.start()
    while not taken:
        pass
    os.eventfd_write(inbox.bell, 1)
    reader.join(10)
    assert taken == [[1, 2], []]
    inbox.close()
    inbox.close()


def put_together(store: FileStore, call: str, rollouts: Sequence[str] = ROLLOUTS) -> list[BaseException | None]:
    async def together() -> list[BaseException | None]:
        puts = [store.put(entry(rollout_id, call)) for rollout_id in rollouts]
        return list(await asyncio.gather(*puts, return_exceptions=True))

    return asyncio.run(together())


def traced(directory: Path, **options: Any) -> tuple[FaultyFiles, FileStore]:
    files = FaultyFiles(in_kernel=True)
    return files, FileStore(directory, files=files, sweep_every_s=0, **options)


def await_threads(except_for: Collection[threading.Thread] = ()) -> None:
    """Until no store of this process has a thread that syncs or commits, but for those of others."""
    for thread in threading.enumerate():
        if thread.name.startswith("tokcap") and thread not in except_for:
            thread.join(10)
            assert not thread.is_alive()


def bells() -> set[str]:
    """Eventfds of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]":
                found.add(fd)
    return found


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    if file_system_of(str(tmp_path)) in ("tmpfs", "ramfs", "btrfs"):
        pytest.skip("the temporary directory is on a file system on which syncs are done one after another")
    return tmp_path / "s"


def test_every_name_and_record_is_synced_before_it_is_acknowledged(on_disk: Path) -> None:
    files, store = traced(on_disk)
    for call in "first", "second":
        files.trace.clear()
        assert put_together(store, call) == [None] * len(ROLLOUTS)
        for rollout_id in ROLLOUTS:
            steps = [(c.kind, c.path) for c in files.trace]
            (acknowledged,) = (step for step in steps if step[0] == "acknowledge" and f"/{rollout_id}/" in step[1])
            done = steps[: steps.index(acknowledged)]
            segment = acknowledged[1]
            assert ("fdatasync", segment) in done
            if call == "first":
                incarnation = os.path.dirname(segment)
                rollout = os.path.dirname(incarnation)
                for directory in (incarnation, rollout, os.path.dirname(rollout), f"{on_disk}/rollouts"):
                    made = max(
                        i
                        for i, (kind, path) in enumerate(done)
                        if kind in ("mkdir", "create")
                        and os.path.dirname(path) == directory
                        and f"{path}/".startswith(directory)
                        and segment.startswith(path)
                    )
                    assert ("fsync", directory) in done[made:]
    assert not [thread for thread in threading.enumerate() if thread.name == "tokcap-sync"]
    store.close_now()


@pytest.mark.parametrize("first", [True, False], ids=["first puts", "later puts"])
def test_a_sync_that_fails_costs_the_put_that_needed_it_and_no_other(first: bool, on_disk: Path) -> None:
    number = failures = 0
    rollouts = ROLLOUTS[:3]
    while True:
        number += 1
        files, store = traced(on_disk / f"{number}")
        if not first:
            assert put_together(store, "before", rollouts) == [None] * len(rollouts)
        files.trace.clear()
        with files.failing(Fault(number, errno.EIO, kinds=["fdatasync", "fsync"])) as plan:
            results = put_together(store, "call", rollouts)
        failed = {rollout_id for rollout_id, error in zip(rollouts, results, strict=True) if error is not None}
        if plan.hit is None:
            assert not failed
            store.close_now()
            break
        # A directory above the rollouts' own is synced once for all that wait for it at the time.
        failures += 1
        assert len(failed) == 1 or (first and re.fullmatch(rf"{on_disk}/{number}/rollouts(/..)?", plan.hit.path))
        assert all(isinstance(error, DurabilityError) and error.errno == errno.EIO for error in results if error)
        for boot in "", "00000000-0000-0000-0000-00000000b002":
            with booted_as(boot), FileStore(on_disk / f"{number}", read_only=True) as other:
                for rollout_id in rollouts:
                    stored = set() if first else {"before"}
                    assert view(other, rollout_id).calls == stored | (set() if rollout_id in failed else {"call"})
        # What failed may be tried again, with everything that leads to it synced anew.
        files.trace.clear()
        assert put_together(store, "call", rollouts) == [None] * len(rollouts)
        store.close_now()
    # One file each, and with the first put the directories above it, the last of them shared.
    assert number > (len(rollouts) * 3 if first else len(rollouts)) and failures == number - 1


def test_a_directory_that_can_not_be_opened_to_be_synced_costs_its_put_only(on_disk: Path) -> None:
    files, store = traced(on_disk)
    put_together(store, "x")
    store.reset_now(*ROLLOUTS)
    files.trace.clear()
    incarnations = 0
    for number in range(1, 4 * len(ROLLOUTS)):
        with files.failing(Fault(number, errno.EMFILE, kinds=["open_directory"])) as plan:
            results = put_together(store, f"call-{number}")
        if plan.hit is None:
            continue
        failed = sum(isinstance(result, DurabilityError) for result in results)
        assert failed == sum(result is not None for result in results)
        assert failed == 1 or os.path.basename(os.path.dirname(plan.hit.path)) in ("rollouts", "s")
        incarnations += len(os.path.basename(plan.hit.path)) == 32
        store.reset_now(*ROLLOUTS)
    assert incarnations
    assert put_together(store, "call") == [None] * len(ROLLOUTS)
    store.close_now()


def test_with_less_room_than_rollouts_all_are_stored(on_disk: Path) -> None:
    class Narrow(FaultyFiles):
        def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
            return super().kernel_syncs(3, eventfd)

    store = FileStore(on_disk, files=Narrow(in_kernel=True), sweep_every_s=0)
    for call in "abc":
        assert put_together(store, call) == [None] * len(ROLLOUTS)
    store.close_now()
    with FileStore(on_disk, read_only=True) as other:
        assert all(view(other, rollout_id).calls == set("abc") for rollout_id in ROLLOUTS)


def test_without_a_descriptor_for_the_bell_threads_do_the_work(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", no_descriptor)
    with FileStore(on_disk, sweep_every_s=0) as store:
        for call in "ab":
            assert put_together(store, call) == [None] * len(ROLLOUTS)
        assert all(view(store, rollout_id).calls == {"a", "b"} for rollout_id in ROLLOUTS)


@pytest.mark.parametrize("threads", [None, 4])
def test_who_asks_for_threads_gets_threads(threads: int | None, on_disk: Path) -> None:
    asked: list[int] = []

    class Asked(Files):
        def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
            asked.append(most)
            return super().kernel_syncs(most, eventfd)

    with FileStore(on_disk, files=Asked(), sync_threads=threads, sweep_every_s=0) as store:
        assert put_together(store, "a") == [None] * len(ROLLOUTS)
    assert bool(asked) == (threads is None)


def test_a_store_leaves_no_descriptor_and_no_thread_behind(on_disk: Path) -> None:
    others, before = threading.enumerate(), set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with FileStore(on_disk, sweep_every_s=0) as store:
            put_together(store, "a")
    await_threads(others)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_after_a_fork_both_sides_go_on(on_disk: Path) -> None:
    store = FileStore(on_disk, sweep_every_s=0)
    put_together(store, "before")
    inherited = bells()
    assert inherited
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 2 if bells() & inherited else 3
            put_together(store, "child")
            status = 0 if status == 3 else status
        finally:
            os._exit(status)
    put_together(store, "parent")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(view(store, rollout_id).calls == {"before", "child", "parent"} for rollout_id in ROLLOUTS)
    store.close_now()
