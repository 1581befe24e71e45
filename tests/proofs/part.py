"""What a part of the proofs is, and how it reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What one run found: figures for the table in the README, and problems, of which there should be none."""

    figures: list[tuple[str, str]] = field(default_factory=list)
    """(what was counted or measured, with its unit if it has one; the figure)"""
    problems: list[str] = field(default_factory=list)
    """What did not hold, each with what is needed to see it again: seed, state, input."""
    left_out: list[str] = field(default_factory=list)
    """What could not run on this machine, and why."""

    def figure(self, what: str, value: object) -> None:
        """Add a row to the table."""
        self.figures.append((what, f"{value:,}" if isinstance(value, int | float) else str(value)))


@dataclass(frozen=True)
class Part:
    """One part of the proofs, as `scripts/prove NAME` runs it."""

    arguments: Callable[[argparse.ArgumentParser], None]
    """Adds its options; their defaults are those of the long run."""
    run: Callable[[argparse.Namespace], Outcome]
