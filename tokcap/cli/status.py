"""Exit statuses, and the error that only the command line knows. The package says what they mean."""

from __future__ import annotations

from ..errors import TokcapError

__all__ = ("INTERRUPTED", "NO", "NOT_THERE", "REFUSED", "USAGE", "NotThereError")

NO, USAGE, NOT_THERE, REFUSED, INTERRUPTED = 1, 2, 3, 4, 130


class NotThereError(TokcapError, LookupError):
    """A rollout or a call that was named isn't in the store."""
