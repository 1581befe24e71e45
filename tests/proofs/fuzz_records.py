"""Targets: what a file of the store may hold. Frames whose checksum holds, too, and bodies that are anything."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from tests.damage import MemoryFiles, Tree
from tokcap import TokenEntry
from tokcap.content import decode_content, encode_content, storable
from tokcap.errors import CorruptError, NewerFormatError, TokcapError
from tokcap.store.frame import (
    ACKNOWLEDGED,
    GROUP_CONTINUES,
    HEADER_SIZE,
    MAGIC,
    SPACE,
    Kind,
    content_end,
    segment_seed,
)
from tokcap.store.layout import Layout, look
from tokcap.store.manifest import Index, IndexedSegment
from tokcap.store.records import (
    NO_BASE,
    BeginRecord,
    DeliveryRecord,
    FinishRecord,
    RootMarker,
    SealRecord,
    SettleRecord,
    encode_contents,
    encode_entry,
    encode_record,
)
from tokcap.store.root import read_marker
from tokcap.store.scan import scan

from .fuzz_files import (
    HOME,
    INCARNATION,
    ROLLOUT,
    SEED,
    Framed,
    consumed,
    first_frame,
    laid_out,
    looker_of,
    reseal,
    single_frame,
)
from .fuzz_input import HOSTILE, Choices, Target, changed, require

__all__ = ("TARGETS", "bodies_of_every_kind", "manifest_tree")

_MARKER_SEED = 0x746F6B63
_KINDS = tuple(Kind)
_SNAPSHOT = f"{HOME}/v1"


def _entry(call: str, prompt: list[int], sampled: list[int], **more: Any) -> TokenEntry:
    return TokenEntry(ROLLOUT, call, prompt, sampled, [-0.5] * len(sampled), **more)


def _entry_body(entry: TokenEntry, base: int = NO_BASE, base_crc: int = 0, shared: int = 0) -> bytes:
    parts, _ = encode_entry(entry, encode_contents(entry), at=5, base=base, base_crc=base_crc, shared=shared)
    return b"".join(parts)


def bodies_of_every_kind() -> list[tuple[int, bytes]]:
    """Frames behind a segment header: a chain of two calls, and one of everything else. As a writer makes them."""
    begin = BeginRecord("c0", 1, 1, "w", 0, "key", NO_BASE, 0, b"d" * 32)
    follow = BeginRecord("c1", 2, 2, "w", 1, "", 1, 2, b"e" * 16)
    experts = np.arange(6, dtype=np.uint8).reshape(2, 3)
    first = _entry(
        "c0", list(range(20)), [70_000, 2], pieces=[b"a", b"\xff"], routed_experts=experts, extra={"n": 2**70}
    )
    second = _entry(
        "c1", [*range(20), 70_000, 2, 9], [3], policy_versions=[("v", 0, 1)], output_items=[{"text": "\ud800"}]
    )
    body = _entry_body(first)
    return [
        (Kind.BEGIN, encode_record(begin)),
        (Kind.ENTRY, body),
        (Kind.BEGIN, encode_record(follow)),
        (Kind.ENTRY, _entry_body(second, 2, zlib.crc32(body, SEED), 22)),
        (Kind.SETTLE, encode_record(SettleRecord("c1", 3, "aborted", "why"))),
        (Kind.DELIVERY, encode_record(DeliveryRecord("c0", 4, "full"))),
        (Kind.FINISH, encode_record(FinishRecord(5, 6.0, msgspec.Raw(encode_content({"reward": 0.5}))))),
        (Kind.SEAL, encode_record(SealRecord(8, 0))),
    ]


# ---- frames: what is believed of a segment in which anything was overwritten


def _frames(data: bytes) -> None:
    choices = Choices(data)
    frames = [first_frame()]
    for _ in range(choices.byte() % 7):
        joined = choices.byte() % 3 == 0
        flags = GROUP_CONTINUES if choices.byte() % 4 == 0 else 0
        frames.append(Framed(choices.one_of(_KINDS), choices.some(40), frames[-1].batch + (not joined), flags))
    written = laid_out(frames, SEED)
    segment = bytearray(written) + SPACE * (choices.byte() % 3)
    untouched = len(segment)
    forged = False
    for _ in range(choices.byte() % 5):
        at = choices.number(len(segment) + 1)
        untouched = min(untouched, at)
        kind = choices.byte() % 7
        if kind == 0:
            del segment[at:]
        elif kind == 1:
            segment[at : at + 1] = choices.some(20)
        elif kind == 2:
            length = choices.byte()
            segment[at : at + length] = bytes(length)
        elif kind == 3:
            at = at // 8 * 8
            untouched = min(untouched, at)
            other = choices.number(len(segment) + 1) // 8 * 8
            segment[at : at + 64] = segment[other : other + 64]
        elif kind == 4:
            segment[at : at + 4] = choices.one_of((0, 1, 2, 7, 255, 65_535, 2**31, 2**32 - 1)).to_bytes(4, "little")
        else:
            at = _forged(choices, segment, claims=kind == 6)
            untouched, forged = min(untouched, at), True
    _judged(choices, bytes(segment), written, frames, untouched, forged)


def _forged(choices: Choices, segment: bytearray, *, claims: bool) -> int:
    """Change a header so that its checksum holds; also one whose length leads out of the file. Where it stands."""
    starts = [at for at in range(0, len(segment) - HEADER_SIZE + 1, 8) if segment[at : at + 4] == MAGIC]
    at = choices.one_of(starts) if starts and choices.byte() % 4 else choices.number(len(segment) + 1) // 8 * 8
    if at + HEADER_SIZE > len(segment):
        return at
    if claims:
        segment[at : at + 4] = MAGIC
        segment[at + 8 : at + 12] = (len(segment) + choices.byte()).to_bytes(4, "little")
        segment[at + 24 : at + 28] = zlib.crc32(segment[at + HEADER_SIZE :], SEED).to_bytes(4, "little")
    else:
        place = at + choices.one_of((4, 5, 6, 8, 12, 16, 20, 24))
        segment[place : place + 1] = bytes([choices.byte()])
    reseal(segment, at, SEED)
    return at


def _judged(
    choices: Choices, data: bytes, written: bytes, frames: Sequence[Framed], untouched: int, forged: bool
) -> None:
    size = content_end(data, len(data))
    require(data[size:] == (SPACE * (len(data) // 8 + 1))[size % 8 : size % 8 + len(data) - size], "space is space")
    sealed_end = choices.one_of((0, 0, size, 2**40, untouched))
    believe = choices.byte() % 2 == 1
    found = scan(data, SEED, limit=size, sealed_end=sealed_end, believe_tail=believe)
    end = sequence = 0
    for frame in found.frames:
        require(frame.offset >= end and frame.sequence >= sequence, "frames in order, none over another")
        require(frame.body_end <= size, "a frame that ends behind the file")
        body = data[frame.body_start : frame.body_end]
        require(zlib.crc32(body, SEED) == frame.body_crc, "a body with another checksum")
        if frame.end <= untouched or not forged:
            require(frame.sequence < len(frames), "a record that was never written")
            wanted = frames[frame.sequence]
            require((frame.kind, body) == (wanted.kind, wanted.body), "another record than was written")
        end, sequence = frame.body_end, frame.sequence + 1
    require(0 <= found.end <= size and found.append_at in (None, size), "it ends in the file")
    for gap in (*found.damage, *([found.torn] if found.torn else [])):
        require(0 <= gap.offset <= gap.end, "a gap that ends before it begins")
    # Whatever comes later, what was acknowledged before it can be read.
    known = scan(written, SEED, limit=len(written))
    require(len(known.frames) == len(frames) or frames[-1].flags, "as many frames as were written")
    believed = {frame.offset for frame in found.frames}
    for frame in known.frames:
        whole = frame.end + 8 <= untouched and any(
            each.end + 8 <= untouched and each.batch == frame.batch and each.flags & 1 for each in known.frames
        )
        require(not whole or frame.offset in believed, f"the acknowledged frame {frame.sequence} is lost")


def _frame_seeds() -> list[bytes]:
    program = bytes([6, 1, 1, 1, 5, *b"hello", 0, 1, 2, 9, *b"other one", 1, 0, 3, 3, *b"abc"])
    return [
        program,
        program + bytes([1, 60, 5, 28, *b"TKCF" + bytes(24)]),
        program + bytes([2, 80, 1, 2, 7, 7, 30, 3, 0]),
    ]


# ---- bodies: frames whose checksums hold, and whose bodies are anything


def _bodies(data: bytes) -> None:
    choices = Choices(data)
    known = bodies_of_every_kind()
    frames = [first_frame()]
    for number in range(1 + choices.byte() % 9):
        kind, body = known[number % len(known)]
        way = choices.byte() % 5
        if way == 1:
            body = msgspec.msgpack.encode(_changed_value(choices, msgspec.msgpack.decode(body)))
        elif way == 4:
            fields = msgspec.msgpack.decode(body)
            record = fields[0] if kind == Kind.ENTRY else fields
            record[choices.number(len(record))] = choices.one_of(HOSTILE)
            body = msgspec.msgpack.encode(fields)
        elif way == 2:
            kind, body = choices.one_of(_KINDS), choices.some(255)
        elif way == 3:
            kind, body = choices.one_of(known)
            at = choices.number(len(body))
            body = body[:at] + choices.some(9) + body[at + choices.byte() % 9 :]
        frames.append(Framed(kind, body, frames[-1].batch + (choices.byte() % 4 > 0)))
    if choices.byte() % 8 == 0:
        header = _changed_value(choices, msgspec.msgpack.decode(frames[0].body))
        frames[0] = frames[0]._replace(body=msgspec.msgpack.encode(header))
    _read({f"{HOME}/000001.{choices.one_of(('seg', 'open', 'torn'))}": laid_out(frames, SEED)})


def _changed_value(choices: Choices, value: Any) -> Any:
    try:
        found = changed(choices, value)
        msgspec.msgpack.encode(found)
    except OverflowError:  # what was a number of 64 bits is more
        return value
    return found


def _read(tree: Tree) -> None:
    looker = looker_of(tree)
    try:
        looker.stat(ROLLOUT)
        with looker.read(ROLLOUT) as snapshot:
            consumed(snapshot)
    except TokcapError:
        return


def _body_seeds() -> list[bytes]:
    plain = bytes([7, *[0, 1] * 8, 1, 0])
    # Each field of an intent, an entry and those that follow them, with a number and with a list in its place.
    places = [(frame, field) for frame, fields in ((0, 9), (1, 14), (2, 9), (3, 14)) for field in range(fields)]
    values = [HOSTILE.index(2**62), HOSTILE.index([1, 2, 3])]
    forged = [bytes([frame, *[0, 1] * frame, 4, field, value, 1, 1, 0]) for frame, field in places for value in values]
    return [
        plain,
        *forged,
        bytes([3, 1, 1, 3, 0, 9, 1, *[0, 1] * 6]),
        bytes([8, 2, 2, 4, *b"\x94\xa1a\x01", 1, *[0, 1] * 8]),
    ]


# ---- manifests


def _manifest_tree(index: Index, segment: bytes) -> Tree:
    seed = segment_seed(INCARNATION, "manifest-1")
    return {
        f"{_SNAPSHOT}/000001-{len(segment)}.seg": segment,
        f"{_SNAPSHOT}/manifest": single_frame(Kind.MANIFEST, msgspec.msgpack.encode(index), seed),
    }


def _intact() -> tuple[Index, bytes]:
    """A manifest and its segment, as a freeze makes them."""
    frames = [
        first_frame(),
        *(Framed(kind, body, place) for place, (kind, body) in enumerate(bodies_of_every_kind(), 1)),
    ]
    segment = laid_out(frames, SEED)
    with looker_of({f"{HOME}/000001.seg": segment}).read(ROLLOUT) as snapshot:
        index = msgspec.structs.replace(snapshot._index)
    index.version = 1
    index.segments = [IndexedSegment(1, len(segment), zlib.crc32(segment))]
    return index, segment


_INTACT = _intact()


def _manifest(data: bytes) -> None:
    choices = Choices(data)
    index, segment = _INTACT
    way = choices.byte() % 3
    if way == 0:
        body: Any = msgspec.msgpack.encode(index)
        fields = msgspec.msgpack.decode(body)
        for _ in range(1 + choices.byte() % 3):
            fields = _changed_value(choices, fields)
    elif way == 1:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(index))
        table = np.frombuffer(index.node_table, "<i8").copy()
        for _ in range(1 + choices.byte() % 4):
            table[choices.number(len(table))] = choices.one_of(_NUMBERS)
        fields[7] = table.tobytes()
    else:
        fields = None
        body = choices.rest()
    tree = _manifest_tree(index, segment)
    if fields is not None:
        body = msgspec.msgpack.encode(fields)
    tree[f"{_SNAPSHOT}/manifest"] = single_frame(Kind.MANIFEST, body, segment_seed(INCARNATION, "manifest-1"))
    _read(tree)


def manifest_tree(change: Callable[[list[Any]], list[Any]]) -> Tree:
    """A snapshot whose manifest was changed, field by field; its checksum holds."""
    index, segment = _INTACT
    tree = _manifest_tree(index, segment)
    body = msgspec.msgpack.encode(change(msgspec.msgpack.decode(msgspec.msgpack.encode(index))))
    tree[f"{_SNAPSHOT}/manifest"] = single_frame(Kind.MANIFEST, body, segment_seed(INCARNATION, "manifest-1"))
    return tree


_NUMBERS = (0, 1, -1, 2, 3, 22, 40, 64, 1000, 2**20, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -2, -40)


def _manifest_seeds() -> list[bytes]:
    return [b"\0", b"\0\0\x07\1\5", b"\1\3" + bytes(range(16)), b"\2" + msgspec.msgpack.encode(_INTACT[0])]


# ---- small files, names, contents


def _small_files(data: bytes) -> None:
    choices = Choices(data)
    body = choices.some(120)
    name = choices.one_of(("note-000001", "note-000007"))
    kind = choices.one_of((Kind.MARKER, Kind.SETTLE, Kind.DELIVERY, *_KINDS))
    marker = bytearray(single_frame(kind, body, _MARKER_SEED))
    note = bytearray(single_frame(kind, body, segment_seed(INCARNATION, name)))
    if choices.byte() % 2:
        at = choices.number(32)
        for file, seed in ((marker, _MARKER_SEED), (note, segment_seed(INCARNATION, name))):
            file[at : at + 2] = choices.some(2)
            if len(file) >= HEADER_SIZE and choices.byte() % 2:
                reseal(file, 0, seed)
    tail = choices.rest()
    try:
        found = read_marker(MemoryFiles({"FORMAT": bytes(marker) + tail}), Layout(""))
    except NewerFormatError:
        found = None
    require(found is None or found.format <= 1, "a format that is newer than this")
    gone = f"{HOME.rpartition('/')[0]}/{INCARNATION}.retired.1.5"
    stat = looker_of({f"{gone}/{name}": bytes(note) + tail}).stat(ROLLOUT)
    require(stat.state == "retired" and len(stat.late) + len(stat.damage) <= 100, "a retired rollout and its notes")


def _small_seeds() -> list[bytes]:
    bodies = [RootMarker(1), SettleRecord("c", 1, "lost", "why"), DeliveryRecord("c", 1, "full")]
    bodies += [RootMarker(2**40)]
    encoded = [encode_record(each) for each in bodies]
    return [bytes([len(body), *body, 0, place]) for place, body in enumerate(encoded)]


_PARTS = (
    *(
        INCARNATION,
        "f" * 32,
        ".trash",
        ".retired.",
        "1",
        "999999",
        "999999999",
        "0",
        "000001",
        ".seg",
        ".open",
        ".torn",
    ),
    *(
        "v",
        "v1",
        "/",
        "manifest",
        "damaged",
        "note-",
        "tmp-",
        "-",
        "18446744073709551615",
        "\u0661",
        "\n",
        "..",
        "x" * 40,
    ),
)


def _names(data: bytes) -> None:
    choices = Choices(data)
    index, segment = _INTACT
    tree = {f"{HOME}/000001.seg": segment}
    if choices.byte() % 2:
        tree = _manifest_tree(index, segment)
    for _ in range(choices.byte() % 6):
        parts = [choices.one_of(_PARTS) for _ in range(1 + choices.byte() % 5)]
        path = "".join(parts).strip("/")
        folder = choices.one_of((HOME, HOME, _SNAPSHOT, HOME.rpartition("/")[0]))
        if path and "//" not in path:
            tree[f"{folder}/{path}"] = choices.one_of((b"", segment, ACKNOWLEDGED))
    try:
        look(MemoryFiles(tree), Layout("").rollout(ROLLOUT))
    except CorruptError:
        return
    except (FileNotFoundError, NotADirectoryError):
        return
    _read(tree)


def _name_seeds() -> list[bytes]:
    return [bytes([0, 1, 1, 6, 9, 0]), bytes([1, 2, 2, 7, 9, 1, 0, 1, 12, 2]), bytes([1, 1, 3, 0, 3, 4, 3])]


def _contents(data: bytes) -> None:
    try:
        value = decode_content(data)
    except msgspec.DecodeError:
        return
    plain = storable(value)
    if repr(plain) == repr(value):  # what a writer may have put
        require(repr(decode_content(encode_content(value))) == repr(value), "contents that change when they are stored")


def _content_seeds() -> list[bytes]:
    values = [{"a": [1, 2**80, -(2**70), None, "\ud800", {"\udfff": 1}]}, [float("nan"), -0.0, {"k": {"l": []}}], "x"]
    return [encode_content(value) for value in values]


TARGETS = (
    Target(
        "frames",
        "segments with anything overwritten, checksums of headers made to hold",
        _frames,
        _frame_seeds,
        weight=10,
    ),
    Target("bodies", "frames whose checksums hold and whose bodies are anything", _bodies, _body_seeds),
    Target("manifests", "manifests whose checksum holds and which say anything", _manifest, _manifest_seeds),
    Target("small-files", "root markers and notes", _small_files, _small_seeds, weight=5),
    Target("names", "files with any name in the directory of a rollout", _names, _name_seeds),
    Target("contents", "msgpack of contents, extensions included", _contents, _content_seeds, 512, 50),
)
