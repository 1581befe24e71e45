"""A disk that is really full: memory and ext4 of a few megabytes, mounted for the test."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import View, booted_as, view
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError

MEGABYTE = 1 << 20
SHUT_DOWN, WITHOUT_FLUSHING = 0x8004587D, 2
"""FS_IOC_SHUTDOWN: from then on the file system answers EIO, as if its device were gone."""
KEPT = ("open", "frozen", "consumed", "to-reset")


@contextlib.contextmanager
def mounted(kind: str) -> Iterator[str]:
    """A file system of about 8 MB; skips if there can't be one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    base = tempfile.mkdtemp(prefix="tokcap-disk-")
    point = f"{base}/disk"
    os.mkdir(point)
    commands = {
        "tmpfs": [["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=200", "tmpfs", point]],
        "tmpfs without inodes": [["mount", "-t", "tmpfs", "-o", "size=32m,nr_inodes=200", "tmpfs", point]],
        "ext4": [
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^resize_inode", f"{base}/image"],
            ["mount", "-o", "loop", f"{base}/image", point],
        ],
    }[kind]
    try:
        if kind == "ext4":
            Path(f"{base}/image").write_bytes(b"")
            os.truncate(f"{base}/image", 12 * MEGABYTE)
        for command in commands:
            if shutil.which(command[0]) is None:
                pytest.skip(f"there is no {command[0]}")
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"can't {' '.join(command[:3])}: {done.stderr.strip()}")
        try:
            yield point
        finally:
            subprocess.run(["umount", "--lazy", point], check=True)
    finally:
        shutil.rmtree(base)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest) -> Iterator[str]:
    with mounted(request.param) as point:
        yield point


def entry(rollout: str, call: str, tokens: int) -> TokenEntry:
    random = np.random.default_rng(tokens)
    ids = random.integers(0, 1 << 30, tokens, np.int32)
    return TokenEntry(rollout, call, ids, ids[:4], random.random(4))


def fill(point: str, *, sizes: tuple[int, ...] = (MEGABYTE, 4096, 1)) -> list[str]:
    """Take all that is left with files of these sizes."""
    fillers: list[str] = []
    for size in sizes:
        with pytest.raises(OSError) as caught:
            while True:
                fillers.append(f"{point}/filler{len(fillers)}")
                with open(fillers[-1], "wb") as file:
                    file.write(bytes(size))
                    file.flush()
                    os.fsync(file.fileno())
        assert caught.value.errno == errno.ENOSPC
        free([fillers.pop()])
    return fillers


def free(fillers: list[str]) -> None:
    for filler in fillers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(filler)


def open_store(point: str) -> FileStore:
    return FileStore(f"{point}/store", sweep_every_s=0)


def prepare(store: FileStore) -> None:
    for rollout in KEPT:
        store.put_now(entry(rollout, "a", 900))
        store.put_now(entry(rollout, "b", 1800))
    for rollout in "frozen", "consumed":
        store.freeze_now(rollout).close()


def views(store: FileStore) -> dict[str, View]:
    return {rollout: view(store, rollout) for rollout in KEPT}


def check_full(store: FileStore, before: dict[str, View]) -> None:
    """What must fail and what must work while nothing can be written."""
    for rollout in "open", "new":
        with pytest.raises(DurabilityError) as caught:
            store.put_now(entry(rollout, "too-much", 200_000 if rollout == "open" else 3_000_000))
        assert caught.value.errno == errno.ENOSPC
        assert f"rollout {rollout}" in str(caught.value)
        assert "the disk is full: free space and try again" in str(caught.value)
    assert views(store) == before
    with store.freeze_now("consumed") as snapshot:
        assert [len(one.prompt_token_ids) for one in snapshot.entries] == [900, 1800]
        assert store.retire_now("consumed", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    store.reset_now("to-reset")
    assert store.stat_now("consumed").state == "retired"
    assert store.stat_now("to-reset").state == "absent"


def check_freed(store: FileStore, before: dict[str, View]) -> None:
    for rollout in "open", "new", "to-reset":
        store.put_now(entry(rollout, "later", 1000))
    assert view(store, "open").calls == {"a", "b", "later"}
    assert view(store, "open").damage == ()
    assert view(store, "new").calls == view(store, "to-reset").calls == {"later"}
    assert view(store, "frozen") == before["frozen"]
    with store.freeze_now("open") as snapshot:
        assert len(snapshot.entries) == 3
        assert not snapshot.incomplete


def test_a_store_on_a_full_disk_reads_retires_and_resets(disk: str) -> None:
    with open_store(disk) as store:
        prepare(store)
        before = views(store)
        fillers = fill(disk)
        check_full(store, before)
        free(fillers)
        check_freed(store, before)


def test_without_inodes_only_rollouts_that_exist_go_on() -> None:
    with mounted("tmpfs without inodes") as point, open_store(point) as store:
        prepare(store)
        fillers = fill(point, sizes=(0,))
        with pytest.raises(DurabilityError, match=r"rollout new: .*the disk is full") as caught:
            store.put_now(entry("new", "a", 10))
        assert caught.value.errno == errno.ENOSPC
        store.put_now(entry("open", "c", 10))
        with store.freeze_now("consumed") as snapshot:
            assert store.retire_now("consumed", snapshot_id=snapshot.snapshot_id, version=1)
        store.reset_now("to-reset")
        with open_store(point) as another:
            assert view(another, "open").calls == {"a", "b", "c"}
        free(fillers)
        store.put_now(entry("new", "a", 10))


def test_a_store_opened_on_a_full_disk_reads_retires_and_resets(disk: str) -> None:
    with open_store(disk) as store:
        prepare(store)
        before = views(store)
    fillers = fill(disk)
    store = open_store(disk)
    check_full(store, before)
    free(fillers)
    check_freed(store, before)
    store.close_now()


def test_retire_and_reset_give_space_back(disk: str) -> None:
    with open_store(disk) as store:
        store.put_now(entry("consumed", "a", 300_000))
        store.put_now(entry("to-reset", "a", 300_000))
        with store.freeze_now("consumed") as snapshot:
            pass
        fill(disk)
        assert store.retire_now("consumed", snapshot_id=snapshot.snapshot_id, version=1)
        store.put_now(entry("new", "a", 200_000))
        store.reset_now("to-reset")
        store.put_now(entry("new", "b", 150_000))
        assert view(store, "new").calls == {"a", "b"}


@pytest.mark.parametrize("rebooted", [True, False], ids=["another-boot", "same-boot"])
def test_a_device_that_goes_away_costs_nothing_that_was_acknowledged(rebooted: bool) -> None:
    with mounted("ext4") as point:
        store = open_store(point)
        prepare(store)
        before = views(store)
        fd = os.open(point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSHING))
        except OSError as error:
            pytest.skip(f"ext4 can't be shut down here: {error}")
        finally:
            os.close(fd)
        for rollout in "open", "new":
            with pytest.raises(DurabilityError, match=rf"rollout {rollout}: .*; "):
                store.put_now(entry(rollout, "too-late", 10))
        with pytest.raises(DurabilityError):
            store.freeze_now("open")
        with contextlib.suppress(DurabilityError):
            store.close_now()
        subprocess.run(["umount", point], check=True)
        subprocess.run(["mount", "-o", "loop", f"{os.path.dirname(point)}/image", point], check=True)
        boot = booted_as("00000000-0000-4000-8000-000000000000") if rebooted else contextlib.nullcontext()
        with boot, open_store(point) as again:
            assert views(again) == before
            assert again.stat_now("new").state == "absent"
            again.reset_now("to-reset")
            check_freed(again, before)
