"""A file system that goes away without flushing anything, as at a power cut: what was acknowledged is there afterwards.

Each round shuts a file system down while many rollouts are written, frozen, retired and reset at once, mounts it again,
and reads with the eyes of a later boot, or of the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import Nursery, nursery
from tests.proofs.power_disk import FILE_SYSTEMS, formatted, mounted, reason_against, workplace
from tests.proofs.power_shutdown import cut_while_working
from tokcap import FileStore


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    yield from nursery()


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as path:
        yield path


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["ext4", "xfs"])
def test_what_was_acknowledged_survives_a_power_cut(name: str, seed: int, place: Path, children: Nursery) -> None:
    fs = FILE_SYSTEMS[name]
    if reason := reason_against(fs, recording=False):
        pytest.skip(reason)
    cut = cut_while_working(fs, place, children, seed=seed, rollouts=24)
    assert cut.problems == []
    assert cut.acknowledged > 0


@pytest.mark.parametrize("name", ["ext4", "ext4-without-journal", "xfs"])
def test_an_ext4_without_a_journal_warns_once(name: str, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    fs = FILE_SYSTEMS[name]
    if reason := reason_against(fs, recording=False):
        pytest.skip(reason)
    with mounted(fs, formatted(fs, place / "image"), place / "disk") as disk:
        for _ in range(2):
            FileStore(disk / "store", sweep_every_s=0).close_now()
    warned = [record for record in caplog.records if "without a journal" in record.getMessage()]
    assert len(warned) == (1 if name == "ext4-without-journal" else 0)
