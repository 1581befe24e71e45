"""Several processes, threads and event loops on one directory: who sees what, who waits, and what forks get."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokcap.conformance.samples import difference, entry_of, ids_of
from tokcap.entry import TokenEntry
from tokcap.errors import (
    BusyError,
    ClosedError,
    ConflictError,
    DurabilityError,
    FrozenError,
    RetiredError,
    StaleAttemptError,
)
from tokcap.store import FileStore, Snapshot
from tokcap.store.files import Files

from .children import Channel, Child, Nursery, fast_directory
from .children import nursery as _nursery

directory = pytest.fixture(fast_directory)
nursery = pytest.fixture(scope="module")(_nursery)

PATIENCE_S = 30.0


def open_store(path: object, **settings: Any) -> FileStore:
    return FileStore(str(path), **{"sweep_every_s": 0.0, **settings})


def calls_of(snapshot: Snapshot) -> dict[str, str]:
    return {call.model_call_id: call.outcome for call in snapshot.calls}


def expect_entries(snapshot: Snapshot, expected: Iterable[TokenEntry]) -> None:
    """Exactly these, each identical."""
    wanted = {(entry.model_call_id, entry.choice_index): entry for entry in expected}
    seen = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
    assert len(seen) == len(snapshot.entries)
    assert seen.keys() == wanted.keys()
    for key, entry in seen.items():
        assert not difference(entry, wanted[key])


def eventually(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.005)


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A measurement, shown in every run; no test depends on it."""
    with capsys.disabled():
        sys.stdout.write(f"\n{text}\n")


# ---- another process that does as it is told


def obey(channel: Channel, path: str, settings: dict[str, Any]) -> None:
    """In a child: call the blocking methods of a store that the test names."""
    store = open_store(path, **settings)
    while True:
        try:
            method, arguments, named = channel.recv()
        except EOFError:
            return
        try:
            result = getattr(store, f"{method}_now")(*arguments, **named)
            if isinstance(result, Snapshot):
                with result as snapshot:
                    result = snapshot.snapshot_id, snapshot.version, calls_of(snapshot)
            channel.send((result, None))
        except Exception as error:
            channel.send((None, error))


class Other:
    """A store in another process."""

    def __init__(self, nursery: Nursery, path: object, **settings: Any) -> None:
        self.child = nursery.start(obey, str(path), settings)

    def ask(self, method: str, *arguments: Any, **named: Any) -> None:
        self.child.send((method, arguments, named))

    def answer(self) -> Any:
        result, error = self.child.receive()
        if error is not None:
            raise error
        return result

    def do(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.ask(method, *arguments, **named)
        return self.answer()

    def is_waiting(self) -> bool:
        return not self.child.channel.poll(0.05)


# ---- what others wrote


def test_a_put_sees_what_another_process_put(directory: Path, nursery: Nursery) -> None:
    store, other = open_store(directory / "store"), Other(nursery, directory / "store")
    entry, conflicting = entry_of("r", "call"), entry_of("r", "call", content="other")
    store.put_now(entry)
    other.do("put", entry)
    with pytest.raises(ConflictError):
        other.do("put", conflicting)
    other.do("put", entry_of("r", "theirs"))
    with pytest.raises(ConflictError):
        store.put_now(entry_of("r", "theirs", content="other"))
    with store.freeze_now("r") as snapshot:
        assert calls_of(snapshot) == {"call": "conflict", "theirs": "conflict"}
        assert len(snapshot.entries) == 2


def test_a_prompt_that_extends_a_call_of_another_process_is_stored_as_its_suffix(
    directory: Path, nursery: Nursery
) -> None:
    store = open_store(directory / "store")
    others = [Other(nursery, directory / "store") for _ in range(2)]
    puts: list[Callable[[TokenEntry], Any]] = [
        store.put_now,
        lambda entry: others[0].do("put", entry),
        lambda entry: others[1].do("put", entry),
    ]
    prompt, entries, sizes = ids_of("r", 20_000), [], []
    for turn in range(24):
        generation = ids_of(f"r/{turn}", 10 + turn)
        entries.append(entry_of("r", f"call-{turn}", prompt=prompt, generation=generation))
        # Not only in turn: the same process twice, and back to one that has missed several.
        puts[random.Random(turn).randrange(3)](entries[-1])
        sizes.append(store.stat_now("r").bytes)
        prompt = prompt + generation + ids_of(f"r/{turn}/tool", 30)
    for turn in range(1, len(sizes)):
        new_ids = 30 + 2 * (10 + turn)
        assert sizes[turn] - sizes[turn - 1] < 12 * new_ids + 400, f"turn {turn} was not stored as a suffix"
    with store.freeze_now("r") as snapshot:
        expect_entries(snapshot, entries)


def write_many(channel: Channel, path: str, name: str, rollout_ids: list[str], count: int) -> None:
    """In a child: one call after the other, of one rollout after the other; the longest time that a put took."""
    store, worst = open_store(path), 0.0
    channel.send("ready")
    channel.recv()
    for number in range(count):
        for rollout_id in rollout_ids:
            entry = entry_of(rollout_id, f"{name}-{number}")
            start = time.perf_counter()
            store.put_now(entry)
            worst = max(worst, time.perf_counter() - start)
    store.close_now()
    channel.send(worst)


def _at_once(children: list[Child]) -> list[Any]:
    for child in children:
        assert child.receive() == "ready"
    for child in children:
        child.send("go")
    answers = [child.receive() for child in children]
    for child in children:
        child.wait()
    return answers


def test_writers_of_several_processes_lose_nothing_and_wait_little(
    directory: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(directory / "store")
    open_store(path).close_now()
    cases = {"one rollout": (["one"], 300), "20 rollouts": ([f"many-{number}" for number in range(20)], 15)}
    for what, (rollout_ids, count) in cases.items():
        names = ("a", "b")
        worst = _at_once([nursery.start(write_many, path, name, rollout_ids, count) for name in names])
        say(capsys, f"two processes on {what}: worst put {max(worst) * 1000:.1f} ms")
        assert max(worst) < 5.0
        store = open_store(path)
        for rollout_id in rollout_ids:
            with store.freeze_now(rollout_id) as snapshot:
                expect_entries(
                    snapshot, [entry_of(rollout_id, f"{name}-{number}") for name in names for number in range(count)]
                )
        store.close_now()


# ---- freeze against putters of other processes


def put_until_frozen(channel: Channel, path: str, name: str) -> None:
    """In a child: put into the rollout that it is told, without a pause, until that is frozen."""
    store = open_store(path)
    while True:
        try:
            rollout_id = channel.recv()
        except EOFError:
            return
        returned = []
        for number in range(1_000_000):
            call = f"{name}-{number}"
            try:
                store.put_now(entry_of(rollout_id, call))
            except FrozenError:
                break
            returned.append(call)
            if number == 0:
                channel.send("started")
        channel.send(returned)


def test_freeze_divides_the_puts_of_other_processes_and_is_not_overtaken(
    directory: Path, nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(directory / "store")
    path = str(directory / "store")
    putters = [nursery.start(put_until_frozen, path, name) for name in ("a", "b", "c")]
    consumer = Other(nursery, path)
    chance, worst = random.Random(5), 0.0
    for turn in range(36):
        rollout_id = f"r-{turn}"
        for putter in putters:
            putter.send(rollout_id)
        for putter in putters:
            assert putter.receive() == "started"
        time.sleep(chance.random() * 0.01)
        # They go on until they are refused: if new puts could overtake the freeze, it would not return.
        start = time.perf_counter()
        if turn % 3:
            store.freeze_now(rollout_id).close()
        else:
            consumer.do("freeze", rollout_id)
        worst = max(worst, time.perf_counter() - start)
        returned = [call for putter in putters for call in putter.receive()]
        with store.freeze_now(rollout_id) as snapshot:
            assert snapshot.version == 1
            assert sorted(calls_of(snapshot)) == sorted(returned)
            expect_entries(snapshot, [entry_of(rollout_id, call) for call in returned])
    say(capsys, f"freeze against three processes that put without a pause: worst {worst * 1000:.0f} ms")
    assert worst < 5.0


# ---- a process that stops while it holds rollouts


class StoppingFiles(Files):
    """Stops its process (SIGSTOP) once so many threads wait for the device."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._guard, self._count = threading.Condition(), count
        self.armed = False

    def fdatasync(self, fd: int) -> None:
        if self.armed:
            with self._guard:
                self._count -= 1
                self._guard.notify_all()
                last = self._count == 0
                self._guard.wait_for(lambda: self._count <= 0)
            if last:
                self.armed = False
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # the signal may arrive in another thread, a little later
        super().fdatasync(fd)


def put_and_stop(channel: Channel, path: str, rollout_ids: list[str]) -> None:
    """In a child: stop while a put of each of these rollouts holds its fence."""
    files = StoppingFiles(len(rollout_ids))
    store = open_store(path, files=files, sync_threads=len(rollout_ids))

    async def main() -> None:
        await asyncio.gather(*(store.put(entry_of(rollout_id, "first")) for rollout_id in rollout_ids))
        files.armed = True
        await asyncio.gather(*(store.put(entry_of(rollout_id, "held")) for rollout_id in rollout_ids))

    asyncio.run(main())
    channel.send("done")


def _stopped(nursery: Nursery, path: Path, rollout_ids: list[str]) -> Child:
    child = nursery.start(put_and_stop, str(path), rollout_ids)
    eventually(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "stopped")
    return child


def test_a_stopped_process_makes_its_rollouts_busy_and_no_others(directory: Path, nursery: Nursery) -> None:
    path = directory / "store"
    stuck = [f"stuck-{number}" for number in range(64)]
    holder = _stopped(nursery, path, stuck)
    store = open_store(path, lock_timeout_s=1.5)
    refused: list[str] = []

    def wait(rollout_id: str) -> None:
        with pytest.raises(BusyError):
            store.put_now(entry_of(rollout_id, "late"))
        refused.append(rollout_id)

    async def main() -> None:
        waiting = [asyncio.create_task(store.put(entry_of(rollout_id, "waits"))) for rollout_id in stuck]
        waiting += [asyncio.create_task(_frozen(rollout_id)) for rollout_id in stuck[:32]]
        await asyncio.sleep(0.3)
        for number in range(20):
            await store.put(entry_of("free", f"call-{number}"))
            await store.put(entry_of(f"free-{number}", "call"))
        (await store.freeze("free")).close()
        assert not any(task.done() for task in waiting), "the others were free only once the waiting ones gave up"
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, BusyError)

    async def _frozen(rollout_id: str) -> None:
        (await store.freeze(rollout_id)).close()

    threads = [threading.Thread(target=wait, args=(rollout_id,)) for rollout_id in stuck[:8]]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(refused) == sorted(stuck[:8])
    # Those that gave up have left no sign behind that would hold others back, and the stopped one goes on.
    holder.signal(signal.SIGCONT)
    assert holder.receive() == "done"
    for rollout_id in stuck:
        with store.freeze_now(rollout_id) as snapshot:
            expect_entries(snapshot, [entry_of(rollout_id, "first"), entry_of(rollout_id, "held")])
    store.close_now()


def test_what_waits_for_a_stopped_process_goes_on_when_that_is_killed(directory: Path, nursery: Nursery) -> None:
    path = directory / "store"
    holder = _stopped(nursery, path, ["r", "s"])
    store, other = open_store(path), Other(nursery, path)
    other.ask("freeze", "r")

    async def main() -> None:
        put = asyncio.create_task(store.put(entry_of("s", "waits")))
        await asyncio.sleep(0.1)
        late = asyncio.create_task(store.put(entry_of("s", "behind")))
        assert other.is_waiting()
        assert not put.done()
        holder.kill()
        await asyncio.wait_for(asyncio.gather(put, late), PATIENCE_S)

    asyncio.run(main())
    _, version, calls = other.answer()
    assert (version, calls) == (1, {"first": "recorded"})
    with store.freeze_now("s") as snapshot:
        assert calls_of(snapshot) == {"first": "recorded", "waits": "recorded", "behind": "recorded"}


def test_operations_behind_one_that_waits_give_up_at_their_own_time(directory: Path, nursery: Nursery) -> None:
    path = directory / "store"
    _stopped(nursery, path, ["r"])
    store = open_store(path, lock_timeout_s=0.6)
    took: dict[int, float] = {}

    async def one(number: int) -> None:
        await asyncio.sleep(0.2 * number)
        start = time.monotonic()
        with pytest.raises(BusyError):
            await store.mark_incomplete("r", f"call-{number}")
        took[number] = time.monotonic() - start

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(5))), PATIENCE_S)

    asyncio.run(main())
    assert all(0.55 < seconds < 5.0 for seconds in took.values()), took


def wait_with_few_descriptors(channel: Channel, path: str, stuck: list[str], limit: int, count: int) -> None:
    """In a child with few descriptors: many rollouts wait for a stopped process, others are written meanwhile."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store = open_store(path, lock_timeout_s=2.0, sync_threads=16)
    rollout_ids = [f"free-{number}" for number in range(count)]

    async def main() -> None:
        await asyncio.gather(*(store.put(entry_of(rollout_id, "before")) for rollout_id in rollout_ids))
        waiting = [asyncio.create_task(store.put(entry_of(rollout_id, "late"))) for rollout_id in stuck]
        await asyncio.sleep(0.3)
        await asyncio.gather(*(store.put(entry_of(rollout_id, "meanwhile")) for rollout_id in rollout_ids))
        for snapshot in await store.freeze_many(rollout_ids[:20]):
            snapshot.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        channel.send({type(result).__name__ for result in results})

    asyncio.run(main())


def test_rollouts_that_wait_leave_descriptors_for_others(directory: Path, nursery: Nursery) -> None:
    stuck = [f"stuck-{number}" for number in range(64)]
    _stopped(nursery, directory / "store", stuck)
    child = nursery.start(wait_with_few_descriptors, str(directory / "store"), stuck, 256, 400)
    assert child.receive() == {"BusyError"}


def test_a_process_that_can_start_no_thread_fails_operations_and_recovers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(directory / "store", sync_threads=4)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def put(call: str) -> None:
        await asyncio.wait_for(store.put(entry_of("r", call)), PATIENCE_S)

    async def put_some() -> list[None]:
        return await asyncio.gather(*(store.put(entry_of(f"s-{n}", "call")) for n in range(8)))

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(DurabilityError, match="can't start a thread"):
                asyncio.run(put("call"))
    asyncio.run(put("call"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            asyncio.run(put_some())  # those threads that there are have to do
        store.freeze_now("s-0").close()
    store.close_now()


# ---- forks


def _descriptors_below(path: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(f"{path}/"):
            found.append(target)
    return found


def fork_once(channel: Channel, path: str) -> None:
    """In a child with a store in use: fork, and let both use the store object."""
    store = open_store(path)
    store.begin_call_now("parent", "begun")
    asyncio.run(store.put(entry_of("shared", "before")))
    for number in range(20):
        store.put_now(entry_of(f"idle-{number}", "call"))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        left = _descriptors_below(path)
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tokcap")]
        store.put_now(entry_of("shared", "child"))
        asyncio.run(store.put(entry_of("child", "call")))
        with store.freeze_now("idle-0") as snapshot:
            frozen = len(snapshot.entries)
        store.close_now()
        os.write(writing, pickle.dumps((left, threads, frozen)))
        os._exit(0)
    os.close(writing)
    store.put_now(entry_of("shared", "parent"))
    told = b""
    while part := os.read(reading, 65536):
        told += part
    os.waitpid(pid, 0)
    asyncio.run(store.put(entry_of("shared", "after")))
    store.put_now(entry_of("parent", "begun"))
    channel.send(pickle.loads(told))
    channel.send({path for path in _descriptors_below(path) if "/writers/" in path})
    store.close_now()


def test_a_forked_child_drops_what_it_inherited_and_can_use_the_store(directory: Path, nursery: Nursery) -> None:
    path = str(directory / "store")
    child = nursery.start(fork_once, path)
    left, threads, frozen = child.receive()
    assert not left
    assert not threads
    assert frozen == 1
    assert len(child.receive()) == 1, "the parent still shows that it is alive"
    child.end()
    store = open_store(path)
    with store.freeze_now("shared") as snapshot:
        assert sorted(calls_of(snapshot)) == ["after", "before", "child", "parent"]
    with store.freeze_now("parent") as snapshot:
        assert calls_of(snapshot) == {"begun": "recorded"}


def fork_while_busy(channel: Channel, path: str, seed: int) -> None:
    """In a child: threads that write, freeze and wait, and a main thread that forks idle children meanwhile."""
    store, chance = open_store(path, sync_threads=4), random.Random(seed)
    store.begin_call_now("waited-for", "open")

    def write(name: str) -> None:
        for number in range(1_000_000):
            store.put_now(entry_of(f"busy-{number % 5}", f"{name}-{number}"))
            store.put_now(entry_of(f"{name}-{number % 40}", f"call-{number}"))

    def look_for_open_calls() -> None:
        while True:
            store.begin_call_now(f"closing-{seed}", "open")
            store.freeze_now(f"closing-{seed}", wait_open_s=0.02)
            store.reset_now(f"closing-{seed}")

    def loop() -> None:
        async def main() -> None:
            for number in range(1_000_000):
                await asyncio.gather(*(store.put(entry_of(f"busy-{k}", f"loop-{number}")) for k in range(5)))

        asyncio.run(main())

    for target in (lambda: write("a"), lambda: write("b"), look_for_open_calls, loop):
        threading.Thread(target=target, daemon=True).start()
    for _ in range(12):
        time.sleep(chance.random() * 0.004)
        if os.fork() == 0:
            try:
                channel.recv()  # idle, until the test lets go of its end
            finally:
                os._exit(0)
    channel.send("forked")
    time.sleep(60)


def test_no_lock_stays_behind_when_a_parent_is_killed_and_its_forked_children_live_on(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    for seed in range(12):
        parent = nursery.start(fork_while_busy, path, seed)
        assert parent.receive() == "forked"
        parent.kill()
        store = open_store(path, lock_timeout_s=1.0)
        for rollout_id in [rollout_id for rollout_id, _ in store.rollouts()]:
            if rollout_id.startswith(("busy-", "a-", "b-")):
                store.put_now(entry_of(rollout_id, f"after-{seed}"))
        start = time.monotonic()
        store.freeze_now("waited-for", wait_open_s=20.0).close()
        assert time.monotonic() - start < 10.0, "a forked child is taken for the writer that died"
        store.reset_now("waited-for")
        if store.stat_now(f"closing-{seed}").state in ("open", "absent"):
            store.begin_call_now(f"closing-{seed}", "not-refused")
        store.close_now()
        nursery.forget(parent)


# ---- copies, exits, threads, loops


def test_pickling_a_store_carries_its_configuration_only(directory: Path) -> None:
    store = open_store(directory / "store", require_intent=True, lock_timeout_s=7.0)
    store.begin_call_now("r", "call")
    packed = pickle.dumps(store)
    assert len(packed) < 1000
    copy: FileStore = pickle.loads(packed)
    assert copy is not store
    assert pickle.dumps(copy) == packed
    copy.put_now(entry_of("r", "call"))
    with pytest.raises(StaleAttemptError):
        copy.put_now(entry_of("r", "no-intent"))
    store.close_now()
    copy.close_now()


def sends_a_copy(channel: Channel) -> None:
    """In a child: use a store that came out of another process."""
    store: FileStore = channel.recv()
    store.put_now(entry_of("r", "theirs"))
    store.close_now()
    channel.send("done")


def test_a_store_can_be_sent_to_another_process(directory: Path, nursery: Nursery) -> None:
    store = open_store(directory / "store")
    store.put_now(entry_of("r", "ours"))
    child = nursery.start(sends_a_copy)
    child.send(store)
    assert child.receive() == "done"
    with store.freeze_now("r") as snapshot:
        assert sorted(calls_of(snapshot)) == ["ours", "theirs"]


UNCLOSED = {
    "idle": """
store.put_now(entry_of("r", "call"))
""",
    "used by a loop that is over": """
async def main():
    await asyncio.gather(*(store.put(entry_of(f"r-{number}", "call")) for number in range(50)))
asyncio.run(main())
""",
    "with puts that were never awaited": """
async def main():
    for number in range(200):
        asyncio.ensure_future(store.put(entry_of("r", f"call-{number}")))
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "with puts that wait for a stopped process": """
async def main():
    for number in range(10):
        asyncio.ensure_future(store.put(entry_of("stuck", f"call-{number}")))
    await asyncio.sleep(0.1)
asyncio.run(main())
""",
    "in other threads": """
import threading
def write():
    for number in range(1_000_000):
        store.put_now(entry_of("r", f"call-{number}"))
threading.Thread(target=write, daemon=True).start()
import time
time.sleep(0.05)
""",
}


@pytest.mark.parametrize("how", UNCLOSED)
def test_the_interpreter_exits_with_an_unclosed_store(directory: Path, nursery: Nursery, how: str) -> None:
    path = directory / "store"
    if "stopped" in how:
        _stopped(nursery, path, ["stuck"])
    head = (
        "import asyncio, logging\n"
        "from tokcap.conformance.samples import entry_of\n"
        "from tokcap.store import FileStore\n"
        "logging.disable(logging.WARNING)\n"
        f"store = FileStore({str(path)!r})\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", head + UNCLOSED[how]],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert time.monotonic() - start < 15.0


def test_threads_and_event_loops_mix_on_one_store(directory: Path) -> None:
    store = open_store(directory / "store", sync_threads=4)
    rollout_ids = [f"r-{number}" for number in range(5)]
    failures: list[BaseException] = []

    def entries(name: str) -> list[TokenEntry]:
        return [entry_of(rollout_ids[number % 5], f"{name}-{number}") for number in range(40)]

    def blocking(name: str) -> None:
        for entry in entries(name):
            store.put_now(entry)

    def in_a_loop(name: str) -> None:
        async def main() -> None:
            mine = entries(name)
            await asyncio.gather(*(store.put(entry) for entry in mine[:20]))
            for entry in mine[20:30]:
                await store.put(entry)
            store.put_many_now(mine[30:])  # the blocking twin inside a loop blocks it, but works

        asyncio.run(main())

    def guarded(work: Callable[[str], None], name: str) -> None:
        try:
            work(name)
        except BaseException as error:
            failures.append(error)

    names = {f"thread-{n}": blocking for n in range(3)} | {f"loop-{n}": in_a_loop for n in range(3)}
    threads = [threading.Thread(target=guarded, args=(work, name)) for name, work in names.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures
    for rollout_id in rollout_ids:
        with store.freeze_now(rollout_id) as snapshot:
            expect_entries(snapshot, [e for name in names for e in entries(name) if e.rollout_id == rollout_id])
    store.close_now()


def test_a_store_keeps_no_event_loop_alive(directory: Path) -> None:
    import gc
    import weakref

    store = open_store(directory / "store")
    loops = []

    async def main(number: int) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await store.put(entry_of("r", f"call-{number}"))

    for number in range(5):
        asyncio.run(main(number))
    gc.collect()
    assert not any(loop() for loop in loops)


def test_cancelled_puts_are_whole_or_absent_and_harm_no_others(directory: Path) -> None:
    store = open_store(directory / "store")

    async def main() -> None:
        for turn in range(30):
            rollout_id = f"r-{turn}"
            entries = [entry_of(rollout_id, f"call-{number}") for number in range(30)]
            tasks = [asyncio.create_task(store.put(entry)) for entry in entries]
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            if turn % 3 == 2:
                await asyncio.sleep(0.0003)
            for task in tasks[::3]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            kept = [result is None for result in results]
            assert all(kept[number] for number in range(30) if number % 3)
            with await store.freeze(rollout_id) as snapshot:
                stored = {entry.model_call_id: entry for entry in snapshot.entries}
                for entry, must in zip(entries, kept, strict=True):
                    if must or entry.model_call_id in stored:
                        assert not difference(stored[entry.model_call_id], entry)
                assert calls_of(snapshot) == dict.fromkeys(stored, "recorded")

    asyncio.run(main())
    store.close_now()


def test_puts_that_race_with_close_return_or_are_refused(directory: Path) -> None:
    for turn in range(15):
        store = open_store(directory / "store", sync_threads=1 + 3 * (turn % 2))
        returned: list[str] = []
        refused: list[str] = []
        started = threading.Barrier(5)

        def write(
            name: str,
            store: FileStore = store,
            turn: int = turn,
            started: threading.Barrier = started,
            returned: list[str] = returned,
            refused: list[str] = refused,
        ) -> None:
            started.wait()
            for number in range(100_000):
                try:
                    if name < "c":
                        store.put_now(entry_of(f"r-{turn}", f"{name}-{number}"))
                    else:
                        asyncio.run(store.put(entry_of(f"r-{turn}", f"{name}-{number}")))
                except ClosedError:
                    refused.append(name)
                    return
                returned.append(f"{name}-{number}")

        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.002 * turn)
        store.close_now()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert len(refused) == 4
        with open_store(directory / "store") as fresh, fresh.freeze_now(f"r-{turn}") as snapshot:
            assert sorted(calls_of(snapshot)) == sorted(returned)


def open_and_close(channel: Channel, path: str) -> None:
    """In a child: use and close stores, and tell what they leave."""

    async def use(turn: int) -> None:
        async with open_store(path, sync_threads=4, sweep_every_s=3600.0) as store:
            await store.begin_call("r-0", f"begun-{turn}")
            await asyncio.gather(*(store.put(entry_of(f"r-{n % 5}", f"call-{turn}-{n}")) for n in range(20)))
            for snapshot in await store.freeze_many(f"frozen-{turn}-{n}" for n in range(5)):
                snapshot.close()

    before = os.listdir("/proc/self/fd")
    for turn in range(10):
        asyncio.run(use(turn))
    eventually(lambda: threading.active_count() == 1, "threads end")
    channel.send((before, os.listdir("/proc/self/fd"), os.listdir(f"{path}/writers")))


def test_closed_stores_leave_no_thread_and_no_descriptor(directory: Path, nursery: Nursery) -> None:
    before, after, writers = nursery.start(open_and_close, str(directory / "store")).receive()
    assert before == after
    assert not writers


# ---- freeze that waits for open calls


def test_freeze_waits_for_open_calls_and_refuses_new_ones(directory: Path, nursery: Nursery) -> None:
    path = directory / "store"
    store, other, consumer = open_store(path), Other(nursery, path), Other(nursery, path)
    other.do("begin_call", "r", "open")
    store.begin_call_now("r", "ours")
    consumer.ask("freeze", "r", wait_open_s=PATIENCE_S)

    def is_refused(begin: Callable[..., Any], call: str) -> bool:
        try:
            begin("r", call)
        except FrozenError:
            return True
        return False

    numbers = iter(range(1_000_000))
    begun: list[str] = []

    def refused() -> bool:
        call = f"new-{next(numbers)}"
        if is_refused(store.begin_call_now, call):
            return True
        begun.append(call)
        store.settle_call_now("r", call, "no_generation")
        return False

    eventually(refused, "new calls are refused")
    assert is_refused(lambda *ids: other.do("begin_call", *ids), "another")
    assert consumer.is_waiting()
    other.do("begin_call", "r", "open")  # a repetition begins nothing
    other.do("put", entry_of("r", "open"))
    store.settle_call_now("r", "ours", "aborted")
    _, _, calls = consumer.answer()
    assert calls == {"open": "recorded", "ours": "aborted", **dict.fromkeys(begun, "no_generation")}


def test_freeze_waits_no_longer_than_it_was_told(directory: Path, nursery: Nursery) -> None:
    store, other = open_store(directory / "store"), Other(nursery, directory / "store")
    other.do("begin_call", "r", "open")
    other.do("begin_call", "s", "open")
    start = time.monotonic()
    with store.freeze_now("r", wait_open_s=0.2) as snapshot:
        assert calls_of(snapshot) == {"open": "open"}
        assert snapshot.incomplete

    async def main() -> None:
        with await store.freeze("s", wait_open_s=0.2) as snapshot:
            assert calls_of(snapshot) == {"open": "open"}

    asyncio.run(main())
    assert 0.4 <= time.monotonic() - start < 10.0
    store.freeze_now("absent", wait_open_s=PATIENCE_S).close()
    assert time.monotonic() - start < 10.0


def test_freeze_does_not_wait_for_calls_of_dead_processes(directory: Path, nursery: Nursery) -> None:
    store, other = open_store(directory / "store"), Other(nursery, directory / "store")
    other.do("begin_call", "r", "open")
    other.do("begin_call", "s", "open")
    other.child.kill()
    start = time.monotonic()
    with store.freeze_now("r", wait_open_s=60.0) as snapshot:
        assert calls_of(snapshot) == {"open": "open"}

    async def main() -> None:
        (await store.freeze("s", wait_open_s=60.0)).close()

    asyncio.run(main())
    assert time.monotonic() - start < 10.0
    store.sweep_now(0)
    assert os.listdir(directory / "store" / "writers") == []


def test_a_killed_waiter_leaves_the_rollout_open(directory: Path, nursery: Nursery) -> None:
    store, waiter = open_store(directory / "store"), Other(nursery, directory / "store")
    store.begin_call_now("r", "open")
    waiter.ask("freeze", "r", wait_open_s=60.0)

    def is_refused(call: str) -> bool:
        try:
            store.begin_call_now("r", call)
        except FrozenError:
            return True
        return False

    numbers = iter(range(1_000_000))
    eventually(lambda: is_refused(f"before-{next(numbers)}"), "new calls are refused")
    waiter.child.kill()
    store.begin_call_now("r", "after")
    store.put_now(entry_of("r", "after"))
    assert store.stat_now("r").state == "open"


# ---- attempts


def test_a_straggler_of_another_process_does_not_reach_the_next_attempt(directory: Path, nursery: Nursery) -> None:
    store, straggler = open_store(directory / "store"), Other(nursery, directory / "store")
    for call in ("one", "two", "three"):
        straggler.do("begin_call", "r", call)
    straggler.do("put", entry_of("r", "recorded"))
    store.reset_now("r")
    with pytest.raises(StaleAttemptError):
        straggler.do("put", entry_of("r", "one"))
    assert store.stat_now("r").state == "absent"
    store.begin_call_now("r", "new")
    store.put_now(entry_of("r", "new"))
    for _ in range(2):
        with pytest.raises(StaleAttemptError):
            straggler.do("put", entry_of("r", "one"))
        with pytest.raises(StaleAttemptError):
            straggler.do("put_many", [entry_of("r", "two", choice_index=choice) for choice in range(3)])
        with pytest.raises(StaleAttemptError):
            straggler.do("settle_call", "r", "two", "aborted")
        with pytest.raises(StaleAttemptError):
            straggler.do("mark_incomplete", "r", "three")
    with store.freeze_now("r") as snapshot:
        assert calls_of(snapshot) == {"new": "recorded"}
        assert snapshot.version == 1
    with pytest.raises(StaleAttemptError):
        straggler.do("mark_incomplete", "r", "three")
    with store.freeze_now("r") as snapshot:
        assert snapshot.version == 1
    straggler.do("mark_incomplete", "r", "of-this-attempt")
    with store.freeze_now("r") as snapshot:
        assert snapshot.version == 2


def test_a_store_that_requires_intents_takes_those_of_other_processes(directory: Path, nursery: Nursery) -> None:
    store, other = open_store(directory / "store", require_intent=True), Other(nursery, directory / "store")
    for state in ("absent", "open"):
        with pytest.raises(StaleAttemptError):
            store.put_now(entry_of("r", "no-intent"))
        assert store.stat_now("r").state == state
        other.do("begin_call", "r", "theirs")
    store.put_now(entry_of("r", "theirs"))
    other.do("reset", "r")
    other.do("begin_call", "r", "next-attempt")
    with pytest.raises(StaleAttemptError):
        store.put_now(entry_of("r", "theirs"))
    other.do("begin_call", "r", "choices", choices=2)
    store.put_many_now([entry_of("r", "choices", choice_index=choice) for choice in range(2)])
    with store.freeze_now("r") as snapshot:
        assert calls_of(snapshot) == {"next-attempt": "open", "choices": "recorded"}


def test_operations_queued_behind_a_reset_belong_to_the_next_attempt(directory: Path, nursery: Nursery) -> None:
    store, other = open_store(directory / "store", sync_threads=4), Other(nursery, directory / "store")
    results: list[object] = []

    def together(works: list[Callable[[], object]]) -> None:
        def run(work: Callable[[], object]) -> None:
            try:
                results.append(work())
            except BaseException as error:
                results.append(error)

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)

    for turn in range(60):
        store.put_now(entry_of("r", f"before-{turn}"))
        other.ask("put", entry_of("r", f"other-{turn}"))
        works: list[Callable[[], object]] = []
        for number in range(3):
            entry = entry_of("r", f"call-{turn}-{number}")
            works += [partial(store.put_now, entry), partial(store.reset_now, "r")]
        together(works)
        other.answer()
    assert results == [None] * len(results)
    store.put_now(entry_of("r", "last"))
    with store.freeze_now("r") as snapshot:
        assert "last" in calls_of(snapshot)
        assert not snapshot.damage


# ---- sweeps


def put_freeze_retire(channel: Channel, path: str, name: str, count: int) -> None:
    """In a child: writer and consumer of one rollout id that is used again and again."""
    store = open_store(path)
    returned: list[str] = []
    consumed: dict[tuple[str, int], list[str]] = {}
    for number in range(count):
        try:
            store.put_now(entry_of("r", f"{name}-{number}"))
            returned.append(f"{name}-{number}")
        except (FrozenError, RetiredError):
            pass
        try:
            with store.freeze_now("r") as snapshot:
                pair, calls = (snapshot.snapshot_id, snapshot.version), list(calls_of(snapshot))
        except RetiredError:
            continue
        if store.retire_now("r", snapshot_id=pair[0], version=pair[1]):
            consumed[pair] = calls
    channel.send((returned, consumed))


def sweep_on(channel: Channel, path: str) -> None:
    """In a child: sweep every tombstone, again and again."""
    store, removed = open_store(path), 0
    while not channel.poll(0):
        removed += store.sweep_now(0)
    channel.send(removed)


def test_a_sweep_never_lets_two_processes_hold_one_rollout(directory: Path, nursery: Nursery) -> None:
    path = str(directory / "store")
    store = open_store(path)
    workers = [nursery.start(put_freeze_retire, path, name, 150) for name in ("a", "b")]
    sweepers = [nursery.start(sweep_on, path) for _ in range(2)]
    returned: list[str] = []
    consumed: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        puts, snapshots = worker.receive()
        returned += puts
        for pair, calls in snapshots.items():
            assert consumed.setdefault(pair, calls) == calls
    for sweeper in sweepers:
        sweeper.send("stop")
    assert sum(sweeper.receive() for sweeper in sweepers) > 0
    try:
        with store.freeze_now("r") as snapshot:
            consumed.setdefault((snapshot.snapshot_id, snapshot.version), list(calls_of(snapshot)))
    except RetiredError:
        pass
    assert sorted(call for calls in consumed.values() for call in calls) == sorted(returned)


def test_a_store_sweeps_by_itself_past_what_is_broken(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = directory / "store"
    store = open_store(path)
    for number in range(5):
        store.put_now(entry_of(f"r-{number}", "call"))
        with store.freeze_now(f"r-{number}") as snapshot:
            pair = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        assert store.retire_now(f"r-{number}", **pair)  # type: ignore[arg-type]
    store.put_now(entry_of("broken", "call"))
    store.close_now()
    (broken,) = (path / "rollouts").glob("*/broken")
    (broken / ("0" * 32)).mkdir()
    with open_store(path, sweep_every_s=0.01, tombstone_age_s=0.001):
        eventually(lambda: not list((path / "rollouts").glob("*/r-*")), "tombstones are gone")
    assert broken.exists()
    assert any("broken" in record.getMessage() for record in caplog.records)
    assert not any(record.exc_info for record in caplog.records)


# ---- bounds


def open_many(channel: Channel, path: str, limit: int, count: int, sync_threads: int) -> None:
    """In a child with few descriptors: many rollouts, all put at once, one after the other, and frozen."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store = open_store(path, sync_threads=sync_threads)

    async def main() -> None:
        for turn in range(3):
            await asyncio.gather(*(store.put(entry_of(f"r-{number}", f"call-{turn}")) for number in range(count)))

    asyncio.run(main())
    for number in range(0, count, 7):
        store.put_now(entry_of(f"r-{number}", "call-3"))
    most = len(os.listdir("/proc/self/fd"))
    wrong = 0
    for number in range(0, count, 5):
        with store.freeze_now(f"r-{number}") as snapshot:
            wrong += len(snapshot.entries) != (4 if number % 7 == 0 else 3)
    store.close_now()
    channel.send((most, wrong, len(os.listdir("/proc/self/fd"))))


def _opens_many(directory: Path, nursery: Nursery, limit: int, count: int) -> None:
    for sync_threads in (1, 16):
        path = str(directory / f"store-{sync_threads}")
        child = nursery.start(open_many, path, limit, count, sync_threads)
        most, wrong, left = child.receive(600.0)
        assert most <= limit // 2 + 16, "half of the descriptors belong to the program around the store"
        assert not wrong
        assert left < 16


def test_many_rollouts_are_open_at_a_low_limit_of_descriptors(directory: Path, nursery: Nursery) -> None:
    _opens_many(directory, nursery, 128, 1_500)


def call_many(channel: Channel, path: str, limit: int, count: int) -> None:
    """In a child with few descriptors: each call is followed by its answer while all the others are under way."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store = open_store(path, sync_threads=16)

    async def call(rollout_id: str) -> None:
        for number in range(5):
            await store.begin_call(rollout_id, f"call-{number}")
            await store.put(entry_of(rollout_id, f"call-{number}"))

    async def main() -> list[BaseException | None]:
        return await asyncio.gather(*(call(f"r-{n}") for n in range(count)), return_exceptions=True)

    channel.send([repr(result) for result in asyncio.run(main()) if result is not None])


def test_rollouts_that_all_have_work_waiting_keep_to_the_limit_of_descriptors(
    directory: Path, nursery: Nursery
) -> None:
    assert nursery.start(call_many, str(directory / "store"), 256, 600).receive() == []


def open_several(channel: Channel, path: str, limit: int, count: int) -> None:
    """In a child with few descriptors: several stores, each with many open rollouts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    stores = []

    async def main() -> None:
        for number in range(4):
            stores.append(open_store(path, sync_threads=16))
            for store in stores:
                call = f"call-{number}-{len(stores)}"
                await asyncio.gather(*(store.put(entry_of(f"r-{n}", call)) for n in range(count)))

    asyncio.run(main())
    most = len(os.listdir("/proc/self/fd"))
    for store in stores:
        store.close_now()
    channel.send((most, len(os.listdir("/proc/self/fd"))))


def test_stores_of_one_process_share_its_descriptors(directory: Path, nursery: Nursery) -> None:
    most, left = nursery.start(open_several, str(directory / "store"), 256, 200).receive()
    assert most < 200
    assert left < 16


@pytest.mark.torture
def test_10000_rollouts_are_open_at_1024_descriptors(directory: Path, nursery: Nursery) -> None:
    _opens_many(directory, nursery, 1_024, 10_000)


def freeze_many_big(channel: Channel, path: str, limit: int, count: int) -> None:
    """In a child with few descriptors: keep the snapshots of many rollouts, each large enough to be mapped."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    store = open_store(path)
    prompt = np.arange(100_000, dtype=np.int32)  # too large for uint16: 400 kB each
    for number in range(count):
        store.put_now(entry_of(f"r-{number}", "call", prompt=prompt + number))
    snapshots = store.freeze_many_now(f"r-{number}" for number in range(count))
    store.put_now(entry_of("another", "call"))
    exact = all(np.array_equal(s.entries[0].prompt_token_ids, prompt + n) for n, s in enumerate(snapshots))
    channel.send((len(os.listdir("/proc/self/fd")), exact))


def test_many_snapshots_are_kept_at_a_low_limit_of_descriptors(directory: Path, nursery: Nursery) -> None:
    descriptors, exact = nursery.start(freeze_many_big, str(directory / "store"), 128, 200).receive()
    assert descriptors <= 60, "mappings may take a quarter, 32, and nothing else is open for long"
    assert exact


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def see_many(channel: Channel, path: str, count: int) -> None:
    """In a child: rollouts that come and go; what they leave in memory."""
    store = open_store(path)

    async def see(numbers: range) -> None:
        await asyncio.gather(*(_live(number) for number in numbers))

    async def _live(number: int) -> None:
        rollout_id = f"rollout-{number}"
        await store.begin_call(rollout_id, "call")
        await store.put(entry_of(rollout_id, "call"))
        if number % 2:
            with await store.freeze(rollout_id) as snapshot:
                pair = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
            await store.retire(rollout_id, **pair)  # type: ignore[arg-type]

    asyncio.run(see(range(200)))
    before = _resident_bytes()
    for first in range(200, count, 200):
        asyncio.run(see(range(first, min(first + 200, count))))
    channel.send(_resident_bytes() - before)


def test_rollouts_that_were_seen_leave_little_memory_behind(
    nursery: Nursery, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The caches of a store are full long before this many: the bound is nearly that of 100,000 rollouts (50 MB).
    count = 20_000
    left = nursery.start(see_many, str(directory / "store"), count).receive(120.0)
    say(capsys, f"{count} rollouts left {left / 1e6:.0f} MB behind")
    assert left < 45e6


@pytest.mark.torture
def test_100000_rollouts_leave_less_than_50_mb_behind(
    nursery: Nursery, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = nursery.start(see_many, str(directory / "store"), 100_000).receive(1_800.0)
    say(capsys, f"100,000 rollouts left {left / 1e6:.0f} MB behind")
    assert left < 50e6
