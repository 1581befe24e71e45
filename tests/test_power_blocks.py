"""Power cuts and failing disks under the kernel's own file systems, on a disk that records what it is told.

The long form is `scripts/prove power`. What a disk had not flushed when its power went, it may have kept or not.
States of btrfs are left to it: Linux 6.18 doesn't mount one of some hundreds, and its kernel stumbles over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import Nursery, nursery
from tests.proofs.power import first_loss, recorded_states, situations_on
from tests.proofs.power_disk import FILE_SYSTEMS, FileSystem, reason_against, workplace
from tests.proofs.power_failing import SITUATIONS
from tests.proofs.power_mutants import CARELESS, MUTANTS
from tests.proofs.power_recording import Recording, check_states, record

ROLLOUTS = 24


@pytest.fixture(scope="module")
def children() -> Iterator[Nursery]:
    yield from nursery()


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as path:
        yield path


def file_system(name: str) -> FileSystem:
    fs = FILE_SYSTEMS[name]
    if reason := reason_against(fs):
        pytest.skip(reason)
    return fs


@pytest.mark.parametrize(("name", "seed"), [("ext4", 1), ("ext4-without-journal", 2), ("xfs", 4)])
def test_a_power_cut_at_any_time_costs_nothing_that_was_acknowledged(name: str, seed: int, children: Nursery) -> None:
    counted = recorded_states(file_system(name), children, seed=seed, states=24, rollouts=ROLLOUTS)
    assert counted.problems == []
    assert counted.states == 24
    assert counted.steps > 200 and counted.flushes > 50


@pytest.mark.parametrize(
    ("without", "name"),
    [
        ("no sync of files", "ext4-without-journal"),
        ("no sync of directories", "ext4"),
        ("no sync by the kernel", "xfs"),
        ("no sync of manifests", "ext4"),
        ("no sync of what is renamed", "btrfs"),
    ],
)
def test_a_store_that_leaves_out_a_sync_is_found(without: str, name: str, children: Nursery) -> None:
    assert name in MUTANTS[without].shows_on
    assert first_loss(file_system(name), children, without=without, seeds=[1, 3, 5], rollouts=ROLLOUTS)


def test_a_recording_that_was_kept_shows_the_same_again(place: Path, tmp_path: Path, children: Nursery) -> None:
    recording = record(file_system("ext4"), place, children, seed=1, rollouts=6, without="no sync of files")
    states = recording.right_after(["put"])[:3]
    seen = list(check_states(recording, states))
    assert any(problems for _, problems in seen)
    recording.keep(tmp_path)
    assert list(check_states(Recording.kept(tmp_path, place), states)) == seen


@pytest.mark.parametrize(
    ("situation", "name"),
    [
        (situation, name)
        for position, situation in enumerate(SITUATIONS)
        for name in [("ext4", "xfs", "btrfs", "ext4-without-journal")[position % 4]]
        if situation in situations_on(FILE_SYSTEMS[name])
    ],
)
def test_a_disk_that_fails_costs_what_it_does_not_take_and_no_more(
    situation: str, name: str, place: Path, children: Nursery
) -> None:
    assert SITUATIONS[situation](file_system(name), place, children, "") == []


@pytest.mark.parametrize("careless", CARELESS)
def test_a_store_that_is_careless_with_errors_is_found(careless: str, place: Path, children: Nursery) -> None:
    problems = SITUATIONS[CARELESS[careless][1]](file_system("ext4"), place, children, careless)
    assert problems
