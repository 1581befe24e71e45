"""What every candidate can do, so that the same clients drive all of them."""

from __future__ import annotations

import abc
import importlib
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ..places import UnavailableError
from ..workload import Call

__all__ = ("Candidate", "Item", "WithIntents", "peer_module")

Item = TypeVar("Item")


class Candidate(abc.ABC, Generic[Item]):
    """A store that is open in a directory; several processes may have one open in the same directory.

    Making one is not measured.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    """The distributions that it measures, for the head of the report."""
    intents: ClassVar[bool] = False
    """Whether it can be told of a call before the engine starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def require(cls) -> None:
        """Raises `UnavailableError` if what it needs is not installed."""

    @abc.abstractmethod
    def prepared(self, conversation: list[Call]) -> list[Item]:
        """What a client has in hand of each call before its put; not measured."""

    @abc.abstractmethod
    async def put(self, item: Item) -> None:
        """Store one call; it is durable when this returns."""

    def close(self) -> None:
        """Let go of what is open; not measured."""


class WithIntents(Candidate[Item]):
    """A store that is told of a call before the engine starts."""

    intents = True

    @abc.abstractmethod
    async def begin(self, item: Item) -> None:
        """Note that the call is about to be made; the note is durable when this returns."""


def peer_module(name: str) -> Any:
    """A module that the core of tokcap does not need. Raises `UnavailableError`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed (pip install '.[bench]'): {error}") from None
