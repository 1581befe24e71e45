"""A file system that fails on demand and remembers what was asked of it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

from tokcap import FileStore
from tokcap.store import base as store_module
from tokcap.store import fence
from tokcap.store.files import Files, Modes
from tokcap.store.syncs import KernelSyncs, Sync

CHANGING = ("mkdir", "create", "pwritev", "write_space", "truncate", "acknowledge", "link", "rename", "unlink", "rmdir")
SYNCING = ("fdatasync", "fsync")
LOOKING = ("open", "open_directory", "close", "stat", "fstat", "listdir", "read", "map", "try_lock", "unlock")
SIGNALLING = ("fcntl",)
"""Record locks on the fence; only heard inside `hearing_signals`."""
KINDS = CHANGING + SYNCING + LOOKING + SIGNALLING

Reach = Literal["once", "kind", "everything"]


@dataclass(frozen=True)
class Fault:
    """The `number`-th call (from 1) of one of `kinds` fails, or is short if `error` is 0.

    `once`: only that call. `kind`: that call and all later ones of its kind. `everything`: it and all later calls.
    With `rollout` only calls in the directory of that rollout count, and fail.
    """

    number: int
    error: int
    reach: Reach = "once"
    kinds: Sequence[str] = KINDS
    rollout: str = ""

    def __str__(self) -> str:
        what = errno.errorcode.get(self.error, "a short write")
        where = f" of rollout {self.rollout}" if self.rollout else ""
        return f"{what} at call {self.number}{where} ({self.reach})"


@dataclass
class Call:
    """One call: what, on which path or inode, and whether it was made to fail."""

    kind: str
    path: str
    target: str = ""
    inode: int = 0
    error: int = 0

    def is_in(self, rollout: str) -> bool:
        """Whether it is about the directory of a rollout, or something in it."""
        return any(f"/{rollout}/" in f"{path}/" for path in (self.path, self.target))

    def __str__(self) -> str:
        return f"{self.kind} {self.path}{' -> ' + self.target if self.target else ''}" + (
            f" {errno.errorcode[self.error]}" if self.error else ""
        )


@dataclass
class _Plan:
    fault: Fault
    seen: int = 0
    hit: Call | None = None
    hits: list[Call] = field(default_factory=list)

    def strikes(self, call: Call) -> bool:
        fault = self.fault
        if fault.rollout and not call.is_in(fault.rollout):
            return False
        if self.hit is None:
            if call.kind not in fault.kinds:
                return False
            self.seen += 1
            if self.seen < fault.number:
                return False
            self.hit = call
        elif (
            fault.reach == "once"
            or (fault.reach == "kind" and call.kind != self.hit.kind)
            # Closing and unlocking never fail for good: the kernel frees both in any case.
            or (fault.reach == "everything" and call.kind in ("close", "unlock"))
        ):
            return False
        self.hits.append(call)
        return True


def changed_directories(call: Call) -> set[str]:
    """The directories whose entries a call changes."""
    if call.error or call.kind not in ("mkdir", "create", "link", "rename", "unlink", "rmdir"):
        return set()
    paths = [call.target] if call.kind == "link" else [call.path, call.target]
    return {os.path.dirname(path) for path in paths if path}


class FaultyFiles(Files):
    """`Files` with a trace, and with faults while `failing` is entered."""

    def __init__(self, modes: Modes | None = None, *, in_kernel: bool = False) -> None:
        super().__init__(modes)
        self.in_kernel = in_kernel
        """Whether syncs that may run at the same time are handed to `TracedSyncs`, and not to threads."""
        self.trace: list[Call] = []
        self._plan: _Plan | None = None
        self._guard = threading.Lock()

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[_Plan]:
        """Faults strike inside this context; what is yielded tells which calls were hit."""
        plan = self._plan = _Plan(fault)
        try:
            yield plan
        finally:
            self._plan = None

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Inside, the record locks that are asked for and shown on fences are calls, too."""

        def request(fd: int, command: int, argument: bytes) -> bytes:
            self._on("fcntl", fd)
            return fcntl.fcntl(fd, command, argument)

        with patch.object(fence, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": request})):
            yield

    def _enter(self, call: Call) -> bool:
        """Note a call; raises if it shall fail, True if it shall be short."""
        with self._guard:
            self.trace.append(call)
            plan = self._plan
            if plan is None or not plan.strikes(call):
                return False
            if plan.fault.error == 0:
                return call.kind == "pwritev"
            call.error = plan.fault.error
        raise OSError(call.error, os.strerror(call.error), call.path)

    def _on(self, kind: str, fd: int) -> bool:
        return self._enter(Call(kind, os.readlink(f"/proc/self/fd/{fd}"), inode=os.fstat(fd).st_ino))

    # ---- changing

    def mkdir(self, path: str) -> None:
        self._enter(Call("mkdir", path))
        super().mkdir(path)

    def create(self, path: str) -> int:
        self._enter(Call("create", path))
        return super().create(path)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        half = self._half(buffers)
        try:
            short = self._on("pwritev", fd)
        except OSError:
            os.pwrite(fd, half, offset)  # a disk that fills up takes what it has room for
            raise
        return os.pwrite(fd, half, offset) if short else super().pwritev(fd, buffers, offset)

    @staticmethod
    def _half(buffers: Sequence[bytes | memoryview]) -> bytes:
        data = b"".join(bytes(buffer) for buffer in buffers)
        return data[: (len(data) + 1) // 2]

    def write_space(self, fd: int, length: int, offset: int) -> int:
        self._on("write_space", fd)
        return super().write_space(fd, length, offset)

    def truncate(self, fd: int, length: int) -> None:
        self._on("truncate", fd)
        super().truncate(fd, length)

    def acknowledge(self, fd: int, word: bytes, offset: int) -> None:
        self._on("acknowledge", fd)
        super().acknowledge(fd, word, offset)

    def fdatasync(self, fd: int) -> None:
        self._on("fdatasync", fd)
        super().fdatasync(fd)

    def kernel_syncs(self, most: int, eventfd: int) -> KernelSyncs | None:
        return TracedSyncs(self, most, eventfd) if self.in_kernel else None

    def fsync_directory(self, path: str) -> None:
        self._enter(Call("open_directory", path))
        super().fsync_directory(path)

    def fsync(self, fd: int) -> None:
        self._on("fsync", fd)
        super().fsync(fd)

    def link(self, source: str, target: str) -> None:
        self._enter(Call("link", source, target))
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._enter(Call("rename", source, target))
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._enter(Call("unlink", path))
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self._enter(Call("rmdir", path))
        super().rmdir(path)

    # ---- looking

    def open(self, path: str, *, write: bool = False) -> int:
        self._enter(Call("open", path))
        return super().open(path, write=write)

    def open_directory(self, path: str) -> int:
        self._enter(Call("open_directory", path))
        return super().open_directory(path)

    def close(self, fd: int) -> None:
        call = Call("close", os.readlink(f"/proc/self/fd/{fd}"))
        super().close(fd)  # Linux frees the descriptor whatever it answers
        self._enter(call)

    def stat(self, path: str) -> os.stat_result:
        self._enter(Call("stat", path))
        return super().stat(path)

    def stat_below(self, fd: int, path: str) -> os.stat_result:
        self._enter(Call("stat", f"{os.readlink(f'/proc/self/fd/{fd}')}/{path}"))
        return super().stat_below(fd, path)

    def fstat(self, fd: int) -> os.stat_result:
        self._on("fstat", fd)
        return super().fstat(fd)

    def listdir(self, path: str) -> list[str]:
        self._enter(Call("listdir", path))
        return super().listdir(path)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        self._on("read", fd)
        return super().read(fd, length, offset)

    def word_at(self, fd: int, offset: int) -> bytes:
        self._on("read", fd)
        return super().word_at(fd, offset)

    def map(self, fd: int, length: int) -> mmap:
        self._on("map", fd)
        return super().map(fd, length)

    def try_lock(self, fd: int) -> bool:
        self._on("try_lock", fd)
        return super().try_lock(fd)

    def unlock(self, fd: int) -> None:
        self._on("unlock", fd)
        super().unlock(fd)


class TracedSyncs(KernelSyncs):
    """In the place of the kernel: each sync is a call in the trace and may fail; the last one started is done first."""

    def __init__(self, files: FaultyFiles, most: int, eventfd: int) -> None:
        self.most, self._files, self._eventfd = most, files, eventfd
        self._done: list[tuple[Any, OSError | None]] = []

    @property
    def in_flight(self) -> int:
        return len(self._done)

    def start(self, syncs: Sequence[Sync]) -> int:
        syncs = syncs[: self.most - len(self._done)]
        for sync in reversed(syncs):
            error = None
            try:
                (self._files.fsync if sync.whole else self._files.fdatasync)(sync.descriptor)
            except OSError as failure:
                error = failure
            self._done.append((sync.ticket, error))
        os.eventfd_write(self._eventfd, 1)
        return len(syncs)

    def finished(self) -> list[tuple[Any, OSError | None]]:
        done, self._done = self._done, []
        return done

    def close(self) -> list[tuple[Any, OSError | None]]:
        return self.finished()


# ---- what is stored, as anybody may see it


@dataclass(frozen=True)
class View:
    """A rollout as a reader sees it."""

    state: str
    entries: frozenset[tuple[str, int, bytes]] = frozenset()
    """(call, choice, ids and log-probs)"""
    outcomes: frozenset[tuple[str, str]] = frozenset()
    delivered: frozenset[tuple[str, str]] = frozenset()
    meta: str = "{}"
    damage: tuple[str, ...] = ()
    late: int = 0

    @property
    def calls(self) -> set[str]:
        return {call for call, _, _ in self.entries}


def view(store: FileStore, rollout_id: str) -> View:
    """Read a rollout without changing it."""
    stat = store.stat_now(rollout_id)
    if stat.state == "retired":
        return View("retired", late=len(stat.late))
    with store.read_now(rollout_id) as snapshot:
        return View(
            stat.state,
            frozenset(
                (
                    entry.model_call_id,
                    entry.choice_index,
                    entry.prompt_token_ids.tobytes()
                    + b"|"
                    + entry.generation_token_ids.tobytes()
                    + b"|"
                    + entry.generation_log_probs.tobytes(),
                )
                for entry in snapshot.entries
            ),
            frozenset((call.model_call_id, call.outcome) for call in snapshot.calls),
            frozenset((call.model_call_id, call.delivered) for call in snapshot.calls if call.delivered != "unknown"),
            repr(snapshot.meta),
            tuple(map(str, snapshot.damage)),
            len(stat.late),
        )


@contextmanager
def booted_as(boot_id: str) -> Iterator[None]:
    """Stores that are made inside believe that the machine was started anew."""
    with patch.object(store_module, "boot_id", lambda: boot_id) if boot_id else nullcontext():
        yield


def serve_views(connection: Connection) -> None:
    """Another process: answers (directory, rollout ids, boot id) with views, until it is told None."""
    while (request := connection.recv()) is not None:
        directory, rollout_ids, boot_id = request
        try:
            with booted_as(boot_id), FileStore(directory, read_only=True) as store:
                connection.send({rollout_id: view(store, rollout_id) for rollout_id in rollout_ids})
        except Exception as error:
            connection.send(error)
