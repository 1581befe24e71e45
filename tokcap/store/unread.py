"""Bytes of a segment that nobody reads: whether they are still as they were written.

A changed one costs nothing. But whatever changed it may have changed others, so it is worth a word. Three places of a
segment have no checksum: the up to 7 bytes that pad a frame (zeros), the 8 of a trailer (`ACKNOWLEDGED`; zeros in the
last batch, if its writer died), and the space behind the last batch. Of a torn tail nobody knows what it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from .frame import ACKNOWLEDGED, LAST_IN_BATCH, SPACE, TRAILER_SIZE, UNACKNOWLEDGED, Buffer, Kind
from .log import SegmentRead
from .records import SealRecord

__all__ = ("Changed", "changed_bytes", "changed_space", "odd_frames")

_FEW = 8
"""Bytes of space that may differ from it and still be space that changed; more are somebody's write."""

_decode_seal = msgspec.msgpack.Decoder(SealRecord).decode


class Changed(NamedTuple):
    """A range of bytes that is not as it was written."""

    offset: int
    end: int
    what: str


def changed_bytes(read: SegmentRead, data: Buffer) -> Iterator[Changed]:
    """Padding and trailers of believed frames, where they are not as they were written."""
    frames = read.scan.frames
    size = len(data)
    for position, frame in enumerate(frames):
        body_end, end = frame.body_end, frame.end
        if body_end < end and any(data[body_end : min(end, size)]):
            yield Changed(body_end, end, "the padding of a frame is not zero")
        if not frame.flags & LAST_IN_BATCH:
            continue
        trailer = data[end : end + TRAILER_SIZE]
        if trailer == ACKNOWLEDGED or len(trailer) < TRAILER_SIZE:
            continue
        if trailer == UNACKNOWLEDGED and (position == len(frames) - 1 or frames[position + 1].batch == frame.batch):
            continue
        yield Changed(end, end + TRAILER_SIZE, "the trailer of a batch is none")


def changed_space(data: Buffer, start: int, end: int) -> Changed | None:
    """`data[start:end]`, a tail that no frame is in: where it was space and isn't any more; None if it never was."""
    start = (start + 7) & ~7
    tail = np.frombuffer(data, np.uint8)[start:end]
    if not len(tail):
        return None
    space = np.frombuffer(SPACE * (len(tail) // len(SPACE) + 1), np.uint8)[: len(tail)]
    differ = np.flatnonzero(tail != space)
    if not len(differ) or len(differ) > _FEW or len(differ) * 2 >= len(tail):
        return None
    first, last = int(differ[0]), int(differ[-1])
    return Changed(start + first, start + last + 1, "space behind the last batch has changed")


def odd_frames(read: SegmentRead, data: Buffer) -> Iterator[Changed]:
    """Frames whose checksums hold, and whose numbers can't be those of a batch of this segment."""
    view = memoryview(data)
    before = None
    for frame in read.scan.frames:
        if before is not None and before.sequence + 1 == frame.sequence:
            expected = before.batch + 1 if before.flags & LAST_IN_BATCH else before.batch
            if frame.batch != expected:
                yield Changed(frame.offset, frame.end, f"a frame of batch {frame.batch} where {expected} goes on")
        if frame.kind == Kind.SEAL:
            try:
                seal = _decode_seal(view[frame.body_start : frame.body_end])
            except msgspec.DecodeError as error:
                yield Changed(frame.offset, frame.end, f"a seal that can't be decoded: {error}")
            else:
                if (seal.frames, seal.end) != (frame.sequence, frame.offset):
                    yield Changed(frame.offset, frame.end, "a seal that states another end than its own place")
        before = frame
