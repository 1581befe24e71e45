"""One rollout as a writer sees it: what its log holds, and where the next batch goes.

Everything here runs while the caller holds the fence of the rollout.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

from ..errors import CorruptError
from .batch import Batch
from .fence import still_there
from .files import Files, durability_error
from .frame import ACKNOWLEDGED, SPACE, TRAILER_SIZE, Kind, content_end
from .layout import OPEN, SEALED, TORN, Directory, Layout, SegmentName, look, remove_tree
from .log import LogReader, SegmentRead
from .open_log import OpenLog, OpenSegment
from .records import SealRecord
from .scan import scan
from .space import cut_space, write_space

__all__ = ("Rollout",)

_LAST_NUMBER = 999_999_999
"""Of a segment whose name is still read as one (`layout`); no writer ever gets there."""
_MOST_CATCH_UP = 256 << 20
"""Bytes that are read of a segment behind what is known; a file may claim any size."""


class Rollout:
    """Handle of one rollout in one store object."""

    def __init__(
        self, files: Files, layout: Layout, rollout_id: str, boot_id: str, segment_bytes: int, spaced: bool = False
    ) -> None:
        self.files = files
        self.spaced = spaced
        """Whether syncs are faster inside space that was written ahead."""
        self.layout = layout
        self.rollout_id = rollout_id
        self.path = layout.rollout(rollout_id)
        self.boot_id = boot_id
        self.segment_bytes = segment_bytes
        self.fence_fd = -1
        self.log: OpenLog | None = None
        self._names_synced = False
        """The directories that lead to this log are durable."""
        self.shards_as_of = 0
        """When the directory of the shards had last been changed when the fence was taken; 0: not to be relied on."""
        self.shard_is_new = False
        """The directory that holds the rollout's was made, and is not durable yet."""
        self.unstated = False
        """A segment was abandoned and nothing durable says where it ends."""

    # ---- what is there

    def look(self) -> Directory:
        """The state that the names show; what a crash left half-done is removed on the way."""
        if self.fence_fd >= 0 and self.files.fstat(self.fence_fd).st_nlink == 2 and self._are_directories_counted():
            return Directory(self.path)  # no directory in it: nothing at all
        if self.fence_fd >= 0 and not still_there(self.files, self.fence_fd, self.path):
            raise OSError(errno.ESTALE, "the directory was replaced by another one while it was in use", self.path)
        directory = look(self.files, self.path)
        if directory.leftovers:
            try:
                # The renames that made them superfluous may not be durable yet: their process may have died.
                self.files.fsync(self.fence_fd)
                if directory.versions:
                    self.files.fsync_directory(directory.incarnation_path)
            except OSError:
                return directory
        for path in directory.leftovers:
            try:
                remove_tree(self.files, path)
            except OSError:
                continue  # it changes no state; the sweep tries again
        return directory

    def _are_directories_counted(self) -> bool:
        """Whether the links of a directory tell how many are in it: some file systems say 2 of each. This one's parent
        has one at least."""
        return self.files.stat(os.path.dirname(self.path)).st_nlink > 2

    def is_current(self) -> bool:
        """Whether the log is still as this object knows it: every change leaves a trace in the segment.

        Another writer's batch stands where the next one would go, a freeze changes the number of links, a closed or
        rotated segment, a retirement and a reset the name.
        """
        log = self.log
        if log is None or log.segment is None:
            return False
        segment = log.segment
        try:
            # A directory that holds a segment is not removed, so what the fence is on is still the rollout's.
            there = self.files.stat_below(self.fence_fd, segment.below)
        except OSError:
            return False
        if (there.st_ino, there.st_dev) != segment.inode or there.st_nlink != 1:
            return False
        if there.st_size == segment.append_at:
            return True
        if there.st_size < segment.append_at:
            return False
        try:
            if segment.fd < 0:
                segment.fd = self.files.open(segment.path, write=True)
            next_word = self.files.word_at(segment.fd, segment.append_at)
        except OSError:
            return False
        return next_word == SPACE or self._catch_up(there.st_size)

    def has_ended(self) -> bool:
        """Whether the segment that is kept open was linked by a freeze, or deleted: nobody will continue it."""
        segment = None if self.log is None else self.log.segment
        if segment is None or segment.fd < 0:
            return False
        try:
            return self.files.fstat(segment.fd).st_nlink != 1
        except OSError:
            return False

    def _catch_up(self, size: int) -> bool:
        """Read what another process appended to the segment; False if that can't be continued."""
        log = self.log
        assert log is not None and log.segment is not None
        segment = log.segment
        if size - segment.append_at > _MOST_CATCH_UP:
            return False  # read anew, which looks at what the file really holds
        try:
            data = self.files.read(segment.fd, size - segment.append_at, segment.append_at)
        except OSError:
            return False
        end = content_end(data, len(data))
        found = scan(
            data,
            segment.seed,
            limit=end,
            origin=segment.append_at,
            sequence=segment.next_sequence,
            batch=segment.next_batch,
        )
        if found.append_at is None or found.damage or (found.frames and found.frames[-1].kind == Kind.SEAL):
            return False
        for frame in found.frames:
            frame.offset += segment.append_at
        known = len(log.ledger.nodes)
        log.reader.buffers.pop(segment.name.number, None)
        log.reader.fold(segment.name.number, data, segment.header, found, shift=segment.append_at)
        try:
            log.reader.settle_repetitions()
            for index in range(known, len(log.ledger.nodes)):
                log.search.follow(index)
        except CorruptError:
            return False
        segment.next_sequence, segment.next_batch = found.next_sequence, found.next_batch
        segment.size = size
        segment.append_at += end
        log.last_end = segment.append_at - TRAILER_SIZE
        return True

    def load(self, directory: Directory) -> OpenLog:
        """Read the log of an open rollout from disk."""
        self.drop()
        reader = LogReader(self.files, self.rollout_id, directory.incarnation, self.boot_id)
        reader.keep_buffers = True
        reader.read_open(directory)
        log = OpenLog(directory, reader)
        lost = {damage.path for damage in reader.ledger.damage}
        for read in reader.segments:
            if read.scan.end or reader.paths[read.number] in lost:
                log.predecessor, log.last_end = read.number, read.scan.end or -1
        self._names_synced = any(read.scan.frames for read in reader.segments)
        if directory.segments:
            self._resume(log, directory.segments[-1], reader.segments[-1])
        reader.keep_buffers = False
        reader.buffers.clear()
        self.log = log
        return log

    def _resume(self, log: OpenLog, name: SegmentName, read: SegmentRead) -> None:
        log.last_name = name
        header = read.header
        if name.kind != OPEN or read.scan.append_at is None or header is None:
            return
        if not log.reader.is_same_life(header, log.directory.incarnation_path):
            return
        if not read.scan.frames or read.scan.frames[-1].kind == Kind.SEAL:
            return
        path = f"{log.directory.incarnation_path}/{name}"
        segment = OpenSegment(name, path, log.reader.seed(name.number), header)
        segment.append_at = read.scan.append_at
        segment.next_sequence, segment.next_batch = read.scan.next_sequence, read.scan.next_batch
        there = self.files.stat(path)
        segment.inode, segment.size = (there.st_ino, there.st_dev), there.st_size
        log.search.adopt(name.number)
        log.segment = segment

    # ---- writing

    def needs_new_segment(self, log: OpenLog) -> bool:
        return log.segment is None or log.segment.append_at >= self.segment_bytes

    def new_batch(self, log: OpenLog, now: float) -> Batch:
        """A batch for the log's segment; for a new one if there is none to continue."""
        segment = log.segment
        if segment is not None and segment.append_at >= self.segment_bytes:
            self._seal(log, segment)
            segment = None
        if segment is not None:
            return Batch(
                seed=segment.seed,
                offset=segment.append_at,
                sequence=segment.next_sequence,
                number=segment.next_batch,
            )
        if not log.directory.incarnation:
            log.directory.incarnation = log.reader.incarnation = os.urandom(16).hex()
        name = SegmentName(log.last_name.number + 1 if log.last_name else 1, OPEN)
        if name.number > _LAST_NUMBER:
            raise CorruptError(
                f"rollout {self.rollout_id}: a segment has the last number that there is, {log.last_name}; nothing "
                "else can be written: move that file away, or freeze",
                path=log.directory.incarnation_path,
            )
        batch = Batch(seed=log.reader.seed(name.number), offset=0, sequence=0, number=0)
        header = batch.add_header(
            self.rollout_id,
            log.directory.incarnation,
            name.number,
            self.boot_id,
            now,
            log.last_end,
            log.predecessor,
            self.files.mount_life(self.layout.root),
        )
        path = f"{log.directory.incarnation_path}/{name}"
        log.segment = OpenSegment(name, path, batch.seed, header)
        log.search.forget()
        log.reader.segment_started()
        log.reader.opened(name.number, path)
        return batch

    def discard(self, log: OpenLog, batch: Batch) -> None:
        """The batch turned out empty: a segment that it would have started is not started."""
        if batch.offset == 0:
            log.segment = None

    def write(self, log: OpenLog, batch: Batch) -> None:
        """Make a batch durable. Raises `DurabilityError`; then nothing of it counts and the log must be read again."""
        error: OSError | None = None
        self.append(log, batch)
        try:
            self.sync(log, batch)
        except OSError as failure:
            error = failure
        self.acknowledge(log, batch, error)

    def _segment(self, log: OpenLog) -> OpenSegment:
        assert log.segment is not None
        return log.segment

    def append(self, log: OpenLog, batch: Batch) -> None:
        """First step of `write`: the bytes, not yet durable."""
        segment = self._segment(log)
        try:
            if segment.fd < 0:
                if batch.offset == 0:
                    self._start_segment(log, segment)
                else:
                    segment.fd = self.files.open(segment.path, write=True)
            self.files.write(segment.fd, batch.buffers(), batch.offset)
            if self.spaced and batch.append_at >= segment.size:
                write_space(self.files, segment, batch.append_at)
        except OSError as error:
            if batch.offset == 0 and segment.fd >= 0:
                self._remove(log, segment)
            self.drop()
            raise durability_error(
                error, f"rollout {self.rollout_id}: can't write {segment.path}", segment.path
            ) from error

    def sync(self, log: OpenLog, batch: Batch) -> None:
        """Second step: durable. Touches nothing but descriptors, so that it may run in another thread."""
        segment = self._segment(log)
        self.files.fdatasync(segment.fd)
        if not self._names_synced:
            self._sync_names(log)
        elif batch.offset == 0:
            self.files.fsync_directory(log.directory.incarnation_path)

    def open_to_sync(self, log: OpenLog, batch: Batch, opened: list[int]) -> list[tuple[int, bool]]:
        """What `sync` syncs below the rollout's directory, in any order: descriptors, and whether each is a directory.

        Those that were opened for it are added to `opened`, to be closed afterwards.
        """
        fds = [(self._segment(log).fd, False)]
        if self._names_synced and batch.offset:
            return fds
        opened.append(self.files.open_directory(log.directory.incarnation_path))
        fds.append((opened[-1], True))
        if not self._names_synced:
            fds.append((self.fence_fd, True))
        return fds

    def shared_to_sync(self) -> list[str]:
        """What `sync` syncs above the rollout's directory: others may wait for the same."""
        return [] if self._names_synced else self.parents()

    def names_are_durable(self) -> None:
        """Everything that led to the first record was synced."""
        if not self._names_synced:
            self._names_synced, self.shard_is_new = True, False

    def parents(self) -> list[str]:
        """Directories above the rollout's whose entries may not be durable yet."""
        return [os.path.dirname(self.path), *([self.layout.rollouts] if self.shard_is_new else ())]

    def acknowledge(self, log: OpenLog, batch: Batch, error: OSError | None) -> None:
        """Third step, given the error of the second: other processes believe the batch from here on."""
        segment = self._segment(log)
        if error is None:
            try:
                self.files.acknowledge(segment.fd, ACKNOWLEDGED, batch.trailer_offset)
            except OSError as failure:
                error = failure
        if error is not None:
            if batch.offset or not self._remove(log, segment):
                self._abandon()
            raise durability_error(
                error, f"rollout {self.rollout_id}: can't sync {segment.path}", segment.path
            ) from error
        self._advance(log, segment, batch)

    def _advance(self, log: OpenLog, segment: OpenSegment, batch: Batch) -> None:
        segment.append_at = batch.append_at
        segment.next_sequence = batch.next_sequence
        segment.next_batch = batch.number + 1
        log.predecessor, log.last_end, log.last_name = segment.name.number, batch.end, segment.name
        log.reader.unwritten.clear()

    def _start_segment(self, log: OpenLog, segment: OpenSegment) -> None:
        incarnation_path = log.directory.incarnation_path
        if log.last_name is None:
            with contextlib.suppress(FileExistsError):
                self.files.mkdir(incarnation_path)
        elif log.last_name.kind == OPEN:
            # Named first, so that no process with an older picture can still append to it.
            torn = SegmentName(log.last_name.number, TORN)
            self.files.rename(f"{incarnation_path}/{log.last_name}", f"{incarnation_path}/{torn}")
            log.reader.opened(torn.number, f"{incarnation_path}/{torn}")
        if log.last_name is not None and log.last_name.number != log.predecessor:
            # Of an empty segment the name may not be durable; without it, it would pass for a lost one.
            self.files.fsync_directory(incarnation_path)
        segment.fd = self.files.create(segment.path)
        there = self.files.fstat(segment.fd)
        segment.inode = (there.st_ino, there.st_dev)

    def _sync_names(self, log: OpenLog) -> None:
        """Every directory entry that leads to a first record, from the segment up to the shard's."""
        self.files.fsync_directory(log.directory.incarnation_path)
        self.files.fsync(self.fence_fd)
        for path in self.parents():
            self.files.fsync_directory(path)
        self.names_are_durable()

    def _seal(self, log: OpenLog, segment: OpenSegment) -> None:
        """Close a segment for good: a footer says where it ends, its name says that it has one."""
        batch = Batch(
            seed=segment.seed, offset=segment.append_at, sequence=segment.next_sequence, number=segment.next_batch
        )
        batch.add_record(Kind.SEAL, SealRecord(segment.next_sequence, segment.append_at))
        self.write(log, batch)
        sealed = SegmentName(segment.name.number, SEALED)
        path = f"{log.directory.incarnation_path}/{sealed}"
        try:
            self.files.rename(segment.path, path)
        except OSError as error:
            self.drop()
            raise durability_error(error, f"rollout {self.rollout_id}: can't seal {segment.path}", path) from error
        cut_space(self.files, segment)
        log.reader.opened(sealed.number, path)
        log.last_name = sealed
        self._close_descriptor(segment)
        log.segment = None

    def seal(self) -> None:
        """Seal the open segment, so that it has no torn tail; the next writer starts another."""
        log = self.log
        if log is None or log.segment is None:
            return
        self._seal(log, log.segment)
        try:
            self.files.fsync_directory(log.directory.incarnation_path)
        except OSError as error:
            raise durability_error(error, f"rollout {self.rollout_id}: can't seal", self.path) from error

    def _remove(self, log: OpenLog, segment: OpenSegment) -> bool:
        """Remove a segment whose first batch failed: nothing in it was ever acknowledged. True if it is gone for good.

        Otherwise a disk that is full for hours would collect one more empty segment with every try.
        """
        self.drop()
        try:
            self.files.unlink(segment.path)
            self.files.fsync_directory(log.directory.incarnation_path)
        except OSError:
            return False
        if not self._names_synced:
            self.unmake(log.directory.incarnation_path)
        return True

    def unmake(self, incarnation_path: str) -> None:
        """Remove the directories of a rollout of which nothing could be stored, as far as they are empty.

        The next sync of a directory whose sync failed succeeds without having done anything: they are made anew.
        """
        with contextlib.suppress(OSError):
            self.files.rmdir(incarnation_path)
            self.files.rmdir(self.path)
            self.close_descriptors()
            self.files.rmdir(os.path.dirname(self.path))

    def _abandon(self) -> None:
        """After a failed sync: say durably, if the device still can, that the batch doesn't count.

        In this boot its trailer stays zero and nobody believes it; a later boot could believe its whole frames. The
        header of the next segment says where this one ends. If that fails too, `close` says it.
        """
        self.drop()
        self.unstated = True
        try:
            self.state_end(self.look())
        except (OSError, CorruptError):
            return
        finally:
            self.drop()

    def state_end(self, directory: Directory) -> None:
        """Start a segment, if the last one has an end that nothing states: its header does."""
        log = self.load(directory)
        if log.segment is None and directory.state == "open":
            batch = self.new_batch(log, time.time())
            self.append(log, batch)
            self.sync(log, batch)
            segment = self._segment(log)
            self.files.acknowledge(segment.fd, ACKNOWLEDGED, batch.trailer_offset)
            self._advance(log, segment, batch)
        self.unstated = False

    # ---- letting go

    def _close_descriptor(self, segment: OpenSegment) -> None:
        if segment.fd >= 0:
            fd, segment.fd = segment.fd, -1
            try:
                self.files.close(fd)
            except OSError:
                return  # everything in it was synced, or was never acknowledged

    def close_descriptors(self) -> None:
        """Free the descriptors; the picture stays and they are opened again when needed."""
        if self.log is not None and self.log.segment is not None:
            self._close_descriptor(self.log.segment)
        if self.fence_fd >= 0:
            fd, self.fence_fd = self.fence_fd, -1
            try:
                self.files.close(fd)
            except OSError:
                return

    def drop(self) -> None:
        """Forget the picture; the next operation reads the directory again."""
        if self.log is not None and self.log.segment is not None:
            self._close_descriptor(self.log.segment)
        self.log = None
