"""What the mixed load says of a rollout, and what a consumer must find: both follow from its id."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple
from zlib import crc32

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.errors import ConflictError, StaleAttemptError
from tokcap.store.snapshot import Snapshot

__all__ = ("Call", "differences", "has_late_mark", "is_plain", "plan_of", "sampled", "write_rollout")

CHOICES = 3
LATE = "late"
_KINDS = {"put": 80, "many": 5, "aborted": 4, "no_generation": 4, "lost": 4, "conflict": 3}
_OUTCOMES = {"put": "recorded", "many": "recorded"}


class Call(NamedTuple):
    """One call of a rollout."""

    name: str
    kind: str
    entries: list[TokenEntry]
    """Of `conflict` both contents, in the order in which they are put."""
    begun: bool

    @property
    def outcome(self) -> str:
        return _OUTCOMES.get(self.kind, self.kind)


def plan_of(seed: int, rollout_id: str, length: int = 12) -> Iterator[Call]:
    """The calls of a rollout, each with the history of those before it as its prompt."""
    chance = random.Random(f"{seed}/{rollout_id}")
    arrays = np.random.default_rng((seed, crc32(rollout_id.encode())))
    history = arrays.integers(0, 150_000, chance.randrange(50, 2000), np.int32)
    for number in range(chance.randrange(1, length + 1)):
        name = f"call-{number:02d}"
        (kind,) = chance.choices([*_KINDS], [*_KINDS.values()])
        generated = arrays.integers(0, 150_000, chance.randrange(5, 300), np.int32)
        log_probs = -arrays.random(len(generated))
        entries: list[TokenEntry] = []
        if kind in ("put", "aborted"):
            reason = "aborted" if kind == "aborted" else "stop"
            entries = [TokenEntry(rollout_id, name, history, generated, log_probs, finish_reason=reason)]
        elif kind == "many":
            entries = [
                TokenEntry(rollout_id, name, history, generated + choice, log_probs, choice_index=choice)
                for choice in range(CHOICES)
            ]
        elif kind == "conflict":
            entries = [TokenEntry(rollout_id, name, history, generated + other, log_probs) for other in range(2)]
        yield Call(name, kind, entries, chance.random() < 0.6)
        if kind == "put":
            history = np.concatenate([history, generated, arrays.integers(0, 150_000, 20, np.int32)])


def is_plain(calls: list[Call]) -> bool:
    """Whether a trainer gets exactly what was sampled, in order, in one trajectory."""
    return all(call.kind == "put" for call in calls)


def has_late_mark(seed: int, rollout_id: str) -> bool:
    """Whether something is said of it after its end, wherever it is by then."""
    return crc32(f"{seed}/late/{rollout_id}".encode()) % 20 == 0


def _is_reset(seed: int, rollout_id: str) -> bool:
    return crc32(f"{seed}/reset/{rollout_id}".encode()) % 30 == 0


def sampled(calls: list[Call]) -> int:
    """Ids that were sampled, as a build counts them: of two contents of one call, one."""
    total = 0
    for call in calls:
        entries = call.entries[:1] if call.kind == "conflict" else call.entries
        total += sum(len(entry.generation_token_ids) for entry in entries)
    return total


# ---- the writer


async def write_rollout(
    store: FileStore, seed: int, rollout_id: str, problems: list[str], finished: Callable[[], None]
) -> int:
    """Say everything that belongs to a rollout, with what is retried and reset on the way; how many calls it were."""
    if _is_reset(seed, rollout_id):
        await _attempt_that_is_reset(store, seed, rollout_id, problems)
    count = 0
    for call in plan_of(seed, rollout_id):
        await _say(store, rollout_id, call, problems)
        count += 1
    await store.finish(rollout_id, {"reward": count})
    finished()
    if has_late_mark(seed, rollout_id):
        await asyncio.sleep(crc32(rollout_id.encode()) % 100 / 200)
        await store.mark_incomplete(rollout_id, LATE)
    return count


async def _say(store: FileStore, rollout_id: str, call: Call, problems: list[str]) -> None:
    if call.begun:
        await store.begin_call(rollout_id, call.name, CHOICES if call.kind == "many" else 1)
    if call.kind == "many":
        await store.put_many(call.entries)
    elif call.entries:
        await store.put(call.entries[0])
    if call.kind == "conflict":
        try:
            await store.put(call.entries[1])
            problems.append(f"{rollout_id}, {call.name}: another content was taken without a word")
        except ConflictError:
            pass
    elif call.kind == "aborted":
        await store.settle_call(rollout_id, call.name, "aborted")
    elif call.kind == "no_generation":
        await store.settle_call(rollout_id, call.name, "no_generation")
    elif call.kind == "lost":
        await store.mark_incomplete(rollout_id, call.name)
    if call.kind == "put":
        await store.note_delivery(rollout_id, call.name, "full")
        if len(call.entries[0].generation_token_ids) % 10 == 0:
            await store.put(call.entries[0])  # a retry: nothing changes


async def _attempt_that_is_reset(store: FileStore, seed: int, rollout_id: str, problems: list[str]) -> None:
    """An attempt that ends with calls in flight; what they say afterwards must change nothing."""
    stragglers = [
        TokenEntry(rollout_id, f"straggler-{call.name}", entry.prompt_token_ids, [1], [-1.0])
        for call in plan_of(seed, rollout_id)
        for entry in call.entries[:1]
    ]
    for entry in stragglers:
        await store.begin_call(rollout_id, entry.model_call_id)
    await store.reset(rollout_id)
    for entry in stragglers:
        for say in (
            functools.partial(store.put, entry),
            functools.partial(store.settle_call, rollout_id, entry.model_call_id, "lost"),
        ):
            try:
                await say()
                problems.append(f"{rollout_id}, {entry.model_call_id}: was heard after its attempt was reset")
            except StaleAttemptError:
                pass


# ---- what a consumer must find


def differences(seed: int, snapshot: Snapshot) -> list[str]:
    """What a snapshot shows that is not what was said; nothing is the result that it should have."""
    name = snapshot.rollout_id
    calls = list(plan_of(seed, name))
    found: list[str] = []
    outcomes = {call.model_call_id: call.outcome for call in snapshot.calls}
    late = outcomes.pop(LATE, None)
    if late is not None and not has_late_mark(seed, name):
        found.append(f"{name}: a late mark that nobody made")
    if outcomes != {call.name: call.outcome for call in calls}:
        found.append(f"{name}: outcomes {outcomes}, expected { {call.name: call.outcome for call in calls} }")
    if snapshot.damage or not snapshot.finished or snapshot.meta != {"reward": len(calls)}:
        found.append(f"{name}: damage {snapshot.damage}, finished {snapshot.finished}, meta {snapshot.meta}")
    stored: dict[str, list[TokenEntry]] = {}
    for entry in snapshot.entries:
        stored.setdefault(entry.model_call_id, []).append(entry)
    for call in calls:
        there = sorted(stored.pop(call.name, []), key=lambda entry: entry.choice_index)
        same = (
            there[0] in call.entries and len(there) == 1 if call.kind == "conflict" and there else there == call.entries
        )
        if not same:
            found.append(f"{name}, {call.name} ({call.kind}): {len(there)} entries, not those that were put")
    if stored:
        found.append(f"{name}: entries of {', '.join(stored)}, which were never put")
    return found
