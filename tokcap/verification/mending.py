"""The repair of one rollout: under its fence, read before and after, and undone if anything is gone."""

from __future__ import annotations

import contextlib
import os
from zlib import crc32

import msgspec

from ..errors import CorruptError
from ..store.files import Files, durability_error
from ..store.layout import DAMAGED, MANIFEST, Directory, look_into, remove_tree
from ..store.ledger import Damage
from ..store.lifecycle import Lifecycle
from ..store.log import LogReader
from ..store.manifest import IndexedSegment, encode_manifest
from ..store.publication import publish
from ..store.rollout import Rollout
from ..store.snapshot import index_of, links_of, read_published
from .checking import Place
from .finding import Finding
from .plan import STAYS, Plan, is_file
from .quarantine import Quarantine
from .readable import gone, readable

__all__ = ("Mend", "Repaired")


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


class Mend(Lifecycle):
    """The repair of one rollout, under its fence."""

    __slots__ = ("files", "made", "place")

    def __init__(self, place: Place, rollout_id: str) -> None:
        super().__init__(rollout_id)
        self.place, self.files = place, place.files
        self.made: dict[str, str] = {}
        """What is made, and the copy of what was there; empty if nothing was."""

    def run(self, rollout: Rollout) -> Repaired | bool:
        plan = Plan(self.place, self.rollout_id, self._findings())
        if not plan.anything:
            return False
        rollout.drop()
        if not plan.words:
            return Repaired(self.rollout_id, (), tuple(plan.left))
        before = readable(self.place, self.rollout_id)
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
            after = readable(self.place, self.rollout_id)
            if lost := gone(before, after, bool(plan.links)):
                raise CorruptError(f"rollout {self.rollout_id}: {lost} after the repair: it was undone")
            rest = self._findings()
            # What stays says its place in the words of now: a manifest that was made again remembers it.
            quarantine.note(plan.findings, [f for f in rest if f.kind in STAYS], noted, plan.words)
        except (OSError, CorruptError) as error:
            _undo(quarantine, self.made)
            if isinstance(error, CorruptError):
                return Repaired(self.rollout_id, (), (*plan.left, str(error)), quarantine.path)
            raise durability_error(error, f"rollout {self.rollout_id}: can't repair it", rollout.path) from error
        return Repaired(self.rollout_id, tuple(plan.words), tuple(plan.left), quarantine.path)

    def _findings(self) -> list[Finding]:
        return self.place.rollouts(fenced=True).check(self.rollout_id).findings

    def _keep(self, plan: Plan, quarantine: Quarantine) -> None:
        """Copies of what is damaged, before anything is changed."""
        for finding in plan.stays:
            if finding.end > finding.offset and is_file(finding.path):
                quarantine.keep_bytes(finding.path, finding.offset, finding.end)
        for finding in plan.manifests:
            if is_file(finding.path):
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

    def _make_again(self, plan: Plan, quarantine: Quarantine) -> None:
        """What was moved away is not there any more, so that all of this is new."""
        path = self.place.layout.rollout(self.rollout_id)
        for link, whole in plan.links.items():
            self.made[link] = ""
            self.files.link(whole, link)
            self.files.fsync_directory(os.path.dirname(link))
        for marker in plan.markers:
            self._make_marker(marker)
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
            self._make_marker(marker)
        self.made.setdefault(manifest, "")
        _write_whole(files, manifest, encode_manifest(index))

    def _make_marker(self, path: str) -> None:
        self.made[path] = ""
        fd = self.files.create(path)
        try:
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)
        self.files.fsync_directory(os.path.dirname(path))

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


def _undo(quarantine: Quarantine, made: dict[str, str]) -> None:
    """Everything as it was; the copies stay in quarantine."""
    files = quarantine.files
    for path, copy in made.items():
        if copy:
            data = _content(files, copy)
            if not is_file(path) or _content(files, path) != data:
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
