"""Snapshots: published by one rename, opened without a scan, readable until closed."""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, overload
from zlib import crc32

import msgspec

from ..content import decode_content
from ..entry import TokenEntry
from ..errors import ClosedError, CorruptError
from ..protocol import CallRecord
from .buffers import map_or_read, size_to_read
from .files import Files
from .frame import FORMAT_VERSION, Buffer, segment_seed
from .layout import DAMAGED, MANIFEST, Directory, LinkName, snapshot_links
from .ledger import SEGMENT_MISSING, Damage
from .log import LogReader
from .manifest import (
    Index,
    IndexedSegment,
    decode_manifest,
    encode_calls,
    encode_nodes,
)
from .prefix import Node
from .records import StoredEntry, decode_entry
from .sequences import Sequences

__all__ = (
    "Entries",
    "Snapshot",
    "index_of",
    "just_published",
    "links_of",
    "open_snapshot",
    "read_manifest",
    "read_published",
)

_NO_META = msgspec.Raw(b"\x80")


class Snapshot:
    """One frozen rollout (`TokenCaptureSnapshot`); with version 0 an unfrozen look at an open one.

    A context manager. It stays readable after its rollout is retired or reset, until it is closed; arrays handed out
    stay valid after that, too.
    """

    def __init__(self, index: Index, buffers: dict[int, Buffer], paths: dict[int, str]) -> None:
        self._index = index
        self._buffers: dict[int, Buffer] | None = buffers
        self._paths = paths
        self._entries: Entries | None = None
        self._calls: tuple[CallRecord, ...] | None = None

    @property
    def rollout_id(self) -> str:
        return self._index.rollout_id

    @property
    def snapshot_id(self) -> str:
        """32 hex digits: the identity of the incarnation, the same for each of its versions."""
        return self._index.snapshot_id

    @property
    def version(self) -> int:
        """From 1; 0 for an unfrozen look."""
        return self._index.version

    @property
    def incomplete(self) -> bool:
        """True if any call is lost, open or in conflict, or if damage was found."""
        return self._index.incomplete

    @property
    def entries(self) -> Entries:
        """The entries, unique per (model_call_id, choice_index), made when asked; their order carries no meaning."""
        if self._entries is None:
            self._entries = Entries(self._index, self._segments(), self._paths)
        elif self._buffers is None:
            self._segments()
        return self._entries

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """One record per call; damage appears as nameless lost calls with file and offset in `detail`."""
        if self._calls is None:
            try:
                self._calls = self._index.calls()
            except msgspec.DecodeError as error:
                raise CorruptError(
                    f"rollout {self.rollout_id}, version {self.version}: the checksum of the manifest holds, but its "
                    f"calls can't be decoded ({error}); without the manifest the snapshot can be read"
                ) from error
        return self._calls

    @property
    def meta(self) -> dict[str, Any]:
        """What `finish` was told: reward, group, ...; empty if nobody did."""
        return dict(decode_content(bytes(self._index.meta)))

    @property
    def finished(self) -> bool:
        """Whether the owner of the rollout said `finish`."""
        return self._index.finished_at is not None

    @property
    def frozen_at(self) -> float:
        """Unix seconds, for information only."""
        return self._index.frozen_at

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Bytes that were durable and are not whole any more."""
        return tuple(self._index.damage)

    @property
    def torn(self) -> tuple[Damage, ...]:
        """Tails that were dropped because they were never acknowledged."""
        return tuple(self._index.torn)

    def _segments(self) -> dict[int, Buffer]:
        if self._buffers is None:
            raise ClosedError(f"the snapshot of rollout {self.rollout_id} is closed")
        return self._buffers

    def close(self) -> None:
        """Let go of the files. Arrays that were handed out keep what they need."""
        self._buffers = None
        if self._entries is not None:
            self._entries.release()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Snapshot {self.rollout_id} version {self.version}: {len(self._index.chosen)} entries"
            f"{', incomplete' if self.incomplete else ''}>"
        )


class Entries(Sequence[TokenEntry]):
    """The entries of a snapshot; each is made when it is asked for, its prompt a view of a shared buffer."""

    def __init__(self, index: Index, buffers: dict[int, Buffer], paths: dict[int, str]) -> None:
        self._rollout_id = index.rollout_id
        self._seeds = {number: segment_seed(index.snapshot_id, f"{number:06d}") for number in buffers}
        self._buffers: dict[int, Buffer] | None = buffers
        self._paths = paths
        self.nodes = index.nodes()
        self.chosen = index.chosen
        this = weakref.proxy(self)  # or both would live until a garbage collection, and all that they hold
        self.sequences = Sequences(self.nodes, lambda node: this.load(node))

    def load(self, node: Node) -> StoredEntry:
        """The stored part of a node, viewed in place. Raises `CorruptError` if that is not what the manifest says."""
        if self._buffers is None:
            raise ClosedError(f"the snapshot of rollout {self._rollout_id} is closed")
        body = memoryview(self._buffers[node.segment])[node.body_start : node.body_start + node.body_length]
        try:
            stored = StoredEntry(body)
        except msgspec.DecodeError as error:
            raise self._unsound(node, error) from error
        head = stored.head
        if head.suffix != node.prompt - node.shared or head.generated != node.total - node.prompt:
            raise self._unsound(node, "it has other lengths than the manifest says")
        return stored

    def entry(self, index: int) -> TokenEntry:
        """Node `index` as the entry that was put. Raises `CorruptError` if it can't be decoded."""
        node = self.nodes[index]
        try:
            return decode_entry(self._rollout_id, self.load(node), self.sequences.prompt(index))
        except msgspec.DecodeError as error:
            raise self._unsound(node, error) from error
        except CorruptError as error:
            raise error if error.path else self._unsound(node, error) from error

    def _unsound(self, node: Node, why: object) -> CorruptError:
        path = self._paths[node.segment]
        return CorruptError(
            f"{path}: the checksum of the record at offset {node.body_start} holds, but the record doesn't: {why}",
            path=path,
            offset=node.body_start,
        )

    def release(self) -> None:
        self._buffers = None

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> TokenEntry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenEntry]: ...
    def __getitem__(self, index: int | slice) -> TokenEntry | Sequence[TokenEntry]:
        if isinstance(index, slice):
            return tuple(self.entry(node) for node in self.chosen[index])
        return self.entry(self.chosen[index])

    def __iter__(self) -> Iterator[TokenEntry]:
        return (self.entry(node) for node in self.chosen)


def index_of(reader: LogReader, version: int, segments: list[IndexedSegment]) -> Index:
    """The index of a log that was read."""
    ledger = reader.ledger
    finish = ledger.finish
    return Index(
        format=FORMAT_VERSION,
        rollout_id=reader.rollout_id,
        snapshot_id=reader.incarnation,
        version=version,
        frozen_at=time.time(),
        incomplete=ledger.incomplete,
        segments=segments,
        node_table=encode_nodes(ledger.nodes),
        chosen=reader.chosen(),
        call_table=encode_calls(ledger),
        damage=ledger.damage,
        torn=reader.torn,
        meta=_NO_META if finish is None else finish.meta,
        finished_at=None if finish is None else finish.finished_at,
    )


def open_snapshot(files: Files, directory: Directory, rollout_id: str, boot_id: str) -> Snapshot:
    """Open the published snapshot of a frozen rollout, every checksum verified."""
    index = read_manifest(files, directory, rollout_id)
    if index is not None:
        opened = _open_indexed(files, directory.snapshot_path, index)
        if opened is not None:
            return opened
    reader, _ = read_published(files, directory, rollout_id, boot_id)
    return Snapshot(index_of(reader, directory.version, []), reader.buffers, reader.paths)


def just_published(index: Index, buffers: dict[int, Buffer], path: str) -> Snapshot:
    """The snapshot at `path` that is made from `buffers`: what `open_snapshot` will read there."""
    kept: dict[int, Buffer] = {}
    paths: dict[int, str] = {}
    for segment in index.segments:
        data = buffers[segment.number]
        # Space behind the last batch is not part of it. A mapping takes no memory of its own.
        kept[segment.number] = data[: segment.length] if isinstance(data, bytes) else data
        paths[segment.number] = f"{path}/{LinkName(segment.number, segment.length)}"
    return Snapshot(index, kept, paths)


def read_published(
    files: Files, directory: Directory, rollout_id: str, boot_id: str
) -> tuple[LogReader, list[LinkName]]:
    """Read the segments of a published snapshot one by one, trusting nothing but the names; and those names."""
    path = directory.snapshot_path
    links = snapshot_links(files, path)
    reader = LogReader(files, rollout_id, directory.incarnation, boot_id)
    reader.keep_buffers = True
    reader.read_snapshot(path, links)
    _remember_damage(files, directory, read_manifest(files, directory, rollout_id), reader, links)
    return reader, links


def _remember_damage(
    files: Files, directory: Directory, index: Index | None, reader: LogReader, links: list[LinkName]
) -> None:
    """Add the damage that the segments themselves don't show."""
    path, damage = directory.snapshot_path, reader.ledger.damage
    reason = SEGMENT_MISSING
    if index is None:
        known = {_place(found) for found in damage}
        linked = {link.number for link in links}
        # Every segment is linked when a rollout is frozen.
        unlinked = {name.number for name in directory.segments}.difference(linked)
        told = [Damage(f"{path}/{number:06d}", 0, 0, reason) for number in sorted(unlinked)]
        damage += [found for found in told if _place(found) not in known]
        if not damage and DAMAGED in files.listdir(path):
            reason = "damage was found before; the manifest that said where is damaged, too"
            damage.append(Damage(f"{path}/{MANIFEST}", 0, 0, reason))
        return
    absent = {LinkName(segment.number, segment.length) for segment in index.segments}.difference(links)
    told = [Damage(f"{path}/{link}", 0, link.length, reason) for link in sorted(absent)]
    known = {_place(found) for found in damage}
    # What was missing when the rollout was frozen was not linked.
    damage += [found for found in (*told, *index.damage) if _place(found) not in known]


def _place(damage: Damage) -> tuple[str, int]:
    """The segment's number and the offset, the same for a segment and for the links to it."""
    return damage.path.rpartition("/")[2][:6], damage.offset


def read_manifest(files: Files, directory: Directory, rollout_id: str) -> Index | None:
    """The index of the published snapshot; None if its manifest is missing, damaged, or another snapshot's."""
    try:
        fd = files.open(f"{directory.snapshot_path}/{MANIFEST}")
    except OSError:
        return None
    try:
        data = files.read(fd, size_to_read(files, fd), 0)
    finally:
        files.close(fd)
    path = f"{directory.snapshot_path}/{MANIFEST}"
    return decode_manifest(path, data, rollout_id, directory.incarnation, directory.version)


def _open_indexed(files: Files, path: str, index: Index) -> Snapshot | None:
    buffers: dict[int, Buffer] = {}
    paths: dict[int, str] = {}
    for segment in index.segments:
        name = f"{path}/{LinkName(segment.number, segment.length)}"
        try:
            data = load_buffer(files, name, segment.length)
        except (FileNotFoundError, CorruptError):
            return None
        if len(data) < segment.length or crc32(memoryview(data)[: segment.length]) != segment.crc:
            return None
        buffers[segment.number] = data
        paths[segment.number] = name
    return Snapshot(index, buffers, paths)


def load_buffer(files: Files, path: str, length: int) -> Buffer:
    """The first `length` bytes of a published segment."""
    try:
        fd = files.open(path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
            raise CorruptError(f"{path} is not a regular file", path=path) from error
        raise
    try:
        return map_or_read(files, fd, min(length, size_to_read(files, fd)))
    finally:
        files.close(fd)


def links_of(reader: LogReader) -> tuple[list[tuple[str, LinkName]], list[IndexedSegment]]:
    """What to link, and how far each segment counts, for a log that was read with its buffers kept."""
    sources, segments = [], []
    for read in reader.segments:
        if read.number in reader.unreadable:
            continue
        data = reader.buffers[read.number]
        # One without any acknowledged byte is linked, too: a gap in the numbers would pass for a lost segment.
        length = min(read.scan.end, len(data))
        sources.append((reader.paths[read.number], LinkName(read.number, length)))
        segments.append(IndexedSegment(read.number, length, crc32(memoryview(data)[:length])))
    return sources, segments
