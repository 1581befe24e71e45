"""Each shape of answers is read as the engine means it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokcap import TokenEntry
from tokcap.capture import shapes
from tokcap.capture.shapes import SHAPES, ParsedChoice, parse_answer

from . import shape_examples
from .shape_examples import EXAMPLES, IDS, LOG_PROBS, PROMPT

MESSAGE = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "hi!", "annotations": []}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def only_choice(payload: Any) -> ParsedChoice:
    (choice,) = parse_answer(payload).choices
    return choice


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_shape_gives_the_ids_and_log_probs_of_the_answer(name: str) -> None:
    shape, example = EXAMPLES[name]
    answer = parse_answer(example())
    (choice,) = answer.choices
    assert (answer.shape, answer.evidence) == (shape, "ids")
    assert choice.prompt_token_ids.tolist() == PROMPT
    assert choice.generation_token_ids.tolist() == IDS
    assert choice.generation_log_probs == LOG_PROBS
    assert choice.log_probs_present
    assert choice.choice_index == 0
    assert choice.clamped == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_shape_makes_an_entry(name: str) -> None:
    choice = only_choice(EXAMPLES[name][1]())
    entry = TokenEntry(
        "r",
        "c",
        choice.prompt_token_ids,
        choice.generation_token_ids,
        choice.generation_log_probs,
        routed_experts=choice.routed_experts,
        output_items=choice.output_items,
        token_item_index=choice.token_item_index,
        finish_reason=choice.finish_reason,
        policy_versions=choice.policy_versions,
        pieces=choice.pieces,
        extra=choice.extra,
    )
    assert entry.prompt_token_ids is choice.prompt_token_ids  # taken as it is, not copied


def test_every_shape_of_the_table_has_an_example_and_a_line_in_the_documentation() -> None:
    names = [shape.name for shape in SHAPES]
    assert len(set(names)) == len(names)
    assert set(names) == {shape for shape, _ in EXAMPLES.values()}
    documented = [line.split("`")[1] for line in (shapes.__doc__ or "").splitlines() if line.startswith("| `")]
    assert documented == [*names, *names]  # where its ids are, and since when
    for shape in SHAPES:
        assert f"| `{shape.name}` | {shape.engine} | {shape.versions} | `{shape.route}` |" in (shapes.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("vllm_chat", ("prompt_token_ids", "choices[].token_ids")),
        (
            "vllm_chat_names",
            ("prompt_token_ids", "choices[].token_ids", "choices[].logprobs.content[].token"),
        ),
        ("old_vllm_chat", ("prompt_token_ids", "choices[].logprobs.content[].token")),
        (
            "vllm_completions",
            ("choices[].prompt_token_ids", "choices[].token_ids", "choices[].logprobs.tokens[]"),
        ),
        (
            "vllm_generate",
            ("prompt_token_ids", "choices[].token_ids", "choices[].logprobs.content[].token_id"),
        ),
        ("vllm_responses", ("input_messages[].tokens", "output_messages[].tokens")),
        ("nemo_responses", ("output[].prompt_token_ids", "output[].generation_token_ids")),
        ("nemo_chat", ("choices[].message.prompt_token_ids", "choices[].message.generation_token_ids")),
        (
            "sglang_generate",
            (
                "prompt_token_ids",
                "meta_info.input_token_logprobs[][1]",
                "output_ids",
                "meta_info.output_token_logprobs[][1]",
            ),
        ),
        (
            "sglang_chat",
            (
                "choices[].prompt_token_ids",
                "sglext.input_ids",
                "choices[].response_token_ids",
                "choices[].meta_info.output_token_logprobs[][1]",
                "sglext.output_ids[]",
            ),
        ),
        ("dynamo", ("nvext.engine_data.prompt_token_ids", "nvext.engine_data.completion_token_ids")),
        ("trtllm_completions", ("prompt_token_ids[]", "choices[].token_ids")),
        ("tgi_generate", ("details.prefill[].id", "details.tokens[].id")),
    ],
)
def test_the_places_of_the_ids_are_named(name: str, sources: tuple[str, ...]) -> None:
    assert parse_answer(EXAMPLES[name][1]()).id_sources == sources


def test_vllm_chat_gives_reasoning_text_pieces_weights_and_experts() -> None:
    answer = parse_answer(shape_examples.vllm_chat())
    (choice,) = answer.choices
    assert (answer.model, answer.response_id, answer.created_at) == ("m", "chatcmpl-x", 1700000000.0)
    assert (answer.usage_prompt_tokens, answer.usage_completion_tokens) == (3, 2)
    reasoning, message = choice.output_items
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert message == MESSAGE
    assert choice.token_item_index == 1
    assert choice.pieces == [b"hi", b"!"]
    assert choice.policy_versions == [("v7", 0, 1), ("v8", 1, 2)]
    np.testing.assert_array_equal(choice.routed_experts, np.arange(24, dtype=np.uint8).reshape(4, 3, 2))
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.extra == {"routed_experts_form": "npy", "system_fingerprint": "vllm-0.33.0-abcd1234"}


def test_vllm_completion_gives_its_text_as_a_message() -> None:
    choice = only_choice(shape_examples.vllm_completions())
    assert choice.output_items == [MESSAGE]
    assert choice.token_item_index == 0
    assert choice.pieces is None


def test_vllm_generate_gives_mask_and_weights_and_no_items() -> None:
    answer = parse_answer(shape_examples.vllm_generate())
    (choice,) = answer.choices
    assert (answer.response_id, answer.model) == ("generate-tokens-x", "")
    assert (choice.output_items, choice.token_item_index) == ([], None)
    assert choice.stop_reason == 151645
    assert choice.policy_versions == [("default", 0, 2)]
    assert choice.extra == {"sampling_mask": [[6023, 11], [151645]]}


def test_vllm_generate_in_text_mode_gives_its_text() -> None:
    payload = shape_examples.old_vllm_generate()
    payload["output_mode"] = "text"
    payload["choices"][0]["text"] = "hi!"
    answer = parse_answer(payload)
    assert answer.shape == "vllm-generate"
    assert answer.choices[0].output_items == [MESSAGE]


def test_vllm_responses_items_come_without_log_probs() -> None:
    answer = parse_answer(shape_examples.vllm_responses())
    (choice,) = answer.choices
    assert choice.output_items == [MESSAGE]
    assert (choice.finish_reason, answer.created_at, answer.usage_completion_tokens) == ("stop", 1700000000.0, 2)


def test_nemo_responses_item_that_carries_the_arrays_is_named_and_stripped() -> None:
    payload = shape_examples.nemo_responses()
    payload["output"].append({"type": "message", "role": "assistant", "content": []})
    choice = only_choice(payload)
    assert choice.token_item_index == 1
    assert choice.output_items == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        CALL,
        {"type": "message", "role": "assistant", "content": []},
    ]


def test_nemo_chat_gives_reasoning_tool_call_and_padded_experts() -> None:
    choice = only_choice(shape_examples.nemo_chat())
    reasoning, call = choice.output_items
    assert reasoning["content"][0]["text"] == "so"
    assert call == {**CALL, "arguments": '{"n": 1.0}'}
    assert choice.token_item_index == 1
    np.testing.assert_array_equal(choice.routed_experts, np.arange(30, dtype=np.int16).reshape(5, 3, 2))
    assert choice.finish_reason == "tool_calls"


def test_sglang_generate_gives_what_matched_and_flat_experts() -> None:
    answer = parse_answer(shape_examples.sglang_generate())
    (choice,) = answer.choices
    assert (answer.response_id, answer.usage_completion_tokens, answer.usage_prompt_tokens) == ("rid", 2, 3)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", 151645)
    assert choice.output_items == [MESSAGE]
    assert choice.policy_versions == [("v7", 0, 1), ("v8", 1, 2)]
    np.testing.assert_array_equal(choice.routed_experts, np.arange(24, dtype=np.int32))
    assert choice.extra["routed_experts_form"] == "raw-int32"
    assert "reshape" in choice.extra["routed_experts_note"]
    assert choice.extra["sampling_mask"] == [[6023, 11], [151645]]
    assert choice.extra["sampling_log_probs"] == [-0.1, 0.0]
    assert choice.extra["weight_version"] == "v8"


def test_sglang_generate_without_output_ids_takes_those_of_the_log_probs() -> None:
    payload = shape_examples.sglang_generate()
    del payload["output_ids"]
    assert only_choice(payload).generation_token_ids.tolist() == IDS


def test_sglang_generate_list_gives_a_choice_for_each_by_position() -> None:
    first, second = shape_examples.sglang_generate(), shape_examples.sglang_generate()
    second["output_ids"], second["meta_info"]["output_token_logprobs"] = [7, 8, 9], [[-1.0, i, None] for i in (7, 8, 9)]
    second["meta_info"].update(completion_tokens=3, weight_versions=None)
    answer = parse_answer([first, second], choices=2)
    assert [choice.choice_index for choice in answer.choices] == [0, 1]
    assert [choice.generation_token_ids.tolist() for choice in answer.choices] == [IDS, [7, 8, 9]]
    assert (answer.usage_completion_tokens, answer.usage_prompt_tokens) == (5, 3)


def test_sglang_chat_takes_the_log_probs_that_stand_beside_the_ids() -> None:
    payload = shape_examples.sglang_chat()
    payload["choices"][0]["logprobs"]["content"][0]["logprob"] = None
    choice = only_choice(payload)
    assert choice.generation_log_probs == LOG_PROBS
    assert choice.stop_reason == 151645
    assert choice.policy_versions == [("v8", 0, 2)]
    assert choice.extra["weight_version"] == "v8"


def test_tgi_generate_gives_reason_seed_and_counts() -> None:
    answer = parse_answer(shape_examples.tgi_generate())
    assert answer.choices[0].finish_reason == "eos_token"
    assert answer.choices[0].extra == {"seed": 1}
    assert answer.usage_completion_tokens == 2
    assert parse_answer([shape_examples.tgi_generate()]).shape == "tgi-generate"
