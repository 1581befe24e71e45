"""Segments that the device can't read back: an error that names the file, where touching a mapping would kill.

With a real device that fails: `test_power_blocks`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import Fault, FaultyFiles
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError
from tokcap.store import files as files_module
from tokcap.store.buffers import map_or_read
from tokcap.store.files import Files

LARGE = 200_000
"""Prompt ids of which a segment is mapped."""


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel says that a mapping can't be read as a whole, or doesn't know the question; how often it was asked."""
    asked: list[int] = []

    def refuses(address: int, length: int, advice: int) -> int:
        asked.append(length)
        return -1

    monkeypatch.setattr(files_module, "_madvise", refuses)
    return asked


@pytest.fixture
def store(store_dir: Path) -> Iterator[FileStore]:
    with FileStore(store_dir, sweep_every_s=0) as store:
        for rollout in "q", "r":
            store.put_now(entry(rollout))
            store.freeze_now(rollout).close()
        yield store


def entry(rollout: str) -> TokenEntry:
    ids = np.random.default_rng(1).integers(0, 150_000, LARGE, dtype=np.int32)
    return TokenEntry(rollout, "a", ids, ids[:3], [-0.5] * 3)


def test_a_large_snapshot_is_mapped_and_all_of_it_was_read(store: FileStore, store_dir: Path) -> None:
    (segment,) = store_dir.glob("rollouts/*/r/*/v1/*.seg")
    files = Files()
    fd = files.open(str(segment))
    mapped = map_or_read(files, fd, segment.stat().st_size)
    os.close(fd)
    assert not isinstance(mapped, bytes)
    with open("/proc/self/smaps") as file:
        found = file.read().split(f"{segment}\n")[1]
    size, resident = (int(found.split(f"{name}:")[1].split()[0]) for name in ("Size", "Rss"))
    assert resident == size > 256


def test_without_a_kernel_that_can_tell_the_file_is_read_before_it_is_mapped(
    store: FileStore, unreadable: list[int]
) -> None:
    with store.read_now("r") as snapshot:
        assert snapshot.entries[0] == entry("r")
    assert unreadable


def test_a_large_segment_that_cannot_be_read_is_an_error_that_names_it(
    store: FileStore, store_dir: Path, unreadable: list[int]
) -> None:
    files = FaultyFiles()
    with FileStore(store_dir, files=files, read_only=True) as other:
        for number in range(1, 50):
            with files.failing(Fault(number, errno.EIO, kinds=["read"])) as plan:
                try:
                    other.read_now("r").close()
                except DurabilityError as error:
                    assert plan.hit is not None
                    assert (error.errno, error.filename) == (errno.EIO, plan.hit.path)
                    assert "rollout r: can't read it" in str(error) and plan.hit.path in str(error)
            if plan.hit is None:
                break
            with other.read_now("q") as snapshot:
                assert snapshot.entries[0] == entry("q")
        assert number > 2, "neither the manifest nor the segment was read"
        with other.read_now("r") as snapshot:
            assert snapshot.entries[0] == entry("r")
    assert unreadable


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    files = Files()
    fd = files.open_directory(str(tmp_path))
    with pytest.raises(IsADirectoryError) as caught:
        files.read(fd, 10, 0)
    os.close(fd)
    assert caught.value.filename == str(tmp_path)
