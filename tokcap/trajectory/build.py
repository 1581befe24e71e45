"""`build`: from a snapshot to trajectories, with an account of every sampled token."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

from ..content import name_of
from ..errors import InvalidOptionError
from ..protocol import TokenCaptureSnapshot
from .content import Content
from .drift import Drift, TokenBytes
from .findings import Asked, Findings
from .links import Links
from .paths import Path
from .recorded import Recorded, read_snapshot
from .scored import Scored, Witnesses
from .siblings import Fate
from .straight import straight
from .trajectory import Trajectory, TrajectoryFacts
from .verdicts import Judged

__all__ = ("Build", "build", "group_of")

_TAIL = re.compile(r"-\d+(?:-a\d+)?\Z")


def build(
    snapshot: TokenCaptureSnapshot,
    *,
    models: str | Collection[str] | None = None,
    call_id: str = "",
    choice_index: int | None = None,
    response_id: str = "",
    response: Mapping[str, Any] | None = None,
    strict: bool = False,
    exclude_not_behaviour: bool = False,
    token_bytes: TokenBytes | None = None,
    group: str | None = None,
) -> Build:
    """All trajectories of a frozen rollout; every sampled id is owned by exactly one of them.

    models: which models are trained; the others are `other_model`. None: the model of the scored call, or the only one
        there is. With several and no scored call nothing is trained.
    call_id, choice_index, response_id, response: what is known of the answer that was scored (`tokcap.trajectory.
        scored`). The scored call is kept, its chain owns the trunk, and what came after it is not trained.
    strict: mask the whole rollout on any doubt, as NeMo Gym does: an incomplete snapshot, an ambiguous or conflicting
        call, more than one trajectory.
    exclude_not_behaviour: leave out spans whose log-probs are known not to be the sampling distribution.
    token_bytes: the bytes of a token id, to tell kinds of drift apart where the engine recorded no pieces.
    group: what the rollout is compared with; `group_of` decides if it is None.

    Raises `InvalidOptionError` for what is no snapshot, and for `models` or `response` of another type; nothing because
    of what was recorded. Never retires anything. The result stays valid when the snapshot is closed. Time and memory
    are linear in the distinct tokens; arrays are made when they are looked at.
    """
    _check(snapshot, models, response)
    witnesses = Witnesses(call_id, choice_index, response_id, response)
    asked = Asked(models, witnesses, strict, exclude_not_behaviour, token_bytes)
    found: Found | None = straight(snapshot, asked)
    if found is None:
        found = Findings(read_snapshot(snapshot), asked, snapshot.incomplete)
    return Build(snapshot, found, group)


def _check(snapshot: object, models: object, response: object) -> None:
    missing = [name for name in ("rollout_id", "snapshot_id", "version", "calls") if not hasattr(snapshot, name)]
    if missing or (not hasattr(type(snapshot), "entries") and not hasattr(snapshot, "entries")):
        raise InvalidOptionError(
            f"build takes a snapshot, as freeze or read give one, not a {type(snapshot).__name__}"
            f" (it has no {', '.join(missing or ['entries'])})"
        )
    if response is not None and not isinstance(response, Mapping):
        raise InvalidOptionError(f"response is a {type(response).__name__}, expected a mapping or None")
    if models is not None and not isinstance(models, (str, Collection)):
        raise InvalidOptionError(f"models is {models!r}, expected a name or a collection of names")


def group_of(rollout_id: str, meta: Mapping[str, Any] | None = None) -> str:
    """The group that a rollout is compared with: `meta["group"]`, else the id without `-<rollout>[-a<attempt>]`."""
    group = (meta or {}).get("group")
    return name_of(group) if group is not None else _TAIL.sub("", rollout_id)


class Found(Protocol):
    """What was found out about a rollout, by whichever way (`Findings`, `Straight`)."""

    @property
    def scored(self) -> Scored: ...
    @property
    def models(self) -> frozenset[str]: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    @property
    def reasons(self) -> tuple[str, ...]: ...
    @property
    def gaps(self) -> set[int]: ...
    @property
    def drift_of(self) -> dict[int, Drift]: ...
    @property
    def whole(self) -> Findings:
        """Everything, step by step."""
        ...

    def content(self, index: int) -> Content: ...


class Build:
    """The trajectories of one rollout, and the account of what is trained and what isn't.

    rollout_id, snapshot_id, version, group, meta: of the snapshot.
    masked: True if nothing is trained. reasons: why anything is not, repetitions apart, as short codes
        (`tokcap.trajectory.REASONS`).
    metrics: numbers by name (`tokcap.trajectory.METRICS`); sampled = trained + abandoned + ambiguous + aborted +
        unknown + conflict + other_model + after_final + masked, exactly.
    drifts: one report for every call whose prompt parts from an earlier call.
    scored: which call gave the scored answer, and which witnesses said so.
    models: those that are trained. incomplete: of the snapshot.
    recorded, links, fates, judged, paths, gaps, drift_of: what the modules of this package found, for tools that look
        inside.
    """

    def __init__(self, snapshot: TokenCaptureSnapshot, found: Found, group: str | None) -> None:
        self.rollout_id = snapshot.rollout_id
        self.snapshot_id, self.version = snapshot.snapshot_id, snapshot.version
        self.meta: dict[str, Any] = dict(getattr(snapshot, "meta", None) or {})
        self.group = group_of(self.rollout_id, self.meta) if group is None else group
        self.incomplete = snapshot.incomplete
        self._found = found
        self.scored, self.models = found.scored, found.models
        self.metrics, self.reasons = found.metrics, found.reasons
        self.masked = self.metrics["trained"] == 0
        self._number = self.metrics["trajectories"]

    @property
    def recorded(self) -> Recorded:
        """The calls, and their prefix tree."""
        return self._found.whole.recorded

    @property
    def links(self) -> Links:
        """Which call continues which."""
        return self._found.whole.links

    @property
    def fates(self) -> dict[int, Fate]:
        """What became of each answer."""
        return self._found.whole.fates

    @property
    def judged(self) -> dict[int, Judged]:
        """What of each answer is trained."""
        return self._found.whole.judged

    @property
    def gaps(self) -> set[int]:
        """Representatives that a lost or open call may directly precede."""
        return self._found.gaps

    @property
    def drift_of(self) -> dict[int, Drift]:
        """The drift of each representative that has one."""
        return self._found.drift_of

    @property
    def paths(self) -> Sequence[Path]:
        """Of each trajectory which calls it owns, in the order of `trajectories`."""
        return self._found.whole.paths

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """Every trajectory, those with trained ids first; each is made when it is asked for."""
        return _Trajectories(self, range(self._number))

    @property
    def trained(self) -> Sequence[Trajectory]:
        """The trajectories that have trained ids: what a trainer takes."""
        return _Trajectories(self, range(self.metrics["trained_trajectories"]))

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """In the order of call ids."""
        return tuple(self.drift_of.values())

    def trajectory(self, index: int) -> Trajectory:
        """The trajectory at `index`."""
        facts = TrajectoryFacts(
            self.rollout_id, self.group, self.metrics["trained_trajectories"], self.metrics["trained"]
        )
        return Trajectory(self._found.content(index), index, facts)

    def __repr__(self) -> str:
        return (
            f"<Build {self.rollout_id}: {self._number} trajectories, {self.metrics['trained']} of "
            f"{self.metrics['sampled']} sampled ids trained{', masked' if self.masked else ''}>"
        )


class _Trajectories(Sequence[Trajectory]):
    def __init__(self, build: Build, indices: range) -> None:
        self._build, self._indices = build, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Sequence[Trajectory]:
        if isinstance(index, slice):
            return _Trajectories(self._build, self._indices[index])
        return self._build.trajectory(self._indices[index])

    def __iter__(self) -> Iterator[Trajectory]:
        return map(self._build.trajectory, self._indices)

    def __repr__(self) -> str:
        return f"<{len(self)} trajectories of {self._build.rollout_id}>"
