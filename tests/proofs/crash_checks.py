"""What must hold of a store after a crash: one state is made real, opened, looked at and used."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.faulty_files import booted_as
from tests.state_model import Operation, Seen, State
from tests.store_worker import UnsyncedFiles, attempt, perform
from tokcap import FileStore, TokenEntry
from tokcap.store.layout import MANIFEST
from tokcap.store.looking import RolloutStat
from tokcap.store.manifest import decode_manifest

from .crash_stage import ROOT, Expected, brief, explained_across_boots
from .crash_tree import Image

__all__ = ("AFTER_ANOTHER", "AFTER_A_CRASH", "Checker", "go_on")

AFTER_A_CRASH = "00000000-0000-0000-0000-00000000b002"
AFTER_ANOTHER = "00000000-0000-0000-0000-00000000b003"
_ONCE_MORE = "00000000-0000-0000-0000-00000000b004"
_SEGMENT_BYTES = 1500
_NEVER_SO_OLD = 1e9

States = dict[str, tuple[State, ...]]
Found = dict[str, object]
"""What a read of each rollout gave."""


class NotExplainedError(AssertionError):
    """What was found after a crash is not what the state table allows."""


class _MortalFiles(UnsyncedFiles):
    """Once dead they change nothing any more, so that a store can give its threads and descriptors back."""

    dead = False

    def _die(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the process is dead")

    def mkdir(self, path: str) -> None:
        self._die()
        super().mkdir(path)

    def create(self, path: str) -> int:
        self._die()
        return super().create(path)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self._die()
        return super().pwritev(fd, buffers, offset)

    def write_space(self, fd: int, length: int, offset: int) -> int:
        self._die()
        return super().write_space(fd, length, offset)

    def truncate(self, fd: int, length: int) -> None:
        self._die()
        super().truncate(fd, length)

    def acknowledge(self, fd: int, word: bytes, offset: int) -> None:
        self._die()
        super().acknowledge(fd, word, offset)

    def link(self, source: str, target: str) -> None:
        self._die()
        super().link(source, target)

    def rename(self, source: str, target: str) -> None:
        self._die()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._die()
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self._die()
        super().rmdir(path)


class Checker:
    """Makes images real in a directory of its own, one at a time, and checks them in a thread of its own.

    Of a thread that is not the main one the store does everything itself, which is faster.
    """

    def __init__(self, scratch: str) -> None:
        self._base = f"{scratch}/state"
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._thread.shutdown()

    def check(self, image: Image, expected: Expected, *, boot_id: str, variant: int) -> str | None:
        """What does not hold, None if everything does. `boot_id`: empty for the eyes of the boot that wrote it."""
        return self._thread.submit(self._check, image, expected, boot_id, variant).result()

    def _check(self, image: Image, expected: Expected, boot_id: str, variant: int) -> str | None:
        os.mkdir(self._base, 0o700)
        try:
            image.write_to(self._base)
            check_directory(f"{self._base}/{ROOT}", expected, boot_id=boot_id, variant=variant)
        except NotExplainedError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(self._base)
        return None


def check_directory(root: str, expected: Expected, *, boot_id: str, variant: int) -> None:
    """Raises for whatever does not hold of the store in `root`. It is used, and not the same afterwards.

    `variant` says what it is used for, and whether that ends with a third boot.
    """
    states = expected.states
    written: set[str] = set()
    with booted_as(boot_id):
        found: Found = {}
        if variant % 2 and os.path.isdir(f"{root}/rollouts"):
            with FileStore(root, read_only=True) as store:
                states, found = look(store, states, expected.sealed)
        files = _MortalFiles()
        store = FileStore(root, sweep_every_s=0, files=files, segment_bytes=_SEGMENT_BYTES)
        try:
            if not found:
                states, found = look(store, states, expected.sealed)
            store.sweep_now(_NEVER_SO_OLD)
            for rollout, before in found.items():
                now = _read(store, rollout)
                if not _same(before, now):
                    raise NotExplainedError(f"{rollout} was {brief(before)} and is {brief(now)} after a recovery")

            def do(operation: Operation) -> object:
                result = attempt(lambda: perform(store, operation))
                _narrow(states, operation, result)
                if operation.name not in ("read", "deliver"):
                    written.add(operation.rollout_id)
                return result

            go_on(do, expected, variant)
            if variant % 3 == 0:
                _sweep(store, states)
            if variant % 8 < 2:
                store.close_now()
        finally:
            files.dead = True  # the directory stays as a killed process leaves it
            with contextlib.suppress(OSError):
                store.close_now()
    if variant % 8 < 2:
        if not boot_id:
            # Whole records of dead processes: nobody believes them before the next boot, if nobody wrote behind them.
            states = {
                rollout: now if rollout in written else tuple(dict.fromkeys((*now, *expected.states[rollout])))
                for rollout, now in states.items()
            }
        with booted_as(_ONCE_MORE), FileStore(root, read_only=True) as store:
            look(store, states, frozenset())


def look(store: FileStore, states: States, sealed: frozenset[str]) -> tuple[States, Found]:
    """Those states that explain what the store shows, and what it is; raises if there are none for a rollout."""
    left: States = {}
    found: Found = {}
    listed = dict(store.rollouts())
    for rollout, before in states.items():
        stat = store.stat_now(rollout)
        found[rollout] = _read(store, rollout)
        result = found[rollout]
        after = explained_across_boots(before, [("", Operation("read", rollout), result)])
        left[rollout] = tuple(state for state in after if _explains(state, stat))
        if not left[rollout]:
            shown = f"{stat.state} {stat.version} {stat.entries} {stat.late} {stat.damage}"
            raise NotExplainedError(f"{rollout}: found {brief(result)}, {shown}; expected {_one_of(before)}")
        if stat.damage:
            raise NotExplainedError(f"{rollout}: damage {stat.damage}")
        if listed.pop(rollout, "absent") != stat.state:
            raise NotExplainedError(f"{rollout} is {stat.state} and not listed as that")
        if stat.state == "frozen":
            _check_manifest(store, rollout, stat)
        if rollout in sealed and stat.state == "open":
            _check_sealed(store, rollout, stat)
    if listed:
        raise NotExplainedError(f"listed, and nobody used them: {listed}")
    return left, found


def _check_manifest(store: FileStore, rollout: str, stat: RolloutStat) -> None:
    """A snapshot appears as a whole, though one without its manifest could be read."""
    path = f"{store._layout.rollout(rollout)}/{stat.snapshot_id}/v{stat.version}/{MANIFEST}"
    with open(path, "rb") as file:
        found = decode_manifest(path, file.read(), rollout, stat.snapshot_id, stat.version)
    if found is None:
        raise NotExplainedError(f"{rollout}: its snapshot was published with a manifest that can't be read")


def _check_sealed(store: FileStore, rollout: str, stat: RolloutStat) -> None:
    path = f"{store._layout.rollout(rollout)}/{stat.snapshot_id}"
    unsealed = [name for name in os.listdir(path) if name.endswith((".open", ".torn"))]
    if unsealed or stat.torn:
        raise NotExplainedError(f"{rollout}: its writers were closed, and there are {unsealed or stat.torn}")


def _read(store: FileStore, rollout: str) -> object:
    return attempt(lambda: store.read_now(rollout))


def _same(before: object, now: object) -> bool:
    if isinstance(before, Seen) and isinstance(now, Seen) and not before.calls and not before.version:
        return not now.calls and not now.version  # the identity of what never counted may be gone
    return before == now


def _explains(state: State, stat: RolloutStat) -> bool:
    life = state.life
    shown = (stat.state, stat.version, stat.entries, stat.incomplete, stat.finished, stat.meta)
    if life is None:
        # A writer that died before its first record was durable leaves an empty log.
        return stat.state in ("absent", "open") and shown[1:] == (0, 0, False, False, {}) and not stat.late
    if life.retired:
        return shown == ("retired", life.version, 0, False, False, {}) and len(stat.late) == len(life.notes)
    incomplete = any(call.outcome in ("lost", "open", "conflict") for call in life.calls.values())
    entries = sum(len(call.contents) for call in life.calls.values())
    expected = ("frozen" if life.version else "open", life.version, entries, incomplete)
    return shown == (*expected, life.finish is not None, life.finish or {}) and len(stat.late) == len(life.notes)


def _narrow(states: States, operation: Operation, result: object) -> None:
    before = states[operation.rollout_id]
    after = tuple(explained_across_boots(before, [("after", operation, result)]))
    if not after:
        raise NotExplainedError(f"{operation} after the crash -> {brief(result)}; it was {_one_of(before)}")
    states[operation.rollout_id] = after


def _one_of(states: tuple[State, ...]) -> str:
    return " or ".join(map(brief, states))


def _sweep(store: FileStore, states: States) -> None:
    retired = [rollout for rollout, (state, *_) in states.items() if state.life is not None and state.life.retired]
    count = store.sweep_now(0)
    if count != len(retired):
        raise NotExplainedError(f"a sweep after the crash gave {count}, retired are {retired}")
    for rollout in states:
        _narrow(states, Operation("sweep", rollout), int(rollout in retired))
        _narrow(states, Operation("read", rollout), _read(store, rollout))


# ---- life goes on


def entry(rollout: str, call: str, *, length: int = 12, seed: int = 0) -> TokenEntry:
    """Something to be put."""
    numbers = np.random.default_rng([len(call), *call.encode(), seed])
    return TokenEntry(
        rollout, call, numbers.integers(0, 150_000, length), numbers.integers(0, 150_000, 3), -numbers.random(3)
    )


def go_on(do: Callable[[Operation], object], expected: Expected, variant: int) -> None:
    """Use the rollouts again: `do` does an operation and compares what came of it with the state table."""
    chance = random.Random(variant)
    for operation in expected.under_way:  # by a client that never heard of it
        if operation.rollout_id and operation.name not in ("sweep", "tidy"):
            do(operation)
    # One of them is enough: no two share anything but directories.
    rollout = chance.choice(list(expected.states))
    new = Operation("put", rollout, entries=(entry(rollout, "after"),))
    late = Operation("settle", rollout, "after-2", word="lost")
    do(chance.choice((new, late)))
    if chance.random() < 0.4:
        do(Operation("reset", rollout))
        do(new)
    if chance.random() < 0.7:
        snapshot = do(Operation("freeze", rollout))
        if isinstance(snapshot, Seen) and chance.random() < 0.7:
            retire = Operation("retire", rollout, word=snapshot.snapshot_id, number=snapshot.version)
            do(chance.choice((late, retire)))
            do(retire)
    do(Operation("read", rollout))
