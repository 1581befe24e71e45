"""Mixed load for as long as one likes: writers, consumers and a sweeper, each a process, with nothing that grows.

Writers put, begin, settle, abort, conflict, reset and finish; one consumer builds what it gets from `consume`, another
freezes and compares every entry. Each finished rollout is consumed once and is what was put. Meanwhile everybody's
memory, descriptors, threads and mappings are sampled, and the names in the directory: in the second half of the time
none of them may grow by more than its bound, by a straight line through the samples.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.children import Child, Nursery
from tokcap import FileStore

from .part import Outcome
from .soak_plan import LATE
from .soak_processes import consume_built, consume_by_hand, sweep_often, write_many
from .soak_watch import MIB, Vitals, names_below, slope, vitals

__all__ = ("MOST_GROWTH", "mixed_load")

MOST_GROWTH: dict[str, float] = {"memory": 16 * MIB, "descriptors": 64, "threads": 16, "maps": 128}
"""By how much the straight line through the second half may rise from its beginning to its end."""
MOST_TRACED = 4 * MIB
"""How much more memory live Python objects may take at the end than in the middle of the time that it is traced."""
MOST_NAMES = 1000
"""How many more names the directory may hold at the end of the second half, and half as many as there are on average:
how many tombstones wait for the sweep depends on how busy the machine is."""
TRACED = 0.1
"""Of the whole time, at its end: what Python objects grow is looked at, which costs memory of its own."""
PATIENCE_S = 300.0


@dataclass
class _Process:
    """One child, and what was seen of it."""

    name: str
    child: Child
    seen: list[Vitals] = field(default_factory=list)
    ended: bool = False


class _Load:
    def __init__(self, directory: Path, seed: int, minutes: float, *, writers: int, open_rollouts: int) -> None:
        self.directory, self.seed, self.seconds = directory, seed, minutes * 60
        self.writers, self.open_rollouts = writers, open_rollouts
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.outstanding: dict[str, _Process] = {}
        """Rollouts that were begun and are not consumed yet, and who writes them."""
        self.names: list[tuple[float, int, int, int]] = []
        """When; names, those of things under construction, liveness files."""
        self.traced: dict[str, tuple[int, list[str]]] = {}
        self.processes: list[_Process] = []

    # ---- children

    def start(self, nursery: Nursery, store: str, tombstone_age_s: float) -> None:
        path = str(self.directory)

        def add(name: str, function: Any, *arguments: object) -> None:
            child = nursery.start(function, path, store, self.seed, *arguments)
            self.processes.append(_Process(name, child))

        for number in range(self.writers):
            add(f"writer {number}", write_many, number, self.open_rollouts)
        add("consumer that builds", consume_built)
        add("consumer that compares", consume_by_hand)
        add("sweeper", sweep_often, tombstone_age_s)

    def tell(self, message: str, *names: str) -> None:
        for process in self.processes:
            if not process.ended and (not names or process.name.startswith(names)):
                process.child.send((message, None))

    def listen(self, within_s: float) -> None:
        """Take what the children say for so long."""
        until = time.monotonic() + within_s
        while (left := until - time.monotonic()) > 0:
            open_processes = {process.child.channel: process for process in self.processes if not process.ended}
            if not open_processes:
                return
            for channel in wait([*open_processes], left):
                process = open_processes[channel]  # type: ignore[index]
                try:
                    kind, content = process.child.receive()
                except (EOFError, ConnectionResetError):
                    self.problems.append(f"{process.name} ended without a word")
                    process.ended = True
                except AssertionError as error:
                    self.problems.append(f"{process.name}: {error}")
                    process.ended = True
                else:
                    self._hear(process, kind, content)

    def _hear(self, process: _Process, kind: str, content: Any) -> None:
        match kind:
            case "begun":
                self.outstanding[content] = process
            case "finished":
                for consumer in self.processes:
                    if consumer.name == "consumer that compares":
                        consumer.child.send(("finished", content))
            case "consumed":
                writer = self.outstanding.pop(content, None)
                self.counts["rollouts consumed"] += 1
                if writer is None:
                    self.problems.append(f"{content} was consumed twice, or never begun")
                elif not writer.ended:
                    writer.child.send(("consumed", content))
            case "count":
                self.counts.update(content)
            case "problem":
                self.problems.append(f"{process.name}: {content}")
            case "traced":
                self.traced[process.name] = content
            case "ended":
                process.ended = True

    # ---- looking

    def sample(self) -> None:
        for process in self.processes:
            if not process.ended:
                try:
                    process.seen.append(vitals(process.child.pid))
                except (OSError, ProcessLookupError) as error:
                    self.problems.append(f"{process.name} is gone: {error}")
        names = [Path(name).name for name in names_below(self.directory / "rollouts")]
        building = sum(name.startswith("tmp-") or name.endswith(".trash") for name in names)
        self.names.append((time.monotonic(), len(names), building, len(list((self.directory / "writers").iterdir()))))

    def run(self, least: int) -> None:
        """For the time that was asked for, and until so many rollouts were consumed."""
        begun = time.monotonic()
        measured = self.seconds * (1 - TRACED)
        every_s = min(2.0, max(0.1, self.seconds / 600))
        while time.monotonic() - begun < measured or self.counts["rollouts consumed"] < least:
            self.sample()
            if all(process.ended for process in self.processes) or time.monotonic() - begun > measured + PATIENCE_S:
                break
            self.listen(every_s)
        self.tell("trace")
        self.listen(self.seconds * TRACED / 2)
        self.tell("mark")
        self.listen(self.seconds * TRACED / 2)
        self.tell("compare")
        self.tell("stop", "writer")
        self._until(lambda: not self.outstanding, "rollouts that were never consumed")
        self.tell("stop")
        self._until(lambda: all(process.ended for process in self.processes), "processes that don't end")

    def _until(self, condition: Any, what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > until:
                left = [*self.outstanding][:3] or [process.name for process in self.processes if not process.ended]
                self.problems.append(f"{what} after {PATIENCE_S:g} s: {left}")
                return
            self.listen(0.2)

    # ---- judging

    def judge(self, outcome: Outcome) -> None:
        for process in self.processes:
            self._judge_process(outcome, process)
        half = self.names[len(self.names) // 2 :]
        for place, what in enumerate(("names in the directory", "of them being built or deleted", "liveness files"), 1):
            grown = slope([one[0] for one in half], [one[place] for one in half]) * (half[-1][0] - half[0][0])
            outcome.figure(
                f"mixed load: {what}, most; grown in the second half",
                f"{max(one[place] for one in self.names):,}; {grown:+.0f}",
            )
            if grown > MOST_NAMES + sum(one[place] for one in half) / len(half) / 2:
                self.problems.append(f"{what}: {grown:+.0f} in the second half of the time")
        for name, (grown_bytes, lines) in self.traced.items():
            if grown_bytes > MOST_TRACED:
                self.problems.append(f"{name}: Python objects grew by {grown_bytes / MIB:.1f} MiB: {'; '.join(lines)}")
        if self.traced:
            most = max(self.traced.values(), key=lambda traced: traced[0])
            outcome.figure(
                "mixed load: most that traced Python objects grew, KiB; where", f"{most[0] >> 10}; {most[1][0]}"
            )

    def _judge_process(self, outcome: Outcome, process: _Process) -> None:
        half = process.seen[len(process.seen) // 2 :]
        if len(half) < 2:
            self.problems.append(f"{process.name}: it was not seen for long enough")
            return
        times = [one.at for one in half]
        rises: list[str] = []
        for what, most in MOST_GROWTH.items():
            values = [float(getattr(one, what)) for one in half]
            rise = slope(times, values) * (times[-1] - times[0])
            unit = MIB if what == "memory" else 1
            rises.append(f"{max(values) / unit:.0f} ({rise / unit:+.1f})")
            if rise > most:
                self.problems.append(
                    f"{process.name}: {what} rose by {rise:.0f} in {times[-1] - times[0]:.0f} s, more than {most:.0f}"
                )
        outcome.figure(
            f"mixed load, {process.name}: MiB, descriptors, threads, mappings (grown in the second half)",
            ", ".join(rises),
        )


def mixed_load(
    outcome: Outcome,
    directory: Path,
    nursery: Nursery,
    minutes: float,
    seed: int,
    *,
    writers: int = 2,
    open_rollouts: int = 32,
    tombstone_age_s: float = 10.0,
    least: int = 0,
    store: str = "tokcap.FileStore",
) -> None:
    """For so many minutes, and for at least so many rollouts.

    `store` names the class that the children use: a broken one must be found out.
    """
    place = directory / "load"
    FileStore(place, sweep_every_s=0).close_now()
    load = _Load(place, seed, minutes, writers=writers, open_rollouts=open_rollouts)
    load.start(nursery, store, tombstone_age_s)
    started = time.monotonic()
    load.run(least)
    seconds = time.monotonic() - started
    for process in load.processes:
        nursery.forget(process.child)
    load.judge(outcome)
    _judge_directory(place, load)
    outcome.figure("mixed load: minutes; processes", f"{seconds / 60:.1f}; {len(load.processes)}")
    for what in ("rollouts consumed", "calls written", "entries compared", "ids trained", "tombstones swept"):
        outcome.figure(f"mixed load: {what}", load.counts[what])
    outcome.problems += load.problems
    if not load.counts["rollouts consumed"]:
        outcome.problems.append("the mixed load consumed nothing: the run shows nothing")


def _judge_directory(place: Path, load: _Load) -> None:
    """Everything that was begun is gone, and nothing stays that nobody needs."""
    with FileStore(place, sweep_every_s=0) as store:
        store.sweep_now(0)
        for name, state in store.rollouts():
            stat = store.stat_now(name)
            if [call.model_call_id for call in stat.calls] == [LATE]:
                load.counts["late marks after the sweep"] += 1  # the writer was slower than the sweep
                store.reset_now(name)
            else:
                load.problems.append(f"{name} is left behind, {state}: {[call.outcome for call in stat.calls]}")
        store.sweep_now(0)
    left = [name for name in names_below(place / "rollouts") if len(Path(name).name) != 2]
    if left or any((place / "writers").iterdir()):
        load.problems.append(f"{len(left)} names are left behind: {left[:3]}; or liveness files")
