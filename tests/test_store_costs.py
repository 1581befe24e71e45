"""What operations of the file store cost: counted, never timed."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store_worker import UnsyncedFiles
from tokcap import FileStore, TokenEntry
from tokcap.errors import FrozenError, RetiredError, StaleAttemptError
from tokcap.store import serving
from tokcap.store.files import Files

ROLLOUT = "r-1"
WRITES = ("pwritev", "acknowledge")
SYNCS = ("fdatasync", "fsync")
NAMES = ("create", "link", "mkdir", "rename", "rmdir", "unlink")
LOOKS = ("listdir", "open", "open_directory", "read", "map")


class CountingFiles(Files):
    """Counts the calls that change or sync something, and the bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.written = 0
        self.offsets: list[int] = []
        """Where each write began; a rewrite would begin at an earlier place."""
        self._guard = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name in (*WRITES, *SYNCS, *NAMES, *LOOKS):
            with object.__getattribute__(self, "_guard"):
                object.__getattribute__(self, "counts")[name] += 1
        return object.__getattribute__(self, name)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        written = super().pwritev(fd, buffers, offset)
        self.written += written
        self.offsets.append(offset)
        return written

    def during(self) -> dict[str, int]:
        """The counts since the last time, zeros left out."""
        counts = {name: count for name, count in self.counts.items() if count}
        self.counts.clear()
        return counts


class SlowDevice(UnsyncedFiles):
    """Every sync takes 50 ms."""

    def fdatasync(self, fd: int) -> None:
        time.sleep(0.05)


class Gate(UnsyncedFiles):
    """Syncs of data that wait at a gate, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.released.set()
        self.arrived = threading.Event()
        self.syncs = self.writes = 0

    def shut(self) -> None:
        self.released.clear()
        self.arrived.clear()
        self.syncs = self.writes = 0

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self.writes += 1
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        self.arrived.set()
        assert self.released.wait(30)


def entry(call: int | str, prompt: Any = (1, 2, 3), generated: Any = (4, 5), *, rollout: str = ROLLOUT) -> TokenEntry:
    name = call if isinstance(call, str) else f"c-{call}"
    return TokenEntry(rollout, name, prompt, generated, [-1.0] * len(generated))


@pytest.fixture
def files() -> CountingFiles:
    return CountingFiles()


@pytest.fixture
def store(store_dir: Path, files: CountingFiles) -> Iterator[FileStore]:
    with FileStore(store_dir, sweep_every_s=0, files=files) as store:
        yield store


# ---- writes and syncs


def test_a_put_is_one_write_one_sync_and_one_acknowledgement(store: FileStore, files: CountingFiles) -> None:
    store.put_now(entry(0))
    files.during()
    files.offsets.clear()
    for number in range(1, 30):
        store.put_now(entry(number, range(number * 10)))
        assert files.during() == {"pwritev": 1, "fdatasync": 1, "acknowledge": 1}
    assert files.offsets == sorted(set(files.offsets)), "nothing is written twice"


@pytest.mark.parametrize("name", ["begin", "settle", "mark", "deliver", "finish", "put_many"])
def test_every_other_record_is_one_write_and_one_sync_too(store: FileStore, files: CountingFiles, name: str) -> None:
    store.put_now(entry(0))
    acts = {
        "begin": lambda n: store.begin_call_now(ROLLOUT, f"c-{n}", request_digests=[b"x" * 16] * n),
        "settle": lambda n: store.settle_call_now(ROLLOUT, f"c-{n}", "aborted"),
        "mark": lambda n: store.mark_incomplete_now(ROLLOUT, f"c-{n}"),
        "deliver": lambda n: store.note_delivery_now(ROLLOUT, "c-0", ("full", "partly")[n % 2]),
        "finish": lambda n: store.finish_now(ROLLOUT, {"reward": n}),
        "put_many": lambda n: store.put_many_now(
            [TokenEntry(ROLLOUT, f"c-{n}", [1], [2], [-1.0], choice_index=c) for c in range(5)]
        ),
    }
    acts[name](1)  # the first begin also makes the liveness file
    files.during()
    for number in range(2, 10):
        acts[name](number)
        assert files.during() == {"pwritev": 1, "fdatasync": 1, "acknowledge": 1}


def test_the_first_record_of_a_rollout_also_syncs_every_name_that_leads_to_it(
    store: FileStore, files: CountingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_TICK_NS", 0)
    store.put_now(entry(0))
    store.reset_now(ROLLOUT)
    files.during()
    store.put_now(entry(0))
    counts = files.during()
    assert {name: counts[name] for name in ("pwritev", "fdatasync", "acknowledge", "create", "mkdir")} == {
        "pwritev": 1,
        "fdatasync": 1,
        "acknowledge": 1,
        "create": 1,
        "mkdir": 2,
    }
    # The directories of the incarnation, the rollout and the shard.
    assert counts["fsync"] == 3


def test_a_repetition_costs_no_write_and_no_sync(store: FileStore, files: CountingFiles) -> None:
    store.begin_call_now(ROLLOUT, "c-0")
    store.put_now(entry(0))
    store.mark_incomplete_now(ROLLOUT, "c-1")
    files.during()
    store.begin_call_now(ROLLOUT, "c-0")
    store.put_now(entry(0))
    store.mark_incomplete_now(ROLLOUT, "c-1")
    counts = files.during()
    assert not {*WRITES, *SYNCS, *NAMES} & counts.keys()


def test_puts_that_wait_at_the_same_time_share_one_write_and_one_sync(store_dir: Path) -> None:
    gate = Gate()

    async def act(store: FileStore) -> None:
        await store.put(entry("first"))
        gate.shut()
        running = asyncio.ensure_future(store.put(entry("running")))
        while not gate.arrived.is_set():
            await asyncio.sleep(0.001)
        waiting = [asyncio.ensure_future(store.put(entry(number))) for number in range(64)]
        waiting += [asyncio.ensure_future(store.begin_call(ROLLOUT, f"c-new-{number}")) for number in range(16)]
        await asyncio.sleep(0.05)
        assert gate.syncs == 1
        gate.released.set()
        await asyncio.gather(running, *waiting)

    with FileStore(store_dir, sweep_every_s=0, files=gate, sync_threads=4) as store:
        asyncio.run(act(store))
        assert (gate.syncs, gate.writes) == (2, 2)
        with store.freeze_now(ROLLOUT) as snapshot:
            assert len(snapshot.entries) == 66
            assert len(snapshot.calls) == 82


def test_blocking_puts_of_several_threads_share_syncs_too(store_dir: Path) -> None:
    gate = Gate()
    with FileStore(store_dir, sweep_every_s=0, files=gate) as store, ThreadPoolExecutor(20) as threads:
        store.put_now(entry("first"))
        gate.shut()
        running = threads.submit(store.put_now, entry("running"))
        assert gate.arrived.wait(20)
        waiting = [threads.submit(store.put_now, entry(number)) for number in range(16)]
        assert store._engine is not None
        while sum(len(queued.pending) for queued in store._engine._queued.values()) < 16:
            time.sleep(0.001)
        gate.released.set()
        for put in (running, *waiting):
            put.result(20)
        assert (gate.syncs, gate.writes) == (2, 2)


def test_syncs_of_different_rollouts_overlap(store_dir: Path) -> None:
    class Overlapping(UnsyncedFiles):
        now = most = 0
        guard = threading.Lock()

        def fdatasync(self, fd: int) -> None:
            with self.guard:
                Overlapping.now += 1
                Overlapping.most = max(self.most, self.now)
            time.sleep(0.02)
            with self.guard:
                Overlapping.now -= 1

    async def act(store: FileStore) -> None:
        for turn in range(3):
            await asyncio.gather(*(store.put(entry(turn, rollout=f"r-{number}")) for number in range(16)))

    with FileStore(store_dir, sweep_every_s=0, files=Overlapping(), sync_threads=8) as store:
        asyncio.run(act(store))
    assert Overlapping.most >= 4


def test_freeze_writes_a_manifest_and_links_and_copies_nothing(store: FileStore, files: CountingFiles) -> None:
    payload = np.random.default_rng(0).integers(0, 150_000, 200_000)
    store.put_now(entry(0, payload))
    for number in range(1, 20):
        store.put_now(entry(number, np.append(payload, range(number))))
    files.during()
    before = files.written
    store.freeze_now(ROLLOUT).close()
    assert files.written - before < 10_000
    counts = files.during()
    assert (counts["link"], counts["create"], counts["fdatasync"]) == (1, 1, 1)
    assert counts["fsync"] <= 3


def test_freeze_again_and_retire_write_no_payload(store: FileStore, files: CountingFiles) -> None:
    store.put_now(entry(0, range(10_000)))
    with store.freeze_now(ROLLOUT) as snapshot:
        files.during()
        store.freeze_now(ROLLOUT).close()
        counts = files.during()
        assert not {*WRITES, *NAMES, "fdatasync"} & counts.keys()
        # Whoever published it may have died before its name was durable.
        assert counts["fsync"] == 1
    store.retire_now(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=1)
    counts = files.during()
    assert not set(WRITES) & counts.keys()
    assert counts["rename"] == 1
    assert sum(counts[name] for name in SYNCS if name in counts) == 1


# ---- nothing grows with the history


def test_looks_writes_and_bytes_of_a_put_do_not_grow_with_the_number_of_earlier_calls(
    store_dir: Path, files: CountingFiles
) -> None:
    class Unsynced(CountingFiles):
        def fdatasync(self, fd: int) -> None:
            """Nothing."""

    files = Unsynced()
    with FileStore(store_dir, sweep_every_s=0, files=files) as store:
        costs = []
        context = list(range(100))
        for number in range(1000):
            files.during()
            before = files.written
            store.put_now(entry(number, context, [number]))
            context += [number, 7, 8]
            costs.append((files.during(), files.written - before))
        assert all(counts == costs[1][0] for counts, _ in costs[1:])
        assert max(size for _, size in costs[1:]) <= costs[1][1] + 32


def test_objects_made_per_put_do_not_grow_with_the_number_of_earlier_calls(store_dir: Path) -> None:
    """Counted by the interpreter itself: every memory block that stays after a put, the cache included."""

    def blocks_of(store: FileStore, numbers: range, context: list[int]) -> int:
        puts = [entry(number, context[: 100 + 3 * number], [number]) for number in numbers]
        gc.collect()
        before = sys.getallocatedblocks()
        for put in puts:
            store.put_now(put)
        gc.collect()
        return sys.getallocatedblocks() - before

    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as store:
        context = list(range(100 + 3 * 2000))
        blocks_of(store, range(200), context)
        early = blocks_of(store, range(200, 400), context)
        blocks_of(store, range(400, 1800), context)
        late = blocks_of(store, range(1800, 2000), context)
        assert late <= 1.5 * early + 1000


def test_another_objects_puts_are_read_once_not_again_and_again(store_dir: Path, files: CountingFiles) -> None:
    with (
        FileStore(store_dir, sweep_every_s=0, files=files) as store,
        FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as other,
    ):
        context = list(range(1000))
        looked = []
        for number in range(60):
            other.put_now(entry(f"other-{number}", context, [1]))
            files.during()
            store.put_now(entry(number, [*context, 1], [2]))
            looked.append(files.during())
            context += [1, 2, 3]
        assert looked[-1] == looked[2]
        assert "listdir" not in looked[-1]


def test_a_rollout_takes_one_file_however_many_calls_it_has(store: FileStore, store_dir: Path) -> None:
    for number in range(300):
        store.put_now(entry(number))
    assert store.stat_now(ROLLOUT).files == 1
    (rollout,) = store_dir.glob("rollouts/*/*")
    assert len(list(rollout.iterdir())) == 1


# ---- the event loop


class Heartbeat:
    """Ticks every 2 ms; the longest silence tells how long the loop was blocked."""

    def __init__(self) -> None:
        self.ticks = 0
        self.longest = 0.0

    async def beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            self.ticks += 1
            last = now


def test_the_event_loop_ticks_while_the_device_is_slow(store_dir: Path) -> None:
    heart = Heartbeat()

    async def act(store: FileStore) -> None:
        beating = asyncio.ensure_future(heart.beat())
        await store.begin_call(ROLLOUT, "c-0")
        for turn in range(3):
            await asyncio.gather(*(store.put(entry(turn, rollout=f"r-{number}")) for number in range(12)))
        await store.put_many([entry(f"many-{n}", rollout=f"r-{n}") for n in range(12)])
        await store.settle_call(ROLLOUT, "c-0", "aborted")
        for snapshot in await store.freeze_many([f"r-{number}" for number in range(12)]):
            await store.mark_incomplete(snapshot.rollout_id, "late")
            snapshot.close()
        await store.read("r-1")
        await store.stat("r-1")
        await store.reset(*(f"r-{number}" for number in range(12)))
        beating.cancel()

    with FileStore(store_dir, sweep_every_s=0, files=SlowDevice(), sync_threads=4) as store:
        begun = time.perf_counter()
        asyncio.run(act(store))
        lasted = time.perf_counter() - begun
    # At least 12 times two syncs of 50 ms one after another; a loop that waited would have ticked once per wait.
    assert lasted > 1.0
    assert heart.ticks > lasted / 0.02


def test_a_reset_of_many_rollouts_does_not_block_the_loop(store_dir: Path) -> None:
    ids = [f"r-{number}" for number in range(1500)]
    heart = Heartbeat()

    async def act(store: FileStore) -> None:
        await asyncio.gather(*(store.put(entry(0, rollout=rollout)) for rollout in ids))
        beating = asyncio.ensure_future(heart.beat())
        await asyncio.sleep(0.01)
        resetting = asyncio.ensure_future(store.reset(*ids))
        before = heart.ticks
        await resetting
        assert heart.ticks - before > 5
        beating.cancel()
        assert list(store.rollouts()) == []

    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as store:
        asyncio.run(act(store))


def test_a_cancelled_put_is_whole_and_does_not_disturb_its_batch(store_dir: Path) -> None:
    gate = Gate()

    async def act(store: FileStore) -> None:
        await store.put(entry("first"))
        gate.shut()
        running = asyncio.ensure_future(store.put(entry("running")))
        while not gate.arrived.is_set():
            await asyncio.sleep(0.001)
        waiting = [asyncio.ensure_future(store.put(entry(number))) for number in range(10)]
        await asyncio.sleep(0.01)
        for task in (running, *waiting[::2]):
            task.cancel()
        gate.released.set()
        await asyncio.gather(*waiting[1::2])

    with FileStore(store_dir, sweep_every_s=0, files=gate) as store:
        asyncio.run(act(store))
        with store.freeze_now(ROLLOUT) as snapshot:
            names = {stored.model_call_id for stored in snapshot.entries}
        assert names >= {"first", *(f"c-{number}" for number in range(1, 10, 2))}
        assert not snapshot.incomplete


# ---- bounds


def cached_bytes(store: FileStore) -> int:
    assert store._engine is not None
    return store._engine._cached_bytes


def test_the_cache_stays_within_its_bytes_and_what_was_evicted_goes_on_exactly(store_dir: Path) -> None:
    bound = 2 << 20
    put: dict[str, list[TokenEntry]] = {f"r-{number}": [] for number in range(60)}
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles(), cache_bytes=bound) as store:
        largest = 0
        for turn in range(4):
            for number, (rollout, entries) in enumerate(put.items()):
                context = np.arange(number, number + 30_000 + 10 * turn)
                entries.append(entry(turn, context, rollout=rollout))
                store.put_now(entries[-1])
                largest = max(largest, cached_bytes(store))
        # Some rollouts more than fit: at most as much as one put adds before the next one evicts.
        assert largest <= bound + 3 * 200_000
        assert len(store._engine._queued) < 30  # type: ignore[union-attr]
        for rollout, entries in put.items():
            with store.freeze_now(rollout) as snapshot:
                assert list(snapshot.entries) == entries


def test_the_cache_stays_within_its_bytes_if_every_rollout_is_asked_for_more(store_dir: Path) -> None:
    bound, largest = 2 << 20, 0

    async def act(store: FileStore) -> list[TokenEntry]:
        nonlocal largest
        puts = [
            entry(f"{call}", np.arange(number, number + 30_000) + 40_000 * call, rollout=f"r-{number}")
            for call in range(12)
            for number in range(20)
        ]
        numbers = iter(range(len(puts)))

        async def some() -> None:
            nonlocal largest
            for number in numbers:
                await store.put(puts[number])
                largest = max(largest, cached_bytes(store))

        await asyncio.gather(*(some() for _ in range(80)))
        return puts

    with FileStore(store_dir, sweep_every_s=0, files=SlowDevice(), cache_bytes=bound, sync_threads=8) as store:
        puts = asyncio.run(act(store))
        # What is at work at the moment is not let go of: eight are written, and as many wait for their next turn.
        assert largest <= bound + 16 * 6 * 120_000
        for number in range(20):
            with store.freeze_now(f"r-{number}") as snapshot:
                expected = sorted((p for p in puts if p.rollout_id == f"r-{number}"), key=lambda p: p.model_call_id)
                assert sorted(snapshot.entries, key=lambda stored: stored.model_call_id) == expected


def test_what_is_cached_of_a_rollout_is_dropped_at_its_freeze(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as store:
        for number in range(20):
            store.put_now(entry(0, range(20_000), rollout=f"r-{number}"))
        assert cached_bytes(store) > 20 * 80_000
        logs = [weakref.ref(queued.rollout.log) for queued in store._engine._queued.values()]  # type: ignore[union-attr]
        for number in range(20):
            store.freeze_now(f"r-{number}").close()
        assert cached_bytes(store) == 0
        assert not store._engine._queued  # type: ignore[union-attr]
        gc.collect()
        assert [log() for log in logs] == [None] * 20


def test_descriptors_stay_bounded_with_thousands_of_open_rollouts(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokcap.store.base._descriptor_budget", lambda: 64)
    descriptors = Path("/proc/self/fd")
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as store:
        before = len(list(descriptors.iterdir()))
        for number in range(2000):
            store.put_now(entry(0, rollout=f"r-{number}"))
        assert len(list(descriptors.iterdir())) - before <= 64 + 16
        for number in range(0, 2000, 100):
            store.put_now(entry(1, rollout=f"r-{number}"))
        assert len(list(descriptors.iterdir())) - before <= 64 + 16


def test_a_snapshot_gives_its_descriptors_back(store: FileStore) -> None:
    for number in range(10):
        store.put_now(entry(0, np.arange(100_000), rollout=f"r-{number}"))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(10):
        with store.freeze_now(f"r-{number}") as snapshot:
            assert len(snapshot.entries[0].prompt_token_ids) == 100_000
        del snapshot
    gc.collect()
    assert len(list(descriptors.iterdir())) <= before


def deleted_and_open(directory: Path) -> list[str]:
    """Files of a store that are deleted, and open: their space is not free."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.startswith(str(directory)) and link.endswith("(deleted)")]


def test_the_space_of_what_another_object_retired_is_free(store_dir: Path) -> None:
    with (
        FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as writer,
        FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as consumer,
    ):
        for number in range(40):
            rollout = f"r-{number}"
            writer.put_now(entry(0, rollout=rollout))
            writer.put_now(entry("open", rollout=f"open-{number % 5}"))
            with consumer.freeze_now(rollout) as snapshot:
                consumer.retire_now(rollout, snapshot_id=snapshot.snapshot_id, version=1)
            assert len(deleted_and_open(store_dir)) <= 8
        assert writer._engine is not None
        assert len(writer._engine._queued) < 20
        writer._sweep_if_due()  # what its thread does every minute, for a store that is asked for nothing more
        assert not deleted_and_open(store_dir)
        assert set(writer._engine._queued) == {f"open-{number}" for number in range(5)}
        for number in range(5):
            writer.put_now(entry("more", rollout=f"open-{number}"))
            with consumer.freeze_now(f"open-{number}") as snapshot:
                assert len(snapshot.entries) == 2


def test_calls_that_came_too_late_are_not_remembered_for_ever(store: FileStore) -> None:
    for number in range(20):
        store.begin_call_now(f"reset-{number}", "c-0")
        store.reset_now(f"reset-{number}")
        for _ in range(2):
            with pytest.raises(StaleAttemptError):
                store.put_now(entry(0, rollout=f"reset-{number}"))
        store.begin_call_now(f"retired-{number}", "c-0")
        with store.freeze_now(f"retired-{number}") as snapshot:
            store.retire_now(f"retired-{number}", snapshot_id=snapshot.snapshot_id, version=1)
        with pytest.raises(RetiredError):
            store.put_now(entry(0, rollout=f"retired-{number}"))
    assert not store._requests._attempts._open


# ---- housekeeping


def test_a_store_that_nobody_closed_gives_back_its_threads_and_descriptors(store_dir: Path) -> None:
    def held() -> list[Path]:
        return [link for link in Path("/proc/self/fd").iterdir() if str(link.resolve()).startswith(str(store_dir))]

    threads = set(threading.enumerate())
    for number in range(10):
        store = FileStore(store_dir, files=UnsyncedFiles())
        store.begin_call_now(f"r-{number}", "c-0")
        store.put_now(entry(0, rollout=f"r-{number}"))
    assert held()
    del store
    deadline = time.monotonic() + 30
    while (held() or set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not held()
    assert not set(threading.enumerate()) - threads
    assert len(list(store_dir.glob("rollouts/*/*/*/*.seg"))) == 10, "every segment is sealed"
    assert not list((store_dir / "writers").iterdir())


def test_errors_and_snapshots_are_freed_without_a_garbage_collection(store: FileStore) -> None:
    first = entry(0, range(5000))
    store.put_now(first)
    store.freeze_now(ROLLOUT).close()

    def refused(number: int) -> weakref.ref[TokenEntry]:
        late = entry(number, range(100))
        with pytest.raises(FrozenError):
            store.put_now(late)
        return weakref.ref(late)

    async def refused_too(number: int) -> weakref.ref[TokenEntry]:
        late = entry(number, range(100))
        with pytest.raises(FrozenError):
            await store.put(late)
        return weakref.ref(late)

    def read() -> weakref.ref[Any]:
        snapshot = store.freeze_now(ROLLOUT)
        assert list(snapshot.entries) == [first]
        return weakref.ref(snapshot.entries)

    gc.collect()
    gc.disable()
    try:
        freed = [refused(1), asyncio.run(refused_too(2)), read()]
        until = time.monotonic() + 60
        while any(reference() is not None for reference in freed) and time.monotonic() < until:
            time.sleep(0.001)  # the thread that answered may still be on its way out
        assert [reference() for reference in freed] == [None, None, None]
    finally:
        gc.enable()


def test_a_sweep_of_many_tombstones_syncs_each_shard_once_and_leaves_nothing(store_dir: Path) -> None:
    count = 500
    files = CountingFiles()
    with FileStore(store_dir, sweep_every_s=0, files=UnsyncedFiles()) as maker:
        for number in range(count):
            maker.put_now(entry(0, rollout=f"r-{number}"))
            with maker.freeze_now(f"r-{number}") as snapshot:
                maker.retire_now(f"r-{number}", snapshot_id=snapshot.snapshot_id, version=1)
    with FileStore(store_dir, sweep_every_s=0, files=files) as store:
        assert store.usage_now()["retired"].rollouts == count
        files.during()
        assert store.sweep_now(3600) == 0
        assert not {*WRITES, *SYNCS, *NAMES} & files.during().keys()
        assert store.sweep_now(0) == count
        counts = files.during()
        assert counts["fsync"] == len(list(store_dir.glob("rollouts/*")))
        assert counts["rmdir"] == 2 * count
        assert "rename" not in counts
        assert not set(WRITES) & counts.keys()
        assert list(store.rollouts()) == []
        assert cached_bytes(store) == 0
    assert not list(store_dir.glob("rollouts/*/*"))


def test_a_retired_rollout_keeps_no_file(store: FileStore, store_dir: Path) -> None:
    for number in range(50):
        store.put_now(entry(0, range(5000), rollout=f"r-{number}"))
        with store.freeze_now(f"r-{number}") as snapshot:
            store.retire_now(f"r-{number}", snapshot_id=snapshot.snapshot_id, version=1)
    usage = store.usage_now()["retired"]
    assert (usage.rollouts, usage.files, usage.bytes) == (50, 0, 0)
