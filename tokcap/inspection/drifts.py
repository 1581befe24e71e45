"""Drift over a whole store: which turns came back as other ids than were sampled, and how."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..arrays import IdArray
from ..trajectory.recorded import Call
from .difference import sequence
from .view import CallKey, CallView, Relation, RolloutView

__all__ = ("DriftTotals", "DriftedTurn", "drifted_turns")


class DriftedTurn(msgspec.Struct, frozen=True):
    """One call whose prompt parts from an earlier call."""

    rollout_id: str
    model_call_id: str
    choice_index: int
    nearest_model_call_id: str
    nearest_choice_index: int
    relation: Relation
    """`drifted`: from an answer. Any other: from a prompt."""
    kind: str
    """`tokcap.trajectory.DriftKind`; empty for another conversation, whose bytes are not compared."""
    index: int
    """The first position at which the prompt differs from the earlier call's prompt and answer."""
    kept: int
    """Sampled ids of the earlier call that the prompt still holds."""
    lost: int
    """Those that it doesn't."""
    model: str
    start: int
    """The position of the first id of both windows."""
    before: IdArray
    """int32: what was sampled there, or stood there before."""
    after: IdArray
    """int32: what stands there now."""

    @property
    def call(self) -> CallKey:
        """The call, as `CallView.key`."""
        return self.model_call_id, self.choice_index

    @property
    def nearest(self) -> CallKey:
        """The earlier call that its prompt parts from."""
        return self.nearest_model_call_id, self.nearest_choice_index


class DriftTotals(msgspec.Struct):
    """Counts over many rollouts, under the names of `Statistics`. `drift_rate` is what drift costs: each drifted turn
    begins another trajectory."""

    rollouts: int = 0
    turns: int = 0
    """Calls whose prompt had an earlier answer to extend: those that do, and those that drifted."""
    drifted_calls: int = 0
    restarted_calls: int = 0
    """Calls whose prompt parts from an earlier prompt, of the same conversation or not; they are no turns."""
    drift_lost: int = 0
    """Sampled ids that drifted prompts no longer hold; they are trained all the same, in a trajectory of their own."""
    kinds: dict[str, int] = {}
    """Drifted turns by kind."""

    @property
    def drift_rate(self) -> float | None:
        """drifted_calls / turns; None without any."""
        return self.drifted_calls / self.turns if self.turns else None

    def add(self, view: RolloutView) -> None:
        """Count a rollout."""
        self.rollouts += 1
        for call in view.calls:
            if call.relation == "drifted" and call.drift is not None:
                self.turns += 1
                self.drifted_calls += 1
                self.drift_lost += call.drift.lost
                self.kinds[call.drift.kind] = self.kinds.get(call.drift.kind, 0) + 1
            elif call.relation == "continues":
                self.turns += 1
            if call.relation != "repeats" and call.drift is not None and call.drift.before_answer:
                self.restarted_calls += 1


def drifted_turns(view: RolloutView, *, restarted: bool = False, context: int = 8) -> Iterator[DriftedTurn]:
    """The drifted turns of a rollout, in order. restarted: those too whose prompt parts from an earlier prompt.

    context: ids on each side of the first that differs, in both windows.
    """
    for call in view.calls:
        if call.drift is not None and call.relation != "repeats" and (restarted or not call.drift.before_answer):
            yield _turn(view, call, context)


def _turn(view: RolloutView, call: CallView, context: int) -> DriftedTurn:
    drift = call.drift
    assert drift is not None
    start = max(drift.index - context, 0)
    end = drift.index + context
    nearest = view.recorded(drift.nearest)
    assert isinstance(nearest, Call)  # a prompt parts from recorded calls only
    return DriftedTurn(
        view.rollout_id,
        *call.key,
        *drift.nearest,
        call.relation,
        "" if call.relation in ("forked", "separate") else drift.kind,
        drift.index,
        drift.kept,
        drift.lost,
        call.model,
        start,
        sequence(view, nearest)[start:end],
        view.prompt_token_ids(call.key)[start:end],
    )
