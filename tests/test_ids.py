"""Rollout and model call ids: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import enum
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.errors import InvalidIdError, TokcapError
from tokcap.ids import check_model_call_id, check_rollout_id

CHECKS = pytest.mark.parametrize("check", [check_rollout_id, check_model_call_id])

GOOD = ["a", "0", "rollout-17", "A.b_c-d", "chatcmpl-af0471313d0c6eaa", "a..b", "x" * 200, "9" * 200]

BAD = {
    "empty": "",
    "trailing newline": "rollout\n",
    "leading newline": "\nrollout",
    "only a newline": "\n",
    "201 characters": "x" * 201,
    "hidden file": ".rollout",
    "parent directory": "..",
    "leading dash, which commands take for an option": "-rf",
    "leading underscore": "_a",
    "path separator": "a/b",
    "absolute path": "/etc/passwd",
    "backslash": "a\\b",
    "null byte": "a\0b",
    "space": "a b",
    "colon": "a:b",
    "percent escape": "a%2Fb",
    "letter outside ASCII": "é",
    "digit outside ASCII": "\u0661",
    "full-width letter": "\uff41",
    "combining mark": "e\u0301",
    "lone surrogate": "a\udc80",
    "bytes": b"rollout",
    "integer": 7,
    "None": None,
    "list": ["a"],
}


@CHECKS
@pytest.mark.parametrize("value", GOOD)
def test_good_id_comes_back_unchanged(check: Callable[[object], str], value: str) -> None:
    assert check(value) == value


@CHECKS
@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_bad_id_is_refused_never_repaired(check: Callable[[object], str], value: object) -> None:
    with pytest.raises(InvalidIdError):
        check(value)


@CHECKS
@given(value=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", fullmatch=True))
def test_every_id_of_the_documented_form_is_accepted(check: Callable[[object], str], value: str) -> None:
    assert check(value) == value


@CHECKS
@given(value=st.text(max_size=20))
def test_accepted_text_can_be_a_path_component(check: Callable[[object], str], value: str) -> None:
    try:
        accepted = check(value)
    except InvalidIdError:
        return
    assert accepted == value
    assert accepted.isascii()
    assert accepted not in ("", ".", "..")
    assert not set(accepted) & set("/\\\0\n")


def test_subclass_of_str_becomes_a_plain_string() -> None:
    class Name(enum.StrEnum):
        FIRST = "rollout-1"

    assert type(check_rollout_id(Name.FIRST)) is str
    assert check_rollout_id(Name.FIRST) == "rollout-1"


def test_refusal_names_the_kind_of_id_the_value_and_the_rule() -> None:
    with pytest.raises(InvalidIdError, match=r"^rollout_id 'a\\n' must match \[A-Za-z0-9\]"):
        check_rollout_id("a\n")


def test_refusal_of_a_call_id_names_its_rollout() -> None:
    with pytest.raises(InvalidIdError, match=r"^model_call_id '' \(rollout r-1\) must match"):
        check_model_call_id("", rollout_id="r-1")


def test_refusal_shortens_a_long_value() -> None:
    with pytest.raises(InvalidIdError) as caught:
        check_rollout_id("x" * 1_000_000)
    assert len(str(caught.value)) < 300


def test_value_that_has_no_repr_is_refused_all_the_same() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    for value in (Hostile(), 10**5000):  # Python refuses to print integers above 4,300 digits
        with pytest.raises(InvalidIdError):
            check_rollout_id(value)


def test_refusal_is_a_value_error_and_a_tokcap_error() -> None:
    assert issubclass(InvalidIdError, ValueError)
    assert issubclass(InvalidIdError, TokcapError)
