"""Conversations of which nothing has to be found out: every prompt is what there was before, and goes on.

Most rollouts are of this kind: each call extends the one before it whole, all are of one model and recorded, and every
log-prob is known. Then the rules leave one trajectory with every sampled id trained, and the node table of the store
proves it: no tree, no comparison and no account is needed to say so. What `straight` gives is what `Findings` would
give, which are made if somebody looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray, IdArray
from ..content import decode_content
from ..entry import TokenEntry
from ..protocol import CallRecord, TokenCaptureSnapshot
from ..store.prefix import NO_PARENT, Node
from ..store.records import decode_contents, decode_contents_head
from ..store.snapshot import Entries
from .behaviour import POSITIVE_BEYOND_ROUNDING, SENTINEL, is_behaviour, log_prob_mode
from .content import BoolArray, Span, joined_versions, read_only
from .drift import Drift
from .findings import Asked, Findings
from .links import NO_CALL
from .pieces import Pieces
from .recorded import PARENT_HINT, Call, Recorded, call_of, recorded_of
from .scored import Scored
from .tree import PrefixTree
from .vocabulary import METRICS

__all__ = ("Straight", "straight")

_HINT = PARENT_HINT.encode()
_UNTRAINED_TRAINED = (False, True)
_REBUILDS = ("delivered", "delivered_fraction", "segments")
_NOTHING: dict[str, Any] = {
    **{name: 0 for name in METRICS if name not in _REBUILDS},
    "largest_log_prob_difference": 0.0,
    "roots": 1,
    "trajectories": 1,
    "trained_trajectories": 1,
    "replay_factor": 1.0,
}
"""The metrics of a conversation in which nothing happened."""

_least, _largest = np.minimum.reduce, np.maximum.reduce


def straight(snapshot: TokenCaptureSnapshot, asked: Asked) -> Straight | None:
    """The conversation of `snapshot` if it is a straight one, and if nothing is asked that needs a closer look."""
    entries = snapshot.entries
    if asked.witnesses.any or not isinstance(entries, Entries) or not _is_chain(entries):
        return None
    records = snapshot.calls
    answered = {record.model_call_id for record in records if record.outcome == "recorded"}
    silent = {record.model_call_id for record in records if record.outcome == "no_generation"}
    # Every record tells of another call, and as many were answered as there are entries.
    if len(answered) != len(entries.nodes) or len(answered | silent) != len(records):
        return None
    if asked.strict and snapshot.incomplete:
        return None
    told = _Told(asked)
    if not told.read(entries) or {answer.model_call_id for answer in told.answers} != answered:
        return None
    return Straight(snapshot.rollout_id, asked, records, entries.nodes, told)


def _is_chain(entries: Entries) -> bool:
    """Whether each call extends the one before it whole and sampled something."""
    nodes = entries.nodes
    if not nodes:
        return False
    parent, total, segment = NO_PARENT, 0, nodes[0].segment
    for node in nodes:
        if node.parent != parent or node.shared != total or node.total <= node.prompt or node.segment != segment:
            return False
        parent += 1
        total = node.total
    return sorted(entries.chosen) == list(range(len(nodes)))


class _Answer(NamedTuple):
    """What was recorded of one call beside its arrays."""

    model_call_id: str
    choice_index: int
    contents: bytes
    pieces: bytes


class _Told:
    """What the entries say, read in one pass."""

    model = ""
    ids: IdArray
    log_probs: npt.NDArray[Any]
    """Of all sampled ids, one call's behind another's, as narrow as they are stored."""
    zeros = 0
    """Log-probs that are exactly 0."""
    not_behaviour = 0

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.answers: list[_Answer] = []
        self.modes: dict[str, int] = {}
        """Calls per mode of their log-probs."""

    def read(self, entries: Entries) -> bool:
        """Whether all of it is as plain as the chain; the rest is then there."""
        ids: list[npt.NDArray[Any]] = []
        log_probs: list[npt.NDArray[Any]] = []
        pieces, load, answers, modes = Pieces(entries), entries.load, self.answers, self.modes
        model: str | None = None
        sampling: msgspec.Raw | None = None
        extra: msgspec.Raw | None = None
        behaviour, mode = None, ""
        for node in entries.nodes:
            stored = load(node)
            head = stored.head
            try:
                told = decode_contents_head(head.contents)
            except msgspec.DecodeError:  # a name that is no plain text
                return False
            if model is None:
                model = self.model = told.model
                if model not in self._asked.selected((model,)):
                    return False
            if told.model != model or told.finish_reason == "aborted":
                return False
            # Both are mostly those of the call before.
            if told.extra != extra:
                extra = told.extra
                if _HINT in bytes(extra):
                    return False
            if told.sampling != sampling:
                sampling = told.sampling
                decoded = decode_content(bytes(sampling))
                behaviour, mode = is_behaviour(decoded), log_prob_mode(decoded) or "unknown"
            modes[mode] = modes.get(mode, 0) + 1
            if behaviour is False:
                self.not_behaviour += head.generated
            sampled, suffix, generated = pieces.of(node, stored)
            log_probs.append(sampled)
            ids.append(suffix)
            ids.append(generated)
            answers.append(_Answer(head.model_call_id, head.choice_index, bytes(head.contents), bytes(head.pieces)))
        self.ids = read_only(np.concatenate(ids, dtype=np.int32, casting="same_kind"))
        self.log_probs = np.concatenate(log_probs)
        return self._all_known() and not (self.not_behaviour and self._asked.exclude_not_behaviour)

    def _all_known(self) -> bool:
        """Whether no log-prob is unknown (`unknown_log_probs`)."""
        # NaN is the least and the largest of everything, and no comparison with it holds.
        largest = float(_largest(self.log_probs))
        if largest >= 0.0:
            self.zeros = int(np.count_nonzero(self.log_probs == 0.0))
        return largest <= POSITIVE_BEYOND_ROUNDING and float(_least(self.log_probs)) > SENTINEL


class Straight:
    """What `Findings` would say of such a conversation, and the content of its only trajectory."""

    scored = Scored()
    reasons: tuple[str, ...] = ()
    shared = 0
    prefix_of = NO_CALL

    def __init__(
        self, rollout_id: str, asked: Asked, records: Sequence[CallRecord], nodes: Sequence[Node], told: _Told
    ) -> None:
        self._rollout_id, self._asked, self._records, self._nodes, self._told = rollout_id, asked, records, nodes, told
        self.models = asked.selected((told.model,))
        self.gaps: set[int] = set()
        self.drift_of: dict[int, Drift] = {}
        self.total, self.trained = len(told.ids), len(told.log_probs)
        self.flags = ("not_behaviour",) if told.not_behaviour else ()
        self.metrics = {
            **_NOTHING,
            "sampled": self.trained,
            "trained": self.trained,
            "calls": len(records),
            "entries": len(nodes),
            "turns": len(nodes) - 1,
            "no_generation_calls": len(records) - len(nodes),
            "distinct_ids": self.total,
            "total_ids": self.total,
            "not_behaviour": told.not_behaviour,
            "zero_log_probs": told.zeros,
            "log_prob_modes": dict(sorted(told.modes.items())),
            "mixed_log_prob_modes": len(told.modes) > 1,
        }

    @cached_property
    def whole(self) -> Findings:
        """The same by the rules, one after another."""
        tree = PrefixTree()
        return Findings(recorded_of(self._rollout_id, _Calls(self, tree), tree, self._records), self._asked, False)

    def content(self, index: int) -> Straight:
        """That of the trajectory at `index`, which is 0."""
        return self

    def token_ids(self) -> IdArray:
        return self._told.ids

    def loss_mask(self) -> BoolArray:
        lengths = [length for node in self._nodes for length in (node.prompt - node.shared, node.total - node.prompt)]
        return read_only(np.repeat(_UNTRAINED_TRAINED * len(self._nodes), lengths))

    def log_probs(self) -> FloatArray:
        log_probs = np.empty(self.total)
        log_probs.fill(np.nan)
        done, known = 0, self._told.log_probs
        for node in self._nodes:
            begun = done
            done += node.total - node.prompt
            log_probs[node.prompt : node.total] = known[begun:done]
        return read_only(log_probs)

    def policy_versions(self) -> tuple[tuple[Any, int, int], ...]:
        return joined_versions(
            (decode_contents(answer.contents).policy_versions, node.prompt, node.total - node.prompt)
            for node, answer in zip(self._nodes, self._told.answers, strict=True)
        )

    def calls(self) -> tuple[Span, ...]:
        return tuple(
            Span(
                (answer.model_call_id,),
                answer.choice_index,
                node.prompt,
                node.total,
                True,
                "trained",
                node.total - node.prompt,
            )
            for node, answer in zip(self._nodes, self._told.answers, strict=True)
        )


class _Calls:
    """The calls of a straight conversation, for who looks inside."""

    def __init__(self, conversation: Straight, tree: PrefixTree) -> None:
        self.calls: list[Call] = []
        self.conflicts: set[str] = set()
        told = conversation._told
        log_probs = read_only(told.log_probs.astype(np.float64))
        done = 0
        for node, answer in zip(conversation._nodes, told.answers, strict=True):
            begun = done
            done += node.total - node.prompt
            suffix, generated = told.ids[node.shared : node.prompt], told.ids[node.prompt : node.total]
            call = call_of(
                answer.model_call_id,
                answer.choice_index,
                decode_contents(answer.contents),
                generated,
                log_probs[begun:done],
                node.prompt,
                node.total,
                tree.add(node.parent, node.shared, suffix, generated),
            )
            call._contents, call._pieces = answer.contents, answer.pieces
            self.calls.append(call)

    def entry(self, call: Call, recorded: Recorded) -> TokenEntry:
        raise AssertionError("no two calls of a straight conversation have the same ids")
