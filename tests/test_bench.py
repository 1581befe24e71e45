"""The benchmarks run, and store what they say; nothing here looks at a clock."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import growth, plots, report, serving, tables, targets
from bench.clients import run, run_processes
from bench.figures import OURS, Figure
from bench.places import UnavailableError
from bench.serving_traffic import Conversation
from bench.stores import CANDIDATES, FLOORS, OURS_LISTS, missing
from bench.stores import base as stores_base
from bench.stores import nemo_gym as stores_nemo_gym
from bench.workload import FULL, SMOKE, WORKLOADS, Workload, calls, distinct_ids, handed_in, named
from tokcap import FileStore
from tokcap.entry import TokenEntry

SMALL = Workload(rollouts=4, turns=4, first_prompt=50, per_turn=20, sampled=10)


# ---- workloads


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_whoever_makes_which_share_of_it(name: str) -> None:
    workload = named(name, SMOKE)
    whole = calls(msgspec.structs.replace(workload, rollouts=4))
    shares = [calls(msgspec.structs.replace(workload, rollouts=2), first=first) for first in (0, 2)]
    for one, other in zip(whole, [*shares[0], *shares[1]], strict=True):
        assert [call.rollout_id for call in one] == [call.rollout_id for call in other]
        for call, again in zip(one, other, strict=True):
            assert np.array_equal(call.prompt, again.prompt)
            assert np.array_equal(call.generated, again.generated)
            assert np.array_equal(call.log_probs, again.log_probs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_call_begins_with_its_parent_and_with_what_it_says_to_share(name: str) -> None:
    for conversation in calls(named(name, SMOKE if name != "W4" else FULL))[:25]:
        sequences: dict[str, np.ndarray] = {}
        for call in conversation:
            known = {0, *(_common(call.prompt, sequence) for sequence in sequences.values())}
            assert call.shared == max(known)
            if call.parent:
                parent = sequences[call.parent]
                assert np.array_equal(call.prompt[: len(parent)], parent)
            sequences[call.model_call_id] = np.concatenate([call.prompt, call.generated])


def _common(one: np.ndarray, other: np.ndarray) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_the_long_workload_grows_to_128k_ids_and_prompts_are_views() -> None:
    (conversation,) = calls(msgspec.structs.replace(named("W2"), rollouts=1))
    assert len(conversation) == 60
    assert 130_000 < len(conversation[-1].prompt) + len(conversation[-1].generated) <= 131_072
    assert np.shares_memory(conversation[0].prompt, conversation[-1].prompt)
    assert distinct_ids([conversation]) == 2_048 + 59 * 2_176 + 512
    assert handed_in([conversation]) == 4 * sum(len(call.prompt) for call in conversation) + 60 * 512 * 12


def test_recorded_calls_are_those_with_ids_and_log_probs() -> None:
    conversations = calls(msgspec.structs.replace(named("W4"), rollouts=25))
    assert sum(len(call.generated) for conversation in conversations for call in conversation) > 6815
    assert not any(np.isnan(call.log_probs).any() for conversation in conversations for call in conversation)


# ---- candidates


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_every_candidate_puts_the_whole_workload(tmp_path: Path, candidate: str) -> None:
    _need(candidate)
    measured = run(candidate, tmp_path / "own", calls(SMALL), open_rollouts=3)
    assert len(measured.first) == SMALL.rollouts
    assert len(measured.steady) == SMALL.rollouts * (SMALL.turns - 1)
    assert measured.file_bytes > measured.puts * SMALL.sampled * 4


@pytest.mark.parametrize("candidate", [name for name, store in CANDIDATES.items() if store.intents])
def test_puts_with_their_intents(tmp_path: Path, candidate: str) -> None:
    _need(candidate)
    with_intents = run(candidate, tmp_path / "with", calls(SMALL), intents=True)
    without = run(candidate, tmp_path / "without", calls(SMALL))
    assert with_intents.puts == without.puts
    assert with_intents.file_bytes > without.file_bytes


@pytest.mark.parametrize("candidate", FLOORS)
def test_a_floor_has_no_intents(tmp_path: Path, candidate: str) -> None:
    with pytest.raises(ValueError, match="has no begin_call"):
        run(candidate, tmp_path / "own", calls(SMALL), intents=True)


def test_floors_write_only_what_is_new(tmp_path: Path) -> None:
    measured = {name: run(name, tmp_path / name, calls(SMALL)).file_bytes for name in FLOORS}
    new = distinct_ids(calls(SMALL)) * 4 + SMALL.rollouts * SMALL.turns * SMALL.sampled * 4
    assert len(set(measured.values())) == 1
    assert new < measured[FLOORS[0]] < new * 1.3


@pytest.mark.parametrize("candidate", [OURS, OURS_LISTS])
def test_what_is_measured_of_tokcap_is_what_can_be_read_back(tmp_path: Path, candidate: str) -> None:
    conversations = calls(SMALL)
    run(candidate, tmp_path / "own", conversations)
    with FileStore(tmp_path / "own" / "store", sweep_every_s=0) as store:
        for conversation in conversations:
            with store.freeze_now(conversation[0].rollout_id) as snapshot:
                stored = {entry.model_call_id: entry for entry in snapshot.entries}
            assert stored == {
                call.model_call_id: TokenEntry(
                    call.rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs
                )
                for call in conversation
            }


def test_two_processes_put_their_shares_into_one_store(tmp_path: Path) -> None:
    measured = run_processes(OURS, tmp_path / "own", SMALL, 2)
    assert measured.puts == SMALL.rollouts * SMALL.turns
    with FileStore(tmp_path / "own" / "store", sweep_every_s=0) as store:
        assert sum(1 for _ in store.rollouts()) == SMALL.rollouts


def test_processes_that_can_not_share_evenly_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 processes can't share 4 rollouts"):
        run_processes(OURS, tmp_path / "own", SMALL, 3)


def _need(candidate: str) -> None:
    absent = missing()
    if candidate in absent:
        pytest.skip(absent[candidate])


# ---- figures


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(exponent: float) -> None:
    sizes = [1e3, 2e3, 4e3, 8e3]
    assert growth.fit(sizes, [3 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_what_grows_faster_than_its_input_is_marked() -> None:
    sizes = (1e3, 2e3, 4e3, 8e3)
    rounds = tuple(tuple(factor * size**1.2 for size in sizes) for factor in (1.0, 2.0))
    fast = growth.Growth("put", "disk", "W1", "turns", OURS, sizes, rounds)
    slow = msgspec.structs.replace(fast, candidate="other", rounds=(sizes,))
    assert (fast.too_fast, slow.too_fast) == (True, False)
    assert list(tables.growth([fast, slow]))[-1] == "| W1 | disk | turns | put | **1.20 !** | 1.00 |"
    assert fast.medians == tuple(1.5 * size**1.2 for size in sizes)


def test_nothing_is_fitted_to_one_size_or_to_no_value() -> None:
    assert math.isnan(growth.fit([5.0, 5.0], [1.0, 2.0]))
    assert math.isnan(growth.fit([1.0, 2.0], [0.0, 2.0]))


def test_a_target_is_the_median_of_the_ratios_of_neighbouring_rounds() -> None:
    target = targets.Target("puts", "times", 3, 6, "puts", "W1", "disk", against="other")
    ours = Figure("puts", "1/s", "more", "disk", "W1", OURS, (10.0, 40.0, 90.0))
    other = msgspec.structs.replace(ours, candidate="other", rounds=(5.0, 10.0, 30.0))
    assert target.found([ours, other]) == 3.0
    assert [target.met(found) for found in (2.9, 3.0, 6.0)] == ["no", "yes", "aim"]
    assert target.found([ours]) is None


def test_a_cost_counts_the_other_way_round() -> None:
    target = targets.Target("pair", "cost", 2, 1.2, "pairs", "W1", "disk", against=OURS, against_measure="puts")
    pairs = Figure("pairs", "1/s", "more", "disk", "W1", OURS, (10.0,))
    puts = msgspec.structs.replace(pairs, measure="puts", rounds=(15.0,))
    assert target.found([pairs, puts]) == 1.5
    slower = [msgspec.structs.replace(figure, better="less") for figure in (pairs, puts)]
    assert target.found(slower) == pytest.approx(10 / 15)
    assert [target.met(found) for found in (1.2, 2.0, 2.1)] == ["aim", "yes", "no"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234567, "1,234,567"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.01234, "0.0123"), (math.nan, "")],
)
def test_numbers_have_three_digits_that_count(value: float, shown: str) -> None:
    assert tables.number(value) == shown


# ---- the report


@pytest.fixture(scope="module")
def tried() -> report.Report:
    tried = report.measured(report.TRIED)
    if "tmpfs" in tried.not_measured:
        pytest.skip(tried.not_measured["tmpfs"])
    return tried


def test_the_report_has_a_figure_of_every_part_for_every_candidate_that_is_there(tried: report.Report) -> None:
    assert not tried.failed
    present = CANDIDATES.keys() - tried.not_measured.keys()
    lines = [line for line in report.shown(tried) if line.startswith("|")]
    for name in WORKLOADS:
        found = {figure.candidate for figure in tried.figures if figure.workload == name}
        assert present <= found
    assert len(lines) == 2 + len(targets.TARGETS) + 2 + len(WORKLOADS) * len(present)
    assert {figure.processes for figure in tried.figures if figure.measure == "durable puts, from processes"} == {2}
    assert {each.along for each in tried.growth} == {"turns", "rollouts"}
    assert all(all(value >= 0 for value in figure.rounds) for figure in tried.figures)


def test_every_target_names_figures_that_are_measured(tried: report.Report) -> None:
    if tried.not_measured:
        pytest.skip(f"not measured: {tried.not_measured}")
    for target in targets.TARGETS:
        if target.kind == "most":  # of a context that the small scale has not
            assert any(figure.measure == target.measure for figure in tried.figures)
            continue
        found = msgspec.structs.replace(target, place="tmpfs" if target.place else "").found(tried.figures)
        assert found is not None, target.text
        assert found > 0


def test_the_report_is_written_as_markdown_and_as_raw_figures(tried: report.Report, tmp_path: Path) -> None:
    few = msgspec.structs.replace(tried, figures=tried.figures[:3], growth=tried.growth[:1])
    markdown, raw, *pictures = report.written(few, tmp_path / "out")
    text = markdown.read_text()
    assert tried.machine.python in text
    assert "| measure | needed | aim | found | met? |" in text
    assert all(f"### {figure.measure} (" in text for figure in few.figures)
    again = msgspec.json.decode(raw.read_bytes(), type=report.Report)
    assert (again.figures, again.growth) == (few.figures, few.growth)
    try:
        drawn = plots.draw(tmp_path, few.figures, few.growth)
    except UnavailableError:
        assert not pictures
    else:
        assert [picture.name for picture in pictures] == [path.name for path in drawn]
        assert all(b"<svg" in picture.read_bytes() for picture in pictures)


def test_a_peer_that_is_not_there_is_said_not_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str = "NeMo Gym") -> None:
        raise UnavailableError(f"{name} is not installed")

    monkeypatch.setattr(stores_base, "peer_module", absent)
    monkeypatch.setattr("bench.stores.databases.peer_module", absent)
    monkeypatch.setattr(stores_nemo_gym, "load", absent)
    words = ["--smoke", "--only", "open", "--out", str(tmp_path / "out")]
    assert report.main(words) == 0
    printed = capsys.readouterr().out
    for name in ("NeMo Gym", "NeMo Gym, delta records", "LMDB", "diskcache"):
        assert f"- {name}: not measured: " in printed
    raw = msgspec.json.decode((tmp_path / "out" / "figures.json").read_bytes(), type=report.Report)
    assert {figure.candidate for figure in raw.figures} == {OURS, *FLOORS}


def test_a_place_that_is_not_there_is_said_not_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKCAP_BENCH_DIR", "/dev/shm")
    assert report.main(["--smoke", "--places", "disk", "--out", str(tmp_path)]) == 0
    assert "- disk: not measured: " in capsys.readouterr().out


def test_what_was_measured_before_a_part_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: report.Plan) -> Iterator[Figure]:
        yield Figure("puts", "1/s", "more", "disk", "W1", OURS, (1.0,))
        raise RuntimeError("the disk is full")

    monkeypatch.setitem(report.PARTS, "stalls", broken)
    logger = logging.getLogger("tokcap")
    before = logger.level
    assert report.main(["--smoke", "--only", "stalls", "--out", str(tmp_path / "out")]) == 1
    assert logger.level == before
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- stalls: not measured: failed: RuntimeError: the disk is full" in text
    assert "### puts (1/s, more is better)" in text


@pytest.mark.parametrize(
    "words", [["--only", "nothing"], ["--places", "moon"], ["--rounds", "0"], ["--all", "--smoke"]]
)
def test_what_the_report_does_not_know_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(words)


# ---- serving


def test_the_table_of_serving_has_every_cell_and_says_whether_the_promise_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKCAP_BENCH_DIR", str(tmp_path))
    words = ["serving", "--quick", "--places", "disk", "--prompts", "600,16384", "--callers", "1,3"]
    monkeypatch.setattr("sys.argv", words)
    assert serving.main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("|")]
    assert [row[:3] for row in rows if "whole" in row or "streamed" in row] == [
        [f"| {prompt}", callers, answer]
        for prompt in ("600", "16,384")
        for callers in ("1", "3")
        for answer in ("whole", "streamed")
    ]
    assert {len(row) for row in rows if len(row) > 1} == {len(serving.COLUMNS)}
    assert len([line for line in lines if line.endswith(("ms: met", "ms: NOT met"))]) == 1


def test_what_is_measured_of_serving_is_captured(tmp_path: Path) -> None:
    cell = serving.Cell(prompt=700, callers=2, streamed=True, rounds=1, calls=2)

    async def measured() -> dict[str, serving.Measured]:
        async with serving.server(tmp_path / "store") as port:
            return await serving.measure(cell, port)

    results = asyncio.run(measured())
    assert [len(results[way].whole_s) for way in serving.WAYS] == [4, 4, 4]
    conversation = Conversation(cell.prompt, cell.turns)
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        for caller in range(cell.callers):
            with store.freeze_now(cell.rollout(caller)) as snapshot:
                assert [call.outcome for call in snapshot.calls] == ["recorded"] * cell.turns
                stored = {
                    tuple(entry.prompt_token_ids): entry.generation_token_ids.tolist() for entry in snapshot.entries
                }
            assert stored == {
                tuple(conversation.prompt(turn)): conversation.sampled(turn) for turn in range(cell.turns)
            }
