"""The engine: queues of operations per rollout, and the threads that serve them.

Operations of one rollout are served in order, by one thread at a time; whatever queued up while the last sync ran
shares the next write and sync (group commit without a timer). Different rollouts are served by different threads, so
that their syncs overlap and the journal of the file system merges them.

A thread that finds the fence held by another process does not wait for it: the rollout is handed to the one *usher*
thread, which polls all such rollouts, and goes back to the workers once its fence is held.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from ..errors import BusyError, ClosedError, TokcapError
from . import fence
from .files import Files, durability_error
from .layout import Directory, Layout
from .lifecycle import Freeze, Lifecycle, Seal, apply_to_frozen
from .notes import Notes
from .operations import Operation, RecordOperation
from .rollout import OpenLog, Rollout
from .waiters import ThreadWaiter, deliver

__all__ = ("Engine",)

_POLL_S = 0.0005
"""Between two tries for a fence that another process holds; newcomers stand back meanwhile."""

_EVICTED_AT_ONCE = 4
"""By one operation, at most: more than it can add, few enough to be no burden."""

_REMEMBERED = 20_000
"""Rollout ids, about 2 MB."""


class _Served:
    """A rollout in the engine: its handle, and the operations that wait for it."""

    __slots__ = ("busy", "cost", "entered", "pending", "rollout", "signal_fd")

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.pending: deque[Operation] = deque()
        self.busy = False
        self.cost = 0
        self.entered: list[Operation] | None = None
        """Operations for which the usher has already taken the fence."""
        self.signal_fd = -1
        """While waiting for the fence: the descriptor that shows it."""


class Engine:
    """Serves operations for one store object."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        *,
        boot_id: str,
        threads: int,
        cache_bytes: int,
        segment_bytes: int,
        descriptors: int,
        lock_timeout_s: float,
    ) -> None:
        self.files, self.layout, self.boot_id = files, layout, boot_id
        self.threads, self.cache_bytes, self.segment_bytes = threads, cache_bytes, segment_bytes
        self.descriptors, self.lock_timeout_s = descriptors, lock_timeout_s
        self._guard = threading.Lock()
        self._served: OrderedDict[str, _Served] = OrderedDict()
        self._with_descriptors: OrderedDict[str, _Served] = OrderedDict()
        self._cached_bytes = 0
        self._ready: SimpleQueue[_Served | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._usher: threading.Thread | None = None
        self._waiting: list[tuple[_Served, list[Operation]]] = []
        self._wake_usher = threading.Condition(self._guard)
        self._known_shards: set[str] = set()
        self._unsealed: dict[str, None] = {}
        """Rollouts that were dropped from memory while open; `close` seals them too."""
        self.closed = False

    # ---- taking operations in

    def submit(self, operation: Operation) -> None:
        """Queue an operation; its waiter is woken once it is done."""
        served = self._enqueue(operation)
        if served is not None:
            self._hand_to_worker(served)

    def call(self, operation: Operation) -> Any:
        """Do an operation and wait for it, in this thread if its rollout is idle."""
        waiter = operation.waiter = ThreadWaiter()
        served = self._enqueue(operation)
        if served is not None:
            self._serve(served)
        waiter.wait()
        if operation.error is not None:
            raise operation.error
        return operation.result

    def call_many(self, operations: Sequence[Operation]) -> list[Any]:
        """Do several operations at once and wait for all; results and errors in the same order."""
        waiters = []
        for operation in operations:
            operation.waiter = waiter = ThreadWaiter()
            waiters.append(waiter)
            self.submit(operation)
        for waiter in waiters:
            waiter.wait()
        return [operation.result if operation.error is None else operation.error for operation in operations]

    def _enqueue(self, operation: Operation) -> _Served | None:
        """The rollout, if it has to be served now: it was idle."""
        operation.deadline = time.monotonic() + self.lock_timeout_s
        rollout_id = operation.rollout_id
        with self._guard:
            if self.closed and not isinstance(operation, Seal):
                raise ClosedError(f"the store on {self.layout.root} is closed")
            served = self._served.get(rollout_id)
            if served is None:
                rollout = Rollout(self.files, self.layout, rollout_id, self.boot_id, self.segment_bytes)
                served = self._served[rollout_id] = _Served(rollout)
            else:
                self._served.move_to_end(rollout_id)
            served.pending.append(operation)
            if served.busy:
                return None
            served.busy = True
            return served

    def _hand_to_worker(self, served: _Served) -> None:
        self._ready.put(served)
        if len(self._workers) < self.threads and (not self._workers or self._ready.qsize()):
            with self._guard:
                if len(self._workers) < self.threads:
                    worker = threading.Thread(target=self._work, name="tokcap-worker", daemon=True)
                    self._workers.append(worker)
                    worker.start()

    def _work(self) -> None:
        while True:
            served = self._ready.get()
            if served is None:
                return
            self._serve(served)

    # ---- serving one rollout

    def _serve(self, served: _Served) -> None:
        if served.entered is not None:
            operations, served.entered = served.entered, None
            self._serve_held(served, operations, held=True)
            return
        with self._guard:
            operations = list(served.pending)
            served.pending.clear()
        try:
            entered = self._enter(served.rollout, any(operation.creates for operation in operations))
        except BaseException as error:
            self._fail(operations, error)
            self._leave(served, operations, held=False)
            return
        if entered == "busy":
            self._hand_to_usher(served, operations)
            return
        self._serve_held(served, operations, held=entered == "held")

    def _serve_held(self, served: _Served, operations: list[Operation], *, held: bool) -> None:
        try:
            self._run(served.rollout, operations, held)
        except BaseException as error:
            served.rollout.drop()
            self._fail([o for o in operations if o.error is None and o.result is None], error)
        self._leave(served, operations, held=held)

    def _fail(self, operations: list[Operation], error: BaseException) -> None:
        if isinstance(error, OSError) and not isinstance(error, TokcapError):
            error = durability_error(error, "the store's directory can't be used", self.layout.root)
        for operation in operations:
            operation.error = error

    def _leave(self, served: _Served, operations: list[Operation], *, held: bool) -> None:
        rollout = served.rollout
        if held and rollout.fence_fd >= 0:
            fence.unlock(self.files, rollout.fence_fd)
        cost = 1000 if rollout.log is None else rollout.log.nbytes
        with self._guard:
            self._cached_bytes += cost - served.cost
            served.cost = cost
            again = bool(served.pending)
            if not again:
                served.busy = False
                self._evict(served)
        deliver(operations)
        if again:
            self._hand_to_worker(served)

    def _evict(self, served: _Served) -> None:
        """Keep memory and descriptors within their bounds. The guard is held, `served` is idle."""
        rollout_id = served.rollout.rollout_id
        if served.rollout.log is None:
            # Nothing worth keeping: absent, frozen or retired.
            served.rollout.close_descriptors()
            self._forget(rollout_id)
        else:
            self._with_descriptors[rollout_id] = served
            self._with_descriptors.move_to_end(rollout_id)
        table = self._with_descriptors
        for _ in range(_EVICTED_AT_ONCE):
            if 2 * len(table) <= self.descriptors:
                break
            name, oldest = next(iter(table.items()))
            table.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.close_descriptors()
                del table[name]
        for _ in range(_EVICTED_AT_ONCE):
            if self._cached_bytes <= self.cache_bytes:
                break
            name, oldest = next(iter(self._served.items()))
            self._served.move_to_end(name)
            if not oldest.busy:
                oldest.rollout.drop()
                oldest.rollout.close_descriptors()
                self._forget(name)
                self._unsealed[name] = None
                while len(self._unsealed) > _REMEMBERED:
                    del self._unsealed[next(iter(self._unsealed))]

    def _forget(self, rollout_id: str) -> None:
        served = self._served.pop(rollout_id, None)
        self._with_descriptors.pop(rollout_id, None)
        if served is not None:
            self._cached_bytes -= served.cost

    # ---- the fence

    def _enter(self, rollout: Rollout, create: bool) -> str:
        """Take the fence: `held`, `busy`, or `absent` if there is nothing to take and nothing is to be made."""
        while True:
            if rollout.fence_fd < 0:
                fd = fence.open_fence(self.files, rollout.path)
                if fd is None:
                    if not create:
                        return "absent"
                    self._make_directory(rollout)
                    continue
                rollout.fence_fd = fd
            if not fence.lock(self.files, rollout.fence_fd):
                return "busy"
            if rollout.log is not None and rollout.is_current():
                return "held"
            rollout.drop()
            if fence.still_there(self.files, rollout.fence_fd, rollout.path):
                return "held"
            rollout.close_descriptors()

    def _make_directory(self, rollout: Rollout) -> None:
        shard = self.layout.shard(rollout.rollout_id)
        if shard not in self._known_shards:
            try:
                self.files.mkdir(shard)
            except FileExistsError:
                pass
            # Whoever made it may have died before it was durable.
            self.files.fsync_directory(self.layout.rollouts)
            self._known_shards.add(shard)
        try:
            self.files.mkdir(rollout.path)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._known_shards.discard(shard)

    def _hand_to_usher(self, served: _Served, operations: list[Operation]) -> None:
        with self._guard:
            self._waiting.append((served, operations))
            if self._usher is None or not self._usher.is_alive():
                self._usher = threading.Thread(target=self._ush, name="tokcap-usher", daemon=True)
                self._usher.start()
            self._wake_usher.notify()

    def _ush(self) -> None:
        """Wait for all fences that others hold; polls, since `flock` can't wait with a time-out."""
        while True:
            with self._guard:
                if not self._waiting and not self._wake_usher.wait(timeout=5):
                    if not self._waiting:
                        self._usher = None
                        return
                waiting, self._waiting = self._waiting, []
            still = []
            for served, operations in waiting:
                if not self._try_again(served, operations):
                    still.append((served, operations))
            with self._guard:
                self._waiting = still + self._waiting
            if still:
                time.sleep(max(_POLL_S, 5e-6 * len(still)))

    def _try_again(self, served: _Served, operations: list[Operation]) -> bool:
        """True if the rollout needs no more waiting."""
        rollout = served.rollout
        freezing = any(isinstance(operation, Freeze) for operation in operations)
        try:
            if served.signal_fd < 0:
                fd = fence.open_fence(self.files, rollout.path)
                if fd is not None:
                    served.signal_fd = fd
                    fence.signal(fd, fence.WAITING)
                    if freezing:
                        fence.signal(fd, fence.FREEZING)
            if served.signal_fd < 0 or not fence.still_there(self.files, rollout.fence_fd, rollout.path):
                self._start_over(served, operations)
                return True
            overtaking = not freezing and fence.is_signalled(served.signal_fd, fence.FREEZING)
            held = not overtaking and self.files.try_lock(rollout.fence_fd)
            if held and not fence.still_there(self.files, rollout.fence_fd, rollout.path):
                self._start_over(served, operations)
                return True
            if held and not rollout.is_current():
                rollout.drop()
        except BaseException as error:
            self._stop_signalling(served)
            self._fail(operations, error)
            self._leave(served, operations, held=False)
            return True
        if held:
            self._stop_signalling(served)
            served.entered = operations
            self._hand_to_worker(served)
            return True
        return self._give_up(served, operations)

    def _give_up(self, served: _Served, operations: list[Operation]) -> bool:
        """Fail what has waited too long; True if nothing is left to wait for."""
        rollout = served.rollout
        now = time.monotonic()
        late = [operation for operation in operations if operation.deadline <= now]
        if not late:
            return False
        operations[:] = [operation for operation in operations if operation.deadline > now]
        self._fail(
            late,
            BusyError(
                f"rollout {rollout.rollout_id}: another process held it for more than {self.lock_timeout_s:g} s "
                f"({rollout.path}); find it with `lsof`, or raise lock_timeout_s"
            ),
        )
        if operations:
            deliver(late)
            return False
        self._stop_signalling(served)
        self._leave(served, late, held=False)
        return True

    def _start_over(self, served: _Served, operations: list[Operation]) -> None:
        """The directory was removed while we waited: whoever serves this next makes or finds another."""
        self._stop_signalling(served)
        served.rollout.drop()
        served.rollout.close_descriptors()
        with self._guard:
            served.pending.extendleft(reversed(operations))
        self._hand_to_worker(served)

    def _stop_signalling(self, served: _Served) -> None:
        if served.signal_fd >= 0:
            fd, served.signal_fd = served.signal_fd, -1
            self.files.close(fd)

    # ---- running operations, the fence held

    def _run(self, rollout: Rollout, operations: list[Operation], held: bool) -> None:
        records: list[RecordOperation] = []
        for operation in operations:
            if isinstance(operation, RecordOperation):
                records.append(operation)
                continue
            self._run_records(rollout, records, held)
            records = []
            self._run_alone(rollout, operation)
        self._run_records(rollout, records, held)

    def _run_alone(self, rollout: Rollout, operation: Operation) -> None:
        assert isinstance(operation, Lifecycle)
        try:
            if rollout.fence_fd < 0:
                self._reenter(rollout, operation.creates)
            if rollout.fence_fd < 0:
                operation.result = False
                return
            operation.result = operation.run(rollout)
        except Exception as error:
            rollout.drop()
            self._fail([operation], error)

    def _reenter(self, rollout: Rollout, create: bool) -> None:
        """An earlier operation of the same turn removed the directory; nobody can hold a fence that we make."""
        state = self._enter(rollout, create)
        if state == "busy":
            rollout.close_descriptors()
            raise BusyError(f"rollout {rollout.rollout_id} was taken by another process right after its reset; try again")

    def _run_records(self, rollout: Rollout, operations: list[RecordOperation], held: bool) -> None:
        if not operations:
            return
        try:
            if rollout.fence_fd < 0:
                self._reenter(rollout, any(o.creates for o in operations))
            log = rollout.log
            if log is None:
                directory = rollout.look() if rollout.fence_fd >= 0 else Directory(rollout.path)
                if directory.state in ("frozen", "retired"):
                    self._run_closed(rollout, directory, operations)
                    return
                log = rollout.load(directory)
            self._commit(rollout, log, operations)
        except Exception as error:
            rollout.drop()
            self._fail([o for o in operations if o.error is None], error)

    def _commit(self, rollout: Rollout, log: OpenLog, operations: list[RecordOperation]) -> None:
        directory = log.directory
        log.closing = rollout.fence_fd >= 0 and fence.is_signalled(rollout.fence_fd, fence.CLOSING)
        batch = rollout.new_batch(log, time.time())
        empty = len(batch)
        state = "open" if log.last_name is not None else "absent"
        accepted = []
        for operation in operations:
            try:
                operation.check_attempt(state, directory.incarnation if state == "open" else "")
                operation.apply(log, batch)
                accepted.append(operation)
            except TokcapError as error:
                operation.error = error
        if len(batch) == empty:
            rollout.discard(log, batch)
        else:
            rollout.write(log, batch)
        for operation in accepted:
            operation.done(directory.incarnation)
            operation.error = operation.verdict

    def _run_closed(self, rollout: Rollout, directory: Directory, operations: list[RecordOperation]) -> None:
        for operation in operations:
            try:
                operation.check_attempt(directory.state, directory.incarnation)
                if directory.state == "retired":
                    notes = Notes(self.files, directory.tombstone_path, directory.incarnation, directory.notes)
                    operation.apply_retired(notes)
                else:
                    apply_to_frozen(rollout, directory, operation)
                    directory = rollout.look()
                operation.done(directory.incarnation)
                operation.error = operation.verdict
            except Exception as error:
                self._fail([operation], error)

    # ---- the end

    def close(self) -> list[TokcapError]:
        """Finish what is queued, seal what this object wrote, let go of threads and descriptors."""
        with self._guard:
            if self.closed:
                return []
            self.closed = True
        self._await_idle()
        errors = []
        for rollout_id in [*self._unsealed, *self._served]:
            try:
                self.call(Seal(rollout_id))
            except TokcapError as error:
                errors.append(error)
        with self._guard:
            for served in self._served.values():
                served.rollout.drop()
                served.rollout.close_descriptors()
            self._served.clear()
            self._with_descriptors.clear()
            self._unsealed.clear()
        for _ in self._workers:
            self._ready.put(None)
        return errors

    def _await_idle(self) -> None:
        while True:
            with self._guard:
                if not any(served.busy for served in self._served.values()):
                    return
            time.sleep(0.001)

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors (the parent keeps its locks) and forget everything."""
        for served in list(self._served.values()):
            rollout = served.rollout
            segment = rollout.log.segment if rollout.log is not None else None
            for fd in (rollout.fence_fd, served.signal_fd, -1 if segment is None else segment.fd):
                if fd >= 0:
                    try:
                        os.close(fd)
                    except OSError:
                        continue

