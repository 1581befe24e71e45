"""A rollout in the engine, with the operations that wait for it."""

from __future__ import annotations

from collections import deque

from .operations import Operation
from .rollout import Rollout
from .serving import Commit

__all__ = ("Queued",)


class Queued:
    """The handle of a rollout and its queue. `busy` says that a thread serves it, or that it waits for its fence."""

    __slots__ = ("busy", "commit", "cost", "entered", "operations", "pending", "place", "rollout", "signal_fd")

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.pending: deque[Operation] = deque()
        self.busy = False
        self.cost = 0
        """Bytes of memory that it is counted with."""
        self.entered: list[Operation] | None = None
        """Operations for which the fence has been taken already."""
        self.commit: Commit | None = None
        """Written, and being synced."""
        self.operations: list[Operation] = []
        """Those of `commit`, the refused ones included."""
        self.place = 0
        """In the queue of those who wait for the fence."""
        self.signal_fd = -1
        """While waiting for the fence: the descriptor that shows it to others."""
