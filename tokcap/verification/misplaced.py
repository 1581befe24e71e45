"""Rollouts where nobody looks for them: somebody moved or renamed a directory. Whose they are, and where they belong.

The headers of its segments say the id of a rollout, wherever it lies. A retired one has no segments left: of that its
name has to say it, unless it looks like a name that somebody made of another one: `task-1.bak`, where `task-1` belongs.
"""

from __future__ import annotations

import os

from ..errors import InvalidIdError, TokcapError
from ..ids import check_rollout_id
from ..store.files import Files
from ..store.frame import HEADER_AND_CRC, HEADER_SIZE, MAGIC, Kind, segment_seed
from ..store.layout import MANIFEST, Layout, kind_below, kind_of_name, snapshot_links
from ..store.log import read_header
from .finding import Finding

__all__ = (
    "id_inside",
    "is_directory",
    "is_free",
    "is_rollout",
    "is_segment",
    "misplaced",
    "out_of_place",
    "rollouts_in",
    "said_below",
)

_HEADER = 65536
"""Bytes of a segment that its header is in."""


def out_of_place(files: Files, layout: Layout, path: str) -> Finding | None:
    """What to say of a directory that doesn't belong here; None if nothing of a rollout is in it."""
    inside = rollouts_in(files, path)
    if inside == [path]:
        return misplaced(files, layout, path)
    if inside:
        return _of_several(files, layout, path, inside)
    if is_segment(files, path):
        what = "a segment of a rollout, under a name that nobody reads"
        return _finding(path, what, "give it its name back if you know it, or move it out of the store")
    if _holds_records(files, path):
        what = "an incarnation or a snapshot of a rollout, under a name that nobody reads"
        return _finding(path, what, "give it its name back if you know it, or move it out of the store")
    return None


def misplaced(files: Files, layout: Layout, path: str) -> Finding:
    """What to say of something that has the name of a rollout, or holds one, and is not in its place."""
    name = os.path.basename(path)
    named = name if _is_id(name) else ""
    rollout_id = id_inside(files, path)
    if not is_directory(path):
        what = "a file, or a link, where nobody looks for a rollout of this name"
        return _finding(path, what, "tokcap verify --repair moves it to quarantine", named)
    if not rollout_id:
        what = "nobody looks for a rollout here, and its segments don't say which rollout it is, or not all the same"
        return _finding(path, what, "move it to its place if you know it, or out of the store", named)
    right = layout.rollout(rollout_id)
    advice = "move it there; tokcap verify --repair does"
    if not is_free(files, right):
        advice = "compare it with what is there, and move one of them out of the store; tokcap leaves both"
    called = "" if rollout_id == name else f" under the name {name},"
    what = f"rollout {rollout_id}{called} where nobody looks for it; its place is {right}"
    return _finding(path, what, advice, named)


def _of_several(files: Files, layout: Layout, path: str, inside: list[str]) -> Finding:
    """A shard under another name, or something like it."""
    ids = [rollout_id for rollout_id in (id_inside(files, one) for one in inside) if rollout_id]
    if not ids:
        what = f"{len(inside)} directories in it hold records, and nothing says of which rollouts"
        return _finding(path, what, "move each to its place if you know it, or out of the store")
    shards = {layout.shard(rollout_id) for rollout_id in ids}
    right = shards.pop()
    whole = len(ids) == len(inside) and not shards and not os.path.lexists(right)
    advice = f"rename it to {right}" if whole else "move each to its place"
    rollouts = f"rollout {ids[0]}" if len(inside) == 1 else f"{len(inside)} rollouts, {ids[0]} among them,"
    what = f"{rollouts} where nobody looks for it; its place is {layout.rollout(ids[0])}"
    return _finding(path, what, f"{advice}; tokcap verify --repair moves each whose place is free")


def _finding(path: str, what: str, advice: str, rollout_id: str = "") -> Finding:
    return Finding("damage", "wrong_shard", path, what, "nothing, but nobody finds it", advice, rollout_id)


# ---- what lies there


def rollouts_in(files: Files, path: str, depth: int = 3) -> list[str]:
    """The directories of rollouts there: `path` itself if it is one, else those in it, as deep as a store goes."""
    if is_rollout(files, path):
        return [path]
    try:
        names = sorted(files.listdir(path)) if depth else []
    except OSError:
        return []
    return [found for name in names for found in rollouts_in(files, f"{path}/{name}", depth - 1)]


def is_rollout(files: Files, path: str) -> bool:
    """Whether it looks like the directory of a rollout, by the names in it."""
    try:
        return any(kind_of_name(name) in ("incarnation", "tombstone") for name in files.listdir(path))
    except OSError:
        return False


def _holds_records(files: Files, path: str, depth: int = 3) -> bool:
    """Whether it looks like an incarnation or a snapshot, by the names in it, or has one in it, as deep as a store
    goes."""
    try:
        names = files.listdir(path)
        if MANIFEST in names or any(kind_below(name) == "segment" for name in names) or snapshot_links(files, path):
            return True
    except OSError:
        return False
    return depth > 0 and any(_holds_records(files, f"{path}/{name}", depth - 1) for name in names)


def is_segment(files: Files, path: str) -> bool:
    """Whether it is a file that begins as a segment does."""
    try:
        fd = files.open(path)
    except OSError:  # a directory, a link, or nothing
        return False
    try:
        begins = files.read(fd, HEADER_SIZE, 0)
    except OSError:
        return False
    finally:
        files.close(fd)
    if len(begins) < HEADER_SIZE:
        return False
    magic, kind, *_ = HEADER_AND_CRC.unpack_from(begins)
    return bool(magic == MAGIC and kind == Kind.SEGMENT)


def is_directory(path: str) -> bool:
    """Whether it is one itself, and no link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def is_free(files: Files, path: str) -> bool:
    """Whether nothing is there but an empty directory, which is what a rollout that is absent may leave."""
    try:
        return not files.listdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def id_inside(files: Files, path: str) -> str:
    """Which rollout it is, as all of its segments say, or as the name of a retired one does. Empty if nothing says
    it, if they say several, or if one of them can't be opened."""
    said: set[str] = set()
    retired = silent = False
    try:
        for name in files.listdir(path):
            kind = kind_of_name(name)
            if kind in ("incarnation", "tombstone"):
                said_there = said_below(files, f"{path}/{name}", name[:32])
                said |= said_there
                retired = retired or kind == "tombstone"
                silent = silent or (kind == "tombstone" and not said_there)
        if len(said) == 1:
            rollout_id = check_rollout_id(said.pop())
            # A tombstone may be that of another one, beside which somebody moved an incarnation.
            return "" if silent and rollout_id != os.path.basename(path) else rollout_id
        return _id_of_retired(path) if retired and not said else ""
    except (OSError, TokcapError):
        return ""


def _id_of_retired(path: str) -> str:
    """Its name, if that can't be another one's with something before or behind it. Raises `InvalidIdError`."""
    name = os.path.basename(path)
    cuts = [at for at, character in enumerate(name) if character in "._-"]
    others = [part for at in cuts for part in (name[:at], name[at + 1 :]) if part]
    shard = os.path.dirname(path)
    layout = Layout(os.path.dirname(os.path.dirname(shard)))
    return "" if any(layout.shard(other) == shard for other in others) else check_rollout_id(name)


def said_below(files: Files, folder: str, incarnation: str) -> set[str]:
    """What the headers of all segments of an incarnation say, those in its snapshots too. A damaged one: nothing."""
    said: set[str] = set()
    for name in files.listdir(folder):
        kind = kind_below(name)
        if kind == "segment":
            said |= _said_by(files, f"{folder}/{name}", incarnation, name.partition(".")[0])
        elif kind == "version":
            for link in snapshot_links(files, f"{folder}/{name}"):
                said |= _said_by(files, f"{folder}/{name}/{link}", incarnation, f"{link.number:06d}")
    return said


def _said_by(files: Files, path: str, incarnation: str, number: str) -> set[str]:
    fd = files.open(path)
    try:
        data = files.read(fd, _HEADER, 0)
    finally:
        files.close(fd)
    header = read_header(path, data, segment_seed(incarnation, number), len(data))
    return set() if header is None else {header.rollout_id}


def _is_id(name: str) -> bool:
    try:
        check_rollout_id(name)
    except InvalidIdError:
        return False
    return True
