"""Files of a store made by hand, with checksums that hold, so that what comes after the checksum is reached."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import numpy as np

from tests.damage import Fingerprint, MemoryFiles, Tree, fingerprint
from tokcap import TokenEntry
from tokcap.errors import TokcapError
from tokcap.protocol import Delivered, Outcome
from tokcap.store import Snapshot
from tokcap.store.frame import (
    ACKNOWLEDGED,
    HEADER_SIZE,
    LAST_IN_BATCH,
    TRAILER_SIZE,
    frame_header,
    padding,
    segment_seed,
)
from tokcap.store.layout import Layout
from tokcap.store.looking import Looker
from tokcap.store.records import SegmentHeader, encode_record
from tokcap.store.scan import scan
from tokcap.trajectory import build

from .fuzz_input import require

__all__ = (
    "BOOT",
    "HOME",
    "INCARNATION",
    "ROLLOUT",
    "SEED",
    "Framed",
    "consumed",
    "first_frame",
    "frames_of",
    "laid_out",
    "looker_of",
    "reseal",
    "single_frame",
)

ROLLOUT = "r-1"
INCARNATION = "0123456789abcdef0123456789abcdef"
BOOT = "11111111-1111-4111-8111-111111111111"
HOME = f"{Layout('').rollout(ROLLOUT)[1:]}/{INCARNATION}"
"""Where the files of this incarnation lie in a tree."""
SEED = segment_seed(INCARNATION, "000001")

OUTCOMES, DELIVERED = get_args(Outcome), get_args(Delivered)


class Framed(NamedTuple):
    """A frame to be written, and where it belongs."""

    kind: int
    body: bytes
    batch: int
    flags: int = 0
    """GROUP_CONTINUES; LAST_IN_BATCH is seen to."""


def first_frame(rollout_id: str = ROLLOUT, incarnation: str = INCARNATION, number: int = 1, **more: Any) -> Framed:
    """The header of a segment, a batch of its own."""
    header = SegmentHeader(1, rollout_id, incarnation, number, BOOT, 1.0, **more)
    return Framed(1, encode_record(header), 0)


def laid_out(frames: Iterable[Framed], seed: int) -> bytes:
    """A segment of these frames, every batch acknowledged."""
    data = bytearray()
    frames = list(frames)
    firsts: dict[int, int] = {}
    for sequence, frame in enumerate(frames):
        firsts.setdefault(frame.batch, sequence)
        last = sequence + 1 == len(frames) or frames[sequence + 1].batch != frame.batch
        flags = (frame.flags & ~LAST_IN_BATCH) | (LAST_IN_BATCH if last else 0)
        body, crc = frame.body, zlib.crc32(frame.body, seed)
        first = firsts[frame.batch]
        data += frame_header(frame.kind, flags, len(body), sequence, frame.batch, first, crc, seed, len(data))
        data += body + bytes(padding(HEADER_SIZE + len(body)))
        data += ACKNOWLEDGED if last else b""
    return bytes(data)


def single_frame(kind: int, body: bytes, seed: int) -> bytes:
    """A file of one frame: a manifest, a note, a marker."""
    return laid_out([Framed(kind, body, 0)], seed)[:-TRAILER_SIZE]


def frames_of(data: bytes, seed: int) -> list[Framed]:
    """The frames of an intact segment."""
    found = scan(data, seed, limit=len(data), believe_tail=True)
    return [Framed(f.kind, data[f.body_start : f.body_end], f.batch, f.flags) for f in found.frames]


def reseal(data: bytearray, offset: int, seed: int) -> None:
    """Make the checksum of the header at `offset` hold for what stands there now."""
    crc = zlib.crc32(data[offset : offset + 28], (seed + offset) & 0xFFFFFFFF)
    data[offset + 28 : offset + 32] = crc.to_bytes(4, "little")


def looker_of(tree: Tree, boot: str = BOOT) -> Looker:
    """Reads files that are in memory only."""
    return Looker(MemoryFiles(tree), Layout(""), boot)


def consumed(snapshot: Snapshot) -> list[Fingerprint]:
    """Everything that a consumer asks of a snapshot; what its entries are. What it says of itself must fit together."""
    named = 0
    for call in snapshot.calls:
        require(call.outcome in OUTCOMES, f"the outcome {call.outcome!r}")
        require(call.delivered in DELIVERED, f"delivered: {call.delivered!r}")
        require(all(type(text) is str for text in (call.model_call_id, call.detail, call.idempotency_key)), "no text")
        digests = tuple(call.request_digests)
        require(len(digests) == len(call.request_digests), "as many digests as it says")
        require(all(type(digest) is bytes and len(digest) == 16 for digest in digests), "digests of 16 bytes")
        named += bool(call.model_call_id)
    require(type(snapshot.meta) is dict and type(snapshot.finished) is bool, "meta is a dict")
    require(len(snapshot.damage) < 10_000 and len(snapshot.torn) < 10_000, "a report of damage without an end")
    require(all(str(place) for place in (*snapshot.damage, *snapshot.torn)), "places of damage in words")
    entries = snapshot.entries
    found = []
    for index in range(len(entries)):
        try:
            entry = entries[index]
        except TokcapError:
            continue
        _is_sound(entry)
        found.append(fingerprint(entry))
    try:
        built = build(snapshot)
    except TokcapError:
        return found
    for trajectory in built.trajectories:
        length = len(trajectory.token_ids)
        require(len(trajectory.loss_mask) == length == len(trajectory.log_probs), "arrays of one length")
    return found


def _is_sound(entry: TokenEntry) -> None:
    """It is what the type says: nobody has to look again."""
    ids, sampled, log_probs = entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs
    require(ids.dtype == sampled.dtype == np.int32 and log_probs.dtype == np.float64, "dtypes of an entry")
    require(ids.ndim == sampled.ndim == log_probs.ndim == 1 and len(sampled) == len(log_probs), "lengths of an entry")
    require(not any(array.flags.writeable for array in (ids, sampled, log_probs)), "arrays that can be written")
    text = (entry.model_call_id, entry.model, entry.response_id, entry.finish_reason)
    require(all(type(each) is str for each in text), "text of an entry")
    require(type(entry.output_items) is list and type(entry.policy_versions) is list, "lists of an entry")
    require(type(entry.sampling) is dict and type(entry.extra) is dict, "mappings of an entry")
    require(type(entry.created_at) is float and type(entry.choice_index) is int, "numbers of an entry")
    pieces = entry.pieces
    require(pieces is None or all(type(piece) is bytes for piece in pieces), "pieces of an entry")
