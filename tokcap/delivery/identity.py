"""Which rollout a finished record belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidIdError
from ..ids import _short, check_rollout_id

__all__ = ("rollout_id_of",)

_TOO_LARGE = 10**200
"""Of an index: the id would be too long. Much larger ones can't even be written in decimal."""

_EXPLICIT = ("rollout_id", "_ng_rollout_id")


def rollout_id_of(record: Mapping[str, Any]) -> str | None:
    """The rollout id that a record names, as the launcher put it into the capture URL; None if it names none.

    `rollout_id` or `_ng_rollout_id`, else "<_ng_task_index>-<_ng_rollout_index>". An `_ng_attempt_index` above 0 adds
    "-a<n>" to either, as NeMo Gym does. Raises `InvalidIdError` for an id or an index that can't be, and if both
    explicit keys are there and differ. Ids are never repaired.
    """
    given = {key: record[key] for key in _EXPLICIT if record.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, str):
            raise InvalidIdError(f"{key} is {_short(value)}, expected a string")
    if len(set(given.values())) > 1:
        raise InvalidIdError(
            f"the record names two rollouts: {' and '.join(f'{key} {_short(value)}' for key, value in given.items())}"
        )
    rollout_id: str
    if given:
        rollout_id = next(iter(given.values()))
    else:
        task, rollout = record.get("_ng_task_index"), record.get("_ng_rollout_index")
        if task is None or rollout is None:
            return None
        rollout_id = f"{_index('_ng_task_index', task)}-{_index('_ng_rollout_index', rollout)}"
    attempt = record.get("_ng_attempt_index")
    if attempt is not None:
        number = _index("_ng_attempt_index", attempt)
        if number > 0:
            rollout_id = f"{rollout_id}-a{number}"
    return check_rollout_id(rollout_id)


def _index(key: str, value: Any) -> int:
    """A count from 0, also as tables and query strings write it: 3.0, "3"."""
    whole: int | None = None
    with contextlib.suppress(Exception):  # too many digits for `int`, an array that is no index
        if isinstance(value, str):
            whole = int(value) if value.isascii() and value.isdecimal() else None
        elif isinstance(value, float):
            whole = int(value) if value.is_integer() else None
        elif not isinstance(value, bool) and hasattr(value, "__index__"):
            whole = value.__index__()
    if whole is None or not 0 <= whole < _TOO_LARGE:
        raise InvalidIdError(f"{key} is {_short(value)}, expected a whole number from 0")
    return whole
