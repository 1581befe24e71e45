"""The benchmarks run, and store what they say; nothing here looks at a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import builds
from bench.candidates import CANDIDATES, run
from bench.report import main
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
