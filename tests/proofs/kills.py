"""Kill torture: writers, consumers and a sweeper, killed at any moment; every put counts exactly once."""

from __future__ import annotations

import argparse
import functools
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..children import Nursery
from .kills_end import end
from .kills_torture import KINDS, Torture
from .part import Outcome, Part

__all__ = ("PART", "torture")


def torture(
    nursery: Nursery,
    directory: Path,
    seed: int,
    kills: int,
    *,
    mutant: str = "",
    until: float = float("inf"),
    enough: int = 20,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Torture, float]:
    """One run on one directory, its end included; what it found, and the longest wait after the last kill.

    It ends after so many kills, at that time (CLOCK_MONOTONIC), or when it has found so many problems.
    """
    run = Torture(nursery, directory, seed, mutant=mutant, enough=enough, say=say)
    try:
        run.run(kills, until=until)
        return run, end(run)
    finally:
        run.close_children()


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=3_200, help="counted kills, in equal parts on each directory")
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--directory", type=Path, default=None, help="only there; default: in memory and on a disk")


def _run(arguments: argparse.Namespace) -> Outcome:
    seed = arguments.seed if arguments.seed is not None else int(time.time())
    print(f"seed {seed}")
    outcome = Outcome()
    logging.disable(logging.WARNING)  # a directory in memory is what was asked for
    places = [str(arguments.directory)] if arguments.directory else _places()
    hit: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    worst = 0.0
    nursery = Nursery()
    try:
        for number, place in enumerate(places):
            directory = Path(tempfile.mkdtemp(prefix="tokcap-kills-", dir=place))
            kills = arguments.kills // len(places)
            done, waited = torture(nursery, directory, seed + number, kills, say=functools.partial(print, flush=True))
            hit += done.hit
            counts += done.counts
            worst = max(worst, waited)
            outcome.problems += done.problems
            print(f"{done.hit.total():,} kills below {place}, {len(done.problems)} problems")
            if not done.problems:
                shutil.rmtree(directory)
            else:
                print(f"kept: {directory}")
    finally:
        nursery.close()
    outcome.figure("kills that struck an operation in flight", hit.total())
    outcome.figure("in flight", ", ".join(f"{kind} {hit[kind]:,}" for kind in KINDS))
    steps = sum(count for name, count in counts.items() if name.endswith(": done"))
    outcome.figure("operations acknowledged", steps)
    for name in sorted(name for name in counts if ": " not in name):
        outcome.figure(name, counts[name])
    refused = {name: count for name, count in sorted(counts.items()) if name.endswith("Error")}
    outcome.figure("refused", ", ".join(f"{name} {count:,}" for name, count in refused.items()))
    outcome.figure("longest freeze and retirement after the last kill", f"{worst * 1000:.0f} ms")
    return outcome


def _places() -> list[str]:
    memory = Path("/dev/shm")
    return [*([str(memory)] if memory.is_dir() else []), tempfile.gettempdir()]


PART = Part(_arguments, _run)
