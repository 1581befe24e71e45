"""Every file-system call of every operation fails; then system calls of a real process; then disks that are full."""

from __future__ import annotations

import argparse
import atexit
import errno
import logging
import multiprocessing
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tests.children import Nursery

from .faults_around import AROUND
from .faults_below import files_below, store_below
from .faults_disks import KINDS, UnavailableError, meet_full_disk, mounted
from .faults_disturbed import ERRORS, SHORT, WAYS, Expected, OtherProcess, disturb, faults
from .faults_looks import LOOKS, STATES, disturb_look, disturb_opening
from .faults_operations import OPERATIONS
from .faults_traced import Traced, calls_made, injections, memory, unavailable
from .part import Outcome, Part

__all__ = ("PART",)


@dataclass
class _Tally:
    """What one task did."""

    runs: int = 0
    injected: int = 0
    unhit: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: _Tally) -> None:
        self.runs += other.runs
        self.injected += other.injected
        self.unhit += other.unhit
        self.kinds += other.kinds
        self.errors += other.errors
        self.problems += other.problems


@dataclass(frozen=True)
class _Task:
    """A piece of the work, done in a process of its own."""

    what: str
    number: int
    way: int = 0
    share: float = 1.0
    seed: int = 0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--only", default="", help="operations whose name matches this expression")
    parser.add_argument("--share", type=float, default=1.0, help="of all faults, chosen by the seed (default: all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--traced", type=int, default=600, help="runs of a process under strace")
    parser.add_argument("--full-disks", default=",".join(KINDS), help="kinds of file systems that are filled")
    parser.add_argument("--below", type=int, default=10, help="rounds with a disk that is full below a file system")


def _run(arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    logging.disable(logging.CRITICAL)  # it is full of faults
    print(f"seed {arguments.seed}", flush=True)
    _injected(arguments, outcome)
    if arguments.traced:
        _traced(arguments, outcome)
    for kind in filter(None, arguments.full_disks.split(",")):
        _full(kind, arguments, outcome)
    if arguments.below:
        _below(arguments, outcome)
    return outcome


# ---- faults in every call


def _tasks(arguments: argparse.Namespace) -> Iterator[_Task]:
    wanted = re.compile(arguments.only)
    for number, operation in enumerate(OPERATIONS):
        if wanted.search(operation.name):
            for way in range(len(WAYS)):
                yield _Task("operation", number, way, arguments.share, arguments.seed)
    for what, names in ("look", list(LOOKS)), ("opening", list(STATES)), ("around", list(AROUND)):
        for number, name in enumerate(names):
            if wanted.search(name):
                yield _Task(what, number, 0, arguments.share, arguments.seed)


def _injected(arguments: argparse.Namespace, outcome: Outcome) -> None:
    tasks = list(_tasks(arguments))
    total = _Tally()
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(_work, task) for task in tasks]
        for count, one in enumerate(as_completed(done), 1):
            tally = one.result()
            total.add(tally)
            if count % 20 == 0:
                print(f"{count} of {len(tasks)}: {total.runs:,} runs, {len(total.problems)} problems", flush=True)
            for problem in tally.problems:
                print(problem, flush=True)
    outcome.figure("operations, each through four ways to the file system", len(OPERATIONS))
    outcome.figure("runs with a fault", total.runs)
    outcome.figure("calls that were made to fail", total.injected)
    outcome.figure("kinds of calls among them", len(total.kinds))
    outcome.figure("of these short writes", total.errors["a short write"])
    outcome.figure("of these syncs", total.kinds["fsync"] + total.kinds["fdatasync"])
    outcome.figure("runs whose fault came too late (threads take turns)", total.unhit)
    outcome.problems += total.problems


def _work(task: _Task) -> _Tally:
    logging.disable(logging.CRITICAL)
    directory = tempfile.mkdtemp(prefix="tokcap-faults-", dir=memory())
    try:
        return _DOING[task.what](task, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_other_process: list[OtherProcess] = []


def _outside() -> OtherProcess:
    if not _other_process:
        _other_process.append(OtherProcess())
        atexit.register(_other_process[0].end)
    return _other_process[0]


def _disturb_operation(task: _Task, directory: str) -> _Tally:
    operation, way, tally = OPERATIONS[task.number], WAYS[task.way], _Tally()
    expected = Expected(operation, f"{directory}/expected", way)
    chance = random.Random(f"{task.seed} {operation} {way}")
    for fault in faults(expected.trace, everything=True):
        if chance.random() >= task.share:
            continue
        hits, problem = disturb(operation, fault, expected, f"{directory}/run", _outside(), way)
        tally.runs += 1
        tally.injected += len(hits)
        tally.unhit += not hits and fault.error != SHORT
        tally.kinds.update(call.kind for call in hits)
        tally.errors[errno.errorcode.get(fault.error, "a short write")] += len(hits)
        tally.problems += [problem] if problem else []
    return tally


def _look(task: _Task, directory: str) -> _Tally:
    injected = 0
    problems: list[str] = []
    for read_only in True, False:
        count, found = disturb_look(list(LOOKS)[task.number], directory, ERRORS, read_only=read_only)
        injected, problems = injected + count, problems + found
    return _Tally(runs=injected, injected=injected, problems=problems)


def _opening(task: _Task, directory: str) -> _Tally:
    injected, problems = disturb_opening(STATES[task.number], directory, ERRORS)
    return _Tally(runs=injected, injected=injected, problems=problems)


def _around(task: _Task, directory: str) -> _Tally:
    runs, injected, problems = list(AROUND.values())[task.number](directory, ERRORS, task.share, task.seed)
    return _Tally(runs=runs, injected=injected, problems=problems)


_DOING: dict[str, Callable[[_Task, str], _Tally]] = {
    "operation": _disturb_operation,
    "look": _look,
    "opening": _opening,
    "around": _around,
}


# ---- system calls of a real process


def _traced(arguments: argparse.Namespace, outcome: Outcome) -> None:
    if reason := unavailable():
        outcome.left_out.append(f"system calls of a real process: {reason}")
        return
    base = tempfile.mkdtemp(prefix="tokcap-traced-")
    nursery = Nursery()
    seen: Counter[str] = Counter()
    try:
        os.mkdir(f"{base}/undisturbed")
        planned = injections(calls_made(nursery, f"{base}/undisturbed"), random.Random(arguments.seed))
        for number in range(arguments.traced):
            injection = next(planned)
            run = Traced(injection, f"{base}/{number}")
            os.mkdir(run.directory)
            try:
                run.run(nursery)
            except Exception as error:
                run.problems.append(f"{type(error).__name__}: {error}")
            seen["injected"] += run.injected
            seen["killed"] += injection.kills and run.injected
            seen["steps that failed"] += len(run.failures)
            outcome.problems += [f"traced, seed {arguments.seed}, {injection}: {problem}" for problem in run.problems]
            shutil.rmtree(run.directory)
            if number % 100 == 99:
                print(f"{number + 1} traced runs, {len(outcome.problems)} problems", flush=True)
    finally:
        nursery.close()
        shutil.rmtree(base, ignore_errors=True)
    outcome.figure("runs of a real process under strace", arguments.traced)
    outcome.figure("system calls failed by it, or killed in", seen["injected"])
    outcome.figure("steps of the process that failed for that", seen["steps that failed"])
    outcome.figure("of these kills in the middle of a step", seen["killed"])


# ---- disks


def _full(kind: str, arguments: argparse.Namespace, outcome: Outcome) -> None:
    wanted = re.compile(arguments.only)
    failed = count = 0
    try:
        with mounted(kind, memory()) as disk:
            for operation in OPERATIONS:
                if wanted.search(operation.name):
                    has_failed, problems = meet_full_disk(operation, disk)
                    failed, count = failed + has_failed, count + 1
                    outcome.problems += problems
    except UnavailableError as reason:
        outcome.left_out.append(f"a full {kind}: {reason}")
        return
    print(f"a full {kind}: {len(outcome.problems)} problems", flush=True)
    outcome.figure(f"operations on a full {kind}, of them failed for it", f"{count}, {failed}")


def _below(arguments: argparse.Namespace, outcome: Outcome) -> None:
    """What the kernel says of syncs when the disk below is full is shown, and is not ours to fail for."""
    try:
        for journal in False, True:
            kind = "ext4 with a journal" if journal else "ext4 without a journal"
            files = files_below(journal=journal)
            outcome.figure(
                f"full below {kind}, no tokcap: files for which fsync returned, of them lost",
                f"{len(files.told)}, {len(files.lost)}",
            )
            totals = [0, 0, 0, 0]
            for number in range(arguments.below):
                found = store_below(journal=journal, seed=arguments.seed + number)
                outcome.problems += found.problems
                row = (found.acknowledged, found.refused, found.missing, found.beside_a_failure)
                totals = [total + one for total, one in zip(totals, row, strict=True)]
            acknowledged, refused, missing, beside = totals
            outcome.figure(f"full below {kind}: records acknowledged, refused", f"{acknowledged:,}, {refused:,}")
            outcome.figure(
                f"full below {kind}: acknowledged and missing, beside an inode whose sync failed",
                f"{missing}, {beside}",
            )
            if missing > beside:
                outcome.problems.append(f"{kind}, seed {arguments.seed}: {missing - beside} records miss for no reason")
    except UnavailableError as reason:
        outcome.left_out.append(f"a disk that is full below a file system: {reason}")


PART = Part(_arguments, _run)
