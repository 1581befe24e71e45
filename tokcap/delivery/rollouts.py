"""`Rollouts`: what `consume` gives, a context manager and an iterator over deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self

from ..foreign import uncancelled
from ..protocol import TokenSource
from .freezing import in_thread
from .guard import MaskGuard
from .handover import Delivery, same_trained
from .reading import How, Wanted, read_again, read_rollout
from .retire import retire_exactly

__all__ = ("Rollouts",)

logger = logging.getLogger("tokcap.delivery")

_RETRIES = 10
"""So many late marks in a row that change nothing of what is trained are followed before `done` gives up."""


class Rollouts:
    """The deliveries of one consumer, each once; made by `consume`, used as an async context manager, once.

    Several tasks of the same event loop may iterate over it together.
    """

    def __init__(
        self,
        source: TokenSource | None,
        wanted: Callable[[], AsyncGenerator[Wanted, None]],
        how: How,
        ahead: int,
        guard: MaskGuard | None,
        sweeping: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._source, self._wanted, self._how, self._guard, self._sweeping = source, wanted, how, guard, sweeping
        self._slots = asyncio.Semaphore(ahead)
        """One for each rollout that may be frozen and not yet handed over."""
        self._ready: deque[Delivery] = deque()
        self._changed = asyncio.Event()
        self._claimed: dict[str, tuple[str, int]] = {}
        """What was read here and is not retired: an id that is given twice must not be trained twice."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._retiring = 0
        self._stopped = self._closed = False

    async def __aenter__(self) -> Self:
        if self._feeder is not None:
            raise RuntimeError("this consumer was used before: call consume() again")
        self._loop = asyncio.get_running_loop()
        self._feeder = asyncio.create_task(self._feed(), name="tokcap-consume")
        self._feeder.add_done_callback(self._wake)
        if self._sweeping is not None:
            self._sweeper = asyncio.create_task(self._sweeping(), name="tokcap-sweep")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        tasks = [task for task in (self._feeder, self._sweeper, *self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        self._changed.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ready.clear()

    def stop(self) -> None:
        """Take no more rollouts; those that are frozen already still come out, then the loop ends.

        From any thread, and from a signal handler.
        """
        self._stopped = True  # before looking for the loop: one that begins now sees it
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing to stop any more
                self._loop.call_soon_threadsafe(self._stop_feeding)

    def _stop_feeding(self) -> None:
        assert self._feeder is not None
        self._feeder.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        if self._feeder is None:
            raise RuntimeError("iterate within `async with consume(...) as rollouts`")
        while not self._ready:
            self._changed.clear()  # before looking: what happens from here on sets it
            if not self._is_over():
                await self._changed.wait()
                continue
            await asyncio.sleep(0)  # a `done` that was just made a task may bring a newer version
            if self._is_over():
                self._raise_failure(self._feeder)
                raise StopAsyncIteration
        delivery = self._ready.popleft()
        if delivery.replaces is None:
            self._slots.release()
            if self._guard is not None and not delivery.resumed:
                self._guard.observe(delivery.masked, delivery.reasons)
        return delivery

    def _is_over(self) -> bool:
        assert self._feeder is not None
        nothing_left = not (self._ready or self._reading or self._retiring)
        return self._closed or (self._feeder.done() and nothing_left)

    def _raise_failure(self, feeder: asyncio.Task[None]) -> None:
        """What the caller's iterable of ids raised comes out of the loop, after everything before it."""
        if feeder.done() and not feeder.cancelled():
            failure = feeder.exception()
            if failure is not None:
                raise failure

    async def _feed(self) -> None:
        wanted = self._wanted()
        try:
            while not self._stopped:
                await self._slots.acquire()  # before the next one is asked for: it is frozen as soon as it is known
                try:
                    # If the caller's iterable is what was cancelled, that is no quiet end.
                    one = await uncancelled(anext(wanted))
                except StopAsyncIteration:
                    return
                task = asyncio.create_task(self._read(one), name=f"tokcap-read-{one.rollout_id}")
                self._reading.add(task)
                task.add_done_callback(self._reading.discard)
                task.add_done_callback(self._wake)
        finally:
            await wanted.aclose()

    async def _read(self, wanted: Wanted) -> None:
        assert self._source is not None  # nothing is wanted without one
        delivery = None
        try:
            delivery = await read_rollout(self._retire, self._source, wanted, self._how, self._claim)
        finally:
            if delivery is None:
                self._slots.release()
            else:
                self._ready.append(delivery)

    def _wake(self, _: object) -> None:
        self._changed.set()

    def _claim(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        pair = (snapshot_id, version)
        if self._claimed.get(rollout_id) == pair:
            return False
        self._claimed[rollout_id] = pair
        return True

    async def _retire(self, delivery: Delivery) -> bool:
        """See `Delivery.done`."""
        assert self._source is not None
        self._retiring += 1
        try:
            last = delivery
            for _ in range(_RETRIES):
                if await retire_exactly(self._source, last.rollout_id, last.snapshot_id, last.version):
                    self._claimed.pop(last.rollout_id, None)
                    return True
                if delivery.replaced:
                    return False
                newer = await read_again(self._retire, self._source, last, self._how)
                if newer is None or delivery.replaced:  # by a `done` at the same time
                    return False
                self._claimed[newer.rollout_id] = (newer.snapshot_id, newer.version)
                if not await in_thread(partial(same_trained, delivery.build, newer.build)):
                    newer.replaces = delivery.version
                    if not (self._closed or delivery.replaced):
                        delivery.replaced = True
                        self._ready.append(newer)
                    return False
                last = newer
            return False
        finally:
            self._retiring -= 1
            self._changed.set()
