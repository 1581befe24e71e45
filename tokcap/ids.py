"""Identity: what a rollout id and a model call id may look like."""

from __future__ import annotations

import re

from .errors import InvalidIdError

__all__ = ("check_model_call_id", "check_rollout_id")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RULE = "must match [A-Za-z0-9][A-Za-z0-9._-]{0,199} as a whole"


def check_rollout_id(value: object) -> str:
    """Return `value` if it is a valid rollout id, else raise `InvalidIdError`. Ids are never repaired."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return str.__str__(value)
    raise InvalidIdError(f"rollout_id {_short(value)} {_RULE}")


def check_model_call_id(value: object, *, rollout_id: str = "") -> str:
    """Return `value` if it is a valid model call id, else raise `InvalidIdError`."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return str.__str__(value)
    where = f" (rollout {rollout_id})" if rollout_id else ""
    raise InvalidIdError(f"model_call_id {_short(value)}{where} {_RULE}")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a repr may raise anything, that of a huge integer included
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
