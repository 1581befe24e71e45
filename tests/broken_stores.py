"""What the broken stores share. Each has one bug, of the kind that real stores have had; the kit must find every one.

They stand in `broken_stores_*.py` by theme, together with the checks that are aimed at them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokcap import TokenEntry

from .memory_store import MemoryStore


class Case(NamedTuple):
    """A broken store, the checks that are aimed at it, and a word that one of the failures must say."""

    store: type[MemoryStore]
    aimed: set[str]
    says: str
    exact: bool = False
    """True: of all checks (but the slow ones), these and no others fail."""


def changed(entry: TokenEntry, **fields: Any) -> TokenEntry:
    """The entry with other values in some fields."""
    return TokenEntry(**{**{name: getattr(entry, name) for name in TokenEntry.__struct_fields__}, **fields})


class ChangesEntries(MemoryStore):
    """Base of the stores whose codec changes what it stores."""

    def change(self, entry: TokenEntry) -> TokenEntry:
        raise NotImplementedError

    def _put(self, group: list[TokenEntry]) -> None:
        super()._put([self.change(entry) for entry in group])
