"""A file system that goes away without flushing anything, as at a power cut: what was acknowledged is there afterwards.

Each round shuts a file system down while many rollouts are written, frozen, retired and reset at once, mounts it again,
and reads with the eyes of a later boot, or of the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import Nursery, nursery
from tests.proofs.power_disk import FILE_SYSTEMS, reason_against, workplace
from tests.proofs.power_shutdown import cut_while_working


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
