"""From the arguments of a call to an operation: everything is checked here, before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from ..content import count_unstorable, storable
from ..entry import TokenEntry
from ..errors import InvalidEntryError, InvalidOutcomeError
from ..ids import check_model_call_id, check_rollout_id
from ..protocol import Delivered, SettledOutcome
from .attempts import Attempts
from .operations import Begin, Deliver, Finish, Put, Settle
from .records import encode_contents

__all__ = ("Requests",)

_OUTCOMES = ("no_generation", "aborted", "lost")
_DELIVERED = ("full", "partly", "no", "unknown")
_DIGEST_SIZE = 16


class Requests:
    """Makes the operations of one store object."""

    def __init__(self, *, require_intent: bool, max_entry_bytes: int) -> None:
        self._require_intent, self._max_entry_bytes = require_intent, max_entry_bytes
        self._attempts = Attempts()
        self.unstorable = 0
        """Values without a JSON form that were replaced by their repr."""

    def put(self, entries: Sequence[TokenEntry]) -> Put:
        """Entries of one call."""
        encoded: list[bytes] = []
        nbytes = 0
        for entry in entries:
            if not isinstance(entry, TokenEntry):
                raise InvalidEntryError(f"put takes TokenEntry objects, not {type(entry).__name__}")
            contents = encode_contents(entry)
            size = _size(entry) + len(contents)
            if size > self._max_entry_bytes:
                raise InvalidEntryError(
                    f"rollout {entry.rollout_id}, call {entry.model_call_id}: the entry has {size} bytes, "
                    f"max_entry_bytes is {self._max_entry_bytes}"
                )
            self.unstorable += count_unstorable(contents)
            encoded.append(contents)
            nbytes += size
        operation = Put(entries, encoded, require_intent=self._require_intent)
        operation.nbytes = nbytes
        operation.attempts = self._attempts
        return operation

    def put_many(self, entries: Iterable[TokenEntry]) -> list[Put]:
        """Entries of any calls; one operation for the choices of each call."""
        by_call: dict[tuple[str, str], list[TokenEntry]] = {}
        for entry in entries:
            if not isinstance(entry, TokenEntry):
                raise InvalidEntryError(f"put_many takes TokenEntry objects, not {type(entry).__name__}")
            by_call.setdefault((entry.rollout_id, entry.model_call_id), []).append(entry)
        return [self.put(choices) for choices in by_call.values()]

    def begin(
        self,
        rollout_id: str,
        model_call_id: str,
        choices: int,
        writer: str,
        request_digests: Iterable[bytes],
        retry_count: int,
        idempotency_key: str,
    ) -> Begin:
        where = self._call(rollout_id, model_call_id)
        digests = list(request_digests)
        if any(type(digest) is not bytes or len(digest) != _DIGEST_SIZE for digest in digests):
            raise InvalidEntryError(f"{where}: request_digests must be {_DIGEST_SIZE} bytes each")
        if type(idempotency_key) is not str:
            raise InvalidEntryError(f"{where}: idempotency_key is {idempotency_key!r}, expected a string")
        operation = Begin(
            rollout_id,
            model_call_id,
            _integer(choices, 1, "choices", where),
            writer,
            _integer(retry_count, 0, "retry_count", where),
            _clean(idempotency_key),
            b"".join(digests),
        )
        operation.attempts = self._attempts
        return operation

    def settle(self, rollout_id: str, model_call_id: str, outcome: str, detail: str) -> Settle:
        where = self._call(rollout_id, model_call_id)
        if outcome not in _OUTCOMES:
            raise InvalidOutcomeError(
                f"{where}: outcome is {outcome!r}, settle_call takes {', '.join(_OUTCOMES)} "
                "(an entry that is put makes a call recorded)"
            )
        operation = Settle(rollout_id, model_call_id, cast(SettledOutcome, outcome), _clean(detail))
        operation.attempts = self._attempts
        return operation

    def mark(self, rollout_id: str, model_call_id: str) -> Settle:
        check_rollout_id(rollout_id)
        if model_call_id != "":
            check_model_call_id(model_call_id, rollout_id=rollout_id)
        operation = Settle(rollout_id, model_call_id, "lost", "marked incomplete")
        operation.attempts = self._attempts
        return operation

    def deliver(self, rollout_id: str, model_call_id: str, delivered: str) -> Deliver:
        where = self._call(rollout_id, model_call_id)
        if delivered not in _DELIVERED:
            raise InvalidOutcomeError(f"{where}: delivered is {delivered!r}, expected one of {', '.join(_DELIVERED)}")
        operation = Deliver(rollout_id, model_call_id, cast(Delivered, delivered))
        operation.attempts = self._attempts
        return operation

    def finish(self, rollout_id: str, meta: dict[str, Any] | None) -> Finish:
        check_rollout_id(rollout_id)
        if meta is not None and not isinstance(meta, dict):
            raise InvalidEntryError(f"rollout {rollout_id}: meta is {type(meta).__name__}, expected a dict")
        return Finish(rollout_id, storable(meta or {}))

    def _call(self, rollout_id: str, model_call_id: str) -> str:
        check_rollout_id(rollout_id)
        check_model_call_id(model_call_id, rollout_id=rollout_id)
        return f"rollout {rollout_id}, call {model_call_id}"


def _integer(value: object, least: int, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidEntryError(f"{where}: {name} is {value!r}, expected an integer from {least}")
    return value


def _size(entry: TokenEntry) -> int:
    experts = entry.routed_experts
    size = entry.prompt_token_ids.nbytes + entry.generation_token_ids.nbytes + entry.generation_log_probs.nbytes
    if experts is not None:
        size += experts.nbytes
    return size + sum(map(len, entry.pieces)) if entry.pieces else size


def _clean(text: object) -> str:
    """Words for people: what UTF-8 can't hold is replaced, rather than the statement refused."""
    return str(text).encode("utf-8", "replace").decode()
