"""What evaluation keeps of a request and its answer: names and numbers, bounded, and nothing that anybody said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import RecordedCall, rollouts
from tests.shape_examples import EXAMPLES
from tokcap.capture.shapes import StreamJoiner
from tokcap.errors import CaptureError, UnusableAnswerError
from tokcap.evaluation import ERROR_CLASSES, ModelCallSummary, TokenUsage
from tokcap.evaluation.answer import AnswerFacts, answer_facts
from tokcap.evaluation.bounds import LOOKED_AT, NAME_LENGTH, NAMES_KEPT, ROLES_KEPT
from tokcap.evaluation.entries import entry_of, summary_of
from tokcap.evaluation.request import request_facts
from tokcap.evaluation.summary import DETAIL_LENGTH, begun, ended

SECRET = "what-was-said"


def begin(request: Any, *, path: str = "/v1/chat/completions", dialect: str = "chat", **more: Any) -> ModelCallSummary:
    known: dict[str, Any] = {
        "began_at": 1_800_000_000.5,
        "method": "POST",
        "engine": "vllm 0.32.0",
        "request_bytes": 1234,
        "training": False,
        "retry_count": 0,
        **more,
    }
    return begun("r-1", "c-1", path=path, dialect=dialect, request=request, **known)


def end(request: Any, answer: Any, *, dialect: str = "chat", **more: Any) -> ModelCallSummary:
    return ended(begin(request, dialect=dialect), answer=answer, **{"status": 200, "latency_s": 1.5, **more})


def joined(*events: Any) -> Any:
    joiner = StreamJoiner()
    for event in events:
        joiner.feed_event(event)
    return joiner.answer()


# ---- requests


def test_of_a_chat_request_roles_tools_and_parameters_are_kept() -> None:
    tools = [{"type": "function", "function": {"name": "search", "description": SECRET, "parameters": {}}}]
    messages = [
        {"role": "system", "content": SECRET},
        {"role": "user", "content": [{"type": "text", "text": SECRET}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "search"}}]},
        {"role": "tool", "tool_call_id": "1", "content": SECRET},
        {"role": "user", "content": SECRET},
    ]
    request = {
        "model": "policy",
        "messages": messages,
        "tools": [*tools, {"type": "custom", "custom": {"name": "shell"}}],
        "functions": [{"name": "old"}],
        "stream": True,
        "temperature": 0.7,
        "top_p": 1,
        "seed": 7,
        "n": 2,
        "logprobs": True,
        "stop": [SECRET, SECRET],
        "logit_bias": {"17": -100},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": SECRET}}},
        "guided_regex": SECRET,
        "reasoning_effort": "low",
        "user": SECRET,
    }
    facts = request_facts(request)
    assert facts.model == "policy"
    assert facts.streamed
    assert facts.message_count == 5
    assert facts.roles == {"system": 1, "user": 2, "assistant": 1, "tool": 1}
    assert (facts.tools, facts.tool_count) == (("search", "shell", "old"), 3)
    assert facts.sampling == {
        "temperature": 0.7,
        "top_p": 1,
        "seed": 7,
        "n": 2,
        "logprobs": True,
        "stop": 2,
        "logit_bias": 1,
        "guided_regex": True,
        "response_format": "json_schema",
        "reasoning_effort": "low",
    }


def test_of_a_responses_request_items_without_a_role_go_by_their_type() -> None:
    request = {
        "model": "policy",
        "instructions": SECRET,
        "input": [
            {"role": "user", "content": SECRET},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "name": "search", "arguments": SECRET},
            {"type": "function_call_output", "output": SECRET},
            {"type": "message", "role": "assistant", "content": []},
        ],
        "tools": [{"type": "function", "name": "search"}, {"type": "web_search"}],
        "max_output_tokens": 100,
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "high"},
    }
    facts = request_facts(request)
    assert facts.message_count == 6
    assert facts.roles == {
        "system": 1,
        "user": 1,
        "reasoning": 1,
        "function_call": 1,
        "function_call_output": 1,
        "assistant": 1,
    }
    assert facts.tools == ("search", "web_search")
    assert facts.sampling == {"max_output_tokens": 100, "response_format": "json_object", "reasoning_effort": "high"}
    assert request_facts({"input": SECRET}).roles == {"user": 1}


def test_of_an_anthropic_request_the_system_prompt_counts_as_a_message() -> None:
    request = {
        "model": "policy",
        "system": [{"type": "text", "text": SECRET}],
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 10,
        "stop_sequences": [SECRET],
        "tools": [{"name": "bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}],
    }
    facts = request_facts(request)
    assert (facts.message_count, facts.roles) == (2, {"system": 1, "user": 1})
    assert facts.tools == ("bash", "bash")
    assert facts.sampling == {"max_tokens": 10, "stop_sequences": 1}


@pytest.mark.parametrize("nested", ["sampling_params", "parameters"])
def test_parameters_of_native_routes_are_taken_out_of_their_mapping(nested: str) -> None:
    request = {"token_ids": [1, 2], "input_ids": [3], "text": SECRET, nested: {"temperature": 0.5, "stop": SECRET}}
    facts = request_facts(request)
    assert facts.sampling == {"temperature": 0.5, "stop": 1}
    assert facts.message_count == 0
    assert facts.roles == {}


def test_the_path_is_kept_without_its_query_and_may_say_that_it_streams() -> None:
    summary = begin({"stream": False}, path=f"/generate_stream?key={SECRET}")
    assert summary.path == "/generate_stream"
    assert summary.streamed
    assert not begin({"stream": "yes"}).streamed


def test_a_call_that_begins_is_open() -> None:
    summary = begin({"messages": []}, training=True, retry_count=2)
    assert summary.is_open
    assert summary.outcome == "open"
    assert (summary.training, summary.retry_count, summary.request_bytes) == (True, 2, 1234)
    assert summary.began_at == 1_800_000_000.5


@pytest.mark.parametrize("request_", [None, {}])
def test_a_call_without_a_request_body_has_a_summary(request_: dict[str, Any] | None) -> None:
    summary = begin(request_)
    assert (summary.message_count, summary.tools, summary.sampling, summary.requested_model) == (0, (), {}, "")


# ---- answers


def test_of_a_chat_answer_reasons_tool_calls_and_usage_are_kept() -> None:
    message = {
        "role": "assistant",
        "content": SECRET,
        "tool_calls": [
            {"id": "1", "function": {"name": "search", "arguments": SECRET}},
            {"id": "2", "type": "custom", "custom": {"name": "shell", "input": SECRET}},
        ],
    }
    answer = {
        "id": "chatcmpl-1",
        "model": "policy-v3",
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls"},
            {"index": 1, "message": {"content": SECRET, "function_call": {"name": "old"}}, "finish_reason": "length"},
        ],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": 12,
            "total_tokens": 42,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 5},
        },
    }
    summary = end({"n": 2}, answer, answer_bytes=77, first_token_s=0.5)
    assert (summary.model, summary.response_id) == ("policy-v3", "chatcmpl-1")
    assert summary.usage == TokenUsage(30, 12, 42, 16, 5)
    assert (summary.choice_count, summary.finish_reasons) == (2, ("tool_calls", "length"))
    assert (summary.tool_call_count, summary.tool_calls) == (3, ("search", "shell", "old"))
    assert (summary.status, summary.error_class, summary.outcome) == (200, "", "")
    assert (summary.latency_s, summary.first_token_s, summary.answer_bytes) == (1.5, 0.5, 77)
    assert not summary.is_open


def test_of_a_response_its_items_and_its_status_are_kept() -> None:
    answer = {
        "id": "resp_1",
        "object": "response",
        "model": "policy",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [
            {"type": "reasoning", "content": SECRET},
            {"type": "message", "content": [{"type": "output_text", "text": SECRET}]},
            {"type": "function_call", "name": "search", "arguments": SECRET},
            {"type": "web_search_call", "action": {"query": SECRET}},
        ],
        "usage": {
            "input_tokens": 30,
            "output_tokens": 12,
            "total_tokens": 42,
            "input_tokens_details": {"cached_tokens": 16},
            "output_tokens_details": {"reasoning_tokens": 5},
        },
    }
    facts = answer_facts(answer)
    assert facts.finish_reasons == ("max_output_tokens",)
    assert facts.tool_calls == ("search", "web_search_call")
    assert facts.usage == TokenUsage(30, 12, 42, 16, 5)
    assert facts.response_id == "resp_1"
    assert answer_facts({**answer, "status": "completed", "incomplete_details": None}).finish_reasons == ("completed",)


def test_of_an_anthropic_message_cached_tokens_belong_to_the_prompt() -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "model": "policy",
        "content": [{"type": "text", "text": SECRET}, {"type": "tool_use", "name": "bash", "input": {"c": SECRET}}],
        "stop_reason": "tool_use",
        "usage": {
            "input_tokens": 10,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 5,
            "output_tokens": 7,
        },
    }
    facts = answer_facts(answer)
    assert facts.usage == TokenUsage(prompt_tokens=115, completion_tokens=7, cached_tokens=100)
    assert (facts.finish_reasons, facts.tool_calls, facts.response_id) == (("tool_use",), ("bash",), "msg_1")


def test_of_several_answers_to_one_prompt_the_prompt_counts_once() -> None:
    def native(finish: str, sampled: int) -> dict[str, Any]:
        reason = {"type": finish, "matched": 151645}
        meta = {"id": "rid", "finish_reason": reason, "prompt_tokens": 30, "completion_tokens": sampled}
        return {"text": SECRET, "output_ids": [1] * sampled, "meta_info": meta}

    summary = end({"sampling_params": {"n": 2}}, [native("stop", 3), native("length", 5)], dialect="native-generate")
    assert summary.usage == TokenUsage(prompt_tokens=30, completion_tokens=8)
    assert (summary.choice_count, summary.finish_reasons, summary.response_id) == (2, ("stop", "length"), "rid")
    batch = answer_facts([native("stop", 3), native("stop", 5)])
    assert batch.usage == TokenUsage(prompt_tokens=60, completion_tokens=8)
    one_says_nothing = [native("stop", 3), {"meta_info": {}}]
    assert answer_facts(one_says_nothing).usage == TokenUsage()


_REASONS = {
    "nemo_chat": "tool_calls",
    "nemo_responses": "",
    "vllm_responses": "completed",
    "tgi_generate": "eos_token",
}


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"tinker_sample"}))
def test_every_shape_of_answer_is_understood(name: str) -> None:
    facts = answer_facts(EXAMPLES[name][1]())
    assert (facts.choice_count, facts.finish_reasons) == (1, (_REASONS.get(name, "stop"),))
    assert (facts.usage.prompt_tokens, facts.usage.completion_tokens) == (3, 2)


def test_an_answer_of_an_unknown_shape_gives_nothing() -> None:
    assert answer_facts(EXAMPLES["tinker_sample"][1]()) == AnswerFacts()


def test_streams_of_text_generation_inference_are_over_once_the_text_is_there() -> None:
    token = {"token": {"id": 1, "text": SECRET, "logprob": -0.5}}
    assert not answer_facts(joined(token, token)).finished
    whole = joined(token, {**token, "generated_text": SECRET})
    assert answer_facts(whole).finished
    with_details = {**token, "generated_text": SECRET, "details": {"finish_reason": "length", "generated_tokens": 2}}
    facts = answer_facts(joined(token, with_details))
    assert (facts.finish_reasons, facts.usage.completion_tokens) == (("length",), 2)


def _streamed(call: RecordedCall) -> Any:
    joiner = StreamJoiner(choices=call.choices)
    joiner.feed("".join(f"{line}\n\n" for line in call.sse or ()).encode())
    joiner.end_of_stream()
    return joiner.answer()


def _recorded() -> Iterator[RecordedCall]:
    for rollout in rollouts():
        yield from (call for call in rollout.calls if call.generates)


def test_summaries_of_recorded_calls_say_what_their_bodies_say() -> None:
    checked = 0
    for call in _recorded():
        answer = call.response if call.sse is None else _streamed(call)
        dialect = {"chat/completions": "chat"}.get(call.path.removeprefix("/v1/"), call.path.removeprefix("/v1/"))
        summary = end(call.request, answer, status=call.status, dialect=dialect)
        assert answer is not None
        usage = answer.get("usage") or {}
        assert summary.streamed == (call.sse is not None)
        assert summary.usage.prompt_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))
        assert summary.usage.completion_tokens == usage.get("completion_tokens", usage.get("output_tokens"))
        assert summary.requested_model == call.request["model"]
        assert summary.message_count == len(call.request.get("messages", ())) + ("input" in call.request)
        assert (summary.error_class == "") == (call.status < 400)
        if call.status < 400:
            assert summary.response_id == answer["id"]
            assert summary.choice_count == call.choices
            assert len(summary.finish_reasons) == call.choices
            assert all(summary.finish_reasons)
        checked += 1
    assert checked > 200


# ---- nothing that was said


def _with_secrets(value: Any) -> Any:
    """`value` with every text in it replaced, but for the words of the protocols."""
    if isinstance(value, str):
        return value if value in _WORDS else SECRET
    if isinstance(value, list):
        return [_with_secrets(item) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in ("model", "id", "request_id") else _with_secrets(item) for key, item in value.items()
        }
    return value


_PROTOCOL = """
system user assistant tool function custom message text tool_use function_call function_call_output output_text
reasoning stop length tool_calls max_tokens max_output_tokens completed incomplete end_turn eos_token search
look chat.completion text_completion response json_schema low
"""
_WORDS = frozenset(_PROTOCOL.split())

_REQUESTS: list[dict[str, Any]] = [
    {
        "model": "m",
        "messages": [{"role": "user", "content": "-", "name": "-", "tool_calls": [{"function": {"arguments": "-"}}]}],
        "tools": [{"type": "function", "function": {"name": "search", "description": "-", "parameters": {"a": "-"}}}],
        "stop": ["-"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "-"}},
        "user": "-",
        "metadata": {"-": "-"},
        "logit_bias": {"-": 1},
        "guided_json": {"a": "-"},
        "chat_template": "-",
    },
    {"model": "m", "input": [{"role": "user", "content": "-"}], "instructions": "-", "prompt": {"id": "-"}},
    {"model": "m", "input": "-", "text": {"format": {"type": "json_schema", "name": "-"}}},
    {"model": "m", "system": "-", "messages": [{"role": "user", "content": [{"type": "text", "text": "-"}]}]},
    {"model": "m", "prompt": "-", "suffix": "-"},
    {"text": "-", "sampling_params": {"stop": "-", "regex": "-", "json_schema": "-"}, "rid": "-"},
    {"inputs": "-", "parameters": {"stop": ["-"], "grammar": {"type": "-", "value": "-"}}},
    {"token_ids": [424242], "sampling_params": {"stop_token_ids": [424242], "bad_words": ["-"]}},
]


@pytest.mark.parametrize("request_", _REQUESTS)
def test_nothing_of_a_request_that_anybody_said_is_in_its_summary(request_: dict[str, Any]) -> None:
    text = msgspec.json.encode(begin(_with_secrets(request_))).decode()
    assert SECRET not in text
    assert "424242" not in text


def test_nothing_of_an_answer_that_the_model_said_is_in_its_summary() -> None:
    answers = [make() for _, make in EXAMPLES.values()]
    answers += [call.response or _streamed(call) for call in _recorded() if call.status < 400]
    for answer in answers:
        text = msgspec.json.encode(end({}, _with_secrets(answer))).decode()
        assert SECRET not in text, answer
        assert "151644" not in text  # an id of the examples
    assert len(answers) > 200


def test_what_an_error_says_is_not_kept_either() -> None:
    body = {"error": {"message": SECRET, "type": "BadRequestError", "param": SECRET, "code": 400}}
    for summary in (
        end({}, body, status=400),
        end({}, None, status=500, error=ValueError(SECRET)),
        end({}, None, status=400, error=SECRET),
        end({}, None, status=400, error=SECRET.encode()),
        end({"stream": True}, {}, error={"error": {"message": SECRET}}),
    ):
        assert SECRET not in msgspec.json.encode(summary).decode()


def test_no_token_array_is_kept() -> None:
    for _, make in EXAMPLES.values():
        entry = entry_of(end({"prompt": [1, 2, 3]}, make()), 5)
        assert len(entry.prompt_token_ids) == len(entry.generation_token_ids) == len(entry.generation_log_probs) == 0


# ---- what went wrong


class HTTPTimeoutError(Exception):
    """As the usual clients name theirs."""


class ReadTimeout(HTTPTimeoutError):  # noqa: N818
    """Likewise."""


class ConnectError(Exception):
    """Likewise."""


class ClientDisconnect(Exception):  # noqa: N818
    """Likewise."""


class StatusError(Exception):
    """Likewise."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(message)
        self.status_code = status


class HostileError(Exception):
    """Its properties fail."""

    @property
    def status_code(self) -> int:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


def openai_error(message: str, status: int = 400, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status, **more}}


_DONE = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x"}}]}
_CUT = {"choices": [{"index": 0, "message": {"content": "x"}}]}
_OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."

ENDS: list[tuple[str, dict[str, Any]]] = [
    ("", {"answer": _DONE}),
    ("", {"answer": _DONE, "streamed": True}),
    ("", {"answer": _CUT}),
    ("", {"answer": None, "status": 307}),
    ("", {"answer": None, "status": 204}),
    ("", {"answer": None, "dialect": "other"}),
    ("", {"answer": {}, "streamed": True, "dialect": "other"}),
    ("client_error", {"answer": openai_error("no such model", 404), "status": 404}),
    ("client_error", {"answer": None, "status": 401}),
    ("client_error", {"answer": {"detail": [{"msg": "x"}]}, "status": 422}),
    ("client_error", {"answer": openai_error("bad", 400), "status": 200}),
    ("rate_limited", {"answer": None, "status": 429}),
    ("rate_limited", {"answer": {"type": "error", "error": {"type": "rate_limit_error"}}, "status": 429}),
    ("rate_limited", {"answer": {}, "streamed": True, "error": {"error": {"code": "rate_limit_exceeded"}}}),
    ("context_overflow", {"answer": openai_error(_OVERFLOW), "status": 400}),
    ("context_overflow", {"answer": {"object": "error", "message": _OVERFLOW, "code": 400}, "status": 400}),
    ("context_overflow", {"answer": None, "status": 400, "error": json.dumps(openai_error(_OVERFLOW)).encode()}),
    ("context_overflow", {"answer": None, "status": 413, "error": "Prompt is too long: 9 tokens > 8 maximum"}),
    ("context_overflow", {"answer": openai_error("too much", code="context_length_exceeded"), "status": 400}),
    ("context_overflow", {"answer": {"error": "`inputs` must have less than 9 tokens. Given: 10"}, "status": 422}),
    ("context_overflow", {"answer": {}, "streamed": True, "error": openai_error(_OVERFLOW)}),
    ("server_error", {"answer": None, "status": 500}),
    ("server_error", {"answer": openai_error("boom", 500), "status": 500}),
    ("server_error", {"answer": None, "status": 503, "client_gone": True}),
    ("server_error", {"answer": None, "status": 0}),
    ("server_error", {"answer": None, "status": 0, "error": ValueError("x")}),
    ("server_error", {"answer": None, "status": 0, "error": HostileError()}),
    ("server_error", {"answer": {"status": "failed", "output": [], "error": {"code": "server_error"}}}),
    ("server_error", {"answer": None, "error": {"error": {"message": "x"}}}),
    ("server_error", {"answer": None, "status": 0, "error": StatusError(500)}),
    ("client_error", {"answer": None, "status": 0, "error": StatusError(404)}),
    ("context_overflow", {"answer": None, "status": 0, "error": StatusError(400, _OVERFLOW)}),
    ("timed_out", {"answer": None, "status": 504}),
    ("timed_out", {"answer": None, "status": 0, "error": TimeoutError()}),
    ("timed_out", {"answer": None, "status": 0, "error": ReadTimeout()}),
    ("unreachable", {"answer": None, "status": 502}),
    ("unreachable", {"answer": None, "status": 0, "error": ConnectionRefusedError()}),
    ("unreachable", {"answer": None, "status": 0, "error": ConnectError()}),
    ("client_gone", {"answer": None, "client_gone": True}),
    ("client_gone", {"answer": _DONE, "client_gone": True}),
    ("client_gone", {"answer": _CUT, "streamed": True, "client_gone": True}),
    ("client_gone", {"answer": None, "status": 0, "error": asyncio.CancelledError(), "client_gone": True}),
    ("client_gone", {"answer": None, "status": 0, "error": ClientDisconnect()}),
    ("client_gone", {"answer": None, "status": 499}),
    ("cancelled", {"answer": None, "status": 0, "error": asyncio.CancelledError()}),
    ("cancelled", {"answer": _CUT, "streamed": True, "error": GeneratorExit()}),
    ("stream_error", {"answer": _CUT, "streamed": True}),
    ("stream_error", {"answer": {}, "streamed": True}),
    ("stream_error", {"answer": {"choices": []}, "streamed": True}),
    ("stream_error", {"answer": _CUT, "streamed": True, "error": {"error": {"message": "x", "code": 500}}}),
    ("stream_error", {"answer": _CUT, "streamed": True, "error": "boom"}),
    ("stream_error", {"answer": _CUT, "streamed": True, "error": ConnectionResetError()}),
    ("malformed", {"answer": None}),
    ("malformed", {"answer": None, "error": UnusableAnswerError("events contradict each other")}),
    ("malformed", {"answer": None, "error": json.JSONDecodeError("x", "", 0)}),
]


@pytest.mark.parametrize(("error_class", "ending"), ENDS)
def test_a_call_that_fails_has_one_word_for_it(error_class: str, ending: dict[str, Any]) -> None:
    ending = dict(ending)
    request = {"stream": ending.pop("streamed", False)}
    assert end(request, ending.pop("answer"), **ending).error_class == error_class


def test_every_word_for_a_failure_is_met_by_an_example() -> None:
    assert {error_class for error_class, _ in ENDS} == set(ERROR_CLASSES)


def test_recorded_errors_are_classified() -> None:
    found = {}
    for call in _recorded():
        if call.status >= 400:
            found[call.status] = end(call.request, call.response, status=call.status)
    assert (found[400].error_class, found[400].error_type) == ("context_overflow", "BadRequestError")
    assert (found[404].error_class, found[404].error_type) == ("client_error", "NotFoundError")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (openai_error("x"), "BadRequestError"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "overloaded_error"),
        ({"object": "error", "message": "x", "type": "NotFoundError", "code": 404}, "NotFoundError"),
        ({"error": {"message": "x", "code": "server_error"}}, "server_error"),
        ({"type": "error", "message": "x", "code": "server_error"}, "server_error"),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}}, "server_error"),
        ({"error": "x"}, ""),
        ({"detail": "x"}, ""),
        ("x", ""),
        (CaptureError("x"), "CaptureError"),
    ],
)
def test_an_error_goes_by_the_name_that_it_gives_itself(error: Any, name: str) -> None:
    assert end({}, None, status=500, error=error).error_type == name


# ---- whatever comes


def test_names_are_cut_and_counted() -> None:
    tools = [{"function": {"name": f"{number}-{'x' * 1000}"}} for number in range(300)]
    messages = [{"role": f"{number}-{'r' * 1000}"} for number in range(50)]
    request = {"model": "m" * 1000, "messages": messages, "tools": tools}
    calls = [{"function": {"name": "y" * 1000}} for _ in range(300)]
    choices = [{"finish_reason": "z" * 1000, "message": {"tool_calls": calls}} for _ in range(200)]
    summary = end(request, {"choices": choices}, outcome="o" * 1000, detail="d" * 5000)
    assert len(summary.requested_model) == NAME_LENGTH
    assert (len(summary.tools), summary.tool_count) == (NAMES_KEPT, 300)
    assert {len(name) for name in (*summary.tools, *summary.roles)} == {NAME_LENGTH}
    assert (len(summary.roles), summary.message_count) == (ROLES_KEPT, 50)
    assert (len(summary.finish_reasons), summary.choice_count) == (NAMES_KEPT, 200)
    assert (len(summary.tool_calls), summary.tool_call_count) == (NAMES_KEPT, LOOKED_AT)
    assert {len(name) for name in (*summary.finish_reasons, *summary.tool_calls)} == {NAME_LENGTH}
    assert (len(summary.outcome), len(summary.detail)) == (NAME_LENGTH, DETAIL_LENGTH)


def test_what_has_no_name_keeps_its_place() -> None:
    facts = request_facts({"tools": [{}, {"function": {"name": "search"}}, 7], "messages": [None, {"role": ""}]})
    assert facts.tools == ("unnamed", "search", "unnamed")
    assert (facts.message_count, facts.roles) == (2, {"unnamed": 2})
    assert request_facts({"system": 7, "instructions": "", "input": 7}).message_count == 0


def test_numbers_that_are_none_are_left_out() -> None:
    request = {"temperature": "0.7", "top_p": [1], "seed": 2**70, "max_tokens": float("nan"), "n": float("inf")}
    assert request_facts(request).sampling == {}
    usage = {"prompt_tokens": -1, "completion_tokens": True, "total_tokens": 2**70}
    assert answer_facts({"choices": [], "usage": usage}).usage == TokenUsage()


def test_deep_nesting_is_looked_at_from_above_only() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    try:
        summary = end({"messages": deep, "tools": deep, "model": deep, "stop": deep}, {"choices": deep, "usage": deep})
        assert (summary.message_count, summary.tool_count, summary.choice_count) == (1, 1, 1)
    finally:
        while deep:  # taken apart by hand: its destructor would recurse
            deep = deep.pop()


_MEMBERS = """
model messages input system instructions role type content tools functions function custom name stream n stop
sampling_params parameters temperature seed response_format text format reasoning effort logit_bias guided_json
choices message tool_calls function_call finish_reason output status incomplete_details reason stop_reason usage
meta_info id prompt_tokens completion_tokens input_tokens cache_read_input_tokens prompt_tokens_details
cached_tokens generated_text details prefill input_length error code detail response
"""
_KEYS = _MEMBERS.split()
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text("\ud800x", max_size=3))
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
        st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    ),
    max_leaves=30,
)
_OBJECTS = st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=8)
_WHOLE = st.one_of(_OBJECTS, _JSON, st.lists(_OBJECTS, max_size=3))
_ERRORS = st.one_of(_WHOLE, st.binary(max_size=20), st.builds(ValueError, st.text()))


@given(
    request=_WHOLE,
    answer=_WHOLE,
    error=_ERRORS,
    status=st.sampled_from([0, 101, 200, 204, 302, 400, 404, 429, 500, 599, 999]),
    dialect=st.sampled_from(["chat", "messages", "other", ""]),
    client_gone=st.booleans(),
)
def test_any_json_gives_a_bounded_summary_that_survives_storing(
    request: Any, answer: Any, error: Any, status: int, dialect: str, client_gone: bool
) -> None:
    beginning = begin(request, dialect=dialect)
    summary = end(request, answer, dialect=dialect, error=error, status=status, client_gone=client_gone)
    assert summary.error_class in ERROR_CLASSES
    for each in (beginning, summary):
        stored = entry_of(each, 3)
        assert stored.choice_index == 6 + (each is summary)
        assert summary_of(stored) == each
        assert all(_is_bounded(value) for value in msgspec.structs.asdict(each).values())


def _is_bounded(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= DETAIL_LENGTH
    if isinstance(value, (tuple, Mapping)):
        return len(value) <= NAMES_KEPT and all(map(_is_bounded, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63
