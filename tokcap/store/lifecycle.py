"""The operations that end a log: freeze, late versions, retire, reset.

Each takes effect by one atomic rename, made under the fence of the rollout and published by a sync of its parent.
"""

from __future__ import annotations

import contextlib
import os
import time
from zlib import crc32

from ..errors import CorruptError, RetiredError, StaleAttemptError
from .batch import Batch
from .files import Files, durability_error
from .frame import Kind
from .layout import SEALED, Directory, LinkName, SegmentName, Tombstone, is_note, remove_tree
from .log import LogReader
from .manifest import IndexedSegment
from .notes import Notes
from .open_log import OpenLog, OpenSegment
from .operations import Operation, RecordOperation
from .publication import Publication, publish
from .records import DeliveryRecord
from .rollout import Rollout
from .snapshot import Snapshot, index_of, just_published, links_of, open_snapshot, read_published
from .space import cut_much_space

__all__ = ("Freeze", "Lifecycle", "Reset", "Retire", "Seal", "apply_to_frozen", "rename_durably")


class Lifecycle(Operation):
    """An operation that is run alone, on what the directory shows."""

    __slots__ = ()

    def run(self, rollout: Rollout) -> object:
        raise NotImplementedError


class Freeze(Lifecycle):
    """Fence the rollout and publish its snapshot, or open the one that is published."""

    __slots__ = ("incarnation",)

    creates = True

    def __init__(self, rollout_id: str, incarnation: str = "") -> None:
        super().__init__(rollout_id)
        self.incarnation = incarnation
        """The one that is meant; empty for whichever there is."""

    def run(self, rollout: Rollout) -> Snapshot:
        begun = self.begin(rollout)
        if isinstance(begun, Snapshot):
            return begun
        publication, snapshot = begun
        try:
            publication.finish()
        except OSError as error:
            snapshot.close()
            raise self.not_published(rollout, error) from error
        return snapshot

    def begin(self, rollout: Rollout) -> Snapshot | tuple[Publication, Snapshot]:
        """The published snapshot; or the first step of its publication, and what it will be."""
        directory = rollout.look()
        files = rollout.files
        if directory.state == "retired":
            try:
                files.fsync(rollout.fence_fd)  # whoever retired it may have died before this
            except OSError as error:
                raise self.not_published(rollout, error) from error
            raise RetiredError(f"rollout {rollout.rollout_id} was consumed and retired; reset it to use its id again")
        if self.incarnation and directory.incarnation != self.incarnation:
            raise StaleAttemptError(
                f"rollout {rollout.rollout_id} was reset: what was to be frozen is incarnation {self.incarnation}, and "
                f"now it is {directory.incarnation or 'absent'}; nothing was frozen"
            )
        try:
            if directory.state != "frozen":
                rollout.drop()
                return self._begin_first(rollout, directory)
            files.fsync_directory(directory.incarnation_path)  # whoever published may have died before this
        except OSError as error:
            raise self.not_published(rollout, error) from error
        try:
            return open_snapshot(files, directory, rollout.rollout_id, rollout.boot_id)
        except OSError as error:
            raise durability_error(
                error, f"rollout {rollout.rollout_id}: can't open its snapshot", directory.snapshot_path
            ) from error

    def not_published(self, rollout: Rollout, error: BaseException) -> BaseException:
        """What the caller gets if `error` came up on the way."""
        if not isinstance(error, OSError):
            return error
        return durability_error(error, f"rollout {rollout.rollout_id}: can't publish a snapshot", rollout.path)

    def _begin_first(self, rollout: Rollout, directory: Directory) -> tuple[Publication, Snapshot]:
        files = rollout.files
        if not directory.incarnation:
            directory.incarnation = os.urandom(16).hex()
            files.mkdir(directory.incarnation_path)
        reader = LogReader(files, rollout.rollout_id, directory.incarnation, rollout.boot_id)
        reader.keep_buffers = reader.fenced = True
        try:
            reader.read_open(directory)
            cut_much_space(files, reader)
            if not any(read.scan.frames for read in reader.segments):
                _sync_names(rollout, directory)
            sources, segments = links_of(reader)
            index = index_of(reader, 1, segments)
            publication = Publication(files, directory, index.version)
            publication.write(index, sources)
        except OSError:
            reader.buffers.clear()  # or whoever keeps the error keeps mappings, and a descriptor of each
            raise
        return publication, just_published(index, reader.buffers, publication.target)


def _sync_names(rollout: Rollout, directory: Directory) -> None:
    """Every directory entry that leads to a rollout without records."""
    try:
        rollout.files.fsync(rollout.fence_fd)
        for path in rollout.parents():
            rollout.files.fsync_directory(path)
    except OSError:
        rollout.unmake(directory.incarnation_path)
        raise


def apply_to_frozen(rollout: Rollout, directory: Directory, operation: RecordOperation) -> None:
    """Do a record operation on a frozen rollout: refuse it, note it, or publish a new version because of it."""
    files = rollout.files
    files.fsync_directory(directory.incarnation_path)  # whoever published may have died before this
    reader, links = read_published(files, directory, rollout.rollout_id, rollout.boot_id)
    log = OpenLog(directory, reader)
    number = links[-1].number + 1 if links else 1
    links = [link for link in links if link.number not in reader.unreadable]
    reader.opened(number, f"{directory.snapshot_path}/{number:06d}")
    batch = Batch(seed=reader.seed(number), offset=0, sequence=0, number=0)
    header = batch.add_header(rollout.rollout_id, directory.incarnation, number, rollout.boot_id, time.time(), 0)
    log.segment = OpenSegment(SegmentName(number, SEALED), "", batch.seed, header)
    notes = Notes(files, directory.incarnation_path, directory.incarnation, directory.notes)
    if not operation.apply_late(log, batch, notes):
        return
    for note in notes.read():
        if isinstance(note, DeliveryRecord):
            batch.add_record(Kind.DELIVERY, note)
            log.ledger.delivery(note)
        else:
            batch.add_record(Kind.SETTLE, note)
            log.ledger.settle(note, rollout.boot_id)
    _publish_next(rollout, directory, reader, links, LinkName(number, batch.end), batch)


def _publish_next(
    rollout: Rollout,
    directory: Directory,
    reader: LogReader,
    links: list[LinkName],
    created: LinkName,
    batch: Batch,
) -> None:
    files = rollout.files
    buffers = batch.buffers(trailer=False)
    crc = 0
    for buffer in buffers:
        crc = crc32(buffer, crc)
    segments = [
        IndexedSegment(link.number, link.length, crc32(memoryview(reader.buffers[link.number])[: link.length]))
        for link in links
    ]
    segments.append(IndexedSegment(created.number, created.length, crc))
    index = index_of(reader, directory.version + 1, segments)
    sources = [(f"{directory.snapshot_path}/{link}", link) for link in links]
    publish(files, directory, index, sources, (created, buffers))
    _try_remove(files, directory.snapshot_path)


class Retire(Lifecycle):
    """Remove exactly the snapshot that was consumed. True if it is gone, now or since an earlier call."""

    __slots__ = ("snapshot_id", "version")

    def __init__(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        super().__init__(rollout_id)
        self.snapshot_id, self.version = snapshot_id, version

    def run(self, rollout: Rollout) -> bool:
        directory = rollout.look()
        if directory.tombstone is not None:
            exact = (directory.tombstone.incarnation, directory.tombstone.version)
            if exact == (self.snapshot_id, self.version):
                rollout.files.fsync(rollout.fence_fd)  # whoever retired it may have died before this
                _remove_payload(rollout.files, directory.tombstone_path)
                return True
            return False
        if directory.state != "frozen" or (directory.incarnation, directory.version) != (
            self.snapshot_id,
            self.version,
        ):
            return False
        rollout.drop()
        files = rollout.files
        tombstone = f"{rollout.path}/{Tombstone(directory.incarnation, directory.version, time.time())}"
        try:
            rename_durably(rollout, [(directory.incarnation_path, tombstone)])
        except OSError as error:
            raise durability_error(error, f"rollout {rollout.rollout_id}: can't retire it", rollout.path) from error
        _remove_payload(files, tombstone)
        return True


def rename_durably(rollout: Rollout, renames: list[tuple[str, str]]) -> None:
    """Rename within the directory of the rollout. If the sync fails, the old names are given back.

    A second sync could succeed without having done anything; the next try renames again.
    """
    done: list[tuple[str, str]] = []
    try:
        for source, target in renames:
            rollout.files.rename(source, target)
            done.append((source, target))
        rollout.files.fsync(rollout.fence_fd)
    except OSError:
        for source, target in done:
            with contextlib.suppress(OSError):
                rollout.files.rename(target, source)
        raise


def _remove_payload(files: Files, tombstone: str) -> None:
    """Delete what a tombstone doesn't need; what fails is left to the sweep."""
    try:
        names = files.listdir(tombstone)
    except OSError:
        return
    for name in names:
        if not is_note(name):
            _try_remove(files, f"{tombstone}/{name}")


def _try_remove(files: Files, path: str) -> None:
    try:
        remove_tree(files, path)
    except OSError:
        return


class Reset(Lifecycle):
    """Back to absent, from any state. `retired_before`: only a tombstone older than that (unix seconds)."""

    __slots__ = ("changed_before", "retired_before")

    def __init__(
        self, rollout_id: str, *, retired_before: float | None = None, changed_before: float | None = None
    ) -> None:
        super().__init__(rollout_id)
        self.retired_before, self.changed_before = retired_before, changed_before

    def run(self, rollout: Rollout) -> bool:
        files = rollout.files
        try:
            directory = rollout.look()
        except CorruptError:
            if self.retired_before is not None or self.changed_before is not None:
                raise
            names = [name for name in files.listdir(rollout.path) if not name.endswith(".trash")]
        else:
            if not self._is_meant(files, directory):
                return False
            names = [str(directory.tombstone)] if directory.tombstone else []
            if directory.incarnation and not directory.tombstone:
                names.append(directory.incarnation)
        rollout.drop()
        trash = [f"{rollout.path}/{name[:32]}.trash" for name in names]
        try:
            # Synced also without names: whoever renamed the last one may have died before this.
            rename_durably(rollout, [(f"{rollout.path}/{n}", t) for n, t in zip(names, trash, strict=True)])
        except OSError as error:
            raise durability_error(error, f"rollout {rollout.rollout_id}: can't reset it", rollout.path) from error
        for target in trash:
            _try_remove(files, target)
        try:
            files.rmdir(rollout.path)
        except OSError:
            return bool(names)  # not empty yet; an empty directory shows nothing, the sweep removes it
        rollout.close_descriptors()  # they led into the directory, and it is gone
        return bool(names)

    def _is_meant(self, files: Files, directory: Directory) -> bool:
        if self.retired_before is not None:
            return directory.tombstone is not None and directory.tombstone.retired_at <= self.retired_before
        if self.changed_before is not None:
            return (
                directory.state in ("open", "frozen")
                and files.stat(directory.incarnation_path).st_mtime <= self.changed_before
                and all(
                    files.stat(f"{directory.incarnation_path}/{name}").st_mtime <= self.changed_before
                    for name in directory.segments
                )
            )
        return True


class Seal(Lifecycle):
    """Close this store's open segment, at the end of its life."""

    __slots__ = ()

    def run(self, rollout: Rollout) -> None:
        directory = rollout.look()
        if directory.state == "open":
            if rollout.log is None or not rollout.is_current():
                rollout.load(directory)
            log = rollout.log
            if log is not None and log.segment is None and any(read.scan.torn for read in log.reader.segments):
                rollout.state_end(directory)
            rollout.seal()
        rollout.drop()
