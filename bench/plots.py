"""A picture for each measure, for people who look rather than read."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .figures import OURS, Figure
from .growth import Growth
from .places import UnavailableError

__all__ = ("draw",)

PANELS_A_ROW = 4
OWN_COLOUR, OTHER_COLOUR = "tab:orange", "tab:blue"


def draw(directory: Path, figures: Sequence[Figure], growth: Sequence[Growth]) -> list[Path]:
    """Write the pictures there; their paths. Raises `UnavailableError` without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise UnavailableError(f"matplotlib is not installed (pip install '.[bench]'): {error}") from None
    written = []
    for measure in dict.fromkeys(figure.measure for figure in figures):
        path = directory / f"{_file_name(measure)}.svg"
        _bars(pyplot, path, [figure for figure in figures if figure.measure == measure])
        written.append(path)
    for measure in dict.fromkeys(each.measure for each in growth):
        path = directory / f"growth-{_file_name(measure)}.svg"
        _lines(pyplot, path, [each for each in growth if each.measure == measure])
        written.append(path)
    return written


def _bars(pyplot: Any, path: Path, figures: Sequence[Figure]) -> None:
    """A panel for each workload and place, a bar of the median for each candidate, a line over all rounds."""
    panels = list(dict.fromkeys((figure.workload, figure.place, figure.processes) for figure in figures))
    drawing, axes = _panels(pyplot, len(panels))
    for (workload, place, processes), axis in zip(panels, axes, strict=True):
        beside = [f for f in figures if (f.workload, f.place, f.processes) == (workload, place, processes)][::-1]
        values = [figure.value for figure in beside]
        spread = [
            [figure.value - min(figure.rounds) for figure in beside],
            [max(figure.rounds) - figure.value for figure in beside],
        ]
        colours = [OWN_COLOUR if figure.candidate.startswith(OURS) else OTHER_COLOUR for figure in beside]
        axis.barh([figure.candidate for figure in beside], values, xerr=spread, color=colours)
        if min(values) > 0 and max(values) / min(values) > 20:
            axis.set_xscale("log")
            _slant(axis)
        where = [workload, place, f"{processes} processes" if processes > 1 else ""]
        axis.set_title(", ".join(filter(None, where)), fontsize="medium")
        axis.set_xlabel(figures[0].unit)
    _save(pyplot, drawing, path, f"{figures[0].measure} ({figures[0].better} is better)")


def _lines(pyplot: Any, path: Path, growth: Sequence[Growth]) -> None:
    """A panel for each workload and place, value over bytes, both in logarithms; the legend has the exponents."""
    panels = list(dict.fromkeys((each.workload, each.place, each.along) for each in growth))
    drawing, axes = _panels(pyplot, len(panels))
    for (workload, place, along), axis in zip(panels, axes, strict=True):
        for each in growth:
            if (each.workload, each.place, each.along) == (workload, place, along):
                axis.loglog(each.sizes, each.medians, marker="o", label=f"{each.candidate}: {each.exponent:.2f}")
        axis.set_title(", ".join(filter(None, (workload, place, f"more {along}"))), fontsize="medium")
        axis.set_xlabel("bytes handed in")
        axis.legend(fontsize="small")
        _slant(axis)
    _save(pyplot, drawing, path, f"growth of {growth[0].measure}")


def _slant(axis: Any) -> None:
    """Or the long labels of a logarithmic axis would lie on each other."""
    axis.tick_params(axis="x", which="both", labelrotation=40, labelsize="small")


def _panels(pyplot: Any, number: int) -> tuple[Any, list[Any]]:
    columns = min(number, PANELS_A_ROW)
    rows = -(-number // columns)
    drawing, axes = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 3.2 * rows + 0.4), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[number:]:
        axis.set_visible(False)
    return drawing, flat[:number]


def _save(pyplot: Any, drawing: Any, path: Path, title: str) -> None:
    drawing.suptitle(title)
    drawing.savefig(path)
    pyplot.close(drawing)


def _file_name(measure: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", measure.lower()).strip("-")
