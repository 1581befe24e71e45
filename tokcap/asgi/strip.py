"""Taking out of an answer what the client did not ask for, so that it sees what it would have seen.

The rules are checked against pairs of recorded exchanges, with and without what is added (`tests/exchanges`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .asks import Asked

__all__ = ("Stripper",)

_REASONING = ("reasoning", "reasoning_content")


class Stripper:
    """Takes out of one answer what `asked` added to it, whole or chunk by chunk.

    fingerprint: the `system_fingerprint` of this server, None if it has none, UNSET if it isn't known yet. vLLM from
    0.22 on moves it from the last chunk of each choice to that of the usage, so that it has to be moved back. Until it
    is known, a choice that ends before the others goes without: events flow as they come.
    """

    def __init__(self, asked: Asked, fingerprint: Any = msgspec.UNSET) -> None:
        self.fingerprint = fingerprint
        self.told: Any = msgspec.UNSET
        """What this answer said of it; None if it said that there is none."""
        self.changed = False
        """Whether the answer or the event that came last was changed."""
        self._asked = asked
        self._nulls, self._removes = _grouped(asked.nulls), _grouped(asked.removes)
        self._usage_is_forced = False
        self._echoed: set[int] = set()

    def answer(self, payload: Any) -> Any:
        """A whole answer, changed in place; a list of them is that of a batch."""
        self.changed = False
        for each in payload if isinstance(payload, list) else [payload]:
            if isinstance(each, dict):
                if "system_fingerprint" in each:
                    self.told = each["system_fingerprint"]
                self._strip(each)
        return payload

    def learn(self, event: Any) -> None:
        """What an event tells of those before it that are still held. To be called in the order of the stream."""
        if _is_usage(event):
            self.fingerprint = self.told = event.get("system_fingerprint")
        elif self._counts_every_chunk(event):
            # Nobody asked for usage in every chunk: the server is told to give it in any case.
            self._usage_is_forced = True

    def _counts_every_chunk(self, event: Any) -> bool:
        drops = self._asked.drops
        return (
            isinstance(event, dict)
            and event.get("usage") is not None
            and "usage" in drops
            and "continuous" not in drops
        )

    def chunk(self, event: Any) -> Any:
        """One event of a stream, changed in place; None if it is only there because of us."""
        self.changed = False
        if not isinstance(event, dict):
            return event
        drops = self._asked.drops
        drops_usage = "usage" in drops and not self._usage_is_forced
        if drops_usage and _is_usage(event):
            return None
        # Judged before it is stripped: afterwards nothing tells it from an empty chunk of the engine's own.
        choices = event.get("choices")
        only_ours = "empty" in drops and _is_empty(choices)
        self._strip(event)
        if only_ours or ("ids" in drops and choices == [] and not _says_more(event)):
            return None
        if "reasoning" in drops and _is_empty(event.get("choices")):
            return None
        if drops_usage and _is_last(choices) and "system_fingerprint" not in event and _known(self.fingerprint):
            _insert_after(event, ("choices", "usage"), "system_fingerprint", self.fingerprint)
            self.changed = True
        return event

    def _echo(self, payload: dict[str, Any]) -> None:
        """Put the prompt before the text of each choice; in a stream before its first one."""
        for choice in _owners(payload, "choices"):
            index, text = choice.get("index"), choice.get("text")
            if type(index) is int and index >= 0 and isinstance(text, str) and index not in self._echoed:
                self._echoed.add(index)
                prompt = index // self._asked.choices_per_prompt
                if prompt < len(self._asked.echoes):
                    choice["text"] = self._asked.echoes[prompt] + text
                    self.changed = True

    def _strip(self, payload: dict[str, Any]) -> None:
        for outer, keys in self._nulls.items():
            for owner in _owners(payload, outer):
                for key in keys:
                    if owner.get(key) is not None:
                        owner[key] = None
                        self.changed = True
        for outer, keys in self._removes.items():
            for owner in _owners(payload, outer):
                for key in keys:
                    if key in owner:
                        del owner[key]
                        self.changed = True
            if outer not in ("", "choices") and payload.get(outer) == {}:
                del payload[outer]
        if "continuous" in self._asked.drops and payload.get("choices") and payload.get("usage") is not None:
            # SGLang builds the chunks of tool calls in another way than those of text.
            if any("tool_calls" in (choice.get("delta") or ()) for choice in _owners(payload, "choices")):
                payload["usage"] = None
            else:
                del payload["usage"]
            self.changed = True
        if self._asked.echoes:
            self._echo(payload)
        if "reasoning" in self._asked.drops:
            for choice in _owners(payload, "choices"):
                for name in ("message", "delta"):
                    if isinstance(choice.get(name), dict):
                        choice[name] = _without_reasoning(choice[name], streamed=name == "delta")
                        self.changed = True


def _grouped(places: list[str]) -> dict[str, list[str]]:
    """The members to be looked at, by what they stand in: nothing (the root), `choices`, or another member."""
    found: dict[str, list[str]] = {}
    for place in places:
        outer, _, key = place.rpartition(".")
        found.setdefault(outer, []).append(key)
    return found


def _owners(payload: dict[str, Any], outer: str) -> list[dict[str, Any]]:
    """The objects in which such members stand."""
    if not outer:
        return [payload]
    value = payload.get(outer)
    if outer == "choices":
        return [choice for choice in value if isinstance(choice, dict)] if isinstance(value, list) else []
    if not isinstance(value, dict):
        return []
    payload[outer] = dict(value)  # what was joined of a stream refers to the other one
    return [payload[outer]]


def _is_usage(event: Any) -> bool:
    """Whether this is the chunk that gives the usage of the whole stream."""
    return isinstance(event, dict) and event.get("choices") == [] and event.get("usage") is not None


def _is_empty(choices: Any) -> bool:
    """Whether the chunk says nothing but ids and log-probs: `{}`, or with the null that some versions put into it."""
    if not isinstance(choices, list):
        return False
    for choice in choices:  # of every chunk
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
            return False
        for key, value in delta.items():
            if value is not None or key not in _REASONING:
                return False
    return bool(choices)


def _is_last(choices: Any) -> bool:
    """Whether a choice ends with this chunk."""
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in choices
    )


def _says_more(event: Mapping[str, Any]) -> bool:
    """Whether a chunk without choices has a usage, or anything of an extension."""
    return event.get("usage") is not None or bool(event.get("sglext"))


def _known(fingerprint: Any) -> bool:
    return fingerprint is not msgspec.UNSET and fingerprint is not None


def _insert_after(event: dict[str, Any], before: tuple[str, ...], key: str, value: Any) -> None:
    """Set a member behind those that stand before it in the order of the engine."""
    last = max((position for position, name in enumerate(event) if name in before), default=-1)
    behind = list(event.items())[last + 1 :]
    for name, _ in behind:
        del event[name]
    event[key] = value
    event.update(behind)


def _without_reasoning(part: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
    """As vLLM hides it: null, in a stream beside the content of every delta that has any."""
    if not streamed:
        return {key: None if key in _REASONING else value for key, value in part.items()}
    said = {key: value for key, value in part.items() if key not in _REASONING}
    if "role" in said:
        return said
    if not said.get("content") and not said.get("tool_calls"):
        return {}
    return {"content": said.pop("content", None), "reasoning": None, **said}
