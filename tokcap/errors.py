"""The errors of tokcap: one small tree, grouped by when they occur.

Every error derives from `TokcapError` and also from the builtin that a caller would expect, so that
`except ValueError` or `except OSError` works without knowing tokcap. Messages name the rollout, the call,
the file and the offset where there is one, and what to do.
"""

from __future__ import annotations

__all__ = (
    "BusyError",
    "CaptureError",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "CorruptError",
    "DurabilityError",
    "FrozenError",
    "InvalidEntryError",
    "InvalidIdError",
    "InvalidOptionError",
    "InvalidOutcomeError",
    "MaskFractionError",
    "NewerFormatError",
    "NoSpaceError",
    "ReadOnlyError",
    "RetiredError",
    "StaleAttemptError",
    "StoreNotFoundError",
    "TokcapError",
    "UnsafeDirectoryError",
    "UnsafeFilesystemError",
    "UntranslatableError",
    "UnusableAnswerError",
    "UpstreamError",
)


class TokcapError(Exception):
    """Base of every error that tokcap raises on purpose."""


# ---- what the caller handed in


class InvalidIdError(TokcapError, ValueError):
    """A rollout id or model call id that does not match `[A-Za-z0-9][A-Za-z0-9._-]{0,199}`."""


class InvalidEntryError(TokcapError, ValueError):
    """A `TokenEntry` with a field that can't be a training record; the message names the field and the value."""


class InvalidOutcomeError(TokcapError, ValueError):
    """An outcome that `settle_call` doesn't take, or a delivery state that `note_delivery` doesn't take."""


class InvalidOptionError(TokcapError, ValueError):
    """An option that can't be; the message names it, its value and what is expected."""


class ConfigError(TokcapError, ValueError):
    """A setting of a run that can't be; names its key, its value (never a secret) and what is expected."""


class UnusableAnswerError(TokcapError, ValueError):
    """An answer of a model server from which no exact record can be made; says which ids or log-probs are wrong."""


class UntranslatableError(TokcapError, ValueError):
    """A request in another dialect that can't be asked as a chat request without a loss; says which field, and why."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


# ---- what the state of the rollout forbids


class ConflictError(TokcapError, ValueError):
    """A second, different content for a call that is already stored. The conflict itself is stored durably."""


class FrozenError(TokcapError, RuntimeError):
    """The rollout is frozen (or being frozen): writers are fenced out."""


class RetiredError(TokcapError, RuntimeError):
    """The rollout was consumed and retired."""


class StaleAttemptError(TokcapError, RuntimeError):
    """The call belongs to another incarnation of the rollout: the rollout was reset since the call began."""


class BusyError(TokcapError, TimeoutError):
    """Another process held the rollout for longer than `lock_timeout_s`, or the disk can't follow. Try again later."""


# ---- what the run as a whole must not do


class CaptureError(TokcapError, RuntimeError):
    """A model call can't be captured: its intent can't be written."""


class UpstreamError(TokcapError, ConnectionError):
    """The engine behind the proxy can't be reached, or broke off its answer."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        """Whether it may have got the request, or a part of it. If not, it can't have sampled anything."""


class MaskFractionError(TokcapError, RuntimeError):
    """More rollouts than `max_mask_fraction` delivered no trainable token; counts per reason are in the message."""


# ---- what the storage underneath does


class DurabilityError(TokcapError, OSError):
    """A file-system call failed; the record was not acknowledged. `errno` and `filename` are those of the call."""


class NoSpaceError(DurabilityError):
    """Too little is free on the file system for another call to begin; what is left is for calls that have begun."""


class CorruptError(TokcapError, ValueError):
    """Stored bytes don't match their checksum; names the file and the offset."""

    def __init__(self, message: str, *, path: str = "", offset: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset


class NewerFormatError(TokcapError, RuntimeError):
    """The directory or a record was written by a newer tokcap; upgrade to read it."""


class UnsafeDirectoryError(TokcapError, PermissionError):
    """The store directory is a symlink, belongs to somebody else, or can be written by others."""


class UnsafeFilesystemError(TokcapError, OSError):
    """The file system lacks hard links or working locks, or is known to break them."""


# ---- how the store object was opened


class StoreNotFoundError(TokcapError, FileNotFoundError):
    """A store that was to be opened with `read_only=True` isn't there."""


class ReadOnlyError(TokcapError, PermissionError):
    """A write through a store that was opened with `read_only=True`."""


class ClosedError(TokcapError, RuntimeError):
    """The store or the snapshot was closed."""
