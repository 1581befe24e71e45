"""Whether a rollout's directory is still what it was when it was looked at, at the price of a few `stat`.

A fingerprint covers inode, size, time of modification and time of change of the directory, of everything in it, and of
the files below. The time of change can't be set: what is put back with its old times, or damaged without a new size,
shows all the same. Two changes may fall into one tick of the clock, though, so what has changed just now has no
fingerprint that counts.

Left out, which saves half of the time, are directories of snapshots and their manifests: a segment that is missing is
missed by its name, and a manifest tells nothing of a rollout without damage that its segments don't tell. So a manifest
that was damaged or removed by hand changes no row, but for the size if it was removed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from typing import Literal

import msgspec

from ..store.layout import DAMAGED, MANIFEST, is_note, kind_below, kind_of_name
from .marks import FACTS, SEPARATOR

__all__ = ("NOTHING_SEEN", "Seen", "see")

_SETTLED_NS = 2_000_000_000
"""Twice the coarsest tick of a file system that has hard links (a second, ext4 with small inodes)."""

_stat = os.stat


class Seen(msgspec.Struct, frozen=True, gc=False):
    """What one walk through a rollout's directory found."""

    mark: int
    """Digest of all facts; 0: not to be trusted, for it was being changed."""
    folder: str
    """The one directory in it, as nearly always; else empty."""
    names: str
    """The paths below `folder` that the digest covers, joined."""
    state: Literal["open", "frozen", "retired", ""]
    """As far as the names tell; empty: absent, or not as the store makes it."""
    files: int
    bytes: int
    """Each file counted once, however many names it has."""
    leftover: int
    """Bytes of what a crash left half-built or half-deleted."""
    changed_at: float
    """Unix seconds: the last modification of anything in it."""


NOTHING_SEEN = Seen(0, "", "", "", 0, 0, 0, 0.0)


def see(rollouts: int, path: str) -> Seen:
    """Walk through the rollout directory `path`, which is relative to the open directory `rollouts`.

    Raises `OSError` as the kernel gives it: `FileNotFoundError` if something vanished meanwhile.
    """
    begun = time.time_ns()
    found = {"": _stat(path, dir_fd=rollouts, follow_symlinks=False)}
    top = sorted(_names(rollouts, path))
    files: dict[int, list[str]] = {}
    waiting = list(top)
    for name in waiting:  # which grows
        there = found[name] = _stat(f"{path}/{name}", dir_fd=rollouts, follow_symlinks=False)
        if stat.S_ISDIR(there.st_mode):
            waiting.extend(f"{name}/{inner}" for inner in sorted(_names(rollouts, f"{path}/{name}")))
        else:
            files.setdefault(there.st_ino, []).append(name)
    home, state, snapshot = _current(top, found)
    sizes = {number: found[names[0]].st_size for number, names in files.items()}
    left = [number for number, names in files.items() if all(_is_left(name, home, state, snapshot) for name in names)]
    covered = _covered(found, files, snapshot)
    trusted = all(abs(begun - there.st_ctime_ns) > _SETTLED_NS for there in found.values())
    trusted &= not any(SEPARATOR in name for name in covered)
    folder = top[0] if len(top) == 1 and stat.S_ISDIR(found[top[0]].st_mode) else ""
    facts = FACTS(found[""]) + (FACTS(found[folder]) if folder else ())
    for name in covered:
        if name != folder:
            facts += FACTS(found[name])
    return Seen(
        _digest(facts) if trusted else 0,
        folder,
        SEPARATOR.join(name[len(folder) + 1 :] if folder else name for name in covered if name != folder),
        state,
        len(files),
        sum(sizes.values()),
        sum(sizes[number] for number in left),
        max(there.st_mtime_ns for there in found.values()) / 1e9,
    )


def _current(top: list[str], found: Collection[str]) -> tuple[str, Literal["open", "frozen", "retired", ""], str]:
    """What counts in a directory with these names: the incarnation or tombstone, the state, the snapshot."""
    kinds = {name: kind_of_name(name) for name in top}
    for name, kind in kinds.items():
        if kind == "tombstone":
            return name, "retired", ""
    live = [name for name, kind in kinds.items() if kind == "incarnation"]
    if len(live) != 1:
        return "", "", ""
    home = live[0]
    below = [name[len(home) + 1 :] for name in found if name.startswith(f"{home}/") and name.count("/") == 1]
    versions = [int(name[1:]) for name in below if kind_below(name) == "version"]
    if versions:
        return home, "frozen", f"{home}/v{max(versions)}"
    return home, "open" if any(kind_below(name) == "segment" for name in below) else "", ""


def _is_left(name: str, home: str, state: str, snapshot: str) -> bool:
    """Whether the next sweep of the store removes it, or the next operation."""
    first, _, rest = name.partition("/")
    if kind_of_name(first) == "trash":
        return True
    if first != home:
        return False
    second = rest.partition("/")[0]
    if state == "retired":
        return not is_note(second)
    kind = kind_below(second)
    return kind == "temporary" or (kind == "version" and f"{home}/{second}" != snapshot)


def _covered(found: Collection[str], files: dict[int, list[str]], snapshot: str) -> list[str]:
    """What the fingerprint covers: of several names of one file that in the snapshot."""
    inside = f"{snapshot}/"
    left_out = {"", snapshot}
    for names in files.values():
        if len(names) > 1:
            kept = next((name for name in names if snapshot and name.startswith(inside)), names[-1])
            left_out.update(name for name in names if name != kept)
    if snapshot and f"{inside}{DAMAGED}" not in found:
        manifest = f"{inside}{MANIFEST}"
        if any(name.startswith(inside) and name != manifest for name in found):
            left_out.add(manifest)
    return [name for name in found if name not in left_out]


def _digest(facts: tuple[int, ...]) -> int:
    # That of a tuple of whole numbers is the same in every process of this version of Python, which the cache knows.
    return hash(facts) or 1


def _names(rollouts: int, path: str) -> list[str]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=rollouts)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
