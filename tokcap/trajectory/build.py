"""`build`: from a snapshot to trajectories, with an account of every sampled token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from ..errors import InvalidOptionError
from ..protocol import Outcome, TokenCaptureSnapshot
from .behaviour import log_prob_mode
from .drift import Drift, TokenBytes, find_drifts
from .gaps import find_gaps
from .links import NO_CALL, Links, chain_of, link, records_of
from .paths import Path, find_paths
from .recorded import Recorded, read_snapshot
from .scored import Scored, Witnesses, attribute
from .siblings import settle_siblings
from .times import ended_before
from .trajectory import Trajectory, TrajectoryFacts
from .verdicts import UNTRAINED, account, judge, mask_all

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
    recorded = read_snapshot(snapshot)
    witnesses = Witnesses(call_id, choice_index, response_id, response)
    linked = _Linked(recorded, token_bytes)
    scored = attribute(recorded, linked.links, linked.continued, witnesses)
    if scored.number != NO_CALL:
        linked = _Linked(recorded, token_bytes, scored.number)
    return Build(snapshot, linked, scored, models, strict, exclude_not_behaviour, group)


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


class _Linked:
    """What follows from the calls alone, and from which of them was scored."""

    def __init__(self, recorded: Recorded, token_bytes: TokenBytes | None, scored: int = NO_CALL) -> None:
        self.recorded = recorded
        self.links = link(recorded, scored)
        self.fates = settle_siblings(recorded, self.links, scored)
        self.drift_of = find_drifts(recorded, self.links, self.fates, _Bytes(recorded, token_bytes))
        drifted = {drift.nearest_number for drift in self.drift_of.values() if not drift.before_answer}
        self.continued = self.links.extended | drifted


def group_of(rollout_id: str, meta: Mapping[str, Any] | None = None) -> str:
    """The group that a rollout is compared with: `meta["group"]`, else the id without `-<rollout>[-a<attempt>]`."""
    group = (meta or {}).get("group")
    return str(group) if group is not None else _TAIL.sub("", rollout_id)


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
    recorded, links, fates, judged, gaps, drift_of: what the modules of this package found, for tools that look inside.
    """

    def __init__(
        self,
        snapshot: TokenCaptureSnapshot,
        linked: _Linked,
        scored: Scored,
        models: str | Collection[str] | None,
        strict: bool,
        exclude_not_behaviour: bool,
        group: str | None,
    ) -> None:
        self.rollout_id = snapshot.rollout_id
        self.snapshot_id, self.version = snapshot.snapshot_id, snapshot.version
        self.meta: dict[str, Any] = dict(getattr(snapshot, "meta", None) or {})
        self.group = group_of(self.rollout_id, self.meta) if group is None else group
        self.incomplete = snapshot.incomplete
        self.scored = scored
        recorded, links = linked.recorded, linked.links
        self.recorded, self.links, self.fates, self.drift_of = recorded, links, linked.fates, linked.drift_of
        self.gaps = find_gaps(recorded, links)
        after_final = _after_final(recorded, links, scored.number)
        self.models = _models(recorded, links, models, scored)
        self.judged = judge(
            recorded,
            links,
            self.fates,
            models=self.models,
            after_final=after_final,
            exclude_not_behaviour=exclude_not_behaviour,
        )
        split = self.gaps | {number for number in after_final if links.parent[number] not in after_final}
        self._paths, self._distinct = find_paths(recorded, links, self.judged, split, scored.number)
        strict_reasons = self._strict_reasons() if strict else []
        if strict_reasons:
            mask_all(self.judged)
            self._paths, self._distinct = find_paths(recorded, links, self.judged, split, scored.number)
        self._flags = [self._flags_of(path) for path in self._paths]
        self.metrics = self._measure()
        self.masked = self.metrics["trained"] == 0
        self.reasons = (*strict_reasons, *self._reasons())

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """Every trajectory, those with trained ids first; each is made when it is asked for."""
        return _Trajectories(self, range(len(self._paths)))

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
        path = self._paths[index]
        return Trajectory(self.recorded, self.links, self.judged, path, index, self._flags[index], facts)

    def __repr__(self) -> str:
        return (
            f"<Build {self.rollout_id}: {len(self._paths)} trajectories, {self.metrics['trained']} of "
            f"{self.metrics['sampled']} sampled ids trained{', masked' if self.masked else ''}>"
        )

    def _strict_reasons(self) -> list[str]:
        verdicts = {found.verdict for found in self.judged.values()}
        found = {
            "incomplete": self.incomplete,
            "ambiguous": "ambiguous" in verdicts,
            "conflict": "conflict" in verdicts,
            "several_trajectories": sum(path.trained > 0 for path in self._paths) > 1,
        }
        return [f"strict:{reason}" for reason, holds in found.items() if holds]

    def _flags_of(self, path: Path) -> tuple[str, ...]:
        flags = set()
        first = path.owned[0]
        if first in self.gaps:
            flags.add("after_gap")
        if first in self.drift_of:
            flags.add("restarted" if self.drift_of[first].before_answer else "drifted")
        for number in path.owned:
            found = self.judged[number]
            flags.update(category for category in found.counts if category in UNTRAINED)
            if found.behaviour is False:
                flags.add("not_behaviour")
        return tuple(sorted(flags))

    def _reasons(self) -> list[str]:
        reasons = [self.scored.reason] if self.scored.reason else []
        if not self.metrics["sampled"]:
            reasons.append("nothing_recorded")
        if self.metrics["other_model"] and not self.models:
            reasons.append("several_models")
        return reasons + [name for name in UNTRAINED if any(name in found.counts for found in self.judged.values())]

    def _measure(self) -> dict[str, Any]:
        recorded, links = self.recorded, self.links
        outcomes = Counter(record.outcome for record in recorded.records)
        drifts = self.drift_of.values()
        total = sum(recorded.calls[path.end].total for path in self._paths)
        answered = [self.judged[number] for number in links.answered]
        modes = Counter(log_prob_mode(found.source.sampling) or "unknown" for found in answered)
        return {
            **account(recorded, links, self.judged),
            "calls": len(recorded.records),
            "entries": len(recorded.calls),
            **{f"{outcome}_calls": outcomes[outcome] for outcome in _OUTCOMES},
            "empty_generation_calls": sum(not call.sampled for call in recorded.calls),
            "merged_calls": len(recorded.calls) - len(links.members),
            "largest_log_prob_difference": links.largest_difference,
            "hints_refuted": links.hints_refuted,
            "roots": sum(links.parent[number] == NO_CALL for number in links.answered),
            "trajectories": len(self._paths),
            "trained_trajectories": sum(path.trained > 0 for path in self._paths),
            "drifted_calls": sum(not drift.before_answer for drift in drifts),
            "restarted_calls": sum(drift.before_answer for drift in drifts),
            "drift_lost": sum(drift.lost for drift in drifts if not drift.before_answer),
            "gaps": len(self.gaps),
            "distinct_ids": self._distinct,
            "total_ids": total,
            "replay_factor": total / self._distinct if self._distinct else 1.0,
            "not_behaviour": sum(found.trained for found in answered if found.behaviour is False),
            "zero_log_probs": sum(int((found.source.generation_log_probs == 0.0).sum()) for found in answered),
            "log_prob_modes": dict(sorted(modes.items())),
            "mixed_log_prob_modes": len(modes) > 1,
        }


_OUTCOMES: tuple[Outcome, ...] = ("lost", "open", "conflict", "aborted", "no_generation")


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


class _Bytes:
    """The bytes of token ids: what the caller knows, else the pieces that the engine recorded."""

    def __init__(self, recorded: Recorded, told: TokenBytes | None) -> None:
        self._recorded, self._told = recorded, told

    def __call__(self, token: int) -> bytes | None:
        if self._told is not None:
            found = self._told.get(token) if isinstance(self._told, Mapping) else self._told(token)
            if found is not None:
                return found
        return self._pieces.get(token)

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        pieces: dict[int, bytes] = {}
        for call in self._recorded.calls:
            told = call.pieces
            if told is None or len(told) != call.sampled:
                continue
            # An engine that puts a character together late says b"" for its first ids and all its bytes at the last.
            late = False
            for token, piece in zip(call.generation_token_ids.tolist(), told, strict=True):
                if piece and not late:
                    pieces[token] = piece
                late = not piece
        return pieces


def _models(recorded: Recorded, links: Links, selected: str | Collection[str] | None, scored: Scored) -> frozenset[str]:
    if selected is not None:
        return frozenset((selected,) if isinstance(selected, str) else selected)
    if scored.number != NO_CALL:
        return frozenset((recorded.calls[scored.number].model,))
    present = {recorded.calls[number].model for number in links.answered}
    return frozenset(present) if len(present) == 1 else frozenset()


def _after_final(recorded: Recorded, links: Links, scored: int) -> set[int]:
    """Representatives that came after the scored call: what continues it, and what began when it had ended."""
    if scored == NO_CALL:
        return set()
    chain = set(chain_of(links, scored))
    final = records_of(recorded, links, scored)
    after = {
        number
        for number in links.answered
        if number not in chain
        and all(ended_before(last, later) for last in final for later in records_of(recorded, links, number))
    }
    waiting = [scored]
    while waiting:
        for child in links.children.get(waiting.pop(), ()):
            after.add(child)
            waiting.append(child)
    return after
