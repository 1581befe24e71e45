"""Housekeeping: old tombstones, what crashes left behind, and what everything weighs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..errors import TokcapError
from ..protocol import RolloutState
from . import fence
from .engine import Engine
from .files import Files, durability_error
from .layout import Directory, Layout, Tombstone, is_note, look, remove_tree
from .lifecycle import Lifecycle, Reset, rename_durably
from .rollout import Rollout
from .waiters import ThreadWaiter, start_thread

__all__ = ("Housekeeper", "Usage", "directories", "sweep", "usage", "usage_of")

logger = logging.getLogger("tokcap.store")

_HOUR = 3600.0

_OPENING = re.compile(r"(FORMAT|probe)-[0-9a-f]{16}(-link)?")


class Usage(msgspec.Struct):
    """What the rollouts of one state weigh."""

    rollouts: int = 0
    files: int = 0
    bytes: int = 0
    """Each file counted once, however many names it has."""


class Tidy(Lifecycle):
    """Finish what a crash left half-done in one rollout's directory."""

    __slots__ = ()

    def run(self, rollout: Rollout) -> bool:
        directory = rollout.look()
        if directory.tombstone is not None:
            if _is_ahead(directory.tombstone):
                now = msgspec.structs.replace(directory.tombstone, retired_at=time.time())
                rename_durably(rollout, [(directory.tombstone_path, f"{rollout.path}/{now}")])
                directory.tombstone = now
            rollout.files.fsync(rollout.fence_fd)  # whoever retired it may have died before this
            for name in rollout.files.listdir(directory.tombstone_path):
                if not is_note(name):
                    remove_tree(rollout.files, f"{directory.tombstone_path}/{name}")
        if directory.state == "absent":
            rollout.drop()
            if directory.incarnation:
                rollout.files.rmdir(directory.incarnation_path)  # of a first put that failed
            rollout.files.rmdir(rollout.path)
            rollout.close_descriptors()
        return True


def _is_ahead(tombstone: Tombstone) -> bool:
    """Whether the clock was set back since: it is as old as nobody knows, and would stay until the clock is there."""
    return tombstone.retired_at > time.time() + _HOUR


def rollout_ids(files: Files, layout: Layout) -> Iterator[str]:
    """Every rollout that has a directory, in no particular order; names that vanish meanwhile are skipped."""
    failure: OSError | None = None
    shards: list[str] = []
    try:
        shards = sorted(files.listdir(layout.rollouts))
    except FileNotFoundError:
        return
    except OSError as error:
        failure = error
    for shard in shards:
        try:
            names = files.listdir(f"{layout.rollouts}/{shard}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = failure or error
            continue
        yield from sorted(names)
    if failure is not None:  # after all others
        raise durability_error(failure, "can't list the rollouts", layout.rollouts) from failure


def directories(files: Files, layout: Layout) -> Iterator[tuple[str, Directory | TokcapError | OSError]]:
    """Every rollout and what its directory shows, or the error that reading it gave."""
    for rollout_id in rollout_ids(files, layout):
        try:
            yield rollout_id, look(files, layout.rollout(rollout_id))
        except FileNotFoundError:
            continue  # it changed under our eyes; it is somebody's present work
        except (TokcapError, OSError) as error:
            yield rollout_id, error


def sweep(engine: Engine, older_than_s: float, *, dry_run: bool = False) -> int:
    """Remove tombstones older than `older_than_s` and what crashes left; the number of tombstones removed.

    One broken rollout never stops the sweep of the others.
    """
    limit = time.time() - older_than_s if older_than_s > 0 else float("inf")
    changed: list[str] = []
    try:
        removed = _sweep_rollouts(engine, limit, changed, dry_run)
    finally:
        for shard in changed:  # at the end: one commit of a journal makes all of them durable
            try:
                engine.files.fsync_directory(shard)
            except OSError as error:
                logger.warning("sweep could not sync %s: %s", shard, error)
    if not dry_run and not engine.closed:
        for path, tidy in (engine.layout.writers, _sweep_writers), (engine.layout.root, _sweep_openings):
            try:
                tidy(engine.files, path)
            except OSError as error:
                logger.warning("sweep could not tidy %s: %s", path, error)
    return removed


def _sweep_rollouts(engine: Engine, limit: float, changed: list[str], dry_run: bool) -> int:
    """`sweep` without its syncs; `changed` takes the shards in which a rollout was removed without one."""
    removed = 0
    found = directories(engine.files, engine.layout)
    for shard, below in itertools.groupby(found, lambda one: engine.layout.shard(one[0])):
        old: list[Directory] = []
        for rollout_id, directory in below:
            if engine.closed:
                return removed
            if not isinstance(directory, Directory):
                logger.warning("sweep leaves rollout %s alone: %s", rollout_id, directory)
                continue
            tombstone = directory.tombstone
            if tombstone is not None and tombstone.retired_at <= limit:
                old.append(directory)
                continue
            try:
                if not dry_run and (
                    directory.leftovers
                    or directory.state == "absent"
                    or (tombstone is not None and _is_ahead(tombstone))
                    or _has_payload(engine, directory)
                ):
                    engine.call(Tidy(rollout_id))
            except (TokcapError, OSError) as error:
                logger.warning("sweep could not tidy rollout %s: %s", rollout_id, error)
        if dry_run:
            removed += len(old)
        elif old:
            changed.append(shard)
            removed += _remove_tombstones(engine, old, limit)
    return removed


def _remove_tombstones(engine: Engine, old: list[Directory], limit: float) -> int:
    """Remove the tombstones of one shard; how many are gone."""
    if threading.current_thread() is not threading.main_thread():
        rest = _remove_empty(engine.files, old)
    else:  # a signal handler may raise at any point of this thread: it holds no fence
        left: list[list[Directory]] = []
        with contextlib.suppress(OSError):  # no more threads: the engine has to do
            start_thread(lambda: left.append(_remove_empty(engine.files, old)), "tokcap-sweep").join()
        rest = left[0] if left else old
    removed = len(old) - len(rest)
    for directory in rest:
        if engine.closed:
            break
        rollout_id = directory.path.rpartition("/")[2]
        try:
            removed += bool(engine.call(Reset(rollout_id, retired_before=limit)))
        except (TokcapError, OSError) as error:
            logger.warning("sweep could not tidy rollout %s: %s", rollout_id, error)
    return removed


def _remove_empty(files: Files, old: list[Directory]) -> list[Directory]:
    """Remove those tombstones that nothing is left of but the name, without a sync; the others come back.

    None of them needs one of its own. A tombstone without payload was durable before the payload went, so nothing of
    the rollout can appear again but the tombstone, to be swept again. It can't appear beside what comes after it:
    its directory is gone, and a first put syncs the shard, where the new directory takes the name. If the directory
    could not be removed, it is synced here, while its fence is held. One with notes is renamed first, as a whole: a
    crash could keep it without them.
    """
    return [directory for directory in old if not _remove_if_empty(files, directory)]


def _remove_if_empty(files: Files, directory: Directory) -> bool:
    try:
        fd = fence.open_fence(files, directory.path)
        if fd is None:
            return False
        try:
            if not fence.lock(files, fd):
                return False
            try:
                if not fence.still_there(files, fd, directory.path):
                    return False
                files.rmdir(directory.tombstone_path)  # which fails if there is anything in it
                try:
                    files.rmdir(directory.path)
                except OSError:
                    files.fsync(fd)
            finally:
                fence.unlock(files, fd)
        finally:
            files.close(fd)
    except OSError:
        return False
    return True


def _has_payload(engine: Engine, directory: Directory) -> bool:
    if directory.tombstone is None:
        return False
    return any(not is_note(name) for name in engine.files.listdir(directory.tombstone_path))


def _sweep_openings(files: Files, root: str) -> None:
    """Remove what a process left that died while it opened the store, which takes milliseconds."""
    for name in filter(_OPENING.fullmatch, files.listdir(root)):
        path = f"{root}/{name}"
        try:
            if time.time() - files.stat(path).st_mtime > _HOUR:
                files.unlink(path)
        except OSError as error:
            logger.warning("sweep could not remove %s: %s", path, error)


def _sweep_writers(files: Files, writers: str) -> None:
    """Remove the liveness files of writers that are gone: nobody holds their lock, and names are never used again."""
    for name in files.listdir(writers):
        path = f"{writers}/{name}"
        try:
            fd = files.open(path)
        except OSError:
            continue
        try:
            if files.try_lock(fd):
                files.unlink(path)
        except OSError as error:
            logger.warning("sweep could not remove %s: %s", path, error)
        finally:
            files.close(fd)


def usage_of(files: Files, directory: Directory) -> Usage:
    """Files and bytes of one rollout."""
    total = Usage(rollouts=1)
    seen: set[int] = set()
    folders = [directory.path]
    while folders:
        folder = folders.pop()
        try:
            names = files.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            try:
                there = files.stat(f"{folder}/{name}")
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(there.st_mode):
                folders.append(f"{folder}/{name}")
            elif there.st_ino not in seen:
                seen.add(there.st_ino)
                total.files += 1
                total.bytes += there.st_size
    return total


def usage(files: Files, layout: Layout) -> dict[RolloutState, Usage]:
    """Rollouts, files and bytes per state."""
    totals: dict[RolloutState, Usage] = {state: Usage() for state in ("open", "frozen", "retired", "absent")}
    for _, directory in directories(files, layout):
        if not isinstance(directory, Directory):
            continue
        try:
            weight = usage_of(files, directory)
        except OSError as error:
            raise durability_error(error, "can't look into a rollout", directory.path) from error
        total = totals[directory.state]
        total.rollouts += 1
        total.files += weight.files
        total.bytes += weight.bytes
    return totals


class Housekeeper:
    """Calls a store's sweep about once an hour, from a thread that never keeps the store or the interpreter alive."""

    def __init__(self, owner: Any, due: Callable[[Any], None], *, first_s: float, then_s: float) -> None:
        self._stop = ThreadWaiter()  # which a garbage collection may wake, whatever lock is held then
        reference = weakref.ref(owner, lambda _: self.stop())
        self._thread = threading.Thread(
            target=_keep_house,
            args=(reference, due, self._stop, first_s, then_s),
            name="tokcap-sweep",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        try:  # also at the end of the interpreter, when modules are empty
            self._stop.wake()
        except RuntimeError:  # it is stopped already
            return


def _keep_house(
    reference: weakref.ref[Any], due: Callable[[Any], None], stop: ThreadWaiter, first_s: float, then_s: float
) -> None:
    delay = first_s
    while not stop.wait(delay):
        owner = reference()
        if owner is None:
            break
        try:
            due(owner)
        except Exception:
            logger.exception("the hourly sweep failed; it is tried again later")
        del owner
        delay = then_s
