"""Checking a store: every flipped bit is found, every name that doesn't belong, and nothing that is as it should be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.damage import FROZEN, OPEN, RETIRED, TRUNK, Golden, Tree, build_store, make_entry, write_tree
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
from tests.looked_at_stores import recorded_store
from tokcap.errors import NewerFormatError, StoreNotFoundError
from tokcap.store import FileStore
from tokcap.store.files import Files
from tokcap.store.frame import ACKNOWLEDGED, SPACE, Kind
from tokcap.store.unread import changed_space
from tokcap.verification import CheckSummary, Finding, check
from tokcap.verification.checking import _checked_together, check_place

Store = tuple[dict[str, Golden], Tree]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(tmp_path_factory.mktemp("golden") / "store")


@pytest.fixture
def copied(golden: Store, tmp_path: Path) -> Path:
    """An open rollout as a killed writer left it, a frozen one at version 2, a retired one; every name its own file."""
    goldens, rest = golden
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    (root / "rollouts").mkdir()
    for tree in (rest, goldens["open"].tree, goldens["frozen"].tree, goldens["retired"].tree):
        write_tree(root, tree)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o700)
    return root


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two calls of an open and of a frozen rollout, the second prompt building on the first, and a retired one."""
    root = tmp_path / "small"
    with FileStore(root, sweep_every_s=0) as store:
        for name in ("a-open", "b-frozen", "c-retired"):
            for call, prompt in (("c0", TRUNK), ("c1", [*TRUNK, 5, 6, 9])):
                store.begin_call_now(name, call)
                store.put_now(make_entry(name, call, prompt, [5, 6]))
        store.freeze_now("b-frozen").close()
        with store.freeze_now("c-retired") as snapshot:
            store.retire_now("c-retired", snapshot_id=snapshot.snapshot_id, version=1)
    return root


def found_in(root: Path, *globs: str, **options: bool) -> list[Finding]:
    return list(check(root, globs, **options))  # type: ignore[arg-type]


def troubles(root: Path) -> list[Finding]:
    return [finding for finding in found_in(root) if finding.level != "info"]


# ---- what is as it should be


def test_recorded_store_has_nothing_wrong_and_every_byte_of_it_is_counted(tmp_path: Path) -> None:
    root = recorded_store(tmp_path / "s")
    summary = CheckSummary()
    assert list(check(root, summary=summary)) == []
    files = {path.stat().st_ino: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    assert (summary.rollouts, summary.files, summary.bytes) == (25, len(files), sum(files.values()))
    assert summary.frames > 300


def test_copy_of_a_live_store_has_only_what_is_for_information(copied: Path) -> None:
    found = found_in(copied)
    assert {(finding.level, finding.kind) for finding in found} == {("info", "torn"), ("info", "apart")}


def test_killed_writer_leaves_nothing_wrong(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom tokcap import FileStore, TokenEntry\ns = FileStore(sys.argv[1])\n"
        "s.begin_call_now('r', 'c0')\ns.put_now(TokenEntry('r', 'c0', [1, 2], [3], [-0.5]))\n"
        "s.begin_call_now('r', 'c1')\nos.kill(os.getpid(), 9)"
    )
    root = tmp_path / "s"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", script, str(root)], env=environment, check=False).returncode == -9
    assert troubles(root) == []


def test_store_that_is_in_use_gives_no_false_alarm(tmp_path: Path) -> None:
    root = tmp_path / "live"
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with FileStore(root, segment_bytes=600, sweep_every_s=0) as store:
                turn = 0
                while not stop.is_set():
                    name, turn = f"r{number}-{turn % 3}", turn + 1
                    for call in range(4):
                        store.begin_call_now(name, f"c{turn}-{call}")
                        store.put_now(make_entry(name, f"c{turn}-{call}", [*TRUNK, turn, call], [1, 2]))
                    store.freeze_now(name).close()
                    store.settle_call_now(name, "late", "aborted")
                    with store.freeze_now(name) as snapshot:
                        store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
                    store.reset_now(name)
                    store.sweep_now(0)
        except BaseException as error:
            failures.append(error)

    FileStore(root).close_now()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        checked, alarms = 0, []
        while checked < 300 and not failures:
            summary = CheckSummary()
            # What changed at each of twenty looks is said to, and is no alarm.
            alarms += [f for f in check(root, summary=summary) if f.level != "info" and f.kind != "unreadable"]
            checked += summary.rollouts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert alarms == []


class Racing(Files):
    """Files of which the first `times` reads miss what another process is just writing."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def read(self, fd: int, length: int, offset: int) -> bytes:
        data = super().read(fd, length, offset)
        entry = data.find(b"c0", data.find(b"c0") + 1)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".seg") and entry > 0 and self.times > 0:
            self.times -= 1
            return data[: entry - 16] + bytes(32) + data[entry + 16 :]
        return data


@pytest.mark.parametrize("times, kinds", [(1, []), (1000, ["bytes"])])
def test_what_only_one_look_shows_is_not_believed(small: Path, times: int, kinds: list[str]) -> None:
    place = msgspec.structs.replace(check_place(small), files=Racing(times))
    assert [finding.kind for finding in place.rollouts().check("b-frozen").findings] == kinds


# ---- every bit


def files_of(root: Path) -> list[Path]:
    """Each file once, however many names it has."""
    by_inode = {path.stat().st_ino: path for path in sorted(root.rglob("*")) if path.is_file()}
    return sorted(by_inode.values())


def missed_flips(root: Path, places: Callable[[Path, int], Iterator[tuple[int, int]]]) -> list[tuple[str, int, int]]:
    """Bits whose flip the check does not find, or finds elsewhere."""
    before = set(map(str, found_in(root)))
    missed = []
    for path in files_of(root):
        for at, bit in places(path, path.stat().st_size):
            flip(path, at, bit)
            fresh = [finding for finding in found_in(root) if str(finding) not in before and finding.level != "info"]
            flip(path, at, bit)
            if not any(finding.end == 0 or finding.offset <= at < finding.end for finding in fresh):
                missed.append((str(path.relative_to(root)), at, bit))
    return missed


def torn_bytes(root: Path) -> set[tuple[str, int]]:
    torn = [finding for finding in found_in(root) if finding.kind == "torn"]
    return {(os.path.relpath(f.path, root), at) for f in torn for at in range(f.offset, f.end)}


@pytest.mark.parametrize("step", [53, pytest.param(1, marks=pytest.mark.torture)])
def test_any_flipped_bit_of_any_file_is_found_but_in_a_torn_tail(copied: Path, step: int) -> None:
    def places(path: Path, size: int) -> Iterator[tuple[int, int]]:
        start = sum(map(ord, path.name)) % step
        for at in range(start, size, step):
            yield from ((at, bit) for bit in (range(8) if step == 1 else (at // step % 8,)))

    missed = missed_flips(copied, places)
    assert {(path, at) for path, at, _ in missed} <= torn_bytes(copied)


def test_flipped_bits_of_headers_of_every_kind_of_file_are_found_in_linked_files(small: Path) -> None:
    assert missed_flips(small, lambda path, size: ((at, at % 8) for at in range(min(size, 40)))) == []


def test_damage_and_bytes_without_meaning_are_told_apart(golden: Store, copied: Path) -> None:
    goldens, _ = golden
    frozen = goldens["frozen"]
    path = frozen.segments()[0]
    entry = next(frame for frame in frozen.frames_of(path) if frame.kind == Kind.ENTRY)
    for at in (entry.offset, entry.body_end - 1):
        flip(copied / path, at)
        assert {f.level for f in troubles(copied) if f.offset <= at < f.end and f.path.endswith(path)} == {"damage"}
        flip(copied / path, at)
    trailer = entry.batch_end
    assert (copied / path).read_bytes()[trailer : trailer + 8] == ACKNOWLEDGED
    flip(copied / path, trailer + 3)
    (finding,) = (f for f in troubles(copied) if f.path.endswith(path))
    assert (finding.level, finding.kind, finding.offset) == ("warning", "meaningless", trailer)


def test_changed_trailer_behind_a_copied_segment_is_found(copied: Path) -> None:
    """Behind the bytes that are the snapshot's, too, a segment and the copies of its links are the same."""
    link = one("rollouts/*/rollout-frozen/*/v2/000001-*.seg", copied)
    segment = one("rollouts/*/rollout-frozen/*/000001.seg", copied)
    length = int(link.stem.partition("-")[2])
    for path in (link, segment):
        flip(path, length + 2)
        found = troubles(copied)
        assert {(finding.level, finding.kind) for finding in found} == {("warning", "meaningless")}
        assert any(finding.path == str(path) and finding.offset <= length + 2 < finding.end for finding in found)
        flip(path, length + 2)


def test_few_changed_bytes_are_changed_space_and_many_are_somebodys_write() -> None:
    space = (SPACE * 64)[:64]
    few, many = bytearray(space), bytearray(space)
    for at in range(16, 24):
        few[at] ^= 1
        many[at] ^= 1
    many[40] ^= 1
    assert changed_space(space, 0, 64) is None
    found = changed_space(bytes(few), 0, 64)
    assert found is not None and (found.offset, found.end) == (16, 24)
    assert changed_space(bytes(many), 0, 64) is None
    assert changed_space(bytes(few), 16, 24) is None  # all of it is something else


def test_changed_space_behind_the_last_batch_is_found(small: Path) -> None:
    with FileStore(small, sweep_every_s=0) as store:
        store.put_now(make_entry("d", "c0", TRUNK, [1]))
        segment = one("rollouts/*/d/*/*.open", small)
        data = segment.read_bytes().removesuffix(SPACE)
        while data.endswith(SPACE):
            data = data.removesuffix(SPACE)
        segment.write_bytes(data + SPACE * 40)
        assert troubles(small) == []
        flip(segment, len(data) + 101)
        (finding,) = troubles(small)
        assert (finding.level, finding.kind, finding.offset) == ("warning", "meaningless", len(data) + 101)


# ---- what it costs


C0 = b"\xa2c0"
"""The call id as msgpack has it: two letters alone may stand in a random id, too."""


def test_lost_calls_are_named_with_those_that_build_on_them(small: Path) -> None:
    link = one("rollouts/*/b-frozen/*/v1/*.seg", small)
    data = link.read_bytes()
    flip(link, data.index(C0, data.index(C0) + 1))  # the first is that of the intent
    (finding,) = troubles(small)
    assert (finding.level, finding.kind, finding.rollout_id) == ("damage", "bytes", "b-frozen")
    assert finding.calls == ("c0", "c1")
    assert "c0, c1" in finding.lost


def test_calls_that_may_have_lost_their_record_are_named_in_an_open_rollout(small: Path) -> None:
    segment = one("rollouts/*/a-open/*/*.seg", small)
    data = segment.read_bytes()
    flip(segment, data.rindex(b"\xa2c1"))
    (finding,) = troubles(small)
    assert (finding.level, finding.calls) == ("damage", ("c1",))


# ---- manifests and links


def test_missing_manifest_link_and_marker_are_found(small: Path) -> None:
    one("rollouts/*/b-frozen/*/v1/manifest", small).unlink()
    (small / "FORMAT").unlink()
    assert {(f.level, f.kind) for f in troubles(small)} == {("damage", "manifest"), ("warning", "marker")}
    one("rollouts/*/b-frozen/*/v1/*.seg", small).unlink()
    assert ("damage", "missing") in {(f.level, f.kind) for f in troubles(small)}


@pytest.mark.parametrize(
    "change, what",
    [
        ({"chosen": [0]}, "other records"),
        ({"finished_at": 1.0}, "other of `finish`"),
        ({"incomplete": True}, "completeness"),
        ({"call_table": msgspec.Raw(b"\x90")}, "other calls"),
        ({"call_table": msgspec.Raw(b"\x91\x01")}, "can't be decoded"),
    ],
)
def test_manifest_that_says_other_than_its_segments_is_found(small: Path, change: dict[str, Any], what: str) -> None:
    path = one("rollouts/*/b-frozen/*/v1/manifest", small)
    rewrite_manifest(path, change)
    (finding,) = troubles(small)
    assert (finding.level, finding.kind, finding.path) == ("damage", "manifest", str(path))
    assert what in finding.what


def test_quick_check_finds_what_names_and_lengths_show_and_reads_no_segment(small: Path) -> None:
    link = one("rollouts/*/b-frozen/*/v1/*.seg", small)
    flip(link, 200)
    assert found_in(small, quick=True) == []
    os.truncate(link, 100)
    (finding,) = found_in(small, quick=True)
    assert (finding.level, finding.kind, finding.offset) == ("damage", "bytes", 100)
    link.unlink()
    assert [(f.level, f.kind) for f in found_in(small, quick=True)] == [("damage", "missing")]


# ---- names


PLANTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "file in the root": (lambda root: plant_file(root / "notes.txt"), "info", "name"),
    "file among shards": (lambda root: plant_file(root / "rollouts" / "xyz"), "warning", "name"),
    "no id": (lambda root: plant_file(one("rollouts/*/a-open", root).parent / ".no id"), "warning", "name"),
    "no writer": (lambda root: plant_file(root / "writers" / "me"), "warning", "name"),
    "file instead of a rollout": (
        lambda root: replace_by_file(one("rollouts/*/a-open", root)),
        "damage",
        "not_a_directory",
    ),
    "link instead of a rollout": (
        lambda root: one("rollouts/*/a-open", root).parent.joinpath("link").symlink_to("a-open"),
        "damage",
        "wrong_shard",
    ),
    "file instead of an incarnation": (
        lambda root: replace_by_file(one("rollouts/*/a-open/*", root)),
        "damage",
        "not_a_directory",
    ),
    "file instead of a version": (
        lambda root: replace_by_file(one("rollouts/*/b-frozen/*/v1", root)),
        "damage",
        "not_a_directory",
    ),
    "second incarnation": (
        lambda root: (one("rollouts/*/a-open", root) / INCARNATION).mkdir(mode=0o700),
        "damage",
        "incarnation",
    ),
    "incarnation behind a tombstone": (
        lambda root: (one("rollouts/*/c-retired", root) / INCARNATION).mkdir(mode=0o700),
        "damage",
        "incarnation",
    ),
    "second tombstone": (
        lambda root: (one("rollouts/*/c-retired", root) / f"{INCARNATION}.retired.1.5").mkdir(mode=0o700),
        "warning",
        "incarnation",
    ),
    "file in a rollout": (lambda root: plant_file(one("rollouts/*/a-open", root) / "core"), "warning", "name"),
    "file in an incarnation": (lambda root: plant_file(one("rollouts/*/a-open/*", root) / "core"), "warning", "name"),
    "file in a version": (lambda root: plant_file(one("rollouts/*/b-frozen/*/v1", root) / "core"), "warning", "name"),
    "segment after the freeze": (
        lambda root: plant_file(one("rollouts/*/b-frozen/*", root) / "000007.seg"),
        "warning",
        "name",
    ),
    "half a snapshot": (
        lambda root: (one("rollouts/*/a-open/*", root) / "tmp-00").mkdir(mode=0o700),
        "info",
        "leftover",
    ),
    "trash": (
        lambda root: (one("rollouts/*/a-open", root) / f"{INCARNATION}.trash").mkdir(mode=0o700),
        "info",
        "leftover",
    ),
    "directory instead of a segment": (
        lambda root: (one("rollouts/*/a-open/*", root) / "000002.seg").mkdir(mode=0o700),
        "damage",
        "bytes",
    ),
    "FIFO instead of a note": (
        lambda root: os.mkfifo(one("rollouts/*/b-frozen/*", root) / "note-000001", 0o600),
        "damage",
        "note",
    ),
    "wrong shard": (lambda root: misplace(one("rollouts/*/a-open", root), root), "damage", "wrong_shard"),
    "shard under another name": (lambda root: rename_shard(one("rollouts/*/a-open", root)), "damage", "wrong_shard"),
    "group may write": (lambda root: one("rollouts/*/a-open/*/*.seg", root).chmod(0o620), "warning", "modes"),
    "others may read": (lambda root: one("rollouts/*/a-open", root).chmod(0o755), "warning", "modes"),
    "another owner": (lambda root: os.chown(one("rollouts/*/a-open", root), 12345, -1), "warning", "modes"),
}


@pytest.mark.parametrize("what", PLANTS)
def test_what_does_not_belong_is_found_and_nothing_else(small: Path, what: str) -> None:
    plant, level, kind = PLANTS[what]
    if what == "another owner" and os.geteuid():
        pytest.skip("only root can give a file away")
    plant(small)
    found = found_in(small)
    assert {(finding.level, finding.kind) for finding in found} == {(level, kind)}


def test_what_is_hidden_under_another_name_is_named_with_its_place(small: Path) -> None:
    rollout = one("rollouts/*/a-open", small)
    rename_shard(rollout)
    (found,) = troubles(small)
    assert str(rollout) in found.what
    assert f"rename it to {rollout.parent}" in found.advice
    (small / "rollouts" / "shard.bak").rename(rollout.parent)
    other = rollout.with_name("another")
    rollout.rename(other)
    (found,) = troubles(small)
    assert (found.kind, found.path, found.rollout_id) == ("wrong_shard", str(other), "another")
    assert "rollout a-open under the name another" in found.what
    assert found.what.endswith(f"its place is {rollout}")


def test_one_rollout_that_cannot_be_read_stops_no_other(small: Path) -> None:
    replace_by_file(one("rollouts/*/a-open/*", small))
    flip(one("rollouts/*/b-frozen/*/v1/*.seg", small), 200)
    assert {finding.rollout_id for finding in troubles(small)} == {"a-open", "b-frozen"}


def test_globs_choose_rollouts(small: Path) -> None:
    flip(one("rollouts/*/b-frozen/*/v1/*.seg", small), 200)
    summary = CheckSummary()
    assert list(check(small, ["a-*", "c-retired"], summary=summary)) == []
    assert summary.rollouts == 2


def test_several_processes_find_the_same(small: Path) -> None:
    with FileStore(small, sweep_every_s=0) as store:
        for number in range(70):
            store.put_now(make_entry(f"many-{number}", "c0", TRUNK, [1]))
    flip(one("rollouts/*/many-33/*/*.seg", small), 150)
    flip(one("rollouts/*/b-frozen/*/v1/*.seg", small), 200)
    alone, together = CheckSummary(), CheckSummary()
    assert list(check(small, summary=alone)) == list(check(small, workers=2, summary=together))
    alone.seconds = together.seconds = 0
    assert alone == together
    assert alone.damage == 2


def test_what_is_no_store_or_a_newer_one_is_refused(tmp_path: Path, small: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        list(check(tmp_path))
    from zlib import crc32

    from tokcap.store import root as root_module
    from tokcap.store.frame import LAST_IN_BATCH, frame_header
    from tokcap.store.records import RootMarker, encode_record

    body = encode_record(RootMarker(99))
    seed = root_module._MARKER_SEED
    header = frame_header(Kind.MARKER, LAST_IN_BATCH, len(body), 0, 0, 0, crc32(body, seed), seed)
    (small / "FORMAT").write_bytes(header + body)
    with pytest.raises(NewerFormatError):
        list(check(small))


def test_nothing_is_written(small: Path, copied: Path) -> None:
    assert {OPEN, FROZEN, RETIRED} == {path.name for path in copied.glob("rollouts/*/*")}
    for root in (small, copied):
        before = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}
        found_in(root)
        assert {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")} == before


def test_the_processes_that_help_leave_interrupts_to_who_started_them(small: Path) -> None:
    found = _checked_together(str(small), iter(["a-open"] * 300), True, 2)
    next(found)
    helpers = multiprocessing.active_children()
    masks = [Path(f"/proc/{helper.pid}/status").read_text().partition("SigBlk:")[2].split()[0] for helper in helpers]
    assert len(list(found)) == 299
    assert masks and all(int(mask, 16) >> signal.SIGINT - 1 & 1 for mask in masks)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
