"""The manifest of a snapshot: an index of what its segments hold, so that opening needs no scan.

It holds nothing that the segments and the names of their links don't say: a damaged one is made again from them.
"""

from __future__ import annotations

from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from ..content import apart_from_the_stack, decode_content
from ..protocol import CallRecord, Delivered, Outcome
from .frame import FORMAT_VERSION, LAST_IN_BATCH, Buffer, Kind, frame_header, newer_format, segment_seed
from .ledger import Damage, DigestChain, Ledger
from .prefix import Node
from .scan import scan

__all__ = ("Index", "IndexedSegment", "decode_manifest", "encode_manifest")

MOST_BYTES = 1 << 30
_COLUMNS = 9


class IndexedSegment(msgspec.Struct, array_like=True, frozen=True):
    number: int
    length: int
    crc: int
    """crc32 of the first `length` bytes of the file."""


_Fields = tuple[str, Outcome, str, float | None, float | None, Delivered, int, str, str]
"""Of a `CallRecord`, but for its request digests."""


class _CallRow(msgspec.Struct, array_like=True, gc=False):
    record: _Fields
    digests_of: int
    """Row whose digests these extend, or -1."""
    digests_shared: int
    digests: bytes


class Index(msgspec.Struct, array_like=True):
    """What a snapshot knows before it looks into its segments."""

    format: int
    rollout_id: str
    snapshot_id: str
    version: int
    frozen_at: float
    incomplete: bool
    segments: list[IndexedSegment]
    node_table: bytes
    """int64 [N, 9]: the fields of `Node`."""
    chosen: list[int]
    """The node of each entry of the snapshot."""
    call_table: msgspec.Raw
    damage: list[Damage]
    torn: list[Damage]
    meta: msgspec.Raw
    """What `finish` was told, encoded."""
    finished_at: float | None

    def nodes(self) -> list[Node]:
        table = np.frombuffer(self.node_table, "<i8").reshape(-1, _COLUMNS).tolist()
        return [Node(*row) for row in table]

    def calls(self) -> tuple[CallRecord, ...]:
        """Raises `msgspec.DecodeError` for rows that can't be."""
        rows = _decode_rows(self.call_table)
        chains: list[DigestChain] = []
        for row in rows:
            parent = None
            if row.digests_of >= 0:
                parent = chains[row.digests_of] if row.digests_of < len(chains) else None
            if not 0 <= row.digests_shared <= (0 if parent is None else len(parent)) or len(row.digests) % 16:
                raise msgspec.ValidationError("request digests that can't be")
            chains.append(DigestChain(row.digests, parent, row.digests_shared))
        return tuple(_record(row, chain) for row, chain in zip(rows, chains, strict=True))


_encode = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(Index).decode
_decode_rows = msgspec.msgpack.Decoder(list[_CallRow]).decode


def _record(row: _CallRow, digests: DigestChain) -> CallRecord:
    call, outcome, boot_id, begun_at, ended_at, delivered, retries, key, detail = row.record
    return CallRecord(
        call,
        outcome,
        boot_id,
        begun_at,
        ended_at,
        delivered,
        retries,
        key,
        digests if len(digests) else (),
        detail,
    )


def encode_calls(ledger: Ledger) -> msgspec.Raw:
    """The rows of `Index.calls`: one per call, and one nameless lost call for each damaged place."""
    # Tuples as `_CallRow` is encoded, and no record in between: half the time.
    rows: list[tuple[_Fields, int, int, bytes]] = []
    row_of: dict[int, int] = {}
    for call in ledger.calls.values():
        chain = call.digests
        parent = chain.parent
        parent_row = -1 if parent is None else row_of.get(id(parent), -1)
        row_of[id(chain)] = len(rows)
        if parent_row >= 0:
            rows.append((call.fields(), parent_row, chain.shared, chain.own))
        else:
            rows.append((call.fields(), -1, 0, chain.joined() if chain.own or chain.shared else b""))
    rows += [(("", "lost", "", None, None, "unknown", 0, "", str(damage)), -1, 0, b"") for damage in ledger.damage]
    return msgspec.Raw(_encode(rows))


def encode_nodes(nodes: list[Node]) -> bytes:
    rows = [
        (n.segment, n.sequence, n.body_start, n.body_length, n.body_crc, n.parent, n.shared, n.prompt, n.total)
        for n in nodes
    ]
    return np.array(rows, "<i8").reshape(-1, _COLUMNS).tobytes()


def _seed(snapshot_id: str, version: int) -> int:
    return segment_seed(snapshot_id, f"manifest-{version}")


def encode_manifest(index: Index) -> list[bytes | memoryview]:
    """The one frame of a manifest file."""
    body = _encode(index)
    seed = _seed(index.snapshot_id, index.version)
    return [frame_header(Kind.MANIFEST, LAST_IN_BATCH, len(body), 0, 0, 0, crc32(body, seed), seed), body]


def decode_manifest(path: str, data: Buffer, rollout_id: str, snapshot_id: str, version: int) -> Index | None:
    """The index in a manifest file, or None if the file is damaged or another snapshot's.

    Raises `NewerFormatError`.
    """
    found = scan(data, _seed(snapshot_id, version), limit=len(data), sealed_end=len(data))
    if len(found.frames) != 1:
        return None
    frame = found.frames[0]
    if frame.format > FORMAT_VERSION:
        raise newer_format(path, frame.format)
    if frame.kind != Kind.MANIFEST:
        return None
    body = memoryview(data)[frame.body_start : frame.body_end]
    try:
        index = _decode_index_anywhere(body)
    except msgspec.DecodeError:
        return None
    if index.format > FORMAT_VERSION:
        raise newer_format(path, index.format)
    if (index.rollout_id, index.snapshot_id, index.version) != (rollout_id, snapshot_id, version):
        return None
    return index if _is_sound(index) else None


def _decode_index_anywhere(body: memoryview) -> Index:
    try:
        return _decode_index(body)
    except RecursionError:
        return apart_from_the_stack(lambda: _decode_index(body))


def _is_sound(index: Index) -> bool:
    """Whether what it says can be, so that whoever reads what it points to need not look again."""
    lengths = {segment.number: segment.length for segment in index.segments}
    if len(lengths) < len(index.segments) or any(
        number < 1 or not 0 <= length < 2**62 for number, length in lengths.items()
    ):
        return False
    size = len(index.node_table)
    if size % (8 * _COLUMNS):
        return False
    table = np.frombuffer(index.node_table, "<i8").reshape(-1, _COLUMNS)
    count = len(table)
    if index.chosen and not 0 <= min(index.chosen) <= max(index.chosen) < count:
        return False
    if count and not _are_sound(table, lengths):
        return False
    try:
        return isinstance(decode_content(bytes(index.meta)), dict)
    except msgspec.DecodeError:
        return False


def _are_sound(table: npt.NDArray[np.int64], lengths: dict[int, int]) -> bool:
    """Whether nodes lie in segments of these lengths, and extend what comes before them."""
    segment, _, start, length, _, parent, shared, prompt, total = table.T
    least = table.min(axis=0).tolist()
    if min(least[2], least[3], least[6]) < 0 or least[5] < -1 or not (parent < np.arange(len(table))).all():
        return False
    ends = np.array([lengths.get(number, -1) for number in segment.tolist()], np.int64)
    before = np.append(total, 0)[parent]  # without a parent there is nothing to share
    # Compared without sums, which might overflow.
    return bool(
        (length <= ends - start).all()
        and (prompt >= shared).all()
        and (total >= prompt).all()
        and (shared <= before).all()
        and (total - shared <= length).all()
    )
