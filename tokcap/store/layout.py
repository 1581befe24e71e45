"""Names on disk, and the state that they show. Nothing else is authoritative: no file says what state a rollout is in.

    <dir>/
      FORMAT                                 marks a store and its format version; rewritten if missing or damaged
      FORMAT-<random> probe-<random>         of a process that opens the store; swept after an hour
      sweep.lock                             held while one process sweeps; its time is that of the last sweep
      writers/<writer>                       locked by a live writer that begins calls; empty
      quarantine/<utc time>-<rollout id>/    what `tokcap verify --repair` moved aside, with a note; no rollout is in it
        <rollout id>/                        (without an id, and without this level: what belongs to no rollout)
          note.json                          what was found and done, what is lost; `verify` calls it known from then on
          moved/... bytes/...                by their paths below the store: what was moved, copies of damaged bytes
      rollouts/<hh>/<rollout id>/            hh: first two hex digits of the id's crc32; this directory is the fence
        <incarnation>/                       32 hex digits; also the snapshot_id
          000001.seg 000002.torn 000003.open segments: sealed, left with a torn tail, being written
          v1/                                a published snapshot; the highest number counts
            manifest 000001-4096.seg         hard links, with the length that belongs to the snapshot
            damaged                          empty; there if damage was found, in case the manifest gets lost, too
          tmp-<random>/                      a snapshot being built by the holder of the fence
          note-000001                        said after the freeze: deliveries; after retirement: marks
        <incarnation>.retired.<version>.<ms> a tombstone: what is left of a retired incarnation
        <incarnation>.trash                  reset or swept, being deleted

| what a rollout directory holds | state |
|---|---|
| nothing, or trash only, or an incarnation without segments and snapshots | absent |
| an incarnation with segments and no `v<n>` | open |
| an incarnation with a `v<n>` | frozen, version n |
| a tombstone | retired |
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Literal

import msgspec

from ..errors import CorruptError
from ..protocol import RolloutState
from .files import Files

__all__ = ("Directory", "Layout", "SegmentName", "is_note", "kind_below", "kind_of_name", "look", "look_into")

_INCARNATION = re.compile(r"[0-9a-f]{32}")
# Numbers only as they are written: the name is made of them again.
_NUMBER, _COUNTED = r"(0|[1-9][0-9]{0,17})", r"([0-9]{6}|[1-9][0-9]{6,8})"
_TOMBSTONE = re.compile(rf"([0-9a-f]{{32}})\.retired\.{_NUMBER}\.(0|[1-9][0-9]{{0,14}})")
_TRASH = re.compile(r"[0-9a-f]{32}\.trash")
_SEGMENT = re.compile(rf"{_COUNTED}\.(open|seg|torn)")
_VERSION = re.compile(r"v([1-9][0-9]{0,17})")
_LINK = re.compile(rf"{_COUNTED}-{_NUMBER}\.seg")
_NOTE = re.compile(rf"note-{_COUNTED}")

MANIFEST = "manifest"
DAMAGED = "damaged"
OPEN, SEALED, TORN = "open", "seg", "torn"


class SegmentName(msgspec.Struct, frozen=True, order=True):
    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.number:06d}.{self.kind}"


class LinkName(msgspec.Struct, frozen=True, order=True):
    number: int
    length: int

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.length}.seg"


class Tombstone(msgspec.Struct, frozen=True):
    incarnation: str
    version: int
    retired_at: float
    """Unix seconds."""

    def __str__(self) -> str:
        return f"{self.incarnation}.retired.{self.version}.{round(self.retired_at * 1000)}"


class Directory(msgspec.Struct):
    """What the names under one rollout directory say."""

    path: str
    state: RolloutState = "absent"
    incarnation: str = ""
    segments: list[SegmentName] = []
    versions: list[int] = []
    notes: list[int] = []
    tombstone: Tombstone | None = None
    leftovers: list[str] = []
    """Absolute paths of what a crash left half-built or half-deleted."""

    @property
    def incarnation_path(self) -> str:
        return f"{self.path}/{self.incarnation}"

    @property
    def version(self) -> int:
        return self.versions[-1] if self.versions else 0

    @property
    def snapshot_path(self) -> str:
        return f"{self.path}/{self.incarnation}/v{self.version}"

    @property
    def tombstone_path(self) -> str:
        return f"{self.path}/{self.tombstone}"


class Layout:
    """Where things are."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.marker = f"{root}/FORMAT"
        self.sweep_lock = f"{root}/sweep.lock"
        self.writers = f"{root}/writers"
        self.rollouts = f"{root}/rollouts"
        self.quarantine = f"{root}/quarantine"

    def shard(self, rollout_id: str) -> str:
        return f"{self.rollouts}/{zlib.crc32(rollout_id.encode()) & 0xFF:02x}"

    def rollout(self, rollout_id: str) -> str:
        return f"{self.shard(rollout_id)}/{rollout_id}"


def look(files: Files, path: str) -> Directory:
    """Read the names under the rollout directory `path`. A missing directory is an absent rollout."""
    found = Directory(path)
    live: list[str] = []
    try:
        names = files.listdir(path)
    except FileNotFoundError:
        return found
    for name in names:
        if _INCARNATION.fullmatch(name):
            live.append(name)
        elif match := _TOMBSTONE.fullmatch(name):
            found.tombstone = Tombstone(match[1], int(match[2]), int(match[3]) / 1000)
        elif _TRASH.fullmatch(name):
            found.leftovers.append(f"{path}/{name}")
    if found.tombstone is not None:
        found.state = "retired"
        found.incarnation = found.tombstone.incarnation
        found.notes = sorted(_numbers(files, found.tombstone_path, _NOTE))
        return found
    if len(live) > 1:
        raise CorruptError(
            f"{path} holds two incarnations, {' and '.join(sorted(live))}; tokcap never leaves two: "
            "move one of them away",
            path=path,
        )
    if live:
        found.incarnation = live[0]
        _look_into(files, found)
    return found


def look_into(files: Files, path: str, incarnation: str) -> Directory:
    """What the names in one incarnation of a rollout say, whatever lies beside it."""
    found = Directory(path, incarnation=incarnation)
    _look_into(files, found)
    return found


def kind_of_name(name: str) -> Literal["incarnation", "tombstone", "trash", ""]:
    """What belongs under this name in the directory of a rollout; nothing does if it is empty."""
    if _INCARNATION.fullmatch(name):
        return "incarnation"
    if _TOMBSTONE.fullmatch(name):
        return "tombstone"
    return "trash" if _TRASH.fullmatch(name) else ""


def kind_below(name: str) -> Literal["segment", "version", "note", "temporary", ""]:
    """What belongs under this name in an incarnation; nothing does if it is empty."""
    if _SEGMENT.fullmatch(name):
        return "segment"
    if _VERSION.fullmatch(name):
        return "version"
    if _NOTE.fullmatch(name):
        return "note"
    return "temporary" if name.startswith("tmp-") else ""


def _look_into(files: Files, found: Directory) -> None:
    segments, versions, notes, leftovers = [], [], [], []
    for name in files.listdir(found.incarnation_path):
        if match := _SEGMENT.fullmatch(name):
            segments.append(SegmentName(int(match[1]), match[2]))
        elif match := _VERSION.fullmatch(name):
            versions.append(int(match[1]))
        elif match := _NOTE.fullmatch(name):
            notes.append(int(match[1]))
        elif name.startswith("tmp-"):
            leftovers.append(f"{found.incarnation_path}/{name}")
    found.segments, found.versions, found.notes = sorted(segments), sorted(versions), sorted(notes)
    found.leftovers += leftovers + [f"{found.incarnation_path}/v{old}" for old in found.versions[:-1]]
    found.state = "frozen" if versions else "open" if segments else "absent"


def is_note(name: str) -> bool:
    """Whether it is a note, to be kept with the tombstone of its rollout."""
    return name.startswith("note-")


def snapshot_links(files: Files, snapshot_path: str) -> list[LinkName]:
    """The segments of a published snapshot, by the names of its links."""
    matches = (_LINK.fullmatch(name) for name in files.listdir(snapshot_path))
    return sorted(LinkName(int(match[1]), int(match[2])) for match in matches if match)


def _numbers(files: Files, path: str, pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for name in files.listdir(path) if (match := pattern.fullmatch(name))]


def remove_tree(files: Files, path: str) -> None:
    """Delete a directory of the store and what is in it; nothing here nests deeper than two levels."""
    try:
        names = files.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        files.unlink(path)
        return
    for name in names:
        child = f"{path}/{name}"
        try:
            files.unlink(child)
        except FileNotFoundError:
            continue
        except (IsADirectoryError, PermissionError):
            remove_tree(files, child)
    try:
        files.rmdir(path)
    except FileNotFoundError:
        return


def absolute(path: str | os.PathLike[str]) -> str:
    """`path` as an absolute path without a trailing slash, links not resolved."""
    return os.path.abspath(os.fspath(path))
