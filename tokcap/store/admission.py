"""Who may add to what waits for the disk.

Records that are not durable yet are held in memory, so there is a bound on them. A call that only begins is refused
above it (`BusyError`), and likewise on a disk that is nearly full (`NoSpaceError`): it fails before tokens are sampled
for it. What was sampled is never refused for that: a put waits for room, first come, first served, until it has waited
too long. Everything else is small, and always let through.

Callers run in the main thread, too, where a signal handler may use the store between any two calls. CPython looks for
signals after a call and where it jumps back, nowhere else, so what callers do under the lock makes no call: a handler
never runs while the main thread holds it. Whoever waits is let in by the engine's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..errors import BusyError, ClosedError, NoSpaceError
from ..protocol import Pending
from .files import FreeSpace
from .operations import Begin, Operation, RecordOperation
from .waiters import ThreadWaiter

__all__ = ("Admission", "Limits", "floors")

_LOOKS_EVERY_S = 1.0
"""At the free space, unless what was taken in since then may have used it up."""

_MORE_ON_DISK = 32 << 10
"""Bytes that a record may take beside its own: a rollout's first one makes directories, a file, and space ahead."""

_LEAST_PATIENCE_S = 10.0
"""A disk that finishes nothing for this long is in trouble, not busy; likewise an event loop that does not come."""

_LONGEST_S = 1e6
"""More than a lock can be waited for is not asked of it."""

_SHARE = 100
_MOST_BYTES_LEFT = 64 << 20
_MOST_INODES_LEFT = 1000
"""What is left free if nobody says how much: a hundredth of the file system, and no more than this."""


class Limits(msgspec.Struct, frozen=True):
    """The bounds of one store object."""

    max_pending_bytes: int
    max_pending_operations: int
    min_free_bytes: int | None
    min_free_inodes: int | None
    patience_s: float


class _Place:
    """One operation in the line of those that wait for room."""

    __slots__ = ("gone", "loop", "operation", "until", "wake")

    def __init__(
        self, operation: RecordOperation, until: float, wake: Callable[[], None], loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.operation, self.wake, self.loop = operation, wake, loop
        self.until = until
        """How long it is waited for: a loop that ended or stands still never comes."""
        self.gone = False

    def is_over(self, now: float) -> bool:
        """Whether nobody comes for it any more."""
        return self.gone or now > self.until or (self.loop is not None and self.loop.is_closed())


_NOTHING = RecordOperation("")


class Admission:
    """Counts the record operations of one engine from before they are handed over until they are done.

    free: what is free on the file system of the store; raises `OSError`. nudge: has an engine's thread call `advance`.
    """

    def __init__(self, root: str, limits: Limits, free: Callable[[], FreeSpace]) -> None:
        self._root, self._limits, self._free = root, limits, free
        self._patience_s = min(limits.patience_s, _LONGEST_S)
        self.nudge: Callable[[], None] = self.advance
        self._guard = threading.RLock()  # a collection may end a coroutine that waits while the guard is held
        self._most_bytes, self._most_operations = limits.max_pending_bytes, limits.max_pending_operations
        self._bytes = self._operations = 0
        self._taken = 0
        """Bytes that were ever let in, as they may be on the disk."""
        self._line: deque[_Place] = deque()
        self._called: deque[_Place] = deque()
        """Those of event loops that were let in, until they come."""
        self._moved_at = 0.0
        """When something was finished last, or began to wait while nothing else did."""
        self._closed = False
        self._looked_at = -_LOOKS_EVERY_S
        self._taken_at_look = self._spare = 0

    @property
    def pending(self) -> Pending:
        return Pending(self._operations, self._bytes, len(self._line))

    # ---- letting in

    def count(self, operation: RecordOperation) -> None:
        """Let an operation in that is neither refused nor kept waiting."""
        now = time.monotonic()
        with self._guard:
            if not self._operations:
                self._moved_at = now
            self._operations += 1
            self._bytes += operation.nbytes
            self._taken += operation.nbytes + _MORE_ON_DISK
            operation.counted = True

    def begin(self, operation: Begin) -> None:
        """Let a call begin, or raise `NoSpaceError` or `BusyError`: nothing has been generated for it yet."""
        self._check_space(operation)
        limits = self._limits
        where = f"rollout {operation.rollout_id}, call {operation.model_call_id}"
        if self._called or self._line:
            self.nudge()
        if self._bytes >= self._most_bytes or self._operations >= self._most_operations or self._line:
            raise BusyError(
                f"{where}: the disk of {self._root} can't follow: {self._operations:,} records of {self._bytes:,} "
                f"bytes wait for it (max_pending_bytes={limits.max_pending_bytes}); the call was not begun, don't "
                "generate: try again later"
            )
        since = time.monotonic() - self._moved_at
        if self._operations and since > max(limits.patience_s, _LEAST_PATIENCE_S):
            raise BusyError(
                f"{where}: the disk of {self._root} has finished nothing for {since:.0f} s; the call was not begun, "
                "don't generate: try again later, and look at the disk"
            )
        self.count(operation)

    def put(self, operation: RecordOperation) -> None:
        """Let records in, waiting for room if there is none. Raises `BusyError` after `patience_s`."""
        if self._let_in(operation):
            return
        waiter = ThreadWaiter()
        place = _Place(operation, time.monotonic() + self._patience_s, waiter.wake, None)
        try:
            if self._join(place):
                waiter.wait(self._patience_s)
        except BaseException:
            self.leave(operation, place)
            raise
        self._after_waiting(operation, place)

    async def put_soon(self, operation: RecordOperation) -> None:
        """`put`, for an event loop."""
        if self._let_in(operation):
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not future.done():
                future.set_result(None)

        place = _Place(operation, time.monotonic() + self._patience_s, partial(_call_in, loop, end), loop)
        timer = loop.call_later(self._patience_s, end)
        try:
            if self._join(place):
                await future
        except BaseException:
            self.leave(operation, place)
            raise
        finally:
            timer.cancel()
        self._after_waiting(operation, place)

    def _let_in(self, operation: RecordOperation) -> bool:
        """Whether there is room, and nobody who came before waits for it; then it is counted."""
        now = time.monotonic()
        nbytes = operation.nbytes
        with self._guard:
            if not self._operations and not self._line:
                self._moved_at = now
            elif (
                self._line
                or self._bytes + nbytes > self._most_bytes
                or self._operations >= self._most_operations
                or self._closed
            ):
                return False
            self._operations += 1
            self._bytes += nbytes
            self._taken += nbytes + _MORE_ON_DISK
            operation.counted = True
        return True

    def _join(self, place: _Place) -> bool:
        """Join the line; False if the store is closed."""
        with self._guard:
            if self._closed:
                return False
            self._line += (place,)
        self.nudge()  # what it waits for may have been finished meanwhile
        return True

    def _after_waiting(self, operation: RecordOperation, place: _Place) -> None:
        """Go on if it was let in; else raise why not."""
        with self._guard:
            let_in = operation.counted
            place.gone = True
            place.operation = _NOTHING
        if let_in:
            return
        self.nudge()
        if self._closed:
            raise ClosedError(f"the store on {self._root} is closed")
        now = self.pending
        raise BusyError(
            f"rollout {operation.rollout_id}: waited {self._limits.patience_s:g} s for room among the records that "
            f"wait for the disk of {self._root} ({now.operations:,} of {now.bytes:,} bytes, "
            f"max_pending_bytes={self._limits.max_pending_bytes}); nothing was stored: try again, or look at the disk"
        )

    # ---- letting go

    def leave(self, operation: Operation, place: _Place | None = None) -> None:
        """It was not handed over after all, or nobody knows: it is counted no more. Repeatable."""
        with self._guard:
            if place is not None:
                place.gone = True
            if operation.counted:
                operation.counted = False
                self._operations -= 1
                self._bytes -= operation.nbytes
        if self._line:
            self.nudge()

    def release(self, operations: Sequence[Operation]) -> None:
        """These are done. Called by threads of the engine, and by callers that did the work themselves."""
        now = time.monotonic()
        with self._guard:
            for operation in operations:
                if operation.counted:
                    operation.counted = False
                    self._operations -= 1
                    self._bytes -= operation.nbytes
            self._moved_at = now
        if self._line:
            self.advance()

    def advance(self) -> None:
        """Let in those at the head of the line for whom there is room. Never in the main thread."""
        while True:
            now = time.monotonic()
            with self._guard:
                if self._called:
                    self._take_back(now)
                while self._line and self._line[0].is_over(now):
                    self._line.popleft().gone = True
                if not self._line:
                    return
                place = self._line[0]
                nbytes = place.operation.nbytes
                if self._operations and (
                    self._bytes + nbytes > self._most_bytes or self._operations >= self._most_operations
                ):
                    return
                self._line.popleft()
                self.count(place.operation)
                if place.loop is not None:
                    place.until = now + max(self._patience_s, _LEAST_PATIENCE_S)
                    self._called.append(place)
            try:
                place.wake()
            except RuntimeError:  # its loop was closed: nobody comes any more
                self.leave(place.operation, place)

    def _take_back(self, now: float) -> None:
        """The room of those who were called and never come. The guard is held."""
        called, self._called = self._called, deque()
        for place in called:
            if not place.is_over(now):
                self._called.append(place)
                continue
            place.gone = True
            operation = place.operation
            if operation.counted:
                operation.counted = False
                self._operations -= 1
                self._bytes -= operation.nbytes

    def close(self) -> None:
        """Those who still wait get `ClosedError`."""
        with self._guard:
            self._closed = True
            line, self._line = self._line, deque()
        for place in line:
            with contextlib.suppress(RuntimeError):
                place.wake()

    def abandon(self) -> None:
        """In a forked child: coroutines that waited in the parent may still leave, when they are collected."""
        self._guard = threading.RLock()  # another thread of the parent may hold the old one for ever
        self.nudge = _nothing

    # ---- the floor

    def _check_space(self, operation: Begin) -> None:
        """Raises `NoSpaceError` if too little is free. Between two looks, what was let in counts as written."""
        now = time.monotonic()
        if now - self._looked_at < _LOOKS_EVERY_S and self._taken - self._taken_at_look < self._spare:
            return
        # What is not written yet takes of what is free, too.
        taken = self._taken - self._bytes - _MORE_ON_DISK * self._operations
        try:
            free = self._free()
        except OSError:
            return  # what can't be told is found out by the write
        limits = self._limits
        bytes_left, inodes_left = floors(free, limits.min_free_bytes, limits.min_free_inodes)
        self._looked_at, self._taken_at_look, self._spare = now, taken, free.bytes - bytes_left
        if free.all_bytes and free.bytes < bytes_left:
            problem = f"{free.bytes:,} bytes are free, fewer than min_free_bytes ({bytes_left:,})"
        elif free.all_inodes and free.inodes < inodes_left:
            problem = f"{free.inodes:,} inodes are free, fewer than min_free_inodes ({inodes_left:,})"
        else:
            return
        self._looked_at = -_LOOKS_EVERY_S
        raise NoSpaceError(
            errno.ENOSPC,
            f"rollout {operation.rollout_id}, call {operation.model_call_id}: {problem}: what is left is kept for the "
            "records of calls that have begun. The call was not begun, don't generate: free space, or lower the floor",
            self._root,
        )


def _nothing() -> None:
    """Of a child: nobody waits there."""


def floors(free: FreeSpace, min_bytes: int | None = None, min_inodes: int | None = None) -> tuple[int, int]:
    """How many bytes and inodes of a file system are left free: with fewer no call begins."""
    return (
        _floor(min_bytes, free.all_bytes, _MOST_BYTES_LEFT),
        _floor(min_inodes, free.all_inodes, _MOST_INODES_LEFT),
    )


def _floor(given: int | None, whole: int, most: int) -> int:
    return min(whole // _SHARE, most) if given is None else given


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(function)
