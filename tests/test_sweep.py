"""Sweeping tombstones: without a sync for each of them, and yet never in the way of what comes after."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faulty_files import Fault, FaultyFiles, booted_as, view
from tests.test_full_disk import SHUT_DOWN, WITHOUT_FLUSHING, entry, mounted
from tokcap import FileStore
from tokcap.store import fence, sweep
from tokcap.store.files import Files
from tokcap.store.layout import Directory, Layout


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(store_dir: Path, files: FaultyFiles) -> Iterator[FileStore]:
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        yield store


def retire(store: FileStore, rollout_id: str, *, late: bool = False) -> None:
    store.put_now(entry(rollout_id, "a", 40))
    with store.freeze_now(rollout_id) as snapshot:
        if late:
            store.note_delivery_now(rollout_id, "a", "full")
        assert store.retire_now(rollout_id, snapshot_id=snapshot.snapshot_id, version=1)
    if late:
        store.mark_incomplete_now(rollout_id)


def steps(files: FaultyFiles, *kinds: str) -> list[str]:
    return [call.kind for call in files.trace if call.kind in kinds]


def test_tombstones_go_without_a_sync_of_their_own_and_their_shards_are_synced_at_the_end(
    store: FileStore, files: FaultyFiles, store_dir: Path
) -> None:
    for number in range(12):
        retire(store, f"r{number}")
    files.trace.clear()
    assert store.sweep_now(0) == 12
    shards = list(store_dir.glob("rollouts/*"))
    last = max(number for number, call in enumerate(files.trace) if call.kind == "rmdir")
    synced = [call.path for call in files.trace[last:] if call.kind == "fsync"]
    assert sorted(synced) == sorted(map(str, shards))
    assert steps(files, "fsync", "rename") == ["fsync"] * len(shards)
    assert not list(store_dir.glob("rollouts/*/*"))


def test_a_tombstone_with_notes_goes_as_a_whole(store: FileStore, files: FaultyFiles, store_dir: Path) -> None:
    """A crash must not keep the tombstone and lose what was said after it."""
    retire(store, "r", late=True)
    files.trace.clear()
    assert store.sweep_now(0) == 1
    assert steps(files, "rename", "fsync", "unlink")[:3] == ["rename", "fsync", "unlink"]
    assert not list(store_dir.glob("rollouts/*/*"))


def test_a_tombstone_with_payload_goes_only_when_its_retirement_is_durable(
    store: FileStore, files: FaultyFiles, store_dir: Path
) -> None:
    with files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        retire(store, "r", late=True)
    files.trace.clear()
    assert store.sweep_now(0) == 1
    assert steps(files, "rename", "fsync", "unlink")[:3] == ["rename", "fsync", "unlink"]
    assert not list(store_dir.glob("rollouts/*/*"))


def test_a_directory_that_is_kept_is_synced_before_its_fence_is_given_back(
    store: FileStore, files: FaultyFiles, store_dir: Path
) -> None:
    retire(store, "r")
    directory = Path(Layout(str(store_dir)).rollout("r"))
    (directory / "not ours").touch()
    files.trace.clear()
    assert store.sweep_now(0) == 1
    assert steps(files, "rmdir", "fsync", "unlock") == ["rmdir", "rmdir", "fsync", "unlock", "fsync"]
    assert [call.path for call in files.trace if call.kind == "fsync"] == [str(directory), str(directory.parent)]
    store.put_now(entry("r", "b", 40))
    assert view(store, "r").calls == {"b"}


def test_what_was_begun_anew_meanwhile_is_left_alone(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    retire(store, "r")
    real = sweep._remove_empty

    def late(files: Files, old: list[Directory]) -> list[Directory]:
        store.reset_now("r")
        store.put_now(entry("r", "b", 40))
        return real(files, old)

    monkeypatch.setattr(sweep, "_remove_empty", late)
    assert store.sweep_now(0) == 0
    assert view(store, "r").calls == {"b"}


def test_what_was_retired_anew_meanwhile_is_left_alone(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    retire(store, "r")
    first = store.stat_now("r").snapshot_id
    real = sweep._remove_empty

    def late(files: Files, old: list[Directory]) -> list[Directory]:
        store.reset_now("r")
        retire(store, "r")
        assert real(files, old) == old
        return []

    monkeypatch.setattr(sweep, "_remove_empty", late)
    store.sweep_now(0)
    assert store.stat_now("r").state == "retired"
    assert store.stat_now("r").snapshot_id != first


def test_a_tombstone_whose_fence_is_held_waits_for_it(store: FileStore, store_dir: Path) -> None:
    retire(store, "r")
    retire(store, "s")
    fd = os.open(Layout(str(store_dir)).rollout("r"), os.O_RDONLY)
    assert fence.lock(Files(), fd)
    with ThreadPoolExecutor(1) as threads:
        sweeping = threads.submit(store.sweep_now, 0)
        while store.stat_now("s").state != "absent":
            assert not sweeping.done()
        assert store.stat_now("r").state == "retired"
        os.close(fd)
        assert sweeping.result(20) == 2


def test_the_fence_is_given_back_whatever_fails(store: FileStore, files: FaultyFiles) -> None:
    for kind in ("open_directory", "try_lock", "stat", "fstat", "listdir", "unlink", "rmdir", "fsync", "close"):
        number, hit = 1, True
        while hit:
            retire(store, "r", late=True)
            with files.failing(Fault(number, errno.EIO, kinds=[kind])) as plan:
                with contextlib.suppress(OSError):
                    store.sweep_now(0)
                hit = plan.hit is not None
            number += 1
            with contextlib.suppress(OSError):
                store.sweep_now(0)
            assert store.stat_now("r").state == "absent"


def test_no_fence_is_held_in_the_main_thread(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    real = fence.lock

    def lock(files: Files, fd: int) -> bool:
        threads.append(threading.current_thread())
        return real(files, fd)

    retire(store, "r")
    monkeypatch.setattr(fence, "lock", lock)
    assert store.sweep_now(0) == 1
    assert threads and threading.main_thread() not in threads


class Unsynced(Files):
    """Whose sweep syncs nothing: as if the power had failed before."""

    def fsync_directory(self, path: str) -> None:
        if not self.sweeping:
            super().fsync_directory(path)

    sweeping = False


def begin(store: FileStore) -> None:
    store.begin_call_now("r", "b")


def put(store: FileStore) -> None:
    store.put_now(entry("r", "b", 40))


def freeze(store: FileStore) -> None:
    store.freeze_now("r").close()


@pytest.mark.parametrize("next_step", [put, begin, freeze])
@pytest.mark.parametrize("kept", [True, False], ids=["directory kept", "directory gone"])
def test_after_a_power_cut_no_tombstone_is_beside_what_came_after_it(
    next_step: Callable[[FileStore], None], kept: bool
) -> None:
    with mounted("ext4") as point:
        files = Unsynced()
        store = FileStore(f"{point}/store", files=files, sweep_every_s=0)
        retire(store, "r")
        os.sync()
        if kept:
            Path(Layout(f"{point}/store").rollout("r"), "not ours").touch()
        files.sweeping = True
        assert store.sweep_now(0) == 1
        files.sweeping = False
        next_step(store)
        before = view(store, "r")
        fd = os.open(point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSHING))
        except OSError as error:
            pytest.skip(f"ext4 can't be shut down here: {error}")
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):
            store.close_now()
        subprocess.run(["umount", point], check=True)
        subprocess.run(["mount", "-o", "loop", f"{os.path.dirname(point)}/image", point], check=True)
        with booted_as("00000000-0000-4000-8000-000000000000"), FileStore(f"{point}/store", sweep_every_s=0) as again:
            assert view(again, "r") == before
            assert before.state == ("frozen" if next_step is freeze else "open")


def test_a_sweep_removes_what_a_process_left_that_died_while_it_opened_the_store(
    store: FileStore, store_dir: Path
) -> None:
    names = [f"FORMAT-{'ab' * 8}", f"probe-{'01' * 8}", f"probe-{'01' * 8}-link"]
    kept = [f"FORMAT-{'cd' * 8}", "probe-ours", "FORMAT-ab.txt"]
    for name in names + kept:
        (store_dir / name).touch()
    for name in [*names, "FORMAT", *kept[1:]]:
        os.utime(store_dir / name, (0, 0))
    store.sweep_now(3600, dry_run=True)
    assert {path.name for path in store_dir.iterdir()} >= {*names, *kept}
    store.sweep_now(3600)
    assert {path.name for path in store_dir.iterdir()} == {"FORMAT", "rollouts", "writers", *kept}


def test_what_cannot_be_removed_of_an_opening_store_stops_no_sweep(
    files: FaultyFiles, store: FileStore, store_dir: Path
) -> None:
    retire(store, "r")
    left = [store_dir / f"probe-{digit * 16}" for digit in "12"]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    with files.failing(Fault(1, errno.EIO, "kind", ["unlink"])) as plan:
        assert store.sweep_now(0) == 1
    assert [call.path for call in plan.hits] and all(path.exists() for path in left)
    store.sweep_now(0)
    assert not any(path.exists() for path in left)
