"""A batch: the frames that one write and one sync make durable together."""

from __future__ import annotations

from zlib import crc32

import msgspec

from .frame import FORMAT_VERSION, HEADER_SIZE, LAST_IN_BATCH, TRAILER_SIZE, UNACKNOWLEDGED, Kind, frame_header, padding
from .records import SegmentHeader, encode_record

__all__ = ("Batch", "Place")


_JOINED_BELOW = 64 << 10
"""Bytes; a copy of this little costs less than a write from many places."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a frame of a batch will stand."""

    sequence: int
    body_start: int
    body_length: int
    body_crc: int


class Batch:
    """Collects frames for one segment, from `offset` on, and lays them out as buffers to write."""

    def __init__(self, *, seed: int, offset: int, sequence: int, number: int) -> None:
        self.seed, self.offset, self.number = seed, offset, number
        self.first = sequence
        self.end = offset
        """Where the frames end, the trailer not counted."""
        self._frames: list[tuple[int, int, list[bytes | memoryview], Place]] = []

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def next_sequence(self) -> int:
        return self.first + len(self._frames)

    def add(self, kind: Kind, body: list[bytes | memoryview], flags: int = 0) -> Place:
        """Append one frame whose body is `body`, joined."""
        length, crc = 0, self.seed
        for part in body:
            length += len(part)
            crc = crc32(part, crc)
        place = Place(self.first + len(self._frames), self.end + HEADER_SIZE, length, crc)
        self._frames.append((kind, flags, body, place))
        self.end += HEADER_SIZE + length + -length % 8
        return place

    def add_record(self, kind: Kind, record: msgspec.Struct) -> Place:
        return self.add(kind, [encode_record(record)])

    def add_header(
        self,
        rollout_id: str,
        incarnation: str,
        segment: int,
        boot_id: str,
        created_at: float,
        predecessor_end: int,
        predecessor: int = 0,
        mount: str = "",
    ) -> SegmentHeader:
        """Append the first frame of a segment."""
        header = SegmentHeader(
            FORMAT_VERSION,
            rollout_id,
            incarnation,
            segment,
            boot_id,
            created_at,
            predecessor_end,
            predecessor,
            mount,
        )
        self.add_record(Kind.SEGMENT, header)
        return header

    @property
    def trailer_offset(self) -> int:
        return self.end

    @property
    def append_at(self) -> int:
        """Where the batch after this one begins."""
        return self.end + TRAILER_SIZE

    def buffers(self, *, trailer: bool = True) -> list[bytes | memoryview]:
        """Everything to write at `offset`. A file that is published whole has no trailer at its end."""
        buffers: list[bytes | memoryview] = []
        last = len(self._frames) - 1
        for position, (kind, flags, body, place) in enumerate(self._frames):
            if position == last:
                flags |= LAST_IN_BATCH
            header = frame_header(
                kind,
                flags,
                place.body_length,
                place.sequence,
                self.number,
                self.first,
                place.body_crc,
                self.seed,
                place.body_start - HEADER_SIZE,
            )
            buffers.append(header)
            buffers += body
            pad = padding(place.body_length)
            if pad:
                buffers.append(bytes(pad))
        if trailer:
            buffers.append(UNACKNOWLEDGED)
        return [b"".join(buffers)] if self.end - self.offset < _JOINED_BELOW else buffers
