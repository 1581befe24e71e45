"""A disk that is full below a file system: the file system says that there is room, and its writes fail later.

A sparse image lies on a small file system in memory; loop-mounted, it has an ext4. Once the memory is full, whatever
the ext4 writes into a hole of its image fails with EIO. What it then says of syncs is the kernel's doing, and is shown
here with nothing but files and `fsync`; how many records of a store it costs is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.faulty_files import booted_as
from tokcap import FileStore
from tokcap.errors import DurabilityError
from tokcap.store.files import Files

from .faults_disks import MEGABYTE, UnavailableError, _run
from .faults_disturbed import ANOTHER_BOOT
from .faults_operations import entry

__all__ = ("Below", "StoreBelow", "below", "files_below", "store_below")

_INODES_PER_BLOCK = 16
"""Of 256 bytes, in blocks of 4,096."""


@dataclass
class Below:
    """An ext4 whose image lies on a file system that is filled and freed."""

    base: str
    loop: str

    @property
    def point(self) -> str:
        return f"{self.base}/upper"

    def use(self, megabytes: int) -> None:
        """Write to so much of it, and delete that: these blocks of the image are no holes any more."""
        path = f"{self.point}/used"
        with open(path, "wb") as file:
            file.write(bytes([1]) * (megabytes * MEGABYTE))
            file.flush()
            os.fsync(file.fileno())
        os.unlink(path)
        _run("sync", "--file-system", self.point)

    def fill(self) -> None:
        """From here on no hole of the image can be written to."""
        fd = os.open(f"{self.base}/lower/filler", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(4096))
        finally:
            os.close(fd)

    def remount(self) -> None:
        """There is room again; what was never written is gone, and the file system is checked."""
        subprocess.run(["umount", self.point], capture_output=True)
        os.unlink(f"{self.base}/lower/filler")
        subprocess.run(["e2fsck", "-fy", self.loop], capture_output=True)
        _run("mount", self.loop, self.point)


@contextlib.contextmanager
def below(*, journal: bool, megabytes: int = 16) -> Iterator[Below]:
    """Raises `UnavailableError` if that can't be made here."""
    if os.geteuid() != 0:
        raise UnavailableError("only root can mount")
    base = tempfile.mkdtemp(prefix="tokcap-below-")
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, base, ignore_errors=True)
        for name in "lower", "upper":
            os.mkdir(f"{base}/{name}")
        _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", f"{base}/lower")
        cleaning.callback(_quietly, "umount", "--lazy", f"{base}/lower")
        with open(f"{base}/lower/image", "wb") as image:
            image.truncate(96 * MEGABYTE)
        # The tables of inodes stay holes until something is written to them.
        make = ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", "-I", "256", "-E", "lazy_itable_init=1"]
        _run(*make, *([] if journal else ["-O", "^has_journal"]), f"{base}/lower/image")
        done = subprocess.run(["losetup", "-f", "--show", f"{base}/lower/image"], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(f"there is no loop device: {done.stderr.strip()}")
        loop = done.stdout.strip()
        cleaning.callback(_quietly, "losetup", "-d", loop)
        _run("mount", "-o", "noinit_itable", loop, f"{base}/upper")
        cleaning.callback(_quietly, "umount", "--lazy", f"{base}/upper")
        yield Below(base, loop)


def _quietly(*words: str) -> None:
    subprocess.run(words, capture_output=True)


# ---- without tokcap


@dataclass
class FilesBelow:
    """What `fsync` said of empty files, and what is there afterwards."""

    failed: list[int] = field(default_factory=list)
    """Inodes for which it raised."""
    told: list[int] = field(default_factory=list)
    """Inodes for which it returned."""
    lost: list[int] = field(default_factory=list)
    """Of those for which it returned: not there any more."""
    directory_failed: bool = False

    @property
    def beside_a_failure(self) -> list[int]:
        """Of the lost: in the same block of the inode table as one for which it raised."""
        blocks = {block_of(inode) for inode in self.failed}
        return [inode for inode in self.lost if block_of(inode) in blocks]


def block_of(inode: int) -> int:
    """Of the inode table: sixteen inodes are written, or not, together."""
    return (inode - 1) // _INODES_PER_BLOCK


def files_below(*, journal: bool, count: int = 64) -> FilesBelow:
    """Make files, sync the directory, sync each file once, mount it again and look."""
    found = FilesBelow()
    with below(journal=journal) as disk:
        directory = f"{disk.point}/directory"
        os.mkdir(directory)
        _run("sync", "--file-system", disk.point)
        disk.fill()
        inodes: dict[str, int] = {}
        for number in range(count):
            fd = os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY, 0o600)
            inodes[str(number)] = os.fstat(fd).st_ino
            os.close(fd)
        found.directory_failed = not _sync(directory)
        for name, inode in inodes.items():
            (found.told if _sync(f"{directory}/{name}") else found.failed).append(inode)
        disk.remount()
        there = set(os.listdir(directory)) if os.path.isdir(directory) else set()
        lost = {inode for name, inode in inodes.items() if name not in there}
        found.lost = [inode for inode in found.told if inode in lost]
    return found


def _sync(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


# ---- with it


class _Remembering(Files):
    """Remembers the inodes whose sync failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[int] = set()

    def fdatasync(self, fd: int) -> None:
        try:
            super().fdatasync(fd)
        except OSError:
            self.failed.add(os.fstat(fd).st_ino)
            raise

    def fsync(self, fd: int) -> None:
        try:
            super().fsync(fd)
        except OSError:
            self.failed.add(os.fstat(fd).st_ino)
            raise


@dataclass
class StoreBelow:
    """Records of a store that was written to while the disk below filled up."""

    acknowledged: int = 0
    refused: int = 0
    """Puts that raised."""
    missing: int = 0
    """Of the acknowledged."""
    beside_a_failure: int = 0
    """Of the missing: what leads to them shares a block of the inode table with what could not be synced."""
    problems: list[str] = field(default_factory=list)


def store_below(*, journal: bool, seed: int, clients: int = 24, turns: int = 40) -> StoreBelow:
    """Clients put at the same time, each to one rollout after another, while the disk below fills up."""
    found = StoreBelow()
    chance = random.Random(seed)
    files = _Remembering()
    acknowledged: dict[str, set[str]] = {}
    leading: dict[str, set[int]] = {}
    with below(journal=journal) as disk:
        disk.use(8)
        directory = f"{disk.point}/store"
        store = FileStore(directory, files=files, sweep_every_s=0)

        async def client(number: int) -> None:
            for turn in range(turns):
                rollout, call = f"r{number}-{turn // 4}", f"c{turn}"
                try:
                    await store.put(entry(rollout, call, tokens=chance.randint(1, 3000)))
                except DurabilityError as error:
                    found.refused += 1
                    if f"rollout {rollout}:" not in str(error):
                        found.problems.append(f"seed {seed}: {error} doesn't name rollout {rollout}")
                else:
                    acknowledged.setdefault(rollout, set()).add(call)
                    with contextlib.suppress(OSError):
                        leading[rollout] = set(_inodes_of(store._layout.rollout(rollout)))
                if number == 0 and turn == turns // 4:
                    disk.fill()

        async def all_clients() -> None:
            await asyncio.gather(*(client(number) for number in range(clients)))

        asyncio.run(all_clients())
        with contextlib.suppress(DurabilityError):
            store.close_now()
        disk.remount()
        _count(found, directory, acknowledged, leading, {block_of(inode) for inode in files.failed})
    return found


def _inodes_of(path: str) -> Iterator[int]:
    yield os.stat(os.path.dirname(path)).st_ino
    for folder, _, names in os.walk(path):
        yield os.stat(folder).st_ino
        for name in names:
            yield os.stat(f"{folder}/{name}").st_ino


def _count(
    found: StoreBelow,
    directory: str,
    acknowledged: dict[str, set[str]],
    leading: dict[str, set[int]],
    failed_blocks: set[int],
) -> None:
    found.acknowledged = sum(map(len, acknowledged.values()))
    try:
        with booted_as(ANOTHER_BOOT), FileStore(directory, read_only=True) as reader:
            for rollout, calls in acknowledged.items():
                with reader.read_now(rollout) as snapshot:
                    there = {stored.model_call_id for stored in snapshot.entries}
                missing = len(calls - there)
                found.missing += missing
                if any(block_of(inode) in failed_blocks for inode in leading.get(rollout, ())):
                    found.beside_a_failure += missing
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        found.missing = found.acknowledged
