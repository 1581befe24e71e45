"""Quarantine: where a repair puts what it takes away, and what it remembers of damage that stays.

    <dir>/quarantine/<utc time>-<rollout id>/<rollout id>/note.json, moved/..., bytes/...

See `tokcap.store.layout`. Nothing reads it but `verify`, and nothing removes it but you.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ..store.files import Files
from ..store.layout import Layout
from .finding import Finding, place_of

__all__ = ("Quarantine", "known_places", "notes_of")

_NOTE = "note.json"
_MOST_NOTE = 64 << 20

Place = tuple[str, str, str, str, int, int]


def notes_of(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every note in quarantine that can be read, with its path."""
    try:
        folders = sorted(os.listdir(layout.quarantine))
    except OSError:
        return
    for folder in folders:
        path = f"{layout.quarantine}/{folder}"
        try:
            below = [name for name in os.listdir(path) if os.path.isfile(f"{path}/{name}/{_NOTE}")]
        except OSError:
            continue
        for note in (f"{path}/{_NOTE}", *(f"{path}/{name}/{_NOTE}" for name in sorted(below))):
            try:
                with open(note, "rb") as file:
                    said = json.loads(file.read(_MOST_NOTE))
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(said, dict):
                yield note, said


def known_places(layout: Layout) -> frozenset[Place]:
    """The damage that notes in quarantine speak of: `place_of` of each finding."""
    places: set[Place] = set()
    for _, note in notes_of(layout):
        known = note.get("known")
        for place in known if isinstance(known, list) else ():
            if isinstance(place, list) and len(place) == 6 and [type(part) for part in place] == [str] * 4 + [int] * 2:
                places.add(tuple(place))
    return frozenset(places)


class Quarantine:
    """One folder in quarantine, of one repair of one rollout (or of what belongs to none).

    Everything is durable before anything is removed from its place: copy or note, sync, then rename, sync.
    """

    def __init__(self, files: Files, layout: Layout, rollout_id: str = "") -> None:
        self.files, self.layout, self.rollout_id = files, layout, rollout_id
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self.path = f"{layout.quarantine}/{now}" + (f"-{rollout_id}/{rollout_id}" if rollout_id else "")
        self._made: set[str] = set()
        self.moves: list[tuple[str, str]] = []
        """From where to where, done."""

    def keep_bytes(self, path: str, offset: int, end: int) -> str:
        """Copy a range of a file, durably; where to. end 0: all of it."""
        fd = self.files.open(path)
        try:
            size = self.files.fstat(fd).st_size
            end = size if not end else min(end, size)
            data = self.files.read(fd, max(0, end - offset), offset)
        finally:
            self.files.close(fd)
        return self._write(f"bytes/{self._below(path)}-{offset}-{end}", data)

    def note(self, findings: list[Finding], known: list[Finding], moving: list[str], did: list[str]) -> str:
        """Say what is done here, durably; where. known: damage that stays where it is. moving: paths, see `target`."""
        said = {
            "at": datetime.now(UTC).isoformat(),
            "rollout_id": self.rollout_id,
            "done": did,
            "moved": [{"from": self._below(path), "to": self._below(self.target(path))} for path in moving],
            "found": [
                {
                    "kind": finding.kind,
                    "file": self._below(finding.path),
                    "incarnation": finding.incarnation,
                    "offset": finding.offset,
                    "end": finding.end,
                    "what": finding.what,
                    "lost": finding.lost,
                    "calls": list(finding.calls),
                }
                for finding in findings
            ],
            "known": [list(place_of(finding)) for finding in known],
        }
        return self._write(_NOTE, json.dumps(said, indent=1).encode() + b"\n")

    def target(self, path: str) -> str:
        """Where a file or directory of the store is moved to."""
        return f"{self.path}/moved/{self._below(path)}"

    def move(self, path: str, now_at: str = "") -> None:
        """Take something out of its place; by one rename, made durable at both ends.

        now_at: where it is by now, if it left its place already, as `moves` says.
        """
        target = self.target(path)
        self._make(os.path.dirname(target))
        self.files.rename(now_at or path, target)
        if now_at:
            self.moves.remove((path, now_at))
        self.moves.append((path, target))
        self.files.fsync_directory(os.path.dirname(target))
        self.files.fsync_directory(os.path.dirname(path))

    def undo(self) -> None:
        """Give back what was moved."""
        while self.moves:
            path, target = self.moves.pop()
            self.files.rename(target, path)
            self.files.fsync_directory(os.path.dirname(path))

    def drop_note(self) -> None:
        """What it says is not so after all."""
        try:
            self.files.unlink(f"{self.path}/{_NOTE}")
        except FileNotFoundError:
            return
        self.files.fsync_directory(self.path)

    def _below(self, path: str) -> str:
        return os.path.relpath(path, self.layout.root)

    def _write(self, name: str, data: bytes) -> str:
        path = f"{self.path}/{name}"
        self._make(os.path.dirname(path))
        temporary = f"{os.path.dirname(path)}/tmp-{os.urandom(8).hex()}"
        fd = self.files.create(temporary)
        try:
            self.files.write(fd, [data], 0) if data else None
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)
        self.files.rename(temporary, path)
        self.files.fsync_directory(os.path.dirname(path))
        return path

    def _make(self, path: str) -> None:
        """A directory and those that lead to it, private and durable. Raises `NotADirectoryError` for a link."""
        missing: list[str] = []
        while path not in self._made and path != self.layout.root:
            missing.append(path)
            path = os.path.dirname(path)
        for name in reversed(missing):
            try:
                self.files.mkdir(name)
            except FileExistsError:
                self.files.close(self.files.open_directory(name))  # a link out of the store is refused
            self.files.fsync_directory(os.path.dirname(name))
            self._made.add(name)
