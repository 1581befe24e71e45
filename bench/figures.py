"""What was measured: one figure per measure, place, workload and candidate, with a value for every round.

Absolute values move with the machine. What is said of two candidates is the median of the ratios of neighbouring
rounds, because neighbours in time saw the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = ("OURS", "Figure", "find", "ratio")

OURS = "tokcap"


class Figure(msgspec.Struct, frozen=True):
    """One measure of one candidate."""

    measure: str
    """Such as `durable puts` or `put p50`; the rows of one measure are compared with each other."""
    unit: str
    """`1/s`, `ms`, `s`, `bytes`, `MB` ..."""
    better: Literal["more", "less"]
    place: str
    """`ext4`, `disk` or `tmpfs`; empty where no disk takes part."""
    workload: str
    """`W1` ... `W4`, with what was varied: `W1, 8 rollouts`."""
    candidate: str
    rounds: tuple[float, ...]
    processes: int = 1

    @property
    def value(self) -> float:
        """The median round."""
        return statistics.median(self.rounds)


def ratio(ours: Figure, theirs: Figure) -> float:
    """How many times better `ours` is than `theirs`; 1.0: the same."""
    pairs = zip(ours.rounds, theirs.rounds, strict=True)
    return statistics.median(a / b if ours.better == "more" else b / a for a, b in pairs)


def find(figures: Iterable[Figure], candidate: str, like: Figure) -> Figure | None:
    """The figure of `candidate` beside `like`: same measure, place, workload and number of processes."""
    for figure in figures:
        if figure.candidate == candidate and (figure.measure, figure.place, figure.workload, figure.processes) == (
            like.measure,
            like.place,
            like.workload,
            like.processes,
        ):
            return figure
    return None
