"""The loop of a consumer: finished rollouts in, built ones out, retired when it says so."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any

from ..errors import InvalidOptionError
from ..protocol import TokenSource
from ..trajectory import group_of as _group_of
from .guard import MaskGuard
from .reading import GroupOf, How, ScoredOf, Wanted
from .rollouts import Rollouts
from .share import share_of
from .wanted import Given, followed_rollouts, given_rollouts

__all__ = ("consume",)

logger = logging.getLogger("tokcap.delivery")


def consume(
    source: TokenSource | None,
    rollouts: Given | None = None,
    *,
    ahead: int = 4,
    worker: int = 0,
    workers: int = 1,
    wait_open_s: float = 5.0,
    idle_s: float | None = None,
    poll_s: float = 1.0,
    models: str | Collection[str] | None = None,
    strict: bool = False,
    scored: ScoredOf | None = None,
    guard: MaskGuard | None = None,
    group_of: GroupOf = _group_of,
    sweep_every_s: float = 3600.0,
    tombstone_age_s: float = 86400.0,
) -> Rollouts:
    """An async context manager over finished rollouts, each frozen and built, in the order in which they are ready.

    ```python
    async with consume(store, finished_ids) as rollouts:
        async for rollout in rollouts:
            save_durably(rollout.trajectories)
            await rollout.done()
    ```

    source: where to freeze, read and retire. None (`tokcap.config.process_source` says so if a framework reads by
        itself): nothing comes out.
    rollouts: ids of finished rollouts, or records that name them (`rollout_id_of`; their `response` is a witness of the
        scored answer), from any iterable; it ends after the last. One that may block is asked in a thread of its own,
        and left there if it blocks when the consumer ends. None: follow the `finish` notes in the store; it ends when
        `stop` is called. A source other than the file store must have `rollouts` and `stat` for that.
    ahead: at most so many rollouts are frozen and not yet handed over.
    worker, workers: with several consumers each takes its share of the ids, by a hash that never changes.
    wait_open_s: how long calls that are still open may take to finish before the freeze, if the source can wait.
    idle_s: a last resort for rollouts whose owner dies without a note, when following: one to which nothing was written
        for so long, while it was watched, counts as finished. Must be longer than the longest pause between two calls.
        Calls that are open in a live process get the same time again before they are cut off.
    poll_s: how often the store is looked at when following; less often if a look takes long.
    models, strict: as in `tokcap.trajectory.build`.
    scored: called with (rollout_id, meta) in a thread; what is known of the scored answer, as keyword arguments of
        `build`: call_id, choice_index, response_id, response. None: nothing.
    guard: observes every rollout that comes out, except those that replace another one, and those that were frozen
        before following began, which an earlier run has counted. Its `MaskFractionError` comes out of the loop.
    group_of: called with (rollout_id, meta); the group of a rollout, `tokcap.trajectory.group_of` if not given.
    sweep_every_s, tombstone_age_s: the first worker sweeps tombstones of that age as often, at the beginning, too, if
        the source can; 0 turns it off.

    A rollout that can't be frozen (after three tries if the reason is an `OSError`, such as `BusyError`) or built comes
    out masked, with the reason `unreadable`; one that is retired already is skipped. What is not `done`
    stays in the store and comes again, to the next consumer that follows it or is given its id. Leaving the context,
    also by an error, closes every snapshot and ends every task; arrays stay valid.

    Raises `InvalidOptionError`.
    """
    _check(ahead=ahead, worker=worker, workers=workers)
    _check_seconds(
        wait_open_s=wait_open_s,
        idle_s=idle_s,
        poll_s=poll_s,
        sweep_every_s=sweep_every_s,
        tombstone_age_s=tombstone_age_s,
    )
    if isinstance(rollouts, (str, Mapping)):
        raise InvalidOptionError("rollouts is a single one, expected several: put it in a list")
    if rollouts is None and source is not None and not (hasattr(source, "rollouts") and hasattr(source, "stat")):
        raise InvalidOptionError(
            f"{type(source).__name__} can't be followed, it has no rollouts() and stat(): give the finished ids"
        )
    how = How(models, strict, scored, group_of)
    mine = functools.partial(_is_mine, worker=worker, workers=workers)
    wanted: Callable[[], AsyncGenerator[Wanted, None]]
    if source is None:
        wanted = functools.partial(given_rollouts, (), mine, wait_open_s)
    elif rollouts is None:
        wanted = functools.partial(followed_rollouts, source, mine, wait_open_s, idle_s, poll_s)
    else:
        wanted = functools.partial(given_rollouts, rollouts, mine, wait_open_s)
    sweeping = functools.partial(_sweep, source, sweep_every_s, tombstone_age_s)
    return Rollouts(source, wanted, how, ahead, guard, sweeping if sweep_every_s > 0 and worker == 0 else None)


def _is_mine(rollout_id: str, *, worker: int, workers: int) -> bool:
    return share_of(rollout_id, workers) == worker


async def _sweep(source: Any, every_s: float, age_s: float) -> None:
    sweep = getattr(source, "sweep", None)
    while callable(sweep):
        try:
            await sweep(age_s)
        except Exception as error:  # the next time, or somebody else's
            logger.warning("a sweep failed: %r", error)
        await asyncio.sleep(every_s)


def _check_seconds(**options: object) -> None:
    for name, seconds in options.items():
        if seconds is None and name == "idle_s":
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise InvalidOptionError(f"{name} is {seconds!r}, expected seconds, 0 or more")


def _check(*, ahead: int, worker: int, workers: int) -> None:
    numbers: tuple[tuple[str, object, int], ...] = (("ahead", ahead, 1), ("workers", workers, 1), ("worker", worker, 0))
    for name, value, least in numbers:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidOptionError(f"{name} is {value!r}, expected a whole number from {least}")
    if worker >= workers:
        raise InvalidOptionError(f"worker is {worker}, expected 0 to {workers - 1}, because workers is {workers}")
