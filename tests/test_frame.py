"""Scans of segments: which frames are believed, what is called damaged and what torn, and that no bytes stop a scan."""

from __future__ import annotations

import mmap
import struct
import tracemalloc
import zlib
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.store import frame as frame_module
from tokcap.store.batch import Batch
from tokcap.store.frame import (
    ACKNOWLEDGED,
    FORMAT_VERSION,
    GROUP_CONTINUES,
    HEADER_SIZE,
    LAST_IN_BATCH,
    TRAILER_SIZE,
    Frame,
    Kind,
    frame_header,
    padding,
    segment_seed,
)
from tokcap.store.scan import Scan, scan

SEED = segment_seed("0123456789abcdef" * 2, "000001")
OTHER_SEED = segment_seed("0123456789abcdef" * 2, "000002")


class Segment:
    """Bytes of a segment, made of batches of frames; the last trailer may be missing."""

    def __init__(self, *batches: list[tuple[bytes, int]], seed: int = SEED, acknowledged: bool = True) -> None:
        self.seed = seed
        self.data = b""
        self.frames: list[Frame] = []
        self.batch_ends: list[int] = []
        """Where each batch begins its trailer."""
        for number, frames in enumerate(batches):
            batch = Batch(seed=seed, offset=len(self.data), sequence=len(self.frames), number=number)
            for body, flags in frames:
                batch.add(Kind.ENTRY, [body], flags)
            joined = b"".join(batch.buffers())
            whole = acknowledged or number < len(batches) - 1
            self.data += joined[:-TRAILER_SIZE] + (ACKNOWLEDGED if whole else bytes(TRAILER_SIZE))
            self.batch_ends.append(batch.end)
            self.frames = scan(self.data, seed, limit=len(self.data), believe_tail=True).frames

    def damage(self, sequence: int, *, part: str = "body") -> Segment:
        """Change one byte of a frame, in its body or its header."""
        place = self.frames[sequence]
        at = place.body_start if part == "body" else place.offset + 9
        return self.with_data(self.data[:at] + bytes((self.data[at] ^ 0x40,)) + self.data[at + 1 :])

    def cut(self, at: int) -> Segment:
        return self.with_data(self.data[:at])

    def zero(self, start: int, end: int) -> Segment:
        return self.with_data(self.data[:start] + bytes(end - start) + self.data[end:])

    def with_data(self, data: bytes) -> Segment:
        other = Segment(seed=self.seed)
        other.data, other.frames, other.batch_ends = data, self.frames, self.batch_ends
        return other

    def scan(self, *, sealed_end: int = 0, believe_tail: bool = False) -> Scan:
        return scan(self.data, self.seed, limit=len(self.data), sealed_end=sealed_end, believe_tail=believe_tail)


def one(body: bytes = b"body of a frame", flags: int = 0) -> list[tuple[bytes, int]]:
    return [(body, flags)]


Summary = tuple[list[int], list[int], int | None, bool]


def summary(found: Scan) -> Summary:
    """Sequence numbers of what is believed, damaged and torn, and whether another batch may follow."""
    return (
        [frame.sequence for frame in found.frames],
        [gap.sequence for gap in found.damage],
        None if found.torn is None else found.torn.sequence,
        found.append_at is not None,
    )


def test_whole_segment_is_read_frame_by_frame() -> None:
    bodies = [b"", b"x", b"12345678", b"y" * 1000]
    segment = Segment([(bodies[0], 0), (bodies[1], 0)], [(bodies[2], 0)], [(bodies[3], 0)])
    found = segment.scan()
    assert summary(found) == ([0, 1, 2, 3], [], None, True)
    assert [segment.data[f.body_start : f.body_end] for f in found.frames] == bodies
    assert [f.batch for f in found.frames] == [0, 0, 1, 2]
    assert [bool(f.flags & LAST_IN_BATCH) for f in found.frames] == [False, True, True, True]
    assert all(f.offset % 8 == 0 and f.format == FORMAT_VERSION for f in found.frames)
    assert found.append_at == len(segment.data) == found.end + TRAILER_SIZE
    assert (found.next_sequence, found.next_batch) == (4, 3)


def test_empty_segment_holds_nothing_and_may_be_written() -> None:
    found = scan(b"", SEED, limit=0)
    assert summary(found) == ([], [], None, True)
    assert (found.append_at, found.next_sequence, found.next_batch) == (0, 0, 0)


# ---- verdicts

# Three batches: 0; 1 and 2; 3, 4 and 5.
THREE = Segment(one(), [(b"b", 0), (b"c" * 20, 0)], [(b"d" * 9, 0), (b"e" * 70, 0), (b"f" * 3, 0)])
UNACKNOWLEDGED = Segment(
    one(), [(b"b", 0), (b"c" * 20, 0)], [(b"d" * 9, 0), (b"e" * 70, 0), (b"f" * 3, 0)], acknowledged=False
)
START_OF_LAST = THREE.frames[3].offset

VERDICTS: dict[str, tuple[Segment, Summary, Summary]] = {
    # name: bytes, verdict in the boot that wrote them, verdict in a later one
    "whole": (THREE, ([0, 1, 2, 3, 4, 5], [], None, True), ([0, 1, 2, 3, 4, 5], [], None, True)),
    "last batch without its trailer": (
        UNACKNOWLEDGED,
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2, 3, 4, 5], [], None, False),
    ),
    "body damaged in an earlier batch": (
        THREE.damage(1),
        ([0, 2, 3, 4, 5], [1], None, True),
        ([0, 2, 3, 4, 5], [1], None, True),
    ),
    "header damaged in an earlier batch": (
        THREE.damage(1, part="header"),
        ([0, 2, 3, 4, 5], [1], None, True),
        ([0, 2, 3, 4, 5], [1], None, True),
    ),
    "header of the very first frame damaged": (
        THREE.damage(0, part="header"),
        ([1, 2, 3, 4, 5], [0], None, True),
        ([1, 2, 3, 4, 5], [0], None, True),
    ),
    "last frame of an earlier batch damaged": (
        THREE.damage(2, part="header"),
        ([0, 1, 3, 4, 5], [2], None, True),
        ([0, 1, 3, 4, 5], [2], None, True),
    ),
    "body damaged in the last batch, acknowledged": (
        THREE.damage(3),
        ([0, 1, 2, 4, 5], [3], None, True),
        ([0, 1, 2, 4, 5], [3], None, True),
    ),
    "header damaged in the last batch, acknowledged": (
        THREE.damage(4, part="header"),
        ([0, 1, 2, 3, 5], [4], None, True),
        ([0, 1, 2, 3, 5], [4], None, True),
    ),
    "body of the very last frame damaged, acknowledged": (
        THREE.damage(5),
        ([0, 1, 2, 3, 4], [5], None, True),
        ([0, 1, 2, 3, 4], [5], None, True),
    ),
    "header of the very last frame damaged, acknowledged": (
        THREE.damage(5, part="header"),
        ([0, 1, 2, 3, 4], [5], None, False),
        ([0, 1, 2, 3, 4], [5], None, False),
    ),
    "all headers of the last batch damaged, acknowledged": (
        THREE.damage(3, part="header").damage(4, part="header").damage(5, part="header"),
        ([0, 1, 2], [3], None, False),
        ([0, 1, 2], [3], None, False),
    ),
    "body damaged in the last batch, without its trailer": (
        UNACKNOWLEDGED.damage(4),
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2, 3], [], 4, False),
    ),
    "header damaged in the last batch, without its trailer": (
        UNACKNOWLEDGED.damage(4, part="header"),
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2, 3], [], 4, False),
    ),
    "damage in an earlier batch and a torn tail": (
        UNACKNOWLEDGED.damage(1).cut(len(UNACKNOWLEDGED.data) - 30),
        ([0, 2], [1], 3, False),
        ([0, 2, 3, 4], [1], 5, False),
    ),
    "cut in the first header": (THREE.cut(20), ([], [], 0, False), ([], [], 0, False)),
    "cut behind the first frame, before its trailer": (
        THREE.cut(THREE.batch_ends[0]),
        ([], [], 0, False),
        ([0], [], None, False),
    ),
    "cut in the first trailer": (
        THREE.cut(THREE.batch_ends[0] + 1),
        ([0], [], None, False),
        ([0], [], None, False),
    ),
    "cut behind the first trailer": (
        THREE.cut(THREE.batch_ends[0] + TRAILER_SIZE),
        ([0], [], None, True),
        ([0], [], None, True),
    ),
    "cut in a header of the last batch": (
        THREE.cut(START_OF_LAST + 5),
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2], [], 3, False),
    ),
    "cut in a body of the last batch": (
        THREE.cut(THREE.frames[4].body_start + 5),
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2, 3], [], 4, False),
    ),
    "cut in the padding of the last frame": (
        THREE.cut(THREE.frames[5].body_end + 1),
        ([0, 1, 2], [], 3, False),
        ([0, 1, 2, 3, 4, 5], [], None, False),
    ),
    "trailer of an earlier batch lost": (
        THREE.zero(THREE.batch_ends[1], THREE.batch_ends[1] + TRAILER_SIZE),
        ([0, 1, 2, 3, 4, 5], [], None, True),
        ([0, 1, 2, 3, 4, 5], [], None, True),
    ),
    "trailer damaged but not empty": (
        THREE.with_data(THREE.data[:-1] + b"J"),
        ([0, 1, 2, 3, 4, 5], [], None, True),
        ([0, 1, 2, 3, 4, 5], [], None, True),
    ),
    "zeros behind the end": (
        THREE.with_data(THREE.data + bytes(64)),
        ([0, 1, 2, 3, 4, 5], [], 6, False),
        ([0, 1, 2, 3, 4, 5], [], 6, False),
    ),
    "an earlier batch zeroed": (
        THREE.zero(THREE.frames[1].offset, THREE.batch_ends[1]),
        ([0, 3, 4, 5], [1], None, True),
        ([0, 3, 4, 5], [1], None, True),
    ),
    "everything zeroed": (THREE.zero(0, len(THREE.data)), ([], [], 0, False), ([], [], 0, False)),
    "everything zeroed but the last trailer": (
        THREE.zero(0, len(THREE.data) - TRAILER_SIZE),
        ([], [0], None, False),
        ([], [0], None, False),
    ),
}


@pytest.mark.parametrize("segment, same_boot, later_boot", VERDICTS.values(), ids=VERDICTS.keys())
def test_verdict(
    segment: Segment,
    same_boot: Summary,
    later_boot: Summary,
) -> None:
    assert summary(segment.scan()) == same_boot
    assert summary(segment.scan(believe_tail=True)) == later_boot


def test_segment_of_another_name_has_no_frames() -> None:
    foreign = Segment(one(), one(), seed=OTHER_SEED, acknowledged=False)
    found = scan(foreign.data, SEED, limit=len(foreign.data), believe_tail=True)
    assert summary(found) == ([], [], 0, False)


@pytest.mark.parametrize("believe_tail", [False, True])
def test_below_a_stated_end_everything_that_is_wrong_is_damage(believe_tail: bool) -> None:
    whole = UNACKNOWLEDGED
    end = whole.batch_ends[-1]
    assert summary(whole.scan(sealed_end=end, believe_tail=believe_tail))[:3] == ([0, 1, 2, 3, 4, 5], [], None)
    for sequence in range(6):
        for part in ("body", "header"):
            found = whole.damage(sequence, part=part).scan(sealed_end=end, believe_tail=believe_tail)
            assert [frame.sequence for frame in found.frames] == [s for s in range(6) if s != sequence]
            assert [gap.sequence for gap in found.damage] == [sequence]
            assert found.torn is None
    cut = whole.cut(whole.frames[4].body_start + 1).scan(sealed_end=end, believe_tail=believe_tail)
    assert summary(cut) == ([0, 1, 2, 3], [4], None, False)


def test_damage_names_the_bytes_that_are_no_frames() -> None:
    place = THREE.frames[1]
    for part in ("body", "header"):
        (gap,) = THREE.damage(1, part=part).scan().damage
        assert (gap.offset, gap.end) == (place.offset, place.end)
    (gap,) = THREE.damage(3, part="header").damage(4, part="header").scan().damage
    assert (gap.offset, gap.end) == (THREE.frames[3].offset, THREE.frames[4].end)


def test_torn_tail_reaches_to_the_end_of_the_file() -> None:
    found = THREE.cut(THREE.frames[4].body_start + 5).scan(believe_tail=True)
    assert found.torn is not None
    assert (found.torn.offset, found.torn.end) == (THREE.frames[4].offset, THREE.frames[4].body_start + 5)
    assert found.end == THREE.frames[3].end


def test_end_of_what_is_believed_is_never_behind_the_end_of_the_file() -> None:
    for at in range(len(THREE.data) + 1):
        for believe_tail in (False, True):
            found = THREE.cut(at).scan(believe_tail=believe_tail)
            assert found.end <= at
            # Read again up to that end, the same is believed: what a successor states about this segment holds.
            again = scan(THREE.data[:at], SEED, limit=found.end, sealed_end=found.end)
            assert again.frames == found.frames
            assert not again.damage


# ---- frames only count in their own place


def test_frame_is_valid_at_its_own_offset_only() -> None:
    data = THREE.data
    for source in THREE.frames:
        for target in THREE.frames:
            moved = data[source.offset : source.end]
            end = target.offset + len(moved)
            if source is target or end > THREE.frames[-1].end:
                continue
            found = THREE.with_data(data[: target.offset] + moved + data[end:]).scan()
            hit = [f.sequence for f in THREE.frames if f.offset < end and target.offset < f.body_end]
            assert [f.sequence for f in found.frames] == [s for s in range(6) if s not in hit]
            assert found.torn is None


def test_frame_inside_a_body_is_content() -> None:
    """A body may hold the bytes of a frame, were it even one of this very segment."""
    inner = Segment(one(b"inner"), one(b"inner too"))
    outer = Segment(one(inner.data), one(b"outer"))
    assert summary(outer.scan()) == ([0, 1], [], None, True)
    found = outer.damage(0, part="header").scan()
    assert [frame.body_length for frame in found.frames] == [5]
    assert [gap.sequence for gap in found.damage] == [0]


def test_zeros_are_never_a_frame_even_with_the_checksum_that_would_fit() -> None:
    head = bytes(28)
    with_crc = head + struct.pack("<I", zlib.crc32(head, SEED))
    assert scan(with_crc, SEED, limit=32, believe_tail=True).frames == []
    assert segment_seed("", "") != 0


# ---- groups


GROUP = [(b"a", GROUP_CONTINUES), (b"b", GROUP_CONTINUES), (b"c", 0)]


@pytest.mark.parametrize("believe_tail", [False, True])
def test_group_is_believed_whole_or_not_at_all_when_its_batch_is_cut(believe_tail: bool) -> None:
    segment = Segment(one(), [(b"before", 0), *GROUP, (b"x", GROUP_CONTINUES), (b"y", 0)])
    members = {2: 2, 3: 2, 4: 2, 5: 5, 6: 5}
    for at in range(segment.batch_ends[0] + TRAILER_SIZE, len(segment.data)):
        believed = [frame.sequence for frame in segment.cut(at).scan(believe_tail=believe_tail).frames]
        assert believed == list(range(len(believed)))
        for first, last in ((2, 4), (5, 6)):
            assert (first in believed) == (last in believed)
        if believed and believed[-1] in members and believe_tail:
            assert believed[-1] in (4, 6)


def test_group_that_was_durable_loses_only_its_damaged_member() -> None:
    segment = Segment(one(), GROUP, one())
    for sequence in (1, 2, 3):
        for part in ("body", "header"):
            found = segment.damage(sequence, part=part).scan()
            assert [f.sequence for f in found.frames] == [s for s in range(5) if s != sequence]
            assert [g.sequence for g in found.damage] == [sequence]


def test_group_with_a_damaged_member_in_an_unacknowledged_batch_is_dropped_and_what_precedes_it_kept() -> None:
    segment = Segment(one(), [(b"before", 0), *GROUP], acknowledged=False)
    for sequence in (2, 3, 4):
        found = segment.damage(sequence).scan(believe_tail=True)
        assert [f.sequence for f in found.frames] == [0, 1]
        assert found.torn is not None and found.torn.sequence == 2


# ---- reading on


def test_scan_of_what_was_added_finds_what_a_scan_of_everything_finds() -> None:
    everything = THREE.scan()
    for end in THREE.batch_ends[:-1]:
        at = end + TRAILER_SIZE
        first = THREE.cut(at).scan()
        assert first.append_at == at
        rest = scan(
            THREE.data[at:],
            SEED,
            limit=len(THREE.data) - at,
            origin=at,
            sequence=first.next_sequence,
            batch=first.next_batch,
        )
        for frame in rest.frames:
            frame.offset += at
        assert first.frames + rest.frames == everything.frames
        assert (rest.next_sequence, rest.next_batch) == (everything.next_sequence, everything.next_batch)
        assert rest.append_at == len(THREE.data) - at


def test_scan_from_a_start_ignores_what_is_before_it() -> None:
    at = THREE.batch_ends[0] + TRAILER_SIZE
    damaged = THREE.zero(0, at)
    found = scan(damaged.data, SEED, limit=len(damaged.data), start=at, sequence=1, batch=1)
    assert summary(found) == ([1, 2, 3, 4, 5], [], None, True)


def test_mapped_file_is_read_like_bytes() -> None:
    with mmap.mmap(-1, len(THREE.data)) as mapped:
        mapped[:] = THREE.data
        found = scan(mapped, SEED, limit=len(THREE.data))
        assert found == THREE.scan()
        del found


# ---- hostile bytes


def _hostile(body_length: int, sequence: int = 1, batch: int = 1, batch_first: int = 1) -> Segment:
    """A whole first batch, then a header whose checksum holds and whose numbers are wrong."""
    first = Segment(one())
    at = len(first.data)
    header = frame_header(Kind.ENTRY, LAST_IN_BATCH, body_length, sequence, batch, batch_first, 0, SEED, at)
    return first.with_data(first.data + header + b"z" * 40)


@pytest.mark.parametrize("body_length", [41, 1000, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("believe_tail", [False, True])
def test_length_beyond_the_file_is_a_cut_off_body_and_allocates_nothing(body_length: int, believe_tail: bool) -> None:
    segment = _hostile(body_length)
    tracemalloc.start()
    try:
        found = segment.scan(believe_tail=believe_tail)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary(found) == ([0], [], 1, False)
    assert peak < 100_000


@pytest.mark.parametrize("sequence", [0, 2, 2**31, 2**32 - 1])
@pytest.mark.parametrize("batch", [0, 1, 2**32 - 1])
def test_sequence_and_batch_numbers_that_cannot_be_stop_no_scan(sequence: int, batch: int) -> None:
    for batch_first in (0, 1, 2**32 - 1):
        found = _hostile(8, sequence, batch, batch_first).scan(believe_tail=True)
        assert [frame.sequence for frame in found.frames][:1] == [0]
        assert found.append_at is None


def test_bytes_full_of_magic_cost_one_look_each() -> None:
    looked = mock.Mock(wraps=frame_module.header_at)
    data = b"TKCF" * 20_000
    with mock.patch.object(frame_module, "header_at", looked):
        found = scan(data, SEED, limit=len(data))
    assert found.frames == []
    assert looked.call_count <= len(data) // 8 + 2


def test_headers_that_can_not_follow_each_cost_one_look() -> None:
    """As a tail of frames of an earlier life in the same place would."""
    segments = [Segment(*([one(b"x")] * count)) for count in (1, 300)]
    data = segments[1].data[: segments[1].frames[200].offset]
    looked = mock.Mock(wraps=frame_module.header_at)
    with mock.patch.object(frame_module, "header_at", looked):
        found = scan(data, SEED, limit=len(data), sequence=1000)
    assert found.frames == []
    assert looked.call_count <= 2 * 200 + 2


def _check_invariants(found: Scan, limit: int, start: int = 0) -> None:
    assert start <= found.end <= max(limit, start)
    assert [frame.sequence for frame in found.frames] == sorted({frame.sequence for frame in found.frames})
    for frame in found.frames:
        assert start <= frame.offset < frame.body_end <= limit
    for gap in found.damage:
        assert start <= gap.offset <= gap.end
    if found.torn is not None:
        assert found.append_at is None
        assert found.torn.end == limit
        assert all(frame.offset < found.torn.offset for frame in found.frames)
    if found.append_at is not None:
        assert found.append_at == limit


@given(data=st.binary(max_size=400), sealed_end=st.integers(0, 500), believe_tail=st.booleans())
def test_random_bytes_are_no_frames_and_stop_no_scan(data: bytes, sealed_end: int, believe_tail: bool) -> None:
    found = scan(data, SEED, limit=len(data), sealed_end=sealed_end, believe_tail=believe_tail)
    assert found.frames == []
    assert found.append_at is None or not data
    _check_invariants(found, len(data))


BODIES = st.lists(
    st.lists(st.tuples(st.binary(max_size=40), st.sampled_from([0, 0, 0, GROUP_CONTINUES])), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(
    batches=BODIES,
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.binary(min_size=1, max_size=64)), max_size=3),
    cut=st.integers(0, 2**16),
    acknowledged=st.booleans(),
    believe_tail=st.booleans(),
    sealed=st.booleans(),
)
def test_whatever_is_changed_nothing_is_believed_that_was_not_written(
    batches: list[list[tuple[bytes, int]]],
    changes: list[tuple[int, bytes]],
    cut: int,
    acknowledged: bool,
    believe_tail: bool,
    sealed: bool,
) -> None:
    # The last member of a group continues nothing.
    batches = [[*frames[:-1], (frames[-1][0], 0)] for frames in batches]
    segment = Segment(*batches, acknowledged=acknowledged)
    data = bytearray(segment.data)
    for at, new in changes:
        at %= len(data)
        data[at : at + len(new)] = new[: len(data) - at]
    del data[cut % (2 * len(data)) :]
    sealed_end = len(data) if sealed else 0
    found = scan(bytes(data), SEED, limit=len(data), sealed_end=sealed_end, believe_tail=believe_tail)
    _check_invariants(found, len(data))
    written = {frame.sequence: frame for frame in segment.frames}
    for frame in found.frames:
        assert frame == written[frame.sequence]
        assert data[frame.body_start : frame.body_end] == segment.data[frame.body_start : frame.body_end]
    if sealed:
        whole = [
            f
            for f in segment.frames
            if f.body_end <= len(data) and data[f.offset : f.body_end] == segment.data[f.offset : f.body_end]
        ]
        assert found.frames == whole
        assert found.torn is None


@given(batches=BODIES, at=st.integers(0, 2**16), believe_tail=st.booleans())
def test_cut_never_costs_what_was_acknowledged_before_it(
    batches: list[list[tuple[bytes, int]]], at: int, believe_tail: bool
) -> None:
    batches = [[*frames[:-1], (frames[-1][0], 0)] for frames in batches]
    segment = Segment(*batches)
    at %= len(segment.data) + 1
    found = segment.cut(at).scan(believe_tail=believe_tail)
    acknowledged = [f for f in segment.frames if segment.batch_ends[f.batch] + TRAILER_SIZE <= at]
    assert found.frames[: len(acknowledged)] == acknowledged
    assert not found.damage
    assert all(frame in segment.frames for frame in found.frames)


# ---- layout


def test_header_of_a_frame_is_laid_out_as_documented() -> None:
    body = b"twelve bytes"
    batch = Batch(seed=SEED, offset=64, sequence=7, number=3)
    batch.add(Kind.ENTRY, [body], GROUP_CONTINUES)
    batch.add(Kind.SETTLE, [b"", b"abc"])
    data = b"".join(batch.buffers())
    assert data[:4] == b"TKCF"
    kind, flags, version, length, sequence, number, first, crc = struct.unpack_from("<BBHIIIII", data, 4)
    assert (kind, flags, version, length) == (Kind.ENTRY, GROUP_CONTINUES, FORMAT_VERSION, 12)
    assert (sequence, number, first) == (7, 3, 7)
    assert crc == zlib.crc32(body, SEED)
    second = HEADER_SIZE + 12 + padding(12)
    assert second % 8 == 0
    kind, flags, _, length, sequence, number, first, _ = struct.unpack_from("<BBHIIIII", data, second + 4)
    assert (kind, flags, length, sequence, number, first) == (Kind.SETTLE, LAST_IN_BATCH, 3, 8, 3, 7)
    assert data.endswith(bytes(TRAILER_SIZE))
    assert batch.append_at == 64 + len(data)
    assert batch.trailer_offset == 64 + len(data) - TRAILER_SIZE


@pytest.mark.parametrize("length", range(17))
def test_padding_brings_any_length_to_a_multiple_of_eight(length: int) -> None:
    assert 0 <= padding(length) < 8
    assert (length + padding(length)) % 8 == 0


def test_seeds_differ_by_incarnation_and_by_name() -> None:
    seeds = {segment_seed(incarnation, name) for incarnation in ("a" * 32, "b" * 32) for name in ("000001", "000002")}
    assert len(seeds) == 4


def test_scan_of_a_frame_of_a_later_format_tells_the_format() -> None:
    with mock.patch.object(frame_module, "FORMAT_VERSION", 7):
        segment = Segment(one())
    assert [frame.format for frame in segment.scan().frames] == [7]
    assert segment.damage(0, part="header").scan().frames == []
