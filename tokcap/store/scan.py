"""The verdict on a stretch of a segment: which frames are believed, what is damage, and what was never acknowledged.

Why it can be certain is said in `frame`.
"""

from __future__ import annotations

import zlib

import msgspec

from .frame import (
    ACKNOWLEDGED,
    GROUP_CONTINUES,
    HEADER_AND_CRC,
    HEADER_SIZE,
    LAST_IN_BATCH,
    MAGIC,
    TRAILER_SIZE,
    UNACKNOWLEDGED,
    Buffer,
    Frame,
    Header,
    header_at,
    next_header,
)

__all__ = ("Gap", "Scan", "scan")


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
        self.gaps: list[tuple[Gap, Header | None]] = []
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
            header = header_at(self.data, self.offset, self.limit, self.header_seed)
            if header is None or header.frame.sequence < self.sequence:
                header = next_header(self.data, self.offset + 1, self.limit, self.header_seed, self.sequence)
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
        frames, crc32, unpack = self.frames, zlib.crc32, HEADER_AND_CRC.unpack_from
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

    def _add_gap(self, until: int, batch: int | None, follower: Header | None) -> None:
        self.gaps.append((Gap(self.offset, until, self.sequence, batch), follower))
        self.offset = until
        self.batch_closed = False
        if follower is not None:
            self.sequence = follower.frame.sequence

    def _take(self, header: Header, view: memoryview) -> None:
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

    def _was_durable(self, gap: Gap, follower: Header | None) -> bool:
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
