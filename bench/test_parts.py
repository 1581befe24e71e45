"""The parts of the store on their own, with pytest-benchmark: `python -m pytest bench/test_parts.py`."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tokcap import FileStore, TokenEntry
from tokcap.store import Snapshot

from .places import place
from .workload import Call, Workload, calls

LONG = Workload(rollouts=1, turns=60, first_prompt=2_000, per_turn=3_300, sampled=1_000)
"""About 200,000 ids in 60 turns."""

MANY_TURNS = Workload(rollouts=1, turns=800, first_prompt=1_000, per_turn=250, sampled=100)
"""About 200,000 ids in 800 turns."""


@pytest.fixture(scope="module")
def directory() -> Generator[Path, None, None]:
    with place("disk") as path:
        yield path


def _entry(call: Call) -> TokenEntry:
    return TokenEntry(call.rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs)


def _stored(directory: Path, workload: Workload) -> tuple[FileStore, str]:
    store = FileStore(directory / f"turns-{workload.turns}")
    conversation = calls(workload)[0]
    if store.stat_now(conversation[0].rollout_id).state == "absent":
        for call in conversation:
            store.begin_call_now(call.rollout_id, call.model_call_id)
            store.put_now(_entry(call))
    return store, conversation[0].rollout_id


@pytest.mark.parametrize("workload", [LONG, MANY_TURNS], ids=["60-turns", "800-turns"])
def test_open_a_frozen_snapshot_of_200k_ids(benchmark: BenchmarkFixture, directory: Path, workload: Workload) -> None:
    store, rollout_id = _stored(directory, workload)
    store.freeze_now(rollout_id).close()

    def opened() -> Snapshot:
        return store.read_now(rollout_id)

    snapshot = benchmark(opened)
    assert len(snapshot.entries) == workload.turns


@pytest.mark.parametrize("workload", [LONG, MANY_TURNS], ids=["60-turns", "800-turns"])
def test_read_every_entry_of_200k_ids(benchmark: BenchmarkFixture, directory: Path, workload: Workload) -> None:
    store, rollout_id = _stored(directory, workload)
    store.freeze_now(rollout_id).close()

    def read() -> int:
        with store.read_now(rollout_id) as snapshot:
            return sum(len(entry.generation_token_ids) for entry in snapshot.entries)

    assert benchmark(read) == workload.turns * workload.sampled


def test_freeze_of_60_turns(benchmark: BenchmarkFixture, directory: Path) -> None:
    store = FileStore(directory / "freeze")
    numbers = itertools.count()
    conversation = calls(LONG)[0]

    def written() -> tuple[tuple[str], dict[str, object]]:
        rollout_id = f"frozen-{next(numbers)}"
        for call in conversation:
            store.put_now(TokenEntry(rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs))
        return (rollout_id,), {}

    snapshot = benchmark.pedantic(store.freeze_now, setup=written, rounds=10)  # type: ignore[no-untyped-call]
    assert len(snapshot.entries) == LONG.turns


@pytest.mark.parametrize("kind", ["array", "list"])
def test_an_entry_of_128k_ids(benchmark: BenchmarkFixture, kind: str) -> None:
    prompt = np.random.default_rng(0).integers(0, 150_000, 131_072, dtype=np.int64)
    ids = prompt if kind == "array" else prompt.tolist()
    entry = benchmark(lambda: TokenEntry("rollout", "call", ids, [1, 2, 3], [-0.1, -0.2, -0.3]))
    assert len(entry.prompt_token_ids) == len(prompt)
