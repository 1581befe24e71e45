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

_ID_SIZE = 4
"""Bytes of an id as int32."""

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
    """The sequence of a node that no other extends, as the bytes of int32 ids: room to grow, compared by memcmp."""

    __slots__ = ("data", "node")

    def __init__(self, node: int, data: bytearray) -> None:
        self.node, self.data = node, data

    def __len__(self) -> int:
        return len(self.data) // _ID_SIZE

    def shared_with(self, prompt: npt.NDArray[np.int32], prompt_bytes: bytes) -> int:
        """How many leading ids it has in common with a prompt. Nearly always the prompt goes on with it."""
        if prompt_bytes.startswith(self.data):
            return len(self)
        if self.data.startswith(prompt_bytes):
            return len(prompt)
        return common_prefix(prompt, np.frombuffer(self.data, np.int32))


class PrefixSearch:
    """Finds what a new prompt shares with the calls of one segment, by comparing ids."""

    def __init__(self, nodes: list[Node], load: Load) -> None:
        self._nodes = nodes
        self._load = load
        self._leaves: list[_Leaf] = []
        """Most recently used last."""
        self.nbytes = 0
        """Of all leaves."""

    def adopt(self, segment: int) -> None:
        """Prepare for the nodes of `segment` that were read from disk: the last sequences that nobody extends."""
        ends = {i for i, node in enumerate(self._nodes) if node.segment == segment}
        for node in self._nodes:
            if node.parent in ends and node.shared == self._nodes[node.parent].total:
                ends.discard(node.parent)
        kept: list[int] = []
        nbytes = 0
        for index in sorted(ends, reverse=True)[:_MOST_LEAVES]:
            nbytes += _ID_SIZE * self._nodes[index].total
            if len(kept) >= _KEPT_LEAVES and nbytes > _LEAVES_BYTES:
                break
            kept.append(index)
        for index in reversed(kept):
            self._load_leaf(index)

    def forget(self) -> None:
        """Start anew: the next segment refers to nothing before it."""
        self._leaves.clear()
        self.nbytes = 0

    def find(self, prompt: npt.NDArray[np.int32]) -> tuple[int, int]:
        """The node whose sequence shares most with `prompt`, and how many ids; `(NO_PARENT, 0)` if it is little."""
        if not self._leaves:
            return NO_PARENT, 0
        best, most = None, _LEAST_SHARED - 1
        length, prompt_bytes = len(prompt), _bytes_of(prompt)
        for leaf in reversed(self._leaves):
            next_id = slice(most * _ID_SIZE, (most + 1) * _ID_SIZE)
            if length <= most or leaf.data[next_id] != prompt_bytes[next_id]:
                continue  # it can't share more than the best so far
            shared = leaf.shared_with(prompt, prompt_bytes)
            if shared > most:
                best, most = leaf, shared
                if shared == length:
                    break
        if best is None:
            return NO_PARENT, 0
        if best is not self._leaves[-1]:
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
        if self._leaves:
            leaf = self._leaves[-1]
            if leaf.node == node.parent and len(leaf) == node.shared:
                self._extend(leaf, index, prompt[node.shared :], generated)
                return
        data = bytearray(_bytes_of(prompt))
        data += generated.data
        self._keep(_Leaf(index, data))
        self._trim()

    def follow(self, index: int) -> None:
        """Take node `index`, written by another process, into account."""
        node = self._nodes[index]
        for leaf in self._leaves:
            if leaf.node == node.parent and len(leaf) == node.shared:
                stored = self._load(node)
                self._extend(leaf, index, stored.suffix.astype(np.int32), stored.generated.astype(np.int32))
                self._leaves.remove(leaf)
                self._leaves.append(leaf)
                return
        self._load_leaf(index)
        self._trim()

    def _extend(self, leaf: _Leaf, index: int, suffix: npt.NDArray[np.int32], generated: npt.NDArray[np.int32]) -> None:
        leaf.data += suffix.data
        leaf.data += generated.data
        leaf.node = index
        self.nbytes += suffix.nbytes + generated.nbytes

    def _keep(self, leaf: _Leaf) -> None:
        self._leaves.append(leaf)
        self.nbytes += len(leaf.data)

    def _load_leaf(self, index: int) -> None:
        data = bytearray(_ID_SIZE * self._nodes[index].total)
        fill_sequence(self._nodes, index, np.frombuffer(data, np.int32), self._load)
        self._keep(_Leaf(index, data))

    def _trim(self) -> None:
        """Forget the conversations that were used least recently."""
        while len(self._leaves) > _MOST_LEAVES or (len(self._leaves) > _KEPT_LEAVES and self.nbytes > _LEAVES_BYTES):
            self.nbytes -= len(self._leaves.pop(0).data)


def _bytes_of(ids: npt.NDArray[np.int32]) -> bytes:
    """The bytes of int32 ids; those of an entry lie in a bytes object already."""
    base: object = ids.base
    return base if isinstance(base, bytes) and len(base) == ids.nbytes and ids.flags.c_contiguous else ids.tobytes()
