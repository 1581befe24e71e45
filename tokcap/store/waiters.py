"""Who waits for an operation: a thread, or a future of an event loop."""

from __future__ import annotations

import contextlib
import errno
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .operations import Operation

if TYPE_CHECKING:
    import asyncio

__all__ = ("Mailbox", "ThreadWaiter", "deliver", "in_thread", "start_thread")


_T = TypeVar("_T")


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
        self._loop = weakref.ref(loop)  # or a store would keep every loop that it ever served
        self._finished: deque[Operation] = deque()
        self._called = False

    def belongs_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this is the mailbox of `loop`."""
        return self._loop() is loop

    def post(self, operations: list[Operation]) -> None:
        self._finished.extend(operations)
        if not self._called:
            self._called = True
            loop = self._loop()
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._called = False
        finished = self._finished
        while finished:
            operation = finished.popleft()
            future = operation.waiter[1]
            operation.waiter = None
            if future.done():
                continue  # cancelled: the record is whole all the same
            error = operation.take_error()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(operation.result)


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A thread that never keeps the interpreter alive. Raises `OSError` if there can be no more."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        advice = "can't start a thread: raise the limit (ulimit -u, or pids.max of the container)"
        raise OSError(errno.EAGAIN, advice) from error
    return thread


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run something long and rare in a thread of its own, which nobody else needs."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, failure)

    start_thread(work, "tokcap-task")
    return await future


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
