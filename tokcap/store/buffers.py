"""The bytes of a file in memory: read, or mapped where that pays and there are descriptors enough."""

from __future__ import annotations

import errno
import mmap
import resource
import weakref

from .files import Files
from .frame import Buffer

__all__ = ("map_or_read", "size_to_read")

_LARGE = 256 << 20
"""Bytes; segments are smaller, unless a single entry is as large."""

_MAP_FROM_BYTES = 128 << 10
"""Smaller files are read instead: as fast, and a mapping costs a descriptor for as long as it lives."""

_MAPPED: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Every live mapping of this process."""


def size_to_read(files: Files, fd: int) -> int:
    """How many bytes of an open file are worth reading: its size; of a large one that is mostly holes, which cost
    nobody anything, those before the first hole."""
    there = files.fstat(fd)
    size = there.st_size
    if size < _LARGE or 4 * 512 * there.st_blocks >= size:
        return size
    return files.first_hole(fd, size)


def map_or_read(files: Files, fd: int, length: int) -> Buffer:
    """The first `length` bytes of an open file, fewer only if it has fewer. Nobody may cut it while they are used."""
    if length >= _MAP_FROM_BYTES and files.fstat(fd).st_size >= length and _may_map():
        try:
            mapped = files.map(fd, length)
            _MAPPED.add(mapped)
            return mapped
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
    return files.read(fd, length, 0)


def _may_map() -> bool:
    """Mappings may take a quarter of the descriptors: snapshots that somebody keeps must not stop everybody else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft == resource.RLIM_INFINITY or 4 * len(_MAPPED) < soft
