"""What the bodies of frames hold: msgpack arrays, decoded into typed structs only.

| kind | body |
|---|---|
| SEGMENT | `SegmentHeader`, the first frame of every segment |
| ENTRY | `[EntryHead, padding bin, arrays bin]`: the arrays start at a multiple of 8 in the file |
| BEGIN | `BeginRecord`: an intent, written before generation |
| SETTLE | `SettleRecord`: how a call ended that has no entry, or not only one |
| DELIVERY | `DeliveryRecord` |
| FINISH | `FinishRecord` |
| SEAL | `SealRecord`, the last frame of a segment that its writer closed |
| MANIFEST | `Manifest`, the only frame of a manifest file |
| MARKER | `RootMarker`, the only frame of the file that marks a store |

The arrays of an entry, in this order, each padded to a multiple of 8: log-probs, the ids of the prompt's suffix, the
sampled ids, routed experts. Ids are stored as the smallest of uint8, uint16 and int32 that holds them, log-probs as
the smallest of float16, float32 and float64 that gives every bit back (`ID_DTYPES`, `LOG_PROB_DTYPES`).

A prompt is `sequence(base)[:shared] + suffix`, where `sequence(x)` is the prompt and the sampled ids of `x`, and
`base` an entry frame earlier in the same segment, named by its sequence number and body checksum. A segment therefore
never needs another one.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import StoredArray
from ..content import apart_from_the_stack, decode_content, encode_content
from ..entry import TokenEntry, contents_of
from ..errors import CorruptError
from ..protocol import Delivered, SettledOutcome
from .frame import HEADER_SIZE, padding

__all__ = (
    "BeginRecord",
    "Contents",
    "ContentsHead",
    "DeliveryRecord",
    "EntryHead",
    "FinishRecord",
    "RootMarker",
    "SealRecord",
    "SegmentHeader",
    "SettleRecord",
    "StoredEntry",
    "decode_contents",
    "decode_contents_head",
    "decode_entry",
    "decode_pieces",
    "encode_contents",
    "encode_entry",
    "encode_record",
)

# Their place in these is half, or a quarter, of the size of an item, rounded down.
ID_DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))
LOG_PROB_DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("<f2"), np.dtype("<f4"), np.dtype("<f8"))
_FLOAT16 = struct.Struct("<e")
_INT32 = np.dtype("<i4")
_FLOAT64 = np.dtype("<f8")

NO_BASE = -1

_maximum = np.maximum.reduce
_ZEROS = bytes(8)
_JOINED_BELOW = 64 << 10
"""Bytes of arrays; larger ones are written from where they lie."""


class SegmentHeader(msgspec.Struct, array_like=True, frozen=True):
    format: int
    rollout_id: str
    incarnation: str
    number: int
    boot_id: str
    created_at: float
    predecessor_end: int = 0
    """Where the believed bytes of segment `predecessor` end; nothing above is ever served again. -1: not stated."""
    predecessor: int = 0
    """The last earlier segment that holds anything, 0 if none does; nothing in those between is ever served."""
    mount: str = ""
    """Life of the mounted file system (`Files.mount_life`); empty if unknown."""


class EntryHead(msgspec.Struct, array_like=True, frozen=True):
    model_call_id: str
    choice_index: int
    at: int
    """CLOCK_BOOTTIME, nanoseconds."""
    base: int
    """Sequence number of the frame that the prompt extends, or NO_BASE."""
    base_crc: int
    shared: int
    """How many ids the prompt takes from the base's sequence."""
    suffix: int
    """How many ids of the prompt are stored here."""
    generated: int
    suffix_dtype: int
    generated_dtype: int
    log_prob_dtype: int
    experts: tuple[Any, tuple[int, ...]] | None
    """dtype description and shape of routed experts."""
    pieces: msgspec.Raw
    contents: msgspec.Raw


class BeginRecord(msgspec.Struct, array_like=True, frozen=True):
    model_call_id: str
    at: int
    choices: int
    writer: str
    """Which writer holds the intent; its liveness file tells whether it is still alive."""
    retry_count: int
    idempotency_key: str
    digests_base: int
    """Sequence number of an earlier BEGIN frame of this segment, or NO_BASE."""
    digests_shared: int
    """How many digests are taken from it."""
    digests: bytes
    """The others, 16 bytes each."""


class SettleRecord(msgspec.Struct, array_like=True, frozen=True):
    model_call_id: str
    at: int
    outcome: SettledOutcome
    detail: str

    def __str__(self) -> str:
        return f"{_named(self.model_call_id)}: {self.outcome}{f': {self.detail}' if self.detail else ''}"


class DeliveryRecord(msgspec.Struct, array_like=True, frozen=True):
    model_call_id: str
    at: int
    delivered: Delivered

    def __str__(self) -> str:
        return f"{_named(self.model_call_id)}: delivered: {self.delivered}"


def _named(model_call_id: str) -> str:
    return f"call {model_call_id}" if model_call_id else "a call without a name"


class FinishRecord(msgspec.Struct, array_like=True, frozen=True):
    at: int
    finished_at: float
    meta: msgspec.Raw


class SealRecord(msgspec.Struct, array_like=True, frozen=True):
    frames: int
    end: int
    """Where the frames before this one end."""


class RootMarker(msgspec.Struct, array_like=True, frozen=True):
    format: int


_encode = msgspec.msgpack.Encoder().encode
_NO_PIECES = msgspec.Raw(_encode(None))


def encode_record(record: msgspec.Struct) -> bytes:
    """The body of any frame but ENTRY."""
    return _encode(record)


def encode_contents(entry: TokenEntry) -> bytes:
    """The contents of an entry, which can be encoded before its place in the log is known."""
    return encode_content(contents_of(entry))


def encode_entry(
    entry: TokenEntry, contents: bytes, *, at: int, base: int, base_crc: int, shared: int
) -> tuple[list[bytes | memoryview], EntryHead]:
    """The body of an ENTRY frame as buffers to write one after another, nothing joined or copied twice."""
    suffix = entry.prompt_token_ids[shared:]
    generated = _smallest_ids(entry.generation_token_ids)
    # A vocabulary that needs int32 for what was sampled nearly always needs it for the rest.
    if generated.dtype is not _INT32 or not generated.size:
        suffix = _smallest_ids(suffix)
    log_probs = _smallest_log_probs(entry.generation_log_probs)
    experts = entry.routed_experts
    head = EntryHead(
        entry.model_call_id,
        int(entry.choice_index),
        at,
        base,
        base_crc,
        shared,
        len(suffix),
        len(generated),
        suffix.itemsize >> 1,
        generated.itemsize >> 1,
        log_probs.itemsize >> 2,
        None if experts is None else (_dtype_description(experts.dtype), experts.shape),
        _NO_PIECES if entry.pieces is None else msgspec.Raw(_encode(entry.pieces)),
        msgspec.Raw(contents),
    )
    encoded = _encode(head)
    parts: list[bytes | memoryview] = [b""]
    length = 0
    for array in (log_probs, suffix, generated) if experts is None else (log_probs, suffix, generated, experts):
        nbytes = array.nbytes
        if not nbytes:
            continue
        parts.append(_bytes_of(array))
        pad = -nbytes % 8
        if pad:
            parts.append(_ZEROS[:pad])
        length += nbytes + pad
    # fixarray(3), head, bin8 padding, bin32 arrays: everything in front of the arrays ends at a multiple of 8.
    pad = padding(HEADER_SIZE + 1 + len(encoded) + 2 + 5)
    parts[0] = b"".join((b"\x93", encoded, b"\xc4", bytes((pad,)), bytes(pad), b"\xc6", length.to_bytes(4, "big")))
    # Few small buffers are dearer than a copy: each costs a checksum, a slot of the write, and objects.
    return [b"".join(parts)] if length < _JOINED_BELOW else parts, head


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    if array.ndim == 1 and array.dtype.kind in "iuf":
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data


def _smallest_ids(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    largest = _maximum(ids) if len(ids) else 0
    if largest >= 2**16:
        return ids
    return ids.astype(ID_DTYPES[0] if largest < 2**8 else ID_DTYPES[1])


def _smallest_log_probs(log_probs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not len(log_probs):
        return log_probs.astype(LOG_PROB_DTYPES[0])
    exact = log_probs.tobytes()
    smallest = log_probs
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in LOG_PROB_DTYPES[-2::-1]:
            if dtype.itemsize == 2 and not _fits_float16(log_probs[0]):
                break  # the first value alone tells nearly always
            narrow = log_probs.astype(dtype)
            if narrow.astype(_FLOAT64).tobytes() != exact:
                break
            smallest = narrow
    return smallest


def _fits_float16(value: float) -> bool:
    try:
        return bool(_FLOAT16.unpack(_FLOAT16.pack(value))[0] == value or value != value)
    except OverflowError:
        return False


def _dtype_description(dtype: np.dtype[Any]) -> Any:
    if dtype.fields is not None:
        return _lists(np.lib.format.dtype_to_descr(dtype))
    # Extension types such as bfloat16 have no string of their own, only a name.
    return dtype.str if np.dtype(dtype.str) == dtype else dtype.name


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _described_dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        return np.dtype(description)
    fields = [
        tuple(tuple(part) if isinstance(part, list) and i == 2 else part for i, part in enumerate(field))
        for field in description
    ]
    return np.lib.format.descr_to_dtype([(name, _field(rest[0]), *rest[1:]) for name, *rest in fields])


def _field(description: Any) -> Any:
    return _described_dtype(description).descr if isinstance(description, list) else description


_decode_body = msgspec.msgpack.Decoder(tuple[EntryHead, bytes, memoryview]).decode
_decode_pieces = msgspec.msgpack.Decoder(list[bytes] | None).decode


_frombuffer = np.frombuffer


def _padded(size: int) -> int:
    return (size + 7) & ~7


class StoredEntry:
    """An ENTRY body, its arrays viewed in place. The prompt is not here, only its suffix: see `prefix`.

    Raises `msgspec.DecodeError` for a body that is none, or whose arrays are shorter than it says.
    """

    __slots__ = ("_arrays", "head")

    def __init__(self, body: memoryview | bytes) -> None:
        try:
            head, _, arrays = _decode_body(body)
        except RecursionError:
            head, _, arrays = apart_from_the_stack(lambda: _decode_body(body))
        floats, first, second = head.log_prob_dtype, head.suffix_dtype, head.generated_dtype
        suffix, generated = head.suffix, head.generated
        if not (0 <= floats <= 2 and 0 <= first <= 2 and 0 <= second <= 2 and suffix >= 0 and generated >= 0):
            raise msgspec.ValidationError("lengths or types of arrays that can't be")
        # The place of a type tells its size (`ID_DTYPES`).
        size = ((generated << floats + 1) + 7 & -8) + ((suffix << first) + 7 & -8) + ((generated << second) + 7 & -8)
        if size > len(arrays):
            raise msgspec.ValidationError("its arrays are shorter than it says")
        self.head, self._arrays = head, arrays

    @property
    def log_probs(self) -> npt.NDArray[Any]:
        head = self.head
        dtype, count = LOG_PROB_DTYPES[head.log_prob_dtype], head.generated
        return _frombuffer(self._arrays, dtype, count, 0) if count else np.empty(0, dtype)

    @property
    def suffix(self) -> npt.NDArray[Any]:
        head = self.head
        dtype, count = ID_DTYPES[head.suffix_dtype], head.suffix
        offset = _padded(LOG_PROB_DTYPES[head.log_prob_dtype].itemsize * head.generated)
        return _frombuffer(self._arrays, dtype, count, offset) if count else np.empty(0, dtype)

    @property
    def generated(self) -> npt.NDArray[Any]:
        head = self.head
        dtype, count = ID_DTYPES[head.generated_dtype], head.generated
        offset = _padded(LOG_PROB_DTYPES[head.log_prob_dtype].itemsize * count)
        offset += _padded(ID_DTYPES[head.suffix_dtype].itemsize * head.suffix)
        return _frombuffer(self._arrays, dtype, count, offset) if count else np.empty(0, dtype)

    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """Raises `msgspec.DecodeError` if they are no array that is there."""
        if self.head.experts is None:
            return None
        try:
            return self._experts(*self.head.experts)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # numpy says many things of a type or a shape that can't be
            raise msgspec.ValidationError(f"routed experts that can't be: {error}") from error

    def _experts(self, description: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        dtype = _described_dtype(description)
        if dtype.hasobject or min(shape, default=0) < 0:
            raise ValueError(f"type {dtype}, shape {shape}")
        count = 1
        for size in shape:
            count *= size
        offset = sum(v.nbytes + padding(v.nbytes) for v in (self.log_probs, self.suffix, self.generated))
        if not count * dtype.itemsize:
            return np.ndarray(shape, dtype, b"")  # also of a million items without a size
        return np.frombuffer(self._arrays, dtype, count, offset).reshape(shape)


class Contents(NamedTuple):
    """Everything of an entry that is neither an array nor needed to find it (`tokcap.entry.contents_of`)."""

    output_items: list[Any]
    policy_versions: list[Any]
    sampling: dict[str, Any]
    extra: dict[str, Any]
    model: str
    response_id: str
    finish_reason: str
    created_at: float
    token_item_index: int | None
    schema_version: int


_CONTENT_TYPES = [(list, list, dict, dict, str, str, str, float, index, int) for index in (type(None), int)]


def decode_contents(data: bytes | memoryview) -> Contents:
    """The contents of an entry, from `EntryHead.contents`. Raises `CorruptError` for what is none."""
    try:
        found = Contents(*decode_content(data))
    except (msgspec.DecodeError, TypeError) as error:
        raise CorruptError(f"the checksum of an entry holds, but its contents can't be decoded: {error}") from error
    if tuple(map(type, found)) not in _CONTENT_TYPES:
        raise CorruptError("the checksum of an entry holds, but its contents are of other types")
    if not found.policy_versions:
        return found
    return found._replace(
        policy_versions=[tuple(span) if isinstance(span, list) else span for span in found.policy_versions]
    )


class ContentsHead(msgspec.Struct, array_like=True, gc=False):
    """The beginning of an entry's contents (`tokcap.entry.contents_of`), for who needs no more of it."""

    output_items: msgspec.Raw
    policy_versions: msgspec.Raw
    sampling: msgspec.Raw
    extra: msgspec.Raw
    model: str
    response_id: msgspec.Raw
    finish_reason: str


decode_contents_head = msgspec.msgpack.Decoder(ContentsHead).decode
"""`decode_contents` of the beginning alone. Raises `msgspec.DecodeError`, also for names that are no plain text."""


def decode_pieces(data: bytes | memoryview) -> list[bytes] | None:
    """The bytes of each sampled token, from `EntryHead.pieces`; None if the engine didn't tell.

    Raises `CorruptError` for what is neither.
    """
    try:
        return _decode_pieces(data)
    except msgspec.DecodeError as error:
        raise CorruptError(f"the checksum of an entry holds, but its pieces can't be decoded: {error}") from error


def decode_entry(rollout_id: str, stored: StoredEntry, prompt: npt.NDArray[np.int32]) -> TokenEntry:
    """The entry again, given its whole prompt; nothing is copied but what is stored narrower than it is shown."""
    head = stored.head
    contents = decode_contents(memoryview(head.contents))
    experts = stored.routed_experts
    # By position, which is a third of the time: the fields in their order.
    return TokenEntry(
        rollout_id,
        head.model_call_id,
        prompt.view(StoredArray),
        read_only(stored.generated, _INT32),
        read_only(stored.log_probs, _FLOAT64),
        head.choice_index,
        None if experts is None else _frozen(experts),
        contents.output_items,
        contents.token_item_index,
        contents.model,
        contents.response_id,
        contents.finish_reason,
        contents.created_at,
        contents.policy_versions,
        contents.sampling,
        decode_pieces(head.pieces),
        contents.extra,
        contents.schema_version,
    )


def read_only(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`array` as `dtype`, read-only; a view where the dtype is the same."""
    return _frozen(array if array.dtype is dtype else array.astype(dtype, copy=False))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.flags.writeable:
        array.flags.writeable = False
    return array
