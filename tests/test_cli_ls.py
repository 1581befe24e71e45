"""`tokcap ls`: what is shown, of which rollouts, in which order."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tokcap import FileStore, TokenEntry
from tokcap.command import main

from .looked_at_stores import recorded_store


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


@pytest.fixture
def mixed(store_dir: Path) -> Path:
    """One rollout of each kind."""
    with FileStore(store_dir) as store:

        def put(rollout: str, call: str, sampled: int, log_prob: float = -0.5, model: str = "policy") -> None:
            ids = list(range(sampled))
            store.put_now(TokenEntry(rollout, call, [1, 2], ids, [log_prob] * sampled, model=model))

        put("good-1", "a", 10)
        store.finish_now("good-1", meta={"group": "easy"})
        store.freeze_now("good-1").close()
        put("masked-1", "a", 20, float("nan"))
        store.freeze_now("masked-1").close()
        put("lost-1", "a", 30)
        store.mark_incomplete_now("lost-1", "b")
        put("judged-1", "a", 4, model="judge")
        store.begin_call_now("empty-1", "a")
        store.settle_call_now("empty-1", "a", "no_generation", "429")
        put("retired-1", "a", 5)
        with store.freeze_now("retired-1") as snapshot:
            assert store.retire_now("retired-1", snapshot_id=snapshot.snapshot_id, version=1)
        put("damaged-1", "a", 6)
        store.freeze_now("damaged-1").close()
    path = next(store_dir.glob("rollouts/*/damaged-1/*/v1/*.seg"))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    stray = next(store_dir.glob("rollouts/*/good-1")).parent / "not an id"
    stray.mkdir()
    return store_dir


def listed(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> list[list[str]]:
    """The cells of the lines that are printed."""
    assert main(["ls", "--dir", str(directory), *arguments]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("\t") == ["ROLLOUT", "STATE", "CALLS", "SAMPLED", "TRAINED", "AGE", "SIZE", "WHY"]
    return [line.split("\t") for line in lines]


def names(capsys: pytest.CaptureFixture[str], directory: Path, *arguments: str) -> list[str]:
    return [cells[0] for cells in listed(capsys, directory, *arguments)]


def test_recorded_rollouts_with_their_tokens(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = {row[0]: row for row in listed(capsys, recorded)}
    assert len(cells) == 25
    assert cells["linear-0"][1:5] == ["frozen", "8", "305", "305"]
    assert int(cells["linear-0"][6]) == sum(
        os.stat(path).st_size for path in recorded.glob("rollouts/*/linear-0/*/v1/*")
    )
    assert "ambiguous" in cells["edges-0"][7]


def test_why_says_what_is_wrong(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = {cells[0]: cells[7] for cells in listed(capsys, mixed)}
    assert why["good-1"] == ""
    assert why["masked-1"] == "masked: unknown"
    assert why["lost-1"] == "1 call lost"
    assert "damaged" in why["damaged-1"]
    assert why["empty-1"] == "nothing_recorded"
    assert why["not an id"].startswith("unreadable: ")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--state", "frozen"], ["damaged-1", "good-1", "masked-1"]),
        (["--state", "retired", "--state", "unreadable"], ["not an id", "retired-1"]),
        (["--masked"], ["damaged-1", "masked-1"]),
        (["--incomplete"], ["damaged-1", "lost-1"]),
        (["--wrong"], ["damaged-1", "empty-1", "lost-1", "masked-1", "not an id"]),
        (["--damaged"], ["damaged-1", "not an id"]),
        (["--reason", "unknown"], ["masked-1"]),
        (["--reason", "unreadable"], ["not an id"]),
        (["--model", "ju*"], ["judged-1"]),
        (["--group", "easy"], ["good-1"]),
        (["--finished"], ["good-1"]),
        (["--unfinished", "--state", "frozen"], ["damaged-1", "masked-1"]),
        (["*ed-1", "--state", "open"], ["judged-1"]),
        (["good-1", "lost-1"], ["good-1", "lost-1"]),
    ],
)
def test_filters(mixed: Path, capsys: pytest.CaptureFixture[str], filters: list[str], expected: list[str]) -> None:
    assert names(capsys, mixed, *filters) == expected


def test_ages(mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7500)
    assert main(["ls", "--dir", str(mixed), "--newer", "2h"]) == 1
    capsys.readouterr()
    everything = names(capsys, mixed, "--older", "2h", "--state", "frozen")
    assert everything == ["damaged-1", "good-1", "masked-1"]
    assert {7495 <= int(cells[5]) <= 7600 for cells in listed(capsys, mixed, "--state", "frozen")} == {True}


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("name", ["damaged-1", "good-1", "judged-1", "lost-1", "masked-1"]),
        ("sampled", ["lost-1", "masked-1", "good-1", "judged-1", "damaged-1"]),
        ("trained", ["lost-1", "good-1", "judged-1", "damaged-1", "masked-1"]),
        ("calls", ["lost-1", "good-1", "judged-1", "masked-1", "damaged-1"]),
    ],
)
def test_order(mixed: Path, capsys: pytest.CaptureFixture[str], sort: str, expected: list[str]) -> None:
    wanted = ["damaged-1", "good-1", "judged-1", "lost-1", "masked-1"]
    assert names(capsys, mixed, *wanted, "--sort", sort) == expected
    turned = names(capsys, mixed, *wanted, "--sort", "name", "--reverse")
    assert turned == sorted(wanted, reverse=True)


def test_the_youngest_is_first_by_age(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incarnation = next(mixed.glob("rollouts/*/lost-1/*"))
    later = time.time() + 100
    os.utime(next(incarnation.glob("000001.*")), (later, later))
    assert names(capsys, mixed, "--sort", "age", "--state", "open")[0] == "lost-1"
    assert names(capsys, mixed, "--sort", "age", "--state", "open", "--reverse")[-1] == "lost-1"


def test_limit_keeps_the_first_of_the_order(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [int(cells[6]) for cells in listed(capsys, recorded, "--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)
    assert [int(cells[6]) for cells in listed(capsys, recorded, "--sort", "size", "--limit", "3")] == sizes[:3]


def test_json_has_everything(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--dir", str(mixed), "--json"]) == 0
    rows = {row["rollout_id"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["masked-1"]["masked"] is True
    assert rows["masked-1"]["metrics"]["unknown"] == 20
    assert rows["lost-1"]["outcomes"] == {"lost": 1, "recorded": 1}
    assert rows["retired-1"]["state"] == "retired"


def test_quick_makes_no_builds(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {tuple(cells[2:5]) for cells in listed(capsys, recorded, "linear-*", "--quick")} == {("8", "0", "0")}
    assert main(["ls", "--dir", str(recorded), "--quick", "--masked"]) == 2


def test_fresh_looks_again_and_the_rest_is_kept(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = listed(capsys, mixed)
    again = listed(capsys, mixed)
    fresh = listed(capsys, mixed, "--fresh")
    assert [cells[:5] + cells[6:] for cells in first] == [cells[:5] + cells[6:] for cells in again]
    assert [cells[:5] + cells[6:] for cells in first] == [cells[:5] + cells[6:] for cells in fresh]


def test_nothing_there(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FileStore(store_dir).close_now()
    assert main(["ls", "--dir", str(store_dir)]) == 0
    assert "no rollouts in" in capsys.readouterr().err
    assert main(["ls", "--dir", str(store_dir), "--masked"]) == 1
    assert main(["ls", "--dir", str(store_dir), "x-*"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["ls", "stats"])
def test_a_rollout_that_is_named_and_not_there_is_told_with_its_neighbours(
    mixed: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([verb, "good-1", "god-1", "--dir", str(mixed)]) == 3
    assert "there is no rollout god-1" in (said := capsys.readouterr().err)
    assert "did you mean good-1 or " in said


def test_a_store_that_is_not_there(store_dir: Path) -> None:
    assert main(["ls", "--dir", str(store_dir / "absent")]) == 3


@pytest.mark.parametrize(
    "wrong", [["--reason", "ambigous"], ["--older", "yesterday"], ["--state", "thawed"], ["--limit", "-1"]]
)
def test_wrong_usage_is_told(recorded: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert main(["ls", "--dir", str(recorded), *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


def test_what_a_model_or_a_user_wrote_cannot_reach_the_terminal(
    store_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(store_dir) as store:
        store.put_now(TokenEntry("r", "a", [1], [2], [-1.0], model="\x1b[2J\nevil"))
    (next(store_dir.glob("rollouts/*")) / "\x1b[31m\nred").mkdir()
    out = [cells[0] for cells in listed(capsys, store_dir)]
    assert out == ["\\x1b[31m\\nred", "r"]
    assert main(["stats", "--dir", str(store_dir)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_read_only_copy_is_listed_without_a_trace(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        before = sorted((str(path), path.lstat().st_mtime_ns) for path in copy.rglob("*"))
        assert len(listed(capsys, copy)) == 25
        assert sorted((str(path), path.lstat().st_mtime_ns) for path in copy.rglob("*")) == before
    finally:
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o700)


def test_a_killed_writers_rollout_shows_its_open_call(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if not child:
        store = FileStore(store_dir)
        store.put_now(TokenEntry("r", "a", [1], [2], [-1.0]))
        store.begin_call_now("r", "b")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    ((name, state, calls, sampled, trained, _, _, why),) = listed(capsys, store_dir)
    assert (name, state, calls, sampled, trained, why) == ("r", "open", "2", "1", "1", "1 call open")
