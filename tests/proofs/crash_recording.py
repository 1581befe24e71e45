"""Everything that matters for durability, in the order in which it was asked of the file system.

A `Recording` is shared by all store objects that work on its directory; each has `RecordingFiles` of its own, which
does every call and its note under one lock, so that the order of the notes is the order of the calls.
"""

from __future__ import annotations

import errno
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from tests.faulty_files import CHANGING, SYNCING, Call, FaultyFiles
from tokcap.store import files as files_module

__all__ = ("STORE", "Event", "Mark", "Recording", "RecordingFiles", "Tree")

STORE = os.path.dirname(files_module.__file__)
_BELOW = tuple(os.path.join(STORE, name) for name in ("files.py", "syncs.py"))
"""The sites of syncs are those who call these."""
_CALLERS = 3


@dataclass(frozen=True, slots=True)
class Event:
    """One call. Directories and files are numbers: their names change, and a file may have several."""

    kind: str
    """mkdir, create, link, rename, unlink, rmdir: of `name` in directory `where`; write, size, sync: of `where`;
    settled: everything so far is durable; mark."""
    where: int = 0
    name: str = ""
    new_name: str = ""
    what: int = 0
    """What the name leads to."""
    offset: int = 0
    """Of a write; or the size."""
    data: bytes = b""
    site: str = ""
    """Of a sync: which line asked for it, for what, on whose behalf."""
    path: str = ""
    """For people: what was meant."""
    place: tuple[str, int] = ("", 0)
    """Of a sync: file and line in the store."""

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (
            f" at {self.offset}, {len(self.data)} bytes" if self.kind == "write" else ""
        )


@dataclass(frozen=True, slots=True)
class Mark:
    """Where in the recording an operation was started or had returned."""

    position: int
    operation: int
    returned: bool


class Tree:
    """Names, and what they lead to: directories by number, with their entries, and files by number."""

    def __init__(self) -> None:
        self.directories: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytes] = {}
        """The durable content of each file that was there before the recording began."""

    def number_of(self, path: str) -> int:
        """What a path relative to the root leads to. Raises `KeyError`."""
        number = 0
        for name in path.split("/") if path else ():
            number = self.directories[number][name]
        return number


def read_tree(base: str) -> Tree:
    """What is on disk below `base`, all of it taken for durable."""
    tree = Tree()
    inodes: dict[int, int] = {}
    count = 0
    waiting = [(base, 0)]
    while waiting:
        path, number = waiting.pop()
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            inode = entry.inode()
            if inode not in inodes:
                count += 1
                inodes[inode] = count
                if entry.is_dir(follow_symlinks=False):
                    tree.directories[count] = {}
                    waiting.append((entry.path, count))
                else:
                    with open(entry.path, "rb") as file:
                        tree.files[count] = file.read()
            tree.directories[number][entry.name] = inodes[inode]
    return tree


class Recording:
    """The calls of everybody who works below `base`."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.lock = threading.RLock()
        self.before = read_tree(base)
        """What was durable when it began."""
        self._now = read_tree(base)
        self._count = len(self._now.files) + len(self._now.directories)
        self._numbers: dict[int, int] = {}
        """Descriptor -> what it leads to."""
        self._sizes = {number: len(data) for number, data in self._now.files.items()}
        self.events: list[Event] = []
        self.marks: list[Mark] = []

    def mark(self, operation: int, *, returned: bool) -> None:
        with self.lock:
            self.marks.append(Mark(len(self.events), operation, returned))

    def settle(self) -> None:
        """All of it is durable, as after a `sync` by somebody else."""
        with self.lock:
            self.events.append(Event("settled"))

    # ---- notes, the lock held

    def _split(self, path: str) -> tuple[int, str, str] | None:
        """(directory, name, path below the base), None if it lies elsewhere."""
        if not path.startswith(f"{self.base}/"):
            return None
        below = path[len(self.base) + 1 :]
        directory, _, name = below.rpartition("/")
        return self._now.number_of(directory), name, below

    def made(self, kind: str, path: str, fd: int = -1) -> None:
        found = self._split(path)
        if found is None:
            return
        where, name, below = found
        self._count += 1
        number = self._count
        if kind == "mkdir":
            self._now.directories[number] = {}
        else:
            self._sizes[number] = 0
            self._numbers[fd] = number
        self._now.directories[where][name] = number
        self.events.append(Event(kind, where, name, what=number, path=below))

    def linked(self, source: str, target: str) -> None:
        found, to = self._split(source), self._split(target)
        assert found is not None and to is not None
        number = self._now.directories[found[0]][found[1]]
        self._now.directories[to[0]][to[1]] = number
        self.events.append(Event("link", to[0], to[1], what=number, path=f"{found[2]} -> {to[2]}"))

    def renamed(self, source: str, target: str) -> None:
        found, to = self._split(source), self._split(target)
        assert found is not None and to is not None
        # Nothing in the store moves from one directory to another; the models would have to know how that can tear.
        assert found[0] == to[0], f"{source} -> {target}"
        entries = self._now.directories[found[0]]
        entries[to[1]] = number = entries.pop(found[1])
        self.events.append(Event("rename", found[0], found[1], to[1], number, path=f"{found[2]} -> {to[2]}"))

    def removed(self, kind: str, path: str) -> None:
        found = self._split(path)
        if found is not None:
            number = self._now.directories[found[0]].pop(found[1])
            self.events.append(Event(kind, found[0], found[1], what=number, path=found[2]))

    def opened(self, fd: int, path: str) -> None:
        below = "" if path == self.base else path[len(self.base) + 1 :]
        if path == self.base or path.startswith(f"{self.base}/"):
            self._numbers[fd] = self._now.number_of(below)
        else:
            self._numbers.pop(fd, None)

    def written(self, fd: int, data: bytes, offset: int) -> None:
        number = self._numbers[fd]
        self.events.append(Event("write", number, offset=offset, data=data, path=self._path(fd)))
        if offset + len(data) > self._sizes[number]:
            self._resized(fd, offset + len(data))

    def truncated(self, fd: int, length: int) -> None:
        # Bytes above the end are never written again afterwards; the models would have to clear them.
        assert length <= self._sizes[self._numbers[fd]]
        self._resized(fd, length)

    def _resized(self, fd: int, size: int) -> None:
        number = self._numbers[fd]
        self._sizes[number] = size
        self.events.append(Event("size", number, offset=size, path=f"{self._path(fd)} to {size} bytes"))

    def synced(self, fd: int) -> None:
        number = self._numbers.get(fd)
        if number is not None:
            path = self._path(fd)
            site, place = _site(path)
            self.events.append(Event("sync", number, site=site, path=path, place=place))

    def _path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")[len(self.base) + 1 :]


def _role(path: str) -> str:
    """What somebody syncs, in words that are the same in every run."""
    parts = path.split("/")
    if "rollouts" not in parts:
        return "the marker" if parts[-1].startswith("FORMAT") else "a directory above"
    below = parts[parts.index("rollouts") + 1 :]
    if len(below) <= 3:
        kind = ("rollouts", "shard", "rollout", "incarnation")[len(below)]
        return "tombstone" if ".retired." in path else kind
    if len(below) == 4 and below[3].startswith("tmp-"):
        return "note or new version"
    return {"manifest": "manifest", "damaged": "manifest"}.get(below[-1], "segment")


def _site(path: str) -> tuple[str, tuple[str, int]]:
    """Which line asks for the sync of `path`, and by whom it was called."""
    frame: FrameType | None = sys._getframe()
    callers: list[str] = []
    line, place = "", ("", 0)
    while frame is not None and len(callers) < _CALLERS:
        code = frame.f_code
        if code.co_filename.startswith(STORE) and code.co_filename not in _BELOW:
            if not callers:
                line = linecache.getline(code.co_filename, frame.f_lineno).partition("  #")[0].strip()
                place = os.path.basename(code.co_filename), frame.f_lineno
            if not code.co_qualname.endswith("comp>"):
                callers.append(code.co_qualname)
        frame = frame.f_back
    return f"{' < '.join(callers)}: {line} [{_role(path)}]", place


class RecordingFiles(FaultyFiles):
    """Files of one store object, which can die between any two changes as by `kill -9`."""

    def __init__(self, recording: Recording, *, in_kernel: bool = False) -> None:
        super().__init__(in_kernel=in_kernel)
        self.recording = recording
        self._left: int | None = None
        """Changes and syncs until it dies."""
        self.dead = False

    @contextmanager
    def dying(self, after: int) -> Iterator[None]:
        """Die after so many changes and syncs; a write is cut in the middle by it."""
        self._left = after
        yield
        self._left = None

    def _enter(self, call: Call) -> bool:
        # Of a dead process the kernel closes all descriptors, and the locks with them.
        if call.kind in ("close", "unlock"):
            return super()._enter(call)
        if self._left is not None and call.kind in CHANGING + SYNCING:
            self.dead = self.dead or self._left == 0
            self._left -= 1
        if self.dead:
            raise OSError(errno.EIO, "the process is dead", call.path)
        return super()._enter(call)

    # ---- changing

    def mkdir(self, path: str) -> None:
        with self.recording.lock:
            super().mkdir(path)
            self.recording.made("mkdir", path)

    def create(self, path: str) -> int:
        with self.recording.lock:
            fd = super().create(path)
            self.recording.made("create", path, fd)
            return fd

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        with self.recording.lock:
            if self.dead:
                self._on("pwritev", fd)
            data = b"".join(buffers)
            try:
                written = super().pwritev(fd, buffers, offset)
            except OSError:
                self.recording.written(fd, self._half(buffers), offset)
                raise
            self.recording.written(fd, data[:written], offset)
            return written

    def write_space(self, fd: int, length: int, offset: int) -> int:
        with self.recording.lock:
            written = super().write_space(fd, length, offset)
            self.recording.written(fd, os.pread(fd, written, offset), offset)
            return written

    def truncate(self, fd: int, length: int) -> None:
        with self.recording.lock:
            super().truncate(fd, length)
            self.recording.truncated(fd, length)

    def acknowledge(self, fd: int, word: bytes, offset: int) -> None:
        with self.recording.lock:
            super().acknowledge(fd, word, offset)
            self.recording.written(fd, word, offset)

    def link(self, source: str, target: str) -> None:
        with self.recording.lock:
            super().link(source, target)
            self.recording.linked(source, target)

    def rename(self, source: str, target: str) -> None:
        with self.recording.lock:
            super().rename(source, target)
            self.recording.renamed(source, target)

    def unlink(self, path: str) -> None:
        with self.recording.lock:
            super().unlink(path)
            self.recording.removed("unlink", path)

    def rmdir(self, path: str) -> None:
        with self.recording.lock:
            super().rmdir(path)
            self.recording.removed("rmdir", path)

    # ---- syncing: what was changed before is durable from here on

    def fdatasync(self, fd: int) -> None:
        with self.recording.lock:
            self._on("fdatasync", fd)
            self.recording.synced(fd)

    def fsync(self, fd: int) -> None:
        with self.recording.lock:
            self._on("fsync", fd)
            self.recording.synced(fd)

    def fsync_directory(self, path: str) -> None:
        with self.recording.lock:
            self._enter(Call("open_directory", path))
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.recording.opened(fd, path)
                self.fsync(fd)
            finally:
                os.close(fd)

    # ---- descriptors

    def open(self, path: str, *, write: bool = False) -> int:
        with self.recording.lock:
            fd = super().open(path, write=write)
            self.recording.opened(fd, path)
            return fd

    def open_directory(self, path: str) -> int:
        with self.recording.lock:
            fd = super().open_directory(path)
            self.recording.opened(fd, path)
            return fd
