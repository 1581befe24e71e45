"""Freezing through any source, and work on a snapshot beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ..foreign import accepted, error_text
from ..protocol import TokenCaptureSnapshot, TokenSource

__all__ = ("freeze", "in_thread")

_T = TypeVar("_T")

_OPTIONAL = frozenset(("wait_open_s", "snapshot_id"))


async def freeze(
    source: TokenSource, rollout_id: str, wait_open_s: float, snapshot_id: str = ""
) -> TokenCaptureSnapshot:
    """`source.freeze`, with `wait_open_s` and the incarnation that is meant if it takes them."""
    method: Any = source.freeze
    taken = accepted(method, _OPTIONAL)
    options: dict[str, Any] = {}
    if wait_open_s > 0 and "wait_open_s" in taken:
        options["wait_open_s"] = wait_open_s
    if snapshot_id and "snapshot_id" in taken:
        options["snapshot_id"] = snapshot_id
    snapshot: TokenCaptureSnapshot = await method(rollout_id, **options)
    return snapshot


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
