"""Stores that a power cut or a failing disk must find out: without one of their syncs, or careless with errors."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokcap.store.files import Files
from tokcap.store.syncs import KernelSyncs, Sync

__all__ = ("CARELESS", "MUTANTS", "Mutant", "files_of", "files_without")

EVERYWHERE = ("ext4", "ext4-without-journal", "xfs", "btrfs")


class Mutant(NamedTuple):
    """One sync that is left out."""

    drops: Callable[[str, bool, bool], bool]
    """Whether a sync of this path is left out: is it a directory, does the kernel do it in the background."""
    shows_after: tuple[str, ...]
    """Steps that are lost if the power goes right after they were acknowledged."""
    shows_on: tuple[str, ...] = EVERYWHERE
    """File systems on which something acknowledged is lost then. The others do more than they promise."""


def _in_publication(path: str) -> bool:
    return os.path.basename(os.path.dirname(path)).startswith("tmp-")


MUTANTS: Final[Mapping[str, Mutant]] = {
    "no sync of files": Mutant(lambda path, directory, kernel: not directory, ("put", "begin", "settle")),
    "no sync of directories": Mutant(lambda path, directory, kernel: directory, ("freeze", "retire", "reset")),
    "no sync by the kernel": Mutant(
        lambda path, directory, kernel: kernel, ("put", "begin", "settle"), ("ext4", "ext4-without-journal", "xfs")
    ),  # on btrfs the store asks for none
    "no sync of manifests": Mutant(
        lambda path, directory, kernel: _in_publication(path) and path.endswith("/manifest"), ("freeze",)
    ),
    "no sync of what is renamed": Mutant(
        lambda path, directory, kernel: directory and os.path.basename(path).startswith("tmp-"), ("freeze",), ("btrfs",)
    ),
}
"""Name -> what is left out, where it shows."""


class _Without(Files):
    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self._drops = mutant.drops

    def _is_dropped(self, fd: int, *, directory: bool, kernel: bool = False) -> bool:
        return self._drops(os.readlink(f"/proc/self/fd/{fd}"), directory, kernel)

    def fdatasync(self, fd: int) -> None:
        if not self._is_dropped(fd, directory=False):
            super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        if not self._is_dropped(fd, directory=True):
            super().fsync(fd)

    def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
        return _SomeSyncs(self, most, eventfd)

    def in_kernel(self, sync: Sync) -> None:
        """What the kernel would do."""
        if not self._is_dropped(sync.descriptor, directory=sync.whole, kernel=True):
            (os.fsync if sync.whole else os.fdatasync)(sync.descriptor)


class _SomeSyncs(KernelSyncs):
    """In the place of the kernel: done at once, or left out."""

    def __init__(self, files: _Without, most: int, eventfd: int) -> None:
        self.most, self._files, self._eventfd = most, files, eventfd
        self._done: list[tuple[Any, OSError | None]] = []

    @property
    def in_flight(self) -> int:
        return len(self._done)

    def start(self, syncs: Sequence[Sync]) -> int:
        syncs = syncs[: self.most - len(self._done)]
        for sync in syncs:
            self._files.in_kernel(sync)
            self._done.append((sync.ticket, None))
        os.eventfd_write(self._eventfd, 1)
        return len(syncs)

    def finished(self) -> list[tuple[Any, OSError | None]]:
        done, self._done = self._done, []
        return done

    def close(self) -> list[tuple[Any, OSError | None]]:
        return self.finished()


def files_without(name: str) -> Files:
    """The file system, as a store uses it that leaves out a sync."""
    return _Without(MUTANTS[name])


# ---- careless with errors


class _TriesAgain(Files):
    """A sync that failed is asked for again: the second one succeeds on ext4 and xfs, and the data is lost."""

    def fdatasync(self, fd: int) -> None:
        try:
            super().fdatasync(fd)
        except OSError:
            super().fdatasync(fd)


class _LooksAway(Files):
    """A sync that failed is taken for one that succeeded."""

    def fdatasync(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            super().fdatasync(fd)


class _MapsUnread(Files):
    """What is mapped was not read before: a page that can't be read kills who touches it."""

    def map(self, fd: int, length: int) -> mmap.mmap:
        return mmap.mmap(fd, length, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)


CARELESS: Final[Mapping[str, tuple[type[Files], str]]] = {
    "a failed sync is tried again": (_TriesAgain, "the blocks of one segment fail once"),
    "a failed sync is ignored": (_LooksAway, "one first record fails once"),
    "mappings are not read first": (_MapsUnread, "a large snapshot can't be read"),
}
"""Name -> what is careless, and the failure of the disk that shows it."""


def files_of(name: str) -> Files:
    """Those of a careless store; of the real one without a name."""
    return CARELESS[name][0]() if name else Files()
