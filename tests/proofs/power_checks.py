"""What a store must show after a power cut, given the steps that were begun and acknowledged before it.

A step that was acknowledged holds; one that was begun holds or doesn't, whole; one that was not begun doesn't. Then the
next operations on what is there must work.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.faulty_files import booted_as
from tokcap import FileStore, TokenEntry
from tokcap.errors import FrozenError, RetiredError, TokcapError
from tokcap.store.layout import Layout
from tokcap.store.manifest import decode_manifest

from .power_workload import Frozen, Step

__all__ = ("Picture", "go_on", "look", "pictures_at", "problems_after")

ANOTHER_BOOT = "00000000-0000-0000-0000-00000000b002"
MISSING = "missing"
Key = tuple[str, int]


class Picture(msgspec.Struct):
    """One way in which a rollout may look."""

    state: str = "absent"
    """absent or open: see `must`."""
    must: dict[Key, tuple[TokenEntry, ...]] = {}
    """Entries that have to be there, each with one of these contents."""
    may: dict[Key, tuple[TokenEntry, ...]] = {}
    """Entries that may be there."""
    together: list[frozenset[Key]] = []
    """Entries that are there together, or not at all."""
    outcomes: dict[str, frozenset[str]] = {}
    """Of each call that was said anything of, what may be shown."""
    delivered: frozenset[str] = frozenset()
    finish: tuple[str, ...] = ("[]",)
    """What meta may be shown, its items sorted, as text."""
    versions: frozenset[int] = frozenset()
    snapshot_id: str = ""
    late: frozenset[str] = frozenset()
    """Calls that have to be noted after retirement."""
    notes: int = 0
    """How many notes have to be there at least."""

    @property
    def is_certain(self) -> bool:
        """Whether anything has to be there at all."""
        return (
            bool(self.must or self.delivered)
            or any(MISSING not in outcomes for outcomes in self.outcomes.values())
            or "[]" not in self.finish
        )


def _copy(picture: Picture) -> Picture:
    return msgspec.structs.replace(
        picture,
        must=dict(picture.must),
        may=dict(picture.may),
        together=list(picture.together),
        outcomes=dict(picture.outcomes),
    )


class _Story:
    """The pictures of one rollout, step by step."""

    def __init__(self) -> None:
        self.pictures = [Picture()]

    def add(self, step: Step, *, acknowledged: bool) -> None:
        if step.name in ("put", "conflict", "begin", "settle", "deliver", "finish"):
            for picture in self.pictures:
                self._record(picture, step, acknowledged)
            return
        after = [changed for picture in self.pictures for changed in self._ended(_copy(picture), step)]
        if acknowledged:
            self.pictures = after
        else:
            self.pictures += after

    def _record(self, picture: Picture, step: Step, acknowledged: bool) -> None:
        if picture.state == "absent":
            picture.state = "open"
        call, known = step.call, picture.outcomes.get(step.call)
        before = known if known is not None else frozenset([MISSING])
        outcome = {
            "put": "recorded",
            "conflict": "conflict",
            "begin": "open",
            "settle": step.word,
            "deliver": None,
            "finish": None,
        }[step.name]
        if outcome is not None:
            picture.outcomes[call] = frozenset([outcome]) if acknowledged else before | {outcome}
        if step.name in ("put", "conflict"):
            keys = frozenset((call, entry.choice_index) for entry in step.entries)
            for entry in step.entries:
                key = (call, entry.choice_index)
                contents = (*picture.must.get(key, ()), *picture.may.get(key, ()), entry)
                if acknowledged or key in picture.must:
                    picture.may.pop(key, None)
                    picture.must[key] = contents
                else:
                    picture.may[key] = contents
            picture.together.append(keys)
        elif step.name == "deliver" and acknowledged:
            picture.delivered |= {call}
        elif step.name == "finish":
            picture.finish = (step.word,) if acknowledged else (*picture.finish, step.word)

    def _ended(self, picture: Picture, step: Step) -> Iterable[Picture]:
        name = step.name
        if name == "freeze":
            if picture.state != "frozen":
                picture.versions = frozenset([1])
            picture.state = "frozen"
            if isinstance(step.result, Frozen):
                self._told(picture, step.result)
        elif name == "mark late":
            picture.outcomes[step.call] = frozenset(["lost"])
            picture.versions = frozenset(version + 1 for version in picture.versions)
        elif name == "deliver late":
            picture.notes += 1
        elif name == "retire":
            picture.state = "retired"
        elif name == "mark retired":
            picture.late |= {step.call}
        elif name == "reset" or (name == "sweep" and picture.state == "retired"):
            picture = Picture()
        yield picture

    def _told(self, picture: Picture, told: Frozen) -> None:
        everything = picture.may | picture.must
        picture.must = {key: everything[key] for key in told.keys}
        picture.may = {}
        picture.outcomes = {call: frozenset([outcome]) for call, outcome in told.outcomes}
        picture.snapshot_id, picture.versions = told.snapshot_id, frozenset([told.version])


def pictures_at(steps: Sequence[Step], position: int) -> dict[str, list[Picture]]:
    """For each rollout, every way in which it may look if the disk was told so much before its power went."""
    stories: dict[str, _Story] = {}
    for step in steps:
        if step.rollout:
            stories.setdefault(step.rollout, _Story())
        if step.begun >= position or step.name == "close":
            continue
        acknowledged = step.done is not None and step.done <= position
        seen = step if acknowledged else msgspec.structs.replace(step, result=None)
        for story in [stories[step.rollout]] if step.rollout else list(stories.values()):
            story.add(seen, acknowledged=acknowledged)
    return {rollout: story.pictures for rollout, story in stories.items()}


class _Found(msgspec.Struct):
    """A rollout as it is read."""

    state: str
    entries: dict[Key, TokenEntry] = {}
    outcomes: dict[str, str] = {}
    delivered: frozenset[str] = frozenset()
    finish: str = "[]"
    snapshot_id: str = ""
    version: int = 0
    late: tuple[str, ...] = ()
    wrong: list[str] = []


def look(store: FileStore, directory: Path, rollout: str) -> _Found:
    """Read a rollout without changing it, with what is wrong about it in any case."""
    stat = store.stat_now(rollout)
    found = _Found(stat.state, snapshot_id=stat.snapshot_id, version=stat.version, late=stat.late, wrong=[])
    if stat.damage:
        found.wrong.append(f"damage is reported: {'; '.join(map(str, stat.damage))}")
    if stat.state == "retired":
        return found
    if stat.state == "frozen":
        found.wrong += _manifest(directory, rollout, stat.snapshot_id, stat.version)
    with store.read_now(rollout) as snapshot:
        entries = list(snapshot.entries)
        found.entries = {(entry.model_call_id, entry.choice_index): entry for entry in entries}
        if len(found.entries) != len(entries):
            found.wrong.append("an entry is there twice")
        found.outcomes = {call.model_call_id: call.outcome for call in snapshot.calls}
        if len(found.outcomes) != len(snapshot.calls) or "" in found.outcomes:
            found.wrong.append(f"calls without a name or twice: {[str(call) for call in snapshot.calls]}")
        if snapshot.incomplete != bool({"lost", "open", "conflict"} & set(found.outcomes.values())):
            found.wrong.append(f"incomplete is {snapshot.incomplete}, and the outcomes are {found.outcomes}")
        found.delivered = frozenset(call.model_call_id for call in snapshot.calls if call.delivered == "full")
        found.finish = repr(sorted(snapshot.meta.items()))
    return found


def _manifest(directory: Path, rollout: str, snapshot_id: str, version: int) -> list[str]:
    """What is wrong with a manifest; without one, a snapshot is read from its segments alone."""
    path = f"{Layout(str(directory)).rollout(rollout)}/{snapshot_id}/v{version}/manifest"
    try:
        data = Path(path).read_bytes()
        index = decode_manifest(path, data, rollout, snapshot_id, version)
    except (TokcapError, OSError) as error:
        return [f"its manifest: {error!r}"]
    return [] if index is not None else [f"its manifest can't be read: {len(data)} bytes"]


def _differences(picture: Picture, found: _Found) -> list[str]:
    problems: list[str] = []
    states = [picture.state]
    if picture.state == "open" and not picture.is_certain:
        states.append("absent")
    if found.state not in states:
        return [f"it is {found.state}, not {' or '.join(states)}"]
    if found.state == "retired":
        if found.version not in picture.versions or picture.snapshot_id not in ("", found.snapshot_id):
            problems.append(f"the tombstone is of {found.snapshot_id} version {found.version}")
        lost = {call for call in picture.late if not any(call in note for note in found.late)}
        return problems + ([f"notes are lost: {sorted(lost)}"] if lost else [])
    if found.state == "absent":
        return problems

    lost_entries = sorted(set(picture.must) - set(found.entries))
    if lost_entries:
        problems.append(f"entries are lost: {lost_entries}")
    for key, entry in found.entries.items():
        contents = (*picture.must.get(key, ()), *picture.may.get(key, ()))
        if not contents:
            problems.append(f"an entry that nobody put: {key}")
        elif entry not in contents:
            problems.append(f"an entry that is not what was put: {key}")
    problems += [
        f"only some of {sorted(keys)} are there"
        for keys in picture.together
        if 0 < len(keys & found.entries.keys()) < len(keys)
    ]
    for call, allowed in picture.outcomes.items():
        if found.outcomes.get(call, MISSING) not in allowed:
            problems.append(f"call {call} is {found.outcomes.get(call, MISSING)}, not {' or '.join(sorted(allowed))}")
    unknown = set(found.outcomes) - set(picture.outcomes)
    if unknown:
        problems.append(f"calls that nobody made: {sorted(unknown)}")
    if picture.delivered - found.delivered:
        problems.append(f"deliveries are lost: {sorted(picture.delivered - found.delivered)}")
    if found.finish not in picture.finish:
        problems.append(f"meta is {found.finish}")
    if found.state == "frozen":
        if found.version not in picture.versions or picture.snapshot_id not in ("", found.snapshot_id):
            problems.append(f"it is {found.snapshot_id} version {found.version}, not {picture.snapshot_id}")
        if len(found.late) < picture.notes:
            problems.append("a late note is lost")
    return problems


def problems_after(
    directory: Path, steps: Sequence[Step], position: int, *, boot_id: str = ANOTHER_BOOT, seed: int = 0
) -> list[str]:
    """Open the store with the eyes of a later boot and compare; then go on with it.

    With which rollouts it goes on depends on `seed`: an eighth of them; the others are reset.
    """
    problems: list[str] = []
    expected = pictures_at(steps, position)
    chance = random.Random(seed)
    try:
        with booted_as(boot_id), FileStore(directory, sweep_every_s=0) as store:
            found = {
                rollout: _compare(store, directory, rollout, pictures, problems)
                for rollout, pictures in expected.items()
            }
            strange = {rollout for rollout, _ in store.rollouts()} - set(expected)
            if strange:
                problems.append(f"rollouts that nobody made: {sorted(strange)}")
            if problems:
                return problems
            chosen = {rollout: looked for rollout, looked in found.items() if looked and chance.random() < 0.125}
            for rollout, looked in chosen.items():
                problems += [f"{rollout}, going on: {problem}" for problem in go_on(store, directory, rollout, looked)]
            store.reset_now(*(found.keys() - chosen.keys()))
            problems += _tidied(store, directory)
    except (TokcapError, OSError) as error:
        problems.append(f"the store: {error!r}")
    return problems


def _compare(
    store: FileStore, directory: Path, rollout: str, pictures: Sequence[Picture], problems: list[str]
) -> _Found | None:
    try:
        found = look(store, directory, rollout)
    except (TokcapError, OSError) as error:
        problems.append(f"{rollout}: {error!r}")
        return None
    nearest = min((_differences(picture, found) for picture in pictures), key=len)
    problems += [f"{rollout}: {problem}" for problem in (*found.wrong, *nearest)]
    return found


def go_on(store: FileStore, directory: Path, rollout: str, found: _Found) -> list[str]:
    """The next operations on a rollout: put, freeze, late mark, retirement, each of them twice."""
    entry = TokenEntry(rollout, "after-the-cut", [1, 2, 3], [4], [-0.5])
    problems: list[str] = []
    try:
        if found.state in ("open", "absent"):
            store.put_now(entry)
            store.put_now(entry)
            again = look(store, directory, rollout)
            wanted: Mapping[Key, TokenEntry] = found.entries | {("after-the-cut", 0): entry}
            if again.entries != wanted or again.wrong:
                problems.append(f"after a put there is {sorted(again.entries)} {again.wrong}")
        elif found.state == "frozen":
            problems += _refused(store, entry, FrozenError)
        else:
            problems += _refused(store, entry, RetiredError)
            if not store.retire_now(rollout, snapshot_id=found.snapshot_id, version=found.version):
                problems.append("the same retirement is not True again")
            return problems
        with store.freeze_now(rollout) as snapshot:
            frozen = Frozen.of(snapshot)
        expected = set(found.entries) | ({("after-the-cut", 0)} if found.state != "frozen" else set())
        if frozen.keys != expected:
            problems.append(f"frozen with {sorted(frozen.keys)}, not {sorted(expected)}")
        if found.state == "frozen" and (frozen.snapshot_id, frozen.version) != (found.snapshot_id, found.version):
            problems.append(f"another freeze gave {frozen.snapshot_id} {frozen.version}")
        store.mark_incomplete_now(rollout, "lost-later")
        if store.retire_now(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version):
            problems.append("a version that a late mark replaced was retired")
        with store.freeze_now(rollout) as snapshot:
            newer = Frozen.of(snapshot)
        if newer.keys != frozen.keys or newer.version <= frozen.version or not snapshot.incomplete:
            problems.append(f"after a late mark: version {newer.version} with {sorted(newer.keys)}")
        for _ in range(2):
            if not store.retire_now(rollout, snapshot_id=newer.snapshot_id, version=newer.version):
                problems.append("it can't be retired")
        problems += _refused(store, entry, RetiredError)
    except (TokcapError, OSError) as error:
        problems.append(repr(error))
    return problems


def _refused(store: FileStore, entry: TokenEntry, kind: type[TokcapError]) -> list[str]:
    try:
        store.put_now(entry)
    except kind:
        return []
    return [f"a put did not raise {kind.__name__}"]


def _tidied(store: FileStore, directory: Path) -> list[str]:
    """A sweep leaves nothing behind: everything is retired or reset by now."""
    for path in directory.iterdir():
        if "-" in path.name:  # of a process that was opening the store; its age tells that it does so no more
            os.utime(path, (0, 0))
    store.sweep_now(0)
    left = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    left -= {"FORMAT", "sweep.lock", "rollouts", "writers"}
    left -= {name for name in left if re.fullmatch(r"rollouts/[0-9a-f]{2}", name)}
    return [f"left after a sweep: {sorted(left)}"] if left else []
