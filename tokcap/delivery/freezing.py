"""Freezing through any source, and work on a snapshot beside the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..protocol import TokenCaptureSnapshot, TokenSource

__all__ = ("error_text", "freeze", "in_thread", "uncancelled")

_T = TypeVar("_T")


async def freeze(
    source: TokenSource, rollout_id: str, wait_open_s: float, snapshot_id: str = ""
) -> TokenCaptureSnapshot:
    """`source.freeze`, with `wait_open_s` and the incarnation that is meant if it takes them."""
    method: Any = source.freeze
    taken = _taken(getattr(method, "__func__", method))
    options: dict[str, Any] = {}
    if wait_open_s > 0 and "wait_open_s" in taken:
        options["wait_open_s"] = wait_open_s
    if snapshot_id and "snapshot_id" in taken:
        options["snapshot_id"] = snapshot_id
    snapshot: TokenCaptureSnapshot = await method(rollout_id, **options)
    return snapshot


_OPTIONS = frozenset(("wait_open_s", "snapshot_id"))


@functools.lru_cache(maxsize=32)
def _taken(function: Callable[..., Any]) -> frozenset[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a callable that doesn't tell
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return _OPTIONS
    return _OPTIONS.intersection(parameters)


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run `function` beside the loop. Cancelled, it ends first: it may be reading what the caller will close.

    What it raises and is no `Exception`, or a `StopIteration`, comes out as `RuntimeError`: no future carries a
    `StopIteration`, so that whoever waits would wait for ever; the others would end the loop or look like our own end.
    """
    work = asyncio.ensure_future(asyncio.to_thread(_carried, function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody asks for it any more
        raise


def _carried(function: Callable[[], _T]) -> _T:
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError(error_text(error)) from error
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(error_text(error)) from error


async def uncancelled(work: Awaitable[_T]) -> _T:
    """`work` of somebody else. A `CancelledError` of its own, while nobody cancels us, comes out as `RuntimeError`."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(error_text(error)) from error


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
