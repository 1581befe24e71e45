"""The processes of the mixed load: what each of them does until it is told to stop.

Each has an event loop with a store, and hears its orders in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from tests.children import Channel
from tokcap import FileStore, consume
from tokcap.delivery import Delivery
from tokcap.delivery.share import share_of

from .soak_plan import differences, is_plain, plan_of, sampled, write_rollout

__all__ = ("consume_built", "consume_by_hand", "sweep_often", "write_many")

TOGETHER = 16
"""Rollouts that are frozen at once."""


class Orders:
    """What the parent says, brought into the event loop; and what it is told, from that."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._traced: tracemalloc.Snapshot | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, kind: str, content: object) -> None:
        self._channel.send((kind, content))

    def problems(self, problems: list[str]) -> None:
        for problem in problems[:20]:
            self.say("problem", problem)
        problems.clear()

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, OSError):
                message = ("stop", None)
            self._loop.call_soon_threadsafe(self._obey, message)
            if message[0] == "stop":
                return

    def _obey(self, message: tuple[str, Any]) -> None:
        match message[0]:
            case "stop":
                self.stopped.set()
                self.heard.put_nowait(message)
            case "trace":
                tracemalloc.start()
            case "mark":
                self._traced = _snapshot()
            case "compare":
                assert self._traced is not None
                grown = _snapshot().compare_to(self._traced, "lineno")
                tracemalloc.stop()
                lines = [f"{one.traceback}: {one.size_diff:+,} B, {one.count_diff:+,} objects" for one in grown[:3]]
                self.say("traced", (sum(one.size_diff for one in grown), lines))
            case _:
                self.heard.put_nowait(message)


def _snapshot() -> tracemalloc.Snapshot:
    return tracemalloc.take_snapshot().filter_traces(
        (tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, "<unknown>"))
    )


def _run(
    channel: Channel, path: str, store: str, act: Callable[[FileStore, Orders], Coroutine[Any, Any, None]]
) -> None:
    """Open a store and act until it is over."""
    module, _, name = store.rpartition(".")
    made: FileStore = getattr(importlib.import_module(module), name)(path, sweep_every_s=0)

    async def main() -> None:
        orders = Orders(channel)
        await act(made, orders)
        await made.close()
        orders.say("ended", None)

    asyncio.run(main())


def write_many(channel: Channel, path: str, store: str, seed: int, number: int, open_rollouts: int) -> None:
    """In a child: so many rollouts at a time, each written until its end; no more than four times as many wait."""

    async def act(store: FileStore, orders: Orders) -> None:
        room = asyncio.Semaphore(4 * open_rollouts)
        serial = iter(range(10**9))
        problems: list[str] = []

        async def some() -> None:
            while True:
                await room.acquire()
                if orders.stopped.is_set():
                    return
                rollout_id = f"writer-{number}-{next(serial):07d}"
                orders.say("begun", rollout_id)
                finished = functools.partial(orders.say, "finished", rollout_id)
                count = await write_rollout(store, seed, rollout_id, problems, finished)
                orders.say("count", {"calls written": count})
                orders.problems(problems)

        async def hear() -> None:
            while not orders.stopped.is_set():
                kind, _ = await orders.heard.get()
                if kind == "consumed":
                    room.release()
            for _ in range(open_rollouts):
                room.release()

        await asyncio.gather(hear(), *(some() for _ in range(open_rollouts)))

    _run(channel, path, store, act)


def consume_built(channel: Channel, path: str, store: str, seed: int) -> None:
    """In a child: half of the rollouts, as a trainer takes them."""

    async def act(store: FileStore, orders: Orders) -> None:
        async with consume(store, worker=0, workers=2, poll_s=0.1, sweep_every_s=0) as rollouts:

            async def stop() -> None:
                await orders.stopped.wait()
                rollouts.stop()

            stopping = asyncio.create_task(stop())
            async for rollout in rollouts:
                orders.problems(_differences_of_build(seed, rollout))
                trained = sum(trajectory.trained for trajectory in rollout.trajectories)
                if not await rollout.done(discard=True):
                    if not rollout.replaced:
                        orders.say("problem", f"{rollout.rollout_id}: could not be retired")
                    continue
                orders.say("count", {"ids trained": trained})
                orders.say("consumed", rollout.rollout_id)
            await stopping

    _run(channel, path, store, act)


def _differences_of_build(seed: int, rollout: Delivery) -> list[str]:
    calls = list(plan_of(seed, rollout.rollout_id))
    if rollout.build is None:
        return [f"{rollout.rollout_id} could not be read: {rollout.metrics}"]
    found = []
    if rollout.metrics["sampled"] != sampled(calls):
        found.append(f"{rollout.rollout_id}: {rollout.metrics['sampled']} sampled, expected {sampled(calls)}")
    if is_plain(calls):
        expected = np.concatenate([call.entries[0].generation_token_ids for call in calls])
        trained = [trajectory.token_ids[trajectory.loss_mask] for trajectory in rollout.trajectories]
        if not np.array_equal(np.concatenate([*trained, np.empty(0, np.int32)]), expected):
            found.append(f"{rollout.rollout_id}: other ids are trained than were sampled")
    return found


def consume_by_hand(channel: Channel, path: str, store: str, seed: int) -> None:
    """In a child: the other half, frozen several at a time, each entry compared with what was put."""

    async def act(store: FileStore, orders: Orders) -> None:
        while not orders.stopped.is_set():
            wanted = [await orders.heard.get()]
            while not orders.heard.empty() and len(wanted) < TOGETHER:
                wanted.append(orders.heard.get_nowait())
            names = [name for kind, name in wanted if kind == "finished" and share_of(name, 2) == 1]
            for snapshot in await store.freeze_many(names):
                while True:
                    with snapshot:
                        orders.problems(differences(seed, snapshot))
                        count = len(snapshot.entries)
                    identity, version = snapshot.snapshot_id, snapshot.version
                    if await store.retire(snapshot.rollout_id, snapshot_id=identity, version=version):
                        break
                    snapshot = await store.freeze(snapshot.rollout_id)  # a late mark made another version
                    if (snapshot.snapshot_id, snapshot.version) == (identity, version):
                        orders.say("problem", f"{snapshot.rollout_id}: could not be retired as it is")
                        break
                orders.say("count", {"entries compared": count})
                orders.say("consumed", snapshot.rollout_id)

    _run(channel, path, store, act)


def sweep_often(channel: Channel, path: str, store: str, seed: int, tombstone_age_s: float) -> None:
    """In a child: sweep and look at everything, all the time."""

    async def act(store: FileStore, orders: Orders) -> None:
        while not orders.stopped.is_set():
            swept = await store.sweep(tombstone_age_s)
            orders.say("count", {"tombstones swept": swept})
            await store.usage()
            if await store.expire(3600.0):
                orders.say("problem", "something expired that is not an hour old")
            await asyncio.sleep(0.3)

    _run(channel, path, store, act)
