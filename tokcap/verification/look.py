"""One look at one rollout: what it counts, and how it says what it finds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import msgspec

from ..errors import NewerFormatError, TokcapError
from ..store.files import Files
from .finding import Finding, FindingKind, Level

__all__ = (
    "APART",
    "OF_ANOTHER",
    "READ_BY_OTHERS",
    "WRITTEN_BY_OTHERS",
    "Checked",
    "Look",
    "Owner",
    "UnsteadyError",
    "unreadable",
)

READ_BY_OTHERS, WRITTEN_BY_OTHERS, OF_ANOTHER = "others can read", "others can write", "another owner"
APART = "no longer the same file"


class UnsteadyError(OSError):
    """It was changed while it was looked at: look again."""


class Checked(msgspec.Struct):
    """What the check of one rollout, or of what belongs to none, gave."""

    findings: list[Finding] = []
    files: int = 0
    bytes: int = 0
    frames: int = 0
    counted: dict[str, tuple[int, str]] = {}
    """What is said once for a whole store: how often it was seen, and the first path."""

    def count(self, what: str, path: str) -> None:
        """See `counted`."""
        number, first = self.counted.get(what, (0, path))
        self.counted[what] = number + 1, first

    @property
    def troubles(self) -> list[Finding]:
        """What has to be seen twice before it is believed: somebody may be at work."""
        return [finding for finding in self.findings if finding.level != "info"]


class Owner(msgspec.Struct, frozen=True):
    """Whose a store is, and which permission bits nobody else's files in it have."""

    user: int
    readable: int
    writable: int

    @staticmethod
    def of(root: os.stat_result) -> Owner:
        """By the `os.stat_result` of its directory."""
        mode, user, group = root.st_mode, root.st_uid, stat.S_IRWXG
        if mode & stat.S_ISGID and mode & stat.S_IWGRP:  # shared with one group
            group = 0
        others = stat.S_IRWXO | group
        return Owner(user, others & (stat.S_IRGRP | stat.S_IROTH), others & (stat.S_IWGRP | stat.S_IWOTH))

    def judge(self, there: os.stat_result, path: str, into: Checked) -> None:
        """Count what the contract forbids."""
        mode = there.st_mode
        if stat.S_ISLNK(mode):
            return
        if mode & self.writable:
            into.count(WRITTEN_BY_OTHERS, path)
        elif mode & self.readable:
            into.count(READ_BY_OTHERS, path)
        if there.st_uid != self.user:
            into.count(OF_ANOTHER, path)


def unreadable(rollout_id: str, path: str, error: OSError | TokcapError, incarnation: str = "") -> Finding:
    newer = isinstance(error, NewerFormatError)
    return Finding(
        "damage",
        "unreadable",
        path,
        f"it can't be read: {error}",
        "" if newer else "whatever it holds, until it can be read",
        "use that tokcap to check it" if newer else "see to the permissions, or the disk, and check again",
        rollout_id,
        incarnation,
    )


class Look:
    """What every part of a look needs."""

    def __init__(self, files: Files, rollout_id: str, path: str, boot_id: str, owner: Owner, quick: bool) -> None:
        self.files, self.rollout_id, self.path = files, rollout_id, path
        self.boot_id, self.owner, self.quick = boot_id, owner, quick
        self.incarnation = ""
        self.result = Checked()
        self.seen: set[tuple[int, int]] = set()

    def say(
        self,
        level: Level,
        kind: FindingKind,
        path: str,
        what: str,
        lost: str = "",
        advice: str = "",
        *,
        place: tuple[int, int] = (0, 0),
        calls: Iterable[str] = (),
    ) -> None:
        self.result.findings.append(
            Finding(
                level,
                kind,
                path,
                what,
                lost,
                advice,
                self.rollout_id,
                self.incarnation,
                *place,
                tuple(calls),
            )
        )

    def weigh(self, path: str) -> None:
        """Count a file, or a directory with what is in it."""
        there = self.files.stat(path)
        self.owner.judge(there, path, self.result)
        if stat.S_ISDIR(there.st_mode):
            for name in self.files.listdir(path):
                self.weigh(f"{path}/{name}")
        elif (there.st_dev, there.st_ino) not in self.seen or not there.st_ino:
            self.seen.add((there.st_dev, there.st_ino))
            self.result.files += 1
            self.result.bytes += there.st_size

    def no_directory(self, path: str, costs: str) -> None:
        self.say(
            "damage",
            "not_a_directory",
            path,
            "a file, or a link, where a directory belongs",
            costs,
            "tokcap verify --repair moves it to quarantine",
        )

    def stranger(self, path: str) -> None:
        self.say(
            "warning",
            "name",
            path,
            "a name that belongs to no store",
            advice="move it out of the store; tokcap verify --repair moves it to quarantine",
        )

    def leftover(self, path: str) -> None:
        what = (
            "left by a crash, or somebody is at work on it; the next operation on the rollout, or a sweep, removes it"
        )
        self.say("info", "leftover", path, what)
