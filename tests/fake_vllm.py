"""The answers of a vLLM 0.32 to chat, completions and generate requests, key by key as its sources write them.

Absent features are null keys in an answer that is not streamed; in a stream keys that were never set are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.fake_script import Choice, Script, choices_of

__all__ = ("RefusalError", "answer", "events")

CREATED, MODEL, FINGERPRINT = 1795956019, "policy", "vllm-0.32.0-a6b701c3"

Json = dict[str, Any]


class RefusalError(Exception):
    """The engine refuses the request before it samples: a 400 with this body."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.body = {
            "error": {"message": message, "type": "BadRequestError", "param": parameter, "code": 400},
        }


class Asked:
    """What a request asks for, of an engine with such a script."""

    def __init__(self, route: str, body: Mapping[str, Any], script: Script) -> None:
        self.route, self.body, self.script = route, body, script
        known = {key: value for key, value in body.items() if key not in script.ignores}
        nested = body.get("sampling_params") or {}
        self.chat = route.endswith("/chat/completions")
        self.tokens_only = route.endswith("/generate")
        self.names = bool(known.get("return_tokens_as_token_ids"))
        self.ids = bool(known.get("return_token_ids"))
        self.versions = bool(known.get("return_weight_versions")) or self.tokens_only
        self.stream = bool(body.get("stream"))
        self.count = (nested.get("n") if self.tokens_only else body.get("n")) or 1
        options = body.get("stream_options") or {}
        self.usage = bool(options.get("include_usage")) and "include_usage" not in script.ignores and script.usage
        self.usage_each = self.usage and bool(options.get("continuous_usage_stats"))
        # A chat asks by truth, the other routes by being set at all.
        wish = nested.get("logprobs") if self.tokens_only else known.get("logprobs")
        self.log_probs = bool(wish) if self.chat else wish is not None
        self.alternatives = (body.get("top_logprobs") or 0) if self.chat else (wish or 0)
        self.hidden = self.chat and body.get("include_reasoning") is False
        self.echo = bool(body.get("echo")) and not self.tokens_only
        self._refuse()

    def _refuse(self) -> None:
        body = self.body
        if body.get("stream_options") and not self.stream:
            raise RefusalError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.chat:
            if not isinstance(body.get("messages"), list):
                raise RefusalError("messages: field required", "messages")
            if (body.get("top_logprobs") or 0) > 0 and not body.get("logprobs"):
                raise RefusalError("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        elif body.get("token_ids" if self.tokens_only else "prompt") is None:
            raise RefusalError("prompt: field required", "prompt")

    @property
    def choices(self) -> list[Choice]:
        prompts = self.body.get("prompt")
        several = isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list))
        return choices_of(self.script, self.count * (len(prompts) if several and prompts else 1))

    def echoed(self, index: int) -> str:
        """The text of the prompt of choice `index`; of ids what the tokenizer makes of them."""
        prompts = self.body.get("prompt")
        several = isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list))
        prompt = prompts[index // self.count] if several and prompts else prompts
        return prompt if isinstance(prompt, str) else "".join(f"p{token}" for token in self.script.prompt)

    def reports(self, index: int) -> bool:
        """Whether choice `index` carries ids."""
        return self.ids and (self.script.ids_on is None or index in self.script.ids_on)


def answer(route: str, body: Mapping[str, Any], script: Script) -> Json:
    """The body of an answer that is not streamed. Raises `RefusalError`."""
    asked = Asked(route, body, script)
    build = _chat_choice if asked.chat else _generated_choice if asked.tokens_only else _completion_choice
    made = [build(asked, index, each) for index, each in enumerate(asked.choices)]
    for position, index in enumerate(script.order):
        if position < len(made):
            made[position] = build(asked, index, asked.choices[index])
    usage = _usage(asked, asked.choices, details=True)
    prompt_ids = list(script.prompt) if asked.ids else None
    root: Json
    if asked.tokens_only:
        root = {
            "request_id": _request(asked),
            "model": MODEL,
            "created": CREATED,
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt_ids,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": made,
        }
    else:
        root = {
            "id": _identity(asked),
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": CREATED,
            "model": MODEL,
            "choices": made,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
        }
        if asked.chat:
            root |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids, "prompt_text": None}
        root |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    if not script.usage:
        del root["usage"]
    return root | script.extra


def events(route: str, body: Mapping[str, Any], script: Script) -> Iterator[Json]:
    """The chunks of a streamed answer, without `[DONE]`. Raises `RefusalError`."""
    asked = Asked(route, body, script)
    return _events(asked)


def _events(asked: Asked) -> Iterator[Json]:
    choices = asked.choices
    if asked.chat:
        for index in range(len(choices)):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}}
            chunk = _chunk(asked, first | {"logprobs": None, "finish_reason": None}, 0)
            prompt = list(asked.script.prompt) if asked.reports(index) else None
            yield chunk | {"prompt_token_ids": prompt, "prompt_text": None}
    size = asked.script.per_chunk
    sent = [0] * len(choices)
    while any(sent[index] < len(each.ids) for index, each in enumerate(choices)):
        for index, each in enumerate(choices):
            start = sent[index]
            if start >= len(each.ids):
                continue
            stop = min(start + size, len(each.ids))
            part = _part(asked, index, each, start, stop)
            sent[index] = stop
            if part is not None:
                yield _chunk(asked, part, stop)
            if asked.script.empty_deltas and stop < len(each.ids):
                yield _chunk(asked, _empty(asked, index), stop)
    for index, each in enumerate(choices):
        if asked.script.empty_deltas and not each.ids:
            yield _chunk(asked, _part(asked, index, each, 0, 0) or {}, 0)
    if asked.usage:
        usage = _usage(asked, choices)
        if asked.tokens_only:
            yield {"request_id": _request(asked), "usage": usage, "output_mode": "tokens", "choices": []}
        else:
            yield _head(asked) | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}


def _request(asked: Asked) -> str:
    return f"generate-tokens-{asked.script.label}"


def _identity(asked: Asked) -> str:
    return f"{'chatcmpl' if asked.chat else 'cmpl'}-{asked.script.label or 'fake'}"


def _head(asked: Asked) -> Json:
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    return {"id": _identity(asked), "object": kind, "created": CREATED, "model": MODEL}


def _chunk(asked: Asked, part: Json, count: int) -> Json:
    if asked.tokens_only:
        usage = _counts(asked, count) if asked.usage_each else None
        chunk: Json = {"request_id": _request(asked), "usage": usage}
        # Here a key that was not asked for is absent, not null.
        if asked.ids and count == min(asked.script.per_chunk, len(asked.choices[0].ids)) and part["index"] == 0:
            chunk["prompt_token_ids"] = list(asked.script.prompt)
        return chunk | {"output_mode": "tokens", "choices": [part]}
    chunk = _head(asked) | {"choices": [part]}
    if asked.usage_each:
        chunk["usage"] = _counts(asked, count) | ({"completion_tokens_details": None} if asked.chat else {})
    if not asked.usage and part.get("finish_reason") is not None:
        chunk["system_fingerprint"] = FINGERPRINT
    return chunk


def _empty(asked: Asked, index: int) -> Json:
    """What a slow tokenizer makes: a chunk with nothing in it."""
    if asked.chat:
        return {
            "index": index,
            "delta": {"content": ""},
            "logprobs": {"content": []} if asked.log_probs else None,
            "finish_reason": None,
            "token_ids": [] if asked.reports(index) else None,
        }
    columns: Json | None = None
    if asked.log_probs:
        columns = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    part: Json = {"index": index, "text": "", "logprobs": columns, "finish_reason": None, "stop_reason": None}
    return part | {"prompt_token_ids": None, "token_ids": [] if asked.reports(index) else None}


def _part(asked: Asked, index: int, each: Choice, start: int, stop: int) -> Json | None:
    """What a chunk says of one choice; None if the engine would not send it."""
    last = stop == len(each.ids)
    finish = each.finish_reason if last else None
    ids = _ids(asked, index, each, start, stop)
    if asked.tokens_only:
        return _generated(asked, index, each, start, stop, finish)
    if not asked.chat:
        echoed = asked.echo and start == 0
        text = "".join(each.texts[start:stop])
        part: Json = {
            "index": index,
            # The prompt's text is left out where its ids are asked for.
            "text": ("" if asked.ids or not echoed else asked.echoed(index)) + text,
            "logprobs": _columns(asked, each, start, stop, echoed),
            "finish_reason": finish,
            "stop_reason": each.stop_reason if last else None,
            # Those of an echoed prompt are there without asking.
            "prompt_token_ids": list(asked.script.prompt) if start == 0 and (echoed or asked.reports(index)) else None,
            "token_ids": ids,
        }
        return part
    delta = _delta(asked, each, start, stop)
    log_probs = None if asked.hidden and each.reasoning else _content(asked, each, start, stop)
    ids = None if asked.hidden and each.reasoning else ids
    if delta is None:
        if not last and log_probs is None and ids is None:
            return None
        delta = {}
    part = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish}
    if last:
        part["stop_reason"] = each.stop_reason
    part["token_ids"] = ids
    if last and asked.script.weight_versions:  # an engine that knows them has the key in any case
        part["weight_versions"] = asked.script.weight_versions if asked.versions else None
    return part


def _delta(asked: Asked, each: Choice, start: int, stop: int) -> Json | None:
    """What the parsers make of the tokens; None: nothing yet."""
    shown = [position for position in range(start, stop) if position not in each.swallowed]
    reasoning = "".join(each.texts[position] for position in shown if position < each.reasoning)
    content = "".join(each.texts[position] for position in shown if position >= each.reasoning)
    delta: Json = {}
    if reasoning and not asked.hidden:
        delta["reasoning"] = reasoning
    if content:
        delta["content"] = content
        if asked.hidden and each.reasoning:
            delta["reasoning"] = None
    if each.tool_calls and stop == len(each.ids):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(each.tool_calls)]
    return delta or None


def _chat_choice(asked: Asked, index: int, each: Choice) -> Json:
    shown = [position for position in range(len(each.ids)) if position not in each.swallowed]
    content = "".join(each.texts[position] for position in shown if position >= each.reasoning)
    reasoning = "".join(each.texts[position] for position in shown if position < each.reasoning)
    hidden = asked.hidden and each.reasoning
    message: Json = {"role": "assistant", "content": None if each.tool_calls and not content else content}
    message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    if each.tool_calls:
        message["tool_calls"] = each.tool_calls
    message["reasoning"] = None if hidden or not each.reasoning else reasoning
    if asked.script.disagreeing:
        message["prompt_token_ids"] = list(asked.script.prompt)
        message["generation_token_ids"] = [token + 1 for token in each.ids]
        message["generation_log_probs"] = list(each.log_probs)
    made: Json = {
        "index": index,
        "message": message,
        "logprobs": None if hidden else _content(asked, each, 0, len(each.ids)),
        "finish_reason": each.finish_reason,
        "stop_reason": each.stop_reason,
        "token_ids": None if hidden else _ids(asked, index, each, 0, len(each.ids)),
        "routed_experts": None,
    }
    if asked.script.weight_versions:
        made["weight_versions"] = asked.script.weight_versions if asked.versions else None
    return made


def _completion_choice(asked: Asked, index: int, each: Choice) -> Json:
    echoed = asked.echoed(index) if asked.echo and not asked.ids else ""
    return {
        "index": index,
        "text": echoed + "".join(each.texts),
        "logprobs": _columns(asked, each, 0, len(each.ids), asked.echo),
        "finish_reason": each.finish_reason,
        "stop_reason": each.stop_reason,
        "token_ids": _ids(asked, index, each, 0, len(each.ids)),
        "prompt_logprobs": _prompt_log_probs(asked),
        "prompt_token_ids": list(asked.script.prompt) if asked.reports(index) else None,
        "routed_experts": None,
    }


def _generated_choice(asked: Asked, index: int, each: Choice) -> Json:
    return _generated(asked, index, each, 0, len(each.ids), each.finish_reason)


def _generated(asked: Asked, index: int, each: Choice, start: int, stop: int, finish: str | None) -> Json:
    """A choice of the route that speaks in ids; there they are told without asking."""
    entries: list[Json] | None = None
    if asked.log_probs:
        entries = [
            {"token_id": each.ids[i], "logprob": each.log_probs[i], "rank": 1, "top_logprobs": []}
            for i in range(start, stop)
        ]
    ids = [each.ids[i] for i in range(start, stop) if i not in each.missing]
    last = stop == len(each.ids)
    versions = asked.script.weight_versions or [{"version": "default", "start": 0, "end": len(each.ids)}]
    return {
        "index": index,
        "finish_reason": finish,
        "stop_reason": each.stop_reason if last else None,
        "token_ids": ids if asked.script.ids_on is None or index in asked.script.ids_on else None,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions if last else None,
        "logprobs": None if entries is None else {"content": entries},
    }


def _ids(asked: Asked, index: int, each: Choice, start: int, stop: int) -> list[int] | None:
    if not asked.reports(index):
        return None
    return [each.ids[position] for position in range(start, stop) if position not in each.missing]


def _name(asked: Asked, each: Choice, position: int) -> str:
    return f"token_id:{each.ids[position]}" if asked.names else each.texts[position]


def _content(asked: Asked, each: Choice, start: int, stop: int) -> Json | None:
    """The log-probs of a chat answer."""
    if not asked.log_probs or asked.script.null_log_probs:
        return None
    return {
        "content": [
            {
                "token": _name(asked, each, position),
                "logprob": each.log_probs[position],
                "bytes": list(each.texts[position].encode()),
                "top_logprobs": [
                    {"token": f"alt{rank}", "logprob": -3.0 - rank, "bytes": [97]}
                    for rank in range(int(asked.alternatives))
                ],
            }
            for position in range(start, stop)
            if position not in each.missing
        ]
    }


def _columns(asked: Asked, each: Choice, start: int, stop: int, echoed: bool) -> Json | None:
    """The log-probs of a completion; with `echo` those of the prompt before them."""
    if not asked.log_probs or asked.script.null_log_probs:
        return None
    prompt = list(asked.script.prompt) if echoed else []
    tokens = [f"token_id:{token}" if asked.names else f"p{token}" for token in prompt]
    values: list[float | None] = [None if position == 0 else -1.0 - position for position in range(len(prompt))]
    for position in range(start, stop):
        if position not in each.missing:
            tokens.append(_name(asked, each, position))
            values.append(each.log_probs[position])
    offsets = [sum(map(len, tokens[:position])) for position in range(len(tokens))]
    alternatives = {f"alt{rank}": -3.0 - rank for rank in range(int(asked.alternatives))}
    tops: list[Json | None] = [{token: value, **alternatives} for token, value in zip(tokens, values, strict=True)]
    if prompt:
        tops[0] = None
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _prompt_log_probs(asked: Asked) -> list[Json | None] | None:
    """Computed for an echo whose log-probs are asked for."""
    if not (asked.echo and asked.log_probs):
        return None
    entries = [{str(token): {"logprob": -1.0, "rank": 1, "decoded_token": "p"}} for token in asked.script.prompt[1:]]
    return [None, *entries]


def _counts(asked: Asked, completion: int) -> Json:
    prompt = len(asked.script.prompt)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _usage(asked: Asked, choices: list[Choice], *, details: bool = False) -> Json:
    counted = sum(len(each.ids) for each in choices)
    said = counted if asked.script.completion_tokens is None else asked.script.completion_tokens
    usage = _counts(asked, said)
    return usage | {"prompt_tokens_details": None, "completion_tokens_details": None} if details else usage
