"""Stores with one thing wrong, each of which the histories must show. A mutant changes the process that calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from tests.store_worker import attempt
from tokcap import FileStore
from tokcap.store.batch import Batch
from tokcap.store.files import Files
from tokcap.store.frame import Kind
from tokcap.store.lifecycle import Freeze, Reset, Retire
from tokcap.store.notes import Notes
from tokcap.store.open_log import OpenLog
from tokcap.store.operations import Put, Settle
from tokcap.store.rollout import Rollout

__all__ = ("MUTANTS",)


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    patch.object(owner, name, function).start()


def no_fence() -> None:
    """Every lock is granted at once."""
    _replace(Files, "try_lock", lambda self, fd: True)


def late_puts() -> None:
    """A put returns before it was done."""
    put_now = FileStore.put_now

    def early(self: FileStore, entry: Any) -> None:
        threading.Thread(target=attempt, args=(lambda: put_now(self, entry),), daemon=True).start()

    async def early_too(self: FileStore, entry: Any) -> None:
        early(self, entry)

    _replace(FileStore, "put_now", early)
    _replace(FileStore, "put", early_too)


def any_version_retires() -> None:
    """A retire looks at the snapshot id alone."""
    run = Retire.run

    def careless(self: Retire, rollout: Rollout) -> bool:
        self.version = rollout.look().version or self.version
        return run(self, rollout)

    _replace(Retire, "run", careless)


def retires_by_version() -> None:
    """A retire looks at the version alone."""
    run = Retire.run

    def careless(self: Retire, rollout: Rollout) -> bool:
        self.snapshot_id = rollout.look().incarnation or self.snapshot_id
        return run(self, rollout)

    _replace(Retire, "run", careless)


def late_marks_make_no_version() -> None:
    """A mark after the freeze is noted, and what was frozen may still be retired."""

    def noted(self: Settle, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        notes.add(Kind.SETTLE, self.record())
        return False

    _replace(Settle, "apply_late", noted)


def late_puts_are_swallowed() -> None:
    """A put after the freeze returns as if it were stored."""
    _replace(Put, "apply_late", lambda self, log, batch, notes: False)


def resets_do_nothing() -> None:
    """A reset returns without having done anything, now and then."""
    run, turns = Reset.run, iter(range(1 << 60))

    def lazy(self: Reset, rollout: Rollout) -> bool:
        return run(self, rollout) if next(turns) % 2 else True

    _replace(Reset, "run", lazy)


def freezes_are_remembered() -> None:
    """A freeze gives the snapshot that this process saw first."""
    run, seen = Freeze.run, dict[str, Any]()

    def remembering(self: Freeze, rollout: Rollout) -> Any:
        if self.rollout_id not in seen:
            snapshot = run(self, rollout)
            seen[self.rollout_id] = snapshot
        return seen[self.rollout_id]

    _replace(Freeze, "run", remembering)


MUTANTS: Mapping[str, Callable[[], None]] = {
    mutant.__name__.replace("_", " "): mutant
    for mutant in (
        no_fence,
        late_puts,
        any_version_retires,
        retires_by_version,
        late_marks_make_no_version,
        late_puts_are_swallowed,
        resets_do_nothing,
        freezes_are_remembered,
    )
}
