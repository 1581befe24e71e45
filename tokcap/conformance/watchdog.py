"""Breaks into a store that blocks the event loop, so that a deadlock fails one check instead of the whole run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ("BlockedLoopError", "interrupting_a_blocked_loop")


_TURN_S = 0.1


class BlockedLoopError(BaseException):
    """Raised inside whatever blocks the loop. Not an `Exception`, so that a retry loop doesn't swallow it."""


@contextmanager
def interrupting_a_blocked_loop(after_s: float, *, every_s: float = 1.0) -> Iterator[None]:
    """Raise `BlockedLoopError` in the running code if, `after_s` after the start, the event loop doesn't turn.

    It is tried again every `every_s`. Works in the main thread, on systems with interval timers, if nobody else uses
    SIGALRM; elsewhere a blocked loop stays blocked.
    """
    if not _is_free():
        yield
        return
    loop = asyncio.get_running_loop()
    last_turn = loop.time()
    handle: asyncio.TimerHandle | None = None

    def turn() -> None:
        nonlocal last_turn, handle
        last_turn = loop.time()
        handle = loop.call_later(_TURN_S, turn)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        blocked_s = loop.time() - last_turn
        if blocked_s > 4 * _TURN_S:
            raise BlockedLoopError(f"the event loop has been blocked for {blocked_s:.1f} s")

    turn()
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if handle is not None:
            handle.cancel()


def _is_free() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    )
