"""A client of a store in a process of its own: does what its plan says, several operations at once, and tells when.

Every operation is announced before it is started, so that whoever listens knows of it when the process is killed in the
middle. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np

from tests.children import Channel
from tests.state_model import Operation, Seen
from tests.store_worker import UnsyncedFiles, attempt, perform
from tokcap import FileStore, TokenEntry

from .histories_mutants import MUTANTS

__all__ = ("Plan", "client", "content")

CALLS = tuple(f"c{number}" for number in range(5))
DELIVERED = ("full", "partly", "unknown")

WEIGHTS: tuple[Mapping[str, int], Mapping[str, int]] = (
    {"put": 50, "group": 8, "begin": 14, "settle": 8, "deliver": 6, "finish": 3, "freeze": 4, "retire": 1, "read": 6},
    {
        "put": 16,
        "begin": 4,
        "settle": 12,
        "deliver": 5,
        "finish": 2,
        "freeze": 22,
        "retire": 22,
        "reset": 7,
        "read": 10,
    },
)
"""What is done how often, at the beginning and at the end of a rollout's history."""


@dataclass(frozen=True)
class Plan:
    """What one client does in one round."""

    seed: int
    rollouts: tuple[str, ...]
    lanes: int
    """How many operations it has under way at once."""
    length: int
    """Operations of each lane."""
    resets: bool


def content(rollout_id: str, call: str, choice: int, variant: int) -> TokenEntry:
    """The same for the same arguments; prompts extend each other, as in a conversation."""
    numbers = np.random.default_rng([*rollout_id.encode(), *call.encode()])
    history = np.random.default_rng(list(rollout_id.encode())).integers(0, 150_000, 200)
    length = 40 * (1 + CALLS.index(call))
    log_probs = numbers.standard_normal(6) - 2
    return TokenEntry(
        rollout_id,
        call,
        history[:length],
        numbers.integers(0, 150_000, 6),
        log_probs - variant,
        choice_index=choice,
        extra={"variant": variant} if variant else {},
    )


class _Rollout:
    """What this client knows of a rollout."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def choose(self, chance: random.Random, rollout_id: str, progress: float, resets: bool) -> Operation:
        early, late = WEIGHTS
        names = [*early, "reset"]
        weights = [early.get(name, 0) * (1 - progress) + late.get(name, 0) * progress for name in names]
        if not resets:
            weights[names.index("reset")] = 0.0
        name = chance.choices(names, weights)[0]
        call = chance.choice(CALLS)
        match name:
            case "put":
                variant = chance.choice((0, 0, 0, 0, 0, 1))
                return Operation("put", rollout_id, entries=(content(rollout_id, call, 0, variant),))
            case "group":
                return Operation(
                    "put", rollout_id, entries=tuple(content(rollout_id, call, choice, 0) for choice in range(3))
                )
            case "begin":
                return Operation("begin", rollout_id, call, number=chance.choice((1, 1, 3)))
            case "settle":
                word = chance.choice(("no_generation", "aborted", "lost", "lost"))
                return Operation("settle", rollout_id, call, word=word)
            case "deliver":
                return Operation("deliver", rollout_id, call, word=chance.choice(DELIVERED))
            case "finish":
                return Operation("finish", rollout_id, meta={"reward": chance.choice((0.0, 1.0))})
            case "retire":
                snapshot_id, version = chance.choice(self.seen[-3:] + self.seen[-1:] * 3 or [("0" * 32, 1)])
                return Operation("retire", rollout_id, word=snapshot_id, number=version)
            case _:
                return Operation(name, rollout_id)

    def learn(self, result: object) -> None:
        if isinstance(result, Seen) and result.version and (result.snapshot_id, result.version) not in self.seen:
            self.seen.append((result.snapshot_id, result.version))


def client(channel: Channel, directory: str, on_loop: bool, synced: bool, mutant: str) -> None:
    """Do rounds until the channel is closed."""
    store = FileStore(directory, sweep_every_s=0, segment_bytes=3000, files=None if synced else UnsyncedFiles())
    if mutant:
        MUTANTS[mutant]()
    telling = Lock()

    def tell(*words: object) -> None:
        with telling:
            channel.send(words)

    channel.send("ready")
    tags = iter(range(1 << 60))
    with ThreadPoolExecutor(8) as threads:
        while True:
            try:
                plan: Plan = channel.recv()
            except EOFError:
                return
            _round(store, plan, tell, tags.__next__, threads, on_loop)
            tell("round done")


def _round(
    store: FileStore,
    plan: Plan,
    tell: Callable[..., None],
    tag: Callable[[], int],
    threads: ThreadPoolExecutor,
    on_loop: bool,
) -> None:
    known = {rollout_id: _Rollout() for rollout_id in plan.rollouts}

    def step(chance: random.Random, number: int) -> Operation:
        rollout_id = chance.choice(plan.rollouts)
        return known[rollout_id].choose(chance, rollout_id, number / plan.length, plan.resets)

    def started(operation: Operation) -> int:
        name = tag()
        tell("start", name, operation, time.monotonic_ns())
        return name

    def ended(name: int, operation: Operation, result: object, at: int) -> None:
        known[operation.rollout_id].learn(result)
        tell("end", name, result, at)

    def lane(number: int) -> None:
        chance = random.Random(plan.seed * 1000 + number)
        for place in range(plan.length):
            operation = step(chance, place)
            name = started(operation)
            result = attempt(lambda operation=operation: perform(store, operation))  # type: ignore[misc]
            ended(name, operation, result, time.monotonic_ns())

    async def lane_on_loop(number: int) -> None:
        chance = random.Random(plan.seed * 1000 + number)
        for place in range(plan.length):
            operation = step(chance, place)
            name = started(operation)
            result: object
            try:
                result = await perform(store, operation, suffix="")
            except Exception as error:
                result = error
            at = time.monotonic_ns()
            ended(name, operation, attempt(lambda result=result: _or_raise(result)), at)  # type: ignore[misc]

    if on_loop:

        async def lanes() -> None:
            await asyncio.gather(*map(lane_on_loop, range(plan.lanes)))

        asyncio.run(lanes())
    else:
        list(threads.map(lane, range(plan.lanes)))


def _or_raise(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result
