"""Checking the log of one incarnation, open or published: frames, records, links, the manifest."""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterable, Iterator

import msgspec
import numpy as np

from ..errors import CorruptError
from ..protocol import CallRecord
from ..store.frame import Buffer
from ..store.layout import DAMAGED, MANIFEST, Directory, LinkName, SegmentName, snapshot_links
from ..store.ledger import SEGMENT_MISSING, Damage
from ..store.log import LogReader
from ..store.manifest import Index
from ..store.records import decode_contents, decode_pieces
from ..store.snapshot import index_of, read_manifest, read_published
from ..store.unread import Changed, changed_bytes, changed_space, odd_frames
from .finding import FindingKind
from .look import APART, Look

__all__ = ("LogLook",)

_NAMED_CALLS = 1000


class LogLook(Look):
    """The part of a look that reads segments."""

    def check_open(self, directory: Directory) -> None:
        if self.quick:
            return
        reader = LogReader(self.files, self.rollout_id, directory.incarnation, self.boot_id)
        reader.keep_buffers = True
        reader.read_open(directory)
        self._say_damage(reader.ledger.damage, _without_record(reader), "may have had their record there")
        self._check_read(reader)

    def _check_read(self, reader: LogReader) -> None:
        """What a reader of a log passes over: torn tails, bytes that nobody reads, contents that nobody asked for."""
        numbers = {path: number for number, path in reader.paths.items()}
        for torn in reader.torn:
            self._check_tail(torn.path, reader.buffers[numbers[torn.path]], torn.offset, torn.end)
        for read in reader.segments:
            data, path = reader.buffers[read.number], reader.paths[read.number]
            self.result.frames += len(read.scan.frames)
            for changed in changed_bytes(read, data):
                self._meaningless(path, changed)
            for changed in odd_frames(read, data):
                self.say("warning", "meaningless", path, changed.what, place=changed[:2], advice=_ODD)
        self._check_records(reader)

    def _check_tail(self, path: str, data: Buffer, start: int, end: int) -> None:
        changed = changed_space(data, start, end)
        if changed is None:
            self.say("info", "torn", path, "a torn tail: it was never acknowledged, and is dropped", place=(start, end))
        else:
            self._meaningless(path, changed)

    def _meaningless(self, path: str, changed: Changed) -> None:
        self.say(
            "warning",
            "meaningless",
            path,
            changed.what,
            "nothing: nobody reads these bytes",
            "whatever changed them may change others: check the disk and the memory",
            place=(changed.offset, changed.end),
        )

    def _check_records(self, reader: LogReader) -> None:
        """The parts of entries that are decoded only when they are asked for."""
        for node in reader.ledger.nodes:
            stored = reader.load(node)
            try:
                decode_contents(stored.head.contents)
                decode_pieces(stored.head.pieces)
            except CorruptError as error:
                call = stored.head.model_call_id
                self.say(
                    "damage",
                    "record",
                    reader.paths[node.segment],
                    str(error),
                    f"what call {call} answered beside its ids; building the rollout raises",
                    "keep a copy, and report it: tokcap does not write this",
                    place=(node.body_start, node.body_start + node.body_length),
                    calls=[call],
                )

    def _say_damage(self, damage: Collection[Damage], calls: list[str], how: str) -> None:
        calls = calls[:_NAMED_CALLS]
        for one in damage:
            kind: FindingKind = one.kind
            named = f"calls that {how}, and have none now: {', '.join(calls)}" if calls else ""
            lost = named or (
                "what these bytes said; no call that is known misses its record"
                if kind == "missing" or one.end > one.offset
                else "nothing that is known"
            )
            advice = (
                "the rollout stays readable without them. Take the file from a backup if there is one; tokcap verify "
                "--repair takes a whole copy beside it if there is one, else keeps the damaged bytes, as known damage"
            )
            self.say("damage", kind, one.path, one.reason, lost, advice, place=(one.offset, one.end), calls=calls)

    # ---- snapshots

    def check_frozen(self, directory: Directory) -> None:
        path = directory.snapshot_path
        manifest = f"{path}/{MANIFEST}"
        index = read_manifest(self.files, directory, self.rollout_id)
        links = snapshot_links(self.files, path)
        names = self.files.listdir(path)
        for name in sorted(set(names) - {MANIFEST, DAMAGED, *map(str, links)}):
            self.stranger(f"{path}/{name}")
        if index is None:
            missing = MANIFEST not in names
            self._bad_manifest(manifest, "the manifest is missing" if missing else "the manifest is damaged")
        elif not self._decodes(index):
            self._bad_manifest(manifest, "its checksum holds, but its calls can't be decoded")
            index = None
        if index is not None and bool(index.damage) != (DAMAGED in names):
            self._say_contradiction(manifest, missing=bool(index.damage))
        self._check_links(directory, index, links)
        if self.quick:
            return
        reader, links = read_published(self.files, directory, self.rollout_id, self.boot_id)
        found = list(reader.ledger.damage)
        if index is None:
            told = [damage for damage in found if damage.path != manifest]  # that one is said already
            self._say_damage(told, _without_record(reader), "may have had their record there")
        else:
            fresh = {_place(damage) for damage in found} - {_place(damage) for damage in index.damage}
            if found:
                lost = _lost_calls(index, reader)
                words = (
                    "had their record there, or one that builds on it" if lost else "may have had their record there"
                )
                self._say_damage(found, lost or _without_record(reader), words)
            if not fresh and (other := _difference(index, index_of(reader, index.version, []))):
                self._bad_manifest(manifest, f"its checksum holds, but it says other {other} than the segments")
        self._check_read(reader)
        if index is not None:
            self._check_stated(directory, index, links)

    def _say_contradiction(self, manifest: str, *, missing: bool) -> None:
        self.say(
            "warning",
            "manifest",
            manifest,
            "it and the file `damaged` beside it contradict each other: "
            + ("it states damage, and the file is missing" if missing else "it states no damage"),
            "nothing: the manifest counts; if it got lost too, "
            + ("the rollout might look whole" if missing else "the rollout would look damaged"),
            "tokcap verify --repair makes the file again"
            if missing
            else "remove the file `damaged`, if nothing else is said of this rollout",
        )

    def _bad_manifest(self, path: str, what: str) -> None:
        self.say(
            "damage",
            "manifest",
            path,
            what,
            "nothing: it is an index, and the segments hold what it says; opening is slower",
            "tokcap verify --repair makes it again",
        )

    def _decodes(self, index: Index) -> bool:
        try:
            index.calls()
        except msgspec.DecodeError:
            return False
        return True

    def _check_stated(self, directory: Directory, index: Index, links: list[LinkName]) -> None:
        """Links that the manifest doesn't know are read only if it is damaged."""
        stated = {LinkName(segment.number, segment.length) for segment in index.segments}
        for link in links:
            if link not in stated and not _is_told(index, link.number):
                self.stranger(f"{directory.snapshot_path}/{link}")

    def _check_links(self, directory: Directory, index: Index | None, links: list[LinkName]) -> None:
        """Each link is a segment of the incarnation, as far as that is still there, and long enough."""
        by_number = {link.number: link for link in links}
        stated = {} if index is None else {segment.number: segment for segment in index.segments}
        for link in links:
            path = f"{directory.snapshot_path}/{link}"
            size = self.files.stat(path).st_size
            if self.quick and size < link.length:
                self.say("damage", "bytes", path, "the end of the segment is missing", place=(size, link.length))
        if self.quick:
            for number, segment in stated.items():
                if number not in by_number:
                    path = f"{directory.snapshot_path}/{LinkName(number, segment.length)}"
                    self.say("damage", "missing", path, SEGMENT_MISSING)
        for name in directory.segments:
            path = f"{directory.incarnation_path}/{name}"
            there = self.files.stat(path)
            if not stat.S_ISREG(there.st_mode):
                continue  # the freeze linked it nowhere, and said so
            published = by_number.get(name.number)
            if published is None:
                self._unlinked(path, name, index)
                continue
            linked = self.files.stat(f"{directory.snapshot_path}/{published}")
            if (linked.st_ino, linked.st_dev) != (there.st_ino, there.st_dev):
                self.result.count(APART, path)
                if not self.quick:
                    self._compare(path, f"{directory.snapshot_path}/{published}", published.length)

    def _unlinked(self, path: str, name: SegmentName, index: Index | None) -> None:
        if index is None:
            self.say(
                "damage",
                "missing",
                path,
                "the snapshot has no link to this segment, and no manifest that says whether it had one",
                "the calls whose records are in it",
                "if it belongs to the snapshot, make the hard link again: the length stands in its name",
            )
        elif name.number not in {segment.number for segment in index.segments} and not _is_told(index, name.number):
            self.stranger(path)

    def _compare(self, path: str, linked: str, length: int) -> None:
        """A segment and its link that are two files: both were the same once."""
        one, other = self._read(path), self._read(linked)
        size = min(len(one), len(other))
        if one[:size] != other[:size] or size < length:
            differ = np.flatnonzero(np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size))
            at = int(differ[0]) if len(differ) else size
            self.say(
                "warning",
                "meaningless",
                path,
                "it differs from the snapshot's copy of it",
                "nothing, if the snapshot's copy is whole: only that is read",
                "whatever changed it may change others; if the snapshot's copy is the damaged one, this one has its "
                "bytes: tokcap verify --repair puts it in the place of the other",
                place=(at, at + 1),
            )
        changed = changed_space(one, size, len(one))  # of a longer one
        if changed is not None:
            self._meaningless(path, changed)

    def _read(self, path: str) -> bytes:
        try:
            fd = self.files.open(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
                return b""  # no file: said by whoever reads the log
            raise
        try:
            return self.files.read(fd, self.files.fstat(fd).st_size, 0)
        finally:
            self.files.close(fd)


_ODD = "keep a copy, and report it: tokcap does not write this"


def _place(damage: Damage) -> tuple[str, int]:
    return damage.path.rpartition("/")[2][:6], damage.offset


def _is_told(index: Index, number: int) -> bool:
    """Whether a manifest says that this segment is lost or damaged: its file may be what is left, or brought back."""
    return any(_place(damage)[0] == f"{number:06d}"[:6] for damage in index.damage)


def _lost_calls(index: Index, reader: LogReader) -> list[str]:
    """Calls that were recorded when the snapshot was published, and have no record now."""
    now = reader.ledger.calls
    lost: list[str] = []
    for record in index.calls():
        name = record.model_call_id
        if name and record.outcome in ("recorded", "aborted", "conflict"):
            call = now.get(name)
            if call is None or (call.outcome != record.outcome and call.outcome in ("lost", "open", "no_generation")):
                lost.append(name)
    return lost


def _without_record(reader: LogReader) -> list[str]:
    calls = reader.ledger.calls.values()
    return [call.model_call_id for call in calls if call.model_call_id and call.outcome in ("lost", "open")]


def _difference(stated: Index, found: Index) -> str:
    """In what a manifest says other than the segments; empty if in nothing."""
    if stated.node_table != found.node_table or stated.chosen != found.chosen:
        return "records"
    if (bytes(stated.meta), stated.finished_at) != (bytes(found.meta), found.finished_at):
        return "of `finish`"
    if stated.incomplete != found.incomplete:
        return "of its completeness"
    if bytes(stated.call_table) == bytes(found.call_table):
        return ""
    if list(_named(stated.calls())) != list(_named(found.calls())):
        return "calls"
    return ""


def _named(calls: Iterable[CallRecord]) -> Iterator[CallRecord]:
    """Without the text in which damage names files: those have other names now."""
    return (msgspec.structs.replace(call, detail="") for call in calls if call.model_call_id)
