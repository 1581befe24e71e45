"""What other threads hand to the committer, and what wakes it.

`put` is called in the main thread, too, where a signal handler may raise, or use the store itself, between any two
calls: it takes no lock, and an item that is in the queue is never left without a reader that is awake.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ("BellInbox", "Inbox")

_T = TypeVar("_T")


class Inbox(Generic[_T]):
    """A queue that is emptied as a whole."""

    def __init__(self) -> None:
        self._items: SimpleQueue[_T] = SimpleQueue()

    def put(self, item: _T) -> None:
        self._items.put(item)

    def take(self) -> list[_T]:
        """Everything that is there; waits if there is nothing."""
        return [self._items.get(), *self.drain()]

    def drain(self) -> list[_T]:
        """Everything that is there, without waiting; each item goes to one of those who ask."""
        items: list[_T] = []
        with contextlib.suppress(Empty):
            while True:
                items.append(self._items.get_nowait())
        return items

    def is_empty(self) -> bool:
        return self._items.empty()

    def close(self) -> None:
        """In a forked child: what it shares with the parent is let go."""


class BellInbox(Inbox[_T]):
    """A queue whose reader is woken through an eventfd, so that the kernel can wake it, too.

    The eventfd is closed with the last reference to the queue, so that nobody who is putting something rings a number
    that has become another file's.
    """

    bell = -1

    def __init__(self) -> None:
        self._waiting: deque[_T] = deque()
        self._asleep = False
        self.bell = os.eventfd(0)
        """Whoever adds to it makes `take` return, with nothing if nothing was put. Raises `OSError` without one."""

    def __del__(self) -> None:
        self.close()

    def put(self, item: _T) -> None:
        try:
            self._waiting.append(item)
            if self._asleep:
                os.eventfd_write(self.bell, 1)
        except BaseException:  # of a signal handler
            os.eventfd_write(self.bell, 1)
            raise

    def take(self) -> list[_T]:
        # Asleep first, then the look: who puts looks the other way round, so that one of the two sees the other.
        self._asleep = True
        if not self._waiting:
            os.read(self.bell, 8)  # `os.eventfd_read` would not go on after a signal that has a handler
        self._asleep = False
        return self.drain()

    def drain(self) -> list[_T]:
        items: list[_T] = []
        with contextlib.suppress(IndexError):
            while True:
                items.append(self._waiting.popleft())
        return items

    def is_empty(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)
