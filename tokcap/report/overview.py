"""The rollouts of a store in one table, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..inspection import RolloutRow, statistics
from .texts import LONGEST_CONTENT, bounded

__all__ = ("COLUMNS", "is_suspect", "table_of", "totals_of")

COLUMNS = (
    "id",
    "state",
    "calls",
    "sampled",
    "trained",
    "lost",
    "drifted",
    "bytes",
    "changed",
    "group",
    "why",
    "reasons",
    "page",
)
"""Of each row. why: what is wrong, apart from reasons: damaged, incomplete, unreadable ...; page: where in the page the
rollout's calls are, or None."""


def is_suspect(row: RolloutRow) -> bool:
    """Whether somebody who looks for a fault should look here first."""
    return bool(row.error or row.damage or row.masked or row.incomplete or row.reasons or row.metric("drifted_calls"))


def table_of(rows: Sequence[RolloutRow], page_of: dict[str, int]) -> list[list[Any]]:
    """One list a rollout, in the order of `COLUMNS`."""
    return [
        [
            row.rollout_id,
            row.state,
            row.calls,
            row.sampled,
            row.trained,
            row.metric("lost_calls") or row.outcomes.get("lost", 0),
            row.metric("drifted_calls"),
            row.bytes,
            row.changed_at,
            bounded(row.group, LONGEST_CONTENT),
            _why(row),
            row.reasons,
            page_of.get(row.rollout_id),
        ]
        for row in rows
    ]


def _why(row: RolloutRow) -> list[str]:
    told = {
        "unreadable": bool(row.error),
        "damaged": bool(row.damage),
        "masked": row.masked,
        "incomplete": row.incomplete,
        "torn": bool(row.torn),
        "unfinished": not row.finished and row.state == "frozen",
    }
    return [word for word, holds in told.items() if holds]


def totals_of(rows: Sequence[RolloutRow]) -> dict[str, Any]:
    """Sums over all rows."""
    found = statistics(rows)
    return {
        "rollouts": found.rollouts,
        "states": _pairs(found.states),
        "masked": found.masked,
        "damaged": found.damaged,
        "unreadable": sum(bool(row.error) for row in rows),
        "bytes": found.bytes,
        "calls": found.calls,
        "sampled": found.sampled,
        "trained": found.categories.get("trained", 0),
        "drifted": found.drifted_calls,
        "driftLost": found.drift_lost,
        "categories": _pairs(found.categories),
        "reasons": _pairs(found.reasons),
        "outcomes": _pairs(found.outcomes),
        "versions": _pairs(found.policy_versions),
        "models": _pairs(found.models),
        "logProbs": found.log_probs,
    }


def _pairs(counts: dict[str, int]) -> list[tuple[str, int]]:
    """The larger first; pairs, because a name from a record may be anything."""
    largest = sorted(counts.items(), key=lambda pair: -pair[1])
    return [(bounded(name, LONGEST_CONTENT), count) for name, count in largest if count]
