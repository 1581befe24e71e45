"""The consumers that are killed: what they freeze they build, hand over durably outside the store, and retire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any

from tokcap.delivery import Delivery, consume, consume_now
from tokcap.errors import RetiredError, StaleAttemptError
from tokcap.store import FileStore, Snapshot
from tokcap.trajectory import Build, build

from ..children import Channel
from .kills_calls import digest_of, trained_digest
from .kills_children import REFUSALS, Life, Teller, begin, open_store
from .kills_mutants import Behaviour

__all__ = ("follow", "look_at", "take", "trained")


def look_at(snapshot: Snapshot) -> dict[str, Any]:
    """What is in a snapshot, as plain data."""
    entries: dict[str, dict[int, str]] = {}
    twice = []
    for entry in snapshot.entries:
        choices = entries.setdefault(entry.model_call_id, {})
        if entry.choice_index in choices:
            twice.append(entry.model_call_id)
        choices[entry.choice_index] = digest_of(entry)
    calls = {call.model_call_id: call.outcome for call in snapshot.calls}
    if len(calls) < len(snapshot.calls):
        twice.append("a call")
    return {
        "rollout_id": snapshot.rollout_id,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "entries": entries,
        "calls": calls,
        "twice": twice,
        "finished": snapshot.finished,
        "damage": [str(damage) for damage in snapshot.damage],
        "torn": len(snapshot.torn),
    }


def trained(built: Build) -> dict[str, Any]:
    """What a trainer gets, and whether its account is balanced."""
    numbers = built.metrics
    parts = ("trained", "abandoned", "ambiguous", "aborted", "unknown", "conflict", "other_model", "after_final")
    balanced = numbers["sampled"] == sum(numbers[part] for part in (*parts, "masked"))
    pieces = [(one.token_ids[one.loss_mask], one.log_probs[one.loss_mask]) for one in built.trained]
    return {"trained": trained_digest(pieces), "balanced": balanced}


class HandOver:
    """A consumer's own file, outside the store."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, seen: dict[str, Any]) -> None:
        """Durable when it returns; a line that was cut off was not handed over."""
        os.write(self._fd, json.dumps(seen).encode() + b"\n")
        os.fsync(self._fd)


def take(channel: Channel, life: Life) -> None:
    """Freezes the rollouts that it is sent, one by one or together, builds, hands over, retires."""
    teller, behaviour = begin(channel, life)
    store = open_store(teller, life, behaviour)
    handed = HandOver(life.handed)
    while True:
        try:
            how, rollout_ids = channel.recv()
        except EOFError:
            return
        ready = _freeze_all(teller, store, how, rollout_ids)
        for rollout_id in rollout_ids:
            frozen = ready.get(rollout_id) or _freeze(teller, store, rollout_id)
            while frozen is not None and not _hand_over(teller, store, behaviour, handed, *frozen):
                frozen = _freeze(teller, store, rollout_id)
            teller.tell("took", rollout_id)


Frozen = tuple[Snapshot, int, int]
"""A snapshot, and from when to when it was frozen."""


def _freeze_all(teller: Teller, store: FileStore, how: str, rollout_ids: list[str]) -> dict[str, Frozen]:
    if how == "many":
        started = time.monotonic_ns()
        with contextlib.suppress(*REFUSALS), teller.operation("freeze_many", *rollout_ids):
            snapshots = store.freeze_many_now(rollout_ids)
            ended = time.monotonic_ns()
            return {one.rollout_id: (one, started, ended) for one in snapshots}
        return {}  # one of them is gone: one by one
    if how == "wait":
        found = (_freeze(teller, store, rollout_id, wait_open_s=0.03) for rollout_id in rollout_ids)
        return {one[0].rollout_id: one for one in found if one is not None}
    return {}


def _freeze(teller: Teller, store: FileStore, rollout_id: str, wait_open_s: float = 0.0) -> Frozen | None:
    started = time.monotonic_ns()
    kind = "freeze, waiting" if wait_open_s else "freeze"
    with contextlib.suppress(RetiredError, StaleAttemptError), teller.operation(kind, rollout_id):
        snapshot = store.freeze_now(rollout_id, wait_open_s=wait_open_s)
        return snapshot, started, time.monotonic_ns()
    return None


def _hand_over(
    teller: Teller, store: FileStore, behaviour: Behaviour, handed: HandOver, snapshot: Snapshot, start: int, end: int
) -> bool:
    """One snapshot on its way out; True if its rollout is gone, False if there is a newer version."""
    pair = (snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
    with teller.operation("build", *pair), snapshot:
        seen = {**look_at(snapshot), **trained(build(snapshot)), "frozen": (start, end)}
    if not behaviour.retires_first:
        _keep(teller, handed, seen)
    time.sleep(behaviour.dawdles_s)
    with teller.operation("retire", *pair) as result:
        gone = store.retire_now(pair[0], snapshot_id=pair[1], version=pair[2])
        result.append(gone)
    time.sleep(behaviour.dawdles_s)
    if behaviour.retires_first:
        _keep(teller, handed, seen)
    if gone or behaviour.takes_false_for_true:
        teller.tell("final", *pair)
        return True
    return store.stat_now(pair[0]).state == "absent"  # reset meanwhile; else there is a newer one


def _keep(teller: Teller, handed: HandOver, seen: dict[str, Any]) -> None:
    with teller.operation("hand over", seen["rollout_id"], seen["snapshot_id"], seen["version"]):
        handed.write(seen)


class Watched(FileStore):
    """A store that tells what the consumer's loop does with it, and keeps what it gave to it, for the hand-over."""

    teller: Teller
    handed: HandOver

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._given: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._taken: dict[str, dict[str, Any]] = {}
        """What was trained of each rollout."""

    async def freeze(self, rollout_id: str, *, wait_open_s: float = 0.0, snapshot_id: str = "") -> Snapshot:
        started = time.monotonic_ns()
        with self.teller.operation("consume: freeze", rollout_id):
            snapshot = await super().freeze(rollout_id, wait_open_s=wait_open_s, snapshot_id=snapshot_id)
        return self._note(snapshot, started)

    async def read(self, rollout_id: str) -> Snapshot:
        started = time.monotonic_ns()
        return self._note(await super().read(rollout_id), started)

    def _note(self, snapshot: Snapshot, started: int) -> Snapshot:
        key = (snapshot.rollout_id, snapshot.snapshot_id, snapshot.version)
        self._given[key] = {**look_at(snapshot), "frozen": (started, time.monotonic_ns())}
        return snapshot

    def keep(self, delivery: Delivery) -> None:
        """Hand over what came out of the loop."""
        if delivery.build is None:
            self.teller.tell("problem", f"{delivery.rollout_id} came out unreadable: {delivery.metrics}")
            return
        seen = self._given.pop((delivery.rollout_id, delivery.snapshot_id, delivery.version))
        self._taken[delivery.rollout_id] = trained(delivery.build)
        _keep(self.teller, self.handed, {**seen, **self._taken[delivery.rollout_id]})

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        newer = self._given.pop((rollout_id, snapshot_id, version), None)
        if newer is not None and rollout_id in self._taken:  # nothing else is trained of it: the loop goes on with it
            _keep(self.teller, self.handed, {**newer, **self._taken[rollout_id]})
        with self.teller.operation("consume: retire", rollout_id, snapshot_id, version) as result:
            gone = await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)
            result.append(gone)
        if gone:
            self.teller.tell("final", rollout_id, snapshot_id, version)
            self._taken.pop(rollout_id, None)
        return gone


def follow(channel: Channel, life: Life) -> None:
    """The consumer's loop of `tokcap.delivery`, which follows the store: with an event loop, or without."""
    teller, behaviour = begin(channel, life)

    class Told(Watched):
        pass

    Told.teller, Told.handed = teller, HandOver(life.handed)
    store = open_store(teller, life, behaviour, Told)
    assert isinstance(store, Told)
    options: dict[str, Any] = {"poll_s": 0.02, "wait_open_s": 0.03, "sweep_every_s": 0.0}

    async def loop() -> None:
        async with consume(store, **options) as rollouts:
            async for delivery in rollouts:
                store.keep(delivery)
                await delivery.done(discard=delivery.masked)

    if life.together:
        asyncio.run(loop())
        return
    with consume_now(store, **options) as deliveries:
        for delivery in deliveries:
            store.keep(delivery)
            delivery.done_now(discard=delivery.masked)
