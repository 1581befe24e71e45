"""The parts of a call's way on their own, with pytest-benchmark: `python -m pytest bench/test_parts.py`.

Entry, put, freeze, open, read, build, retire; on tmpfs, so that it is the processor that is measured. Nothing here
asserts on time.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tokcap import FileStore, TokenEntry
from tokcap.store import Snapshot
from tokcap.trajectory import build

from .building import Shape, drifting
from .places import UnavailableError, place
from .stock import copies, entry_of, stock
from .workload import Call, Workload, calls

CONTEXT = 131_072

SHORT = Workload(rollouts=1)
"""One rollout of W1."""
LONG = Workload(rollouts=1, turns=60, first_prompt=2_000, per_turn=3_300, sampled=1_000)
"""About 200,000 ids in 60 turns."""
MANY_TURNS = Workload(rollouts=1, turns=800, first_prompt=1_000, per_turn=250, sampled=100)
"""About 200,000 ids in 800 turns."""

CONVERSATIONS = {
    "W1": lambda: calls(SHORT)[0],
    "60-turns": lambda: calls(LONG)[0],
    "800-turns": lambda: calls(MANY_TURNS)[0],
    "drifting": lambda: drifting(Shape(200, 50_000, 3)),
}

every_conversation = pytest.mark.parametrize("name", CONVERSATIONS)


@pytest.fixture(scope="module")
def store() -> Generator[FileStore, None, None]:
    try:
        with place("tmpfs") as path, FileStore(path / "store") as opened:
            yield opened
    except UnavailableError as error:
        pytest.skip(str(error))


def _frozen(store: FileStore, name: str) -> tuple[str, list[Call]]:
    """The id and the calls of a frozen rollout with that conversation, stored when it is first asked for."""
    conversation = CONVERSATIONS[name]()
    rollout_id = f"frozen-{name}"
    if store.stat_now(rollout_id).state == "absent":
        stock(store, [[msgspec.structs.replace(call, rollout_id=rollout_id) for call in conversation]])
        store.freeze_now(rollout_id).close()
    return rollout_id, conversation


def _at_128k(turns: int) -> list[Call]:
    return calls(Workload(rollouts=1, turns=turns, first_prompt=CONTEXT))[0]


def _as_kind(call: Call, kind: str) -> tuple[Any, Any, Any]:
    if kind == "arrays":
        return call.prompt, call.generated, call.log_probs
    return call.prompt.tolist(), call.generated.tolist(), call.log_probs.tolist()


@pytest.mark.parametrize("kind", ["arrays", "lists"])
def test_an_entry_of_128k_ids(benchmark: BenchmarkFixture, kind: str) -> None:
    call = _at_128k(2)[0]
    prompt, generated, log_probs = _as_kind(call, kind)
    entry = benchmark(lambda: TokenEntry("rollout", "call", prompt, generated, log_probs))
    assert entry == TokenEntry("rollout", "call", call.prompt, call.generated, call.log_probs)


@pytest.mark.parametrize("kind", ["arrays", "lists"])
def test_entry_and_put_of_the_next_call_at_128k(benchmark: BenchmarkFixture, store: FileStore, kind: str) -> None:
    """Finds the prefix among what was stored, encodes and writes the rest."""
    rounds = 20
    following = iter([(call.model_call_id, *_as_kind(call, kind)) for call in _at_128k(rounds + 2)])
    rollout_id = f"next-{kind}"

    def put(call_id: str, prompt: Any, generated: Any, log_probs: Any) -> None:
        store.put_now(TokenEntry(rollout_id, call_id, prompt, generated, log_probs))

    put(*next(following))
    benchmark.pedantic(put, setup=lambda: (next(following), {}), rounds=rounds)  # type: ignore[no-untyped-call]
    assert store.stat_now(rollout_id).entries == rounds + 1


def test_put_of_the_first_call_at_128k(benchmark: BenchmarkFixture, store: FileStore) -> None:
    """All of it is new."""
    numbers = itertools.count()
    call = _at_128k(2)[0]

    def entry() -> tuple[tuple[TokenEntry], dict[str, Any]]:
        return (entry_of(msgspec.structs.replace(call, rollout_id=f"first-{next(numbers)}")),), {}

    benchmark.pedantic(store.put_now, setup=entry, rounds=20)  # type: ignore[no-untyped-call]
    assert store.stat_now("first-19").entries == 1


def test_begin_call(benchmark: BenchmarkFixture, store: FileStore) -> None:
    numbers = itertools.count()
    benchmark(lambda: store.begin_call_now("begun", f"call-{next(numbers)}"))
    assert len(store.stat_now("begun").calls) == next(numbers)


@pytest.mark.parametrize("name", ["W1", "60-turns"])
def test_freeze(benchmark: BenchmarkFixture, store: FileStore, name: str) -> None:
    rounds = 10
    rollouts = copies([CONVERSATIONS[name]()], rounds, f"to-freeze-{name}")
    stock(store, rollouts)
    following = iter(rollouts)
    snapshot: Snapshot = benchmark.pedantic(  # type: ignore[no-untyped-call]
        store.freeze_now, setup=lambda: ((next(following)[0].rollout_id,), {}), rounds=rounds
    )
    assert len(snapshot.entries) == len(rollouts[0])


def test_freeze_of_64_at_once(benchmark: BenchmarkFixture, store: FileStore) -> None:
    rounds = 5
    rollouts = copies([CONVERSATIONS["W1"]()], 64 * rounds, "at-once")
    stock(store, rollouts)
    ids = iter([[each[0].rollout_id for each in rollouts[at : at + 64]] for at in range(0, len(rollouts), 64)])
    snapshots: list[Snapshot] = benchmark.pedantic(  # type: ignore[no-untyped-call]
        store.freeze_many_now, setup=lambda: ((next(ids),), {}), rounds=rounds
    )
    assert [len(snapshot.entries) for snapshot in snapshots] == [len(rollouts[0])] * 64


@every_conversation
def test_open(benchmark: BenchmarkFixture, store: FileStore, name: str) -> None:
    rollout_id, conversation = _frozen(store, name)
    snapshot: Snapshot = benchmark(store.read_now, rollout_id)
    assert len(snapshot.entries) == len(conversation)


@every_conversation
def test_read_every_entry(benchmark: BenchmarkFixture, store: FileStore, name: str) -> None:
    rollout_id, conversation = _frozen(store, name)

    def read(snapshot: Snapshot) -> int:
        return sum(int(entry.prompt_token_ids.sum()) for entry in snapshot.entries)

    found = benchmark.pedantic(  # type: ignore[no-untyped-call]
        read, setup=lambda: ((store.read_now(rollout_id),), {}), rounds=10
    )
    assert found == sum(int(call.prompt.sum()) for call in conversation)


@every_conversation
def test_build(benchmark: BenchmarkFixture, store: FileStore, name: str) -> None:
    """Without any array."""
    rollout_id, conversation = _frozen(store, name)
    found = benchmark.pedantic(  # type: ignore[no-untyped-call]
        build, setup=lambda: ((store.read_now(rollout_id),), {}), rounds=10
    )
    assert found.metrics["sampled"] == sum(len(call.generated) for call in conversation)


@every_conversation
def test_arrays_of_a_build(benchmark: BenchmarkFixture, store: FileStore, name: str) -> None:
    rollout_id, conversation = _frozen(store, name)

    def arrays(trajectories: Any) -> int:
        return sum(int(t.loss_mask.sum()) for t in trajectories if len(t.token_ids) == len(t.log_probs))

    trained = benchmark.pedantic(  # type: ignore[no-untyped-call]
        arrays, setup=lambda: ((build(store.read_now(rollout_id)).trajectories,), {}), rounds=10
    )
    assert trained == sum(len(call.generated) for call in conversation)


def test_retire(benchmark: BenchmarkFixture, store: FileStore) -> None:
    rounds = 20
    rollouts = copies([CONVERSATIONS["W1"]()], rounds, "to-retire")
    stock(store, rollouts)
    following = iter(rollouts)

    def frozen() -> tuple[tuple[()], dict[str, Any]]:
        with store.freeze_now(next(following)[0].rollout_id) as snapshot:
            return (), {
                "rollout_id": snapshot.rollout_id,
                "snapshot_id": snapshot.snapshot_id,
                "version": snapshot.version,
            }

    gone = benchmark.pedantic(store.retire_now, setup=frozen, rounds=rounds)  # type: ignore[no-untyped-call]
    assert gone is True
