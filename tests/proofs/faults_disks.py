"""Disks that are really full: small file systems in memory and in loop-mounted files, full while an operation runs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.faulty_files import View, booted_as
from tokcap.errors import DurabilityError

from .faults_disturbed import ANOTHER_BOOT, WAYS, leftovers, normal, open_store, perform, views
from .faults_operations import ROLLOUTS, Operation

__all__ = ("KINDS", "Disk", "UnavailableError", "fill", "free", "meet_full_disk", "mounted")

MEGABYTE = 1 << 20


class UnavailableError(Exception):
    """This machine has no such disk; the message says why."""


@dataclass(frozen=True)
class Disk:
    """A file system for a while."""

    kind: str
    point: str
    image: str = ""
    """What a loop device makes a disk of; empty if it is in memory."""


_IMAGES: dict[str, tuple[int, list[str]]] = {
    "ext4": (12, ["mkfs.ext4", "-q", "-m", "0", "-O", "^resize_inode"]),
    "ext4 without a journal": (8, ["mkfs.ext4", "-q", "-m", "0", "-O", "^resize_inode,^has_journal"]),
    "xfs": (320, ["mkfs.xfs", "-q", "-f"]),
    "btrfs": (160, ["mkfs.btrfs", "-q", "-f"]),
}
"""Megabytes, how it is made."""

_IN_MEMORY = {
    "tmpfs": "size=8m,nr_inodes=4000",
    "tmpfs without inodes": "size=64m,nr_inodes=200",
}

KINDS = (*_IN_MEMORY, *_IMAGES)


@contextlib.contextmanager
def mounted(kind: str, directory: str | None = None) -> Iterator[Disk]:
    """A small file system. Raises `UnavailableError` if there can't be one; `directory` is where its image is."""
    if os.geteuid() != 0:
        raise UnavailableError("only root can mount")
    base = tempfile.mkdtemp(prefix="tokcap-disk-", dir=directory)
    point, image = f"{base}/disk", f"{base}/image"
    os.mkdir(point)
    try:
        if kind in _IN_MEMORY:
            _run("mount", "-t", "tmpfs", "-o", _IN_MEMORY[kind], "tmpfs", point)
            image = ""
        else:
            megabytes, make = _IMAGES[kind]
            with open(image, "wb") as file:
                file.truncate(megabytes * MEGABYTE)
            _run(*make, image)
            _run("mount", "-o", "loop", image, point)
        try:
            yield Disk(kind, point, image)
        finally:
            subprocess.run(["umount", "--lazy", point], check=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _run(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise UnavailableError(f"there is no {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"can't {' '.join(words[:3])}: {done.stderr.strip()}")


def fill(point: str, *, sizes: tuple[int, ...] = (64 * MEGABYTE, MEGABYTE, 4096, 1)) -> list[str]:
    """Take all that is left with files of these sizes."""
    fillers: list[str] = []
    for size in sizes:
        while True:
            fillers.append(f"{point}/filler{len(fillers)}")
            try:
                _fill_one(fillers[-1], size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                free([fillers.pop()])
                break
    return fillers


def _fill_one(path: str, size: int) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        if size > MEGABYTE:
            os.posix_fallocate(fd, 0, size)
        elif size:
            os.write(fd, bytes(size))
        os.fsync(fd)
        if os.fstat(fd).st_size < size:
            raise OSError(errno.ENOSPC, "a short write")
    finally:
        os.close(fd)


def free(fillers: list[str]) -> None:
    for filler in fillers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(filler)


# ---- one operation on a full disk


def meet_full_disk(operation: Operation, disk: Disk) -> tuple[bool, list[str]]:
    """The disk is full while it runs, and has room again afterwards: whether it failed, and what did not hold."""
    before, after = _undisturbed(operation, f"{disk.point}/expected")
    directory = f"{disk.point}/store"
    problems: list[str] = []
    store = open_store(directory, segment_bytes=4000)
    prepared = operation.prepare(store)
    try:
        fillers = fill(disk.point, sizes=(0,) if "inodes" in disk.kind else (64 * MEGABYTE, MEGABYTE, 4096, 1))
        failure: Exception | None = None
        try:
            result = perform(operation, store, WAYS[0])
            if isinstance(result, dict):
                failure = next((error for error in result.values() if error is not None), None)
        except Exception as error:
            failure = error
        problems += _check_error(operation, failure)
        for boot in "", ANOTHER_BOOT:
            with booted_as(boot), open_store(directory, read_only=True) as reader:
                for rollout, seen in views(reader).items():
                    allowed = [after[rollout]] if failure is None else [before[rollout], after[rollout]]
                    if failure is None and operation.best_effort:
                        allowed.append(before[rollout])
                    if failure is not None and operation.writes_records and not operation.in_parts:
                        allowed = [before[rollout]]
                    if normal(seen) not in allowed and not operation.best_effort:
                        problems.append(f"on the full disk {rollout} is {seen}, not as {allowed}")
        free(fillers)
        _run("sync", "--file-system", disk.point)
        if not operation.ends_store:
            _patiently(lambda: perform(operation, store, WAYS[0]))
            store.sweep_now(10_000)
        store.close_now()
        if prepared is not None and hasattr(prepared, "close_now"):
            prepared.close_now()
        with open_store(directory) as again:
            again.sweep_now(10_000)
            seen_at_last = views(again)
        problems += [
            f"after all {rollout} is {seen_at_last[rollout]}, not {after[rollout]}"
            for rollout in ROLLOUTS
            if seen_at_last[rollout] != after[rollout]
        ]
        if left := leftovers(directory):
            problems.append(f"left behind: {left}")
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(DurabilityError):
            store.close_now()
        shutil.rmtree(directory, ignore_errors=True)
        free([f"{disk.point}/{name}" for name in os.listdir(disk.point) if name.startswith("filler")])
    return failure is not None, [f"{operation} on a full {disk.kind}: {problem}" for problem in problems]


def _patiently(act: Callable[[], object]) -> None:
    """xfs and btrfs give back what was deleted in the background, and the store looks at what is free now and then."""
    for _ in range(100):
        try:
            act()
        except DurabilityError as error:
            if error.errno != errno.ENOSPC:
                raise
            time.sleep(0.1)
        else:
            return
    act()


def _undisturbed(operation: Operation, directory: str) -> tuple[dict[str, View], dict[str, View]]:
    with open_store(directory, segment_bytes=4000) as store:
        prepared = operation.prepare(store)
        before = views(store)
        perform(operation, store, WAYS[0])
        if prepared is not None and hasattr(prepared, "close_now"):
            prepared.close_now()
    with open_store(directory) as store:
        after = views(store)
    shutil.rmtree(directory)
    return before, after


_MUST_SUCCEED = ("retire", "reset", "sweep", "expire")
"""They give space back: a full disk must not stop them."""


def _check_error(operation: Operation, failure: Exception | None) -> list[str]:
    if failure is None:
        return []
    if operation.name.startswith(_MUST_SUCCEED):
        return [f"it failed with {failure!r}, and needs no space"]
    if not isinstance(failure, DurabilityError) or failure.errno != errno.ENOSPC:
        return [f"it raised {failure!r}, not a DurabilityError with ENOSPC"]
    if "free space" not in str(failure):
        return [f"it doesn't say what to do: {failure}"]
    if operation.names_rollout and not re.search(r"rollout r[:,]", str(failure)):
        return [f"it doesn't name the rollout: {failure}"]
    return []
