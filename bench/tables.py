"""Figures as Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from .figures import OURS, Figure, find, ratio
from .growth import Growth
from .puts import BYTES, CPU, DURABLE, P50, P99

__all__ = ("growth", "measures", "number", "summary")

Row = tuple[str, str, int]
"""Workload, place, processes."""


def summary(figures: Sequence[Figure]) -> list[str]:
    """The table of the README: puts of each workload and place, candidate by candidate."""
    columns = (P50, P99, CPU, BYTES)
    lines = [
        "| workload | place | candidate | puts/s | tokcap is | p50 ms | p99 ms | CPU s per 1,000 | MB on disk |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = ("", "")
    for figure in figures:
        if figure.measure != DURABLE or figure.processes != 1:
            continue
        ours = find(figures, OURS, figure)
        better = "" if ours is None or ours is figure else f"{number(ratio(ours, figure))}x"
        beside = [_of_measure(figures, figure, measure) for measure in columns]
        cells = [math.nan if each is None else each.value for each in beside]
        cells[-1] /= 1e6
        where = (figure.workload, figure.place)
        row = (*(where if where != before else ("", "")), figure.candidate, number(figure.value), better)
        lines.append(f"| {' | '.join((*row, *map(number, cells)))} |")
        before = where
    return lines


def measures(figures: Sequence[Figure]) -> Iterator[str]:
    """For each measure a heading and a table, a line for each workload and place and a column for each candidate."""
    for measure in dict.fromkeys(figure.measure for figure in figures):
        found = [figure for figure in figures if figure.measure == measure]
        candidates = list(dict.fromkeys(figure.candidate for figure in found))
        several = any(figure.processes != 1 for figure in found)
        yield f"### {measure} ({found[0].unit}, {found[0].better} is better)"
        yield ""
        yield f"| workload | place | {'processes | ' if several else ''}{' | '.join(candidates)} |"
        yield "|---" * (2 + several + len(candidates)) + "|"
        for row in dict.fromkeys(map(_row, found)):
            beside = {figure.candidate: figure for figure in found if _row(figure) == row}
            cells = [_cell(beside.get(candidate), beside.get(OURS)) for candidate in candidates]
            workload, place, processes = row
            head = (workload, place or "-", *([str(processes)] if several else []))
            yield f"| {' | '.join((*head, *cells))} |"
        yield ""


def growth(found: Sequence[Growth]) -> Iterator[str]:
    """The exponents, a column for each candidate; too large ones are marked."""
    candidates = list(dict.fromkeys(each.candidate for each in found))
    yield f"| workload | place | along | measure | {' | '.join(candidates)} |"
    yield "|---" * (4 + len(candidates)) + "|"
    for row in dict.fromkeys((each.workload, each.place, each.along, each.measure) for each in found):
        beside = {
            each.candidate: f"**{each.exponent:.2f} !**" if each.too_fast else f"{each.exponent:.2f}"
            for each in found
            if (each.workload, each.place, each.along, each.measure) == row
        }
        cells = [beside.get(candidate, "") for candidate in candidates]
        workload, place, along, measure = row
        yield f"| {' | '.join((workload, place or '-', along, measure, *cells))} |"


def number(value: float) -> str:
    """Three digits that count; nothing for NaN."""
    if math.isnan(value):
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _row(figure: Figure) -> Row:
    return figure.workload, figure.place, figure.processes


def _cell(figure: Figure | None, ours: Figure | None) -> str:
    if figure is None:
        return ""
    if ours is None or ours is figure:
        return number(figure.value)
    return f"{number(figure.value)} ({number(ratio(ours, figure))}x)"


def _of_measure(figures: Iterable[Figure], like: Figure, measure: str) -> Figure | None:
    return find(figures, like.candidate, msgspec.structs.replace(like, measure=measure))
