"""Crash-state enumeration: every state that a crash can leave is made, opened, checked and used.

A script is recorded (`crash_recording`, `crash_scripts`), the states of each crash point are made from what was synced
and what was not (`crash_tree`), and each is compared with the state table (`crash_checks`). Of some of them the
recovery is recorded in turn, and the states of a second crash in it are checked. At each crash point the state that a
`kill -9` leaves, with everything that was written, is checked as well, with the eyes of the same boot.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.faulty_files import booted_as
from tokcap import FileStore

from .crash_checks import AFTER_A_CRASH, AFTER_ANOTHER, Checker, go_on, look
from .crash_scripts import AFTERWARDS, DEATHS, ROLLOUTS, SCRIPTS, NotReachedError, Script, death, random_script
from .crash_stage import ROOT, Expected, Stage
from .crash_tree import MODELS, Disk, Image, Model
from .part import Outcome, Part

__all__ = ("PART", "Budget", "Explorer", "Tally", "scratch_directory")

_MOST_TRIED = 6000


@dataclass(frozen=True)
class Budget:
    """How much of each crash point is looked at."""

    states: int = 60
    """States per crash point and model."""
    again: int = 40
    """Of one state in so many the recovery is recorded; 0: never."""
    states_again: int = 20
    """Of a recovery: each at another crash point."""
    models: tuple[Model, ...] = MODELS
    unit: int = 512
    """Bytes of a data unit."""


@dataclass
class Tally:
    """What was looked at."""

    states: int = 0
    """Distinct pairs of a tree and what was expected of it."""
    trees: set[int] = field(default_factory=set)
    again: int = 0
    killed: int = 0
    points: int = 0
    exhausted: int = 0
    events: int = 0
    recordings: int = 0
    late: int = 0
    """Recordings that were not made, because the time was up."""
    problems: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.trees |= other.trees
        self.problems += other.problems
        for name in "states", "again", "killed", "points", "exhausted", "events", "recordings", "late":
            setattr(self, name, getattr(self, name) + getattr(other, name))


def scratch_directory() -> str:
    """An empty directory in memory, where there is such a place."""
    return tempfile.mkdtemp(prefix="tokcap-crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


class Explorer:
    """Records scripts and looks at their states, in a scratch directory of its own."""

    def __init__(self, scratch: str, budget: Budget, *, seed: int = 0, keep: str = "") -> None:
        self.scratch, self.budget, self.seed, self.keep = scratch, budget, seed, keep
        self.checker = Checker(scratch)
        self.tally = Tally()
        self.until = float("inf")
        """When to stop (`time.monotonic`)."""

    def close(self) -> None:
        self.checker.close()

    def record(self, script: Script) -> Stage:
        """Run a script; what it did is in the stage."""
        base = f"{self.scratch}/recorded"
        os.mkdir(base, 0o700)
        stage = Stage(base, ROLLOUTS)
        try:
            script(stage)
        finally:
            stage.end()
            shutil.rmtree(base)
        self.tally.recordings += 1
        self.tally.problems += [f"{script.__name__}: without any crash: {problem}" for problem in stage.problems]
        return stage

    def explore(self, script: Script) -> Stage:
        """Record a script and look at its states."""
        stage = self.record(script)
        kinds = [event.kind for event in stage.recording.events]
        # What was before somebody made all of it durable, other scripts look at.
        first = len(kinds) - kinds[::-1].index("settled") if "settled" in kinds else 0
        self.look_at(stage, script.__name__, first=first)
        return stage

    def look_at(self, stage: Stage, name: str, *, first: int = 0) -> None:
        """Check the states of the crash points of a recording, from the event `first` on."""
        self.tally.events += len(stage.recording.events) - first
        known: set[tuple[int, int]] = set()
        for model in self.budget.models:
            chance = random.Random(f"{self.seed} {name} {model}")
            for position, image, expected, same_boot in self._states(stage, model, chance, known, first):
                if time.monotonic() > self.until:
                    return
                boot_id = "" if same_boot else AFTER_A_CRASH
                self.tally.trees.add(image.key)
                if same_boot:
                    self.tally.killed += 1
                else:
                    self.tally.states += 1
                variant = chance.randrange(1 << 30)
                problem = self.checker.check(image, expected, boot_id=boot_id, variant=variant)
                if problem is not None:
                    self._report(problem, stage, name, model, position, image, expected, same_boot)
                elif self.budget.again and not same_boot and variant % self.budget.again == 0:
                    problem = self._again(image, expected, variant)
                    if problem is not None:
                        self._report(f"recovery: {problem}", stage, name, model, position, image, expected, same_boot)

    def _states(
        self, stage: Stage, model: Model, chance: random.Random, known: set[tuple[int, int]], first: int
    ) -> Iterator[tuple[int, Image, Expected, bool]]:
        """(crash point, state, what is expected of it, whether with the eyes of the same boot), each once."""
        events = stage.recording.events
        disk = Disk.of(stage.recording, unit=self.budget.unit)
        for position in range(len(events) + 1):
            if position >= first:
                expected = stage.expected(position)
                pending = disk.pending()
                if model == self.budget.models[0]:
                    yield position, pending.everything, expected, True
                new, is_cut = 0, False
                for tried, image in enumerate(pending.images(model, chance)):
                    if new >= self.budget.states or tried >= _MOST_TRIED:
                        is_cut = True
                        break
                    key = (image.key, id(expected))
                    if key not in known:
                        known.add(key)
                        new += 1
                        yield position, image, expected, False
                self.tally.points += 1
                self.tally.exhausted += not is_cut and pending.is_exhaustive
            if position < len(events):
                disk.apply(events[position])

    def _report(
        self,
        problem: str,
        stage: Stage,
        name: str,
        model: str,
        position: int,
        image: Image,
        expected: Expected,
        same_boot: bool,
    ) -> None:
        events = stage.recording.events
        before = f"in front of {events[position]}" if position < len(events) else "at the end"
        kept = ""
        if self.keep:
            kept = f"{self.keep}/{len(os.listdir(self.keep)):04d}"
            os.mkdir(kept)
            image.write_to(kept)
            with open(f"{kept}.txt", "w") as file:
                file.write("\n".join(f"#{number} {event}" for number, event in enumerate(events[:position])))
        self.tally.problems.append(
            f"{name}, seed {self.seed}, {'kill -9' if same_boot else f'{model} model'}, event {position} ({before}), "
            f"unit {self.budget.unit}; missing: {'; '.join(map(str, image.missing)) or 'nothing'}; "
            f"during {expected.moment}: {problem}{f'; kept in {kept}' if kept else ''}"
        )

    # ---- a second crash

    def _again(self, image: Image, expected: Expected, variant: int) -> str | None:
        """Record the recovery of a state and look at what a crash in it leaves; the first problem."""
        base = f"{self.scratch}/again"
        os.mkdir(base, 0o700)
        try:
            image.write_to(base)
            with booted_as(AFTER_A_CRASH):
                states = expected.states
                if os.path.isdir(f"{base}/{ROOT}/rollouts"):
                    with FileStore(f"{base}/{ROOT}", read_only=True) as store:
                        states, _ = look(store, states, expected.sealed)
                stage = Stage(base, tuple(states), states)
                stage.open("after", segment_bytes=1500)
                stage.sweep("after", older_than_s=1e9)
                go_on(lambda operation: stage.do("after", operation)[0], expected, variant)
                if variant % 3 == 0:
                    stage.close("after")
                stage.end()
        finally:
            shutil.rmtree(base)
        if stage.problems:
            return stage.problems[0]
        model = self.budget.models[variant % len(self.budget.models)]
        disk = Disk.of(stage.recording, unit=self.budget.unit)
        chance = random.Random(variant)
        events = stage.recording.events
        wanted = chance.sample(range(len(events) + 1), min(self.budget.states_again, len(events) + 1))
        for position in range(len(events) + 1):
            if position in wanted:
                now = stage.expected(position)
                images = itertools.islice(disk.pending().images(model, chance), 64)
                state = chance.choice(list(images))
                self.tally.again += 1
                self.tally.trees.add(state.key)
                problem = self.checker.check(state, now, boot_id=AFTER_ANOTHER, variant=chance.randrange(1 << 30))
                if problem is not None:
                    missing = "; ".join(map(str, state.missing))
                    return f"a second crash, at event {position}; missing: {missing}; during {now.moment}: {problem}"
            if position < len(events):
                disk.apply(events[position])
        return None


# ---- the long run

Job = tuple[str, int, int, str]
"""Kind, and what it needs: of a death how many changes and what follows; of a random script its seed."""


def jobs(count_of_random: int, seed: int) -> list[Job]:
    """Everything that is recorded."""
    work: list[Job] = [("script", 0, 0, name) for name in SCRIPTS]
    work += [("death", after, then, name) for name in DEATHS for then in range(len(AFTERWARDS)) for after in range(30)]
    work += [("random", seed * 1_000_000 + number, 0, "") for number in range(count_of_random)]
    return work


def explore_job(explorer: Explorer, job: Job) -> None:
    """Look at the states of one recording; nothing if the death would come after the end."""
    kind, number, then, name = job
    if kind == "script":
        explorer.explore(SCRIPTS[name])
    elif kind == "random":
        explorer.explore(random_script(number))
    else:
        try:
            explorer.explore(death(name, number, then))
        except NotReachedError:
            return


def _work(job: Job, budget: Budget, seed: int, keep: str, until: float) -> Tally:
    if time.monotonic() > until:
        return Tally(late=1)
    logging.getLogger("tokcap.store").setLevel(logging.ERROR)  # a store in memory warns that it is one
    scratch = scratch_directory()
    explorer = Explorer(scratch, budget, seed=seed, keep=keep)
    explorer.until = until
    try:
        explore_job(explorer, job)
    except Exception as error:
        explorer.tally.problems.append(f"{job}: {type(error).__name__}: {error}")
    finally:
        explorer.close()
        shutil.rmtree(scratch, ignore_errors=True)
    return explorer.tally


def _budget_of(job: Job, options: argparse.Namespace) -> Budget:
    states = options.states
    if job[0] == "death":
        states = max(1, states // 6)  # there are many, and much alike
    return Budget(states, options.again, options.states_again, tuple(options.models), options.unit)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--states", type=int, default=60, help="states per crash point and model")
    parser.add_argument("--again", type=int, default=40, help="of one state in so many a second crash is looked at")
    parser.add_argument("--states-again", type=int, default=20, help="states of a second crash")
    parser.add_argument("--random", type=int, default=100, help="random scripts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--unit", type=int, default=512, help="bytes of a data unit")
    parser.add_argument("--only", default="", help="recordings whose name has this in it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after that")
    parser.add_argument("--keep", default="", help="a directory for states that fail")


def run(options: argparse.Namespace) -> Outcome:
    """The long form."""
    if options.keep:
        os.makedirs(options.keep, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    work = [job for job in jobs(options.random, options.seed) if options.only in " ".join(map(str, job))]
    random.Random(options.seed).shuffle(work)  # some of everything, wherever it is stopped
    print(f"seed {options.seed}, {len(work)} recordings", flush=True)
    tally = Tally()
    for number, done in enumerate(_all(work, options, until), start=1):
        tally.add(done)
        if number % 50 == 0:
            print(f"{number} recordings, {tally.states:,} states", flush=True)
        if done.problems:
            print(f"{len(tally.problems)} problems: {done.problems[0][:2000]}", flush=True)
    outcome = Outcome(problems=tally.problems)
    if tally.late:
        outcome.left_out.append(f"{tally.late:,} of {len(work):,} recordings: the time was up")
    if not tally.states:
        outcome.problems.append("no state was checked: see --only and --minutes")
    outcome.figure("recordings", tally.recordings)
    outcome.figure("calls recorded", tally.events)
    outcome.figure("crash points, both models", tally.points)
    outcome.figure("of these with every state made", tally.exhausted)
    outcome.figure("states checked", tally.states)
    outcome.figure("states of a second crash, in the recovery", tally.again)
    outcome.figure("states after kill -9", tally.killed)
    outcome.figure("distinct trees of files among them", len(tally.trees))
    return outcome


def _all(work: Iterable[Job], options: argparse.Namespace, until: float) -> Iterator[Tally]:
    with multiprocessing.get_context("forkserver").Pool(options.workers) as pool:
        tasks = [(job, _budget_of(job, options), options.seed, options.keep, until) for job in work]
        yield from pool.imap_unordered(_one, tasks)


def _one(task: tuple[Job, Budget, int, str, float]) -> Tally:
    return _work(*task)


PART = Part(_arguments, run)
