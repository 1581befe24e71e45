"""How a measure grows with the size of what it is measured on.

Fitted is the exponent of `value = c * bytes ** exponent` over the bytes that are handed in, by least squares of the
logarithms; not over turns, because a prompt that is handed in whole has to be looked at once. What grows faster than
its input by more than noise is a bug. Costs that don't depend on the size pull an exponent down, never up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from .figures import Figure
from .workload import Scale

__all__ = ("FACTORS", "LIMIT", "Along", "Growth", "fit", "grown")

FACTORS = (1, 2, 4, 8)
LIMIT = 1.1
"""An exponent above it is a bug."""

Along = Literal["turns", "rollouts"]


class Growth(msgspec.Struct, frozen=True):
    """One measure of one candidate at several sizes."""

    measure: str
    place: str
    workload: str
    along: Along
    candidate: str
    sizes: tuple[float, ...]
    """Bytes handed in, or how many tombstones there were."""
    rounds: tuple[tuple[float, ...], ...]
    """For each round one value per size, measured one after the other."""

    @property
    def exponent(self) -> float:
        """The median of the rounds; 1.0: twice the bytes take twice as long, or as much."""
        return statistics.median(fit(self.sizes, values) for values in self.rounds)

    @property
    def medians(self) -> tuple[float, ...]:
        """The median round of each size."""
        return tuple(map(statistics.median, zip(*self.rounds, strict=True)))

    @property
    def too_fast(self) -> bool:
        """Whether it grows faster than its input by more than noise."""
        return self.exponent > LIMIT


def fit(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent with which `values` grow over `sizes`; NaN if there are no two sizes, or a value is not positive."""
    if len(set(sizes)) < 2 or min(*sizes, *values) <= 0 or any(map(math.isnan, values)):
        return math.nan
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values]).slope


def grown(
    measure: Callable[[Scale], Iterable[Figure]], size_of: Callable[[Figure, Scale], float], scale: Scale
) -> Iterator[Growth]:
    """How the figures of a module of measures grow along turns; at 8x are the turns of the workloads themselves.

    measure: gives figures of the same measures in the same order at every scale. size_of: the bytes that were handed
    in; NaN for a figure that does not depend on turns, which is left out.
    """
    scales = [msgspec.structs.replace(scale, turns=scale.turns * factor / FACTORS[-1]) for factor in FACTORS]
    found = [list(measure(each)) for each in scales]
    for figures in zip(*found, strict=True):
        sizes = tuple(size_of(figure, each) for figure, each in zip(figures, scales, strict=True))
        if any(map(math.isnan, sizes)) or figures[0].better != "less":
            continue
        last = figures[-1]
        rounds = tuple(zip(*(figure.rounds for figure in figures), strict=True))
        yield Growth(last.measure, last.place, last.workload, "turns", last.candidate, sizes, rounds)
