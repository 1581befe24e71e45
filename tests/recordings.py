"""The recorded traffic in `tests/traffic`, and the entries that its bodies prove.

Ids and log-probs are taken from where vLLM puts them and nowhere else; nothing is tokenised, padded or guessed. A call
whose body holds no ids has no entries.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokcap import TokenEntry

__all__ = ("RecordedCall", "RecordedRollout", "load", "names", "rollouts")

TRAFFIC = Path(__file__).parent / "traffic"

_GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "n",
    "logprobs",
    "top_logprobs",
)
_TOKEN_AS_ID = "token_id:"


class RecordedCall(msgspec.Struct, frozen=True, dict=True):
    """One exchange of a recorded rollout."""

    rollout_id: str
    seq: int
    path: str
    request: dict[str, Any]
    status: int
    note: str = ""
    response: dict[str, Any] | None = None
    """The body of an answer that was not streamed."""
    sse: list[str] | None = None
    """The non-empty lines of an answer that was."""

    @property
    def model_call_id(self) -> str:
        return f"call-{self.seq:04d}"

    @property
    def generates(self) -> bool:
        """Whether a request to this path asks the model for tokens, whatever came of it."""
        return self.path in _GENERATING_PATHS

    @property
    def choices(self) -> int:
        """How many answers were asked for."""
        return int(self.request.get("n") or 1)

    @property
    def outcome(self) -> Literal["recorded", "no_generation", "lost"]:
        """What a capture of this call has to say: recorded only if ids of every choice are there."""
        if len(self.entries) == self.choices:
            return "recorded"
        return "no_generation" if self.status >= 400 or not self.generates else "lost"

    @cached_property
    def entries(self) -> tuple[TokenEntry, ...]:
        """One for every choice whose prompt ids and sampled ids are in the body."""
        answer = self.response if self.sse is None else _joined(self.sse)
        found = []
        for choice in (answer or {}).get("choices", ()):
            prompt = _first(answer, choice, "prompt_token_ids")
            if prompt is not None and choice.get("token_ids") is not None:
                found.append(self._entry(answer or {}, choice, prompt))
        return tuple(found)

    def _entry(self, answer: dict[str, Any], choice: dict[str, Any], prompt: list[int]) -> TokenEntry:
        ids = choice["token_ids"]
        log_probs, pieces = _log_probs_and_pieces(choice.get("logprobs"), ids, f"{self.rollout_id} {self.seq}")
        item = choice["message"] if "message" in choice else {"text": choice["text"]}
        return TokenEntry(
            self.rollout_id,
            self.model_call_id,
            prompt,
            ids,
            log_probs,
            choice_index=choice["index"],
            output_items=[item],
            token_item_index=0,
            model=answer["model"],
            response_id=answer["id"],
            finish_reason=choice.get("finish_reason") or "",
            created_at=answer["created"],
            sampling={key: self.request[key] for key in _SAMPLING_KEYS if key in self.request},
            pieces=pieces,
        )


class RecordedRollout(msgspec.Struct, frozen=True):
    """One file: a rollout and its calls, in the order in which the client sent them."""

    rollout_id: str
    shape: str
    model: str
    calls: tuple[RecordedCall, ...]

    @property
    def entries(self) -> tuple[TokenEntry, ...]:
        return tuple(entry for call in self.calls for entry in call.entries)


def names() -> list[str]:
    """The names of all recorded rollouts, sorted."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in TRAFFIC.glob("*.jsonl.gz"))


def load(name: str) -> RecordedRollout:
    """The recorded rollout of that name."""
    with gzip.open(TRAFFIC / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        head, *calls = map(json.loads, lines)
    return RecordedRollout(
        head["rollout"],
        head["shape"],
        head["model"],
        tuple(msgspec.convert({"rollout_id": head["rollout"], **call}, RecordedCall) for call in calls),
    )


def rollouts() -> Iterator[RecordedRollout]:
    """All recorded rollouts, by name."""
    return map(load, names())


def _first(answer: dict[str, Any] | None, choice: dict[str, Any], key: str) -> Any:
    """Chat answers carry the prompt ids beside the choices, completions inside each."""
    return choice[key] if choice.get(key) is not None else (answer or {}).get(key)


def _joined(sse: list[str]) -> dict[str, Any]:
    """A streamed answer as if it had not been: the chunks of each choice put together."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for line in sse:
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        parts = chunk.pop("choices", ())
        answer.update({key: value for key, value in chunk.items() if value is not None})
        for part in parts:
            _add(choices.setdefault(part["index"], {"index": part["index"]}), part)
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    if part.get("token_ids") is not None:
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    if part.get("logprobs") is not None:
        for key, column in part["logprobs"].items():
            if column is not None:
                choice.setdefault("logprobs", {}).setdefault(key, []).extend(column)
    if "text" in part:
        choice["text"] = choice.get("text", "") + part["text"]
    for key, value in part.get("delta", {}).items():
        message = choice.setdefault("message", {})
        joins = isinstance(value, str) and key != "role"
        message[key] = message.get(key, "") + value if joins else value
    for key in ("prompt_token_ids", "finish_reason", "stop_reason"):
        if part.get(key) is not None:
            choice[key] = part[key]


def _log_probs_and_pieces(
    logprobs: dict[str, Any] | None, ids: list[int], where: str
) -> tuple[list[float | None], list[bytes] | None]:
    """One log-prob per id, that of the sampled token; None where the body has none. The bytes, if all are known."""
    if logprobs is None:
        return [None] * len(ids), None
    if logprobs.get("content") is None:
        columns = logprobs["token_logprobs"]
        _check(len(columns) == len(ids), where, f"{len(columns)} log-probs for {len(ids)} ids")
        return columns, None
    content = logprobs["content"]
    _check(len(content) == len(ids), where, f"{len(content)} log-probs for {len(ids)} ids")
    named = [item["token"] for item in content if item["token"].startswith(_TOKEN_AS_ID)]
    if named:  # then the bytes may be those of the placeholder
        _check(named == [f"{_TOKEN_AS_ID}{token}" for token in ids], where, "the named ids are others")
    pieces = None if named else [item.get("bytes") for item in content]
    known = None if pieces is None or None in pieces else [bytes(piece or ()) for piece in pieces]
    return [item["logprob"] for item in content], known


def _check(holds: bool, where: str, message: str) -> None:
    if not holds:
        raise ValueError(f"recorded call {where}: {message}")
