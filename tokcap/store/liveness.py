"""Who is alive: a writer that begins calls holds a lock on a file of its own, until the kernel drops it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading

from .files import Files, durability_error
from .layout import Layout

__all__ = ("Liveness",)


class Liveness:
    """The liveness file of one store object. It says nothing that would have to survive a power cut: nobody does."""

    def __init__(self, files: Files, layout: Layout) -> None:
        self._files, self._layout = files, layout
        self._guard = threading.RLock()  # a signal handler may begin a call, too
        self._name = ""
        self._fd = -1
        self._ended = False

    def name(self, rollout_id: str) -> str:
        """The identity of this writer, shown to be alive from now on; it is needed for a call of `rollout_id`."""
        if not self._name:
            with self._guard:
                if not self._name:
                    self._begin(rollout_id)
        return self._name

    def _begin(self, rollout_id: str) -> None:
        while True:
            name = os.urandom(8).hex()
            path = f"{self._layout.writers}/{name}"
            try:
                if stat.S_ISLNK(self._files.stat(self._layout.writers).st_mode):
                    raise OSError(errno.ELOOP, "it is a symbolic link, which leads out of the store", path)
                fd = self._files.create(path)
                try:
                    # A sweep may have come between and taken the file for a dead writer's.
                    shown = self._files.try_lock(fd) and self._files.fstat(fd).st_nlink > 0
                except BaseException:
                    self._files.close(fd)
                    raise
                if not shown:
                    self._files.close(fd)
                    continue
            except OSError as error:
                raise durability_error(
                    error, f"rollout {rollout_id}: can't show that this writer is alive", path
                ) from error
            if self._name or self._ended:  # a signal handler came in between
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
                    self._files.close(fd)
                return
            self._fd, self._name = fd, name
            return

    def is_alive(self, writer: str) -> bool:
        """Whether the process behind an intent still runs."""
        if writer == self._name:
            return True
        try:
            fd = self._files.open(f"{self._layout.writers}/{writer}")
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nobody can tell at the moment
        try:
            return not self._files.try_lock(fd)
        finally:
            self._files.close(fd)

    def end(self) -> None:
        """This writer begins no more calls."""
        self._ended = True
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._files.unlink(f"{self._layout.writers}/{self._name}")
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # nothing was written to it
                self._files.close(fd)

    def abandon(self) -> None:
        """In a forked child: the parent lives on."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
