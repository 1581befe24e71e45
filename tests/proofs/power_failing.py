"""A disk that answers EIO: for the blocks of one file, for what holds certain words, or for its flushes.

What failed was not acknowledged and is never served; other rollouts go on; a retry goes to other blocks; what can't be
read is an error that names the file, of that rollout alone, and costs no process its life.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.children import Channel, Nursery
from tests.faulty_files import View, booted_as, serve_views, view
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError, FrozenError, TokcapError

from .power_checks import ANOTHER_BOOT
from .power_disk import Disk, FileSystem, disk, extents, formatted, mounted
from .power_mutants import files_of

__all__ = ("SITUATIONS", "Situation")

ROLLOUTS: Final = tuple(f"r{number}" for number in range(6))
VICTIM: Final = ROLLOUTS[2]
OTHERS: Final = tuple(rollout for rollout in ROLLOUTS if rollout != VICTIM)
SMALL, BIG = 2_000, 200_000
"""Prompt ids: segments that are read, and segments that are mapped."""
WORDS: Final = "these words can't be written"

Situation = Callable[[FileSystem, Path, Nursery, str], list[str]]
"""Plays it on a file system of this kind, with a store that is careless in a way (see `power_mutants`) or, without a
name, with the real one; what did not hold."""


def _entry(rollout: str, call: str, ids: int = SMALL, words: str = "") -> TokenEntry:
    chance = np.random.default_rng(sum(map(ord, rollout + call)) + ids)
    prompt = chance.integers(0, 150_000, ids, dtype=np.int32)
    return TokenEntry(rollout, call, prompt, prompt[:9], -chance.random(9), extra={"words": words})


def _put_together(store: FileStore, entries: list[TokenEntry]) -> dict[str, BaseException]:
    """What went wrong, by rollout."""

    async def together() -> list[BaseException | None]:
        return await asyncio.gather(*(store.put(entry) for entry in entries), return_exceptions=True)

    results = asyncio.run(together())
    return {entry.rollout_id: error for entry, error in zip(entries, results, strict=True) if error is not None}


def _open(point: Path, careless: str) -> FileStore:
    return FileStore(point / "store", sweep_every_s=0, files=files_of(careless))


class _Played:
    """What is expected of each rollout, and what did not hold."""

    def __init__(self, nursery: Nursery, careless: str) -> None:
        self.nursery, self.careless = nursery, careless
        self.problems: list[str] = []
        self.stored: dict[str, set[str]] = {rollout: set() for rollout in ROLLOUTS}

    def put(self, store: FileStore, call: str, words: Mapping[str, str], failing: set[str]) -> None:
        """Put to all rollouts at once; those in `failing` must say that the device failed, all others must work."""
        entries = [_entry(rollout, call, words=words.get(rollout, "")) for rollout in ROLLOUTS]
        errors = _put_together(store, entries)
        if set(errors) != failing:
            self.problems.append(f"put {call}: {errors} instead of errors of {sorted(failing)}")
        for rollout, error in errors.items():
            self.is_clear(f"put {call}", error, rollout)
        for rollout in set(ROLLOUTS) - set(errors):
            self.stored[rollout].add(call)

    def is_clear(self, what: str, error: BaseException, rollout: str, numbers: Sequence[int] = (errno.EIO,)) -> None:
        """Whether an error is of the right kind and says what it is about."""
        clear = isinstance(error, DurabilityError) and error.errno in numbers and f"rollout {rollout}" in str(error)
        if not clear or f"/{rollout}" not in str(error.filename):  # type: ignore[attr-defined]
            self.problems.append(f"{what}: the error is not clear: {error!r} {getattr(error, 'filename', '')}")

    def check(self, when: str, views: Mapping[str, View] | BaseException) -> None:
        """Whether each rollout shows exactly what was acknowledged."""
        if isinstance(views, BaseException):
            self.problems.append(f"{when}: {views!r}")
            return
        for rollout, seen in views.items():
            if seen.calls != self.stored[rollout] or seen.damage:
                expected = sorted(self.stored[rollout])
                self.problems.append(f"{when}: {rollout} shows {sorted(seen.calls)} {seen.damage}, not {expected}")

    def look(self, point: Path, when: str) -> None:
        """With the eyes of another process and, before anything is written any more, of a later boot."""
        child = self.nursery.start(serve_views)
        for boot_id in "", ANOTHER_BOOT:
            child.send((str(point / "store"), ROLLOUTS, boot_id))
            self.check(f"{when}, boot {boot_id or 'the same'}", child.receive())
        child.send(None)
        self.nursery.forget(child)

    def after_mounting(self, fs: FileSystem, served: Disk, point: Path) -> None:
        """What the disk really has: read it after mounting it again, and go on."""
        with mounted(fs, served.file, point), booted_as(ANOTHER_BOOT), _open(point, self.careless) as store:
            self.check("mounted again", {rollout: view(store, rollout) for rollout in ROLLOUTS})
            self.put(store, "last", {}, set())
            for rollout in ROLLOUTS:
                with store.freeze_now(rollout) as snapshot:
                    if {entry.model_call_id for entry in snapshot.entries} != self.stored[rollout]:
                        self.problems.append(f"{rollout} was frozen with something else than was stored")


# ---- writing


def _write(
    fs: FileSystem,
    place: Path,
    nursery: Nursery,
    careless: str,
    *,
    times: int | None,
    first: bool,
    by_words: bool,
) -> list[str]:
    """One rollout's records can't be written: its first one or a later one, `times` or for ever."""
    played = _Played(nursery, careless)
    formatted(fs, place / "image")
    with disk(place, recording=False) as served:
        with mounted(fs, served.file, place / "m") as point, _open(point, careless) as store:
            if not first:
                played.put(store, "a", {}, set())
            if by_words:
                served.fail("write", holding=WORDS, times=times)
            else:
                segments = (point / "store").rglob(f"{VICTIM}/*/*.open")
                served.fail("write", ranges=[found for path in segments for found in extents(path)], times=times)
            words = {VICTIM: WORDS} if by_words else {}
            played.put(store, "b", words, {VICTIM})
            if not served.failed:
                played.problems.append("the disk did not fail")
            played.look(point, "after the failure")
            # A retry goes to other blocks; with the words in it, it fails again while the disk is sick.
            if by_words and times is None:
                played.put(store, "c", words, {VICTIM})
                served.heal()
            played.put(store, "d", words, set())
            played.look(point, "after the retry")
            served.heal()
            played.put(store, "e", {}, set())
        played.after_mounting(fs, served, place / "m")
    return played.problems


def _flush(fs: FileSystem, place: Path, nursery: Nursery, careless: str, *, times: int | None) -> list[str]:
    """The disk doesn't flush: nothing is acknowledged; what was acknowledged before is there afterwards."""
    played = _Played(nursery, careless)
    formatted(fs, place / "image")
    with disk(place, recording=False) as served:
        with mounted(fs, served.file, place / "m") as point:
            store = _open(point, careless)
            played.put(store, "a", {}, set())
            served.fail("flush", times=times)
            errors = _put_together(store, [_entry(rollout, "b") for rollout in ROLLOUTS])
            for rollout, error in errors.items():
                # btrfs gives up and becomes read-only.
                played.is_clear("put b", error, rollout, (errno.EIO, errno.EROFS))
            if not served.failed or not errors or (times is None and set(errors) != set(ROLLOUTS)):
                played.problems.append(f"{served.failed} flushes failed, and of the puts only {sorted(errors)}")
            for rollout in set(ROLLOUTS) - set(errors):
                played.stored[rollout].add("b")
            served.heal()
            try:
                store.close_now()
            except TokcapError as error:
                if not isinstance(error, DurabilityError):
                    played.problems.append(f"close: {error!r}")
        with mounted(fs, served.file, place / "m") as point, booted_as(ANOTHER_BOOT), _open(point, careless) as store:
            for rollout in ROLLOUTS:
                seen = view(store, rollout)
                # Of what was not acknowledged, the disk may have all after all.
                if not played.stored[rollout] <= seen.calls <= {"a", "b"} or seen.damage:
                    played.problems.append(f"mounted again: {rollout} shows {sorted(seen.calls)} {seen.damage}")
                store.put_now(_entry(rollout, "c"))
                store.freeze_now(rollout).close()
    return played.problems


def _freeze(fs: FileSystem, place: Path, nursery: Nursery, careless: str, *, times: int | None) -> list[str]:
    """The manifest of one rollout can't be written: it stays open, others are frozen, and later it is, too."""
    played = _Played(nursery, careless)
    formatted(fs, place / "image")
    with disk(place, recording=False) as served:
        with mounted(fs, served.file, place / "m") as point, _open(point, careless) as store:
            played.put(store, "a", {}, set())
            for rollout in ROLLOUTS:
                store.finish_now(rollout, {"words": WORDS if rollout == VICTIM else ""})
            served.fail("write", holding=WORDS, times=times)
            for rollout in ROLLOUTS:
                try:
                    store.freeze_now(rollout).close()
                except DurabilityError as error:
                    played.is_clear(f"freeze {rollout}", error, rollout)
                state = store.stat_now(rollout).state
                if state != ("open" if rollout == VICTIM else "frozen"):
                    played.problems.append(f"{rollout} is {state} after the failure")
            if not served.failed:
                played.problems.append("the disk did not fail")
            served.heal()
            store.put_now(_entry(VICTIM, "b"))
            played.stored[VICTIM].add("b")
            store.freeze_now(VICTIM).close()
        with mounted(fs, served.file, place / "m") as point, booted_as(ANOTHER_BOOT), _open(point, careless) as store:
            played.check("mounted again", {rollout: view(store, rollout) for rollout in ROLLOUTS})
            played.problems += [
                f"mounted again: {rollout} is {state}" for rollout, state in store.rollouts() if state != "frozen"
            ]
    return played.problems


# ---- reading


def _read_all(channel: Channel, directory: str, careless: str) -> None:
    """In a child process: what reading, freezing and putting give, by rollout; an error as its errno and its text."""
    with booted_as(ANOTHER_BOOT), _open(Path(directory).parent, careless) as store:
        for rollout in ROLLOUTS:
            for name in "read", "freeze", "freeze again":
                try:
                    with store.read_now(rollout) if name == "read" else store.freeze_now(rollout) as snapshot:
                        seen = {entry.model_call_id: len(entry.prompt_token_ids) for entry in snapshot.entries}
                        channel.send((rollout, name, seen, tuple(map(str, snapshot.damage))))
                except TokcapError as error:
                    channel.send((rollout, name, error, getattr(error, "filename", "")))
            try:
                store.put_now(_entry(rollout, "later"))
                channel.send((rollout, "put", None, ""))
            except TokcapError as error:
                channel.send((rollout, "put", error, getattr(error, "filename", "")))


def _read(
    fs: FileSystem,
    place: Path,
    nursery: Nursery,
    careless: str,
    *,
    ids: int,
    frozen: bool,
    times: int | None,
    name: str = "*.seg",
) -> list[str]:
    """The segments of one rollout can't be read back, as sealed by `close`, or in a snapshot that is frozen already."""
    problems: list[str] = []
    whole = {"a": ids, "b": SMALL}
    formatted(fs, place / "image")
    with disk(place, recording=False) as served:
        with mounted(fs, served.file, place / "m") as point, _open(point, careless) as store:
            for call, length in whole.items():
                _put_together(store, [_entry(rollout, call, length) for rollout in ROLLOUTS])
            if frozen:
                for rollout in ROLLOUTS:
                    store.freeze_now(rollout).close()
        # Mounted again, so that nothing of it is in the page cache.
        with mounted(fs, served.file, place / "m") as point:
            broken = [path for path in (point / "store").rglob(name) if f"/{VICTIM}/" in str(path)]
            served.fail("read", ranges=[found for path in broken for found in extents(path)], times=times)
            child = nursery.start(_read_all, str(point / "store"), careless)
            said: list[Any] = child.end()
            nursery.forget(child)
            if not served.failed:
                problems.append("the disk did not fail")
            if len(said) != 4 * len(ROLLOUTS):
                problems.append(f"the process died after {[message[:2] for message in said]}")
            for rollout, doing, seen, more in said:
                if rollout == VICTIM and isinstance(seen, DurabilityError) and seen.errno == errno.EIO:
                    if f"rollout {VICTIM}" not in str(seen) or Path(more).suffix != Path(name).suffix:
                        problems.append(f"{doing}: the error is not clear: {seen!r} {more!r}")
                elif doing == "put":
                    if not isinstance(seen, FrozenError):
                        problems.append(f"put to {rollout}: {seen!r}")
                elif (seen, more) != (whole, ()):
                    problems.append(f"{doing} of {rollout}: {seen!r} {more}")
            if times is None and not any(isinstance(seen, DurabilityError) for _, _, seen, _ in said):
                problems.append("nothing was said of what can't be read")
            served.heal()
        with mounted(fs, served.file, place / "m") as point, booted_as(ANOTHER_BOOT), _open(point, careless) as store:
            for rollout in ROLLOUTS:
                with store.freeze_now(rollout) as snapshot:
                    seen = {entry.model_call_id: len(entry.prompt_token_ids) for entry in snapshot.entries}
                    if not whole.items() <= seen.items() or snapshot.incomplete or snapshot.damage:
                        problems.append(f"healed: {rollout} has {seen} {snapshot.damage}")
    return problems


def _situation(play: Callable[..., list[str]], **options: Any) -> Situation:
    return lambda fs, place, nursery, careless: play(fs, place, nursery, careless, **options)


SITUATIONS: Final[Mapping[str, Situation]] = {
    "the blocks of one segment fail once": _situation(_write, times=1, first=False, by_words=False),
    "the blocks of one segment fail for ever": _situation(_write, times=None, first=False, by_words=False),
    "one record fails once": _situation(_write, times=1, first=False, by_words=True),
    "one record fails for ever": _situation(_write, times=None, first=False, by_words=True),
    "one first record fails once": _situation(_write, times=1, first=True, by_words=True),
    "one first record fails for ever": _situation(_write, times=None, first=True, by_words=True),
    "a flush fails once": _situation(_flush, times=1),
    "flushes fail for ever": _situation(_flush, times=None),
    "a manifest can't be written once": _situation(_freeze, times=1),
    "a manifest can't be written": _situation(_freeze, times=None),
    "a sealed segment can't be read once": _situation(_read, ids=SMALL, frozen=False, times=1),
    "a sealed segment can't be read": _situation(_read, ids=SMALL, frozen=False, times=None),
    "a large sealed segment can't be read": _situation(_read, ids=BIG, frozen=False, times=None),
    "a snapshot can't be read": _situation(_read, ids=SMALL, frozen=True, times=None),
    "a large snapshot can't be read": _situation(_read, ids=BIG, frozen=True, times=None),
    "a manifest can't be read": _situation(_read, ids=SMALL, frozen=True, times=None, name="manifest"),
}
"""Name -> how it is played."""

IN_PLACE: Final = ("ext4", "ext4-without-journal", "xfs")
"""File systems that write where they wrote before, and give a small file blocks of its own."""
NEEDS_BLOCKS: Final = (
    "the blocks of one segment fail once",
    "the blocks of one segment fail for ever",
    "a manifest can't be written once",
    "a manifest can't be written",
    "a manifest can't be read",
)
