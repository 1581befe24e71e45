"""Shared prefixes: what a prompt has in common with earlier calls, and how it is put together again.

A *node* is one stored entry; its *sequence* is its prompt followed by its sampled ids. A node keeps only the part of
its prompt behind what it shares with another node's sequence, so the nodes of a rollout form a forest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .records import StoredEntry

__all__ = ("NO_PARENT", "Node", "PrefixSearch", "common_prefix", "fill_sequence")

NO_PARENT = -1

_HEAD = 256
"""Elements that are compared before the rest is looked at."""

_LEAST_SHARED = 16
"""Ids; sharing less saves nothing and would tie the fate of one record to another."""

_KEPT_LEAVES = 16
"""Conversations of one rollout that a new prompt is compared with, however long they are: sub-agents, samples, the
trunk before a drift."""

_MOST_LEAVES = 512
_LEAVES_BYTES = 4 << 20
"""As many as this are kept if all of them together are no larger than that."""


class Node(msgspec.Struct, gc=False):
    """One stored entry in the forest. Lengths in ids, places in bytes of its segment."""

    segment: int
    """Number of the segment that holds it."""
    sequence: int
    """Of its frame."""
    body_start: int
    body_length: int
    body_crc: int
    parent: int
    """Index of the node that its prompt extends, or NO_PARENT."""
    shared: int
    prompt: int
    total: int
    """Length of prompt and sampled ids together."""


Load = Callable[[Node], StoredEntry]


def fill_sequence(nodes: Sequence[Node], index: int, out: npt.NDArray[np.int32], load: Load) -> None:
    """Fill `out` with the first `len(out)` ids of a node's sequence. No recursion, each id copied once."""
    end = len(out)
    while end > 0:
        node = nodes[index]
        if end > node.shared:
            stored = load(node)
            if end > node.prompt:
                out[node.prompt : end] = stored.generated[: end - node.prompt]
                end = node.prompt
            out[node.shared : end] = stored.suffix[: end - node.shared]
            end = node.shared
        index = node.parent


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many elements are equal from the start. A mismatch near the start is found without reading the rest."""
    length = min(len(one), len(other))
    start = 0
    for end in (min(length, _HEAD), length):
        if end > start:
            differs = one[start:end] != other[start:end]
            position = int(differs.argmax())
            if differs[position]:
                return start + position
            start = end
    return length


class _Leaf:
    """The sequence of a node that no other extends, in a buffer with room to grow."""

    __slots__ = ("buffer", "length", "node")

    def __init__(self, node: int, buffer: npt.NDArray[np.int32], length: int) -> None:
        self.node, self.buffer, self.length = node, buffer, length

    def append(self, *parts: npt.NDArray[Any]) -> None:
        need = self.length + sum(len(part) for part in parts)
        if need > len(self.buffer):
            grown = np.empty(need + need // 4 + 256, np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        for part in parts:
            self.buffer[self.length : self.length + len(part)] = part
            self.length += len(part)


class PrefixSearch:
    """Finds what a new prompt shares with the calls of one segment, by comparing ids."""

    def __init__(self, nodes: list[Node], load: Load) -> None:
        self._nodes = nodes
        self._load = load
        self._leaves: list[_Leaf] = []
        """Most recently used last."""

    @property
    def nbytes(self) -> int:
        return sum(leaf.buffer.nbytes for leaf in self._leaves)

    def adopt(self, segment: int) -> None:
        """Prepare for the nodes of `segment` that were read from disk: the last sequences that nobody extends."""
        ends = {i for i, node in enumerate(self._nodes) if node.segment == segment}
        for node in self._nodes:
            if node.parent in ends and node.shared == self._nodes[node.parent].total:
                ends.discard(node.parent)
        kept: list[int] = []
        nbytes = 0
        for index in sorted(ends, reverse=True)[:_MOST_LEAVES]:
            nbytes += 4 * self._nodes[index].total
            if len(kept) >= _KEPT_LEAVES and nbytes > _LEAVES_BYTES:
                break
            kept.append(index)
        for index in reversed(kept):
            self._load_leaf(index)

    def forget(self) -> None:
        """Start anew: the next segment refers to nothing before it."""
        self._leaves.clear()

    def find(self, prompt: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The node whose sequence shares most with `prompt`, and how many ids; `(NO_PARENT, 0)` if it is little."""
        best, most = None, _LEAST_SHARED - 1
        for leaf in reversed(self._leaves):
            if leaf.length <= most or len(prompt) <= most or leaf.buffer[most] != prompt[most]:
                continue  # it can't share more than the best so far
            shared = common_prefix(prompt, leaf.buffer[: leaf.length])
            if shared > most:
                best, most = leaf, shared
                if shared == len(prompt):
                    break
        if best is None:
            return NO_PARENT, 0
        self._leaves.remove(best)
        self._leaves.append(best)
        # The node that holds the last shared id: nothing that this prompt doesn't run through can cost it.
        index = best.node
        while self._nodes[index].shared >= most:
            index = self._nodes[index].parent
        return index, most

    def add(self, index: int, prompt: npt.NDArray[np.int32], generated: npt.NDArray[np.int32]) -> None:
        """Take node `index`, just written, into account; `find` gave its parent."""
        node = self._nodes[index]
        suffix = prompt[node.shared :]
        for leaf in self._leaves[-1:]:
            if leaf.node == node.parent and leaf.length == node.shared:
                leaf.append(suffix, generated)
                leaf.node = index
                return
        fresh = _Leaf(index, np.empty(node.total + node.total // 4 + 256, np.int32), 0)
        fresh.append(prompt, generated)
        self._leaves.append(fresh)
        self._trim()

    def follow(self, index: int) -> None:
        """Take node `index`, written by another process, into account."""
        node = self._nodes[index]
        for leaf in self._leaves:
            if leaf.node == node.parent and leaf.length == node.shared:
                stored = self._load(node)
                leaf.append(stored.suffix, stored.generated)
                leaf.node = index
                self._leaves.remove(leaf)
                self._leaves.append(leaf)
                return
        self._load_leaf(index)
        self._trim()

    def _load_leaf(self, index: int) -> None:
        buffer = np.empty(self._nodes[index].total, np.int32)
        fill_sequence(self._nodes, index, buffer, self._load)
        self._leaves.append(_Leaf(index, buffer, len(buffer)))

    def _trim(self) -> None:
        """Forget the conversations that were used least recently."""
        del self._leaves[:-_MOST_LEAVES]
        excess = self.nbytes - _LEAVES_BYTES if len(self._leaves) > _KEPT_LEAVES else 0
        while excess > 0 and len(self._leaves) > _KEPT_LEAVES:
            excess -= self._leaves.pop(0).buffer.nbytes
