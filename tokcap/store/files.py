"""Every file-system call of the store that matters for durability stands here, and nowhere else.

Faults can be injected and a trace recorded by handing `FileStore` another `Files`. The rules that the callers keep:
a file is synced before the directory that names it, the directory before the call is acknowledged; a rename is
published by a sync of its parent; after a failed sync the descriptor is closed and never used again (on ext4 and xfs
the second fsync succeeds and the data is lost, measured on Linux 6.18).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import DurabilityError
from .frame import SPACE
from .syncs import KernelSyncs

__all__ = ("Files", "FreeSpace", "Modes")

_MAX_BUFFERS = 1000  # IOV_MAX is 1024
_MEGABYTE = 1 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, since Linux 5.14

_madvise = ctypes.CDLL(None).madvise  # that of `mmap` would stop every other thread meanwhile
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FreeSpace(NamedTuple):
    """What is free on a file system for users without privileges, and how much there is at all."""

    bytes: int
    all_bytes: int
    """0 if they are not counted, as on a tmpfs without a size."""
    inodes: int
    all_inodes: int
    """0 if they are not counted."""


class Modes:
    """Permissions of what a store creates: private, or shared with one group."""

    def __init__(self, group_id: int | None = None) -> None:
        self.group_id = group_id
        self.directory = 0o700 if group_id is None else 0o2770
        self.file = 0o600 if group_id is None else 0o660


class Files:
    """The file system, as the store uses it. Methods raise `OSError` as the kernel gives it."""

    def __init__(self, modes: Modes | None = None) -> None:
        from filelock import lock_descriptor, unlock_descriptor  # 15 ms, which `import tokcap` need not take

        self.modes = modes or Modes()
        self._mount_nodes: dict[int, str] = {}
        """Device -> the node of its mount under /sys/fs."""
        self._lock, self._unlock = lock_descriptor, unlock_descriptor

    # ---- changing

    def mkdir(self, path: str) -> None:
        """Make one directory, with the store's permissions whatever the umask."""
        os.mkdir(path, 0o700)
        if self.modes.group_id is None:
            if stat.S_IMODE(os.stat(path).st_mode) != self.modes.directory:
                os.chmod(path, self.modes.directory)
            return
        # Others of the group may put a symlink into its place at once: what was made is changed, not what its name is.
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            made = f"/proc/self/fd/{fd}"
            os.chown(made, -1, self.modes.group_id)
            if stat.S_IMODE(os.fstat(fd).st_mode) != self.modes.directory:
                os.chmod(made, self.modes.directory)
        finally:
            os.close(fd)

    def create(self, path: str) -> int:
        """A new, empty file, open for reading and writing; `FileExistsError` if the name is taken."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if self.modes.group_id is not None:
                os.fchown(fd, -1, self.modes.group_id)
            if stat.S_IMODE(os.fstat(fd).st_mode) != self.modes.file:
                os.fchmod(fd, self.modes.file)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        """Write all buffers one after another from `offset`; the number of bytes written."""
        if len(buffers) == 1:
            written = self.pwritev(fd, buffers, offset)
            if written == len(buffers[0]):
                return written
        position = offset
        for first in range(0, len(buffers), _MAX_BUFFERS):
            pending = list(buffers[first : first + _MAX_BUFFERS])
            while pending:
                written = self.pwritev(fd, pending, position)
                if written <= 0:
                    raise OSError(errno.EIO, "write accepted no bytes")
                position += written
                while pending and written >= len(pending[0]):
                    written -= len(pending.pop(0))
                if written:
                    pending[0] = memoryview(pending[0])[written:]
        return position - offset

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def write_space(self, fd: int, length: int, offset: int) -> int:
        """Write `length` bytes of space from `offset`, both multiples of 8; how many were written."""
        return os.pwrite(fd, SPACE * (length // len(SPACE)), offset)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def acknowledge(self, fd: int, word: bytes, offset: int) -> None:
        """Overwrite the trailer of a synced batch; inside space that exists, deliberately not synced."""
        if os.pwrite(fd, word, offset) <= 0:  # one byte of it is enough
            raise OSError(errno.EIO, "write accepted no bytes")

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
        """What does many `fdatasync` at once, in the kernel; None if there is none, or if `fdatasync` is not the
        kernel's own here."""
        return KernelSyncs.open(most, eventfd) if type(self).fdatasync is Files.fdatasync else None

    def fsync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(fd)
        finally:
            os.close(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    # ---- looking

    def open(self, path: str, *, write: bool = False) -> int:
        """An existing regular file; a symlink, FIFO or directory under its name is refused, never followed."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd

    def open_directory(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def stat_below(self, fd: int, path: str) -> os.stat_result:
        """What `path` is, seen from the directory `fd`: a shorter way than from the root."""
        return os.stat(path, dir_fd=fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def mount_life(self, path: str) -> str:
        """What identifies the file system under `path` from its mount to its unmount; empty if that can't be told.

        A file system that was shut down or torn away and mounted again has lost its page cache, in the same boot. The
        kernel makes a new node under /sys/fs for each mount of an ext4, xfs or f2fs; other kinds have none.
        """
        device = os.stat(path).st_dev
        node = self._mount_node(device)
        try:
            return str(os.stat(node).st_ino) if node else ""
        except OSError:
            del self._mount_nodes[device]
            return ""

    def _mount_node(self, device: int) -> str:
        node = self._mount_nodes.get(device)
        if node is None:
            name = os.path.basename(os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
            nodes = (f"/sys/fs/{kind}/{name}" for kind in ("ext4", "xfs", "f2fs"))
            node = self._mount_nodes[device] = next((node for node in nodes if os.path.isdir(node)), "")
        return node

    def lacks_journal(self, path: str) -> bool:
        """Whether `path` is on an ext4 that is known to have no journal."""
        node = self._mount_node(os.stat(path).st_dev)
        try:
            with open(f"{node}/journal_task") as file:
                return file.read().strip() == "<none>"
        except OSError:  # another file system, or no /sys
            return False

    def free_space(self, path: str) -> FreeSpace:
        """Of the file system that holds `path`."""
        there = os.statvfs(path)
        size = there.f_frsize
        return FreeSpace(there.f_bavail * size, there.f_blocks * size, there.f_favail, there.f_files)

    def listdir(self, path: str) -> list[str]:
        """The names in a directory; `NotADirectoryError` for a symlink to one: what is listed may be deleted."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """`length` bytes from `offset`, fewer only at the end of the file. An error names the file."""
        try:
            data = os.pread(fd, length, offset)
            while len(data) < length:
                more = os.pread(fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            error.filename = os.readlink(f"/proc/self/fd/{fd}")
            raise
        return data

    def first_hole(self, fd: int, size: int) -> int:
        """Where the first hole of a file of `size` bytes begins; `size` if it has none, or the file system no holes."""
        try:
            return os.lseek(fd, 0, os.SEEK_HOLE)
        except OSError:
            return size

    def word_at(self, fd: int, offset: int) -> bytes:
        """Eight bytes, fewer only at the end of the file."""
        return os.pread(fd, 8, offset)

    def map(self, fd: int, length: int) -> mmap.mmap:
        """A read-only mapping. It keeps its own descriptor (CPython < 3.13 duplicates it).

        All of it is read here. Whoever touches a page that the device can't read is killed; this raises.
        """
        mapped = mmap.mmap(fd, length, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        if _madvise(address, length, _POPULATE_READ):
            try:  # an older kernel, or a page can't be read: then this says which file
                for offset in range(0, length, _MEGABYTE):
                    self.read(fd, min(_MEGABYTE, length - offset), offset)
            except OSError:
                mapped.close()
                raise
        return mapped

    def try_lock(self, fd: int) -> bool:
        """`flock` without waiting, on the open file description."""
        return self._lock(fd, blocking=False)

    def unlock(self, fd: int) -> None:
        self._unlock(fd)


def durability_error(error: OSError, doing: str, path: str) -> DurabilityError:
    """What the caller gets for a failed file-system call: the same errno, with what was being done and what to do."""
    if isinstance(error, DurabilityError):
        return error
    number = error.errno or 0
    advice = {
        errno.ENOSPC: "the disk is full: free space and try again",
        errno.EDQUOT: "the quota is used up: free space and try again",
        errno.EMFILE: "too many open files: raise the descriptor limit (ulimit -n)",
        errno.ENFILE: "too many open files on this machine",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "its owner or its mode forbids it",
        errno.ENOTDIR: "a file, or a link, is where a directory belongs; see tokcap verify",
        errno.EIO: "the device reported an error: check it before you go on",
    }.get(number, "nothing was acknowledged; it may be tried again")
    return DurabilityError(number, f"{doing}: {error.strerror or error}; {advice}", error.filename or path)
