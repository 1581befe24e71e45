"""What a sweep would remove: old tombstones, and what crashes left."""

from __future__ import annotations

import os
import stat
import time

import msgspec

from ..store import FileStore
from ..store.files import Files
from ..store.layout import Directory, Layout
from ..store.sweep import directories, usage_of

__all__ = ("Remains", "remains")


class Remains(msgspec.Struct):
    """How much there is to sweep."""

    tombstones: int = 0
    tombstone_bytes: int = 0
    """Notes beside them, and payload that a crash kept from being removed."""
    leftovers: int = 0
    """Half-built snapshots, versions before the last, and what was reset."""
    leftover_bytes: int = 0
    """Of files that have no other name: a link costs nothing."""
    unreadable: int = 0
    """Rollouts that a sweep leaves alone, because what they hold can't be read; `verify` says why."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.tombstone_bytes + self.leftover_bytes


def remains(store: FileStore, older_than_s: float) -> Remains:
    """Look at what a sweep of tombstones older than that (0: every one) would remove; nothing is changed."""
    files, found = Files(), Remains()
    limit = time.time() - older_than_s if older_than_s > 0 else float("inf")
    for _, directory in directories(files, Layout(store.directory)):
        if not isinstance(directory, Directory):
            found.unreadable += 1
            continue
        if directory.tombstone is not None and directory.tombstone.retired_at <= limit:
            found.tombstones += 1
            found.tombstone_bytes += usage_of(files, directory).bytes
            continue
        for path in directory.leftovers:
            found.leftovers += 1
            found.leftover_bytes += _own_bytes(path)
    return found


def _own_bytes(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                there = os.lstat(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            total += there.st_size if stat.S_ISREG(there.st_mode) and there.st_nlink == 1 else 0
    return total
