"""What a long run looks at: memory, descriptors, threads and mappings of a process, and what the store asks the kernel.

Memory is what a process has for itself (`RssAnon`): mapped files are the kernel's to drop.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokcap.store.files import Files, Modes

__all__ = (
    "CountedFiles",
    "Vitals",
    "blocks",
    "free_inodes",
    "give_back",
    "largest_directory",
    "names_below",
    "slope",
    "vitals",
)

MIB = 1 << 20


class Vitals(NamedTuple):
    """What a process holds at a moment."""

    at: float
    """Seconds of CLOCK_MONOTONIC."""
    memory: int
    """Bytes."""
    descriptors: int
    threads: int
    maps: int


def vitals(pid: int | str = "self") -> Vitals:
    """Of this process, or of another one."""
    process = Path(f"/proc/{pid}")
    memory = threads = 0
    for line in (process / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            memory = int(line.split()[1]) << 10
        elif line.startswith("Threads:"):
            threads = int(line.split()[1])
    maps = (process / "maps").read_text().count("\n")
    return Vitals(time.monotonic(), memory, len(os.listdir(process / "fd")), threads, maps)


def give_back() -> None:
    """Have the allocator give the kernel what it keeps of freed memory, where it can; the rest is really held."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Per second, by least squares."""
    if len(times) < 2 or times[0] == times[-1]:
        return 0.0
    moments = np.asarray(times, float) - times[0]
    return float(np.polyfit(moments, np.asarray(values, float), 1)[0])


def blocks() -> int:
    """How many blocks of memory live objects hold; it tells a leak of one object in a short run."""
    gc.collect()
    return sys.getallocatedblocks()


def names_below(directory: Path) -> Iterator[str]:
    """Every file and directory below it."""
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            yield f"{place}/{name}"


def largest_directory(directory: Path) -> int:
    """Bytes of the largest directory itself, not of what is in it; of the top and the two levels below."""
    places = [directory, *(place for place in directory.glob("*/") if place.is_dir())]
    places += [place for place in directory.glob("rollouts/*/") if place.is_dir()]
    return max(place.stat().st_size for place in places)


def free_inodes(directory: Path) -> int:
    """Of its file system; others on it count, too."""
    return os.statvfs(directory).f_ffree


_COUNTED = (
    "create",
    "fsync",
    "fsync_directory",
    "link",
    "mkdir",
    "open",
    "open_directory",
    "pwritev",
    "rename",
    "rmdir",
    "stat",
    "unlink",
)


class CountedFiles(Files):
    """Counts what the store asks the kernel, and the names that directories give: what each operation costs.

    Counts don't depend on the machine or on who else is on it, so they can show that a cost doesn't grow.
    """

    def __init__(self, modes: Modes | None = None) -> None:
        super().__init__(modes)
        self._counts: Counter[str] = Counter()
        self._guard = threading.Lock()
        for name in _COUNTED:
            setattr(self, name, self._counting(name, getattr(self, name)))

    def _counting(self, name: str, method: object) -> object:
        def counted(*arguments: object, **named: object) -> object:
            self._add(name, 1)
            return method(*arguments, **named)  # type: ignore[operator]

        return counted

    def _add(self, name: str, count: int) -> None:
        with self._guard:
            self._counts[name] += count

    def listdir(self, path: str) -> list[str]:
        names = super().listdir(path)
        self._add("listdir", 1)
        self._add("names listed", len(names))
        return names

    def during(self) -> int:
        """Everything counted since the last time."""
        with self._guard:
            total = sum(self._counts.values())
            self._counts.clear()
        return total
