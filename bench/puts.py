"""Durable puts: how many a second, how long each takes, what they cost in CPU and on disk.

A round runs every candidate once, one after the other, in the same place.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from .clients import Measured, percentile, run, run_processes
from .figures import Figure
from .places import place
from .stores import CANDIDATES, missing
from .workload import Call, Scale, Workload, calls, distinct_ids, named

__all__ = (
    "ALLOCATED",
    "BYTES",
    "DURABLE",
    "FIRST_P50",
    "FROM_PROCESSES",
    "P50",
    "P99",
    "PAIR_P50",
    "STEADY",
    "open_label",
    "open_rollouts",
    "processes",
    "take_turns",
    "workloads",
)

DURABLE = "durable puts"
STEADY = "durable puts, first of each rollout excluded"
P50, P99 = "put p50", "put p99"
FIRST_P50 = "first put of a rollout p50"
CPU = "CPU per 1,000 puts"
BYTES = "bytes on disk"
ALLOCATED = "bytes on disk, allocated blocks"
PER_ID = "bytes on disk per distinct id"
PAIRS = "durable begin_call + put"
PAIR_P50, PAIR_P99 = "begin_call + put p50", "begin_call + put p99"
PAIR_CPU = "CPU per 1,000 begin_call + put"
FROM_PROCESSES = "durable puts, from processes"
PROCESSES_CPU = "CPU per 1,000 puts, from processes"

LEAST_ROLLOUTS = 8
"""With one rollout open, so many are stored one after another: 20 puts alone have no 99th percentile."""

Better = Literal["more", "less"]
Key = TypeVar("Key", bound=Hashable)


class Turn(msgspec.Struct, frozen=True):
    """What a candidate does when it is its turn."""

    candidate: str
    intents: bool = False
    """Whether each put has its `begin_call`."""


def workloads(
    places: Sequence[str], rounds: int, scale: Scale, names: Sequence[str], intents: Collection[str] | None = None
) -> Iterator[Figure]:
    """Every measure of the workloads of these names, from one process.

    intents: the workloads that are also put with a `begin_call` before each put; None: all.
    """
    for where in places:
        with place(where) as directory:
            for name in names:
                run_of = _Run(where, name, None, whole=True, intents=intents is None or name in intents)
                yield from _figures(directory, run_of, rounds, calls(named(name, scale)), None)


def open_rollouts(
    places: Sequence[str],
    rounds: int,
    scale: Scale,
    numbers: Sequence[int],
    candidates: Sequence[str] | None = None,
    intents: Collection[int] | None = None,
) -> Iterator[Figure]:
    """Puts per second and latencies of conversations as in W1, so many open at once; None: all candidates.

    intents: the numbers at which there are also puts with a `begin_call` before each; None: all.
    """
    for where in places:
        with place(where) as directory:
            for number in numbers:
                at_once = max(1, round(number * scale.rollouts))
                batches = max(1, LEAST_ROLLOUTS // at_once) if scale.rollouts >= 1 else 1
                conversations = calls(msgspec.structs.replace(named("W1", scale), rollouts=at_once * batches))
                also = intents is None or number in intents
                run_of = _Run(where, open_label(number), at_once, whole=False, intents=also)
                yield from _figures(directory, run_of, rounds, conversations, candidates)


def open_label(number: int) -> str:
    """How figures name the workload of so many open rollouts."""
    return f"W1, {number} open"


def processes(
    places: Sequence[str],
    rounds: int,
    scale: Scale,
    names: Sequence[str],
    numbers: Sequence[int],
    candidates: Sequence[str] | None = None,
) -> Iterator[Figure]:
    """Puts per second from so many processes, each with its share of the rollouts; None: all candidates."""
    turns = list(map(Turn, _present(candidates)))
    for where in places:
        with place(where) as directory:
            for name in names:
                for number in numbers:
                    workload = named(name, scale)
                    shared = math.ceil(workload.rollouts / number) * number
                    workload = msgspec.structs.replace(workload, rollouts=shared)
                    for turn, runs in take_turns(directory, rounds, turns, _shared(workload, number)).items():
                        rates = tuple(each.puts / each.seconds for each in runs)
                        cpu = tuple(each.cpu_seconds / each.puts * 1e3 for each in runs)
                        yield Figure(FROM_PROCESSES, "1/s", "more", where, name, turn.candidate, rates, number)
                        yield Figure(PROCESSES_CPU, "s", "less", where, name, turn.candidate, cpu, number)


def _shared(workload: Workload, number: int) -> Callable[[Turn, Path], Measured]:
    return lambda turn, directory: run_processes(turn.candidate, directory, workload, number)


def take_turns(
    directory: Path, rounds: int, turns: Sequence[Key], taken: Callable[[Key, Path], Measured]
) -> dict[Key, list[Measured]]:
    """So many rounds of all turns, each in a directory of its own, which is removed afterwards.

    Every round begins with another one, so that nobody always runs after the same neighbour has filled the caches.
    """
    found: dict[Key, list[Measured]] = {turn: [] for turn in turns}
    for number in range(rounds):
        first = number % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            own = directory / "turn"
            try:
                found[turn].append(taken(turn, own))
            finally:
                shutil.rmtree(own, ignore_errors=True)
    return found


def _present(candidates: Sequence[str] | None) -> list[str]:
    absent = missing()
    return [name for name in candidates or CANDIDATES if name not in absent]


class _Run(msgspec.Struct, frozen=True):
    """What is the same for all candidates."""

    where: str
    label: str
    at_once: int | None
    whole: bool
    """Whether it is a workload as it is defined, so that its sums mean something."""
    intents: bool


def _figures(
    directory: Path,
    run_of: _Run,
    rounds: int,
    conversations: Sequence[list[Call]],
    candidates: Sequence[str] | None,
) -> Iterator[Figure]:
    def taken(turn: Turn, own: Path) -> Measured:
        return run(turn.candidate, own, conversations, open_rollouts=run_of.at_once, intents=turn.intents)

    turns = []
    for candidate in _present(candidates):
        turns.append(Turn(candidate))
        if run_of.intents and CANDIDATES[candidate].intents:
            # Beside its own puts, which it is compared with.
            turns.append(Turn(candidate, intents=True))
    distinct = distinct_ids(conversations)
    for turn, runs in take_turns(directory, rounds, turns, taken).items():
        measures = _pair_measures() if turn.intents else _put_measures(distinct, whole=run_of.whole)
        for name, unit, better, value in measures:
            yield Figure(name, unit, better, run_of.where, run_of.label, turn.candidate, tuple(map(value, runs)))


Measure = tuple[str, str, Better, Callable[[Measured], float]]


def _put_measures(distinct: int, *, whole: bool) -> list[Measure]:
    of_all: list[Measure] = [
        (DURABLE, "1/s", "more", lambda run: run.puts / run.seconds),
        (CPU, "s", "less", lambda run: run.cpu_seconds / run.puts * 1e3),
        (BYTES, "bytes", "less", lambda run: run.file_bytes),
        (ALLOCATED, "bytes", "less", lambda run: run.allocated_bytes),
        (PER_ID, "bytes", "less", lambda run: run.file_bytes / distinct),
    ]
    return [
        *(of_all if whole else ()),
        (STEADY, "1/s", "more", lambda run: len(run.steady) / run.steady_seconds),
        (P50, "ms", "less", lambda run: percentile(run.steady, 0.5) * 1e3),
        (P99, "ms", "less", lambda run: percentile(run.steady, 0.99) * 1e3),
        (FIRST_P50, "ms", "less", lambda run: percentile(run.first, 0.5) * 1e3),
    ]


def _pair_measures() -> list[Measure]:
    return [
        (PAIRS, "1/s", "more", lambda run: len(run.steady) / run.steady_seconds),
        (PAIR_P50, "ms", "less", lambda run: percentile(run.steady, 0.5) * 1e3),
        (PAIR_P99, "ms", "less", lambda run: percentile(run.steady, 0.99) * 1e3),
        (PAIR_CPU, "s", "less", lambda run: run.cpu_seconds / run.puts * 1e3),
    ]
