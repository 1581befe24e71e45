"""What can be done to a rollout: one class per operation, one method per column of the state table.

| method | the rollout is |
|---|---|
| `apply` | absent or open: add frames to the batch, or nothing for a repetition |
| `apply_late` | frozen: add frames and say whether an outcome changes, or write a note |
| `apply_retired` | retired: write a note, or refuse |

An operation that must raise after its record is durable leaves the error in `verdict`. Everything here runs under the
fence of the rollout.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ..content import encode_content
from ..entry import TokenEntry, identical
from ..errors import ConflictError, FrozenError, RetiredError, StaleAttemptError, TokcapError
from ..protocol import Delivered, RolloutState, SettledOutcome
from .attempts import Attempts
from .batch import Batch
from .frame import GROUP_CONTINUES, Kind
from .ledger import Call
from .notes import Notes
from .open_log import OpenLog
from .prefix import NO_PARENT, Node
from .records import (
    NO_BASE,
    BeginRecord,
    DeliveryRecord,
    FinishRecord,
    SettleRecord,
    encode_entry,
)

__all__ = ("Begin", "Deliver", "Finish", "Operation", "Put", "RecordOperation", "Settle", "boot_clock")


def boot_clock() -> int:
    """CLOCK_BOOTTIME in nanoseconds: counts on while the machine sleeps, never set back."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Operation:
    """Something to be done to one rollout, by whoever serves its queue."""

    __slots__ = ("counted", "deadline", "error", "nbytes", "result", "rollout_id", "waiter")

    creates = False
    """Whether it makes a rollout that is absent."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiter: Any = None
        self.deadline = 0.0
        self.nbytes = 0
        """What it holds in memory until it is done, roughly."""
        self.counted = False
        """Whether `nbytes` is part of what waits for the disk."""

    def take_error(self) -> BaseException | None:
        """Its error, for whoever raises it. Kept here, too, it would hold itself, and entries, until a collection."""
        error, self.error = self.error, None
        return error


class RecordOperation(Operation):
    """An operation that says something in the log."""

    __slots__ = ("attempts", "verdict")

    creates = True
    begins = False
    """Whether it is refused while a freeze waits for open calls."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(rollout_id)
        self.verdict: TokcapError | None = None
        self.attempts: Attempts | None = None

    @property
    def calls(self) -> Sequence[str]:
        """The calls it speaks of."""
        return ()

    def check_attempt(self, state: RolloutState, incarnation: str) -> None:
        """Refuse what belongs to an earlier life of the rollout id."""
        for call in self.calls:
            began = self.attempts.incarnation(self.rollout_id, call) if self.attempts is not None else None
            if began is not None and (state == "absent" or incarnation != began):
                self._end_calls()
                raise StaleAttemptError(
                    f"rollout {self.rollout_id}, call {call}: the rollout was reset since this call began; "
                    "nothing was stored, drop the answer"
                )

    def done(self, incarnation: str) -> None:
        """It is durable, in this incarnation."""
        self._end_calls()

    def _end_calls(self) -> None:
        """Nothing more is expected of its calls: they are not remembered for ever."""
        if self.attempts is not None:
            for call in self.calls:
                self.attempts.ended(self.rollout_id, call)

    def take_verdict(self) -> None:
        """Its record is durable: now it may raise."""
        self.error, self.verdict = self.verdict, None

    def apply(self, log: OpenLog, batch: Batch) -> None:
        raise NotImplementedError

    def apply_late(self, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        """On a frozen rollout; True if frames were added that change an outcome."""
        raise self.frozen()

    def apply_retired(self, notes: Notes) -> None:
        self._end_calls()
        raise RetiredError(
            f"rollout {self.rollout_id} was consumed and retired; nothing was stored: drop it, or reset the rollout to "
            "use its id again"
        )

    def frozen(self) -> FrozenError:
        return FrozenError(
            f"rollout {self.rollout_id} is frozen; {type(self).__name__.lower()} of {', '.join(self.calls) or 'it'} "
            "came too late and nothing was stored: drop it, or reset the rollout to use its id again"
        )


class Put(RecordOperation):
    """Store entries; those of one call become durable together or not at all."""

    __slots__ = ("contents", "entries", "require_intent")

    def __init__(self, entries: Sequence[TokenEntry], contents: Sequence[bytes], *, require_intent: bool) -> None:
        super().__init__(entries[0].rollout_id)
        self.entries = entries
        self.contents = contents
        """Encoded by whoever makes this: the caller may change a dict of the entry as soon as it has control again."""
        self.require_intent = require_intent

    @property
    def calls(self) -> Sequence[str]:
        if len(self.entries) == 1:
            return (self.entries[0].model_call_id,)
        return list(dict.fromkeys(entry.model_call_id for entry in self.entries))

    def apply(self, log: OpenLog, batch: Batch) -> None:
        if self.require_intent:
            self._check_intents(log)
        if len(self.entries) == 1 and (self.calls[0], self.entries[0].choice_index) not in log.ledger.contents:
            add_entry(log, batch, self.entries[0], self.contents[0], 0)
            return
        fresh: list[int] = []
        for position, entry in enumerate(self.entries):
            known = self._compare(log, entry, fresh)
            if known in ("other", "evidence"):
                self.verdict = self._conflict(entry)
            if known in ("new", "other"):
                fresh.append(position)
        for position in fresh:
            entry = self.entries[position]
            more = position != fresh[-1] and self.entries[position + 1].model_call_id == entry.model_call_id
            add_entry(log, batch, entry, self.contents[position], GROUP_CONTINUES if more else 0)

    def apply_late(self, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        others: list[int] = []
        for position, entry in enumerate(self.entries):
            known = self._compare(log, entry, others)
            if known == "same":
                continue
            self.verdict = self.frozen() if known == "new" else self._frozen_conflict(entry)
            if known == "other":
                others.append(position)
        call = log.ledger.calls.get(self.entries[0].model_call_id)
        changed = bool(others) and call is not None and call.outcome != "conflict"
        for position in others:
            add_entry(log, batch, self.entries[position], self.contents[position], 0)
        return changed

    def _check_intents(self, log: OpenLog) -> None:
        for name in self.calls:
            call = log.ledger.calls.get(name)
            if call is None or not call.writer:
                raise StaleAttemptError(
                    f"rollout {self.rollout_id}, call {name}: no begin_call in the current incarnation; "
                    "nothing was stored. Call begin_call first (this store was opened with require_intent=True)"
                )

    def _compare(self, log: OpenLog, entry: TokenEntry, before: Sequence[int]) -> str:
        """What is stored for this identity; `before`: positions of entries that this put adds in front of it.

        `new`: nothing. `same`: this came first, so that the put is a repetition. `evidence`: this came second, after
        another content, and is kept already. `other`: only other contents.
        """
        choice = entry.choice_index
        known = log.ledger.contents.get((entry.model_call_id, choice), ())
        own = [self.entries[position] for position in before if self.entries[position].choice_index == choice]
        if not known and not own:
            return "new"
        stored = itertools.chain(map(log.reader.entry, known), own)
        first = next((place for place, other in enumerate(stored) if identical(entry, other)), None)
        return "other" if first is None else "evidence" if first else "same"

    def _conflict(self, entry: TokenEntry) -> ConflictError:
        return ConflictError(
            f"rollout {self.rollout_id}, call {entry.model_call_id}, choice {entry.choice_index}: another content is "
            "already stored; both are kept as evidence and the call is marked as a conflict; give each model call an "
            "id of its own"
        )

    def _frozen_conflict(self, entry: TokenEntry) -> FrozenError:
        return FrozenError(
            f"rollout {self.rollout_id} is frozen; put of {entry.model_call_id}, choice {entry.choice_index}, came too "
            "late and its content is not the one that is stored: the call is marked as a conflict, freeze again to see"
        )


def add_entry(log: OpenLog, batch: Batch, entry: TokenEntry, contents: bytes, flags: int) -> None:
    """One ENTRY frame: the prompt as what it adds to the call that it shares most with."""
    nodes = log.ledger.nodes
    parent, shared = log.search.find(entry.prompt_token_ids)
    base, base_crc = NO_BASE, 0
    if parent != NO_PARENT:
        base, base_crc = nodes[parent].sequence, nodes[parent].body_crc
    body, head = encode_entry(entry, contents, at=boot_clock(), base=base, base_crc=base_crc, shared=shared)
    place = batch.add(Kind.ENTRY, body, flags)
    prompt = len(entry.prompt_token_ids)
    node = Node(
        log.number,
        place.sequence,
        place.body_start,
        place.body_length,
        place.body_crc,
        parent,
        shared,
        prompt,
        prompt + head.generated,
    )
    index = log.ledger.entry(head, node, log.boot_id)
    log.search.add(index, entry.prompt_token_ids, entry.generation_token_ids)
    log.reader.written(place.sequence, index, entry)


class Begin(RecordOperation):
    """A durable intent: written before generation, so that a call that never came back still shows."""

    __slots__ = ("choices", "digests", "idempotency_key", "model_call_id", "retry_count", "writer")

    def __init__(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int,
        writer: str,
        retry_count: int,
        idempotency_key: str,
        digests: bytes,
    ) -> None:
        super().__init__(rollout_id)
        self.model_call_id, self.choices, self.writer = model_call_id, choices, writer
        self.retry_count, self.idempotency_key, self.digests = retry_count, idempotency_key, digests

    @property
    def calls(self) -> Sequence[str]:
        return (self.model_call_id,)

    begins = True

    def check_attempt(self, state: RolloutState, incarnation: str) -> None:
        """A call may begin in any life of its rollout."""

    def done(self, incarnation: str) -> None:
        if self.attempts is not None:
            self.attempts.began(self.rollout_id, self.model_call_id, incarnation)

    def apply(self, log: OpenLog, batch: Batch) -> None:
        call = log.ledger.calls.get(self.model_call_id)
        if call is not None and call.writer:
            return
        if log.closing:
            raise FrozenError(
                f"rollout {self.rollout_id} is being frozen; call {self.model_call_id} was not begun, don't generate"
            )
        base, shared = log.ledger.share_digests(self.digests) if self.digests else (NO_BASE, 0)
        record = BeginRecord(
            self.model_call_id,
            boot_clock(),
            self.choices,
            self.writer,
            self.retry_count,
            self.idempotency_key,
            base,
            shared,
            self.digests[shared * 16 :],
        )
        place = batch.add_record(Kind.BEGIN, record)
        log.ledger.begin(record, place.sequence, log.boot_id)


class Settle(RecordOperation):
    """How a call ended without an entry, or in spite of one."""

    __slots__ = ("detail", "model_call_id", "outcome")

    def __init__(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str) -> None:
        super().__init__(rollout_id)
        self.model_call_id, self.outcome, self.detail = model_call_id, outcome, detail

    @property
    def calls(self) -> Sequence[str]:
        return (self.model_call_id,)

    def record(self) -> SettleRecord:
        return SettleRecord(self.model_call_id, boot_clock(), self.outcome, self.detail)

    def apply(self, log: OpenLog, batch: Batch) -> None:
        call = log.ledger.calls.get(self.model_call_id)
        if call is not None and getattr(call, self.outcome):
            return
        record = self.record()
        batch.add_record(Kind.SETTLE, record)
        log.ledger.settle(record, log.boot_id)

    def apply_late(self, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        call = log.ledger.calls.get(self.model_call_id)
        if call is not None and getattr(call, self.outcome):
            return False
        before = None if call is None else call.outcome
        after = msgspec.structs.replace(call) if call is not None else Call(self.model_call_id)
        setattr(after, self.outcome, True)
        if after.outcome == before:
            notes.add(Kind.SETTLE, self.record())
            return False
        self.apply(log, batch)
        return True

    def apply_retired(self, notes: Notes) -> None:
        notes.add(Kind.SETTLE, self.record())


class Deliver(RecordOperation):
    """How much of an answer the client received; never makes a new version."""

    __slots__ = ("delivered", "model_call_id")

    def __init__(self, rollout_id: str, model_call_id: str, delivered: Delivered) -> None:
        super().__init__(rollout_id)
        self.model_call_id, self.delivered = model_call_id, delivered

    creates = False

    @property
    def calls(self) -> Sequence[str]:
        return (self.model_call_id,)

    def done(self, incarnation: str) -> None:
        """It ends no call."""

    def record(self) -> DeliveryRecord:
        return DeliveryRecord(self.model_call_id, boot_clock(), self.delivered)

    def apply(self, log: OpenLog, batch: Batch) -> None:
        call = log.ledger.calls.get(self.model_call_id)
        if call is None or call.delivered == self.delivered:
            return  # of a call that nobody knows there is nothing to say
        record = self.record()
        batch.add_record(Kind.DELIVERY, record)
        log.ledger.delivery(record)

    def apply_late(self, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        call = log.ledger.calls.get(self.model_call_id)
        if call is None:
            return False
        for note in notes.read():
            if isinstance(note, DeliveryRecord):
                log.ledger.delivery(note)
        if call.delivered != self.delivered:
            notes.add(Kind.DELIVERY, self.record())
        return False

    def apply_retired(self, notes: Notes) -> None:
        notes.add(Kind.DELIVERY, self.record())


class Finish(RecordOperation):
    """What the owner of the rollout leaves for its consumer; a later one replaces an earlier one."""

    __slots__ = ("finished_at", "meta")

    def __init__(self, rollout_id: str, meta: dict[str, Any]) -> None:
        super().__init__(rollout_id)
        self.meta = encode_content(meta)
        self.finished_at = time.time()

    def _is_known(self, log: OpenLog) -> bool:
        known = log.ledger.finish
        return known is not None and bytes(known.meta) == self.meta

    def apply(self, log: OpenLog, batch: Batch) -> None:
        if self._is_known(log):
            return
        record = FinishRecord(boot_clock(), self.finished_at, msgspec.Raw(self.meta))
        batch.add_record(Kind.FINISH, record)
        log.ledger.finish = record

    def apply_late(self, log: OpenLog, batch: Batch, notes: Notes) -> bool:
        if self._is_known(log):
            return False
        raise self.frozen()
