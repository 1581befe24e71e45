"""The log-probs of an answer are those of its sampled tokens, position by position, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tokcap.capture.shapes import ParsedChoice, parse_answer
from tokcap.errors import UnusableAnswerError

from . import shape_examples
from .shape_examples import EXAMPLES, IDS, LOG_PROBS, PROMPT


def refusal(payload: Any) -> str:
    with pytest.raises(UnusableAnswerError) as caught:
        parse_answer(payload)
    return str(caught.value)


def only_choice(payload: Any) -> ParsedChoice:
    (choice,) = parse_answer(payload).choices
    return choice


def with_content(entries: Any) -> dict[str, Any]:
    payload = shape_examples.vllm_chat()
    payload["choices"][0]["logprobs"] = {"content": entries}
    return payload


def test_hazard_09_missing_log_probs_are_unknown_and_not_zero() -> None:
    payload = shape_examples.vllm_chat()
    payload["choices"][0]["logprobs"] = None
    choice = only_choice(payload)
    assert (choice.generation_log_probs, choice.log_probs_present) == ([None, None], False)


def test_hazard_09_null_keeps_its_position() -> None:
    first, second = shape_examples.content()
    assert only_choice(with_content([{**first, "logprob": None}, second])).generation_log_probs == [None, LOG_PROBS[1]]
    choice = only_choice(with_content([None, second]))
    assert (choice.generation_log_probs, choice.log_probs_present) == ([None, LOG_PROBS[1]], True)


def test_hazard_09_log_prob_is_that_of_the_sampled_token_not_of_an_alternative() -> None:
    payload = shape_examples.vllm_completions()
    alternatives = payload["choices"][0]["logprobs"]["top_logprobs"]
    assert next(iter(alternatives[0].values())) != LOG_PROBS[0]
    assert only_choice(payload).generation_log_probs == LOG_PROBS
    entries = shape_examples.content()
    for entry in entries:
        entry["top_logprobs"] = [{"token": "ho", "logprob": -0.001}, {"token": entry["token"], "logprob": -7.0}]
    assert only_choice(with_content(entries)).generation_log_probs == LOG_PROBS


@pytest.mark.parametrize("count", [0, 1])
def test_hazard_09_fewer_log_probs_than_ids_are_all_unknown_because_nothing_tells_which_are_missing(count: int) -> None:
    (choice,) = parse_answer(with_content(shape_examples.content()[:count])).choices
    assert list(choice.generation_log_probs) == [None, None]
    assert not choice.log_probs_present
    assert len(choice.generation_token_ids) == 2


def test_hazard_09_more_log_probs_than_ids_are_refused() -> None:
    entries = (shape_examples.content() * 2)[:3]
    assert "choices[0].logprobs.content gives 3 log-probs, but there are 2 sampled ids" in refusal(
        with_content(entries)
    )


def test_hazard_09_two_sources_of_log_probs_that_differ_are_refused() -> None:
    payload = shape_examples.sglang_chat()
    payload["choices"][0]["logprobs"]["content"][1]["logprob"] = -0.7  # another mode: before the temperature
    assert refusal(payload) == (
        "choices[0].meta_info.output_token_logprobs and choices[0].logprobs.content disagree about the log-prob at "
        "position 1: -0.01 and -0.7"
    )


@pytest.mark.parametrize("other", [None, -9999.0, LOG_PROBS[1] + 1e-7])
def test_source_that_knows_less_does_not_contradict(other: float | None) -> None:
    payload = shape_examples.sglang_chat()
    payload["choices"][0]["logprobs"]["content"][1]["logprob"] = other
    assert only_choice(payload).generation_log_probs == LOG_PROBS


@pytest.mark.parametrize("bad", ["-0.2", True, [], {}, 10**400])
@pytest.mark.parametrize("name", ["vllm_chat", "vllm_completions", "sglang_generate", "nemo_chat", "tgi_generate"])
def test_log_prob_that_is_no_number_is_refused(name: str, bad: object) -> None:
    payload = EXAMPLES[name][1]()
    if name == "vllm_chat":
        payload["choices"][0]["logprobs"]["content"][1]["logprob"] = bad
    elif name == "vllm_completions":
        payload["choices"][0]["logprobs"]["token_logprobs"][1] = bad
    elif name == "sglang_generate":
        payload["meta_info"]["output_token_logprobs"][1][0] = bad
    elif name == "nemo_chat":
        payload["choices"][0]["message"]["generation_log_probs"][1] = bad
    else:
        payload["details"]["tokens"][1]["logprob"] = bad
    assert "[1]" in refusal(payload)


@pytest.mark.parametrize("bad", [5, "x", {}])
def test_log_probs_that_are_no_list_are_refused(bad: object) -> None:
    assert "expected a list" in refusal(with_content(bad))
    payload = shape_examples.sglang_generate()
    payload["meta_info"]["output_token_logprobs"] = bad
    assert "expected a list" in refusal(payload)


@pytest.mark.parametrize("rows", [[[-0.2, 6023, "hi"], [-0.01]], [[-0.2, 6023, "hi"], None], ["ab", "cd"]])
def test_row_of_log_probs_that_is_no_triple_is_refused(rows: object) -> None:
    payload = shape_examples.sglang_generate()
    payload["meta_info"]["output_token_logprobs"] = rows
    assert "expected [log-prob, token id, text]" in refusal(payload)


def test_clamped_log_probs_are_kept_and_listed() -> None:
    first, second = shape_examples.content()
    choice = only_choice(with_content([first, {**second, "logprob": -9999.0}]))
    assert (choice.generation_log_probs, choice.clamped) == ([LOG_PROBS[0], -9999.0], [1])


@pytest.mark.parametrize(
    ("entry", "log_prob", "clamped"),
    [
        ({"rank": 1, "top_logprobs": []}, -9999.0, [1]),
        ({"rank": None, "top_logprobs": [{"token_id": 5, "logprob": -1.0, "rank": 1}]}, None, []),
        ({"rank": None}, None, []),
    ],
    ids=["-inf", "NaN", "missing"],
)
def test_rank_tells_what_the_clamp_of_vllm_stands_for(
    entry: dict[str, Any], log_prob: float | None, clamped: list[int]
) -> None:
    payload = shape_examples.vllm_generate()
    payload["choices"][0]["logprobs"]["content"][1] = {"token_id": IDS[1], "logprob": -9999.0, **entry}
    choice = only_choice(payload)
    assert (choice.generation_log_probs, choice.clamped) == ([LOG_PROBS[0], log_prob], clamped)


def test_log_prob_without_rank_is_kept_if_it_is_no_clamp() -> None:
    payload = shape_examples.vllm_generate()
    payload["choices"][0]["logprobs"]["content"][1]["rank"] = None
    assert only_choice(payload).generation_log_probs == LOG_PROBS


# ---- echo


def echoed() -> dict[str, Any]:
    payload = shape_examples.vllm_completions()
    columns = payload["choices"][0]["logprobs"]
    columns["tokens"][:0] = [f"token_id:{token}" for token in PROMPT]
    columns["token_logprobs"][:0] = [None, -3.0, -4.0]
    columns["top_logprobs"][:0] = [None, {}, {}]
    return payload


def test_echoed_prompt_is_cut_off_the_columns() -> None:
    choice = only_choice(echoed())
    assert choice.generation_log_probs == LOG_PROBS
    assert choice.generation_token_ids.tolist() == IDS


def test_echoed_prompt_with_nothing_sampled_leaves_no_log_prob() -> None:
    payload = echoed()
    (choice,) = payload["choices"]
    choice["token_ids"] = []
    choice["logprobs"] = {key: column[:3] for key, column in choice["logprobs"].items() if key != "text_offset"}
    payload["usage"]["completion_tokens"] = 0
    assert only_choice(payload).generation_log_probs == []


def test_echo_that_does_not_fit_is_refused() -> None:
    payload = echoed()
    for column in payload["choices"][0]["logprobs"].values():
        del column[0]
    assert "token_logprobs gives 4 log-probs, but there are 2 sampled ids" in refusal(payload)


def test_echo_of_another_prompt_is_refused() -> None:
    payload = echoed()
    payload["choices"][0]["logprobs"]["tokens"][1] = "token_id:5"
    assert "choices[0].logprobs.tokens[1] names the id 5, but at position 1 the ids say 872" in refusal(payload)


def test_columns_of_different_length_are_refused() -> None:
    payload = shape_examples.vllm_completions()
    payload["choices"][0]["logprobs"]["tokens"].append("token_id:5")
    assert "has 3 tokens but 2 token_logprobs" in refusal(payload)


def test_chat_answer_has_no_echo() -> None:
    entries = [{"token": "x", "logprob": -1.0}] * 3 + shape_examples.content()
    assert "gives 5 log-probs, but there are 2" in refusal(with_content(entries))


# ---- responses


def test_log_probs_of_a_part_of_a_response_are_not_used() -> None:
    payload = shape_examples.vllm_responses()
    payload["output"][0]["content"][0]["logprobs"].pop()
    choice = only_choice(payload)
    assert (choice.generation_log_probs, choice.log_probs_present, choice.pieces) == ([None, None], False, None)


def test_log_probs_beside_other_items_of_a_response_are_not_used() -> None:
    payload = shape_examples.vllm_responses()
    payload["output"].append({"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"})
    choice = only_choice(payload)
    assert (choice.generation_log_probs, choice.log_probs_present) == ([None, None], False)
    assert choice.token_item_index == 1


# ---- pieces


@pytest.mark.parametrize(
    ("token", "bytes_", "pieces"),
    [
        ("!", [33], [b"hi", b"!"]),
        ("é", [195, 169], [b"hi", "é".encode()]),
        ("<|im_end|>", [60], None),
        ("<|im_end|>", [], None),
        ("!", None, None),
        ("!", "!", None),
        ("!", [256], None),
        ("!", [None], None),
        (None, [33], None),
        ("\ufffd", [240, 159], [b"hi", b"\xf0\x9f"]),
        ("\ufffd", [239, 191, 189], None),
        ("\ud800", [33], None),
    ],
)
def test_pieces_are_kept_only_if_each_can_be_trusted(token: object, bytes_: object, pieces: object) -> None:
    first, second = shape_examples.content()
    assert only_choice(with_content([first, {**second, "token": token, "bytes": bytes_}])).pieces == pieces


def test_bytes_of_a_named_token_are_not_trusted() -> None:
    assert only_choice(shape_examples.vllm_chat_names()).pieces is None
