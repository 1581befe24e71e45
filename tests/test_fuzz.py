"""Hostile bytes: inputs that were found once, what chance makes of them, and a short search by coverage."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .proofs.fuzz import atheris_is_missing, searched
from .proofs.fuzz_alone import first_problem, noticed
from .proofs.fuzz_bombs import BOMBS, Bomb, exploded
from .proofs.fuzz_mutants import MUTANTS
from .proofs.fuzz_targets import TARGETS, corpus_of

KEPT = [(name, path) for name in TARGETS for path in corpus_of(name)]


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{name}-{path.name}" for name, path in KEPT])
def test_what_was_found_once_is_met(name: str, path: Path) -> None:
    TARGETS[name].run(path.read_bytes())


def test_every_kept_input_belongs_to_a_target() -> None:
    corpus = Path(__file__).parent / "corpus"
    assert {path.parent.name for path in corpus.glob("*/*")} <= set(TARGETS)
    assert len(KEPT) == len([path for path in corpus.glob("*/*") if path.is_file()]) >= 15


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_chance_makes_of_them_are_met(name: str) -> None:
    assert first_problem(name, seed=1, count=60) is None


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_met(name: str, data: bytes) -> None:
    TARGETS[name].run(data)


def test_a_search_by_coverage_finds_nothing(tmp_path: Path) -> None:
    missing = atheris_is_missing()
    if missing:
        pytest.skip(missing)
    told = list(searched(list(TARGETS), tmp_path, "--runs=150", "--jobs=2", "--seed=1"))
    assert {each["target"] for each in told} == set(TARGETS)
    for each in told:
        assert each["problems"] == []
        assert each["inputs"] >= 150
        assert each["edges"] > 20


@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb.name.replace(" ", "-") for bomb in BOMBS])
def test_a_bomb_is_refused_before_what_it_claims_is_allocated(bomb: Bomb) -> None:
    assert exploded(bomb) == ""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_check_that_is_missing_is_noticed(mutant: str) -> None:
    assert noticed(mutant, count=200)
