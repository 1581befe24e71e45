"""Broken stores that don't open, close, name or answer things as a sink and a source should."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from typing import Any, ClassVar, cast

from tokcap import TokenEntry
from tokcap.protocol import SettledOutcome

from .broken_stores import Case
from .memory_store import MemorySnapshot, MemoryState, MemoryStore, Rollout


class RepairsIds(MemoryStore):
    """Ids are stripped before they are checked, so that two ids mean one rollout."""

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        return await super().freeze(rollout_id.strip())


class PutsWithoutACoroutine(MemoryStore):
    """put is a plain function that does its work at once: the caller's await fails after the record was stored."""

    def put(self, entry: TokenEntry) -> None:  # type: ignore[override]
        self._put([entry])


class ClosesOnce(MemoryStore):
    """A second close is an error, on the way out of a server that closes twice."""

    async def close(self) -> None:
        if self.closed == "closed":
            raise RuntimeError("already closed")
        await super().close()


class SharesOneInstance(MemoryStore):
    """The client is kept per address and handed out again: several processes are tested as one."""

    made: ClassVar[list[MemoryStore]] = []

    def __new__(cls, state: MemoryState) -> SharesOneInstance:
        for instance in cls.made:
            if instance.state is state:
                return cast(SharesOneInstance, instance)
        cls.made.append(super().__new__(cls))
        cls.made[-1].state = state
        return cast(SharesOneInstance, cls.made[-1])


class ClosesTheSharedConnection(MemoryStore):
    """All instances of a process share one connection, and the first that is closed closes it for all."""

    opened: ClassVar[list[MemoryStore]] = []

    def __init__(self, state: MemoryState) -> None:
        super().__init__(state)
        self.opened.append(self)

    async def close(self) -> None:
        for instance in self.opened:
            if instance.state is self.state:
                instance.closed = instance.closed or "closed"
        self.opened.clear()
        await super().close()


class QueuesAfterClose(MemoryStore):
    """close stops the thread that writes; put goes on filling its queue and returns."""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        if self.closed != "closed":
            await super().put_many(entries)


class RepairsIdsOfCalls(MemoryStore):
    """begin_call and settle_call make a file name of whatever they are given; only the rest checks it."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await super().begin_call(_repaired(rollout_id), _repaired(model_call_id), choices)

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        await super().settle_call(_repaired(rollout_id), _repaired(model_call_id), outcome, detail)


def _repaired(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:200] or "unnamed"


# ---- without cases


class HangsOnMarks(MemoryStore):
    """mark_incomplete waits for a lock that its own process holds."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await asyncio.Event().wait()


class BlocksTheLoop(MemoryStore):
    """mark_incomplete takes a lock that another task of the same loop holds, with a blocking call."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        time.sleep(60.0)


class SwallowsCancellation(MemoryStore):
    """A retry loop that catches everything, so that a caller's time-out never ends it."""

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        while not self.closed:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                continue


class KeepsNothing(MemoryStore):
    """A stub that was meant to be replaced: every operation succeeds, and nothing is kept."""

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        pass

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        pass

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        pass

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        pass

    async def freeze(self, rollout_id: str) -> MemorySnapshot:
        return MemorySnapshot(rollout_id, Rollout(version=1))

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def reset(self, *rollout_ids: str) -> None:
        pass


CASES = [
    Case(RepairsIds, {"invalid_ids_are_refused"}, r"freeze('call\n')", exact=True),
    Case(PutsWithoutACoroutine, {"sink_and_source_have_the_protocol_methods"}, "call put"),
    Case(ClosesOnce, {"close_is_idempotent"}, "already closed"),
    Case(
        SharesOneInstance,
        {"factories_give_a_new_instance_each_time", "closing_one_instance_leaves_the_others_usable"},
        "the same SharesOneInstance twice",
    ),
    Case(
        ClosesTheSharedConnection,
        {"closing_one_instance_leaves_the_others_usable", "a_chain_written_by_several_sinks_comes_back_exact"},
        "this store has closed",
    ),
    Case(
        QueuesAfterClose,
        {"a_put_after_close_is_refused_or_stored"},
        "put through the closed sink, freeze",
        exact=True,
    ),
    Case(
        RepairsIdsOfCalls,
        {"invalid_ids_are_refused_by_begin_and_settle"},
        "did: begin_call('', 'call')\nexpected: ValueError",
        exact=True,
    ),
]
