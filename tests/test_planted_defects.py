"""Every planted defect is found by the commands that the README names, and by no more than they print."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import planted_defects
from scripts.planted_defects import DEFECTS, Planted
from tokcap import build
from tokcap.command import main
from tokcap.inspection import open_to_look

Practice = tuple[Path, dict[str, Planted]]


@pytest.fixture(scope="module")
def practice(tmp_path_factory: pytest.TempPathFactory) -> Practice:
    directory = tmp_path_factory.mktemp("practice") / "store"
    return directory, {planted.name: planted for planted in planted_defects.plant_all(directory, seed=1)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return iter(())


def run(capsys: pytest.CaptureFixture[str], practice: Practice, command: str) -> tuple[int, str]:
    """Run a command on the store; its status, and what it printed."""
    program, *arguments = shlex.split(command)
    assert program == "tokcap"
    status = main([*arguments, "--dir", str(practice[0])])
    told = capsys.readouterr()
    return status, told.out + told.err


def see(capsys: pytest.CaptureFixture[str], practice: Practice, name: str) -> tuple[int, str]:
    """Run the command that the answers name."""
    return run(capsys, practice, practice[1][name].see)


# ---- the store


def test_the_place_of_a_defect_depends_on_the_seed_alone(practice: Practice, tmp_path: Path) -> None:
    again = planted_defects.plant_all(tmp_path / "again", seed=1)
    other = planted_defects.plant_all(tmp_path / "other", seed=2)
    assert {planted.name: planted for planted in again} == practice[1]
    assert {planted.name for planted in other} == set(DEFECTS)
    assert other != again


def test_answers_are_told_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planted_defects.main([str(tmp_path / "quiet")]) == 0
    told = capsys.readouterr()
    assert not re.search(r"task-\d", told.out + told.err)
    assert f"tokcap ls --dir {tmp_path / 'quiet'}\n" in told.out
    assert planted_defects.main([str(tmp_path / "loud"), "--answers"]) == 0
    assert len(re.findall(r"^task-\d-\d ", capsys.readouterr().out, re.MULTILINE)) == len(DEFECTS)
    with pytest.raises(SystemExit), contextlib.redirect_stderr(None):
        planted_defects.main([str(tmp_path / "loud")])  # it is there already


def test_a_store_does_not_tell_by_a_warning_where_a_defect_is(tmp_path: Path) -> None:
    command = [sys.executable, planted_defects.__file__, str(tmp_path / "quiet"), "--seed", "4711"]
    root = Path(planted_defects.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)})
    assert not re.search(r"task-\d", done.stdout + done.stderr)


def test_answers_are_told_later_of_a_store_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(tmp_path / "practice")
    planted_defects.main([directory, "--seed", "5", "--answers"])
    at_once = capsys.readouterr().out.splitlines()
    assert planted_defects.main([directory, "--seed", "5", "--answers"]) == 0
    assert capsys.readouterr().out.splitlines() == at_once[1:]


def test_the_others_are_well(practice: Practice) -> None:
    directory, planted = practice
    store = open_to_look(directory)
    ill = {one.rollout_id for one in planted.values()}
    well = [rollout_id for rollout_id, _ in store.rollouts() if rollout_id not in ill]
    assert len(well) == len(planted_defects.WELL)
    for rollout_id in well:
        with store.read_now(rollout_id) as snapshot:
            built = build(snapshot)
            assert not snapshot.incomplete
        assert built.metrics["trained"] == built.metrics["sampled"] > 0
        assert built.metrics["drifted_calls"] == 0


# ---- each defect, by the commands


def test_ls_shows_that_something_is_wrong_with_all_but_drift(
    practice: Practice, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state and the column WHY; what is well says nothing there."""
    status, _ = run(capsys, practice, "tokcap ls")
    assert status == 0
    main(["ls", "--json", "--dir", str(practice[0])])
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    noted = {
        row["rollout_id"]
        for row in rows
        if row["state"] != "frozen" or row["reasons"] or row["damage"] or set(row["outcomes"]) - {"recorded"}
    }
    assert noted == {one.rollout_id for name, one in practice[1].items() if name != "drift"}


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("lost", 0, ("{call}", "lost", "no ids of sampled tokens")),
        ("drift", 0, ("{call}", "call-0004", "269")),  # parts there from the prompt and answer of call-0004
        ("flipped", 1, ("{id}", "checksum", "{call}")),
        ("retired", 0, ("{id}", "retired")),
        ("aborted", 0, ("{call}", "aborted", "14")),  # ids that are not trained
        ("ambiguous", 0, ("{call}", "ambiguous", "68")),
        ("no-log-probs", 0, ("{call}",)),
        ("died", 0, ("{call}", "open")),
        ("conflict", 0, ("{call}", "conflict")),
    ],
)
def test_the_command_that_the_answers_name_shows_the_defect(
    practice: Practice, capsys: pytest.CaptureFixture[str], name: str, status: int, words: tuple[str, ...]
) -> None:
    planted = practice[1][name]
    given, printed = see(capsys, practice, name)
    assert given == status, printed
    for word in words:
        assert word.format(id=planted.rollout_id, call=planted.call) in printed, printed


def test_a_rollout_without_calls_is_shown_with_what_to_do(
    practice: Practice, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = practice[1]["wrong-url"]
    _, printed = run(capsys, practice, f"tokcap show {planted.rollout_id}")
    assert "nothing_recorded" in printed
    assert "rollout_base_url" in printed
    _, printed = see(capsys, practice, "wrong-url")
    assert "call-" not in printed


def test_filters_of_ls_find_their_defects(practice: Practice, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*arguments: str) -> set[str]:
        main(["ls", *arguments, "--json", "--dir", str(practice[0])])
        return {json.loads(line)["rollout_id"] for line in capsys.readouterr().out.splitlines()}

    def of(*names: str) -> set[str]:
        return {practice[1][name].rollout_id for name in names}

    assert found("--reason", "ambiguous") == of("ambiguous")
    assert found("--reason", "unknown") == of("no-log-probs")
    assert found("--reason", "nothing_recorded") == of("wrong-url")
    assert found("--damaged") == of("flipped")
    assert found("--state", "retired") == of("retired")
    assert found("--state", "open") == of("died")
    assert found("--incomplete") == of("lost", "flipped", "died", "conflict")


def test_verify_names_the_flipped_byte_and_nothing_else(practice: Practice, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, practice, "tokcap verify --json")
    assert status == 1
    findings = [json.loads(line) for line in printed.splitlines()]
    damaged = {finding["rollout_id"] for finding in findings if finding.get("level") == "damage"}
    assert damaged == {practice[1]["flipped"].rollout_id}


def test_drift_names_the_drifted_turn_and_nothing_else(practice: Practice, capsys: pytest.CaptureFixture[str]) -> None:
    main(["drift", "--json", "--dir", str(practice[0])])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    planted = practice[1]["drift"]
    assert {line["rollout_id"] for line in lines if "rollout_id" in line} == {planted.rollout_id}
    assert planted.call in json.dumps(lines)
