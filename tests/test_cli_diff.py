"""`tokcap diff`: the first id in which calls, rollouts and stores differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.damage_by_hand import flip, one
from tests.test_cli_show import entry, run
from tokcap import FileStore, TokenEntry


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two rollouts: in `r` the second prompt has drifted from the first answer; `s` differs in log-probs only."""
    with FileStore(tmp_path / "store") as store:
        for rollout, log_prob in (("r", -0.5), ("s", -0.25)):
            store.begin_call_now(rollout, "one")
            pieces = [b"y", b"es"]
            store.put_now(TokenEntry(rollout, "one", [1, 2], [3, 4], [-1.0, log_prob], model="m", pieces=pieces))
            store.begin_call_now(rollout, "two")
            store.put_now(entry(rollout, "two", [1, 2, 3, 9, 8], [7]))
            store.begin_call_now(rollout, "three")
            store.put_now(entry(rollout, "three", [1, 2, 3, 9, 8, 7, 6], [5]))
            store.freeze_now(rollout).close()
    return tmp_path / "store"


def rows_of(out: str) -> list[list[str]]:
    return [line.split("\t") for line in out.splitlines() if "\t" in line][1:]


def test_a_call_is_compared_with_the_one_that_it_drifted_from(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "diff", "r", "two", "--context", "1", "--dir", store)
    assert (status, err) == (1, "")
    assert "the ids differ at position 3: there A is in its answer and B is in its prompt" in out
    assert rows_of(out) == [
        ["", "2", "3", "'y'", "-1.0000", "3", "'y'", ""],
        [">", "3", "4", "'es'", "-0.5000", "9", "", ""],
        ["!", "4", "", "", "", "8", "", ""],
    ]
    assert run(capsys, "diff", "r", "one", "two", "--dir", store)[1] != ""
    status, out, _ = run(capsys, "diff", "r", "three", "--dir", store)  # it continues: the other one ends first
    assert status == 1 and "at position 6: there A has ended and B is in its prompt" in out
    status, _, err = run(capsys, "diff", "r", "one", "--dir", store)
    assert status == 3 and "parts from no other call" in err


def test_rollouts_that_differ_in_log_probs_only(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "diff", "r", "s", "--dir", store)
    assert status == 1
    assert "2 of 3 pairs of calls are equal (paired by their ids)" in out
    assert "log-probs differ at 1 of 2 positions, most at 3: by 0.25" in out
    status, out, _ = run(capsys, "diff", "r/one", "s", "--dir", store, "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["index"], told["largest"]) == (1, "log_probs", 3, 0.25)
    assert run(capsys, "diff", "r/two", "s/two", "--dir", store)[0] == 0


def test_the_same_ids_in_which_the_answer_begins_elsewhere_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as made:
        made.put_now(entry("r", "one", [1, 2], [3]))
        made.put_now(entry("s", "one", [1], [2, 3]))
    status, out, _ = run(capsys, "diff", "r/one", "s/one", "--dir", tmp_path / "store")
    assert (status, "the ids are the same, and the answer begins elsewhere" in out) == (1, True)
    status, out, _ = run(capsys, "diff", "r/one", "s/one", "--dir", tmp_path / "store", "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["index"], told["lengths"]) == (1, "cut", -1, [[2, 1], [1, 2]])


def test_a_copy_is_equal_and_a_changed_one_is_not(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, tmp_path / "copy")
    assert run(capsys, "diff", "r", "--dir", store, "--dir2", tmp_path / "copy")[0] == 0
    status, out, _ = run(capsys, "diff", "--dir", store, "--dir2", tmp_path / "copy")
    assert (status, out) == (0, "2 of 2 rollouts are equal\n")
    with FileStore(tmp_path / "copy") as copy:
        copy.reset_now("s")
        copy.put_now(entry("t", "one", [1], [2]))
    status, out, _ = run(capsys, "diff", "--dir", store, "--dir2", tmp_path / "copy")
    assert (status, out.splitlines()) == (
        1,
        ["s\tstate: frozen, absent", "t\tstate: absent, open", "1 of 3 rollouts are equal"],
    )
    status, _, err = run(capsys, "diff", "s", "--dir", store, "--dir2", tmp_path / "copy")
    assert status == 3 and "there is no rollout s" in err


def test_a_copy_of_a_damaged_store_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "store"
    with FileStore(root) as store:
        for call, length in (("one", 100), ("two", 200), ("three", 300)):  # each is stored as what it adds
            store.begin_call_now("r", call)
            store.put_now(entry("r", call, list(range(length)), [length, 7], finish_reason=f"finish-{call}"))
        store.freeze_now("r").close()
    flip(one("rollouts/*/r/*/v1/*.seg", root), one("rollouts/*/r/*/v1/*.seg", root).read_bytes().index(b"finish-one"))
    shutil.copytree(root, tmp_path / "a copy")
    status, out, err = run(capsys, "diff", "--dir", root, "--dir2", tmp_path / "a copy")
    assert (status, out, err) == (0, "1 of 1 rollouts are equal\n", "")


@pytest.mark.parametrize("things", [(), ("r",), ("r/one", "s", "r"), ("r", "one", "two", "three")])
def test_what_cannot_be_compared_is_wrong_usage(
    store: Path, capsys: pytest.CaptureFixture[str], things: tuple[str, ...]
) -> None:
    assert run(capsys, "diff", *things, "--dir", store)[0] == 2


def test_names_that_are_not_there(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "diff", "r", "absent", "--dir", store)[0] == 3
    assert run(capsys, "diff", "r", "one", "four", "--dir", store)[0] == 3
    assert run(capsys, "diff", "r/nothing", "s", "--dir", store)[0] == 3
    # A second name is a call only beside a rollout in the same store.
    assert run(capsys, "diff", "r/one", "two", "--dir", store)[0] == 3
    assert run(capsys, "diff", "r", "two", "--dir", store, "--dir2", store)[0] == 3
