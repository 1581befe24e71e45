"""The answers of an SGLang 0.5.23 to chat and native generate requests, key by key as its sources write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.fake_script import Choice, Script, choices_of
from tests.fake_vllm import CREATED, MODEL, RefusalError

__all__ = ("answer", "events")

Json = dict[str, Any]

_NOT_IN_STREAMS = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")


def answer(route: str, body: Mapping[str, Any], script: Script, headers: Mapping[str, str]) -> Json | list[Json]:
    """The body of an answer that is not streamed. Raises `RefusalError`."""
    if route.endswith("/generate"):
        made = [_native(body, script, each, len(each.ids)) for each in _choices(body, script)]
        return made[0] if len(made) == 1 else made
    if not isinstance(body.get("messages"), list):
        raise RefusalError("messages: field required", "messages")
    made = [_chat_choice(body, script, index, each) for index, each in enumerate(_choices(body, script))]
    root: Json = {
        "id": f"chatcmpl-{script.label or 'fake'}",
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": made,
        "usage": _usage(script, _choices(body, script)),
        "metadata": {"weight_version": "default"},
    }
    extension = _extension(body, script, headers)
    return root | ({"sglext": extension} if extension else {}) | script.extra


def events(route: str, body: Mapping[str, Any], script: Script, headers: Mapping[str, str]) -> Iterator[Json]:
    """The events of a streamed answer, without `[DONE]`. Raises `RefusalError`."""
    if route.endswith("/generate"):
        return _native_events(body, script)
    for flag in _NOT_IN_STREAMS:
        if body.get(flag):
            raise RefusalError(
                f"{flag} is not supported with streaming. Please set stream=false when using {flag}=true."
            )
    return _chat_events(body, script, headers)


def _choices(body: Mapping[str, Any], script: Script) -> list[Choice]:
    return choices_of(script, (body.get("sampling_params") or {}).get("n") or body.get("n") or 1)


def _reports(script: Script, index: int) -> bool:
    return script.ids_on is None or index in script.ids_on


def _ids(each: Choice, start: int, stop: int) -> list[int]:
    return [each.ids[position] for position in range(start, stop) if position not in each.missing]


def _triples(each: Choice, start: int, stop: int) -> list[list[Any]]:
    return [[each.log_probs[position], each.ids[position], None] for position in range(start, stop)]


def _finish(each: Choice) -> Json:
    reason: Json = {"type": each.finish_reason}
    return reason | ({"length": len(each.ids)} if each.finish_reason == "length" else {"matched": each.ids[-1]})


def _meta(body: Mapping[str, Any], script: Script, each: Choice, start: int, stop: int) -> Json:
    count = len(each.ids) if script.completion_tokens is None else script.completion_tokens
    meta: Json = {
        "id": script.label or "fake",
        "finish_reason": _finish(each) if stop == len(each.ids) else None,
        "prompt_tokens": len(script.prompt),
        "weight_version": "default",
        "completion_tokens": count if stop == len(each.ids) else stop,
        "cached_tokens": 0,
    }
    if body.get("return_logprob") and "return_logprob" not in script.ignores:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = _triples(each, start, stop)
        meta["output_token_logprobs_length"] = stop
    return meta


def _native(body: Mapping[str, Any], script: Script, each: Choice, stop: int, start: int = 0) -> Json:
    """One result of `/generate`: up to token `stop`, from `start` where streams are incremental."""
    made = {
        "text": "".join(each.texts[start:stop]),
        "output_ids": _ids(each, start, stop),
        "meta_info": _meta(body, script, each, start, stop),
    }
    if "output_ids" in script.ignores:
        del made["output_ids"]
    return made | ({"prompt_token_ids": list(script.prompt)} if body.get("return_prompt_token_ids") else {})


def _native_events(body: Mapping[str, Any], script: Script) -> Iterator[Json]:
    for each in _choices(body, script):
        for start in range(0, len(each.ids), script.per_chunk):
            stop = min(start + script.per_chunk, len(each.ids))
            yield _native(body, script, each, stop, start if script.incremental else 0)


def _log_probs(body: Mapping[str, Any], script: Script, each: Choice, start: int, stop: int) -> Json | None:
    if not body.get("logprobs") or script.null_log_probs or "logprobs" in script.ignores:
        return None
    return {
        "content": [
            {
                "token": each.texts[position],
                "bytes": list(each.texts[position].encode()),
                "logprob": each.log_probs[position],
                "top_logprobs": [],
            }
            for position in range(start, stop)
        ]
    }


def _chat_choice(body: Mapping[str, Any], script: Script, index: int, each: Choice) -> Json:
    message: Json = {"role": "assistant", "content": "".join(each.texts), "reasoning_content": None}
    if each.tool_calls:
        message["tool_calls"] = each.tool_calls
    made: Json = {
        "index": index,
        "message": message,
        "logprobs": _log_probs(body, script, each, 0, len(each.ids)),
        "finish_reason": each.finish_reason,
        "matched_stop": each.ids[-1],
    }
    ids = bool(body.get("return_token_ids")) and "return_token_ids" not in script.ignores and _reports(script, index)
    if ids or body.get("return_prompt_token_ids"):
        made["prompt_token_ids"] = list(script.prompt)
    if ids:
        made["response_token_ids"] = _ids(each, 0, len(each.ids))
    if body.get("return_meta_info") and "return_meta_info" not in script.ignores:
        # The log-probs in it are there only if they were asked for, too.
        inner = {"return_logprob": bool(body.get("logprobs"))}
        made["meta_info"] = _meta(inner, script, each, 0, len(each.ids))
    return made


def _extension(body: Mapping[str, Any], script: Script, headers: Mapping[str, str]) -> Json:
    made: Json = {}
    if "sglext" in script.ignores:
        return made
    if body.get("return_input_ids_in_sglext") or headers.get("x-sglext-return-input-ids") == "1":
        made["input_ids"] = list(script.prompt)
    if body.get("return_output_ids_in_sglext") or headers.get("x-sglext-return-output-ids") == "1":
        made["output_ids"] = [_ids(each, 0, len(each.ids)) for each in _choices(body, script)]
    return made


def _chat_events(body: Mapping[str, Any], script: Script, headers: Mapping[str, str]) -> Iterator[Json]:
    choices = _choices(body, script)
    options = body.get("stream_options") or {}
    for index in range(len(choices)):
        yield _chunk(script, index, {"role": "assistant", "content": ""})
    for start in range(0, max(len(each.ids) for each in choices), script.per_chunk):
        for index, each in enumerate(choices):
            stop = min(start + script.per_chunk, len(each.ids))
            if start < stop:
                text = "".join(each.texts[start:stop])
                yield _chunk(script, index, {"content": text}, _log_probs(body, script, each, start, stop))
    for index, each in enumerate(choices):
        yield _chunk(script, index, {}, None, each)
    extension = _extension(body, script, headers)
    if extension:
        yield _head(script) | {"choices": [], "usage": None, "sglext": extension}
    if options.get("include_usage") and "include_usage" not in script.ignores and script.usage:
        yield _head(script) | {"choices": [], "usage": _usage(script, choices)}


def _head(script: Script) -> Json:
    head = {"id": f"chatcmpl-{script.label or 'fake'}", "object": "chat.completion.chunk"}
    return head | {"created": CREATED, "model": MODEL}


def _chunk(script: Script, index: int, delta: Json, logprobs: Json | None = None, ended: Choice | None = None) -> Json:
    shown = {"role": None, "content": None, "reasoning_content": None} | delta
    part = {
        "index": index,
        "delta": shown,
        "logprobs": logprobs,
        "finish_reason": ended.finish_reason if ended else None,
        "matched_stop": ended.ids[-1] if ended else None,
    }
    return _head(script) | {"choices": [part], "usage": None}


def _usage(script: Script, choices: list[Choice]) -> Json:
    count = sum(len(each.ids) for each in choices) if script.completion_tokens is None else script.completion_tokens
    prompt = len(script.prompt)
    usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
    return usage | {"prompt_tokens_details": None, "reasoning_tokens": 0}
