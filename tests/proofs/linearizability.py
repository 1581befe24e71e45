"""Whether what several clients saw of one object can be explained by some order of their operations.

The search of Wing and Gong (1993) with Lowe's memory of what was tried, as in Porcupine and Knossos: an operation may
come next if it was invoked before any operation that is still to come returned; a pair of (operations done, state) is
tried once. An object may be anything with a pure step function; several objects are checked one by one, because
linearizability is local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ("Event", "UndecidedError", "Verdict", "linearizable")

S = TypeVar("S", bound=Hashable)
O = TypeVar("O")  # noqa: E741 - an operation with its result


@dataclass(frozen=True)
class Event(Generic[O]):
    """One operation of one client."""

    what: O
    invoked: float
    """On one clock for all clients."""
    returned: float = math.inf
    """Infinite if nobody knows: then it may have happened at any time after `invoked`, or never."""


@dataclass(frozen=True)
class Verdict(Generic[O]):
    """Whether there is an order, and how far the longest one came."""

    ok: bool
    order: tuple[Event[O], ...]
    """One that explains everything, or the longest that explains its part."""
    tried: int
    """How many (operations done, state) were looked at."""


class UndecidedError(AssertionError):
    """More was tried than allowed."""


def linearizable(
    history: Sequence[Event[O]], initial: S, step: Callable[[S, O], Iterable[S]], *, most: int = 2_000_000
) -> Verdict[O]:
    """Search for an order that agrees with the times and with `step`, which gives every state that can follow.

    Raises `UndecidedError` after `most` tries.
    """
    events = sorted(history, key=lambda event: event.invoked)
    needed = sum(1 << place for place, event in enumerate(events) if event.returned != math.inf)
    tried: set[tuple[int, S]] = set()
    longest: tuple[int, ...] = ()
    # Depth first, without recursion: (done, state, order so far, what may come next).
    stack: list[tuple[int, S, tuple[int, ...]]] = [(0, initial, ())]
    while stack:
        done, state, order = stack.pop()
        if (done, state) in tried:
            continue
        tried.add((done, state))
        if len(tried) > most:
            raise UndecidedError(f"{most:,} states tried; the longest order has {len(longest)} of {len(events)}")
        if len(order) > len(longest):
            longest = order
        if done & needed == needed:
            return Verdict(True, tuple(events[place] for place in order), len(tried))
        first_return = min(event.returned for place, event in enumerate(events) if not done >> place & 1)
        for place in range(len(events) - 1, -1, -1):  # the earliest is tried first
            event = events[place]
            if done >> place & 1 or event.invoked > first_return:
                continue
            stack += [(done | 1 << place, after, (*order, place)) for after in step(state, event.what)]
    return Verdict(False, tuple(events[place] for place in longest), len(tried))
