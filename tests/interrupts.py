"""Signal handlers that come at every point of the main thread at which CPython would run one, one after another.

CPython runs handlers after a call, where a function begins, and where it jumps back. `Interrupter` counts these points
inside of `tokcap/store` and has its handler come at one of them. `python -m tests.interrupts SCENARIO HANDLER` does
that for each point in turn; it ends with status 3 as soon as nothing moves any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import faulthandler
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tokcap.store
from tokcap import FileStore, TokenEntry
from tokcap.errors import ClosedError, FrozenError, RetiredError, TokcapError
from tokcap.store import inbox, waiters
from tokcap.store.engine import Engine

STUCK = 3
"""Exit status: something waits that nobody will wake."""

_STORE = str(Path(tokcap.store.__file__).parent)
_MUTATED: set[CodeType] = set()
"""If a mutant is looked into, nothing else is."""
_LOOKS_AFTER = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


class InterruptError(Exception):
    """What a signal handler raised."""


class Interrupter:
    """Has `handler` come at the `number`-th point (from 1), in the thread that enters it."""

    def __init__(self, number: int, handler: Callable[[], None]) -> None:
        self._number, self._handler = number, handler
        self._seen = 0
        self._before: dict[FrameType, int] = {}
        self._codes: dict[CodeType, bytes] = {}
        self.came = False

    def __enter__(self) -> Interrupter:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in _MUTATED if _MUTATED else not frame.f_code.co_filename.startswith(_STORE):
            return None
        frame.f_trace_opcodes = True
        self._point()
        return self._traced

    def _traced(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            code = self._codes.get(frame.f_code)
            if code is None:
                code = self._codes[frame.f_code] = frame.f_code.co_code
            before = self._before.get(frame)
            self._before[frame] = code[frame.f_lasti]
            if before is not None and dis.opname[before] in _LOOKS_AFTER:
                self._point()
        elif event == "return":
            self._before.pop(frame, None)
        return self._traced

    def _point(self) -> None:
        self._seen += 1
        if self._seen == self._number:
            self.came = True
            sys.settrace(None)
            self._handler()


class Watch:
    """Ends the process if nothing moves for `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self.moved = 0
        self._patience_s = patience_s
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            time.sleep(0.05)
            if self.moved != seen:
                seen, since = self.moved, time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                sys.stdout.write(f"stuck after {self.moved} steps\n")
                sys.stdout.flush()
                faulthandler.dump_traceback(sys.stdout)
                sys.stdout.flush()
                os._exit(STUCK)


def entry(rollout_id: str, call: str) -> TokenEntry:
    return TokenEntry(rollout_id, call, [1, 2, 3], [7, 8], [-0.5, -1.0])


# ---- what is interrupted


def put(store: FileStore, name: str) -> None:
    store.put_now(entry(name, "a"))


def put_many(store: FileStore, name: str) -> None:
    store.put_many_now([entry(name, "a"), entry(f"{name}-too", "a")])


def call(store: FileStore, name: str) -> None:
    store.begin_call_now(name, "a")
    store.settle_call_now(name, "a", "lost")


def first_call(store: FileStore, name: str) -> None:
    """Of a store that has shown nobody yet that it lives."""
    store.begin_call_now(name, "a")


def end(store: FileStore, name: str) -> None:
    with store.freeze_now(name) as snapshot:
        store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    store.reset_now(name)


def freeze_many(store: FileStore, name: str) -> None:
    for snapshot in store.freeze_many_now([name, f"{name}-too"]):
        snapshot.close()


def in_a_loop(store: FileStore, name: str) -> None:
    """What was lost on the way to the loop is delivered with the next operation that the loop asks for."""

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        first = asyncio.create_task(store.put(entry(name, "a")))
        await _with_others(store, name, [first])
        await first

    asyncio.run(main())


async def _with_others(store: FileStore, name: str, tasks: list[asyncio.Task[None]]) -> None:
    turn = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.001)
        turn += 1
        await asyncio.wait({asyncio.create_task(store.note_delivery(f"{name}-too", f"c{turn}", "full"))}, timeout=1)


def waiting_for_room(store: FileStore, name: str) -> None:
    """Two puts of which one fits at a time. What the loop isn't told of it finds out when the time is up."""

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        puts = [asyncio.create_task(store.put(entry(name, call))) for call in "ab"]
        await _with_others(store, name, puts)
        for one in puts:
            one.exception()

    asyncio.run(main())


SCENARIOS: dict[str, Callable[[FileStore, str], None]] = {
    function.__name__: function
    for function in (put, put_many, call, first_call, end, freeze_many, in_a_loop, waiting_for_room)
}


def run(scenario: str, handler: str, directory: str, watch: Watch) -> int:
    """Every point of one scenario; how many there are."""
    act = SCENARIOS[scenario]
    bound, patience_s = (30, 0.2) if scenario == "waiting_for_room" else (1 << 30, 30)
    number = 0

    def make() -> FileStore:
        return FileStore(directory, sweep_every_s=0, max_pending_bytes=bound, lock_timeout_s=patience_s)

    store = make()

    def handle() -> None:
        if handler == "raises":
            raise InterruptError
        if handler == "puts":
            store.begin_call_now("of-the-handler", f"call-{number}")
            store.put_now(entry("of-the-handler", f"call-{number}"))
        else:
            store.close_now()

    while True:
        number += 1
        name = f"r{number}"
        with Interrupter(number, handle) as interrupter, contextlib.suppress(InterruptError, ClosedError):
            act(store, name)
        watch.moved += 1
        if handler == "closes" or scenario == "first_call":
            store.close_now()
            store = make()
            store.sweep_now(0)  # also what a call left that was interrupted before it could show that it lives
            assert not os.listdir(os.path.join(directory, "writers"))
        if not interrupter.came:
            break
        # What was handed over is taken although nobody comes after it; others, and the same rollout, go on.
        assert store._engine is not None
        while not store._engine._committer._inbox.is_empty():
            time.sleep(0.0005)
        store.put_now(entry("another", f"call-{number}"))
        try:
            store.put_now(entry(name, "afterwards"))
        except (FrozenError, RetiredError):
            assert scenario in ("end", "freeze_many")
        watch.moved += 1
        while store.pending.operations:
            time.sleep(0.0005)  # of what was interrupted
        assert store.pending == type(store.pending)(0, 0, 0), store.pending
        watch.moved += 1
    store.close_now()
    watch.moved += 1
    _check(directory, scenario, handler, number)
    return number


def run_close(handler: str, directory: str, watch: Watch) -> int:
    """A close that is interrupted at every point, with puts that are under way; the next one ends it."""
    number = 0
    while True:
        number += 1
        store = FileStore(directory, sweep_every_s=0)
        store.put_now(entry("r", f"a{number}"))

        def meanwhile(store: FileStore = store, number: int = number) -> None:
            try:
                store.put_now(entry("r", f"b{number}"))
            except ClosedError:
                return

        thread = threading.Thread(target=meanwhile)
        thread.start()

        def handle(store: FileStore = store) -> None:
            if handler == "raises":
                raise InterruptError
            store.close_now()

        with Interrupter(number, handle) as interrupter, contextlib.suppress(InterruptError):
            store.close_now()
        store.close_now()
        thread.join()
        watch.moved += 1
        left = [target for target in map(_target, os.listdir("/proc/self/fd")) if target.startswith(f"{directory}/")]
        assert not left, left
        if not interrupter.came:
            return number


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _check(directory: str, scenario: str, handler: str, points: int) -> None:
    """What was acknowledged is there, and everything that is there is whole."""
    with FileStore(directory, sweep_every_s=0) as store:
        wanted = {("another", f"call-{number}") for number in range(1, points)}
        if handler == "puts":
            wanted |= {("of-the-handler", f"call-{number}") for number in range(1, points)}
        for name, _ in list(store.rollouts()):
            try:
                snapshot = store.freeze_now(name)
            except TokcapError:
                continue
            with snapshot:
                assert not snapshot.damage
                for one in snapshot.entries:
                    assert one == entry(name, one.model_call_id)
                    wanted.discard((name, one.model_call_id))
        assert not wanted, sorted(wanted)[:3]


# ---- mutants: what it has to see


def _forget_to_ring() -> None:
    def put(self: inbox.BellInbox[Any], item: Any) -> None:
        self._waiting.append(item)
        if self._asleep:
            os.eventfd_write(self.bell, 1)

    _MUTATED.add(put.__code__)
    inbox.BellInbox.put = put  # type: ignore[method-assign]


def _take_before_it_is_told() -> None:
    def empty(self: waiters.Mailbox) -> None:
        self._called = self._looking = False
        while self._finished:
            operation = self._finished.popleft()
            operation.waiter[1].set_result(operation.result)

    _MUTATED.add(empty.__code__)
    waiters.Mailbox._empty = empty  # type: ignore[method-assign]


def _queue_in_the_main_thread() -> None:
    def submit(self: Engine, operation: Any) -> None:
        operation.deadline = time.monotonic() + self.lock_timeout_s
        queued = self._enqueue(operation)
        if queued is not None:
            self._to_committer(queued)

    _MUTATED.add(submit.__code__)
    Engine.submit = submit  # type: ignore[method-assign]


def _leave_and_stay_counted() -> None:
    from tokcap.store.admission import Admission

    def leave(self: Admission, operation: Any, place: Any = None) -> None:
        """Counts stay."""

    Admission.leave = leave  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "forget to ring": _forget_to_ring,
    "take before it is told": _take_before_it_is_told,
    "queue in the main thread": _queue_in_the_main_thread,
    "leave and stay counted": _leave_and_stay_counted,
}


def main(scenario: str, handler: str, base: str, mutant: str = "", patience_s: str = "60") -> None:
    MUTANTS[mutant]()
    warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that were interrupted before they began
    watch = Watch(float(patience_s))
    with tempfile.TemporaryDirectory(prefix="tokcap-interrupts-", dir=base) as directory:
        path = os.path.join(directory, "store")
        points = run_close(handler, path, watch) if scenario == "close" else run(scenario, handler, path, watch)
        sys.stdout.write(f"{scenario}, a handler that {handler}: {points - 1} points\n")
        watch.moved += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
