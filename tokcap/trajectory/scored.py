"""Which call gave the answer that was scored (rule 18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..digests import answer_digest, message_digest
from .links import NO_CALL, Links
from .recorded import Recorded

__all__ = ("Scored", "Witnesses", "attribute", "last_turn")


class Witnesses(msgspec.Struct, frozen=True):
    """What is known of the scored answer; any of it may be missing."""

    call_id: str = ""
    """The model call id, as captured answers carry it in the header `x-tokcap-call-id`."""
    choice_index: int | None = None
    response_id: str = ""
    """The response id that the harness declares."""
    response: Mapping[str, Any] | None = None
    """The scored response itself, in Responses or chat form: its `id` and its content speak."""


class Scored(msgspec.Struct, frozen=True):
    """The outcome of asking the witnesses."""

    number: int = NO_CALL
    """Representative of the scored call; NO_CALL if none is attributed."""
    spoke: tuple[str, ...] = ()
    """The witnesses that named a call: any of `call_id`, `response_id`, `response.id`, `content`."""
    reason: str = ""
    """Why no call is attributed although a witness was asked: `no_such_call` or `witnesses_disagree`."""


def attribute(recorded: Recorded, links: Links, witnesses: Witnesses) -> Scored:
    """Ask every witness. All that speak must name the same token sequence; each is silent on doubt."""
    by_content = _by_content(recorded, links, witnesses.response)
    named: dict[str, int] = {}
    for witness, value in (("call_id", witnesses.call_id), ("response_id", witnesses.response_id)):
        if not value:
            continue
        candidates = _by_id(recorded, links, witness, value)
        if not candidates:
            return Scored(reason="no_such_call")
        _speak(recorded, named, witness, candidates, by_content, witnesses.choice_index)
    own_id = (witnesses.response or {}).get("id")
    if isinstance(own_id, str) and own_id:
        # A harness may give its response an id of its own; one that no call has says nothing.
        candidates = _by_id(recorded, links, "response_id", own_id)
        _speak(recorded, named, "response.id", candidates, by_content, witnesses.choice_index)
    # An earlier call with the same text can't be told from the last by content; never cut a chain there.
    ends = {number for number in by_content if not links.children.get(number)}
    if len(ends) == 1:
        named["content"] = ends.pop()
    places = {
        (recorded.calls[i].prompt_vertex, recorded.calls[i].end_vertex, recorded.calls[i].model) for i in named.values()
    }
    if len(places) > 1:
        return Scored(spoke=tuple(named), reason="witnesses_disagree")
    return Scored(min(named.values()), tuple(named)) if named else Scored()


def _speak(
    recorded: Recorded,
    named: dict[str, int],
    witness: str,
    candidates: set[int],
    by_content: set[int],
    choice_index: int | None,
) -> None:
    if len(candidates) > 1 and choice_index is not None:
        candidates = {i for i in candidates if recorded.calls[i].choice_index == choice_index}
    if len(candidates) > 1:
        candidates = candidates & by_content
    if len(candidates) == 1:
        named[witness] = next(iter(candidates))


def _by_id(recorded: Recorded, links: Links, witness: str, value: str) -> set[int]:
    field = "model_call_id" if witness == "call_id" else "response_id"
    return {links.representative[call.number] for call in recorded.calls if getattr(call.answer, field) == value}


def _by_content(recorded: Recorded, links: Links, response: Mapping[str, Any] | None) -> set[int]:
    digest = _content_digest(response)
    if digest is None:
        return set()
    return {number for number in links.answered if answer_digest(recorded.calls[number].answer.output_items) == digest}


def _content_digest(response: Mapping[str, Any] | None) -> bytes | None:
    if response is None:
        return None
    choices = response.get("choices")
    if isinstance(choices, Sequence) and len(choices) == 1 and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        if isinstance(message, Mapping) and (message.get("content") or message.get("tool_calls")):
            return message_digest({"role": "assistant", **message})
        return None
    return answer_digest(last_turn(response))


def last_turn(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The items of the model's last turn: what stands behind the last item that isn't the model's."""
    output = response.get("output")
    turn: list[Mapping[str, Any]] = []
    for item in reversed(output if isinstance(output, Sequence) and not isinstance(output, str) else ()):
        if not isinstance(item, Mapping) or not is_model_item(item):
            break
        turn.append(item)
    return turn[::-1]


def is_model_item(item: Mapping[str, Any]) -> bool:
    """Whether a Responses item was written by the model: not a tool's result, not somebody else's message."""
    kind = item.get("type", "message")
    if kind == "message":
        return bool(item.get("role", "assistant") == "assistant")
    return kind in ("reasoning", "function_call") or (isinstance(kind, str) and kind.endswith("_call"))
