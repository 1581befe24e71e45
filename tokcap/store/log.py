"""Reading a rollout's log: segment files in, a ledger out, damage reported and never guessed over."""

from __future__ import annotations

import errno
from zlib import crc32

import msgspec
import numpy as np

from ..content import apart_from_the_stack, decode_content
from ..entry import TokenEntry, content_digest, identical
from ..errors import CorruptError
from .buffers import map_or_read, size_to_read
from .files import Files
from .frame import (
    FORMAT_VERSION,
    HEADER_SIZE,
    LAST_IN_BATCH,
    TRAILER_SIZE,
    Buffer,
    Frame,
    Kind,
    content_end,
    newer_format,
    segment_seed,
)
from .layout import SEALED, Directory, LinkName, SegmentName
from .ledger import RECORD_UNSOUND, SEGMENT_MISSING, Damage, Ledger, segments_missing
from .prefix import NO_PARENT, Node, fill_sequence
from .records import (
    NO_BASE,
    BeginRecord,
    DeliveryRecord,
    FinishRecord,
    SealRecord,
    SegmentHeader,
    SettleRecord,
    StoredEntry,
    decode_contents,
    decode_entry,
    decode_pieces,
)
from .scan import Gap, Scan, scan

__all__ = ("LogReader", "SegmentRead", "read_header")

_NAMED_MISSING = 100
"""Missing segments that are reported one by one; a name may leave out a billion."""

_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
_decode_begin = msgspec.msgpack.Decoder(BeginRecord).decode
_decode_settle = msgspec.msgpack.Decoder(SettleRecord).decode
_decode_delivery = msgspec.msgpack.Decoder(DeliveryRecord).decode
_decode_finish = msgspec.msgpack.Decoder(FinishRecord).decode
_decode_seal = msgspec.msgpack.Decoder(SealRecord).decode


def read_header(path: str, data: Buffer, seed: int, limit: int) -> SegmentHeader | None:
    """The first frame of a segment, or None if it isn't whole. Raises `NewerFormatError`."""
    found = scan(data, seed, limit=min(limit, _first_frame_end(data)), believe_tail=True)
    if not found.frames or found.frames[0].kind != Kind.SEGMENT:
        return None
    frame = found.frames[0]
    if frame.format > FORMAT_VERSION:
        raise newer_format(path, frame.format)
    try:
        header = _decode_header(memoryview(data)[frame.body_start : frame.body_end])
    except (msgspec.DecodeError, RecursionError):
        return None
    if header.format > FORMAT_VERSION:
        raise newer_format(path, header.format)
    return header


def _first_frame_end(data: Buffer) -> int:
    length = int.from_bytes(data[8:12], "little")
    return (HEADER_SIZE + length + 7) & ~7


def _end_at_seal(found: Scan) -> None:
    """What stands behind the seal of a segment costs nothing: it was never part of it."""
    last = found.frames[-1] if found.frames else None
    if last is not None and last.kind == Kind.SEAL and found.damage and found.damage[-1].offset >= last.end:
        found.torn = found.damage.pop()
        found.end = last.end


def _is_damaged_behind(found: Scan, last: Frame | None) -> bool:
    return bool(found.damage) and (last is None or found.damage[-1].offset >= last.end)


def _nothing() -> Scan:
    return Scan([], [], None, 0, None, 0, 0)


class SegmentRead(msgspec.Struct):
    """What was found in one segment file."""

    name: str
    number: int
    header: SegmentHeader | None
    scan: Scan
    size: int
    sealed: bool


class LogReader:
    """Folds segments, in order, into one `Ledger`."""

    def __init__(self, files: Files, rollout_id: str, incarnation: str, boot_id: str) -> None:
        self.files = files
        self.rollout_id = rollout_id
        self.incarnation = incarnation
        self.boot_id = boot_id
        self.ledger = Ledger()
        self.segments: list[SegmentRead] = []
        self.keep_buffers = False
        """Whether the bytes read stay here after the log was read."""
        self.fenced = False
        """Whether the fence is held: nobody cuts a file, so that it may be mapped."""
        self.unwritten: dict[int, TokenEntry] = {}
        """Entries, by node, of a batch that is still being put together."""
        self.torn: list[Damage] = []
        """Dropped tails: bytes that were never acknowledged."""
        self.paths: dict[int, str] = {}
        self._by_sequence: dict[int, int] = {}
        """Frame sequence -> node, in the segment being read or written."""
        self.buffers: dict[int, Buffer] = {}
        self.unreadable: set[int] = set()
        """Segments whose name belongs to something that is no file: to be linked nowhere."""
        self._repeated: set[tuple[str, int]] = set()

    # ---- whole logs

    def read_open(self, directory: Directory) -> None:
        """Read the log of an open rollout: what was acknowledged counts."""
        ends = self._stated_ends(directory)
        for name in directory.segments:
            path = f"{directory.incarnation_path}/{name}"
            if self._is_next(name.number, path):
                self._read_segment(path, name, ends.get(name.number))
        self._finish()

    def read_snapshot(self, path: str, links: list[LinkName]) -> None:
        """Read the segments of a published snapshot: every byte below the length in its name was durable."""
        for link in links:
            if self._is_next(link.number, f"{path}/{link}"):
                self._read_link(f"{path}/{link}", link)
        self._finish()

    def _finish(self) -> None:
        self.settle_repetitions()
        if not self.keep_buffers:
            self.buffers.clear()

    def _is_next(self, number: int, path: str) -> bool:
        """Report the segments that are missing in front of this one; False for a second file of the same number."""
        expected = self.segments[-1].number + 1 if self.segments else 1
        folder = path.rpartition("/")[0]
        for missing in range(expected, min(number, expected + _NAMED_MISSING)):
            self._damaged(f"{folder}/{missing:06d}", 0, 0, SEGMENT_MISSING)
        if number > expected + _NAMED_MISSING:
            first = expected + _NAMED_MISSING
            self._damaged(f"{folder}/{first:06d}", 0, 0, segments_missing(number - 1))
        if number < expected:
            self._damaged(path, 0, 0, "a second file of the same segment")
        return number >= expected

    def _stated_ends(self, directory: Directory) -> dict[int, int]:
        """Where segments end that are followed by others, as the headers of those say."""
        ends: dict[int, int] = {}
        there = [name.number for name in directory.segments]
        for name in directory.segments[1:]:
            path = f"{directory.incarnation_path}/{name}"
            data = self._load(path, HEADER_SIZE + 4096)
            header = None if data is None else read_header(path, data, self.seed(name.number), len(data))
            if header is None or not self._is_ours(header, name.number):
                continue
            if header.predecessor and header.predecessor_end >= 0:
                ends[header.predecessor] = header.predecessor_end
            ends.update((number, 0) for number in there if header.predecessor < number < name.number)
        return ends

    def _load(self, path: str, length: int | None = None) -> Buffer | None:
        """The bytes of a file, None if something else has its name. A failing call is no damage: it may pass."""
        try:
            fd = self.files.open(path)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
                raise
            return None
        try:
            if length is not None:
                return self.files.read(fd, length, 0)
            size = size_to_read(self.files, fd)
            return map_or_read(self.files, fd, size) if self.fenced else self.files.read(fd, size, 0)
        finally:
            self.files.close(fd)

    def seed(self, number: int) -> int:
        return segment_seed(self.incarnation, f"{number:06d}")

    def _is_ours(self, header: SegmentHeader, number: int) -> bool:
        return (header.rollout_id, header.incarnation, header.number) == (self.rollout_id, self.incarnation, number)

    def is_same_life(self, header: SegmentHeader, path: str) -> bool:
        """Whether what can be read of a segment may be in the page cache only, as its writer left it there."""
        if header.boot_id != self.boot_id:
            return False
        mount = self.files.mount_life(path)
        return not header.mount or not mount or header.mount == mount

    def _read_segment(self, path: str, name: SegmentName, stated_end: int | None) -> None:
        data = self._load(path)
        if data is None:
            self._take_unreadable(path, name.number)
            return
        seed = self.seed(name.number)
        header = read_header(path, data, seed, len(data))
        size = content_end(data, len(data))
        limit, sealed_end, believe_tail = size, 0, header is None or not self.is_same_life(header, path)
        if stated_end is not None:
            limit, sealed_end, believe_tail = min(limit, stated_end), stated_end, False
        elif name.kind == SEALED:
            sealed_end = max(limit, 1)
        found = scan(data, seed, limit=limit, sealed_end=sealed_end, believe_tail=believe_tail)
        if stated_end is None and name.kind == SEALED:
            _end_at_seal(found)
        self._take(path, name.number, data, header, found, sealed=name.kind == SEALED)
        if stated_end is not None:
            self._check_end(path, data, stated_end, found)
        if name.kind == SEALED and limit >= (stated_end or 0):
            # Also below a stated end: whoever wrote on may have found the segment without its seal.
            self._check_seal(path, limit, found)

    def _check_end(self, path: str, data: Buffer, end: int, found: Scan) -> None:
        """Report what is missing below the end that something else states, and what stands above it."""
        size = len(data)
        if size < end:
            self._damaged(path, size, end, "the end of the segment is missing")
        last = found.frames[-1] if found.frames else None
        if end and (last is None or last.flags & LAST_IN_BATCH or _is_damaged_behind(found, last)):
            end += TRAILER_SIZE
        size = content_end(data, size)
        if size > end:
            self._torn(path, end, size)

    def _check_seal(self, path: str, limit: int, found: Scan) -> None:
        last = found.frames[-1] if found.frames else None
        if (last is None or last.kind != Kind.SEAL) and not _is_damaged_behind(found, last):
            self._damaged(path, limit, limit, "the end of a sealed segment is missing")

    def _read_link(self, path: str, link: LinkName) -> None:
        data = self._load(path)
        if data is None:
            self._take_unreadable(path, link.number)
            return
        seed = self.seed(link.number)
        limit = min(len(data), link.length)
        found = scan(data, seed, limit=limit, sealed_end=link.length)
        self._take(path, link.number, data, read_header(path, data, seed, limit), found, sealed=True)
        self._check_end(path, data, link.length, found)

    # ---- frames

    def _take_unreadable(self, path: str, number: int) -> None:
        self.unreadable.add(number)
        self._damaged(path, 0, 0, "it is no file, the segment can't be opened")
        self._take(path, number, b"", None, _nothing(), sealed=True)

    def _take(
        self, path: str, number: int, data: Buffer, header: SegmentHeader | None, found: Scan, *, sealed: bool
    ) -> None:
        if header is not None and not self._is_ours(header, number):
            self._damaged(path, 0, len(data), f"it belongs to rollout {header.rollout_id}, segment {header.number}")
            found = _nothing()
            header = None
        self.segments.append(SegmentRead(path.rpartition("/")[2], number, header, found, len(data), sealed))
        self.paths[number] = path
        self.buffers[number] = data
        self.segment_started()
        self.fold(number, data, header, found)

    def fold(self, number: int, data: Buffer, header: SegmentHeader | None, found: Scan, shift: int = 0) -> None:
        """Apply the frames of a scan. `data` begins at `shift` bytes into the segment."""
        path = self.paths[number]
        for gap in found.damage:
            self._gap(path, gap)
        if found.torn is not None:
            self._torn(path, found.torn.offset, found.torn.end)
        boot_id = header.boot_id if header is not None else ""
        view = memoryview(data)
        for frame in found.frames:
            if frame.format > FORMAT_VERSION:
                raise newer_format(path, frame.format, frame.offset)
            try:
                self._apply(frame, view[frame.body_start - shift : frame.body_end - shift], number, boot_id, path)
            except msgspec.DecodeError as error:
                self._unsound(path, frame.offset, frame.end, error)

    def _gap(self, path: str, gap: Gap) -> None:
        self._damaged(path, gap.offset, gap.end, f"checksum mismatch, frame {gap.sequence} and maybe others are lost")

    def _damaged(self, path: str, offset: int, end: int, reason: str) -> None:
        self.ledger.damage.append(Damage(path, offset, end, reason))

    def _unsound(self, path: str, offset: int, end: int, why: Exception) -> None:
        self._damaged(path, offset, end, f"{RECORD_UNSOUND}: {why}")

    def _torn(self, path: str, offset: int, end: int) -> None:
        self.torn.append(Damage(path, offset, end, "torn tail, never acknowledged"))

    def _apply(self, frame: Frame, body: memoryview, number: int, boot_id: str, path: str) -> None:
        try:
            self._apply_record(frame, body, number, boot_id, path)
        except RecursionError:  # while it was decoded: nothing is applied yet
            apart_from_the_stack(lambda: self._apply_record(frame, body, number, boot_id, path))

    def _apply_record(self, frame: Frame, body: memoryview, number: int, boot_id: str, path: str) -> None:
        kind = frame.kind
        if kind == Kind.ENTRY:
            self._apply_entry(frame, body, number, boot_id, path)
        elif kind == Kind.BEGIN:
            self.ledger.begin(_decode_begin(body), frame.sequence, boot_id)
        elif kind == Kind.SETTLE:
            self.ledger.settle(_decode_settle(body), boot_id)
        elif kind == Kind.DELIVERY:
            self.ledger.delivery(_decode_delivery(body))
        elif kind == Kind.FINISH:
            self.ledger.finish = _owned_finish(_decode_finish(body))
        elif kind not in (Kind.SEGMENT, Kind.SEAL):
            raise msgspec.DecodeError(f"unknown kind of frame {kind}")

    def _apply_entry(self, frame: Frame, body: memoryview, number: int, boot_id: str, path: str) -> None:
        stored = StoredEntry(body)
        head = stored.head
        if head.experts is not None:
            _ = stored.routed_experts  # raises if they can't be
        parent = NO_PARENT
        if head.base != NO_BASE:
            found = self._by_sequence.get(head.base)
            if found is None or self.ledger.nodes[found].body_crc != head.base_crc:
                self.ledger.lose(head, Damage(path, frame.offset, frame.end, "the frame it extends is lost"))
                return
            parent = found
        limit = self.ledger.nodes[parent].total if parent != NO_PARENT else 0
        if not 0 <= head.shared <= limit:
            raise msgspec.DecodeError("it shares more with the entry that it extends than there is")
        prompt = head.shared + head.suffix
        node = Node(
            segment=number,
            sequence=frame.sequence,
            body_start=frame.body_start,
            body_length=frame.body_length,
            body_crc=frame.body_crc,
            parent=parent,
            shared=head.shared,
            prompt=prompt,
            total=prompt + head.generated,
        )
        key = (head.model_call_id, head.choice_index)
        if key in self.ledger.contents:
            self._repeated.add(key)
        self._by_sequence[frame.sequence] = self.ledger.entry(head, node, boot_id)

    def settle_repetitions(self) -> None:
        """A record written twice with the same content, because the first was not known durable, is no conflict."""
        for key in self._repeated:
            self._drop_unsound(key)
            self.drop_identical(key)
        self._repeated.clear()

    def _drop_unsound(self, key: tuple[str, int]) -> None:
        """Of contents that have to be compared: those that can't be decoded, though their checksums hold."""
        kept: list[int] = []
        for index in self.ledger.contents[key]:
            node = self.ledger.nodes[index]
            stored = self.load(node)
            try:
                decode_contents(stored.head.contents)
                decode_pieces(stored.head.pieces)
            except CorruptError as error:
                start = node.body_start - HEADER_SIZE
                self._unsound(self.paths[node.segment], start, node.body_start + node.body_length, error)
            else:
                kept.append(index)
        if kept:
            self.ledger.contents[key] = kept
        else:
            self.ledger.forget(key)

    def drop_identical(self, key: tuple[str, int]) -> None:
        kept: list[int] = []
        for index in self.ledger.contents.get(key, ()):
            entry = self.entry(index)
            if not any(identical(entry, self.entry(other)) for other in kept):
                kept.append(index)
        if kept:
            self.ledger.contents[key] = kept
        call = self.ledger.calls[key[0]]
        call.conflict = any(len(c) > 1 for (name, _), c in self.ledger.contents.items() if name == key[0])

    # ---- entries

    def load(self, node: Node) -> StoredEntry:
        """The stored part of a node; from the buffer being read, else from its file, checksum verified again."""
        data = self.buffers.get(node.segment)
        if data is not None:
            return StoredEntry(memoryview(data)[node.body_start : node.body_start + node.body_length])
        path = self.paths[node.segment]
        return read_stored(self.files, path, node, self.seed(node.segment))

    def path(self, number: int) -> str:
        return self.paths[number]

    def opened(self, number: int, path: str) -> None:
        """A segment was started, or an open one renamed."""
        self.paths[number] = path

    def segment_started(self) -> None:
        """Frames of the next segment refer to nothing before it."""
        self._by_sequence.clear()
        self.ledger.segment_started()

    def written(self, frame_sequence: int, index: int, entry: TokenEntry) -> None:
        """An entry of our own: frames that other processes add later may extend it."""
        self._by_sequence[frame_sequence] = index
        self.unwritten[index] = entry

    def entry(self, index: int) -> TokenEntry:
        """Node `index` as the entry that was put."""
        if index in self.unwritten:
            return self.unwritten[index]
        node = self.ledger.nodes[index]
        prompt = np.empty(node.prompt, np.int32)
        fill_sequence(self.ledger.nodes, index, prompt, self.load)
        prompt.flags.writeable = False
        return decode_entry(self.rollout_id, self.load(node), prompt)

    def chosen(self) -> list[int]:
        """The node of each entry; of several contents for one identity the one with the smallest digest."""
        return [
            nodes[0] if len(nodes) == 1 else min(nodes, key=lambda index: content_digest(self.entry(index)))
            for nodes in self.ledger.contents.values()
        ]


def read_stored(files: Files, path: str, node: Node, seed: int) -> StoredEntry:
    """Read one body from its file. Raises `CorruptError` if the bytes are not those that were written."""
    fd = files.open(path)
    try:
        body = files.read(fd, node.body_length, node.body_start)
    finally:
        files.close(fd)
    if len(body) != node.body_length or crc32(body, seed) != node.body_crc:
        raise CorruptError(
            f"{path}: the record at offset {node.body_start} doesn't match its checksum: copy it, check the disk",
            path=path,
            offset=node.body_start,
        )
    return StoredEntry(body)


def _owned_finish(record: FinishRecord) -> FinishRecord:
    meta = bytes(record.meta)
    if not isinstance(decode_content(meta), dict):
        raise msgspec.DecodeError("its meta is no mapping")
    return FinishRecord(record.at, record.finished_at, msgspec.Raw(meta))


def finish_meta(record: FinishRecord | None) -> dict[str, object]:
    """What `finish` was told."""
    return {} if record is None else decode_content(bytes(record.meta))
