"""The sequences of a frozen rollout, in as few buffers as possible.

A *run* is a chain of nodes each of which extends the one before it completely, such as the turns of a conversation
that never drifted. One buffer holds the sequence of a run's last node; the prompts of all its nodes are read-only
views of it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from .prefix import NO_PARENT, Load, Node, fill_sequence

__all__ = ("Sequences",)

_KEPT_BYTES = 64 << 20
"""Buffers kept for the next question. Under drift every turn starts a run of its own, as long as the context."""


class Sequences:
    """Prompts and sequences of nodes, made when asked."""

    def __init__(self, nodes: list[Node], load: Load) -> None:
        self.nodes = nodes
        self._load = load
        self._run_end = self._find_runs()
        self._kept: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[int, npt.NDArray[np.int32]] = weakref.WeakValueDictionary()

    def _find_runs(self) -> list[int]:
        """For each node the last node of its run."""
        nodes = self.nodes
        continued: dict[int, int] = {}
        for index, node in enumerate(nodes):
            if node.parent != NO_PARENT and node.shared == nodes[node.parent].total:
                continued.setdefault(node.parent, index)
        ends = list(range(len(nodes)))
        for index in range(len(nodes) - 1, -1, -1):
            if index in continued:
                ends[index] = ends[continued[index]]
        return ends

    def sequence(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [P + G] of a node, read-only: its prompt and what was sampled after it."""
        return self._buffer(self._run_end[index])[: self.nodes[index].total]

    def prompt(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [P] of a node, read-only."""
        return self._buffer(self._run_end[index])[: self.nodes[index].prompt]

    def _buffer(self, end: int) -> npt.NDArray[np.int32]:
        buffer = self._kept.get(end)
        if buffer is None:
            buffer = self._alive.get(end)
            if buffer is None:
                buffer = np.empty(self.nodes[end].total, np.int32)
                fill_sequence(self.nodes, end, buffer, self._load)
                buffer.flags.writeable = False
                self._alive[end] = buffer
            self._kept[end] = buffer
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(end)
        return buffer
