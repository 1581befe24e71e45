"""The consumer's loop for trainers without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..protocol import TokenSource
from .consumer import consume
from .handover import Delivery
from .rollouts import Rollouts
from .wanted import Given

__all__ = ("consume_now",)

_T = TypeVar("_T")


@contextmanager
def consume_now(
    source: TokenSource | None, rollouts: Given | None = None, **options: Any
) -> Iterator[Iterator[Delivery]]:
    """`consume`, blocking; freezing and building go on in a thread meanwhile. Takes the same options.

    ```python
    with consume_now(store, finished_ids) as rollouts:
        for rollout in rollouts:
            save_durably(rollout.trajectories)
            rollout.done_now()
    ```

    An iterable of ids is read in that thread.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tokcap-consume", daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        consumer = consume(source, rollouts, **options)
        run(consumer.__aenter__())
        try:
            yield _each(consumer, run)
        finally:
            run(consumer.__aexit__(None, None, None))
    finally:
        run(loop.shutdown_asyncgens())
        run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _each(consumer: Rollouts, run: Any) -> Iterator[Delivery]:
    while True:
        delivery = run(_next(consumer))
        if delivery is None:
            return
        yield delivery


async def _next(consumer: Rollouts) -> Delivery | None:
    try:
        return await anext(consumer)
    except StopAsyncIteration:
        return None
