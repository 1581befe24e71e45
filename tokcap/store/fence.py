"""The fence of a rollout: kernel locks on its directory, which a dead process can't leave behind.

Whoever changes a rollout holds `flock` on its directory: a put from its check until its sync returned, a freeze until
its snapshot is published. Locking the directory needs no lock file, so there is none that a sweep could pull away
under a waiter; a directory that was removed or replaced meanwhile is recognised by its inode.

More locks on the same directory are signals only: open-file-description read locks on single bytes, which others test
with F_OFD_GETLK (0.4 us).

- Who waits for the fence holds the byte of its place in the queue: when it came, in microseconds of CLOCK_MONOTONIC,
  which all processes of a node share. Newcomers who see anybody in the queue stand back and queue up, too; who sees
  somebody before him lets him go first. A freeze has place 0, so that no put overtakes it.
- CLOSING: a freeze waits for open calls, new calls are refused.

Measured here: `filelock.lock_descriptor` and unlock 1.0 us (bare flock 0.8), the test 0.4 us; a path-based
lock takes 80 us and polls at 50 ms.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time

from .files import Files

__all__ = (
    "CLOSING",
    "FREEZE_PLACE",
    "is_anybody_before",
    "is_signalled",
    "lock",
    "next_place",
    "open_fence",
    "queue_up",
    "signal",
    "still_there",
    "unlock",
)

CLOSING = 1
FREEZE_PLACE = 0
_QUEUE = 1 << 32
"""The byte of place 0."""

_FLOCK = struct.Struct("hhqqi4x")


def _request(kind: int, start: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


_IS_ANYBODY_WAITING = _request(fcntl.F_WRLCK, _QUEUE, 0)  # length 0: to the end of all bytes


def open_fence(files: Files, path: str) -> int | None:
    """A descriptor on the rollout directory, or None if there is no such directory.

    Raises `OSError` if a symlink on the way leads out of the store: others of its group may have put one there.
    """
    shard = os.path.dirname(path)
    try:
        for above in (os.path.dirname(shard), shard):
            _check_directory(files, above)
        return files.open_directory(path)
    except FileNotFoundError:
        return None


def _check_directory(files: Files, path: str) -> None:
    if not stat.S_ISDIR(files.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a directory, nor followed if it is a link", path)


def lock(files: Files, fd: int) -> bool:
    """Take the fence if nobody holds it and nobody waits for it."""
    return not _is_held(fd, _IS_ANYBODY_WAITING) and files.try_lock(fd)


def unlock(files: Files, fd: int) -> None:
    files.unlock(fd)


def still_there(files: Files, fd: int, path: str) -> bool:
    """Whether `path` is still the directory behind `fd`: it may have been removed while we waited."""
    try:
        there = files.stat(path)
    except FileNotFoundError:
        return False
    held = files.fstat(fd)
    return (there.st_ino, there.st_dev) == (held.st_ino, held.st_dev)


def signal(fd: int, name: int) -> None:
    """Show `name` to others until `fd` is closed; several may show it at once."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK, name))


def is_signalled(fd: int, name: int) -> bool:
    """Whether somebody shows `name` through another descriptor."""
    return _is_held(fd, _request(fcntl.F_WRLCK, name))


def next_place() -> int:
    """The place in the queue of somebody who comes now."""
    return time.monotonic_ns() // 1000 + 1


def queue_up(fd: int, place: int) -> None:
    """Show others that the fence is waited for, until `fd` is closed."""
    signal(fd, _QUEUE + place)


def is_anybody_before(fd: int, place: int) -> bool:
    """Whether somebody with a smaller place waits, through another descriptor."""
    return place > 0 and _is_held(fd, _request(fcntl.F_WRLCK, _QUEUE, place))


def _is_held(fd: int, request: bytes) -> bool:
    return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))[0] != fcntl.F_UNLCK)
