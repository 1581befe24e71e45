"""What the consumer of a rollout pays: freeze, open and read it, retire it, sweep what is left of it.

    python -m bench.reading [--places ext4,tmpfs] [--rounds 3] [--scale quick]

tokcap gives arrays when they are asked for, NeMo Gym parses everything into Python lists when it freezes. So the fair
figure is `freeze, open, read`: until every id and log-prob of every entry was looked at once (summed); the sums of both
must agree with what was put. All is read from the page cache. Rollouts are written beforehand, with intents, by another
store object than the one that reads, which stays open.

Values are milliseconds per rollout: the mean of one round over its own rollouts, which nobody has read before.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .consumers import Consumer, check_sums, consumers
from .figures import Figure
from .growth import FACTORS, Growth, grown
from .places import UnavailableError, place
from .stock import copies, own_garbage, print_figures
from .workload import Call, Scale, calls, handed_in, named

__all__ = ("MEASURES", "main", "measure", "of_rollouts", "of_turns", "size_of")

MEASURES = {
    "freeze, open, read": "until every id and log-prob was summed; one rollout at a time",
    "freeze, open, read, CPU": "the same in seconds of CPU, all threads",
    "freeze": "tokcap: published and opened; NeMo Gym: marked, and everything parsed",
    "open": "again, once it is frozen",
    "read": "sum every array, or list, of what is open",
    "freeze_many of 64": "64 freezes at once, none of them read; NeMo Gym: in its threads",
    "retire": "one rollout at a time; NeMo Gym calls it drop",
    "sweep": "all tombstones, per tombstone",
}
"""What is measured, and how."""

MANY = 64
SINGLES = {"W1": 16, "W2": 2}
"""How many rollouts are read one by one in each round."""
TOMBSTONES = 100_000
GROWING = 8
"""Rollouts at 1x, where growth with their number is measured."""


def measure(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Figure]:
    """Every figure of this module, place by place. A place that can't be had is reported on stderr."""
    for where in places:
        try:
            with place(where) as directory:
                for name in SINGLES:
                    yield from _reading(directory / name, where, name, rounds, scale)
            with place(where) as directory:
                yield from _sweeping(directory, where, rounds, scale)
        except UnavailableError as error:
            print(f"{where}: not measured: {error}", file=sys.stderr)


def of_turns(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Growth]:
    """How it grows with the turns of a rollout, over the bytes that are read: W1 from 20 turns, W2 from 16k ids."""
    for where in places:
        for name, last in (("W1", FACTORS[-1]), ("W2", 1)):
            longest = msgspec.structs.replace(scale, turns=scale.turns * last)
            try:
                yield from grown(functools.partial(_alone, where, name, rounds), size_of, longest)
            except UnavailableError as error:
                print(f"{where}: not measured: {error}", file=sys.stderr)


def _alone(where: str, name: str, rounds: int, scale: Scale) -> list[Figure]:
    with place(where) as directory:
        return list(_reading(directory, where, name, rounds, scale))


def size_of(figure: Figure, scale: Scale) -> float:
    """Bytes of all arrays of one rollout of the figure's workload; NaN if none is read."""
    if figure.workload not in SINGLES:
        return math.nan
    workload = msgspec.structs.replace(named(figure.workload, scale), rollouts=1)
    return float(handed_in(calls(workload)))


def of_rollouts(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Growth]:
    """How the time for all rollouts grows with their number: W1, read one by one and frozen at once; tombstones."""
    for where in places:
        try:
            with place(where) as directory:
                yield from _of_rollouts(directory, where, rounds, scale)
        except UnavailableError as error:
            print(f"{where}: not measured: {error}", file=sys.stderr)


def _of_rollouts(directory: Path, where: str, rounds: int, scale: Scale) -> Iterator[Growth]:
    conversations = calls(msgspec.structs.replace(named("W1", scale), rollouts=1))
    numbers = [max(1, round(GROWING * min(1.0, scale.rollouts))) * factor for factor in FACTORS]
    tombstones = [max(2, round(TOMBSTONES / FACTORS[-1] * scale.bulk)) * factor for factor in FACTORS]
    found = [_Series(where, "W1") for _ in FACTORS]
    swept = [_Series(where, "W1") for _ in FACTORS]
    for at in range(rounds):
        for size, number in enumerate(numbers):
            for candidate in consumers(directory / f"{at}-{size}"):
                singles, many = (copies(conversations, number, prefix) for prefix in ("single", "many"))
                candidate.stock(singles + many)
                with own_garbage():
                    _one_by_one(candidate, singles, found[size])
                    asyncio.run(_at_once(candidate, [each[0].rollout_id for each in many], found[size]))
                candidate.close()
    for size, number in enumerate(tombstones):
        for candidate in consumers(directory / f"tombstones-{size}"):
            swept[size].add("sweep", candidate.name, _sweep(candidate, directory, number) / number * 1e3)
            candidate.close()
    handed = [float(number * handed_in(conversations)) for number in numbers]
    yield from _grown(found, numbers, handed)
    yield from _grown(swept, tombstones, list(map(float, tombstones)))


def _grown(found: Sequence[_Series], numbers: Sequence[int], sizes: Sequence[float]) -> Iterator[Growth]:
    """Of series at each size, whose values are per rollout: how what all take together grows."""
    for same in zip(*(series.figures() for series in found), strict=True):
        first = same[0]
        values = [[each * number for each in figure.rounds] for figure, number in zip(same, numbers, strict=True)]
        yield Growth(
            f"{first.measure.removesuffix(f' of {MANY}')}: all",
            first.place,
            first.workload,
            "rollouts",
            first.candidate,
            tuple(sizes),
            tuple(zip(*values, strict=True)),
        )


class _Series:
    """The rounds of every measure and candidate of one place and workload, as they come."""

    def __init__(self, where: str, workload: str) -> None:
        self._where, self._workload = where, workload
        self._rounds: dict[tuple[str, str], list[float]] = {}

    def add(self, measure: str, candidate: str, value: float) -> None:
        self._rounds.setdefault((measure, candidate), []).append(value)

    def figures(self) -> Iterator[Figure]:
        for (measure, candidate), rounds in self._rounds.items():
            yield Figure(measure, "ms", "less", self._where, self._workload, candidate, tuple(rounds))


def _reading(directory: Path, where: str, name: str, rounds: int, scale: Scale) -> Iterator[Figure]:
    singles = min(SINGLES[name], max(1, round(SINGLES[name] * scale.rollouts)))
    many = max(2, round(MANY * min(1.0, scale.rollouts))) if name == "W1" else 0
    conversations = calls(msgspec.structs.replace(named(name, scale), rollouts=1 + singles))
    found = consumers(directory)
    blocks = [copies(conversations, singles + many, f"round-{number}") for number in range(rounds)]
    for candidate in found:
        for block in blocks:
            candidate.stock(block)
    series = _Series(where, name)
    for block in blocks:
        for candidate in found:
            with own_garbage():
                _one_by_one(candidate, block[:singles], series)
        if many:
            for candidate in found:
                with own_garbage():
                    asyncio.run(_at_once(candidate, [each[0].rollout_id for each in block[singles:]], series))
    for candidate in found:
        candidate.close()
    yield from series.figures()


def _one_by_one(candidate: Consumer, conversations: Sequence[Sequence[Call]], series: _Series) -> None:
    """Freeze, read, open again and retire each rollout, and add the means."""
    sums = dict.fromkeys(("freeze", "read", "open", "retire", "CPU"), 0.0)
    versions: list[tuple[str, str, int]] = []
    for conversation in conversations:
        rollout_id = conversation[0].rollout_id
        cpu = time.process_time()
        opened = _timed(sums, "freeze", candidate.freeze, rollout_id)
        found = _timed(sums, "read", candidate.read, opened)
        sums["CPU"] += time.process_time() - cpu
        check_sums(candidate, conversation, found)
        candidate.let_go(opened)
        del opened  # or the parsed lists of two snapshots would be there at once
        again = _timed(sums, "open", candidate.open, rollout_id)
        versions.append((rollout_id, again.snapshot_id, again.version))
        candidate.let_go(again)
        del again
    asyncio.run(_retire(candidate, versions, sums))
    means = {name: total / len(conversations) * 1e3 for name, total in sums.items()}
    series.add("freeze, open, read", candidate.name, means["freeze"] + means["read"])
    series.add("freeze, open, read, CPU", candidate.name, means["CPU"])
    for name in ("freeze", "open", "read", "retire"):
        series.add(name, candidate.name, means[name])


def _timed(sums: dict[str, float], name: str, work: Callable[[Any], Any], argument: Any) -> Any:
    begun = time.perf_counter()
    result = work(argument)
    sums[name] += time.perf_counter() - begun
    return result


async def _retire(candidate: Consumer, versions: Sequence[tuple[str, str, int]], sums: dict[str, float]) -> None:
    await asyncio.to_thread(int)  # or the first one would wait for the thread to start
    begun = time.perf_counter()
    for rollout_id, snapshot_id, version in versions:
        if not await candidate.retire(rollout_id, snapshot_id, version):
            raise AssertionError(f"{candidate.name}: {rollout_id} was not retired")
    sums["retire"] += time.perf_counter() - begun


async def _at_once(candidate: Consumer, rollout_ids: Sequence[str], series: _Series) -> None:
    begun = time.perf_counter()
    opened = await candidate.freeze_many(rollout_ids)
    seconds = time.perf_counter() - begun
    series.add(f"freeze_many of {MANY}", candidate.name, seconds / len(rollout_ids) * 1e3)
    for snapshot in opened:
        candidate.let_go(snapshot)


def _sweeping(directory: Path, where: str, rounds: int, scale: Scale) -> Iterator[Figure]:
    number = max(10, round(TOMBSTONES * scale.bulk))
    series = _Series(where, f"{number:,} tombstones")
    # A hundred thousand even out noise by themselves.
    for at in range(1 if number >= 5_000 else rounds):
        for candidate in consumers(directory / str(at)):
            series.add("sweep", candidate.name, _sweep(candidate, directory, number) / number * 1e3)
            candidate.close()
    yield from series.figures()


def _sweep(candidate: Consumer, directory: Path, number: int) -> float:
    """Seconds for so many tombstones."""
    candidate.bury(number)
    _flush(directory)
    begun = time.perf_counter()
    gone = candidate.sweep()
    seconds = time.perf_counter() - begun
    if gone != number:
        raise AssertionError(f"{candidate.name}: {gone} of {number} tombstones were swept")
    return seconds


def _flush(directory: Path) -> None:
    """A journal commits everything that it has; what was prepared is not to be written in the measured time."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def main() -> int:
    """Print every figure as it comes."""
    return print_figures(__doc__, measure)


if __name__ == "__main__":
    raise SystemExit(main())
