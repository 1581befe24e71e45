"""Power cuts and failing disks under real file systems.

Three ways: the block writes of a disk are recorded while a store works, and every state that a cut could have left of
it is mounted and checked (`power_recording`); the file system is shut down while a store works (`power_shutdown`); the
disk answers EIO (`power_failing`). A disk that says it flushed and didn't is out of scope: nothing above it can help.

On an ext4 without a journal nothing is removed while it is recorded. There e2fsck repairs what a cut left, and if a
directory was removed shortly before, it may take blocks and inodes for those of the removed one that belong to what is
durable since, whoever wrote it. How often, is counted and is no problem of the store. Nor is a btrfs that its own
kernel doesn't mount, because it can't replay its log: such states are reported as left out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.children import Nursery

from .part import Outcome, Part
from .power_disk import FILE_SYSTEMS, FileSystem, reason_against, workplace
from .power_failing import IN_PLACE, NEEDS_BLOCKS, SITUATIONS
from .power_mutants import CARELESS, MUTANTS
from .power_recording import UNMOUNTABLE, Keeps, Recording, State, check_states, record
from .power_shutdown import cut_while_working
from .power_workload import FATES, KEEPING

__all__ = ("PART", "fates_on", "first_loss", "recorded_states", "situations_on")

CAN_BE_SHUT_DOWN = ("ext4", "xfs")


def fates_on(fs: FileSystem) -> Sequence[str]:
    """What may become of rollouts while a file system of this kind is recorded."""
    return KEEPING if fs.repair else FATES


def situations_on(fs: FileSystem) -> list[str]:
    """Failures of its disk that make sense on a file system of this kind."""
    return [name for name in SITUATIONS if fs.name in IN_PLACE or name not in NEEDS_BLOCKS]


class Counted:
    """What was recorded and checked."""

    def __init__(self) -> None:
        self.states = self.steps = self.writes = self.flushes = 0
        self.problems: list[str] = []
        self.unmountable: list[str] = []
        """States that were not checked, on btrfs: its kernel doesn't mount them."""
        self.bad = 0
        """States with a problem."""


def recorded_states(
    fs: FileSystem,
    nursery: Nursery,
    *,
    seed: int,
    states: int,
    rollouts: int,
    fates: Sequence[str] = (),
    keep: str = "",
) -> Counted:
    """Record one workload and check so many states of it."""
    counted = Counted()
    with workplace() as place:
        recording = record(fs, place, nursery, seed=seed, rollouts=rollouts, fates=fates or fates_on(fs))
        counted.steps = len(recording.steps)
        counted.flushes = recording.flushes
        counted.writes = len(recording.operations) - counted.flushes
        for state, problems in check_states(recording, recording.choose(states, random.Random(seed))):
            if _is_of_btrfs(fs, problems):
                counted.unmountable += [f"{fs.name}, seed {seed}, {state}: {problem}" for problem in problems]
                continue
            counted.states += 1
            counted.bad += bool(problems)
            counted.problems += [f"{fs.name}, seed {seed}, {state}: {problem}" for problem in problems]
        if counted.problems and keep:
            kept = Path(keep) / f"{fs.name}-{seed}"
            recording.keep(kept)
            counted.problems.append(f"{fs.name}, seed {seed}: recording kept, see it with --again {kept} and the above")
    return counted


def _is_of_btrfs(fs: FileSystem, problems: Sequence[str]) -> bool:
    return fs.kind == "btrfs" and any(problem.startswith(UNMOUNTABLE) for problem in problems)


def first_loss(fs: FileSystem, nursery: Nursery, *, without: str, seeds: Sequence[int], rollouts: int) -> str:
    """What the harness finds in a store that leaves out a sync; empty if it finds nothing."""
    mutant = MUTANTS[without]
    for seed in seeds:
        with workplace() as place:
            recording = record(fs, place, nursery, seed=seed, rollouts=rollouts, fates=fates_on(fs), without=without)
            for state, problems in check_states(recording, recording.right_after(mutant.shows_after)):
                if problems and not _is_of_btrfs(fs, problems):
                    return f"seed {seed}, {state}: {problems[0]}"
    return ""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file-systems", nargs="+", choices=FILE_SYSTEMS, default=list(FILE_SYSTEMS))
    parser.add_argument("--seed", type=int, default=1, help="of the first recording; each has the next one")
    parser.add_argument("--recordings", type=int, default=10, help="workloads recorded on each file system")
    parser.add_argument("--states", type=int, default=100, help="of each recording that are mounted and checked")
    parser.add_argument("--rollouts", type=int, default=36, help="in each workload, all at once")
    parser.add_argument("--cuts", type=int, default=40, help="shutdowns of each file system that can be shut down")
    parser.add_argument("--keep", default="", metavar="DIR", help="keep recordings in which something was found here")
    parser.add_argument("--again", default="", metavar="DIR", help="see one state of a kept recording again:")
    parser.add_argument("--at", type=int, default=0, help="its number of writes and flushes")
    parser.add_argument("--keeps", choices=get_args(Keeps), default="nothing", help="what the disk kept")
    parser.add_argument("--chance", type=int, default=0, help="its seed")


def _run(options: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    if options.again:
        with workplace() as place:
            recording = Recording.kept(Path(options.again), place)
            for state, problems in check_states(recording, [State(options.at, options.keeps, options.chance)]):
                outcome.problems += [f"{state}: {problem}" for problem in problems]
        return outcome
    nursery = Nursery()
    try:
        for name in options.file_systems:
            fs = FILE_SYSTEMS[name]
            if reason := reason_against(fs):
                outcome.left_out.append(reason)
            else:
                _recorded(fs, nursery, options, outcome)
                _failed(fs, nursery, outcome)
                _mutants(fs, nursery, options, outcome)
            if reason := reason_against(fs, recording=False):
                outcome.left_out.append(f"shutdown: {reason}")
            elif name in CAN_BE_SHUT_DOWN:
                _shut_down(fs, nursery, options, outcome)
    finally:
        nursery.close()
    return outcome


def _recorded(fs: FileSystem, nursery: Nursery, options: argparse.Namespace, outcome: Outcome) -> None:
    kinds = {fs.name: fates_on(fs)}
    if fates_on(fs) != FATES:
        kinds[f"{fs.name}, directories removed"] = FATES
    for what, fates in kinds.items():
        total = Counted()
        demanded = fates == fates_on(fs)
        recordings = options.recordings if demanded else max(1, options.recordings // 5)
        for seed in range(options.seed, options.seed + recordings):
            counted = recorded_states(
                fs,
                nursery,
                seed=seed,
                states=options.states,
                rollouts=options.rollouts,
                fates=fates,
                keep=options.keep if demanded else "",
            )
            for field in "states", "steps", "writes", "flushes", "bad":
                setattr(total, field, getattr(total, field) + getattr(counted, field))
            total.problems += counted.problems
            outcome.left_out += counted.unmountable
            print(f"{what}, seed {seed}: {counted.states} states, {len(counted.problems)} problems", flush=True)
        if demanded:
            outcome.problems += total.problems
            outcome.figure(
                f"{what}: operations acknowledged, block writes, flushes",
                f"{total.steps:,}, {total.writes:,}, {total.flushes:,}",
            )
            outcome.figure(f"{what}: states mounted and checked", total.states)
        else:
            outcome.figure(
                f"{what}: states, and those in which e2fsck lost something", f"{total.states:,}, {total.bad:,}"
            )


def _failed(fs: FileSystem, nursery: Nursery, outcome: Outcome) -> None:
    names = situations_on(fs)
    for name in names:
        with workplace() as place:
            problems = SITUATIONS[name](fs, place, nursery, "")
            outcome.problems += [f"{fs.name}, {name}: {problem}" for problem in problems]
    outcome.figure(f"{fs.name}: failures of the disk", len(names))


def _mutants(fs: FileSystem, nursery: Nursery, options: argparse.Namespace, outcome: Outcome) -> None:
    names = [name for name, mutant in MUTANTS.items() if fs.name in mutant.shows_on]
    for name in names:
        seeds = range(options.seed, options.seed + 3)
        loss = first_loss(fs, nursery, without=name, seeds=seeds, rollouts=options.rollouts)
        print(f"{fs.name}, {name}: {loss or 'NOT SEEN'}", flush=True)
        if not loss:
            outcome.problems.append(f"{fs.name}: a store with {name} looks like a whole one (seeds {list(seeds)})")
    outcome.figure(f"{fs.name}: syncs left out, each found", len(names))
    careless = {name: situation for name, (_, situation) in CARELESS.items() if situation in situations_on(fs)}
    for name, situation in careless.items():
        with workplace() as place:
            seen = SITUATIONS[situation](fs, place, nursery, name)
        print(f"{fs.name}, {name}: {seen[0] if seen else 'NOT SEEN'}", flush=True)
        if not seen:
            outcome.problems.append(f"{fs.name}: a store in which {name} looks like a whole one")
    outcome.figure(f"{fs.name}: ways to be careless with errors, each found", len(careless))


def _shut_down(fs: FileSystem, nursery: Nursery, options: argparse.Namespace, outcome: Outcome) -> None:
    acknowledged = 0
    for seed in range(options.seed, options.seed + options.cuts):
        with workplace() as place:
            cut = cut_while_working(fs, place, nursery, seed=seed, rollouts=options.rollouts)
        acknowledged += cut.acknowledged
        outcome.problems += [f"{fs.name}, shut down, seed {seed}: {problem}" for problem in cut.problems]
    outcome.figure(f"{fs.name}: shutdowns, operations acknowledged before", f"{options.cuts:,}, {acknowledged:,}")


PART = Part(_arguments, _run)
