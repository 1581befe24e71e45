"""The engine: a queue of operations per rollout, and the threads that serve them.

Operations of one rollout are served in order, by one thread at a time; whatever queued up while the last sync ran
shares the next write and sync (group commit without a timer). Different rollouts are synced at the same time, so that
the journal of the file system merges them.

    submit -> queue of the rollout -> committer   short path: a batch for an open rollout
                                   -> workers     the rest: first puts, reloads, freezes, retirements, resets
                                   -> usher       while another process holds the fence; then to the workers
    call   -> the calling thread does it itself, if nobody serves the rollout at the moment (and it is not the main
              thread, which a signal may interrupt anywhere)
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from ..errors import ClosedError, TokcapError
from .committer import Committer
from .files import Files
from .layout import Layout
from .lifecycle import Freeze, Lifecycle, Seal
from .operations import Operation
from .queue import Queued
from .rollout import Rollout
from .serving import Server, fail
from .together import Together
from .usher import Usher
from .waiters import ThreadWaiter, deliver, start_thread

__all__ = ("Engine",)

_EVICTED_AT_ONCE = 4
"""By one operation, at most: more than it can add, few enough to be no burden."""

_REMEMBERED = 20_000
"""Rollout ids, about 2 MB."""

_MOST_LOGS = 4096
"""Rollouts kept in memory, however small: beside those at work there are those that nobody ever ends."""

_COST_OF_A_HANDLE = 1000
"""Bytes that an idle rollout without a log takes, roughly."""

_ENGINES: dict[int, weakref.ref[Engine]] = {}
"""Those of this process that are in use: they share its descriptors."""

os.register_at_fork(after_in_child=_ENGINES.clear)


class Engine:
    """Serves operations for one store object."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        *,
        boot_id: str,
        sync_threads: int,
        kernel_syncs: int,
        free_syncs: bool,
        cache_bytes: int,
        segment_bytes: int,
        descriptors: int,
        lock_timeout_s: float,
        spaced: bool = False,
    ) -> None:
        self.files, self.layout, self.boot_id = files, layout, boot_id
        self.cache_bytes, self.segment_bytes = cache_bytes, segment_bytes
        self.descriptors, self.lock_timeout_s, self.spaced = descriptors, lock_timeout_s, spaced
        self._guard = threading.Lock()
        self._queued: OrderedDict[str, Queued] = OrderedDict()
        """Least recently used first."""
        self._with_descriptors: OrderedDict[str, Queued] = OrderedDict()
        self._cached_bytes = 0
        self._unsealed: dict[str, None] = {}
        """Rollouts that were dropped from memory while open; `close` seals them too."""
        self._server = Server(files, layout)
        self._committer = Committer(
            self._server,
            sync_threads,
            kernel_syncs=kernel_syncs,
            free_syncs=free_syncs,
            most_unsynced=max(1, descriptors // 8),
            pending=self._take_pending,
            elsewhere=self._work_on,
            leave=self._leave,
            deliver=deliver,
        )
        self._usher = Usher(
            files, lock_timeout_s, entered=self._hand_to_worker, again=self._again, failed=self._waited_in_vain
        )
        # Without the kernel many threads that wait are faster.
        self._together = None
        if kernel_syncs or sync_threads <= 1:
            self._together = Together(
                self._server,
                kernel_syncs,
                most=max(1, min(64, descriptors // 16)),
                pending=self._take_pending,
                elsewhere=self._work_on,
                wait=self._wait_for_fence,
                leave=self._leave,
                deliver=deliver,
            )
        self._one_at_a_time = threading.Lock()
        self._most_workers = max(2, sync_threads)
        self._ready: SimpleQueue[Queued | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self.closed = False
        others = list(_ENGINES.values())
        key = id(self)
        _ENGINES[key] = weakref.ref(self, lambda _: _ENGINES.pop(key, None))
        for other in others:
            engine = other()
            if engine is not None:
                engine.make_room()

    # ---- taking operations in

    def submit(self, operation: Operation) -> None:
        """Queue an operation; its waiter is woken once it is done."""
        queued = self._enqueue(operation)
        if queued is not None:
            self._pass_on(queued, operation)

    def submit_together(self, operations: Sequence[Freeze]) -> None:
        """`submit` freezes of several rollouts, which are then frozen in step."""
        together = self._together
        idle: list[Queued] = []
        for operation in operations:
            try:
                queued = self._enqueue(operation)
            except TokcapError as error:
                operation.error = error
                deliver([operation])
                continue
            if queued is not None:
                idle.append(queued)
        if together is not None and len(idle) > 1:
            with contextlib.suppress(OSError):  # no more threads: those that there are have to do
                start_thread(lambda: self._freeze_together(together, idle), "tokcap-freeze")
                return
        for queued in idle:
            self._to_committer(queued)

    def _freeze_together(self, together: Together, idle: list[Queued]) -> None:
        with self._one_at_a_time:
            together.freeze(idle)

    def call(self, operation: Operation) -> Any:
        """Do an operation and wait for it, in this thread if nobody serves its rollout."""
        waiter = operation.waiter = ThreadWaiter()
        queued = self._enqueue(operation)
        if queued is not None:
            if threading.current_thread() is threading.main_thread():
                # A signal handler may raise at any point of this thread: it only waits.
                self._pass_on(queued, operation)
            else:
                self._serve(queued)
        waiter.wait()
        error = operation.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return operation.result

    def call_many(self, operations: Sequence[Operation]) -> list[Any]:
        """Do several operations at once and wait for all; results and errors in the same order."""
        waiters = []
        for operation in operations:
            operation.waiter = waiter = ThreadWaiter()
            waiters.append(waiter)
        freezes = [operation for operation in operations if isinstance(operation, Freeze)]
        if len(freezes) == len(operations):
            self.submit_together(freezes)
        else:
            for operation in operations:
                self.submit(operation)
        for waiter in waiters:
            waiter.wait()
        results: list[Any] = []
        for operation in operations:
            error = operation.take_error()
            results.append(operation.result if error is None else error)
        return results

    def _enqueue(self, operation: Operation) -> Queued | None:
        """The rollout, if somebody has to serve it now: it was idle."""
        operation.deadline = time.monotonic() + self.lock_timeout_s
        rollout_id = operation.rollout_id
        with self._guard:
            if self.closed and not isinstance(operation, Seal):
                raise ClosedError(f"the store on {self.layout.root} is closed")
            queued = self._queued.get(rollout_id)
            if queued is None:
                rollout = Rollout(self.files, self.layout, rollout_id, self.boot_id, self.segment_bytes, self.spaced)
                queued = self._queued[rollout_id] = Queued(rollout)
            else:
                self._queued.move_to_end(rollout_id)
            queued.pending.append(operation)
            if queued.busy:
                return None
            queued.busy = True
            return queued

    def _take_pending(self, queued: Queued) -> list[Operation]:
        with self._guard:
            operations = list(queued.pending)
            queued.pending.clear()
        return operations

    def _pass_on(self, queued: Queued, operation: Operation) -> None:
        if self._workers and isinstance(operation, Lifecycle):
            self._hand_to_worker(queued)  # where the committer would send it
        else:
            self._to_committer(queued)

    def _to_committer(self, queued: Queued) -> None:
        try:
            self._committer.take(queued)
        except OSError as error:
            operations = self._take_pending(queued)
            fail(operations, error, queued.rollout.path)
            self._leave(queued, operations)
            deliver(operations)

    # ---- serving outside the committer

    def _work_on(self, queued: Queued, operations: list[Operation]) -> None:
        """Hand a rollout to the workers; with `entered` set, its fence is held already."""
        if queued.entered is None:
            with self._guard:
                queued.pending.extendleft(reversed(operations))
        self._hand_to_worker(queued)

    def _hand_to_worker(self, queued: Queued) -> None:
        self._ready.put(queued)
        if len(self._workers) < self._most_workers and (not self._workers or self._ready.qsize()):
            with self._guard:
                if len(self._workers) < self._most_workers:
                    with contextlib.suppress(OSError):  # no more threads: those that there are have to do
                        self._workers.append(start_thread(self._work, "tokcap-worker"))
            if not self._workers:
                self._serve(self._ready.get())  # type: ignore[arg-type]

    def _work(self) -> None:
        while True:
            queued = self._ready.get()
            if queued is None:
                return
            self._serve(queued)

    def _serve(self, queued: Queued) -> None:
        """One turn at a rollout, from taking the fence to waking those who wait."""
        rollout = queued.rollout
        if queued.entered is not None:
            operations, queued.entered = queued.entered, None
            held = "held"
        else:
            operations = self._take_pending(queued)
            try:
                held = self._server.enter(rollout, any(operation.creates for operation in operations))
            except BaseException as error:
                fail(operations, error, rollout.path)
                self._leave(queued, operations)
                deliver(operations)
                return
            if held == "busy":
                self._wait_for_fence(queued, operations)
                return
        try:
            left = self._server.run(rollout, operations)
            if left:
                operations = operations[: -len(left)]
                with self._guard:
                    queued.pending.extendleft(reversed(left))
        except BaseException as error:
            rollout.drop()
            fail([o for o in operations if o.error is None and o.result is None], error, rollout.path)
        self._server.leave(rollout)
        self._leave(queued, operations)
        deliver(operations)

    def _wait_for_fence(self, queued: Queued, operations: list[Operation]) -> None:
        self._usher.take(queued, operations)
        with self._guard:
            self._free_descriptors()

    def _leave(self, queued: Queued, operations: list[Operation]) -> None:
        """End a turn: count what the rollout holds, and let the next operations have theirs."""
        log = queued.rollout.log
        cost = _COST_OF_A_HANDLE if log is None else log.nbytes
        with self._guard:
            self._cached_bytes += cost - queued.cost
            queued.cost = cost
            again = bool(queued.pending)
            if not again:
                queued.busy = False
                self._evict(queued)
            else:
                self._keep_descriptors(queued)
        if again:
            self._to_committer(queued)

    def _again(self, queued: Queued, operations: list[Operation]) -> None:
        self._work_on(queued, operations)

    def _waited_in_vain(self, queued: Queued, operations: list[Operation], error: BaseException, last: bool) -> None:
        fail(operations, error, queued.rollout.path)
        if last:
            self._leave(queued, operations)
        deliver(operations)

    # ---- bounds

    def _evict(self, queued: Queued) -> None:
        """Keep memory and descriptors within their bounds. The guard is held, `queued` is idle."""
        rollout_id = queued.rollout.rollout_id
        if queued.rollout.log is None:
            # Absent, frozen or retired: nothing worth keeping.
            queued.rollout.close_descriptors()
            self._forget(rollout_id)
            if queued.rollout.unstated:
                self._remember_unsealed(rollout_id)
        else:
            self._keep_descriptors(queued)
        for _ in range(_EVICTED_AT_ONCE):
            if (self._cached_bytes <= self.cache_bytes and len(self._queued) <= _MOST_LOGS) or len(self._queued) <= 1:
                break
            name, oldest = next(iter(self._queued.items()))
            self._queued.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.drop()
                oldest.rollout.close_descriptors()
                self._forget(name)
                self._remember_unsealed(name)

    def _keep_descriptors(self, queued: Queued) -> None:
        """Leave a rollout its descriptors, if there is room. The guard is held, and nobody serves it at the moment."""
        rollout_id = queued.rollout.rollout_id
        if rollout_id in self._with_descriptors:
            self._with_descriptors.move_to_end(rollout_id)
            if not self._has_too_many():
                return
        self._with_descriptors[rollout_id] = queued
        self._free_descriptors()
        if self._has_too_many():  # the others are all about to be served
            queued.rollout.close_descriptors()
            self._with_descriptors.pop(rollout_id, None)

    def _has_too_many(self) -> bool:
        held = 2 * (len(self._with_descriptors) + self._usher.waiting)
        return held > self.descriptors // max(1, len(_ENGINES))

    def _free_descriptors(self) -> None:
        """Close those of rollouts that are idle, if with those that wait there are too many. The guard is held."""
        table = self._with_descriptors
        for _ in range(_EVICTED_AT_ONCE):
            if not table or not self._has_too_many():
                break
            name, oldest = next(iter(table.items()))
            table.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.close_descriptors()
                del table[name]

    def make_room(self) -> None:
        """Another engine has come: its share of the descriptors is left to it."""
        with self._guard:
            for _ in range(0, len(self._with_descriptors), _EVICTED_AT_ONCE):
                self._free_descriptors()

    def _forget(self, rollout_id: str) -> None:
        queued = self._queued.pop(rollout_id, None)
        self._with_descriptors.pop(rollout_id, None)
        if queued is not None:
            self._cached_bytes -= queued.cost

    def _remember_unsealed(self, rollout_id: str) -> None:
        self._unsealed[rollout_id] = None
        while len(self._unsealed) > _REMEMBERED:
            del self._unsealed[next(iter(self._unsealed))]

    # ---- the end

    def close(self) -> list[TokcapError]:
        """Finish what is queued, seal what this object wrote, let go of threads and descriptors."""
        with self._guard:
            if self.closed:
                return []
            self.closed = True
        self._await_idle()
        seals = [Seal(rollout_id) for rollout_id in dict.fromkeys([*self._unsealed, *self._queued])]
        errors = [error for error in self.call_many(seals) if isinstance(error, TokcapError)]
        self._await_idle()
        with self._guard:
            for queued in self._queued.values():
                queued.rollout.drop()
                queued.rollout.close_descriptors()
            self._queued.clear()
            self._with_descriptors.clear()
            self._unsealed.clear()
        self._committer.stop()
        if self._together is not None:
            with self._one_at_a_time:
                self._together.close()
        for _ in self._workers:
            self._ready.put(None)
        _ENGINES.pop(id(self), None)
        return errors

    def _await_idle(self) -> None:
        while True:
            with self._guard:
                if not any(queued.busy for queued in self._queued.values()):
                    return
            time.sleep(0.001)

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors (the parent keeps its locks); nothing else is touched."""
        self._committer.abandon()
        if self._together is not None:
            self._together.abandon()
        for queued in list(self._queued.values()):
            rollout = queued.rollout
            segment = rollout.log.segment if rollout.log is not None else None
            for fd in (rollout.fence_fd, queued.signal_fd, -1 if segment is None else segment.fd):
                if fd >= 0:
                    try:
                        os.close(fd)
                    except OSError:
                        continue
