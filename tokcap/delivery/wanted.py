"""Where a consumer's rollouts come from: given by the caller, or followed in the store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from ..errors import InvalidIdError
from ..ids import check_rollout_id
from .following import follow
from .identity import rollout_id_of
from .reading import Wanted

__all__ = ("Given", "followed_rollouts", "given_rollouts")

One = str | Mapping[str, Any]
Given = Iterable[One] | AsyncIterable[One]

Mine = Callable[[str], bool]


async def given_rollouts(given: Given, mine: Mine, wait_open_s: float) -> AsyncGenerator[Wanted, None]:
    """Those of the given ids or records that are `mine`. One without a usable id belongs to whom "" belongs."""
    async with aclosing(_each(given)) as ones:
        async for one in ones:
            wanted = _wanted(one, wait_open_s)
            if mine(wanted.rollout_id):
                yield wanted


def _wanted(one: One, wait_open_s: float) -> Wanted:
    record = one if isinstance(one, Mapping) else None
    try:
        rollout_id = check_rollout_id(one) if record is None else rollout_id_of(record)
    except InvalidIdError as error:
        return Wanted("", wait_open_s, record, error=str(error))
    if rollout_id is None:
        return Wanted("", wait_open_s, record, error="the record names no rollout")
    return Wanted(rollout_id, wait_open_s, record)


async def followed_rollouts(
    source: Any, mine: Mine, wait_open_s: float, idle_s: float | None, poll_s: float
) -> AsyncGenerator[Wanted, None]:
    """Those that are finished by a note in the store, or idle; see `follow`."""
    async with aclosing(follow(source, mine, idle_s=idle_s, poll_s=poll_s)) as finished:
        async for one in finished:
            # Nothing says that an idle rollout is over, so a call that is open in a live process gets longer.
            wait = max(wait_open_s, idle_s or 0.0) if one.idle else wait_open_s
            yield Wanted(one.rollout_id, wait, resumed=one.resumed)


async def _each(given: Given) -> AsyncGenerator[One, None]:
    if isinstance(given, AsyncIterable):
        async for one in given:
            yield one
    else:
        for one in given:
            yield one
