"""A disk that can't follow a thousand callers: memory stays bounded, and nothing is dropped without a word.

Every sync takes long, and for a while none comes back at all. Calls that want to begin are refused then, puts wait for
room and give up with a typed error; what was acknowledged is there afterwards, what was not is there whole or absent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.errors import BusyError, TokcapError
from tokcap.store.files import Files

from .part import Outcome
from .soak_watch import MIB, give_back, vitals

__all__ = ("SlowFiles", "slow_disk")

CALLERS_OF_A_ROLLOUT = 4
PENDING_BYTES = 16 * MIB
CACHE_BYTES = 16 * MIB
BEGINS = MIB
"""What was let in while there was room may go a little beyond it."""
OVERHEAD = 96 * MIB
"""Of memory, beside what the callers hold and what may wait: one batch more for each sync thread, tasks, the rest."""


class SlowFiles(Files):
    """Every sync of data takes so long; none comes back while `stalled`."""

    def __init__(self, sync_s: float) -> None:
        super().__init__()
        self._sync_s = sync_s
        self._going = threading.Event()
        self._going.set()

    def fdatasync(self, fd: int) -> None:
        time.sleep(self._sync_s)
        self._going.wait()
        super().fdatasync(fd)

    def stall(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()


class _Callers:
    """What the callers did, and what must be there afterwards."""

    def __init__(self, store: FileStore, seed: int, entry_ids: int) -> None:
        self.store, self.seed, self.entry_ids = store, seed, entry_ids
        self.counts: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.said: dict[tuple[str, str], str] = {}
        """Of each call that was begun: `put`, or the error that its put gave."""
        self.problems: list[str] = []
        self.stopped = False

    def entry(self, rollout_id: str, caller: int, number: int) -> TokenEntry:
        """Ids that follow from the call; the prompt is new each time, so that nothing of it is stored already."""
        arrays = np.random.default_rng((self.seed, caller, number))
        ids = arrays.integers(0, 2**31 - 1, self.entry_ids, np.int32)
        return TokenEntry(rollout_id, f"c{caller}-{number}", ids, ids[:50], -arrays.random(50))

    async def call(self, caller: int) -> None:
        rollout_id = f"slow-{caller // CALLERS_OF_A_ROLLOUT:04d}"
        number = 0
        while not self.stopped:
            number += 1
            entry = self.entry(rollout_id, caller, number)
            try:
                await self.store.begin_call(rollout_id, entry.model_call_id)
            except TokcapError as error:
                self._refused("begin refused", error)
                await asyncio.sleep(0.05)
                continue
            self.counts["begun"] += 1
            started = time.monotonic()
            try:
                await self.store.put(entry)
            except TokcapError as error:
                self._refused("put gave up", error)
                self.said[rollout_id, entry.model_call_id] = repr(error)
            except Exception as error:
                self.problems.append(f"{rollout_id}, {entry.model_call_id}: {error!r} is not a TokcapError")
            else:
                self.said[rollout_id, entry.model_call_id] = "put"
                self.counts["put"] += 1
                self.latencies.append(time.monotonic() - started)

    def _refused(self, what: str, error: TokcapError) -> None:
        self.counts[what] += 1
        if not isinstance(error, BusyError):
            self.problems.append(f"{what}: {error!r}, expected BusyError")


async def _run(
    callers: _Callers, files: SlowFiles, count: int, seconds: float, stall_s: float, pending_bytes: int, rounds: int
) -> tuple[int, int]:
    """The most memory that was held, without what the allocator keeps of freed memory, and the most bytes that waited.

    Half of the time, the stall, the other half; again if nobody was refused yet, at most so many times.
    """
    tasks = [asyncio.create_task(callers.call(number)) for number in range(count)]
    most_memory = most_pending = looks = 0
    for _ in range(rounds):
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds + stall_s:
            if seconds / 2 <= now < seconds / 2 + stall_s:
                files.stall()
            else:
                files.go_on()
            await asyncio.sleep(0.05)
            looks += 1
            if looks % 10 == 0:
                give_back()
                most_memory = max(most_memory, vitals().memory)
            most_pending = max(most_pending, _waiting(callers.store))
        files.go_on()
        if (callers.counts["begin refused"] and callers.counts["put gave up"]) or most_pending > pending_bytes + BEGINS:
            break
    callers.stopped = True
    await asyncio.gather(*tasks)
    return most_memory, most_pending


def _waiting(store: FileStore) -> int:
    """Of records that wait for the disk."""
    return store.pending.bytes


def slow_disk(
    outcome: Outcome,
    directory: Path,
    seconds: float,
    seed: int,
    *,
    callers: int = 1000,
    sync_s: float = 0.02,
    entry_ids: int = 20_000,
    stall_s: float = 6.0,
    lock_timeout_s: float = 3.0,
    pending_bytes: int = PENDING_BYTES,
    rounds: int = 10,
    store: type[FileStore] = FileStore,
) -> None:
    """So many callers that begin and put without a pause; `store` may be a broken one, which must be found out."""
    before = vitals().memory
    files = SlowFiles(sync_s)
    place = directory / "slow"
    with store(
        place,
        sweep_every_s=0,
        files=files,
        max_pending_bytes=pending_bytes,
        cache_bytes=CACHE_BYTES,
        sync_threads=8,
        lock_timeout_s=lock_timeout_s,
    ) as opened:
        done = _Callers(opened, seed, entry_ids)
        most_memory, most_pending = asyncio.run(_run(done, files, callers, seconds, stall_s, pending_bytes, rounds))
        left = _waiting(opened)
    outcome.problems += done.problems
    held = callers * entry_ids * 8  # by the callers themselves: ids, and a copy while they are encoded
    allowed = before + held + pending_bytes + CACHE_BYTES + OVERHEAD
    if most_memory > allowed:
        outcome.problems.append(f"slow disk: {most_memory / MIB:.0f} MiB, more than {allowed / MIB:.0f}")
    if most_pending > pending_bytes + BEGINS:
        outcome.problems.append(f"slow disk: {most_pending:,} bytes waited, more than {pending_bytes:,}")
    if left:
        outcome.problems.append(f"slow disk: {left:,} bytes still count as waiting after everything ended")
    if not done.counts["begin refused"] or not done.counts["put gave up"]:
        outcome.problems.append(f"the disk was never too slow for anybody, the run shows nothing: {done.counts}")
    _check(outcome, place, done)
    latencies = sorted(done.latencies) or [0.0]
    outcome.figure(
        f"{callers:,} callers on a disk that takes {sync_s * 1e3:.0f} ms for a sync, and {stall_s:g} s for one of them",
        ", ".join(f"{what} {count:,}" for what, count in sorted(done.counts.items())),
    )
    outcome.figure(
        "slow disk: MiB of memory at most, of it waiting; median and worst put, s",
        f"{most_memory / MIB:.0f} (at most {allowed / MIB:.0f} allowed), {most_pending / MIB:.0f}; "
        f"{latencies[len(latencies) // 2]:.2f}, {latencies[-1]:.2f}",
    )


def _check(outcome: Outcome, place: Path, done: _Callers) -> None:
    """What was acknowledged is there and what was not is whole or absent, and nothing else is there."""
    by_rollout: dict[str, dict[str, str]] = {}
    for (rollout_id, call), said in done.said.items():
        by_rollout.setdefault(rollout_id, {})[call] = said
    whole = 0
    with FileStore(place, sweep_every_s=0) as store:
        for rollout_id, calls in by_rollout.items():
            with store.freeze_now(rollout_id) as snapshot:
                if snapshot.damage:
                    outcome.problems.append(f"{rollout_id} is damaged: {snapshot.damage}")
                stored = {entry.model_call_id: entry for entry in snapshot.entries}
                for call, said in calls.items():
                    entry = stored.pop(call, None)
                    if entry is None and said == "put":
                        outcome.problems.append(f"{rollout_id}, {call}: its put returned, and nothing is stored")
                    elif entry is not None:
                        caller, number = map(int, call[1:].split("-"))
                        whole += said != "put"
                        if entry != done.entry(rollout_id, caller, number):
                            outcome.problems.append(f"{rollout_id}, {call}: something else is stored than was put")
                if stored:
                    outcome.problems.append(f"{rollout_id}: entries that nobody put: {[*stored][:3]}")
    outcome.figure("slow disk: puts whose error came first and whose record is there all the same, whole", whole)
