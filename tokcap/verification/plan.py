"""What is to be done about the findings of one rollout, before anything is done."""

from __future__ import annotations

import os
import stat
from zlib import crc32

from ..errors import TokcapError
from ..store.layout import DAMAGED, LinkName, kind_below, kind_of_name, look_into
from ..store.log import LogReader
from ..store.snapshot import load_buffer, read_manifest
from .checking import Place
from .finding import Finding, place_of
from .misplaced import said_below
from .quarantine import known_places

__all__ = ("STAYS", "Plan", "is_file")

STAYS = ("bytes", "record", "missing", "note")
"""Kinds of findings about what stays where it is: tokcap reads around it."""


class Plan:
    """What is to be done about the findings of one rollout."""

    def __init__(self, place: Place, rollout_id: str, findings: list[Finding]) -> None:
        self.place, self.rollout_id = place, rollout_id
        known = known_places(place.layout)
        self.findings = [f for f in findings if f.level != "info" and place_of(f) not in known]
        self.moves: list[str] = []
        self.manifests: list[Finding] = []
        self.markers: list[str] = []
        """Files `damaged` that are missing beside a manifest that states damage."""
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
        elif finding.kind in STAYS:
            self.stays.append(finding)
            self.words.append(f"noted as known, with a copy: {finding.what} ({path}, {finding.offset}..{finding.end})")
        elif finding.kind == "manifest" and finding.level == "damage":
            self.manifests.append(finding)
            self.words.append(f"made {path} again from the segments")
        elif finding.kind == "manifest":
            self._settle_contradiction(finding)
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

    def _settle_contradiction(self, finding: Finding) -> None:
        marker = f"{os.path.dirname(finding.path)}/{DAMAGED}"
        if os.path.lexists(marker):
            self.left.append(f"{finding.path}: {finding.what}; {finding.advice}")
        else:
            self.markers.append(marker)
            self.words.append(f"made {marker} again, for the manifest states damage")

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
            if self._is_of_another(found[0]):
                self.left.append(
                    f"{found[0].path}: its segments say another rollout, and the tombstone beside it hides it: move it "
                    "into a directory of that rollout, or out of the store"
                )
            else:
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
        self.markers = [marker for marker in self.markers if not is_inside(marker)]
        self.unmade = [finding for finding in self.unmade if not is_inside(finding.path)]
        self.stays = [finding for finding in self.stays if not is_inside(finding.path)]
        self.links = {link: whole for link, whole in self.links.items() if not is_inside(link)}
        self.words = [said for said in self.words if not any(f"{folder}/" in said for folder in self.moves)]
        self.moves = [path for path in self.moves if not is_inside(path)]

    def _is_of_another(self, finding: Finding) -> bool:
        """Whether its segments say another rollout, for all that can be read of them."""
        try:
            return bool(said_below(self.place.files, finding.path, finding.incarnation) - {self.rollout_id})
        except (OSError, TokcapError):
            return False

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
                if segment.number == stated.number and is_file(whole) and not _is_same(whole, link):
                    data = load_buffer(files, whole, stated.length)
                    if len(data) == stated.length and crc32(data) == stated.crc:
                        return link, whole
    except (OSError, TokcapError):
        return None
    return None


def _is_same(one: str, other: str) -> bool:
    return os.path.lexists(other) and os.path.samestat(os.lstat(one), os.lstat(other))


def is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
