"""Freezes of several rollouts at once: each step is done for all of them, and one sync of the journal serves them all.

Measured, 64 rollouts on a journalled ext4: 0.6 to 0.8 ms each, and 0.8 to 1.5 in a thread of its own each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .files import Files
from .lifecycle import Freeze
from .operations import Operation
from .publication import Publication
from .queue import Queued
from .serving import Server, fail
from .snapshot import Snapshot
from .syncs import KernelSyncs, Sync

__all__ = ("Together",)


class _Begun(NamedTuple):
    queued: Queued
    freeze: Freeze
    publication: Publication
    snapshot: Snapshot


class Together:
    """Freezes rollouts, up to `most` at the same time. Used by one thread at a time.

    `elsewhere` gets those that more than a freeze is asked of, with their fence held; `wait` those whose fence somebody
    else holds; `leave` those that are done. What fails for one rollout costs the others nothing.
    """

    def __init__(
        self,
        server: Server,
        kernel_syncs: int,
        *,
        most: int,
        pending: Callable[[Queued], list[Operation]],
        elsewhere: Callable[[Queued, list[Operation]], None],
        wait: Callable[[Queued, list[Operation]], None],
        leave: Callable[[Queued, list[Operation]], None],
        deliver: Callable[[list[Operation]], None],
    ) -> None:
        self._server, self._files = server, server.files
        self._most = most
        self._pending, self._elsewhere, self._wait = pending, elsewhere, wait
        self._leave, self._deliver = leave, deliver
        self._syncs = _Syncs(server, self._files, kernel_syncs)

    def close(self) -> None:
        """Let go of the kernel's resources."""
        self._syncs.close()

    def abandon(self) -> None:
        """In a forked child, where they are the parent's."""
        self._syncs.abandon()

    def freeze(self, rollouts: Sequence[Queued]) -> None:
        """Freeze rollouts each of which waits for that, and wake those who wait."""
        for first in range(0, len(rollouts), self._most):
            self._freeze(rollouts[first : first + self._most])

    def _freeze(self, rollouts: Sequence[Queued]) -> None:
        begun = [one for one in map(self._begin, rollouts) if one is not None]
        try:
            self._step(begun, Publication.rename)
            self._step(begun, Publication.close)
        except BaseException as error:  # whatever it is, nobody waits for ever
            while begun:
                self._undo(begun.pop(), error)
        for one in begun:
            one.freeze.result = one.snapshot
            self._done(one.queued, one.freeze)

    def _begin(self, queued: Queued) -> _Begun | None:
        """Everything up to the first sync; None if there is nothing more to do for this rollout here."""
        rollout = queued.rollout
        operations = self._pending(queued)
        try:
            held = self._server.enter(rollout, create=True)
        except BaseException as error:
            fail(operations, error, rollout.path)
            self._leave(queued, operations)
            self._deliver(operations)
            return None
        if held == "busy":
            self._wait(queued, operations)
            return None
        freeze = operations[0]
        if len(operations) > 1 or not isinstance(freeze, Freeze):
            queued.entered = operations
            self._elsewhere(queued, operations)
            return None
        try:
            begun = freeze.begin(rollout)
            if not isinstance(begun, Snapshot):
                return _Begun(queued, freeze, *begun)
            freeze.result = begun
        except BaseException as error:
            self._failed(queued, freeze, error)
        else:
            self._done(queued, freeze)
        return None

    def _step(self, begun: list[_Begun], then: Callable[[Publication], None]) -> None:
        """Sync what all of them have to, then go on; those stay that nothing failed for."""
        errors = self._syncs.sync([(one, one.publication.unsynced) for one in begun])
        for one in tuple(begun):
            error: BaseException | None = errors.get(id(one))
            if error is None:
                try:
                    then(one.publication)
                except BaseException as failure:
                    error = failure
            if error is not None:
                begun.remove(one)
                self._undo(one, error)

    def _undo(self, one: _Begun, error: BaseException) -> None:
        one.publication.undo()
        one.snapshot.close()
        self._failed(one.queued, one.freeze, one.freeze.not_published(one.queued.rollout, error))

    def _failed(self, queued: Queued, freeze: Freeze, error: BaseException) -> None:
        queued.rollout.drop()
        fail([freeze], error, queued.rollout.path)
        self._done(queued, freeze)

    def _done(self, queued: Queued, freeze: Freeze) -> None:
        self._server.leave(queued.rollout)
        self._leave(queued, [freeze])
        self._deliver([freeze])


class _Syncs:
    """Many syncs at once: in the kernel, if it does that, else one after another."""

    def __init__(self, server: Server, files: Files, kernel_syncs: int) -> None:
        self._server, self._files = server, files
        self._most = kernel_syncs
        self._bell = -1
        self._kernel: KernelSyncs | None = None

    def _open(self) -> KernelSyncs | None:
        if self._kernel is None and self._most:
            try:
                self._bell = os.eventfd(0)
            except OSError:
                return None  # no descriptor left for it: maybe next time
            self._kernel = self._files.kernel_syncs(self._most, self._bell)
            if self._kernel is None:
                self._most = 0
                self._close_bell()
        return self._kernel

    def sync(self, owners: list[tuple[_Begun, list[tuple[int, bool]]]]) -> dict[int, OSError]:
        """Sync descriptors of several owners and wait for all: the first error of each owner, by its identity."""
        errors: dict[int, OSError] = {}

        def done(owner: int, error: OSError | None) -> None:
            if error is not None:
                errors.setdefault(owner, error)

        waiting = [Sync(fd, whole, id(owner)) for owner, fds in owners for fd, whole in fds]
        kernel = self._open() if len(waiting) > 1 else None
        while waiting or (kernel is not None and kernel.in_flight):
            if kernel is not None:
                del waiting[: kernel.start(waiting)]
                if kernel.in_flight:
                    os.read(self._bell, 8)  # `os.eventfd_read` would not go on after a signal that has a handler
                    for owner, error in kernel.finished():
                        done(owner, error)
                    continue
            sync = waiting.pop(0)
            done(sync.ticket, self._server.sync(sync))
        return errors

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
        self._close_bell()

    def abandon(self) -> None:
        self._kernel = None
        self._close_bell()

    def _close_bell(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
