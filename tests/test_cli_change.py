"""`tokcap retire`, `reset`, `sweep`: exactly what is asked, and never blindly."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.damage import TRUNK, make_entry
from tests.damage_by_hand import INCARNATION
from tokcap.command import main
from tokcap.store import FileStore

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An open, a frozen and a retired rollout."""
    root = tmp_path / "store"
    with FileStore(root, sweep_every_s=0) as store:
        for name in ("a-open", "b-frozen", "c-retired"):
            store.begin_call_now(name, "c0")
            store.put_now(make_entry(name, "c0", TRUNK, [5, 6, 7]))
        store.freeze_now("b-frozen").close()
        with store.freeze_now("c-retired") as snapshot:
            store.retire_now("c-retired", snapshot_id=snapshot.snapshot_id, version=1)
    return root


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(verb: str, *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([verb, "--dir", str(root), *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def states(root: Path) -> dict[str, str]:
    with FileStore(root, read_only=True) as store:
        return dict(store.rollouts())


def pair(root: Path, rollout_id: str) -> tuple[str, str, str, str]:
    with FileStore(root, read_only=True) as store:
        stat = store.stat_now(rollout_id)
    return "--snapshot-id", stat.snapshot_id, "--version", str(stat.version)


BEFORE = {"a-open": "open", "b-frozen": "frozen", "c-retired": "retired"}


# ---- retire


def test_exact_pair_is_retired_and_again_when_repeated(root: Path, run: Run) -> None:
    exact = pair(root, "b-frozen")
    for _ in range(2):
        status, out, err = run("retire", "b-frozen", *exact)
        assert (status, err) == (0, "")
        assert str(root) in out
    assert states(root) == BEFORE | {"b-frozen": "retired"}


def test_without_a_version_nothing_is_retired_and_the_command_with_it_is_printed(root: Path, run: Run) -> None:
    status, _, err = run("retire", "b-frozen")
    assert status == 2
    assert states(root) == BEFORE
    command = next(line for line in err.splitlines() if "--snapshot-id" in line and "b-frozen" in line)
    words = command.split()
    assert words[:2] == ["tokcap", "retire"] and words[-2:] == ["--dir", str(root)]
    assert run(*words[1:])[0] == 0
    assert states(root)["b-frozen"] == "retired"


def test_stale_version_is_not_retired(root: Path, run: Run) -> None:
    exact = pair(root, "b-frozen")
    with FileStore(root, sweep_every_s=0) as store:
        store.settle_call_now("b-frozen", "late", "aborted")
    status, out, err = run("retire", "b-frozen", *exact)
    assert (status, out) == (1, "")
    assert "stale" in err
    assert "version 2 is published" in err
    assert states(root) == BEFORE


@pytest.mark.parametrize(
    "rollout_id, snapshot_id, version, why",
    [
        ("b-frozen", INCARNATION, "1", "another incarnation"),
        ("b-frozen", "", "9", "isn't there yet"),
        ("c-retired", INCARNATION, "1", "another incarnation"),
        ("c-retired", "", "2", "retired already"),
        ("a-open", INCARNATION, "1", "open"),
    ],
)
def test_what_is_not_published_is_not_retired_and_it_is_said_why(
    root: Path, run: Run, rollout_id: str, snapshot_id: str, version: str, why: str
) -> None:
    snapshot_id = snapshot_id or pair(root, rollout_id)[1]
    asked = (rollout_id, "--snapshot-id", snapshot_id, "--version", version)
    status, _, err = run("retire", *asked)
    assert status == 1
    assert why in err
    status, out, _ = run("retire", *asked, "--json")
    said = json.loads(out)
    assert (status, said["retired"]) == (1, False)
    assert why in said["reason"]
    assert states(root) == BEFORE


def test_current_is_shown_and_retired_only_if_wanted(root: Path, run: Run) -> None:
    status, _, err = run("retire", "b-frozen", "--current")
    assert status == 2
    assert "--yes" in err
    assert states(root) == BEFORE
    assert run("retire", "a-open", "--current", "--yes")[0] == 1
    assert run("retire", "b-frozen", "--current", "--version", "1", "--yes")[0] == 2
    snapshot_id = pair(root, "b-frozen")[1]
    status, _, err = run("retire", "b-frozen", "--current", "--yes")
    assert status == 0
    assert snapshot_id in err
    assert states(root)["b-frozen"] == "retired"


def on_a_terminal(answer: bytes, *arguments: str) -> tuple[int, str]:
    """The command with a terminal in front of it; its status and what is on the screen."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "tokcap.command", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    screen = b""
    try:
        while b"[y/N]" not in screen:
            screen += os.read(ours, 4096)
        os.write(ours, answer)
        while True:
            try:
                more = os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if not more:
                break
            screen += more
    finally:
        os.close(ours)
        status = process.wait()
    return status, screen.decode()


def test_a_terminal_is_asked(root: Path) -> None:
    asked = ("retire", "b-frozen", "--current", "--dir", str(root))
    status, screen = on_a_terminal(b"n\n", *asked)
    assert status == 130
    assert "1 call" in screen
    assert states(root) == BEFORE
    assert on_a_terminal(b"y\n", *asked)[0] == 0
    assert states(root)["b-frozen"] == "retired"


# ---- reset


def test_reset_says_what_is_forgotten_and_forgets_it(root: Path, run: Run) -> None:
    status, out, err = run("reset", "a-open", "b-frozen", "--yes")
    assert status == 0
    assert "2 rollouts with 2 calls and 6 sampled tokens" in out
    assert str(root) in err
    assert "b-frozen: frozen, 1 call, 3 sampled tokens" in err
    assert states(root) == {"c-retired": "retired"}


def test_reset_asks_and_wants_yes_where_it_cannot(root: Path, run: Run) -> None:
    assert run("reset", "a-open")[0] == 2
    assert states(root) == BEFORE
    assert on_a_terminal(b"n\n", "reset", "a-open", "--dir", str(root))[0] == 130
    assert states(root) == BEFORE


def test_globs_are_refused_without_yes(root: Path, run: Run) -> None:
    status, _, err = run("reset", "*-open")
    assert status == 2
    assert "--yes" in err
    status, out, _ = run("reset", "*-open", "c-*", "--yes", "--json")
    assert status == 0
    assert [json.loads(line)["rollout_id"] for line in out.splitlines()] == ["a-open", "c-retired"]
    assert states(root) == {"b-frozen": "frozen"}


def test_nothing_is_reset_if_one_of_them_is_not_there(root: Path, run: Run) -> None:
    status, _, err = run("reset", "a-open", "b-frozn", "--yes")
    assert status == 3
    assert "b-frozen" in err
    assert states(root) == BEFORE


def test_what_cannot_be_read_can_be_reset(root: Path, run: Run) -> None:
    (path,) = root.glob("rollouts/*/a-open")
    (path / INCARNATION).mkdir(mode=0o700)
    (path / INCARNATION / "000001.seg").write_bytes(b"x")
    assert run("reset", "a-open", "--yes")[0] == 0
    assert not path.exists()


# ---- sweep


def test_dry_run_changes_nothing_and_says_what_a_sweep_then_does(root: Path, run: Run) -> None:
    with FileStore(root, sweep_every_s=0) as store:
        store.settle_call_now("c-retired", "late", "lost", "x" * 200)
    (leftover,) = root.glob("rollouts/*/a-open/*")
    (leftover / "tmp-0123").mkdir(mode=0o700)
    (leftover / "tmp-0123" / "manifest").write_bytes(b"y" * 1000)
    freed = json.loads(run("sweep", "--dry-run", "--json")[1])["bytes"]
    os.link(next(leftover.glob("0*")), leftover / "tmp-0123" / "000001-000000000001.seg")
    before = sorted(root.rglob("*"))
    assert json.loads(run("sweep", "--dry-run", "--json")[1])["bytes"] == freed == 1000  # a link frees nothing
    assert json.loads(run("sweep", "--dry-run", "--json")[1])["tombstones"] == 0
    status, out, _ = run("sweep", "--older-than", "0", "--dry-run", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["tombstones"], told["leftovers"]) == (1, 1)
    assert told["bytes"] > 1200
    assert sorted(root.rglob("*")) == before
    status, out, _ = run("sweep", "--older-than", "0", "--json")
    assert (status, json.loads(out)) == (0, told | {"dry_run": False})
    assert states(root) == {"a-open": "open", "b-frozen": "frozen"}
    assert not (leftover / "tmp-0123").exists()


def test_sweep_names_its_directory_and_keeps_what_is_young(root: Path, run: Run) -> None:
    status, out, err = run("sweep")
    assert status == 0
    assert str(root) in err
    assert out.startswith("removed 0 tombstones")
    assert states(root) == BEFORE
    assert run("sweep", "--older-than", "soon")[0] == 2


# ---- all of them


@pytest.mark.parametrize("arguments", [["retire", "x", "--current", "--yes"], ["reset", "x", "--yes"], ["sweep"]])
def test_a_directory_without_a_store_is_not_made_one(tmp_path: Path, arguments: list[str]) -> None:
    assert main([*arguments, "--dir", str(tmp_path / "nothing")]) == 3
    (tmp_path / "empty").mkdir()
    assert main([*arguments, "--dir", str(tmp_path / "empty")]) == 3
    assert sorted(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert not list((tmp_path / "empty").iterdir())


def test_a_store_that_others_can_write_to_is_refused(root: Path, run: Run) -> None:
    exact = pair(root, "b-frozen")
    root.chmod(0o777)
    for arguments in (["retire", "b-frozen", *exact], ["reset", "a-open", "--yes"], ["sweep", "--older-than", "0"]):
        status, _, err = run(*arguments)
        assert status == 4
        assert "others can write to it" in err
    assert states(root) == BEFORE
