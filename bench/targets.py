"""What tokcap wants to reach, as ratios of figures of one run, and whether it does."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from .figures import OURS, Figure
from .peer import PEER
from .puts import BYTES, DURABLE, P50, PAIR_P50, PAIRS, STEADY, open_label
from .stores import OWN_FILES, WRITE_AND_SYNC

__all__ = ("TARGETS", "Target", "table")

Kind = Literal["times", "part", "cost", "most"]


class Target(msgspec.Struct, frozen=True):
    """One line: a figure of tokcap beside another one.

    kind: `times`: so many times better, at least; `part`: the same, shown as a fraction; `cost`: so many times as much,
    at most; `most`: the value itself, at most.
    """

    text: str
    kind: Kind
    needed: float
    aim: float
    measure: str
    workload: str
    place: str = ""
    """Empty: whichever comes first, for what depends on no disk."""
    candidate: str = OURS
    against: str = ""
    against_measure: str = ""
    """If it is another one."""

    def found(self, figures: Iterable[Figure]) -> float | None:
        """The figure of this run; None if a part of it was not measured."""
        figures = list(figures)
        ours = self._first(figures, self.candidate, self.measure)
        if ours is None or self.kind == "most":
            return None if ours is None else ours.value
        theirs = self._first(figures, self.against, self.against_measure or self.measure, ours.place)
        if theirs is None:
            return None
        pairs = list(zip(ours.rounds, theirs.rounds, strict=True))
        # A cost compares what a call takes, so that rates count the other way round.
        more = (ours.better == "more") != (self.kind == "cost")
        return statistics.median(a / b if more else b / a for a, b in pairs)

    def met(self, found: float) -> str:
        """`aim`, `yes` or `no`."""
        reached = found.__le__ if self.kind in ("cost", "most") else found.__ge__
        return "aim" if reached(self.aim) else "yes" if reached(self.needed) else "no"

    def shown(self, value: float) -> str:
        """The value as the table has it."""
        if self.kind == "most":
            return f"{value:.2g} ms"
        if self.kind == "part":
            return f"1/{value:.3g}"
        return f"{value:.3g}x"

    def _first(self, figures: Sequence[Figure], candidate: str, measure: str, place: str = "") -> Figure | None:
        place = place or self.place
        for figure in figures:
            wanted = (figure.measure, figure.workload, figure.candidate) == (measure, self.workload, candidate)
            if wanted and figure.processes == 1 and (not place or figure.place == place):
                return figure
        return None


def table(figures: Iterable[Figure]) -> list[str]:
    """Every target in a Markdown table."""
    figures = list(figures)
    lines = ["| measure | needed | aim | found | met? |", "|---|---|---|---|---|"]
    for target in TARGETS:
        found = target.found(figures)
        cells = ("not measured", "") if found is None else (target.shown(found), target.met(found))
        row = (target.text, target.shown(target.needed), target.shown(target.aim), *cells)
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _against_peer(
    text: str, measure: str, workload: str, levels: dict[str, tuple[float, float]], kind: Kind = "times"
) -> list[Target]:
    return [
        Target(
            f"{text}, against {PEER}{f', {place}' if place else ''}",
            kind,
            needed,
            aim,
            measure,
            workload,
            place,
            against=PEER,
        )
        for place, (needed, aim) in levels.items()
    ]


READ = "freeze, open, read"
ONE_OPEN = open_label(1)

TARGETS: tuple[Target, ...] = (
    *_against_peer(
        "durable puts/s, W1 from 64 rollouts", DURABLE, "W1", {"ext4": (3, 6), "disk": (4, 8), "tmpfs": (12, 25)}
    ),
    Target(
        "put latency p50, one open rollout, against bare write + fdatasync, ext4",
        "cost",
        1.4,
        1.15,
        P50,
        ONE_OPEN,
        "ext4",
        against=WRITE_AND_SYNC,
    ),
    Target(
        "begin_call + put together against put, p50, one open rollout, ext4",
        "cost",
        2,
        1.2,
        PAIR_P50,
        ONE_OPEN,
        "ext4",
        against=OURS,
        against_measure=P50,
    ),
    Target(
        "begin_call + put together against put, W1 from 64 rollouts, first excluded, ext4",
        "cost",
        2,
        1.2,
        PAIRS,
        "W1",
        "ext4",
        against=OURS,
        against_measure=STEADY,
    ),
    Target(
        "durable puts/s, 256 open rollouts, first excluded, against own files and 16 threads, ext4",
        "times",
        0.5,
        0.8,
        STEADY,
        open_label(256),
        "ext4",
        against=OWN_FILES,
    ),
    *_against_peer("bytes on disk, W1", BYTES, "W1", {"": (9, 12)}, "part"),
    *_against_peer("bytes on disk, W2", BYTES, "W2", {"": (30, 45)}, "part"),
    *_against_peer(
        "freeze, open, read all arrays, W1, one by one", READ, "W1", {"ext4": (3, 4), "disk": (4, 6), "tmpfs": (10, 20)}
    ),
    *_against_peer("freeze, open, read all arrays, W2, one by one", READ, "W2", {"ext4": (30, 60)}),
    *_against_peer("freeze_many of 64, per rollout", "freeze_many of 64", "W1", {"ext4": (8, 20)}),
    *_against_peer("build, W1", "build", "W1", {"": (20, 100)}),
    *_against_peer("build, W2", "build", "W2", {"": (100, 300)}),
    *_against_peer("peak memory of the build, W2", "build, peak memory", "W2", {"": (20, 50)}, "part"),
    *(
        Target(
            f"longest stall of the event loop by a put at 128k context, above an idle loop, {kind} as input",
            "most",
            needed,
            aim,
            "longest stall",
            f"128k, {kind}",
        )
        for kind, needed, aim in (("arrays", 2, 1), ("lists", 5, 2))
    ),
)
