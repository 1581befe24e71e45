"""Streams that aren't OpenAI's: SGLang's own route, TGI, Responses, and messages of Anthropic's dialect."""

from __future__ import annotations

from typing import Any

from ...errors import UnusableAnswerError
from .places import as_dict, as_list, count, text

__all__ = ("MessagesStream", "NativeStream", "ResponsesStream", "TokenStream")

_DELTAS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)


class NativeStream:
    """SGLang `/generate`: each event repeats everything, or, with `--incremental-streaming-output`, only what is new.

    The events don't say which. The number of sampled tokens does: a list as long as that is a whole one, and one that
    fills up what was there to that length is new. Each list is judged by itself, since older builds send the ids in
    pieces and the log-probs whole.
    """

    def __init__(self) -> None:
        self._answers: dict[int, dict[str, Any]] = {}
        self._finished: set[int] = set()

    def add(self, event: dict[str, Any]) -> None:
        """One event. Raises `UnusableAnswerError` if its lists fit neither way of streaming."""
        number = event.get("index")
        index = number if type(number) is int else 0
        meta = as_dict(event.get("meta_info"))
        before = self._answers.get(index, {})
        meta_before = as_dict(before.get("meta_info"))
        sampled = count(meta.get("completion_tokens"))
        lists = {key: _grown(meta_before.get(key), meta[key], sampled, key) for key in _DELTAS if key in meta}
        now = {**before, **event, "meta_info": {**meta_before, **meta, **lists}}
        ids = event.get("output_ids")
        if "output_ids" in event:
            now["output_ids"] = _grown(before.get("output_ids"), ids, sampled, "output_ids")
        if "text" in event:
            measured = ids if ids is not None else meta.get("output_token_logprobs")
            is_new = isinstance(measured, list) and sampled is not None and len(measured) < sampled
            now["text"] = text(before.get("text")) + text(event["text"]) if is_new else event["text"]
        self._answers[index] = now
        if meta.get("finish_reason") is not None:
            self._finished.add(index)

    def finished(self, choices: int) -> bool:
        """Whether each of `choices` choices has a finish reason."""
        return len(self._answers) >= choices and self._finished >= set(self._answers)

    def answer(self) -> Any:
        """One object, or a list of them if there are several choices."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        return answers[0] if len(answers) == 1 else answers


def _grown(before: Any, now: Any, sampled: int | None, name: str) -> Any:
    if not isinstance(now, list):
        return before if now is None else now
    known = as_list(before)
    if sampled is None or len(now) == sampled:
        # Without a count nothing but the values tells a whole list from a new part.
        if (sampled is None or name == "output_ids") and now[: len(known)] != known:
            raise UnusableAnswerError(f"{name} of the stream is not continued: an event has other values than before")
        return list(now)
    if len(known) + len(now) == sampled:
        known.extend(now)  # a list of this stream, not one that was fed
        return known
    raise UnusableAnswerError(
        f"{name} of the stream has {len(now)} values after {len(known)}, but completion_tokens is {sampled}"
    )


class TokenStream:
    """TGI `/generate_stream`: an event for each token, the last one with the details."""

    def __init__(self) -> None:
        self._tokens: list[Any] = []
        self._last: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        """One event."""
        self._tokens.append(event.get("token"))
        if event.get("details") is not None or event.get("generated_text") is not None:
            self._last = event

    def finished(self, choices: int) -> bool:
        """Whether the event with the details was seen."""
        return bool(self._last)

    def answer(self) -> dict[str, Any]:
        """As it would have been without streaming; the text is left out until the last event gives it."""
        details = {**as_dict(self._last.get("details")), "tokens": self._tokens}
        return {"generated_text": self._last.get("generated_text"), "details": details}


class ResponsesStream:
    """`/v1/responses`: the last event holds the whole response."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}
        self._items: dict[Any, Any] = {}
        self._finished = False

    def add(self, event: dict[str, Any]) -> None:
        """One event."""
        kind = text(event.get("type"))
        if isinstance(event.get("response"), dict):
            self._response = event["response"]
        if kind == "response.output_item.done" and type(event.get("output_index")) is int:
            self._items[event["output_index"]] = event.get("item")
        if kind in ("response.completed", "response.incomplete"):
            self._finished = True

    def finished(self, choices: int) -> bool:
        """Whether the event with the whole response was seen."""
        return self._finished

    def answer(self) -> dict[str, Any]:
        """The response; the items that were done, if it was cut off."""
        if self._finished:
            return self._response
        return {**self._response, "output": [self._items[index] for index in sorted(self._items)]}


class MessagesStream:
    """`/v1/messages`: no ids in any event; id, model, usage, and what blocks there are, are kept."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: list[Any] = []
        self._finished = False

    def add(self, event: dict[str, Any]) -> None:
        """One event."""
        kind = event.get("type")
        usage = {**as_dict(self._message.get("usage")), **as_dict(event.get("usage"))}
        if kind == "message_start":
            message = as_dict(event.get("message"))
            usage = {**usage, **as_dict(message.get("usage"))}
            self._message = dict(message)
        if kind == "content_block_start":
            self._blocks.append(event.get("content_block"))
        if kind == "message_delta":
            self._message.update(as_dict(event.get("delta")))
        self._message["usage"] = usage
        self._finished = self._finished or kind == "message_stop" or self._message.get("stop_reason") is not None

    def finished(self, choices: int) -> bool:
        """Whether the message has a stop reason."""
        return self._finished

    def answer(self) -> dict[str, Any]:
        """What is known of the message; its blocks as they began, without their text."""
        return {**self._message, "content": self._blocks} if self._blocks else self._message
