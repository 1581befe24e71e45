"""Repairing what a check found, conservatively: nothing that can be read gets lost, nothing becomes complete.

- A manifest or FORMAT that is damaged, missing, or says other than the segments: kept aside, made again. So is a
  missing `damaged` beside a manifest that states damage.
- A whole rollout where nobody looks for it: put back into its place, if that is free (`putting_back`). Otherwise it is
  left where it is, and stays damage. So is an incarnation or a snapshot under a name that nobody reads.
- What stops a rollout from being read or swept (a file where a directory belongs, a name that belongs to no store, an
  incarnation that holds nothing beside another one, or one behind a tombstone): moved to quarantine. What is frozen
  stays frozen, and what is retired stays retired.
- Damaged bytes, records that can't be decoded, missing segments, notes that can't be read: stay. tokcap reads around
  them and names what is lost. The bytes are copied to quarantine, and noted as known.
- Torn tails, leftovers of crashes, permissions: nothing; they are the sweep's, or yours.
- A link of a snapshot that is missing or damaged, while the segment beside it is still what the manifest states: linked
  again.
- Two incarnations that both hold records, or one of another rollout behind a tombstone: nothing; only you know which
  of them counts, and what it is.

A rollout is repaired under its fence, and read before and after (`mending`): if anything is gone that was there, all is
undone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator

import msgspec

from ..inspection.opening import open_to_change
from ..store import FileStore
from ..store.files import Files, Modes, durability_error
from ..store.root import check_directory, group_id_of, read_marker
from .checking import Place, check_place
from .finding import Finding
from .mending import Mend, Repaired
from .misplaced import id_inside, is_directory, is_segment
from .plan import Plan
from .putting_back import Misplaced, PutBack, in_turn, misplaced_at
from .quarantine import Quarantine

__all__ = ("Repaired", "repair")


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
    hidden = [f for f in findings if f.kind == "wrong_shard" and is_segment(place.files, f.path)]
    yield from (Repaired(f.rollout_id, (), (f"{f.path}: {f.what}: {f.advice}",)) for f in hidden)
    findings = [finding for finding in findings if finding not in hidden]
    outside = [f for f in findings if not f.rollout_id or f.kind == "wrong_shard"]
    outside += [f for f in findings if f.kind == "not_a_directory" and f.path == place.layout.rollout(f.rollout_id)]
    if not dry_run:
        check_directory(place.files, root)
    done = _repair_outside(place, outside, dry_run)
    if done is not None:
        yield done
    folders = [f for f in findings if f.kind == "wrong_shard" and is_directory(f.path)] + _of_others(place, findings)
    misplaced = in_turn([one for finding in folders for one in misplaced_at(place, finding)])
    ids = {finding.rollout_id for finding in findings if finding.rollout_id and finding.kind != "wrong_shard"}
    ids.difference_update(one.finding.rollout_id for one in misplaced if one.finding.kind != "wrong_shard")
    if dry_run:
        yield from _planned(place, misplaced, sorted(ids))
        return
    if not ids and not any(one.free for one in misplaced):
        yield from (Repaired(one.rollout_id, (), (one.left,)) for one in misplaced)
        return
    emptied: list[str] = []
    with open_to_change(root, group=group) as opened:
        for one in misplaced:
            result = opened.perform_now(PutBack(place, one)) if one.free else Repaired(one.rollout_id, (), (one.left,))
            yield result
            if result.done:
                ids.add(one.rollout_id)
                emptied += _remove_emptied(place.files, one)
        if emptied:
            yield Repaired("", tuple(f"removed {folder}, which was empty then" for folder in emptied))
        for rollout_id in sorted(ids):
            # Under the fence of the rollout, waiting for it as any operation does.
            result = opened.perform_now(Mend(place, rollout_id))
            if isinstance(result, Repaired):
                yield result


def _of_others(place: Place, findings: list[Finding]) -> list[Finding]:
    """A finding for each directory that has the place of one rollout, and whose segments say another one."""
    said = {finding.rollout_id: finding for finding in findings if finding.rollout_id and finding.kind == "bytes"}
    found: list[Finding] = []
    for rollout_id, finding in said.items():
        path = place.layout.rollout(rollout_id)
        if id_inside(place.files, path) not in ("", rollout_id):
            found.append(msgspec.structs.replace(finding, path=path, offset=0, end=0))
    return found


def _planned(place: Place, misplaced: list[Misplaced], ids: list[str]) -> Iterator[Repaired]:
    """What would be done, with `dry_run`."""
    for one in misplaced:
        yield Repaired(one.rollout_id, (one.done,)) if one.free else Repaired(one.rollout_id, (), (one.left,))
    checker = place.rollouts()
    for rollout_id in ids:
        plan = Plan(place, rollout_id, checker.check(rollout_id).findings)
        if plan.anything:
            yield Repaired(rollout_id, tuple(plan.words), tuple(plan.left))


def _repair_outside(place: Place, findings: list[Finding], dry_run: bool) -> Repaired | None:
    moving = [f for f in findings if f.kind in ("name", "not_a_directory", "wrong_shard") and _is_in_the_way(f)]
    markers = [f for f in findings if f.kind == "marker" and read_marker(place.files, place.layout) is None]
    if not moving and not markers:
        return None
    words = [f"moved {f.path} to quarantine" for f in moving] + [f"made {f.path} again" for f in markers]
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
    return there and not (finding.kind in ("not_a_directory", "wrong_shard") and is_directory(finding.path))


def _remove_emptied(files: Files, one: Misplaced) -> list[str]:
    """Remove the directories that held nothing but what was put back, as a shard under another name; which."""
    removed: list[str] = []
    folder = one.path
    with contextlib.suppress(OSError):  # another is in it; or it may come back, and holds nothing
        while folder != one.finding.path:
            folder = os.path.dirname(folder)
            files.rmdir(folder)
            removed.append(folder)
            files.fsync_directory(os.path.dirname(folder))
    return removed
