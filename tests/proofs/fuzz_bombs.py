"""Small inputs that claim to be large, or nest without an end: refused before what they claim is allocated.

Each runs in a forked child that may take 64 MB and 64 times the input more than it has; one that needs more, or takes
two minutes, is a finding. What it must come to is said by each bomb itself.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.damage import MemoryFiles, Tree, make_entry
from tokcap.asgi.client import decoded
from tokcap.asgi.coding import Coding
from tokcap.asgi.refusals import RefusalError
from tokcap.asgi.settings import serving_settings
from tokcap.capture.shapes import EventSplitter, StreamJoiner, decode_json, lift, parse_answer
from tokcap.config import load_config, token_id_capture_config
from tokcap.content import decode_content
from tokcap.errors import ConfigError, UnusableAnswerError, UpstreamError
from tokcap.store import FileStore
from tokcap.store.frame import HEADER_SIZE, Kind, segment_seed
from tokcap.store.layout import Layout
from tokcap.store.records import FinishRecord, StoredEntry
from tokcap.store.root import read_marker

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
from .fuzz_input import require
from .fuzz_records import bodies_of_every_kind, manifest_tree
from .fuzz_upstream import answer_of

__all__ = ("BOMBS", "Bomb", "exploded", "forked")

_SPARE = 64 << 20
_RATIO = 64
_PATIENCE_S = 120
_DEEP = 100_000
_HUGE = b"\xff\xff\xff\xff"
_TERABYTE = 1 << 40


class Bomb(NamedTuple):
    """An input, its size, and what has to hold of it."""

    name: str
    size: int
    run: Callable[[], None]


def exploded(bomb: Bomb) -> str:
    """What is wrong with how a bomb is met; empty if nothing is."""
    reading, writing = os.pipe()
    pid = forked()
    if pid == 0:
        os.close(reading)
        os.dup2(writing, 2)
        status = 1
        try:
            _run_bounded(bomb)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], _PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with open(reading, errors="replace") as told:
            said = told.read()
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return f"{bomb.name}: not over after {_PATIENCE_S} s"
    return "" if code == 0 else f"{bomb.name}: exit status {code}\n{said[-2000:]}"


def forked() -> int:
    """`os.fork`; threads that are there belong to stores, which begin anew in a child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_bounded(bomb: Bomb) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = size + _SPARE + _RATIO * bomb.size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    bomb.run()


# ---- files


def _read(tree: Tree, *, damaged: bool = True) -> None:
    """It is read to its end, and what can't be is called damaged."""
    with looker_of(tree).read(ROLLOUT) as snapshot:
        consumed(snapshot)
        require(bool(snapshot.damage) == damaged, f"damage: {snapshot.damage}")
        require(len(snapshot.damage) < 1000, "a report without an end")


def _segment(*bodies: tuple[int, bytes]) -> Tree:
    frames = [first_frame(), *(Framed(kind, body, place) for place, (kind, body) in enumerate(bodies, 1))]
    return {f"{HOME}/000001.seg": laid_out([*frames, Framed(Kind.SEAL, b"\x92\x01\x01", len(frames))], SEED)}


def _long_frame() -> None:
    tree = _segment(*bodies_of_every_kind()[:2])
    (path,) = tree
    data = bytearray(tree[path])
    at = data.find(b"TKCF", HEADER_SIZE)
    data[at + 8 : at + 12] = _HUGE
    reseal(data, at, SEED)
    _read({path: bytes(data)})


def _forged_head(**fields: int) -> bytes:
    _, body = bodies_of_every_kind()[1]
    value = msgspec.msgpack.decode(body)
    names = StoredEntry(body).head.__struct_fields__
    for name, number in fields.items():
        value[0][names.index(name)] = number
    return msgspec.msgpack.encode(value)


def _long_arrays() -> None:
    for fields in ({"suffix": 2**40}, {"generated": 2**62}, {"shared": 2**62}, {"suffix": 2**64 - 1}):
        _read(_segment((Kind.ENTRY, _forged_head(**fields))))


def _long_experts() -> None:
    for experts in (["|u1", [2**40]], ["|V0", [2**40]], ["<f8", [2**31, 2**31]], ["|O", [0]], ["|u1", [-1, 2**40]]):
        body = msgspec.msgpack.decode(bodies_of_every_kind()[1][1])
        body[0][11] = experts
        tree = _segment((Kind.ENTRY, msgspec.msgpack.encode(body)))
        _read(tree, damaged=experts[0] != "|V0")


def _long_msgpack() -> None:
    claims = [head + _HUGE for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")]
    for claim in claims:
        for kind in Kind:
            if kind not in (Kind.SEGMENT, Kind.SEAL):
                _read(_segment((kind, claim)))
                _read(_segment((kind, b"\x93" + claim)))
        for body in (claim, b"\x9e\x01" + claim, b"\xc7\x05\x03" + claim):
            try:
                decode_content(body)
            except msgspec.DecodeError:
                continue
            raise AssertionError("a claim is decoded")


def _deep_msgpack() -> None:
    deep = b"\x91" * _DEEP
    for kind in Kind:
        if kind not in (Kind.SEGMENT, Kind.SEAL):
            _read(_segment((kind, deep + b"\x01")))
            _read(_segment((kind, b"\x9f" + deep + b"\x01" * 15)))
    meta = FinishRecord(1, 2.0, msgspec.Raw(b"\x81\xa1a" + deep + b"\x01"))
    _read(_segment((Kind.FINISH, msgspec.msgpack.encode(meta))))
    note = {f"{HOME.rpartition('/')[0]}/{INCARNATION}.retired.1.5/note-000001": b""}
    (path,) = note
    note[path] = single_frame(Kind.SETTLE, b"\x95\xa1a\x01\xa4lost\xa0" + deep + b"\x01", _seed("note-000001"))
    require(len(looker_of(note).stat(ROLLOUT).damage) == 1, "a note that nests is damaged")
    marker = single_frame(Kind.MARKER, b"\x92\x01" + deep + b"\x01", 0x746F6B63)
    require(read_marker(MemoryFiles({"FORMAT": marker[:4096]}), Layout("")) is None, "a marker that nests is damaged")


def _deep_extensions() -> None:
    """Each level is a mapping in an extension, which is decoded by a decoder of its own."""
    value = b"\x90"
    for _ in range(2000):
        inner = b"\x92\xa1k" + value
        value = b"\xc9" + len(inner).to_bytes(4, "big") + b"\x03" + inner
    try:
        decode_content(value)
    except msgspec.DecodeError:
        return
    raise AssertionError("contents that nest without an end are decoded")


def _seed(name: str) -> int:
    return segment_seed(INCARNATION, name)


def _long_manifest() -> None:
    billion = b"\xdd\x3b\x9a\xca\x00"
    for place in (6, 8, 9, 10, 11):
        _read(manifest_tree(lambda fields, place=place: _with_raw(fields, place, billion)), damaged=False)  # type: ignore[misc]
    _read(manifest_tree(lambda fields: _with_raw(fields, 9, b"\x91" * _DEEP + b"\x01")), damaged=False)
    _read(manifest_tree(lambda fields: _with_raw(fields, 12, b"\x91" * _DEEP + b"\x01")), damaged=False)


def _with_raw(fields: list[Any], place: int, claim: bytes) -> list[Any]:
    fields[place] = msgspec.Raw(claim)
    return fields


def _missing_billion() -> None:
    (data,) = _segment().values()
    _read({f"{HOME}/000001.seg": data, f"{HOME}/999999999.seg": b""})
    frames = [first_frame(number=999_999_999, predecessor=-(2**62), predecessor_end=2**62)]
    far = laid_out(frames, _seed("999999999"))
    _read({f"{HOME}/000001.seg": data, f"{HOME}/999999999.open": far})
    _read({f"{HOME}/v1/000001-{len(data)}.seg": data, f"{HOME}/v1/999999999-0.seg": b""})


def _sparse_files() -> None:
    """Files of a terabyte that hold nothing, everywhere where a file of the store may be."""
    with tempfile.TemporaryDirectory(prefix="tokcap-fuzz-") as directory:
        root = Path(directory) / "store"
        for place in ("open", "closed", "frozen", "manifest", "note"):
            with FileStore(root, sweep_every_s=0) as store:
                store.put_now(make_entry(place, "c0", [1, 2, 3], [4]))
                if place in ("frozen", "manifest", "note"):
                    with store.freeze_now(place) as snapshot:
                        version = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
                    store.note_delivery_now(place, "c0", "partly")
                if place == "note":
                    store.retire_now(place, **version)  # type: ignore[arg-type]
                    store.settle_call_now(place, "c1", "lost")
                if place == "open":
                    _stretch(root, place)
                    store.put_now(make_entry(place, "c1", [1, 2, 3], [5]))
            if place != "open":
                _stretch(root, place)
            _look_at_sparse(root, place)


def _stretch(root: Path, place: str) -> None:
    """Make the files of a rollout as long as they claim to be."""
    for path in root.glob(f"rollouts/*/{place}/**/*"):
        if path.is_file() and (place != "manifest" or path.name == "manifest"):
            path.chmod(0o600)
            os.truncate(path, _TERABYTE)


def _look_at_sparse(root: Path, place: str) -> None:
    with FileStore(root, sweep_every_s=0) as store:
        stat = store.stat_now(place)
        if place == "note":
            require(stat.state == "retired" and not stat.damage, f"{stat}")
            return
        with store.read_now(place) as snapshot:
            require("c0" in {entry.model_call_id for entry in snapshot.entries}, f"{place}: the record is gone")
        with store.freeze_now(place) as snapshot:
            found = {entry.model_call_id for entry in snapshot.entries}
            require("c0" in found and ("c1" in found or place != "open"), f"{place}: a record is gone after the freeze")
        store.sweep_now(0)


# ---- bodies and streams


def _refused(function: Callable[[], object], *kinds: type[BaseException], status: int = 0) -> None:
    try:
        function()
    except kinds as error:
        require(getattr(error, "status", status) == (status or getattr(error, "status", status)), f"{error!r}")
        return
    raise AssertionError("it is taken")


_NESTED_JSON = (b"[" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, b"[" * _DEEP + b"]" * _DEEP)


def _deep_json() -> None:
    for body in _NESTED_JSON:
        _refused(lambda body=body: decode_json(body), ValueError)  # type: ignore[misc]
        _refused(lambda body=body: lift(body), ValueError)  # type: ignore[misc]
        joiner = StreamJoiner()
        joiner.feed(b"data: " + body + b"\n\n")
        require(joiner.error is not None, "an event that nests is an error")


_DIGITS = 1_000_000


def _long_numbers() -> None:
    for body in (b"9" * _DIGITS, b"-" + b"9" * _DIGITS, b"[1" + b"0" * _DIGITS + b"]"):
        _refused(lambda body=body: decode_json(body), ValueError)  # type: ignore[misc]
    require(decode_json(b"1e" + b"9" * 1000) == float("inf"), "a float without a bound")
    ids = b'{"prompt_token_ids":[' + b"9" * 5000 + b',1],"choices":[]}'
    _refused(lambda: lift(ids), ValueError)


def _far_choices() -> None:
    """A place that is a number is no reason to fill all places before it."""
    for index in (2**31 - 1, 2**31, 2**62, -1, -(2**40)):
        joiner = StreamJoiner()
        call = {"index": index, "id": "c", "function": {"name": "f", "arguments": "{}"}}
        part = {"index": index, "delta": {"content": "x", "tool_calls": [call]}, "finish_reason": "stop"}
        joiner.feed_event({"id": "x", "choices": [part]})
        joiner.feed_event({"type": "content_block_start", "index": index, "content_block": {"type": "text"}})
        joiner.feed_event({"type": "response.output_item.added", "output_index": index, "item": {}})
        try:
            parse_answer(joiner.answer(), partial=True)
        except UnusableAnswerError:
            continue


_LINE = 8 << 20


def _endless_line() -> None:
    splitter = EventSplitter()
    for _ in range(_LINE >> 10):
        require(not list(splitter.feed(b"x" * 1024)), "an event without a line end")
    splitter = EventSplitter()
    for _ in range(_LINE >> 14):
        require(not list(splitter.feed(b"data:\n" * 2730)), "an event without a blank line")
    require(len(list(splitter.end())) == 1, "the event at the end")


def _many_members() -> None:
    empty = gzip.compress(b"") * 100_000
    _refused(lambda: decoded(empty, b"gzip", 1 << 28), RefusalError, status=400)
    _refused(lambda: Coding(b"gzip").decode(empty), ValueError)


def _zeros(size: int, bits: int) -> bytes:
    """So many zeros, compressed."""
    stream = zlib.compressobj(9, zlib.DEFLATED, bits)
    mebibyte = bytes(1 << 20)
    return b"".join([*(stream.compress(mebibyte) for _ in range(size >> 20)), stream.flush()])


def _inflating() -> None:
    once = _zeros(1 << 27, 31)
    _refused(lambda: decoded(gzip.compress(once), b"gzip, gzip", 1 << 20), RefusalError, status=413)
    _refused(lambda: decoded(once, b"gzip", 1 << 20), RefusalError, status=413)
    _refused(lambda: Coding(b"gzip").decode(once), ValueError)
    raw = _zeros(1 << 27, 15)
    _refused(lambda: decoded(raw, b"deflate", 1 << 20), RefusalError, status=413)
    _refused(lambda: decoded(raw[2:-4], b"deflate", 1 << 20), RefusalError, status=413)


# ---- the engine behind the proxy


def _floods() -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    for text in (
        head + b"x: 1\r\n" * 100_000,
        head + b"x" * 1_000_000,
        head + b"x: " + b"1" * 1_000_000 + b"\r\n\r\n",
        b"x" * 1_000_000,
        chunked + b"5;" + b"e" * 1_000_000,
        chunked + b"f" * 1_000_000,
        chunked + b"0\r\n" + b"t: 1\r\n" * 100_000,
        head + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
    ):
        pieces = [text[start : start + 65536] for start in range(0, len(text), 65536)]
        try:
            _, _, _, ended = asyncio.run(answer_of(pieces))
        except (UpstreamError, ValueError):
            continue
        require(ended == "broken off", f"{text[:60]!r} is taken for an answer")
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000
    status, *_ = asyncio.run(answer_of([interim, head + b"content-length: 0\r\n\r\n"]))
    require(status == 200, "interim answers are passed over")


# ---- configurations


def _configurations() -> None:
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    texts = {
        "laughs.yaml": laughs + "token_id_capture: {enabled: true, sink: 'a:B', sink_kwargs: {x: *a39}}\n",
        "serving.yaml": laughs + "tokcap_serving: {sampling_overrides: {x: *a39}}\n",
        "itself.yaml": "tokcap_serving: {sampling_overrides: {x: &x [*x]}}\n",
        "deep.yaml": "[" * 2_000,
        "deep.json": "[" * _DEEP,
        "long.yaml": "a: " + "9" * 10_000,
        "long.json": "9" * _DIGITS,
    }
    with tempfile.TemporaryDirectory(prefix="tokcap-fuzz-") as directory:
        for name, text in texts.items():
            path = Path(directory) / name
            path.write_text(text)
            read = serving_settings if name in ("serving.yaml", "itself.yaml") else token_id_capture_config
            _refused(lambda path=path, read=read: read(load_config(path)), ConfigError)  # type: ignore[misc]


BOMBS = (
    Bomb("a frame of 4 GiB in a file of a kilobyte", 2000, _long_frame),
    Bomb("arrays of 2^40 ids and more", 2000, _long_arrays),
    Bomb("routed experts of a terabyte", 2000, _long_experts),
    Bomb("msgpack that claims 2^32 items", 2000, _long_msgpack),
    Bomb("msgpack that nests 100,000 deep", 3 * _DEEP, _deep_msgpack),
    Bomb("extensions in extensions, 2,000 deep", 100_000, _deep_extensions),
    Bomb("a manifest with a billion entries", 10_000 + _DEEP, _long_manifest),
    Bomb("a name that leaves out a billion segments", 2000, _missing_billion),
    Bomb("files of a terabyte that hold nothing", 100_000, _sparse_files),
    Bomb("JSON that nests 100,000 deep", 6 * _DEEP, _deep_json),
    Bomb("numbers of a million digits", _DIGITS, _long_numbers),
    Bomb("choices and calls at place 2^31", 1000, _far_choices),
    Bomb("a line of 8 MiB, and one event of a million lines", _LINE, _endless_line),
    Bomb("100,000 gzip members that are empty", 2_000_000, _many_members),
    Bomb("128 MiB of zeros, compressed", 150_000, _inflating),
    Bomb("floods of headers, chunks and interim answers", 1_000_000, _floods),
    Bomb("configurations that double forty times", _DIGITS, _configurations),
)
