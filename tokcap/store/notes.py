"""Notes: what is said of a rollout when its log is closed. Each is a small file that appears whole.

Beside a snapshot: statements that change no outcome (deliveries). Beside a tombstone: late marks and settlements.
`stat` shows them; the next version of a snapshot takes them in.
"""

from __future__ import annotations

import contextlib
import errno
import os
from zlib import crc32

import msgspec

from .buffers import size_to_read
from .files import Files
from .frame import LAST_IN_BATCH, Kind, frame_header, segment_seed
from .ledger import Damage
from .records import DeliveryRecord, SettleRecord, encode_record
from .scan import scan

__all__ = ("Note", "Notes")

_decode_settle = msgspec.msgpack.Decoder(SettleRecord).decode
_decode_delivery = msgspec.msgpack.Decoder(DeliveryRecord).decode

Note = SettleRecord | DeliveryRecord


class Notes:
    """The notes in the directory of an incarnation or a tombstone."""

    def __init__(self, files: Files, path: str, incarnation: str, numbers: list[int]) -> None:
        self.files, self.path, self.incarnation = files, path, incarnation
        self.numbers = numbers
        self.damage: list[Damage] = []
        """What the last `read` could not read."""

    def _name(self, number: int) -> str:
        return f"note-{number:06d}"

    def add(self, kind: Kind, record: Note) -> None:
        """Write a note durably; one that says what is said already is left out."""
        call, kind_of_note = record.model_call_id, type(record)
        said = [note for note in self.read() if type(note) is kind_of_note and note.model_call_id == call]
        if kind_of_note is DeliveryRecord:
            said = said[-1:]  # a later one replaces an earlier one
        if any(_says_the_same(record, known) for known in said):
            self.files.fsync_directory(self.path)  # whoever wrote it may have died before this
            return
        number = self.numbers[-1] + 1 if self.numbers else 1
        name = self._name(number)
        body = encode_record(record)
        seed = segment_seed(self.incarnation, name)
        header = frame_header(kind, LAST_IN_BATCH, len(body), 0, 0, 0, crc32(body, seed), seed)
        temporary = f"{self.path}/tmp-{os.urandom(8).hex()}"
        fd = self.files.create(temporary)
        try:
            self.files.write(fd, [header, body], 0)
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)
        self.files.rename(temporary, f"{self.path}/{name}")
        try:
            self.files.fsync_directory(self.path)
        except OSError:
            # A second sync could succeed without having done anything; the next try writes it again.
            with contextlib.suppress(OSError):
                self.files.unlink(f"{self.path}/{name}")
            raise
        self.numbers.append(number)

    def read(self) -> list[Note]:
        """All notes that are whole; the others are in `damage`."""
        notes: list[Note] = []
        self.damage = []
        for number in self.numbers:
            name = self._name(number)
            try:
                fd = self.files.open(f"{self.path}/{name}")
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENXIO):
                    raise
                if error.errno != errno.ENOENT:  # that one was only renamed meanwhile
                    self._damaged(name, 0, 0)
                continue
            try:
                data = self.files.read(fd, size_to_read(self.files, fd), 0)
            finally:
                self.files.close(fd)
            found = scan(data, segment_seed(self.incarnation, name), limit=len(data), sealed_end=len(data))
            if not found.frames:
                self._damaged(name, 0, len(data))
            for frame in found.frames:
                body = memoryview(data)[frame.body_start : frame.body_end]
                try:
                    notes.append(_decode_settle(body) if frame.kind == Kind.SETTLE else _decode_delivery(body))
                except (msgspec.DecodeError, RecursionError):
                    self._damaged(name, frame.offset, frame.end)
        return notes

    def _damaged(self, name: str, offset: int, end: int) -> None:
        self.damage.append(Damage(f"{self.path}/{name}", offset, end, "the note can't be read"))


def _says_the_same(one: Note, other: Note) -> bool:
    if isinstance(one, SettleRecord) and isinstance(other, SettleRecord):
        return (one.model_call_id, one.outcome) == (other.model_call_id, other.outcome)
    if isinstance(one, DeliveryRecord) and isinstance(other, DeliveryRecord):
        return (one.model_call_id, one.delivered) == (other.model_call_id, other.delivered)
    return False
