"""The calls of a rollout as trees, in the order in which they are read.

A conversation that only goes on stays at one level, however long it is, as in `git log --graph`; what leaves it is one
level deeper, directly below the call that it leaves. Where a call has several continuations, the one with the most
calls below it goes on at its level, so that n calls are at most log2(n) levels deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from .view import CallView, RolloutView

__all__ = ("Branch", "Conversation", "Skipped", "conversations", "lines", "shortened")

_LONG = 8
"""Plain calls in a row from which on the middle is left out."""
_ENDS = 2
"""What is left of them, at each end."""


class Branch(msgspec.Struct):
    """One call, and what leaves it."""

    call: CallView
    follows: bool
    """Whether the call that it hangs on is the one before it at its level."""
    leaving: list[Branch] = []
    """Calls that hang on it or on another one of these, and do not go on at its level; also those of which no ids are
    stored and which began between this call and the next."""


class Skipped(msgspec.Struct):
    """In place of calls that only go on."""

    calls: int
    trained: int
    leaving: list[Branch] = []
    """None; so that it can stand where a `Branch` stands."""


class Conversation(msgspec.Struct):
    """Calls that hang together."""

    first: CallView | None
    """None: calls that can't be placed at all."""
    branches: list[Branch]
    calls: int
    trained: int


def conversations(view: RolloutView) -> list[Conversation]:
    """Every call of a rollout exactly once: the conversations in the order in which they began, then what has no place.

    A call of which no ids are stored (lost, open, nothing sampled) is placed behind the last call that began before it;
    damage, and what has no known time, can't be placed.
    """
    placed = [call for call in view.calls if call.relation != "unrecorded"]
    children = _children(view, placed)
    weights = _weights(placed, children)
    found: list[Conversation] = []
    branch_of: dict[int, Branch] = {}
    done: set[int] = set()
    for root in _roots(view, placed):
        if root.number in done:
            continue
        branches = _branches(root, children, weights, branch_of, done)
        made = [branch.call for branch, _ in lines(branches)]
        found.append(Conversation(root, branches, len(made), sum(call.trained for call in made)))
    first: list[Branch] = []
    unplaced: list[Branch] = []
    latest: Branch | None = None
    for call in view.calls:
        if call.relation != "unrecorded":
            latest = branch_of[call.number]
            continue
        branch = Branch(call, False)
        if call.began_s is None or not found:
            unplaced.append(branch)
        else:
            (first if latest is None else latest.leaving).append(branch)
    if first:
        found[0].branches[:0] = first
    return [*found, Conversation(None, unplaced, len(unplaced), 0)] if unplaced else found


Item = TypeVar("Item", Branch, Branch | Skipped)


def lines(branches: Sequence[Item]) -> Iterator[tuple[Item, tuple[bool, ...]]]:
    """Every branch in the order in which it is read, with one mark per level: whether more follows at that level."""
    stack: list[tuple[Sequence[Any], int, tuple[bool, ...]]] = [(branches, 0, ())] if branches else []
    above: tuple[bool, ...]
    while stack:
        level, place, above = stack.pop()
        branch, more = level[place], place + 1 < len(level)
        yield branch, (*above, more)
        if more:
            stack.append((level, place + 1, above))
        if branch.leaving:
            stack.append((branch.leaving, 0, (*above, more)))


def shortened(branches: Sequence[Branch]) -> list[Branch | Skipped]:
    """The same level without the middle of long runs of calls that only go on, and that are trained as a whole."""
    found: list[Branch | Skipped] = []
    run: list[Branch] = []
    for branch in (*branches, None):
        if branch is not None and _is_plain(branch):
            run.append(branch)
            continue
        if len(run) > _LONG:
            middle = run[_ENDS:-_ENDS]
            skipped = Skipped(len(middle), sum(each.call.trained for each in middle))
            run_shown: list[Branch | Skipped] = [*run[:_ENDS], skipped, *run[-_ENDS:]]
            found += run_shown
        else:
            found += run
        run = []
        if branch is not None:
            found.append(branch)
    return found


def _is_plain(branch: Branch) -> bool:
    call = branch.call
    return (
        branch.follows
        and not branch.leaving
        and call.relation == "continues"
        and call.outcome == "recorded"
        and call.trained == call.sampled > 0
        and call.drift is None
        and not call.after_gap
        and call.attempts == call.samples == 1
    )


def _children(view: RolloutView, placed: Sequence[CallView]) -> dict[int, list[CallView]]:
    children: dict[int, list[CallView]] = {call.number: [] for call in placed}
    for call in placed:
        above = None if call.parent is None else view.call(call.parent)
        if above is not None:
            children[above.number].append(call)
    return children


def _roots(view: RolloutView, placed: Sequence[CallView]) -> Iterator[CallView]:
    """The calls that hang on none; then all others, should clocks that contradict each other make a circle."""
    yield from (call for call in placed if call.parent is None or view.call(call.parent) is None)
    yield from placed


def _weights(placed: Sequence[CallView], children: dict[int, list[CallView]]) -> dict[int, int]:
    """Calls below each call, itself included."""
    weights: dict[int, int] = {}
    for start in placed:
        stack = [] if start.number in weights else [start]
        while stack:
            call = stack[-1]
            weights.setdefault(call.number, 0)
            waiting = [child for child in children[call.number] if child.number not in weights]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            weights[call.number] = 1 + sum(weights[child.number] for child in children[call.number])
    return weights


def _branches(
    root: CallView,
    children: dict[int, list[CallView]],
    weights: dict[int, int],
    branch_of: dict[int, Branch],
    done: set[int],
) -> list[Branch]:
    top: list[Branch] = []
    starts = [(root, top)]
    while starts:
        call, level = starts.pop()
        follows = False
        while True:
            done.add(call.number)
            branch = branch_of[call.number] = Branch(call, follows, [])
            level.append(branch)
            below = [child for child in children[call.number] if child.number not in done]
            if not below:
                break
            main = max(below, key=lambda child: (_goes_on(child), weights[child.number], child.trained, child.number))
            starts += [(child, branch.leaving) for child in reversed(below) if child is not main]
            call, follows = main, True
    return top


def _goes_on(call: CallView) -> bool:
    """Repetitions are leaves, and never what a conversation goes on with."""
    return call.relation != "repeats"
