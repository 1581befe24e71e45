"""From what a user typed to rollouts and calls, with the nearest names where there is no such one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .status import NO, NotThereError

if TYPE_CHECKING:
    from ..errors import TokcapError
    from ..inspection import CallView, RolloutView
    from ..inspection.text import Texts
    from ..store import FileStore, RolloutStat, Snapshot

__all__ = (
    "check_named",
    "is_glob",
    "looked_at",
    "meant",
    "near",
    "nothing",
    "one_call",
    "say_unlisted",
    "stat_of",
    "texts_of",
    "view_with",
    "views_of",
)

_NEAR = 5
_COMPARED = 5000
"""Names that are compared closely; of more, those that begin alike."""
_LISTED = 12
_SAMPLED = 256
"""Rollouts whose pieces are read, of a whole store."""


def stat_of(store: FileStore, rollout_id: str) -> RolloutStat:
    """What the store shows of a rollout; raises `NotThereError` with near names if there is none."""
    stat = store.stat_now(rollout_id)
    if stat.state == "absent":
        if rollout_id in (names := _names(store)):
            raise NotThereError(
                f"rollout {rollout_id} stands in a directory of {store.directory} in which the store never looks for "
                "it; tokcap verify says where it belongs"
            )
        raise NotThereError(f"there is no rollout {rollout_id} in {store.directory}{near(rollout_id, names)}")
    return stat


def looked_at(store: FileStore, rollout_id: str, texts: Texts | None = None) -> RolloutView:
    """A rollout, read and built. Raises `NotThereError`, `RetiredError`, `CorruptError`."""
    stat_of(store, rollout_id)
    with store.read_now(rollout_id) as snapshot:
        return view_with(snapshot, texts)


def view_with(snapshot: Snapshot, texts: Texts | None = None) -> RolloutView:
    """A snapshot, built, its drifts told apart by the bytes that `texts` knows."""
    from ..inspection import view_of
    from ..inspection.text import models_of

    return view_of(snapshot, token_bytes=None if texts is None else texts.of(models_of(snapshot)))


def views_of(
    store: FileStore, ids: Sequence[str], texts: Texts | None = None, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, RolloutView | Exception]]:
    """The rollouts of these ids one after another; instead of one that can't be read, why. Those that are retired, or
    vanish meanwhile, are left out."""
    from ..errors import RetiredError, TokcapError

    for place, rollout_id in enumerate(ids):
        if progress is not None:
            progress(place, len(ids))
        try:
            with store.read_now(rollout_id) as snapshot:
                if snapshot.snapshot_id:
                    yield rollout_id, view_with(snapshot, texts)
        except RetiredError:
            continue
        except TokcapError as error:
            yield rollout_id, error
    if progress is not None:
        progress(len(ids), len(ids))


def meant(store: FileStore, globs: Sequence[str], unlisted: dict[str, TokcapError] | None = None) -> list[str]:
    """The ids of the rollouts that are named; raises `NotThereError` for a name (no glob) that isn't there.

    Of one that is retired it is said that its calls are gone. unlisted: as for `wanted_ids`.
    """
    from ..inspection import wanted_ids

    ids = wanted_ids(store, globs, unlisted=unlisted)
    check_named(store, globs, ids)
    if len(globs) <= _LISTED:
        for name in globs:
            if not is_glob(name):
                _say_if_retired(store, name)
    return ids


def nothing(directory: str, *, asked: bool) -> int:
    """Say that there is nothing to look at; the exit status. asked: for something, by a glob or a condition."""
    from .output import safe

    if asked:
        sys.stderr.write("tokcap: nothing matches\n")
        return NO
    sys.stderr.write(f"tokcap: no rollouts in {safe(directory)}\n")
    return 0


def say_unlisted(unlisted: Mapping[str, TokcapError]) -> None:
    """Name directories of a store that can't be listed, whose rollouts nobody sees."""
    from .output import safe

    for name, error in sorted(unlisted.items()):
        sys.stderr.write(f"tokcap: {safe(name)} can't be listed: {safe(str(error))}\n")


def is_glob(name: str) -> bool:
    """Whether it may stand for several rollouts."""
    return not set(name).isdisjoint("*?[")


def check_named(store: FileStore, globs: Sequence[str], there: Collection[str]) -> None:
    """Raise `NotThereError` for a name (no glob) that isn't among the rollouts that are there."""
    there = set(there)
    for name in globs:
        if not is_glob(name) and name not in there:
            stat_of(store, name)


def _say_if_retired(store: FileStore, name: str) -> None:
    from ..errors import TokcapError

    try:
        stat = store.stat_now(name)
    except TokcapError:  # whoever reads it will say so
        return
    if stat.state == "retired":
        sys.stderr.write(f"tokcap: rollout {name} is retired: its calls are gone; tokcap show {name} says when\n")


def one_call(view: RolloutView, name: str) -> CallView:
    """The call that is meant by its id, `ID#N`, a response id, the beginning of either, or its number in `show`.

    Raises `NotThereError` with the calls that may be meant.
    """
    found = view.named(name)
    if len(found) == 1:
        return found[0]
    if not found:
        names = [call.name for call in view.calls if call.model_call_id]
        hint = near(name, names) or (f"; there are {_listed(names)}" if names else "; it has none")
        raise NotThereError(f"rollout {view.rollout_id} has no call {name!r}{hint}")
    names = [f"{call.model_call_id}#{call.choice_index}" for call in found]
    raise NotThereError(
        f"{name!r} may be any of {len(found)} calls of rollout {view.rollout_id}: {_listed(names)}; say which one"
    )


def texts_of(store: FileStore, tokenizer: str | None, first: Sequence[str] = ()) -> Texts:
    """The bytes of ids: a tokenizer's if one is named, and the pieces that the store holds.

    first: rollouts that are read whatever others tell; with a tokenizer no others are.
    """
    from ..inspection.text import Texts, TokenizerBytes, pieces_of_store

    told = None if tokenizer is None else TokenizerBytes(tokenizer)
    if told is not None and told.approximate:
        sys.stderr.write("tokcap: this tokenizer doesn't tell bytes: texts of single ids are approximate\n")
    return Texts(pieces_of_store(store, first, most=0 if told is not None and first else _SAMPLED), told)


def near(name: str, names: Sequence[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    from difflib import get_close_matches

    alike = [other for other in names if name and (other.startswith(name) or name.startswith(other))]
    pool = names if len(names) <= _COMPARED else [other for other in names if other[:2] == name[:2]][:_COMPARED]
    found = list(dict.fromkeys([*sorted(alike)[:_NEAR], *get_close_matches(name, pool, _NEAR, 0.6)]))[:_NEAR]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _names(store: FileStore) -> list[str]:
    from ..errors import TokcapError
    from ..inspection import wanted_ids

    try:
        return wanted_ids(store)
    except TokcapError:
        return []


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
