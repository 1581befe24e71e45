"""OmegaConf objects, if the program uses them, and the references (`${...}`) in them.

Nothing here imports OmegaConf: an object of it can only come from a program that has done so.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from ..errors import ConfigError

__all__ = ("Reference", "ResolvedText", "is_omegaconf", "item", "keys_of", "look_up", "plain_copy", "reference")

MANDATORY = "???"
"""What OmegaConf, and people, write for a value that must be given; no setting accepts it where it matters."""


class ResolvedText(str):
    """Text that came out of a reference: it is used as it is, and shown as the reference."""

    raw: str

    def __new__(cls, value: str, raw: str) -> ResolvedText:
        text = super().__new__(cls, value)
        text.raw = raw
        return text

    def __repr__(self) -> str:
        return self.raw

    def __reduce__(self) -> tuple[Any, ...]:
        return ResolvedText, (str(self), self.raw)


class Reference(str):
    """The text of a reference, which OmegaConf resolves only when `resolve` is called: the value isn't kept."""

    node: Any
    key: Any

    def __new__(cls, raw: str, node: Any, key: Any) -> Reference:
        text = super().__new__(cls, raw)
        text.node, text.key = node, key
        return text

    def resolve(self, path: str) -> Any:
        """The value now, plain; raises `ConfigError` that names the reference and never a value."""
        return plain_copy(item(self.node, self.key, path, str(self)), path)

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (str(self), self.node, self.key)


def is_omegaconf(value: object) -> bool:
    """Whether it is a container of OmegaConf; without importing it."""
    container = getattr(sys.modules.get("omegaconf"), "Container", None)
    return container is not None and isinstance(value, container)


def keys_of(node: Any) -> list[Any]:
    """The keys of a mapping, or the indexes of a list of OmegaConf."""
    return list(node.keys()) if hasattr(node, "keys") else list(range(len(node)))


def reference(node: Any, key: Any) -> str | None:
    """The text of the reference that stands at a key of an OmegaConf container; None if it isn't one."""
    omegaconf: Any = sys.modules["omegaconf"]
    if not omegaconf.OmegaConf.is_interpolation(node, key):
        return None
    if hasattr(node, "keys"):
        # Of the one key: the others may be large.
        node = omegaconf.OmegaConf.masked_copy(node, key)
    return str(omegaconf.OmegaConf.to_container(node, resolve=False)[key])


def look_up(mapping: Any, key: str, path: str) -> tuple[Any, str | None]:
    """What stands at a key, and the text of the reference that led there; `UNSET` if nothing does.

    Resolves this one reference. Raises `ConfigError` if it can't be.
    """
    if not is_omegaconf(mapping):
        return mapping.get(key, msgspec.UNSET), None
    if key not in mapping.keys():  # noqa: SIM118 - `in` of OmegaConf denies references that can't be resolved
        return msgspec.UNSET, None
    raw = reference(mapping, key)
    return item(mapping, key, path, raw or "text"), raw


def plain_copy(value: Any, path: str) -> Any:
    """Containers of OmegaConf as dicts and lists, with everything in them resolved; others as they are."""
    if not is_omegaconf(value):
        return value
    omegaconf: Any = sys.modules["omegaconf"]
    problem = ""
    try:
        return omegaconf.OmegaConf.to_container(value, resolve=True)
    except Exception as error:
        problem = type(error).__name__
    raise ConfigError(f"{path}: OmegaConf can't resolve what it refers to ({problem})")


def item(node: Any, key: Any, path: str, raw: str) -> Any:
    """What stands at a key of an OmegaConf container, with that one reference resolved; `???` if it must be given.

    raw: the reference, for the message of the `ConfigError` that is raised if it can't be resolved.
    """
    omegaconf: Any = sys.modules["omegaconf"]
    if omegaconf.OmegaConf.is_missing(node, key):
        return MANDATORY
    problem = ""
    try:
        return node[key]
    except Exception as error:
        # Not chained, and without its text: what a resolver says may contain what it has resolved so far.
        problem = type(error).__name__
    raise ConfigError(f"{path} is {raw}, which OmegaConf can't resolve here ({problem})")
