"""The fence of a rollout: kernel locks on its directory, which a dead process can't leave behind.

Whoever changes a rollout holds `flock` on its directory: a put from its check until its sync returned, a freeze until
its snapshot is published. Locking the directory needs no lock file, so there is none that a sweep could pull away
under a waiter; a directory that was removed or replaced meanwhile is recognised by its inode.

Three more locks on the same directory are signals only (open-file-description read locks on byte ranges, taken by
waiters and tested by others with F_OFD_GETLK, 0.4 us):

- WAITING: somebody waits for the fence, newcomers stand back and wait, too;
- FREEZING: a freeze is among those who wait, the others let it go first;
- CLOSING: a freeze waits for open calls, new calls are refused.

Measured here: `filelock.lock_descriptor` and unlock 1.0 us (bare flock 0.8), the test 0.4 us; a path-based
lock takes 80 us and polls at 50 ms.
"""

from __future__ import annotations

import fcntl
import os
import struct

from .files import Files

__all__ = (
    "CLOSING",
    "FREEZING",
    "WAITING",
    "is_signalled",
    "lock",
    "open_fence",
    "signal",
    "still_there",
    "unlock",
)

WAITING, FREEZING, CLOSING = 1, 2, 3

_FLOCK = struct.Struct("hhqqi4x")


def _request(kind: int, signal: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, signal, 1, 0)


_TESTS = {name: _request(fcntl.F_WRLCK, name) for name in (WAITING, FREEZING, CLOSING)}


def open_fence(files: Files, path: str) -> int | None:
    """A descriptor on the rollout directory, or None if there is no such directory."""
    try:
        return files.open_directory(path)
    except FileNotFoundError:
        return None


def lock(files: Files, fd: int) -> bool:
    """Take the fence if nobody holds it and nobody waits for it."""
    return not is_signalled(fd, WAITING) and files.try_lock(fd)


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
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _TESTS[name])
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
