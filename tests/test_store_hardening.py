"""What happens to a store around its work: signal handlers, ends of all kinds, dropped objects, clocks that jump."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import interrupts
from tests.children import Channel, Nursery
from tests.children import nursery as _nursery
from tests.faulty_files import booted_as
from tests.interrupts import STUCK, entry
from tokcap import FileStore
from tokcap.config import process
from tokcap.errors import ClosedError, DurabilityError, RetiredError
from tokcap.store import root
from tokcap.store.files import Files
from tokcap.store.inbox import BellInbox
from tokcap.store.root import file_system_of, kernel_syncs_for
from tokcap.store.syncs import KernelSyncs

nursery = pytest.fixture(scope="module")(_nursery)

PATIENCE_S = 60.0
PLACE = Path(__file__).parent.parent


# ---- signal handlers, at every point at which one may come


def interrupted(base: Path, scenario: str, handler: str, mutant: str = "", patience_s: float = PATIENCE_S) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupts", scenario, handler, str(base), mutant, str(patience_s)],
        cwd=PLACE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 4,
    )
    assert done.returncode in (0, STUCK), done.stdout + done.stderr
    if not mutant:
        assert done.returncode == 0, done.stdout + done.stderr
    return done.returncode


@pytest.mark.parametrize("scenario", interrupts.SCENARIOS)
def test_a_handler_that_raises_costs_its_own_call_and_nobody_else(tmp_path: Path, scenario: str) -> None:
    interrupted(tmp_path, scenario, "raises")


@pytest.mark.parametrize("scenario", ["put", "first_call", "in_a_loop"])
def test_a_handler_may_use_the_store_itself(tmp_path: Path, scenario: str) -> None:
    interrupted(tmp_path, scenario, "puts")


def test_a_handler_may_close_the_store(tmp_path: Path) -> None:
    interrupted(tmp_path, "put", "closes")


@pytest.mark.parametrize("handler", ["raises", "closes"])
def test_a_close_that_is_interrupted_is_ended_by_the_next(tmp_path: Path, handler: str) -> None:
    interrupted(tmp_path, "close", handler)


@pytest.mark.torture
@pytest.mark.parametrize("scenario", interrupts.SCENARIOS)
@pytest.mark.parametrize("handler", ["raises", "puts", "closes"])
def test_every_handler_at_every_point_of_everything(tmp_path: Path, scenario: str, handler: str) -> None:
    if (scenario, handler) == ("waiting_for_room", "puts"):
        pytest.skip("it waits for the room that the call below it holds, until its time is up")
    interrupted(tmp_path, scenario, handler)


@pytest.mark.parametrize(
    ("scenario", "handler", "mutant"),
    [
        ("put", "raises", "forget to ring"),
        ("in_a_loop", "raises", "take before it is told"),
        ("put", "raises", "queue in the main thread"),
        ("put", "raises", "leave and stay counted"),
    ],
)
def test_handlers_at_every_point_find_what_is_left_half_done(
    tmp_path: Path, scenario: str, handler: str, mutant: str
) -> None:
    if mutant == "forget to ring" and not kernel_syncs_for(file_system_of(str(tmp_path))):
        pytest.skip("nothing is rung for on the file system of the temporary directory")
    # Where threads meet is chance: what is wrong shows in one of some runs.
    assert any(interrupted(tmp_path, scenario, handler, mutant, 1.0) == STUCK for _ in range(8))


def test_real_signals_that_raise_at_any_time_cost_their_own_calls(tmp_path: Path) -> None:
    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    acknowledged: set[str] = set()
    store = FileStore(tmp_path / "s", sweep_every_s=0)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        for number in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 40 * 2.5e-5)
                store.put_now(entry("r", f"c{number}"))
                acknowledged.add(f"c{number}")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    store.put_now(entry("r", "last"))
    with store.freeze_now("r") as snapshot:
        assert acknowledged <= {one.model_call_id for one in snapshot.entries}
        assert all(one == entry("r", one.model_call_id) for one in snapshot.entries)
    assert store.pending.operations == 0
    store.close_now()


# ---- ends


class Held(Files):
    """Syncs of data wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.waiting = threading.Event(), threading.Event()
        self.go.set()

    def fdatasync(self, fd: int) -> None:
        self.waiting.set()
        assert self.go.wait(PATIENCE_S)
        super().fdatasync(fd)


def in_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_close_is_over_for_everybody_at_the_same_time(store_dir: Path) -> None:
    """Whoever closes second knows that everything is sealed when it returns."""
    files = Held()
    store = FileStore(store_dir, files=files, sweep_every_s=0)
    store.put_now(entry("r", "a"))
    files.go.clear()
    files.waiting.clear()
    ended: list[int] = []

    def close() -> None:
        store.close_now()
        ended.append(len(list((store_dir / "rollouts").glob("*/r/*/*.open"))))

    threads = in_threads(close, close, close)
    assert files.waiting.wait(PATIENCE_S)
    with pytest.raises(ClosedError):
        store.put_now(entry("r", "late"))
    assert not ended
    files.go.set()
    join(threads)
    assert ended == [0, 0, 0]
    store.close_now()
    asyncio.run(store.close())


def test_a_close_lets_what_was_asked_for_before_end(store_dir: Path) -> None:
    files = Held()
    store = FileStore(store_dir, files=files, sweep_every_s=0)
    store.put_now(entry("r", "a"))
    files.go.clear()
    files.waiting.clear()
    frozen: list[int] = []

    def freeze() -> None:
        with store.freeze_now("r") as snapshot:
            frozen.append(len(snapshot.entries))

    threads = in_threads(lambda: store.put_now(entry("r", "b")))
    assert files.waiting.wait(PATIENCE_S)
    threads += in_threads(freeze)
    while not any(queued.pending for queued in store._engine._queued.values()):  # type: ignore[union-attr]
        time.sleep(0.001)
    threads += in_threads(store.close_now)
    while not store.closed:
        time.sleep(0.001)
    files.go.set()
    join(threads)
    assert frozen == [2]


def test_a_block_that_is_left_by_an_exception_is_closed(store_dir: Path) -> None:
    with pytest.raises(KeyboardInterrupt), FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(entry("r", "a"))
        raise KeyboardInterrupt
    assert store.closed and not list((store_dir / "rollouts").glob("*/r/*/*.open"))


# ---- objects that are dropped


def held() -> tuple[int, int, int]:
    """Threads, descriptors and kernel contexts of this process."""
    with open("/proc/self/maps") as file:
        contexts = file.read().count("/[aio]")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), contexts


def use_and_drop(path: Path, how: str) -> None:
    store = FileStore(
        path, sweep_every_s=3600 if how == "sweeping" else 0, sync_threads=3 if how == "threads" else None
    )
    if how == "unused":
        return

    async def puts(call: str) -> None:
        await asyncio.gather(*(store.put(entry(f"r{number}", call)) for number in range(8)))

    asyncio.run(puts("a"))
    store.begin_call_now("r0", "begun")
    store.freeze_now("r1").close()
    for snapshot in store.freeze_many_now(["r2", "r3", "r4"]):
        snapshot.close()
    join(in_threads(lambda: store.put_now(entry("r5", "b")), lambda: store.put_now(entry("r6", "b"))))


def drop_and_count(_: Channel, path: str, how: str) -> None:
    directory = Path(path) / "s"
    use_and_drop(directory, how)  # whatever is made once in a process
    gc.collect()
    wait_until(lambda: not threads_of_stores())
    before = held()
    for _turn in range(3):
        use_and_drop(directory, how)
    gc.collect()
    wait_until(lambda: held() <= before and not threads_of_stores())
    assert not list((directory / "rollouts").glob("*/r[0567]/*/*.open"))
    assert not list((directory / "writers").iterdir())


@pytest.mark.parametrize("how", ["kernel", "threads", "sweeping", "unused"])
def test_a_store_that_is_dropped_gives_everything_back(nursery: Nursery, tmp_path: Path, how: str) -> None:
    nursery.start(drop_and_count, str(tmp_path), how).end()  # alone in a process


def threads_of_stores() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tokcap-")]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, (held(), threads_of_stores())
        time.sleep(0.005)


def test_a_store_is_not_dropped_while_something_is_under_way(store_dir: Path) -> None:
    files = Held()

    async def main() -> None:
        store = FileStore(store_dir, files=files, sweep_every_s=0, sync_threads=2)
        await store.put(entry("r", "a"))
        files.go.clear()
        task = asyncio.create_task(store.put(entry("r", "b")))
        await asyncio.sleep(0)
        del store
        gc.collect()
        files.go.set()
        await task

    asyncio.run(main())
    with FileStore(store_dir, read_only=True) as store, store.read_now("r") as snapshot:
        assert {one.model_call_id for one in snapshot.entries} == {"a", "b"}


def fork_and_drop(channel: Channel, path: str) -> None:
    """In a child: a store in use; its own child drops the store, which is the parent's, too."""
    stores = [FileStore(path, sweep_every_s=0)]
    stores[0].put_now(entry("r", "a"))
    child = os.fork()
    if child == 0:
        stores.clear()
        gc.collect()
        time.sleep(0.2)
        os._exit(len(threads_of_stores()))
    _, status = os.waitpid(child, 0)
    channel.send(os.waitstatus_to_exitcode(status))
    stores[0].put_now(entry("r", "b"))
    with stores[0].freeze_now("r") as snapshot:
        channel.send(sorted(one.model_call_id for one in snapshot.entries))


def test_a_child_that_drops_a_store_leaves_its_parent_alone(store_dir: Path, nursery: Nursery) -> None:
    child = nursery.start(fork_and_drop, str(store_dir))
    assert child.receive() == 0
    assert child.receive() == ["a", "b"]
    child.end()


def test_a_dropped_store_keeps_no_interpreter_alive(store_dir: Path) -> None:
    source = f"""
from tests.interrupts import entry
from tokcap import FileStore
store = FileStore({str(store_dir)!r})
store.put_now(entry("r", "a"))
del store
other = FileStore({str(store_dir)!r})
other.put_now(entry("s", "a"))
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=PLACE, capture_output=True, text=True, timeout=PATIENCE_S)
    said = [line for line in done.stderr.splitlines() if " is on " not in line]  # what is warned of the file system
    assert (done.returncode, said) == (0, [])


def test_kernel_contexts_go_with_their_object() -> None:
    bell = os.eventfd(0)
    syncs = KernelSyncs.open(4, bell)
    if syncs is None:
        os.close(bell)
        pytest.skip("this kernel does no syncs in the background")
    before = held()[2]
    del syncs
    gc.collect()
    assert held()[2] == before - 1
    os.close(bell)


def test_the_bell_of_an_inbox_is_closed_with_its_last_reference() -> None:
    """And not before: somebody may just be ringing it, and the number become another file's."""
    inbox: BellInbox[int] = BellInbox()
    bell = inbox.bell
    put = inbox.put
    del inbox
    put(1)
    assert os.readlink(f"/proc/self/fd/{bell}").startswith("anon_inode:[eventfd]")
    del put
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell)


def test_a_forked_child_has_endpoints_and_a_lock_of_its_own(nursery: Nursery) -> None:
    child = nursery.start(fork_with_endpoints)
    assert child.receive() == 0
    child.end()


def fork_with_endpoints(channel: Channel) -> None:
    here = process._here()
    held_in_a_thread = threading.Event()

    def hold() -> None:
        with here.guard:
            held_in_a_thread.set()
            time.sleep(PATIENCE_S)

    in_threads(hold)
    held_in_a_thread.wait()
    child = os.fork()
    if child == 0:
        own = process._here()
        os._exit(0 if own is not here and own.guard.acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)
    channel.send(os.waitstatus_to_exitcode(status))


# ---- clocks and boots


def test_a_clock_that_jumps_ahead_costs_no_rollout_that_is_open_or_frozen(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tombstones go early, which keep stragglers out and nothing else."""
    with FileStore(store_dir, sweep_every_s=0) as store:
        for name in "open", "frozen", "retired":
            store.put_now(entry(name, "a"))
        store.freeze_now("frozen").close()
        with store.freeze_now("retired") as snapshot:
            store.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=1)
        assert store.sweep_now(86400) == 0
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + 10 * 365 * 86400)
            assert store.sweep_now(86400) == 1
            store.put_now(entry("open", "b"))
        store.put_now(entry("open", "c"))
        with store.freeze_now("open") as snapshot:
            assert [one.model_call_id for one in snapshot.entries] == ["a", "b", "c"]
        with store.freeze_now("frozen") as snapshot:
            assert len(snapshot.entries) == 1


def test_a_clock_that_is_set_back_sweeps_nothing_early_and_nothing_never(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ahead = time.time, 10 * 365 * 86400.0
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(entry("r", "a"))
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + ahead)
            with store.freeze_now("r") as snapshot:
                assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=1)
        # Of when it was retired the name says nothing any more; from now on its age is known again.
        assert store.sweep_now(86400) == 0
        assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=1)
        with pytest.raises(RetiredError):
            store.put_now(entry("r", "b"))
        store.mark_incomplete_now("r", "late")
        assert store.stat_now("r").state == "retired"
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() + 86300)
            assert store.sweep_now(86400) == 0
            patch.setattr(time, "time", lambda: real() + 86500)
            assert store.sweep_now(86400) == 1
        assert not list(store.rollouts())


def test_a_sweep_is_due_again_when_the_clock_was_set_back(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        store._settings["sweep_every_s"] = 3600.0
        store._sweep_if_due()
        swept = store._layout.sweep_lock
        os.utime(swept, (time.time() + 86400, time.time() + 86400))
        store._sweep_if_due()
        assert os.stat(swept).st_mtime <= time.time()


def test_times_of_two_boots_are_never_taken_for_times_of_one(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_BOOTTIME begins anew: what came later has the smaller time."""
    clock = time.clock_gettime_ns
    with booted_as("one"), FileStore(store_dir, sweep_every_s=0) as store:
        monkeypatch.setattr(time, "clock_gettime_ns", lambda which: clock(which) + 10**15)
        store.begin_call_now("r", "across")
        store.begin_call_now("r", "before")
        store.settle_call_now("r", "before", "lost")
    with booted_as("two"), FileStore(store_dir, sweep_every_s=0) as store:
        monkeypatch.setattr(time, "clock_gettime_ns", lambda which: 5)
        store.settle_call_now("r", "across", "aborted")
        store.begin_call_now("r", "after")
        with store.freeze_now("r") as snapshot:
            calls = {call.model_call_id: call for call in snapshot.calls}
    assert (calls["across"].boot_id, calls["across"].begun_at) == ("two", None)
    assert (calls["before"].boot_id, calls["after"].boot_id) == ("one", "two")
    assert calls["before"].begun_at > calls["after"].begun_at  # type: ignore[operator]


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_where_no_boot_is_known_no_store_is_opened(
    store_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Processes that take the same boot for two, or two for one, would believe what was never acknowledged."""
    path = tmp_path / "boot_id"
    if what == "empty":
        path.write_text("\n")
    monkeypatch.setattr(root, "_BOOT_ID", str(path))
    for read_only in False, True:
        with pytest.raises(DurabilityError, match=r"which boot of the machine this is; mount /proc") as caught:
            FileStore(store_dir, read_only=read_only)
        assert caught.value.filename == str(path)
    assert not list(store_dir.iterdir())
