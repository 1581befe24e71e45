"""Rows that are kept from one look to the next, in the cache directory of this user; never in a store.

One file per store, a sequence of blocks. Each has a checksum, and the key of what it is about: the version of what it
holds, and the store's place, device and inode. Rows of later blocks replace those of earlier ones. What is new is
appended in one write; a file that is damaged, or mostly outdated, is written anew and renamed into its place. Several
processes may do so at once: at worst one of them has worked for nothing. Whatever fails costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from ..version import __version__
from .row import RolloutRow

__all__ = ("Kept", "RowCache", "cache_directory", "decode_rows", "encode_rows")

_FORMAT = 3
"""One more whenever rows of the same directory tell something else, or fingerprints are made in another way."""

_BLOCK = struct.Struct("<8s16sQI")
_MAGIC = b"tokrows\n"
_ROWS_PER_BLOCK = 5000
_WASTE = 1000
"""Outdated rows that a file may hold beside half as many as it has."""


class Kept(NamedTuple):
    """A row, and the fingerprint of the directory that it tells of (`Seen`)."""

    mark: int
    folder: str
    names: str
    row: RolloutRow


# ---- rows as columns, which are read five times as fast

_POOLED = ("state", "group", "damage", "models", "reasons", "outcomes", "policy_versions", "error")
"""Columns with few different values."""
_FIELDS = msgspec.structs.fields(RolloutRow)


def _column_type(field: msgspec.structs.FieldInfo) -> Any:
    if field.name in _POOLED:
        return tuple[list[field.type], list[int]]  # type: ignore[name-defined]
    if field.name == "metrics":
        return tuple[list[tuple[str, ...]], list[int], list[Any]]
    return list[field.type]  # type: ignore[name-defined]


_Columns: Any = msgspec.defstruct(
    "_Columns",
    [("mark", list[int]), ("folder", list[str]), ("names", list[str])]
    + [(field.name, _column_type(field)) for field in _FIELDS],
    array_like=True,
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Columns).decode


def encode_rows(kept: Sequence[Kept]) -> bytes:
    """Rows as one piece of bytes."""
    columns = [[one.mark for one in kept], [one.folder for one in kept], [one.names for one in kept]]
    for field in _FIELDS:
        values = [getattr(one.row, field.name) for one in kept]
        if field.name in _POOLED:
            columns.append(_pooled(values))
        elif field.name == "metrics":
            names, places = _pooled([tuple(value) for value in values])
            columns.append([names, places, list(chain.from_iterable(value.values() for value in values))])
        else:
            columns.append(values)
    return _encode(columns)


def _pooled(values: list[Any]) -> list[Any]:
    places: dict[bytes, int] = {}
    pool: list[Any] = []
    found = []
    for value in values:
        key = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _encode(value)
        place = places.get(key)
        if place is None:
            place = places[key] = len(pool)
            pool.append(value)
        found.append(place)
    return [pool, found]


def decode_rows(data: bytes | memoryview) -> Iterator[Kept]:
    """The rows of `encode_rows`. Raises `msgspec.DecodeError`, `IndexError` or `ValueError` for what is none."""
    read = _decode(data)
    columns = []
    for field in _FIELDS:
        column = getattr(read, field.name)
        if field.name == "metrics":
            columns.append(_metrics(*column))
        elif field.name not in _POOLED:
            columns.append(column)
        else:
            pool, places = column
            if field.name in ("outcomes", "policy_versions"):  # nobody shares them
                columns.append([pool[place].copy() for place in places])
            else:
                columns.append([pool[place] for place in places])
    rows = map(RolloutRow, *columns)
    return map(Kept, read.mark, read.folder, read.names, rows)


def _metrics(names: list[tuple[str, ...]], places: list[int], values: list[Any]) -> list[dict[str, Any]]:
    found = []
    done = 0
    for place in places:
        keys = names[place]
        begun, done = done, done + len(keys)
        found.append(dict(zip(keys, values[begun:done], strict=True)))
    return found


# ---- the file


def cache_directory() -> str:
    """`$XDG_CACHE_HOME/tokcap`, or `~/.cache/tokcap`; empty if there is no such place."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return f"{base}/tokcap" if os.path.isabs(base) else ""


class RowCache:
    """The rows that are kept of one store. No method raises because of the file."""

    def __init__(self, directory: str) -> None:
        self.rows: dict[str, Kept] = {}
        """By rollout id."""
        self._path, self._about = "", b""
        self._written = 0
        """Rows in the file, outdated ones included."""
        self._inode = 0
        """Of the file that was read to its end; 0: there is none, or it is damaged."""
        try:
            place, there = os.path.realpath(directory), os.stat(directory)
        except OSError:
            return
        folder = cache_directory()
        if folder:
            self._path = f"{folder}/rows-{blake2b(os.fsencode(place), digest_size=16).hexdigest()}"
        # Fingerprints are hashes, which another version of Python may make in another way.
        about = (_FORMAT, __version__, sys.version, sys.hash_info, place, there.st_dev, there.st_ino)
        self._about = blake2b(repr(about).encode("utf-8", "surrogateescape"), digest_size=16).digest()

    def load(self) -> None:
        """Read what is there."""
        if not self._path:
            return
        try:
            data, inode = _content(self._path)
        except OSError:
            return
        for block in self._blocks(data):
            if block is None:
                return
            try:
                found = [(kept.row.rollout_id, kept) for kept in decode_rows(block)]
            except (msgspec.DecodeError, IndexError, ValueError, TypeError):
                return
            self._written += len(found)
            self.rows.update(found)
        self._inode = inode

    def _blocks(self, data: bytes) -> Iterator[memoryview | None]:
        """The body of each block; None for the first one that is damaged, or about something else."""
        view, offset = memoryview(data), 0
        while offset < len(data):
            if offset + _BLOCK.size > len(data):
                yield None
                return
            magic, about, length, crc = _BLOCK.unpack_from(view, offset)
            body = view[offset + _BLOCK.size : offset + _BLOCK.size + length]
            offset += _BLOCK.size + length
            if magic != _MAGIC or about != self._about or len(body) != length or crc32(body, len(body)) != crc:
                yield None
                return
            yield body

    def add(self, kept: Iterable[Kept]) -> None:
        """Keep these rows, too, or in place of others. Those without a mark are left out."""
        new = [one for one in kept if one.mark]
        if not self._path or not new:
            return
        self.rows.update((one.row.rollout_id, one) for one in new)
        with contextlib.suppress(OSError):
            if not (self._inode and self._append(new)):
                self._write(sorted(self.rows.values(), key=lambda one: one.row.rollout_id))

    def tidy(self, ids: Iterable[str]) -> None:
        """Write the file anew with the rows of these rollouts alone, if it holds many others."""
        wanted = set(ids)
        if self._path and self._inode and 2 * self._written > 3 * len(wanted) + 2 * _WASTE:
            with contextlib.suppress(OSError):
                self._write([self.rows[name] for name in sorted(wanted & self.rows.keys())])

    def _append(self, new: list[Kept]) -> bool:
        """In one write, so that nothing of another process comes between. False if the file is another one by now."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(fd).st_ino != self._inode:
                return False
            data = b"".join(self._encoded(new))
            if os.write(fd, data) < len(data):
                self._inode = 0
            self._written += len(new)
            return True
        finally:
            os.close(fd)

    def _write(self, kept: list[Kept]) -> None:
        folder = os.path.dirname(self._path)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        temporary = f"{self._path}.{os.urandom(8).hex()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                for data in self._encoded(kept):
                    left = memoryview(data)
                    while left:
                        left = left[os.write(fd, left) :]
                inode = os.fstat(fd).st_ino
            finally:
                os.close(fd)
            os.replace(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._inode, self._written = inode, len(kept)

    def _encoded(self, kept: list[Kept]) -> Iterator[bytes]:
        for first in range(0, len(kept), _ROWS_PER_BLOCK):
            try:
                body = encode_rows(kept[first : first + _ROWS_PER_BLOCK])
            except (UnicodeEncodeError, OverflowError, TypeError):  # a name that is no text; it is looked at again
                continue
            yield _BLOCK.pack(_MAGIC, self._about, len(body), crc32(body, len(body))) + body


def _content(path: str) -> tuple[bytes, int]:
    """The bytes of a file of this user, and its inode. Raises `OSError` for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        there = os.fstat(fd)
        if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid():
            raise OSError("not a file of this user")
        with open(fd, "rb", closefd=False) as file:
            return file.read(), there.st_ino
    finally:
        os.close(fd)
