"""Notes: what is said of a rollout when its log is closed. Each is a small file that appears whole.

Beside a snapshot: statements that change no outcome (deliveries). Beside a tombstone: late marks and settlements.
`stat` shows them; the next version of a snapshot takes them in.
"""

from __future__ import annotations

import os
from zlib import crc32

import msgspec

from .files import Files
from .frame import LAST_IN_BATCH, Kind, frame_header, scan, segment_seed
from .records import DeliveryRecord, SettleRecord, encode_record

__all__ = ("Note", "Notes")

_decode_settle = msgspec.msgpack.Decoder(SettleRecord).decode
_decode_delivery = msgspec.msgpack.Decoder(DeliveryRecord).decode

Note = SettleRecord | DeliveryRecord


class Notes:
    """The notes in the directory of an incarnation or a tombstone."""

    def __init__(self, files: Files, path: str, incarnation: str, numbers: list[int]) -> None:
        self.files, self.path, self.incarnation = files, path, incarnation
        self.numbers = numbers

    def _name(self, number: int) -> str:
        return f"note-{number:06d}"

    def add(self, kind: Kind, record: Note) -> None:
        """Write a note durably; one that says what is said already is left out."""
        if any(_says_the_same(record, known) for known in self.read()):
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
        self.files.fsync_directory(self.path)
        self.numbers.append(number)

    def read(self) -> list[Note]:
        """All notes that are whole."""
        notes: list[Note] = []
        for number in self.numbers:
            name = self._name(number)
            try:
                fd = self.files.open(f"{self.path}/{name}")
            except OSError:
                continue
            try:
                data = self.files.read(fd, self.files.fstat(fd).st_size, 0)
            finally:
                self.files.close(fd)
            found = scan(data, segment_seed(self.incarnation, name), limit=len(data), sealed_end=len(data))
            for frame in found.frames:
                body = memoryview(data)[frame.body_start : frame.body_end]
                try:
                    notes.append(_decode_settle(body) if frame.kind == Kind.SETTLE else _decode_delivery(body))
                except msgspec.DecodeError:
                    continue
        return notes


def _says_the_same(one: Note, other: Note) -> bool:
    if isinstance(one, SettleRecord) and isinstance(other, SettleRecord):
        return (one.model_call_id, one.outcome) == (other.model_call_id, other.outcome)
    if isinstance(one, DeliveryRecord) and isinstance(other, DeliveryRecord):
        return (one.model_call_id, one.delivered) == (other.model_call_id, other.delivered)
    return False
