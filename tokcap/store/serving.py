"""Serving one rollout: take its fence, do what is asked, in order. Used by every thread of the engine."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Sequence
from typing import Any

from ..errors import CorruptError, TokcapError
from . import fence
from .batch import Batch
from .files import Files, durability_error
from .layout import Directory, Layout
from .lifecycle import Lifecycle, apply_to_frozen
from .notes import Notes
from .open_log import OpenLog
from .operations import Operation, RecordOperation
from .rollout import Rollout
from .syncs import Sync

__all__ = ("Commit", "Server", "fail")

_TICK_NS = 20_000_000
"""Kernels before 6.13 give two changes within a tick of their clock, 10 ms at most, the same time."""


def fail(operations: Sequence[Operation], error: BaseException, path: str) -> None:
    """Leave `error` to whoever waits for these operations."""
    if isinstance(error, OSError) and not isinstance(error, TokcapError):
        name = path.rpartition("/")[2]
        error = durability_error(error, f"rollout {name}: its directory can't be used", path)
    for operation in operations:
        operation.error = error


class Commit:
    """A batch between its write and its acknowledgement."""

    __slots__ = ("batch", "error", "log", "opened", "operations", "owner", "rollout", "unsynced")

    def __init__(self, rollout: Rollout, log: OpenLog, batch: Batch, operations: list[RecordOperation]) -> None:
        self.rollout, self.log, self.batch, self.operations = rollout, log, batch, operations
        self.error: OSError | None = None
        self.owner: Any = None
        """Whoever waits for it."""
        self.unsynced = 0
        """Syncs of it that the kernel has not finished."""
        self.opened: list[int] = []
        """Descriptors that are needed until it is synced."""

    def to_sync(self) -> list[Sync]:
        """What makes this commit durable, beside `shared`. Raises `OSError` if something can't be opened."""
        opened = self.rollout.open_to_sync(self.log, self.batch, self.opened)
        return [Sync(fd, whole, (self,)) for fd, whole in opened]

    def synced(self, error: OSError | None) -> bool:
        """One of `to_sync` is done; True if it was the last."""
        self.error = self.error or error
        self.unsynced -= 1
        return not self.unsynced

    def sync(self) -> None:
        """Wait for the device; needs nothing but the descriptor."""
        try:
            self.rollout.sync(self.log, self.batch)
        except OSError as error:
            self.error = error
        except BaseException as error:  # it may run in a thread that others need
            self.error = OSError(errno.EIO, f"the sync was interrupted: {error!r}")


class Server:
    """Does operations on rollouts; holds no state of its own but which directories are known."""

    def __init__(self, files: Files, layout: Layout) -> None:
        self.files, self.layout = files, layout
        self._shards_as_of = 0
        """When the directory of the shards was last changed, as it was when all its entries were made durable."""

    # ---- the fence

    def enter(self, rollout: Rollout, create: bool) -> str:
        """Take the fence: `held`, `busy`, or `absent` if there is nothing to take and nothing is to be made."""
        try:
            return self._enter(rollout, create)
        except BaseException:
            # It may be held already, and nobody will come to give it back.
            rollout.drop()
            rollout.close_descriptors()
            raise

    def _enter(self, rollout: Rollout, create: bool) -> str:
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
            if rollout.is_current():
                return "held"
            rollout.drop()
            if fence.still_there(self.files, rollout.fence_fd, rollout.path):
                # Also if the shard was there: whoever made it, maybe anew, may have died before it was durable.
                as_of = self.files.stat(self.layout.rollouts).st_ctime_ns
                rollout.shard_is_new = as_of != self._shards_as_of
                # Another change may still get the same time.
                rollout.shards_as_of = 0 if 0 <= time.time_ns() - as_of < _TICK_NS else as_of
                return "held"
            rollout.close_descriptors()

    def leave(self, rollout: Rollout) -> None:
        """Give the fence back."""
        if rollout.fence_fd >= 0:
            try:
                fence.unlock(self.files, rollout.fence_fd)
            except OSError:
                rollout.close_descriptors()

    def _make_directory(self, rollout: Rollout) -> None:
        """Make the rollout's directory, and its shard's; whoever writes the first record syncs what leads to it."""
        with contextlib.suppress(FileExistsError):
            try:
                self.files.mkdir(rollout.path)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    self.files.mkdir(self.layout.shard(rollout.rollout_id))

    # ---- operations, the fence held

    def run(self, rollout: Rollout, operations: list[Operation]) -> list[Operation]:
        """Do the operations in order; their results and errors are left in them.

        Those behind one that removed the directory, and the fence with it, come back: they need a turn of their own.
        """
        records: list[RecordOperation] = []
        for position, operation in enumerate(operations):
            if isinstance(operation, RecordOperation):
                records.append(operation)
                continue
            self._run_records(rollout, records)
            records = []
            fenced = rollout.fence_fd >= 0
            self._run_alone(rollout, operation)
            if fenced and rollout.fence_fd < 0:
                return operations[position + 1 :]
        self._run_records(rollout, records)
        return []

    def _run_alone(self, rollout: Rollout, operation: Operation) -> None:
        assert isinstance(operation, Lifecycle)
        try:
            operation.result = operation.run(rollout) if rollout.fence_fd >= 0 else False
        except Exception as error:
            rollout.drop()
            fail([operation], error, rollout.path)

    def _run_records(self, rollout: Rollout, operations: list[RecordOperation]) -> None:
        if not operations:
            return
        try:
            log = rollout.log
            if log is None:
                directory = rollout.look() if rollout.fence_fd >= 0 else Directory(rollout.path)
                if directory.state in ("frozen", "retired"):
                    self._run_closed(rollout, directory, operations)
                    return
                log = rollout.load(directory)
            try:
                commit = self.start_commit(rollout, log, operations)
            except CorruptError:
                # A record was damaged since the log was read. Read again, it is lost, and may be stored once more.
                commit = self.start_commit(rollout, rollout.load(rollout.look()), operations)
            if commit is not None:
                commit.sync()
                self.finish_commit(commit)
        except Exception as error:
            rollout.drop()
            fail([operation for operation in operations if operation.error is None], error, rollout.path)

    def _run_closed(self, rollout: Rollout, directory: Directory, operations: list[RecordOperation]) -> None:
        if directory.state == "retired":
            self.files.fsync(rollout.fence_fd)  # whoever retired it may have died before this
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
                operation.take_verdict()
            except Exception as error:
                fail([operation], error, rollout.path)

    def is_there(self, rollout: Rollout) -> bool:
        """Whether the rollout has a directory, in which there may be something to read."""
        try:
            self.files.stat(rollout.path)
        except OSError:
            return False
        return True

    def begin_log(self, rollout: Rollout) -> OpenLog | None:
        """The log of a rollout that is absent as yet; None if there is something to be read first."""
        directory = rollout.look()
        return rollout.load(directory) if directory.state == "absent" and not directory.incarnation else None

    # ---- a commit, in steps

    def sync(self, sync: Sync) -> OSError | None:
        """Do one sync and wait for it."""
        try:
            if sync.whole:
                self.files.fsync(sync.descriptor)
            else:
                self.files.fdatasync(sync.descriptor)
        except OSError as error:
            return error
        return None

    def start_commit(self, rollout: Rollout, log: OpenLog, operations: list[RecordOperation]) -> Commit | None:
        """Apply record operations to an open log and write their frames; None if there was nothing to write.

        Raises `DurabilityError` if the write fails, `CorruptError` if a record on disk is not any more what the log
        holds in memory. What an operation itself forbids is left in the operation.
        """
        log.closing = (
            rollout.fence_fd >= 0
            and any(operation.begins for operation in operations)
            and fence.is_signalled(rollout.fence_fd, fence.CLOSING)
        )
        batch = rollout.new_batch(log, time.time())
        empty = len(batch)
        exists = log.last_name is not None
        accepted: list[RecordOperation] = []
        for operation in operations:
            operation.error = operation.verdict = None  # of a try that met damage
            try:
                operation.check_attempt("open" if exists else "absent", log.directory.incarnation)
                operation.apply(log, batch)
                accepted.append(operation)
            except CorruptError:
                raise
            except TokcapError as error:
                operation.error = error
        commit = Commit(rollout, log, batch, accepted)
        if len(batch) == empty:
            rollout.discard(log, batch)
            self._accept(commit)
            return None
        rollout.append(log, batch)
        return commit

    def finish_commit(self, commit: Commit) -> None:
        """Acknowledge a commit that was synced. Raises `DurabilityError` if the sync had failed."""
        rollout = commit.rollout
        if commit.opened:
            for fd in commit.opened:
                with contextlib.suppress(OSError):
                    self.files.close(fd)
            if commit.error is None:
                rollout.names_are_durable()
        if commit.error is None and rollout.shards_as_of and not rollout.shard_is_new:
            self._shards_as_of, rollout.shards_as_of = rollout.shards_as_of, 0
        rollout.acknowledge(commit.log, commit.batch, commit.error)
        self._accept(commit)

    def _accept(self, commit: Commit) -> None:
        for operation in commit.operations:
            operation.done(commit.log.directory.incarnation)
            operation.take_verdict()
