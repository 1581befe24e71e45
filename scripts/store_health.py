"""Is the store well? For cron and for monitoring: one line a problem, and the exit status of a Nagios plugin.

0 ok, 1 warning, 2 critical, 3 unknown (no such store, wrong usage). Critical: damage, what can't be read, a disk at the
floor at which no call begins any more, three times `--masked`. All else is a warning. Looks without
writing into the store; rollouts that have not changed are remembered from run to run. `--verify` reads every byte.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tokcap import FileStore
from tokcap.errors import TokcapError
from tokcap.inspection import RolloutRow, open_to_look, rows, store_directory
from tokcap.verification import check

OK, WARNING, CRITICAL, UNKNOWN = range(4)
LEVELS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
Problem = tuple[int, str, str]
"""Level, what was looked at, and what is wrong with it."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FLOOR_BYTES, FLOOR_INODES = 64 << 20, 1000
"""What a store leaves free by itself, or a hundredth of the disk if that is less."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """2 would be critical."""
        print(f"TOKCAP UNKNOWN: {message}")
        self.exit(UNKNOWN)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-d", "--dir", help="the store (default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG)")
    add("--recent", type=seconds, default="6h", metavar="AGE", help="for shares: what changed since (default: 6h)")
    add("--open-call", type=seconds, default="1h", metavar="AGE", help="of the oldest open call (default: 1h)")
    add("--unfinished", type=seconds, default="6h", metavar="AGE", help="an open rollout was last written to (6h)")
    add("--unconsumed", type=seconds, default="6h", metavar="AGE", help="a frozen one waits for its consumer (6h)")
    add("--tombstones", type=seconds, default="48h", metavar="AGE", help="of the oldest tombstone (default: 48h)")
    add("--masked", type=float, default=0.1, metavar="SHARE", help="of rollouts that train nothing (0.1)")
    add("--lost", type=float, default=0.02, metavar="SHARE", help="of calls without a usable record (default: 0.02)")
    add("--drift", type=float, default=0.5, metavar="SHARE", help="of calls whose prompts drifted (default: 0.5)")
    add("--verify", action="store_true", help="read and check every byte")
    add("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    try:
        directory = store_directory(options.dir)
        store = open_to_look(directory)
        found = rows(store)
        problems = [*disk(directory), *unreadable(found), *calls(store, found, options.open_call)]
        problems += [*ages(found, options), *shares(found, options)]
        damaged = [row.rollout_id for row in found if row.damage]
        if options.verify or damaged:
            problems += checked(directory, () if options.verify else damaged)
    except (TokcapError, OSError) as error:
        parser.error(str(error))
    level = max((problem[0] for problem in problems), default=OK)
    states = {state: sum(row.state == state for row in found) for state in ("open", "frozen", "retired", "unreadable")}
    if options.json:
        told = [dict(zip(("level", "check", "message"), (LEVELS[one[0]], *one[1:]), strict=True)) for one in problems]
        print(json.dumps({"level": LEVELS[level], "rollouts": states, "problems": told}))
        return level
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    print(f"TOKCAP {LEVELS[level]}: {len(problems)} problems; {len(found)} rollouts: {counts}")
    for one, name, message in sorted(problems, reverse=True):
        print(f"{LEVELS[one]} {name}: {shown(message)}")
    return level


def disk(directory: str) -> Iterator[Problem]:
    there = os.statvfs(directory)
    for what, free, all_, most in (
        ("bytes", there.f_bavail * there.f_frsize, there.f_blocks * there.f_frsize, FLOOR_BYTES),
        ("inodes", there.f_favail, there.f_files, FLOOR_INODES),
    ):
        floor = min(all_ // 100, most)
        if all_ and free < 10 * floor:
            level = CRITICAL if free < floor else WARNING
            yield level, "disk", f"{free:,} {what} are free; below {floor:,} no call begins"


def unreadable(found: Iterable[RolloutRow]) -> Iterator[Problem]:
    for row in found:
        if row.error:
            yield CRITICAL, "unreadable", f"{row.rollout_id}: {row.error}"


def calls(store: FileStore, found: Iterable[RolloutRow], longest: float) -> Iterator[Problem]:
    """Open calls whose server is gone, and the oldest of the others."""
    now, oldest, name = time.clock_gettime(time.CLOCK_BOOTTIME), longest, ""
    for row in found:
        if row.state != "open" or not row.outcomes.get("open"):
            continue
        try:
            alive = store.open_calls_now(row.rollout_id)
            begun = {call.model_call_id: call.begun_at for call in store.stat_now(row.rollout_id).calls}
        except TokcapError:  # meanwhile; the next run tells
            continue
        for call_id in alive:
            if not alive[call_id]:
                yield WARNING, "open call", f"{row.rollout_id} {call_id}: its server is gone"
            elif now - (begun.get(call_id) or now) >= oldest:
                oldest, name = now - (begun.get(call_id) or now), f"{row.rollout_id} {call_id}"
    if name:
        yield WARNING, "open call", f"{name}: open for {age(oldest)}"


def ages(found: Sequence[RolloutRow], options: argparse.Namespace) -> Iterator[Problem]:
    """What waits for too long: the oldest of each kind, and how many."""
    for name, states, longest, what in (
        ("unfinished", ("open", False), options.unfinished, "open, nothing was written to it"),
        ("unconsumed", ("open", True), options.unconsumed, "finished, and not consumed"),
        ("unconsumed", ("frozen",), options.unconsumed, "frozen, and not retired"),
        ("tombstone", ("retired",), options.tombstones, "retired, and not swept"),
    ):
        late = sorted(
            (time.time() - row.changed_at, row.rollout_id)
            for row in found
            if row.state == states[0] and (len(states) == 1 or row.finished == states[1])
            if time.time() - row.changed_at > longest
        )
        if late:
            yield WARNING, name, f"{late[-1][1]}: {what} for {age(late[-1][0])}; {len(late)} older than {age(longest)}"


def shares(found: Iterable[RolloutRow], options: argparse.Namespace) -> Iterator[Problem]:
    """Of what changed lately. A retired rollout was delivered, so it counts as one that trains."""
    recent = [row for row in found if time.time() - row.changed_at <= options.recent]
    ended = [row for row in recent if row.state in ("frozen", "retired")]
    masked = sum(row.state == "frozen" and not row.trained for row in ended)
    all_calls = sum(row.calls for row in recent)
    lost = sum(row.outcomes.get("lost", 0) + row.outcomes.get("conflict", 0) for row in recent)
    drifted = sum(row.metric("drifted_calls") for row in recent)
    since = f"of the last {age(options.recent)}"
    for name, part, all_, most, what in (
        ("masked", masked, len(ended), options.masked, f"ended rollouts {since} train nothing"),
        ("lost", lost, all_calls, options.lost, f"calls {since} are lost or in conflict"),
        ("drift", drifted, all_calls, options.drift, f"calls {since} drifted"),
    ):
        if part > most * all_:
            level = CRITICAL if name == "masked" and part > 3 * most * all_ else WARNING
            yield level, name, f"{part:,} of {all_:,} {what} ({part / all_:.0%})"


def checked(directory: str, wanted: Sequence[str]) -> Iterator[Problem]:
    """What `tokcap verify` finds, but for damage that `verify --repair` has noted as known."""
    for finding in check(directory, wanted):
        if finding.level in ("damage", "warning"):
            what = str(finding).removeprefix("damage: ") + (f"; {finding.lost}" if finding.lost else "")
            yield CRITICAL if finding.level == "damage" else WARNING, "damage", what


def seconds(text: str) -> float:
    """90s, 30m, 6h, 2d."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age, such as 30m or 6h")
    return float(match[1]) * _SECONDS[match[2]]


def age(seconds: float) -> str:
    unit, per = next(((unit, per) for unit, per in reversed(_SECONDS.items()) if seconds >= 2 * per), ("s", 1))
    return f"{seconds / per:.0f}{unit}"


def shown(text: Any) -> str:
    """What comes from a store may hold anything: no control character of it gets to the terminal."""
    return str(text) if str(text).isprintable() else repr(text)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
