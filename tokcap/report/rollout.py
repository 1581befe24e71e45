"""One rollout for the page: its calls in words, and its tokens in arrays, every shared prefix once."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..content import name_of
from ..inspection import CallView, RolloutView
from ..inspection.branches import conversations, lines
from ..trajectory.links import NO_CALL
from .texts import LONGEST_CONTENT, Vocabulary, bounded, content_text

__all__ = ("Parts", "call_facts", "distinct_ids", "rollout_facts", "token_parts")

Parts = dict[str, npt.NDArray[Any]]
"""Arrays by name; see `token_parts`."""

_LARGEST = 2**53 - 1
"""The largest number that a script counts with; of an integer of thousands of digits Python makes no text."""


def distinct_ids(view: RolloutView) -> int:
    """Ids of all prompts and answers, shared prefixes counted once."""
    return sum(map(len, view.build.recorded.tree.edge))


def rollout_facts(view: RolloutView) -> dict[str, Any]:
    """What is said of a rollout and its calls, without a token. Calls are named by their position in `calls`."""
    place = {call.key: position for position, call in enumerate(view.calls)}
    built = view.build
    sources = _sources(view)
    trajectories: list[dict[str, Any]] = []
    owner: dict[int, int] = {}
    for trajectory, path in zip(built.trajectories, built.paths, strict=True):
        owned = [place[built.judged[number].source.key] for number in path.owned]
        owner |= dict.fromkeys(owned, trajectory.index)
        trajectories.append(
            {
                "length": len(trajectory),
                "trained": trajectory.trained,
                "flags": trajectory.flags,
                "shared": trajectory.shared,
                "prefixOf": trajectory.prefix_of,
                "end": owned[-1],
                "owned": owned,
            }
        )
    calls = []
    for call in view.calls:
        facts = call_facts(view, call, place)
        facts["source"] = place[sources.get(call.key, call.key)]
        facts["owner"] = owner.get(facts["source"])
        calls.append(facts)
    return {
        "version": view.version,
        "snapshot": view.snapshot_id,
        "incomplete": view.incomplete,
        "finished": view.finished,
        "meta": content_text(view.meta, indent=1),
        "group": bounded(built.group, LONGEST_CONTENT),
        "damage": view.damage,
        "torn": view.torn,
        "masked": view.masked,
        "reasons": built.reasons,
        "metrics": {name: value for name, value in built.metrics.items() if _is_number(value)},
        "logProbModes": content_text(built.metrics["log_prob_modes"]),
        "models": [bounded(model, LONGEST_CONTENT) for model in sorted(built.models)],
        "calls": calls,
        "conversations": sum(each.first is not None for each in conversations(view)),
        "tree": _tree(view),
        "trajectories": trajectories,
    }


def _is_number(value: Any) -> bool:
    """Worth showing, and something that JSON has a word for: between log-probs there may be an infinite difference."""
    return isinstance(value, (int, float)) and bool(value) and bool(np.isfinite(value))


def _tree(view: RolloutView) -> list[tuple[int, str, bool]]:
    """(position in `calls`, one character a level, whether it goes on from the call before it at its level).

    The characters say whether more follows at that level: `|` or a space; the last one is its own level.
    """
    found = []
    for conversation in conversations(view):
        for branch, marks in lines(conversation.branches):
            place = branch.call.number - 1
            found.append((place, "".join("|" if more else " " for more in marks), branch.follows))
    return found


def _sources(view: RolloutView) -> dict[tuple[str, int], tuple[str, int]]:
    """Of each recorded call the one whose log-probs count: itself, or of identical calls the chosen one."""
    built = view.build
    found = {}
    for call in built.recorded.calls:
        judged = built.judged.get(built.links.representative[call.number])
        found[call.key] = call.key if judged is None else judged.source.key
    return found


def call_facts(view: RolloutView, call: CallView, place: dict[tuple[str, int], int]) -> dict[str, Any]:
    """What is said of one call."""
    facts: dict[str, Any] = {
        "id": call.model_call_id,
        "choice": call.choice_index,
        "outcome": call.outcome,
        "relation": call.relation,
        "parent": None if call.parent is None else place.get(call.parent),
        "shared": call.shared,
        "prompt": call.prompt,
        "sampled": call.sampled,
        "trained": call.trained,
        "verdict": call.verdict,
        "continued": call.continued,
        "afterGap": call.after_gap,
        "began": call.began_s,
        "took": call.took_s,
        "delivered": call.delivered,
        "samples": call.samples,
        "attempts": call.attempts,
        "retries": call.retry_count,
        "model": bounded(call.model, LONGEST_CONTENT),
        "finish": bounded(call.finish_reason, LONGEST_CONTENT),
        "response": bounded(call.response_id, LONGEST_CONTENT),
        "versions": [span for span in map(_version, call.policy_versions) if span is not None],
        "sampling": content_text(call.sampling),
        "unknown": call.unknown_log_probs,
        "mean": call.mean_log_prob if call.mean_log_prob is None or np.isfinite(call.mean_log_prob) else None,
        "detail": bounded(call.detail, LONGEST_CONTENT),
    }
    if call.drift is not None:
        drift = call.drift
        facts["drift"] = {
            "nearest": place.get(drift.nearest),
            "index": drift.index,
            "kept": drift.kept,
            "lost": drift.lost,
            "beforeAnswer": drift.before_answer,
            "kind": drift.kind,
        }
    recorded = view.recorded(call.key)
    if recorded is not None:
        parent = view.build.links.parent[view.build.links.representative[recorded.number]]
        facts["continues"] = None if parent == NO_CALL else place[view.build.recorded.calls[parent].key]
        contents = recorded.contents
        facts["items"] = content_text(contents.output_items, indent=1)
        facts["extra"] = content_text(contents.extra, indent=1)
    return facts


def _version(span: Any) -> tuple[str, int, int] | None:
    """(version as text, start, end), or None for what an engine told in another form."""
    if not isinstance(span, (tuple, list)) or len(span) != 3 or not all(type(bound) is int for bound in span[1:]):
        return None
    start, end = (min(max(bound, 0), _LARGEST) for bound in span[1:])
    return bounded(name_of(span[0]), LONGEST_CONTENT), start, end


def token_parts(view: RolloutView, facts: dict[str, Any], vocabulary: Vocabulary) -> Parts:
    """The tokens of a rollout; adds to the calls in `facts` where theirs are.

    `parents` int32 [V], `starts` int32 [V + 1], `ids` int32 [N]: the prefix tree. Vertex v stands for a sequence: that
    of vertex parents[v], then ids[starts[v]:starts[v + 1]]. A call's prompt and answer end at the vertices
    `promptVertex` and `endVertex`.
    `logProbs` float32 [S], float64 if that would round; `mask` bits [S], the lowest first: sampled ids of all calls,
    those of a call from `first` on. NaN: unknown.
    """
    tree = view.build.recorded.tree
    lengths = list(map(len, tree.edge))
    parts: Parts = {
        "parents": np.array(tree.parent, np.int32),
        "starts": np.array([0, *accumulate(lengths)], np.int32),
        "ids": np.concatenate(tree.edge, dtype=np.int32, casting="same_kind"),
    }
    log_probs: list[npt.NDArray[Any]] = [np.empty(0)]
    masks: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    first = 0
    for call, told in zip(view.calls, facts["calls"], strict=True):
        recorded = view.recorded(call.key)
        if recorded is None:
            continue
        told |= {"first": first, "promptVertex": recorded.prompt_vertex, "endVertex": recorded.end_vertex}
        first += recorded.sampled
        log_probs.append(recorded.generation_log_probs)
        masks.append(view.loss_mask(call.key))
        vocabulary.learn(recorded, told)
    known = np.concatenate(log_probs)
    with np.errstate(over="ignore"):
        narrow = known.astype(np.float32)
    parts["logProbs"] = narrow if np.array_equal(narrow.astype(np.float64), known, equal_nan=True) else known
    parts["mask"] = np.packbits(np.concatenate(masks), bitorder="little")
    for model in {call.model for call in view.build.recorded.calls}:
        vocabulary.ask(model, np.unique(parts["ids"]).tolist())
    return parts
