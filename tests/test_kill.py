"""`kill -9` at any moment: what was acknowledged is there exactly once, the rest whole or absent, and no lock stays.

Children announce the start and the end of every operation. A kill counts only if it hit a child with an operation in
flight. What may be found afterwards follows from the announcements alone.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tokcap.conformance.samples import difference, entry_of, ids_of
from tokcap.entry import TokenEntry
from tokcap.errors import ConflictError, FrozenError, RetiredError
from tokcap.store import FileStore, RolloutStat

from .children import Channel, Child, Nursery, fast_directory
from .children import nursery as _nursery
from .proofs.kills_calls import SlowFiles

KILLS = 320
TORTURE_KILLS = 3_200

PROMPT = 400
GROUP = 4
"""Choices of a `put_many`."""

directory = pytest.fixture(scope="module")(fast_directory)
nursery = pytest.fixture(scope="module")(_nursery)


# ---- what children do


def plan_of(seed: int, rollout_id: str, length: int) -> list[tuple[str, str]]:
    """Operations of one writer. Each call is used by one of them, so that parallel ones don't depend on order."""
    chance = random.Random(f"{seed}/{rollout_id}")
    steps: list[tuple[str, str]] = []
    for number in range(length):
        call = f"w{seed}-{number}"
        shape = chance.choice(["put", "put", "put", "many", "begun", "settled", "mark", "twice", "conflict", "aborted"])
        steps += {
            "put": [("put", call)],
            "many": [("put_many", call)],
            "begun": [("begin", call), ("put", call)],
            "settled": [("begin", call), ("no_generation", call)],
            "mark": [("mark", call)],
            "twice": [("put", call), ("put", call)],
            "conflict": [("put", call), ("other", call)],
            "aborted": [("begin", call), ("put", call), ("aborted", call)],
        }[shape]
    return steps


def entries_of(rollout_id: str, step: tuple[str, str]) -> list[TokenEntry]:
    """What a step puts: each prompt extends one long prompt, so that suffixes are stored."""
    what, call = step
    prompt = ids_of(rollout_id, PROMPT) + ids_of(f"{rollout_id}/{call}", 20)
    if what == "put_many":
        return [entry_of(rollout_id, call, prompt=prompt, choice_index=choice) for choice in range(GROUP)]
    if what == "other":
        return [entry_of(rollout_id, call, prompt=prompt, content="other")]
    return [entry_of(rollout_id, call, prompt=prompt)] if what == "put" else []


async def _do(store: FileStore, rollout_id: str, step: tuple[str, str]) -> None:
    what, call = step
    if what == "put_many":
        await store.put_many(entries_of(rollout_id, step))
    elif what == "put":
        await store.put(entries_of(rollout_id, step)[0])
    elif what == "other":
        try:
            await store.put(entries_of(rollout_id, step)[0])
        except ConflictError:
            return
        raise AssertionError("a put of another content returned")
    elif what == "begin":
        await store.begin_call(rollout_id, call)
    elif what == "mark":
        await store.mark_incomplete(rollout_id, call)
    else:
        await store.settle_call(rollout_id, call, what)  # type: ignore[arg-type]


def _do_now(store: FileStore, rollout_id: str, step: tuple[str, str]) -> None:
    what, call = step
    if what == "put_many":
        store.put_many_now(entries_of(rollout_id, step))
    elif what == "put":
        store.put_now(entries_of(rollout_id, step)[0])
    elif what == "other":
        with pytest.raises(ConflictError):
            store.put_now(entries_of(rollout_id, step)[0])
    elif what == "begin":
        store.begin_call_now(rollout_id, call)
    elif what == "mark":
        store.mark_incomplete_now(rollout_id, call)
    else:
        store.settle_call_now(rollout_id, call, what)  # type: ignore[arg-type]


def _opened(path: str, seed: int, slow: bool, **settings: Any) -> FileStore:
    return FileStore(path, files=SlowFiles(seed) if slow else None, sweep_every_s=0.0, **settings)


def write_one_by_one(channel: Channel, path: str, rollout_id: str, seed: int, slow: bool, length: int) -> None:
    """A writer, blocking; small segments, so that rotation is among what is interrupted."""
    store = _opened(path, seed, slow, segment_bytes=12_000)
    for number, step in enumerate(plan_of(seed, rollout_id, length)):
        channel.send(("start", number))
        _do_now(store, rollout_id, step)
        channel.send(("ack", number))
    channel.send(("end", None))


def write_at_once(channel: Channel, path: str, rollout_id: str, seed: int, slow: bool, length: int) -> None:
    """A writer with many operations in flight; those of one call one after the other."""

    async def main() -> None:
        store = _opened(path, seed, slow)
        steps = plan_of(seed, rollout_id, length)
        by_call: dict[str, list[int]] = {}
        for number, step in enumerate(steps):
            by_call.setdefault(step[1], []).append(number)

        async def one(numbers: list[int]) -> None:
            for number in numbers:
                channel.send(("start", number))
                await _do(store, rollout_id, steps[number])
                channel.send(("ack", number))

        calls = list(by_call.values())
        for first in range(0, len(calls), 8):
            await asyncio.gather(*(one(numbers) for numbers in calls[first : first + 8]))

    asyncio.run(main())
    channel.send(("end", None))


CONSUMPTION = (
    "freeze",
    "late mark",
    "late settle",
    "late conflict",
    "freeze",
    "note delivery",
    "retire",
    "mark retired",
    "retire",
    "reset",
    "put again",
    "freeze",
    "retire",
    "reset",
)


def consume(channel: Channel, path: str, rollout_ids: list[str], seed: int, slow: bool) -> None:
    """A consumer: freezes, hears of late losses, retires, resets, and starts the next attempt."""
    store = _opened(path, seed, slow)
    number = 0
    for rollout_id in rollout_ids:
        pair = ("", 0)
        for what in CONSUMPTION:
            channel.send(("start", number, what, rollout_id))
            result: Any = None
            if what == "freeze":
                with store.freeze_now(rollout_id) as snapshot:
                    result = pair = snapshot.snapshot_id, snapshot.version
            elif what == "late mark":
                store.mark_incomplete_now(rollout_id, "late-mark")
            elif what == "late settle":
                store.settle_call_now(rollout_id, "late-settle", "aborted")
            elif what == "late conflict":
                with pytest.raises(FrozenError):
                    store.put_now(entries_of(rollout_id, ("other", "c0"))[0])
            elif what == "note delivery":
                store.note_delivery_now(rollout_id, "c1", "partly")
            elif what == "retire":
                assert store.retire_now(rollout_id, snapshot_id=pair[0], version=pair[1])
            elif what == "mark retired":
                store.mark_incomplete_now(rollout_id, "too-late")
            elif what == "reset":
                store.reset_now(rollout_id)
            else:
                store.put_now(entries_of(rollout_id, ("put", "again"))[0])
            channel.send(("ack", number, what, rollout_id, result))
            number += 1
    channel.send(("end", None))


# ---- what may be found


@dataclass
class Call:
    """What was said of one call, and what must therefore be seen of it."""

    begun: bool = False
    contents: dict[int, list[TokenEntry]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)

    def apply(self, rollout_id: str, step: tuple[str, str]) -> None:
        what = step[0]
        if what == "begin":
            self.begun = True
        elif what == "mark":
            self.settled.add("lost")
        elif what in ("aborted", "no_generation"):
            self.settled.add(what)
        for entry in entries_of(rollout_id, step):
            known = self.contents.setdefault(entry.choice_index, [])
            if all(difference(entry, other) for other in known):
                known.append(entry)

    @property
    def outcome(self) -> str | None:
        if any(len(contents) > 1 for contents in self.contents.values()):
            return "conflict"
        if "aborted" in self.settled:
            return "aborted"
        if self.contents:
            return "recorded"
        return next(iter(self.settled), "open" if self.begun else None)


def matches(call: Call, outcome: str | None, seen: dict[int, TokenEntry]) -> bool:
    """Whether exactly this call was found."""
    return (
        call.outcome == outcome
        and call.contents.keys() == seen.keys()
        and all(any(not difference(seen[c], e) for e in contents) for c, contents in call.contents.items())
    )


class Found:
    """A frozen rollout, by call."""

    def __init__(self, store: FileStore, rollout_id: str) -> None:
        self.entries: dict[str, dict[int, TokenEntry]] = {}
        with store.freeze_now(rollout_id) as snapshot:
            self.damage = [str(damage) for damage in snapshot.damage]
            self.outcomes = Counter(call.model_call_id for call in snapshot.calls)
            self.calls = {call.model_call_id: call.outcome for call in snapshot.calls}
            self.pair = snapshot.snapshot_id, snapshot.version
            for entry in snapshot.entries:
                choices = self.entries.setdefault(entry.model_call_id, {})
                assert entry.choice_index not in choices, "an entry twice"
                choices[entry.choice_index] = entry


def check_writers(found: Found, rollout_id: str, writers: Sequence[Log]) -> None:
    """Every call holds exactly what was acknowledged of it, or that and the operation that was in flight."""
    assert not found.damage
    assert all(count == 1 for count in found.outcomes.values())
    expected: set[str] = set()
    for log in writers:
        calls: dict[str, list[tuple[int, tuple[str, str]]]] = {}
        for number, step in enumerate(log.steps):
            calls.setdefault(step[1], []).append((number, step))
        for name, steps in calls.items():
            least, most = Call(), Call()
            for number, step in steps:
                if number in log.acknowledged:
                    least.apply(rollout_id, step)
                if number in log.started:
                    most.apply(rollout_id, step)
            seen = found.entries.get(name, {})
            outcome = found.calls.get(name)
            assert matches(least, outcome, seen) or matches(most, outcome, seen), (
                f"call {name} of {rollout_id}: acknowledged {least}, in flight up to {most}, seen {outcome} {seen}"
            )
            expected.add(name)
    assert found.calls.keys() <= expected
    assert found.entries.keys() <= expected


@dataclass
class Log:
    """What a writer announced."""

    steps: list[tuple[str, str]]
    started: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    ended: bool = False

    def hear(self, message: tuple[Any, ...]) -> None:
        if message[0] == "start":
            self.started.add(message[1])
        elif message[0] == "ack":
            self.acknowledged.add(message[1])
        else:
            self.ended = True

    @property
    def in_flight(self) -> set[int]:
        return self.started - self.acknowledged


def kill_at(child: Child, chance: random.Random, starts: int, hear: Callable[[tuple[Any, ...]], None]) -> None:
    """Let that many operations start, wait up to half a millisecond, and kill; everything said is heard."""
    while starts:
        message = child.receive()
        hear(message)
        if message[0] == "end":
            break
        starts -= message[0] == "start"
    until = time.perf_counter() + chance.random() ** 2 * 0.0005
    while time.perf_counter() < until:
        pass
    child.kill()
    for message in child.rest():
        hear(message)


class Stopwatch:
    """The slowest operation right after a kill. A lock that was left behind makes it fail (`BusyError`)."""

    def __init__(self) -> None:
        self.worst = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            self.worst = max(self.worst, time.perf_counter() - start)


# ---- rounds


class Rounds:
    """Kills one child after the other, all on one directory, and looks at what it leaves."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int) -> None:
        self.nursery, self.path = nursery, str(directory / "store")
        self.chance = random.Random(seed)
        self.store = FileStore(self.path, lock_timeout_s=20.0, sweep_every_s=0.0)
        self.watch = Stopwatch()
        self.number = 0
        self.hit: Counter[str] = Counter()

    def writer(self, how: Callable[..., None]) -> None:
        """One writer, killed."""
        self.number += 1
        seed, rollout_id, slow = self.number, f"written-{self.number}", self.chance.random() < 0.5
        log = Log(plan_of(seed, rollout_id, 40))
        child = self.nursery.start(how, self.path, rollout_id, seed, slow, 40)
        kill_at(child, self.chance, self.chance.randint(1, len(log.steps) - 5), log.hear)
        self.nursery.forget(child)
        self._count(log.steps[number][0] for number in log.in_flight)
        self._goes_on(rollout_id, [log])

    def pair(self) -> None:
        """Two writers on one rollout; one is killed, the other must not notice."""
        self.number += 1
        rollout_id, slow = f"shared-{self.number}", self.chance.random() < 0.5
        seeds = (2 * self.number, 2 * self.number + 1)
        logs = [Log(plan_of(seed, rollout_id, 20)) for seed in seeds]
        children = [self.nursery.start(write_one_by_one, self.path, rollout_id, seed, slow, 20) for seed in seeds]
        kill_at(children[0], self.chance, self.chance.randint(1, 20), logs[0].hear)
        for message in children[1].end():
            logs[1].hear(message)
        assert logs[1].ended
        assert not logs[1].in_flight
        for child in children:
            self.nursery.forget(child)
        self._count(logs[0].steps[number][0] for number in logs[0].in_flight)
        self._goes_on(rollout_id, logs)

    def _goes_on(self, rollout_id: str, logs: list[Log]) -> None:
        own = Log([("put", "after")], {0}, {0})
        self.watch.call(self.store.put_now, entries_of(rollout_id, ("put", "after"))[0])
        found = self.watch.call(Found, self.store, rollout_id)
        check_writers(found, rollout_id, [*logs, own])
        with pytest.raises(FrozenError):
            self.store.put_now(entries_of(rollout_id, ("put", "too-late"))[0])
        retire = self.watch.call(self.store.retire_now, rollout_id, snapshot_id=found.pair[0], version=found.pair[1])
        assert retire
        self.watch.call(self.store.reset_now, rollout_id)
        assert self.store.stat_now(rollout_id).state == "absent"

    def consumer(self) -> None:
        """A consumer, killed while it freezes, hears late marks, retires, resets."""
        self.number += 1
        ids = [f"consumed-{self.number}-{place}" for place in range(3)]
        for rollout_id in ids:
            self.store.put_many_now(entries_of(rollout_id, ("put", f"c{number}"))[0] for number in range(4))
        messages: list[tuple[Any, ...]] = []
        child = self.nursery.start(consume, self.path, ids, self.number, self.chance.random() < 0.6)
        kill_at(child, self.chance, self.chance.randint(1, len(ids) * len(CONSUMPTION)), messages.append)
        self.nursery.forget(child)
        for rollout_id in ids:
            mine = [message for message in messages if message[0] != "end" and message[3] == rollout_id]
            done = [message[4] for message in mine if message[0] == "ack"]
            in_flight = len(mine) > 2 * len(done)
            if in_flight:
                self._count([CONSUMPTION[len(done)]])
            least = expected_after(rollout_id, len(done))
            most = expected_after(rollout_id, len(done) + in_flight)
            # A first record that was cut off has left a segment with nothing in it.
            begun = [Expected("open")] if in_flight and CONSUMPTION[len(done)] == "put again" else []
            self._consumption_goes_on(rollout_id, [least, most, *begun], done)

    def _consumption_goes_on(self, rollout_id: str, expected: list[Expected], done: list[Any]) -> None:
        stat = self.store.stat_now(rollout_id)
        fits = [one for one in expected if one.fits(stat)]
        assert fits, f"{rollout_id}: expected {expected}, found {stat}"
        pair = next((pair for pair in reversed(done[: CONSUMPTION.index("reset")]) if pair), None)
        if stat.state == "retired":
            with pytest.raises(RetiredError):
                self.watch.call(self.store.freeze_now, rollout_id)
        else:
            found = self.watch.call(Found, self.store, rollout_id)
            assert not found.damage
            assert any(found.calls == one.calls for one in fits)
            for call, choices in found.entries.items():
                # Of two contents in conflict the one with the smaller digest is shown.
                contents = [entries_of(rollout_id, ("put", call))[0], entries_of(rollout_id, ("other", call))[0]]
                shown = contents if found.calls[call] == "conflict" else contents[:1]
                assert any(not difference(choices[0], entry) for entry in shown)
            if stat.state == "frozen":
                assert found.pair == (stat.snapshot_id, stat.version)
                if pair is not None and len(done) < CONSUMPTION.index("reset"):
                    assert found.pair[0] == pair[0]
                    assert found.pair[1] >= pair[1]
            retire = self.watch.call(
                self.store.retire_now, rollout_id, snapshot_id=found.pair[0], version=found.pair[1]
            )
            assert retire
        self.watch.call(self.store.reset_now, rollout_id)
        self.watch.call(self.store.put_now, entries_of(rollout_id, ("put", "next"))[0])
        assert list(self.watch.call(Found, self.store, rollout_id).calls) == ["next"]
        self.store.reset_now(rollout_id)

    def _count(self, in_flight: Iterator[str] | list[str]) -> None:
        hit = sorted(set(in_flight))
        if hit:
            self.hit[self.chance.choice(hit)] += 1

    def run(self, kills: int) -> None:
        kinds: list[Callable[[], None]] = [
            lambda: self.writer(write_one_by_one),
            lambda: self.writer(write_at_once),
            self.pair,
            self.consumer,
            self.consumer,
        ]
        while self.hit.total() < kills:
            kinds[self.number % len(kinds)]()
            assert self.number < 3 * kills + 50, f"too few kills strike an operation: {self.hit}"
        self.store.close_now()


@dataclass
class Expected:
    """What the consumer's steps leave of a rollout."""

    state: str = "open"
    version: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    late: int = 0

    def fits(self, stat: RolloutStat) -> bool:
        calls: dict[str, str] = {call.model_call_id: call.outcome for call in stat.calls}
        if self.state == "retired":
            calls = self.calls
        return (stat.state, stat.version, calls, len(stat.late)) == (self.state, self.version, self.calls, self.late)


def expected_after(rollout_id: str, steps: int) -> Expected:
    """Fold the first steps of a consumption."""
    seen = Expected(calls={f"c{number}": "recorded" for number in range(4)})
    for what in CONSUMPTION[:steps]:
        if what == "freeze":
            seen.state, seen.version = "frozen", max(1, seen.version)
        elif what in ("late mark", "late settle", "late conflict"):
            call, outcome = {
                "late mark": ("late-mark", "lost"),
                "late settle": ("late-settle", "aborted"),
                "late conflict": ("c0", "conflict"),
            }[what]
            seen.calls[call] = outcome
            seen.version += 1
        elif what == "note delivery":
            seen.late += 1
        elif what == "retire":
            if seen.state == "frozen":
                seen.state = "retired"
        elif what == "mark retired":
            seen.late += 1
        elif what == "reset":
            seen = Expected("absent")
        else:
            seen = Expected("open", calls={"again": "recorded"})
    return seen


def _report(rounds: Rounds, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(
            f"\n{rounds.hit.total()} kills in {rounds.number} rounds, worst wait afterwards "
            f"{rounds.watch.worst * 1000:.0f} ms: {dict(rounds.hit.most_common())}\n"
        )


def test_killed_writers_and_consumers_lose_nothing_and_leave_no_lock(
    nursery: Nursery, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = Rounds(nursery, directory, 1)
    rounds.run(KILLS)
    _report(rounds, capsys)
    assert rounds.hit.total() >= 300
    for what in ("put", "put_many", "begin", "no_generation", "freeze", "late mark", "retire", "reset"):
        assert rounds.hit[what], f"no kill struck {what}: {rounds.hit}"


@pytest.mark.torture
def test_thousands_of_killed_writers_and_consumers_lose_nothing(
    nursery: Nursery, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = Rounds(nursery, directory, int(time.time()))
    rounds.run(TORTURE_KILLS)
    _report(rounds, capsys)
    assert rounds.hit.total() >= TORTURE_KILLS
