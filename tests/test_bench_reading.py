"""What is measured of the consumer and of the event loop, at sizes that mean nothing; no clock is judged."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import builders, building, consumers, peer, reading, stalls, stock
from bench.figures import OURS, Figure
from bench.growth import FACTORS, Growth
from bench.places import UnavailableError
from bench.workload import SMOKE, Call, Workload, calls
from tokcap import FileStore

Measure = Callable[[Sequence[str], int, Any], Iterator[Figure]]

NOT_INSTALLED = "not installed here"
SMALL = Workload(rollouts=2, turns=4, first_prompt=50, per_turn=20, sampled=10)


@pytest.fixture(autouse=True)
def on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_BENCH_DIR", str(tmp_path))


@pytest.fixture
def no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> peer.Peer:
        raise UnavailableError(NOT_INSTALLED)

    monkeypatch.setattr(stock, "load", refuse)


def the_peer() -> peer.Peer:
    try:
        return peer.load()
    except UnavailableError as error:
        pytest.skip(str(error))


def candidates_of(figures: Sequence[Figure], measure: str) -> set[str]:
    return {figure.candidate for figure in figures if figure.measure == measure}


def named(figures: Sequence[Figure]) -> set[str]:
    return {figure.measure for figure in figures}


MODULES: dict[str, tuple[Measure, dict[str, str]]] = {
    "reading": (reading.measure, reading.MEASURES),
    "building": (building.measure, building.MEASURES),
    "stalls": (stalls.measure, stalls.MEASURES),
}
every_module = pytest.mark.parametrize("module", MODULES)


@every_module
def test_every_measure_has_a_figure_of_every_candidate(module: str) -> None:
    the_peer()
    measure, measures = MODULES[module]
    figures = list(measure(["disk"], 2, SMOKE))
    assert set(measures) <= named(figures)
    for name in measures:
        assert {OURS, peer.PEER} <= candidates_of(figures, name)
    assert {len(figure.rounds) for figure in figures} == {2}
    assert min(min(figure.rounds) for figure in figures) > 0
    keys = [(f.measure, f.place, f.workload, f.candidate) for f in figures]
    assert len(keys) == len(set(keys))


@every_module
@pytest.mark.usefixtures("no_peer")
def test_a_peer_that_is_not_there_is_said(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    measure, measures = MODULES[module]
    figures = list(measure(["disk"], 1, SMOKE))
    assert set(measures) <= named(figures)
    assert {figure.candidate for figure in figures} == {OURS}
    assert f"{peer.PEER}: not measured: {NOT_INSTALLED}" in capsys.readouterr().err


@every_module
def test_a_place_that_is_not_there_is_said(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    measure, _ = MODULES[module]
    assert list(measure(["nowhere"], 1, SMOKE)) == []
    assert "nowhere: not measured: there is no such place" in capsys.readouterr().err


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    peer.load.cache_clear()
    with pytest.raises(UnavailableError, match=r"NeMo Gym is not installed \(pip install"):
        peer.load()


GROWTHS: dict[str, Callable[[], Iterator[Growth]]] = {
    "rollouts": lambda: reading.of_rollouts(["disk"], 1, SMOKE),
    "turns": lambda: reading.of_turns(["disk"], 1, SMOKE),
    "builds": lambda: building.of_turns(["disk"], 1, SMOKE),
}


@pytest.mark.parametrize("along", GROWTHS)
@pytest.mark.usefixtures("no_peer")
def test_growth_is_measured_at_four_sizes(along: str) -> None:
    found = list(GROWTHS[along]())
    measures = building.MEASURES if along == "builds" else reading.MEASURES
    wanted = (
        {f"{name.removesuffix(' of 64')}: all" for name in measures}
        if along == "rollouts"
        else set(measures) - {"sweep"}
    )
    assert {growth.measure for growth in found} == wanted
    for growth in found:
        assert len(growth.sizes) == len(FACTORS) == len(growth.medians)
        assert list(growth.sizes) == sorted(growth.sizes)
        assert growth.sizes[0] < growth.sizes[-1]


# ---- what the peers are given and give


def test_the_peer_reads_back_what_it_was_given(tmp_path: Path) -> None:
    theirs = the_peer()
    conversations = calls(SMALL)
    store = theirs.store(tmp_path)
    stock.stock_peer(theirs, store, conversations)
    for conversation in conversations:
        snapshot = store.freeze_now(conversation[0].rollout_id)
        assert not snapshot.incomplete
        assert [
            (entry.model_call_id, entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs)
            for entry in snapshot.entries
        ] == [
            (call.model_call_id, call.prompt.tolist(), call.generated.tolist(), call.log_probs.tolist())
            for call in conversation
        ]


@pytest.mark.parametrize("delta", [False, True])
def test_the_peer_builds_one_chain_of_a_conversation(delta: bool) -> None:
    theirs = the_peer()
    (conversation,) = calls(Workload(rollouts=1, turns=5, first_prompt=50, per_turn=20, sampled=10))
    entries = theirs.entries(conversation, delta=delta)
    assert [entry.prompt_is_delta for entry in entries] == [False] + [delta] * 4
    assert len(entries[-1].prompt_token_ids) == (10 if delta else len(conversation[-1].prompt))
    built = theirs.build(entries)
    assert [chain.chain_id for chain in built.chains] == ["main"]
    ids, mask, log_probs = builders.joined(theirs.project("rollout", built))
    last = conversation[-1]
    assert ids.tolist() == [*last.prompt.tolist(), *last.generated.tolist()]
    assert ids[mask].tolist() == [each for call in conversation for each in call.generated.tolist()]
    assert log_probs[mask].tolist() == [each for call in conversation for each in call.log_probs.tolist()]


def test_a_call_without_a_parent_is_a_root_of_the_peer() -> None:
    theirs = the_peer()
    conversation = building.drifting(building.Shape(turns=6, ids=600, drift_every=3))
    assert [call.parent for call in conversation] == ["", "", "call-00001", "call-00002", "", "call-00004"]
    built = theirs.build(theirs.entries(conversation))
    assert [[link.entry.model_call_id for link in chain.links] for chain in built.chains] == [
        ["call-00000"],
        ["call-00001", "call-00002", "call-00003"],
        ["call-00004", "call-00005"],
    ]


def test_tokcap_builds_a_trajectory_of_every_drift(tmp_path: Path) -> None:
    conversation = building.drifting(building.Shape(turns=6, ids=600, drift_every=3))
    candidate = builders.Tokcap(tmp_path)
    candidate.stock([conversation])
    built = candidate.build(candidate.open(conversation[0].rollout_id))
    assert len(built) == 3
    assert candidate.trained(built) == 6 * 40
    candidate.close()


# ---- what is read wrong is found


def test_sums_that_differ_are_an_error(tmp_path: Path) -> None:
    (conversation, _) = calls(SMALL)
    candidate = consumers.Tokcap(tmp_path)
    candidate.stock([conversation])
    found = candidate.read(candidate.freeze(conversation[0].rollout_id))
    consumers.check_sums(candidate, conversation, found)
    for wrong in ((found[0] + 1, found[1]), (found[0], found[1] + 1e-3)):
        with pytest.raises(AssertionError, match="read"):
            consumers.check_sums(candidate, conversation, wrong)
    candidate.close()


def test_arrays_that_differ_are_an_error(tmp_path: Path) -> None:
    (conversation, _) = calls(SMALL)
    candidate = builders.Tokcap(tmp_path)
    candidate.stock([conversation])
    ((ids, mask, log_probs),) = candidate.build(candidate.open(conversation[0].rollout_id))
    builders.check_built(candidate, conversation, [(ids, mask, log_probs)])
    with pytest.raises(AssertionError, match="arrays"):
        builders.check_built(candidate, conversation, [(ids + 1, mask, log_probs)])
    with pytest.raises(AssertionError, match="30 of 40 sampled ids"):
        shorter = np.where(np.cumsum(mask) <= 30, mask, False)
        builders.check_built(candidate, conversation, [(ids, shorter, log_probs)])
    candidate.close()


@pytest.mark.parametrize("kind", ["tokcap", "NeMo Gym"])
def test_every_tombstone_is_swept(tmp_path: Path, kind: str) -> None:
    candidate = consumers.Tokcap(tmp_path) if kind == "tokcap" else consumers.NemoGym(tmp_path, the_peer())
    candidate.bury(7)
    assert candidate.sweep() == 7
    assert candidate.sweep() == 0
    candidate.close()


def test_a_ticker_sees_what_keeps_the_loop() -> None:
    import asyncio
    import time

    async def main() -> stalls.Ticker:
        ticker = stalls.Ticker()
        ticking = asyncio.create_task(ticker.run())
        await asyncio.sleep(0)
        ticker.reset()
        time.sleep(0.02)
        await asyncio.sleep(0)
        ticking.cancel()
        return ticker

    assert asyncio.run(main()).gap_s >= 0.02


def test_copies_share_the_arrays_under_other_ids() -> None:
    conversations = calls(SMALL)
    found = stock.copies(conversations, 3, "again")
    assert [each[0].rollout_id for each in found] == ["again-00000", "again-00001", "again-00002"]
    assert all(one.prompt is other.prompt for one, other in zip(found[2], conversations[0], strict=True))


def test_stock_leaves_every_call_recorded(tmp_path: Path) -> None:
    conversations: list[list[Call]] = calls(SMALL)
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        stock.stock(store, conversations)
        for conversation in conversations:
            with store.freeze_now(conversation[0].rollout_id) as snapshot:
                assert [call.outcome for call in snapshot.calls] == ["recorded"] * SMALL.turns
                assert list(snapshot.entries) == [stock.entry_of(call) for call in conversation]
