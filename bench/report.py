"""Measure every candidate in every place, in one run, and write the tables and a picture for each measure.

    python -m bench.report                 # what the README shows: W1 and W2, journalled ext4 and tmpfs, one process
    python -m bench.report --all           # every workload and place, several processes, growth: takes hours
    python -m bench.report --only puts     # a part of it
    python -m bench.report --smoke         # that it runs; the figures mean nothing

Absolute figures move with the machine; the ratios of one run are what to look at. Written are `report.md`, the figures
of every round as `figures.json`, and `*.svg`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from . import building, plots, puts, puts_growth, reading, stalls, tables, targets
from .figures import OURS, Figure
from .growth import Growth
from .machine import Machine, look
from .peer import PEER
from .places import PLACES, UnavailableError, describe, place
from .stores import CANDIDATES, FLOORS, OURS_LISTS, missing
from .workload import FULL, QUICK, SMOKE, WORKLOADS, Scale

__all__ = ("PARTS", "Plan", "Report", "main", "measured")


class Plan(msgspec.Struct, frozen=True):
    """How much of everything is measured."""

    scale: Scale
    places: tuple[str, ...]
    rounds: int
    parts: tuple[str, ...]
    workloads: tuple[str, ...]
    open_rollouts: tuple[int, ...]
    processes: tuple[int, ...]
    from_processes: tuple[str, ...] = tuple(WORKLOADS)
    """Workloads that are also put from several processes."""
    few: tuple[str, ...] | None = None
    """If not everything beside the workloads themselves is measured: the candidates that are compared there.

    Then other numbers of open rollouts are measured in the first place only, and `begin_call` with W1 and with one
    open rollout.
    """


class Report(msgspec.Struct):
    """Everything that was found, as it is written to `figures.json`."""

    machine: Machine
    plan: Plan
    seconds: float
    figures: list[Figure]
    growth: list[Growth]
    not_measured: dict[str, str]
    """Candidates, places and parts, and why."""
    failed: list[str] = []
    """The parts among them that ended in an error."""


def _puts(plan: Plan) -> Iterator[Figure]:
    intents = None if plan.few is None else ("W1",)
    yield from puts.workloads(plan.places, plan.rounds, plan.scale, plan.workloads, intents)


def _open(plan: Plan) -> Iterator[Figure]:
    places, intents = (plan.places, None) if plan.few is None else (plan.places[:1], (1,))
    yield from puts.open_rollouts(places, plan.rounds, plan.scale, plan.open_rollouts, plan.few, intents)


def _processes(plan: Plan) -> Iterator[Figure]:
    names = plan.from_processes
    yield from puts.processes(plan.places, plan.rounds, plan.scale, names, plan.processes, plan.few)


def _reading(plan: Plan) -> Iterator[Figure]:
    yield from reading.measure(plan.places, plan.rounds, plan.scale)


def _building(plan: Plan) -> Iterator[Figure]:
    yield from building.measure(plan.places, plan.rounds, plan.scale)


def _stalls(plan: Plan) -> Iterator[Figure]:
    yield from stalls.measure(plan.places, plan.rounds, plan.scale)


def _growth(plan: Plan) -> Iterator[Growth]:
    first = plan.places[:1]
    yield from puts_growth.of_puts(plan.places, plan.rounds, plan.scale)
    yield from reading.of_turns(first, plan.rounds, plan.scale)
    yield from reading.of_rollouts(first, plan.rounds, plan.scale)
    yield from building.of_turns(first, plan.rounds, plan.scale)


PARTS: dict[str, Callable[[Plan], Iterator[Figure | Growth]]] = {
    "puts": _puts,
    "open": _open,
    "processes": _processes,
    "reading": _reading,
    "building": _building,
    "stalls": _stalls,
    "growth": _growth,
}
"""What `--only` takes: puts of the workloads, puts with other numbers of rollouts open, puts from several processes,
what the consumer does, the builds, stalls of the event loop, and growth."""

_FEW = (OURS, OURS_LISTS, PEER, *FLOORS)

README = Plan(
    QUICK,
    ("ext4", "tmpfs"),
    5,
    ("puts", "open", "reading", "building", "stalls"),
    ("W1", "W2"),
    (1, 256),
    (2,),
    ("W1", "W2"),
    _FEW,
)
EVERYTHING = Plan(FULL, PLACES, 3, tuple(PARTS), tuple(WORKLOADS), (1, 8, 64, 256), (1, 2, 4))
TRIED = Plan(SMOKE, ("tmpfs",), 1, tuple(PARTS), tuple(WORKLOADS), (1, 256), (2,), ("W1",), (OURS, PEER, *FLOORS))


def measured(plan: Plan) -> Report:
    """Measure all of the plan that can be had here; progress goes to stderr."""
    begun = time.perf_counter()
    not_measured = missing()
    file_systems: dict[str, str] = {}
    for name in plan.places:
        try:
            with place(name) as directory:
                file_systems[name] = describe(directory) + (", loop-mounted" if name == "ext4" else "")
        except UnavailableError as error:
            not_measured[name] = str(error)
    plan = msgspec.structs.replace(plan, places=tuple(file_systems))
    packages = dict.fromkeys(package for candidate in CANDIDATES.values() for package in candidate.packages)
    report = Report(look(packages, file_systems), plan, 0.0, [], [], not_measured)
    for part in plan.parts if plan.places else ():
        before = ""
        try:
            for found in PARTS[part](plan):
                (report.figures if isinstance(found, Figure) else report.growth).append(found)  # type: ignore[arg-type]
                done = f"{part}: {found.workload} {found.place}".rstrip()
                if done != before:
                    print(f"{time.perf_counter() - begun:6.0f} s  {done}", file=sys.stderr, flush=True)
                before = done
        except UnavailableError as error:
            not_measured[part] = str(error)
        except Exception as error:  # what other parts found in hours is not thrown away
            report.failed.append(part)
            not_measured[part] = f"failed: {type(error).__name__}: {error}"
            traceback.print_exc()
    report.seconds = time.perf_counter() - begun
    return report


def shown(report: Report) -> list[str]:
    """What the README shows of a report, as lines of Markdown."""
    plan = report.plan
    lines = [
        *(f"- {line}" for line in report.machine.lines()),
        f"- scale {plan.scale.name}; {plan.rounds} rounds, candidates in turn; {report.seconds:,.0f} s in all",
        "- values are medians of the rounds, ratios medians of the ratios of each round",
        *(f"- {name}: not measured: {why}" for name, why in report.not_measured.items()),
        "",
        *targets.table(report.figures),
        "",
    ]
    if any(figure.measure == puts.DURABLE for figure in report.figures):
        lines += [*tables.summary(report.figures), ""]
    return lines


def written(report: Report, directory: Path) -> list[Path]:
    """Write the report there; the paths, the Markdown first."""
    directory.mkdir(parents=True, exist_ok=True)
    markdown, raw = directory / "report.md", directory / "figures.json"
    lines = ["# Benchmark", "", *shown(report)]
    if report.figures:
        lines += ["## Every measure", "", "In brackets: how many times better tokcap is.", ""]
        lines += tables.measures(report.figures)
    if report.growth:
        lines += ["## Growth", "", "Exponents over the bytes handed in; above 1.1 is a bug, and marked.", ""]
        lines += tables.growth(report.growth)
    markdown.write_text("\n".join(lines).rstrip() + "\n")
    raw.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    try:
        pictures = plots.draw(directory, report.figures, report.growth)
    except UnavailableError as error:
        pictures = []
        print(f"no pictures: {error}", file=sys.stderr)
    return [markdown, raw, *pictures]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print what the README shows, write the rest; 1 if a part ended in an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--all", action="store_true", help="everything, at full size")
    size.add_argument("--smoke", action="store_true", help="a little of everything, to see that it runs")
    parser.add_argument("--only", metavar="MEASURE", help=f"some of {', '.join(PARTS)}, with commas")
    parser.add_argument("--places", help=f"some of {', '.join(PLACES)}, with commas")
    parser.add_argument("--rounds", type=int, help="turns of each candidate")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="where to write (%(default)s)")
    options = parser.parse_args(words)
    plan = EVERYTHING if options.all else TRIED if options.smoke else README
    if options.only:
        plan = msgspec.structs.replace(plan, parts=_some(parser, options.only, PARTS))
    if options.places:
        plan = msgspec.structs.replace(plan, places=_some(parser, options.places, PLACES))
    if options.rounds is not None:
        if options.rounds < 1:
            parser.error("--rounds is a number from 1")
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    logger = logging.getLogger("tokcap")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says of every store on tmpfs that it is one
    try:
        report = measured(plan)
    finally:
        logger.setLevel(level)
    paths = written(report, options.out)
    print("\n".join(shown(report)))
    print(f"All of it: {paths[0]}, {paths[1].name} and {len(paths) - 2} pictures beside it")
    return 1 if report.failed else 0


def _some(parser: argparse.ArgumentParser, given: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(given.split(","))
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    return names


def _stop(number: int, _: object) -> None:
    """Ended from outside, it still unmounts what it mounted."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    raise SystemExit(main())
