"""Rows of many rollouts: right, whatever is kept of an earlier look, and whatever is wrong with one of them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import stat
import sys
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tokcap import FileStore, TokenEntry, build
from tokcap.inspection import (
    LOG_PROB_EDGES,
    RolloutRow,
    fingerprint,
    marks,
    row_of,
    rows,
    scan,
    unchanged,
    wanted_ids,
    workers,
)
from tokcap.inspection import cache as cache_module
from tokcap.inspection.cache import Kept, RowCache, cache_directory, decode_rows, encode_rows
from tokcap.inspection.keeping import kept_of
from tokcap.inspection.unchanged import Question
from tokcap.store.files import Files
from tokcap.store.frame import ACKNOWLEDGED

from .looked_at_stores import recorded_store


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept from another test, and changes need no two seconds to settle."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded") / "store"
    return recorded_store(directory)


def looking(directory: Path) -> FileStore:
    return FileStore(directory, read_only=True)


def entry(rollout_id: str, call: str, prompt: list[int], sampled: list[int], **fields: Any) -> TokenEntry:
    return TokenEntry(rollout_id, call, prompt, sampled, [-0.5] * len(sampled), **fields)


class Looks:
    """Counts the rollouts that are really looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[str] = []
        real = kept_of

        def counted(store: FileStore, rollout_id: str, whole: bool) -> Kept | None:
            self.ids.append(rollout_id)
            return real(store, rollout_id, whole)

        monkeypatch.setattr(workers, "kept_of", counted)

    def of(self, store: FileStore, **options: Any) -> list[str]:
        self.ids.clear()
        rows(store, **options)
        return sorted(self.ids)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


# ---- what a row says


def test_a_row_says_what_the_build_says(recorded: Path) -> None:
    store = looking(recorded)
    for row in rows(store):
        with store.read_now(row.rollout_id) as snapshot:
            built = build(snapshot)
            known = np.concatenate([one.generation_log_probs for one in snapshot.entries])
        assert row.state == "frozen" and row.version == 1 and row.finished
        assert {name: row.metrics.get(name, 0) for name in built.metrics} == built.metrics
        assert row.reasons == built.reasons and row.masked == (built.masked and built.metrics["sampled"] > 0)
        assert row.calls == built.metrics["calls"] == sum(row.outcomes.values())
        assert sum(row.policy_versions.values()) == row.sampled
        edges = [*LOG_PROB_EDGES, float("inf")]
        inside = [int(((known >= low) & (known < high)).sum()) for low, high in pairwise(edges)]
        assert list(row.log_probs) == inside


def test_policy_versions_count_ids_and_what_no_engine_told(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "a", [1], [2, 3, 4], policy_versions=[("7", 0, 2)]))
        store.put_now(entry("r", "b", [9], [5], model="other"))
        row = row_of(store, "r")
    assert row.policy_versions == {"": 2, "7": 2}
    assert row.models == ("", "other")


def test_sizes_count_each_file_once(recorded: Path) -> None:
    store = looking(recorded)
    for row in rows(store):
        told = store.stat_now(row.rollout_id)
        assert (row.files, row.bytes) == (told.files, told.bytes)
        folder = next(recorded.glob(f"rollouts/*/{row.rollout_id}"))
        newest = max(os.lstat(path).st_mtime for path in [folder, *folder.rglob("*")])
        assert row.changed_at == pytest.approx(newest)


def test_what_a_crash_left_is_counted_apart(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "a", [1], [2]))
        store.freeze_now("r").close()
    incarnation = next(store_dir.glob("rollouts/*/r/*"))
    (incarnation / "tmp-0123456789abcdef").mkdir()
    (incarnation / "tmp-0123456789abcdef" / "manifest").write_bytes(b"x" * 100)
    os.link(next(incarnation.glob("v1/*.seg")), incarnation / "tmp-0123456789abcdef" / "000001-64.seg")
    row = row_of(looking(store_dir), "r")
    assert row.leftover == 100
    assert row.bytes == looking(store_dir).stat_now("r").bytes


def test_old_versions_and_trash_are_left_and_what_they_share_is_not(store_dir: Path, looks: Looks) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "a", [1], [2]))
        store.freeze_now("r").close()
    (incarnation,) = store_dir.glob("rollouts/*/r/*")
    row = row_of(looking(store_dir), "r")
    (incarnation / "v1").rename(incarnation / "v10")
    shutil.copytree(incarnation / "v10", incarnation / "v9", copy_function=os.link)
    (incarnation / "v9" / "manifest").unlink()
    (incarnation / "v9" / "manifest").write_bytes(b"x" * 7)
    trash = incarnation.parent / f"{'0' * 32}.trash"
    (trash / "v1").mkdir(parents=True)
    (trash / "v1" / "000001-5.seg").write_bytes(b"12345")
    again = row_of(looking(store_dir), "r")
    assert (again.state, again.version, again.leftover, again.bytes) == ("frozen", 10, 12, row.bytes + 12)
    assert looks.of(looking(store_dir)) == ["r"]
    assert looks.of(looking(store_dir)) == []
    shutil.rmtree(trash)
    assert looks.of(looking(store_dir)) == ["r"]
    assert rows(looking(store_dir))[0].leftover == 7


def test_an_empty_snapshot_is_kept_and_seen_to_change(store_dir: Path, looks: Looks) -> None:
    with FileStore(store_dir) as store:
        store.freeze_now("r").close()
        assert [row.state for row in rows(store)] == ["frozen"]
        assert looks.of(store) == []
        store.mark_incomplete_now("r", "late")
        assert looks.of(store) == ["r"]
        assert rows(store) == rows(store, remember=False)


@pytest.mark.parametrize("text", ["\ud800", "é", "\x1b[31m"])
def test_any_text_of_a_store_can_be_kept_and_shown(store_dir: Path, text: str) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "a", [1], [2], model=text, sampling={"logprobs_mode": text}))
        store.finish_now("r", meta={"group": text})
        first = rows(store)
        assert rows(store) == first
    assert msgspec.json.decode(msgspec.json.encode(first[0]))["group"] == first[0].group


# ---- what can't be read


def test_what_cannot_be_read_is_shown_and_stops_nothing(recorded: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(recorded, directory)
    twice = next(directory.glob("rollouts/*/linear-0/*"))
    shutil.copytree(twice, twice.parent / ("0" * 32))
    stream = next(directory.glob("rollouts/*/stream-0"))
    shutil.rmtree(stream)
    stream.write_text("a file")
    edges = next(directory.glob("rollouts/*/edges-0"))
    shard = edges.parent
    (shard / "-no id").mkdir()
    (shard / "caf\udce9").mkdir()
    (directory / "rollouts" / "00").mkdir(exist_ok=True)
    shutil.move(edges, directory / "rollouts" / "00" / "edges-0")
    found = {row.rollout_id: row for row in rows(looking(directory))}
    wrong = {name: row.error for name, row in found.items() if row.state == "unreadable"}
    assert set(wrong) == {"linear-0", "stream-0", "-no id", "caf\\udce9", "edges-0"}
    assert "two incarnations" in wrong["linear-0"] and "belongs into" in wrong["edges-0"]
    assert len(found) == 27
    assert all(row.state == "frozen" for name, row in found.items() if name not in wrong)


def test_a_directory_without_permission_is_unreadable(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Files.listdir

    def listdir(files: Files, path: str) -> list[str]:
        if path.endswith("/linear-0"):
            raise PermissionError(13, "Permission denied", path)
        return real(files, path)

    monkeypatch.setattr(Files, "listdir", listdir)
    (row,) = [row for row in rows(looking(recorded)) if row.state != "frozen"]
    assert (row.rollout_id, row.state) == ("linear-0", "unreadable")
    assert "its owner or its mode forbids it" in row.error
    monkeypatch.undo()
    assert all(row.state == "frozen" for row in rows(looking(recorded)))  # what fails is not kept


def test_a_shard_that_cannot_be_listed_is_shown(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = next(recorded.glob("rollouts/*/linear-0")).parent
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if path == str(shard):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    found = rows(looking(recorded))
    assert [(row.rollout_id, row.state) for row in found if row.state != "frozen"] == [(f"{shard.name}/", "unreadable")]
    with pytest.raises(OSError, match="can't list rollouts"):
        wanted_ids(looking(recorded))


def test_what_vanishes_meanwhile_has_no_row(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(store_dir) as store:
        for name in ("a", "b", "c"):
            store.put_now(entry(name, "call", [1], [2]))
        real = scan._listed

        def listed(*arguments: Any) -> Any:
            found = real(*arguments)
            store.reset_now("b")
            shutil.rmtree(next(store_dir.glob("rollouts/*/c")))
            return found

        monkeypatch.setattr(scan, "_listed", listed)
        assert [row.rollout_id for row in rows(store)] == ["a"]


def test_globs_name_what_is_meant(recorded: Path) -> None:
    store = looking(recorded)
    assert wanted_ids(store, ["linear-*", "edges-0", "no-such"]) == ["edges-0", *(f"linear-{n}" for n in range(6))]
    assert wanted_ids(store, ["linear-0", "no-such"]) == ["linear-0"]
    assert wanted_ids(store, ["linear-[01]"]) == ["linear-0", "linear-1"]
    assert len(wanted_ids(store)) == len(wanted_ids(store, ["*"])) == 25
    assert [row.rollout_id for row in rows(store, ["linear-[01]"])] == ["linear-0", "linear-1"]


# ---- what is kept


def test_what_is_kept_says_the_same(recorded: Path, looks: Looks) -> None:
    store = looking(recorded)
    fresh = rows(store, remember=False)
    assert len(looks.of(store)) == 25
    assert looks.of(store) == []
    assert rows(store) == fresh
    assert len(looks.of(store, remember=False)) == 25


def test_every_field_of_a_row_comes_back(recorded: Path) -> None:
    store = looking(recorded)
    made = [Kept(index + 1, f"folder {index}", "a|b", row) for index, row in enumerate(rows(store))]
    full = RolloutRow(
        "r", "unreadable", "f" * 32, 3, 1.5, True, "group", 4, 5, 6, 7, {"lost": 7}, True, ("here", "there"), 1, 2,
        ("one", "two"), True, ("ambiguous",), {"sampled": 3, "replay_factor": 1.5, "log_prob_modes": {"raw": 1}},
        {"": 1}, tuple(range(len(LOG_PROB_EDGES))), "error",
    )  # fmt: skip
    assert all(getattr(full, field.name) != field.default for field in msgspec.structs.fields(RolloutRow))
    made.append(Kept(-5, "", "", full))
    assert list(decode_rows(encode_rows(made))) == made


def change_put(store: FileStore) -> None:
    store.put_now(entry("r", "second", [1, 2, 3], [4]))


def change_begin(store: FileStore) -> None:
    store.begin_call_now("r", "second")


def change_finish(store: FileStore) -> None:
    store.finish_now("r", meta={"group": "other"})


def change_freeze(store: FileStore) -> None:
    store.freeze_now("r").close()


def change_retire(store: FileStore) -> None:
    with store.freeze_now("r") as snapshot:
        assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def change_reset(store: FileStore) -> None:
    store.reset_now("r")


def change_reset_and_put(store: FileStore) -> None:
    store.reset_now("r")
    store.put_now(entry("r", "first", [1], [2, 3]))


@pytest.mark.parametrize(
    "change",
    [change_put, change_begin, change_finish, change_freeze, change_retire, change_reset, change_reset_and_put],
)
def test_a_changed_rollout_is_looked_at_again(store_dir: Path, looks: Looks, change: Any) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        store.put_now(entry("other", "first", [1], [2, 3]))
        rows(store)
        assert looks.of(store) == []
        change(store)
        assert "other" not in looks.of(store)
        assert rows(store) == rows(store, remember=False)


@pytest.mark.parametrize("late", ["mark", "delivery", "retired"])
def test_what_is_said_after_the_freeze_shows(store_dir: Path, looks: Looks, late: str) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        store.freeze_now("r").close()
        if late == "retired":
            change_retire(store)
        before = rows(store)
        assert looks.of(store) == []
        if late == "delivery":
            store.note_delivery_now("r", "first", "full")
        else:
            store.mark_incomplete_now("r", "second")
        assert looks.of(store) == ["r"]
        after = rows(store)
        assert after == rows(store, remember=False) != before
        assert after[0].late == (0 if late == "mark" else 1)


@pytest.mark.parametrize("where", ["manifest", "*.seg", "note-000001"])
def test_a_flipped_byte_shows_though_size_and_time_are_put_back(store_dir: Path, where: str) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        store.freeze_now("r").close()
        store.note_delivery_now("r", "first", "full")
    store = looking(store_dir)
    assert rows(store)[0].damage == ()
    path = next(store_dir.glob(f"rollouts/*/r/*/**/{where}"))
    there = path.stat()
    data = bytearray(path.read_bytes())
    data[min(len(data) // 2, 200)] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))
    assert path.stat().st_size == there.st_size and path.stat().st_mtime_ns == there.st_mtime_ns
    assert rows(store) == rows(store, remember=False)
    assert bool(rows(store)[0].damage) == (where != "manifest")  # a manifest is made again from the segments


def test_a_removed_or_added_file_shows(recorded: Path, tmp_path: Path, looks: Looks) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(recorded, directory)
    store = looking(directory)
    rows(store)
    next(directory.glob("rollouts/*/linear-0/*/v1/*.seg")).unlink()
    (next(directory.glob("rollouts/*/linear-1/*")) / "note-000001").write_bytes(b"nonsense")
    (next(directory.glob("rollouts/*/linear-2")) / ("0" * 32)).mkdir()
    assert looks.of(store) == ["linear-0", "linear-1", "linear-2"]
    found = {row.rollout_id: row for row in rows(store)}
    assert found["linear-0"].damage and found["linear-1"].damage and found["linear-2"].state == "unreadable"


def test_damage_is_no_call_and_hides_no_call_that_is_lost_without_a_name(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        for call in ("a", "b"):
            store.put_now(entry("r", call, [1], [2, 3]))
        store.mark_incomplete_now("r")
        store.freeze_now("r").close()
        (before,) = rows(store)
    (segment,) = store_dir.glob("rollouts/*/r/*/v1/*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(b"b", data.index(ACKNOWLEDGED))] ^= 1  # in the record of the second call
    with segment.open("r+b") as file:
        file.write(data)
    (after,) = rows(looking(store_dir))
    assert (before.calls, before.outcomes) == (3, {"lost": 1, "recorded": 2})
    assert after.damage and (after.calls, after.outcomes) == (2, {"lost": 1, "recorded": 1})


def test_what_changed_just_now_is_not_trusted(store_dir: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        monkeypatch.setattr(fingerprint, "_SETTLED_NS", 3600 * 10**9)  # all of it was just now
        assert looks.of(store) == looks.of(store) == ["r"]
        monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
        assert looks.of(store) == ["r"]
        assert looks.of(store) == []


def test_times_in_the_future_are_no_reason_to_look_again(
    store_dir: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        monkeypatch.setattr(fingerprint, "_SETTLED_NS", 2 * 10**9)
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)  # the clock was set back
        assert looks.of(store) == ["r"]
        assert looks.of(store) == []


def test_another_store_in_its_place_is_not_mistaken(recorded: Path, tmp_path: Path, looks: Looks) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    shutil.copytree(recorded, one)
    shutil.copytree(recorded, other)
    rows(looking(one))
    one.rename(tmp_path / "away")
    other.rename(one)
    assert len(looks.of(looking(one))) == 25


def files_of(cache: Path) -> list[Path]:
    return sorted((cache / "tokcap").iterdir())


def test_the_cache_is_private_and_nothing_is_written_into_the_store(recorded: Path, own_cache: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in recorded.rglob("*")}
    rows(looking(recorded))
    assert {path: path.lstat().st_mtime_ns for path in recorded.rglob("*")} == before
    (file,) = files_of(own_cache)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "nonsense", "link", "directory", "longer"])
def test_a_damaged_cache_is_made_anew(recorded: Path, own_cache: Path, looks: Looks, damage: str) -> None:
    store = looking(recorded)
    right = rows(store)
    (file,) = files_of(own_cache)
    data = bytearray(file.read_bytes())
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "flipped":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    elif damage == "nonsense":
        file.write_bytes(os.urandom(5000))
    elif damage == "longer":
        file.write_bytes(data + b"\0")
    else:
        file.unlink()
        if damage == "directory":
            file.mkdir()
        else:
            file.symlink_to(recorded / "FORMAT")
    assert rows(store) == right
    assert rows(store) == right
    assert looks.of(store) == ([] if damage != "directory" else sorted(row.rollout_id for row in right))
    assert (recorded / "FORMAT").stat().st_size < 100


def test_each_bit_of_the_cache_may_be_wrong(store_dir: Path, own_cache: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "first", [1], [2, 3]))
        right = rows(store)
        (file,) = files_of(own_cache)
        data = file.read_bytes()
        for position in range(len(data)):
            wrong = bytearray(data)
            wrong[position] ^= 1 << position % 8
            file.write_bytes(wrong)
            found = RowCache(str(store_dir))
            found.load()
            assert found.rows == {}
        assert rows(store) == right


@pytest.mark.parametrize("place", ["a file", "nowhere", "relative"])
def test_without_a_place_for_the_cache_it_goes_without(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", {"a file": str(blocked), "nowhere": "/proc/no", "relative": "here"}[place])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert len(rows(looking(recorded))) == 25
    assert cache_directory() == (
        str(tmp_path / "home/.cache/tokcap") if place == "relative" else f"{os.environ['XDG_CACHE_HOME']}/tokcap"
    )
    assert not Path("here").exists()


def test_the_rows_of_another_version_are_not_taken(
    recorded: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = looking(recorded)
    rows(store)
    monkeypatch.setattr(cache_module, "__version__", "0.0.0.other")
    assert len(looks.of(store)) == 25
    assert looks.of(store) == []


def test_what_another_boot_believes_of_an_open_rollout_is_looked_at_again(
    store_dir: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without its trailer counts only once the machine was started anew, though no file changes for that."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            dying = FileStore(store_dir)
            for call in ("a", "b"):
                dying.put_now(entry("r", call, [1], [2, 3]))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with FileStore(store_dir) as store:
        store.put_now(entry("frozen", "a", [1], [2, 3]))
        store.freeze_now("frozen").close()
    (segment,) = store_dir.glob("rollouts/*/r/*/*.open")
    data = segment.read_bytes()
    end = data.rindex(ACKNOWLEDGED)
    segment.write_bytes(data[:end] + bytes(len(ACKNOWLEDGED)) + data[end + len(ACKNOWLEDGED) :])
    before = rows(looking(store_dir))
    assert looks.of(looking(store_dir)) == []
    assert [row.calls for row in before] == [1, 1]
    monkeypatch.setattr("tokcap.store.base.boot_id", lambda: "00000000-0000-4000-8000-000000000000")
    assert looks.of(looking(store_dir)) == ["r"]
    after = rows(looking(store_dir))
    assert after == rows(looking(store_dir), remember=False) != before
    assert [row.calls for row in after] == [1, 2]
    assert looks.of(looking(store_dir)) == []


def test_an_interrupted_look_keeps_what_it_did(recorded: Path, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_AT_ONCE", 5)

    def stop(done: int, of: int) -> None:
        if done >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows(looking(recorded), progress=stop)
    assert len(looks.of(looking(recorded))) == 15


def test_what_is_new_is_appended_and_what_is_gone_is_dropped(
    store_dir: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_WASTE", 4)
    with FileStore(store_dir) as store:
        names = [f"r-{number}" for number in range(20)]
        for name in names:
            store.put_now(entry(name, "first", [1], [2, 3]))
        rows(store)
        (file,) = files_of(own_cache)
        inode, size = file.stat().st_ino, file.stat().st_size
        store.put_now(entry("r-0", "second", [7], [8]))
        found = rows(store)
        assert file.stat().st_ino == inode and file.stat().st_size > size
        assert rows(store) == found
        store.reset_now(*names[2:])
        assert [row.rollout_id for row in rows(store)] == ["r-0", "r-1"]
        assert file.stat().st_size < size
        assert [row.rollout_id for row in rows(store)] == ["r-0", "r-1"]


def test_two_may_look_at_once(recorded: Path) -> None:
    right = rows(looking(recorded), remember=False)
    found: list[list[RolloutRow]] = []
    threads = [threading.Thread(target=lambda: found.append(rows(looking(recorded)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [right] * 4
    assert rows(looking(recorded)) == right


def test_a_look_without_builds_takes_what_is_kept_and_keeps_nothing(recorded: Path, looks: Looks) -> None:
    store = looking(recorded)
    quick = rows(store, whole=False)
    assert all(row.calls and not row.metrics and not row.log_probs for row in quick)
    assert len(looks.of(store)) == 25
    assert all(row.metrics for row in rows(store, whole=False))
    assert looks.of(store) == []


# ---- several processes


def test_several_processes_find_the_same(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_AT_ONCE", 4)
    store = looking(recorded)
    told: list[tuple[int, int]] = []
    one = rows(store, remember=False)
    several = rows(store, remember=False, workers=2, progress=lambda done, of: told.append((done, of)))
    assert several == one
    assert told[-1] == (25, 25)


def test_processes_that_die_leave_their_work_to_this_one(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_AT_ONCE", 4)
    real = workers._receive

    def receive(pipe: Any) -> bytes | None:
        real(pipe)
        return None

    monkeypatch.setattr(workers, "_receive", receive)
    store = looking(recorded)
    assert rows(store, remember=False, workers=2) == rows(store, remember=False)


def test_no_process_stays_when_a_look_is_interrupted(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_AT_ONCE", 4)
    started = []
    real = workers._started

    def remembered(directory: str) -> Any:
        process = real(directory)
        started.append(process)
        return process

    monkeypatch.setattr(workers, "_started", remembered)

    def stop(done: int, of: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rows(looking(recorded), remember=False, workers=2, progress=stop)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


# ---- two processes


@pytest.fixture
def questions(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """What is asked of every rollout of a store that nobody changes, and of some that are not what they were."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 0)
    rollouts = os.open(recorded / "rollouts", os.O_RDONLY | os.O_DIRECTORY)
    try:
        paths = sorted(path.relative_to(recorded / "rollouts").as_posix() for path in recorded.glob("rollouts/*/*"))
        seen = [(path, fingerprint.see(rollouts, path)) for path in paths]
    finally:
        os.close(rollouts)
    right = [(path, one.mark, one.folder, one.names) for path, one in seen]
    wrong = [(path, mark ^ 1, folder, names) for path, mark, folder, names in right[:3]]
    return [*right, *wrong, ("00/nobody", 1, "", ""), ("00/n\u00f6body", 1, "", "")]


def answers(directory: Path, asked: list[Question]) -> list[bool]:
    return unchanged.are_unchanged(f"{directory}/rollouts", asked)


@pytest.mark.parametrize("worth", [1, 10**9])
def test_two_processes_find_what_one_finds(
    recorded: Path, questions: list[Question], worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "_WORTH_A_PROCESS", worth)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    asked = questions[:-1]  # the last one has a name that is only looked at here
    assert answers(recorded, asked) == [True] * 25 + [False] * 4
    assert answers(recorded, asked[::-1]) == [False] * 4 + [True] * 25
    assert answers(recorded, questions) == [True] * 25 + [False] * 5


@pytest.mark.parametrize("program", ["", "raise SystemExit('no')", "print(end='1')", "import os; os.close(0)"])
def test_what_the_other_process_does_not_answer_is_looked_at_here(
    recorded: Path,
    questions: list[Question],
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(unchanged, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    (tmp_path / "other.py").write_text(program)
    expected = answers(recorded, questions)
    monkeypatch.setattr(marks, "__file__", str(tmp_path / "other.py"))
    assert answers(recorded, questions) == expected
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    assert answers(recorded, questions) == expected
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


@pytest.mark.usefixtures("two_processes")
def test_a_process_that_is_forked_meanwhile_and_lives_on_is_not_waited_for(
    recorded: Path, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has whatever was open when another thread forked it."""
    release, held = os.pipe()
    real = os.posix_spawn
    forked: list[int] = []

    def spawn(*arguments: Any, **options: Any) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
            process = os.fork()
        if not process:
            os.close(held)
            select.select([release], [], [], 10)
            os._exit(0)
        forked.append(process)
        return real(*arguments, **options)

    monkeypatch.setattr(os, "posix_spawn", spawn)
    assert answers(recorded, questions[:-1]) == [True] * 25 + [False] * 4
    assert os.waitpid(forked[0], os.WNOHANG) == (0, 0)
    os.close(held)
    os.waitpid(forked[0], 0)
    os.close(release)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("program", ["", None])
def test_the_other_process_is_not_killed_if_the_kernel_collected_it(
    recorded: Path, questions: list[Question], program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be somebody else's by then."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(process))
    if program is not None:
        (tmp_path / "other.py").write_text(program)
        monkeypatch.setattr(marks, "__file__", str(tmp_path / "other.py"))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert answers(recorded, questions[:-1]) == [True] * 25 + [False] * 4
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert killed == []


@pytest.mark.usefixtures("two_processes")
def test_the_other_process_ends_if_this_one_is_interrupted(
    recorded: Path, questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_spawn
    begun: list[int] = []

    def spawn(*arguments: Any, **options: Any) -> int:
        begun.append(real(*arguments, **options))
        return begun[0]

    def interrupted(*arguments: object) -> bool:
        raise KeyboardInterrupt

    (tmp_path / "other.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(marks, "__file__", str(tmp_path / "other.py"))
    monkeypatch.setattr(os, "posix_spawn", spawn)
    monkeypatch.setattr(unchanged, "is_unchanged", interrupted)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        answers(recorded, questions[:-1])
    with pytest.raises(ChildProcessError):
        os.waitpid(begun[0], os.WNOHANG)
    assert os.listdir("/proc/self/fd") == open_before
