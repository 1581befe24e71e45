"""The rollouts of a store in one table, and what they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..inspection import LOG_PROB_EDGES, RolloutRow
from ..trajectory.verdicts import CATEGORIES
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
    states = Counter(row.state for row in rows)
    reasons = Counter(reason for row in rows for reason in row.reasons)
    outcomes: Counter[str] = Counter()
    versions: Counter[str] = Counter()
    models = Counter(model for row in rows for model in row.models)
    log_probs = np.zeros(len(LOG_PROB_EDGES), np.int64)
    for row in rows:
        outcomes.update(row.outcomes)
        versions.update(row.policy_versions)
        if row.log_probs:
            log_probs += row.log_probs
    categories = {name: sum(row.metric(name) for row in rows) for name in CATEGORIES}
    return {
        "rollouts": len(rows),
        "states": _pairs(states),
        "masked": sum(row.masked for row in rows),
        "damaged": sum(bool(row.damage) for row in rows),
        "unreadable": sum(bool(row.error) for row in rows),
        "bytes": sum(row.bytes for row in rows),
        "calls": sum(row.calls for row in rows),
        "sampled": sum(row.sampled for row in rows),
        "trained": categories["trained"],
        "drifted": sum(row.metric("drifted_calls") for row in rows),
        "driftLost": sum(row.metric("drift_lost") for row in rows),
        "categories": _pairs(Counter(categories)),
        "reasons": _pairs(reasons),
        "outcomes": _pairs(outcomes),
        "versions": _pairs(versions),
        "models": _pairs(models),
        "logProbs": log_probs.tolist(),
    }


def _pairs(counts: Counter[Any]) -> list[tuple[str, int]]:
    """The larger first; pairs, because a name from a record may be anything."""
    return [(bounded(str(name), LONGEST_CONTENT), count) for name, count in counts.most_common() if count]
