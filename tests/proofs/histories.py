"""What many processes saw of put, begin, settle, mark, freeze, retire and reset is explained by some order of them.

Rounds: clients in four processes, some on event loops and some in threads, work at the same time on the same few
rollouts; some are killed or paused meanwhile. The history of each rollout is then checked against the state table of
the contract (`tests/state_model.py`). A look at an open rollout is no single moment of it: such looks are checked to
show everything that was acknowledged before, nothing that was not yet asked for, and never less than an earlier look.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.children import Child, Nursery, fast_directory
from tests.state_model import UNKNOWN, Operation, Raised, Seen, State, exactly_equal, step
from tokcap.entry import content_digest

from .histories_client import Plan, client, content
from .linearizability import Event, UndecidedError, Verdict, linearizable
from .part import Outcome, Part

__all__ = ("PART", "Clients", "Said", "problems_of")

PROCESSES, LANES, LENGTH = 4, 3, 6


@dataclass(frozen=True)
class Said:
    """An operation, who did it, and what came of it."""

    who: str
    operation: Operation
    result: object = UNKNOWN


History = list[Event[Said]]


def follows(state: State, said: Said) -> Iterable[State]:
    """The state table as the checker wants it."""
    after = step(state, said.who, said.operation, said.result)
    return () if after is None else (after,)


@dataclass
class _Client:
    child: Child
    name: str
    under_way: dict[int, tuple[Operation, int]] = field(default_factory=dict)


class Clients:
    """Four processes, and what they said."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int, *, synced: bool = False, mutant: str = "") -> None:
        self._nursery, self._directory, self._synced, self._mutant = nursery, directory, synced, mutant
        self.seed = seed
        self.kills = self.pauses = self.rounds = 0
        self._chance = random.Random(seed)
        self._lives = iter(range(1 << 60))
        self._clients = [self._start(number) for number in range(PROCESSES)]

    def _start(self, number: int) -> _Client:
        child = self._nursery.start(client, str(self._directory), number % 2 == 0, self._synced, self._mutant)
        assert child.receive() == "ready"
        return _Client(child, f"client {number}, life {next(self._lives)}")

    def round(self, *, resets: bool) -> dict[str, History]:
        """Let all of them work on fresh rollouts; the history of each."""
        chance, number = self._chance, self.rounds
        self.rounds += 1
        rollouts = tuple(f"h-{number}-{letter}" for letter in ("a", "b"))
        history: dict[str, History] = {rollout_id: [] for rollout_id in rollouts}
        for place, one in enumerate(self._clients):
            one.child.send(Plan(self.seed * 1_000_003 + number * 10 + place, rollouts, LANES, LENGTH, resets))
        victim = chance.choice(range(2 * PROCESSES)) if chance.random() < 0.5 else PROCESSES
        if victim < PROCESSES:
            time.sleep(chance.random() * 0.02)
            self._disturb(victim, chance, history)
        for one in self._clients:
            self._hear(one, history)
        return history

    def _disturb(self, victim: int, chance: random.Random, history: dict[str, History]) -> None:
        """Kill a client, or pause it for as long as others need to freeze and retire."""
        one = self._clients[victim]
        if chance.random() < 0.5:
            self.pauses += 1
            one.child.signal(signal.SIGSTOP)
            time.sleep(0.03)
            one.child.signal(signal.SIGCONT)
            return
        self.kills += 1
        one.child.kill()
        for message in one.child.rest():
            self._note(one, message, history)
        for operation, invoked in one.under_way.values():
            history[operation.rollout_id].append(Event(Said(one.name, operation), invoked))
        self._nursery.forget(one.child)
        self._clients[victim] = self._start(victim)
        self._clients[victim].child.send(Plan(0, (), 0, 0, False))  # it has nothing to do in this round any more

    def _hear(self, one: _Client, history: dict[str, History]) -> None:
        while (message := one.child.receive()) != ("round done",):
            self._note(one, message, history)

    @staticmethod
    def _note(one: _Client, message: tuple[object, ...], history: dict[str, History]) -> None:
        match message:
            case ("start", int(tag), Operation() as operation, int(invoked)):
                one.under_way[tag] = operation, invoked
            case ("end", int(tag), result, int(returned)):
                operation, invoked = one.under_way.pop(tag)
                event = Event(Said(one.name, operation, result), invoked, returned)
                history[operation.rollout_id].append(event)

    def close(self) -> None:
        for one in self._clients:
            self._nursery.forget(one.child)


# ---- what is demanded


def problems_of(rollout_id: str, history: History, *, resets: bool) -> list[str]:
    """What no order explains."""
    found = [problem for event in history if (problem := _strange(event.what))]
    atomic = [event for event in history if not _is_open_look(event.what)]
    try:
        verdict = linearizable(atomic, State(), follows)
    except UndecidedError as error:
        return [*found, f"{rollout_id}: {error}\n{_story(atomic)}"]
    if not verdict.ok:
        found.append(f"{rollout_id}: no order explains\n{_story(atomic, verdict)}")
    if not resets:
        found += [f"{rollout_id}: {problem}" for problem in _looks(history)]
    return found


def _strange(said: Said) -> str:
    """Contents that nobody put, and errors that no state explains."""
    if isinstance(said.result, Seen):
        for entry in said.result.entries:
            variant = entry.extra.get("variant", 0)
            put = content(entry.rollout_id, entry.model_call_id, entry.choice_index, variant)
            if not exactly_equal(entry, put):
                return f"{said.operation} shows {entry}, put was {put}"
    if isinstance(said.result, Raised) and said.result.error not in (
        *("ConflictError", "FrozenError", "RetiredError", "StaleAttemptError"),
        UNKNOWN.error,
    ):
        return f"{said.operation} raised {said.result.error}: {said.result.message}"
    return ""


def _is_open_look(said: Said) -> bool:
    return said.operation.name == "read" and isinstance(said.result, Seen) and said.result.version == 0


def _looks(history: History) -> Iterable[str]:
    """Of a rollout that was never reset."""
    puts: list[tuple[set[tuple[str, int, bytes]], Event[Said]]] = [
        ({(e.model_call_id, e.choice_index, content_digest(e)) for e in event.what.operation.entries}, event)
        for event in history
        if event.what.operation.name == "put"
    ]
    looks = [event for event in history if _is_open_look(event.what)]
    shown: dict[int, set[tuple[str, int]]] = {}
    for number, look in enumerate(looks):
        assert isinstance(look.what.result, Seen)
        entries = {(e.model_call_id, e.choice_index, content_digest(e)) for e in look.what.result.entries}
        shown[number] = {(call, choice) for call, choice, _ in entries}
        asked = set[tuple[str, int, bytes]]().union(*(put for put, event in puts if event.invoked < look.returned))
        if not entries <= asked:
            yield f"a look shows {entries - asked} before anybody put it"
        for put, event in puts:
            acknowledged = event.what.result is None and event.returned < look.invoked
            if acknowledged and not {(call, choice) for call, choice, _ in put} <= shown[number]:
                yield f"a look lacks what {event.what.operation} had stored"
    for number, look in enumerate(looks):
        for other, later in enumerate(looks):
            if look.returned < later.invoked and not shown[number] <= shown[other]:
                yield f"a later look lacks {shown[number] - shown[other]}"


def _name(operation: Operation) -> str:
    return "mark" if operation.name == "settle" and operation.word == "lost" else operation.name


def _story(history: Sequence[Event[Said]], verdict: Verdict[Said] | None = None) -> str:
    """For whoever has to find out: by time, with the place in the longest order that was found."""
    start = min((event.invoked for event in history), default=0)
    places = {id(event): place for place, event in enumerate(verdict.order if verdict else ())}
    lines = []
    for event in sorted(history, key=lambda event: event.invoked):
        said = event.what
        result = said.result
        if isinstance(result, Seen):
            calls = " ".join(f"{name}={shown[0]}" for name, shown in sorted(result.calls.items()))
            result = f"version {result.version} of {result.snapshot_id[:6]}: {calls}"
        elif isinstance(result, Raised):
            result = result.error
        until = "..." if event.returned == math.inf else f"{(event.returned - start) / 1e6:.3f}"
        place = places.get(id(event), "-")
        lines.append(
            f"{place:>4} {(event.invoked - start) / 1e6:9.3f} {until:>9} {said.who}: {said.operation} -> {result}"
        )
    return "\n".join(lines)


# ---- the part


@dataclass
class Tally:
    """What was checked."""

    operations: Counter[str] = field(default_factory=Counter)
    histories: int = 0
    longest: int = 0
    most_at_once: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list)

    def take(self, rollout_id: str, history: History, *, resets: bool) -> None:
        self.histories += 1
        self.longest = max(self.longest, len(history))
        self.operations.update(_name(event.what.operation) for event in history)
        self.unknown += sum(event.returned == math.inf for event in history)
        at_once = (sum(o.invoked <= e.invoked < o.returned for o in history if o.returned != math.inf) for e in history)
        self.most_at_once = max(self.most_at_once, *at_once, 0)
        self.problems += problems_of(rollout_id, history, resets=resets)


def run_rounds(clients: Clients, tally: Tally, count: int) -> None:
    """Rounds with and without resets; stops at the first problem."""
    for number in range(count):
        resets = number % 3 != 2
        for rollout_id, history in clients.round(resets=resets).items():
            tally.take(rollout_id, history, resets=resets)
        if tally.problems:
            tally.problems = [f"seed {clients.seed}, round {number}: {problem}" for problem in tally.problems]
            return


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=4000, help="of two rollouts each")
    parser.add_argument("--seed", type=int, default=1)


def _run(arguments: argparse.Namespace) -> Outcome:
    outcome, tally = Outcome(), Tally()
    kills = pauses = 0
    nursery, memory = Nursery(), contextmanager(fast_directory)
    with closing(nursery), memory() as directory:
        for part in range(0, arguments.rounds, 250):  # a new store now and then: one of three waits for a device
            synced = part // 250 % 3 == 2
            with TemporaryDirectory(prefix="tokcap-histories-", dir=None if synced else directory) as path:
                clients = Clients(nursery, Path(path) / "store", arguments.seed + part, synced=synced)
                run_rounds(clients, tally, min(250, arguments.rounds - part))
                kills, pauses = kills + clients.kills, pauses + clients.pauses
                clients.close()
            print(f"{tally.histories:,} histories, {sum(tally.operations.values()):,} operations", flush=True)
            if tally.problems:
                break
    outcome.problems = tally.problems
    outcome.figure("seed", str(arguments.seed))
    outcome.figure("histories checked, of one rollout each", tally.histories)
    outcome.figure("operations in them", sum(tally.operations.values()))
    outcome.figure("of these", ", ".join(f"{count:,} {name}" for name, count in tally.operations.most_common()))
    outcome.figure("most operations of one history; most at the same time", f"{tally.longest}; {tally.most_at_once}")
    outcome.figure("processes killed; paused", f"{kills:,}; {pauses:,}")
    outcome.figure("operations of which nobody knows whether they happened", tally.unknown)
    outcome.figure("histories that no order explains", len(tally.problems))
    return outcome


PART = Part(_arguments, _run)
