"""Before a rollout is dispatched: nothing of an earlier attempt may be left under its id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidOptionError
from ..ids import check_rollout_id
from ..protocol import TokenSource
from .identity import rollout_id_of

__all__ = ("reset_rollouts",)


async def reset_rollouts(
    records_or_ids: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]], source: TokenSource | None
) -> tuple[str, ...]:
    """Bring rollouts that are about to be dispatched back to absent, in one call; the ids that were reset.

    Records that name no rollout are skipped, ids that come twice are reset once. What stragglers of an earlier attempt
    still write is then refused. With source None (a framework reads by itself) nothing is done.

    Raises `InvalidIdError` before anything is reset, `InvalidOptionError` if the source can't reset, and what its
    `reset` raises: then a rollout must not be dispatched.
    """
    given = [records_or_ids] if isinstance(records_or_ids, (str, Mapping)) else records_or_ids
    named = [rollout_id_of(one) if isinstance(one, Mapping) else check_rollout_id(one) for one in given]
    ids = tuple(dict.fromkeys(name for name in named if name is not None))
    if source is None:
        return ()
    reset = getattr(source, "reset", None)
    if not callable(reset):
        raise InvalidOptionError(
            f"{type(source).__name__} has no reset(*rollout_ids): give every attempt a rollout id of its own, or use a "
            "source that can reset"
        )
    if ids:
        await reset(*ids)
    return ids
