"""All that follows from the calls of a rollout: links, fates, verdicts, paths, and the numbers of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..protocol import Outcome
from .behaviour import log_prob_mode
from .content import MadeIds, PathContent
from .drift import TokenBytes, find_drifts
from .gaps import find_gaps
from .links import NO_CALL, Links, chain_of, link, records_of
from .paths import Path, find_paths
from .recorded import Recorded
from .scored import Scored, Witnesses, attribute
from .siblings import doubtful_siblings, settle_siblings
from .times import ended_before
from .verdicts import UNTRAINED, account, judge, mask_all

__all__ = ("Asked", "Findings")


class Asked(msgspec.Struct, frozen=True):
    """What the caller of `build` wants to know, and knows."""

    models: str | Collection[str] | None
    witnesses: Witnesses
    strict: bool
    exclude_not_behaviour: bool
    token_bytes: TokenBytes | None

    def selected(self, otherwise: Collection[str]) -> frozenset[str]:
        """The models that are trained: those that were asked for, if any were."""
        if self.models is None:
            return frozenset(otherwise)
        return frozenset((self.models,) if isinstance(self.models, str) else self.models)


class _Linked:
    """What follows from the calls, and from which of them was scored if `scored_matters`."""

    def __init__(self, recorded: Recorded, token_bytes: TokenBytes | None, scored: int = NO_CALL) -> None:
        self.links = link(recorded, scored)
        doubtful = doubtful_siblings(recorded, self.links)
        self.fates = settle_siblings(recorded, self.links, doubtful, scored)
        # Equal samples, one of which a later call continues, are siblings, too.
        self.scored_matters = bool(doubtful)
        self.drift_of = find_drifts(recorded, self.links, self.fates, _Bytes(recorded, token_bytes))
        drifted = {drift.nearest_number for drift in self.drift_of.values() if not drift.before_answer}
        self.continued = self.links.extended | drifted


class Findings:
    """What each step of a build found; the names are those of the modules that explain them.

    scored, models, metrics, reasons: as `Build` has them.
    """

    def __init__(self, recorded: Recorded, asked: Asked, incomplete: bool) -> None:
        linked = _Linked(recorded, asked.token_bytes)
        self.scored = scored = attribute(recorded, linked.links, linked.continued, asked.witnesses)
        if scored.number != NO_CALL and linked.scored_matters:
            linked = _Linked(recorded, asked.token_bytes, scored.number)
        links = linked.links
        self.recorded, self.links = recorded, links
        self.fates, self.drift_of = linked.fates, linked.drift_of
        self.gaps = find_gaps(recorded, links)
        after_final = _after_final(recorded, links, scored.number)
        self.models = asked.selected(_trainable(recorded, links, scored))
        self.judged = judge(
            recorded,
            links,
            self.fates,
            models=self.models,
            after_final=after_final,
            exclude_not_behaviour=asked.exclude_not_behaviour,
        )
        split = self.gaps | {number for number in after_final if links.parent[number] not in after_final}
        self.paths, self._distinct = find_paths(recorded, links, self.judged, split, scored.number)
        self._made = MadeIds()
        strict_reasons = self._strict_reasons(incomplete) if asked.strict else []
        if strict_reasons:
            mask_all(self.judged)
            self.paths, self._distinct = find_paths(recorded, links, self.judged, split, scored.number)
        self.metrics = self._measure()
        self.reasons = (*strict_reasons, *self._reasons())

    @property
    def whole(self) -> Findings:
        """These."""
        return self

    def content(self, index: int) -> PathContent:
        """The content of the trajectory at `index`."""
        path = self.paths[index]
        return PathContent(self.recorded, self.links, self.judged, path, self._flags_of(path), index, self._made)

    def _strict_reasons(self, incomplete: bool) -> list[str]:
        verdicts = {found.verdict for found in self.judged.values()}
        found = {
            "incomplete": incomplete,
            "ambiguous": "ambiguous" in verdicts,
            "conflict": "conflict" in verdicts,
            "several_trajectories": sum(path.trained > 0 for path in self.paths) > 1,
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
        present = {category for found in self.judged.values() for category in found.counts}
        return reasons + [name for name in UNTRAINED if name in present]

    def _has_answer_to_extend(self, number: int) -> bool:
        drift = self.drift_of.get(number)
        return self.links.parent[number] != NO_CALL or (drift is not None and not drift.before_answer)

    def _measure(self) -> dict[str, Any]:
        recorded, links = self.recorded, self.links
        outcomes = Counter([record.outcome for record in recorded.records])
        drifts = self.drift_of.values()
        total = sum(recorded.calls[path.end].total for path in self.paths)
        answered = [self.judged[number] for number in links.answered]
        modes = Counter([log_prob_mode(found.source.sampling) or "unknown" for found in answered])
        log_probs = [found.source.generation_log_probs for found in answered]
        return {
            **account(recorded, links, self.judged),
            "calls": len(recorded.records),
            "entries": len(recorded.calls),
            **{f"{outcome}_calls": outcomes[outcome] for outcome in _OUTCOMES},
            "empty_generation_calls": sum(not call.sampled for call in recorded.calls),
            "merged_calls": len(recorded.calls) - len(links.members),
            "largest_log_prob_difference": links.largest_difference,
            "hints_refuted": links.hints_refuted,
            "turns": sum(self._has_answer_to_extend(number) for number in links.members),
            "roots": sum(links.parent[number] == NO_CALL for number in links.answered),
            "trajectories": len(self.paths),
            "trained_trajectories": sum(path.trained > 0 for path in self.paths),
            "drifted_calls": sum(not drift.before_answer for drift in drifts),
            "restarted_calls": sum(drift.before_answer for drift in drifts),
            "drift_lost": sum(drift.lost for drift in drifts if not drift.before_answer),
            "gaps": len(self.gaps),
            "distinct_ids": self._distinct,
            "total_ids": total,
            "replay_factor": total / self._distinct if self._distinct else 1.0,
            "not_behaviour": sum(found.trained for found in answered if found.behaviour is False),
            "zero_log_probs": int(np.count_nonzero(np.concatenate(log_probs) == 0.0)) if log_probs else 0,
            "log_prob_modes": dict(sorted(modes.items())),
            "mixed_log_prob_modes": len(modes) > 1,
        }


_OUTCOMES: tuple[Outcome, ...] = ("lost", "open", "conflict", "aborted", "no_generation")


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


def _trainable(recorded: Recorded, links: Links, scored: Scored) -> frozenset[str]:
    """The models that are trained if nobody says which: the scored one's, or the only one that there is."""
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
