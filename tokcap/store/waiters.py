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

    def wait(self, timeout_s: float = -1) -> bool:
        """Whether it is done; False after `timeout_s`."""
        return self._done.acquire(timeout=timeout_s)

    def wake(self) -> None:
        self._done.release()


class Mailbox:
    """Finished operations of one event loop. Many that finish at about the same time wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # or a store would keep every loop that it ever served
        self._finished: deque[Operation] = deque()
        self._called = False
        self._looking = False

    def belongs_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this is the mailbox of `loop`."""
        return self._loop() is loop

    def look_again(self) -> None:
        """In the thread of the loop: a signal handler that raised may have cost the call that was to come."""
        if self._finished and not self._looking:
            loop = self._loop()
            if loop is not None:
                loop.call_soon(self._empty)
                self._looking = True

    def post(self, operations: list[Operation]) -> None:
        self._finished.extend(operations)
        if not self._called:
            self._called = True
            loop = self._loop()
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                    loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._called = self._looking = False
        finished = self._finished
        try:
            while finished:
                # Taken off only when its future is done: a signal handler may raise in between.
                operation = finished[0]
                future = operation.waiter[1]
                if not future.done():  # else cancelled: the record is whole all the same
                    if operation.error is not None:
                        future.set_exception(operation.error)
                    else:
                        future.set_result(operation.result)
                finished.popleft()
                operation.waiter = operation.error = None
        except BaseException:
            self.look_again()
            raise


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
