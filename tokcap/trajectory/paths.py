"""From linked calls to trajectories: who owns which span, and which prefixes repeat (rules 11, 12, 19)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from .links import NO_CALL, Links, chain_of, first_content
from .recorded import Recorded
from .tree import ROOT
from .verdicts import Judged

__all__ = ("Path", "find_paths")


class Path(msgspec.Struct, eq=False):
    """One trajectory: calls each of which continues the one before it, and what precedes them as context."""

    owned: list[int]
    """Representatives whose spans belong to this trajectory, in order."""
    trained: int
    shared: int = 0
    """How many ids it has in common, from the start, with the trajectory `prefix_of`."""
    prefix_of: int = NO_CALL
    """Position of the trajectory that has these ids first; NO_CALL if it has a beginning of its own."""

    @property
    def end(self) -> int:
        return self.owned[-1]


def find_paths(
    recorded: Recorded, links: Links, judged: dict[int, Judged], split: Collection[int], scored: int
) -> tuple[list[Path], int]:
    """All trajectories, those with trained ids first; and how many distinct ids they have.

    split: representatives that start a trajectory although they continue a call.
    scored: representative of the scored answer, or NO_CALL; its chain owns what lies on it.
    """
    rank = _ranking(recorded, links, judged, scored)
    goes_on: dict[int, int] = {}
    for number, children in links.children.items():
        joined = [child for child in children if child not in split]
        if joined:
            goes_on[number] = joined[0] if len(joined) == 1 else _first(recorded, links, joined, rank)
    continued = set(goes_on.values())
    paths = []
    for number in links.answered:
        if number in continued:
            continue
        owned = [number]
        while owned[-1] in goes_on:
            owned.append(goes_on[owned[-1]])
        paths.append(Path(owned, sum(judged[i].trained for i in owned)))
    if len(paths) < 2:
        return paths, _share(recorded, paths)
    on_chain = set(chain_of(links, scored))
    paths.sort(
        key=lambda path: (
            path.trained == 0,
            not on_chain.intersection(path.owned),
            -path.trained,
            rank(path.end)[2:],
            first_content(recorded, links.members[path.end]),
        )
    )
    return paths, _share(recorded, paths)


Rank = Callable[[int], tuple[bool, int, int, int]]


def _first(recorded: Recorded, links: Links, numbers: list[int], rank: Rank) -> int:
    best = min(map(rank, numbers))
    equal = [number for number in numbers if rank(number) == best]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda n: first_content(recorded, links.members[n]))


def _ranking(recorded: Recorded, links: Links, judged: dict[int, Judged], scored: int) -> Rank:
    """Orders the calls that continue the same call; the first of them owns the trunk."""
    below = {number: judged[number].trained for number in links.answered}
    for number in sorted(links.answered, key=lambda n: recorded.calls[n].total, reverse=True):
        parent = links.parent[number]
        if parent != NO_CALL:
            below[parent] += below[number]
    chain = set(chain_of(links, scored))

    def rank(number: int) -> tuple[bool, int, int, int]:
        call = recorded.calls[number]
        return (
            number not in chain,
            -below[number],
            recorded.first[call.end_vertex],
            -call.prompt,
        )

    return rank


def _share(recorded: Recorded, paths: list[Path]) -> int:
    """Note what each path repeats of an earlier one; the number of distinct ids of all."""
    depth, parent = recorded.tree.depth, recorded.tree.parent
    having: dict[int, int] = {ROOT: NO_CALL}
    distinct = 0
    for position, path in enumerate(paths):
        vertex = recorded.calls[path.end].end_vertex
        total = depth[vertex]
        while vertex not in having:
            having[vertex] = position
            vertex = parent[vertex]
        path.shared, path.prefix_of = depth[vertex], having[vertex]
        distinct += total - depth[vertex]
    return distinct
