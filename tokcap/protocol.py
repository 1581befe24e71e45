"""The two sides of a store, and what passes between them.

A `TokenSink` is where a serving process writes; a `TokenSource` is where a consumer on the same node freezes, reads
and retires. `FileStore` is both. Other transports implement these protocols and check themselves with
`tokcap.conformance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from .entry import TokenEntry

__all__ = (
    "CallRecord",
    "Delivered",
    "Outcome",
    "Pending",
    "RolloutState",
    "SettledOutcome",
    "TokenCaptureSnapshot",
    "TokenSink",
    "TokenSource",
)

Outcome = Literal["recorded", "no_generation", "aborted", "lost", "conflict", "open"]
"""How a model call ended. When several things were said of one call, the first of
conflict, aborted, recorded, lost, no_generation, open holds."""

SettledOutcome = Literal["no_generation", "aborted", "lost"]
"""What `settle_call` may say. `no_generation` only on proof that nothing was sampled."""

Delivered = Literal["full", "partly", "no", "unknown"]
"""How much of the answer the client received."""

RolloutState = Literal["absent", "open", "frozen", "retired"]


class Pending(msgspec.Struct, frozen=True):
    """What a sink has taken in that is not durable yet. One that counts this shows it as its property `pending`."""

    operations: int
    bytes: int
    waiting: int = 0
    """Puts that wait for room among these."""


class CallRecord(msgspec.Struct, frozen=True):
    """One model call of a rollout, answered or not."""

    model_call_id: str
    """Empty for a lost call that nobody could name: `mark_incomplete(rollout_id)`, or damage."""
    outcome: Outcome
    boot_id: str = ""
    """Of the kernel that `begun_at` and `ended_at` count from; times compare only within one boot id."""
    begun_at: float | None = None
    """CLOCK_BOOTTIME seconds of `begin_call`; None without one."""
    ended_at: float | None = None
    """CLOCK_BOOTTIME seconds of the last put or settlement; None while open."""
    delivered: Delivered = "unknown"
    retry_count: int = 0
    idempotency_key: str = ""
    request_digests: Sequence[bytes] = ()
    """16 bytes per message of the request, over role, canonical content and tool calls."""
    detail: str = ""
    """Why, in words: the reason of a loss, or the file and offset of damage."""


@runtime_checkable
class TokenCaptureSnapshot(Protocol):
    """One frozen rollout. Readable until it is closed, also after its rollout was retired or reset."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def entries(self) -> Sequence[TokenEntry]:
        """Immutable, one per (model_call_id, choice_index); the order carries no meaning."""
        ...

    @property
    def incomplete(self) -> bool:
        """True if a call is lost, open or in conflict, or if damage was found."""
        ...

    @property
    def snapshot_id(self) -> str:
        """32 hex digits, random, the same for every version of one incarnation."""
        ...

    @property
    def version(self) -> int:
        """From 1; 0 for an unfrozen look."""
        ...

    @property
    def calls(self) -> Sequence[CallRecord]: ...

    def close(self) -> None:
        """Give back what the snapshot holds. Repeatable; arrays that were read before stay valid."""
        ...

    def __enter__(self) -> TokenCaptureSnapshot: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class TokenSink(Protocol):
    """Where entries are written. When a method returns, its record is durable.

    Optional, used by the capture layer if they are there:
    `begin_call(rollout_id, model_call_id, choices=1)`, also with any of `request_digests`, `retry_count` and
    `idempotency_key`; `settle_call(rollout_id, model_call_id, outcome, detail="")`, `put_many(entries)`,
    `note_delivery(rollout_id, model_call_id, delivered)`.
    """

    async def put(self, entry: TokenEntry) -> None:
        """Store one entry; when this returns it is durable and every other instance sees it. Repeating it is a no-op.

        Raises `ConflictError` if another content is stored for this call and choice (the conflict is durable before
        that), `FrozenError` and `RetiredError` if the rollout takes nothing any more, `StaleAttemptError` if it was
        reset since `begin_call`. After any other error, and when cancelled, the entry is whole or absent: put it again.
        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """The call happened and its record is lost; an empty call id is one unnamed lost call.

        Accepted in every state: it creates an absent rollout, moves the version of a frozen one if an outcome changes,
        and never revives a retired one. Raises `InvalidIdError`, and `StaleAttemptError` if the rollout was reset since
        `begin_call`.
        """
        ...

    async def close(self) -> None:
        """Let go of this instance only, repeatable. A put afterwards raises or is stored, but is never dropped."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Where a consumer freezes, reads and retires.

    Optional, used by delivery if they are there: `wait_open_s` and `snapshot_id` of `freeze`; `read(rollout_id)`,
    `rollouts()`, `stat(rollout_id)`, `reset(*rollout_ids)`, `sweep(older_than_s)`, as `FileStore` has them.
    """

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Fence the rollout against writers and return its snapshot; the same one when repeated.

        Every put that returned before is in it, none succeeds after. An absent rollout gives an empty snapshot and is
        fenced, too. Raises `InvalidIdError`, and `RetiredError` after `retire`.
        """
        ...

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove exactly this version of this snapshot, after its consumer has it safely.

        True: it is gone, now or since an earlier call with the same pair. False: nothing was touched, because the pair
        is not the current one (a late mark made a newer version, or the id is foreign) or the rollout is absent, open
        or was reset. Raises `InvalidIdError`.
        """
        ...

    async def close(self) -> None:
        """Let go of this instance only, repeatable."""
        ...


class SettlingSink(TokenSink, Protocol):
    """A sink with the optional methods."""

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None: ...
    async def settle_call(
        self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = ""
    ) -> None: ...
    async def put_many(self, entries: Iterable[TokenEntry]) -> None: ...
