"""What a store weighs on its disk: rollouts by state, what crashes and repairs left, and what a sweep would free."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence

import msgspec

from ..store import FileStore
from ..store.layout import Layout
from .row import RolloutRow

__all__ = ("Share", "StoreUsage", "usage_of_store")


class Share(msgspec.Struct):
    """Some files. Each is counted once, however many names it has; lengths, not blocks of the disk."""

    rollouts: int = 0
    files: int = 0
    bytes: int = 0


class StoreUsage(msgspec.Struct, frozen=True):
    """Of a whole store."""

    states: dict[str, Share]
    """By state; what is unreadable weighs what could be seen of it."""
    leftovers: Share
    """Among these: what crashes left half-built or half-deleted."""
    quarantine: Share
    """What `tokcap verify --repair` moved aside. No sweep removes it."""
    rest: Share
    """Beside the rollouts: markers, locks, one small file for each writer."""
    bytes: int
    files: int
    sweepable_tombstones: int
    """Of retired rollouts, as old as that or older."""
    sweepable_bytes: int
    """What the next sweep would free: these tombstones with what was said after them, and leftovers."""


def usage_of_store(store: FileStore, rows: Sequence[RolloutRow], older_than_s: float = 24 * 3600.0) -> StoreUsage:
    """Add up rows of `tokcap.inspection.rows` (whole=False will do), and look at what is beside the rollouts.

    older_than_s: the age from which on a sweep removes tombstones; the store's own takes those of a day.
    """
    states: dict[str, Share] = {}
    leftovers = Share()
    tombstones = freed = 0
    limit = time.time() - older_than_s
    for row in rows:
        share = states.setdefault(row.state, Share())
        share.rollouts += 1
        share.files += row.files
        share.bytes += row.bytes
        if row.leftover:
            leftovers.rollouts += 1
            leftovers.bytes += row.leftover
        if row.state == "retired" and row.changed_at <= limit:
            tombstones += 1
            freed += row.bytes
        else:
            freed += row.leftover
    layout = Layout(store.directory)
    quarantine = _below(layout.quarantine)
    rest = _below(store.directory, without=(layout.rollouts, layout.quarantine))
    everything = (*states.values(), quarantine, rest)
    return StoreUsage(
        dict(sorted(states.items())),
        leftovers,
        quarantine,
        rest,
        sum(share.bytes for share in everything),
        sum(share.files for share in everything),
        tombstones,
        freed,
    )


def _below(path: str, without: Sequence[str] = ()) -> Share:
    found = Share()
    seen: set[int] = set()
    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                names = [entry.path for entry in entries]
        except OSError:  # it isn't there, or nobody may look
            continue
        for name in names:
            try:
                there = os.lstat(name)
            except OSError:
                continue
            if stat.S_ISDIR(there.st_mode):
                if name not in without:
                    folders.append(name)
            elif there.st_ino not in seen:
                seen.add(there.st_ino)
                found.files += 1
                found.bytes += there.st_size
    return found
