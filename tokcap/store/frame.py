"""Frames: the bytes of a segment file. What bytes that are wrong mean is judged in `scan`.

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
    "HEADER_AND_CRC",
    "HEADER_SIZE",
    "LAST_IN_BATCH",
    "MAGIC",
    "SPACE",
    "TRAILER_SIZE",
    "Buffer",
    "Frame",
    "Header",
    "Kind",
    "content_end",
    "frame_header",
    "header_at",
    "newer_format",
    "next_header",
    "padding",
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
HEADER_AND_CRC = struct.Struct("<4sBBHIIIIII")


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


class Header(msgspec.Struct, gc=False):
    frame: Frame
    batch_first: int


def header_at(data: Buffer, offset: int, limit: int, seed: int) -> Header | None:
    if offset + HEADER_SIZE > limit:
        return None
    head = data[offset : offset + HEADER_SIZE]
    if head[:4] != MAGIC or _CRC.unpack_from(head, 28)[0] != zlib.crc32(head[:28], _placed(seed, offset)):
        return None
    _, kind, flags, version, body_length, sequence, batch, batch_first, body_crc = _HEADER.unpack_from(head)
    return Header(Frame(kind, flags, sequence, batch, offset, body_length, body_crc, version), batch_first)


def next_header(data: Buffer, offset: int, limit: int, seed: int, sequence: int) -> Header | None:
    """The first valid header above `offset` that can follow frame `sequence - 1`."""
    found = data.find(MAGIC, offset, limit)
    while found >= 0:
        if found % 8 == 0:
            header = header_at(data, found, limit, seed)
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
