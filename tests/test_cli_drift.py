"""`tokcap drift`: every drifted turn of a store, and how many there are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.looked_at_stores import recorded_store
from tests.test_cli_show import entry, on_a_terminal, run
from tokcap import FileStore


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """One turn was tokenised again, one came back edited; a compacted history; a turn that only goes on."""
    pieces = {2: b"y", 3: b"es", 4: b"yes", 5: b"!", 6: b"no", 7: b"<end>"}
    with FileStore(tmp_path / "store") as store:
        for rollout, calls in (
            ("r", [([1], [2, 3, 7]), ([1, 4, 7, 20], [5, 7]), ([1, 4, 7, 20, 5, 7, 20], [6]), ([1, 4, 30], [6])]),
            ("s", [([1], [5, 2, 3, 7]), ([1, 5, 6, 7, 20], [4])]),
        ):
            for number, (prompt, answer) in enumerate(calls):
                store.begin_call_now(rollout, f"c{number}")
                store.put_now(entry(rollout, f"c{number}", prompt, answer, pieces=[pieces[token] for token in answer]))
            store.freeze_now(rollout).close()
    return tmp_path / "store"


def test_each_drifted_turn_is_a_line_and_the_totals_follow(drifted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "drift", "--context", "2", "--dir", drifted)
    assert (status, err) == (0, "")
    head, *rows = (line.split("\t") for line in out.splitlines() if line.count("\t") > 2)
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["ROLLOUT"], row["CALL"], row["FROM"], row["KIND"]) for row in found] == [
        ("r", "c1", "c0", "retokenised"),
        ("s", "c1", "c0", "edited"),
    ]
    assert [found[0][name] for name in ("TIE", "INDEX", "KEPT", "LOST", "START")] == ["drifted", "1", "0", "3", "0"]
    assert [found[0][name] for name in ("WAS", "IS", "WAS_TEXT", "IS_TEXT")] == [
        "1 2 3",
        "1 4 7",
        "⟨1⟩yes",
        "⟨1⟩yes<end>",
    ]
    assert "2 of 3 turns drifted (66.7%) in 2 rollouts; 6 sampled ids" in out
    assert "1 prompt parts from an earlier prompt" in out


def test_drifts_are_chosen_by_kind_and_restarts_on_request(drifted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*options: str) -> list[dict[str, object]]:
        status, out, _ = run(capsys, "drift", *options, "--json", "--dir", drifted)
        assert status == 0
        return [json.loads(line) for line in out.splitlines()]

    *turns, totals = found("--kind", "edited")
    assert [turn["rollout_id"] for turn in turns] == ["s"]
    assert (turns[0]["model_call_id"], turns[0]["choice_index"]) == ("c1", 0)
    assert (turns[0]["nearest_model_call_id"], turns[0]["nearest_choice_index"]) == ("c0", 0)
    assert totals["totals"] == {
        "rollouts": 2, "turns": 3, "drifted_calls": 2, "restarted_calls": 1, "drift_lost": 6, "drift_rate": 2 / 3,
        "kinds": {"retokenised": 1, "edited": 1},
    }  # fmt: skip
    assert [turn["relation"] for turn in found("r", "--restarted")[:-1]] == ["drifted", "restarted"]
    assert len(found("--totals")) == 1


def test_the_recorded_traffic_drifts_as_often_as_its_prompts_do(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "drift", "--json", "--dir", recorded)
    *turns, last = map(json.loads, out.splitlines())
    assert status == 0
    assert (last["totals"]["drifted_calls"], last["totals"]["turns"], len(turns)) == (50, 201, 50)
    assert Counter(turn["kind"] for turn in turns) == last["totals"]["kinds"]
    assert last["totals"]["kinds"]["retokenised"] >= 6  # what the pieces of the store prove, without a tokenizer
    for turn in turns:
        place = turn["index"] - turn["start"]
        assert turn["before"][:place] == turn["after"][:place]
        assert turn["before"][place : place + 1] != turn["after"][place : place + 1]


def test_on_a_terminal_both_windows_stand_one_below_the_other(drifted: Path) -> None:
    seen = on_a_terminal("drift", "r", "--dir", str(drifted))
    assert "#2 parts from #1 at 1: keeps 0 of its ids, lost 3; retokenised" in seen
    assert "1 | 2 3 7" in seen and "1 | 4 7 20" in seen


def test_no_rollouts_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FileStore(tmp_path / "store").close_now()
    status, out, err = run(capsys, "drift", "--dir", tmp_path / "store")
    assert (status, out, err) == (0, "", f"tokcap: no rollouts in {tmp_path / 'store'}\n")
