"""Of a prompt that begins as a recent one only the rest is read, and what is read is what it was without a memory."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap import TokenEntry
from tokcap.arrays import IdArray, owned_array
from tokcap.capture.shapes import RecentPrompts, StreamJoiner, decode_answer, decode_json, id_texts, lift, recent
from tokcap.capture.shapes.id_texts import ids_of

LIST = re.compile(rb"(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))*")
LONG = [(7919 * position) % 151_936 for position in range(2_000)]


def text_of(ids: list[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def slowly(text: bytes) -> list[int] | None:
    """What a list of ids is, said in another way."""
    if not LIST.fullmatch(text):
        return None
    ids: list[int] = json.loads(b"[%b]" % text)
    return ids if max(ids) < 2**31 else None


def as_list(ids: IdArray | None) -> list[int] | None:
    return None if ids is None else ids.tolist()


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many bytes were read each time."""
    lengths: list[int] = []

    def counted(text: bytes) -> IdArray | None:
        lengths.append(len(text))
        return ids_of(text)

    monkeypatch.setattr(recent, "ids_of", counted)
    yield lengths


@pytest.fixture(scope="module", autouse=True)
def short_texts_will_do() -> Iterator[None]:
    """So that every case is met by texts of a few bytes, and every place in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_texts, "_BLOCK", 7)
        patch.setattr(recent, "_LEAST_SHARED", 1)
        patch.setattr(recent, "_LITTLE", 6)
        patch.setattr(recent, "_STEP", 5)
        yield


# ---- texts


@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 130), min_size=1, max_size=30))
def test_every_list_of_ids_is_read(ids: list[int]) -> None:
    assert as_list(ids_of(text_of(ids))) == ids


@given(st.text("0129,,, -.]e\x00\xff", max_size=40).map(lambda text: text.encode("latin-1")))
def test_nothing_else_is_read(text: bytes) -> None:
    assert as_list(ids_of(text)) == slowly(text)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 16])
@pytest.mark.parametrize(
    "bad", ["", ",", "1,", ",1", "1,,2", "01", "1,00", "-1", "1.5", "2147483648", "1 ", "99999999999"]
)
@pytest.mark.parametrize("before", ["", "12,", "12,345,6,"])
@pytest.mark.parametrize("behind", ["", ",78", ",7,89,1"])
def test_a_mistake_is_found_wherever_a_block_ends(
    monkeypatch: pytest.MonkeyPatch, block: int, bad: str, before: str, behind: str
) -> None:
    monkeypatch.setattr(id_texts, "_BLOCK", block)
    text = (before + bad + behind).encode()
    assert as_list(ids_of(text)) == slowly(text)


Change = tuple[str, int, str]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "cut", "anew", "within", "again"]),
        st.integers(0, 10**6),
        st.text("0123456789", min_size=1, max_size=3)
        | st.sampled_from([",", ",,", "1,2", ",5", "5,", "x", "00", "", "77,8,9"]),
    ),
    max_size=14,
)


def changed(texts: list[bytes], change: Change) -> bytes:
    """A text made of one of those before."""
    how, number, said = change
    text = texts[number % len(texts)]
    at = number % (len(text) + 1)
    if how == "on":
        return text + b"," + said.encode()
    if how == "cut":
        return text[:at] + said.encode()
    if how == "within":
        return text[:at] + said.encode() + text[at:]
    return text if how == "again" else said.encode()


@given(CHANGES, st.sampled_from([10, 100, 1000]), st.lists(st.integers(0, 1), min_size=15, max_size=15))
def test_whatever_is_known_the_same_is_read(changes: list[Change], most_bytes: int, whose: list[int]) -> None:
    prompts = RecentPrompts(most_bytes)
    texts = [b"12,345,6"]
    for change, rollout in zip([("again", 0, ""), *changes], whose, strict=False):
        texts.append(changed(texts, change))
        ids = prompts.of(f"rollout-{rollout}")(texts[-1])
        assert as_list(ids) == slowly(texts[-1])
        assert prompts.nbytes <= most_bytes
        if ids is not None:
            assert ids.dtype == np.int32
            assert not ids.flags.writeable


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7,12", "7,123"),
        ("7,123", "7,12"),
        ("7,1", "7,1,2"),
        ("7,12", "7,12,"),
        ("7,12", "7,12,,1"),
        ("7,12", "7,12,01"),
        ("7,12", "7,12,2147483648"),
        ("7,2147483647", "7,21474836470"),
        ("7,0", "7,00"),
        ("7,0", "7,01"),
        ("12", "123"),
        ("123", "12"),
        ("7,12", ""),
    ],
)
def test_a_number_that_goes_on_is_another(one: str, other: str) -> None:
    reads = RecentPrompts().of("r")
    assert as_list(reads(one.encode())) == slowly(one.encode())
    assert as_list(reads(other.encode())) == slowly(other.encode())
    assert as_list(reads(one.encode())) == slowly(one.encode())


# ---- what is kept


def test_only_what_is_new_is_read(read: list[int]) -> None:
    reads = RecentPrompts().of("r")
    text = text_of(LONG)
    first = reads(text)
    assert reads(text) is first
    assert as_list(reads(text + b",5,6")) == [*LONG, 5, 6]
    assert as_list(reads(text + b",5,6,77")) == [*LONG, 5, 6, 77]
    assert read == [len(text), len("5,6"), len("77")]


def test_a_prompt_that_ends_otherwise_is_read_from_there(read: list[int]) -> None:
    prompts = RecentPrompts()
    reads = prompts.of("r")
    text = text_of(LONG)
    for turn in range(5):
        assert as_list(reads(text + b",%d,9" % turn)) == [*LONG, turn, 9]
    assert read == [len(text) + len(",0,9"), *[len("0,9")] * 4]
    assert prompts.nbytes < 2 * (len(text) + 4 * len(LONG))  # those that only end otherwise are not kept beside it


def test_sub_agents_of_a_rollout_take_turns(read: list[int]) -> None:
    reads = RecentPrompts().of("r")
    agents = [[*range(start, start + 500)] for start in (1000, 3000, 5000)]
    agents.append([*agents[0][:250], *range(400)])  # begins as another one does
    for turn in range(4):
        for ids in agents:
            ids += [turn, turn]
            assert as_list(reads(text_of(ids))) == ids
    assert read[4:] == [len(f"{turn},{turn}") for turn in range(1, 4) for _ in agents]


def test_rollouts_know_nothing_of_each_other(read: list[int]) -> None:
    prompts = RecentPrompts()
    for name in ("r-1", "r-2"):
        assert as_list(prompts.of(name)(text_of(LONG))) == LONG
    assert read == [len(text_of(LONG))] * 2


def test_the_rollout_that_was_not_heard_of_for_the_longest_time_is_forgotten(read: list[int]) -> None:
    text = text_of(LONG)
    one = len(text) + 4 * len(LONG)
    prompts = RecentPrompts(3 * one + 100)
    for name in ("a", "b", "c", "a", "d"):
        prompts.of(name)(text)
    assert (len(prompts), prompts.nbytes) == (3, 3 * one)
    read.clear()
    for name, known in (("a", True), ("c", True), ("d", True), ("b", False)):
        read.clear()
        assert as_list(prompts.of(name)(text + b",1")) == [*LONG, 1]
        assert read == [len("1") if known else len(text) + 2]


def test_a_text_that_is_too_large_is_not_kept() -> None:
    prompts = RecentPrompts(1000)
    assert as_list(prompts.of("a")(b"1,2")) == [1, 2]
    assert as_list(prompts.of("b")(text_of(LONG))) == LONG
    assert (len(prompts), prompts.nbytes) == (0, 0)


def test_with_no_memory_nothing_is_kept() -> None:
    prompts = RecentPrompts(0)
    assert as_list(prompts.of("a")(text_of(LONG))) == LONG
    assert (len(prompts), prompts.nbytes) == (0, 0)


def test_what_is_no_list_is_not_kept() -> None:
    prompts = RecentPrompts()
    assert prompts.of("a")(b"1,,2") is None
    assert (len(prompts), prompts.nbytes) == (0, 0)


def test_an_entry_takes_the_ids_without_a_copy() -> None:
    reads = RecentPrompts().of("r")
    for text in (text_of(LONG), text_of(LONG), text_of(LONG) + b",1", text_of(LONG) + b",2,3"):
        ids = reads(text)
        assert ids is not None
        assert owned_array(ids, np.dtype(np.int32)) is ids
        assert TokenEntry("r", "c", ids, [1], [-0.5]).prompt_token_ids is ids


def test_threads_may_share_it() -> None:
    one = len(text_of(LONG)) + 4 * len(LONG)
    prompts = RecentPrompts(3 * one)
    failed = []

    def work(number: int) -> None:
        ids = LONG[number:]
        for turn in range(60):
            ids = [*ids, turn]
            if as_list(prompts.of(f"r-{(number + turn) % 5}")(text_of(ids))) != ids:
                failed.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert 0 < prompts.nbytes <= prompts.most_bytes
    assert prompts.nbytes == sum(each.nbytes for known in prompts._known.values() for each in known)


# ---- answers


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("odd", [7, "7", -1, 2**31, 1.5, True, None, [7], 10**30])
def test_odd_prompts_behind_a_known_one_are_what_they_were(odd: Any) -> None:
    reads = RecentPrompts().of("r")
    for prompt in (LONG, [*LONG, odd], [*LONG, odd, 5], LONG, [odd, *LONG], [*LONG, 5]):
        body = compact({"choices": [{"index": 0}], "prompt_token_ids": prompt})
        assert as_lists(decode_answer(body, reads)) == decode_json(body)


@pytest.mark.parametrize("cut", [b"", b"]", b"]]", b",]}", b"01]}", b" 1]}", b"1"])
def test_what_was_no_json_is_none_behind_a_known_prompt(cut: bytes) -> None:
    reads = RecentPrompts().of("r")
    known = compact({"prompt_token_ids": LONG})
    for body in (known, known[:-2] + b"," + cut):
        try:
            expected = decode_json(body)
        except ValueError:
            with pytest.raises(ValueError):
                decode_answer(body, reads)
        else:
            assert as_lists(decode_answer(body, reads)) == expected


def test_what_is_left_of_a_document_is_all_but_the_ids() -> None:
    body = compact({"a": "NaN", "prompt_token_ids": LONG, "choices": [{"b": 1.5}]})
    value, rest = lift(body)
    assert as_lists(value) == json.loads(body)
    assert json.loads(rest) | {"prompt_token_ids": LONG} == json.loads(body)
    assert len(rest) < 200
    short = compact({"prompt_token_ids": [1, 2]})
    assert lift(short) == ({"prompt_token_ids": [1, 2]}, short)


def test_a_stream_knows_the_prompt_of_the_call_before(read: list[int]) -> None:
    reads = RecentPrompts().of("r")
    for prompt in (LONG, [*LONG, 5, 6]):
        joiner = StreamJoiner(arrays=True, prompts=reads)
        part = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", "token_ids": [5]}
        joiner.feed(b"data: " + compact({"choices": [part], "prompt_token_ids": prompt}) + b"\n\n")
        assert as_lists(joiner.answer())["prompt_token_ids"] == prompt
    assert read == [len(text_of(LONG)), len("5,6")]
