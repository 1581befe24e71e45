"""Checking one rollout: every name, every byte, and whether what they say agrees."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable

import msgspec

from ..errors import TokcapError
from ..store.files import Files
from ..store.layout import Layout, is_note, kind_below, kind_of_name, look_into
from ..store.notes import Notes
from .finding import Finding
from .log import LogLook
from .look import Checked, Owner, UnsteadyError, unreadable
from .misplaced import out_of_place

__all__ = ("RolloutCheck",)

_TRIES = 20
_AHEAD_S = 3600.0


class RolloutCheck:
    """Checks rollouts of one store, one at a time.

    quick: names, manifests and lengths only. boot_id: of the machine that looks. fenced: nobody changes anything
    meanwhile, so that one look is enough.
    """

    def __init__(
        self, files: Files, layout: Layout, boot_id: str, owner: Owner, *, quick: bool = False, fenced: bool = False
    ) -> None:
        self.files, self.layout, self.boot_id, self.owner = files, layout, boot_id, owner
        self.quick, self.fenced = quick, fenced

    def check(self, rollout_id: str) -> Checked:
        """What is wrong with a rollout. What is seen twice counts; what changed in between is looked at again."""
        known: list[Finding] | None = None
        failure: OSError = FileNotFoundError(errno.ENOENT, "it changes all the time")
        found = Checked()
        for attempt in range(_TRIES):
            try:
                found = self._look(rollout_id)
            except (FileNotFoundError, UnsteadyError) as error:
                known, failure = None, error
                time.sleep(0.001 * attempt)
                continue
            if self.fenced or not found.troubles or found.troubles == known:
                return found
            known = found.troubles
        if known is None:
            what = f"it changed at each of {_TRIES} looks, and could not be checked: {failure}"
            path, advice = self.layout.rollout(rollout_id), "check it again"
            found = Checked([Finding("warning", "unreadable", path, what, advice=advice, rollout_id=rollout_id)])
        return found

    def _look(self, rollout_id: str) -> Checked:
        path = self.layout.rollout(rollout_id)
        look = _Look(self.files, rollout_id, path, self.boot_id, self.owner, self.quick)
        look.layout = self.layout
        return look.look()


class _Look(LogLook):
    """One look at one rollout, from its names on."""

    layout: Layout

    # ---- names

    def look(self) -> Checked:
        try:
            names = sorted(self.files.listdir(self.path))
        except FileNotFoundError:
            return self.result  # absent
        except NotADirectoryError:
            self.no_directory(self.path, "the rollout can't be written or read")
            return self.result
        except OSError as error:
            self.result.findings.append(unreadable(self.rollout_id, self.path, error))
            return self.result
        self.owner.judge(self.files.stat(self.path), self.path, self.result)
        live: list[str] = []
        tombstones: list[str] = []
        for name in names:
            kind, path = kind_of_name(name), f"{self.path}/{name}"
            if not kind:
                self.weigh(path)
                self._judge_stranger(path)
            elif not stat.S_ISDIR(self.files.stat(path).st_mode):
                self.weigh(path)
                if kind == "trash":
                    self.leftover(path)
                else:
                    self.incarnation = name[:32]
                    self.no_directory(path, "the rollout can't be read")
            elif kind == "trash":
                self.weigh(path)
                self.leftover(path)
            else:
                (live if kind == "incarnation" else tombstones).append(name)
        self._judge_lives(live, tombstones)
        for name in tombstones:
            self.incarnation = name[:32]
            self._check_safely(f"{self.path}/{name}", self._check_tombstone)
        for name in live:
            self.incarnation = name
            self._check_safely(f"{self.path}/{name}", self._check_incarnation)
        if self.result.troubles and sorted(self.files.listdir(self.path)) != names:
            raise UnsteadyError(errno.EAGAIN, "it changed while it was read", self.path)
        return self.result

    def _judge_stranger(self, path: str) -> None:
        hidden = out_of_place(self.files, self.layout, path)
        if hidden is None:
            self.stranger(path)
        else:
            self.result.findings.append(
                msgspec.structs.replace(hidden, rollout_id=hidden.rollout_id or self.rollout_id)
            )

    def _check_safely(self, path: str, check: Callable[[str], None]) -> None:
        try:
            check(path)
        except (FileNotFoundError, UnsteadyError):
            raise
        except (OSError, TokcapError) as error:
            self.result.findings.append(unreadable(self.rollout_id, path, error, self.incarnation))

    def _judge_lives(self, live: list[str], tombstones: list[str]) -> None:
        if len(live) > 1:
            for name in live:
                self.incarnation = name
                self.say(
                    "damage",
                    "incarnation",
                    f"{self.path}/{name}",
                    f"the rollout has {len(live)} incarnations; tokcap never leaves two",
                    "nothing, but none of them is read until one is moved away",
                    "tokcap verify --repair moves away those that hold nothing; which of two that hold records counts, "
                    "you have to say: move the other one out of the store",
                )
        elif live and tombstones:
            self.incarnation = live[0]
            self.say(
                "damage",
                "incarnation",
                f"{self.path}/{live[0]}",
                "an incarnation beside the tombstone of its rollout, which hides it",
                "nothing, but it isn't read: the rollout counts as retired",
                "tokcap verify --repair moves it to quarantine",
            )
        if len(tombstones) > 1:
            self.incarnation = tombstones[0][:32]
            self.say(
                "warning",
                "incarnation",
                f"{self.path}/{tombstones[0]}",
                f"the rollout has {len(tombstones)} tombstones; which of them counts is chance",
                advice="remove all but the latest, or reset the rollout",
            )

    # ---- tombstones and notes

    def _check_tombstone(self, path: str) -> None:
        self.weigh(path)
        names = self.files.listdir(path)
        numbers = sorted(int(name[5:]) for name in names if kind_below(name) == "note")
        for name in names:
            if not is_note(name):
                self.leftover(f"{path}/{name}")
            elif kind_below(name) != "note":
                self.stranger(f"{path}/{name}")
        self._check_notes(path, numbers)
        retired_at = int(path.rpartition(".")[2]) / 1000
        if retired_at > time.time() + _AHEAD_S:
            self.say("info", "leftover", path, "retired in the future: the clock was set back; the sweep sets it right")

    def _check_notes(self, path: str, numbers: list[int]) -> None:
        notes = Notes(self.files, path, self.incarnation, numbers)
        notes.read()
        for damage in notes.damage:
            self.say(
                "damage",
                "note",
                damage.path,
                damage.reason,
                "a late mark or a delivery, which `stat` would show",
                "tokcap verify --repair notes it",
                place=(damage.offset, damage.end),
            )

    # ---- incarnations

    def _check_incarnation(self, path: str) -> None:
        self.weigh(path)
        directory = look_into(self.files, self.path, self.incarnation)
        for name in self.files.listdir(path):
            if not kind_below(name):
                self._judge_stranger(f"{path}/{name}")
        for leftover in directory.leftovers:
            self.leftover(leftover)
        self._check_notes(path, directory.notes)
        if directory.state == "open":
            self.check_open(directory)
        elif directory.state == "frozen":
            if stat.S_ISDIR(self.files.stat(directory.snapshot_path).st_mode):
                self.check_frozen(directory)
            else:
                self.no_directory(directory.snapshot_path, "the rollout can't be read")
        if self.result.troubles:
            now = look_into(self.files, self.path, self.incarnation)
            if (now.segments, now.versions) != (directory.segments, directory.versions):
                raise UnsteadyError(errno.EAGAIN, "it changed while it was read", path)
