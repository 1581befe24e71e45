"""Stores and consumers that are wrong in one way, to show that the torture sees it.

They change the process that they run in.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokcap.entry import TokenEntry
from tokcap.store import log, rollout
from tokcap.store.base import StoreBase
from tokcap.store.files import Files
from tokcap.store.lifecycle import Retire
from tokcap.store.operations import Put
from tokcap.store.rollout import Rollout
from tokcap.store.scan import Scan, scan
from tokcap.store.sink import SinkMethods

from .kills_calls import SlowFiles

__all__ = ("MUTANTS", "Behaviour", "behaviour_of")


def _fence_of(fd: int) -> str:
    """The rollout directory that a descriptor leads to; empty for others, whose locks are tried when a store opens."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    return path if "/rollouts/" in path else ""


class _Unfenced(SlowFiles):
    """Takes no fence."""

    def try_lock(self, fd: int) -> bool:
        return bool(_fence_of(fd)) or super().try_lock(fd)

    def unlock(self, fd: int) -> None:
        if not _fence_of(fd):
            super().unlock(fd)


class _LockFiles(SlowFiles):
    """Makes a file for each fence that it takes, which outlives its process."""

    def _path(self, fence: str) -> str:
        root, _, below = fence.partition("/rollouts/")
        return f"{os.path.dirname(root)}/lock-{below.replace('/', '-')}"

    def try_lock(self, fd: int) -> bool:
        fence = _fence_of(fd)
        if not fence:
            return super().try_lock(fd)
        try:
            os.close(os.open(self._path(fence), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fence = _fence_of(fd)
        if not fence:
            super().unlock(fd)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(fence))


class _CopyingFiles(SlowFiles):
    """Publishes a snapshot by copying it, one file after the other."""

    def rename(self, source: str, target: str) -> None:
        if not os.path.basename(source).startswith("tmp-"):
            super().rename(source, target)
            return
        os.mkdir(target, 0o700)
        for name in sorted(os.listdir(source)):
            time.sleep(0.004)
            os.link(f"{source}/{name}", f"{target}/{name}")


class _TearingFiles(SlowFiles):
    """Many writes are torn when their process is killed."""

    between_writes_s = 0.005


@dataclass(frozen=True)
class Behaviour:
    """What a child does as no child should."""

    files: Callable[[SlowFiles], Files] = lambda files: files
    mutates_files: bool = False
    retires_first: bool = False
    takes_false_for_true: bool = False
    dawdles_s: float = 0.0
    """Before and after a retire."""
    lock_timeout_s: float = 30.0


def _with_files(kind: type[SlowFiles], **others: Any) -> Callable[[], Behaviour]:
    return lambda: Behaviour(files=lambda files: kind(files.seed), mutates_files=True, **others)


def _ignore_versions() -> Behaviour:
    """A retire removes whatever is published."""
    exact = Retire.run

    def run(self: Retire, rollout: Rollout) -> bool:
        directory = rollout.look()
        if directory.state == "frozen":
            self.snapshot_id, self.version = directory.incarnation, directory.version
        return exact(self, rollout)

    Retire.run = run  # type: ignore[method-assign]
    return Behaviour(dawdles_s=0.03)


def _keep_torn_tails() -> Behaviour:
    """What comes next is written behind a torn tail, as if it were whole."""

    def without_tears(data: Any, seed: int, **named: Any) -> Scan:
        found = scan(data, seed, **named)
        if found.torn is not None:
            found.torn, found.append_at = None, named["limit"]
        return found

    vars(log)["scan"] = vars(rollout)["scan"] = without_tears
    return _with_files(_TearingFiles)()


def _acknowledge_early() -> Behaviour:
    """A put returns before anything is written."""
    call = StoreBase._call

    def without_waiting(self: StoreBase, operation: Any) -> Any:
        if not isinstance(operation, Put):
            return call(self, operation)

        def later() -> None:
            time.sleep(0.002)
            with contextlib.suppress(Exception):
                call(self, operation)

        threading.Thread(target=later, daemon=True).start()
        return None

    StoreBase._call = without_waiting  # type: ignore[method-assign]
    return Behaviour()


def _put_one_by_one() -> Behaviour:
    """The choices of a call are stored one after the other."""

    def put_many_now(self: SinkMethods, entries: Iterable[TokenEntry]) -> None:
        for entry in entries:
            self.put_now(entry)
            time.sleep(0.002)

    async def put_many(self: SinkMethods, entries: Iterable[TokenEntry]) -> None:
        for entry in entries:
            await self.put(entry)

    SinkMethods.put_many_now = put_many_now  # type: ignore[method-assign]
    SinkMethods.put_many = put_many  # type: ignore[method-assign]
    return Behaviour()


@dataclass(frozen=True)
class Mutant:
    """One of them."""

    roles: frozenset[str]
    """The kinds of children that have it."""
    become: Callable[[], Behaviour]
    focus: tuple[str, ...] = ()
    """What is killed; anything, if empty."""
    early: bool = False
    """All rollouts are frozen while they are still written."""


_WRITERS, _CONSUMERS = frozenset(("write",)), frozenset(("take", "follow"))
_FREEZES = ("freeze", "freeze_many", "freeze, waiting", "consume: freeze")

MUTANTS: dict[str, Mutant] = {
    "puts without the fence": Mutant(_WRITERS, _with_files(_Unfenced)),
    "freezes without the fence": Mutant(_CONSUMERS, _with_files(_Unfenced)),
    "a retire that ignores the version": Mutant(_CONSUMERS, _ignore_versions, ("mark", "aborted"), True),
    "a consumer that retires before it hands over": Mutant(
        frozenset(("take",)), lambda: Behaviour(retires_first=True, dawdles_s=0.005), ("retire", "hand over")
    ),
    "a consumer that takes False for True": Mutant(
        frozenset(("take",)), lambda: Behaviour(takes_false_for_true=True, dawdles_s=0.03), ("mark", "aborted"), True
    ),
    "a publication that is not atomic": Mutant(_CONSUMERS, _with_files(_CopyingFiles), _FREEZES),
    "torn tails that are written on": Mutant(_WRITERS, _keep_torn_tails, ("put", "put_many", "begin")),
    "puts that are acknowledged early": Mutant(_WRITERS, _acknowledge_early, ("put", "put_many")),
    "choices that are put one by one": Mutant(_WRITERS, _put_one_by_one, ("put_many",)),
    "locks that outlive their process": Mutant(
        frozenset(("write", "take", "follow", "sweep")), _with_files(_LockFiles, lock_timeout_s=1.0)
    ),
}


def behaviour_of(mutant: str) -> Behaviour:
    """Become the mutant of that name; empty for none."""
    return MUTANTS[mutant].become() if mutant else Behaviour()
