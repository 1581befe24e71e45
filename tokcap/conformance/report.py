"""What a run of the conformance kit found."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import indent

__all__ = ("Report",)


@dataclass
class Report:
    """The names of the checks by result. `str(report)` is meant to be read."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Name of the check -> what was done, expected and seen, and the rule."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of the check -> what it would have needed."""

    @property
    def ok(self) -> bool:
        """True if something was checked and nothing failed. Skipped checks count for nothing."""
        return bool(self.passed) and not self.failed

    def __str__(self) -> str:
        lines = [f"{len(self.passed)} checks passed, {len(self.failed)} failed, {len(self.skipped)} skipped"]
        for name, text in self.failed.items():
            lines += [f"FAILED {name}", indent(text, "    ")]
        lines += [f"skipped {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)
