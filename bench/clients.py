"""Asyncio clients that store conversations, one client per rollout, the next call only after the last was durable."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec

from .stores import CANDIDATES, Candidate, WithIntents
from .workload import SMOKE, Call, Workload, calls, named

__all__ = ("Measured", "percentile", "run", "run_processes")

START_S = 120.0
"""How long the slowest of several processes may take to have its calls ready."""


class Measured(msgspec.Struct):
    """One run of one candidate."""

    seconds: float
    """From the first put to the last."""
    steady_seconds: float
    """The same without the first puts of the rollouts, which all clients make before anyone goes on."""
    cpu_seconds: float
    """Of all threads of the process, in user and kernel mode."""
    first: list[float]
    """Seconds that each first put of a rollout took."""
    steady: list[float]
    """Seconds that each other put took, in no particular order."""
    file_bytes: int = 0
    """Sizes of all files that are left; holes don't count."""
    allocated_bytes: int = 0
    """What the file system set aside for them, directories included."""

    @property
    def puts(self) -> int:
        return len(self.first) + len(self.steady)


def run(
    candidate: str,
    directory: Path,
    conversations: Sequence[list[Call]],
    *,
    open_rollouts: int | None = None,
    intents: bool = False,
) -> Measured:
    """Store the conversations in a new directory, and weigh what is left there when the store is closed.

    open_rollouts: so many at a time, then the next so many; all at once if None. intents: each put with its
    `begin_call` before it, both inside the measured time. Raises `UnavailableError`.
    """
    directory.mkdir(parents=True)
    _warm_up(candidate, directory)
    store = CANDIDATES[candidate](directory)
    try:
        items = _prepared(store, conversations)
        measured = asyncio.run(_drive(store, items, open_rollouts or len(items), intents))
    finally:
        store.close()
        gc.unfreeze()
    measured.file_bytes, measured.allocated_bytes = _weigh(directory)
    return measured


def run_processes(candidate: str, directory: Path, workload: Workload, processes: int) -> Measured:
    """The same from several processes, each with its share of the rollouts, all in one directory.

    They start together; the time is from the first start to the last end. Raises `UnavailableError`.
    """
    if workload.rollouts % processes:
        raise ValueError(f"{processes} processes can't share {workload.rollouts} rollouts evenly")
    directory.mkdir(parents=True)
    share = msgspec.structs.replace(workload, rollouts=workload.rollouts // processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _keep, (context.Barrier(processes),)) as pool:
        running = [
            pool.submit(_run_share, candidate, directory, share, number * share.rollouts) for number in range(processes)
        ]
    # One that fails breaks the barrier for the others: its own error says more than theirs.
    failed = [error for future in running if (error := future.exception())]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    shares = [future.result() for future in running]
    parts = [measured for measured, _ in shares]
    file_bytes, allocated_bytes = _weigh(directory)
    return Measured(
        max(begun + measured.seconds for measured, begun in shares) - min(begun for _, begun in shares),
        max(part.steady_seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
        [latency for part in parts for latency in part.first],
        [latency for part in parts for latency in part.steady],
        file_bytes,
        allocated_bytes,
    )


def percentile(latencies: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all don't exceed; NaN of nothing."""
    if not latencies:
        return math.nan
    return sorted(latencies)[max(0, math.ceil(len(latencies) * share) - 1)]


_warm: set[str] = set()


def _warm_up(candidate: str, directory: Path) -> None:
    """A few puts that nobody measures, once in each process: what is imported and compiled by the first of all."""
    if candidate in _warm:
        return
    _warm.add(candidate)
    own = directory / f"warm-up-{os.getpid()}"
    run(candidate, own, calls(named("W1", SMOKE)))
    shutil.rmtree(own)


def _prepared(store: Candidate[Any], conversations: Sequence[list[Call]]) -> list[list[Any]]:
    # The floors hold a descriptor per rollout.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(conversations) + 1_000
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard > 0 else wanted, hard))
    items = [store.prepared(conversation) for conversation in conversations]
    # Millions of prepared ids are the benchmark's own: nobody's collections should have to look through them.
    gc.collect()
    gc.freeze()
    return items


async def _drive(store: Candidate[Any], items: Sequence[list[Any]], at_a_time: int, intents: bool) -> Measured:
    store_call: Callable[[Any], Awaitable[None]]
    if not intents:
        store_call = store.put
    elif isinstance(store, WithIntents):
        store_call = _pair(store)
    else:
        raise ValueError(f"{type(store).__name__} has no begin_call")
    found = Measured(0.0, 0.0, 0.0, [], [])
    cpu = time.process_time()
    for start in range(0, len(items), at_a_time):
        clients = items[start : start + at_a_time]
        begun = time.perf_counter()
        await asyncio.gather(*(_client(store_call, items[:1], found.first) for items in clients))
        steady = time.perf_counter()
        await asyncio.gather(*(_client(store_call, items[1:], found.steady) for items in clients))
        ended = time.perf_counter()
        found.seconds += ended - begun
        found.steady_seconds += ended - steady
    found.cpu_seconds = time.process_time() - cpu
    return found


async def _client(store_call: Callable[[Any], Awaitable[None]], items: list[Any], latencies: list[float]) -> None:
    for item in items:
        begun = time.perf_counter()
        await store_call(item)
        latencies.append(time.perf_counter() - begun)


def _pair(store: WithIntents[Any]) -> Callable[[Any], Awaitable[None]]:
    async def begin_and_put(item: Any) -> None:
        await store.begin(item)
        await store.put(item)

    return begin_and_put


def _weigh(directory: Path) -> tuple[int, int]:
    files = allocated = 0
    for path in (directory, *directory.rglob("*")):
        stat = path.lstat()
        allocated += stat.st_blocks * 512
        if path.is_file():
            files += min(stat.st_size, stat.st_blocks * 512)
    return files, allocated


_barrier: Barrier | None = None


def _keep(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _run_share(candidate: str, directory: Path, share: Workload, first: int) -> tuple[Measured, float]:
    """In a process of its own: the measured part, and when it began on the clock that all processes share."""
    if _barrier is None:
        raise RuntimeError("this process was started without a barrier")
    try:
        _warm_up(candidate, directory)
        store = CANDIDATES[candidate](directory)
        items = _prepared(store, calls(share, first=first))
        _barrier.wait(START_S)
    except BaseException:
        _barrier.abort()
        raise
    begun = time.monotonic()
    try:
        return asyncio.run(_drive(store, items, len(items), False)), begun
    finally:
        store.close()
