"""What makes the ids of an answer unusable, and what does not: one test for each rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tokcap.capture.shapes import ParsedChoice, parse_answer
from tokcap.errors import UnusableAnswerError

from . import shape_examples
from .shape_examples import IDS, PROMPT

Change = Callable[[dict[str, Any]], object]


def refusal(payload: Any, **asked: Any) -> str:
    with pytest.raises(UnusableAnswerError) as caught:
        parse_answer(payload, **asked)
    return str(caught.value)


def only_choice(payload: Any, **asked: Any) -> ParsedChoice:
    (choice,) = parse_answer(payload, **asked).choices
    return choice


def chat(**changes: Any) -> dict[str, Any]:
    """A chat answer of vLLM, its choice changed."""
    payload = shape_examples.vllm_chat()
    payload["choices"][0].update(routed_experts=None, weight_versions=None, **changes)
    return payload


def two_choices() -> dict[str, Any]:
    payload = chat()
    payload["choices"].append({**chat(token_ids=[7], logprobs=None)["choices"][0], "index": 1})
    payload["usage"]["completion_tokens"] = 3
    return payload


# ---- ids


def test_hazard_10_fewer_ids_than_completion_tokens_is_refused() -> None:
    payload = chat()
    payload["usage"]["completion_tokens"] = 3
    assert "2 sampled ids, but usage.completion_tokens is 3" in refusal(payload)


def test_hazard_10_fewer_ids_than_completion_tokens_over_all_choices_is_refused() -> None:
    payload = two_choices()
    assert len(parse_answer(payload, choices=2).choices) == 2
    payload["usage"]["completion_tokens"] = 4
    assert "3 sampled ids, but usage.completion_tokens is 4" in refusal(payload, choices=2)


def test_more_ids_than_completion_tokens_is_refused() -> None:
    payload = chat()
    payload["usage"]["completion_tokens"] = 1
    assert "2 sampled ids, but usage.completion_tokens is 1" in refusal(payload)


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, {"completion_tokens": "2"}, 5])
def test_absent_usage_abstains(usage: object) -> None:
    payload = chat()
    payload["usage"] = usage
    answer = parse_answer(payload)
    assert (answer.usage_completion_tokens, answer.usage_prompt_tokens) == (None, None)
    assert answer.choices[0].generation_token_ids.tolist() == IDS


def test_another_number_of_prompt_ids_than_usage_is_refused() -> None:
    payload = chat()
    payload["usage"]["prompt_tokens"] = 4
    assert "3 prompt ids, but usage.prompt_tokens is 4" in refusal(payload)


def test_each_prompt_of_a_batch_counts_once_in_usage() -> None:
    payload = shape_examples.vllm_completions()
    (first,) = payload["choices"]
    payload["choices"] = [
        {**first, "index": index, "prompt_token_ids": prompt}
        for index, prompt in enumerate((PROMPT, PROMPT, [1, 2, 3, 4], [1, 2, 3, 4]))
    ]
    payload["usage"] = {"prompt_tokens": 7, "completion_tokens": 8}
    assert len(parse_answer(payload, choices=4).choices) == 4
    for wrong in (3, 10):
        payload["usage"]["prompt_tokens"] = wrong
        assert f"prompt ids, but usage.prompt_tokens is {wrong}" in refusal(payload, choices=4)
    payload["choices"].pop()
    payload["choices"][2]["prompt_token_ids"] = PROMPT
    for total, taken in ((3, True), (9, True), (6, False)):  # one prompt, three prompts, no number of equal ones
        payload["usage"] = {"prompt_tokens": total, "completion_tokens": 6}
        if taken:
            assert len(parse_answer(payload, choices=3).choices) == 3
        else:
            assert "usage.prompt_tokens is 6" in refusal(payload, choices=3)


def test_prompt_that_choices_of_a_chat_share_counts_once_in_usage() -> None:
    payload = two_choices()
    payload["usage"]["prompt_tokens"] = 6
    assert "3 prompt ids, but usage.prompt_tokens is 6" in refusal(payload, choices=2)


def test_disagreeing_places_are_named_with_position_and_both_values() -> None:
    payload = shape_examples.sglang_chat()
    payload["sglext"]["output_ids"] = [[6023, 15]]
    assert refusal(payload, path="/v1/chat/completions") == (
        "/v1/chat/completions: choices[0].response_token_ids and sglext.output_ids[0] disagree about the sampled ids: "
        "at position 1 they say 151645 and 15"
    )


def test_places_with_different_numbers_of_ids_disagree() -> None:
    payload = shape_examples.sglang_chat()
    payload["sglext"]["input_ids"] = [*PROMPT, 5]
    assert "disagree about the prompt ids: 3 ids and 4" in refusal(payload)


def test_name_of_another_id_among_the_log_probs_is_refused() -> None:
    payload = shape_examples.vllm_chat_names()
    payload["choices"][0]["logprobs"]["content"][1]["token"] = "token_id:15"
    assert "choices[0].logprobs.content[1].token names the id 15, but at position 1 the ids say 151645" in refusal(
        payload
    )


def test_integer_id_of_another_token_beside_a_log_prob_is_refused() -> None:
    payload = shape_examples.vllm_generate()
    payload["choices"][0]["logprobs"]["content"][0]["token_id"] = 15
    assert "choices[0].logprobs.content[0].token_id names the id 15" in refusal(payload)


@pytest.mark.parametrize("token_id", [float(IDS[0]), str(IDS[0]), [IDS[0]]])
def test_id_beside_a_log_prob_that_is_no_integer_is_refused(token_id: object) -> None:
    payload = shape_examples.vllm_generate()
    payload["choices"][0]["logprobs"]["content"][0]["token_id"] = token_id
    assert "content[0].token_id is" in refusal(payload)


def test_names_of_some_ids_are_checked_but_are_no_source() -> None:
    payload = shape_examples.vllm_chat_names()
    payload["choices"][0]["logprobs"]["content"][0]["token"] = ""
    assert parse_answer(payload).id_sources == ("prompt_token_ids", "choices[].token_ids")
    payload["choices"][0]["logprobs"]["content"][1]["token"] = "token_id:15"
    assert "content[1].token names the id 15" in refusal(payload)


def test_null_stands_for_no_list() -> None:
    payload = shape_examples.sglang_chat()
    payload["sglext"] = {"input_ids": None, "output_ids": [None]}
    payload["choices"][0]["response_token_ids"] = None
    answer = parse_answer(payload)
    assert answer.choices[0].generation_token_ids.tolist() == IDS
    assert answer.id_sources == ("choices[].prompt_token_ids", "choices[].meta_info.output_token_logprobs[][1]")


@pytest.mark.parametrize("bad", [True, False, 12.0, "12", None, -1, 2**31, [1], {}])
def test_id_that_is_no_token_id_is_refused(bad: object) -> None:
    assert "choices[0].token_ids[1]" in refusal(chat(token_ids=[6023, bad]))
    payload = chat()
    payload["prompt_token_ids"] = [bad, 872, 198]
    assert "prompt_token_ids" in refusal(payload)


@pytest.mark.parametrize("ids", ["[1]", 5, {"0": 1}])
def test_ids_that_are_no_list_are_refused(ids: object) -> None:
    assert "choices[0].token_ids is" in refusal(chat(token_ids=ids))


@pytest.mark.parametrize("name", ["token_id:", "token_id:x", "token_id:-1", "token_id:1_0", "token_id:" + "9" * 5000])
def test_name_that_is_none_of_an_id_is_refused(name: str) -> None:
    payload = shape_examples.vllm_chat_names()
    payload["choices"][0]["logprobs"]["content"][0]["token"] = name
    assert "content[0].token is" in refusal(payload)


def test_ids_named_for_some_positions_only_are_refused() -> None:
    payload = shape_examples.old_vllm_chat()
    payload["choices"][0]["logprobs"]["content"][1]["token"] = "!"
    assert "choices[0].logprobs.content[1].token names no id, but others do" in refusal(payload)


def test_ids_of_some_choices_only_are_refused() -> None:
    payload = two_choices()
    payload["choices"][1]["token_ids"] = None
    assert "choices[1] has no ids of sampled tokens, but choices[0] has" in refusal(payload, choices=2)


def test_fewer_choices_than_asked_for_are_refused() -> None:
    assert "1 choices in the answer, but 2 were asked for" in refusal(chat(), choices=2)


def test_two_choices_with_one_index_are_refused() -> None:
    payload = two_choices()
    payload["choices"][1]["index"] = 0
    assert "same index: [0, 0]" in refusal(payload, choices=2)


@pytest.mark.parametrize("index", [-1, True, "0", 1.0, 2**31])
def test_index_that_is_no_number_of_a_choice_is_refused(index: object) -> None:
    assert "choices[0].index is" in refusal(chat(index=index))


def test_choices_are_ordered_by_index_and_share_the_prompt_at_the_root() -> None:
    payload = two_choices()
    payload["choices"].reverse()
    first, second = parse_answer(payload, choices=2).choices
    assert (first.choice_index, first.generation_token_ids.tolist()) == (0, IDS)
    assert (second.choice_index, second.generation_token_ids.tolist()) == (1, [7])
    assert first.prompt_token_ids is second.prompt_token_ids


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (shape_examples.tinker_sample, "sequences[0] has 2 ids of sampled tokens but no prompt ids"),
        (shape_examples.old_vllm_chat, "choices[0] has 2 ids of sampled tokens but no prompt ids"),
        (shape_examples.vllm_chat, "choices[0] has 2 ids of sampled tokens but no prompt ids"),
    ],
)
def test_sampled_ids_without_prompt_ids_are_refused(payload: Callable[[], dict[str, Any]], message: str) -> None:
    answer = payload()
    del answer["prompt_token_ids"]
    assert message in refusal(answer)


def test_tgi_answer_without_prefill_has_no_prompt_ids() -> None:
    payload = shape_examples.tgi_generate()
    payload["details"]["prefill"] = []
    assert "details has 2 ids of sampled tokens but no prompt ids" in refusal(payload)


def test_tgi_answer_with_another_number_of_prompt_ids_than_it_counts_is_refused() -> None:
    payload = shape_examples.tgi_generate()
    payload["details"]["input_length"] = 4
    assert "3 prompt ids, but details.input_length is 4" in refusal(payload)


def test_prompt_ids_without_sampled_ids_are_refused_unless_nothing_was_sampled() -> None:
    payload = chat(token_ids=None, logprobs=None)
    assert "prompt_token_ids gives prompt ids, but no ids of sampled tokens" in refusal(payload)
    payload["usage"]["completion_tokens"] = 0
    answer = parse_answer(payload)
    assert (answer.evidence, answer.choices, answer.usage_completion_tokens) == ("none", [], 0)


def test_answer_with_no_sampled_token_is_exact() -> None:
    payload = chat(token_ids=[], logprobs={"content": []}, finish_reason="abort")
    payload["usage"]["completion_tokens"] = 0
    choice = only_choice(payload)
    assert (len(choice.generation_token_ids), choice.generation_log_probs) == (0, [])


def test_partial_triple_on_a_message_is_refused() -> None:
    payload = shape_examples.nemo_chat()
    del payload["choices"][0]["message"]["prompt_token_ids"]
    assert "no prompt ids" in refusal(payload)
    payload = shape_examples.nemo_chat()
    del payload["choices"][0]["message"]["generation_token_ids"]
    assert "choices[0].message.prompt_token_ids gives prompt ids, but no ids" in refusal(payload)


def test_several_items_that_carry_ids_are_refused() -> None:
    payload = shape_examples.nemo_responses()
    payload["output"].append(dict(payload["output"][1]))
    assert "output[1], output[2] carry ids" in refusal(payload)


def test_answer_of_several_rounds_is_refused() -> None:
    payload = shape_examples.vllm_responses()
    payload["output_messages"] += [{"tokens": [1]}, {"tokens": [2]}]
    assert "output_messages holds 3 messages" in refusal(payload)


def test_ids_of_one_choice_at_the_root_are_refused_for_several_choices() -> None:
    payload = shape_examples.dynamo()
    payload["choices"].append({**payload["choices"][0], "index": 1})
    assert "nvext.engine_data.completion_token_ids is no list for each of the 2 choices" in refusal(payload)


def test_count_beside_the_ids_of_one_choice_is_checked() -> None:
    payload = shape_examples.sglang_generate()
    payload["meta_info"]["completion_tokens"] = 3
    assert "2 sampled ids, but meta_info counts 3" in refusal(payload)
    payload = shape_examples.sglang_generate()
    payload["meta_info"].update(prompt_tokens=4)
    assert "3 prompt ids, but meta_info counts 4" in refusal(payload)


def test_log_probs_of_a_part_of_the_prompt_are_no_prompt() -> None:
    payload = shape_examples.sglang_generate()
    payload["meta_info"]["input_token_logprobs"] = [[-2.0, 7, None]]
    assert only_choice(payload).prompt_token_ids.tolist() == PROMPT


def test_prompt_ids_at_the_root_belong_to_the_choices_of_each_prompt() -> None:
    payload = shape_examples.trtllm_completions()
    (first,) = payload["choices"]
    payload["choices"] = [{**first, "index": index} for index in range(4)]
    payload["prompt_token_ids"] = [PROMPT, [1, 2]]
    payload["usage"] = {"prompt_tokens": 5, "completion_tokens": 8}
    found = [choice.prompt_token_ids.tolist() for choice in parse_answer(payload, choices=4).choices]
    assert found == [PROMPT, PROMPT, [1, 2], [1, 2]]


def test_id_of_a_request_makes_no_completion_an_answer_of_the_generate_route() -> None:
    payload = {**shape_examples.vllm_completions(), "request_id": "r"}
    answer = parse_answer(payload)
    assert (answer.shape, answer.response_id) == ("vllm-completions", "cmpl-x")


@pytest.mark.parametrize("created", [None, "1700000000", True, math.inf, math.nan, 10**400])
def test_time_that_is_no_time_is_left_out(created: object) -> None:
    assert parse_answer({**chat(), "created": created}).created_at == 0.0
