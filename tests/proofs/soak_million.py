"""A million rollouts in one directory: made, frozen, retired and swept, in waves that grow tenfold.

Every state exists with all rollouts of a wave in it. What an operation asks the kernel must not grow with the number
of rollouts, nor what the process holds; every snapshot must be what was put, and after the sweep nothing is left.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.store.files import Files

from .part import Outcome
from .soak_watch import MIB, CountedFiles, blocks, free_inodes, largest_directory, names_below, vitals

__all__ = ("LOOKED_AT", "entry_of", "many_rollouts")

IN_FLIGHT = 256
"""Puts, or retirements, at the same time; also how many are frozen at once."""
LOOKED_AT = 200
"""Rollouts that are looked at in each state."""
MOST_GROWTH = 1.25
"""How much more of the kernel an operation may ask in a wave ten times as large."""
MOST_MEMORY = 48 * MIB
"""How much more memory a wave ten times as large may take at its height: caches of fixed size fill up meanwhile."""
MOST_BLOCKS = 1_000
"""How many more objects may be left after a wave than after the one before it, and one for each fifty rollouts."""
PHASES = ("put", "freeze", "retire", "sweep")


def rollout_id(number: int) -> str:
    return f"rollout-{number:07d}"


def entry_of(number: int) -> TokenEntry:
    """What is put into a rollout: it follows from its number, so that nobody has to remember it."""
    return TokenEntry(
        rollout_id(number),
        "call",
        [number & 0xFFFF, number >> 16, 7],
        [number % 150_001, 5],
        [-(number % 1000) / 1000 - 0.25, -0.5],
    )


class Phase(NamedTuple):
    """One operation on every rollout of a wave."""

    seconds: float
    processor: float
    """Seconds of this process."""
    asked: int
    """Calls to the kernel, and names listed."""
    memory: int
    """Bytes, the most that was seen."""


class Wave:
    """One directory with a number of rollouts, from the first put to the sweep."""

    def __init__(self, directory: Path, count: int, seed: int, files: Files) -> None:
        self.directory, self.count = directory, count
        self.chance = random.Random(f"{seed}/{count}")
        self.files = files
        self.phases: dict[str, Phase] = {}
        self.problems: list[str] = []
        self.largest_directory = self.inodes = 0
        self.open_s = self.listing_s = self.stat_s = 0.0
        self._ids = np.full((count, 16), 255, np.uint8)
        """The identity of each snapshot; all of it is touched now, so that it isn't taken for growth later."""

    def run(self) -> None:
        """Everything; what did not hold is in `problems`."""
        with FileStore(self.directory, sweep_every_s=0, files=self.files) as store:
            asyncio.run(self._run(store))

    async def _run(self, store: FileStore) -> None:
        free = free_inodes(self.directory)
        steps: dict[str, Callable[[FileStore], Awaitable[None]]] = {
            "put": self._put_all,
            "freeze": self._freeze_all,
            "retire": self._retire_all,
        }
        for (phase, step), state in zip(steps.items(), ("open", "frozen", "retired"), strict=True):
            with self._measured(phase):
                await step(store)
            self.inodes = max(self.inodes, free - free_inodes(self.directory))
            self._look_at_all(store, state)
        self.largest_directory = largest_directory(self.directory)
        with self._measured("sweep"):
            swept = await store.sweep(0)
        if swept != self.count:
            self.problems.append(f"the sweep of {self.count:,} tombstones removed {swept:,}")
        left = [name for name in names_below(self.directory / "rollouts") if len(Path(name).name) != 2]
        if left or any(True for _ in store.rollouts()):
            self.problems.append(f"after the sweep of {self.count:,} rollouts {len(left):,} names are left: {left[:3]}")

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        self._asked()
        self._most_memory = vitals().memory
        started, used = time.monotonic(), time.process_time()
        yield
        self.phases[phase] = Phase(
            time.monotonic() - started,
            time.process_time() - used,
            self._asked(),
            max(self._most_memory, vitals().memory),
        )

    def _asked(self) -> int:
        return self.files.during() if isinstance(self.files, CountedFiles) else 0

    # ---- what is done to each

    async def _each(self, act: Callable[[int], Awaitable[None]]) -> None:
        numbers = iter(range(self.count))

        async def some() -> None:
            for number in numbers:
                await act(number)
                if number % 10_000 == 0:
                    self._most_memory = max(self._most_memory, vitals().memory)

        await asyncio.gather(*(some() for _ in range(min(IN_FLIGHT, self.count))))

    async def _put_all(self, store: FileStore) -> None:
        await self._each(lambda number: store.put(entry_of(number)))

    async def _freeze_all(self, store: FileStore) -> None:
        for first in range(0, self.count, IN_FLIGHT):
            numbers = range(first, min(first + IN_FLIGHT, self.count))
            snapshots = await store.freeze_many(map(rollout_id, numbers))
            for number, snapshot in zip(numbers, snapshots, strict=True):
                with snapshot:
                    if list(snapshot.entries) != [entry_of(number)] or snapshot.incomplete or snapshot.version != 1:
                        self.problems.append(f"{rollout_id(number)} is frozen with something else: {snapshot!r}")
                    self._ids[number] = np.frombuffer(bytes.fromhex(snapshot.snapshot_id), np.uint8)
            if first // IN_FLIGHT % 40 == 0:
                self._most_memory = max(self._most_memory, vitals().memory)

    async def _retire_all(self, store: FileStore) -> None:
        async def retire(number: int) -> None:
            identity = self._ids[number].tobytes().hex()
            if not await store.retire(rollout_id(number), snapshot_id=identity, version=1):
                self.problems.append(f"{rollout_id(number)}: the snapshot that was read could not be retired")

        await self._each(retire)

    # ---- what the store shows

    def _look_at_all(self, store: FileStore, state: str) -> None:
        """Every rollout is there once, in that state; some are looked at more closely, also by another store."""
        seen = np.zeros(self.count, bool)
        started = time.monotonic()
        for name, there in store.rollouts():
            number = int(name.removeprefix("rollout-"))
            if there != state or seen[number]:
                self.problems.append(f"{name} is {there}, expected {state}, once")
            seen[number] = True
        self.listing_s = max(self.listing_s, time.monotonic() - started)
        if not seen.all():
            self.problems.append(f"{np.count_nonzero(~seen):,} rollouts are missing, {int(np.argmin(seen))} first")
        started = time.monotonic()
        with FileStore(self.directory, sweep_every_s=0) as other:
            self.open_s = max(self.open_s, time.monotonic() - started)
            started = time.monotonic()
            for _ in range(LOOKED_AT):
                self._look_at(other, self.chance.randrange(self.count), state)
            self.stat_s = max(self.stat_s, (time.monotonic() - started) / LOOKED_AT)

    def _look_at(self, store: FileStore, number: int, state: str) -> None:
        stat = store.stat_now(rollout_id(number))
        if stat.state != state or stat.entries != (0 if state == "retired" else 1) or stat.damage:
            self.problems.append(f"{rollout_id(number)}, expected {state}, shows {stat!r}")
        if state != "retired":
            with store.read_now(rollout_id(number)) as snapshot:
                if list(snapshot.entries) != [entry_of(number)]:
                    self.problems.append(f"{rollout_id(number)} reads as something else when {state}")


def many_rollouts(
    outcome: Outcome, directory: Path, counts: list[int], seed: int, *, files: Callable[[], Files] = CountedFiles
) -> None:
    """Waves of so many rollouts, one after another, in one directory; each is ten times the one before, or so."""
    waves: list[Wave] = []
    held: list[int] = []
    for count in counts:
        wave = Wave(directory, count, seed, files())
        wave.run()
        held.append(blocks())
        waves.append(wave)
        outcome.problems += wave.problems
        _report(outcome, wave)
        print("\n".join(f"{what}: {figure}" for what, figure in outcome.figures[-6:]), flush=True)
    for (earlier, before), (later, after) in itertools.pairwise(zip(waves, held, strict=True)):
        _compare(outcome, earlier, later)
        if earlier is not waves[0] and after - before > MOST_BLOCKS + later.count // 50:
            outcome.problems.append(f"{after - before:,} more objects are left after {later.count:,} rollouts")


def _report(outcome: Outcome, wave: Wave) -> None:
    count = wave.count
    rates = ", ".join(f"{name} {count / phase.seconds:,.0f}" for name, phase in wave.phases.items())
    outcome.figure(f"{count:,} rollouts in one directory: per second", rates)
    used = ", ".join(f"{name} {phase.processor / count * 1e6:,.0f}" for name, phase in wave.phases.items())
    outcome.figure(f"{count:,} rollouts: µs of processor time each", used)
    asked = ", ".join(f"{name} {phase.asked / count:.1f}" for name, phase in wave.phases.items())
    outcome.figure(f"{count:,} rollouts: calls to the kernel and names listed, each", asked)
    memory = ", ".join(f"{name} {phase.memory / MIB:.0f}" for name, phase in wave.phases.items())
    outcome.figure(f"{count:,} rollouts: MiB of memory at most", memory)
    outcome.figure(
        f"{count:,} rollouts: listed, opened, one looked at",
        f"{wave.listing_s:.2f} s, {wave.open_s * 1e3:.1f} ms, {wave.stat_s * 1e3:.2f} ms",
    )
    outcome.figure(
        f"{count:,} rollouts: inodes at most; largest directory; names left after the sweep",
        f"{wave.inodes:,}; {wave.largest_directory >> 10} KiB; {'none' if not wave.problems else 'see the problems'}",
    )


def _compare(outcome: Outcome, earlier: Wave, later: Wave) -> None:
    """What a rollout costs has not grown."""
    for name in PHASES:
        before, after = earlier.phases[name], later.phases[name]
        # The sweep lists every shard, however little is in it.
        allowed = MOST_GROWTH * before.asked / earlier.count + 0.5
        if after.asked / later.count > allowed:
            outcome.problems.append(
                f"{name} asked {after.asked / later.count:.1f} of the kernel per rollout with {later.count:,} of them,"
                f" {before.asked / earlier.count:.1f} with {earlier.count:,}"
            )
        # What the run itself remembers of each rollout is 17 bytes.
        if after.memory - before.memory > MOST_MEMORY + 17 * later.count:
            outcome.problems.append(
                f"{name} took {after.memory / MIB:.0f} MiB with {later.count:,} rollouts,"
                f" {before.memory / MIB:.0f} with {earlier.count:,}"
            )
