"""What the rules leave to the details: choices that a build makes and that the tests of the rules don't see.

The rules by their number stand in `test_trajectory_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.rollout_examples import Example, call, example, missing, samples
from tests.test_trajectory_rules import of, scored, text, trained
from tokcap import CallRecord
from tokcap.digests import answer_digest
from tokcap.entry import content_digest
from tokcap.errors import InvalidOptionError
from tokcap.trajectory import Build, build, group_of, rebuild_response
from tokcap.trajectory.behaviour import is_behaviour, unknown_log_probs
from tokcap.trajectory.drift import compare
from tokcap.trajectory.samples import sample_units
from tokcap.trajectory.times import began_before, ended_before, ended_first, is_before
from tokcap.trajectory.verdicts import CATEGORIES


def digest(said: str) -> bytes:
    """Of an answer that says that."""
    found = answer_digest(text(said))
    assert found is not None
    return found


def asked(given: Example, requests: Mapping[str, Sequence[str]]) -> Example:
    """The same rollout, where the request of a call holds these answers."""
    records = [
        msgspec.structs.replace(record, request_digests=tuple(map(digest, requests.get(record.model_call_id, ()))))
        for record in given.calls
    ]
    return Example(given.entries, records)


def calls_of(built: Build, call_id: str) -> list[str]:
    """The calls on the way of the trajectory that owns the span of a call."""
    return [span.model_call_ids[0] for span in of(built, call_id).calls]


# ---- siblings


def test_calls_of_two_models_with_one_prompt_are_no_siblings() -> None:
    given = example(call("a", [1], [2], model="m"), call("b", [1], [3], model="n"))
    assert trained(build(given, models=("m", "n"))) == {"a": [2], "b": [3]}


def test_a_prompt_may_go_on_with_a_cut_off_answer_whose_ids_an_abandoned_sibling_shares() -> None:
    built = build(
        example(
            call("kept", [1], [4]),
            call("abandoned", [1], [2, 3, 9]),
            call("cut-off", [1], [2, 3, 5], outcome="aborted"),
            call("next", [1, 4, 6], [7]),
            call("other", [1, 2, 3, 8], [7]),
        )
    )
    assert trained(built) == {"kept": [4], "cut-off": [2, 3], "next": [7], "other": [7]}
    assert (built.metrics["abandoned"], built.metrics["aborted"]) == (3, 1)


def test_a_cut_off_answer_that_is_never_continued_says_so_and_is_no_end_of_a_conversation() -> None:
    given = example(call("cut-off", [1], [2, 3], outcome="aborted"), call("again", [1], [4]))
    (span,) = of(build(given), "cut-off").calls
    assert (span.verdict, span.trained) == ("aborted", 0)
    assert rebuild_response(given).calls == (("again", 0),)


def test_complete_answers_are_abandoned_for_a_cut_off_one_that_a_prompt_goes_on_with() -> None:
    built = build(
        example(
            call("a", [1], [5]),
            call("b", [1], [6]),
            call("cut-off", [1], [2, 3, 4], outcome="aborted"),
            call("next", [1, 2, 3, 9], [7]),
        )
    )
    assert trained(built) == {"cut-off": [2, 3], "next": [7]}
    assert (built.metrics["abandoned"], built.metrics["aborted"]) == (2, 1)


def test_a_prompt_that_ends_within_a_cut_off_answer_goes_on_with_it() -> None:
    built = build(example(call("cut-off", [1], [2, 3, 4, 5], outcome="aborted"), call("next", [1, 2, 3], [6])))
    assert trained(built) == {"cut-off": [2, 3], "next": [6]}


def test_a_prompt_after_which_nothing_was_sampled_goes_on_with_a_cut_off_answer() -> None:
    built = build(example(call("cut-off", [1], [2, 3, 4], outcome="aborted"), call("silent", [1, 2, 3, 9], [])))
    assert trained(built) == {"cut-off": [2, 3]}


def test_of_identical_answers_it_is_enough_that_one_was_received() -> None:
    built = build(
        example(
            call("a", [1], [2], delivered="no"),
            call("a-again", [1], [2], delivered="full"),
            call("b", [1], [3], delivered="no"),
        )
    )
    assert (built.metrics["trained"], built.metrics["ambiguous"], built.metrics["abandoned"]) == (1, 0, 2)
    assert [span.model_call_ids for span in built.trajectories[0].calls] == [("a", "a-again")]


@pytest.mark.parametrize(("third", "kept"), [("no", True), ("partly", True), ("unknown", False)])
def test_a_received_answer_is_kept_only_if_every_other_is_known_to_have_lost_its_client(third: Any, kept: bool) -> None:
    built = build(
        example(
            call("a", [1], [2], delivered="full"),
            call("b", [1], [3], delivered="no"),
            call("c", [1], [4], delivered=third),
        )
    )
    assert trained(built) == ({"a": [2]} if kept else {})
    assert built.metrics["ambiguous"] == (0 if kept else 3)


@pytest.mark.parametrize(("answer", "kept"), [([2, 3], True), ([7, 7], False)])
def test_delivery_is_believed_among_those_that_share_the_longest_run_only(answer: list[int], kept: bool) -> None:
    built = build(
        example(
            call("a", [1], answer, delivered="full"),
            call("b", [1], [2, 4], delivered="no"),
            call("c", [1], [2, 5], delivered="no"),
            call("next", [1, 2, 9], [6]),
        )
    )
    assert trained(built) == ({"a": answer, "next": [6]} if kept else {"next": [6]})
    assert built.metrics["ambiguous"] == (0 if kept else 6)


def test_samples_are_kept_together_if_one_of_them_is_what_a_prompt_goes_on_with() -> None:
    by_run = build(
        example(samples("a", [1], [[2, 3], [5]]), call("retry", [1], [6]), call("next", [1, 2, 9], [7])),
    )
    assert (by_run.metrics["trained"], by_run.metrics["abandoned"]) == (4, 1)
    choices = [
        call("a", [1], [2 + i], choice=i, output_items=text(said)).entries[0] for i, said in enumerate(("red", "green"))
    ]
    others = example(call("retry", [1], [6], output_items=text("blue")), call("next", [8], [9]))
    records = [CallRecord("a", "recorded"), *others.calls]
    by_text = build(asked(Example([*choices, *others.entries], records), {"next": ["green"]}))
    assert (by_text.metrics["trained"], by_text.metrics["abandoned"]) == (3, 1)
    by_delivery = build(
        example(
            samples("a", [1], [[2], [3]], delivered="full"),
            call("retry", [1], [6], delivered="no"),
        )
    )
    assert (by_delivery.metrics["trained"], by_delivery.metrics["abandoned"]) == (2, 1)


def test_ids_and_text_that_name_the_same_sibling_keep_it() -> None:
    given = example(
        call("a", [1], [2, 3], output_items=text("red")),
        call("b", [1], [4, 5], output_items=text("blue")),
        call("next", [1, 2, 9], [8]),
    )
    assert trained(build(asked(given, {"next": ["red"]}))) == {"a": [2, 3], "next": [8]}


def test_where_several_siblings_share_a_run_text_picks_among_them() -> None:
    def siblings(*said: str) -> Example:
        answers = ([2, 3], [2, 4], [7, 7])
        made = [
            call(name, [1], ids, output_items=text(words))
            for name, ids, words in zip("abc", answers, said, strict=True)
        ]
        return example(*made, call("next", [1, 2, 9], [8]))

    found = build(asked(siblings("red", "blue", "red"), {"next": ["red"]}))
    assert trained(found) == {"a": [2, 3], "next": [8]}  # c says it, too, but shares no id
    for said in (("red", "red", "blue"), ("blue", "blue", "red")):  # two of them say it, and none
        found = build(asked(siblings(*said), {"next": ["red"]}))
        assert trained(found) == {"next": [8]}
        assert found.metrics["ambiguous"] == 6


def test_siblings_that_say_the_same_are_not_told_apart_by_text() -> None:
    given = example(
        call("a", [1], [2], output_items=text("red")),
        call("b", [1], [3], output_items=text("red")),
        call("next", [7], [8]),
    )
    assert trained(build(asked(given, {"next": ["red"]}))) == {"next": [8]}


def test_an_answer_that_shows_nothing_stands_in_no_request() -> None:
    given = example(
        call("a", [1], [2]),
        call("b", [1], [3], output_items=text("blue")),
        call("next", [7], [8]),
    )
    assert trained(build(asked(given, {"next": ["green"]}))) == {"next": [8]}


def test_a_text_in_an_earlier_request_is_no_proof_that_a_sibling_was_kept() -> None:
    given = example(
        call("before", [7], [8], begun=0, ended=1),
        call("a", [1], [2], begun=2, ended=3, output_items=text("red")),
        call("b", [1], [3], begun=4, ended=5, output_items=text("blue")),
    )
    assert trained(build(asked(given, {"before": ["red"]}))) == {"before": [8]}


def test_a_prompt_is_later_than_identical_answers_if_it_is_later_than_one_of_them() -> None:
    built = build(
        example(
            call("a", [1], [2, 3], begun=0, ended=1),
            call("b", [1], [7, 7], begun=2, ended=3),
            call("next", [1, 2, 9], [8], begun=5, ended=6),
            call("a-again", [1], [2, 3], begun=10, ended=11),
        )
    )
    assert trained(built) == {"a": [2, 3], "next": [8]}


# ---- identical calls


def test_equal_samples_that_were_retried_are_paired_by_what_was_recorded_and_not_by_name() -> None:
    first = [call("a", [1], [2], [log_prob], choice=i).entries[0] for i, log_prob in enumerate((-0.1, -0.4))]
    again = [call("b", [1], [2], [log_prob], choice=i).entries[0] for i, log_prob in enumerate((-0.4, -0.1))]
    built = build(Example([*first, *again], [CallRecord("a", "recorded"), CallRecord("b", "recorded")]))
    assert built.metrics["largest_log_prob_difference"] == 0.0
    assert sorted(trajectory.log_probs[1] for trajectory in built.trained) == [-0.4, -0.1]
    assert (built.metrics["merged_calls"], built.metrics["repeated"]) == (2, 2)


def test_equal_samples_of_which_one_is_continued_are_chosen_by_content_and_not_by_name() -> None:
    continued = set()
    for log_probs in ((-0.1, -0.4), (-0.4, -0.1)):
        choices = [call("a", [1], [2], [value], choice=i).entries[0] for i, value in enumerate(log_probs)]
        following = example(call("next", [1, 2, 3], [4]))
        records = [CallRecord("a", "recorded"), *following.calls]
        built = build(Example([*choices, *following.entries], records))
        assert calls_of(built, "next") == ["a", "next"]
        continued.add(of(built, "next").log_probs[1])
    assert len(continued) == 1


@pytest.mark.parametrize("values", [(-0.1, -0.2), (-0.2, -0.1)])
def test_the_log_probs_kept_are_those_of_the_last_that_had_ended_before_everything_that_went_on(
    values: tuple[float, float],
) -> None:
    both = (
        call("a", [1], [2], values[:1], begun=0, ended=1),
        call("b", [1], [2], values[1:], begun=2, ended=3),
    )
    following = call("c", [1, 2, 3], [4], begun=4, ended=5)
    assert of(build(example(*both, following)), "c").log_probs[1] == values[1]
    # A repetition of what went on says nothing if it is not known when it began.
    unknown = call("d", [1, 2, 3], [4])
    assert of(build(example(*both, following, unknown)), "c").log_probs[1] == values[1]
    earlier = call("d", [1, 2, 5], [6], begun=2.5, ended=2.6)
    assert build(example(*both, following, earlier)).trajectories[0].log_probs[1] == values[0]


@pytest.mark.parametrize("values", [(-0.1, -0.2), (-0.2, -0.1)])
def test_else_the_smaller_content_digest_decides_and_no_name(values: tuple[float, float]) -> None:
    given = example(call("a", [1], [2], values[:1]), call("b", [1], [2], values[1:]))
    smaller = min(given.entries, key=content_digest)
    assert build(given).trajectories[0].log_probs[1] == smaller.generation_log_probs[0]


def test_a_difference_just_above_one_half_is_not_trained() -> None:
    built = build(example(call("a", [1], [2], [-0.1]), call("b", [1], [2], [-0.61])))
    assert (built.metrics["trained"], built.metrics["unknown"], built.metrics["abandoned"]) == (0, 1, 1)
    assert built.metrics["largest_log_prob_difference"] == pytest.approx(0.51)


def test_unknown_log_probs_of_identical_calls_make_no_difference() -> None:
    given = example(
        call("a", [1], [2, 3, 4], [None, -0.5, -0.5], delivered="full"),
        call("b", [1], [2, 3, 4], [-0.5, -9999.0, -0.25]),
    )
    built = build(given)
    assert built.metrics["largest_log_prob_difference"] == 0.25
    assert trained(built) == {"a": [3, 4]}


def test_identical_calls_of_which_no_log_prob_is_known_do_not_differ() -> None:
    built = build(example(call("a", [1], [2], [None]), call("b", [1], [2], [None])))
    assert (built.metrics["largest_log_prob_difference"], built.metrics["unknown"]) == (0.0, 1)


def test_drifts_are_reported_in_the_order_of_call_ids() -> None:
    built = build(
        example(
            call("0", [1], [2, 3], begun=0, ended=1),
            call("x", [1, 2, 9], [5], begun=2, ended=5, delivered="full"),
            call("y", [1, 2, 8], [5], begun=3, ended=6, delivered="full"),
            call("z", [1, 2, 9], [5], begun=4, ended=7, delivered="full"),
        )
    )
    assert [drift.call[0] for drift in built.drifts] == ["x", "y", "z"]


def test_a_hint_may_name_any_of_identical_calls_and_each_refuted_one_is_counted() -> None:
    def hinted(name: str) -> Build:
        choices = [call("a", [1], [2], [log_prob], choice=i).entries[0] for i, log_prob in enumerate((-0.1, -0.4))]
        others = example(
            call("again", [1], [2], [-0.1]),
            call("elsewhere", [7], [8]),
            call("next", [1, 2, 3], [4], extra={"parent_call_id": name}),
            call("last", [1, 2, 3, 4, 5], [6], extra={"parent_call_id": name}),
        )
        return build(Example([*choices, *others.entries], [CallRecord("a", "recorded"), *others.calls]))

    named = hinted("again")
    assert of(named, "next").calls[0].model_call_ids == ("a", "again")
    assert named.metrics["hints_refuted"] == 1  # of the last call, which continues the next one
    assert hinted("elsewhere").metrics["hints_refuted"] == 2
    assert hinted("never-recorded").metrics["hints_refuted"] == 0


@pytest.mark.parametrize("name", ["a", "b"])
def test_of_equal_samples_the_scored_one_is_continued(name: str) -> None:
    given = example(
        call("a", [1], [2], [-0.1], begun=0, ended=2, delivered="full"),
        call("b", [1], [2], [-0.2], begun=1, ended=3, delivered="full"),
        call("next", [1, 2, 3], [4], begun=4, ended=5),
    )
    built = build(given, call_id=name)
    (following,) = [c.number for c in built.recorded.calls if c.model_call_id == "next"]
    assert built.links.parent[following] == built.scored.number
    assert scored(built) == name


# ---- log-probs and what they mean


@pytest.mark.parametrize(
    ("mode", "parameters", "counts"),
    [
        ("raw_logprobs", {}, True),
        ("raw_logprobs", {"frequency_penalty": 0.5}, False),
        ("raw_logprobs", {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": None}, True),
        ("raw_logprobs", {"repetition_penalty": 1.1}, False),
        ("raw_logprobs", {"repetition_penalty": 0.0}, False),
        ("raw_logprobs", {"presence_penalty": 1.0}, False),
        ("raw_logprobs", {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, True),
        ("raw_logprobs", {"top_p": None, "top_k": None, "min_p": None}, True),
        ("raw_logprobs", {"top_p": 0.0}, False),
        ("raw_logprobs", {"top_k": 20}, False),
        ("raw_logprobs", {"top_k": 1}, False),
        ("raw_logprobs", {"min_p": 0.05}, False),
        ("raw_logprobs", {"logit_bias": {}, "bad_words": [], "regex": "", "grammar": None}, True),
        ("raw_logprobs", {"allowed_token_ids": (), "ebnf": False, "logits_processors": 0}, True),
        ("raw_logprobs", {"temperature": 2.0}, False),
        ("raw_logprobs", {"temperature": None}, None),
        ("raw_logprobs", {"temperature": None, "top_p": 0.5}, False),
        ("sglang", {}, None),
        ("sglang", {"temperature": 0.5}, None),
        ("sglang", {"top_p": 0.5}, False),
        ("processed_logprobs", {"temperature": 0.5, "top_p": 0.5}, True),
        ("raw_logits", {}, False),
        ("processed_logits", {}, False),
        ("another", {"top_p": 0.5}, None),
        ("unknown", {"top_p": 0.5}, None),
        ("", {"top_p": 0.5}, None),
        (5, {"top_p": 0.5}, None),
    ],
)
def test_log_probs_are_those_that_were_sampled_from_where_the_mode_and_the_parameters_say_so(
    mode: Any, parameters: dict[str, Any], counts: bool | None
) -> None:
    assert is_behaviour({"logprobs_mode": mode, "temperature": 1.0, **parameters}) is counts


@pytest.mark.parametrize(
    "name",
    [
        "grammar",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "response_format",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
    ],
)
def test_whatever_forbids_tokens_or_moves_their_logits_makes_raw_log_probs_others(name: str) -> None:
    sampling = {"logprobs_mode": "raw_logprobs", "temperature": 1.0}
    assert is_behaviour({**sampling, name: {"type": "json_schema"}}) is False
    assert is_behaviour({**sampling, name: {"type": "text"}}) is True


def test_log_probs_at_the_borders_of_what_is_known() -> None:
    values = np.array([-9998.9, -9999.0, -9999.1, 0.0, 1e-5, 1.01e-5, math.nan, math.inf, -math.inf])
    assert unknown_log_probs(values).tolist() == [False, True, True, False, False, True, True, True, True]


# ---- verdicts and the account


def test_what_is_wrong_with_a_call_has_one_name_the_gravest() -> None:
    given = example(
        call("scored", [1], [2], begun=0, ended=1),
        call("late", [1, 2, 3], [4], begun=2, ended=3, outcome="conflict"),
        call("other", [7], [8], begun=2, ended=3, outcome="conflict", model="n"),
        call("cut", [5], [6], begun=2, ended=3, outcome="aborted"),
    )
    built = build(given, call_id="scored")
    verdicts = {found.call.model_call_id: found.verdict for found in built.judged.values()}
    assert verdicts == {"scored": "trained", "late": "conflict", "other": "other_model", "cut": "after_final"}


@pytest.mark.parametrize(
    ("model", "outcome", "call_id", "expected"),
    [
        ("n", "conflict", "scored", {"trained": 1, "other_model": 4}),
        ("m", "conflict", "scored", {"trained": 1, "after_final": 2, "conflict": 2}),
        ("m", "recorded", "scored", {"trained": 1, "after_final": 4}),
        ("m", "conflict", "", {"trained": 3, "conflict": 2}),
        ("m", "recorded", "", {"trained": 3, "abandoned": 2}),
    ],
)
def test_a_repetition_is_counted_as_what_is_wrong_with_it(
    model: str, outcome: Any, call_id: str, expected: dict[str, int]
) -> None:
    given = example(
        call("scored", [1], [2], begun=0, ended=1),
        call("x", [7], [8, 9], begun=2, ended=3, model=model, delivered="full"),
        call("y", [7], [8, 9], begun=4, ended=5, model=model, outcome=outcome),
    )
    built = build(given, call_id=call_id)
    assert {name: built.metrics[name] for name in CATEGORIES if built.metrics[name]} == expected
    assert (built.metrics["sampled"], built.metrics["repeated"]) == (5, 2)


def test_of_a_cut_off_answer_unknown_log_probs_count_where_a_prompt_holds_it() -> None:
    given = example(
        call("cut", [1], [2, 3, 4, 5], [None, -0.5, None, -0.5], outcome="aborted"), call("next", [1, 2, 3, 9], [6])
    )
    built = build(given)
    assert trained(built) == {"cut": [3], "next": [6]}
    assert (built.metrics["unknown"], built.metrics["aborted"]) == (1, 2)
    (span,) = of(built, "cut").calls
    assert (span.verdict, span.trained) == ("trained", 1)
    (span,) = of(build(example(call("a", [1], [2], [None]))), "a").calls
    assert (span.verdict, span.trained) == ("unknown", 0)


# ---- the scored answer


def tool_call(name: str) -> dict[str, object]:
    return {"type": "function_call", "call_id": "x", "name": name, "arguments": "{}"}


def tool_result(said: str) -> dict[str, object]:
    return {"type": "function_call_output", "call_id": "x", "output": said}


CHAT_CALL = {"function": {"name": "find", "arguments": "{}"}}


def answers() -> Example:
    return example(
        call("a", [1], [2], response_id="r-a", output_items=text("yes")),
        call("b", [5], [6], response_id="r-b", output_items=[*text("look"), tool_call("find")]),
        call("c", [7], [8], response_id="r-c", output_items=[tool_call("find"), tool_call("find")]),
        call("d", [9], [8], response_id="r-d", output_items=[tool_call("find"), tool_call("open")]),
    )


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "yes"}}]}, "a"),
        ({"choices": [{"message": {"content": "yes"}}]}, "a"),
        ({"choices": [{"message": {"content": "look", "tool_calls": [CHAT_CALL]}}]}, "b"),
        ({"choices": [{"message": {"content": None, "tool_calls": [CHAT_CALL, CHAT_CALL]}}]}, "c"),
        ({"choices": [{"message": {"content": "yes"}}, {"message": {"content": "yes"}}]}, None),
        ({"choices": [{"message": {"content": ""}}]}, None),
        ({"choices": [{"message": "yes"}]}, None),
        ({"choices": ["yes"]}, None),
        ({"choices": [{"message": {"content": None}}], "output": text("yes")}, None),
        ({"output": [*text("look"), tool_call("find")]}, "b"),
        ({"output": [tool_call("other"), tool_result("none"), *text("yes")]}, "a"),
        ({"output": [*text("yes"), {"type": "message", "role": "user", "content": "no"}]}, None),
        ({"output": [{"type": "message", "role": "user", "content": "no"}, *text("yes")]}, "a"),
        ({"output": ["yes"]}, None),
        ({"output": [{"type": 5}, *text("yes")]}, "a"),
        ({"output": [{"type": "message", "content": "yes"}]}, "a"),
        ({"output": [*text("look"), {"type": "reasoning", "summary": []}, tool_call("find")]}, "b"),
        ({"output": [tool_call("find"), tool_call("open")]}, "d"),
        ({"output": [tool_call("open"), tool_call("find")]}, None),
        ({"output": [{"type": "reasoning", "summary": []}, *text("yes")]}, "a"),
        ({"output": [{"role": "assistant", "content": "yes"}]}, "a"),
        ({"output": [{"content": "yes"}]}, None),
        ({"output": []}, None),
        ({"output": "yes"}, None),
        ({}, None),
    ],
)
def test_content_names_the_call_that_said_the_last_turn(response: dict[str, Any], named: str | None) -> None:
    built = build(answers(), response=response)
    assert scored(built) == named
    assert built.scored.spoke == (("content",) if named else ())
    assert built.scored.reason == ""


def test_calls_of_tools_that_the_server_runs_belong_to_the_last_turn() -> None:
    search = {"type": "web_search_call", "id": "s", "status": "completed", "action": {"query": "it"}}
    given = example(
        call("a", [1], [2], output_items=[search, *text("yes")]), call("b", [5], [6], output_items=text("yes"))
    )
    assert scored(build(given, response={"output": [search, *text("yes")]})) == "a"
    assert scored(build(given, response={"output": [tool_result("it"), *text("yes")]})) == "b"


def test_an_id_with_a_choice_that_was_not_recorded_names_no_call() -> None:
    for asked_for in ({"call_id": "a"}, {"response_id": "r-a"}):
        built = build(answers(), choice_index=1, **asked_for)  # type: ignore[arg-type]
        assert (scored(built), built.scored.reason, built.scored.spoke) == (None, "no_such_call", ())
        assert scored(build(answers(), choice_index=0, **asked_for)) == "a"  # type: ignore[arg-type]


def test_an_id_of_the_response_that_is_no_text_says_nothing() -> None:
    assert build(answers(), response={"id": 5}).scored.reason == ""


def test_a_shared_id_is_silent_where_content_fits_none_or_several_of_its_calls() -> None:
    given = example(
        call("a", [1], [2], response_id="r", output_items=text("yes")),
        call("b", [5], [6], response_id="r", output_items=text("no")),
        call("c", [7], [8], output_items=text("maybe")),
    )
    for said, named, spoke in (("yes", "a", ("response_id", "content")), ("maybe", "c", ("content",))):
        built = build(given, response_id="r", response={"output": text(said)})
        assert (scored(built), built.scored.spoke, built.scored.reason) == (named, spoke, "")


def test_witnesses_that_name_equal_samples_agree() -> None:
    given = example(
        call("a", [1], [2], begun=0, ended=2, delivered="full", response_id="r-a"),
        call("b", [1], [2], begun=1, ended=3, delivered="full", response_id="r-b"),
    )
    for first, second in (("a", "r-b"), ("b", "r-a")):
        built = build(given, call_id=first, response_id=second)
        assert (scored(built), built.scored.spoke) == ("a", ("call_id", "response_id"))


@pytest.mark.parametrize(
    "other",
    [{"prompt": [1, 2, 3], "ids": [4]}, {"prompt": [1], "ids": [5]}, {"prompt": [1], "ids": [2], "model": "n"}],
    ids=["another call of its chain", "another answer", "the same ids of another model"],
)
def test_witnesses_that_name_other_ids_or_another_model_disagree(other: dict[str, Any]) -> None:
    second = call("b", other["prompt"], other["ids"], model=other.get("model", "m"), response_id="r-b")
    built = build(example(call("a", [1], [2]), second), call_id="a", response_id="r-b")
    assert (scored(built), built.scored.reason) == (None, "witnesses_disagree")
    assert built.scored.spoke == ("call_id", "response_id")


# ---- after the scored answer


def test_what_overlapped_the_scored_call_did_not_come_after_it() -> None:
    given = example(
        call("scored", [1], [2], begun=2, ended=5),
        call("beside", [7], [8], begun=4, ended=9),
        call("after", [9], [8], begun=6, ended=9),
        call("unknown", [3], [8]),
    )
    assert set(trained(build(given, call_id="scored"))) == {"scored", "beside", "unknown"}


def test_what_continues_the_scored_call_came_after_it_whatever_the_clocks_say() -> None:
    given = example(
        call("scored", [1], [2], begun=2, ended=5),
        call("next", [1, 2, 3], [4], begun=0, ended=1),
        call("last", [1, 2, 3, 4, 5], [6]),
        call("fork", [1, 2, 9], [6]),
    )
    built = build(given, call_id="scored")
    assert trained(built) == {"scored": [2]}
    assert built.metrics["after_final"] == 3
    assert calls_of(built, "scored") == ["scored"]
    assert of(built, "last") is not of(built, "scored")
    assert [span.owned for span in of(built, "last").calls] == [False, True, True]


def test_identical_scored_calls_must_all_have_ended_before_what_came_after() -> None:
    def later(begun: float) -> Example:
        return example(
            call("scored", [1], [2], begun=0, ended=1),
            call("scored-again", [1], [2], begun=4, ended=5),
            call("title", [7], [8], begun=begun, ended=9),
        )

    assert set(trained(build(later(3), call_id="scored"))) == {"scored", "title"}
    assert set(trained(build(later(6), call_id="scored"))) == {"scored"}


def test_the_chain_of_the_scored_call_is_not_after_it() -> None:
    given = example(
        call("a", [1], [2], begun=5, ended=6), call("scored", [1, 2, 3], [4], begun=0, ended=1)
    )  # clocks may be wrong
    assert trained(build(given, call_id="scored")) == {"a": [2], "scored": [4]}


# ---- rebuilds


def test_the_payload_of_a_rebuild_is_that_of_the_last_answer() -> None:
    given = example(
        call("a", [1, 1], [2], response_id="r-a", created_at=5.0, finish_reason="length"),
        call("b", [1, 1, 2, 3], [4], created_at=7.0),
    )
    response = rebuild_response(given).response
    assert response is not None
    del response["output"]
    assert response == {
        "id": "resp_b",
        "object": "response",
        "created_at": 7.0,
        "model": "m",
        "status": "completed",
        "usage": {"input_tokens": 2, "output_tokens": 2, "total_tokens": 4},
    }
    cut = rebuild_response(example(call("a", [1], [2], response_id="r", finish_reason="length"))).response
    assert cut is not None
    assert (cut["id"], cut["status"]) == ("r", "incomplete")


@pytest.mark.parametrize(
    ("items", "index", "kinds", "carrier"),
    [
        ([*text("x"), tool_call("f")], None, ["message", "function_call"], 1),
        ([*text("x"), tool_call("f")], 0, ["message", "function_call"], 0),
        ([], None, ["message"], 0),
        ([*text("x"), "not an item"], 0, ["message", "message"], 1),
        (["not an item"], 0, ["message"], 0),
    ],
)
def test_one_item_of_each_answer_carries_its_tokens(
    items: list[Any], index: int | None, kinds: list[str], carrier: int
) -> None:
    rebuilt = rebuild_response(example(call("a", [1, 7], [2], [-0.25], output_items=items, token_item_index=index)))
    assert rebuilt.response is not None
    output = rebuilt.response["output"]
    assert [item["type"] for item in output] == kinds
    assert [i for i, item in enumerate(output) if "prompt_token_ids" in item] == [carrier]
    tokens = {name: output[carrier][name] for name in ("prompt_token_ids", "generation_token_ids")}
    assert tokens == {"prompt_token_ids": [1, 7], "generation_token_ids": [2]}
    assert output[carrier]["generation_log_probs"] == [-0.25]
    if kinds != [item.get("type") for item in items if isinstance(item, dict)]:  # an item of its own, that says nothing
        assert (output[-1]["role"], output[-1]["content"]) == ("assistant", [])
    assert rebuilt.items == (tuple(output),)


def test_each_reason_of_a_rebuild_is_given_once_those_of_the_chain_first() -> None:
    chain = [
        call("a", [1], [2, 2], [None, -0.5], begun=0, ended=1),
        call("b", [1, 2, 2, 3], [4, 4], [None, -0.5], begun=4, ended=5),
    ]
    rebuilt = rebuild_response(
        example(*chain, missing("l", begun=2, ended=3), missing("k", begun=6, ended=7)), strict=True
    )
    assert rebuilt.reasons == ("unknown", "lost_call", "strict:incomplete", "strict:several_trajectories")
    assert (rebuilt.calls, rebuilt.items) == ((), ())
    assert (rebuilt.masked, rebuilt.response, rebuilt.metrics["delivered"]) == (True, None, 0)


def test_a_named_call_is_rebuilt_unless_a_lost_one_may_lie_inside_its_chain() -> None:
    chain = [call("a", [1], [2], begun=0, ended=1), call("b", [1, 2, 3], [4], begun=4, ended=5)]
    for begun, reasons in ((2, ("lost_call",)), (6, ())):
        given = example(*chain, missing("l", begun=begun, ended=begun + 1))
        assert rebuild_response(given, call_id="b").reasons == reasons
    alone = example(call("a", [1], [2], begun=0, ended=1), missing("l"))
    assert rebuild_response(alone).reasons == ("lost_call",)
    assert rebuild_response(alone, call_id="a").reasons == ()


def test_a_named_call_that_sampled_nothing_is_left_out_of_its_chain() -> None:
    given = example(call("a", [1], [2]), call("silent", [1, 2, 3], []), call("alone", [7], []))
    assert rebuild_response(given, call_id="silent").calls == (("a", 0),)
    assert rebuild_response(given, call_id="alone").reasons == ("nothing_recorded",)


def test_a_rebuild_takes_what_a_build_takes() -> None:
    given = example(
        samples("a", [1], [[2], [3]], response_id="r-a"),
        call("b", [7], [8], model="n", sampling={"logprobs_mode": "raw_logits"}, output_items=text("yes")),
    )
    assert rebuild_response(given, call_id="a", choice_index=1).calls == (("a", 1),)
    assert rebuild_response(given, response_id="r-a", choice_index=0).calls == (("a", 0),)
    assert rebuild_response(given, response={"output": text("yes")}).calls == (("b", 0),)
    assert rebuild_response(given, models="n").calls == (("b", 0),)
    assert rebuild_response(given, models="n", exclude_not_behaviour=True).reasons == ("unknown",)
    assert rebuild_response(given, models=["m", "n"]).reasons == ("several_conversations",)


@pytest.mark.parametrize(
    ("others", "reasons"),
    [
        ([call("x", [7], [8], model="n")], ()),
        ([call("x", [7], [8], outcome="aborted")], ()),
        ([call("x", [1], [9])], ()),  # a retry that was abandoned
        ([call("x", [7], [8])], ("several_conversations",)),
        ([call("x", [7], [8]), call("y", [7], [9])], ("several_conversations",)),
        ([call("x", [1, 2, 3], [9])], ("ambiguous",)),
        ([call("x", [1, 2, 3, 4, 5], []), call("y", [9], [])], ()),
    ],
)
def test_without_a_witness_there_must_be_one_conversation(others: list[Any], reasons: tuple[str, ...]) -> None:
    given = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]), *others)
    rebuilt = rebuild_response(given, models="m")
    assert rebuilt.reasons == reasons
    assert rebuilt.calls == (() if reasons else (("a", 0), ("b", 0)))


def test_a_conversation_that_drifted_twice_has_three_segments_of_which_the_last_is_delivered() -> None:
    given = example(
        call("a", [1], [2, 3], begun=0, ended=1),
        call("b", [1, 2, 9], [4, 5], begun=2, ended=3),
        call("c", [1, 2, 9, 4, 5, 6], [7, 7], begun=4, ended=5),
        call("d", [1, 2, 9, 4, 5, 6, 7, 8], [3], begun=6, ended=7),
    )
    rebuilt = rebuild_response(given)
    assert rebuilt.calls == (("b", 0), ("d", 0))
    assert rebuilt.metrics["segments"] == 3
    assert (rebuilt.metrics["delivered"], rebuilt.metrics["delivered_fraction"]) == (3, 3 / 7)
    assert rebuild_response(given, on_drift="mask").reasons == ("drift",)
    straight = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]))
    assert rebuild_response(straight, on_drift="mask").metrics["segments"] == 1
    assert not rebuild_response(straight, on_drift="mask").masked


def test_a_compacted_history_is_another_conversation_and_no_segment() -> None:
    given = example(
        call("a", [1, 2, 2], [3], begun=0, ended=1),
        call("b", [1, 9], [4], begun=2, ended=3),
    )
    assert build(given).metrics["restarted_calls"] == 1
    assert rebuild_response(given).reasons == ("several_conversations",)
    named = rebuild_response(given, call_id="b", on_drift="mask")
    assert (named.masked, named.metrics["segments"], named.metrics["delivered_fraction"]) == (False, 1, 0.5)


# ---- the order of trajectories and who owns what


def test_trajectories_come_in_the_order_of_trained_scored_most_ids() -> None:
    built = build(
        example(
            call("scored", [9], [2], begun=0, ended=1),
            call("few", [8], [2, 2], begun=0, ended=1),
            call("many", [7], [2, 2, 2], begun=0, ended=1),
            call("low", [6], [2, 2], begun=0, ended=1),
            call("late", [5], [2, 2, 2, 2], begun=4, ended=5),
        ),
        call_id="scored",
    )
    order = [trajectory.calls[-1].model_call_ids[0] for trajectory in built.trajectories]
    assert order == ["scored", "many", "low", "few", "late"]


def test_a_scored_chain_that_is_not_trained_comes_first_among_those() -> None:
    built = build(
        example(call("other", [1], [2], [None]), call("scored", [3], [4], [None])),
        call_id="scored",
    )
    assert [t.calls[-1].model_call_ids[0] for t in built.trajectories] == ["scored", "other"]


def test_of_equal_sequences_the_later_cut_comes_first() -> None:
    built = build(example(call("a", [1], [2, 3], [-0.5, None]), call("b", [1, 2], [3])))
    assert [t.calls[-1].model_call_ids[0] for t in built.trajectories] == ["b", "a"]
    assert [(t.prefix_of, t.shared) for t in built.trajectories] == [(None, 0), (0, 3)]


def test_the_trunk_goes_to_the_most_trained_ids_and_not_to_the_most_sampled_ones() -> None:
    built = build(
        example(
            call("trunk", [1], [2]),
            call("long", [1, 2, 3], [4, 4, 4], [-0.5, None, None]),
            call("short", [1, 2, 5], [6, 6]),
        )
    )
    assert calls_of(built, "trunk") == ["trunk", "short"]
    assert [(t.prefix_of, t.shared, len(t)) for t in built.trajectories] == [(None, 0, 5), (0, 2, 6)]
    assert (built.metrics["distinct_ids"], built.metrics["total_ids"]) == (9, 11)
    assert built.metrics["replay_factor"] == 11 / 9


def test_the_trunk_of_equal_samples_that_go_on_goes_by_content_and_not_by_name() -> None:
    owners = set()
    for log_probs in ((-0.1, -0.4), (-0.4, -0.1)):
        given = example(
            call("trunk", [1], [2], begun=0, ended=1),
            call("a", [1, 2, 3], [4], log_probs[:1], begun=2, ended=4, delivered="full"),
            call("b", [1, 2, 3], [4], log_probs[1:], begun=3, ended=5, delivered="full"),
        )
        owners.add(of(build(given), "trunk").log_probs[3])
    assert len(owners) == 1


# ---- trajectories


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        ([], ((None, 1, 5),)),
        ([("v", 0, 4)], (("v", 1, 5),)),
        ([("v", 1, 3)], ((None, 1, 2), ("v", 2, 4), (None, 4, 5))),
        ([("v", 2, 4), ("w", 0, 2)], (("w", 1, 3), ("v", 3, 5))),
        ([("v", 0, 0), ("w", 1, 3)], ((None, 1, 2), ("w", 2, 4), (None, 4, 5))),
        ([("v", 0, 3), ("w", 1, 4)], ((None, 1, 5),)),  # which of the two sampled the ids that both claim?
        ([("v", 0, 3), ("w", 1, 2)], ((None, 1, 5),)),
        ([("v", -2, 2), ("w", 2, 9)], (("v", 1, 3), ("w", 3, 5))),
        ([("v", 2, 2), ("w", 7, 9), ("x", 3, 1)], ((None, 1, 5),)),
        ([("v", 0, 2), ("v", 2, 4)], (("v", 1, 5),)),
        (
            [("v", 0), "v", ("v", "0", 2), ("v", 0, 2, 3), ("v", False, 2), {"v": 1}, 7, ["w", 2, 4]],
            ((None, 1, 3), ("w", 3, 5)),
        ),
    ],
)
def test_policy_versions_fill_the_sampled_positions_whatever_was_told(
    told: list[Any], versions: tuple[tuple[Any, int, int], ...]
) -> None:
    (trajectory,) = build(example(call("a", [1], [2, 3, 4, 5], policy_versions=told))).trajectories
    assert trajectory.policy_versions == versions


def test_policy_versions_of_answers_that_meet_are_one_span_if_they_are_equal() -> None:
    def versions(first: str, second: str) -> tuple[tuple[Any, int, int], ...]:
        given = example(
            call("a", [1], [2, 3], policy_versions=[(first, 0, 2)]),
            call("b", [1, 2, 3], [4], policy_versions=[(second, 0, 1)]),
        )
        return build(given).trajectories[0].policy_versions

    assert versions("v", "v") == (("v", 1, 4),)
    assert versions("v", "w") == (("v", 1, 3), ("w", 3, 4))


def test_a_trajectory_as_a_dict_has_all_that_a_trainer_takes() -> None:
    given = example(
        call("a", [1], [2, 9], [-0.5, None]), call("b", [1, 2, 9, 3], [4], choice=2), call("c", [1, 2, 9, 5], [6, 6])
    )
    first, second = build(given).trajectories
    for trajectory in (first, second):
        found = trajectory.as_dict()
        assert {name: getattr(trajectory, name) for name in found} == found
    facts = {name: value for name, value in second.as_dict().items() if not isinstance(value, np.ndarray)}
    assert facts == {
        "rollout_id": "rollout",
        "group": "rollout",
        "index": 1,
        "count": 2,
        "trained": 1,
        "rollout_trained": 4,
        "flags": (),
        "policy_versions": ((None, 4, 5),),
    }
    assert set(second.as_dict()) - set(facts) == {"token_ids", "loss_mask", "log_probs"}
    assert (second.prefix_of, second.shared) == (0, 3)
    spans = [(span.choice_index, span.owned, span.trained, span.verdict) for span in second.calls]
    assert spans == [(0, False, 0, "trained"), (2, True, 1, "trained")]
    assert [span.trained for span in first.calls] == [1, 2]
    assert first.flags == ("unknown",)
    assert second.loss_mask.tolist() == [False] * 4 + [True]
    assert second.log_probs.dtype == np.float64


def test_trajectories_are_a_sequence() -> None:
    built = build(example(*(call(name, [i], [9]) for i, name in enumerate("abc"))))
    names = [trajectory.calls[0].model_call_ids[0] for trajectory in built.trajectories]
    assert names == ["a", "b", "c"]
    assert [t.index for t in built.trajectories[1:]] == [1, 2]
    assert [t.index for t in built.trajectories[::-2]] == [2, 0]
    assert built.trajectories[-1].index == 2
    assert built.trajectories[1:][0].index == 1
    assert built.trajectory(1).calls[0].model_call_ids == ("b",)
    assert built.trajectories[0].loss_mask is not built.trajectories[0].loss_mask  # made when they are asked for
    with pytest.raises(IndexError):
        built.trajectories[3]


# ---- the metrics of a build


def test_every_metric_of_a_build() -> None:
    raw = {"logprobs_mode": "raw_logprobs", "temperature": 0.5}
    processed = {"logprobs_mode": "processed_logprobs"}
    built = build(
        example(
            call("a", [1, 2, 2], [3, 4, 5], [0.0, -0.5, None], begun=0, ended=1, sampling=raw, delivered="full"),
            call("a-again", [1, 2, 2], [3, 4, 5], [-0.25, -0.5, None], begun=0, ended=1, sampling=raw),
            missing("lost", begun=1.2, ended=1.3),
            call("b", [1, 2, 2, 3, 9], [4, 4], [0.0, 0.0], begun=2, ended=3, sampling=processed),
            call("c", [1, 2, 2, 3, 9, 4, 4, 5], [6], begun=4, ended=5, outcome="conflict"),
            call("silent", [1, 2, 2, 3, 9, 4, 4, 5], [], begun=4, ended=5),
            call("compacted", [1, 7, 7], [8], begun=6, ended=7, extra={"parent_call_id": "c"}),
            call("cut", [9], [8], begun=6, ended=7, outcome="aborted"),
            missing("open", "open", begun=8),
            missing("nothing", "no_generation", begun=8, ended=9),
        )
    )
    assert built.metrics == {
        "sampled": 11,
        "trained": 5,
        "abandoned": 3,
        "ambiguous": 0,
        "aborted": 1,
        "unknown": 1,
        "conflict": 1,
        "other_model": 0,
        "after_final": 0,
        "masked": 0,
        "repeated": 3,
        "calls": 10,
        "entries": 7,
        "lost_calls": 1,
        "open_calls": 1,
        "conflict_calls": 1,
        "aborted_calls": 1,
        "no_generation_calls": 1,
        "empty_generation_calls": 1,
        "merged_calls": 1,
        "largest_log_prob_difference": 0.25,
        "hints_refuted": 1,
        "turns": 3,
        "roots": 4,
        "trajectories": 4,
        "trained_trajectories": 3,
        "drifted_calls": 1,
        "restarted_calls": 1,
        "drift_lost": 2,
        "gaps": 3,
        "distinct_ids": 16,
        "total_ids": 21,
        "replay_factor": 21 / 16,
        "not_behaviour": 2,
        "zero_log_probs": 3,
        "log_prob_modes": {"processed_logprobs": 1, "raw_logprobs": 1, "unknown": 3},
        "mixed_log_prob_modes": True,
    }
    assert built.incomplete


# ---- clocks


TIMES = {
    "early": CallRecord("early", "recorded", "boot", 0.0, 1.0),
    "touching": CallRecord("touching", "recorded", "boot", 1.0, 3.0),
    "late": CallRecord("late", "recorded", "boot", 2.0, 3.0),
    "begun": CallRecord("begun", "open", "boot", 0.0, None),
    "ended": CallRecord("ended", "lost", "boot", None, 3.0),
    "rebooted": CallRecord("rebooted", "recorded", "reboot", 2.0, 3.0),
    "untimed": CallRecord("untimed", "recorded"),
    "bootless": CallRecord("bootless", "recorded", "", 2.0, 3.0),
    "bootless-early": CallRecord("bootless-early", "recorded", "", 0.0, 1.0),
    "timeless": CallRecord("timeless", "recorded", "boot"),
}


def pairs(order: Callable[[CallRecord, CallRecord], bool | None]) -> set[tuple[str, str]]:
    return {(a, b) for a, one in TIMES.items() for b, other in TIMES.items() if order(one, other)}


def test_calls_are_ordered_where_their_times_compare_only() -> None:
    begins = {
        ("early", "touching"),
        ("early", "late"),
        ("touching", "late"),
        ("begun", "touching"),
        ("begun", "late"),
    }
    assert pairs(began_before) == begins
    assert pairs(is_before) == begins | {("early", "ended")}
    assert pairs(ended_before) == {("early", "late")}
    assert pairs(ended_first) == {("early", "touching"), ("early", "late"), ("early", "ended")}


@pytest.mark.parametrize(
    ("times", "by_delivery_alone", "units"),
    [
        ([("boot", 0.0, 2.0), ("boot", 1.0, 3.0)], False, [[0, 1]]),
        ([("boot", 0.0, 1.0), ("boot", 1.0, 3.0)], False, [[0, 1]]),
        ([("boot", 0.0, 1.0), ("boot", 2.0, 3.0)], True, [[0], [1]]),
        ([("boot", 2.0, 3.0), ("boot", 0.0, 9.0), ("boot", 5.0, 6.0)], False, [[0, 1, 2]]),
        ([("boot", 0.0, 2.0), ("boot", 1.0, 3.0), ("boot", 2.5, 4.0), ("boot", 8.0, 9.0)], False, [[0, 1, 2], [3]]),
        ([("boot", 0.0, 2.0), ("reboot", 1.0, 3.0)], False, [[0], [1]]),
        ([("boot", 0.0, 2.0), ("reboot", 1.0, 3.0)], True, [[0, 1]]),
        ([("boot", 0.0, 2.0), ("", None, None)], False, [[0], [1]]),
        ([("boot", 0.0, 2.0), ("", None, None)], True, [[0, 1]]),
        ([("", 0.0, 1.0), ("", 5.0, 6.0)], False, [[0], [1]]),
        ([("", 0.0, 1.0), ("", 5.0, 6.0)], True, [[0, 1]]),
        ([("boot", None, None), ("boot", 5.0, 6.0)], False, [[0], [1]]),
        ([("boot", None, None), ("boot", 5.0, 6.0)], True, [[0, 1]]),
        ([("boot", None, 9.0), ("boot", 5.0, 6.0)], False, [[0], [1]]),
        ([("boot", None, 9.0), ("boot", 5.0, 6.0)], True, [[0, 1]]),
        ([("boot", None, 4.0), ("boot", 5.0, 6.0)], True, [[0], [1]]),
        ([("boot", 0.0, None), ("boot", 5.0, 6.0)], True, [[0, 1]]),
        ([("boot", 7.0, None), ("boot", 5.0, 6.0)], True, [[0], [1]]),
        ([("boot", 7.0, None), ("boot", 5.0, 6.0), ("reboot", 0.0, 1.0)], True, [[0, 1, 2]]),
    ],
)
def test_samples_are_calls_that_ran_at_the_same_time_as_far_as_is_known(
    times: list[tuple[str, float | None, float | None]], by_delivery_alone: bool, units: list[list[int]]
) -> None:
    records = {
        number: [CallRecord(f"c{number}", "recorded", boot, begun, ended, "full")]
        for number, (boot, begun, ended) in enumerate(times)
    }
    assert sorted(map(sorted, sample_units(records, by_delivery_alone=by_delivery_alone))) == units
    # What did not reach the client in full is no sample of another call.
    cut = {number: [msgspec.structs.replace(one, delivered="partly")] for number, (one,) in records.items()}
    assert sample_units(cut, by_delivery_alone=by_delivery_alone) == [[number] for number in cut]


def test_choices_of_one_call_are_samples_whatever_became_of_it() -> None:
    first, other = CallRecord("a", "recorded", delivered="no"), CallRecord("b", "recorded", delivered="no")
    assert sample_units({0: [first], 1: [other], 2: [first]}, by_delivery_alone=False) == [[0, 2], [1]]
    assert sample_units({0: [first], 1: [other], 2: [other, first]}, by_delivery_alone=False) == [[0, 1, 2]]


# ---- drift


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (b"yes<end>", b"yes<end>\nUser", "retokenised"),
        (b"yes<end>", b"yes<end>", "retokenised"),
        (b"yes<end>", b"yes\nUser", "whitespace_or_stop"),
        (b" yes<end>", b"yes<end>User", "whitespace_or_stop"),
        (b"yes", b"\n yes", "whitespace_or_stop"),
        (b"yes \n<end>", b"yes<end>", "whitespace_or_stop"),
        (b"so  it\tis<end>", b"so it is, User", "whitespace_or_stop"),
        (b"\n<end>", b"User", "whitespace_or_stop"),
        (b"<think>hm</think>\n\nyes<end>", b"yes<end>", "stripped_reasoning"),
        (b"<think>h\nm</think>yes<end>", b"\nyes\nUser", "stripped_reasoning"),
        (b"<thinking>hm</thinking>yes", b"yes", "stripped_reasoning"),
        (b"<reasoning>hm</reasoning>yes", b"yes", "stripped_reasoning"),
        (b"hm</think>yes<end>", b"yes<end>", "stripped_reasoning"),
        (b"hm</think>hm</think> yes<end>", b"yes<end>", "stripped_reasoning"),
        (b"<think>a</think>so <think>b</think>yes", b"so yes", "stripped_reasoning"),
        (b"<think>hm</thinking>yes", b"yes", "other"),
        (b"<think>hm</think>yes", b"no", "other"),
        (b"<think>hm</think>yes", b"<think>so</think>yes", "edited"),
        (b"<think>hm yes", b"hm yes", "other"),
        (b"yes it is<end>", b"yes it", "truncated_or_compacted"),
        (b"yes it is<end>", b"yes it was not", "edited"),
        (b"yes", b"y", "truncated_or_compacted"),
        (b"yes", b"", "truncated_or_compacted"),
        (b"yes", b"yet", "edited"),
        (b"yes", b"no", "other"),
        (b"yes<end>", b"yes<e", "whitespace_or_stop"),
        (b"<end>yes<end>", b"yes<end>", "other"),
        (b"<end>", b"", "truncated_or_compacted"),
        (b"<think>hm</think>", b"", "truncated_or_compacted"),
        (b"<think>hm</think><end>", b"\n<think>hm</think>User", "whitespace_or_stop"),
        (b"<think>hm</think><end>", b"User", "stripped_reasoning"),
    ],
)
def test_what_became_of_an_answer_is_told_by_its_bytes(before: bytes, after: bytes, kind: str) -> None:
    assert compare(before, after, b"<end>") == kind


def test_a_stop_token_of_which_the_bytes_are_not_known_is_part_of_the_answer() -> None:
    assert compare(b"yes<end>", b"yes no") == "edited"
    assert compare(b"yes<end>", b"yes") == "truncated_or_compacted"


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (b"so it was", "retokenised"),
        (b"so ", "truncated_or_compacted"),
        (b"so we go", "edited"),
        (b"so we all", "edited"),
        (b"so it ", "truncated_or_compacted"),
    ],
)
def test_what_became_of_a_history_is_told_by_its_length(after: bytes, kind: str) -> None:
    before = b"so it was" if kind == "retokenised" else b"so it is"
    assert compare(before, after, b" is", rewritten_history=True) == kind


def restarted(*others: Any, begun: float | None = 4.0, boot: str | None = None) -> Build:
    """A call that parts from the prompts of others."""
    return build(example(*others, call("last", [1, 2, 9, 9], [8], begun=begun, ended=None, boot=boot)), models="m")


def test_a_restart_names_the_latest_of_the_earlier_calls_that_share_the_most() -> None:
    def other(name: str, begun: float, **facts: Any) -> Any:
        return call(name, [1, 2, int(begun), 5, 5], [6], begun=begun, ended=begun + 0.5, **facts)

    def nearest(built: Build) -> list[tuple[str, int]]:
        return [(drift.nearest[0], drift.index) for drift in built.drifts if drift.call[0] == "last"]

    less = call("less", [1, 7, 7, 7, 7], [6], begun=3.9, ended=3.95)
    assert nearest(restarted(other("a", 2), other("b", 3), less)) == [("b", 2)]
    assert nearest(restarted(other("a", 3), other("b", 2), less)) == [("a", 2)]
    assert nearest(restarted(other("a", 2), other("b", 6), less)) == [("a", 2)]
    assert nearest(restarted(other("a", 6), less)) == [("less", 1)]
    assert nearest(restarted(other("a", 2), other("b", 3, model="n"))) == [("a", 2)]
    assert nearest(restarted(other("a", 2), other("b", 3, boot="reboot"))) == [("a", 2)]
    assert nearest(restarted(other("a", 2), other("b", 3), begun=None, boot="boot")) == []
    assert nearest(restarted(other("a", 2), boot="reboot")) == []
    assert nearest(restarted(other("a", 4))) == []
    assert nearest(restarted(call("a", [3, 2, 2], [6], begun=0, ended=1))) == []
    assert nearest(restarted(call("a", [1, 2, 3, 3], [], begun=0, ended=1))) == []  # it sampled nothing


def test_what_an_earlier_call_sampled_in_full_is_no_restart() -> None:
    built = build(
        example(
            call("a", [1], [2], begun=0, ended=1),
            call("b", [1, 2, 5], [6], begun=2, ended=3),
            call("c", [1, 2, 9], [6], begun=4, ended=5),
        )
    )
    assert built.drifts == ()  # both continue a: a fork


def test_of_answers_that_a_prompt_leaves_at_one_place_a_kept_one_is_named() -> None:
    answers = [
        call("abandoned", [1], [2, 3, 4], begun=0, ended=1),
        call("kept", [1], [2, 5, 6], begun=2, ended=3),
        call("next", [1, 2, 5, 6, 7], [8], begun=4, ended=5),
    ]
    drifted = call("drifted", [1, 2, 9, 9], [8], begun=6, ended=7)
    found = {drift.call[0]: drift for drift in build(example(*answers, drifted)).drifts}
    assert set(found) == {"drifted"}
    assert (found["drifted"].nearest, found["drifted"].kept, found["drifted"].lost) == (("kept", 0), 1, 2)


def test_of_kept_answers_that_a_prompt_leaves_the_first_by_ids_and_the_later_cut_is_named() -> None:
    def nearest(*calls: Any) -> tuple[str, int]:
        found = {drift.call[0]: drift for drift in build(example(*calls)).drifts}
        return found["last"].nearest[0], found["last"].lost

    last = call("last", [1, 2, 3, 9, 9], [8])
    assert nearest(samples("s", [1], [[2, 3, 7]]), call("t", [1, 2], [3, 5]), last) == ("t", 1)
    assert nearest(call("s", [1], [2, 3, 7]), call("t", [1, 2], [3, 7]), last) == ("t", 1)
    assert nearest(call("s", [1], [2, 3, 5]), call("t", [1, 2], [3, 7]), last) == ("s", 1)


def test_equal_samples_that_a_prompt_leaves_are_told_apart_by_content_and_not_by_name() -> None:
    named = set()
    for values in ((-0.1, -0.4), (-0.4, -0.1)):
        built = build(
            example(
                call("a", [1], [2, 3], [-0.5, values[0]], begun=0, ended=2, delivered="full"),
                call("b", [1], [2, 3], [-0.5, values[1]], begun=1, ended=3, delivered="full"),
                call("last", [1, 2, 9], [8], begun=4, ended=5),
            )
        )
        (drift,) = built.drifts
        named.add(values["ab".index(drift.nearest[0])])
    assert len(named) == 1


def test_a_prompt_leaves_no_answer_that_came_later_nor_one_of_a_longer_prompt_nor_of_another_model() -> None:
    def drifts(**facts: Any) -> list[str]:
        prompt = facts.pop("prompt", [1, 2])
        answer = call("answer", prompt, [3, 4], **facts)
        built = build(example(answer, call("last", [1, 2, 3, 9], [8], begun=4, ended=5)), models=("m", "n"))
        return [drift.call[0] for drift in built.drifts if drift.call[0] == "last"]

    assert drifts(begun=0, ended=1) == ["last"]
    assert drifts() == ["last"]
    assert drifts(begun=6, ended=7) == []
    assert drifts(begun=0, ended=1, model="n") == []
    assert drifts(prompt=[1, 2, 3, 4]) == []
    assert drifts(prompt=[1, 2, 3]) == ["last"]


def test_identical_answers_come_later_only_if_all_of_them_do() -> None:
    def drifts(begun: float) -> int:
        last = call("last", [1, 2, 3, 9], [8], begun=4, ended=5)
        again = call("again", [1, 2], [3, 4], begun=begun, ended=begun + 1)
        built = build(example(call("answer", [1, 2], [3, 4], begun=6, ended=7), again, last))
        return sum(drift.call[0] == "last" for drift in built.drifts)

    assert (drifts(0), drifts(8)) == (1, 0)


def test_the_bytes_that_the_caller_knows_outrank_recorded_pieces_which_fill_in() -> None:
    def kind(told: Any, pieces: list[bytes] | None) -> str:
        given = example(
            call("a", [1, 2], [13, 14], begun=0, ended=1, pieces=pieces),
            call("b", [1, 2, 15, 15], [16, 17], begun=2, ended=3, pieces=[b"", b""]),
            call("c", [7, 7], [15], begun=2, ended=3, pieces=[b"yes"]),
        )
        return build(given, token_bytes=told).drifts[0].kind

    assert kind(None, [b"y", b"es"]) == "retokenised"
    assert kind(None, [b"n", b"o"]) == "other"
    assert kind({13: b"y", 14: b"es"}, [b"n", b"o"]) == "retokenised"
    assert kind({13: b"y", 14: b"es"}, None) == "retokenised"
    assert kind({13: b"y"}, [b"n", b"es"]) == "retokenised"
    assert kind({}.get, [b"y", b"es"]) == "retokenised"
    assert kind({13: b"y", 14: b"es"}.get, [b"n", b"o"]) == "retokenised"
    assert kind(None, [b"yes"]) == "unknown"  # not one piece for each id
    assert kind(None, [b"y", b"es", b"!"]) == "unknown"
    assert kind(None, [b"", b"yes"]) == "unknown"  # told late: of which ids is not known
    assert kind({14: b"yes"}, [b"", b"yes"]) == "unknown"
    assert kind({13: b""}, [b"", b"yes"]) == "unknown"


def test_of_a_rewritten_history_the_bytes_count_from_where_it_parts() -> None:
    given = example(
        call("a", [1, 10, 11], [12], begun=0, ended=1), call("b", [1, 13, 11, 12, 12], [8], begun=2, ended=3)
    )
    told = {10: b"yes", 11: b", ", 12: b"so", 13: b"no"}
    assert [drift.kind for drift in build(given, token_bytes=told).drifts] == ["edited"]
    assert [drift.kind for drift in build(given, token_bytes={**told, 13: b"yes"}).drifts] == ["retokenised"]


@pytest.mark.parametrize(("begins", "restarts"), [((4, 10), 0), ((10, 4), 0), ((None, 10), 1), ((8, None), 1)])
def test_a_prompt_restarted_from_what_came_before_the_first_of_identical_calls(
    begins: tuple[float | None, float | None], restarts: int
) -> None:
    built = build(
        example(
            call("other", [1, 2, 3], [4], begun=6, ended=7),
            *(call(f"a{i}", [1, 2, 9], [8], begun=begun, boot="boot") for i, begun in enumerate(begins)),
        )
    )
    assert sum(drift.call[0] == "a0" for drift in built.drifts) == restarts


def test_the_bytes_behind_an_answer_need_not_be_known() -> None:
    told = {13: b"y", 14: b"es", 15: b"yes", 16: b"ye", 17: b"no", 18: b" \n", 19: b"<end>"}

    def kind(answer: list[int], prompt: list[int]) -> str:
        given = example(call("a", [1], answer, begun=0, ended=1), call("b", prompt, [8], begun=2, ended=3))
        return build(given, token_bytes=told).drifts[0].kind

    assert kind([13, 14], [1, 15, 99, 99]) == "retokenised"
    assert kind([13, 14], [1, 15, 15, 15, 15, 99]) == "retokenised"
    assert kind([13, 14, 19], [1, 16, 99, 99]) == "unknown"  # the rest may be the same
    assert kind([13, 14, 19], [1, 99, 99]) == "unknown"
    assert kind([13, 14, 19], [1, 13, 18, 99]) == "unknown"  # or but for white space
    assert kind([13, 14, 19], [1, 13, 17, 99]) == "edited"  # whatever follows
    assert kind([13, 14, 18, 19], [1, 15, 19, 99]) == "whitespace_or_stop"
    assert kind([13, 14, 17, 19], [1, 15, 19, 99]) == "truncated_or_compacted"


# ---- gaps


def gaps_of(*made: Any) -> set[str]:
    built = build(example(*made))
    return {built.recorded.calls[number].model_call_id for number in built.gaps}


@pytest.mark.parametrize(
    ("lost", "gaps"),
    [
        ({"begun": 5.5, "ended": 5.6}, {"b"}),
        ({"begun": 1, "ended": 2}, set()),  # over before a's answer was released
        ({"begun": 1, "ended": 5.5}, {"b"}),
        ({"begun": 1, "ended": 5}, {"b"}),
        ({"begun": 1, "outcome": "open"}, {"b"}),
        ({"begun": -1, "ended": -0.5}, {"a"}),
        ({"begun": -1, "ended": 9}, {"a"}),
        ({"begun": 0, "ended": 9}, {"a", "b"}),
        ({"begun": 6, "ended": 6.1}, {"b"}),
        ({"begun": 6.5, "ended": 6.6}, set()),
        ({"ended": 3}, {"a"}),
        ({"ended": 5.5}, {"a", "b"}),
        ({}, {"a", "b"}),
        ({"begun": 5.5, "ended": 5.6, "boot": "reboot"}, {"a", "b"}),
        ({"begun": 6.5, "ended": 6.6, "boot": ""}, {"a", "b"}),
        ({"begun": 5.5, "ended": 5.6, "outcome": "no_generation"}, set()),
        ({"begun": 5.5, "ended": 5.6, "outcome": "aborted"}, set()),
    ],
)
def test_where_a_lost_call_may_lie_follows_from_when_it_ran(lost: dict[str, Any], gaps: set[str]) -> None:
    chain = (call("a", [1], [2], begun=0, ended=5), call("b", [1, 2, 3], [4], begun=6, ended=7))
    assert gaps_of(*chain, missing("l", **lost)) == gaps
    assert gaps_of(*chain, missing("l", **lost), missing("far", begun=90, ended=91)) == gaps


def test_where_calls_have_no_times_a_lost_one_may_lie_before_each() -> None:
    timed = call("b", [1, 2, 3], [4], begun=6, ended=7)
    for begun, gaps in ((5, {"a", "b"}), (8, {"a"})):
        assert gaps_of(call("a", [1], [2]), timed, missing("l", begun=begun, ended=begun + 1)) == gaps
        other_boot = call("a", [1], [2], begun=0, ended=1, boot="reboot")
        assert gaps_of(other_boot, timed, missing("l", begun=begun, ended=begun + 1)) == gaps


def test_a_lost_call_lies_after_identical_answers_if_it_may_lie_after_one_of_them() -> None:
    last = call("b", [1, 2, 3], [4], begun=12, ended=13)
    for begun, ended in ((0, 1), (9, 10)):
        again = (call("a", [1], [2], begun=begun, ended=ended), call("a2", [1], [2], begun=9 - begun, ended=10 - begun))
        assert gaps_of(*again, last, missing("l", begun=5, ended=6)) == {"b"}
    both_later = (call("a", [1], [2], begun=7, ended=8), call("a2", [1], [2], begun=9, ended=10))
    assert gaps_of(*both_later, last, missing("l", begun=5, ended=6)) == {"a"}


def test_a_prompt_was_there_when_the_first_of_identical_calls_asked_it() -> None:
    for first, second in ((6, 20), (20, 6)):
        made = (
            call("a", [1], [2], begun=0, ended=1),
            call("b", [1, 2, 3], [4], begun=first, ended=first + 1),
            call("c", [1, 2, 3], [4], begun=second, ended=second + 1),
        )
        assert gaps_of(*made, missing("l", begun=8, ended=9)) == set()
        assert gaps_of(*made, missing("l", begun=4, ended=5)) == {"b"}


def test_a_lost_choice_lies_beside_the_choices_of_its_call_and_not_before_or_after_them() -> None:
    chain = (call("a", [1], [2]), call("b", [1, 2, 3], [4], outcome="lost"), call("c", [1, 2, 3, 4, 5], [6]))
    assert gaps_of(*chain) == {"a"}
    assert gaps_of(*chain, missing("")) == {"a", "b", "c"}


def test_a_rollout_of_which_every_call_is_lost_has_nothing_to_train() -> None:
    built = build(example(missing("l"), missing("k", "open")))
    assert (len(built.trajectories), built.gaps, built.reasons) == (0, set(), ("nothing_recorded",))
    assert (built.metrics["replay_factor"], built.masked) == (1.0, True)
    assert rebuild_response(example(missing("l"))).reasons == ("nothing_recorded",)


# ---- what is selected


def test_an_empty_selection_and_one_that_nothing_answers_train_nothing() -> None:
    given = example(call("a", [1], [2], model="m"), call("b", [7], [8], model="n"))
    for models in ((), "x", ("x", "y")):
        built = build(given, models=models)
        assert (built.metrics["trained"], built.metrics["other_model"], built.masked) == (0, 2, True)
    assert trained(build(given, models={"m", "x"})) == {"a": [2]}
    assert build(given, models="n", call_id="a").metrics["other_model"] == 1
    silent = example(call("a", [1], [2], model="m"), call("b", [7], [], model="n"))
    assert trained(build(silent)) == {"a": [2]}


def test_a_build_says_of_which_rollout_and_attempt_it_is() -> None:
    given = Example((), (), rollout_id="task-3-a1")
    given.meta = {"task": 7}  # type: ignore[attr-defined]
    built = build(given)
    assert (built.rollout_id, built.snapshot_id, built.version) == ("task-3-a1", given.snapshot_id, given.version)
    assert (built.meta, built.group) == ({"task": 7}, "task")
    given.meta = {"group": 5}  # type: ignore[attr-defined]
    assert build(given).group == "5"
    rebuilt = rebuild_response(given)
    assert (rebuilt.rollout_id, rebuilt.snapshot_id, rebuilt.version) == ("task-3-a1", given.snapshot_id, given.version)


@pytest.mark.parametrize(
    ("made", "reasons"),
    [
        ([call("a", [1], [2]), missing("l", begun=5, ended=6)], {"incomplete"}),
        ([call("a", [1], [2]), call("b", [7], [8])], {"several_trajectories"}),
        ([call("a", [1], [2]), call("b", [7], [8], [None])], set()),
        ([call("a", [1], [2], outcome="conflict")], {"incomplete", "conflict"}),
        ([call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 3], [5])], {"ambiguous"}),
    ],
)
def test_strict_masks_a_rollout_on_each_doubt(made: list[Any], reasons: set[str]) -> None:
    built = build(example(*made), strict=True)
    assert {reason.removeprefix("strict:") for reason in built.reasons if reason.startswith("strict:")} == reasons
    assert built.masked is bool(reasons)
    assert all(not trajectory.trained for trajectory in built.trajectories) is bool(reasons)
    assert build(example(*made)).metrics["masked"] == 0
    if reasons:
        assert "masked" not in {flag for trajectory in built.trajectories for flag in trajectory.flags}
        assert np.isnan(np.concatenate([t.log_probs for t in built.trajectories])).all()


# ---- what a source may give


def test_of_two_entries_for_one_choice_equal_ones_are_one_and_others_are_a_conflict() -> None:
    (entry,) = call("a", [1], [2, 3]).entries
    (equal,) = call("a", [1], [2, 3]).entries
    (other,) = call("a", [1], [2, 4]).entries
    following = example(call("b", [7], [8]))
    for order in ((entry, other), (other, entry), (entry, equal, other)):
        built = build(Example([*order, *following.entries], ()))
        assert trained(built) == {"b": [8]}
        assert (built.metrics["entries"], built.metrics["conflict"], built.metrics["conflict_calls"]) == (2, 2, 1)
        assert of(built, "a").token_ids.tolist() == [1, *min(entry, other, key=content_digest).generation_token_ids]
    built = build(Example([entry, equal], [CallRecord("a", "recorded")]))
    assert (built.metrics["entries"], built.metrics["trained"], built.metrics["conflict_calls"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("outcome", "finish_reasons", "kept"),
    [
        ("recorded", ("stop", "stop"), [[2], [3]]),
        ("recorded", ("stop", "aborted"), [[2]]),
        ("recorded", ("aborted", "aborted"), []),
        ("aborted", ("stop", "aborted"), [[2]]),
        ("aborted", ("stop", "stop"), []),
    ],
)
def test_of_several_choices_those_were_cut_off_that_say_so_else_all_of_an_aborted_call(
    outcome: Any, finish_reasons: tuple[str, str], kept: list[list[int]]
) -> None:
    entries = [
        call("a", [1], [2 + i], choice=i, finish_reason=reason).entries[0] for i, reason in enumerate(finish_reasons)
    ]
    built = build(Example(entries, [CallRecord("a", outcome)]))
    assert [trajectory.token_ids[1:].tolist() for trajectory in built.trained] == kept
    assert built.metrics["aborted"] == 2 - len(kept)


def test_a_call_that_is_known_to_have_come_before_is_no_proof_that_an_answer_was_kept() -> None:
    given = (
        call("early", [1, 2, 3], [4], begun=0, ended=1),
        call("a", [1], [2], begun=2, ended=3),
        call("b", [1], [5], begun=4, ended=5),
    )
    built = build(example(*given))
    assert (trained(built), built.metrics["ambiguous"]) == ({"early": [4]}, 2)
    later = call("later", [1, 2, 3], [4], begun=6, ended=7)
    assert build(example(*given[1:], later)).metrics["abandoned"] == 1


def test_content_alone_names_no_call_that_went_on_in_spite_of_a_drift() -> None:
    given = example(
        call("a", [1], [2, 3], output_items=text("yes")), call("b", [1, 2, 9], [4], output_items=text("no"))
    )
    assert scored(build(given, response={"output": text("yes")})) is None
    assert scored(build(given, response={"output": text("no")})) == "b"


def test_a_rebuild_speaks_for_the_one_of_identical_calls_that_was_received() -> None:
    given = example(
        call("a", [1], [2], delivered="no", response_id="r-a", output_items=text("from a")),
        call("b", [1], [2], delivered="full", response_id="r-b", output_items=text("from b")),
    )
    rebuilt = rebuild_response(given)
    assert rebuilt.response is not None
    assert rebuilt.response["id"] == "r-b"
    assert rebuilt.response["output"][0]["content"] == text("from b")[0]["content"]


def test_a_rebuild_without_a_chain_has_no_segments() -> None:
    apart = rebuild_response(example(call("a", [1], [2]), call("b", [7], [8])))
    assert (apart.reasons, apart.metrics["segments"]) == (("several_conversations",), 0)
    cut = rebuild_response(example(call("a", [1], [2], outcome="aborted")), on_drift="mask")
    assert (cut.reasons, cut.metrics["segments"]) == (("aborted",), 0)
    assert rebuild_response(example(call("a", [1], [2]))).metrics["segments"] == 1


def test_whether_a_lost_call_may_be_the_scored_one_is_settled_by_an_id_and_not_by_content() -> None:
    given = example(
        call("a", [1], [2], begun=0, ended=1, response_id="r", output_items=text("yes")),
        missing("l", begun=4, ended=5),
    )
    assert rebuild_response(given, response={"output": text("yes")}).reasons == ("lost_call",)
    assert rebuild_response(given, response={"id": "r", "output": text("yes")}).reasons == ()
    # Between two identical calls it may have been the last that the client saw.
    between = example(
        call("a", [1], [2], begun=0, ended=1),
        call("again", [1], [2], begun=6, ended=7),
        missing("l", begun=4, ended=5),
    )
    assert rebuild_response(between).reasons == ("lost_call",)


def test_a_prompt_that_ends_within_a_cut_off_answer_drifted_from_it() -> None:
    given = example(call("cut", [1], [2, 3, 4], outcome="aborted"), call("next", [1, 2, 3], [5]))
    (drift,) = build(given).drifts
    assert (drift.call, drift.nearest, drift.before_answer) == (("next", 0), ("cut", 0), False)
    assert (drift.index, drift.kept, drift.lost) == (3, 2, 1)
    assert rebuild_response(given).metrics["segments"] == 2
    whole = example(call("whole", [1], [2, 3, 4]), call("next", [1, 2, 3], [5]))
    assert build(whole).drifts == ()
    models = [call("next", [1, 2, 3], [5]), call("next-n", [1, 2, 3], [5], model="n")]
    other = build(example(call("cut", [1], [2, 3, 4], outcome="aborted", model="n"), *models), models=("m", "n"))
    assert [drift.call[0] for drift in other.drifts] == ["next-n"]
    again = example(call("cut", [1], [2, 3, 4], outcome="aborted"), call("next", [1], [5]))
    assert build(again).drifts == ()
    # What continues another answer to its end has not drifted from the cut-off one.
    ended = example(
        call("cut", [1, 2], [3, 4], outcome="aborted"), call("a", [1], [2, 3]), call("next", [1, 2, 3], [5])
    )
    assert build(ended).drifts == ()
    assert calls_of(build(ended), "next") == ["a", "next"]


@pytest.mark.parametrize("cut_off", [[[2, 3, 4]], [[2, 3, 4], [8]], [[8], [2, 3, 4]]])
def test_the_only_complete_answer_is_abandoned_for_a_cut_off_one_that_a_prompt_goes_on_with(
    cut_off: list[list[int]],
) -> None:
    built = build(
        example(call("a", [1], [5]), samples("cut", [1], cut_off, outcome="aborted"), call("next", [1, 2, 3, 9], [7]))
    )
    assert trained(built) == {"cut": [2, 3], "next": [7]}
    assert (built.metrics["abandoned"], built.metrics["aborted"]) == (1, len(cut_off))


def test_a_scored_chain_of_which_nothing_is_trained_comes_behind_those_that_are() -> None:
    built = build(example(call("a", [1], [2], [None]), call("other", [3], [4])), call_id="a")
    assert [t.calls[-1].model_call_ids[0] for t in built.trajectories] == ["other", "a"]
    assert [(t.index, t.count, t.trained) for t in built.trained] == [(0, 1, 1)]


def test_equal_samples_come_in_an_order_that_no_name_decides() -> None:
    orders = set()
    for values in ((-0.1, -0.4), (-0.4, -0.1)):
        entries = [call("a", [1], [2], [value], choice=i).entries[0] for i, value in enumerate(values)]
        built = build(Example(entries, [CallRecord("a", "recorded")]))
        orders.add(tuple(float(trajectory.log_probs[1]) for trajectory in built.trajectories))
    assert len(orders) == 1


def test_trajectories_with_as_many_trained_ids_come_in_the_order_of_their_ids() -> None:
    built = build(
        example(
            call("a", [9], [2]),
            call("b", [9, 2, 3], [4, 4]),
            call("c", [8], [2, 2]),
            call("d", [8, 2, 2, 3], [4]),
        )
    )
    assert [t.token_ids.tolist() for t in built.trajectories] == [[8, 2, 2, 3, 4], [9, 2, 3, 4, 4]]


@pytest.mark.parametrize("names", ["pqr", "rqp", "qpr"])
def test_all_that_is_below_a_fork_counts_whatever_the_calls_are_named(names: str) -> None:
    first, second, third = tuple(names)
    built = build(
        example(
            call("trunk", [1], [2]),
            call("other", [1, 2, 3], [4, 4]),
            call(first, [1, 2, 5], [6]),
            call(second, [1, 2, 5, 6, 7], [8]),
            call(third, [1, 2, 5, 6, 7, 8, 9], [9]),
        )
    )
    assert calls_of(built, "trunk") == ["trunk", first, second, third]


@pytest.mark.parametrize(
    ("answers", "prompt", "later"),
    [
        ({"begun": 4, "ended": 8}, {"ended": 3}, False),
        ({"begun": 4, "ended": 8}, {"ended": 9}, True),
        ({"ended": 8}, {"begun": 1, "ended": 3}, False),
        ({"ended": 8}, {"begun": 1, "ended": 9}, True),
        ({"begun": 4, "ended": 8}, {"begun": 5, "ended": 6}, True),  # begins decide where they are known
        ({"begun": 4, "ended": 8}, {"begun": 4, "ended": 6}, True),
        ({"begun": 4, "ended": 8}, {"begun": 3, "ended": 9}, False),
        ({"begun": 4, "ended": 8}, {"begun": 3, "ended": 9, "boot": "reboot"}, True),
    ],
)
def test_a_prompt_tells_of_answers_that_are_not_known_to_have_come_after_it(
    answers: dict[str, Any], prompt: dict[str, Any], later: bool
) -> None:
    built = build(
        example(
            call("a", [1], [2, 3], **answers), call("b", [1], [5, 6], **answers), call("next", [1, 2, 9], [8], **prompt)
        )
    )
    assert trained(built) == ({"a": [2, 3], "next": [8]} if later else {"next": [8]})


def test_a_prompt_does_not_part_from_an_earlier_one_that_holds_it_whole() -> None:
    built = build(
        example(
            call("zero", [0, 2], [6], begun=0, ended=1),
            call("other", [1, 2, 3, 3, 3], [6], begun=0, ended=1),
            call("longer", [1, 2, 9, 9, 5], [6], begun=2, ended=3),
            call("last", [1, 2, 9, 9], [4], begun=4, ended=5),
        )
    )
    found = {drift.call[0]: (drift.nearest[0], drift.index, drift.before_answer) for drift in built.drifts}
    assert found == {"longer": ("other", 2, True), "last": ("other", 2, True)}


@pytest.mark.parametrize(("begun", "continued"), [(0, False), (6, True), (8.5, False), (12, False)])
def test_a_prompt_went_on_with_a_cut_off_answer_if_it_came_after_it_and_before_each_that_shares_the_ids(
    begun: float, continued: bool
) -> None:
    built = build(
        example(
            call("cut", [1], [2, 3, 9], begun=4, ended=5, outcome="aborted"),
            call("x", [1], [2, 3, 4], begun=7, ended=9),
            call("y", [1], [2, 3, 5], begun=8, ended=9),
            call("after-x", [1, 2, 3, 4, 6], [7], begun=10, ended=11),
            call("after-y", [1, 2, 3, 5, 6], [7], begun=10, ended=11),
            call("prompt", [1, 2, 3, 7], [8], begun=begun, ended=begun + 0.5),
        )
    )
    assert ("cut" in trained(built)) is continued
    assert built.metrics["aborted"] == (1 if continued else 3)


# ---- what a build is given and what it says


def test_content_names_a_call_although_another_conversation_parts_from_its_prompt() -> None:
    given = example(
        call("a", [1, 2, 3, 4, 5], [6], begun=0, ended=1, output_items=text("yes")),
        call("compacted", [1, 2, 9], [6], begun=2, ended=3, output_items=text("no")),
    )
    built = build(given, response={"output": text("yes")})
    assert [drift.before_answer for drift in built.drifts] == [True]
    assert scored(built) == "a"


def test_a_build_names_what_it_can_not_take() -> None:
    given = example(call("a", [1], [2]))
    with pytest.raises(InvalidOptionError, match="not a dict"):
        build({})  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="response is a str"):
        build(given, response="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="models is 5"):
        build(given, models=5)  # type: ignore[arg-type]


def test_a_group_that_is_given_is_taken_as_it_is() -> None:
    given = Example((), (), rollout_id="task-3")
    assert build(given, group="other-1").group == "other-1"
    assert build(given, group="").group == ""
    assert build(given).group == "task"


def test_flags_and_reasons_come_in_a_fixed_order() -> None:
    built = build(
        example(
            call("a", [1, 2, 2], [3, 4], [-0.5, None], begun=0, ended=1, sampling={"logprobs_mode": "raw_logits"}),
            missing("l", begun=2, ended=3),
            call("b", [1, 2, 2, 3, 9], [4], begun=4, ended=5, outcome="conflict"),
            call("c", [1, 2, 2, 3, 9, 4, 4], [5], [None], begun=6, ended=7, sampling={"logprobs_mode": "raw_logits"}),
            call("cut", [7], [8], begun=6, ended=7, outcome="aborted"),
        )
    )
    assert of(built, "c").flags == ("after_gap", "conflict", "drifted", "not_behaviour", "unknown")
    assert of(built, "a").flags == ("not_behaviour", "unknown")
    assert of(built, "cut").flags == ("aborted", "after_gap")
    assert built.reasons == ("aborted", "unknown", "conflict")


def test_flags_and_reasons_name_what_happened_and_nothing_else() -> None:
    restart = example(call("a", [1, 2, 2, 2], [3], begun=0, ended=1), call("b", [1, 2, 9], [4], begun=2, ended=3))
    assert of(build(restart), "b").flags == ("restarted",)
    models = example(call("a", [1], [2], model="m"), call("b", [1], [2], model="n"))
    assert build(models, models="m").reasons == ("other_model",)
    retried = example(call("a", [1], [2]), call("b", [1], [3]), call("c", [1, 3, 4], [5]), call("d", [1, 3, 4, 5], [6]))
    assert build(retried, call_id="c").reasons == ("abandoned", "after_final")
    assert build(retried).metrics["mixed_log_prob_modes"] is False


@pytest.mark.parametrize("without", ["rollout_id", "snapshot_id", "version", "calls", "entries"])
def test_a_snapshot_that_lacks_something_is_refused_by_its_name(without: str) -> None:
    parts = {"rollout_id": "r", "snapshot_id": "0" * 32, "version": 1, "calls": (), "entries": (), "incomplete": False}
    assert build(SimpleNamespace(**parts)).reasons == ("nothing_recorded",)
    del parts[without]
    with pytest.raises(InvalidOptionError, match=rf"\(it has no {without}\)"):
        build(SimpleNamespace(**parts))


def test_a_group_or_a_version_that_python_writes_out_in_no_digits_is_a_name_all_the_same() -> None:
    huge = 10**5000
    names = {group_of("r-1", {"group": group}) for group in (huge, huge + 1, [huge], {"a": huge}, "a", 7)}
    assert len(names) == 6 and {"a", "7"} < names
    assert group_of("other", {"group": huge}) in names
    assert all(name.isprintable() and len(name) < 100 for name in names)
    for other, unclear in ((huge, 0), (huge + 1, 1)):
        versions = {"a": huge, "b": other}
        twice = [call(name, [1], [2], policy_versions=[(version, 0, 1)]) for name, version in versions.items()]
        assert len(build(example(*twice)).links.unclear) == unclear
