"""`tokcap verify`, and what `--repair` does about what it finds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.damage import TRUNK, make_entry
from tests.damage_by_hand import (
    INCARNATION,
    flip,
    misplace,
    one,
    plant_file,
    rename_shard,
    replace_by_file,
    rewrite_manifest,
)
from tokcap.command import main
from tokcap.errors import RetiredError, TokcapError
from tokcap.store import FileStore
from tokcap.store.fence import lock, open_fence
from tokcap.store.files import Files
from tokcap.store.layout import Layout
from tokcap.verification import repair as repair_findings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An open rollout, a frozen one at version 2 with three segments, and a retired one."""
    root = tmp_path / "store"
    with FileStore(root, sweep_every_s=0, segment_bytes=500) as store:
        for name in ("a-open", "b-frozen", "c-retired"):
            for number in range(3):
                call, prompt = f"c{number}", [*TRUNK, *range(900, 900 + number)]
                store.begin_call_now(name, call)
                store.put_now(make_entry(name, call, prompt, [5, 6], output_items=[{"text": "x" * 300}]))
        store.freeze_now("b-frozen").close()
        store.settle_call_now("b-frozen", "late", "aborted")
        store.note_delivery_now("b-frozen", "c0", "full")
        with store.freeze_now("c-retired") as snapshot:
            store.retire_now("c-retired", snapshot_id=snapshot.snapshot_id, version=1)
    return root


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["verify", "--dir", str(root), *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def found_by(run: Run, *arguments: str) -> list[dict[str, Any]]:
    _, out, _ = run("--json", *arguments)
    return [line for line in map(json.loads, out.splitlines()) if "level" in line]


def files_of(root: Path) -> dict[str, bytes | None]:
    """Everything in the store but quarantine."""
    there = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in there.items()
        if not name.startswith("quarantine")
    }


def entries_of(root: Path, rollout_id: str) -> set[str]:
    with FileStore(root, read_only=True) as store, store.read_now(rollout_id) as snapshot:
        return {entry.model_call_id for entry in snapshot.entries}


# ---- looking


def test_whole_store_gives_a_summary_and_status_0(run: Run) -> None:
    status, out, err = run()
    assert (status, err) == (0, "")
    assert out.startswith("3 rollouts, ")
    assert out.endswith("0 damage, 0 warnings\n")


def test_json_has_one_finding_a_line_and_the_summary_last(run: Run, root: Path) -> None:
    break_range(root)
    status, out, _ = run("--json")
    *findings, last = map(json.loads, out.splitlines())
    assert status == 1
    assert last["summary"]["damage"] == 1
    (finding,) = findings
    assert (finding["level"], finding["kind"], finding["rollout_id"]) == ("damage", "bytes", "b-frozen")
    assert 0 < finding["offset"] < finding["end"]
    assert finding["calls"] == ["c1"]


def test_damage_is_said_in_a_row_with_what_is_lost(run: Run, root: Path) -> None:
    break_range(root)
    status, out, _ = run()
    rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert status == 1
    assert [row[:3] for row in rows] == [["LEVEL", "KIND", "ROLLOUT"], ["damage", "bytes", "b-frozen"]]
    assert "c1" in rows[1][7]


def test_warnings_count_only_with_strict_and_information_is_shown_with_all(run: Run, root: Path) -> None:
    plant_file(one("rollouts/*/a-open", root) / "core")
    plant_file(root / "notes.txt")
    assert run()[0] == 0
    assert run("--strict")[0] == 1
    assert "notes.txt" not in run()[1]
    assert "notes.txt" in run("--all")[1]


def test_hostile_names_do_not_reach_the_terminal(run: Run, root: Path) -> None:
    plant_file(one("rollouts/*/a-open", root) / "\x1b[2J\u202eevil\n")
    _, out, _ = run()
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "\\x1b[2J\\u202eevil\\n" in out


def test_globs_choose_and_what_is_not_there_is_status_3(run: Run, root: Path) -> None:
    break_range(root)
    assert run("a-*")[0] == 0
    assert run("b-frozen")[0] == 1
    status, _, err = run("nobody")
    assert status == 3
    assert "nobody" in err


def test_no_store_and_wrong_usage(tmp_path: Path, run: Run) -> None:
    assert main(["verify", "--dir", str(tmp_path / "nothing")]) == 3
    assert run("--dry-run")[0] == 2


# ---- repairing


def break_range(root: Path) -> None:
    """In the entry of c1."""
    path = one("rollouts/*/b-frozen/*/v2/000002-*.seg", root)
    flip(path, path.read_bytes().index(b"xxxx"))


def lose_segment(root: Path) -> None:
    one("rollouts/*/a-open/*/000002.seg", root).unlink()


def unsound_note(root: Path) -> None:
    note = one("rollouts/*/b-frozen/*", root) / "note-000007"
    plant_file(note)


def lose_marker_of_damage(root: Path) -> None:
    """The manifest is lost of a snapshot that was damaged when it was published."""
    break_range(root)
    with FileStore(root, sweep_every_s=0) as store:
        store.settle_call_now("b-frozen", "later", "aborted")
    flip(one("rollouts/*/b-frozen/*/v3/manifest", root), 60)


def break_both(root: Path) -> None:
    break_range(root)
    flip(one("rollouts/*/b-frozen/*/v2/manifest", root), 60)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def plant_everywhere(root: Path) -> None:
    for place in ("rollouts/*/a-open/*", "rollouts/*/a-open", "rollouts/*/b-frozen/*/v2", "rollouts", "writers"):
        plant_file(one(place, root) / "core")


def two_lives(root: Path) -> None:
    (one("rollouts/*/a-open", root) / INCARNATION).mkdir(mode=0o700)


def two_lives_and_a_stranger(root: Path) -> None:
    two_lives(root)
    plant_file(one("rollouts/*/a-open", root) / INCARNATION / "core")


def hide_damage(root: Path) -> None:
    """With everything in it that could be mended."""
    hidden = one("rollouts/*/c-retired", root) / INCARNATION
    shutil.copytree(one("rollouts/*/b-frozen/*", root), hidden)
    flip(hidden / "v2" / "manifest", 60)
    one("v2/000002-*.seg", hidden).unlink()
    plant_file(hidden / "v2" / "core")
    plant_file(hidden / "note-000007")
    plant_file(hidden / "v3")


def lose_manifest_and_spoil_link(root: Path) -> None:
    one("rollouts/*/b-frozen/*/v2/manifest", root).unlink()
    replace_by_directory(one("rollouts/*/b-frozen/*/v2/000002-*.seg", root))


REPAIRS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "damaged bytes": (break_range, {"known"}),
    "damaged bytes of an open rollout": (
        lambda root: flip(one("rollouts/*/a-open/*/000002.seg", root), 200),
        {"known"},
    ),
    "missing segment": (lose_segment, {"known"}),
    "note": (unsound_note, {"known"}),
    "manifest": (lambda root: flip(one("rollouts/*/b-frozen/*/v2/manifest", root), 60), set()),
    "no manifest": (lambda root: one("rollouts/*/b-frozen/*/v2/manifest", root).unlink(), set()),
    "directory instead of a manifest": (
        lambda root: replace_by_directory(one("rollouts/*/b-frozen/*/v2/manifest", root)),
        set(),
    ),
    "manifest that lies": (
        lambda root: rewrite_manifest(one("rollouts/*/b-frozen/*/v2/manifest", root), {"chosen": [0]}),
        set(),
    ),
    "manifest and bytes": (
        break_both,
        {"known"},
    ),
    "manifest of what was damaged before": (lose_marker_of_damage, {"known"}),
    "marker": (lambda root: flip(root / "FORMAT", 5), set()),
    "no marker": (lambda root: (root / "FORMAT").unlink(), set()),
    "second incarnation, empty": (two_lives, set()),
    "incarnation behind a tombstone": (
        lambda root: shutil.copytree(one("rollouts/*/a-open/*", root), one("rollouts/*/c-retired", root) / INCARNATION),
        set(),
    ),
    "second incarnation with a strange name in it": (two_lives_and_a_stranger, set()),
    "damaged incarnation behind a tombstone": (hide_damage, set()),
    "no manifest, and a directory instead of a link": (lose_manifest_and_spoil_link, {"known", "warning", "info"}),
    "strange names": (
        plant_everywhere,
        set(),
    ),
    "file instead of a rollout": (lambda root: replace_by_file(one("rollouts/*/a-open", root)), set()),
    "file instead of an incarnation": (lambda root: replace_by_file(one("rollouts/*/a-open/*", root)), set()),
    "file instead of a version": (lambda root: replace_by_file(one("rollouts/*/b-frozen/*/v2", root)), {"known"}),
    "wrong shard": (lambda root: misplace(one("rollouts/*/a-open", root), root), set()),
    "shard under another name": (lambda root: rename_shard(one("rollouts/*/a-open", root)), set()),
    "missing link": (lambda root: one("rollouts/*/b-frozen/*/v2/000002-*.seg", root).unlink(), set()),
}


@pytest.mark.parametrize("what", REPAIRS)
def test_what_is_repaired_is_found_no_more_or_known_and_the_store_goes_on(root: Path, run: Run, what: str) -> None:
    spoil, levels = REPAIRS[what]
    spoil(root)
    spoilt = files_of(root)
    before = found_by(run)
    assert before
    status, out, _ = run("--repair", "--dry-run")
    assert status == (1 if "damage" in {finding["level"] for finding in before} else 0)
    assert "would have " in out
    assert files_of(root) == spoilt
    assert not (root / "quarantine").exists()
    readable = {name: readable_of(root, name) for name in ("a-open", "b-frozen", "c-retired")}

    status, out, _ = run("--repair")

    assert status == 0, out
    assert {finding["level"] for finding in found_by(run)} == levels
    assert run()[0] == 0
    for name, (entries, incomplete) in readable.items():
        now, still = readable_of(root, name)
        assert now >= entries
        assert still or not incomplete or what == "missing link"
    assert_private(root / "quarantine")
    assert_nothing_lost(root, spoilt)
    live_on(root)
    assert {finding["level"] for finding in found_by(run)} <= {"known"}


def readable_of(root: Path, rollout_id: str) -> tuple[set[str], bool]:
    with FileStore(root, read_only=True) as store:
        try:
            with store.read_now(rollout_id) as snapshot:
                return {entry.model_call_id for entry in snapshot.entries}, snapshot.incomplete
        except TokcapError:
            return set(), False


def assert_private(quarantine: Path) -> None:
    assert quarantine.stat().st_mode & 0o777 == 0o700
    for folder in quarantine.iterdir():
        (note,) = folder.rglob("note.json")
        assert json.loads(note.read_text())["found"]
        assert (folder.stat().st_mode & 0o777, note.stat().st_mode & 0o777) == (0o700, 0o600)


def place_of(root: Path, rollout_id: str) -> str:
    return os.path.relpath(Layout(str(root)).rollout(rollout_id), root)


def assert_nothing_lost(root: Path, spoilt: dict[str, bytes | None]) -> None:
    """What is not in its place any more is in quarantine, byte for byte, or was put back into the right one."""
    kept = {path.read_bytes() for path in (root / "quarantine").rglob("*") if path.is_file()}
    if place_of(root, "a-open") not in spoilt:
        kept |= {path.read_bytes() for path in root.glob("rollouts/*/a-open/*/*") if path.is_file()}
    for name, data in spoilt.items():
        path = root / name
        if data is not None and not (path.is_file() and path.read_bytes() == data):
            assert data in kept, name


def live_on(root: Path) -> None:
    """Put, freeze, retire, reset and sweep, with a quarantine in the store."""
    with FileStore(root, sweep_every_s=0) as store:
        store.put_now(make_entry("a-open", "new", TRUNK, [1]))
        store.put_now(make_entry("d-new", "new", TRUNK, [1]))
        for name in ("a-open", "b-frozen"):
            with store.freeze_now(name) as snapshot:
                pair = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
            assert store.retire_now(name, **pair)  # type: ignore[arg-type]
        store.reset_now("d-new")
        assert dict(store.rollouts()) == dict.fromkeys(("a-open", "b-frozen", "c-retired"), "retired")
        assert store.sweep_now(0) == 3
        assert list(store.rollouts()) == []
    assert not any((root / "rollouts").glob("*/*"))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
def test_segment_without_link_and_manifest_is_lost_and_stays_where_it_is(
    root: Path, run: Run, number: int, late: bool
) -> None:
    """Nothing but the name of the segment says that the snapshot lacks it: that must not get lost, too."""
    name = "b-frozen" if late else "a-open"
    with FileStore(root, sweep_every_s=0) as store:
        store.freeze_now(name).close()
    snapshot = one(f"rollouts/*/{name}/*/v*", root)
    (snapshot / "manifest").unlink()
    one(f"{number:06d}-*.seg", snapshot).unlink()
    segment = one(f"{number:06d}.*", snapshot.parent)
    assert readable_of(root, name) == ({"c0", "c1", "c2"} - {f"c{number - 1}"}, True)
    for _ in range(2):
        assert run("--repair")[0] == 0
        assert readable_of(root, name) == ({"c0", "c1", "c2"} - {f"c{number - 1}"}, True)
        assert {(finding["level"], finding["kind"]) for finding in found_by(run)} == {("known", "missing")}
        assert segment.exists()


def test_missing_file_that_says_damage_beside_a_manifest_that_states_it_is_made_again(root: Path, run: Run) -> None:
    lose_marker_of_damage(root)
    assert run("--repair")[0] == 0
    marker = one("rollouts/*/b-frozen/*/v3/damaged", root)
    marker.unlink()
    (found,) = [finding for finding in found_by(run) if finding["level"] == "warning"]
    assert "it states damage, and the file is missing" in found["what"]
    assert "tokcap verify --repair makes the file again" in found["advice"]
    assert f"would have made {marker} again" in run("--repair", "--dry-run")[1]
    assert not marker.exists()
    assert f"made {marker} again" in run("--repair")[1]
    assert (marker.read_bytes(), marker.stat().st_mode & 0o777) == (b"", 0o600)
    assert {finding["level"] for finding in found_by(run)} == {"known"}


def test_file_that_says_damage_beside_a_manifest_that_states_none_is_left_to_the_user(root: Path, run: Run) -> None:
    marker = one("rollouts/*/b-frozen/*/v2", root) / "damaged"
    marker.touch(mode=0o600)
    (found,) = found_by(run)
    assert (found["level"], found["kind"]) == ("warning", "manifest")
    assert "it states no damage" in found["what"]
    assert "remove the file `damaged`" in found["advice"]
    status, out, _ = run("--repair")
    assert status == 0
    assert "left to you: " in out
    assert marker.exists()


@pytest.mark.parametrize("call", ["create", "fdatasync", "fsync_directory"])
def test_file_that_says_damage_is_not_left_half_made_on_a_failing_disk(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    lose_marker_of_damage(root)
    assert run("--repair")[0] == 0
    one("rollouts/*/b-frozen/*/v3/damaged", root).unlink()
    before = files_of(root)
    real = getattr(Files, call)
    calls = 0

    def failing(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(5, "Input/output error", str(arguments[0]))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, failing)
    for fail_at in range(1, 40):
        calls = 0
        if run("--repair")[0] == 0:
            break
        assert files_of(root) == before, fail_at
    assert 1 < fail_at < 39
    assert one("rollouts/*/b-frozen/*/v3/damaged", root).exists()


def test_two_incarnations_that_hold_records_are_left_to_the_user(root: Path, run: Run) -> None:
    mine = one("rollouts/*/a-open/*", root)
    other = "f" * 32
    with FileStore(root.parent / "other", sweep_every_s=0) as store:
        store.put_now(make_entry("a-open", "theirs", TRUNK, [1]))
        (theirs,) = (root.parent / "other").glob("rollouts/*/a-open/*")
        other = theirs.name
        shutil.copytree(theirs, mine.parent / other)
    for folder in (mine.parent / other,):
        folder.chmod(0o700)
    before = files_of(root)
    status, out, _ = run("--repair")
    assert status == 1
    assert "left to you" in out
    assert mine.name in out
    assert other in out
    assert files_of(root) == before


def test_damage_stays_known_when_the_rollout_is_frozen_and_new_damage_is_not(root: Path, run: Run) -> None:
    flip(one("rollouts/*/a-open/*/000002.seg", root), 200)
    assert run("--repair")[0] == 0
    with FileStore(root, sweep_every_s=0) as store:
        store.freeze_now("a-open").close()
    assert [finding["level"] for finding in found_by(run)] == ["known"]
    assert run("--repair")[0] == 0
    assert len(list((root / "quarantine").iterdir())) == 1, "what is known is noted once"
    flip(one("rollouts/*/a-open/*/v1/000003-*.seg", root), 200)
    assert {finding["level"] for finding in found_by(run)} == {"known", "damage"}
    assert run()[0] == 1


def test_damaged_link_of_a_copy_is_taken_from_its_whole_segment(root: Path, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    shutil.rmtree(root)
    shutil.move(copy, root)  # as cp -r makes it: links are files of their own
    link = one("rollouts/*/b-frozen/*/v2/000002-*.seg", root)
    whole = link.read_bytes()
    flip(link, whole.index(b"xxxx"))
    assert entries_of(root, "b-frozen") == {"c0", "c2"}
    assert run("--repair")[0] == 0
    assert link.read_bytes() == whole
    assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}
    assert found_by(run) == [finding for finding in found_by(run) if finding["kind"] in ("apart", "modes")]


def test_repair_that_would_lose_something_is_undone(root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(one("rollouts/*/b-frozen/*/v2/manifest", root), 60)
    plant_file(one("rollouts/*/b-frozen", root) / "core")
    before = files_of(root)
    monkeypatch.setattr(import_module("tokcap.verification.mending"), "gone", lambda *_: "a record could not be read")
    status, out, _ = run("--repair")
    assert status == 1
    assert "it was undone" in out
    assert files_of(root) == before
    assert not list(root.glob("quarantine/**/note.json"))


@pytest.mark.parametrize("call", ["rename", "link", "fdatasync", "fsync_directory", "create"])
def test_repair_on_a_failing_disk_is_undone_and_can_be_repeated(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call != "link":  # a link is made again only if there is a manifest to prove it
        flip(one("rollouts/*/b-frozen/*/v2/manifest", root), 60)
    one("rollouts/*/b-frozen/*/v2/000002-*.seg", root).unlink()
    plant_file(one("rollouts/*/b-frozen", root) / "core")
    before = files_of(root)
    real = getattr(Files, call)
    calls = 0

    def failing(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        names = [str(argument) for argument in arguments]
        inside = any("quarantine" in name or "b-frozen" in name for name in names) or call == "fdatasync"
        calls += inside
        if inside and calls == fail_at:
            raise OSError(5, "Input/output error", names[0])
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, failing)
    for fail_at in range(1, 40):
        calls = 0
        status, _, err = run("--repair", "b-frozen")
        if status == 0:
            break
        assert status == 4
        assert "Input/output error" in err
        assert files_of(root) == before, fail_at
    assert 1 < fail_at < 39
    assert entries_of(root, "b-frozen") >= {"c0"}


class _Crash(BaseException):
    """Nothing is undone, as if the process had been killed."""


@pytest.mark.parametrize("call", ["rename", "link", "create"])
def test_repair_that_dies_anywhere_is_finished_by_the_next_one(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    flip(one("rollouts/*/b-frozen/*/v2/manifest", root), 60)
    plant_file(one("rollouts/*/b-frozen", root) / "core")
    link = one("rollouts/*/a-open/*", root)
    with FileStore(root, sweep_every_s=0) as store:
        store.freeze_now("a-open").close()
    one("rollouts/*/a-open/*/v1/000002-*.seg", root).unlink()
    plant_file(link / "core")
    spoilt = files_of(root)
    subprocess.run(["cp", "-a", str(root), str(tmp_path / "kept")], check=True)
    real = getattr(Files, call)
    calls, die_at = 0, 1

    def dying(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == die_at:
            raise _Crash
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, dying)
    while True:
        shutil.rmtree(root)
        subprocess.run(["cp", "-a", str(tmp_path / "kept"), str(root)], check=True)
        calls = 0
        try:
            run("--repair")
            break
        except _Crash:
            calls = 1000
        assert run("--repair")[0] == 0
        assert {finding["level"] for finding in found_by(run)} <= {"info"}
        assert entries_of(root, "a-open") == entries_of(root, "b-frozen") == {"c0", "c1", "c2"}
        assert_nothing_lost(root, spoilt)
        die_at += 1
    assert die_at > 1


@pytest.mark.parametrize("call", ["rename", "link", "create", "fsync_directory"])
def test_frozen_rollout_never_looks_open_while_it_is_repaired(
    root: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    version = one("rollouts/*/b-frozen/*/v2", root)
    shutil.rmtree(version)
    plant_file(version)
    subprocess.run(["cp", "-a", str(root), str(tmp_path / "kept")], check=True)
    real = getattr(Files, call)
    calls = 0

    def dying(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == die_at:
            raise _Crash
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, dying)
    for die_at in range(1, 40):
        shutil.rmtree(root)
        subprocess.run(["cp", "-a", str(tmp_path / "kept"), str(root)], check=True)
        calls = 0
        try:
            run("--repair")
            break
        except _Crash:
            calls = 1000
        with FileStore(root, sweep_every_s=0) as store, pytest.raises(TokcapError):  # it is frozen, or can't be read
            store.put_now(make_entry("b-frozen", "after", TRUNK, [1]))
        assert run("--repair")[0] == 0
        assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}, die_at
    assert 1 < die_at < 39


@pytest.mark.parametrize("call", ["rename", "link", "create"])
def test_repair_of_a_version_that_is_no_directory_is_undone_on_a_failing_disk(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    version = one("rollouts/*/b-frozen/*/v2", root)
    shutil.rmtree(version)
    plant_file(version)
    before = files_of(root)
    real = getattr(Files, call)
    calls = 0

    def failing(self: Files, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(5, "Input/output error", str(arguments[0]))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Files, call, failing)
    for fail_at in range(1, 40):
        calls = 0
        if run("--repair")[0] == 0:
            break
        assert files_of(root) == before, fail_at
    assert 1 < fail_at < 39
    assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}


def test_retired_rollout_stays_retired_when_its_tombstone_is_no_directory(root: Path, run: Run) -> None:
    tombstone = one("rollouts/*/c-retired/*", root)
    incarnation, _, version, _ = tombstone.name.split(".")
    replace_by_file(tombstone)
    assert run("--repair")[0] == 0
    assert found_by(run) == []
    with FileStore(root, sweep_every_s=0) as store:
        with pytest.raises(RetiredError):
            store.put_now(make_entry("c-retired", "after", TRUNK, [1]))
        assert store.retire_now("c-retired", snapshot_id=incarnation, version=int(version))
        assert store.sweep_now(0) == 1


def test_repair_waits_for_whoever_holds_the_rollout(root: Path, run: Run) -> None:
    break_range(root)
    files = Files()
    fd = open_fence(files, str(one("rollouts/*/b-frozen", root)))
    assert fd is not None
    assert lock(files, fd)
    held: list[bool] = []

    def let_go() -> None:
        time.sleep(0.3)
        held.append((root / "quarantine").exists())
        files.close(fd)

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        assert run("--repair")[0] == 0
    finally:
        thread.join()
    assert held == [False]


def test_repair_is_refused_where_the_store_would_be(root: Path, run: Run, tmp_path: Path) -> None:
    break_range(root)
    before = files_of(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    assert main(["verify", "--dir", str(link), "--repair"]) == 4
    root.chmod(0o777)
    assert run("--repair")[0] == 4
    root.chmod(0o700)
    (root / "quarantine").symlink_to(tmp_path)
    assert run("--repair")[0] == 4
    (root / "quarantine").unlink()
    assert files_of(root) == before


def test_repair_of_other_rollouts_leaves_this_one(root: Path, run: Run) -> None:
    break_range(root)
    flip(one("rollouts/*/a-open/*/000002.seg", root), 200)
    before = files_of(root)
    run("--repair", "a-*")
    assert [path.name.partition("-")[2] for path in (root / "quarantine").iterdir()] == ["a-open"]
    assert files_of(root) == before
    assert run()[0] == 1


def test_repair_reads_before_it_believes(root: Path) -> None:
    """Findings of a check that is out of date repair nothing."""
    from tokcap.verification import check

    path = one("rollouts/*/b-frozen/*/v2/000002-*.seg", root)
    whole = path.read_bytes()
    break_range(root)
    findings = list(check(root))
    path.write_bytes(whole)
    assert list(repair_findings(root, findings)) == []
    assert not (root / "quarantine").exists()


def test_what_is_mended_since_the_check_is_not_moved_away(root: Path) -> None:
    from tokcap.verification import check

    shard = one("rollouts/*/b-frozen", root).parent
    shard.rename(root / "kept")
    plant_file(shard)
    plant_file(root / "writers" / "core")
    marker = (root / "FORMAT").read_bytes()
    flip(root / "FORMAT", 5)
    findings = list(check(root))
    assert {finding.kind for finding in findings} >= {"not_a_directory", "name", "marker"}
    shard.unlink()
    (root / "kept").rename(shard)
    (root / "writers" / "core").unlink()
    (root / "FORMAT").write_bytes(marker)
    assert list(repair_findings(root, findings)) == []
    assert not (root / "quarantine").exists()
    assert entries_of(root, "b-frozen") == {"c0", "c1", "c2"}
