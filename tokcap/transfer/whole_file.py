"""A file that appears at once, whole and synced, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import BinaryIO

from ..errors import BusyError

__all__ = ("UNFINISHED", "WholeFile", "sync_directory")

UNFINISHED = ".unfinished"
"""How the name ends under which a file grows, beside the one that it gets."""


class WholeFile:
    """Grows as `.<name>.unfinished` in the same directory. What a killed process left there is written over.

    Raises `BusyError` if another process writes the same file, and `OSError` if a link or no file has that name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.temporary = temporary_of(path)
        fd = _opened(self.temporary)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _has_name(fd, self.temporary):  # it was finished meanwhile: it is whole, and not ours
                raise BlockingIOError(errno.EAGAIN, "it got another name", path)
            os.ftruncate(fd, 0)
        except BlockingIOError as error:
            os.close(fd)
            raise BusyError(f"another process writes {path} now") from error
        except BaseException:
            os.close(fd)
            raise
        self.file: BinaryIO = os.fdopen(fd, "w+b", 1 << 20)

    def sync(self) -> int:
        """Everything that was written is on the disk; how many bytes that are."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def publish(self) -> None:
        """Give the file its name; what had it before is replaced. To be called after `sync`."""
        os.rename(self.temporary, self.path)
        sync_directory(os.path.dirname(self.path))
        self.file.close()

    def discard(self) -> None:
        """Leave nothing behind; no-op after `publish`."""
        if not self.file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
            with contextlib.suppress(OSError, ValueError):
                self.file.close()


def _opened(path: str) -> int:
    """A file of this name, made if it is missing; never what a link leads to, which others may have planted."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    there = os.fstat(fd)
    if stat.S_ISREG(there.st_mode) and there.st_nlink <= 1:
        return fd
    os.close(fd)
    raise OSError(errno.EEXIST, "not a file of an unfinished export; remove it", path)


def _has_name(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def temporary_of(path: str) -> str:
    """Where the file at `path` grows."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}{UNFINISHED}")


def sync_directory(path: str) -> None:
    """Names that were made or changed in it are on the disk."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
