"""Rule 25: captured calls among the output items of a record, what isn't the model's in its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent_runs import function_call, message, reasoning, result
from tokcap.delivery.alignment import aligned_output, prompts_extend

Items = list[dict[str, Any]]


def captured(*items: dict[str, Any]) -> Items:
    """The items of one call, each marked so that it can be told from the record's."""
    return [{**item, "captured": True} for item in items]


def user(text: str = "go on") -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def shown(output: Items | None) -> list[str] | None:
    """Letters: reasoning, function_call, message, those that were captured in capitals; `.` what isn't the model's."""
    if output is None:
        return None
    letters = {"reasoning": "r", "function_call": "f", "message": "m", "function_call_output": "."}
    told = ["." if item.get("role") == "user" else letters[item["type"]] for item in output]
    return [letter.upper() if "captured" in item else letter for letter, item in zip(told, output, strict=True)]


def aligned(output: Items, *groups: Items) -> str | None:
    before = copy.deepcopy((output, groups))
    told = shown(aligned_output(output, groups))
    assert (output, groups) == before
    return None if told is None else "".join(told)


def test_an_output_that_shows_nothing_is_replaced_as_a_whole() -> None:
    assert aligned([], captured(message("a"))) == "M"
    assert aligned([reasoning("hm")], captured(function_call("x")), captured(message("a"))) == "FM"


def test_an_output_that_shows_the_last_answers_only_gets_the_calls_before_them_too() -> None:
    assert aligned([message("a")], captured(function_call("x")), captured(message("a"))) == "FM"


def test_an_output_that_says_something_else_is_kept() -> None:
    calls = captured(function_call("x")), captured(message("a"))
    assert aligned([message("AGENT TIMED OUT")], *calls) is None
    assert aligned([message("a"), message("AGENT TIMED OUT")], *calls) is None
    # An answer that was named by an id is the captured one, however it was rewritten.
    assert shown(aligned_output([message("rewritten")], calls, named=True)) == ["F", "M"]


def test_an_output_that_ends_at_an_earlier_answer_is_kept() -> None:
    assert aligned([message("one")], captured(message("one")), captured(message("two"))) is None


def test_answers_of_earlier_segments_stay_without_tokens_also_where_nothing_else_stands() -> None:
    assert aligned([message("one"), message("two")], captured(message("two"))) == "mM"


def test_a_captured_tool_call_takes_the_id_that_its_result_refers_to() -> None:
    own = {**function_call("x"), "call_id": "1", "id": "fc_1"}
    output = [own, result("1"), message("a")]
    placed = aligned_output(output, [captured(function_call("x")), captured(message("a"))])
    assert placed is not None
    assert (placed[0]["call_id"], placed[0]["id"], placed[0]["captured"]) == ("1", "fc_1", True)
    assert placed[1] == output[1]


def test_foreign_items_stay_between_the_calls() -> None:
    output = [user(), function_call("x"), result("1"), user(), message("a")]
    assert aligned(output, captured(function_call("x")), captured(message("a"))) == ".F..M"


def test_parallel_tool_calls_stay_before_their_results() -> None:
    output = [message("both"), function_call("x"), result("1"), function_call("y"), result("2"), message("a")]
    call = captured(reasoning("hm"), message("both"), function_call("x"), function_call("y"))
    assert aligned(output, call, captured(message("a"))) == "RMF.F.M"


def test_hazard_24_arguments_ids_and_white_space_may_be_written_otherwise() -> None:
    output = [function_call("x", '{"a": 1, "b": 2}', "short"), result("short"), message(" a\n")]
    assert (
        aligned(output, captured(function_call("x", '{"a":1.0,"b":2}', "call_long")), captured(message("a"))) == "F.M"
    )


def test_reasoning_may_be_missing_in_the_record() -> None:
    output = [function_call("x"), result("1"), message("a")]
    groups = captured(reasoning("1"), function_call("x")), captured(reasoning("2"), message("a"))
    assert aligned(output, *groups) == "RF.RM"


def test_reasoning_of_the_record_gives_way_to_what_was_captured() -> None:
    output = [reasoning("1"), function_call("x"), result("1"), reasoning("2"), message("a")]
    assert aligned(output, captured(function_call("x")), captured(message("a"))) == "F.M"
    groups = captured(reasoning("1"), function_call("x")), captured(reasoning("2"), message("a"))
    assert aligned(output, *groups) == "RF.RM"
    assert aligned([*output, reasoning("3")], *groups) == "RF.RM"


def test_reasoning_behind_a_message_stays_behind_it() -> None:
    output = [user(), message("a")]
    assert aligned(output, captured(message("a"), reasoning("later"))) == ".MR"


def test_items_of_earlier_segments_stay_without_tokens() -> None:
    output = [reasoning("0"), function_call("x"), result("1"), message("a"), user(), message("b")]
    assert aligned(output, captured(message("b"))) == "rf.m.M"


@pytest.mark.parametrize(
    "output",
    [
        [user(), message("something else")],
        [user(), message("a"), message("of nobody")],
        [user(), function_call("x"), result("1"), function_call("x"), result("2")],
        [user()],
        [message("a"), user(), function_call("x")],
        [function_call("x", '{"a": 2}'), user(), message("a")],
    ],
)
def test_what_is_not_the_models_answer_in_its_order_is_not_aligned(output: Items) -> None:
    assert aligned(output, captured(function_call("x")), captured(message("a"))) is None


def test_an_answer_that_the_record_cuts_otherwise_is_found() -> None:
    parts = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": t} for t in ("one ", "two")]}
    assert aligned([user(), message("one "), message("two"), user()], captured(parts)) == ".M."
    assert aligned([user(), parts, user()], captured(message("one "), message("two"))) == ".MM."


def test_calls_with_equal_answers_are_taken_from_the_end() -> None:
    output = [function_call("x"), result("1"), function_call("x"), result("2")]
    assert aligned(output, captured(function_call("x"))) == "f.F."
    assert aligned(output, captured(function_call("x")), captured(function_call("x"))) == "F.F."


def test_a_call_that_shows_nothing_takes_the_place_of_reasoning_or_stands_before_the_next() -> None:
    silent = captured(reasoning("cut off"))
    assert aligned([user(), reasoning("cut off"), user(), message("a")], silent, captured(message("a"))) == ".R.M"
    assert aligned([user(), message("a")], silent, captured(message("a"))) == ".RM"
    assert aligned([message("a"), user()], captured(message("a")), silent) == "M.R"
    assert aligned([user(), message("a")], silent, silent, captured(message("a"))) == ".RRM"


def test_calls_that_show_nothing_stay_in_their_order_and_take_one_run_of_reasoning_each() -> None:
    first, second = captured(reasoning("1")), captured(reasoning("2"))
    output = [user(), reasoning("1"), user(), reasoning("2"), user(), message("a")]
    assert aligned(output, first, second, captured(message("a"))) == ".R.R.M"
    assert aligned([user(), reasoning("2"), user(), message("a")], first, second, captured(message("a"))) == ".RR.M"
    placed = aligned_output([user(), message("a")], [first, second, [message("a")]])
    assert placed is not None
    assert placed[1:3] == first + second


def test_items_that_are_no_mappings_are_not_the_models() -> None:
    assert aligned_output(["odd", message("a"), None], [[message("a")]]) == ["odd", message("a"), None]


_VISIBLE = st.one_of(st.sampled_from("abc").map(message), st.sampled_from("xyz").map(lambda name: function_call(name)))
_CALLS = st.lists(
    st.lists(st.one_of(_VISIBLE, st.sampled_from("pq").map(reasoning)), min_size=1, max_size=3).filter(
        lambda items: any(item["type"] != "reasoning" for item in items)
    ),
    min_size=1,
    max_size=5,
)


@given(calls=_CALLS, earlier=_CALLS, data=st.data())
def test_whatever_the_record_drops_of_reasoning_every_call_is_found_in_order(
    calls: list[Items], earlier: list[Items], data: st.DataObject
) -> None:
    foreign: list[dict[str, Any]] = []
    output: Items = []
    for items in [*earlier, *calls]:
        for item in items:
            if item["type"] != "reasoning" or data.draw(st.booleans()):
                output.append(item)
        foreign.append({**user(), "number": len(foreign)})
        output.append(foreign[-1])
    marked = [
        [{**item, "call": (number, place)} for place, item in enumerate(call)] for number, call in enumerate(calls)
    ]
    placed = aligned_output(output, marked)
    assert placed is not None
    assert [item for item in placed if "call" in item] == [item for call in marked for item in call]
    assert [item for item in placed if "number" in item] == foreign
    # Behind every call comes its own foreign item, and none of another call between.
    ends = [
        next(i for i, item in enumerate(placed) if item.get("number") == len(earlier) + n) for n in range(len(calls))
    ]
    for number, end in enumerate(ends):
        last = max(i for i, item in enumerate(placed) if item.get("call", (-1,))[0] == number)
        assert last == end - 1


def test_prompts_must_extend_all_tokens_before_them() -> None:
    first = {"prompt_token_ids": [1], "generation_token_ids": [2]}
    assert prompts_extend([first, user(), {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4]}])
    assert prompts_extend([first, "odd", {"prompt_token_ids": [1, 2], "generation_token_ids": [4]}])
    assert not prompts_extend([first, {"prompt_token_ids": [1, 3], "generation_token_ids": [4]}])
    assert not prompts_extend([first, {"prompt_token_ids": [1], "generation_token_ids": [4]}])
