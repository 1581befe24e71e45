"""Freezing through any source, and work on a snapshot beside the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol import TokenCaptureSnapshot, TokenSource

__all__ = ("error_text", "freeze", "in_thread")

_T = TypeVar("_T")


async def freeze(source: TokenSource, rollout_id: str, wait_open_s: float) -> TokenCaptureSnapshot:
    """`source.freeze`, with `wait_open_s` if it takes that."""
    method: Any = source.freeze
    snapshot: TokenCaptureSnapshot
    if wait_open_s > 0 and _takes_wait(getattr(method, "__func__", method)):
        snapshot = await method(rollout_id, wait_open_s=wait_open_s)
    else:
        snapshot = await method(rollout_id)
    return snapshot


@functools.lru_cache(maxsize=32)
def _takes_wait(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a callable that doesn't tell
        return False
    return "wait_open_s" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run `function` beside the loop. Cancelled, it ends first: it may be reading what the caller will close."""
    work = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody asks for it any more
        raise


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
