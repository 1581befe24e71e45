"""What goes into a page: a row for every rollout that is meant, and the calls and tokens of as many as it may hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ..errors import RetiredError, TokcapError
from ..inspection import Progress, RolloutRow, RolloutView, Texts, models_of, row_of, view_of
from ..store import FileStore
from .overview import is_suspect, table_of, totals_of
from .rollout import Parts, distinct_ids, rollout_facts, token_parts
from .texts import LONGEST_CONTENT, Vocabulary, bounded

__all__ = ("MAX_TOKENS", "Contents", "contents_of")

MAX_TOKENS = 1_000_000
"""Distinct token ids in a page, unless said otherwise: some 15 MB."""

_CALL_COSTS = 100
"""Ids that a call weighs as much as, so that a store of empty calls is bounded, too."""

_TRIES = 20
"""Rollouts that don't fit any more, after which no other one is read."""


class Contents(msgspec.Struct):
    """What a page shows."""

    rows: list[RolloutRow]
    """Of every rollout that is meant."""
    rollouts: list[dict[str, Any]]
    """Of those whose calls are in the page: `tokcap.report.rollout.rollout_facts` and what its row says."""
    parts: list[Parts]
    """Their tokens; empty where there are none, or were too many."""
    vocabulary: list[tuple[str, list[int], list[str]]]
    """(model, ids, texts)."""
    max_tokens: int

    @property
    def with_tokens(self) -> int:
        """Rollouts whose tokens are in the page."""
        return sum(bool(parts) for parts in self.parts)

    @property
    def tokens(self) -> int:
        """Distinct token ids in the page."""
        return sum(len(parts["ids"]) for parts in self.parts if parts)

    def table(self) -> list[list[Any]]:
        """The overview's rows."""
        return table_of(self.rows, {facts["id"]: position for position, facts in enumerate(self.rollouts)})

    def totals(self) -> dict[str, Any]:
        """The overview's sums."""
        return totals_of(self.rows)


def contents_of(
    store: FileStore,
    rows: Sequence[RolloutRow],
    *,
    chosen: Collection[str] | None = None,
    max_tokens: int = MAX_TOKENS,
    texts: Texts | None = None,
    progress: Progress | None = None,
) -> Contents:
    """Read the rollouts of `rows` until `max_tokens` distinct ids are read.

    chosen: only these are read, in this order. None: all, and those first in which something is masked, lost or
    drifted. A rollout that can't be read is in the page with the reason. texts: the bytes of ids of which the calls in
    the page tell none. progress: told how many are read, of how many.
    """
    wanted = _in_order(rows, chosen)
    vocabulary = Vocabulary(texts)
    contents = Contents(list(rows), [], [], [], max_tokens)
    left, too_large, alone = max_tokens, 0, len(wanted) == 1
    for position, row in enumerate(wanted):
        if (left <= 0 and not alone) or too_large >= _TRIES:
            break
        facts, parts, weight = _read(store, row, left, vocabulary, texts, alone=alone)
        if weight > left and not alone:
            too_large += 1
        else:
            left -= weight
            contents.rollouts.append(facts)
            contents.parts.append(parts)
        if progress is not None:
            progress(position + 1, len(wanted))
    contents.vocabulary = vocabulary.settle()
    return contents


def _in_order(rows: Sequence[RolloutRow], chosen: Collection[str] | None) -> list[RolloutRow]:
    if chosen is None:
        return sorted(rows, key=lambda row: (not is_suspect(row), row.state == "retired"))
    by_id = {row.rollout_id: row for row in rows}
    return [by_id[rollout_id] for rollout_id in chosen if rollout_id in by_id]


def _read(
    store: FileStore,
    row: RolloutRow,
    left: int,
    vocabulary: Vocabulary,
    texts: Texts | None,
    *,
    alone: bool,
) -> tuple[dict[str, Any], Parts, int]:
    """The facts and tokens of one rollout, and what it weighs against the bound."""
    facts = _row_facts(row)
    if row.state in ("retired", "absent"):
        return _tombstone(store, row, facts), {}, _CALL_COSTS
    try:
        with store.read_now(row.rollout_id) as snapshot:
            view = view_of(snapshot, token_bytes=None if texts is None else texts.of(models_of(snapshot)))
    except RetiredError:  # meanwhile
        return _tombstone(store, row_of(store, row.rollout_id), facts), {}, _CALL_COSTS
    except (TokcapError, OSError) as error:
        return facts | {"error": row.error or str(error)}, {}, _CALL_COSTS
    return _viewed(view, facts, left, vocabulary, alone=alone)


def _viewed(
    view: RolloutView, facts: dict[str, Any], left: int, vocabulary: Vocabulary, *, alone: bool
) -> tuple[dict[str, Any], Parts, int]:
    count = distinct_ids(view)
    weight = count + _CALL_COSTS * len(view.calls)
    if weight > left and not alone:
        return facts, {}, weight
    facts |= rollout_facts(view)
    facts["distinct"] = count
    if count > left:  # the only one: its calls are shown all the same
        return facts | {"tokensLeftOut": True}, {}, weight
    return facts, token_parts(view, facts, vocabulary), weight


def _row_facts(row: RolloutRow) -> dict[str, Any]:
    return {
        "id": row.rollout_id,
        "state": row.state,
        "version": row.version,
        "snapshot": row.snapshot_id,
        "changed": row.changed_at,
        "files": row.files,
        "bytes": row.bytes,
        "late": row.late,
        "group": bounded(row.group, LONGEST_CONTENT),
        "finished": row.finished,
        "damage": row.damage,
        "incomplete": row.incomplete,
        "reasons": row.reasons,
        "error": row.error,
        "logProbBins": row.log_probs,
        "calls": [],
        "trajectories": [],
    }


def _tombstone(store: FileStore, row: RolloutRow, facts: dict[str, Any]) -> dict[str, Any]:
    """What is left of a retired rollout."""
    facts |= {"state": row.state, "version": row.version, "snapshot": row.snapshot_id, "changed": row.changed_at}
    try:
        stat = store.stat_now(row.rollout_id)
    except TokcapError as error:
        return facts | {"error": str(error)}
    return facts | {"lateNotes": [bounded(str(note), LONGEST_CONTENT) for note in stat.late]}
