"""Who may add to what waits for the disk: a floor of free space for calls that begin, a bound on what is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_full_disk import mounted
from tokcap import FileStore, TokenEntry
from tokcap.asgi import CaptureMiddleware
from tokcap.asgi.metrics import Metrics
from tokcap.asgi.refusals import intent_refusal, send_refusal
from tokcap.config import close_process_endpoints
from tokcap.errors import BusyError, ClosedError, DurabilityError, FrozenError, NoSpaceError
from tokcap.store import admission
from tokcap.store.admission import Admission
from tokcap.store.files import Files, FreeSpace

PATIENCE_S = 60.0
MEGABYTE = 1 << 20


def entry(rollout_id: str, call: str, tokens: int = 3) -> TokenEntry:
    ids = np.arange(tokens, dtype=np.int32)
    return TokenEntry(rollout_id, call, ids, [7, 8], [-0.5, -1.0])


SIZE = 3 * 4 + 2 * 4 + 2 * 8
"""Of the arrays of one entry; what else it holds takes some bytes more."""


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---- the floor


class Filling(Files):
    """A file system of 10 GB, of which as much is free as somebody says."""

    def __init__(self, *, free: int = 5_000 * MEGABYTE, inodes: int = 10_000, all_inodes: int = 100_000) -> None:
        super().__init__()
        self.free, self.inodes, self.all_inodes = free, inodes, all_inodes
        self.looks = 0

    def free_space(self, path: str) -> FreeSpace:
        self.looks += 1
        return FreeSpace(self.free, 10_000 * MEGABYTE, self.inodes, self.all_inodes)


@contextlib.contextmanager
def filling(directory: Path, files: Files, **options: Any) -> Iterator[FileStore]:
    with FileStore(directory, files=files, sweep_every_s=0, **options) as store:
        yield store


def refused(store: FileStore, words: str = "min_free") -> NoSpaceError:
    with pytest.raises(NoSpaceError, match=words) as caught:
        store.begin_call_now("r", "refused")
    return caught.value


def test_below_the_floor_no_call_begins_and_everything_else_goes_on(store_dir: Path) -> None:
    files = Filling()
    with filling(store_dir, files) as store:
        store.begin_call_now("r", "a")
        store.begin_call_now("r", "b")
        files.free = 60 * MEGABYTE
        for _ in range(3):
            wait_for_a_look(store)
            error = refused(store, r"call refused: 62,914,560 bytes are free, fewer than min_free_bytes \(67,108,864\)")
        assert isinstance(error, DurabilityError)
        assert (error.errno, error.filename) == (errno.ENOSPC, str(store_dir))
        with pytest.raises(NoSpaceError):
            asyncio.run(store.begin_call("r", "refused"))
        store.put_now(entry("r", "a"))
        store.settle_call_now("r", "b", "aborted")
        store.mark_incomplete_now("r", "c")
        store.note_delivery_now("r", "a", "full")
        store.finish_now("r", {"reward": 1.0})
        with store.freeze_now("r") as snapshot:
            assert {call.model_call_id for call in snapshot.calls} == {"a", "b", "c"}
            assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=1)
        store.reset_now("r")
        files.free = 70 * MEGABYTE
        store.begin_call_now("r", "a")


def wait_for_a_look(store: FileStore) -> None:
    """The next call that begins looks at the disk, as it would a second later."""
    assert store._engine is not None
    store._engine.admission._looked_at = -admission._LOOKS_EVERY_S


@pytest.mark.parametrize(("inodes", "all_inodes", "is_refused"), [(999, 100_000, True), (0, 0, False)])
def test_inodes_have_a_floor_where_they_are_counted(
    store_dir: Path, inodes: int, all_inodes: int, is_refused: bool
) -> None:
    with filling(store_dir, Filling(inodes=inodes, all_inodes=all_inodes)) as store:
        if is_refused:
            refused(store, r"999 inodes are free, fewer than min_free_inodes \(1,000\)")
        else:
            store.begin_call_now("r", "a")


@pytest.mark.parametrize(
    ("options", "free", "is_refused"),
    [
        ({"min_free_bytes": 0, "min_free_inodes": 0}, 0, False),
        ({"min_free_bytes": 1000}, 999, True),
        ({"min_free_bytes": 1000}, 1000, False),
        ({"min_free_bytes": 6_000 * MEGABYTE}, 5_000 * MEGABYTE, True),
    ],
)
def test_the_floor_is_where_it_was_said(store_dir: Path, options: dict[str, Any], free: int, is_refused: bool) -> None:
    with filling(store_dir, Filling(free=free), **options) as store:
        if is_refused:
            refused(store)
        else:
            store.begin_call_now("r", "a")


def test_between_two_looks_what_was_taken_in_counts_as_written(store_dir: Path) -> None:
    """A look a second is enough, unless the disk may be full before the next one."""
    files = Filling(free=80 * MEGABYTE)
    with filling(store_dir, files) as store:
        for number in range(20):
            store.begin_call_now("r", f"c{number}")
        assert files.looks <= 20
        looks = files.looks
        store.begin_call_now("r", "small")
        files.free = 0
        store.put_now(entry("r", "c0", 5 * MEGABYTE))  # 20 MB: more than there was above the floor
        refused(store)
        assert files.looks > looks


def test_many_calls_look_at_the_disk_once(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_LOOKS_EVERY_S", 1e9)
    files = Filling()
    with filling(store_dir, files) as store:
        wait_for_a_look(store)
        for number in range(50):
            store.begin_call_now("r", f"c{number}")
        assert files.looks == 1


def test_what_can_not_be_told_refuses_nothing(store_dir: Path) -> None:
    class Broken(Files):
        def free_space(self, path: str) -> FreeSpace:
            raise OSError(errno.EIO, "no answer", path)

    with filling(store_dir, Broken()) as store:
        store.begin_call_now("r", "a")


def test_a_disk_that_is_nearly_full_refuses_before_it_is_full() -> None:
    with mounted("tmpfs") as point, FileStore(f"{point}/store", sweep_every_s=0, min_free_bytes=3 * MEGABYTE) as store:
        store.begin_call_now("r", "begun")
        with open(f"{point}/filler", "wb") as file:
            file.write(bytes(6 * MEGABYTE))
        wait_for_a_look(store)
        refused(store)
        store.put_now(entry("r", "begun"))
        os.unlink(f"{point}/filler")
        store.begin_call_now("r", "again")


# ---- back-pressure


class Slow(Files):
    """A disk that finishes a sync whenever somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(1 << 20)
        self.syncs = 0

    def stop(self) -> None:
        self.allowed = threading.Semaphore(0)

    def go(self) -> None:
        self.allowed.release(1 << 20)

    def fdatasync(self, fd: int) -> None:
        assert self.allowed.acquire(timeout=PATIENCE_S)
        super().fdatasync(fd)
        self.syncs += 1


@contextlib.contextmanager
def slow(directory: Path, **options: Any) -> Iterator[tuple[FileStore, Slow]]:
    """A store whose disk stands still from now on; `r0` to `r19` are there."""
    files = Slow()
    with FileStore(directory, files=files, sweep_every_s=0, **options) as store:
        for number in range(20):
            store.begin_call_now(f"r{number}", "begun")
        files.stop()
        try:
            yield store, files
        finally:
            files.go()


def stored(store: FileStore, rollout_id: str) -> set[str]:
    with store.read_now(rollout_id) as snapshot:
        return {one.model_call_id for one in snapshot.entries}


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def test_what_waits_is_counted_until_it_is_durable(store_dir: Path) -> None:
    with slow(store_dir) as (store, files):
        assert store.pending.operations == 0

        async def main() -> None:
            puts = [asyncio.create_task(store.put(entry(f"r{n}", "a"))) for n in range(5)]
            await asyncio.sleep(0)
            await asyncio.to_thread(wait_until, lambda: store.pending.operations == 5)
            assert 5 * SIZE <= store.pending.bytes < 5 * (SIZE + 1000)
            assert not any(put.done() for put in puts)
            files.go()
            await asyncio.gather(*puts)

        asyncio.run(main())
        assert (store.pending.operations, store.pending.bytes, store.pending.waiting) == (0, 0, 0)


@pytest.mark.parametrize("bound", [{"max_pending_bytes": 3 * SIZE}, {"max_pending_operations": 2}])
def test_above_the_bound_no_call_begins_and_records_wait_for_room(store_dir: Path, bound: dict[str, int]) -> None:
    with slow(store_dir, **bound) as (store, files):

        async def main() -> None:
            puts = [asyncio.create_task(store.put(entry(f"r{n}", "a"))) for n in range(10)]
            await asyncio.to_thread(wait_until, lambda: store.pending.waiting > 0)
            assert store.pending.operations <= 3
            with pytest.raises(BusyError, match=r"call refused: the disk of .* can't follow: .*don't generate"):
                await store.begin_call("r0", "refused")
            with pytest.raises(BusyError):
                await asyncio.to_thread(store.begin_call_now, "r0", "refused")
            before = store.pending.operations
            settled = asyncio.create_task(store.settle_call("r11", "begun", "lost"))  # small: never kept waiting
            await asyncio.to_thread(wait_until, lambda: store.pending.operations == before + 1)
            files.go()
            await asyncio.gather(settled, *puts)
            await store.begin_call("r0", "now")

        asyncio.run(main())
        assert store.pending.operations == store.pending.waiting == 0
        assert all(stored(store, f"r{number}") == {"a"} for number in range(10))
        with store.freeze_now("r0") as snapshot:
            assert {call.model_call_id for call in snapshot.calls} == {"begun", "a", "now"}


def test_who_comes_first_is_let_in_first_from_whatever_thread_or_loop(store_dir: Path) -> None:
    """Also if a smaller record behind it would fit."""
    with slow(store_dir, max_pending_operations=1, sync_threads=1) as (store, files):
        order: list[str] = []
        started: list[threading.Thread] = []

        def blocking(name: str, number: int) -> None:
            store.put_now(entry(f"r{number}", "a", 100 if number % 2 else 3))
            order.append(name)

        def in_a_loop(name: str, number: int) -> None:
            asyncio.run(store.put(entry(f"r{number}", "a", 100 if number % 2 else 3)))
            order.append(name)

        names = [f"{number}" for number in range(8)]
        for number, name in enumerate(names):
            work = in_a_loop if number % 3 == 2 else blocking
            thread, _ = in_thread(lambda work=work, name=name, number=number: work(name, number))  # type: ignore[misc]
            started.append(thread)
            wait_until(lambda number=number: sum(store_counts(store)) == number + 1)  # type: ignore[misc]
        done = 0
        while done < len(names):
            files.allowed.release()
            done += 1
            wait_until(lambda done=done: len(order) >= done)  # type: ignore[misc]
        for thread in started:
            thread.join(PATIENCE_S)
        assert order == names


def store_counts(store: FileStore) -> tuple[int, int]:
    return store.pending.operations, store.pending.waiting


@pytest.mark.parametrize("how", ["blocking", "loop", "many"])
def test_a_record_that_finds_no_room_in_time_is_an_error_and_nothing_of_it_stays(store_dir: Path, how: str) -> None:
    with slow(store_dir, max_pending_operations=1, lock_timeout_s=0.05) as (store, files):
        first, errors = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        with pytest.raises(BusyError, match=r"rollout r1: waited 0.05 s for room .* nothing was stored"):
            if how == "blocking":
                store.put_now(entry("r1", "a"))
            elif how == "loop":
                asyncio.run(store.put(entry("r1", "a")))
            else:
                store.put_many_now([entry("r1", "a"), entry("r1", "b")])
        files.go()
        first.join(PATIENCE_S)
        assert not errors
        wait_until(lambda: store_counts(store) == (0, 0))
        assert (stored(store, "r0"), stored(store, "r1")) == ({"a"}, set())
        store.put_now(entry("r1", "a"))


def test_waits_that_are_cancelled_or_forgotten_leave_no_count_behind(store_dir: Path) -> None:
    with slow(store_dir, max_pending_operations=1) as (store, files):
        first, errors = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)

        async def cancelled() -> None:
            tasks = [asyncio.create_task(store.put(entry(f"r{n}", "a"))) for n in range(1, 6)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            tasks[3].cancel()
            await asyncio.sleep(0)
            # The others are forgotten: their loop ends with them.

        asyncio.run(cancelled())

        loop = asyncio.new_event_loop()
        forgotten = loop.create_task(store.put(entry("r6", "a")))
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        wait_until(lambda: store.pending.waiting > 0)
        files.go()
        first.join(PATIENCE_S)
        assert not errors
        wait_until(lambda: store_counts(store) == (0, 0))
        assert all(stored(store, f"r{number}") == set() for number in range(1, 7))
        store.put_now(entry("r7", "a"))
        forgotten._log_destroy_pending = False  # type: ignore[attr-defined]
        del forgotten
        gc.collect()
        assert store_counts(store) == (0, 0)


def test_one_record_above_the_bound_is_let_in_alone(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0, max_pending_bytes=1) as store:
        for number in range(3):
            store.put_now(entry("r", f"c{number}"))
            asyncio.run(store.put(entry("r", f"d{number}")))
        assert len(stored(store, "r")) == 6


def test_a_disk_that_finishes_nothing_for_long_begins_no_calls(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow(store_dir, lock_timeout_s=20) as (store, files):
        first, errors = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        clock = time.monotonic
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: clock() + 19)
            let_in_and_leave(store, "r1")
            patch.setattr(time, "monotonic", lambda: clock() + 60)
            with pytest.raises(BusyError, match=r"has finished nothing for (59|60) s; the call was not begun"):
                store.begin_call_now("r2", "a")
        files.go()
        first.join(PATIENCE_S)
        assert not errors
        wait_until(lambda: store.pending.operations == 0)
        store.begin_call_now("r2", "a")


def let_in_and_leave(store: FileStore, rollout_id: str) -> None:
    """A call may begin; it doesn't, because that would not be durable before the disk goes on."""
    assert store._engine is not None
    operation = store._begin(rollout_id, "a", 1, (), 0, "")
    store._engine.admission.begin(operation)
    store._engine.admission.leave(operation)


def test_a_store_that_is_closed_keeps_nobody_waiting_for_room(store_dir: Path) -> None:
    with slow(store_dir, max_pending_operations=1) as (store, files):
        first, errors = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        second, refusals = in_thread(lambda: store.put_now(entry("r1", "a")))
        wait_until(lambda: store.pending.waiting == 1)
        closing, _ = in_thread(store.close_now)
        second.join(PATIENCE_S)
        assert [type(error) for error in refusals] == [ClosedError]
        files.go()
        first.join(PATIENCE_S)
        closing.join(PATIENCE_S)
        assert not errors and not closing.is_alive()


def test_what_fails_is_not_counted_any_more(store_dir: Path) -> None:
    class Failing(Slow):
        fails = False

        def fdatasync(self, fd: int) -> None:
            if self.fails:
                raise OSError(errno.EIO, "the device is gone")
            super().fdatasync(fd)

    files = Failing()
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        store.put_now(entry("r", "a"))
        store.freeze_now("frozen").close()
        with pytest.raises(FrozenError):
            store.put_now(entry("frozen", "a"))
        with pytest.raises(FrozenError):
            store.begin_call_now("frozen", "a")
        files.fails = True
        with pytest.raises(DurabilityError):
            store.put_now(entry("r", "b"))
        with pytest.raises(DurabilityError):
            asyncio.run(store.put(entry("r", "c")))
        files.fails = False
        assert (store.pending.operations, store.pending.bytes) == (0, 0)


# ---- at the door


def answer_to(error: Exception) -> dict[bytes, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    refusal = intent_refusal(error, "r")
    assert refusal.status == 503
    asyncio.run(send_refusal(refusal, "chat", send))
    assert str(error).encode() in sent[1]["body"]
    return dict(sent[0]["headers"])


def test_a_client_is_told_why_and_when_to_come_back() -> None:
    assert answer_to(BusyError("the disk can't follow"))[b"retry-after"] == b"1"
    full = answer_to(NoSpaceError("nothing is free"))
    assert full[b"retry-after"] == b"30" and b"x-should-retry" not in full
    assert answer_to(DurabilityError("no"))[b"retry-after"] == b"5"


def test_a_full_disk_is_a_503_and_costs_no_generation(store_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])

    block = {"enabled": True, "dir": str(store_dir), "min_free_bytes": 1 << 62}
    middleware = CaptureMiddleware(engine, {"token_id_capture": block})
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/ng-rollout/r/training-token-capture/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        for _ in range(2):
            await middleware(scope, receive, send)
        await close_process_endpoints()

    asyncio.run(main())
    assert caplog.text.count("a call was answered 503 and not begun: nothing was generated") == 1
    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"retry-after"]) == (503, b"30")
    assert b"fewer than min_free_bytes" in sent[1]["body"]
    assert not asked
    with FileStore(store_dir, read_only=True) as store:
        assert not list(store.rollouts())


def test_refused_begins_and_what_waits_are_counted() -> None:
    prometheus_client: Any = pytest.importorskip("prometheus_client", reason="prometheus-client does the counting")
    registry = prometheus_client.CollectorRegistry()
    metrics = Metrics(registry)
    errors: list[Exception] = [NoSpaceError("b"), BusyError("a"), NoSpaceError("c"), FrozenError("d")]
    for error in (*errors, DurabilityError("e")):
        metrics.refused(error)

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(name, labels)

    counts = {reason: value("tokcap_refused_begins_total", reason=reason) for reason in ("busy", "no_space", "state")}
    assert counts == {"busy": 1, "no_space": 2, "state": 1}
    assert value("tokcap_refused_begins_total", reason="other") == 1


def test_the_gauges_show_what_waits(store_dir: Path) -> None:
    prometheus_client: Any = pytest.importorskip("prometheus_client", reason="prometheus-client does the counting")
    registry: Any = prometheus_client.CollectorRegistry()
    metrics = Metrics(registry)
    with slow(store_dir) as (store, files):
        first, _ = in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        metrics.pending(store)
        assert registry.get_sample_value("tokcap_pending_operations") == 1
        assert registry.get_sample_value("tokcap_pending_bytes") >= SIZE
        files.go()
        first.join(PATIENCE_S)
        metrics.pending(store)
        assert registry.get_sample_value("tokcap_pending_operations") == 0
        metrics.pending(object())  # a sink that tells nothing


# ---- mutants: what the tests above have to see


def _no_floor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "_check_space", lambda self, operation: None)


def _no_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Admission, "begin", Admission.count)


def _a_look_only_once_a_second(patch: pytest.MonkeyPatch) -> None:
    check = Admission._check_space

    def checked(self: Admission, operation: Any) -> None:
        self._taken_at_look = self._taken
        check(self, operation)

    patch.setattr(Admission, "_check_space", checked)


def _the_floor_refuses_records_too(patch: pytest.MonkeyPatch) -> None:
    count = Admission.count

    def counted(self: Admission, operation: Any) -> None:
        operation.model_call_id = "refused"
        self._check_space(operation)
        count(self, operation)

    patch.setattr(Admission, "count", counted)


def _whoever_came_last_is_let_in_first(patch: pytest.MonkeyPatch) -> None:
    advance = Admission.advance

    def advanced(self: Admission) -> None:
        with self._guard:
            self._line.reverse()
        advance(self)
        with self._guard:
            self._line.reverse()

    patch.setattr(Admission, "advance", advanced)


def _failures_stay_counted(patch: pytest.MonkeyPatch) -> None:
    release = Admission.release
    patch.setattr(
        Admission, "release", lambda self, operations: release(self, [o for o in operations if o.error is None])
    )
    patch.setattr(Admission, "leave", lambda self, operation, place=None: None)


@pytest.mark.parametrize(
    ("mutant", "behaviour"),
    [
        (_no_floor, test_below_the_floor_no_call_begins_and_everything_else_goes_on),
        (_the_floor_refuses_records_too, test_below_the_floor_no_call_begins_and_everything_else_goes_on),
        (_a_look_only_once_a_second, test_between_two_looks_what_was_taken_in_counts_as_written),
        (_whoever_came_last_is_let_in_first, test_who_comes_first_is_let_in_first_from_whatever_thread_or_loop),
        (_failures_stay_counted, test_what_fails_is_not_counted_any_more),
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_a_store_without_its_bounds_is_seen(
    store_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[pytest.MonkeyPatch], None],
    behaviour: Callable[[Path], None],
) -> None:
    with monkeypatch.context() as patch:
        mutant(patch)
        with pytest.raises((AssertionError, NoSpaceError, pytest.fail.Exception)):
            behaviour(store_dir)


def test_a_store_without_its_gate_is_seen(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_gate(monkeypatch)
    with slow(store_dir, max_pending_operations=1) as (store, _):
        in_thread(lambda: store.put_now(entry("r0", "a")))
        wait_until(lambda: store.pending.operations == 1)
        in_thread(lambda: store.begin_call_now("r1", "a"))
        wait_until(lambda: store.pending.operations == 2)  # which the gate would not have let in
