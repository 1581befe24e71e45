"""The sink: what serving processes call."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..entry import TokenEntry
from ..protocol import Delivered, SettledOutcome
from .base import StoreBase, raise_first
from .operations import Begin

__all__ = ("SinkMethods",)


class SinkMethods(StoreBase):
    """Everything that says something of a rollout."""

    async def put(self, entry: TokenEntry) -> None:
        """Store one entry; when this returns it is durable and every process on the node sees it.

        Repeating it is a no-op. Raises `ConflictError` (another content is stored for this call; the conflict is
        durable), `FrozenError`, `RetiredError`, `StaleAttemptError`, `BusyError`, `DurabilityError`. Cancelled, it
        is whole or absent, and others are not affected.
        """
        await self._await(self._requests.put((entry,)))

    def put_now(self, entry: TokenEntry) -> None:
        """`put`, blocking."""
        self._call(self._requests.put((entry,)))

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        """Store several entries; the choices of one call become durable together or not at all.

        All are tried; the first error is raised.
        """
        import asyncio

        operations = self._requests.put_many(entries)
        raise_first(await asyncio.gather(*(self._await(o) for o in operations), return_exceptions=True))

    def put_many_now(self, entries: Iterable[TokenEntry]) -> None:
        """`put_many`, blocking."""
        engine = self._running()
        let_in = partial(self._let_in, engine.admission)
        raise_first(engine.call_many(self._requests.put_many(entries), let_in))

    async def begin_call(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int = 1,
        *,
        request_digests: Iterable[bytes] = (),
        retry_count: int = 0,
        idempotency_key: str = "",
    ) -> None:
        """A durable intent, before generation: a call that never comes back then shows as `open`.

        If it raises, don't generate: `FrozenError` (also while a freeze waits), `RetiredError`, `DurabilityError`;
        `NoSpaceError` on a disk that is nearly full, `BusyError` on one that can't follow: try again later.
        request_digests: 16 bytes per message of the request; a repeated history is stored once.
        """
        await self._await(
            self._begin(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key)
        )

    def begin_call_now(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int = 1,
        *,
        request_digests: Iterable[bytes] = (),
        retry_count: int = 0,
        idempotency_key: str = "",
    ) -> None:
        """`begin_call`, blocking."""
        self._call(self._begin(rollout_id, model_call_id, choices, request_digests, retry_count, idempotency_key))

    def _begin(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int,
        request_digests: Iterable[bytes],
        retry_count: int,
        idempotency_key: str,
    ) -> Begin:
        self._running()
        writer = self._liveness.name(rollout_id)
        return self._requests.begin(
            rollout_id, model_call_id, choices, writer, request_digests, retry_count, idempotency_key
        )

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """Say how a call ended that has no entry: `no_generation` (only on proof), `aborted` or `lost`.

        On a frozen rollout it makes a new version if the call's outcome changes; on a retired one it is noted beside
        the tombstone. Raises `InvalidOutcomeError`, `StaleAttemptError`, `BusyError`, `DurabilityError`.
        """
        await self._await(self._requests.settle(rollout_id, model_call_id, outcome, detail))

    def settle_call_now(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        """`settle_call`, blocking."""
        self._call(self._requests.settle(rollout_id, model_call_id, outcome, detail))

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """A call happened and its record is lost; an empty id is one unnamed lost call."""
        await self._await(self._requests.mark(rollout_id, model_call_id))

    def mark_incomplete_now(self, rollout_id: str, model_call_id: str = "") -> None:
        """`mark_incomplete`, blocking."""
        self._call(self._requests.mark(rollout_id, model_call_id))

    async def note_delivery(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """How much of the answer the client received. After a freeze it makes no new version."""
        await self._await(self._requests.deliver(rollout_id, model_call_id, delivered))

    def note_delivery_now(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        """`note_delivery`, blocking."""
        self._call(self._requests.deliver(rollout_id, model_call_id, delivered))

    async def finish(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """A durable note by the owner of the rollout (reward, group ...); the consumer finds it in `snapshot.meta`."""
        await self._await(self._requests.finish(rollout_id, meta))

    def finish_now(self, rollout_id: str, meta: dict[str, Any] | None = None) -> None:
        """`finish`, blocking."""
        self._call(self._requests.finish(rollout_id, meta))
