"""Calling sinks and sources that others wrote: which options they take, and a cancellation that nobody asked for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

__all__ = ("UnaskedCancellationError", "accepted", "error_text", "uncancelled")

_T = TypeVar("_T")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_known: WeakKeyDictionary[Any, frozenset[str] | None] = WeakKeyDictionary()
"""Function -> the names of its parameters, None for any name: signatures are slow to read."""


class UnaskedCancellationError(RuntimeError):
    """A `CancelledError` that a sink or source raised of its own."""


async def uncancelled(work: Awaitable[_T]) -> _T:
    """Await `work`; a cancellation that is not one of this task is a failure like any other, and so is what extensions
    in other languages raise beside `Exception`."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnaskedCancellationError(f"{error_text(error)}, and nobody had cancelled it") from error
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(error_text(error)) from error


def accepted(method: Callable[..., Any], optional: frozenset[str]) -> frozenset[str]:
    """Which of the optional keyword arguments `method` takes; none if it doesn't tell."""
    function = getattr(method, "__func__", method)
    try:
        names = _known[function]
    except (KeyError, TypeError):  # TypeError: some callables can't be keys
        names = _names(method)
        with suppress(TypeError):
            _known[function] = names
    return optional if names is None else optional & names


def _names(method: Callable[..., Any]) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (ValueError, TypeError):  # built in, without a signature
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)


def error_text(error: BaseException) -> str:
    """Type and message."""
    return f"{type(error).__name__}: {error}"
