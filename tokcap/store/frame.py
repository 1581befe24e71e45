"""Frames: the bytes of a segment file, and the verdict on bytes that are wrong.

A segment is a sequence of batches; a batch is what one write and one fdatasync made durable. All integers are
little-endian, everything starts at a multiple of 8.

    segment  = batch* space
    batch    = frame+ trailer            the last frame of a batch carries LAST_IN_BATCH
    frame    = header(32) body pad8      body: one msgpack value, see `records`
    trailer  = 8 bytes                   zeros when written; ACKNOWLEDGED once fdatasync has returned
    space    = (8 bytes SPACE)*          written ahead of the batches to come, which are written over it

    header, 32 bytes
      0  magic        4 bytes "TKCF"
      4  kind         u8        see `Kind`
      5  flags        u8        LAST_IN_BATCH, GROUP_CONTINUES
      6  format       u16       FORMAT_VERSION
      8  body_length  u32
     12  sequence     u32       0, 1, 2 ... in this segment, the segment header being 0
     16  batch        u32       0, 1, 2 ... in this segment
     20  batch_first  u32       sequence of the first frame of this batch
     24  body_crc     u32       crc32 of the body
     28  header_crc   u32       crc32 of the 28 bytes before

Both checksums start from the segment's seed (`segment_seed`), that of the header also from the offset, so that a frame
copied from another segment, rollout or incarnation, or to another place in its own, doesn't pass.

Why the verdict can be certain. Batch n + 1 is written only after the fdatasync of batch n returned, to the same
segment; after a failed one the segment is left alone for good. So a frame of batch n + 1, or the trailer of batch n,
proves that batch n was durable: whatever is wrong inside it is *damage*. What is wrong above the last proof is a
*torn tail*: it was never acknowledged (or, after a power cut, it is the one batch whose trailer had not reached the
disk, and its whole frames are kept).

In the boot that wrote it, a batch without its trailer is never believed: its writer died before the sync returned, or
the sync failed, and then the page cache shows bytes that the disk does not have. In a later boot what can be read came
from the disk, so whole frames are believed; likewise after the file system was mounted anew. A segment is only ever
written in one boot and one life of its mount (`SegmentHeader.boot_id`, `mount`).
The trailer lies inside the bytes that the sync made durable: writing it needs no room and can't fail half-way.

Why there is space. A sync of bytes that the file had already waits for the device; one that also makes the file longer
waits for a commit of the file system's journal (ext4, measured: 0.17 ms and 0.35 ms). Space is a word and not zeros, so
that zeroed sectors still show. It is cut off when a segment is sealed, and when it is frozen if it is much; where it is
left over it means nothing.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from enum import IntEnum
from typing import Final

import msgspec

from ..errors import NewerFormatError

__all__ = (
    "ACKNOWLEDGED",
    "FORMAT_VERSION",
    "GROUP_CONTINUES",
    "HEADER_SIZE",
    "LAST_IN_BATCH",
    "SPACE",
    "TRAILER_SIZE",
    "Buffer",
    "Frame",
    "Gap",
    "Kind",
    "Scan",
    "content_end",
    "frame_header",
    "newer_format",
    "padding",
    "scan",
    "segment_seed",
)

Buffer = bytes | mmap.mmap

FORMAT_VERSION: Final = 1
MAGIC: Final = b"TKCF"
HEADER_SIZE: Final = 32
TRAILER_SIZE: Final = 8
UNACKNOWLEDGED: Final = bytes(TRAILER_SIZE)
ACKNOWLEDGED: Final = b"tokcapOK"
SPACE: Final = b"unused.."
"""Begins unlike MAGIC, ACKNOWLEDGED and zeros, so that a part of one of these is never taken for it."""

LAST_IN_BATCH: Final = 1
GROUP_CONTINUES: Final = 2
"""The frame counts only together with the next one: the choices of one call that were put at once."""

_HEADER = struct.Struct("<4sBBHIIIII")
_CRC = struct.Struct("<I")
_HEADER_AND_CRC = struct.Struct("<4sBBHIIIIII")


class Kind(IntEnum):
    SEGMENT = 1
    ENTRY = 2
    BEGIN = 3
    SETTLE = 4
    DELIVERY = 5
    FINISH = 6
    SEAL = 7
    MANIFEST = 8
    MARKER = 9


class Frame(msgspec.Struct, gc=False):
    """One whole frame: where it stands and what its header says."""

    kind: int
    flags: int
    sequence: int
    batch: int
    offset: int
    body_length: int
    body_crc: int
    format: int = FORMAT_VERSION

    @property
    def body_start(self) -> int:
        return self.offset + HEADER_SIZE

    @property
    def body_end(self) -> int:
        return self.offset + HEADER_SIZE + self.body_length

    @property
    def end(self) -> int:
        return _aligned(self.body_end)


class Gap(msgspec.Struct):
    """Bytes that are no frames although frames must have been there."""

    offset: int
    end: int
    sequence: int
    """Of the first frame that is missing."""
    batch: int | None = None
    """Known only if the header of the frame survived."""


class Scan(msgspec.Struct):
    """What a stretch of a segment holds."""

    frames: list[Frame]
    """Believed frames, in order."""
    damage: list[Gap]
    """Bytes that were durable and are not whole any more."""
    torn: Gap | None
    """The unacknowledged tail, if there is one: dropped."""
    end: int
    """Where the believed bytes end, the trailer of the last batch not counted (it may not be synced)."""
    append_at: int | None
    """Where the next batch may be written; None if nothing may follow here."""
    next_sequence: int
    next_batch: int


def segment_seed(incarnation: str, name: str) -> int:
    """Where the checksums of one file of an incarnation start; never 0, so that zeros are never a valid frame."""
    return zlib.crc32(f"{incarnation}/{name}".encode()) or 1


def newer_format(path: str, version: int, offset: int = 0) -> NewerFormatError:
    """For what is intact and of a later format than this code knows."""
    return NewerFormatError(
        f"{path}: format {version} at offset {offset}, this tokcap reads up to {FORMAT_VERSION}: upgrade tokcap"
    )


def padding(length: int) -> int:
    """How many bytes bring `length` to a multiple of 8."""
    return -length % 8


def _aligned(offset: int) -> int:
    return (offset + 7) & ~7


def frame_header(
    kind: int,
    flags: int,
    body_length: int,
    sequence: int,
    batch: int,
    batch_first: int,
    body_crc: int,
    seed: int,
    offset: int = 0,
) -> bytes:
    """The 32 bytes at `offset`, in front of a body whose crc32 (from `seed`) is `body_crc`."""
    head = _HEADER.pack(MAGIC, kind, flags, FORMAT_VERSION, body_length, sequence, batch, batch_first, body_crc)
    return head + _CRC.pack(zlib.crc32(head, _placed(seed, offset)))


def _placed(seed: int, offset: int) -> int:
    """Where the checksum of a header starts that stands at `offset`."""
    return (seed + offset) & 0xFFFFFFFF


class _Header(msgspec.Struct, gc=False):
    frame: Frame
    batch_first: int


def _header_at(data: Buffer, offset: int, limit: int, seed: int) -> _Header | None:
    if offset + HEADER_SIZE > limit:
        return None
    head = data[offset : offset + HEADER_SIZE]
    if head[:4] != MAGIC or _CRC.unpack_from(head, 28)[0] != zlib.crc32(head[:28], _placed(seed, offset)):
        return None
    _, kind, flags, version, body_length, sequence, batch, batch_first, body_crc = _HEADER.unpack_from(head)
    return _Header(Frame(kind, flags, sequence, batch, offset, body_length, body_crc, version), batch_first)


def _next_header(data: Buffer, offset: int, limit: int, seed: int, sequence: int) -> _Header | None:
    """The first valid header above `offset` that can follow frame `sequence - 1`."""
    found = data.find(MAGIC, offset, limit)
    while found >= 0:
        if found % 8 == 0:
            header = _header_at(data, found, limit, seed)
            if header is not None and header.frame.sequence >= sequence:
                return header
        found = data.find(MAGIC, found + 1, limit)
    return None


def content_end(data: Buffer, size: int) -> int:
    """Where the space at the end of `data[:size]` begins; `size` if there is none."""
    end = size
    while end:
        start = (end - 1) // _STRIDE * _STRIDE
        if data[start:end] != _STRIDE_OF_SPACE[: end - start]:
            break
        end = start
    while end and data[(end - 1) & ~7 : end] == SPACE[: (end - 1) % 8 + 1]:
        end = (end - 1) & ~7
    return end


_STRIDE: Final = 4096
_STRIDE_OF_SPACE: Final = SPACE * (_STRIDE // len(SPACE))


def scan(
    data: Buffer,
    seed: int,
    *,
    limit: int,
    sealed_end: int = 0,
    believe_tail: bool = False,
    start: int = 0,
    origin: int = 0,
    sequence: int = 0,
    batch: int = 0,
) -> Scan:
    """Read the frames of `data[start:limit]` and judge what is wrong between them.

    `sealed_end`: bytes below it are known to have been durable (a manifest, a footer or a successor says so).
    `believe_tail`: whole frames above the last proof count (the segment is of an earlier boot).
    `start, sequence, batch`: where an earlier scan ended, to read only what was added since.
    `origin`: where in its file `data` begins, if it isn't all of it.
    """
    reader = _Reader(data, seed, limit, sealed_end, start, origin, sequence, batch)
    reader.walk()
    return reader.verdict(believe_tail)


class _Reader:
    """One walk over a segment. `walk` collects, `verdict` decides once the last proof is known."""

    def __init__(
        self, data: Buffer, seed: int, limit: int, sealed_end: int, start: int, origin: int, sequence: int, batch: int
    ) -> None:
        self.data, self.seed, self.limit, self.sealed_end = data, seed, limit, sealed_end
        self.header_seed = seed + origin
        self.offset, self.sequence = start, sequence
        self.start, self.start_batch = start, batch
        self.proven = batch - 1
        """Every batch up to this one was durable."""
        self.frames: list[Frame] = []
        self.gaps: list[tuple[Gap, _Header | None]] = []
        """Each with the header that follows it."""
        self.all_proven = False
        """The last trailer is there though the frames before it can't be read: all of this was durable."""
        self.batch_closed = True
        """The last frame ended its batch and its trailer was seen."""
        self.acknowledged = True
        self.next_batch = batch

    def walk(self) -> None:
        view = memoryview(self.data)
        self._take_whole(view)
        while self.offset < self.limit:
            header = _header_at(self.data, self.offset, self.limit, self.header_seed)
            if header is None or header.frame.sequence < self.sequence:
                header = _next_header(self.data, self.offset + 1, self.limit, self.header_seed, self.sequence)
                until = self.limit if header is None else header.frame.offset
                self._add_gap(until, None, header)
                continue
            if header.frame.sequence > self.sequence:
                self._add_gap(self.offset, None, header)
            self._take(header, view)

    def _take_whole(self, view: memoryview) -> None:
        """What `walk` does, for as long as there is nothing to judge: whole frames in order, in closed batches."""
        offset, sequence, limit = self.offset, self.sequence, self.limit
        seed, header_seed = self.seed, self.header_seed
        frames, crc32, unpack = self.frames, zlib.crc32, _HEADER_AND_CRC.unpack_from
        while offset + HEADER_SIZE <= limit:
            magic, kind, flags, version, length, number, batch, _, body_crc, header_crc = unpack(view, offset)
            body = offset + HEADER_SIZE
            end = body + length
            if (
                magic != MAGIC
                or number != sequence
                or end > limit
                or crc32(view[offset : body - 4], (header_seed + offset) & 0xFFFFFFFF) != header_crc
                or crc32(view[body:end], seed) != body_crc
            ):
                break
            frame = Frame(kind, flags, number, batch, offset, length, body_crc, version)
            end = (end + 7) & ~7
            if flags & LAST_IN_BATCH:
                trailer = view[end : end + TRAILER_SIZE]
                end += TRAILER_SIZE
                if end > limit or trailer == UNACKNOWLEDGED:
                    break
                self.proven, self.batch_closed = max(self.proven, batch), True
            elif end > limit:
                break
            else:
                self.proven, self.batch_closed = max(self.proven, batch - 1), False
            frames.append(frame)
            offset, sequence, self.next_batch = end, number + 1, batch + 1
        self.offset, self.sequence = offset, sequence

    def _add_gap(self, until: int, batch: int | None, follower: _Header | None) -> None:
        self.gaps.append((Gap(self.offset, until, self.sequence, batch), follower))
        self.offset = until
        self.batch_closed = False
        if follower is not None:
            self.sequence = follower.frame.sequence

    def _take(self, header: _Header, view: memoryview) -> None:
        frame = header.frame
        self.proven = max(self.proven, frame.batch - 1)
        self.next_batch = frame.batch + 1
        if frame.body_end > self.limit:
            # The header is whole and its length can be trusted: the body was cut off.
            self._add_gap(self.limit, frame.batch, None)
            return
        whole = zlib.crc32(view[frame.body_start : frame.body_end], self.seed) == frame.body_crc
        if whole:
            self.frames.append(frame)
        else:
            self.gaps.append((Gap(frame.offset, frame.end, frame.sequence, frame.batch), None))
        self.offset = min(frame.end, self.limit)
        self.sequence = frame.sequence + 1
        self.batch_closed = False
        if frame.flags & LAST_IN_BATCH:
            trailer = self.data[self.offset : min(self.offset + TRAILER_SIZE, self.limit)]
            # Any byte that isn't zero was written after the sync returned.
            self.acknowledged = any(trailer)
            if self.acknowledged:
                self.proven = max(self.proven, frame.batch)
            self.offset += len(trailer)
            self.batch_closed = len(trailer) == TRAILER_SIZE

    def verdict(self, believe_tail: bool) -> Scan:
        damage: list[Gap] = []
        torn: Gap | None = None
        self.all_proven = self._ends_acknowledged()
        for gap, follower in self.gaps:
            if self._was_durable(gap, follower):
                damage.append(gap)
            elif torn is None:
                torn = gap
        proven, sealed_end = self.proven, self.sealed_end
        if believe_tail or self.all_proven:
            believed = self.frames
        else:
            believed = [f for f in self.frames if f.batch <= proven or f.offset < sealed_end]
        if torn is not None:
            believed = [f for f in believed if f.offset < torn.offset]
        believed = self._drop_open_group(believed)
        if len(believed) < len(self.frames):
            first = self.frames[len(believed)]
            if torn is None or first.offset < torn.offset:
                torn = Gap(first.offset, self.limit, first.sequence, first.batch)
        if torn is not None:
            torn.end = self.limit
        # The padding of the last frame may be cut off.
        end = min(self.limit, max([self.start] + [f.end for f in believed[-1:]] + [g.end for g in damage]))
        clean = torn is None and self.batch_closed and self.acknowledged and self.offset == self.limit
        if damage and damage[-1].end == self.limit:
            clean = False
        return Scan(
            frames=believed,
            damage=damage,
            torn=torn,
            end=end,
            append_at=self.limit if clean else None,
            next_sequence=self.sequence,
            next_batch=self.next_batch,
        )

    def _ends_acknowledged(self) -> bool:
        """Whether the last frames can't be read, but the last trailer can.

        A torn write does not end in the word that is written after the sync.
        """
        if not self.gaps or self.limit < TRAILER_SIZE:
            return False
        last, follower = self.gaps[-1]
        unreadable = last.end == self.limit and follower is None and last.batch is None
        return unreadable and self.data[self.limit - TRAILER_SIZE : self.limit] == ACKNOWLEDGED

    def _is_proven(self, frame: Frame) -> bool:
        return self.all_proven or frame.batch <= self.proven or frame.offset < self.sealed_end

    def _was_durable(self, gap: Gap, follower: _Header | None) -> bool:
        if self.all_proven or gap.offset < self.sealed_end:
            return True
        if gap.batch is not None:
            return gap.batch <= self.proven
        if follower is None:
            return False
        # The lost frames belong to a batch before the follower's, unless the follower's batch began among them.
        return gap.sequence < follower.batch_first or follower.frame.batch <= self.proven

    def _drop_open_group(self, believed: list[Frame]) -> list[Frame]:
        """Leave out a group at the end that lacks its last members: it was never acknowledged."""
        if not believed or not believed[-1].flags & GROUP_CONTINUES:
            return believed
        last = believed[-1]
        if self._is_proven(last):
            return believed  # it was whole once; its other members are damage
        keep = len(believed)
        while keep and believed[keep - 1].flags & GROUP_CONTINUES and believed[keep - 1].batch == last.batch:
            keep -= 1
        return believed[:keep]
