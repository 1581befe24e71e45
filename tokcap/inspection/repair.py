"""Repairing what a check found, conservatively: nothing that can be read gets lost, nothing becomes complete.

- A manifest or FORMAT that is damaged, missing, or says other than the segments: kept aside, made again.
- What stops a rollout from being read or swept (a file where a directory belongs, a name that belongs to no store, an
  incarnation that holds nothing beside another one, or one behind a tombstone, a rollout in the wrong place): moved to
  quarantine. What is frozen stays frozen, and what is retired stays retired.
- Damaged bytes, records that can't be decoded, missing segments, notes that can't be read: stay. tokcap reads around
  them and names what is lost. The bytes are copied to quarantine, and noted as known.
- Torn tails, leftovers of crashes, permissions: nothing; they are the sweep's, or yours.
- A link of a snapshot that is missing or damaged, while the segment beside it is still what the manifest states: linked
  again.
- Two incarnations that both hold records: nothing; only you know which of them counts.

A rollout is repaired under its fence, and read before and after: if anything is gone that was there, all is undone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from zlib import crc32

import msgspec

from ..entry import content_digest
from ..errors import CorruptError, TokcapError
from ..store import FileStore
from ..store.files import Files, Modes, durability_error
from ..store.layout import (
    DAMAGED,
    MANIFEST,
    Directory,
    Layout,
    LinkName,
    kind_below,
    kind_of_name,
    look_into,
    remove_tree,
)
from ..store.ledger import Damage
from ..store.lifecycle import Lifecycle
from ..store.log import LogReader
from ..store.looking import Looker
from ..store.manifest import IndexedSegment, encode_manifest
from ..store.publication import publish
from ..store.rollout import Rollout
from ..store.root import check_directory, group_id_of, read_marker
from ..store.snapshot import index_of, links_of, load_buffer, read_manifest, read_published
from .check import Place, check_place
from .finding import Finding, place_of
from .opening import open_to_change
from .quarantine import Quarantine, known_places

__all__ = ("Repaired", "repair")

_STAYS = ("bytes", "record", "missing", "note")


class Repaired(msgspec.Struct, frozen=True):
    """What was done about one rollout, or about what belongs to none."""

    rollout_id: str
    """Empty: the store itself."""
    done: tuple[str, ...]
    """In words; with `dry_run`, what would be done."""
    left: tuple[str, ...] = ()
    """What is left to you, and why, in words."""
    quarantine: str = ""
    """The directory that has what was moved, copies of damaged bytes, and the note."""


def repair(
    store: FileStore | str | os.PathLike[str] | None,
    findings: Collection[Finding],
    *,
    dry_run: bool = False,
    group: str | int | None = None,
) -> Iterator[Repaired]:
    """Mend what a check found, as far as that is safe; each rollout is checked again under its fence first.

    store: its directory, or a store on it. group: as for `FileStore`. Raises what `open_to_change` raises,
    `BusyError` if somebody holds a rollout too long, `DurabilityError` if the disk refuses.
    """
    place = check_place(store)
    root = place.layout.root
    place = msgspec.structs.replace(place, files=Files(Modes(group_id_of(group))))
    findings = [finding for finding in findings if finding.level in ("damage", "warning")]
    ids = sorted({finding.rollout_id for finding in findings if finding.rollout_id and finding.kind != "wrong_shard"})
    outside = [f for f in findings if not f.rollout_id or f.kind == "wrong_shard"]
    outside += [f for f in findings if f.kind == "not_a_directory" and f.path == place.layout.rollout(f.rollout_id)]
    if not dry_run:
        check_directory(place.files, root)
    done = _repair_outside(place, outside, dry_run)
    if done is not None:
        yield done
    if dry_run:
        checker = place.rollouts()
        for rollout_id in ids:
            plan = _Plan(place, rollout_id, checker.check(rollout_id).findings)
            if plan.anything:
                yield Repaired(rollout_id, tuple(plan.words), tuple(plan.left))
        return
    if not ids:
        return
    with open_to_change(root, group=group) as opened:
        for rollout_id in ids:
            # Under the fence of the rollout, waiting for it as any operation does.
            result = opened.perform_now(_Repair(place, rollout_id))
            if isinstance(result, Repaired):
                yield result


def _repair_outside(place: Place, findings: list[Finding], dry_run: bool) -> Repaired | None:
    moving = [f for f in findings if f.kind in ("name", "not_a_directory", "wrong_shard") and _is_in_the_way(f)]
    markers = [f for f in findings if f.kind == "marker" and read_marker(place.files, place.layout) is None]
    if not moving and not markers:
        return None
    words = [f"moved {f.path} to quarantine{_whole(f)}" for f in moving] + [f"made {f.path} again" for f in markers]
    if dry_run:
        return Repaired("", tuple(words))
    quarantine = Quarantine(place.files, place.layout)
    try:
        for marker in markers:
            if os.path.isfile(marker.path) and not os.path.islink(marker.path):
                quarantine.keep_bytes(marker.path, 0, 0)
            elif os.path.lexists(marker.path):
                moving.append(marker)
        quarantine.note([*moving, *markers], [], [f.path for f in moving], words)
        for finding in moving:
            quarantine.move(finding.path)
    except OSError as error:
        raise durability_error(error, "can't move things to quarantine", place.layout.root) from error
    if markers:
        open_to_change(place.layout.root, group=place.files.modes.group_id).close_now()
    return Repaired("", tuple(words), (), quarantine.path)


def _is_in_the_way(finding: Finding) -> bool:
    """Whether it still is: a check may have found it long ago, and nothing fences it."""
    there = os.path.lexists(finding.path)
    return there and not (finding.kind == "not_a_directory" and _is_directory(finding.path))


def _whole(finding: Finding) -> str:
    """What not to forget of what is moved: rollouts are in it, and they may be whole."""
    return f", and nothing is lost of it yet: {finding.what}" if finding.kind == "wrong_shard" else ""


# ---- one rollout


class _Plan:
    """What is to be done about the findings of one rollout."""

    def __init__(self, place: Place, rollout_id: str, findings: list[Finding]) -> None:
        self.place, self.rollout_id = place, rollout_id
        known = known_places(place.layout)
        self.findings = [f for f in findings if f.level != "info" and place_of(f) not in known]
        self.moves: list[str] = []
        self.manifests: list[Finding] = []
        self.unmade: list[Finding] = []
        """Versions of snapshots that are no directories."""
        self.tombstones: list[str] = []
        """Tombstones that are no directories, of rollouts that hold nothing else."""
        self.stays: list[Finding] = []
        self.links: dict[str, str] = {}
        """Links of a snapshot to be made again, and the whole segment of each."""
        self.words: list[str] = []
        self.left: list[str] = []
        for finding in self.findings:
            self._add(finding)
        self._choose_incarnation()
        self._leave_alone_what_is_moved()

    @property
    def anything(self) -> bool:
        return bool(self.words or self.left)

    def _add(self, finding: Finding) -> None:
        path = finding.path
        if path == self.place.layout.rollout(self.rollout_id):
            return  # it has no fence, and is seen to before
        if finding.kind in ("bytes", "missing") and (found := _whole_segment(self.place, self.rollout_id, finding)):
            link, whole = found
            if link not in self.links:
                self.links[link] = whole
                self.words.append(f"linked {link} again, to {whole}, which is what the manifest states")
        elif finding.kind in _STAYS:
            self.stays.append(finding)
            self.words.append(f"noted as known, with a copy: {finding.what} ({path}, {finding.offset}..{finding.end})")
        elif finding.kind == "manifest" and finding.level == "damage":
            self.manifests.append(finding)
            self.words.append(f"made {path} again from the segments")
        elif finding.kind == "not_a_directory" and kind_below(path.rpartition("/")[2]) == "version":
            self.unmade.append(finding)
            self.words.append(f"moved {path} to quarantine, and published it again from the segments, as damaged")
        elif finding.kind == "not_a_directory" and self._is_lone_tombstone(path):
            self.tombstones.append(path)
            self.words.append(f"moved {path} to quarantine, and made the tombstone again: the rollout stays retired")
        elif finding.kind in ("name", "not_a_directory"):
            self._move(path)
        elif finding.kind == "unreadable":
            self.left.append(f"{path}: {finding.what}; {finding.advice}")

    def _is_lone_tombstone(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        kinds = {other: kind_of_name(other) for other in self.place.files.listdir(folder)}
        return kinds.pop(name, "") == "tombstone" and not {"incarnation", "tombstone"}.intersection(kinds.values())

    def _move(self, path: str) -> None:
        if path not in self.moves:
            self.moves.append(path)
            self.words.append(f"moved {path} to quarantine")

    def _choose_incarnation(self) -> None:
        found = [f for f in self.findings if f.kind == "incarnation" and f.level == "damage"]
        if len(found) == 1:  # hidden behind a tombstone
            self._move(found[0].path)
            return
        holding = [f for f in found if self._holds_records(f.incarnation)]
        empty = [f for f in found if f not in holding]
        for finding in empty if holding else empty[1:]:
            self._move(finding.path)
        if len(holding) > 1:
            names = " and ".join(f.incarnation for f in holding)
            self.left.append(
                f"rollout {self.rollout_id}: incarnations {names} both hold records; only you know which of them "
                "counts: move the other one out of the store"
            )

    def _leave_alone_what_is_moved(self) -> None:
        """What is inside something that is moved goes with it, as it is."""

        def is_inside(path: str) -> bool:
            return any(path.startswith(f"{folder}/") for folder in self.moves)

        self.manifests = [finding for finding in self.manifests if not is_inside(finding.path)]
        self.unmade = [finding for finding in self.unmade if not is_inside(finding.path)]
        self.stays = [finding for finding in self.stays if not is_inside(finding.path)]
        self.links = {link: whole for link, whole in self.links.items() if not is_inside(link)}
        self.words = [said for said in self.words if not any(f"{folder}/" in said for folder in self.moves)]
        self.moves = [path for path in self.moves if not is_inside(path)]

    def _holds_records(self, incarnation: str) -> bool:
        """Whether anything is in it that a rollout could need; what can't be told counts as something."""
        files, path = self.place.files, self.place.layout.rollout(self.rollout_id)
        try:
            directory = look_into(files, path, incarnation)
            if directory.versions or directory.notes:
                return True
            reader = LogReader(files, self.rollout_id, incarnation, self.place.boot_id)
            reader.read_open(directory)
        except (OSError, TokcapError):
            return True
        return bool(reader.ledger.damage or reader.ledger.calls or reader.ledger.finish)


class _Repair(Lifecycle):
    """The repair of one rollout, under its fence."""

    __slots__ = ("files", "made", "place")

    def __init__(self, place: Place, rollout_id: str) -> None:
        super().__init__(rollout_id)
        self.place, self.files = place, place.files
        self.made: dict[str, str] = {}
        """What is made, and the copy of what was there; empty if nothing was."""

    def run(self, rollout: Rollout) -> Repaired | bool:
        plan = _Plan(self.place, self.rollout_id, self._findings())
        if not plan.anything:
            return False
        rollout.drop()
        if not plan.words:
            return Repaired(self.rollout_id, (), tuple(plan.left))
        before = _readable(self.place, self.rollout_id)
        quarantine = Quarantine(self.files, self.place.layout, self.rollout_id)
        self.made = {}
        try:
            self._keep(plan, quarantine)
            moving = [*plan.moves, *plan.tombstones, *filter(os.path.lexists, plan.links)]
            noted = [*moving, *(finding.path for finding in plan.unmade)]
            quarantine.note(plan.findings, plan.stays, noted, plan.words)
            for path in plan.tombstones:
                self._make_tombstone(path)
            for path in moving:
                quarantine.move(path)
            self._make_again(plan, quarantine)
            after = _readable(self.place, self.rollout_id)
            if gone := _gone(before, after, bool(plan.links)):
                raise CorruptError(f"rollout {self.rollout_id}: {gone} after the repair: it was undone")
            rest = self._findings()
            # What stays says its place in the words of now: a manifest that was made again remembers it.
            quarantine.note(plan.findings, [f for f in rest if f.kind in _STAYS], noted, plan.words)
        except (OSError, CorruptError) as error:
            _undo(quarantine, self.made)
            if isinstance(error, CorruptError):
                return Repaired(self.rollout_id, (), (*plan.left, str(error)), quarantine.path)
            raise durability_error(error, f"rollout {self.rollout_id}: can't repair it", rollout.path) from error
        return Repaired(self.rollout_id, tuple(plan.words), tuple(plan.left), quarantine.path)

    def _findings(self) -> list[Finding]:
        return self.place.rollouts(fenced=True).check(self.rollout_id).findings

    def _keep(self, plan: _Plan, quarantine: Quarantine) -> None:
        """Copies of what is damaged, before anything is changed."""
        for finding in plan.stays:
            if finding.end > finding.offset and _is_file(finding.path):
                quarantine.keep_bytes(finding.path, finding.offset, finding.end)
        for finding in plan.manifests:
            if _is_file(finding.path):
                self.made[finding.path] = quarantine.keep_bytes(finding.path, 0, 0)
            elif os.path.lexists(finding.path):
                plan.moves.append(finding.path)

    def _make_tombstone(self, path: str) -> None:
        """A millisecond younger, so that there is always one."""
        name, _, retired_at = path.rpartition(".")
        again = f"{name}.{int(retired_at) + 1}"
        self.made[again] = ""
        self.files.mkdir(again)
        self.files.fsync_directory(os.path.dirname(again))

    def _make_again(self, plan: _Plan, quarantine: Quarantine) -> None:
        """What was moved away is not there any more, so that all of this is new."""
        path = self.place.layout.rollout(self.rollout_id)
        for link, whole in plan.links.items():
            self.made[link] = ""
            self.files.link(whole, link)
            self.files.fsync_directory(os.path.dirname(link))
        for finding in plan.unmade:
            self._publish_again(path, finding, quarantine)
        for finding in plan.manifests:
            directory = look_into(self.files, path, finding.incarnation)
            if directory.snapshot_path == finding.path.rpartition("/")[0]:
                self._index_again(directory)

    def _index_again(self, directory: Directory) -> None:
        """The manifest, from the segments that are linked, in the place of the damaged one. The version stays: what
        can be read is the same."""
        files = self.files
        reader, links = read_published(files, directory, self.rollout_id, self.place.boot_id)
        segments = [
            IndexedSegment(link.number, link.length, crc32(memoryview(reader.buffers[link.number])[: link.length]))
            for link in links
            if link.number not in reader.unreadable
        ]
        index = index_of(reader, directory.version, segments)
        marker, manifest = f"{directory.snapshot_path}/{DAMAGED}", f"{directory.snapshot_path}/{MANIFEST}"
        if index.damage and not os.path.lexists(marker):
            self.made[marker] = ""
            files.close(files.create(marker))
        self.made.setdefault(manifest, "")
        _write_whole(files, manifest, encode_manifest(index))

    def _publish_again(self, path: str, finding: Finding, quarantine: Quarantine) -> None:
        """A version whose directory is gone, from the segments. What was said late may be lost, so it is damaged.

        What is in its place counts as the next version until it is published: a rollout that is frozen never looks
        open, whenever this ends.
        """
        folder, _, number = finding.path.rpartition("/v")
        version = int(number)
        aside = f"{folder}/v{version + 1}"
        self.files.rename(finding.path, aside)
        quarantine.moves.append((finding.path, aside))
        self.made[finding.path] = ""
        directory = look_into(self.files, path, finding.incarnation)
        reader = LogReader(self.files, self.rollout_id, finding.incarnation, self.place.boot_id)
        reader.keep_buffers = reader.fenced = True
        reader.read_open(directory)
        reason = "the snapshot was no directory; it was made again from the segments, without what was said late"
        reader.ledger.damage.append(Damage(finding.path, 0, 0, reason))
        sources, segments = links_of(reader)
        publish(self.files, directory, index_of(reader, version, segments), sources)
        quarantine.move(finding.path, aside)


def _whole_segment(place: Place, rollout_id: str, finding: Finding) -> tuple[str, str] | None:
    """A damaged or missing link of a snapshot and the segment that it leads to, if that is there, and whole."""
    folder, _, name = finding.path.rpartition("/")
    files, path = place.files, place.layout.rollout(rollout_id)
    try:
        directory = look_into(files, path, finding.incarnation)
        if folder != directory.snapshot_path or (index := read_manifest(files, directory, rollout_id)) is None:
            return None
        for stated in index.segments:
            link = f"{folder}/{LinkName(stated.number, stated.length)}"
            if name[:6] != f"{stated.number:06d}"[:6]:
                continue
            for segment in directory.segments:
                whole = f"{directory.incarnation_path}/{segment}"
                if segment.number == stated.number and _is_file(whole) and not _is_same(whole, link):
                    data = load_buffer(files, whole, stated.length)
                    if len(data) == stated.length and crc32(data) == stated.crc:
                        return link, whole
    except (OSError, TokcapError):
        return None
    return None


def _is_same(one: str, other: str) -> bool:
    return os.path.lexists(other) and os.path.samestat(os.lstat(one), os.lstat(other))


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _undo(quarantine: Quarantine, made: dict[str, str]) -> None:
    """Everything as it was; the copies stay in quarantine."""
    files = quarantine.files
    for path, copy in made.items():
        if copy:
            data = _content(files, copy)
            if not _is_file(path) or _content(files, path) != data:
                _write_whole(files, path, [data])
        elif os.path.lexists(path):
            remove_tree(files, path)
    quarantine.undo()
    quarantine.drop_note()


def _content(files: Files, path: str) -> bytes:
    fd = files.open(path)
    try:
        return files.read(fd, files.fstat(fd).st_size, 0)
    finally:
        files.close(fd)


def _write_whole(files: Files, path: str, buffers: list[bytes | memoryview]) -> None:
    """A file of a snapshot, which appears by one rename; what a crash leaves of it, the next operation removes."""
    folder = os.path.dirname(path)
    temporary = f"{os.path.dirname(folder)}/tmp-{os.urandom(8).hex()}"
    try:
        fd = files.create(temporary)
        try:
            files.write(fd, buffers, 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    files.fsync_directory(folder)


class _Readable(msgspec.Struct, frozen=True):
    """What a reader gets of a rollout."""

    state: str
    snapshot_id: str
    version: int
    incomplete: bool
    outcomes: dict[str, str]
    entries: dict[tuple[str, int], bytes]


def _readable(place: Place, rollout_id: str) -> _Readable | None:
    """None if it can't be read at all."""
    looker = Looker(place.files, Layout(place.layout.root), place.boot_id)
    try:
        said = looker.stat(rollout_id)
        entries: dict[tuple[str, int], bytes] = {}
        if said.state in ("open", "frozen"):
            with looker.read(rollout_id) as snapshot:
                for node in range(len(snapshot.entries)):
                    try:
                        entry = snapshot.entries[node]
                    except CorruptError:
                        continue
                    entries[entry.model_call_id, entry.choice_index] = content_digest(entry)
        outcomes = {call.model_call_id: call.outcome for call in said.calls if call.model_call_id}
        return _Readable(said.state, said.snapshot_id, said.version, said.incomplete, dict(outcomes), entries)
    except TokcapError:
        return None


def _gone(before: _Readable | None, after: _Readable | None, restored: bool) -> str:
    """What could be read before and can't be any more, or looks better than it is; empty if nothing.

    restored: bytes came back that a checksum of the manifest proves, so that more may be there than before.
    """
    if before is None:
        return ""
    if after is None:
        return "nothing could be read"
    if (before.state, before.snapshot_id, before.version) != (after.state, after.snapshot_id, after.version):
        return f"it was {after.state}, version {after.version} of {after.snapshot_id}"
    if any(after.entries.get(key) != digest for key, digest in before.entries.items()):
        return "a record could not be read"
    if restored:
        return ""
    if before.incomplete and not after.incomplete:
        return "it seemed complete"
    if any(after.outcomes.get(call) != outcome for call, outcome in before.outcomes.items()):
        return "a call had another outcome"
    return ""
