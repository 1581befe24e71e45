"""What an attack on the store found: signals, sandboxes, few descriptors, readers in the middle of a write."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import Fault, FaultyFiles, TracedSyncs
from tokcap import FileStore, TokenEntry
from tokcap.errors import FrozenError, RetiredError
from tokcap.store import syncs
from tokcap.store.files import Files
from tokcap.store.frame import content_end
from tokcap.store.inbox import BellInbox
from tokcap.store.root import file_system_of, is_faster_with_space
from tokcap.store.syncs import KernelSyncs, Sync

ROLLOUTS = [f"r{number}" for number in range(9)]
PATIENCE_S = 60.0


def entry(rollout_id: str, call: str) -> TokenEntry:
    ids = np.random.default_rng(len(call)).integers(0, 2**17, 40, dtype=np.int32)
    return TokenEntry(rollout_id, call, ids, [7, 8], [-0.5, -1.0])


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    if not is_faster_with_space(file_system_of(str(tmp_path))):
        pytest.skip("the temporary directory is on a file system where no space is written")
    return tmp_path / "s"


def put_together(store: FileStore, call: str) -> None:
    async def together() -> None:
        await asyncio.wait_for(asyncio.gather(*(store.put(entry(name, call)) for name in ROLLOUTS)), PATIENCE_S)

    asyncio.run(together())


# ---- signals


@pytest.fixture
def handled() -> Iterator[int]:
    """A signal with a handler, which makes waiting calls of whichever thread gets it return early."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def sleeps(thread: threading.Thread) -> bool:
    """Raises `FileNotFoundError` if it has ended."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def interrupt(thread: threading.Thread, number: int) -> None:
    assert thread.ident is not None
    for _ in range(20):
        while not sleeps(thread):
            pass
        signal.pthread_kill(thread.ident, number)


def test_a_signal_that_hits_the_reader_of_an_inbox_does_not_end_it(handled: int) -> None:
    inbox: BellInbox[int] = BellInbox()
    taken: list[int] = []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take()), daemon=True)
    reader.start()
    interrupt(reader, handled)
    inbox.put(1)
    reader.join(PATIENCE_S)
    assert taken == [1]
    inbox.close()


def test_a_signal_that_hits_the_committer_costs_nothing(on_disk: Path, handled: int) -> None:
    others = set(threading.enumerate())
    store = FileStore(on_disk, sweep_every_s=0)  # closed only if all went well: closing waits for what hangs
    put_together(store, "a")
    for thread in set(threading.enumerate()) - others:
        interrupt(thread, handled)
    put_together(store, "b")
    for snapshot in store.freeze_many_now(ROLLOUTS):
        with snapshot:
            assert {one.model_call_id for one in snapshot.entries} == {"a", "b"}
    store.close_now()


def test_a_signal_that_hits_a_thread_that_freezes_costs_nothing(on_disk: Path, handled: int) -> None:
    """Its syncs are still waited for, and none of them is taken for one of the next freeze."""

    class Late(TracedSyncs):
        """Whoever waits for it is interrupted before the results are there."""

        def start(self, wanted: Sequence[Sync]) -> int:
            started = super().start(wanted)
            os.eventfd_read(self._eventfd)
            threading.Thread(target=self._ring, args=(threading.current_thread(),)).start()
            return started

        def _ring(self, waiting: threading.Thread) -> None:
            interrupt(waiting, handled)
            os.eventfd_write(self._eventfd, 1)

    class LateFiles(FaultyFiles):
        def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
            if threading.current_thread().name != "tokcap-freeze":
                return None
            return Late(self, most, eventfd)

    with FileStore(on_disk, files=LateFiles(in_kernel=True), sweep_every_s=0) as store:
        for name in ROLLOUTS:
            store.put_now(entry(name, "a"))
        for snapshot in store.freeze_many_now(ROLLOUTS):
            with snapshot:
                assert [one.model_call_id for one in snapshot.entries] == ["a"]


# ---- sandboxes


@pytest.mark.parametrize("refused", ["submit", "getevents"])
def test_a_sandbox_that_refuses_one_of_the_calls_has_none(
    refused: str, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be submitted and not be collected would be waited for for ever."""
    numbers = syncs._NUMBERS.get(os.uname().machine)
    if numbers is None:
        pytest.skip("the calls of this processor are not known")
    number = numbers[{"submit": 3, "getevents": 2}[refused]]

    def sandboxed(call: Callable[..., int]) -> Callable[..., int]:
        def checked(which: ctypes.c_long, *arguments: object) -> int:
            return -1 if which.value == number else call(which, *arguments)

        return checked

    for name in "_call", "_call_at_once":
        monkeypatch.setattr(syncs, name, sandboxed(getattr(syncs, name)))
    bell = os.eventfd(0)
    assert KernelSyncs.open(4, bell) is None
    os.close(bell)
    with FileStore(on_disk, sweep_every_s=0) as store:
        put_together(store, "a")
        for snapshot in store.freeze_many_now(ROLLOUTS):
            with snapshot:
                assert [one.model_call_id for one in snapshot.entries] == ["a"]


# ---- few descriptors


@pytest.mark.parametrize("limit", [64, 128])
def test_many_first_puts_at_once_are_stored_with_few_descriptors(limit: int, on_disk: Path) -> None:
    source = f"""
import asyncio, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
from tests.test_store_attacks import entry
from tokcap import FileStore

async def main():
    store = FileStore({str(on_disk)!r}, sweep_every_s=0)
    for call in "ab":
        await asyncio.gather(*(store.put(entry(f"r{{n}}", call)) for n in range(200)))
    for snapshot in await store.freeze_many([f"r{{n}}" for n in range(200)]):
        assert [one.model_call_id for one in snapshot.entries] == ["a", "b"]
    await store.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE_S * 2)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_snapshot_that_appeared_is_one_that_could_be_synced(store_dir: Path) -> None:
    """A directory that can't be opened for want of descriptors is found out before the rename, not behind it."""
    files = FaultyFiles()
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        number = hits = 0
        while True:
            number += 1
            store.put_now(entry("r", "a"))
            files.trace.clear()
            with files.failing(Fault(number, errno.EMFILE, kinds=["open_directory"])) as plan:
                try:
                    store.freeze_now("r").close()
                except OSError:
                    hits += 1
                    assert not [call for call in files.trace if call.kind == "rename"]
            if plan.hit is None:
                break
            store.reset_now("r")
        assert hits


# ---- readers in the middle of a write


class Torn(Files):
    """Of the next long read the beginning is as it was before `meanwhile`, and the rest as it is after it."""

    meanwhile: Callable[[], None] | None = None
    times = 0

    def read(self, fd: int, length: int, offset: int) -> bytes:
        meanwhile = self.meanwhile
        if meanwhile is None or length < 4096 or not self.times:
            return super().read(fd, length, offset)
        self.times -= 1
        data = super().read(fd, length, offset)
        first = content_end(data, len(data)) + 40
        meanwhile()
        return data[:first] + super().read(fd, length - first, offset + first)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_reader_that_meets_two_batches_sees_no_damage(on_disk: Path, times: int) -> None:
    calls: list[str] = []
    files = Torn()
    with FileStore(on_disk, sweep_every_s=0) as store:

        def put() -> None:
            calls.append("c" * (len(calls) + 1))
            store.put_now(entry("r", calls[-1]))

        def put_two() -> None:
            put()
            put()

        put()
        files.meanwhile = put_two
        with FileStore(on_disk, read_only=True, files=files) as other:
            files.times = times
            with other.read_now("r") as snapshot:
                assert not snapshot.damage and not snapshot.incomplete
                assert {one.model_call_id for one in snapshot.entries} == set(calls)
            assert not files.times and len(calls) == 1 + 2 * times
            files.times = times
            assert not other.stat_now("r").damage


# ---- names


def test_a_shard_that_was_removed_is_made_durable_again(store_dir: Path) -> None:
    """A first put that fails removes the directories that it made, the shard of an earlier rollout as well."""
    files = FaultyFiles()
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        store.put_now(entry("r", "a"))
        store.reset_now("r")
        with (
            files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])) as plan,
            pytest.raises(OSError, match="r: can't sync"),
        ):
            store.put_now(entry("r", "b"))
        assert plan.hit is not None and not list((store_dir / "rollouts").iterdir())
        files.trace.clear()
        store.put_now(entry("r", "c"))
        steps = [(call.kind, call.path) for call in files.trace]
        (made,) = (i for i, (kind, path) in enumerate(steps) if kind == "mkdir" and len(os.path.basename(path)) == 2)
        acknowledged = [kind for kind, _ in steps].index("acknowledge")
        assert ("fsync", f"{store_dir}/rollouts") in steps[made:acknowledged]


class TwoLinks(Files):
    """A file system that says of every directory that it has two links, as some in user space do."""

    def _of(self, there: os.stat_result) -> os.stat_result:
        if not stat.S_ISDIR(there.st_mode):
            return there
        return os.stat_result((*there[:3], 2, *there[4:]), {"st_ctime_ns": there.st_ctime_ns})

    def stat(self, path: str) -> os.stat_result:
        return self._of(super().stat(path))

    def fstat(self, fd: int) -> os.stat_result:
        return self._of(super().fstat(fd))


def test_what_a_directory_holds_is_seen_whatever_its_links(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        for name in "open", "frozen", "retired":
            store.put_now(entry(name, "a"))
        store.freeze_now("frozen").close()
        with store.freeze_now("retired") as snapshot:
            store.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=1)
    with FileStore(store_dir, files=TwoLinks(), sweep_every_s=0) as store:
        store.put_now(entry("open", "b"))
        with pytest.raises(FrozenError):
            store.put_now(entry("frozen", "b"))
        with pytest.raises(RetiredError):
            store.put_now(entry("retired", "b"))
        store.put_now(entry("new", "b"))
        with store.freeze_now("open") as snapshot:
            assert [one.model_call_id for one in snapshot.entries] == ["a", "b"]


def test_a_sweep_goes_on_without_a_thread_of_its_own(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        for name in ROLLOUTS:
            store.put_now(entry(name, "a"))
            with store.freeze_now(name) as snapshot:
                assert store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=1)
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == "tokcap-sweep":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert store.sweep_now(0) == len(ROLLOUTS)
        assert not list(store.rollouts())
