"""What other threads hand to the committer, and what wakes it."""

from __future__ import annotations

import os
import threading
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
        items = [self._items.get()]
        try:
            while True:
                items.append(self._items.get_nowait())
        except Empty:
            return items

    def is_empty(self) -> bool:
        return self._items.empty()

    def close(self) -> None:
        """Nobody takes anything any more."""

    def abandon(self) -> None:
        """`close` in a forked child, where a lock may be held by a thread that is not there."""


class BellInbox(Inbox[_T]):
    """A queue whose reader is woken through an eventfd, so that the kernel can wake it, too."""

    def __init__(self) -> None:
        self._waiting: deque[_T] = deque()
        self._asleep = False
        self._closing = threading.Lock()
        self.bell = os.eventfd(0)
        """Whoever adds to it makes `take` return, with nothing if nothing was put. Raises `OSError` without one."""

    def put(self, item: _T) -> None:
        self._waiting.append(item)
        if self._asleep:
            with self._closing:  # the reader may have taken it meanwhile, and closed: the number is another file's then
                if self.bell >= 0:
                    os.eventfd_write(self.bell, 1)

    def take(self) -> list[_T]:
        # Asleep first, then the look: who puts looks the other way round, so that one of the two sees the other.
        self._asleep = True
        if not self._waiting:
            os.read(self.bell, 8)  # `os.eventfd_read` would not go on after a signal that has a handler
        self._asleep = False
        items = []
        while self._waiting:
            items.append(self._waiting.popleft())
        return items

    def is_empty(self) -> bool:
        return not self._waiting

    def close(self) -> None:
        with self._closing:
            self.abandon()

    def abandon(self) -> None:
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)
