"""`scripts/prove soak`: large numbers, long runs, disks that can't follow; each run alone with `--only`."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.children import Nursery

from .part import Outcome, Part
from .soak_files import few_descriptors, files_open_elsewhere, no_descriptors
from .soak_load import mixed_load
from .soak_million import many_rollouts
from .soak_reading import read_back
from .soak_slow_disk import slow_disk

__all__ = ("PART",)

RUNS = ("million", "files", "reading", "load", "slow-disk")

_BYTES_OF_A_ROLLOUT = 36_000
_INODES_OF_A_ROLLOUT = 6


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the soak."""
    parser.add_argument("--only", choices=RUNS, action="append", help="this run alone; may be given several times")
    parser.add_argument("--directory", type=Path, help="where to work: on the disk that is meant (a temporary one)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rollouts", type=int, default=1_000_000, help="of the last wave; a hundredth and a tenth of it come first"
    )
    parser.add_argument("--files", type=int, default=100_000, help="open elsewhere on the machine")
    parser.add_argument("--open-rollouts", type=int, default=10_000, help="at a soft limit of 1,024 descriptors")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="written and read back")
    parser.add_argument("--minutes", type=float, default=20.0, help="of mixed load")
    parser.add_argument("--callers", type=int, default=1000, help="on the disk that can't follow")
    parser.add_argument("--slow-seconds", type=float, default=60.0, help="of that disk")


def run(options: argparse.Namespace) -> Outcome:
    """All runs, or those that were asked for."""
    outcome = Outcome()
    outcome.figure("seed", str(options.seed))
    wanted = options.only or RUNS
    nursery = Nursery()
    with tempfile.TemporaryDirectory(prefix="tokcap-soak-", dir=options.directory, ignore_cleanup_errors=True) as path:
        directory = Path(path)
        acts: dict[str, Callable[[], None]] = {
            "million": lambda: _many(outcome, directory, options),
            "files": lambda: _files(outcome, directory, nursery, options),
            "reading": lambda: _reading(outcome, directory, options),
            "load": lambda: mixed_load(outcome, directory, nursery, options.minutes, options.seed),
            "slow-disk": lambda: slow_disk(
                outcome, directory, options.slow_seconds, options.seed, callers=options.callers
            ),
        }
        try:
            for name in wanted:
                print(f"{name} ...", flush=True)
                acts[name]()
        finally:
            nursery.close()
    return outcome


def _many(outcome: Outcome, directory: Path, options: argparse.Namespace) -> None:
    counts = [max(10, options.rollouts // 100), max(10, options.rollouts // 10), options.rollouts]
    if not _fits(outcome, directory, counts[-1] * _BYTES_OF_A_ROLLOUT, counts[-1] * _INODES_OF_A_ROLLOUT, "million"):
        return
    many_rollouts(outcome, directory / "many", counts, options.seed)


def _files(outcome: Outcome, directory: Path, nursery: Nursery, options: argparse.Namespace) -> None:
    files_open_elsewhere(outcome, directory, nursery, options.files, 500)
    few_descriptors(outcome, directory, nursery, options.open_rollouts)
    no_descriptors(outcome, directory, nursery, 24)


def _reading(outcome: Outcome, directory: Path, options: argparse.Namespace) -> None:
    size = int(options.gigabytes * 1e9)
    if _fits(outcome, directory, size * 11 // 10, 10_000, "reading"):
        read_back(outcome, directory, size, options.seed)


def _fits(outcome: Outcome, directory: Path, size: int, inodes: int, run: str) -> bool:
    """Whether there is room for it; else the reason is told."""
    free = os.statvfs(directory)
    if shutil.disk_usage(directory).free < size:
        outcome.left_out.append(f"{run}: {directory} has less than {size / 1e9:.0f} GB free")
    elif free.f_files and free.f_favail < inodes:
        outcome.left_out.append(f"{run}: {directory} has fewer than {inodes:,} inodes free")
    else:
        return True
    return False


PART = Part(arguments, run)
