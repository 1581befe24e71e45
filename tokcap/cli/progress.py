"""How far something is, for whoever looks at standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ("BAR_AFTER_S", "progress_bar")

BAR_AFTER_S = 0.5
"""What is done by then needs no bar."""


class progress_bar:  # noqa: N801
    """On a terminal a bar on standard error, if it takes longer than half a second. Gives what is to be told."""

    def __init__(self, title: str) -> None:
        self._title, self._begun = title, time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._show if sys.stderr.isatty() else None

    def _show(self, done: int, of: int) -> None:
        if self._bar is None:
            if done >= of or time.monotonic() - self._begun < BAR_AFTER_S:
                return
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            from .output import console

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=of)
        self._bar.update(self._task, completed=done, total=of)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
