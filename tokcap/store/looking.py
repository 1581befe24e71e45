"""Looking at a store without a lock: for inspection, for copies, for other people's directories."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from ..errors import ReadOnlyError, RetiredError, TokcapError
from ..ids import check_rollout_id
from ..protocol import CallRecord, RolloutState
from .files import Files, durability_error
from .layout import Directory, Layout, look
from .ledger import Damage
from .log import LogReader
from .notes import Notes
from .snapshot import Snapshot, index_of, open_snapshot
from .sweep import Usage, directories, usage_of

__all__ = ("Looker", "RolloutStat")

_T = TypeVar("_T")
_TRIES = 20


class RolloutStat(msgspec.Struct, frozen=True):
    """What the directory shows of one rollout."""

    rollout_id: str
    state: RolloutState
    snapshot_id: str = ""
    """Identity of the incarnation; empty if absent."""
    version: int = 0
    """Of the published snapshot, or of the one that was retired."""
    retired_at: float | None = None
    """Unix seconds."""
    entries: int = 0
    calls: tuple[CallRecord, ...] = ()
    incomplete: bool = False
    finished: bool = False
    meta: dict[str, Any] = {}
    late: tuple[str, ...] = ()
    """What was said after the log was closed, in words."""
    files: int = 0
    bytes: int = 0
    damage: tuple[Damage, ...] = ()
    torn: tuple[Damage, ...] = ()


class Looker:
    """Reads what is there; writes nothing."""

    def __init__(self, files: Files, layout: Layout, boot_id: str) -> None:
        self._files, self._layout, self._boot_id = files, layout, boot_id

    def read(self, rollout_id: str) -> Snapshot:
        """Version 0 of what is open, the published snapshot of what is frozen, nothing of what is absent."""
        check_rollout_id(rollout_id)
        return self._patiently(rollout_id, lambda directory: self._read(rollout_id, directory))

    def published(self, rollout_id: str) -> Snapshot:
        """The published snapshot of a frozen rollout."""
        check_rollout_id(rollout_id)

        def opened(directory: Directory) -> Snapshot:
            if directory.state in ("open", "absent"):
                raise ReadOnlyError(
                    f"rollout {rollout_id} is {directory.state} and a read-only store can't freeze it; use read()"
                )
            return self._read(rollout_id, directory)

        return self._patiently(rollout_id, opened)

    def stat(self, rollout_id: str) -> RolloutStat:
        """State, calls, size, damage and late notes."""
        check_rollout_id(rollout_id)
        return self._patiently(rollout_id, lambda directory: self._stat(rollout_id, directory))

    def look(self, rollout_id: str, weigh: bool) -> tuple[RolloutStat, Snapshot | None]:
        """`stat` and, of what is open or frozen, the snapshot that it tells of, in one look. Close that."""
        check_rollout_id(rollout_id)
        return self._patiently(rollout_id, lambda directory: self._look(rollout_id, directory, weigh))

    def open_calls(self, rollout_id: str) -> dict[str, str]:
        """The calls of an open rollout that are open, each with its writer (empty if it never began)."""
        check_rollout_id(rollout_id)

        def read(directory: Directory) -> dict[str, str]:
            if directory.state != "open":
                return {}
            reader = LogReader(self._files, rollout_id, directory.incarnation, self._boot_id)
            reader.read_open(directory)
            return {call.model_call_id: call.writer for call in reader.ledger.calls.values() if call.outcome == "open"}

        return self._patiently(rollout_id, read)

    def rollouts(self) -> Iterator[tuple[str, RolloutState]]:
        """Every rollout that is not absent. Raises for one that can't be read, after the others."""
        failure: Exception | None = None
        for rollout_id, directory in directories(self._files, self._layout):
            if not isinstance(directory, Directory):
                failure = failure or directory
            elif directory.state != "absent":
                yield rollout_id, directory.state
        if isinstance(failure, OSError):
            raise durability_error(failure, "can't look at every rollout", self._layout.rollouts) from failure
        if failure is not None:
            raise failure

    def _patiently(self, rollout_id: str, function: Callable[[Directory], _T]) -> _T:
        """What is renamed under our eyes is looked at again."""
        path = self._layout.rollout(rollout_id)
        for attempt in range(_TRIES):
            try:
                return function(look(self._files, path))
            except TokcapError:
                raise
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or attempt == _TRIES - 1:
                    raise durability_error(error, f"rollout {rollout_id}: can't read it", path) from error
                time.sleep(0.001 * attempt)
        raise AssertionError("unreachable")

    def _read(self, rollout_id: str, directory: Directory) -> Snapshot:
        if directory.state == "retired":
            raise RetiredError(f"rollout {rollout_id} was consumed and retired; reset it to use its id again")
        if directory.state == "frozen":
            return self._steady(directory, open_snapshot(self._files, directory, rollout_id, self._boot_id))
        return self._read_open(rollout_id, directory)

    def _read_open(self, rollout_id: str, directory: Directory) -> Snapshot:
        """An open rollout as it is now; damage is what two looks agree on.

        A read is not atomic: of two batches that are written into space meanwhile it may show the second alone.
        """
        known: tuple[Damage, ...] = ()
        while True:
            reader = LogReader(self._files, rollout_id, directory.incarnation, self._boot_id)
            reader.keep_buffers = True
            reader.read_open(directory)
            snapshot = Snapshot(index_of(reader, 0, []), reader.buffers, reader.paths)
            if not snapshot.damage:
                return snapshot
            if snapshot.damage == known:
                return self._steady(directory, snapshot)
            known = snapshot.damage

    def _steady(self, directory: Directory, snapshot: Snapshot) -> Snapshot:
        """Raise `FileNotFoundError` if names changed meanwhile: then a file that seemed missing was only renamed."""
        now = look(self._files, directory.path)
        if (now.incarnation, now.segments, now.versions) != (
            directory.incarnation,
            directory.segments,
            directory.versions,
        ):
            snapshot.close()
            raise FileNotFoundError(errno.ENOENT, "it changed while it was read", directory.path)
        return snapshot

    def _stat(self, rollout_id: str, directory: Directory) -> RolloutStat:
        stat, snapshot = self._look(rollout_id, directory, True)
        if snapshot is not None:
            snapshot.close()
        return stat

    def _look(self, rollout_id: str, directory: Directory, weigh: bool) -> tuple[RolloutStat, Snapshot | None]:
        if directory.state == "absent":
            return RolloutStat(rollout_id, "absent"), None
        weight = usage_of(self._files, directory) if weigh else Usage()
        tombstone = directory.tombstone
        path = directory.tombstone_path if tombstone is not None else directory.incarnation_path
        notes = Notes(self._files, path, directory.incarnation, directory.notes)
        late = tuple(str(note) for note in notes.read())
        if tombstone is not None:
            stat = RolloutStat(
                rollout_id,
                "retired",
                directory.incarnation,
                tombstone.version,
                tombstone.retired_at,
                late=late,
                files=weight.files,
                bytes=weight.bytes,
                damage=tuple(notes.damage),
            )
            return stat, None
        snapshot = self._read(rollout_id, directory)
        try:
            stat = RolloutStat(
                rollout_id,
                directory.state,
                directory.incarnation,
                directory.version,
                entries=len(snapshot.entries),
                calls=snapshot.calls,
                incomplete=snapshot.incomplete,
                finished=snapshot.finished,
                meta=snapshot.meta,
                late=late,
                files=weight.files,
                bytes=weight.bytes,
                damage=snapshot.damage + tuple(notes.damage),
                torn=snapshot.torn,
            )
        except BaseException:
            snapshot.close()
            raise
        return stat, snapshot
