"""What a process does to a store while its disk is recorded, or until its power is cut: many rollouts at once.

Puts, intents, settlements, choices, conflicts, notes of delivery and ends; segments that are full; freezes alone and
together; late marks; retirement, reset, a second life; a sweep; a store that is closed and one after it. Everything is
told step by step: `Step` before it begins, and its number again when it is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.children import Channel
from tokcap import FileStore, TokenEntry
from tokcap.errors import ConflictError
from tokcap.store.snapshot import Snapshot

from .power_mutants import files_without

__all__ = ("FATES", "KEEPING", "Frozen", "Step", "work")

FATES = (
    "open",
    "closed",
    "frozen",
    "frozen together",
    "marked late",
    "delivered late",
    "retired",
    "marked after retirement",
    "reset while open",
    "reset while frozen",
    "reset after retirement",
    "swept",
)
"""What becomes of a rollout, by its number."""

KEEPING = ("open", "closed", "frozen", "frozen together", "delivered late")
"""Those that remove no directory."""

SEGMENT_BYTES = 6_000
BIG = 90_000
"""Prompt ids of a record that takes more than any other way to write or read is made for."""


class Step(msgspec.Struct):
    """One operation on one rollout."""

    number: int
    name: str
    rollout: str
    begun: int
    """How much the disk had been told before it began."""
    call: str = ""
    word: str = ""
    """An outcome, or the meta of a `finish` as text."""
    entries: tuple[TokenEntry, ...] = ()
    done: int | None = None
    """How much the disk had been told when it was acknowledged."""
    result: Any = None

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, self.rollout, self.call, self.word, f"{self.begun}..{self.done}"]))


class Frozen(msgspec.Struct, frozen=True):
    """What a freeze gave."""

    snapshot_id: str
    version: int
    keys: frozenset[tuple[str, int]]
    outcomes: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Frozen:
        return cls(
            snapshot.snapshot_id,
            snapshot.version,
            frozenset((entry.model_call_id, entry.choice_index) for entry in snapshot.entries),
            frozenset((call.model_call_id, call.outcome) for call in snapshot.calls),
        )


class _Worker:
    """Does steps and tells of them."""

    def __init__(
        self, channel: Channel, store: FileStore, directory: str, log: str, seed: int, fates: Sequence[str]
    ) -> None:
        self.channel, self.store, self.directory, self.log = channel, store, directory, log
        self.seed, self.fates = seed, fates
        self.numbers = iter(range(1 << 60))

    def position(self) -> int:
        return os.stat(self.log).st_size if self.log else 0

    async def step(
        self,
        name: str,
        rollout: str,
        what: Callable[[], Awaitable[Any]],
        *,
        call: str = "",
        word: str = "",
        entries: tuple[TokenEntry, ...] = (),
    ) -> Any:
        step = Step(next(self.numbers), name, rollout, self.position(), call, word, entries)
        self.channel.send(step)
        result = await what()
        if isinstance(result, Snapshot):
            with result:
                result = Frozen.of(result)
        self.channel.send((step.number, self.position(), result))
        return result


class _Life:
    """One rollout, from its first call on."""

    def __init__(self, worker: _Worker, number: int) -> None:
        self.worker, self.fate = worker, worker.fates[number % len(worker.fates)]
        self.rollout = f"{self.fate.replace(' ', '-')}-{number}"
        self.chance = random.Random(f"{worker.seed}/{number}")
        self.context = np.zeros(0, np.int32)
        self.turn = 0
        self.open_call = ""
        self.big = number == len(worker.fates)

    @property
    def store(self) -> FileStore:
        return self.worker.store

    # ---- calls

    def entry(self, call: str, choice: int = 0, *, ids: int = 0) -> TokenEntry:
        chance = np.random.default_rng(self.chance.getrandbits(64))
        new = chance.integers(0, 150_000, ids or self.chance.randrange(20, 200), dtype=np.int32)
        sampled = chance.integers(0, 150_000, self.chance.randrange(1, 60), dtype=np.int32)
        return TokenEntry(
            self.rollout,
            call,
            np.concatenate([self.context, new]),
            sampled,
            -chance.random(len(sampled)),
            choice_index=choice,
            extra={"note": "x" * self.chance.randrange(200)},
        )

    def went_on_with(self, entry: TokenEntry) -> None:
        self.context = np.concatenate([entry.prompt_token_ids, entry.generation_token_ids])

    async def put(self, entry: TokenEntry) -> None:
        await self.worker.step(
            "put", self.rollout, lambda: self.store.put(entry), call=entry.model_call_id, entries=(entry,)
        )

    async def put_many(self, entries: tuple[TokenEntry, ...]) -> None:
        await self.worker.step(
            "put",
            self.rollout,
            lambda: self.store.put_many(entries),
            call=entries[0].model_call_id,
            entries=entries,
        )

    async def begin(self, call: str, choices: int = 1) -> None:
        digests = [self.chance.randbytes(16) for _ in range(self.chance.randrange(3))]
        await self.worker.step(
            "begin",
            self.rollout,
            lambda: self.store.begin_call(self.rollout, call, choices, request_digests=digests),
            call=call,
        )

    async def settle(self, call: str, outcome: Any) -> None:
        await self.worker.step(
            "settle",
            self.rollout,
            lambda: self.store.settle_call(self.rollout, call, outcome, "because"),
            call=call,
            word=outcome,
        )

    async def deliver(self, call: str) -> None:
        await self.worker.step(
            "deliver", self.rollout, lambda: self.store.note_delivery(self.rollout, call, "full"), call=call
        )

    async def conflict(self, call: str) -> None:
        other = self.entry(call)

        async def refused() -> None:
            with contextlib.suppress(ConflictError):
                await self.store.put(other)
                raise AssertionError(f"{self.rollout}/{call}: a second content was taken without a word")

        await self.worker.step("conflict", self.rollout, refused, call=call, entries=(other,))

    async def calls(self, count: int) -> None:
        for _ in range(count):
            self.turn += 1
            call = f"c{self.turn}"
            kind = self.chance.choice(
                ["put", "begun", "begun", "choices", "together", "settled", "settled", "conflict", "left open"]
            )
            if self.big and self.turn == 2:
                await self.put(self.entry(call, ids=BIG))
            elif kind == "choices":
                await self.begin(call, 3)
                entries = tuple(self.entry(call, choice) for choice in range(3))
                await self.put_many(entries)
                self.went_on_with(entries[0])
            elif kind == "together":
                entries = tuple(self.entry(f"{call}-{part}") for part in range(3))
                await asyncio.gather(*map(self.put, entries))
                self.went_on_with(entries[-1])
            elif kind == "settled":
                await self.begin(call)
                await self.settle(call, self.chance.choice(["aborted", "lost", "no_generation"]))
            elif kind == "left open":
                await self.begin(call)
                self.open_call = call
            else:
                entry = self.entry(call)
                if kind == "begun":
                    await self.begin(call)
                await self.put(entry)
                if kind == "conflict":
                    await self.conflict(call)
                else:
                    self.went_on_with(entry)
                    if self.chance.random() < 0.5:
                        await self.deliver(call)

    # ---- what becomes of it

    async def before(self) -> None:
        """Until its fate comes."""
        await self.calls(self.chance.randrange(2, 7))
        if self.fate != "closed" and self.chance.random() < 0.5:
            meta = {"reward": self.chance.random(), "group": self.rollout}
            await self.worker.step(
                "finish", self.rollout, lambda: self.store.finish(self.rollout, meta), word=repr(sorted(meta.items()))
            )

    async def freeze(self) -> Frozen:
        frozen: Frozen = await self.worker.step("freeze", self.rollout, lambda: self.store.freeze(self.rollout))
        return frozen

    async def retire(self, frozen: Frozen) -> None:
        async def retired() -> None:
            pair = {"snapshot_id": frozen.snapshot_id, "version": frozen.version}
            if not await self.store.retire(self.rollout, **pair):  # type: ignore[arg-type]
                raise AssertionError(f"{self.rollout}: {pair} was not retired")

        await self.worker.step("retire", self.rollout, retired)

    async def reset(self) -> None:
        await self.worker.step("reset", self.rollout, lambda: self.store.reset(self.rollout))
        if self.chance.random() < 0.7:
            self.context = self.context[:0]
            await self.calls(2)

    async def after(self) -> None:
        """Its fate."""
        fate = self.fate
        if fate == "reset while open":
            await self.reset()
        if fate in ("open", "closed", "frozen together", "reset while open"):
            return
        if fate == "marked late" and not self.open_call:
            self.open_call = "cx"
            await self.begin("cx")
        if fate == "delivered late":
            entry = self.entry("cx")
            await self.put(entry)
        frozen = await self.freeze()
        if fate == "marked late":
            await self.worker.step(
                "mark late",
                self.rollout,
                lambda: self.store.mark_incomplete(self.rollout, self.open_call),
                call=self.open_call,
            )
            if self.chance.random() < 0.5:
                await self.freeze()
        elif fate == "delivered late":
            await self.worker.step(
                "deliver late", self.rollout, lambda: self.store.note_delivery(self.rollout, "cx", "full"), call="cx"
            )
        elif fate == "reset while frozen":
            await self.reset()
        elif fate in ("retired", "marked after retirement", "reset after retirement", "swept"):
            await self.retire(frozen)
            if fate == "marked after retirement":
                await self.worker.step(
                    "mark retired",
                    self.rollout,
                    lambda: self.store.mark_incomplete(self.rollout, "c-late"),
                    call="c-late",
                )
            elif fate == "reset after retirement":
                await self.reset()


async def _freeze_together(worker: _Worker, lives: list[_Life]) -> None:
    """All of them by one call; each is a step of its own."""
    ids = [life.rollout for life in lives]
    many = asyncio.ensure_future(worker.store.freeze_many(ids))

    async def one(position: int) -> Snapshot:
        return (await asyncio.shield(many))[position]

    await asyncio.gather(
        *(
            worker.step("freeze", rollout, lambda position=position: one(position))  # type: ignore[misc]
            for position, rollout in enumerate(ids)
        )
    )


async def _work(worker: _Worker, rollouts: int, reopen: Callable[[], FileStore]) -> None:
    lives = [_Life(worker, number) for number in range(rollouts)]
    await asyncio.gather(*(life.before() for life in lives))
    if worker.seed % 2:  # what is there is on the disk: what comes then, the file system has to say by itself
        _sync_file_system(worker.directory)
    together = [life for life in lives if life.fate == "frozen together"]
    others = [life for life in lives if life.fate not in ("frozen together", "closed")]
    await asyncio.gather(*(life.after() for life in others), _freeze_together(worker, together))

    async def close_and_open() -> None:
        await worker.store.close()
        worker.store = reopen()

    await worker.step("close", "", close_and_open)
    await asyncio.gather(*(life.calls(2) for life in lives if life.fate in ("open", "closed")))
    if "swept" in worker.fates:
        await worker.step("sweep", "", lambda: worker.store.sweep(0))


def work(
    channel: Channel,
    directory: str,
    log: str,
    seed: int,
    rollouts: int,
    fates: Sequence[str] = FATES,
    without: str = "",
) -> None:
    """Make a store in `directory` and work; `log` is that of the disk. In a child process.

    `without`: the sync that is left out, of `power_mutants.MUTANTS`.
    """

    def open_store() -> FileStore:
        files = files_without(without) if without else None
        return FileStore(directory, sweep_every_s=0, segment_bytes=SEGMENT_BYTES, files=files)

    stop = threading.Event()
    neighbour = threading.Thread(target=_sync_beside, args=(f"{os.path.dirname(directory)}/neighbour", seed, stop))
    neighbour.start()
    try:
        worker = _Worker(channel, open_store(), directory, log, seed, fates)
        asyncio.run(_work(worker, rollouts, open_store))
        worker.store.close_now()
    finally:
        stop.set()
        neighbour.join()


def _sync_file_system(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", path)
    finally:
        os.close(fd)


def _sync_beside(path: str, seed: int, stop: threading.Event) -> None:
    """Somebody else on the same file system, whose syncs write what others have not synced yet."""
    chance = random.Random(seed)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    with contextlib.suppress(OSError):  # the power was cut
        while not stop.wait(chance.random() * 0.02):
            os.write(fd, b"x" * 100)
            os.fsync(fd)
    os.close(fd)
