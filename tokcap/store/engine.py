"""The engine: a queue of operations per rollout, and the threads that serve them.

Operations of one rollout are served in order, by one thread at a time; whatever queued up while the last sync ran
shares the next write and sync (group commit without a timer). Different rollouts are synced at the same time, so that
the journal of the file system merges them.

    submit -> committer -> queue of the rollout -> committer   short path: a batch for an open rollout
                                                -> workers     the rest: first puts, reloads, freezes, resets ...
                                                -> usher       while another process holds the fence; then the workers
    call   -> the calling thread does it itself, if nobody serves the rollout at the moment

In the main thread a signal handler may raise between any two calls, or use the store, or close it. So `submit` is one
call that takes no lock, and `call` from the main thread is `submit` and a wait: everything that could be left half done
is done by threads that no signal handler runs in.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..errors import ClosedError, TokcapError
from .admission import Admission
from .committer import Committer, Errand
from .files import Files, durability_error
from .kept import Kept
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


class Engine(Kept):
    """Serves operations for one store object."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        admission: Admission,
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
        super().__init__(cache_bytes, descriptors)
        self.files, self.layout, self.boot_id = files, layout, boot_id
        self.admission = admission
        self.segment_bytes, self.lock_timeout_s, self.spaced = segment_bytes, lock_timeout_s, spaced
        self._server = Server(files, layout)
        self._committer = Committer(
            self._server,
            sync_threads,
            kernel_syncs=kernel_syncs,
            free_syncs=free_syncs,
            most_unsynced=max(1, descriptors // 8),
            arrived=self._arrived,
            refused=self._refused,
            pending=self._take_pending,
            elsewhere=self._work_on,
            leave=self._leave,
            deliver=self._deliver,
        )
        admission.nudge = self._nudge
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
                deliver=self._deliver,
            )
        self._one_at_a_time = threading.Lock()
        self._most_workers = max(2, sync_threads)
        self._ready: SimpleQueue[Queued | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self.closed = False
        self._share_descriptors()

    # ---- taking operations in

    def submit(self, operation: Operation) -> None:
        """Hand over an operation; its waiter is woken once it is done. Raises what it can't be handed over for."""
        if self.closed and not isinstance(operation, Seal):
            raise self._is_closed()
        operation.deadline = time.monotonic() + self.lock_timeout_s
        self._hand_over(operation, operation.rollout_id)

    def submit_together(self, operations: Sequence[Freeze]) -> None:
        """`submit` freezes of several rollouts, which are then frozen in step."""
        if self.closed:
            raise self._is_closed()
        deadline = time.monotonic() + self.lock_timeout_s
        for operation in operations:
            operation.deadline = deadline
        if operations:
            self._hand_over(partial(self._begin_together, operations), operations[0].rollout_id)

    def _hand_over(self, item: Operation | Errand, rollout_id: str) -> None:
        try:
            self._committer.take(item)
        except OSError as error:
            path = self.layout.rollout(rollout_id)
            raise durability_error(error, f"rollout {rollout_id}: nobody can serve it", path) from error

    def _arrived(self, operation: Operation) -> Queued | None:
        """An operation reached the committer; the rollout, if the committer is the one to serve it now."""
        try:
            queued = self._enqueue(operation)
        except BaseException as error:
            self._fail(operation, error)
            return None
        if queued is not None and self._workers and isinstance(operation, Lifecycle):
            self._hand_to_worker(queued)  # where the committer would send it
            return None
        return queued

    def _refused(self, operations: list[Operation]) -> None:
        """They came after the end."""
        for operation in operations:
            self._fail(operation, self._is_closed())

    def _fail(self, operation: Operation, error: BaseException) -> None:
        fail([operation], error, self.layout.rollout(operation.rollout_id))
        self._deliver([operation])

    def _deliver(self, operations: list[Operation]) -> None:
        """Wake those who wait for these; they wait for the disk no longer."""
        self.admission.release(operations)
        deliver(operations)

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # no thread: nothing waits, then
            self._committer.take(self.admission.advance)

    def _others_wait(self) -> int:
        return self._usher.waiting

    def _ask_for_room(self) -> None:
        with contextlib.suppress(OSError):
            self._committer.take(self.make_room)

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"the store on {self.layout.root} is closed")

    def _begin_together(self, operations: Sequence[Freeze]) -> None:
        together = self._together
        idle: list[Queued] = []
        for operation in operations:
            try:
                queued = self._enqueue(operation)
            except BaseException as error:
                self._fail(operation, error)
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
        if threading.current_thread() is threading.main_thread():
            self.submit(operation)
        else:
            operation.deadline = time.monotonic() + self.lock_timeout_s
            queued = self._enqueue(operation)
            if queued is not None:
                self._serve(queued)
        waiter.wait()
        error = operation.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return operation.result

    def call_many(self, operations: Sequence[Operation], admit: Callable[[Operation], None] | None = None) -> list[Any]:
        """Do several operations at once and wait for all; results and errors in the same order.

        `admit` is asked before each of them is handed over, and may wait, or raise what becomes of it.
        """
        waiters = []
        for operation in operations:
            operation.waiter = waiter = ThreadWaiter()
            waiters.append(waiter)
        freezes = [operation for operation in operations if isinstance(operation, Freeze)]
        if freezes and len(freezes) == len(operations):
            self.submit_together(freezes)
        else:
            for operation in operations:
                try:
                    if admit is not None:
                        admit(operation)
                    self.submit(operation)
                except BaseException as error:
                    self.admission.leave(operation)
                    if not isinstance(error, TokcapError):
                        raise
                    operation.error = error
                    operation.waiter.wake()
        for waiter in waiters:
            waiter.wait()
        results: list[Any] = []
        for operation in operations:
            failure = operation.take_error()
            results.append(operation.result if failure is None else failure)
        return results

    def _enqueue(self, operation: Operation) -> Queued | None:
        """The rollout, if somebody has to serve it now: it was idle."""
        rollout_id = operation.rollout_id
        with self._guard:
            if self.closed and not isinstance(operation, Seal):
                raise self._is_closed()
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
                self._ready.put(None)  # for the next one
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
                self._deliver(operations)
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
        self._deliver(operations)

    def _wait_for_fence(self, queued: Queued, operations: list[Operation]) -> None:
        self._usher.take(queued, operations)
        with self._guard:
            self._free_descriptors()

    def _leave(self, queued: Queued, operations: list[Operation]) -> None:
        """End a turn: count what the rollout holds, and let the next operations have theirs."""
        with self._guard:
            self._weigh(queued)
            again = bool(queued.pending)
            if not again:
                queued.busy = False
                self._evict(queued)
            else:
                self._keep_in_turn(queued)
        if again:
            self._to_committer(queued)

    def _to_committer(self, queued: Queued) -> None:
        try:
            self._committer.take(queued)
        except OSError as error:  # there is no thread: a caller that served it itself was the first that came
            operations = self._take_pending(queued)
            fail(operations, error, queued.rollout.path)
            self._leave(queued, operations)
            self._deliver(operations)

    def _again(self, queued: Queued, operations: list[Operation]) -> None:
        self._work_on(queued, operations)

    def _waited_in_vain(self, queued: Queued, operations: list[Operation], error: BaseException, last: bool) -> None:
        fail(operations, error, queued.rollout.path)
        if last:
            self._leave(queued, operations)
        self._deliver(operations)

    # ---- the end

    def close(self) -> list[TokcapError]:
        """Finish what is queued, seal what this object wrote, let go of threads and descriptors."""
        with self._guard:
            if self.closed:
                return []
            self.closed = True
        self.admission.close()
        self._committer.flush()  # what was asked for before is done
        self._await_idle()
        seals = [Seal(rollout_id) for rollout_id in dict.fromkeys([*self._unsealed, *self._queued])]
        errors = [error for error in self.call_many(seals) if isinstance(error, TokcapError)]
        self._await_idle()
        self._drop_all()
        self._committer.stop()
        if self._together is not None:
            with self._one_at_a_time:
                self._together.close()
        self._ready.put(None)
        return errors

    def _await_idle(self) -> None:
        while True:
            with self._guard:
                if not any(queued.busy for queued in self._queued.values()):
                    return
            time.sleep(0.001)

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors (the parent keeps its locks); nothing else is touched."""
        self.admission.abandon()
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
