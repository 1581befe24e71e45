"""The consumer's loop for trainers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from ..protocol import TokenSource
from .consumer import consume
from .handover import Delivery
from .rollouts import Rollouts
from .wanted import Given

__all__ = ("RolloutsNow", "consume_now")

_T = TypeVar("_T")


class RolloutsNow:
    """The deliveries of one consumer, each once, for a plain loop; made by `consume_now`."""

    def __init__(self, consumer: Rollouts, loop: asyncio.AbstractEventLoop) -> None:
        self._consumer, self._loop = consumer, loop
        self._left = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivery:
        delivery = None if self._left else _run(_next(self._consumer), self._loop)
        if delivery is None:
            raise StopIteration
        return delivery

    def stop(self) -> None:
        """Take no more rollouts; those that are frozen already still come out, then the loop ends. From any thread."""
        self._consumer.stop()


@contextmanager
def consume_now(source: TokenSource | None, rollouts: Given | None = None, **options: Any) -> Iterator[RolloutsNow]:
    """`consume`, blocking; freezing and building go on in a thread meanwhile. Takes the same options.

    ```python
    with consume_now(store, finished_ids) as rollouts:
        for rollout in rollouts:
            save_durably(rollout.trajectories)
            rollout.done_now()
    ```

    What it gives has `stop()`, for any thread. `done_now` works after leaving, too. An iterator of ids is asked in a
    thread of its own.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tokcap-consume", daemon=True)
    thread.start()

    try:
        consumer = consume(source, rollouts, **options)
        _run(consumer.__aenter__(), loop)
        given = RolloutsNow(consumer, loop)
        try:
            yield given
        finally:
            given._left = True
            _run(consumer.__aexit__(None, None, None), loop)
            _run(_rest(), loop)
    finally:
        _run(loop.shutdown_asyncgens(), loop)
        _run(loop.shutdown_default_executor(), loop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _run(coroutine: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


async def _next(consumer: Rollouts) -> Delivery | None:
    try:
        return await anext(consumer)
    except StopAsyncIteration:
        return None


async def _rest() -> None:
    """What other threads began with `done_now` comes to its end."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
