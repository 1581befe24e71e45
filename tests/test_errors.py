"""The error tree: what an `except` clause of a user who knows only builtins catches."""

from __future__ import annotations

import copy
import errno
import pickle

import pytest

from tokcap import errors
from tokcap.errors import BusyError, CorruptError, DurabilityError, TokcapError

BUILTINS: dict[str, type[Exception]] = {
    "BusyError": TimeoutError,
    "ClosedError": RuntimeError,
    "ConflictError": ValueError,
    "CorruptError": ValueError,
    "DurabilityError": OSError,
    "FrozenError": RuntimeError,
    "InvalidEntryError": ValueError,
    "InvalidIdError": ValueError,
    "InvalidOutcomeError": ValueError,
    "NewerFormatError": RuntimeError,
    "ReadOnlyError": PermissionError,
    "RetiredError": RuntimeError,
    "StaleAttemptError": RuntimeError,
    "UnsafeDirectoryError": PermissionError,
    "UnsafeFilesystemError": OSError,
}

PUBLIC = [name for name in errors.__all__ if name != "TokcapError"]


@pytest.mark.parametrize("name", PUBLIC)
def test_error_is_caught_as_a_tokcap_error_and_as_a_builtin(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, TokcapError)
    expected = BUILTINS.get(name, (ValueError, RuntimeError, OSError))
    assert issubclass(error, expected)


@pytest.mark.parametrize("name", PUBLIC)
def test_error_says_when_it_occurs(name: str) -> None:
    assert getattr(errors, name).__doc__


@pytest.mark.parametrize("name", PUBLIC)
def test_error_keeps_its_message_across_processes(name: str) -> None:
    error = getattr(errors, name)("rollout r-1, call c-1: what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == "rollout r-1, call c-1: what happened"


def test_every_error_of_the_module_is_public() -> None:
    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, TokcapError)}
    assert found == set(errors.__all__)


def test_no_error_is_caught_by_the_clause_of_another() -> None:
    for name in PUBLIC:
        error = getattr(errors, name)
        others = [other for other in PUBLIC if other != name and issubclass(error, getattr(errors, other))]
        # A full disk is a full disk, whether it is found out before the write or by it.
        assert others == (["DurabilityError"] if name == "NoSpaceError" else [])


def test_corrupt_error_keeps_file_and_offset_across_processes_and_copies() -> None:
    error = CorruptError("segment x: checksum differs", path="a/b.seg", offset=4096)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (again.path, again.offset) == ("a/b.seg", 4096)
        assert str(again) == str(error)


def test_durability_error_carries_errno_and_file_of_the_failed_call() -> None:
    error = DurabilityError(errno.ENOSPC, "no space left", "a/b.seg")
    assert (error.errno, error.filename) == (errno.ENOSPC, "a/b.seg")
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.filename) == (errno.ENOSPC, "a/b.seg")


def test_busy_error_is_a_timeout_for_those_who_wait() -> None:
    with pytest.raises(TimeoutError):
        raise BusyError("rollout r-1 was held for 30 s")
