"""How long one put of a long context keeps the event loop, and how long a contended fence is waited for.

python -m bench.stalls
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from tokcap import FileStore, TokenEntry

from .places import place

CONTEXT = 131_072


def main() -> int:
    with place("disk") as directory:
        for kind in ("array", "list"):
            stalls = asyncio.run(_stalls(directory / kind, kind))
            print(f"longest turn of the event loop, puts at 128k context, {kind}s: {_shown(stalls)}")
        waits = _contended(directory / "contended")
        print(f"put of a rollout that another process puts to without a pause: {_shown(waits)}")
    return 0


def _shown(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds) * 1e3:.2f} ms, worst {max(seconds) * 1e3:.2f} ms of {len(seconds)}"


async def _stalls(directory: Path, kind: str) -> list[float]:
    """The CPU that each put takes of the loop's thread: everything until it gives control back, and the wake-up."""
    random = np.random.default_rng(0)
    sequence = random.integers(0, 150_000, CONTEXT, dtype=np.int64)
    taken = []
    async with FileStore(directory) as store:
        for turn in range(50):
            prompt = np.concatenate([sequence, random.integers(0, 150_000, 300 * turn, dtype=np.int64)])
            ids = prompt if kind == "array" else prompt.tolist()
            begun = time.thread_time()
            await store.put(TokenEntry("rollout", f"call-{turn}", ids, [1] * 200, [-0.5] * 200))
            taken.append(time.thread_time() - begun)
    return taken


def _contended(directory: Path) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    other = context.Process(target=_put_without_pause, args=(directory, ready, stop))
    other.start()
    ready.wait(60)
    waits: list[float] = []

    def put() -> None:
        with FileStore(directory) as store:
            for number in range(300):
                begun = time.perf_counter()
                store.put_now(TokenEntry("rollout", f"ours-{number}", [1, 2, 3], [4], [-0.5]))
                waits.append(time.perf_counter() - begun)
                time.sleep(0.005)

    thread = threading.Thread(target=put)
    thread.start()
    thread.join()
    stop.set()
    other.join()
    return waits


def _put_without_pause(directory: Path, ready: Event, stop: Event) -> None:
    def put() -> None:
        with FileStore(directory) as store:
            number = 0
            while not stop.is_set():
                store.put_now(TokenEntry("rollout", f"theirs-{number}", [1, 2, 3], [4], [-0.5]))
                number += 1
                ready.set()

    thread = threading.Thread(target=put)
    thread.start()
    thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
