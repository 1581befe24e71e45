"""Rollouts that somebody moved or renamed: `verify --repair` puts them back if their place is free, or leaves them."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.damage import TRUNK, make_entry
from tests.damage_by_hand import flip, one
from tests.test_cli_verify import Run, entries_of, files_of, found_by, root, run
from tokcap.errors import RetiredError
from tokcap.store import FileStore
from tokcap.store.fence import is_anybody_before, lock, next_place, open_fence
from tokcap.store.files import Files
from tokcap.store.layout import Layout
from tokcap.verification import check
from tokcap.verification import repair as repair_findings
from tokcap.verification.checking import check_place
from tokcap.verification.putting_back import PutBack, misplaced_at

__all__ = ("root", "run")

NAMES = ("a-open", "b-frozen", "c-retired")


def place_of(root: Path, name: str) -> Path:
    return Path(Layout(str(root)).rollout(name))


def states_of(root: Path) -> dict[str, str]:
    with FileStore(root, read_only=True) as store:
        return dict(store.rollouts())


def to_wrong_shard(rollout: Path, root: Path) -> None:
    wrong = root / "rollouts" / "00"
    wrong.mkdir(mode=0o700)
    rollout.rename(wrong / rollout.name)


def to_renamed_shard(rollout: Path, root: Path) -> None:
    rollout.parent.rename(rollout.parent.with_name(f"{rollout.parent.name}.bak"))


def to_shard_in_its_shard(rollout: Path, root: Path) -> None:
    to_renamed_shard(rollout, root)
    rollout.parent.mkdir(mode=0o700)
    rollout.parent.with_name(f"{rollout.parent.name}.bak").rename(rollout.parent / f"{rollout.parent.name}.bak")


def above_the_shards(rollout: Path, root: Path) -> None:
    rollout.rename(root / "rollouts" / rollout.name)


def below_another_tree(rollout: Path, root: Path) -> None:
    below = root / "rollouts" / "old" / rollout.parent.name
    below.mkdir(mode=0o700, parents=True)
    rollout.rename(below / rollout.name)


def into_another_rollout(rollout: Path, root: Path) -> None:
    (other,) = {"a-open", "b-frozen"} - {rollout.name} if rollout.name != "c-retired" else {"a-open"}
    rollout.rename(place_of(root, other) / rollout.name)


def to_another_name(rollout: Path, root: Path) -> None:
    rollout.rename(rollout.with_name("another"))


def to_no_name(rollout: Path, root: Path) -> None:
    rollout.rename(rollout.with_name(f"{rollout.name} (copy)"))


def to_a_name_of_this_shard(rollout: Path, root: Path) -> None:
    names = (f"other-{number}" for number in range(100_000))
    name = next(name for name in names if place_of(root, name).parent == rollout.parent)
    rollout.rename(rollout.with_name(name))


KEEP_NAME: dict[str, Callable[[Path, Path], None]] = {
    "wrong shard": to_wrong_shard,
    "shard under another name": to_renamed_shard,
    "shard inside its namesake": to_shard_in_its_shard,
    "above the shards": above_the_shards,
    "below another tree": below_another_tree,
    "in another rollout": into_another_rollout,
}
RENAME: dict[str, Callable[[Path, Path], None]] = {
    "another name": to_another_name,
    "no id": to_no_name,
    "another name of this shard": to_a_name_of_this_shard,
}
MOVES = [(what, name) for what in KEEP_NAME for name in NAMES] + [(what, name) for what in RENAME for name in NAMES[:2]]


@pytest.mark.parametrize(("what", "name"), MOVES)
def test_a_whole_rollout_is_put_back_into_its_place(root: Path, run: Run, what: str, name: str) -> None:
    rollout = place_of(root, name)
    whole, states = files_of(root), states_of(root)
    (KEEP_NAME | RENAME)[what](rollout, root)
    moved = files_of(root)
    assert run()[0] == 1
    status, out, _ = run("--repair", "--dry-run")
    assert status == 1
    assert "would have put " in out
    assert files_of(root) == moved

    status, out, _ = run("--repair")

    assert status == 0, out
    assert f"back into its place, {rollout}" in out
    assert found_by(run) == []
    assert states_of(root) == states
    now = files_of(root)
    assert {path: data for path, data in now.items() if path in whole} == whole
    assert set(now) - set(whole) <= {"rollouts/00"}
    assert not list(root.glob("quarantine/**/moved"))
    notes = [json.loads(note.read_text()) for note in root.glob("quarantine/*/*/note.json")]
    assert [f"its place, {rollout}" in "".join(note["done"]) for note in notes] == [True]


@pytest.mark.parametrize("what", KEEP_NAME)
def test_a_retired_rollout_that_is_put_back_stays_retired(root: Path, run: Run, what: str) -> None:
    KEEP_NAME[what](place_of(root, "c-retired"), root)
    assert run("--repair")[0] == 0
    with FileStore(root, sweep_every_s=0) as store, pytest.raises(RetiredError):
        store.put_now(make_entry("c-retired", "after", TRUNK, [1]))


@pytest.mark.parametrize(("what", "name"), MOVES)
def test_a_rollout_whose_place_is_taken_is_left_where_it_is_and_stays_damage(
    root: Path, run: Run, what: str, name: str
) -> None:
    rollout = place_of(root, name)
    shutil.copytree(rollout, root.parent / "copy", symlinks=True)
    (KEEP_NAME | RENAME)[what](rollout, root)
    rollout.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(root.parent / "copy", rollout)
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "left to you: " in out
        assert "is taken" in out
        assert files_of(root) == before
        assert not (root / "quarantine").exists()


@pytest.mark.parametrize("what", KEEP_NAME)
def test_a_rollout_of_which_nothing_says_the_id_is_left_where_it_is_and_stays_damage(
    root: Path, run: Run, what: str
) -> None:
    rollout = place_of(root, "a-open")
    for segment in rollout.glob("*/*.*"):
        flip(segment, 40)
    KEEP_NAME[what](rollout, root)
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "left to you: " in out
        assert files_of(root) == before
        assert not (root / "quarantine").exists()


@pytest.mark.parametrize("name", ["c-retired.bak", "old-c-retired", "c-retired_2"])
def test_a_retired_rollout_that_was_renamed_is_not_taken_for_another_one(root: Path, run: Run, name: str) -> None:
    rollout = place_of(root, "c-retired")
    rollout.rename(rollout.with_name(name))
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "left to you: " in out
        assert files_of(root) == before
    rollout.with_name(name).rename(rollout)
    assert found_by(run) == []


def test_segments_of_several_rollouts_belong_nowhere(root: Path, run: Run) -> None:
    theirs = one("rollouts/*/b-frozen/*", root)
    mine = place_of(root, "a-open")
    theirs.rename(mine / theirs.name)
    place_of(root, "b-frozen").rmdir()
    to_wrong_shard(mine, root)
    before = files_of(root)
    status, out, _ = run("--repair")
    assert status == 1
    assert "don't say which rollout it is" in out
    assert files_of(root) == before


def test_rollouts_of_a_renamed_shard_that_cannot_go_back_stay_in_it_and_the_others_go(root: Path, run: Run) -> None:
    rollout = place_of(root, "a-open")
    to_renamed_shard(rollout, root)
    aside = rollout.parent.with_name(f"{rollout.parent.name}.bak")
    for name in ("b-frozen", "c-retired"):
        place_of(root, name).rename(aside / name)
    rollout.mkdir(mode=0o700, parents=True)
    (rollout / "core").write_bytes(b"x")
    status, out, _ = run("--repair", "--json")
    assert status == 1
    done = [json.loads(line)["repaired"] for line in out.splitlines() if "repaired" in line]
    assert {one["rollout_id"] for one in done if one["done"]} >= {"b-frozen", "c-retired"}
    assert (aside / "a-open").is_dir()
    assert not (aside / "b-frozen").exists()
    status, out, _ = run("--repair")  # what was in the way is in quarantine by now
    assert status == 0, out
    assert not aside.exists()
    assert states_of(root) == {"a-open": "open", "b-frozen": "frozen", "c-retired": "retired"}


def test_an_empty_directory_in_its_place_is_no_hindrance(root: Path, run: Run) -> None:
    rollout = place_of(root, "b-frozen")
    to_wrong_shard(rollout, root)
    rollout.mkdir(mode=0o700)
    assert run("--repair")[0] == 0
    assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}


def test_damage_in_a_rollout_that_is_put_back_is_noted_with_it(root: Path, run: Run) -> None:
    rollout = place_of(root, "b-frozen")
    path = one("*/v2/000002-*.seg", rollout)
    flip(path, path.read_bytes().index(b"xxxx"))
    to_wrong_shard(rollout, root)
    assert run("--repair")[0] == 0
    assert [finding["level"] for finding in found_by(run)] == ["known"]
    assert entries_of(root, "b-frozen") == {"c0", "c2"}


def test_a_rollout_that_begins_meanwhile_is_not_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody makes the right directory between the check and the rename, and one holds the fence then."""
    rollout = place_of(root, "a-open")
    to_wrong_shard(rollout, root)
    aside = root / "rollouts" / "00" / "a-open"
    findings = list(check(root))
    place = check_place(root)
    (misplaced,) = misplaced_at(place, findings[0])
    assert misplaced.free
    with FileStore(root, sweep_every_s=0) as store:
        store.put_now(make_entry("a-open", "new", TRUNK, [1]))
        result: Any = store.perform_now(PutBack(place, misplaced))
        assert result.done == ()
        assert "is taken" in result.left[0]
    assert aside.is_dir()
    assert entries_of(root, "a-open") == {"new"}
    (repaired,) = repair_findings(root, findings)
    assert repaired.done == ()
    assert entries_of(root, "a-open") == {"new"}


def test_a_writer_that_waits_for_the_fence_goes_on_in_what_is_put_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = place_of(root, "a-open")
    to_wrong_shard(rollout, root)
    aside = str(root / "rollouts" / "00" / "a-open")
    place = check_place(root)
    (misplaced,) = misplaced_at(place, next(iter(check(root))))
    real, waiting = Files.rename, threading.Event()
    with FileStore(root, sweep_every_s=0) as writer, FileStore(root, sweep_every_s=0) as mender:
        begun = threading.Thread(target=writer.put_now, args=(make_entry("a-open", "new", TRUNK, [1]),))

        def rename(self: Files, source: str, target: str) -> None:
            if source == aside:
                begun.start()
                files, fd = Files(), open_fence(Files(), target)
                assert fd is not None
                while not is_anybody_before(fd, next_place()):
                    waiting.wait(0.001)
                files.close(fd)
            real(self, source, target)

        monkeypatch.setattr(Files, "rename", rename)
        result: Any = mender.perform_now(PutBack(place, misplaced))
        begun.join()
        assert result.done
        mender.put_now(make_entry("a-open", "newer", TRUNK, [1]))
    assert len(list(rollout.iterdir())) == 1
    assert entries_of(root, "a-open") == {"c0", "c1", "c2", "new", "newer"}


def test_what_somebody_holds_is_not_moved(root: Path, run: Run) -> None:
    """A writer from before it was moved may still be at work in it."""
    to_wrong_shard(place_of(root, "a-open"), root)
    before = files_of(root)
    files = Files()
    fd = open_fence(files, str(root / "rollouts" / "00" / "a-open"))
    assert fd is not None
    assert lock(files, fd)
    status, out, _ = run("--repair")
    assert status == 1
    assert "somebody is at work in it" in out
    assert files_of(root) == before
    files.close(fd)
    assert run("--repair")[0] == 0


@pytest.mark.parametrize("call", ["rename", "fsync_directory", "mkdir", "create"])
def test_a_failing_disk_leaves_it_where_it_was(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    to_renamed_shard(place_of(root, "b-frozen"), root)
    before = {path: data for path, data in files_of(root).items() if data is not None}
    real = getattr(Files, call)
    calls = 0

    def failing(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        inside = any(name in str(argument) for argument in arguments for name in ("rollouts", "quarantine"))
        calls += inside
        if inside and calls == fail_at:
            raise OSError(5, "Input/output error", str(arguments[0]))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, failing)
    fail_at = 1
    for fail_at in range(1, 40):
        calls = 0
        status, _, _ = run("--repair")
        if status == 0:
            break
        assert status == 4
        assert {path: data for path, data in files_of(root).items() if data is not None} == before, fail_at
        assert not list(root.glob("quarantine/**/note.json"))
    assert 1 < fail_at < 39
    assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}


class _Crash(BaseException):
    """Nothing is undone, as if the process had been killed."""


@pytest.mark.parametrize("call", ["rename", "fsync_directory", "mkdir", "rmdir"])
def test_a_repair_that_dies_anywhere_is_finished_by_the_next_one(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    to_renamed_shard(place_of(root, "b-frozen"), root)
    shutil.copytree(root, tmp_path / "kept")
    for folder, _, names in os.walk(tmp_path / "kept"):
        os.chmod(folder, 0o700)
        for name in names:
            os.chmod(f"{folder}/{name}", 0o600)
    real = getattr(Files, call)
    calls = 0

    def dying(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == die_at:
            raise _Crash
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, dying)
    die_at = 1
    for die_at in range(1, 40):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "kept", root)
        calls = 0
        try:
            run("--repair")
            break
        except _Crash:
            calls = 1000
        status, out, _ = run("--repair")
        assert status == 0, (die_at, out)
        assert states_of(root) == {"a-open": "open", "b-frozen": "frozen", "c-retired": "retired"}
    assert 1 < die_at < 39


def test_repair_of_others_leaves_it(root: Path, run: Run) -> None:
    to_wrong_shard(place_of(root, "a-open"), root)
    before = files_of(root)
    run("--repair", "b-*")
    assert files_of(root) == before
    assert run("--repair", "a-*")[0] == 0
    assert states_of(root)["a-open"] == "open"


def test_what_is_no_directory_is_moved_to_quarantine(root: Path, run: Run) -> None:
    rollout = place_of(root, "a-open")
    rollout.with_name("core").write_bytes(b"x")
    rollout.with_name("link").symlink_to("a-open")
    assert run("--repair")[0] == 0
    assert sorted(path.name for path in rollout.parent.iterdir()) == ["a-open"]
    assert sorted(path.name for path in root.glob("quarantine/*/moved/rollouts/*/*")) == ["core", "link"]
    assert entries_of(root, "a-open") == {"c0", "c1", "c2"}


def renamed_incarnation(rollout: Path) -> None:
    incarnation = one("*", rollout)
    incarnation.rename(incarnation.with_name(f"{incarnation.name}.bak"))


def renamed_snapshot(rollout: Path) -> None:
    one("*/v*", rollout).rename(one("*", rollout) / "v2.bak")


def snapshot_beside_its_incarnation(rollout: Path) -> None:
    one("*/v*", rollout).rename(rollout / "v2")


def incarnation_above_the_shards(rollout: Path) -> None:
    one("*", rollout).rename(rollout.parent.parent / one("*", rollout).name)


def renamed_incarnation_in_a_misplaced_rollout(rollout: Path) -> None:
    renamed_incarnation(rollout)
    rollout.rename(rollout.parent.parent / rollout.name)


@pytest.mark.parametrize(
    "change",
    [
        renamed_incarnation,
        renamed_snapshot,
        snapshot_beside_its_incarnation,
        incarnation_above_the_shards,
        renamed_incarnation_in_a_misplaced_rollout,
    ],
)
def test_records_under_a_name_that_nobody_reads_are_damage_and_stay(
    root: Path, run: Run, change: Callable[[Path], None]
) -> None:
    change(place_of(root, "b-frozen"))
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "left to you: " in out
        assert files_of(root) == before
        assert not (root / "quarantine").exists()


@pytest.mark.parametrize("name", ["000002.seg.bak", "000002", "old"])
def test_a_segment_under_a_name_that_nobody_reads_is_damage_and_stays(root: Path, run: Run, name: str) -> None:
    segment = max(place_of(root, "a-open").glob("*/*.seg"))  # nothing behind it says that it was there
    segment.rename(segment.with_name(name))
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "left to you: " in out
        assert files_of(root) == before


def test_whose_records_have_a_name_that_nobody_reads_is_told(root: Path, run: Run) -> None:
    renamed_snapshot(place_of(root, "b-frozen"))
    (finding,) = found_by(run, "b-*")
    assert (finding["level"], finding["kind"], finding["rollout_id"]) == ("damage", "wrong_shard", "b-frozen")
    assert "give it its name back" in finding["advice"]
    assert "give it its name back" in run("--repair", "b-*")[1]


def test_rollouts_in_each_others_places_go_back_as_these_become_free(root: Path, run: Run) -> None:
    whole, states = files_of(root), states_of(root)
    place_of(root, "c-retired").rename(root / "c")
    place_of(root, "b-frozen").rename(place_of(root, "c-retired"))
    place_of(root, "a-open").rename(place_of(root, "b-frozen"))
    (root / "rollouts" / "00").mkdir(mode=0o700)
    (root / "c").rename(root / "rollouts" / "00" / "c-retired")
    planned = [
        line.split("would have ")[1] for line in run("--repair", "--dry-run")[1].splitlines() if "would have " in line
    ]
    status, out, _ = run("--repair")
    assert status == 0, out
    assert "left to you" not in out
    assert [line for line in planned if line.startswith("put ")] == [
        line.strip() for line in out.splitlines() if line.strip().startswith("put ")
    ]
    assert states_of(root) == states
    now = files_of(root)
    assert {path: data for path, data in now.items() if path in whole} == whole


def test_a_tombstone_does_not_go_with_the_records_of_another_rollout(root: Path, run: Run) -> None:
    """Somebody moved an incarnation beside it: retired stays retired, and the other one doesn't become so."""
    incarnation, retired = one("*", place_of(root, "a-open")), place_of(root, "c-retired")
    incarnation.rename(retired / incarnation.name)
    before = files_of(root)
    for _ in range(2):
        status, out, _ = run("--repair")
        assert status == 1
        assert "its segments say another rollout" in out
        assert files_of(root) == before
        assert states_of(root)["c-retired"] == "retired"
        assert states_of(root).get("a-open", "absent") == "absent"
