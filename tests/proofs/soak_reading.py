"""Gigabytes of captures, written and read back: every array equals, by a digest that is kept outside the store.

Nothing of what is read comes from memory: the pages of each file are dropped before it is opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.store.snapshot import Snapshot

from .part import Outcome
from .soak_watch import MIB, names_below, vitals

__all__ = ("Sizes", "read_back")

CALLS = 12
"""Of each rollout, each with the whole history in its prompt."""
IN_FLIGHT = 8
"""Rollouts that are written at the same time."""
CACHE_BYTES = 16 * MIB
MOST_GROWTH = 24 * MIB
"""How much more memory the second half of the writing, or of the reading, may take than the first."""

Digests = dict[str, bytes]
"""Of each call: 16 bytes over all of its arrays."""


class Sizes:
    """How large each call is."""

    def __init__(self, prompt: int = 60_000, generated: int = 40_000, experts: int = 64 << 10) -> None:
        self.prompt, self.generated, self.experts = prompt, generated, experts


def calls_of(seed: int, number: int, sizes: Sizes) -> Iterator[TokenEntry]:
    """The calls of one rollout; they follow from its number. Ids and log-probs are random: nothing can be packed."""
    random = np.random.default_rng((seed, number))
    prompt = random.integers(0, 2**31 - 1, sizes.prompt, np.int32)
    for call in range(CALLS):
        generated = random.integers(0, 2**31 - 1, sizes.generated, np.int32)
        experts = random.integers(0, 256, sizes.experts, np.uint8)
        yield TokenEntry(
            f"capture-{number:05d}",
            f"call-{call:02d}",
            prompt,
            generated,
            -random.random(sizes.generated),
            routed_experts=experts,
        )
        prompt = np.concatenate([prompt, generated, random.integers(0, 2**31 - 1, sizes.prompt // 10, np.int32)])


def digest_of(entry: TokenEntry) -> bytes:
    """Over type, length and bytes of each array."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (
        entry.prompt_token_ids,
        entry.generation_token_ids,
        entry.generation_log_probs,
        entry.routed_experts,
    ):
        assert array is not None
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def array_bytes(entry: TokenEntry) -> int:
    """As they are handed out."""
    experts = entry.routed_experts
    return int(
        entry.prompt_token_ids.nbytes
        + entry.generation_token_ids.nbytes
        + entry.generation_log_probs.nbytes
        + (0 if experts is None else experts.nbytes)
    )


class Memory:
    """The most in the first and in the second half of so many steps, but the first tenth, in which caches fill."""

    def __init__(self, steps: int) -> None:
        self._steps, self._step = steps, 0
        self.first = self.second = 0

    def step(self) -> None:
        self._step += 1
        memory = vitals().memory
        if self._step > self._steps // 2:
            self.second = max(self.second, memory)
        elif self._step > self._steps // 10:
            self.first = max(self.first, memory)

    def check(self, what: str, problems: list[str]) -> None:
        if self.first and self.second - self.first > MOST_GROWTH:
            problems.append(
                f"{what}: {self.first / MIB:.0f} MiB in the first half, {self.second / MIB:.0f} in the second"
            )


async def _write(store: FileStore, seed: int, count: int, sizes: Sizes, memory: Memory) -> dict[int, Digests]:
    kept: dict[int, Digests] = {}
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            digests: Digests = {}
            for entry in calls_of(seed, number, sizes):
                await store.put(entry)
                digests[entry.model_call_id] = digest_of(entry)
            kept[number] = digests
            memory.step()

    await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
    return kept


def _drop_pages(directory: Path) -> int:
    """Let the kernel forget what it has in memory of every file; their bytes."""
    size = 0
    for name in names_below(directory):
        with suppress(IsADirectoryError):
            fd = os.open(name, os.O_RDONLY)
            try:
                size += os.fstat(fd).st_size
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                continue
            finally:
                os.close(fd)
    return size


def _check(snapshot: Snapshot, expected: Digests, problems: list[str]) -> int:
    """Compare every array; their bytes."""
    size, seen = 0, dict(expected)
    for entry in snapshot.entries:
        size += array_bytes(entry)
        if seen.pop(entry.model_call_id, None) != digest_of(entry):
            problems.append(f"{snapshot.rollout_id}, {entry.model_call_id}: not the arrays that were put")
    if seen or snapshot.incomplete or snapshot.damage:
        problems.append(f"{snapshot.rollout_id}: {len(seen)} calls are missing, damage: {snapshot.damage}")
    return size


def read_back(
    outcome: Outcome,
    directory: Path,
    size: int,
    seed: int,
    sizes: Sizes | None = None,
    *,
    store: type[FileStore] = FileStore,
) -> None:
    """Write so many bytes to disk, read all of them back, retire what was read.

    `store` is what writes them; a broken one must be found out.
    """
    sizes = sizes or Sizes()
    each = CALLS * (sizes.prompt // 10 * 4 + sizes.generated * 12 + sizes.experts) + sizes.prompt * 4
    count = max(2, -(-size // each))
    place = directory / "captures"
    problems = outcome.problems

    started = time.monotonic()
    writing = Memory(count)
    with store(place, sweep_every_s=0, cache_bytes=CACHE_BYTES) as writer:
        kept = asyncio.run(_write(writer, seed, count, sizes, writing))
    written_s = time.monotonic() - started
    writing.check("writing", problems)
    on_disk = _drop_pages(place / "rollouts")

    shown = 0
    reading = Memory(2 * count)
    started = time.monotonic()
    with FileStore(place, sweep_every_s=0) as reader:
        for number, digests in kept.items():
            with reader.freeze_now(f"capture-{number:05d}") as snapshot:
                shown += _check(snapshot, digests, problems)
            reading.step()
    frozen_s = time.monotonic() - started
    _drop_pages(place / "rollouts")
    started = time.monotonic()
    with FileStore(place, read_only=True) as reader, FileStore(place, sweep_every_s=0) as owner:
        for number, digests in kept.items():
            with reader.read_now(f"capture-{number:05d}") as snapshot:
                _check(snapshot, digests, problems)
                if not owner.retire_now(snapshot.rollout_id, snapshot_id=snapshot.snapshot_id, version=1):
                    problems.append(f"{snapshot.rollout_id} could not be retired after it was read")
                _check(snapshot, digests, problems)  # of an open snapshot everything stays
            reading.step()
        read_s = time.monotonic() - started
        if owner.sweep_now(0) != count:
            problems.append("not every tombstone of what was read was swept")
    reading.check("reading", problems)
    left = [name for name in names_below(place / "rollouts") if len(Path(name).name) != 2]
    if left:
        problems.append(f"{len(left)} names are left of what was read and retired: {left[:3]}")

    gigabytes = on_disk / 1e9
    outcome.figure(
        "captures written, GB on disk; calls; GB/s with all syncs",
        f"{gigabytes:.2f}; {count * CALLS:,}; {gigabytes / written_s:.2f}",
    )
    outcome.figure(
        "read back with an empty page cache, every array by its digest: frozen, GB/s; read twice and retired, GB/s",
        f"{gigabytes / frozen_s:.2f}; {gigabytes / read_s:.2f}",
    )
    outcome.figure("GB of arrays that were handed out in one pass", f"{shown / 1e9:.1f}")
    outcome.figure(
        "MiB of memory at most, first and second half: writing; reading",
        f"{writing.first / MIB:.0f}, {writing.second / MIB:.0f}; {reading.first / MIB:.0f}, {reading.second / MIB:.0f}",
    )
