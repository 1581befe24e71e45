"""The short way through a segment, where nothing is wrong, ends in what the judging way finds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokcap.store import frame
from tokcap.store import scan as scanning
from tokcap.store.batch import Batch
from tokcap.store.frame import ACKNOWLEDGED, SPACE, Kind, segment_seed
from tokcap.store.scan import scan

SEED = segment_seed("a" * 32, "000001")
KINDS = (Kind.ENTRY, Kind.BEGIN, Kind.SETTLE, Kind.DELIVERY)


@st.composite
def segments(draw: st.DrawFn) -> bytes:
    """Batches of frames, most of them acknowledged; then perhaps damaged, cut, and with space behind."""
    data, sequence = b"", draw(st.sampled_from([0, 0, 0, 3]))
    for number in range(draw(st.integers(0, 4))):
        batch = Batch(seed=SEED, offset=len(data), sequence=sequence, number=number)
        for _ in range(draw(st.integers(1, 3))):
            flags = draw(st.sampled_from([0, 0, 0, frame.GROUP_CONTINUES]))
            batch.add(draw(st.sampled_from(KINDS)), [draw(st.binary(max_size=30))], flags)
        trailer = draw(st.sampled_from([ACKNOWLEDGED, ACKNOWLEDGED, ACKNOWLEDGED, bytes(8), b"t" + bytes(7)]))
        data += b"".join(batch.buffers(trailer=False)) + trailer
        sequence = batch.next_sequence + draw(st.sampled_from([0, 0, 0, 0, 1]))
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 2))):
        if changed:
            at = draw(st.integers(0, len(changed) - 1))
            match draw(st.sampled_from(["flip", "zero", "move"])):
                case "flip":
                    changed[at] ^= 1 << draw(st.integers(0, 7))
                case "zero":
                    changed[at & ~7 : at + 16] = bytes(len(changed[at & ~7 : at + 16]))
                case "move":
                    changed[at & ~7 : at & ~7] = bytes(8)
    cut = draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    return bytes(changed[:cut]) + SPACE * draw(st.sampled_from([0, 0, 2]))


def scanned(data: bytes, **how: Any) -> Any:
    return msgspec.to_builtins(scan(data, SEED, **how))


def check(data: bytes, **how: Any) -> None:
    found = scanned(data, **how)
    with patch.object(scanning._Reader, "_take_whole", lambda reader, view: None):
        assert found == scanned(data, **how)


@settings(max_examples=400)
@given(segments(), st.booleans(), st.sampled_from([0, 0, 40, 10_000]), st.integers(0, 20))
def test_the_short_way_finds_what_the_judging_way_finds(
    data: bytes, believe_tail: bool, sealed_end: int, short: int
) -> None:
    check(data, limit=len(data))
    check(data, limit=len(data), believe_tail=believe_tail, sealed_end=sealed_end)
    check(data, limit=max(0, len(data) - short))
    check(data, limit=len(data), sequence=1, batch=1)


def whole(last_trailer: bytes) -> bytes:
    """Three batches of one or two frames; bodies of every length modulo 8."""
    data, sequence = b"", 0
    for number, bodies in enumerate(([b"body 1"], [b"body 22", b"body 333"], [b"body 4444"])):
        batch = Batch(seed=SEED, offset=len(data), sequence=sequence, number=number)
        for body in bodies:
            batch.add(Kind.BEGIN, [body])
        data += b"".join(batch.buffers(trailer=False)) + ACKNOWLEDGED
        sequence = batch.next_sequence
    return data[:-8] + last_trailer


@pytest.mark.parametrize("last_trailer", [ACKNOWLEDGED, bytes(8), b"t" + bytes(7)])
def test_whatever_byte_is_wrong_and_wherever_it_ends(last_trailer: bytes) -> None:
    data = whole(last_trailer)
    for at in range(len(data)):
        check(data[:at], limit=at)
        check(data, limit=at, believe_tail=True)
        for value in (data[at] ^ 1, 0, 255):
            check(data[:at] + bytes([value]) + data[at + 1 :], limit=len(data))
    check(data, limit=len(data))


@pytest.mark.parametrize("without", range(4))
def test_a_frame_that_is_missing(without: int) -> None:
    data = whole(ACKNOWLEDGED)
    frames = scan(data, SEED, limit=len(data)).frames
    gone = frames[without]
    check(data[: gone.offset] + bytes(gone.end - gone.offset) + data[gone.end :], limit=len(data))
    check(data[gone.offset :], limit=len(data) - gone.offset, origin=gone.offset)
    check(data[gone.offset :], limit=len(data) - gone.offset, origin=gone.offset, sequence=without, batch=gone.batch)


def test_the_short_way_is_taken() -> None:
    batch = Batch(seed=SEED, offset=0, sequence=0, number=0)
    batch.add(Kind.BEGIN, [b"begin"])
    batch.add(Kind.SETTLE, [b"settle"])
    data = b"".join(batch.buffers(trailer=False)) + ACKNOWLEDGED
    with patch.object(scanning._Reader, "_take", side_effect=AssertionError):
        assert [each.sequence for each in scan(data, SEED, limit=len(data)).frames] == [0, 1]
