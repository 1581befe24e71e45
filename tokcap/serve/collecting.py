"""How often a server process looks for reference cycles."""

from __future__ import annotations

import gc

__all__ = ("collect_rarely",)

_FULL_AFTER = 100
"""Collections of the younger objects before one of all; Python's own number is 10."""


def collect_rarely() -> None:
    """Once a process has started: leave what is there for good out of collections, and look at everything seldom.

    A full collection stops all calls, for the longer the more of them are open: 40 to 70 ms with 256, and a third of
    the CPU of whole answers then. It would find nothing, because no call leaves a cycle behind. What others leave is
    found all the same, after ten times as many objects.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_AFTER)
