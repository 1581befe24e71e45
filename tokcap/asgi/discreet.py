"""Structs that hold secrets, and don't show them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

__all__ = ("Discreet",)


class Discreet(msgspec.Struct, frozen=True):
    """A struct whose `repr`, as logs and tracebacks show it, has `***` for the values of some of its fields."""

    _hidden: ClassVar[tuple[str, ...]] = ()

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The fields as they are shown."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "***" if value and name in self._hidden else value) for name, value in values]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"
