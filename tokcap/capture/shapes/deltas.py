"""Chunks of OpenAI-style streams put together: chat, completions and vLLM's own generate route."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from ...errors import UnusableAnswerError
from .places import as_dict, as_list, count, text

__all__ = ("ChunkedAnswer",)

_LISTS = ("token_ids", "response_token_ids", "sampling_mask")
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_JOINED = ("sglext", "nvext", "metadata")
_NOT_REPLACED = frozenset(("choices", "usage", "prompt_token_ids", *_JOINED))
"""Members of the root of which a later chunk doesn't simply say something newer."""
_NO_ENTRY = {"token": "", "logprob": None, "bytes": None}


class _Choice:
    """One choice, as far as it was streamed. Lists of the chunks are joined, other values replaced by later ones."""

    def __init__(self, index: Any) -> None:
        self.values: dict[str, Any] = {"index": index}
        self.texts: dict[str, list[str]] = {}
        self.message: dict[str, Any] = {}
        self.calls: dict[Any, dict[str, Any]] = {}
        self.entries: list[Any] = []
        self.columns: dict[str, list[Any]] = {}
        self.has_log_probs = self.by_column = self.has_message = self.has_text = False
        self.counted = 0
        """How many tokens were sampled up to the last chunk that told; 0 if none did."""
        self.uncounted = False
        """Whether log-probs came without ids and without such a count, so that nothing tells whose they are."""

    def add(self, part: dict[str, Any], sampled: int | None = None) -> None:
        """One chunk. sampled: how many tokens there are up to its end, if it tells."""
        for key, value in part.items():
            if key == "delta":
                self.has_message = True
                self._add_delta(as_dict(value))
            elif value is None:
                continue
            elif key == "text":
                self.has_text = True
                self._add_text(key, value)
            elif key == "prompt_token_ids":
                self.set_prompt(value)
            elif key in _LISTS and isinstance(value, list):
                self.values.setdefault(key, []).extend(value)
            elif key not in ("logprobs", "index"):
                self.values[key] = value
        ids = part.get("token_ids", part.get("response_token_ids"))
        if not isinstance(ids, list):
            self._align(as_list(as_dict(part.get("logprobs")).get("content")), sampled)
        self._add_log_probs(part.get("logprobs"), len(ids) if isinstance(ids, list) else 0)

    def set_prompt(self, value: Any) -> None:
        if value is None:
            return
        if _differ(self.values.setdefault("prompt_token_ids", value), value):
            raise UnusableAnswerError(f"the stream gives two different prompts for choice {self.values['index']}")

    def _add_delta(self, delta: dict[str, Any]) -> None:
        for key, value in delta.items():
            if key in _TEXTS and isinstance(value, str):
                self._add_text(key, value)
            elif key == "tool_calls":
                for position, call in enumerate(as_list(value)):
                    self._add_call(as_dict(call), position)
            elif value is not None:
                self.message[key] = value

    def _align(self, entries: list[Any], sampled: int | None) -> None:
        """Leave the places of tokens open whose log-probs were in no chunk.

        SGLang sends no chunk for a step without text, such as the stop token, and its log-probs with it. Those that a
        chunk has are of the last tokens up to its count (`continuous_usage_stats`).
        """
        if sampled is None:
            self.uncounted |= bool(entries)
            return
        self.counted = max(self.counted, sampled)
        missing = sampled - len(entries) - len(self.entries) if entries else 0
        self.entries.extend(repeat(_NO_ENTRY, max(missing, 0)))

    def _add_text(self, key: str, value: Any) -> None:
        if isinstance(value, str):
            self.texts.setdefault(key, []).append(value)

    def _add_call(self, part: dict[str, Any], position: int) -> None:
        key: Any = part.get("index")
        if type(key) is not int:
            # Servers that leave the index out name a call once, and go on with the one that was named last.
            key = next(reversed(self.calls), position)
            if isinstance(part.get("id"), str):
                key = part["id"]
            elif (
                as_dict(part.get("function")).get("name")
                and key in self.calls
                and "name" in self.calls[key]["function"]
            ):
                key = ("unnamed", len(self.calls))
        call = self.calls.setdefault(key, {"function": {}})
        for key, value in part.items():
            if key not in ("function", "index") and value is not None:
                call[key] = value
        for key, value in as_dict(part.get("function")).items():
            if key == "arguments" and isinstance(value, str):
                call["function"].setdefault(key, []).append(value)
            elif value:
                call["function"][key] = value

    def _add_log_probs(self, value: Any, ids: int) -> None:
        # A chunk whose log-probs are missing, all or some, leaves its ids' positions unknown, and shifts nothing.
        logprobs = as_dict(value)
        content, numbers = logprobs.get("content"), logprobs.get("token_logprobs")
        if isinstance(content, list) and len(content) >= max(ids, 1):
            self.has_log_probs = True
            self.entries.extend(content)
        elif isinstance(numbers, list) and len(numbers) >= max(ids, 1):
            self.has_log_probs = self.by_column = True
            for key in _COLUMNS:
                found = logprobs.get(key)
                whole = found if isinstance(found, list) and len(found) == len(numbers) else [None] * len(numbers)
                self.columns.setdefault(key, []).extend(whole)
        else:
            self.entries.extend(repeat(_NO_ENTRY, ids))
            for key in _COLUMNS:
                self.columns.setdefault(key, []).extend(repeat(None, ids))

    def joined(self) -> dict[str, Any]:
        choice = dict(self.values)
        texts = {key: "".join(parts) for key, parts in self.texts.items()}
        if self.has_text:
            choice["text"] = texts.pop("text", "")
        if self.has_message:
            choice["message"] = {**self.message, **texts}
            if self.calls:
                choice["message"]["tool_calls"] = [_joined_call(call) for call in self.calls.values()]
        if self.has_log_probs:
            if not self.uncounted:
                self.entries.extend(repeat(_NO_ENTRY, self.counted - len(self.entries)))
            choice["logprobs"] = self.columns if self.by_column else {"content": self.entries}
        return choice


class ChunkedAnswer:
    """The answer that the chunks of a stream make."""

    def __init__(self) -> None:
        self._root: dict[str, Any] = {}
        self._choices: dict[Any, _Choice] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """One chunk. Raises `UnusableAnswerError` if it contradicts an earlier one."""
        parts = as_list(chunk.get("choices"))
        sampled = count(as_dict(chunk.get("usage")).get("completion_tokens")) if len(parts) == 1 else None
        for position, part in enumerate(map(as_dict, parts)):
            index = part.get("index")
            index = index if type(index) is int else position
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _Choice(index)
            choice.add(part, sampled)
        for key, value in chunk.items():
            if value is None:
                continue
            if key not in _NOT_REPLACED:
                self._root[key] = value
                continue
            if key == "choices" or (key == "usage" and self._is_interim(parts)):
                continue
            known = self._root.get(key)
            if key == "prompt_token_ids" and known is not None:
                # The chunk that opens a choice repeats the prompt.
                if _differ(known, value):
                    raise UnusableAnswerError("the stream gives two different prompts at the root")
            elif isinstance(known, dict) and isinstance(value, dict) and key in _JOINED:
                self._root[key] = {**known, **value}
            else:
                self._root[key] = value

    def _is_interim(self, parts: list[Any]) -> bool:
        """Whether the usage of a chunk is only that of one choice, or only that so far (`continuous_usage_stats`)."""
        return bool(parts) and not (len(self._choices) == 1 and as_dict(parts[-1]).get("finish_reason") is not None)

    def finished(self, choices: int) -> bool:
        """Whether each of `choices` choices has a finish reason."""
        reasons = [choice.values.get("finish_reason") for choice in self._choices.values()]
        return len(reasons) >= choices and None not in reasons

    def answer(self) -> dict[str, Any]:
        """As it would have been without streaming."""
        choices = [self._choices[index].joined() for index in sorted(self._choices)]
        name = text(self._root.get("object")).removesuffix(".chunk")
        return {**self._root, **({"object": name} if name else {}), "choices": choices}


def _differ(one: Any, other: Any) -> bool:
    """Whether two prompts are not the same; they may be lists or arrays."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return not np.array_equal(one, other)
    return bool(one != other)


def _joined_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), list):
        function["arguments"] = "".join(function["arguments"])
    return {**call, "function": function}
