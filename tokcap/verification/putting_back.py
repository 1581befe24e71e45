"""Putting a rollout back that lies where nobody looks for it: one rename into its place, if that is free.

It takes nobody's place. The fence of the rollout is held meanwhile, that of an empty directory which is made if there
is none, and so is the fence of what lies in the wrong place: a writer from before may still have it open. A rename
replaces an empty directory and no other.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from ..store import fence
from ..store.files import durability_error
from ..store.lifecycle import Lifecycle
from ..store.rollout import Rollout
from .checking import Place
from .finding import Finding
from .mending import Repaired
from .misplaced import id_inside, is_free, rollouts_in
from .quarantine import Quarantine

__all__ = ("Misplaced", "PutBack", "in_turn", "misplaced_at")


class Misplaced(msgspec.Struct, frozen=True):
    """One directory in the wrong place."""

    path: str
    finding: Finding
    rollout_id: str
    """Empty if nothing says it."""
    right: str = ""
    """Its place."""
    free: bool = False
    """Whether nothing is there, or will be when its turn comes (`in_turn`)."""

    @property
    def done(self) -> str:
        """What is done about it, in words."""
        return f"put {self.path} back into its place, {self.right}"

    @property
    def left(self) -> str:
        """Why it is left, in words."""
        if not self.rollout_id and self.path == self.finding.path:
            return f"{self.path}: {self.finding.what}; {self.finding.advice}"
        if not self.rollout_id:
            return (
                f"{self.path}: its segments don't say which rollout it is, or not all the same: "
                "move it to its place if you know it, or out of the store"
            )
        return (
            f"{self.path}: the place of rollout {self.rollout_id}, {self.right}, is taken: compare the two, and move "
            "one of them out of the store"
        )


def misplaced_at(place: Place, finding: Finding) -> list[Misplaced]:
    """What lies in a wrong place, as it is by now: one rollout, or several in a shard under another name."""
    found: list[Misplaced] = []
    for path in rollouts_in(place.files, finding.path) or [finding.path]:
        rollout_id = id_inside(place.files, path)
        right = place.layout.rollout(rollout_id) if rollout_id else ""
        if path != right and os.path.lexists(path):
            free = bool(right) and is_free(place.files, right)
            found.append(Misplaced(path, finding, rollout_id, right, free))
    return found


def in_turn(misplaced: list[Misplaced]) -> list[Misplaced]:
    """Those that can be put back, each behind the one that lies in its place; then those that are left."""
    ordered: list[Misplaced] = []
    given: set[str] = set()
    left_behind: set[str] = set()
    waiting = misplaced
    while True:
        rest: list[Misplaced] = []
        for one in waiting:
            if one.right and one.right not in given and (one.free or one.right in left_behind):
                given.add(one.right)
                left_behind.add(one.path)
                ordered.append(msgspec.structs.replace(one, free=True))
            else:
                rest.append(one)
        if len(rest) == len(waiting):
            return ordered + [msgspec.structs.replace(one, free=False) for one in rest]
        waiting = rest


class PutBack(Lifecycle):
    """Puts one back, under the fence of its rollout."""

    __slots__ = ("misplaced", "place")

    creates = True

    def __init__(self, place: Place, misplaced: Misplaced) -> None:
        super().__init__(misplaced.rollout_id)
        self.place, self.misplaced = place, misplaced

    def run(self, rollout: Rollout) -> Repaired:
        """Says why not, if it is not what it was, or somebody holds it."""
        one, files = self.misplaced, self.place.files
        rollout.drop()
        if not is_free(files, rollout.path):
            return Repaired(one.rollout_id, (), (one.left,))
        try:
            held = files.open_directory(one.path)
        except OSError as error:
            self._unmake(rollout)
            return Repaired(one.rollout_id, (), (f"{one.path}: it can't be opened any more: {error}",))
        try:
            if not fence.lock(files, held) or not fence.still_there(files, held, one.path):
                self._unmake(rollout)
                return Repaired(one.rollout_id, (), (f"{one.path}: somebody is at work in it; repeat the repair",))
            if id_inside(files, one.path) != one.rollout_id:
                self._unmake(rollout)
                return Repaired(one.rollout_id, (), (f"{one.path}: it was changed meanwhile; repeat the repair",))
            return self._put_back(rollout)
        finally:
            files.close(held)

    def _put_back(self, rollout: Rollout) -> Repaired:
        one, files = self.misplaced, self.place.files
        quarantine = Quarantine(files, self.place.layout, one.rollout_id)
        done = False
        try:
            quarantine.note([one.finding], [], [], [one.done])
            files.rename(one.path, rollout.path)
            done = True
            for path in (*rollout.parents(), os.path.dirname(one.path)):
                files.fsync_directory(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                if done:
                    files.rename(rollout.path, one.path)
                    files.fsync_directory(os.path.dirname(one.path))
            with contextlib.suppress(OSError):
                quarantine.drop_note()
            self._unmake(rollout)
            raise durability_error(error, f"rollout {one.rollout_id}: can't put it back", one.path) from error
        rollout.close_descriptors()  # they led into the empty directory, and it is gone
        return Repaired(one.rollout_id, (one.done,), (), quarantine.path)

    def _unmake(self, rollout: Rollout) -> None:
        """Remove the empty directory that was made for the fence."""
        with contextlib.suppress(OSError):
            self.place.files.rmdir(rollout.path)
        rollout.close_descriptors()
