"""Which call gave the answer that was scored (rule 18)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..digests import answer_digest, message_digest
from .links import NO_CALL, Links
from .recorded import Recorded

__all__ = ("Scored", "Witnesses", "attribute", "is_model_item", "last_turn")


class Witnesses(msgspec.Struct, frozen=True):
    """What is known of the scored answer; any of it may be missing."""

    call_id: str = ""
    """The model call id, as captured answers carry it in the header `x-tokcap-call-id`."""
    choice_index: int | None = None
    response_id: str = ""
    """The response id that the harness declares."""
    response: Mapping[str, Any] | None = None
    """The scored response itself, in Responses or chat form: its `id` and its content speak."""

    @property
    def any(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self.call_id or self.response_id) or self.response is not None


class Scored(msgspec.Struct, frozen=True):
    """The outcome of asking the witnesses."""

    number: int = NO_CALL
    """Representative of the scored call; NO_CALL if none is attributed."""
    spoke: tuple[str, ...] = ()
    """The witnesses that named a call: any of `call_id`, `response_id`, `response.id`, `content`."""
    reason: str = ""
    """Why no call is attributed although a witness was asked: `no_such_call` or `witnesses_disagree`."""


def attribute(recorded: Recorded, links: Links, continued: Collection[int], witnesses: Witnesses) -> Scored:
    """Ask every witness. All that speak must name the same token sequence; each is silent on doubt.

    continued: representatives that a later call goes on from, by ids or in spite of a drift.
    """
    by_content = _by_content(recorded, links, witnesses.response)
    own_id = (witnesses.response or {}).get("id")
    named: dict[str, int] = {}
    for witness, field, value in (
        ("call_id", "model_call_id", witnesses.call_id),
        ("response_id", "response_id", witnesses.response_id),
        ("response.id", "response_id", own_id if isinstance(own_id, str) else ""),
    ):
        if not value:
            continue
        calls = [call for call in recorded.calls if getattr(call, field) == value]
        if witnesses.choice_index is not None:
            calls = [call for call in calls if call.choice_index == witnesses.choice_index]
        candidates = {links.representative[call.number] for call in calls}
        if len(candidates) > 1:
            candidates &= by_content
        if len(candidates) == 1:
            named[witness] = candidates.pop()
        elif not calls and witness != "response.id":
            # A harness may give its response an id of its own, which says nothing; an id that it declares is meant.
            return Scored(reason="no_such_call")
    # An earlier call with the same text can't be told from the last by content; never cut a chain there.
    ends = {number for number in by_content if number not in continued}
    if len(ends) == 1:
        named["content"] = ends.pop()
    places = {
        (recorded.calls[i].prompt_vertex, recorded.calls[i].end_vertex, recorded.calls[i].model) for i in named.values()
    }
    if len(places) > 1:
        return Scored(spoke=tuple(named), reason="witnesses_disagree")
    return Scored(min(named.values()), tuple(named)) if named else Scored()


def _by_content(recorded: Recorded, links: Links, response: Mapping[str, Any] | None) -> set[int]:
    digest = _content_digest(response)
    if digest is None:
        return set()
    return {
        number
        for number in links.answered
        if any(answer_digest(recorded.calls[i].contents.output_items) == digest for i in links.members[number])
    }


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
