"""`TokenEntry`: the training record of one answered model call, or of one choice of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr

from .arrays import FloatArray, IdArray, StoredArray, is_masked, log_prob_array, owned_array, shown, token_id_array
from .content import encode_content, storable
from .errors import InvalidEntryError
from .ids import check_model_call_id, check_rollout_id

__all__ = ("SCHEMA_VERSION", "TokenEntry", "canonical_contents", "content_digest", "contents_of", "identical")

TokenIdsLike: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
LogProbsLike: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating[Any]]

SCHEMA_VERSION = 1
"""Of `TokenEntry` itself: an entry of a newer version is refused, an older one is read."""


class TokenEntry(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """What the engine saw and what the policy sampled, in one model call.

    `(model_call_id, choice_index)` identifies an entry in its rollout. All arrays are read-only and owned: arrays that
    the caller could still write are copied, lists converted, contents deep-copied. Values survive storage exactly.

    Raises `InvalidIdError` for an id, `InvalidEntryError` for anything else that can't be a training record; the
    message names the field and the value.
    """

    rollout_id: str
    model_call_id: str
    prompt_token_ids: IdArray
    """int32 [P]: the ids that the engine was given, as it reports them; never re-tokenised text."""
    generation_token_ids: IdArray
    """int32 [G]: the ids that the policy sampled, the stop token included if the engine reports it."""
    generation_log_probs: FloatArray
    """float64 [G]: natural logs under the behaviour policy. NaN: unknown, never trained on."""
    choice_index: int = 0
    routed_experts: npt.NDArray[Any] | None = None
    """Any dtype and shape (R3 replay); stored as bytes."""
    output_items: list[Any] = msgspec.field(default_factory=list)
    """The content of the answer without token arrays: Responses output items, as dicts."""
    token_item_index: int | None = None
    """Which of `output_items` carried the arrays."""
    model: str = ""
    response_id: str = ""
    """The response id that the client saw."""
    finish_reason: str = ""
    created_at: float = 0.0
    """Unix seconds, for information only."""
    policy_versions: list[Any] = msgspec.field(default_factory=list)
    """Spans `(version, start, end)` over the generation."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """Effective sampling parameters and log-prob mode, where known."""
    pieces: list[bytes] | None = None
    """The bytes of each sampled token, if the engine tells."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    if TYPE_CHECKING:
        # What is taken is wider than what is shown.
        def __init__(
            self,
            rollout_id: str,
            model_call_id: str,
            prompt_token_ids: TokenIdsLike,
            generation_token_ids: TokenIdsLike,
            generation_log_probs: LogProbsLike,
            choice_index: int = 0,
            routed_experts: npt.ArrayLike | None = None,
            output_items: Sequence[Mapping[str, Any]] = (),
            token_item_index: int | None = None,
            model: str = "",
            response_id: str = "",
            finish_reason: str = "",
            created_at: float = 0.0,
            policy_versions: Sequence[Sequence[Any]] = (),
            sampling: Mapping[str, Any] = ...,
            pieces: Sequence[bytes] | None = None,
            extra: Mapping[str, Any] = ...,
            schema_version: int = SCHEMA_VERSION,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.prompt_token_ids) is StoredArray:
            force_setattr(self, "prompt_token_ids", self.prompt_token_ids.view(np.ndarray))
            return
        rollout_id = check_rollout_id(self.rollout_id)
        call_id = check_model_call_id(self.model_call_id, rollout_id=rollout_id)
        where = f"rollout {rollout_id}, call {call_id}"
        put = force_setattr
        # Exact builtins, because subclasses and numpy integers can't be encoded.
        if rollout_id is not self.rollout_id:
            put(self, "rollout_id", rollout_id)
        if call_id is not self.model_call_id:
            put(self, "model_call_id", call_id)
        if type(self.schema_version) is not int or self.schema_version != SCHEMA_VERSION:
            self._own_schema_version(where)
        if type(self.choice_index) is not int or not 0 <= self.choice_index < 2**31:
            self._own_choice_index(where)
        where = f"{where}, choice {self.choice_index}"
        put(self, "prompt_token_ids", token_id_array(self.prompt_token_ids, field="prompt_token_ids", where=where))
        ids = token_id_array(self.generation_token_ids, field="generation_token_ids", where=where)
        log_probs = log_prob_array(self.generation_log_probs, field="generation_log_probs", where=where)
        if len(ids) != len(log_probs):
            raise InvalidEntryError(
                f"{where}: {len(ids)} generation_token_ids but {len(log_probs)} generation_log_probs; "
                "give one log-prob per id, None where it is unknown"
            )
        put(self, "generation_token_ids", ids)
        put(self, "generation_log_probs", log_probs)
        if self.routed_experts is not None:
            put(self, "routed_experts", _routed_experts(self.routed_experts, where))
        for field in ("model", "response_id", "finish_reason"):
            value = getattr(self, field)
            if type(value) is not str:
                if not isinstance(value, str):
                    raise InvalidEntryError(f"{where}: {field} is {shown(value)}, expected a string")
                put(self, field, str.__str__(value))
        if type(self.created_at) is not float or self.created_at != self.created_at:
            put(self, "created_at", _seconds(self.created_at, where))
        if self.pieces is not None:
            put(self, "pieces", _pieces(self.pieces, where))
        self._own_contents(where)

    def _own_schema_version(self, where: str) -> None:
        if not _is_int(self.schema_version) or not 1 <= self.schema_version <= SCHEMA_VERSION:
            raise InvalidEntryError(
                f"{where}: schema_version is {shown(self.schema_version)}; this tokcap reads 1..{SCHEMA_VERSION}, "
                "upgrade it to read newer entries"
            )
        force_setattr(self, "schema_version", int(self.schema_version))

    def _own_choice_index(self, where: str) -> None:
        if not _is_int(self.choice_index) or not 0 <= self.choice_index < 2**31:
            raise InvalidEntryError(f"{where}: choice_index is {shown(self.choice_index)}, expected an integer from 0")
        force_setattr(self, "choice_index", int(self.choice_index))

    def _own_contents(self, where: str) -> None:
        for field, kinds in _CONTENT_FIELDS:
            value = getattr(self, field)
            if type(value) is kinds[0] and not value:
                force_setattr(self, field, kinds[0]())  # the caller may fill his own
                continue
            if not isinstance(value, kinds):
                raise InvalidEntryError(f"{where}: {field} is {type(value).__name__}, expected {kinds[0].__name__}")
            copied = storable(value) if value else kinds[0]()
            # Replaced as a whole, a list is a mapping now, too.
            force_setattr(self, field, copied if isinstance(copied, kinds) else [copied])
        if self.policy_versions:
            spans = [tuple(span) if isinstance(span, list) else span for span in self.policy_versions]
            force_setattr(self, "policy_versions", spans)
        index = self.token_item_index
        if index is None:
            return
        if not _is_int(index) or not 0 <= index < len(self.output_items):
            raise InvalidEntryError(
                f"{where}: token_item_index is {shown(index)}, but there are {len(self.output_items)} output_items"
            )
        force_setattr(self, "token_item_index", int(index))

    def __eq__(self, other: object) -> bool:
        return identical(self, other) if isinstance(other, TokenEntry) else NotImplemented

    def __ne__(self, other: object) -> bool:
        # A Struct that compares by its own __eq__ would still tell `!=` by identity.
        return not identical(self, other) if isinstance(other, TokenEntry) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.rollout_id, self.model_call_id, self.choice_index))

    @property
    def flags(self) -> tuple[str, ...]:
        """What is odd about the log-probs: any of `unknown`, `infinite`, `positive`. They are kept, not refused."""
        log_probs = self.generation_log_probs
        found = (
            ("unknown", np.isnan(log_probs)),
            ("infinite", np.isinf(log_probs)),
            ("positive", log_probs > 0),
        )
        return tuple(name for name, where in found if where.any())


_CONTENT_FIELDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("output_items", (list, tuple)),
    ("policy_versions", (list, tuple)),
    ("sampling", (dict,)),
    ("extra", (dict,)),
)


def identical(one: TokenEntry, other: TokenEntry) -> bool:
    """Equal field by field: ids by value, floats by bit pattern with one canonical NaN, tuple = list."""
    return _scalars(one) == _scalars(other) and all(
        _same_bytes(getattr(one, field), getattr(other, field))
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
    )


def contents_of(entry: TokenEntry) -> list[Any]:
    """Everything of an entry that is neither an array nor needed to find it, in the order in which it is stored."""
    return [
        entry.output_items,
        [list(span) if isinstance(span, tuple) else span for span in entry.policy_versions],
        entry.sampling,
        entry.extra,
        entry.model,
        entry.response_id,
        entry.finish_reason,
        entry.created_at,
        None if entry.token_item_index is None else int(entry.token_item_index),
        int(entry.schema_version),
    ]


def canonical_contents(entry: TokenEntry) -> bytes:
    """`contents_of` an entry, encoded so that equal entries give equal bytes."""
    return encode_content(contents_of(entry), canonical=True)


def content_digest(entry: TokenEntry) -> bytes:
    """16 bytes over everything that makes two entries identical; the smaller of two in conflict is shown."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    experts = entry.routed_experts
    if experts is not None:
        digest.update(repr((experts.dtype.str, experts.shape)).encode() + experts.tobytes())
    digest.update(repr(entry.pieces).encode())
    digest.update(canonical_contents(entry))
    return digest.digest()


def _scalars(entry: TokenEntry) -> tuple[object, ...]:
    return (
        entry.rollout_id,
        entry.model_call_id,
        entry.choice_index,
        entry.pieces,
        canonical_contents(entry),
    )


def _same_bytes(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    # Bit patterns, so that -0.0 is not 0.0 and the one canonical NaN equals itself.
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and (not one.nbytes or bool(np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))))
    )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def _seconds(value: object, where: str) -> float:
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.timedelta64)):
        try:
            seconds = float(value)
        except OverflowError:
            pass
        else:
            return seconds if seconds == seconds else math.nan
    raise InvalidEntryError(f"{where}: created_at is {shown(value)}, expected unix seconds")


def _routed_experts(value: object, where: str) -> npt.NDArray[Any] | None:
    if value is None:
        return None
    if is_masked(value):
        raise InvalidEntryError(
            f"{where}: routed_experts is a masked array; its masked values would count as real ones"
        )
    try:
        source = value if isinstance(value, np.ndarray) else np.asarray(value)
    except Exception as error:
        raise InvalidEntryError(f"{where}: routed_experts is no array: {error}") from error
    if source.dtype.hasobject:
        raise InvalidEntryError(f"{where}: routed_experts has dtype {source.dtype}, which has no bytes of its own")
    return owned_array(source, source.dtype)


def _pieces(value: object, where: str) -> list[bytes] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(p, (bytes, bytearray, memoryview)) for p in value):
        raise InvalidEntryError(f"{where}: pieces must be a list of bytes, one per sampled token, or None")
    return [bytes(piece) for piece in value]
