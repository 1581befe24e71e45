"""What agents ask and engines answer, as bytes: made once, so that neither side spends time on it while it is measured.

Every call of a conversation extends the one before it: its prompt is the last prompt, what was sampled then, and what
the tools said to that. Requests hold about four bytes of text for each id.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

__all__ = ("PER_TURN", "SAMPLED", "Conversation")

SAMPLED = 200
"""Ids of each answer."""
PER_TURN = 300
"""Ids by which the prompt grows from call to call, the sampled ones included."""
PER_MESSAGE = 500
"""Ids of a message of the history that was there before the first call."""
VOCABULARY = 150_000

_WORDS = (" the", " of", " and", " to", " run", " test", " file", " in", " it", " line", " that", "\n", ' "', " path")
_HEAD = {"id": "chatcmpl-bench", "created": 1795956019, "model": "policy"}
_FINGERPRINT = "vllm-0.33.0-bench"
_FLAGS: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "return_weight_versions": True}
_VERSIONS = [{"version": "default", "start": 0, "end": SAMPLED}]

Json = dict[str, Any]


class Conversation:
    """`turns` calls, the first one with a prompt of `first_prompt` ids. The same arguments give the same bytes."""

    def __init__(self, first_prompt: int, turns: int) -> None:
        random = np.random.default_rng(0)
        self.first_prompt = first_prompt
        self.turns = turns
        self._ids: list[int] = random.integers(0, VOCABULARY, first_prompt + turns * PER_TURN).tolist()
        # Engines compute log-probs in float32 and say them as JSON numbers.
        self._log_probs: list[float] = (-random.exponential(1.0, SAMPLED)).astype(np.float32).tolist()

    def prompt(self, turn: int) -> list[int]:
        """The ids that the engine sees in this call."""
        return self._ids[: self.first_prompt + turn * PER_TURN]

    def sampled(self, turn: int) -> list[int]:
        """The ids that it answers with."""
        start = self.first_prompt + turn * PER_TURN
        return self._ids[start : start + SAMPLED]

    def request(self, turn: int, *, streamed: bool, flags: bool) -> bytes:
        """The body of one request; with `flags` the client itself asks for ids and log-probs."""
        asked: Json = dict(_FLAGS) if flags else {}
        if streamed:
            asked |= {"stream": True, **({"stream_options": {"include_usage": True}} if flags else {})}
        asked |= {"model": "policy", "temperature": 1.0, "max_tokens": SAMPLED, "messages": self._messages(turn)}
        return msgspec.json.encode(asked)

    def answer(self, turn: int, *, flags: bool) -> bytes:
        """A whole answer, in the shape of vLLM's chat completions: what was not asked for is null."""
        ids = self.sampled(turn)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": _text(ids), "refusal": None, "reasoning": None},
            "logprobs": {"content": self._entries(ids)} if flags else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids if flags else None,
            "routed_experts": None,
            "weight_versions": _VERSIONS if flags else None,
        }
        return msgspec.json.encode(
            {
                **_HEAD,
                "object": "chat.completion",
                "choices": [choice],
                "system_fingerprint": _FINGERPRINT,
                "usage": self._usage(turn),
                "prompt_logprobs": None,
                "prompt_token_ids": self.prompt(turn) if flags else None,
                "kv_transfer_params": None,
            }
        )

    def events(self, turn: int, *, flags: bool) -> list[bytes]:
        """A streamed answer: the role and the prompt, one id in each chunk, usage if it was asked for, `[DONE]`."""
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [_chunk(opening) | {"prompt_token_ids": self.prompt(turn) if flags else None}]
        ids = self.sampled(turn)
        for position, entry in enumerate(self._entries(ids)):
            last = position == len(ids) - 1
            part: Json = {
                "index": 0,
                "delta": {"content": entry["token"]},
                "logprobs": {"content": [entry]} if flags else None,
                "finish_reason": "stop" if last else None,
                "token_ids": [ids[position]] if flags else None,
            }
            if last:
                part |= {"stop_reason": None, "weight_versions": _VERSIONS if flags else None}
            # Without a chunk for the usage the last one has the fingerprint.
            chunks.append(_chunk(part) | ({"system_fingerprint": _FINGERPRINT} if last and not flags else {}))
        if flags:
            chunks.append(_chunk() | {"usage": self._usage(turn), "system_fingerprint": _FINGERPRINT})
        return [*(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]

    def _messages(self, turn: int) -> list[Json]:
        history = self.prompt(0)
        parts = [history[start : start + PER_MESSAGE] for start in range(0, len(history), PER_MESSAGE)]
        roles = ["system", "user", *("assistant" if number % 2 else "user" for number in range(1, len(parts)))]
        for number in range(turn):
            start = self.first_prompt + number * PER_TURN
            parts += [self._ids[start : start + SAMPLED], self._ids[start + SAMPLED : start + PER_TURN]]
            roles[len(parts) - 2 :] = ["assistant", "user"]
        return [{"role": role, "content": _text(part)} for role, part in zip(roles, parts, strict=False)]

    def _entries(self, ids: list[int]) -> list[Json]:
        return [
            {"token": word, "logprob": log_prob, "bytes": list(word.encode()), "top_logprobs": []}
            for word, log_prob in zip(map(_word, ids), self._log_probs, strict=True)
        ]

    def _usage(self, turn: int) -> Json:
        prompt = self.first_prompt + turn * PER_TURN
        return {"prompt_tokens": prompt, "total_tokens": prompt + SAMPLED, "completion_tokens": SAMPLED}


def _chunk(*choices: Json) -> Json:
    return {**_HEAD, "object": "chat.completion.chunk", "choices": list(choices)}


def _word(token_id: int) -> str:
    return _WORDS[token_id % len(_WORDS)]


def _text(ids: list[int]) -> str:
    return "".join(map(_word, ids))
