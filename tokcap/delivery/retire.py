"""The end of a rollout whose consumer has it safely (rule 26)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, overload

from ..protocol import TokenSource

if TYPE_CHECKING:
    from .finalize import Finalized

__all__ = ("retire_exactly", "retire_rollout")

logger = logging.getLogger("tokcap.delivery")


@overload
async def retire_rollout(rollout: Finalized | None, source: TokenSource | None) -> bool: ...
@overload
async def retire_rollout(rollout: str, source: TokenSource | None, *, snapshot_id: str, version: int) -> bool: ...
async def retire_rollout(
    rollout: Finalized | str | None, source: TokenSource | None, *, snapshot_id: str = "", version: int = 0
) -> bool:
    """Remove exactly what was finalized, once it is handed over durably: after an fsync, or when downstream has it.

    Takes what `finalize_rollout` returned, or a rollout id with the `snapshot_id` and `version` that were read. True
    if it is gone, also when repeated. False, with the evidence untouched, if there is nothing to retire (masked or
    failed, no source), if a late mark made a newer version (finalize again), or if the source fails, which is logged.
    Raises `TypeError` for an id without its pair.
    """
    if isinstance(rollout, str):
        if not snapshot_id or version < 1:
            raise TypeError("retire_rollout(rollout_id, source) needs the snapshot_id and the version that were read")
        return source is not None and await retire_exactly(source, rollout, snapshot_id, version)
    if rollout is None or source is None or not rollout.retirable:
        return False
    return await retire_exactly(source, rollout.rollout_id, rollout.snapshot_id, rollout.version)


async def retire_exactly(source: TokenSource, rollout_id: str, snapshot_id: str, version: int) -> bool:
    """Whether the source has retired this pair; its errors are logged and keep the evidence."""
    from ..foreign import uncancelled  # which needs asyncio: not before it is needed

    try:
        return bool(await uncancelled(source.retire(rollout_id, snapshot_id=snapshot_id, version=version)))
    except Exception as error:
        logger.warning(
            "rollout %s, snapshot %s, version %d: not retired, its evidence stays: %r",
            rollout_id,
            snapshot_id,
            version,
            error,
        )
        return False
