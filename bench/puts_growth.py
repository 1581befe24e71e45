"""How puts grow with the turns and with the rollouts.

Seconds, CPU and bytes on disk are those of all puts; latencies are as they are, and grow with the number of rollouts
that are open at once, because there is one disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from .clients import Measured, percentile, run
from .figures import OURS
from .growth import FACTORS, Along, Growth
from .peer import PEER
from .places import place
from .puts import Turn, take_turns
from .stores import OURS_LISTS, missing
from .workload import Scale, Workload, calls, handed_in, named

__all__ = ("of_puts",)


def of_puts(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Growth]:
    """Of W1 (at 1x: 16 rollouts of 20 turns) and W2 (at 1x: 8 rollouts that grow to 16k ids), tokcap and NeMo Gym."""
    first = {
        "W1": msgspec.structs.replace(named("W1", scale), rollouts=max(1, round(16 * scale.rollouts))),
        "W2": named("W2", Scale("", scale.rollouts, scale.turns / FACTORS[-1])),
    }
    for where in places:
        with place(where) as directory:
            for name, workload in first.items():
                for along in ("turns", "rollouts"):
                    yield from _of_puts(directory, where, rounds, name, workload, along)


def _of_puts(directory: Path, where: str, rounds: int, name: str, first: Workload, along: Along) -> Iterator[Growth]:
    conversations = [calls(_times(first, along, factor)) for factor in FACTORS]
    sizes = tuple(map(handed_in, conversations))
    absent = missing()
    kinds = [
        Turn(candidate, intents)
        for candidate in (OURS, OURS_LISTS, PEER)
        if candidate not in absent
        for intents in (False, True)
    ]
    # All sizes of one candidate are neighbours in time, so that a machine that slows down looks like no growth.
    turns = [(kind, size) for kind in kinds for size in range(len(sizes))]

    def taken(turn: tuple[Turn, int], own: Path) -> Measured:
        kind, size = turn
        return run(kind.candidate, own, conversations[size], intents=kind.intents)

    found = take_turns(directory, rounds, turns, taken)
    for kind in kinds:
        for measure, value in _VALUES.items():
            values = [[value(each) for each in found[kind, size]] for size in range(len(sizes))]
            name_of = f"{'begin_call + put' if kind.intents else 'put'}: {measure}"
            yield Growth(name_of, where, name, along, kind.candidate, sizes, tuple(zip(*values, strict=True)))


def _times(first: Workload, along: Along, factor: int) -> Workload:
    if along == "turns":
        return msgspec.structs.replace(first, turns=first.turns * factor)
    return msgspec.structs.replace(first, rollouts=first.rollouts * factor)


_VALUES: dict[str, Callable[[Measured], float]] = {
    "seconds of all": lambda run: run.seconds,
    "CPU seconds of all": lambda run: run.cpu_seconds,
    "p50": lambda run: percentile(run.steady, 0.5),
    "p99": lambda run: percentile(run.steady, 0.99),
    "p50 of the first": lambda run: percentile(run.first, 0.5),
    "bytes on disk": lambda run: run.file_bytes,
    "allocated bytes on disk": lambda run: run.allocated_bytes,
}
