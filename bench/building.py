"""From a frozen rollout to what a trainer eats: time, CPU and memory of the build.

    python -m bench.building [--places tmpfs] [--rounds 3] [--scale quick]

All end with the same: token ids, loss mask and log-probs as arrays. tokcap: `build(snapshot)` and the arrays of every
trajectory. NeMo Gym: its builder on the entries that its store has read; then, as its consumer does before a trainer
sees anything, the checks and the projection of the main chain to one response; then what a trainer does with that: the
new ids of each item behind the others. Its builder alone is a candidate of its own: chains of links, nothing joined. No
disk takes part in any of it, but in `open, build`, which begins with the files of the frozen rollout.

Of a conversation that neither forks nor drifts, both must give the same arrays, with every sampled id trained. Of the
others (W4, drifts) NeMo Gym joins the main chain only, tokcap everything.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .builders import Builder, Tokcap, builders, check_built
from .figures import Figure
from .growth import FACTORS, Growth, grown
from .peer import PEER
from .places import UnavailableError, place
from .stock import own_garbage, print_figures
from .workload import FULL, VOCABULARY, Call, Scale, Workload, calls, named

__all__ = ("MEASURES", "Shape", "drifting", "main", "measure", "of_turns", "size_of")

MEASURES = {
    "build": "from what was opened or read to all arrays; one rollout",
    "build, CPU": "the same in CPU time of the process",
    "build, peak memory": "most that the build held at once, its result included, what it was given not (tracemalloc)",
    "open, build": "from the files of a frozen rollout to all arrays",
    "open, build, peak memory": "most that this held at once: what was read, too (tracemalloc; not the mapped files)",
}
"""What is measured, and how."""

ROLLOUTS = {"W1": 8, "W2": 2, "W4": 25}
"""How many rollouts of each workload are built in a round; each is one recording in W4."""

DRIFTS = "drifts"
"""What growth with the number of drifts is called."""


class Shape(msgspec.Struct, frozen=True):
    """One conversation of `turns` calls that together have `ids` ids, two fifths of them sampled."""

    turns: int
    ids: int
    drift_every: int = 0
    """Every so many turns the answer comes back changed in its middle; 0: never."""

    def times(self, factor: float) -> Shape:
        """The same conversation, longer or shorter; at least two turns."""
        turns = max(2, round(self.turns * factor))
        return Shape(turns, max(10 * turns, round(self.ids * factor)), self.drift_every)

    def __str__(self) -> str:
        drift = f", one turn in {self.drift_every} drifts" if self.drift_every else ""
        return f"{self.turns:,} calls, {self.ids:,} ids{drift}"


SHAPES = (Shape(200, 50_000, 3),)
"""What W1, W2 and W4 have not: prompts that drift again and again."""
LONG_SHAPES = (Shape(1250, 100_000), Shape(1250, 100_000, 3))
"""Very many turns; only at full size, and only tokcap: NeMo Gym takes 3 GB for one of them."""


def drifting(shape: Shape, rollout_id: str = "") -> list[Call]:
    """The calls of such a conversation. One that follows a drift has a parent no more: it is another root."""
    random = np.random.default_rng(shape.turns)
    per_turn = shape.ids // shape.turns
    sampled = per_turn * 2 // 5
    rollout_id = rollout_id or f"rollout-{shape.turns}-{shape.drift_every}"
    context = random.integers(3, VOCABULARY, per_turn - sampled, dtype=np.int32)
    found: list[Call] = []
    parent, shared = "", 0
    for turn in range(shape.turns):
        answer = random.integers(3, VOCABULARY, sampled, dtype=np.int32)
        log_probs = -random.exponential(1.0, sampled).astype(np.float32).astype(np.float64)
        found.append(Call(rollout_id, f"call-{turn:05d}", context, answer, log_probs, parent, shared))
        parent, shared = found[-1].model_call_id, len(context) + sampled
        if shape.drift_every and turn % shape.drift_every == 0:
            answer = answer.copy()
            answer[sampled // 2] = 1
            parent, shared = "", len(context) + sampled // 2
        context = np.concatenate([context, answer, random.integers(3, VOCABULARY, per_turn - sampled, dtype=np.int32)])
    return found


def measure(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Figure]:
    """Every figure of this module. Only the first place is used: the build reads no disk."""
    for where in places[:1]:
        try:
            with place(where) as directory:
                yield from _measure(directory, rounds, scale)
        except UnavailableError as error:
            print(f"{where}: not measured: {error}", file=sys.stderr)


def of_turns(places: Sequence[str], rounds: int, scale: Scale) -> Iterator[Growth]:
    """How it grows with the turns of a rollout, over `size_of`: W1 from 20 turns, W2 from 16k ids, and with drifts.

    In the first place only.
    """
    for name, last in (("W1", FACTORS[-1]), ("W2", 1), (DRIFTS, 1)):
        longest = msgspec.structs.replace(scale, turns=scale.turns * last)
        try:
            yield from grown(functools.partial(_alone, places[0], name, rounds), size_of, longest)
        except UnavailableError as error:
            print(f"{places[0]}: not measured: {error}", file=sys.stderr)


def _alone(where: str, name: str, rounds: int, scale: Scale) -> list[Figure]:
    with place(where) as directory:
        found = builders(directory)
        if name != DRIFTS:
            return list(_building(found, name, calls(_first(name, scale, 1)), rounds))
        shape = SHAPES[0].times(scale.turns)
        return list(_building(found, str(shape), [drifting(shape)], rounds))


def size_of(figure: Figure, scale: Scale) -> float:
    """Bytes of the arrays of all trajectories of one rollout: what a build hands out. NaN for recorded rollouts.

    What is handed in is more, because every prompt repeats those before it: over that, exponents would be half as high.
    """
    for name in ("W1", "W2"):
        if figure.workload == name:
            return _handed_out(calls(_first(name, scale, 1))[0])
    for shape in (*SHAPES, *LONG_SHAPES):
        if figure.workload == str(shape.times(scale.turns)):
            return _handed_out(drifting(shape.times(scale.turns)))
    return math.nan


def _handed_out(conversation: Sequence[Call]) -> float:
    """Of each call that no other one continues: int32 ids, a mask, float64 log-probs."""
    continued = {call.parent for call in conversation}
    ids = sum(len(c.prompt) + len(c.generated) for c in conversation if c.model_call_id not in continued)
    return ids * (4 + 1 + 8)


def _first(name: str, scale: Scale, number: int) -> Workload:
    return msgspec.structs.replace(named(name, scale), rollouts=number)


def _measure(directory: Path, rounds: int, scale: Scale) -> Iterator[Figure]:
    for name in ROLLOUTS:
        number = min(ROLLOUTS[name], max(1, round(ROLLOUTS[name] * scale.rollouts)))
        wanted = _first(name, scale, number)
        conversations = calls(wanted)
        yield from _building(builders(directory / name), name, conversations, rounds)
        if name == "W1":
            # Their builder then has to find parents by their ids.
            longer = msgspec.structs.replace(wanted, turns=max(3, wanted.turns))
            emptied = [_emptied(conversation) for conversation in calls(longer)]
            yield from _building(builders(directory / "empty"), f"{name}, one empty answer", emptied, rounds)
    for shape in SHAPES:
        scaled = shape.times(scale.turns)
        yield from _building(builders(directory / str(shape.turns)), str(scaled), [drifting(scaled)], rounds)
    if scale.name == FULL.name:
        for shape in LONG_SHAPES:
            scaled = shape.times(scale.turns)
            print(f"{scaled}: {PEER} not measured: it would take gigabytes of memory", file=sys.stderr)
            own = directory / f"{shape.turns}-{shape.drift_every}"
            yield from _building([Tokcap(own)], str(scaled), [drifting(scaled)], rounds)


def _emptied(conversation: Sequence[Call]) -> list[Call]:
    """The same, but the model said nothing in the second call, and the next prompt holds something in its place."""
    found = list(conversation)
    found[1] = msgspec.structs.replace(found[1], generated=found[1].generated[:0], log_probs=found[1].log_probs[:0])
    return found


def _building(
    found: Sequence[Builder], workload: str, conversations: Sequence[Sequence[Call]], rounds: int
) -> Iterator[Figure]:
    for candidate in found:
        candidate.stock(conversations)
    series: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(rounds):
        for candidate in found:
            with own_garbage():
                measured = [_one(candidate, conversation) for conversation in conversations]
            for at, measure in enumerate(("build", "build, CPU", "open, build")):
                value = statistics.mean(times[at] for times in measured) * 1e3
                series.setdefault((measure, "ms", candidate.name), []).append(value)
    largest = max(conversations, key=lambda conversation: sum(len(call.prompt) for call in conversation))
    for candidate in found:
        # Memory has no noise that several rounds would even out, and tracing it takes long.
        for measure, opened in (("build, peak memory", True), ("open, build, peak memory", False)):
            peak = _peak(candidate, largest[0].rollout_id, opened=opened)
            series[measure, "MB", candidate.name] = [peak / 1e6] * rounds
        candidate.close()
    for (measure, unit, name), values in series.items():
        yield Figure(measure, unit, "less", "", workload, name, tuple(values))


def _one(candidate: Builder, conversation: Sequence[Call]) -> tuple[float, float, float]:
    """Seconds of the build, its CPU, and of opening and building together."""
    begun = time.perf_counter()
    opened = candidate.open(conversation[0].rollout_id)
    at_open, cpu = time.perf_counter(), time.process_time()
    built = candidate.build(opened)
    cpu, done = time.process_time() - cpu, time.perf_counter()
    check_built(candidate, conversation, built)
    return done - at_open, cpu, done - begun


def _peak(candidate: Builder, rollout_id: str, *, opened: bool) -> int:
    """Most bytes held at once by the build, or by opening and building, above what was there before."""

    def work() -> Callable[[], Any]:
        if not opened:
            return lambda: candidate.build(candidate.open(rollout_id))
        given = candidate.open(rollout_id)
        return lambda: candidate.build(given)

    todo = work()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = todo()
        _, peak = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    return peak - before


def main() -> int:
    """Print every figure as it comes."""
    return print_figures(__doc__, measure)


if __name__ == "__main__":
    raise SystemExit(main())
