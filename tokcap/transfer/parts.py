"""A directory of parts, and the file beside them that says which rollouts are in which: the way to go on.

`progress.jsonl`: a first line that says what is exported, then one for each part: its file, size, number of records,
and `[rollout_id, snapshot_id, version]` of every rollout in it. A part is written under another name, synced, told of
here, and then renamed: whatever a kill leaves is either finished by the next run, or written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..errors import BusyError, InvalidOptionError
from .whole_file import UNFINISHED, WholeFile, sync_directory, temporary_of

__all__ = ("PROGRESS", "Part", "Parts")

PROGRESS = "progress.jsonl"


class Part(msgspec.Struct, frozen=True):
    """One finished file."""

    file: str
    bytes: int
    records: int
    rollouts: list[tuple[str, str, int]]
    """(rollout_id, snapshot_id, version)."""


class Parts:
    """The parts in `directory`, which is made if it is missing.

    what: everything that decides what records look like; another export in the same directory is refused. Raises
    `InvalidOptionError` for that, and for a directory with other files; `BusyError` if another process exports there.
    """

    def __init__(self, directory: str, what: Mapping[str, Any], end: str) -> None:
        self.directory, self._end = directory, end
        os.makedirs(directory, exist_ok=True)
        found = os.listdir(directory)
        if found and PROGRESS not in found:
            raise InvalidOptionError(f"{directory} holds other files and no {PROGRESS}; name a new directory")
        path = os.path.join(directory, PROGRESS)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o666), "a+b")
        try:
            self._lock()
            self.finished = self._read(dict(what))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"another process exports into {self.directory} now") from error

    def _read(self, what: dict[str, Any]) -> dict[str, Part]:
        """The parts that are there; what a kill cut off is removed."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1  # a last line without an end was never acknowledged
        os.ftruncate(self._file.fileno(), whole)
        lines = data[:whole].splitlines()
        told: dict[str, Part] = {}
        if not lines:
            self._append(what)
            sync_directory(self.directory)
        else:
            try:
                self._check(lines[0], what)
                for line in lines[1:]:
                    part = msgspec.json.decode(line, type=Part)
                    told[part.file] = part
            except ValueError as error:
                if isinstance(error, InvalidOptionError):
                    raise
                raise InvalidOptionError(f"{self._file.name} can't be read ({error}); name a new directory") from error
        finished = {name: part for name, part in told.items() if self._is_there(part)}
        for name in os.listdir(self.directory):
            if name.endswith(UNFINISHED):
                os.unlink(os.path.join(self.directory, name))
        return finished

    def _check(self, line: bytes, what: dict[str, Any]) -> None:
        found = json.loads(line)
        for name in {**found, **what}:
            if found.get(name) != what.get(name):
                raise InvalidOptionError(
                    f"{self.directory} holds an export with {name} {found.get(name)!r}, not {what.get(name)!r}; "
                    "name a new directory"
                )

    def _is_there(self, part: Part) -> bool:
        path = os.path.join(self.directory, part.file)
        if not os.path.exists(path):
            # Killed between the line and the rename: what the line tells of is whole.
            temporary = temporary_of(path)
            if not os.path.exists(temporary) or os.path.getsize(temporary) != part.bytes:
                return False
            os.rename(temporary, path)
            sync_directory(self.directory)
        return os.path.getsize(path) == part.bytes

    def _append(self, value: Any) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def rollouts(self) -> dict[str, tuple[str, int, str]]:
        """What is in the finished parts: rollout_id -> (snapshot_id, version, file)."""
        return {
            rollout_id: (snapshot_id, version, part.file)
            for part in self.finished.values()
            for rollout_id, snapshot_id, version in part.rollouts
        }

    def names(self) -> Iterator[str]:
        """File names for new parts, in order."""
        number = 0
        while True:
            name = f"part-{number:05d}{self._end}"
            if name not in self.finished:
                yield name
            number += 1

    def finish(self, file: WholeFile, records: int, rollouts: list[tuple[str, str, int]]) -> Part:
        """A part is complete: say so, and give it its name."""
        part = Part(os.path.basename(file.path), file.sync(), records, rollouts)
        self._append(part)
        file.publish()
        self.finished[part.file] = part
        return part

    def close(self) -> None:
        """Let others export there."""
        with contextlib.suppress(OSError):
            self._file.close()
