"""Random operations through several store objects, threads and processes, against the state table as a model.

A failure shows the seed, and everything that was done with what came of it.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.state_model import UNKNOWN, Operation, Raised, Seen, State, exactly_equal, linearize, step
from tests.store_worker import PATIENCE_S, LocalObject, RemoteObject
from tokcap import TokenEntry
from tokcap.entry import content_digest

ROLLOUTS = ("r-0", "r-1", "r-2")
CALLS = tuple(f"c-{number}" for number in range(6))
WEIGHTS = {
    "open": {"put": 60, "begin": 14, "settle": 8, "deliver": 6, "finish": 3, "freeze": 2, "retire": 1, "reset": 1},
    "frozen": {"put": 15, "begin": 3, "settle": 12, "deliver": 15, "finish": 2, "freeze": 6, "retire": 5, "reset": 3},
    "retired": {"put": 5, "begin": 3, "settle": 5, "deliver": 5, "finish": 1, "freeze": 2, "retire": 5, "reset": 10},
}
"""What is done how often: an open rollout should live for long, a retired one shouldn't be in the way."""
SETTLED = ("no_generation", "aborted", "lost")
DELIVERED = ("full", "partly", "no", "unknown")
EXAMPLES, STEPS = 25, 40
SEEDS = (1, 2, 3, 4)

CHOICES = st.integers(0, 2**32 - 1).map(random.Random)
"""One number per rule: what it does follows from it."""


class Actors:
    """The store objects, kept for all examples: some in this process, some in processes of their own."""

    def __init__(self) -> None:
        self.local = [
            LocalObject("threads"),
            LocalObject("loop", on_loop=True, segment_bytes=700, require_intent=True),
        ]
        self.remote = [
            RemoteObject("worker-1", cache_bytes=1, segment_bytes=3000),
            RemoteObject("worker-2", on_loop=True),
        ]
        self.all: list[LocalObject | RemoteObject] = [*self.local, *self.remote]
        self.strict = frozenset(actor.name for actor in self.all if actor.strict)

    def end(self) -> None:
        for actor in self.all:
            actor.end()


class Contents:
    """What may be put: chains, drifts, retries, repetitions and contradictions of what was put before."""

    def __init__(self) -> None:
        self.by_rollout: dict[str, list[TokenEntry]] = {rollout: [] for rollout in ROLLOUTS}
        self._known: dict[tuple[str, str, int, bytes], TokenEntry] = {}

    def some(self, chance: random.Random, rollout: str) -> tuple[TokenEntry, ...]:
        known = self.by_rollout[rollout]
        kind = chance.choice(("new", "new", "new", "again", "other", "other", "group"))
        if kind == "again" and known:
            return (chance.choice(known[-12:]),)
        if kind == "other" and known:
            entry = chance.choice(known[-5:])
            return (self._new(chance, rollout, entry.model_call_id, entry.choice_index, entry),)
        call = chance.choice(CALLS)
        if kind == "group":
            group = [self._new(chance, rollout, call, choice) for choice in range(chance.randint(2, 3))]
            if chance.random() < 0.2:
                group.append(chance.choice(group))
            if chance.random() < 0.1:
                group.append(self._new(chance, rollout, call, 0, group[0]))
            return tuple(group)
        return (self._new(chance, rollout, call, chance.choice((0, 0, 0, 1))),)

    def _new(
        self, chance: random.Random, rollout: str, call: str, choice: int, like: TokenEntry | None = None
    ) -> TokenEntry:
        prompt = like.prompt_token_ids if like is not None and chance.random() < 0.5 else self._prompt(chance, rollout)
        length = chance.choice((0, 1, 3, 20))
        numbers = np.random.default_rng(chance.getrandbits(32))
        log_probs = numbers.standard_normal(length) - 3
        if chance.random() < 0.5:
            log_probs = log_probs.astype(np.float32).astype(np.float64)
        if length and chance.random() < 0.3:
            log_probs[chance.randrange(length)] = chance.choice((np.nan, -np.inf, -0.0, 1.5))
        largest = chance.choice((200, 60_000, 2**31))
        entry = TokenEntry(
            rollout,
            call,
            prompt,
            numbers.integers(0, largest, length),
            log_probs,
            choice_index=choice,
            extra={"note": chance.choice(("", "x" * 50, None, 1e300))} if chance.random() < 0.3 else {},
        )
        if self.put_as(entry) is None:
            self._known[_key(entry)] = entry
            self.by_rollout[rollout].append(entry)
        return entry

    def put_as(self, entry: TokenEntry) -> TokenEntry | None:
        """The entry that somebody put with this identity and content."""
        return self._known.get(_key(entry))

    def _prompt(self, chance: random.Random, rollout: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        known = self.by_rollout[rollout]
        fresh = np.random.default_rng(chance.getrandbits(32)).integers(0, 150_000, chance.choice((0, 2, 17, 40)))
        if not known or chance.random() < 0.15:
            return fresh
        parent = chance.choice(known[-6:])
        sequence = np.concatenate([parent.prompt_token_ids, parent.generation_token_ids]).astype(np.int64)[:3000]
        kind = chance.choice(("extended", "extended", "retried", "cut", "drifted"))
        if kind == "retried":
            return parent.prompt_token_ids.astype(np.int64)
        if kind == "cut":
            sequence = sequence[: chance.randint(0, len(sequence))]
        elif kind == "drifted" and len(sequence):
            sequence[chance.randrange(len(sequence))] ^= 1
        return np.concatenate([sequence, fresh])


class Machine(RuleBasedStateMachine):
    """Follows every state that explains what was seen so far; fails when none is left."""

    directory: Path
    actors: Actors
    synced: bool
    stories: list[str]
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        Machine.examples += 1
        self.root = self.directory / f"store-{Machine.examples}"
        for actor in self.actors.all:
            actor.open(str(self.root), synced=self.synced)
        self.contents = Contents()
        self.states: dict[str, list[State]] = {rollout: [State()] for rollout in ROLLOUTS}
        self.seen: dict[str, list[tuple[str, int]]] = {rollout: [] for rollout in ROLLOUTS}
        """(snapshot id, version) of every snapshot that anybody saw."""
        self.history: list[str] = []

    def teardown(self) -> None:
        for actor in self.actors.all:
            actor.close()
        shutil.rmtree(self.root)

    # ---- what to do

    def operation(self, chance: random.Random, rollout: str) -> Operation:
        life = self.states[rollout][0].life
        weights = WEIGHTS["retired" if life and life.retired else "frozen" if life and life.version else "open"]
        name = chance.choices(list(weights), list(weights.values()))[0]
        call = chance.choice(CALLS)
        match name:
            case "put":
                return Operation("put", rollout, entries=self.contents.some(chance, rollout))
            case "begin":
                history = [bytes([n]) * 16 for n in range(chance.choice((0, 3, 9)))]
                fresh = [chance.randbytes(16) for _ in range(chance.choice((0, 1, 2)))]
                key = chance.choice(("", "key"))
                return Operation(
                    "begin", rollout, call, word=key, number=chance.choice((1, 1, 1, 2)), digests=(*history, *fresh)
                )
            case "settle":
                word = chance.choice(SETTLED)
                unnamed = word == "lost" and chance.random() < 0.3
                return Operation("settle", rollout, "" if unnamed else call, word=word)
            case "deliver":
                return Operation("deliver", rollout, call, word=chance.choice(DELIVERED))
            case "finish":
                return Operation("finish", rollout, meta={"reward": chance.choice((0.0, 1.0))})
            case "retire":
                seen = self.seen[rollout]
                word, number = chance.choice((*seen[-3:], seen[-1], seen[-1])) if seen else ("0" * 32, 1)
                return Operation("retire", rollout, word=word, number=number)
            case _:
                return Operation(name, rollout)

    @rule(chance=CHOICES)
    def one(self, chance: random.Random) -> None:
        rollout = chance.choice(ROLLOUTS)
        actor, operation = chance.choice(self.actors.all), self.operation(chance, rollout)
        self.record(rollout, [(actor.name, operation, actor.start(operation).result(PATIENCE_S))])

    @rule(chance=CHOICES)
    def several_in_a_row(self, chance: random.Random) -> None:
        rollout = chance.choice(ROLLOUTS)
        for _ in range(chance.randint(5, 15)):
            actor, operation = chance.choice(self.actors.all), self.operation(chance, rollout)
            self.record(rollout, [(actor.name, operation, actor.start(operation).result(PATIENCE_S))])

    @rule(chance=CHOICES, killing=st.booleans())
    def together(self, chance: random.Random, killing: bool) -> None:
        """2 to 6 operations at once on one rollout: some order of them explains all results."""
        rollout = chance.choice(ROLLOUTS)
        operations = [self.operation(chance, rollout) for _ in range(chance.randint(2, 6))]
        operations += [Operation("freeze", rollout)] * (chance.random() < 0.2)
        operations += [Operation("read", rollout)] * (chance.random() < 0.2)
        chance.shuffle(operations)
        planned = [(chance.choice(self.actors.all), operation) for operation in operations]
        started = [(actor, operation, actor.start(operation)) for actor, operation in planned]
        victim = chance.choice(self.actors.remote) if killing and chance.random() < 0.5 else None
        if victim is not None:
            time.sleep(chance.choice((0.0, 0.0003, 0.001, 0.002)))
            victim.kill()
        done = [(actor.name, operation, future.result(PATIENCE_S)) for actor, operation, future in started]
        if victim is not None:
            victim.revive()
        self.record(rollout, done)
        if victim is not None:
            self.forget(victim, f"{victim.name} was killed meanwhile")

    @rule(chance=CHOICES)
    def sweep(self, chance: random.Random) -> None:
        actor = chance.choice(self.actors.all)
        result = actor.start(Operation("sweep", "")).result(PATIENCE_S)
        self.history.append(f"{actor.name}: sweep -> {result}")
        swept = 0
        for rollout, states in self.states.items():
            retired = {state.life is not None and state.life.retired for state in states}
            assert len(retired) == 1, "whether a rollout is retired is never in doubt after it was looked at"
            swept += retired == {True}
            self.states[rollout] = [step(s, "", Operation("sweep", rollout), UNKNOWN) or s for s in states]
        assert result == swept, self.story(f"sweep gave {result}, {swept} rollouts were retired")

    @rule(chance=CHOICES)
    def reopen(self, chance: random.Random) -> None:
        if chance.random() < 0.5:
            return
        actor = chance.choice(self.actors.all)
        actor.close()
        self.forget(actor, f"{actor.name} is closed and opened again")
        actor.open(str(self.root), synced=self.synced)

    @rule(chance=CHOICES)
    def kill_an_idle_process(self, chance: random.Random) -> None:
        if chance.random() < 0.7:
            return
        victim = chance.choice(self.actors.remote)
        victim.kill()
        self.forget(victim, f"{victim.name} is killed")
        victim.revive()

    # ---- what came of it

    @invariant()
    def every_look_shows_the_model(self) -> None:
        for position, rollout in enumerate(ROLLOUTS):
            actor = self.actors.local[(position + len(self.history)) % 2]
            operation = Operation("read", rollout)
            result = actor.start(operation).result(PATIENCE_S)
            self.record(rollout, [(actor.name, operation, result)], quietly=True)
            assert actor.store is not None
            stat = actor.store.stat_now(rollout)
            self.states[rollout] = [state for state in self.states[rollout] if _explains(state, stat)]
            assert self.states[rollout], self.story(f"no state of {rollout} explains {stat}")

    def record(self, rollout: str, done: list[tuple[str, Operation, object]], *, quietly: bool = False) -> None:
        """Keep the states that explain these results; fail if there are none."""
        for name, operation, result in done:
            if isinstance(result, Seen):
                self.check(operation, result)
            if not quietly:
                together = " (at the same time)" if len(done) > 1 else ""
                self.history.append(f"{name}: {operation} -> {_short(result)}{together}")
        after = linearize(self.states[rollout], done, self.actors.strict)
        assert after, self.story(
            "no order explains " + "; ".join(f"{name}: {operation} -> {result}" for name, operation, result in done)
        )
        self.states[rollout] = after

    def check(self, operation: Operation, result: Seen) -> None:
        for entry in result.entries:
            put = self.contents.put_as(entry)
            assert put is not None, self.story(f"{operation} shows {entry}, which nobody put")
            assert exactly_equal(entry, put), self.story(f"{operation} shows {entry}, put was {put}")
        if result.version:
            pair = (result.snapshot_id, result.version)
            if pair not in self.seen[operation.rollout_id]:
                self.seen[operation.rollout_id].append(pair)

    def forget(self, actor: LocalObject | RemoteObject, why: str) -> None:
        self.history.append(why)
        for rollout, states in self.states.items():
            self.states[rollout] = [state.forget(actor.name) for state in states]

    def story(self, problem: str) -> str:
        states = "\n".join(f"{rollout}: {states}" for rollout, states in self.states.items())
        story = "\n".join([problem, "states:", states, "history:", *self.history])
        self.stories.append(story)
        return story


def _key(entry: TokenEntry) -> tuple[str, str, int, bytes]:
    return entry.rollout_id, entry.model_call_id, entry.choice_index, content_digest(entry)


def _short(result: object) -> str:
    if isinstance(result, Seen):
        calls = " ".join(f"{name}={shown[0]}" for name, shown in result.calls.items())
        return f"version {result.version} of {result.snapshot_id[:6]}: {calls}"
    return result.error if isinstance(result, Raised) else str(result)


def _explains(state: State, stat: object) -> bool:
    life = state.life
    shown = tuple(getattr(stat, name) for name in ("state", "version", "entries", "incomplete", "finished", "meta"))
    late = len(getattr(stat, "late"))  # noqa: B009
    if life is None:
        # A writer that died before its first record was durable leaves an empty log.
        return shown[0] in ("absent", "open") and shown[1:] == (0, 0, False, False, {}) and not late
    if life.retired:
        return shown == ("retired", life.version, 0, False, False, {}) and late == len(life.notes)
    entries = sum(len(call.contents) for call in life.calls.values())
    incomplete = any(call.outcome in ("lost", "open", "conflict") for call in life.calls.values())
    expected = ("frozen" if life.version else "open", life.version, entries, incomplete)
    return shown == (*expected, life.finish is not None, life.finish or {}) and late == len(life.notes)


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    actors = Actors()
    yield actors
    actors.end()


def run_machine(actors: Actors, directory: Path, number: int, *, examples: int) -> None:
    # One seed in four waits for the device; the others see many more operations, and closer together.
    stories: list[str] = []
    own = {"actors": actors, "directory": directory, "synced": number % 4 == 1, "stories": stories}
    machine = seed(number)(type("SeededMachine", (Machine,), own))
    # No shrinking: what threads and processes do at the same time is not the same twice. The story tells what happened.
    chosen = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except BaseException as error:
        error.add_note(f"seed {number}, {examples} examples")
        # A second run, that may end in another way or not fail at all, must not hide what the first one found.
        error.add_note("\n".join(stories[:1]))
        raise


@pytest.mark.parametrize("number", SEEDS)
def test_every_operation_and_look_agrees_with_the_state_table(actors: Actors, tmp_path: Path, number: int) -> None:
    run_machine(actors, tmp_path, number, examples=EXAMPLES if number % 4 != 1 else EXAMPLES // 3)


@pytest.mark.torture
@pytest.mark.parametrize("round_", range(10))
def test_every_operation_and_look_agrees_with_the_state_table_for_long(
    actors: Actors, tmp_path: Path, round_: int
) -> None:
    run_machine(actors, tmp_path, random.SystemRandom().randrange(2**32), examples=10 * EXAMPLES)
