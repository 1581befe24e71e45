"""Whether the checks would see it if a sync were left out of the code.

A site is a line of the store that leads to a sync, with what it syncs and on whose behalf; it is found in the recorded
calls, so that a new one is covered without being named. Left out, it is asked for no more: everything else that was
recorded stays as it is. The states that only this makes possible are looked at first: what it should have made durable
is missing, all of it or a part, after an operation that rested on it has returned.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator

from .crash_checks import AFTER_A_CRASH, Checker
from .crash_recording import STORE
from .crash_stage import Expected, Stage
from .crash_tree import Disk, Image

__all__ = ("first_problem_without", "lines_that_sync", "sites_of")

_SYNCS = ("fsync", "fdatasync", "fsync_directory", "start")
_NO_CALLERS = ("files.py", "syncs.py", "waiters.py")
"""`files` and `syncs` do what others ask for; what `waiters` starts are threads."""
_MOST_STATES = 400


def sites_of(stage: Stage) -> set[str]:
    """The sites of the syncs in a recording."""
    return {event.site for event in stage.recording.events if event.kind == "sync"}


def lines_that_sync() -> dict[str, list[range]]:
    """Module -> the lines of each call in the store that syncs something."""
    found: dict[str, list[range]] = {}
    for name in sorted(os.listdir(STORE)):
        if not name.endswith(".py") or name in _NO_CALLERS:
            continue
        with open(os.path.join(STORE, name)) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SYNCS:
                if ast.unparse(node.func.value).endswith(("thread", "_thread")):
                    continue
                found.setdefault(name, []).append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def first_problem_without(site: str, stages: Iterable[Stage], checker: Checker, *, unit: int = 512) -> str | None:
    """What the checks find if the syncs of `site` are left out; None if they find nothing."""
    left = _MOST_STATES
    for stage in stages:
        for position, image, expected in _states_without(site, stage, unit):
            problem = checker.check(image, expected, boot_id=AFTER_A_CRASH, variant=left)
            if problem is not None:
                missing = "; ".join(map(str, image.missing))
                return f"event {position}; missing: {missing}; during {expected.moment}: {problem}"
            left -= 1
            if not left:
                return None
    return None


def _states_without(site: str, stage: Stage, unit: int) -> Iterator[tuple[int, Image, Expected]]:
    """States in which something is missing that the site should have made durable, each once."""
    disk = Disk.of(stage.recording, unit=unit)
    known: set[tuple[int, int]] = set()
    wanting: dict[tuple[int, int], None] = {}
    """(position, what) of the units that the site left unsynced."""
    before: Expected | None = None
    events = stage.recording.events
    for position in range(len(events) + 1):
        expected = stage.expected(position)
        pending = disk.pending()
        indexes = [index for index, one in enumerate(pending.units) if (one.position, one.where) in wanting]
        if indexes:
            rests = expected is not before or position == len(events) or events[position].kind == "sync"
            # All of it, and what came later as well; each alone, and what came later.
            firsts = indexes if rests else indexes[:1]
            choices = [
                set(indexes),
                *({index} for index in firsts),
                *(set(range(i, len(pending.units))) for i in firsts),
            ]
            for dropped in choices:
                for others in (True, False) if rests else (True,):
                    image = pending.without(dropped, others)
                    if (image.key, id(expected)) not in known:
                        known.add((image.key, id(expected)))
                        yield position, image, expected
        before = expected
        if position == len(events):
            return
        event = events[position]
        if event.kind == "sync" and event.site == site:
            wanting |= {(one.position, one.where): None for one in pending.units if one.where == event.where}
            disk.skip()
        else:
            disk.apply(event)
