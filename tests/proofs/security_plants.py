"""What somebody who may write to a store's directory puts in the place of its files, and what the store then does.

Whoever it is (another user of the group of a shared store; nobody else gets that far), three things must not happen:
that anything outside the store is changed or read, that an operation hangs, and that it fails with an error that isn't
one of tokcap's. The damage to the store itself is theirs to make.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.errors import TokcapError

__all__ = ("MOMENTS", "OPERATIONS", "PLANTS", "Case", "Outside", "components", "every_case", "fill", "played")

_PATIENCE_S = 60
"""After this long an operation hangs; generous, because no test is about speed."""
ROLLOUTS = ("open", "frozen", "retired", "bare")
MOMENTS = ("before", "during")
"""Whether the store is opened after the planting, or was in use before it."""
TRASH = f"{'a' * 32}.trash"
TEMPORARY = "tmp-0123456789abcdef"


def entry(rollout: str, call: str) -> TokenEntry:
    return TokenEntry(rollout, call, np.arange(5, dtype=np.int32), np.array([7, 8], np.int32), np.array([-0.5, -1.0]))


def open_store(root: str) -> FileStore:
    return FileStore(root, sweep_every_s=0, lock_timeout_s=0.2)


def fill(root: str, store: FileStore | None = None) -> None:
    """A rollout in every state, each with what can be in it."""
    with open_store(root) if store is None else _kept(store) as used:
        for rollout in "open", "frozen", "retired":
            used.begin_call_now(rollout, "a")
            used.put_now(entry(rollout, "a"))
        used.put_now(entry("bare", "a"))
        used.freeze_now("frozen").close()
        used.mark_incomplete_now("frozen", "late")
        used.note_delivery_now("frozen", "a", "full")
        with used.freeze_now("retired") as snapshot:
            used.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        used.mark_incomplete_now("retired", "late")
        used.begin_call_now("open", "b")


@contextmanager
def _kept(store: FileStore) -> Iterator[FileStore]:
    yield store


# ---- what can be replaced, and by what


def components(root: str) -> list[str]:
    """Every path below the directory, and two names that are not there yet, relative to it; the same for each store."""
    found = [
        os.path.relpath(os.path.join(folder, name), root)
        for folder, folders, names in os.walk(root)
        for name in (*folders, *names)
    ]
    homes = [path for path in found if os.path.basename(path) in ROLLOUTS]
    incarnations = [path for path in found if os.path.dirname(path) in homes and len(os.path.basename(path)) == 32]
    found += [f"{path}/{TRASH}" for path in homes] + [f"{path}/{TEMPORARY}" for path in incarnations]
    return sorted(found, key=lambda path: (path.count("/"), _class(path), path))


def _class(path: str) -> str:
    """What a component is, without what is random in its name."""
    parts = path.split("/")
    return "/".join("*" if len(part) >= 32 and part != TRASH else part for part in parts)


def _link(to: Callable[[str, Outside], str]) -> Callable[[str, Outside], None]:
    def plant(path: str, outside: Outside) -> None:
        os.symlink(to(path, outside), path)

    return plant


def _socket(path: str, outside: Outside) -> None:
    made = socket.socket(socket.AF_UNIX)
    try:
        before = os.getcwd()
        os.chdir(os.path.dirname(path))  # a path of a socket has 107 bytes at most
        try:
            made.bind(os.path.basename(path))
        finally:
            os.chdir(before)
    finally:
        made.close()


def _device(path: str, outside: Outside) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def _hard_link(path: str, outside: Outside) -> None:
    os.link(outside.file, path)


def _file(path: str, outside: Outside) -> None:
    Path(path).write_bytes(os.urandom(64))


PLANTS: dict[str, Callable[[str, Outside], None]] = {
    "a link to a directory elsewhere": _link(lambda path, outside: outside.directory),
    "a link to a file elsewhere": _link(lambda path, outside: outside.file),
    "a link to itself": _link(lambda path, outside: os.path.basename(path)),
    "a link to nowhere": _link(lambda path, outside: f"{outside.directory}/not-there"),
    "a link to the directory above": _link(lambda path, outside: ".."),
    "a FIFO": lambda path, outside: os.mkfifo(path),
    "a socket": _socket,
    "a device": _device,
    "a hard link of a file elsewhere": _hard_link,
    "a file": _file,
    "a directory": lambda path, outside: os.mkdir(path),
}


class Outside:
    """A directory of somebody's own, that no operation of a store may touch; made so that it invites to it."""

    def __init__(self, where: Path) -> None:
        self.directory: str = str(where)
        self.file: str = f"{where}/precious"
        where.mkdir()
        for name in ("precious", "manifest", "000001.open", "000001.seg", "note-000001", f"{'b' * 32}.trash"):
            (where / name).write_text(f"mine: {name}")
        for name in ("a" * 32, TRASH, f"{'c' * 32}.retired.1.1", "v1", TEMPORARY, "open", "frozen", "00"):
            (where / name).mkdir()
            (where / name / "precious").write_text("mine, too")
        self._before = self._look()

    def changes(self) -> list[str]:
        """What is not as it was made."""
        now = self._look()
        return [path for path in sorted(self._before.keys() | now.keys()) if self._before.get(path) != now.get(path)]

    def _look(self) -> dict[str, tuple[int, str]]:
        found = {}
        for folder, folders, names in os.walk(self.directory):
            for name in (*folders, *names):
                path = f"{folder}/{name}"
                mode = os.lstat(path).st_mode
                text = Path(path).read_bytes() if stat.S_ISREG(mode) else b""
                found[path] = mode, hashlib.sha256(text).hexdigest()
        return found


# ---- one case


def _froze(store: FileStore, rollout: str) -> None:
    with store.freeze_now(rollout) as snapshot:
        for one in snapshot.entries:
            assert one.generation_token_ids.tolist() == [7, 8]
        store.retire_now(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def _read(store: FileStore, rollout: str) -> None:
    with store.read_now(rollout) as snapshot:
        assert all(one.generation_token_ids.tolist() == [7, 8] for one in snapshot.entries)


OPERATIONS: dict[str, Callable[[FileStore, str], object]] = {
    "begin_call": lambda store, rollout: store.begin_call_now(rollout, "c"),
    "put": lambda store, rollout: store.put_now(entry(rollout, "c")),
    "settle_call": lambda store, rollout: store.settle_call_now(rollout, "b", "lost"),
    "mark_incomplete": lambda store, rollout: store.mark_incomplete_now(rollout, "d"),
    "note_delivery": lambda store, rollout: store.note_delivery_now(rollout, "a", "full"),
    "finish": lambda store, rollout: store.finish_now(rollout, meta={}),
    "read": _read,
    "stat": lambda store, rollout: store.stat_now(rollout),
    "freeze and retire": _froze,
    "reset": lambda store, rollout: store.reset_now(rollout),
    "list": lambda store, rollout: list(store.rollouts()),
    "usage": lambda store, rollout: store.usage_now(),
    "sweep": lambda store, rollout: store.sweep_now(0),
    "expire": lambda store, rollout: store.expire_now(0),
}


@dataclass(frozen=True)
class Case:
    """component: its number in `components`. operations: in this order, each on every rollout."""

    component: int
    plant: str
    moment: str
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"component {self.component}, {self.plant}, {self.moment}: {', '.join(self.operations)}"


def every_case(count: int, seed: int) -> Iterator[Case]:
    """Each plant at each of `count` components, before and during use, with the operations in a drawn order."""
    for number, (component, plant, moment) in enumerate(itertools.product(range(count), PLANTS, MOMENTS)):
        order = list(OPERATIONS)
        random.Random(f"{seed}/{number}").shuffle(order)
        yield Case(component, plant, moment, tuple(order))


def played(case: Case, where: Path) -> list[str]:
    """What went wrong: nothing should. where: a directory for this case alone, which doesn't exist yet."""
    where.mkdir()
    outside = Outside(where / "outside")
    root = str(where / "store")
    problems: list[str] = []
    store = open_store(root)
    try:
        fill(root, store)
        names = components(root)
        name = names[case.component % len(names)]
        if case.moment == "before":
            store.close_now()
        path = f"{root}/{name}"
        _plant(path, case.plant, outside, where / "aside")
        with _alarm():
            if case.moment == "before":
                try:
                    store = open_store(root)
                except TokcapError:
                    return [f"{case}: {_class(name)}: {change} changed" for change in outside.changes()]
            for operation in case.operations:
                for rollout in (*ROLLOUTS, "new"):
                    try:
                        OPERATIONS[operation](store, rollout)
                    except TokcapError:
                        pass
                    except Exception as error:
                        problems.append(f"{case}: {_class(name)}: {operation} of {rollout} raised {error!r}")
                    if outside.changes():
                        problems.append(f"{case}: {_class(name)}: {operation} of {rollout} changed {outside.changes()}")
                        return problems
            with suppress(TokcapError):
                store.close_now()
    except _HangError:
        problems.append(f"{case}: {_class(name)}: hangs")
    finally:
        with suppress(TokcapError, OSError):
            store.close_now()
        problems += [f"{case}: {change} changed" for change in outside.changes()] if not problems else []
        shutil.rmtree(where, ignore_errors=True)
    return problems


def _plant(path: str, plant: str, outside: Outside, aside: Path) -> None:
    if os.path.lexists(path):
        os.rename(path, aside)
    PLANTS[plant](path, outside)


class _HangError(Exception):
    """An operation took too long."""


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
