"""Who waits for an operation: a thread, or a future of an event loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from .operations import Operation

if TYPE_CHECKING:
    import asyncio

__all__ = ("Mailbox", "ThreadWaiter", "deliver")


class ThreadWaiter:
    """A thread that blocks until its operation is done. A bare lock: the cheapest thing to wait on."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()

    def wait(self) -> None:
        self._done.acquire()

    def wake(self) -> None:
        self._done.release()


class Mailbox:
    """Finished operations of one event loop. Many that finish at about the same time wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._finished: deque[Operation] = deque()
        self._called = False

    def post(self, operations: list[Operation]) -> None:
        self._finished.extend(operations)
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                return  # the loop was closed: nobody waits any more

    def _empty(self) -> None:
        self._called = False
        finished = self._finished
        while finished:
            operation = finished.popleft()
            future = operation.waiter[1]
            if future.done():
                continue  # cancelled: the record is whole all the same
            if operation.error is not None:
                future.set_exception(operation.error)
            else:
                future.set_result(operation.result)


def deliver(operations: list[Operation]) -> None:
    """Wake everybody who waits for these."""
    mailboxes: dict[int, tuple[Mailbox, list[Operation]]] = {}
    for operation in operations:
        waiter = operation.waiter
        if type(waiter) is ThreadWaiter:
            waiter.wake()
        elif waiter is not None:
            mailboxes.setdefault(id(waiter[0]), (waiter[0], []))[1].append(operation)
    for mailbox, finished in mailboxes.values():
        mailbox.post(finished)
