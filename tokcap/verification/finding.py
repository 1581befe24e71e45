"""What a check of a store finds, and what it counts."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ("CheckSummary", "Finding", "FindingKind", "Level", "place_of")

Level = Literal["damage", "warning", "info", "known"]
"""damage: something that was durable isn't whole, or is hidden. warning: nothing is lost yet, somebody should look.
info: as crashes and copies leave it. known: damage that a note in quarantine speaks of already."""

FindingKind = Literal[
    "bytes",
    "record",
    "missing",
    "manifest",
    "note",
    "marker",
    "incarnation",
    "not_a_directory",
    "wrong_shard",
    "name",
    "unreadable",
    "meaningless",
    "torn",
    "leftover",
    "apart",
    "modes",
]
"""
bytes: a checksum doesn't hold. record: it holds, and what it covers can't be decoded. missing: a segment file isn't
there. manifest: it is damaged, missing, or says other than the segments. note, marker: a note, the file FORMAT.
incarnation: one too many. not_a_directory: something else has the name of one. wrong_shard: a rollout, or a part of
one, where nobody looks for it. name: what belongs to no store. unreadable: the system refused. meaningless: padding,
trailers or unused space have changed. torn: a tail that was never acknowledged. leftover: of a crash. apart: files that
were one, and are copies now. modes: permissions and owners.
"""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a check has to say."""

    level: Level
    kind: FindingKind
    path: str
    """Absolute."""
    what: str
    """In words."""
    lost: str = ""
    """What it costs, in words."""
    advice: str = ""
    """What to do, in words."""
    rollout_id: str = ""
    """Empty: it concerns the store."""
    incarnation: str = ""
    offset: int = 0
    end: int = 0
    """The bytes that are meant, if some are: `offset..end` of the file."""
    calls: tuple[str, ...] = ()
    """Calls that had a record, or may have had one, and have none now."""

    def __str__(self) -> str:
        where = f" bytes {self.offset}..{self.end}" if self.end else ""
        return f"{self.level}: {self.path}{where}: {self.what}"


class CheckSummary(msgspec.Struct):
    """What was looked at. It grows while the check runs."""

    rollouts: int = 0
    files: int = 0
    bytes: int = 0
    """Of all files, each counted once however many names it has."""
    frames: int = 0
    """Whose checksums hold."""
    seconds: float = 0.0
    damage: int = 0
    warning: int = 0
    info: int = 0
    known: int = 0


def place_of(finding: Finding) -> tuple[str, str, str, str, int, int]:
    """What identifies damage for as long as its incarnation lives: a segment keeps its number when it is sealed, and
    in every version of a snapshot."""
    name = finding.path.rpartition("/")[2]
    if finding.kind in ("bytes", "record", "missing"):
        name = name[:6]
    missing = finding.kind == "missing"
    place = (0, 0) if missing else (finding.offset, finding.end)
    return finding.rollout_id, finding.incarnation, finding.kind, name, *place
