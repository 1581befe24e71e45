"""The prefix tree of a rollout: every prompt and every answer as a path of ids from the root.

A *vertex* stands for the sequence of ids on the way to it. There is one wherever a prompt ends, an answer ends, or two
sequences part; ids between two vertices lie in one array, so nothing is done per token. The tree depends on the set of
sequences only, not on the order in which they came.

An edge is stored once, by the call that brought it (its *owner*). A call says how far it follows another call, as the
store does (`tokcap.store.prefix`); that point is found by bisecting the vertices of the owners, not by walking there.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from ..store.prefix import common_prefix

__all__ = ("ROOT", "PrefixTree")

ROOT = 0

Ids = npt.NDArray[Any]


class PrefixTree:
    """Vertices by number; `depth[v]` is the length in ids of the sequence that vertex `v` stands for."""

    def __init__(self) -> None:
        self.depth: list[int] = [0]
        self.parent: list[int] = [ROOT]
        self.children: list[dict[int, int]] = [{}]
        """Of each vertex: first id of the edge -> vertex at its end."""
        self.edge: list[Ids] = [np.empty(0, np.int32)]
        """Of each vertex: the ids between its parent and it."""
        self._owner: list[int] = [-1]
        self._attached: list[int] = []
        """Of each call: the vertex where the edges that it brought begin."""
        # Arrays, because they are invisible to the garbage collector: thousands of lists would make it slow.
        self._own_depths: list[array[int]] = []
        self._own_vertices: list[array[int]] = []

    def __len__(self) -> int:
        return len(self.depth)

    def add(self, follows: int, shared: int, suffix: Ids, generated: Ids) -> tuple[int, int]:
        """Add the next call: its prompt is the first `shared` ids of call `follows` (-1: none), then `suffix`.

        Returns the vertices where its prompt and its answer end. Calls are numbered as they are added.
        """
        number = len(self._attached)
        start = self._locate(follows, shared) if shared else ROOT
        self._attached.append(-1)
        self._own_depths.append(array("q"))
        self._own_vertices.append(array("q"))
        prompt = self._descend(number, start, suffix)
        end = self._descend(number, prompt, generated)
        if self._attached[number] < 0:
            self._attached[number] = end
        return prompt, end

    def _locate(self, call: int, depth: int) -> int:
        """The vertex at `depth` on the way to the end of `call`, made if it is in the middle of an edge."""
        while depth < self.depth[self._attached[call]]:
            call = self._owner[self._attached[call]]
        attached = self._attached[call]
        if depth == self.depth[attached]:
            return attached
        vertex = self._own_vertices[call][bisect_left(self._own_depths[call], depth)]
        return vertex if self.depth[vertex] == depth else self._split(vertex, depth)

    def _descend(self, call: int, vertex: int, ids: Ids) -> int:
        """Follow `ids` from `vertex`, adding what is not there; the vertex where they end."""
        done, length = 0, len(ids)
        while done < length:
            child = self.children[vertex].get(int(ids[done]))
            if child is None:
                return self._grow(call, vertex, ids[done:])
            edge = self.edge[child]
            same = common_prefix(edge, ids[done:])
            vertex = child if same == len(edge) else self._split(child, self.depth[vertex] + same)
            done += same
        return vertex

    def _grow(self, call: int, vertex: int, ids: Ids) -> int:
        fresh = len(self.depth)
        depth = self.depth[vertex] + len(ids)
        self.depth.append(depth)
        self.parent.append(vertex)
        self.children.append({})
        self.edge.append(ids)
        self._owner.append(call)
        self.children[vertex][int(ids[0])] = fresh
        if self._attached[call] < 0:
            self._attached[call] = vertex
        self._own_depths[call].append(depth)
        self._own_vertices[call].append(fresh)
        return fresh

    def _split(self, vertex: int, depth: int) -> int:
        """Put a vertex at `depth` into the edge above `vertex`."""
        above, edge, owner = self.parent[vertex], self.edge[vertex], self._owner[vertex]
        cut = depth - self.depth[above]
        fresh = len(self.depth)
        self.depth.append(depth)
        self.parent.append(above)
        self.children.append({int(edge[cut]): vertex})
        self.edge.append(edge[:cut])
        self._owner.append(owner)
        self.edge[vertex] = edge[cut:]
        self.parent[vertex] = fresh
        self.children[above][int(edge[0])] = fresh
        place = bisect_left(self._own_depths[owner], depth)
        self._own_depths[owner].insert(place, depth)
        self._own_vertices[owner].insert(place, fresh)
        return fresh

    def ranks(self) -> tuple[list[int], list[int]]:
        """Of each vertex its place in the order of its ids, and the last place below it.

        Sequences compare like lists of ids: the smaller id first, a sequence before what extends it. Vertex `w` lies
        at or below `v` if `first[v] <= first[w] <= last[v]`.
        """
        first = [0] * len(self.depth)
        order: list[int] = []
        waiting = [ROOT]
        while waiting:
            vertex = waiting.pop()
            first[vertex] = len(order)
            order.append(vertex)
            below = self.children[vertex]
            if len(below) == 1:
                waiting.extend(below.values())
            elif below:
                waiting.extend(below[i] for i in sorted(below, reverse=True))
        last = list(first)
        for vertex in reversed(order):
            above = self.parent[vertex]
            if last[vertex] > last[above]:
                last[above] = last[vertex]
        return first, last

    def ids_to(self, vertex: int, out: npt.NDArray[np.int32]) -> None:
        """Fill `out` with the last `len(out)` ids of the sequence of `vertex`."""
        edges, above, end = self.edge, self.parent, len(out)
        while end > 0:
            edge = edges[vertex]
            start = end - len(edge)
            if start < 0:
                edge, start = edge[-end:], 0
            out[start:end] = edge
            end, vertex = start, above[vertex]
