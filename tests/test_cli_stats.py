"""`tokcap stats` and `tokcap du`: sums that agree with what is there."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tokcap import FileStore, TokenEntry, build
from tokcap.command import main
from tokcap.inspection import LOG_PROB_EDGES, RolloutRow, rows
from tokcap.inspection.statistics import BY, statistics, statistics_by
from tokcap.trajectory.verdicts import CATEGORIES

from .looked_at_stores import recorded_store


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


def test_sums_are_those_of_the_builds(recorded: Path) -> None:
    store = FileStore(recorded, read_only=True)
    found = statistics(rows(store))
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    log_probs, zeros = 0, 0
    for rollout_id, _ in store.rollouts():
        with store.read_now(rollout_id) as snapshot:
            built = build(snapshot)
            outcomes.update(call.outcome for call in snapshot.calls)
            for entry in snapshot.entries:
                log_probs += int(np.isfinite(entry.generation_log_probs).sum())
                zeros += int((entry.generation_log_probs == 0).sum())
        sums.update({name: value for name, value in built.metrics.items() if isinstance(value, int)})
        reasons.update(built.reasons)
    assert found.rollouts == 25 and found.states == {"frozen": 25} and found.finished == 25
    assert found.sampled == sums["sampled"] == sum(found.categories.values())
    assert found.categories == {name: sums[name] for name in CATEGORIES if sums[name]}
    assert found.delivered_fraction == sums["trained"] / sums["sampled"]
    assert found.reasons == reasons and found.outcomes == outcomes and found.calls == sums["calls"]
    assert found.drifted_calls == sums["drifted_calls"] == 50
    assert found.turns == sums["turns"] == 201
    assert sum(found.log_probs) == log_probs and found.zero_log_probs == zeros
    assert found.payload_bytes == 4 * sums["distinct_ids"] + 8 * sums["sampled"]
    assert found.bytes == sum(path.lstat().st_size for path in recorded.glob("rollouts/*/*/*/v1/*"))
    assert found.write_amplification == found.bytes / found.payload_bytes
    assert found.replay_factor == sums["total_ids"] / sums["distinct_ids"]


def test_parts_add_up(recorded: Path) -> None:
    found = rows(FileStore(recorded, read_only=True))
    whole = statistics(found)
    for by in BY:
        parts = statistics_by(found, by)
        assert sum(part.rollouts for part in parts.values()) == whole.rollouts
        assert sum(part.sampled for part in parts.values()) == whole.sampled
    assert list(statistics_by(found, "state")) == ["frozen"]
    assert {"linear", "edges"} <= set(statistics_by(found, "group"))


def row(**fields: object) -> RolloutRow:
    return RolloutRow("r", "frozen", **fields)  # type: ignore[arg-type]


def test_what_looks_wrong_is_said() -> None:
    bins = [0] * len(LOG_PROB_EDGES)
    zeros = row(metrics={"sampled": 10, "zero_log_probs": 9}, log_probs=(*bins[:-2], 1, 9))
    assert "exactly 0.0" in statistics([zeros]).hints[0]
    fine = row(metrics={"sampled": 10, "zero_log_probs": 3}, log_probs=(*bins[:-2], 7, 3))
    assert statistics([fine]).hints == ()
    mixed = row(metrics={"log_prob_modes": {"raw_logprobs": 1, "sglang": 2}, "mixed_log_prob_modes": True})
    assert "several modes" in statistics([mixed]).hints[0]
    each = [row(metrics={"log_prob_modes": {mode: 1}}) for mode in ("raw_logprobs", "sglang")]
    assert "several modes" in statistics(each).hints[0]
    assert statistics(each[:1]).hints == ()
    assert "not those of the sampling distribution" in statistics([row(metrics={"not_behaviour": 4})]).hints[0]
    assert "no log-prob is known" in statistics([row(metrics={"sampled": 4})]).hints[0]
    assert statistics([]).delivered_fraction is None


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    assert main(list(arguments)) == 0
    return {line.split("\t")[0]: line.split("\t")[1:] for line in capsys.readouterr().out.splitlines()}


def test_stats_prints_what_the_sums_are(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = statistics(rows(FileStore(recorded, read_only=True)))
    lines = lines_of(capsys, "stats", "--dir", str(recorded))
    assert lines["sampled_ids.sampled"][0] == str(found.sampled)
    assert lines["sampled_ids.trained"] == [str(found.categories["trained"]), f"{found.delivered_fraction:.1%}"]
    assert lines["drift.drifted"] == ["50", f"{found.drift_rate:.1%}"]
    assert lines["why_not_trained.ambiguous"][0] == str(found.reasons["ambiguous"])
    assert sum(int(value[0]) for name, value in lines.items() if name.startswith("log-probs.")) == sum(found.log_probs)
    assert main(["stats", "--dir", str(recorded), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampled"] == found.sampled


def test_policy_versions_are_in_the_order_of_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["", "2", "009", "10", "100", "9" * 5000, "step-2", "step-10", "step-10-b"]
    with FileStore(tmp_path / "store") as store:
        for number, name in enumerate(sorted(names)):
            spans = [(name, 0, 1)] if name else []
            store.put_now(TokenEntry("r", f"call-{number}", [1], [number], [-0.5], policy_versions=spans))
    assert main(["stats", "--dir", str(tmp_path / "store"), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["policy_versions"]) == names


def test_stats_takes_the_filters_of_ls(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(capsys, "stats", "linear-*", "--dir", str(recorded))["rollouts.all"][0] == "6"
    assert lines_of(capsys, "stats", "--reason", "ambiguous", "--dir", str(recorded))["rollouts.all"][0] == "3"
    assert main(["stats", "--masked", "--dir", str(recorded)]) == 1


def test_stats_by_group_has_a_line_for_each(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "stats", "--by", "group", "--dir", str(recorded))
    assert lines["GROUP"][0] == "ROLLOUTS"
    assert lines["linear"][0] == str(sum(row.group == "linear" for row in rows(FileStore(recorded, read_only=True))))
    assert main(["stats", "--by", "group", "--json", "--dir", str(recorded)]) == 0
    parts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(part["rollouts"] for part in parts) == 25
    assert len({part["group"] for part in parts}) == len(lines) - 1


def test_du_counts_everything_in_the_directory_once(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    (copy / "quarantine" / "x").mkdir(parents=True)
    (copy / "quarantine" / "x" / "moved").write_bytes(b"q" * 1000)
    with FileStore(copy) as store:
        for name in ("linear-0", "linear-1"):
            with store.freeze_now(name) as snapshot:
                store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=1)
        store.mark_incomplete_now("linear-0", "late")
        store.put_now(TokenEntry("open", "a", [1], [2], [-1.0]))
    incarnation = next(copy.glob("rollouts/*/linear-2/*"))
    (incarnation / "tmp-0123456789abcdef").write_bytes(b"t" * 500)
    assert main(["du", "--dir", str(copy), "--json"]) == 0
    whole, *largest = map(json.loads, capsys.readouterr().out.splitlines())
    there = {path.lstat().st_ino: path.lstat().st_size for path in copy.rglob("*") if path.is_file()}
    assert (whole["files"], whole["bytes"]) == (len(there), sum(there.values()))
    assert {state: share["rollouts"] for state, share in whole["states"].items()} == {
        "frozen": 23,
        "open": 1,
        "retired": 2,
    }
    assert whole["quarantine"] == {"rollouts": 0, "files": 1, "bytes": 1000}
    assert whole["leftovers"]["bytes"] == 500 == whole["sweepable_bytes"]
    assert whole["sweepable_tombstones"] == 0
    sizes = [one["bytes"] for one in largest]
    assert len(sizes) == 20 and sizes == sorted(sizes, reverse=True)

    assert main(["du", "--dir", str(copy), "--json", "--older-than", "0"]) == 0
    whole, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    note = next(copy.glob("rollouts/*/linear-0/*/note-*")).stat().st_size
    assert (whole["sweepable_tombstones"], whole["sweepable_bytes"]) == (2, 500 + note)
    with FileStore(copy) as store:
        assert store.sweep_now(0) == 2
    assert main(["du", "--dir", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["leftovers"]["bytes"] == 0


def test_du_in_lines(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, "du", "--dir", str(recorded), "--limit", "2")
    assert lines["frozen"][:2] == ["25", "50"]
    assert {"long-1", "all", "rest"} <= set(lines)
