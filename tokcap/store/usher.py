"""The usher: waits for fences that other processes hold, so that no thread that others need has to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from ..errors import BusyError
from . import fence
from .files import Files
from .lifecycle import Freeze
from .operations import Operation
from .queue import Queued
from .waiters import start_thread

__all__ = ("Usher",)

_POLL_S = 0.0005
"""Between two tries; newcomers stand back meanwhile, so the first try after a release succeeds."""

_PATIENCE_S = 0.1
"""How long somebody who came earlier is let go first; he may have been stopped meanwhile."""

_IDLE_S = 5.0


class Usher:
    """One thread, started when it is needed, for all rollouts that wait.

    `entered` is called with a rollout whose fence was taken, `again` with one whose directory went away, `failed`
    with operations that can't wait any longer.
    """

    def __init__(
        self,
        files: Files,
        lock_timeout_s: float,
        *,
        entered: Callable[[Queued], None],
        again: Callable[[Queued, list[Operation]], None],
        failed: Callable[[Queued, list[Operation], BaseException, bool], None],
    ) -> None:
        self.files, self.lock_timeout_s = files, lock_timeout_s
        self._entered, self._again, self._failed = entered, again, failed
        self._waiting: list[tuple[Queued, list[Operation]]] = []
        self.waiting = 0
        """How many rollouts wait; each of them holds descriptors."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, queued: Queued, operations: list[Operation]) -> None:
        """Wait for the fence of a rollout, for these operations."""
        try:
            with self._changed:
                if self._thread is None:
                    self._thread = start_thread(self._run, "tokcap-usher")
                self._waiting.append((queued, operations))
                self.waiting += 1
                self._changed.notify()
        except OSError as error:
            self._failed(queued, operations, error, True)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._changed.wait(timeout=_IDLE_S)
                if not self._waiting:
                    self._thread = None
                    return
                waiting, self._waiting = self._waiting, []
            still = [(queued, operations) for queued, operations in waiting if not self._try(queued, operations)]
            with self._changed:
                self._waiting = still + self._waiting
                self.waiting -= len(waiting) - len(still)
            if still:
                time.sleep(max(_POLL_S, 5e-6 * len(still)))

    def _try(self, queued: Queued, operations: list[Operation]) -> bool:
        """True if the rollout needs no more waiting."""
        rollout = queued.rollout
        freezing = any(isinstance(operation, Freeze) for operation in operations)
        try:
            if queued.signal_fd < 0:
                self._signal(queued, freezing)
            there = queued.signal_fd >= 0 and fence.still_there(self.files, rollout.fence_fd, rollout.path)
            held = False
            if there and not self._lets_others_go_first(queued):
                held = self.files.try_lock(rollout.fence_fd)
                there = not held or fence.still_there(self.files, rollout.fence_fd, rollout.path)
            if not there:
                self._stop_signalling(queued)
                rollout.drop()
                rollout.close_descriptors()
                self._again(queued, operations)
                return True
            if held and not rollout.is_current():
                rollout.drop()
        except BaseException as error:
            self._stop_signalling(queued)
            # The fence may be held already, and nobody will come to give it back.
            rollout.drop()
            rollout.close_descriptors()
            self._failed(queued, operations, error, True)
            return True
        if held:
            self._stop_signalling(queued)
            queued.entered = operations
            self._entered(queued)
            return True
        return self._give_up(queued, operations)

    def _lets_others_go_first(self, queued: Queued) -> bool:
        """Whether somebody is in front: a freeze always counts, others not for long, for they may be stopped."""
        place = queued.place
        if place and fence.next_place() - place > _PATIENCE_S * 1e6:
            place = fence.FREEZE_PLACE + 1
        return fence.is_anybody_before(queued.signal_fd, place)

    def _give_up(self, queued: Queued, operations: list[Operation]) -> bool:
        """Fail what has waited too long; True if nothing is left to wait for."""
        now = time.monotonic()
        late = [operation for operation in operations if operation.deadline <= now]
        if not late:
            return False
        operations[:] = [operation for operation in operations if operation.deadline > now]
        error = BusyError(
            f"rollout {queued.rollout.rollout_id}: another process held it for more than {self.lock_timeout_s:g} s; "
            f"find it with `lsof {queued.rollout.path}`, or raise lock_timeout_s"
        )
        last = not operations
        if last or any(isinstance(operation, Freeze) for operation in late):
            self._stop_signalling(queued)  # what still waits shows itself anew
        self._failed(queued, late, error, last)
        return last

    def _signal(self, queued: Queued, freezing: bool) -> None:
        fd = fence.open_fence(self.files, queued.rollout.path)
        if fd is None:
            return
        queued.signal_fd = fd
        queued.place = fence.FREEZE_PLACE if freezing else fence.next_place()
        fence.queue_up(fd, queued.place)

    def _stop_signalling(self, queued: Queued) -> None:
        if queued.signal_fd >= 0:
            fd, queued.signal_fd = queued.signal_fd, -1
            with contextlib.suppress(OSError):
                self.files.close(fd)
