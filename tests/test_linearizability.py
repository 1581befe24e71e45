"""The checker itself: known histories, and agreement with trying every order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from tests.proofs.linearizability import Event, UndecidedError, linearizable

Word = tuple[str, int]


def register(state: int, word: Word) -> list[int]:
    """A register: write sets it, read must see it, swap-if-1 is a compare-and-set from 1."""
    name, value = word
    if name == "write":
        return [value]
    if name == "read":
        return [state] if state == value else []
    if name == "lost write":  # done or not, nobody can tell
        return [value, state]
    return [value] if state == 1 else []


def history(*events: tuple[str, int, float, float]) -> list[Event[Word]]:
    return [Event((name, value), invoked, returned) for name, value, invoked, returned in events]


@pytest.mark.parametrize(
    "events",
    [
        history(("write", 1, 0, 1), ("read", 1, 2, 3)),
        history(("write", 1, 0, 10), ("read", 0, 1, 2), ("read", 1, 3, 4)),
        history(("write", 1, 0, 10), ("write", 2, 0, 10), ("read", 1, 1, 2), ("read", 2, 3, 4)),
        history(("write", 1, 0, math.inf), ("read", 0, 5, 6), ("read", 1, 7, 8)),  # happens long after it was asked for
        history(("write", 1, 0, math.inf), ("read", 0, 5, 6)),  # never happens
        history(("write", 1, 0, 3), ("swap", 5, 1, 2), ("read", 5, 4, 5)),
        history(("lost write", 1, 0, 1), ("read", 0, 2, 3)),
    ],
    ids=[str(n) for n in range(7)],
)
def test_a_history_with_an_order_is_accepted(events: list[Event[Word]]) -> None:
    verdict = linearizable(events, 0, register)
    assert verdict.ok
    assert _agrees(events, [events.index(event) for event in verdict.order])


@pytest.mark.parametrize(
    "events",
    [
        history(("write", 1, 0, 1), ("read", 0, 2, 3)),  # a stale read
        history(("write", 1, 0, 10), ("read", 1, 1, 2), ("read", 0, 3, 4)),  # a read that goes back
        history(("write", 1, 0, 10), ("write", 2, 0, 10), ("read", 1, 1, 2), ("read", 2, 3, 4), ("read", 1, 5, 6)),
        history(("write", 1, 0, 1), ("swap", 2, 2, 3), ("swap", 3, 4, 5)),  # both win
        history(("read", 7, 0, 1), ("write", 7, 2, math.inf)),  # seen before it was asked for
        history(("lost write", 1, 0, 1), ("read", 0, 2, 3), ("read", 1, 4, 5)),  # comes to life after it returned
    ],
    ids=[str(n) for n in range(6)],
)
def test_a_history_without_an_order_is_refused(events: list[Event[Word]]) -> None:
    verdict = linearizable(events, 0, register)
    assert not verdict.ok
    assert len(verdict.order) < len(events)


def _agrees(events: Sequence[Event[Word]], order: Sequence[int]) -> bool:
    """Whether this order of some of the events agrees with the times, and leaves out only what nobody knows."""
    if any(place not in order and events[place].returned != math.inf for place in range(len(events))):
        return False
    for before, after in itertools.combinations(order, 2):
        if events[after].returned < events[before].invoked:
            return False
    states = {0}
    for place in order:
        states = {after for state in states for after in register(state, events[place].what)}
    return bool(states)


def test_it_agrees_with_trying_every_order() -> None:
    verdicts = []
    for seed in range(600):
        chance = random.Random(seed)
        events = []
        for _ in range(chance.randint(1, 5)):
            invoked = chance.uniform(0, 10)
            returned = math.inf if chance.random() < 0.15 else invoked + chance.uniform(0, 6)
            name = chance.choice(("write", "read", "read", "swap", "lost write"))
            events.append(Event((name, chance.randint(0, 2)), invoked, returned))
        unknown = [place for place, event in enumerate(events) if event.returned == math.inf]
        expected = any(
            _agrees(events, order)
            for left_out in itertools.chain.from_iterable(
                itertools.combinations(unknown, count) for count in range(len(unknown) + 1)
            )
            for order in itertools.permutations(place for place in range(len(events)) if place not in left_out)
        )
        assert linearizable(events, 0, register).ok == expected, f"seed {seed}: {events}"
        verdicts.append(expected)
    assert 100 < sum(verdicts) < 500


def test_a_search_that_takes_too_long_says_so() -> None:
    events = [Event(("write", number), 0, 10) for number in range(12)] + [Event(("read", 99), 11, 12)]
    with pytest.raises(UndecidedError, match="500 states tried"):
        linearizable(events, 0, register, most=500)
