"""`export`: rollouts of a store into one file, or into a directory of parts that a repeated call goes on with."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import msgspec

from ..errors import InvalidIdError, InvalidOptionError, RetiredError, TokcapError
from ..ids import check_rollout_id
from ..inspection.opening import open_to_look
from ..protocol import RolloutState
from ..store import FileStore, Snapshot
from ..store.files import Files
from ..store.layout import Directory, Layout, look
from ..store.sweep import directories
from .parts import Parts
from .records import Asked, records_of
from .schema import FORMATS, LEVELS, SCHEMA_VERSION, Level, Record, weight
from .whole_file import WholeFile
from .writing import Writer, format_of, writer_for

__all__ = ("PART_BYTES", "Exported", "Progress", "WantedState", "export")

PART_BYTES = 512 << 20

WantedState = Literal["frozen", "open", "any"]

Progress = Callable[[int, int], None]
"""Told how many rollouts are done, of how many."""


class Exported(msgspec.Struct):
    """What an export did."""

    to: str
    format: str
    by: Level
    rollouts: int = 0
    """Rollouts written by this call."""
    records: int = 0
    bytes: int = 0
    """Of the files of this call."""
    parts: list[str] = []
    """The files of this call."""
    already: int = 0
    """Rollouts that finished parts hold from earlier calls."""
    without_records: int = 0
    """Rollouts among `rollouts` that have no record: nothing of them is trained."""
    changed: dict[str, str] = {}
    """Rollouts that changed since they were exported, and the part that holds them as they were."""
    skipped: dict[str, int] = {}
    """Rollouts by why they were left out: `open`, `frozen`, `retired`, `unreadable`."""
    unreadable: dict[str, str] = {}
    """Those that could not be read, and why."""
    damaged: dict[str, str] = {}
    """Those that were exported without the calls that damaged bytes cost, and where the first of these bytes are."""
    missing: tuple[str, ...] = ()
    """Ids that were named in full and aren't in the store."""

    @property
    def complete(self) -> bool:
        """Whether everything that was named is exported as it is now."""
        return not (self.skipped or self.changed or self.damaged or self.missing)


def export(
    store: FileStore | str | os.PathLike[str],
    to: str | os.PathLike[str],
    rollouts: str | Collection[str] = (),
    *,
    format: str | None = None,
    by: Level = "trajectory",
    state: WantedState = "frozen",
    untrained: bool = False,
    models: Collection[str] | None = None,
    strict: bool = False,
    exclude_not_behaviour: bool = False,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Write what was captured into a file, or into a directory of parts.

    to: a file, if its name ends as one of `FORMATS` does; it appears when it is complete, replaces what was there, and
        is begun anew after a kill. Else a directory: parts of whole rollouts appear one by one, a repeated call goes on
        with what is missing, and names those that changed since in `changed`; remove a part, and its rollouts are
        exported again.
    rollouts: ids or globs (`fnmatch`); none: all. format: by default what the name of the file says.
    by: what a record is. state: `frozen` (published snapshots, finished or not), `open` (as they are at this moment;
        that one grew is noticed when it is frozen) or `any`.
    untrained: also trajectories of which nothing is trained. models, strict, exclude_not_behaviour: see `tokcap.build`.
    part_bytes: a part is closed when its records have this many bytes. npz and safetensors keep a part in memory, so
        that a single file of them may have no more either; parquet keeps 64 MB, JSONL a rollout.

    Nothing is written into the store, nothing is retired. Rollouts that can't be read are left out and named. Raises
    `InvalidOptionError`, `StoreNotFoundError`, `BusyError` (another process writes the same), `OSError`. If nothing is
    to be exported, nothing is written.
    """
    path = os.path.abspath(to)
    single = format_of(os.path.basename(path))
    chosen = format or single
    if chosen is None:
        raise InvalidOptionError(f"{path} is to be a directory: say which format, one of {', '.join(FORMATS)}")
    if by not in LEVELS:
        raise InvalidOptionError(f"by is {by!r}, expected one of {', '.join(LEVELS)}")
    if state not in get_args(WantedState):
        raise InvalidOptionError(f"state is {state!r}, expected one of {', '.join(get_args(WantedState))}")
    if single is not None and chosen != single:
        raise InvalidOptionError(f"the name {os.path.basename(path)} says {single}, not {chosen}")
    if part_bytes < 1:
        raise InvalidOptionError(f"part_bytes is {part_bytes}, expected a whole number from 1")
    if isinstance(models, str):
        models = (models,)
    asked = Asked(by, untrained, None if models is None else tuple(sorted(models)), strict, exclude_not_behaviour)
    open_writer = writer_for(chosen, by)
    opened = open_to_look(store) if isinstance(store, (str, os.PathLike)) else store
    done = Exported(path, chosen, by)
    wanted, retired = _wanted(opened, (rollouts,) if isinstance(rollouts, str) else tuple(rollouts), state, done)
    if not wanted and (single is not None or not os.path.isdir(path)):  # then nothing is made or replaced
        return done
    reading = _Reading(opened, wanted, state, asked, done, progress)
    if single is not None:
        if os.path.isdir(path):
            raise InvalidOptionError(f"{path} is a directory; name a file, or a directory that doesn't end like one")
        if not os.path.isdir(os.path.dirname(path)):
            raise InvalidOptionError(f"there is no directory {os.path.dirname(path)} for the file")
        _into_file(reading, path, open_writer, part_bytes if chosen in ("npz", "safetensors") else None)
        return done
    what = {"tokcap": "export", "schema": SCHEMA_VERSION, "format": chosen, **msgspec.to_builtins(asked)}
    parts = Parts(path, what, FORMATS[chosen])
    try:
        reading.known = parts.rollouts()
        _count_consumed(done, retired, reading.known)
        _into_parts(reading, parts, open_writer, part_bytes)
    finally:
        parts.close()
    return done


class _Reading:
    """The rollouts that are meant, one after the other, with their records."""

    def __init__(
        self,
        store: FileStore,
        wanted: Sequence[str],
        state: WantedState,
        asked: Asked,
        done: Exported,
        progress: Progress | None,
    ) -> None:
        self._store, self._wanted, self._state, self._asked = store, wanted, state, asked
        self._files, self._layout = Files(), Layout(store.directory)
        self.done = done
        self._progress = progress
        self.known: dict[str, tuple[str, int, str]] = {}
        """What finished parts hold."""

    def __iter__(self) -> Iterator[tuple[tuple[str, str, int], Iterator[Record]]]:
        for count, rollout_id in enumerate(self._wanted):
            if self._progress is not None:
                self._progress(count, len(self._wanted))
            if self._is_there_as_it_was(rollout_id):
                self.done.already += 1
                continue
            try:
                with self._store.read_now(rollout_id) as snapshot:
                    if not self._is_meant(snapshot):
                        continue
                    records = records_of(snapshot, self._asked)
                    if snapshot.damage:
                        self.done.damaged[rollout_id] = str(snapshot.damage[0])
                    yield (rollout_id, snapshot.snapshot_id, snapshot.version), records
            except RetiredError:
                _count(self.done, "retired")
            except (TokcapError, OSError) as error:
                _count(self.done, "unreadable")
                self.done.unreadable[rollout_id] = str(error)
        if self._progress is not None:
            self._progress(len(self._wanted), len(self._wanted))

    def _is_there_as_it_was(self, rollout_id: str) -> bool:
        """Whether a finished part has this version of it, as far as names tell: nothing is read again to go on."""
        known = self.known.get(rollout_id)
        if known is None:
            return False
        try:
            now = look(self._files, self._layout.rollout(rollout_id))
        except (TokcapError, OSError):  # reading it says what is wrong
            return False
        return now.state in ("open", "frozen") and known[:2] == (now.incarnation, now.version)

    def _is_meant(self, snapshot: Snapshot) -> bool:
        done, rollout_id = self.done, snapshot.rollout_id
        now: RolloutState = "frozen" if snapshot.version else "open"
        if not snapshot.snapshot_id:  # it was reset meanwhile
            return False
        if self._state not in (now, "any"):
            _count(done, now)
            return False
        known = self.known.get(rollout_id)
        if known is None:
            return True
        done.already += 1
        if known[:2] != (snapshot.snapshot_id, snapshot.version):
            done.changed[rollout_id] = known[2]
        return False


def _count(done: Exported, why: str) -> None:
    done.skipped[why] = done.skipped.get(why, 0) + 1


def _cannot_read(done: Exported, rollout_id: str, error: Exception) -> None:
    """rollout_id: empty for a directory of several, which can't be listed."""
    _count(done, "unreadable")
    done.unreadable[rollout_id] = str(error)


def _count_consumed(done: Exported, retired: Collection[str], known: Collection[str]) -> None:
    """What was exported first and retired then is not left out."""
    consumed = sum(rollout_id in known for rollout_id in retired)
    if consumed:
        done.already += consumed
        done.skipped["retired"] -= consumed
        if not done.skipped["retired"]:
            del done.skipped["retired"]


def _wanted(
    store: FileStore, globs: tuple[str, ...], state: WantedState, done: Exported
) -> tuple[list[str], list[str]]:
    """Those that are named and may be exported, sorted, and those that are retired; what is left out is counted."""
    found: dict[str, RolloutState] = {}
    exact = {glob for glob in globs if not any(char in glob for char in "*?[")}
    patterns = [glob for glob in globs if glob not in exact]
    if globs and not patterns:
        found = _named(store, exact, done)
    else:
        try:
            for rollout_id, shown in directories(Files(), Layout(store.directory)):
                if globs and rollout_id not in exact and not any(fnmatchcase(rollout_id, glob) for glob in patterns):
                    continue
                if not isinstance(shown, Directory):
                    _cannot_read(done, rollout_id, shown)
                elif shown.state != "absent":
                    found[rollout_id] = shown.state
        except TokcapError as error:  # after all those that can be listed
            _cannot_read(done, "", error)
    left_out = Counter(now for now in found.values() if now == "retired" or (now != state and state != "any"))
    for now, count in sorted(left_out.items()):
        done.skipped[now] = done.skipped.get(now, 0) + count
    done.missing = tuple(sorted(exact.difference(found, done.unreadable)))
    wanted = sorted(rollout_id for rollout_id, now in found.items() if now not in left_out)
    return wanted, [rollout_id for rollout_id, now in found.items() if now == "retired"]


def _named(store: FileStore, ids: Collection[str], done: Exported) -> dict[str, RolloutState]:
    """Those of `ids` that are there, as their names tell; what is wrong with others doesn't matter."""
    files, layout = Files(), Layout(store.directory)
    found: dict[str, RolloutState] = {}
    for rollout_id in ids:
        try:
            state = look(files, layout.rollout(check_rollout_id(rollout_id))).state
        except InvalidIdError:  # nothing can be there
            continue
        except (TokcapError, OSError) as error:
            _cannot_read(done, rollout_id, error)
            continue
        if state != "absent":
            found[rollout_id] = state
    return found


def _into_file(reading: _Reading, path: str, open_writer: Callable[..., Writer], most: int | None) -> None:
    done = reading.done
    file = WholeFile(path)
    writer = open_writer(file.file)
    try:
        held = 0
        for _, records in reading:
            held += _write(writer, records, done)
            if most is not None and held > most:
                raise InvalidOptionError(
                    f"{path} would have more than {most} bytes, which {done.format} keeps in memory; name a directory, "
                    "which gets several parts, or allow larger ones"
                )
        writer.close()
        done.bytes = file.sync()
        file.publish()
    finally:
        writer.abandon()
        file.discard()
    done.parts = [path]


def _into_parts(reading: _Reading, parts: Parts, open_writer: Callable[..., Writer], most: int) -> None:
    done = reading.done
    names = parts.names()
    file: WholeFile | None = None
    writer: Writer | None = None
    inside: list[tuple[str, str, int]] = []
    held, before = 0, 0
    try:
        for identity, records in reading:
            if file is None or writer is None:
                file = WholeFile(os.path.join(parts.directory, next(names)))
                writer = open_writer(file.file)
                inside, held, before = [], 0, done.records
            held += _write(writer, records, done)
            inside.append(identity)
            if held >= most:
                _close(parts, file, writer, inside, before, done)
                file = writer = None
        if file is not None and writer is not None:
            _close(parts, file, writer, inside, before, done)
    finally:
        if file is not None and writer is not None:
            writer.abandon()
            file.discard()


def _close(
    parts: Parts, file: WholeFile, writer: Writer, inside: list[tuple[str, str, int]], before: int, done: Exported
) -> None:
    writer.close()
    part = parts.finish(file, done.records - before, inside)
    done.bytes += part.bytes
    done.parts.append(file.path)


def _write(writer: Writer, records: Iterator[Record], done: Exported) -> int:
    """The records of one rollout; their weight."""
    weighed, count = 0, 0
    for record in records:
        writer.write(record)
        weighed += weight(record, done.by)
        count += 1
    done.rollouts += 1
    done.records += count
    done.without_records += not count
    return weighed
