"""Which rows are meant: the conditions of `ls` and `stats`, for scripts, too."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Collection, Iterable

import msgspec

from .row import RolloutRow

__all__ = ("Wanted", "is_named")


class Wanted(msgspec.Struct, frozen=True):
    """Conditions on rows; all that are given must hold. Of several values of one, any."""

    states: Collection[str] = ()
    masked: bool = False
    """Nothing of it is trained."""
    incomplete: bool = False
    damaged: bool = False
    """Bytes were damaged, or it can't be read at all."""
    reasons: Collection[str] = ()
    """Of `tokcap.trajectory.REASONS`."""
    models: Collection[str] = ()
    """Globs (`fnmatch`)."""
    groups: Collection[str] = ()
    """Globs."""
    older_s: float | None = None
    """What is shown last changed at least so many seconds ago."""
    newer_s: float | None = None
    finished: bool | None = None
    """Whether its owner said so."""
    wrong: bool = False
    """`RolloutRow.why` has something to say: anything that isn't trained, or not as it should be."""

    @property
    def needs_builds(self) -> bool:
        """Whether rows must tell what only a build tells."""
        return bool(self.masked or self.reasons or self.models or self.wrong)

    def of(self, rows: Iterable[RolloutRow]) -> list[RolloutRow]:
        """Those of `rows` that are meant."""
        if self == _ALL:
            return list(rows)
        now = time.time()
        return [row for row in rows if self._matches(row, now - row.changed_at)]

    def _matches(self, row: RolloutRow, age_s: float) -> bool:
        unreadable = row.state == "unreadable"
        return (
            (not self.states or row.state in self.states)
            and (not self.masked or row.masked)
            and (not self.incomplete or row.incomplete)
            and (not self.damaged or unreadable or bool(row.damage))
            and (
                not self.reasons
                or any(reason in self.reasons for reason in row.reasons)
                or ("unreadable" in self.reasons and (unreadable or bool(row.error)))
            )
            and (not self.models or any(is_named(model, self.models) for model in row.models))
            and (not self.groups or is_named(row.group, self.groups))
            and (self.older_s is None or age_s >= self.older_s)
            and (self.newer_s is None or age_s < self.newer_s)
            and (self.finished is None or row.finished == self.finished)
            and (not self.wrong or bool(row.why))
        )


_ALL = Wanted()


def is_named(name: str, globs: Collection[str]) -> bool:
    """Whether one of `globs` names it (`fnmatch`)."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)
