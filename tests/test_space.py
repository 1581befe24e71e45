"""Space that is written ahead of the batches of an open segment: it makes syncs faster and means nothing."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faulty_files import Fault, FaultyFiles, booted_as, view
from tokcap import FileStore, TokenEntry
from tokcap.store.frame import ACKNOWLEDGED, HEADER_SIZE, SPACE, content_end
from tokcap.store.root import file_system_of, is_faster_with_space

ANOTHER_BOOT = "00000000-0000-0000-0000-00000000b002"


def entry(call: str, length: int = 50) -> TokenEntry:
    ids = np.random.default_rng(len(call) + length).integers(0, 2**17, length, dtype=np.int32)
    return TokenEntry("r", call, ids, [7, 8], [-0.5, -1.0])


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    if not is_faster_with_space(file_system_of(str(tmp_path))):
        pytest.skip("the temporary directory is on a file system where no space is written")
    yield tmp_path / "s"


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "rollouts").glob("*/r/*/*.*"))


def space_of(path: Path) -> int:
    data = path.read_bytes()
    return len(data) - content_end(data, len(data))


def spaced(directory: Path, calls: int = 3) -> Path:
    """The segment of an open rollout, with space behind it, as a killed writer leaves it."""
    store = FileStore(directory, sweep_every_s=0)
    for number in range(calls):
        store.put_now(entry(f"c{number}"))
    (segment,) = segments(directory)
    left = segment.read_bytes()
    store.close_now()
    for path in segments(directory):
        path.unlink()
    segment.write_bytes(left)
    segment.chmod(0o600)
    assert space_of(segment) > 1000
    return segment


# ---- where it begins


@given(st.binary(max_size=100), st.integers(0, 20_000))
def test_space_begins_where_the_content_ends(content: bytes, words: int) -> None:
    content += bytes(-len(content) % 8)
    if content.endswith(SPACE):
        content += ACKNOWLEDGED
    data = content + SPACE * words
    assert content_end(data, len(data)) == len(content)
    assert content_end(data, len(content)) == len(content)


@given(st.integers(0, 1100), st.integers(0, 7))
def test_space_may_be_cut_off_anywhere(words: int, part: int) -> None:
    data = bytes(24) + ACKNOWLEDGED + SPACE * words + SPACE[:part]
    assert content_end(data, len(data)) == 32


@pytest.mark.parametrize("length", range(1, 9))
def test_the_beginning_of_a_trailer_or_header_is_no_space(length: int) -> None:
    for word in (ACKNOWLEDGED, b"TKCF\x01\x02\x03\x04", bytes(8)):
        data = bytes(16) + word[:length]
        assert content_end(data, len(data)) == len(data)


def test_zeros_in_the_place_of_space_are_content() -> None:
    data = ACKNOWLEDGED + SPACE * 600 + bytes(512) + SPACE * 10
    assert content_end(data, len(data)) == 8 + 4800 + 512


# ---- what a store does with it


def test_later_batches_are_written_into_it(directory: Path) -> None:
    with FileStore(directory, sweep_every_s=0) as store:
        store.put_now(entry("a"))
        (segment,) = segments(directory)
        size = segment.stat().st_size
        for number in range(5):
            before = space_of(segment)
            store.put_now(entry(f"b{number}"))
            assert segment.stat().st_size == size
            assert 0 < space_of(segment) < before
        store.put_now(entry("large", 8000))
        assert segment.stat().st_size > size and space_of(segment) > 0


@pytest.mark.parametrize("length", [50, 30_000], ids=["little", "much"])
def test_a_freeze_cuts_off_what_is_much(directory: Path, length: int) -> None:
    with FileStore(directory, sweep_every_s=0) as store:
        store.put_now(entry("a", length))
        (segment,) = segments(directory)
        before = space_of(segment)
        assert (before >= 64 << 10) == (length > 50)
        with store.freeze_now("r") as snapshot:
            assert space_of(segment) == (0 if length > 50 else before)
            assert snapshot.entries[0] == entry("a", length)
        with store.freeze_now("r") as snapshot:
            assert snapshot.entries[0] == entry("a", length) and not snapshot.torn


@pytest.mark.parametrize("how", ["close", "rotation"])
def test_it_is_cut_off_when_a_segment_is_done(directory: Path, how: str) -> None:
    store = FileStore(directory, sweep_every_s=0, segment_bytes=3000)
    for number in range(60 if how == "rotation" else 3):
        store.put_now(entry(f"c{number}"))
    if how == "close":
        store.close_now()
    done = segments(directory)[:-1] if how == "rotation" else segments(directory)
    assert done and all(space_of(path) == 0 for path in done)
    store.close_now()
    with FileStore(directory, read_only=True) as other:
        assert len(view(other, "r").calls) == (60 if how == "rotation" else 3)


@pytest.mark.parametrize("boot", ["", ANOTHER_BOOT], ids=["same boot", "later boot"])
def test_what_a_killed_writer_left_is_read_and_written_on(directory: Path, boot: str) -> None:
    segment = spaced(directory)
    with booted_as(boot), FileStore(directory, sweep_every_s=0) as store:
        with store.read_now("r") as snapshot:
            assert len(snapshot.entries) == 3 and not snapshot.torn and not snapshot.damage
        store.put_now(entry("more"))
        if not boot:
            assert segments(directory) == [segment], "the same boot goes on in the same segment"
        with store.freeze_now("r") as snapshot:
            assert len(snapshot.entries) == 4 and not snapshot.torn and not snapshot.damage


def test_a_snapshot_of_a_segment_with_space_is_whole(directory: Path) -> None:
    """Whoever freezes after a crash may not be the one who wrote; what can't be cut off is left over."""
    spaced(directory)
    files = FaultyFiles()
    with FileStore(directory, sweep_every_s=0, files=files) as store:
        with files.failing(Fault(1, errno.EIO, "kind", kinds=["truncate"])):
            store.freeze_now("r").close()
        with store.freeze_now("r") as snapshot:
            assert len(snapshot.entries) == 3 and not snapshot.torn and not snapshot.damage
        for manifest in (directory / "rollouts").glob("*/r/*/v1/manifest*"):
            manifest.unlink()
        with store.read_now("r") as snapshot:
            assert len(snapshot.entries) == 3 and not snapshot.torn and not snapshot.damage


def test_two_stores_that_take_turns_see_what_the_other_wrote_into_it(directory: Path) -> None:
    with FileStore(directory, sweep_every_s=0) as one, FileStore(directory, sweep_every_s=0) as other:
        for number in range(6):
            (one, other)[number % 2].put_now(entry(f"c{number}", 200 * number))
        assert len(segments(directory)) == 1
        assert view(one, "r").calls == view(other, "r").calls == {f"c{number}" for number in range(6)}


def test_a_full_disk_goes_without(directory: Path) -> None:
    files = FaultyFiles()
    with FileStore(directory, sweep_every_s=0, files=files) as store:
        with files.failing(Fault(1, errno.ENOSPC, "kind", kinds=["write_space"])) as plan:
            for number in range(4):
                store.put_now(entry(f"c{number}"))
        assert plan.hit is not None
        (segment,) = segments(directory)
        assert space_of(segment) == 0
        store.put_now(entry("more"))
        assert len(view(store, "r").calls) == 5


def test_a_batch_whose_writer_died_in_it_is_torn(directory: Path) -> None:
    segment = spaced(directory)
    data = segment.read_bytes()
    end = content_end(data, len(data))
    batch = data[:end][-600:]
    for written in range(8, 400, 56):
        segment.write_bytes(data[:end] + batch[:written] + data[end + written :])
        with FileStore(directory, read_only=True) as store, store.read_now("r") as snapshot:
            assert len(snapshot.entries) == 3 and not snapshot.damage
            assert [(torn.offset, torn.end) for torn in snapshot.torn] == [(end, end + written)]


def test_any_change_in_it_costs_nothing_and_shows(directory: Path) -> None:
    segment = spaced(directory)
    data = segment.read_bytes()
    end = content_end(data, len(data))
    chance = random.Random(1)
    places = [end, len(data) - 1, *(chance.randrange(end, len(data)) for _ in range(30))]
    for at in places:
        for changed in (bytes([data[at] ^ 1 << chance.randrange(8)]), bytes(512)[: len(data) - at]):
            segment.write_bytes(data[:at] + changed + data[at + len(changed) :])
            with FileStore(directory, sweep_every_s=0) as store:
                with store.read_now("r") as snapshot:
                    assert len(snapshot.entries) == 3 and not snapshot.damage
                    assert len(snapshot.torn) == 1 and snapshot.torn[0].offset == end
                store.put_now(entry("more"))
                assert len(view(store, "r").calls) == 4
            for path in segments(directory):
                path.unlink()


def test_frames_that_zeros_took_away_show_although_space_follows(directory: Path) -> None:
    segment = spaced(directory)
    data = segment.read_bytes()
    end = content_end(data, len(data))
    last = data.rfind(b"TKCF", 0, end)
    segment.write_bytes(data[:last] + bytes(end - last) + data[end:])
    with FileStore(directory, read_only=True) as store, store.read_now("r") as snapshot:
        assert len(snapshot.entries) == 2
        assert [(torn.offset, torn.end) for torn in snapshot.torn] == [(last, end)]
    assert last % 8 == 0 and end - last > HEADER_SIZE


def test_no_space_is_written_where_it_would_not_help() -> None:
    memory = "/dev/shm"
    if file_system_of(memory) != "tmpfs":
        pytest.skip("there is no tmpfs here")
    path = Path(memory, f"tokcap-space-{os.getpid()}")
    try:
        with FileStore(path, sweep_every_s=0) as store:
            store.put_now(entry("a"))
            (segment,) = segments(path)
            assert space_of(segment) == 0
            store.reset_now("r")
    finally:
        for name in sorted(path.rglob("*"), reverse=True):
            name.rmdir() if name.is_dir() else name.unlink()
        path.rmdir()
