"""Content round-trips exactly if JSON has words for it, and never costs the token record if not."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokcap.content import (
    MAX_NESTING,
    MAX_REPEATED,
    UNSTORABLE_KEY,
    count_unstorable,
    decode_content,
    encode_content,
    storable,
)

TEXT = st.text(st.characters(exclude_categories=())) | st.text()  # with and without lone surrogates
INTEGERS = st.integers() | st.sampled_from([-(2**63), -(2**63) - 1, 2**63, 2**64 - 1, 2**64, 10**400, -(10**400)])
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats() | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=30)


def round_trip(value: object) -> Any:
    return decode_content(encode_content(storable(value)))


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, all the way down; floats by their bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def nested(levels: int) -> Any:
    value: Any = []
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else [value]
    return value


def doubled(levels: int, pair: Callable[[Any], Any] = lambda value: [value, value], leaf: Any = ()) -> Any:
    """A small value that would be 2^levels large if it were written out."""
    value = leaf
    for _ in range(levels):
        value = pair(value)
    return value


def replaced(text: str) -> dict[str, str]:
    return {UNSTORABLE_KEY: text}


# ---- what JSON has words for


@given(JSON)
def test_any_json_value_comes_back_equal(value: Any) -> None:
    assert same(round_trip(value), value)


@given(JSON)
def test_any_json_value_comes_back_equal_from_the_canonical_form(value: Any) -> None:
    decoded = decode_content(encode_content(storable(value), canonical=True))
    assert encode_content(decoded, canonical=True) == encode_content(storable(value), canonical=True)


@given(st.integers(min_value=-(2**5000), max_value=2**5000))
def test_integer_of_any_size_comes_back_equal(value: int) -> None:
    assert same(round_trip({"arguments": [value]}), {"arguments": [value]})


@pytest.mark.parametrize("bits", [63, 64, 70, 127, 128, 20_000])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_integer_beside_a_power_of_two_comes_back_equal(bits: int, offset: int, sign: int) -> None:
    value = sign * (2**bits + offset)
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.0, -0.0, 5e-324, sys.float_info.max, 1.0])
def test_float_keeps_its_bits_and_stays_a_float(value: float) -> None:
    assert same(round_trip([value]), [value])


def test_every_nan_becomes_the_one_canonical_nan() -> None:
    signalling = struct.unpack("<d", struct.pack("<Q", 0xFFF0_0000_DEAD_BEEF))[0]
    assert encode_content(storable([signalling])) == encode_content(storable([math.nan]))
    assert math.isnan(round_trip([signalling])[0])


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80" * 3, "\ud83d", "\ude00\ud83d"])
def test_lone_surrogate_comes_back_equal_as_value_and_as_key(text: str) -> None:
    value = {"before": 1, text: {"inner": [text, {text: text}]}, "after": text}
    assert same(round_trip(value), value)


def test_huge_integer_inside_a_mapping_with_a_surrogate_key_comes_back_equal() -> None:
    value = {"\udc80": [2**70, {"\udc81": -(2**70)}]}
    assert same(round_trip(value), value)


@pytest.mark.parametrize("text", ["", "\0", "a\r\nb\u2028c", "naïve café", "🐍🚀", "\uffff", "\U0010ffff", "e\u0301"])
def test_text_is_not_normalised(text: str) -> None:
    assert same(round_trip({text: text}), {text: text})


def test_boolean_integer_and_float_stay_apart() -> None:
    assert same(round_trip([True, 1, 1.0, False, 0, 0.0]), [True, 1, 1.0, False, 0, 0.0])


def test_order_of_keys_is_kept() -> None:
    value = {"z": 1, "a": 2, "m": 3}
    assert list(round_trip(value)) == ["z", "a", "m"]


def test_text_that_looks_like_a_replacement_is_neither_replaced_nor_counted() -> None:
    value = [UNSTORABLE_KEY, f"a {UNSTORABLE_KEY} b", {"text": UNSTORABLE_KEY}]
    encoded = encode_content(storable(value))
    assert decode_content(encoded) == value
    assert count_unstorable(encoded) == 0


# ---- what is close enough to JSON


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Pair(NamedTuple):
    one: int
    other: str


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2, "a")), [1, [2, "a"]]),
        (Pair(1, "a"), [1, "a"]),
        (Colour.RED, "red"),
        ({Colour.RED: 1}, {"red": 1}),
        (Level.HIGH, 3),
        (np.int64(-5), -5),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(-0.0), -0.0),
        (np.float64(math.inf), math.inf),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        ({np.str_("a"): 1}, {"a": 1}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
    ],
)
def test_subclass_or_numpy_scalar_becomes_the_plain_value(value: Any, expected: Any) -> None:
    assert same(storable(value), expected)
    assert same(round_trip(value), expected)
    assert count_unstorable(encode_content(storable(value))) == 0


# ---- what is replaced


@dataclasses.dataclass
class Something:
    number: int = 1


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


UNSTORABLE: list[Any] = [
    b"bytes",
    bytearray(b"bytes"),
    memoryview(b"bytes").tobytes(),
    {1, 2},
    frozenset({1}),
    datetime.datetime(2026, 1, 1),
    datetime.timedelta(1),
    decimal.Decimal("0.1"),
    fractions.Fraction(1, 3),
    1j,
    np.complex128(1j),
    np.longdouble("0.1"),
    np.timedelta64(5, "s"),
    np.datetime64("2026-01-01"),
    np.arange(3),
    np.void(b"ab"),
    Something(),
    Something,
    object.__init__,
    range(3),
    {1: "a"},
    {None: "a"},
    {True: "a"},
    {b"a": "a"},
    {("a",): "a"},
    msgspec.msgpack.Ext(1, b"\x01"),
    ...,
]


@pytest.mark.parametrize("value", UNSTORABLE, ids=[repr(value)[:28] for value in UNSTORABLE])
def test_unstorable_value_is_replaced_by_its_repr_and_counted(value: Any) -> None:
    content = {"kept": [1, "a"], "replaced": value, "also kept": {"b": None}}
    encoded = encode_content(storable(content))
    assert decode_content(encoded) == {**content, "replaced": replaced(repr(value))}
    assert count_unstorable(encoded) == 1


@given(st.lists(st.one_of(JSON, st.binary(), st.sets(st.integers()))))
def test_every_replaced_value_is_counted_once(values: list[Any]) -> None:
    encoded = encode_content(storable(values))
    expected = sum(isinstance(value, (bytes, set)) for value in values)
    assert count_unstorable(encoded) == expected


def test_replacement_is_counted_inside_a_mapping_with_a_surrogate_key() -> None:
    encoded = encode_content(storable({"\udc80": [b"a", {"\udc81": b"b"}]}))
    assert count_unstorable(encoded) == 2
    assert count_unstorable(memoryview(encoded)) == 2


def test_replaced_value_that_is_stored_again_stays_the_same() -> None:
    once = round_trip({"a": b"bytes"})
    assert round_trip(once) == once


def test_one_key_that_is_no_string_replaces_its_mapping_only() -> None:
    assert storable({"a": [{"b": 1, 2: 3}, 4]}) == {"a": [replaced("{'b': 1, 2: 3}"), 4]}


def test_long_repr_is_cut_and_says_how_long_it_was() -> None:
    text = storable(b"x" * 1_000_000)[UNSTORABLE_KEY]
    assert len(text) < 3000
    assert text.startswith("b'xxx")
    assert text.endswith("... (1000003 characters)")


def test_object_whose_repr_fails_is_replaced_all_the_same() -> None:
    assert storable([Silent()]) == [replaced("<Silent object whose repr failed>")]


class Unreadable(dict[str, Any]):
    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not to be read")

    def keys(self) -> Any:
        raise RuntimeError("not to be read")


class UnreadableList(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("not to be read")


def test_container_that_cannot_be_read_is_replaced_and_its_neighbours_kept() -> None:
    content = storable([1, Unreadable(a=1), UnreadableList([1]), 2])
    assert (content[0], content[3]) == (1, 2)
    assert count_unstorable(encode_content(content)) == 2


# ---- nesting, cycles, repetition


def test_nesting_up_to_the_limit_comes_back_equal() -> None:
    value = nested(MAX_NESTING)
    encoded = encode_content(storable(value))
    assert count_unstorable(encoded) == 0
    assert same(decode_content(encoded), value)


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, MAX_NESTING + 2, 2 * MAX_NESTING, 100_000])
def test_deeper_nesting_is_replaced_at_the_limit_and_counted(levels: int) -> None:
    content = storable({"kept": 1, "deep": nested(levels)})
    encoded = encode_content(content)
    assert count_unstorable(encoded) == 1
    assert same(decode_content(encoded), content)
    assert content["kept"] == 1
    deepest = content["deep"]
    for _ in range(MAX_NESTING - 1):
        (deepest,) = deepest.values() if isinstance(deepest, dict) else deepest
    assert list(deepest) == [UNSTORABLE_KEY]


def test_nesting_of_mappings_with_surrogate_keys_and_huge_integers_comes_back_equal() -> None:
    value: Any = 2**70
    for _ in range(MAX_NESTING):
        value = {"\udc80": value}
    encoded = encode_content(storable(value))
    assert len(encoded) < 100 * MAX_NESTING
    assert same(decode_content(encoded), value)


def test_nested_subclasses_come_back_equal() -> None:
    value: Any = 1
    expected: Any = 1
    for _ in range(MAX_NESTING):
        value, expected = collections.OrderedDict(a=value), {"a": expected}
    assert same(storable(value), expected)


def test_cycle_is_replaced_where_it_closes() -> None:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    value["list"] = [value]
    content = storable(value)
    assert content["a"] == 1
    assert list(content["self"]) == [UNSTORABLE_KEY]
    assert list(content["list"][0]) == [UNSTORABLE_KEY]
    assert count_unstorable(encode_content(content)) == 2


def test_cycle_through_a_subclass_is_replaced_where_it_closes() -> None:
    value: collections.OrderedDict[str, Any] = collections.OrderedDict(a=1)
    value["self"] = value
    content = storable(value)
    assert content["a"] == 1
    assert list(content["self"]) == [UNSTORABLE_KEY]


@pytest.mark.parametrize("repeats", [2, 1000])
def test_value_that_is_met_again_is_no_cycle_and_comes_back_equal(repeats: int) -> None:
    tool = {"name": "search", "parameters": {"query": ["a", "b"]}}
    value = [tool] * repeats
    content = storable(value)
    assert same(content, value)
    assert count_unstorable(encode_content(content)) == 0


@pytest.mark.parametrize(
    "pair",
    [
        lambda value: [value, value],
        lambda value: (value, value),
        lambda value: {"a": value, "b": value},
        lambda value: {"a": value, "b": [value]},
        lambda value: collections.OrderedDict(a=value, b=value),
        lambda value: Pair(value, value),
    ],
    ids=["list", "tuple", "dict", "uneven depth", "subclass of dict", "named tuple"],
)
def test_value_that_doubles_at_every_level_is_cut_and_counted(pair: Callable[[Any], Any]) -> None:
    value = doubled(40, pair, "leaf")
    content = storable({"kept": "yes", "exploding": value})
    encoded = encode_content(content)
    assert content["kept"] == "yes"
    assert count_unstorable(encoded) >= 1
    assert len(encoded) < 20 * MAX_REPEATED
    assert decode_content(encoded) == content


@pytest.mark.parametrize(
    "wrap",
    [
        lambda value: {1: value},
        lambda value: [nested(1), {None: [value]}],
        lambda value: {"a": {2: collections.OrderedDict(a=value)}},
    ],
)
def test_repr_of_a_value_that_doubles_at_every_level_is_short(wrap: Callable[[Any], Any]) -> None:
    for pair in (lambda value: [value, value], lambda value: collections.OrderedDict(a=value, b=value)):
        encoded = encode_content(storable(wrap(doubled(60, pair))))
        assert count_unstorable(encoded) >= 1
        assert len(encoded) < 10_000


def test_wide_value_is_copied_in_full() -> None:
    value = {"items": [{"number": number} for number in range(2 * MAX_REPEATED)]}
    encoded = encode_content(storable(value))
    assert count_unstorable(encoded) == 0
    assert decode_content(encoded) == value


def test_copy_made_on_a_nearly_full_stack_never_raises() -> None:
    value = {"deep": nested(MAX_NESTING)}

    def at_depth(frames: int) -> Any:
        return storable(value) if frames == 0 else at_depth(frames - 1)

    for free in (20, 50, 100, 150, 300):
        used = len(_frames())
        content = at_depth(sys.getrecursionlimit() - used - free)
        assert content == value or list(content) == [UNSTORABLE_KEY]


def _frames() -> list[Any]:
    frame, found = sys._getframe(), []
    current: Any = frame
    while current:
        found.append(current)
        current = current.f_back
    return found


# ---- ownership and canonical form


def test_copy_shares_no_container_with_the_original() -> None:
    inner = {"b": [1]}
    value = {"a": inner, "again": inner}
    content = storable(value)
    inner["b"].append(2)
    value["c"] = inner
    assert content == {"a": {"b": [1]}, "again": {"b": [1]}}


@given(st.dictionaries(TEXT, SCALARS, max_size=8), st.randoms())
def test_canonical_form_does_not_depend_on_the_order_of_keys(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    one, other = {"outer": value}, {"outer": dict(items)}
    assert encode_content(storable(one), canonical=True) == encode_content(storable(other), canonical=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0, False),
        (0.0, -0.0),
        ("1", 1),
        (None, ""),
        ({}, []),
        ("\ud83d", "\ude00"),
        (2**64, float(2**64)),
        ({"a": None}, {}),
    ],
)
def test_canonical_form_of_different_values_differs(one: Any, other: Any) -> None:
    assert encode_content(storable(one), canonical=True) != encode_content(storable(other), canonical=True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x01\x01",
        b"\xd4\x7f\x00",
        b"\xd9\x05ab",
        b"\xa2\x00\x80",
        b"\x91" * 100_000,
        encode_content({"a": 2**70})[:-1],
    ],
    ids=[
        "nothing",
        "unused type",
        "cut list",
        "two values",
        "unknown extension",
        "cut text",
        "no UTF-8",
        "nested without end",
        "cut integer",
    ],
)
def test_decoding_foreign_bytes_raises_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_content(data)


@pytest.mark.parametrize("payload", [b"\x93\x01\x02\x03", b"\x01", b"\x92\x90\x01", b"\xc1"])
def test_decoding_a_damaged_extension_raises_a_decode_error(payload: bytes) -> None:
    for code in (2, 3):
        data = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, payload + b"\xff"))
        with pytest.raises(msgspec.DecodeError):
            decode_content(data)


@given(st.binary(max_size=60))
def test_decoding_any_bytes_gives_a_value_or_a_decode_error(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode_content(data)


@pytest.mark.parametrize("step", [lambda inner: [inner], lambda inner: {"k": inner}], ids=["lists", "dicts"])
def test_storing_what_was_stored_before_changes_nothing_even_at_the_nesting_limit(step: Callable[[Any], Any]) -> None:
    deep: Any = 1
    for _ in range(MAX_NESTING + 100):
        deep = step(deep)
    once = storable(deep)
    assert storable(once) == once
