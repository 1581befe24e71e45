"""Where a consumer's rollouts come from: given by the caller, or followed in the store."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, KeysView, Mapping, ValuesView
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any

from ..errors import InvalidIdError
from ..foreign import error_text
from ..ids import check_rollout_id
from .following import follow
from .identity import rollout_id_of
from .reading import Wanted

__all__ = ("Given", "followed_rollouts", "given_rollouts")

One = str | Mapping[str, Any]
Given = Iterable[One] | AsyncIterable[One]

_AT_HAND = (list, tuple, set, frozenset, deque, KeysView, ValuesView)
"""Whose next id is there at once; any other iterator may wait for it."""

_IN_A_ROW = 256
"""So many ids, which may all be those of other workers, are looked at before the event loop goes on."""

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
    except Exception as error:  # of a mapping that is none
        return Wanted("", wait_open_s, record, error=error_text(error))
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
            yield Wanted(one.rollout_id, wait, resumed=one.resumed, snapshot_id=one.snapshot_id)


async def _each(given: Given) -> AsyncGenerator[One, None]:
    if isinstance(given, AsyncIterable):
        async for one in given:
            yield one
    elif isinstance(given, _AT_HAND):
        for number, one in enumerate(given):
            if number % _IN_A_ROW == _IN_A_ROW - 1:
                await asyncio.sleep(0)
            yield one
    else:
        async with aclosing(_asked(given)) as ones:
            async for one in ones:
                yield one


async def _asked(given: Iterable[One]) -> AsyncGenerator[One, None]:
    """Asks for one after the other in a thread of its own; one that is left while it waits is abandoned with it."""
    loop = asyncio.get_running_loop()
    questions: SimpleQueue[asyncio.Future[list[One]] | None] = SimpleQueue()
    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(_answer, given, questions, loop), name="tokcap-ids", daemon=True).start()
    try:
        while True:
            question: asyncio.Future[list[One]] = loop.create_future()
            questions.put(question)
            ones = await question
            if not ones:
                return
            yield ones[0]
    finally:
        questions.put(None)


def _answer(
    given: Iterable[One], questions: SimpleQueue[asyncio.Future[list[One]] | None], loop: asyncio.AbstractEventLoop
) -> None:
    ones = None
    while (question := questions.get()) is not None:
        answer: list[One] = []
        failure: Exception | None = None
        try:
            ones = iter(given) if ones is None else ones
            answer.append(next(ones))
        except StopIteration:
            pass
        except Exception as error:
            failure = error
        except BaseException as error:  # which would end the loop, or look like its own end
            failure = RuntimeError(error_text(error))
            failure.__cause__ = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_tell, question, answer, failure)


def _tell(question: asyncio.Future[list[One]], answer: list[One], failure: Exception | None) -> None:
    if question.done():  # nobody waits any more
        return
    if failure is None:
        question.set_result(answer)
    else:
        question.set_exception(failure)
