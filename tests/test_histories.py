"""Histories of four processes are linearizable; stores with one thing wrong are found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.children import Nursery, fast_directory
from tests.children import nursery as _nursery
from tests.proofs.histories import Clients, Tally, run_rounds
from tests.proofs.histories_mutants import MUTANTS

directory = pytest.fixture(fast_directory)
nursery = pytest.fixture(scope="module")(_nursery)


@pytest.mark.parametrize("synced", [False, True], ids=["memory", "waiting for a device"])
def test_what_many_processes_see_is_explained_by_some_order(
    nursery: Nursery, directory: Path, tmp_path: Path, synced: bool
) -> None:
    tally = Tally()
    clients = Clients(nursery, (tmp_path if synced else directory) / "store", seed=11, synced=synced)
    run_rounds(clients, tally, 20 if synced else 80)
    clients.close()
    assert not tally.problems, tally.problems[0]
    assert tally.most_at_once > 4
    assert clients.kills
    assert clients.pauses


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_store_with_one_thing_wrong_is_found_out(nursery: Nursery, directory: Path, mutant: str) -> None:
    tally = Tally()
    clients = Clients(nursery, directory / "store", seed=3, mutant=mutant)
    run_rounds(clients, tally, 150)
    clients.close()
    assert tally.problems
