"""The ledger: what is known of every call of a rollout, folded from the frames of its log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import msgspec
import numpy as np

from ..protocol import Delivered, Outcome
from .prefix import Node, common_prefix
from .records import NO_BASE, BeginRecord, DeliveryRecord, EntryHead, FinishRecord, SettleRecord

__all__ = (
    "RECORD_UNSOUND",
    "SEGMENT_MISSING",
    "Call",
    "Damage",
    "DamageKind",
    "DigestChain",
    "Ledger",
    "segments_missing",
)

_DIGEST_SIZE = 16
_DIGEST_LEAVES = 64
"""Requests that a new one is compared with: the last of each conversation, and those that did not go on."""


class DigestChain(Sequence[bytes]):
    """Request digests of one call: what it shares with an earlier one, and its own. Made when asked."""

    __slots__ = ("_made", "own", "parent", "shared")

    def __init__(self, own: bytes, parent: DigestChain | None = None, shared: int = 0) -> None:
        self.own, self.parent, self.shared = own, parent, shared
        self._made: tuple[bytes, ...] | None = None

    def own_digests(self) -> Iterator[bytes]:
        """Those that it doesn't share, in order: from position `shared` on."""
        return (self.own[i : i + _DIGEST_SIZE] for i in range(0, len(self.own), _DIGEST_SIZE))

    def joined(self) -> bytes:
        """All digests in one piece."""
        parts: list[bytes] = []
        chain: DigestChain | None = self
        end = len(self) * _DIGEST_SIZE
        while chain is not None and end > 0:
            begin = chain.shared * _DIGEST_SIZE
            if end > begin:
                parts.append(chain.own[: end - begin])
                end = begin
            chain = chain.parent
        return b"".join(reversed(parts))

    def _all(self) -> tuple[bytes, ...]:
        if self._made is None:
            joined = self.joined()
            self._made = tuple(joined[i : i + _DIGEST_SIZE] for i in range(0, len(joined), _DIGEST_SIZE))
        return self._made

    def __len__(self) -> int:
        return self.shared + len(self.own) // _DIGEST_SIZE

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        return self._all()[index]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (Sequence, DigestChain)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return f"<{len(self)} request digests>"


_NO_DIGESTS = DigestChain(b"")


DamageKind = Literal["bytes", "record", "missing"]
"""bytes: they are not what was written. record: they are, and can't be decoded. missing: the file isn't there."""

# Manifests keep these sentences, and `Damage.kind` is read from them: a later version has to know these, too.
SEGMENT_MISSING = "the segment file is missing"
RECORD_UNSOUND = "the checksum holds but the record doesn't"
_UP_TO, _ARE_MISSING = "the segment files up to ", " are missing"


def segments_missing(last: int) -> str:
    """`SEGMENT_MISSING` of several, up to number `last`."""
    return f"{_UP_TO}{last:06d}{_ARE_MISSING}"


class Damage(msgspec.Struct, frozen=True):
    """Bytes that were durable and can't be read any more."""

    path: str
    offset: int
    end: int
    reason: str

    @property
    def kind(self) -> DamageKind:
        """What sort of damage it is, as its reason says: a manifest keeps nothing else of it."""
        if self.reason.startswith(RECORD_UNSOUND):
            return "record"
        several = self.reason.startswith(_UP_TO) and self.reason.endswith(_ARE_MISSING)
        return "missing" if several or self.reason == SEGMENT_MISSING else "bytes"

    def __str__(self) -> str:
        return f"{self.path}: bytes {self.offset}..{self.end}: {self.reason}"


class Call(msgspec.Struct, gc=False):
    """Every statement that the log makes about one call."""

    model_call_id: str
    choices: int = 1
    boot_id: str = ""
    begun_at: int | None = None
    """Nanoseconds of CLOCK_BOOTTIME."""
    ended_at: int | None = None
    writer: str = ""
    stored: int = 0
    """Choices with a readable entry."""
    conflict: bool = False
    aborted: bool = False
    lost: bool = False
    no_generation: bool = False
    delivered: Delivered = "unknown"
    retry_count: int = 0
    idempotency_key: str = ""
    digests: DigestChain = _NO_DIGESTS
    details: dict[str, str] = {}

    @property
    def outcome(self) -> Outcome:
        """The first that holds of conflict, aborted, recorded, lost, no_generation, open (contract, section 4)."""
        if self.conflict:
            return "conflict"
        if self.aborted:
            return "aborted"
        if self.stored and self.stored >= self.choices:
            return "recorded"
        if self.lost or (self.no_generation and self.stored):
            # Some choices are stored, so "nothing was sampled" is wrong, and the others are missing.
            return "lost"
        return "no_generation" if self.no_generation else "open"

    def fields(self) -> tuple[str, Outcome, str, float | None, float | None, Delivered, int, str, str]:
        """Of its `CallRecord`, all but the request digests, in their order."""
        outcome = self.outcome
        return (
            self.model_call_id,
            outcome,
            self.boot_id,
            None if self.begun_at is None else self.begun_at / 1e9,
            None if self.ended_at is None or outcome == "open" else self.ended_at / 1e9,
            self.delivered,
            self.retry_count,
            self.idempotency_key,
            self.details.get(outcome, ""),
        )


EntryKey = tuple[str, int]


class Ledger:
    """Calls, entries and notes of one incarnation, in the order of the log."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.nodes: list[Node] = []
        self.contents: dict[EntryKey, list[int]] = {}
        """Nodes of each entry: one, or several different ones where the call is in conflict."""
        self.finish: FinishRecord | None = None
        self.damage: list[Damage] = []
        self._digest_chains: dict[int, DigestChain] = {}
        """By BEGIN frame, of the segment being read or written: what another one may refer to."""
        self._digest_leaves: dict[int, bytes | None] = {}
        """Those that a next request may repeat, most recently used last, each in one piece once that was asked for."""

    def call(self, model_call_id: str) -> Call:
        call = self.calls.get(model_call_id)
        if call is None:
            call = self.calls[model_call_id] = Call(model_call_id)
        return call

    # ---- one frame each

    def begin(self, record: BeginRecord, frame_sequence: int, boot_id: str) -> None:
        """Raises `msgspec.DecodeError` for digests that can't be."""
        parent = self._digest_chains.get(record.digests_base)
        most = 0 if parent is None else len(parent)
        if (
            record.digests_shared < 0
            or len(record.digests) % _DIGEST_SIZE
            or (parent is not None and record.digests_shared > most)
        ):
            raise msgspec.ValidationError("request digests that can't be")
        call = self.call(record.model_call_id)
        if parent is None and record.digests_shared:
            chain = _NO_DIGESTS  # the frame that they repeat is damaged
        else:
            chain = DigestChain(record.digests, parent, record.digests_shared)
        if call.begun_at is None:
            call.choices, call.writer = record.choices, record.writer
            call.boot_id, call.begun_at = boot_id, record.at
            call.retry_count, call.idempotency_key = record.retry_count, record.idempotency_key
            call.digests = chain
        if len(chain):
            self._add_digests(frame_sequence, chain, record.digests_base)

    def entry(self, head: EntryHead, node: Node, boot_id: str) -> int:
        """Add an entry; the caller has made sure that it differs from those of the same identity."""
        index = len(self.nodes)
        self.nodes.append(node)
        contents = self.contents.setdefault((head.model_call_id, head.choice_index), [])
        contents.append(index)
        call = self.call(head.model_call_id)
        if len(contents) == 1:
            call.stored += 1
        else:
            call.conflict = True
        self._ended(call, head.at, boot_id)
        return index

    def forget(self, key: EntryKey) -> None:
        """Of this choice nothing can be read after all."""
        del self.contents[key]
        call = self.call(key[0])
        call.stored -= 1
        call.lost = True

    def settle(self, record: SettleRecord, boot_id: str) -> None:
        call = self.call(record.model_call_id)
        setattr(call, record.outcome, True)
        if record.detail:
            call.details = {**call.details, record.outcome: record.detail}
        self._ended(call, record.at, boot_id)

    def delivery(self, record: DeliveryRecord) -> None:
        call = self.calls.get(record.model_call_id)
        if call is not None:
            call.delivered = record.delivered

    def lose(self, head: EntryHead, why: Damage) -> None:
        """An entry whose frame is whole but whose prompt runs through damage."""
        call = self.call(head.model_call_id)
        call.lost = True
        call.details = {**call.details, "lost": f"its prompt runs through damage in {why}"}

    def _ended(self, call: Call, at: int, boot_id: str) -> None:
        if call.begun_at is not None and call.boot_id != boot_id:
            call.begun_at = None  # another boot: the two times can't be compared
        call.boot_id, call.ended_at = boot_id, at

    # ---- request digests

    def segment_started(self) -> None:
        """Frames of the next segment refer to nothing before it."""
        self._digest_chains.clear()
        self._digest_leaves.clear()

    @property
    def digest_bytes(self) -> int:
        """What is held in memory to compare requests with."""
        if not self._digest_leaves:
            return 0
        return sum(len(joined) for joined in self._digest_leaves.values() if joined is not None)

    def _add_digests(self, frame_sequence: int, chain: DigestChain, base: int) -> None:
        joined = None
        if base in self._digest_leaves:
            known = self._digest_leaves.pop(base)
            if chain.shared < len(self._digest_chains[base]):
                self._digest_leaves[base] = known  # not its continuation: both may go on
            if known is not None:
                joined = known[: chain.shared * _DIGEST_SIZE] + chain.own
        self._digest_chains[frame_sequence] = chain
        self._digest_leaves[frame_sequence] = joined
        if len(self._digest_leaves) > _DIGEST_LEAVES:
            del self._digest_leaves[next(iter(self._digest_leaves))]

    def share_digests(self, digests: bytes) -> tuple[int, int]:
        """The BEGIN frame that shares most leading digests with these, and how many; `(NO_BASE, 0)` if none."""
        best, most = NO_BASE, 0
        wanted = np.frombuffer(digests, np.uint8)
        for frame_sequence, joined in reversed(self._digest_leaves.items()):
            if joined is None:
                joined = self._digest_leaves[frame_sequence] = self._digest_chains[frame_sequence].joined()
            next_digest = slice(most * _DIGEST_SIZE, (most + 1) * _DIGEST_SIZE)
            if joined[next_digest] != digests[next_digest]:
                continue  # it can't share more than the best so far
            shared = common_prefix(wanted, np.frombuffer(joined, np.uint8)) // _DIGEST_SIZE
            if shared > most:
                best, most = frame_sequence, shared
        return best, most

    # ---- the whole

    @property
    def incomplete(self) -> bool:
        """A call is lost, open or in conflict, or damage was found."""
        return bool(self.damage) or any(c.outcome in ("lost", "open", "conflict") for c in self.calls.values())
