"""The committer: one thread that takes in what callers ask for, and writes batches for all open rollouts, while the
kernel syncs those before them.

Writing a batch is a handful of short calls; done by many threads at once they would spend their time handing each
other the interpreter. So one thread encodes and writes, has the kernel sync the files (`syncs`; threads that do nothing
but wait, where the kernel can't), and acknowledges what comes back. What is done at about the same time is delivered
by one wake-up per event loop. Whatever is not the short path (a reload, a frozen rollout, a freeze; with threads that
sync, first puts) goes to the workers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ..errors import CorruptError
from .inbox import BellInbox, Inbox
from .operations import Operation, RecordOperation
from .queue import Queued
from .serving import Commit, Server, fail
from .syncs import KernelSyncs, Sync
from .waiters import ThreadWaiter, start_thread

__all__ = ("Committer", "Errand")

Errand = Callable[[], None]
"""Something short that the committer is asked to do in its turn."""

_STARTED_AT_ONCE = 8
"""Syncs, while more is to be written: the device has something to do meanwhile."""

_MOST_OF_ONE = 5
"""Syncs of one rollout: a first put needs its file and four directories."""

logger = logging.getLogger("tokcap.store")


class Committer:
    """`take` what is to be done. `arrived` queues operations, `refused` gets those that came after the end; `elsewhere`
    gets rollouts that are not for the short path, `leave` those that are done.

    Whoever hands something over does it with one call that takes no lock: it may be the main thread, where a signal
    handler may raise, or use the store itself, at any point.
    """

    def __init__(
        self,
        server: Server,
        sync_threads: int,
        *,
        kernel_syncs: int,
        free_syncs: bool,
        most_unsynced: int,
        arrived: Callable[[Operation], Queued | None],
        refused: Callable[[list[Operation]], None],
        pending: Callable[[Queued], list[Operation]],
        elsewhere: Callable[[Queued, list[Operation]], None],
        leave: Callable[[Queued, list[Operation]], None],
        deliver: Callable[[list[Operation]], None],
    ) -> None:
        self._server = server
        self._sync_threads = sync_threads
        self._most_unsynced = max(sync_threads, most_unsynced)
        """Rollouts between write and acknowledgement; each of them needs its descriptors."""
        self._arrived, self._refused = arrived, refused
        self._pending, self._elsewhere, self._leave, self._deliver = pending, elsewhere, leave, deliver
        self._inbox: Inbox[Queued | Operation | Errand | None] = Inbox()
        self._kernel: KernelSyncs | None = None
        if kernel_syncs:
            self._use_kernel(kernel_syncs, most_unsynced)
        self._begins_logs = free_syncs or self._kernel is not None
        """With threads that sync, a first put takes one of the workers: it has several directories to wait for."""
        self._to_sync: SimpleQueue[Queued | None] = SimpleQueue()
        self._backlog: deque[Queued] = deque()
        """Rollouts that are not written yet because too many others are unsynced."""
        self._syncing = 0
        self._threads: list[threading.Thread] = []
        """Those that wait for the device."""
        self._role = threading.Lock()
        """Held for ever by the one thread that is the committer."""
        self._has_thread = False
        self._ended = False

    def _use_kernel(self, most: int, most_unsynced: int) -> None:
        try:
            inbox: BellInbox[Queued | Operation | Errand | None] = BellInbox()
        except OSError:
            return  # no descriptor left for it: threads do without
        self._kernel = self._server.files.kernel_syncs(most, inbox.bell)
        if self._kernel is not None:
            self._inbox = inbox
            # Not more because of threads: a first put has five descriptors open.
            self._most_unsynced = min(most_unsynced, self._kernel.most)

    def take(self, item: Queued | Operation | Errand) -> None:
        """An operation, a rollout with operations, or an errand. Raises `OSError` if there is no thread to take it."""
        if not self._has_thread:
            start_thread(self._run, "tokcap-committer")  # of several that may be started one stays
            self._has_thread = True
        inbox = self._inbox
        inbox.put(item)
        if self._ended:
            self._refuse(inbox)

    def flush(self) -> None:
        """Wait until everything that was handed over before has been taken in."""
        if self._has_thread:
            waiter = ThreadWaiter()
            self.take(waiter.wake)
            waiter.wait()

    def stop(self) -> None:
        """End the threads once the inbox is empty. What is handed over afterwards is refused."""
        if self._role.acquire(blocking=False):
            self._end()  # there is no thread, and there won't be any
        else:
            self._inbox.put(None)

    def abandon(self) -> None:
        """In a forked child: the threads and what the kernel does are the parent's."""
        self._inbox.close()

    def _end(self) -> None:
        self._ended = True
        self._has_thread = True
        for _ in self._threads:
            self._to_sync.put(None)
        if self._kernel is not None:
            self._kernel.close()
        inbox, self._inbox = self._inbox, Inbox()
        self._refuse(inbox)

    def _refuse(self, inbox: Inbox[Queued | Operation | Errand | None]) -> None:
        """What came when nobody looked any more: it and the end can't both have missed each other."""
        left = inbox.drain()
        self._refused([item for item in left if isinstance(item, Operation)])
        for item in left:
            if item is not None and not isinstance(item, (Operation, Queued)):
                item()

    def _run(self) -> None:
        if not self._role.acquire(blocking=False):
            return
        while not self._ended:
            self._turn()

    def _turn(self) -> None:
        arrived = self._inbox.take()
        finished: list[Operation] = []
        if self._kernel is not None and self._syncing:
            self._collect(self._kernel, finished)
        for item in arrived:
            if type(item) is Queued:
                queued: Queued | None = item
            elif isinstance(item, Operation):
                queued = self._arrived(item)
            else:
                if item is not None:
                    self._run_errand(item)  # type: ignore[arg-type]
                continue
            if queued is None:
                continue
            if queued.commit is None:
                self._backlog.append(queued)
            else:
                self._syncing -= 1
                self._finish(queued, finished)
        if finished:
            self._deliver(finished)
        self._write_all()
        if None in arrived:
            self._end()

    def _run_errand(self, errand: Errand) -> None:
        try:
            errand()
        except BaseException:  # whatever it is, it never costs this thread
            logger.exception("something that was asked of the committer failed")

    def _write_all(self) -> None:
        finished: list[Operation] = []
        written: list[Queued] = []
        inline = self._sync_threads <= 1 and self._kernel is None
        while self._backlog and self._has_room(len(written)):
            queued = self._backlog.popleft()
            if self._write(queued, finished):
                if inline:
                    self._sync(queued, finished)
                else:
                    written.append(queued)
                    if self._kernel is not None and len(written) >= _STARTED_AT_ONCE:
                        self._hand_over(self._kernel, written, finished)
        if len(written) == 1 and not self._syncing and not self._backlog and self._inbox.is_empty():
            # Alone: handing over would only add two wake-ups.
            self._sync(written.pop(), finished)
        if self._kernel is not None:
            self._hand_over(self._kernel, written, finished)
        elif written:
            self._hand_to_threads(written)
        if finished:
            self._deliver(finished)

    def _has_room(self, written: int) -> bool:
        """For one more beside so many that are written and not handed over."""
        if not self._syncing and not written:
            return True
        room = self._syncing + written < self._most_unsynced
        if room and self._kernel is not None:
            room = self._kernel.most - self._kernel.in_flight >= _MOST_OF_ONE * (written + 1)
        return room

    # ---- syncs that the kernel does

    def _hand_over(self, kernel: KernelSyncs, written: list[Queued], finished: list[Operation]) -> None:
        """Start the syncs of what was written; those that the kernel doesn't take are done here."""
        syncs: list[Sync] = []
        shared: dict[str, list[Commit]] = {}
        for queued in written:
            commit = queued.commit
            assert commit is not None
            commit.owner = queued
            try:
                own = commit.to_sync()
            except BaseException as error:  # whatever it is, it costs these operations, never this thread
                commit.error = error if isinstance(error, OSError) else OSError(errno.EIO, repr(error))
                self._finish(queued, finished)
                continue
            paths = queued.rollout.shared_to_sync()
            for path in paths:
                shared.setdefault(path, []).append(commit)
            commit.unsynced = len(own) + len(paths)
            syncs += own
            self._syncing += 1
        written.clear()
        for path, commits in shared.items():
            # One sync for all: what they made in this directory was made before it begins.
            try:
                fd = self._server.files.open_directory(path)
            except OSError as error:
                self._synced(commits, error, finished)
                continue
            commits[0].opened.append(fd)
            syncs.append(Sync(fd, True, commits))
        for sync in syncs[kernel.start(syncs) :]:
            self._synced(sync.ticket, self._server.sync(sync), finished)

    def _collect(self, kernel: KernelSyncs, finished: list[Operation]) -> None:
        for commits, error in kernel.finished():
            self._synced(commits, error, finished)

    def _synced(self, commits: Sequence[Commit], error: OSError | None, finished: list[Operation]) -> None:
        """A sync is done that these waited for."""
        for commit in commits:
            if commit.synced(error):
                self._syncing -= 1
                self._finish(commit.owner, finished)

    # ---- syncs that threads wait for

    def _hand_to_threads(self, written: list[Queued]) -> None:
        for queued in written:
            self._syncing += 1
            self._to_sync.put(queued)
        try:
            while len(self._threads) < min(self._sync_threads, self._syncing):
                self._threads.append(start_thread(self._wait_for_device, "tokcap-sync"))
        except OSError:  # no more threads: those that there are have to do
            if not self._threads:
                self._sync_here()

    def _sync(self, queued: Queued, finished: list[Operation]) -> None:
        assert queued.commit is not None
        queued.commit.sync()
        self._finish(queued, finished)

    def _wait_for_device(self) -> None:
        while True:
            queued = self._to_sync.get()
            if queued is None:
                return
            self._sync_next(queued)

    def _sync_next(self, queued: Queued) -> None:
        assert queued.commit is not None
        queued.commit.sync()
        self._inbox.put(queued)

    def _sync_here(self) -> None:
        with contextlib.suppress(Empty):
            while (queued := self._to_sync.get_nowait()) is not None:
                self._sync_next(queued)

    # ---- one rollout

    def _write(self, queued: Queued, finished: list[Operation]) -> bool:
        """Write what waits for an open rollout that nobody else changed; True if it now has to be synced."""
        operations = self._pending(queued)
        try:
            return self._try_to_write(queued, operations, finished)
        except BaseException as error:  # whatever it is, it costs these operations, never this thread
            logger.exception("rollout %s: a batch could not be put together", queued.rollout.rollout_id)
            queued.commit, queued.operations, queued.entered = None, [], None
            queued.rollout.drop()
            queued.rollout.close_descriptors()
            fail([operation for operation in operations if operation.error is None], error, queued.rollout.path)
            self._done(queued, operations, finished, held=False)
            return False

    def _try_to_write(self, queued: Queued, operations: list[Operation], finished: list[Operation]) -> bool:
        rollout = queued.rollout
        log = rollout.log
        if (
            rollout.needs_new_segment(log)
            if log is not None
            else not self._begins_logs or self._server.is_there(rollout)
        ):
            self._elsewhere(queued, operations)
            return False
        creates = False
        for operation in operations:
            if not isinstance(operation, RecordOperation):
                self._elsewhere(queued, operations)
                return False
            creates = creates or operation.creates
        try:
            if self._server.enter(rollout, create=log is None and creates) != "held":
                self._elsewhere(queued, operations)
                return False
            if log is None:
                log = self._server.begin_log(rollout)
        except BaseException as error:
            held = rollout.fence_fd >= 0
            rollout.drop()
            fail(operations, error, rollout.path)
            self._done(queued, operations, finished, held=held)
            return False
        if log is None or rollout.log is not log:
            queued.entered = operations
            self._elsewhere(queued, operations)
            return False
        try:
            queued.commit = self._server.start_commit(rollout, log, operations)  # type: ignore[arg-type]
        except CorruptError:
            rollout.drop()
            queued.entered = operations
            self._elsewhere(queued, operations)
            return False
        except BaseException as error:
            rollout.drop()
            fail([operation for operation in operations if operation.error is None], error, rollout.path)
        if queued.commit is None:
            self._done(queued, operations, finished, held=True)
            return False
        queued.operations = operations
        return True

    def _finish(self, queued: Queued, finished: list[Operation]) -> None:
        commit, operations = queued.commit, queued.operations
        queued.commit, queued.operations = None, []
        assert commit is not None
        try:
            self._server.finish_commit(commit)
        except BaseException as error:
            queued.rollout.drop()
            fail([operation for operation in operations if operation.error is None], error, queued.rollout.path)
        self._done(queued, operations, finished, held=True)

    def _done(self, queued: Queued, operations: list[Operation], finished: list[Operation], *, held: bool) -> None:
        if held:
            self._server.leave(queued.rollout)
        finished += operations
        self._leave(queued, operations)
