"""What a second attack on the store found: first calls on a nearly full disk, forks, ticking clocks, full stacks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.faulty_files import FaultyFiles
from tests.test_admission import MEGABYTE, Filling, entry, in_thread, slow, stored, wait_until
from tokcap import FileStore, TokenEntry
from tokcap.content import MAX_NESTING, decode_content, encode_content
from tokcap.errors import BusyError, NoSpaceError
from tokcap.store import admission
from tokcap.store.admission import Admission, Limits
from tokcap.store.files import FreeSpace
from tokcap.store.manifest import decode_manifest
from tokcap.store.operations import Begin, RecordOperation

_T = TypeVar("_T")
PATIENCE_S = 60.0


# ---- the floor

BLOCK = 4096


class Dwindling(Filling):
    """A nearly full disk, on which directories and files take blocks."""

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self.free -= BLOCK

    def create(self, path: str) -> int:
        self.free -= BLOCK
        return super().create(path)


def test_first_calls_do_not_use_up_what_is_left_between_two_looks(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An intent has no bytes to speak of, but its rollout needs directories and a file."""
    monkeypatch.setattr(admission, "_LOOKS_EVERY_S", 1e9)
    floor = 64 * MEGABYTE
    files = Dwindling(free=floor + MEGABYTE)
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        with pytest.raises(NoSpaceError):
            for number in range(200):
                store.begin_call_now(f"r{number}", "c")
        assert floor - 5 * BLOCK <= files.free < floor
        assert files.looks < 100


def test_a_look_counts_what_is_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the disk takes of what is free, too: the next call looks again."""
    monkeypatch.setattr(admission, "_LOOKS_EVERY_S", 1e9)
    frees = [3 * MEGABYTE, 0]
    gate = Admission(
        "s", Limits(1 << 30, 1 << 16, MEGABYTE, 0, 1.0), lambda: FreeSpace(frees.pop(0), 1 << 40, 9_000, 9_000)
    )
    waiting = RecordOperation("r0")
    waiting.nbytes = 2 * MEGABYTE
    gate.count(waiting)
    gate.begin(Begin("r1", "c", 1, "", 0, "", b""))
    with pytest.raises(NoSpaceError):
        gate.begin(Begin("r2", "c", 1, "", 0, "", b""))


def test_nobody_overtakes_those_who_wait_when_all_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Admission("s", Limits(1 << 30, 1, 0, 0, PATIENCE_S), lambda: FreeSpace(1 << 40, 1 << 40, 9_000, 9_000))
    first, second, third = (RecordOperation(name) for name in ("r1", "r2", "r3"))
    gate.put(first)
    waiting = threading.Thread(target=gate.put, args=(second,))
    waiting.start()
    wait_until(lambda: gate.pending.waiting == 1)
    overtaking = threading.Thread(target=gate.put, args=(third,))
    advance = gate.advance

    def late() -> None:
        """The one who makes room is stopped before he gives it away."""
        monkeypatch.setattr(gate, "advance", advance)
        overtaking.start()
        wait_until(lambda: third.counted or second.counted)
        advance()

    monkeypatch.setattr(gate, "advance", late)
    gate.release([first])
    waiting.join(PATIENCE_S)
    assert (second.counted, third.counted) == (True, False)
    gate.release([second])
    overtaking.join(PATIENCE_S)
    assert third.counted


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stands still"])
def test_a_loop_that_never_comes_for_the_room_that_it_was_given_keeps_nobody_out(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Those of its tasks that still waited kept it alive, and the room was never free again."""
    patience_s = PATIENCE_S if closed else 0.2
    monkeypatch.setattr(admission, "_LEAST_PATIENCE_S", patience_s)
    with slow(store_dir, max_pending_operations=1, lock_timeout_s=patience_s) as (store, files):
        first, errors = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(store.put(entry(f"r{number}", "a"))) for number in (1, 2, 3)]
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert store.pending.waiting == 3
        files.go()
        first.join(PATIENCE_S)
        assert not errors
        if closed:
            loop.close()
        second, _ = in_thread(partial(put_again_and_again, store))
        second.join(PATIENCE_S)
        assert "b" in stored(store, "r4")
        wait_until(lambda: (store.pending.operations, store.pending.bytes) == (0, 0))
        store.begin_call_now("r5", "b")
        if not closed:
            found = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            assert [type(error) for error in found] == [BusyError] * 3
            loop.close()
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]


def put_again_and_again(store: FileStore) -> None:
    while True:
        with contextlib.suppress(BusyError):
            return store.put_now(entry("r4", "b"))


def test_a_file_system_without_a_size_is_never_nearly_full(store_dir: Path) -> None:
    """A tmpfs that was mounted with `size=0` says that it has no bytes at all, none of them free."""

    class Endless(Filling):
        def free_space(self, path: str) -> FreeSpace:
            return FreeSpace(0, 0, 10_000, 100_000)

    with FileStore(store_dir, files=Endless(), sweep_every_s=0, min_free_bytes=MEGABYTE) as store:
        store.begin_call_now("r", "c")


# ---- forks


def test_what_waited_in_the_parent_may_be_collected_in_a_child(store_dir: Path) -> None:
    """Also if another thread of the parent was counting at that moment."""
    with slow(store_dir, max_pending_operations=1) as (store, files):
        writing = threading.Thread(target=lambda: store.put_now(entry("r0", "a")))
        writing.start()
        wait_until(lambda: store.pending.operations == 1)
        loop = asyncio.new_event_loop()
        task = loop.create_task(store.put(entry("r1", "a")))
        loop.call_soon(loop.stop)
        loop.run_forever()
        wait_until(lambda: store.pending.waiting == 1)
        engine = store._engine
        assert engine is not None
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with engine.admission._guard:
                taken.set()
                done.wait(PATIENCE_S)

        holding = threading.Thread(target=hold)
        holding.start()
        taken.wait(PATIENCE_S)
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE_S))
            status = 1
            try:
                task.get_coro().close()
                status = 0
            finally:
                os._exit(status)
        done.set()
        holding.join(PATIENCE_S)
        _, status = os.waitpid(child, 0)
        files.go()
        loop.run_until_complete(task)
        loop.close()
        writing.join(PATIENCE_S)
    assert status == 0


# ---- the end

AT_THE_END = """
import sys
from tokcap import FileStore, TokenEntry
from tokcap.errors import ClosedError

class Server:
    def __init__(self, directory):
        self.store = FileStore(directory)
        self.put("a")

    def put(self, call):
        self.store.put_now(TokenEntry("r", call, [1], [2], [-0.5]))

    def __del__(self):
        try:
            {does}
        except ClosedError:
            print("is closed")
        else:
            print("is done")

server = Server(sys.argv[1])
server.itself = server
"""


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("self.store.close_now()", "is done"),
        ("self.put('b')", "is closed"),
        ("self.store.freeze_now('r')", "is closed"),
        ("self.store.begin_call_now('new', 'c')", "is closed"),
    ],
)
def test_a_finalizer_that_uses_the_store_does_not_block_the_end_of_the_interpreter(
    store_dir: Path, does: str, says: str
) -> None:
    """Its threads are stopped for ever by then: whoever waits for them never ends."""
    command = [sys.executable, "-c", AT_THE_END.format(does=does), str(store_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == says
    with FileStore(store_dir, sweep_every_s=0) as store, store.freeze_now("r") as snapshot:
        assert [one.model_call_id for one in snapshot.entries] == ["a"] and not snapshot.incomplete


# ---- clocks


class Ticking(FaultyFiles):
    """A file system whose times move only when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000_000

    def stat(self, path: str) -> os.stat_result:
        there = super().stat(path)
        return os.stat_result(tuple(there)[:10], {"st_ctime_ns": self.now})


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_shard_that_another_process_makes_within_the_same_tick_is_made_durable(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, ticks: int
) -> None:
    """It dies before it has synced the name; the directory of the shards still shows the time that is known."""
    files = Ticking()
    monkeypatch.setattr("time.time_ns", lambda: files.now + 1_000_000 + ticks * 1_000_000_000)
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        store.put_now(entry("r", "a"))
        other = store._layout.shard("other")
        assert other != store._layout.shard("r")
        os.mkdir(other, 0o700)
        files.now += ticks * 20_000_000
        files.trace.clear()
        store.put_now(entry("other", "a"))
        assert ("fsync", f"{store_dir}/rollouts") in [(call.kind, call.path) for call in files.trace]


# ---- full stacks


def nested(levels: int, key: str = "d") -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def far_down(levels: int, function: Callable[[], _T]) -> _T:
    """So many calls down the stack of a thread that is not the main one: such a thread serves its calls itself."""
    results: list[_T] = []

    def down(levels: int) -> _T:
        return down(levels - 1) if levels else function()

    thread = threading.Thread(target=lambda: results.append(down(levels)))
    thread.start()
    thread.join(PATIENCE_S)
    return results[0]


@pytest.mark.parametrize("key", ["d", "\ud800"], ids=["plain", "surrogates"])
def test_content_comes_through_on_a_stack_that_is_nearly_full(key: str) -> None:
    content = nested(MAX_NESTING - 1, key)
    encoded = encode_content(content)
    for levels in range(300, 950, 25):
        assert far_down(levels, lambda: (encode_content(content), decode_content(encoded))) == (encoded, content)


def test_a_freeze_on_a_stack_that_is_nearly_full_costs_nothing(store_dir: Path) -> None:
    """At one depth what a finish note holds could be passed over, but not decoded: it was published as damaged."""
    meta = {"m": nested(MAX_NESTING - 10)}
    levels = range(770, 800)
    with FileStore(store_dir, sweep_every_s=0) as store:
        for number in levels:
            store.finish_now(f"r{number}", meta)
    with FileStore(store_dir, sweep_every_s=0) as store:
        for number in levels:
            with far_down(number, partial(store.freeze_now, f"r{number}")) as snapshot:
                assert (snapshot.incomplete, snapshot.calls, snapshot.meta) == (False, (), meta)


def test_a_snapshot_is_read_on_a_stack_that_is_nearly_full(store_dir: Path) -> None:
    deep = nested(MAX_NESTING - 10)
    one = TokenEntry("r", "c", [1], [2], [-0.5], output_items=[deep], extra=deep)
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(one)
        store.finish_now("r", deep)
        store.freeze_now("r").close()

        def read() -> tuple[TokenEntry, dict[str, Any]]:
            with store.freeze_now("r") as snapshot:
                return snapshot.entries[0], snapshot.meta

        for levels in range(700, 900, 10):
            assert far_down(levels, read) == (one, deep)

        (path,) = (store_dir / "rollouts").glob("*/r/*/v1/manifest")
        data = path.read_bytes()
        name = path.parts[-3]
        for levels in range(700, 950, 10):
            assert far_down(levels, partial(decode_manifest, str(path), data, "r", name, 1)) is not None
