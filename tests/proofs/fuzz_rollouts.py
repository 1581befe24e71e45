"""Targets: rollouts that real writers left, damaged, also with checksums that hold, and lived on with."""

from __future__ import annotations

import atexit
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from tests.damage import LATER_BOOT, Bench, Golden, Tree, build_store, fingerprint, make_entry
from tokcap.errors import ConflictError, CorruptError, FrozenError, NewerFormatError, RetiredError, TokcapError
from tokcap.store import FileStore
from tokcap.store.frame import SPACE, Kind, segment_seed
from tokcap.store.manifest import IndexedSegment
from tokcap.store.records import StoredEntry
from tokcap.store.root import boot_id
from tokcap.store.scan import scan

from .fuzz_files import consumed, frames_of, laid_out, looker_of, reseal, single_frame
from .fuzz_input import Choices, Target, changed, require

__all__ = ("TARGETS",)

_KINDS = ("open", "closed", "whole", "frozen", "retired")


@cache
def _stores() -> tuple[dict[str, Golden], Tree]:
    with tempfile.TemporaryDirectory(prefix="tokcap-fuzz-") as directory:
        return build_store(Path(directory) / "store")


class _Damaged:
    """A rollout under damage."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden
        self.tree: Tree = dict(golden.tree)
        self.renamed = False
        """Whether names were added, changed or taken away."""
        self.forged: set[str] = set()
        """Model calls of which records were made up, with checksums that hold."""
        self.forging = False

    def seed(self, path: str) -> int:
        name = path.rpartition("/")[2]
        version = path.rpartition("/")[0].rpartition("/v")[2]
        if name == "manifest":
            name = f"manifest-{version}"
        elif not name.startswith("note-"):
            name = name[:6]
        return segment_seed(self.golden.incarnation, name)


def _is_segment(path: str) -> bool:
    return path.endswith((".seg", ".open", ".torn"))


def _damage(choices: Choices, kinds: tuple[str, ...] = _KINDS) -> _Damaged:
    found = _Damaged(_stores()[0][choices.one_of(kinds)])
    for _ in range(1 + choices.byte() % 4):
        if not found.tree:
            break
        path = choices.one_of(sorted(found.tree))
        way = choices.byte() % 11
        if way < 5:
            _overwrite(choices, found, path, way)
        elif way < 9 and found.tree[path]:
            _forge(choices, found, path, way)
        else:
            _rename(choices, found, path)
    return found


def _overwrite(choices: Choices, found: _Damaged, path: str, way: int) -> None:
    data = bytearray(found.tree[path])
    at = choices.number(len(data) + 1)
    if way == 0:
        data[at : at + 1] = bytes([choices.byte()])
    elif way == 1:
        del data[at:]
    elif way == 2:
        data[at : at + choices.byte()] = choices.some(40)
    elif way == 3:
        length = 1 + choices.byte()
        data[at : at + length] = choices.one_of((b"\0", b"\xff", SPACE)) * length
    else:
        other = found.tree[choices.one_of(sorted(found.tree))]
        start = choices.number(len(other) + 1)
        data[at : at + 100] = other[start : start + 100]
    found.tree[path] = bytes(data)


def _forge(choices: Choices, found: _Damaged, path: str, way: int) -> None:
    """Change what a file says, and make its checksums hold."""
    found.forging = True
    seed, data = found.seed(path), found.tree[path]
    if way == 5:  # a header
        frames = scan(data, seed, limit=len(data), believe_tail=True).frames
        if frames:
            forged, at = bytearray(data), choices.one_of(frames).offset
            place = at + choices.one_of((4, 5, 6, 8, 9, 10, 12, 14, 16, 19, 20, 24))
            forged[place : place + 1] = bytes([choices.byte()])
            reseal(forged, at, seed)
            found.forged.add("*")
            found.tree[path] = bytes(forged)
        return
    frames_there = frames_of(data, seed)
    if not frames_there:
        return
    place = choices.number(len(frames_there))
    frame = frames_there[place]
    body = _forged_body(choices, frame.body, way)
    for each in (frame.body, body):
        found.forged.add(_call_of(each))
    frames_there[place] = frame._replace(body=body, kind=choices.one_of(list(Kind)) if way == 8 else frame.kind)
    if not _is_segment(path):
        found.tree[path] = single_frame(frames_there[0].kind, frames_there[0].body, seed)
        return
    forged_segment = laid_out(frames_there, seed)
    if "-" not in path.rpartition("/")[2]:
        found.tree[path] = forged_segment
        return
    # The name of a link says how long it is, and its manifest, too.
    del found.tree[path]
    folder, _, name = path.rpartition("/")
    found.tree[f"{folder}/{name[:6]}-{len(forged_segment)}.seg"] = forged_segment
    manifest = f"{folder}/manifest"
    if manifest in found.tree and choices.byte() % 2:
        found.tree[manifest] = _manifest_of(found, manifest, int(name[:6]), forged_segment)


def _manifest_of(found: _Damaged, path: str, number: int, segment: bytes) -> bytes:
    seed = found.seed(path)
    frames = frames_of(found.tree[path], seed)
    try:
        index = msgspec.msgpack.decode(frames[0].body)
        for place, known in enumerate(index[6]):
            if known[0] == number:
                index[6][place] = msgspec.to_builtins(IndexedSegment(number, len(segment), zlib.crc32(segment)))
        return single_frame(Kind.MANIFEST, msgspec.msgpack.encode(index), seed)
    except (IndexError, TypeError, msgspec.DecodeError):  # it was forged already
        return found.tree[path]


def _forged_body(choices: Choices, body: bytes, way: int) -> bytes:
    if way == 6:
        try:
            return msgspec.msgpack.encode(changed(choices, msgspec.msgpack.decode(body)))
        except (msgspec.DecodeError, OverflowError, TypeError):
            return body
    at = choices.number(len(body) + 1)
    return body[:at] + choices.some(20) + body[at + choices.byte() % 20 :]


def _call_of(body: bytes) -> str:
    """The call that a record is of; anything if it is none."""
    try:
        return StoredEntry(body).head.model_call_id
    except (msgspec.DecodeError, RecursionError):
        return ""


def _rename(choices: Choices, found: _Damaged, path: str) -> None:
    found.renamed = True
    data = found.tree[path] if choices.byte() % 2 else found.tree.pop(path)
    folder, _, name = path.rpartition("/")
    at = choices.number(len(name) + 1)
    added = choices.one_of(("", "0", "9", "999999", "-", ".", "v1", ".seg", "x", "\u0663"))
    changed_name = f"{name[:at]}{added}{name[at + choices.byte() % 4 :]}"
    if changed_name not in ("", ".", ".."):
        found.tree[f"{folder}/{changed_name}"] = data


# ---- read from memory


def _read(data: bytes) -> None:
    choices = Choices(data)
    found = _damage(choices)
    looker = looker_of(found.tree, choices.one_of((boot_id(), LATER_BOOT)))
    name = found.golden.rollout_id
    try:
        looker.stat(name)
        with looker.read(name) as snapshot:
            entries = consumed(snapshot)
    except TokcapError:
        return
    if "*" in found.forged:
        return
    for entry in entries:
        known = found.golden.contents.get((entry[1], entry[2]), [])
        require(entry in known or entry[1] in found.forged or "" in found.forged, f"another record of {entry[1]}")


def _seeds() -> list[bytes]:
    plain = [
        bytes([kind, 0, file, way, 90, 0, 7, 3, 1, 2, 3]) for kind in range(5) for file in (0, 2) for way in (0, 6)
    ]
    return [*plain, bytes([3, 2, 0, 7, 9, 0, 5, 1, 2, 3, 4, 5, 1]), bytes([0, 1, 3, 9, 1, 4, 3, 1])]


# ---- lived on with, on a disk


class _Life:
    """One directory in memory, restored for each input."""

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self.used = 0

    @contextmanager
    def bench(self) -> Iterator[Bench]:
        self.used += 1
        if self._bench is not None and self.used % 200 == 0:
            self.close()
        if self._bench is None:
            self._bench = Bench(_stores()[1], directory=tempfile.tempdir)
        try:
            yield self._bench
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            bench.close()


_LIFE = _Life()
atexit.register(_LIFE.close)


def _live(data: bytes) -> None:
    choices = Choices(data)
    found = _damage(choices)
    name = found.golden.rollout_id
    with _LIFE.bench() as bench:
        bench.restore({path: part for path, part in found.tree.items() if len(path.rpartition("/")[2]) < 200})
        _operate(choices, found, bench.one, name)
        # Whatever was there: after a reset the id can be used again.
        _begin_anew(bench.other, name)


def _operate(choices: Choices, found: _Damaged, store: FileStore, name: str) -> None:
    state = ""
    for _ in range(1 + choices.byte() % 5):
        operation = choices.byte() % 6
        try:
            if operation == 0:
                store.put_now(make_entry(name, f"new-{choices.byte() % 3}", [1, 2, 3], [4]))
            elif operation == 1:
                store.settle_call_now(name, "late", choices.one_of(("lost", "aborted", "no_generation")))
            elif operation == 2:
                store.note_delivery_now(name, "c0", "partly")
            elif operation == 3:
                state = store.stat_now(name).state
            elif operation == 4:
                store.begin_call_now(name, "begun", request_digests=(b"d" * 16,))
            else:
                state = "to freeze"
                with store.freeze_now(name) as snapshot:
                    consumed(snapshot)
                    if choices.byte() % 2:
                        store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        except (FrozenError, RetiredError, NewerFormatError, ConflictError):
            continue
        except CorruptError as error:
            # Damage is reported, not raised, but where nobody can tell which of two incarnations is meant.
            require(found.renamed or "incarnations" in str(error), f"{state}: {error}")


def _begin_anew(store: FileStore, name: str) -> None:
    try:
        store.reset_now(name)
    except CorruptError as error:
        require("incarnations" in str(error), f"can't be reset: {error}")
        return
    entry = make_entry(name, "anew", [1, 2, 3], [4, 5])
    store.put_now(entry)
    with store.freeze_now(name) as snapshot:
        require([fingerprint(each) for each in snapshot.entries] == [fingerprint(entry)], "a rollout that begins anew")
        require(not snapshot.incomplete and not snapshot.damage, "damage in a rollout that begins anew")


TARGETS = (
    Target("rollouts", "rollouts that real writers left, damaged and forged, as they are read", _read, _seeds),
    Target("lives", "the same on a disk, with everything that is done to a rollout", _live, _seeds, 512),
)
