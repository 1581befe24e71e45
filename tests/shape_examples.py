"""One answer of each shape, as the engine would give it, all for the same call: three prompt ids and two sampled ids.

The shapes are those that engines document or show in their sources; the values are invented and agree with each other.
Every function gives a fresh object, so that a test may change it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ("EXAMPLES", "IDS", "LOG_PROBS", "PROMPT", "npy", "sse")

PROMPT = [151644, 872, 198]
IDS = [6023, 151645]
LOG_PROBS = [-0.2, -0.01]

_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def npy(array: npt.NDArray[Any]) -> str:
    """An array as vLLM sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def sse(events: Iterable[Any], *, done: bool = True) -> bytes:
    """Events as a server streams them."""
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"] if done else lines).encode()


def content(*, names: bool = False) -> list[dict[str, Any]]:
    """The log-probs of a chat answer; with the ids as names, if asked for."""
    tokens = [f"token_id:{token}" for token in IDS] if names else ["hi", "!"]
    return [
        {"token": token, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for token, log_prob, text in zip(tokens, LOG_PROBS, ("hi", "!"), strict=True)
    ]


def triples() -> list[list[Any]]:
    """The log-probs of SGLang."""
    return [[LOG_PROBS[0], IDS[0], "hi"], [LOG_PROBS[1], IDS[1], None]]


def _chat(choice: dict[str, Any], message: dict[str, Any] | None = None, **root: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi!", **(message or {})},
                "finish_reason": "stop",
                **choice,
            }
        ],
        "usage": dict(_USAGE),
        **root,
    }


def _completion(choice: dict[str, Any], **root: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "text": "hi!", "finish_reason": "stop", **choice}],
        "usage": dict(_USAGE),
        **root,
    }


def columns(*, names: bool = False) -> dict[str, Any]:
    """The log-probs of a completion."""
    tokens = [f"token_id:{token}" for token in IDS] if names else ["hi", "!"]
    return {
        "tokens": tokens,
        "token_logprobs": list(LOG_PROBS),
        # The sampled token is neither the first nor the likeliest among the alternatives.
        "top_logprobs": [{"ho": -0.1, tokens[0]: LOG_PROBS[0]}, {"?": -0.005, tokens[1]: LOG_PROBS[1]}],
        "text_offset": [0, 2],
    }


def vllm_chat() -> dict[str, Any]:
    """2.1, with `return_token_ids`, `logprobs` and `return_weight_versions`."""
    versions = [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}]
    choice = {
        "token_ids": list(IDS),
        "logprobs": {"content": content()},
        "stop_reason": None,
        "routed_experts": npy(np.arange(24, dtype=np.uint8).reshape(4, 3, 2)),
        "weight_versions": versions,
    }
    message = {"refusal": None, "reasoning": "so"}
    return _chat(choice, message, prompt_token_ids=list(PROMPT), system_fingerprint="vllm-0.33.0-abcd1234")


def vllm_chat_names() -> dict[str, Any]:
    """2.1, with `return_tokens_as_token_ids` beside the ids."""
    choice = {"token_ids": list(IDS), "logprobs": {"content": content(names=True)}}
    return _chat(choice, prompt_token_ids=list(PROMPT))


def old_vllm_chat() -> dict[str, Any]:
    """The same before 0.10.2: no ids but the names, behind a gateway that adds the prompt."""
    return _chat({"logprobs": {"content": content(names=True)}}, prompt_token_ids=list(PROMPT))


def vllm_completions() -> dict[str, Any]:
    """2.3."""
    choice = {"token_ids": list(IDS), "prompt_token_ids": list(PROMPT), "logprobs": columns(names=True)}
    return _completion({**choice, "stop_reason": None, "routed_experts": None, "weight_versions": None})


def vllm_generate() -> dict[str, Any]:
    """2.4, with integer ids beside the log-probs (0.32 and later)."""
    entries = [
        {"token_id": IDS[0], "logprob": LOG_PROBS[0], "rank": 1, "top_logprobs": []},
        {"token_id": IDS[1], "logprob": LOG_PROBS[1], "rank": 2, "top_logprobs": []},
    ]
    return {
        "request_id": "generate-tokens-x",
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "stop_reason": 151645,
                "token_ids": list(IDS),
                "logprobs": {"content": entries},
                "routed_experts": None,
                "sampling_mask": [[6023, 11], [151645]],
                "weight_versions": [{"version": "default", "start": 0, "end": 2}],
            }
        ],
        "prompt_token_ids": list(PROMPT),
        "usage": dict(_USAGE),
        "prompt_logprobs": None,
    }


def old_vllm_generate() -> dict[str, Any]:
    """2.4, with names (up to 0.31)."""
    answer = vllm_generate()
    answer["choices"][0]["logprobs"] = {"content": content(names=True)}
    return answer


def vllm_responses() -> dict[str, Any]:
    """2.5, with `enable_response_messages`."""
    part = {"type": "output_text", "text": "hi!", "annotations": [], "logprobs": content()}
    return {
        "id": "resp_x",
        "object": "response",
        "created_at": 1700000000,
        "model": "m",
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}],
        "input_messages": [{"type": "raw_message_tokens", "message": "<user>", "tokens": list(PROMPT)}],
        "output_messages": [{"type": "raw_message_tokens", "message": "hi!", "tokens": list(IDS)}],
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }


def nemo_responses() -> dict[str, Any]:
    """2.8: the three fields on the last item."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    return {
        "id": "resp_x",
        "object": "response",
        "created_at": 1700000000.5,
        "model": "m",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {
                **call,
                "prompt_token_ids": list(PROMPT),
                "generation_token_ids": list(IDS),
                "generation_log_probs": list(LOG_PROBS),
            },
        ],
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }


def nemo_chat() -> dict[str, Any]:
    """2.8: the three fields on the message."""
    experts = base64.b64encode(np.arange(30, dtype=np.int16).tobytes()).decode()
    message = {
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1.0}'}}],
        "prompt_token_ids": list(PROMPT),
        "generation_token_ids": list(IDS),
        "generation_log_probs": list(LOG_PROBS),
        "routed_experts": f"nrlre1:int16:5x3x2:{experts}",
    }
    return _chat({"finish_reason": "tool_calls"}, message)


def sglang_generate() -> dict[str, Any]:
    """2.6."""
    meta = {
        "id": "rid",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "v8",
        "weight_versions": [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}],
        "input_token_logprobs": [[None, 151644, None], [-1.0, 872, None], [-2.0, 198, None]],
        "output_token_logprobs": triples(),
        "output_token_sampling_mask": [[6023, 11], [151645]],
        "output_token_sampling_logprobs": [-0.1, 0.0],
        "routed_experts": base64.b64encode(np.arange(24, dtype="<i4").tobytes()).decode(),
    }
    return {"text": "hi!", "output_ids": list(IDS), "prompt_token_ids": list(PROMPT), "meta_info": meta}


def sglang_chat() -> dict[str, Any]:
    """2.7, with everything that can be asked for."""
    choice = {
        "logprobs": {"content": content()},
        "matched_stop": 151645,
        "prompt_token_ids": list(PROMPT),
        "response_token_ids": list(IDS),
        "meta_info": {"output_token_logprobs": triples(), "weight_version": "v8"},
    }
    return _chat(
        choice,
        {"reasoning_content": None},
        metadata={"weight_version": "v8", "weight_versions": [{"version": "v8", "start": 0, "end": 2}]},
        sglext={"input_ids": list(PROMPT), "output_ids": [list(IDS)]},
    )


def sglang_completions() -> dict[str, Any]:
    """2.7."""
    choice = {"token_ids": list(IDS), "prompt_token_ids": list(PROMPT), "matched_stop": 151645}
    return _completion({**choice, "logprobs": columns()})


def dynamo() -> dict[str, Any]:
    """2.8: all at the root."""
    data = {
        "prompt_token_ids": list(PROMPT),
        "completion_token_ids": list(IDS),
        "completion_logprobs": list(LOG_PROBS),
    }
    return _chat({}, nvext={"engine_data": data})


def trtllm_completions() -> dict[str, Any]:
    """2.9: prompt ids at the root, a list for each prompt."""
    return _completion({"token_ids": list(IDS), "logprobs": columns()}, prompt_token_ids=[list(PROMPT)])


def tgi_generate() -> dict[str, Any]:
    """2.9."""
    prefill = [{"id": token, "text": "", "logprob": None} for token in PROMPT]
    tokens = [
        {"id": token, "text": text, "logprob": log_prob, "special": False}
        for token, log_prob, text in zip(IDS, LOG_PROBS, ("hi", "!"), strict=True)
    ]
    details = {"finish_reason": "eos_token", "generated_tokens": 2, "seed": 1, "prefill": prefill, "tokens": tokens}
    return {"generated_text": "hi!", "details": details}


def tinker_sample() -> dict[str, Any]:
    """2.9, with the prompt that a gateway has to add."""
    sequence = {"tokens": list(IDS), "logprobs": list(LOG_PROBS), "stop_reason": "stop"}
    return {"sequences": [sequence], "prompt_token_ids": list(PROMPT)}


EXAMPLES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "vllm_chat": ("vllm-chat", vllm_chat),
    "vllm_chat_names": ("vllm-chat", vllm_chat_names),
    "old_vllm_chat": ("vllm-chat-token-names", old_vllm_chat),
    "vllm_completions": ("vllm-completions", vllm_completions),
    "vllm_generate": ("vllm-generate", vllm_generate),
    "old_vllm_generate": ("vllm-generate", old_vllm_generate),
    "vllm_responses": ("vllm-responses", vllm_responses),
    "nemo_responses": ("nemo-responses", nemo_responses),
    "nemo_chat": ("nemo-chat", nemo_chat),
    "sglang_generate": ("sglang-generate", sglang_generate),
    "sglang_chat": ("sglang-chat", sglang_chat),
    "sglang_completions": ("sglang-completions", sglang_completions),
    "dynamo": ("dynamo", dynamo),
    "trtllm_completions": ("trtllm-completions", trtllm_completions),
    "tgi_generate": ("tgi-generate", tgi_generate),
    "tinker_sample": ("tinker-sample", tinker_sample),
}
"""By name: the shape that it has, and the function that makes it."""
