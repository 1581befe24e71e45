"""Reading a rollout's log: segment files in, a ledger out, damage reported and never guessed over."""

from __future__ import annotations

import hashlib
from zlib import crc32

import msgspec
import numpy as np

from ..content import decode_content
from ..entry import TokenEntry, canonical_contents, identical
from ..errors import CorruptError, NewerFormatError
from .files import Files
from .frame import (
    FORMAT_VERSION,
    HEADER_SIZE,
    Buffer,
    Frame,
    Gap,
    Kind,
    Scan,
    scan,
    segment_seed,
)
from .layout import SEALED, Directory, LinkName, SegmentName
from .ledger import Damage, Ledger
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
    decode_entry,
)

__all__ = ("LogReader", "SegmentRead", "content_digest", "read_header")

_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
_decode_begin = msgspec.msgpack.Decoder(BeginRecord).decode
_decode_settle = msgspec.msgpack.Decoder(SettleRecord).decode
_decode_delivery = msgspec.msgpack.Decoder(DeliveryRecord).decode
_decode_finish = msgspec.msgpack.Decoder(FinishRecord).decode
_decode_seal = msgspec.msgpack.Decoder(SealRecord).decode


def content_digest(entry: TokenEntry) -> bytes:
    """16 bytes over everything that makes two entries identical; the smaller of two in conflict is shown."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    experts = entry.routed_experts
    if experts is not None:
        digest.update(repr((experts.dtype.str, experts.shape)).encode() + experts.tobytes())
    digest.update(repr(entry.pieces).encode())
    digest.update(canonical_contents(entry))
    return digest.digest()


def read_header(data: Buffer, seed: int, limit: int) -> SegmentHeader | None:
    """The first frame of a segment, or None if it isn't whole. Raises `NewerFormatError`."""
    found = scan(data, seed, limit=min(limit, _first_frame_end(data)), believe_tail=True)
    if not found.frames or found.frames[0].kind != Kind.SEGMENT:
        return None
    frame = found.frames[0]
    try:
        header = _decode_header(memoryview(data)[frame.body_start : frame.body_end])
    except msgspec.DecodeError:
        return None
    if header.format > FORMAT_VERSION:
        raise NewerFormatError(
            f"segment of rollout {header.rollout_id} has format {header.format}, this tokcap reads up to "
            f"{FORMAT_VERSION}: upgrade tokcap to read it"
        )
    return header


def _first_frame_end(data: Buffer) -> int:
    length = int.from_bytes(data[8:12], "little")
    return (HEADER_SIZE + length + 7) & ~7


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
        self.unwritten: dict[int, TokenEntry] = {}
        """Entries, by node, of a batch that is still being put together."""
        self.torn: list[Damage] = []
        """Dropped tails: bytes that were never acknowledged."""
        self.paths: dict[int, str] = {}
        self._by_sequence: dict[int, int] = {}
        """Frame sequence -> node, in the segment being read."""
        self.buffers: dict[int, Buffer] = {}
        self._repeated: set[tuple[str, int]] = set()

    # ---- whole logs

    def read_open(self, directory: Directory) -> None:
        """Read the log of an open rollout: what was acknowledged counts."""
        for position, name in enumerate(directory.segments):
            path = f"{directory.incarnation_path}/{name}"
            successor = directory.segments[position + 1] if position + 1 < len(directory.segments) else None
            stated = 0
            if successor is not None:
                stated = self._predecessor_end(f"{directory.incarnation_path}/{successor}", successor)
            self._miss_until(name.number, directory.incarnation_path)
            self._read_segment(path, name, stated)
        self._finish()

    def read_snapshot(self, path: str, links: list[LinkName]) -> None:
        """Read the segments of a published snapshot: every byte below the length in its name was durable."""
        for link in links:
            self._miss_until(link.number, path)
            self._read_link(f"{path}/{link}", link)
        self._finish()

    def _finish(self) -> None:
        self.settle_repetitions()
        if not self.keep_buffers:
            self.buffers.clear()
        self.ledger.loaded()

    def _miss_until(self, number: int, path: str) -> None:
        expected = self.segments[-1].number + 1 if self.segments else 1
        for missing in range(expected, number):
            self.ledger.damage.append(Damage(f"{path}/{missing:06d}", 0, 0, "the segment file is missing"))

    def _predecessor_end(self, path: str, name: SegmentName) -> int:
        data = self._load(path, HEADER_SIZE + 4096)
        if data is None:
            return 0
        header = read_header(data, self.seed(name.number), len(data))
        return header.predecessor_end if header is not None and self._is_ours(header, name.number) else 0

    def _load(self, path: str, length: int | None = None) -> bytes | None:
        try:
            fd = self.files.open(path)
        except OSError:
            return None
        try:
            return self.files.read(fd, self.files.fstat(fd).st_size if length is None else length, 0)
        finally:
            self.files.close(fd)

    def seed(self, number: int) -> int:
        return segment_seed(self.incarnation, f"{number:06d}")

    def _is_ours(self, header: SegmentHeader, number: int) -> bool:
        return (header.rollout_id, header.incarnation, header.number) == (self.rollout_id, self.incarnation, number)

    def _read_segment(self, path: str, name: SegmentName, stated_end: int) -> None:
        data = self._load(path)
        if data is None:
            self.ledger.damage.append(Damage(path, 0, 0, "the segment file can't be opened"))
            data = b""
        seed = self.seed(name.number)
        header = read_header(data, seed, len(data))
        limit, sealed_end, believe_tail = len(data), stated_end, header is None or header.boot_id != self.boot_id
        if stated_end:
            limit, believe_tail = min(limit, stated_end), False
        elif name.kind == SEALED:
            sealed_end = max(limit, 1)
        found = scan(data, seed, limit=limit, sealed_end=sealed_end, believe_tail=believe_tail)
        self._take(path, name.number, data, header, found, sealed=name.kind == SEALED)
        if stated_end > len(data):
            self._damaged(path, len(data), stated_end, "the end of the segment is missing")
        elif name.kind == SEALED and not stated_end:
            self._check_seal(path, data, found)

    def _check_seal(self, path: str, data: Buffer, found: Scan) -> None:
        last = found.frames[-1] if found.frames else None
        told = bool(found.damage) and found.damage[-1].end >= len(data) > 0
        if (last is None or last.kind != Kind.SEAL) and not told:
            self._damaged(path, len(data), len(data), "the end of a sealed segment is missing")

    def _read_link(self, path: str, link: LinkName) -> None:
        data = self._load(path)
        if data is None:
            self.ledger.damage.append(Damage(path, 0, link.length, "the segment file can't be opened"))
            data = b""
        seed = self.seed(link.number)
        limit = min(len(data), link.length)
        found = scan(data, seed, limit=limit, sealed_end=link.length)
        self._take(path, link.number, data, read_header(data, seed, limit), found, sealed=True)
        if len(data) < link.length:
            self._damaged(path, len(data), link.length, "the end of the segment is missing")

    # ---- frames

    def _take(
        self, path: str, number: int, data: Buffer, header: SegmentHeader | None, found: Scan, *, sealed: bool
    ) -> None:
        if header is not None and not self._is_ours(header, number):
            self._damaged(path, 0, len(data), f"it belongs to rollout {header.rollout_id}, segment {header.number}")
            found = Scan([], [], None, 0, None, 0, 0)
            header = None
        self.segments.append(SegmentRead(path.rpartition("/")[2], number, header, found, len(data), sealed))
        self.paths[number] = path
        self.buffers[number] = data
        self._by_sequence.clear()
        self.ledger.segment_started()
        self.fold(number, data, header, found)

    def fold(self, number: int, data: Buffer, header: SegmentHeader | None, found: Scan, shift: int = 0) -> None:
        """Apply the frames of a scan. `data` begins at `shift` bytes into the segment."""
        path = self.paths[number]
        for gap in found.damage:
            self._gap(path, gap)
        if found.torn is not None:
            self.torn.append(Damage(path, found.torn.offset, found.torn.end, "torn tail, never acknowledged"))
        boot_id = header.boot_id if header is not None else ""
        view = memoryview(data)
        for frame in found.frames:
            try:
                self._apply(frame, view[frame.body_start - shift : frame.body_end - shift], number, boot_id, path)
            except msgspec.DecodeError as error:
                self._damaged(path, frame.offset, frame.end, f"the checksum holds but the record doesn't: {error}")

    def _gap(self, path: str, gap: Gap) -> None:
        self._damaged(path, gap.offset, gap.end, f"checksum mismatch, frame {gap.sequence} and maybe others are lost")

    def _damaged(self, path: str, offset: int, end: int, reason: str) -> None:
        self.ledger.damage.append(Damage(path, offset, end, reason))

    def _apply(self, frame: Frame, body: memoryview, number: int, boot_id: str, path: str) -> None:
        kind = frame.kind
        if kind == Kind.ENTRY:
            self._apply_entry(frame, body, number, boot_id, path)
        elif kind == Kind.BEGIN:
            self.ledger.begin(_decode_begin(body), frame.sequence, boot_id, writing=False)
        elif kind == Kind.SETTLE:
            self.ledger.settle(_decode_settle(body), boot_id)
        elif kind == Kind.DELIVERY:
            self.ledger.delivery(_decode_delivery(body))
        elif kind == Kind.FINISH:
            self.ledger.finish = _owned_finish(_decode_finish(body))
        elif kind not in (Kind.SEGMENT, Kind.SEAL):
            raise msgspec.DecodeError(f"unknown kind of frame {kind}")

    def _apply_entry(self, frame: Frame, body: memoryview, number: int, boot_id: str, path: str) -> None:
        head = StoredEntry(body).head
        parent = NO_PARENT
        if head.base != NO_BASE:
            found = self._by_sequence.get(head.base)
            if found is None or self.ledger.nodes[found].body_crc != head.base_crc:
                self.ledger.lose(head, Damage(path, frame.offset, frame.end, "the frame it extends is lost"))
                return
            parent = found
        limit = self.ledger.nodes[parent].total if parent != NO_PARENT else 0
        if not 0 <= head.shared <= limit or head.suffix < 0 or head.generated < 0:
            raise msgspec.DecodeError("lengths that can't be")
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
            self.drop_identical(key)
        self._repeated.clear()

    def drop_identical(self, key: tuple[str, int]) -> None:
        kept: list[int] = []
        for index in self.ledger.contents[key]:
            entry = self.entry(index)
            if not any(identical(entry, self.entry(other)) for other in kept):
                kept.append(index)
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
            f"{path}: the record at offset {node.body_start} doesn't match its checksum; run verify on the store",
            path=path,
            offset=node.body_start,
        )
    return StoredEntry(body)


def _owned_finish(record: FinishRecord) -> FinishRecord:
    return FinishRecord(record.at, record.finished_at, msgspec.Raw(bytes(record.meta)))


def finish_meta(record: FinishRecord | None) -> dict[str, object]:
    """What `finish` was told."""
    return {} if record is None else decode_content(bytes(record.meta))
