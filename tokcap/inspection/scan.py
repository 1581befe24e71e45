"""Rows of many rollouts: those that are meant, in the order of their names."""

from __future__ import annotations

import fnmatch
import gc
import os
import re
import time
from collections.abc import Callable, Collection

from ..errors import DurabilityError, InvalidIdError, TokcapError
from ..ids import check_rollout_id
from ..store import FileStore
from ..store.files import Files, durability_error
from ..store.layout import Layout
from .cache import Kept, RowCache
from .keeping import life_of
from .row import RolloutRow, proper
from .unchanged import Question, are_unchanged
from .workers import looked_at

__all__ = ("Progress", "rows", "wanted_ids")

Progress = Callable[[int, int], None]
"""Told how many rollouts were looked at, of how many."""

_WORTH_PROCESSES = 1000
"""Rollouts to look at from which on others help: it takes them 0.3 s to begin."""
_SAVED_EVERY_S = 5.0


def wanted_ids(
    store: FileStore, globs: Collection[str] = (), *, unlisted: dict[str, TokcapError] | None = None
) -> list[str]:
    """The ids of every rollout with a directory that one of `globs` (`fnmatch`; none: all) names, sorted.

    Names that are no valid ids are among them. unlisted: gets the directories of the store that can't be listed
    (`rollouts/XX`), and why; without it `DurabilityError` is raised for the first of them.
    """
    found, failed = _listed(Layout(store.directory), globs)
    if failed and unlisted is None:
        raise next(iter(failed.values()))
    if unlisted is not None:
        unlisted.update((f"rollouts/{shard}".rstrip("/"), error) for shard, error in failed.items())
    return [name for name, _ in found]


def _listed(layout: Layout, globs: Collection[str]) -> tuple[list[tuple[str, str]], dict[str, DurabilityError]]:
    """Name and shard of every rollout that is meant, sorted; and the shards that can't be listed."""
    is_wanted = _matcher(globs)
    found: list[tuple[str, str]] = []
    failed: dict[str, DurabilityError] = {}
    if globs and all(map(_is_plain, globs)):
        for name in sorted(set(globs)):
            shard = layout.shard(name).rpartition("/")[2]
            if os.path.lexists(f"{layout.rollouts}/{shard}/{name}"):
                found.append((name, shard))
        return found, failed
    for shard in sorted(_names(layout.rollouts, "", failed)):
        names = _names(f"{layout.rollouts}/{shard}", shard, failed)
        found.extend((name, shard) for name in (names if is_wanted is None else filter(is_wanted, names)))
    # What is kept is kept in this order, and memory that is read in the order in which it was filled is read faster.
    found.sort()
    return found, failed


def _names(path: str, shard: str, failed: dict[str, DurabilityError]) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        failed[shard] = durability_error(error, "can't list rollouts", path)
        return []


def _is_plain(glob: str) -> bool:
    try:
        check_rollout_id(glob)
    except InvalidIdError:
        return False
    return True


def _matcher(globs: Collection[str]) -> Callable[[str], object] | None:
    if not globs or "*" in globs:
        return None
    return re.compile("|".join(map(fnmatch.translate, globs))).match


def rows(
    store: FileStore,
    globs: Collection[str] = (),
    *,
    whole: bool = True,
    remember: bool = True,
    workers: int = 0,
    progress: Progress | None = None,
) -> list[RolloutRow]:
    """A row for every rollout that is meant, sorted by id; what can't be read has one, too, and what is gone has none.

    whole: see `row_of`. remember: take rows of rollouts that haven't changed from the cache of this user
    (`$XDG_CACHE_HOME/tokcap`), and keep new ones there; nothing is ever written into the store. A row counts as long
    as inode, size and times of everything in the rollout's directory are what they were. What a disk loses by itself
    changes none of them: remember=False reads everything. workers: processes that look at rollouts; 0: one for each
    processor if there is much to do.

    About 2 KB of memory a row.
    """
    collecting = gc.isenabled()
    gc.disable()  # of what is made here nothing is garbage, and a hundred thousand rows would be searched for it
    try:
        return _rows(store, globs, whole, remember, workers, progress or (lambda done, of: None))
    finally:
        if collecting:
            gc.enable()


def _rows(
    store: FileStore, globs: Collection[str], whole: bool, remember: bool, workers: int, progress: Progress
) -> list[RolloutRow]:
    layout = Layout(store.directory)
    listed, failed = _listed(layout, globs)
    named = bool(globs) and all(map(_is_plain, globs))  # few: looking is as fast as reading all that is kept
    cache = RowCache(store.directory) if remember and not named and type(store.files) is Files else None
    found: list[RolloutRow] = []
    changed: list[str] = []
    if cache is not None:
        cache.load()
    known = {} if cache is None else cache.rows
    life = life_of(store)
    questions = [_question(f"{shard}/{name}", known.get(name), life) for name, shard in listed]
    for (name, shard), still in zip(listed, are_unchanged(layout.rollouts, questions), strict=True):
        if still:
            found.append(known[name].row)
        elif wrong := _what_is_wrong_with(layout, name, shard):
            found.append(RolloutRow(proper(name), "unreadable", error=wrong))
        else:
            changed.append(name)
    total, done = len(listed), len(found)
    progress(done, total)
    if not workers:
        workers = len(os.sched_getaffinity(0)) if len(changed) >= _WORTH_PROCESSES else 1
    if type(store.files) is not Files:
        workers = 1
    is_saved = whole  # what was left out is not to be taken for nothing
    unsaved: list[Kept] = []
    saved_at = time.monotonic()
    try:
        for part, answers in looked_at(store, changed, workers, whole):
            found.extend(kept.row for kept in answers)
            unsaved += answers
            done += len(part)
            progress(done, total)
            if cache is not None and is_saved and time.monotonic() - saved_at > _SAVED_EVERY_S:
                unsaved, saving = [], unsaved
                cache.add(saving)
                saved_at = time.monotonic()
    finally:  # also of what is interrupted
        if cache is not None and is_saved:
            cache.add(unsaved)
    if cache is not None and not globs:
        cache.tidy(name for name, _ in listed)
    for shard, error in failed.items():
        found.append(RolloutRow(f"{shard}/", "unreadable", error=str(error)))
    return sorted(found, key=lambda row: row.rollout_id)


def _question(path: str, kept: Kept | None, life: int) -> Question:
    """What to ask of a rollout; of one that isn't kept, something that is never so."""
    if kept is None:
        return path, 0, "", ""
    return path, kept.mark ^ life if kept.row.state == "open" else kept.mark, kept.folder, kept.names


def _what_is_wrong_with(layout: Layout, name: str, shard: str) -> str:
    """Why nothing of this name can be a rollout; empty if it can."""
    try:
        right = layout.shard(check_rollout_id(name)).rpartition("/")[2]
    except InvalidIdError as error:
        return proper(str(error))
    if shard == right:
        return ""
    return f"it stands in {layout.rollouts}/{shard} and belongs into {right}: the store never looks for it there"
