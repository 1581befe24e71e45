"""Signal handlers at every point of the main thread: they raise, use the store, or close it (`tests/interrupts.py`)."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.interrupts import SCENARIOS, STUCK

from .part import Outcome, Part

__all__ = ("PART",)

HANDLERS = ("raises", "puts", "closes")
_ROOT = Path(__file__).parent.parent.parent


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS, "close"], help="this one alone")
    parser.add_argument("--directory", help="where to work, instead of a temporary directory")


def _run(options: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    points = pairs = 0
    for scenario in options.scenario or [*SCENARIOS, "close"]:
        for handler in HANDLERS if scenario != "close" else ("raises", "closes"):
            if (scenario, handler) == ("waiting_for_room", "puts"):
                outcome.left_out.append(
                    "a handler that puts while its own call waits for the last room: it waits until its time is up"
                )
                continue
            with tempfile.TemporaryDirectory(prefix="tokcap-signals-", dir=options.directory) as base:
                done = subprocess.run(
                    [sys.executable, "-m", "tests.interrupts", scenario, handler, base],
                    cwd=_ROOT,
                    capture_output=True,
                    text=True,
                )
            found = re.search(r": (\d+) points", done.stdout)
            pairs += 1
            if done.returncode or found is None:
                what = "is stuck" if done.returncode == STUCK else "failed"
                outcome.problems.append(f"{scenario}, a handler that {handler}, {what}:\n{done.stdout}{done.stderr}")
                continue
            points += int(found[1])
            print(done.stdout.strip(), flush=True)
    outcome.figure("scenarios, each with one kind of handler", pairs)
    outcome.figure("points of the main thread at which a handler came", points)
    outcome.figure("scenarios that got stuck, or lost a record", len(outcome.problems))
    return outcome


PART = Part(_arguments, _run)
