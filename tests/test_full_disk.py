"""A disk that is really full: memory and ext4 of a few megabytes, mounted for the test."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.faulty_files import View, booted_as, view
from tests.proofs import faults_disks as disks
from tests.proofs.faults_below import files_below, store_below
from tests.proofs.faults_disks import UnavailableError, fill, free, meet_full_disk
from tests.proofs.faults_operations import OPERATIONS
from tests.proofs.faults_traced import memory
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError
from tokcap.store import lifecycle as lifecycle_module

MEGABYTE = 1 << 20
SHUT_DOWN, WITHOUT_FLUSHING = 0x8004587D, 2
"""FS_IOC_SHUTDOWN: from then on the file system answers EIO, as if its device were gone."""
KEPT = ("open", "frozen", "consumed", "to-reset")


@contextlib.contextmanager
def mounted(kind: str) -> Iterator[str]:
    """A small file system; skips if there can't be one."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(disks.mounted(kind))
        except UnavailableError as reason:
            pytest.skip(str(reason))
        yield disk.point


@pytest.fixture(params=["tmpfs", "ext4", "ext4 without a journal"])
def disk(request: pytest.FixtureRequest) -> Iterator[str]:
    with mounted(request.param) as point:
        yield point


def entry(rollout: str, call: str, tokens: int) -> TokenEntry:
    random = np.random.default_rng(tokens)
    ids = random.integers(0, 1 << 30, tokens, np.int32)
    return TokenEntry(rollout, call, ids, ids[:4], random.random(4))


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


# ---- every operation


KINDS_AT_HAND = ("tmpfs", "tmpfs without inodes", "ext4", "ext4 without a journal")
"""Those that are made and filled quickly; the proofs have xfs and btrfs, too."""


@pytest.mark.parametrize("kind", KINDS_AT_HAND)
def test_every_operation_meets_a_full_disk_and_heals_when_there_is_room(kind: str) -> None:
    failed, problems = 0, []
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(disks.mounted(kind, memory()))
        except UnavailableError as reason:
            pytest.skip(str(reason))
        chosen = OPERATIONS if kind == "tmpfs" else [o for o in OPERATIONS if o.name in SHORT_LIST]
        for operation in chosen:
            has_failed, found = meet_full_disk(operation, disk)
            failed += has_failed
            problems += found
    assert failed >= 3 and not problems, problems


SHORT_LIST = ("first put", "freeze", "late mark", "retire", "reset of several", "expire")


def test_a_retirement_that_needs_space_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = lifecycle_module.rename_durably

    def with_a_list(rollout: Any, renames: list[tuple[str, str]]) -> None:
        with open(f"{rollout.path}/list", "wb") as file:
            file.write(repr(renames).encode())
        rename(rollout, renames)

    monkeypatch.setattr(lifecycle_module, "rename_durably", with_a_list)
    retire = next(operation for operation in OPERATIONS if operation.name == "retire")
    try:
        with disks.mounted("tmpfs", memory()) as disk:
            _, problems = meet_full_disk(retire, disk)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert any("needs no space" in problem for problem in problems), problems


# ---- full below


def test_linux_says_that_files_are_synced_whose_inodes_it_could_not_write() -> None:
    """Without a journal. Sixteen inodes share a block: when it can't be written, one `fsync` fails and the others of
    that block succeed. Nothing that a program can ask about its own files tells."""
    try:
        found = files_below(journal=False)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert found.failed, "the disk below was not full"
    if not found.lost:
        pytest.skip("this kernel tells everybody")
    assert found.lost == found.beside_a_failure


def test_linux_says_that_files_are_synced_whose_transaction_was_given_up() -> None:
    """With a journal. When a commit fails, the `fsync` that waits for it fails, and those that come later succeed."""
    try:
        found = files_below(journal=True)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert found.directory_failed or found.failed, "the disk below was not full"
    if not found.lost:
        pytest.skip("this kernel tells everybody")
    assert len(found.lost) + len(found.failed) == 64


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "journal"])
def test_a_disk_that_is_full_below_costs_no_more_than_linux_does_not_tell(journal: bool) -> None:
    try:
        found = store_below(journal=journal, seed=6)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert found.refused and found.acknowledged and not found.problems, found
    assert found.missing == found.beside_a_failure, found
