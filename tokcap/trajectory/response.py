"""`rebuild_response`: the one scored chain as a Responses payload that carries its tokens (rule 23)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from ..errors import InvalidOptionError
from ..protocol import TokenCaptureSnapshot
from .build import Build, build
from .gaps import gaps_between, missing_calls
from .links import NO_CALL, chain_of, records_of
from .times import began_before
from .verdicts import UNTRAINED

__all__ = ("OnDrift", "Rebuild", "check_on_drift", "rebuild_from", "rebuild_response")

OnDrift = Literal["last_segment", "mask"]


class Rebuild(msgspec.Struct):
    """One response with tokens, or the reasons why there is none."""

    rollout_id: str
    snapshot_id: str
    version: int
    response: dict[str, Any] | None
    """A Responses payload; None if masked. Items that carry tokens have `prompt_token_ids`, `generation_token_ids` and
    `generation_log_probs` (lists), one item for each model call; each prompt extends all tokens before it."""
    masked: bool
    reasons: tuple[str, ...]
    """Why it is masked, as short codes (`tokcap.trajectory.REASONS`)."""
    metrics: dict[str, Any]
    """Those of `Build`, and `delivered`, `delivered_fraction`, `segments`."""
    calls: tuple[tuple[str, int], ...] = ()
    """(model_call_id, choice_index) of the calls in `response`, in order."""
    items: tuple[tuple[dict[str, Any], ...], ...] = ()
    """The output items of each of these calls."""
    spoke: tuple[str, ...] = ()
    """Which witnesses named the scored call (`Scored.spoke`)."""

    @property
    def delivered_fraction(self) -> float:
        """How much of all trained ids of the rollout the response carries, 0 to 1."""
        return float(self.metrics["delivered_fraction"])

    @property
    def segments(self) -> int:
        """How many contiguous parts the scored conversation has; more than one if it drifted."""
        return int(self.metrics["segments"])


def check_on_drift(on_drift: object) -> None:
    """Raise `InvalidOptionError` for anything but the two."""
    if on_drift not in get_args(OnDrift):
        raise InvalidOptionError(f"on_drift is {on_drift!r}, expected 'last_segment' or 'mask'")


def rebuild_response(
    snapshot: TokenCaptureSnapshot,
    *,
    models: str | Collection[str] | None = None,
    call_id: str = "",
    choice_index: int | None = None,
    response_id: str = "",
    response: Mapping[str, Any] | None = None,
    on_drift: OnDrift = "last_segment",
    strict: bool = False,
    exclude_not_behaviour: bool = False,
) -> Rebuild:
    """The scored chain as one Responses payload.

    Which chain was scored follows from what is known of the answer: call_id, choice_index, response_id, response (see
    `build`). With none of them it is the only conversation there is; if there are several, the rebuild is masked.
    on_drift: a chain whose prompts drifted is no single sequence. `last_segment`: its last contiguous part is
        delivered, and `metrics["delivered_fraction"]` and `["segments"]` say how much that is; `mask`: nothing is.

    A masked rebuild has reasons and no response. Nothing is raised because of what was recorded, and nothing is
    retired; the other trajectories of the rollout are in `build`. Raises `InvalidOptionError` for an `on_drift` that
    isn't one, and as `build` does.
    """
    built = build(
        snapshot,
        models=models,
        call_id=call_id,
        choice_index=choice_index,
        response_id=response_id,
        response=response,
        strict=strict,
        exclude_not_behaviour=exclude_not_behaviour,
    )
    return rebuild_from(built, on_drift=on_drift)


def rebuild_from(built: Build, *, on_drift: OnDrift = "last_segment") -> Rebuild:
    """`rebuild_response` of what is built already."""
    check_on_drift(on_drift)
    scored, reasons = _scored(built)
    chain = [number for number in chain_of(built.links, scored) if built.recorded.calls[number].sampled]
    steps = _steps(built, scored) if scored != NO_CALL else []
    segments = 1 + sum(built.links.parent[later] != earlier for earlier, later in steps) if chain else 0
    if not reasons:
        reasons = _doubts(built, chain, steps) if chain else ["nothing_recorded"]
    if segments > 1 and on_drift == "mask":
        reasons.append("drift")
    reasons += [reason for reason in built.reasons if reason.startswith("strict:")]
    delivered = 0 if reasons else sum(built.judged[number].trained for number in chain)
    metrics = {
        **built.metrics,
        "delivered": delivered,
        "delivered_fraction": delivered / built.metrics["trained"] if built.metrics["trained"] else 0.0,
        "segments": segments,
    }
    rebuilt = Rebuild(
        built.rollout_id, built.snapshot_id, built.version, None, bool(reasons), tuple(dict.fromkeys(reasons)), metrics
    )
    if not reasons:
        rebuilt.spoke = built.scored.spoke
        rebuilt.calls = tuple(built.recorded.calls[number].key for number in chain)
        # One list that all prompts are cut from, so that they share its integers: 800 turns repeat theirs 400 times.
        ids = _ids_of(built, chain[-1])
        rebuilt.items = tuple(_items(built, number, ids) for number in chain)
        rebuilt.response = _payload(built, chain, rebuilt.items)
    return rebuilt


def _scored(built: Build) -> tuple[int, list[str]]:
    """The scored call, by the witnesses or because there is only one conversation; or why there is none."""
    if not built.metrics["sampled"]:
        return NO_CALL, ["nothing_recorded"]
    if built.scored.reason:
        return NO_CALL, [built.scored.reason]
    if built.scored.number != NO_CALL:
        return built.scored.number, []
    if built.metrics["other_model"] and not built.models:
        return NO_CALL, ["several_models"]
    included = [
        number
        for number in built.links.answered
        if built.judged[number].verdict not in ("abandoned", "aborted", "other_model")
    ]
    went_on = {_continued(built, number) for number in included}
    last = [number for number in included if number not in went_on]
    if len(last) == 1:
        return last[0], []
    if not last:
        return NO_CALL, ["aborted"]
    if all(built.judged[number].verdict == "ambiguous" for number in last):
        return NO_CALL, ["ambiguous"]
    return NO_CALL, ["several_conversations"]


def _continued(built: Build, number: int) -> int:
    """The call that a call continues in its conversation, by ids or in spite of a drift; NO_CALL if none."""
    drift = built.drift_of.get(number)
    if drift is not None and not drift.before_answer:
        return drift.nearest_number
    return built.links.parent[number]


def _steps(built: Build, number: int) -> list[tuple[int, int]]:
    """(earlier, later) call, from the last step of the conversation that leads to a call back to its first."""
    steps = []
    while (before := _continued(built, number)) != NO_CALL:
        steps.append((before, number))
        number = before
    return steps


def _doubts(built: Build, chain: list[int], steps: list[tuple[int, int]]) -> list[str]:
    """Why the chain can't be trained as one response. `steps`: of its whole conversation."""
    recorded, links = built.recorded, built.links
    reasons: list[str] = []
    for number in chain:
        found = built.judged[number]
        reasons += [category for category in found.counts if category in UNTRAINED]
    # A lost call may be the scored one unless an id says which that is: another answer may have the same text.
    named = set(built.scored.spoke) - {"content"}
    last = records_of(recorded, links, chain[-1])
    final = not named and any(
        not all(began_before(missing, record) for record in last) for missing in missing_calls(recorded)
    )
    if final or gaps_between(recorded, links, steps):
        reasons.append("lost_call")
    return reasons


def _ids_of(built: Build, number: int) -> list[int]:
    """Prompt and sampled ids of a call."""
    call = built.recorded.calls[number]
    ids = np.empty(call.total, np.int32)
    built.recorded.tree.ids_to(call.end_vertex, ids)
    return ids.tolist()


def _items(built: Build, number: int, ids: list[int]) -> tuple[dict[str, Any], ...]:
    """The output items of one call, one of which carries its tokens; `ids` start with its prompt and its answer."""
    found = built.judged[number]
    answer = found.source.contents
    items = [dict(item) for item in answer.output_items if isinstance(item, Mapping)]
    carrier = answer.token_item_index
    if len(items) != len(answer.output_items) or not items:
        items, carrier = [*items, {"type": "message", "role": "assistant", "content": []}], None
    items[len(items) - 1 if carrier is None else carrier].update(
        prompt_token_ids=ids[: found.call.prompt],
        generation_token_ids=ids[found.call.prompt : found.call.total],
        generation_log_probs=found.source.generation_log_probs.tolist(),
    )
    return tuple(items)


def _payload(built: Build, chain: list[int], items: tuple[tuple[dict[str, Any], ...], ...]) -> dict[str, Any]:
    calls = [built.judged[number].source for number in chain]
    answer = calls[-1].contents
    read, sampled = calls[0].prompt, sum(call.sampled for call in calls)
    return {
        "id": answer.response_id or f"resp_{calls[-1].model_call_id}",
        "object": "response",
        "created_at": answer.created_at,
        "model": answer.model,
        "status": "incomplete" if answer.finish_reason == "length" else "completed",
        "output": [item for group in items for item in group],
        "usage": {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled},
    }
