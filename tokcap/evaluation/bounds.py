"""How much of what others wrote may go into a summary: names, cut short, and not too many of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

__all__ = ("LOOKED_AT", "NAMES_KEPT", "NAME_LENGTH", "ROLES_KEPT", "bounded_names", "name_of", "number_of", "tally")

NAME_LENGTH = 200
"""Characters that are kept of a name: of a model, a tool, a role, a path, an id, a kind of error."""

NAMES_KEPT = 128
"""Names that are kept of a list, the first ones; the others are counted."""

ROLES_KEPT = 16
"""Different roles that are told apart."""

LOOKED_AT = 10_000
"""Items of a list that are looked at; the others are counted."""

UNNAMED = "unnamed"
"""What stands for something that has no name, so that names keep their places."""


def name_of(*candidates: object) -> str:
    """The first that is a string and not empty, cut to `NAME_LENGTH` characters; empty if none is."""
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return str.__str__(candidate[:NAME_LENGTH])
    return ""


def number_of(value: object) -> bool | int | float | None:
    """`value` if it is a truth value, a finite number, and no integer of more than 64 bits; else None."""
    if type(value) is bool:
        return value
    if type(value) is int:
        return value if -(2**63) <= value < 2**63 else None
    return value if type(value) is float and math.isfinite(value) else None


def bounded_names(names: Iterable[str]) -> tuple[tuple[str, ...], int]:
    """The first `NAMES_KEPT` of the names, and how many there are of the first `LOOKED_AT` items."""
    kept: list[str] = []
    total = 0
    for name in islice(names, LOOKED_AT):
        total += 1
        if len(kept) < NAMES_KEPT:
            kept.append(name or UNNAMED)
    return tuple(kept), total


def tally(names: Iterable[str]) -> dict[str, int]:
    """How often each name comes, in order of appearance: `ROLES_KEPT` different ones of the first `LOOKED_AT`."""
    counts: dict[str, int] = {}
    for whole in islice(names, LOOKED_AT):
        name = whole[:NAME_LENGTH] or UNNAMED
        if name in counts:
            counts[name] += 1
        elif len(counts) < ROLES_KEPT:
            counts[name] = 1
    return counts
