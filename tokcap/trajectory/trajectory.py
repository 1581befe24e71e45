"""`Trajectory`: one contiguous sequence with its loss mask and behaviour log-probs, made when looked at (rule 20)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from ..arrays import FloatArray, IdArray
from .content import BoolArray, Content, Span

__all__ = ("Span", "Trajectory", "TrajectoryFacts")


class TrajectoryFacts(msgspec.Struct, frozen=True):
    """What a trajectory says of its rollout."""

    rollout_id: str
    group: str
    count: int
    trained: int


class Trajectory:
    """One contiguous token sequence. All arrays have its length L and are read-only; they are made on first access.

    rollout_id, group: of the rollout.
    index, count: `index` is the position in `Build.trajectories`; `count` how many of them have trained ids. Those
        come first, so `index >= count` means that nothing here is trained.
    trained: ids that are trained here. rollout_trained: in all trajectories of the rollout, so that a rollout that
        splits into many neither weighs more nor moves a baseline.
    flags: what is worth knowing, sorted; see `tokcap.trajectory.FLAGS`.
    prefix_of, shared: the first `shared` ids are also the first ids of trajectory `prefix_of`, an earlier one; None, 0
        if it has no such prefix. Equal prefixes are stored once.
    """

    def __init__(self, content: Content, index: int, facts: TrajectoryFacts) -> None:
        self._content = content
        self.rollout_id, self.group = facts.rollout_id, facts.group
        self.index, self.count = index, facts.count
        self.rollout_trained = facts.trained
        self.trained = content.trained
        self.flags = content.flags
        self.shared = content.shared
        self.prefix_of = content.prefix_of if content.shared else None

    def __len__(self) -> int:
        return self._content.total

    @cached_property
    def token_ids(self) -> IdArray:
        """int32 [L]: exactly what the engine saw and the policy sampled."""
        return self._content.token_ids()

    @cached_property
    def loss_mask(self) -> BoolArray:
        """bool [L]: True where an id was sampled by the policy and is trained here."""
        return self._content.loss_mask()

    @cached_property
    def log_probs(self) -> FloatArray:
        """float64 [L]: natural log under the policy that sampled; NaN wherever the mask is False."""
        return self._content.log_probs()

    @property
    def policy_versions(self) -> tuple[tuple[Any, int, int], ...]:
        """(version, start, end) over the sampled positions that belong to this trajectory; None: unknown."""
        return self._content.policy_versions()

    @property
    def calls(self) -> tuple[Span, ...]:
        """Every call on the way, the first first, whether its span is owned here or not."""
        return self._content.calls()

    def as_dict(self) -> dict[str, Any]:
        """Arrays and facts in one plain dict, for a queue or a file; independent of the build."""
        return {
            "rollout_id": self.rollout_id,
            "group": self.group,
            "index": self.index,
            "count": self.count,
            "trained": self.trained,
            "rollout_trained": self.rollout_trained,
            "flags": self.flags,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "log_probs": self.log_probs,
            "policy_versions": self.policy_versions,
        }

    def __repr__(self) -> str:
        flags = f", {', '.join(self.flags)}" if self.flags else ""
        return f"<Trajectory {self.rollout_id} {self.index}: {len(self)} ids, {self.trained} trained{flags}>"
