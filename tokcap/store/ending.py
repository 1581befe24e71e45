"""How a store object ends: closed once, by whoever comes first, or dropped by everybody."""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from ..errors import TokcapError
from .engine import Engine
from .liveness import Liveness

__all__ = ("End", "let_go", "let_go_of_dropped")

logger = logging.getLogger("tokcap.store")


class End:
    """The end of a store, made once, by whoever comes first."""

    def __init__(self) -> None:
        self._claim, self._over = threading.Lock(), threading.Lock()
        self._over.acquire()
        self._errors: Sequence[BaseException] = ()

    @property
    def is_over(self) -> bool:
        return not self._over.locked()

    def close(self, work: Callable[[], Sequence[BaseException]]) -> None:
        """Do the work, if nobody has begun to."""
        if self._claim.acquire(blocking=False):
            try:
                self._errors = work()
            except BaseException as error:  # for whoever waits
                self._errors = [error]
            finally:
                self._over.release()

    def wait(self) -> Sequence[BaseException]:
        """What failed, for the first one who asks."""
        with self._over:
            errors, self._errors = self._errors, ()
        return errors


def let_go(engine: Engine, liveness: Liveness) -> list[TokcapError]:
    try:
        return engine.close()
    finally:
        liveness.end()


def let_go_of_dropped(engine: Engine, liveness: Liveness) -> None:
    """The store object is gone, and nobody closed it: its threads and descriptors would stay.

    This may be called by a garbage collection, in any thread and whatever it holds: it waits for nothing.
    """
    with contextlib.suppress(RuntimeError):  # no more threads, or the end of the interpreter
        _thread.start_new_thread(_close_dropped, (engine, liveness))


def _close_dropped(engine: Engine, liveness: Liveness) -> None:
    for error in let_go(engine, liveness):
        logger.warning("a store that nobody closed could not be closed: %s", error)
