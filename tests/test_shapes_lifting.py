"""Long prompt ids come as arrays, and nothing else about an answer changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.capture.shapes import StreamJoiner, decode_answer, decode_json, parse_answer

LONG = [(7919 * position) % 151_936 for position in range(2_000)]


def answer(prompt: Any = LONG, **root: Any) -> dict[str, Any]:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a"},
        "logprobs": {"content": [entry]},
        "finish_reason": "stop",
        "token_ids": [5],
    }
    return {"id": "x", "choices": [choice], "prompt_token_ids": prompt, **root}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, list) else value


def test_ids_of_the_root_and_of_a_choice_are_lifted() -> None:
    for body in (answer(), {"choices": [{"index": 0, "text": "a", "prompt_token_ids": LONG, "token_ids": [5]}]}):
        found = decode_answer(compact(body))
        lifted = found.get("prompt_token_ids", found["choices"][0].get("prompt_token_ids"))
        assert isinstance(lifted, np.ndarray)
        assert (lifted.dtype, lifted.flags.writeable) == (np.int32, False)
        assert as_lists(found) == body
        assert list(found) == list(body)


def test_what_is_captured_is_the_same() -> None:
    body = compact(answer())
    one, other = (parse_answer(decode(body)).choices[0] for decode in (decode_json, decode_answer))
    assert one.prompt_token_ids.tolist() == other.prompt_token_ids.tolist() == LONG
    assert one.generation_log_probs == other.generation_log_probs


@pytest.mark.parametrize(
    "prompt",
    [
        [0, *LONG],
        [*LONG, 0],
        [2**31 - 1, *LONG],
        [*LONG, 2**31],
        [*LONG, -1],
        [*LONG, 1.5],
        [*LONG, True],
        [*LONG, None],
        [*LONG, "7"],
        [*LONG, 10**30],
        [LONG, LONG],
        [10**9] * 2_000,
        "1," * 3_000,
    ],
)
def test_odd_prompts_are_what_they_were(prompt: Any) -> None:
    body = compact(answer(prompt))
    assert as_lists(decode_answer(body)) == decode_json(body)


@pytest.mark.parametrize("bad", [b"01", b"1,,2", b",1", b"1,", b"1 2", b""])
def test_lists_that_json_does_not_have_are_no_json(bad: bytes) -> None:
    body = compact(answer())
    ids = body[body.index(b"prompt_token_ids") + len(b'prompt_token_ids":[') : -2]
    broken = body.replace(ids, ids + (b"," if bad else b"") + bad) if bad else body[:-2]
    with pytest.raises(ValueError):
        decode_json(broken)
    with pytest.raises(ValueError):
        decode_answer(broken)


LOOKALIKE = '"prompt_token_ids":[' + ",".join(map(str, LONG)) + "]"


@pytest.mark.parametrize(
    "body",
    [
        answer([1, 2], note=LOOKALIKE),
        answer(LONG, note="{" + LOOKALIKE),
        answer([1], note=["{" + LOOKALIKE, "ids were here"]),
        {"note": "ids were here", **answer()},
        {"choices": [{"message": {"prompt_token_ids": LONG}}]},
        {"nvext": {"engine_data": {"prompt_token_ids": LONG}}},
        {"prompt_token_ids": LONG, "choices": [{"prompt_token_ids": LONG}]},
        [answer()],
        {"choices": 7, "prompt_token_ids": LONG},
        {"choices": [7, None, {"prompt_token_ids": "ids were here"}]},
    ],
)
def test_lookalikes_change_nothing(body: Any) -> None:
    assert as_lists(decode_answer(compact(body))) == body


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=900, max_size=950),
    st.dictionaries(st.text(max_size=8), st.text(max_size=20) | st.lists(st.integers(), max_size=3), max_size=4),
)
def test_any_prompt_beside_anything(prompt: list[int], beside: dict[str, Any]) -> None:
    body = {**beside, **answer(prompt), **beside}
    assert as_lists(decode_answer(compact(body))) == body


@pytest.mark.parametrize("same", [True, False])
def test_prompts_that_a_stream_repeats_are_compared_as_arrays(same: bool) -> None:
    joiner = StreamJoiner(choices=2, arrays=True)
    for index in (0, 1):
        prompt = LONG if same or not index else [*LONG[:-1], 7]
        part = {"index": index, "delta": {"role": "assistant"}, "finish_reason": None}
        joiner.feed(b"data: " + compact({"choices": [part], "prompt_token_ids": prompt}) + b"\n\n")
    for index in (0, 1):
        last = {"index": index, "delta": {"content": "a"}, "finish_reason": "stop", "token_ids": [5 + index]}
        joiner.feed(b"data: " + compact({"choices": [last]}) + b"\n\n")
    if same:
        assert [c.prompt_token_ids.tolist() for c in parse_answer(joiner.answer(), choices=2).choices] == [LONG, LONG]
    else:
        with pytest.raises(ValueError, match="two different prompts"):
            joiner.answer()
