"""The benchmarks run, and store what they say; nothing here looks at a clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import builds, serving
from bench.candidates import CANDIDATES, run
from bench.report import main
from bench.serving_traffic import Conversation
from bench.workload import Workload, calls
from tokcap import FileStore
from tokcap.entry import TokenEntry

SMALL = Workload(rollouts=3, turns=4, first_prompt=50, per_turn=20, sampled=10)


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_every_candidate_puts_the_whole_workload(tmp_path: Path, candidate: str) -> None:
    measured = run(candidate, tmp_path, calls(SMALL))
    assert measured.puts == SMALL.puts == len(measured.latencies)
    assert measured.bytes_on_disk > SMALL.puts * SMALL.sampled


def test_what_is_measured_of_tokcap_is_what_can_be_read_back(tmp_path: Path) -> None:
    conversations = calls(SMALL)
    run("tokcap", tmp_path, conversations)
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        for conversation in conversations:
            with store.freeze_now(conversation[0].rollout_id) as snapshot:
                stored = {entry.model_call_id: entry for entry in snapshot.entries}
            assert stored == {
                call.model_call_id: TokenEntry(
                    call.rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs
                )
                for call in conversation
            }


def test_the_report_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKCAP_BENCH_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["report", "--rounds", "1", "--places", "disk", "--rollouts", "2", "--turns", "2"])
    assert main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CANDIDATES)


def test_the_table_of_builds_has_three_sizes_of_every_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKCAP_BENCH_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["builds", "--rounds", "1", "--shrink", "50"])
    assert builds.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3 * len(builds.SHAPES)


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
