"""`TokenEntry`: strict about what would train wrong data, owner of all it holds, compared field by field."""

from __future__ import annotations

import array
import collections
import copy
import decimal
import enum
import math
import operator
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from tokcap import TokenEntry
from tokcap.arrays import MAX_TOKEN_ID
from tokcap.content import UNSTORABLE_KEY
from tokcap.entry import SCHEMA_VERSION, canonical_contents, identical
from tokcap.errors import InvalidEntryError, InvalidIdError

TOKEN_IDS = st.integers(min_value=0, max_value=MAX_TOKEN_ID)
ID_FIELDS = pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
QUIET_NAN_BITS = 0x7FF8_0000_0000_0000


def entry(**fields: Any) -> TokenEntry:
    values: dict[str, Any] = {
        "rollout_id": "r-1",
        "model_call_id": "c-1",
        "prompt_token_ids": [5, 6, 7],
        "generation_token_ids": [8, 9],
        "generation_log_probs": [-0.5, -0.25],
    }
    return TokenEntry(**{**values, **fields})


def with_ids(field: str, ids: Any) -> TokenEntry:
    """An entry with `ids` in one of the id fields, and as many log-probs as ids where that matters."""
    if field == "prompt_token_ids":
        return entry(prompt_token_ids=ids)
    return entry(generation_token_ids=ids, generation_log_probs=[-1.0] * len(ids))


def with_log_probs(log_probs: Any) -> TokenEntry:
    return entry(generation_token_ids=list(range(len(log_probs))), generation_log_probs=log_probs)


def bits(log_probs: npt.NDArray[np.float64]) -> list[int]:
    return [int(value) for value in log_probs.view(np.uint64)]


HUGE = pytest.param(10**5000, id="thousands of digits")  # more than Python is willing to print


class Index:
    """An integer that only has `__index__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Tensor:
    """What a torch tensor looks like from outside."""

    def __init__(self, values: Any, dtype: Any = None) -> None:
        self.values = np.array(values, dtype)

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        return self.values if dtype is None else self.values.astype(dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, position: Any) -> Any:
        return self.values[position]


class DeviceTensor(Tensor):
    """A tensor whose memory can't be read from here."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class TorchBool:
    """A torch scalar of dtype torch.bool, as it looks from outside."""

    dtype = "torch.bool"

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0


class Hostile:
    """Fails at whatever is asked of it."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


# ---- token ids


@given(st.lists(TOKEN_IDS), st.lists(st.tuples(TOKEN_IDS, st.floats() | st.none())))
def test_ids_and_log_probs_come_back_exactly(prompt: list[int], sampled: list[tuple[int, float | None]]) -> None:
    ids, log_probs = [pair[0] for pair in sampled], [pair[1] for pair in sampled]
    made = entry(prompt_token_ids=prompt, generation_token_ids=ids, generation_log_probs=log_probs)
    assert made.prompt_token_ids.tolist() == prompt
    assert made.generation_token_ids.tolist() == ids
    expected = [math.nan if value is None else value for value in log_probs]
    for stored, given_value in zip(made.generation_log_probs.tolist(), expected, strict=True):
        assert struct.pack("<d", stored) == struct.pack("<d", given_value) or given_value != given_value


@ID_FIELDS
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        collections.deque,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.array(ids, object),
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
        lambda ids: np.array(ids[::-1], np.int32)[::-1],
        lambda ids: array.array("i", ids),
        lambda ids: array.array("Q", ids),
        lambda ids: np.array(ids, np.int32).data,
        lambda ids: [np.int64(token) for token in ids],
        lambda ids: [np.uint8(token) for token in ids],
        lambda ids: [np.array(token) for token in ids],
        lambda ids: [Index(token) for token in ids],
        Tensor,
        lambda ids: Tensor(ids, np.uint16),
    ],
)
def test_integers_of_any_container_and_kind_become_int32(field: str, make: Callable[[list[int]], Any]) -> None:
    made = getattr(with_ids(field, make([0, 1, 2, 200])), field)
    assert type(made) is np.ndarray
    assert made.dtype == np.int32
    assert made.tolist() == [0, 1, 2, 200]


@ID_FIELDS
def test_range_is_a_sequence_of_ids(field: str) -> None:
    assert getattr(with_ids(field, range(3)), field).tolist() == [0, 1, 2]


@ID_FIELDS
@pytest.mark.parametrize(
    "empty",
    [[], (), np.array([]), np.array([], np.float64), np.array([], np.int8), np.array([], object), Tensor([]), b""[:0]],
    ids=["list", "tuple", "array", "float64", "int8", "object", "tensor", "bytes"],
)
def test_empty_ids_are_accepted_whatever_the_dtype_but_not_as_bytes(field: str, empty: Any) -> None:
    if isinstance(empty, bytes):
        with pytest.raises(InvalidEntryError):
            with_ids(field, empty)
        return
    made = getattr(with_ids(field, empty), field)
    assert (made.dtype, made.shape) == (np.int32, (0,))


WRONG_ITEMS: dict[str, Any] = {
    "True": True,
    "False": False,
    "numpy True": np.bool_(True),
    "numpy False": np.bool_(False),
    "text": "12",
    "bytes": b"12",
    "float": 12.0,
    "float with a fraction": 1.5,
    "numpy float": np.float32(12.0),
    "NaN": math.nan,
    "None": None,
    "negative": -1,
    "numpy negative": np.int64(-1),
    "2^31": 2**31,
    "2^32, which wraps to 0": 2**32,
    "2^32 + 5, which wraps to 5": 2**32 + 5,
    "2^64 + 1": 2**64 + 1,
    "numpy 2^63": np.uint64(2**63),
    "thousands of digits": 10**5000,
    "complex": 1 + 0j,
    "decimal": decimal.Decimal(12),
    "list": [12],
    "array of one": np.array([12]),
    "array of a bool": np.array(True),
    "array of a float": np.array(12.0),
    "duration": np.timedelta64(1, "s"),
    "negative index": Index(-1),
    "large index": Index(2**31),
    "index that is a bool": Index(True),
    "torch bool": TorchBool(),
    "hostile": Hostile(),
}


@ID_FIELDS
@pytest.mark.parametrize("wrong", WRONG_ITEMS.values(), ids=WRONG_ITEMS.keys())
@pytest.mark.parametrize("make", [list, tuple, lambda items: collections.deque(items)], ids=["list", "tuple", "deque"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy and Python, for some of these items
def test_item_that_is_no_token_id_is_refused_with_its_position(field: str, wrong: Any, make: Any) -> None:
    with pytest.raises(InvalidEntryError, match=rf"^rollout r-1, call c-1, choice 0: {field}\[3\] is "):
        with_ids(field, make([4, 1, 0, wrong, 5]))


@ID_FIELDS
@pytest.mark.parametrize("wrong", [True, False, np.bool_(True), -1])
def test_wrong_item_is_found_among_many_zeros_and_ones(field: str, wrong: Any) -> None:
    ids: list[Any] = [0, 1] * 1000
    ids[1500] = wrong
    with pytest.raises(InvalidEntryError, match=rf"{field}\[1500\] is "):
        with_ids(field, ids)


@pytest.mark.parametrize(
    ("array_of_ids", "position"),
    [
        (np.array([1, -1, 2], np.int8), 1),
        (np.array([1, -1, 2], np.int64), 1),
        (np.array([1, 2, 2**31], np.int64), 2),
        (np.array([2**32, 1], np.int64), 0),
        (np.array([1, 2**31], np.uint32), 1),
        (np.array([1, 2**64 - 1], np.uint64), 1),
        (np.array([1, 2**63], np.uint64), 1),
        (np.array([1, -(2**63)], np.int64), 1),
        (np.array([1, True], object), 1),
        (np.array([1, "2"], object), 1),
        (np.array([1, 2.0], object), 1),
        (np.array([1, None], object), 1),
    ],
)
@ID_FIELDS
def test_array_with_an_id_out_of_range_is_refused_with_position_and_value(
    field: str, array_of_ids: npt.NDArray[Any], position: int
) -> None:
    with pytest.raises(InvalidEntryError) as caught:
        with_ids(field, array_of_ids)
    assert f"{field}[{position}] is " in str(caught.value)
    assert str(array_of_ids[position]) in str(caught.value)


@ID_FIELDS
@pytest.mark.parametrize("largest", [MAX_TOKEN_ID, np.int64(MAX_TOKEN_ID), Index(MAX_TOKEN_ID)])
def test_largest_token_id_is_accepted(field: str, largest: Any) -> None:
    assert getattr(with_ids(field, [0, largest]), field).tolist() == [0, MAX_TOKEN_ID]


WRONG_CONTAINERS: dict[str, Any] = {
    "None": None,
    "integer": 5,
    "numpy integer": np.int64(5),
    "text": "123",
    "bytes": b"\x01\x02",
    "bytearray": bytearray(b"\x01\x02"),
    "memoryview of bytes": memoryview(b"\x01\x02"),
    "set": {1, 2},
    "frozenset": frozenset({1, 2}),
    "dict": {1: 2},
    "keys": {1: 2}.keys(),
    "generator": (token for token in (1, 2)),
    "map": map(int, "12"),
    "float array": np.array([1.0, 2.0]),
    "bool array": np.array([True, False]),
    "text array": np.array(["1", "2"]),
    "complex array": np.array([1j]),
    "date array": np.array(["2026-01-01"], "datetime64[D]"),
    "duration array": np.array([1, 2], "timedelta64[s]"),
    "structured array": np.array([(1, 2)], "i4,i4"),
    "no dimension": np.array(5),
    "two dimensions": np.array([[1, 2], [3, 4]]),
    "two dimensions, one row": np.array([[1, 2]]),
    "two dimensions, empty": np.empty((0, 3), np.int32),
    "nested lists": [[1, 2], [3, 4]],
    "masked array": np.ma.MaskedArray([1, 2], mask=[False, True]),
    "masked array without a mask": np.ma.MaskedArray([1, 2]),
    "float tensor": Tensor([1.0, 2.0]),
    "bool tensor": Tensor([True]),
    "tensor of two dimensions": Tensor([[1, 2]]),
    "tensor on a device": DeviceTensor([1, 2]),
    "float array of the array module": array.array("d", [1.0]),
    "hostile": Hostile(),
}


@pytest.mark.parametrize("wrong", WRONG_CONTAINERS.values(), ids=WRONG_CONTAINERS.keys())
def test_container_that_holds_no_token_ids_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"^rollout r-1, call c-1, choice 0: prompt_token_ids"):
        entry(prompt_token_ids=wrong)
    with pytest.raises(InvalidEntryError, match=r"^rollout r-1, call c-1, choice 0: generation_token_ids"):
        entry(generation_token_ids=wrong)


def test_masked_values_of_an_array_interface_are_refused_too() -> None:
    class Masked(Tensor):
        def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
            return np.ma.MaskedArray([1, 2], mask=[False, True])

    # numpy drops the mask before anybody can see it, or it is refused; it must never be half of each.
    try:
        made = entry(prompt_token_ids=Masked([1, 2]))
    except InvalidEntryError:
        return
    assert type(made.prompt_token_ids) is np.ndarray


# ---- log-probs


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        collections.deque,
        lambda values: np.array(values, np.float64),
        lambda values: np.array(values, np.float32),
        lambda values: np.array(values, np.float16),
        lambda values: np.array(values, ">f8"),
        lambda values: np.array(values, object),
        lambda values: np.repeat(np.array(values), 2)[::2],
        lambda values: array.array("d", values),
        lambda values: array.array("f", values),
        lambda values: [np.float32(value) for value in values],
        Tensor,
    ],
)
def test_log_probs_of_any_container_and_width_become_float64(make: Callable[[list[float]], Any]) -> None:
    values = [-0.5, 0.0, 1.0, -3.25]
    made = with_log_probs(make(values)).generation_log_probs
    assert type(made) is np.ndarray
    assert made.dtype == np.float64
    assert made.tolist() == values


@pytest.mark.parametrize("value", [0.1, np.float32(0.1), -1e-300, 5e-324, -math.inf, math.inf, -0.0, -9999.0, 2.0])
@pytest.mark.parametrize("make", [list, np.array])
def test_log_prob_is_kept_to_the_last_bit(value: Any, make: Callable[[Any], Any]) -> None:
    made = with_log_probs(make([value])).generation_log_probs
    assert struct.pack("<d", made[0]) == struct.pack("<d", float(value))


def test_missing_log_prob_becomes_nan_in_its_own_place() -> None:
    made = with_log_probs([-0.5, None, 0.0, None]).generation_log_probs
    assert np.isnan(made).tolist() == [False, True, False, True]
    assert (made[0], made[2]) == (-0.5, 0.0)


@pytest.mark.parametrize("payload", [0xFFF8_0000_0000_0000, 0x7FF8_0000_DEAD_BEEF, 0x7FF0_0000_0000_0001])
def test_every_nan_becomes_the_one_canonical_nan(payload: int) -> None:
    values = np.array([payload, payload], np.uint64).view(np.float64)
    for given_values in (values, values.tolist(), [None, math.nan], np.array([None, math.nan], object)):
        assert bits(with_log_probs(given_values).generation_log_probs) == [QUIET_NAN_BITS] * 2


def test_array_that_was_given_keeps_its_own_nan() -> None:
    values = np.array([0xFFF8_0000_0000_0001], np.uint64).view(np.float64)
    with_log_probs(values)
    assert bits(values) == [0xFFF8_0000_0000_0001]


WRONG_LOG_PROBS: dict[str, Any] = {
    "True": True,
    "False": False,
    "numpy True": np.bool_(True),
    "array of a bool": np.array(True),
    "torch bool": TorchBool(),
    "text": "-0.5",
    "text of NaN": "nan",
    "bytes": b"-0.5",
    "complex": 1j,
    "list": [-0.5],
    "mapping": {"logprob": -0.5},
    "integer beyond floats": 10**400,
    "hostile": Hostile(),
}


@pytest.mark.parametrize("wrong", WRONG_LOG_PROBS.values(), ids=WRONG_LOG_PROBS.keys())
@pytest.mark.parametrize("before", [[-0.5, 0.0, 1.0], [-0.5, None, 1.0]], ids=["floats", "some missing"])
def test_item_that_is_no_log_prob_is_refused_with_its_position(wrong: Any, before: list[Any]) -> None:
    with pytest.raises(
        InvalidEntryError,
        match=r"^rollout r-1, call c-1, choice 0: generation_log_probs\[3\] is .*a log-prob is a float",
    ):
        with_log_probs([*before, wrong])


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        -0.5,
        "ab",
        b"ab",
        {1: -0.5},
        {-0.5, -1.0},
        (value for value in (-0.5, -1.0)),
        np.array([True, False]),
        np.array(["a", "b"]),
        np.array([1j, 2j]),
        np.array([-0.5, -1.0], np.longdouble),
        np.array([[-0.5, -1.0]]),
        np.array(-0.5),
        np.ma.MaskedArray([-0.5, -1.0], mask=[True, False]),
        np.array([1, 2], "timedelta64[s]"),
        DeviceTensor([-0.5, -1.0]),
        Hostile(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_container_that_holds_no_log_probs_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"^rollout r-1, call c-1, choice 0: generation_log_probs"):
        entry(generation_log_probs=wrong)


@pytest.mark.parametrize(("ids", "log_probs"), [([1, 2], [-0.5]), ([1], [-0.5, -1.0]), ([], [None]), ([1], [])])
def test_different_lengths_are_refused_never_padded(ids: list[int], log_probs: list[float | None]) -> None:
    with pytest.raises(
        InvalidEntryError, match=f"{len(ids)} generation_token_ids but {len(log_probs)} generation_log_probs"
    ):
        entry(generation_token_ids=ids, generation_log_probs=log_probs)


@pytest.mark.parametrize(
    ("log_probs", "flags"),
    [
        ([], ()),
        ([-0.5, 0.0, -0.0], ()),
        ([None], ("unknown",)),
        ([-math.inf], ("infinite",)),
        ([0.25], ("positive",)),
        ([math.inf], ("infinite", "positive")),
        ([None, -math.inf, 1e-9], ("unknown", "infinite", "positive")),
    ],
)
def test_odd_log_probs_are_kept_and_flagged(log_probs: list[float | None], flags: tuple[str, ...]) -> None:
    assert with_log_probs(log_probs).flags == flags


def test_empty_prompt_and_empty_generation_are_accepted() -> None:
    made = entry(prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[])
    assert (made.prompt_token_ids.shape, made.generation_token_ids.shape) == ((0,), (0,))
    assert made.generation_log_probs.dtype == np.float64


# ---- routed experts and pieces


@given(numpy_st.arrays(numpy_st.scalar_dtypes(), numpy_st.array_shapes(min_dims=0, min_side=0, max_dims=4)))
def test_routed_experts_of_any_dtype_and_shape_keep_every_byte(experts: npt.NDArray[Any]) -> None:
    made = entry(routed_experts=experts).routed_experts
    assert made is not None
    assert (made.dtype, made.shape, made.tobytes()) == (experts.dtype, experts.shape, experts.tobytes())
    assert not made.flags.writeable


@pytest.mark.parametrize(
    "experts",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4).T,
        np.arange(24, dtype=np.int16)[::-2],
        np.array([(1, 2.0)], [("layer", "u1"), ("weight", ">f4")]),
        np.zeros((3, 0, 8), np.uint8),
        np.array(7, np.uint16),
        np.broadcast_to(np.uint8(3), (2, 2)),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.array(["ab"], "S2"),
    ],
    ids=["transposed", "strided", "structured", "empty", "no dimension", "broadcast", "dates", "bytes"],
)
def test_routed_experts_of_any_layout_come_back_equal(experts: npt.NDArray[Any]) -> None:
    made = entry(routed_experts=experts).routed_experts
    assert made is not None
    assert made.dtype == experts.dtype
    np.testing.assert_array_equal(made, experts)
    assert identical(entry(routed_experts=experts), entry(routed_experts=experts.copy()))


def test_nested_lists_become_routed_experts() -> None:
    made = entry(routed_experts=[[1, 2], [3, 4]]).routed_experts
    assert made is not None
    assert made.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([None, 1]),
        np.array([(1, None)], [("a", "i4"), ("b", "O")]),
        np.ma.MaskedArray([1, 2], mask=[True, False]),
        [[1, 2], [3]],
        {"data": "abc"},
        object(),
        DeviceTensor([1]),
    ],
    ids=["objects", "objects inside", "masked", "ragged", "mapping", "object", "device"],
)
def test_routed_experts_without_bytes_of_their_own_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"^rollout r-1, call c-1, choice 0: routed_experts "):
        entry(routed_experts=wrong)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (None, None),
        ([], []),
        ([b"a", b""], [b"a", b""]),
        ((b"\xff", bytearray(b"\x00")), [b"\xff", b"\x00"]),
        ([memoryview(b"abcd")[::2]], [b"ac"]),
    ],
)
def test_pieces_become_a_list_of_bytes(pieces: Any, expected: Any) -> None:
    made = entry(pieces=pieces).pieces
    assert made == expected
    assert made is None or {type(piece) for piece in made} <= {bytes}


@pytest.mark.parametrize("wrong", ["ab", b"ab", ["a"], [[97]], [None], [97], {b"a"}, (piece for piece in [b"a"])])
def test_pieces_that_are_no_bytes_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match="choice 0: pieces must be a list of bytes"):
        entry(pieces=wrong)


# ---- the other fields


def test_defaults_are_those_of_the_contract() -> None:
    made = entry()
    assert made.choice_index == 0
    assert made.routed_experts is None
    assert (made.output_items, made.policy_versions, made.sampling, made.extra) == ([], [], {}, {})
    assert made.token_item_index is None
    assert (made.model, made.response_id, made.finish_reason) == ("", "", "")
    assert made.created_at == 0.0
    assert made.pieces is None
    assert made.schema_version == SCHEMA_VERSION


def test_positional_order_is_that_of_the_contract() -> None:
    made = TokenEntry("r", "c", [1], [2], [-0.5], 3)
    assert (made.rollout_id, made.model_call_id, made.choice_index) == ("r", "c", 3)
    assert (made.prompt_token_ids.tolist(), made.generation_token_ids.tolist()) == ([1], [2])


@pytest.mark.parametrize("field", ["rollout_id", "model_call_id"])
@pytest.mark.parametrize("wrong", ["", "a/b", "a\n", None, 7, b"a"])
def test_bad_id_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidIdError, match=field):
        entry(**{field: wrong})


@pytest.mark.parametrize("wrong", [-1, True, np.bool_(True), 1.0, "1", None, 2**31, np.timedelta64(1), HUGE])
def test_choice_index_that_is_no_small_integer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"^rollout r-1, call c-1: choice_index is "):
        entry(choice_index=wrong)


@pytest.mark.parametrize("field", ["choice_index", "token_item_index", "schema_version"])
def test_numpy_integer_becomes_a_plain_one(field: str) -> None:
    made = getattr(entry(output_items=[{}, {}], **{field: np.int64(1)}), field)
    assert type(made) is int
    assert made == 1


@pytest.mark.parametrize("wrong", [0, -1, SCHEMA_VERSION + 1, True, 1.0, "1", None, HUGE])
def test_schema_version_that_is_newer_or_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"schema_version is .*upgrade"):
        entry(schema_version=wrong)


@pytest.mark.parametrize("index", [0, 1])
def test_token_item_index_names_an_output_item(index: int) -> None:
    assert entry(output_items=[{"type": "reasoning"}, {"type": "message"}], token_item_index=index) is not None


@pytest.mark.parametrize("wrong", [-1, 2, True, 0.0, "0", np.bool_(False), HUGE])
def test_token_item_index_outside_the_output_items_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=r"token_item_index is .*2 output_items"):
        entry(output_items=[{}, {}], token_item_index=wrong)
    with pytest.raises(InvalidEntryError, match="token_item_index is 0, but there are 0 output_items"):
        entry(token_item_index=0)


@pytest.mark.parametrize("field", ["model", "response_id", "finish_reason"])
@pytest.mark.parametrize("wrong", [None, b"stop", 1, ["stop"], Hostile()])
def test_text_field_that_is_no_text_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match=rf"^rollout r-1, call c-1, choice 0: {field} is "):
        entry(**{field: wrong})


@pytest.mark.parametrize("field", ["model", "response_id", "finish_reason"])
def test_text_field_takes_any_text_also_of_a_subclass(field: str) -> None:
    class Reason(enum.StrEnum):
        STOP = "stop"

    made = getattr(entry(**{field: Reason.STOP}), field)
    assert (type(made), made) == (str, "stop")
    for text in ("", "\udc80", "naïve\n\0", "x" * 10_000):
        assert getattr(entry(**{field: text}), field) == text


@pytest.mark.parametrize("seconds", [0, 1_795_956_019, 1.5, -1.0, np.float32(2.5), np.int64(7), math.inf])
def test_created_at_becomes_a_float(seconds: Any) -> None:
    made = entry(created_at=seconds).created_at
    assert type(made) is float
    assert made == float(seconds)


@pytest.mark.parametrize("wrong", [None, "2026", True, np.bool_(True), 1j, np.complex64(1), 10**400, np.timedelta64(1)])
def test_created_at_that_is_no_number_of_seconds_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntryError, match="choice 0: created_at is "):
        entry(created_at=wrong)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("output_items", {}),
        ("output_items", "ab"),
        ("output_items", None),
        ("policy_versions", {"v": 1}),
        ("policy_versions", None),
        ("sampling", []),
        ("sampling", None),
        ("extra", [("a", 1)]),
        ("extra", "ab"),
    ],
)
def test_content_field_of_another_kind_is_refused(field: str, wrong: Any) -> None:
    with pytest.raises(
        InvalidEntryError, match=rf"^rollout r-1, call c-1, choice 0: {field} is {type(wrong).__name__}"
    ):
        entry(**{field: wrong})


@pytest.mark.parametrize(
    "spans", [[("v7", 0, 1), ("v8", 1, 2)], [["v7", 0, 1], ["v8", 1, 2]], (("v7", 0, 1), ["v8", 1, 2])]
)
def test_policy_versions_become_tuples(spans: Any) -> None:
    assert entry(policy_versions=spans).policy_versions == [("v7", 0, 1), ("v8", 1, 2)]


def test_content_never_costs_the_record() -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    exploding: Any = []
    for _ in range(40):
        exploding = [exploding, exploding]
    for content in (cycle, {"deep": deep}, {"wide": exploding}, {"b": b"bytes"}, {1: 2}, {"o": Hostile()}):
        made = entry(extra=content, sampling=content, output_items=[content, *[content] * 3], policy_versions=[content])
        assert made.prompt_token_ids.tolist() == [5, 6, 7]
        assert UNSTORABLE_KEY.encode() in canonical_contents(made)
        assert identical(made, copy.copy(made))


def test_list_that_cannot_be_read_is_still_a_list() -> None:
    class Unreadable(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError("not to be read")

    made = entry(output_items=Unreadable([1]), policy_versions=Unreadable([1]))
    assert [list(item) for item in made.output_items] == [[UNSTORABLE_KEY]]
    assert [list(item) for item in made.policy_versions] == [[UNSTORABLE_KEY]]


# ---- ownership


ARRAY_FIELDS = ["prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"]


def arrays() -> dict[str, npt.NDArray[Any]]:
    return {
        "prompt_token_ids": np.array([5, 6, 7], np.int32),
        "generation_token_ids": np.array([8, 9], np.int32),
        "generation_log_probs": np.array([-0.5, -0.25], np.float64),
        "routed_experts": np.array([[1, 2], [3, 4]], np.uint8),
    }


@pytest.mark.parametrize("field", ARRAY_FIELDS)
def test_writing_to_a_given_array_afterwards_changes_nothing(field: str) -> None:
    given_arrays = arrays()
    made = entry(**given_arrays)
    given_arrays[field][...] = 99
    np.testing.assert_array_equal(getattr(made, field), arrays()[field])


@pytest.mark.parametrize("field", ARRAY_FIELDS)
def test_writing_through_an_older_view_of_a_read_only_array_changes_nothing(field: str) -> None:
    given_arrays = arrays()
    view = given_arrays[field][:]
    given_arrays[field].flags.writeable = False
    made = entry(**given_arrays)
    view[...] = 99
    np.testing.assert_array_equal(getattr(made, field), arrays()[field])


@pytest.mark.parametrize("field", ARRAY_FIELDS)
def test_writing_below_a_read_only_view_changes_nothing(field: str) -> None:
    given_arrays = arrays()
    base = given_arrays[field]
    given_arrays[field] = base[:]
    given_arrays[field].flags.writeable = False
    made = entry(**given_arrays)
    base[...] = 99
    np.testing.assert_array_equal(getattr(made, field), arrays()[field])


@pytest.mark.parametrize("field", ARRAY_FIELDS)
def test_writing_to_foreign_memory_below_an_array_changes_nothing(field: str) -> None:
    given_arrays = arrays()
    original = given_arrays[field]
    memory = bytearray(original.tobytes())
    given_arrays[field] = np.frombuffer(memory, original.dtype).reshape(original.shape)
    given_arrays[field].flags.writeable = False
    made = entry(**given_arrays)
    memory[:] = bytes(len(memory))
    np.testing.assert_array_equal(getattr(made, field), arrays()[field])


@pytest.mark.parametrize("field", ARRAY_FIELDS)
def test_arrays_are_plain_and_read_only(field: str) -> None:
    made = getattr(entry(**arrays()), field)
    assert type(made) is np.ndarray
    assert made.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        made[...] = 0


@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids", "routed_experts"])
def test_ids_and_experts_cannot_be_made_writable_again(field: str) -> None:
    with pytest.raises(ValueError, match="WRITEABLE"):
        getattr(entry(**arrays()), field).flags.writeable = True


def test_array_over_immutable_bytes_is_shared_not_copied() -> None:
    prompt = np.frombuffer(np.arange(1000, dtype=np.int32).tobytes(), np.int32)
    assert np.shares_memory(entry(prompt_token_ids=prompt).prompt_token_ids, prompt)
    made = entry(prompt_token_ids=np.arange(1000, dtype=np.int32))
    again = msgspec.structs.replace(made, model_call_id="c-2")
    assert np.shares_memory(again.prompt_token_ids, made.prompt_token_ids)


def test_given_arrays_stay_writable() -> None:
    given_arrays = arrays()
    entry(**given_arrays)
    assert all(given_array.flags.writeable for given_array in given_arrays.values())


def test_changing_given_lists_afterwards_changes_nothing() -> None:
    prompt, ids, log_probs, pieces = [5, 6, 7], [8, 9], [-0.5, None], [bytearray(b"a"), b"b"]
    made = entry(prompt_token_ids=prompt, generation_token_ids=ids, generation_log_probs=log_probs, pieces=pieces)
    prompt[0], ids[0], log_probs[0] = 99, 99, -99.0
    pieces[0][:] = b"z"  # type: ignore[index]
    pieces.append(b"c")
    assert made.prompt_token_ids.tolist() == [5, 6, 7]
    assert made.generation_token_ids.tolist() == [8, 9]
    assert made.generation_log_probs[0] == -0.5
    assert made.pieces == [b"a", b"b"]


def test_changing_given_contents_at_any_depth_afterwards_changes_nothing() -> None:
    deep = {"arguments": [{"path": "a"}]}
    items: list[Any] = [{"type": "message", "content": [deep]}]
    sampling: dict[str, Any] = {"temperature": 1.0, "stop": ["a"]}
    extra: dict[str, Any] = {"deep": deep}
    spans: list[Any] = [["v7", 0, 2]]
    made = entry(output_items=items, sampling=sampling, extra=extra, policy_versions=spans)
    before = canonical_contents(made)
    deep["arguments"][0]["path"] = "b"
    deep["more"] = []
    items[0]["type"] = "other"
    items.append({})
    sampling["stop"].append("b")
    extra["more"] = 1
    spans[0][0] = "v9"
    spans.append(["v9", 2, 3])
    assert canonical_contents(made) == before
    assert made.extra == {"deep": {"arguments": [{"path": "a"}]}}


@pytest.mark.parametrize("field", ["output_items", "policy_versions", "sampling", "extra"])
def test_filling_a_given_empty_container_afterwards_changes_nothing(field: str) -> None:
    container: Any = {} if field in ("sampling", "extra") else []
    made = entry(**{field: container})
    if isinstance(container, dict):
        container["a"] = 1
    else:
        container.append(["v", 0, 1])
    assert len(getattr(made, field)) == 0


def test_two_entries_share_no_default() -> None:
    one, other = entry(), entry()
    for field in ("output_items", "policy_versions", "sampling", "extra"):
        assert getattr(one, field) is not getattr(other, field)


def test_fields_cannot_be_assigned() -> None:
    made = entry()
    for field in made.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(made, field, getattr(made, field))


# ---- identity


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt_token_ids": [5, 6]}, {"prompt_token_ids": np.array([5, 6], np.uint64)}),
        ({"generation_log_probs": [None, -0.5]}, {"generation_log_probs": [math.nan, -0.5]}),
        (
            {"generation_log_probs": np.array([QUIET_NAN_BITS + 5, 0], np.uint64).view(np.float64)},
            {"generation_log_probs": [None, 0.0]},
        ),
        ({"generation_log_probs": np.array([-0.5, -0.25], np.float16)}, {"generation_log_probs": [-0.5, -0.25]}),
        ({"extra": {"a": 1, "b": {"c": 2, "d": 3}}}, {"extra": {"b": {"d": 3, "c": 2}, "a": 1}}),
        ({"extra": {"a": (1, 2)}}, {"extra": {"a": [1, 2]}}),
        ({"extra": {"a": math.nan}}, {"extra": {"a": -math.nan}}),
        ({"extra": {"\udc80": 2**70, "a": 1}}, {"extra": {"a": 1, "\udc80": 2**70}}),
        ({"output_items": [{"a": 1}]}, {"output_items": ({"a": 1},)}),
        ({"policy_versions": [("v", 0, 2)]}, {"policy_versions": [["v", 0, 2]]}),
        ({"pieces": [b"a", b"b"]}, {"pieces": (bytearray(b"a"), b"b")}),
        ({"created_at": 1}, {"created_at": 1.0}),
        ({"created_at": math.nan}, {"created_at": struct.unpack("<d", struct.pack("<Q", QUIET_NAN_BITS + 1))[0]}),
        ({"choice_index": 1}, {"choice_index": np.int16(1)}),
        ({"routed_experts": np.arange(6, dtype=np.uint8)}, {"routed_experts": np.arange(12, dtype=np.uint8)[:6]}),
        (
            {"routed_experts": np.array([[1, 2], [3, 4]], np.uint8)},
            {"routed_experts": np.array([[1, 3], [2, 4]], np.uint8).T},
        ),
    ],
)
def test_entries_that_say_the_same_are_identical(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identical(entry(**one), entry(**other))
    assert entry(**one) == entry(**other)
    assert hash(entry(**one)) == hash(entry(**other))
    assert canonical_contents(entry(**one)) == canonical_contents(entry(**other))


DIFFERENT: list[dict[str, Any]] = [
    {"rollout_id": "r-2"},
    {"model_call_id": "c-2"},
    {"choice_index": 1},
    {"prompt_token_ids": [5, 6, 8]},
    {"prompt_token_ids": [5, 6]},
    {"prompt_token_ids": [5, 6, 7, 0]},
    {"generation_token_ids": [9, 8]},
    {"generation_log_probs": [-0.5, np.nextafter(-0.25, 0.0)]},
    {"generation_log_probs": [-0.5, None]},
    {"generation_token_ids": [], "generation_log_probs": []},
    {"routed_experts": np.array([1, 2], np.uint8)},
    {"output_items": [{"type": "message"}]},
    {"output_items": [{}], "token_item_index": 0},
    {"model": "m"},
    {"response_id": "m"},
    {"finish_reason": "m"},
    {"created_at": 1.0},
    {"policy_versions": [("v", 0, 2)]},
    {"sampling": {"a": 1}},
    {"pieces": [b"a", b"b"]},
    {"pieces": []},
    {"extra": {"a": 1}},
]


@pytest.mark.parametrize("other", DIFFERENT, ids=[str(fields)[:60] for fields in DIFFERENT])
def test_a_difference_in_any_field_is_a_difference(other: dict[str, Any]) -> None:
    assert not identical(entry(), entry(**other))
    assert entry() != entry(**other)


def test_every_field_but_the_schema_version_is_covered_by_the_test_above() -> None:
    covered = {field for fields in DIFFERENT for field in fields}
    assert covered == set(TokenEntry.__struct_fields__) - {"schema_version"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"generation_log_probs": [0.0, 0.0]}, {"generation_log_probs": [0.0, -0.0]}),
        ({"created_at": 0.0}, {"created_at": -0.0}),
        ({"extra": {"a": 0.0}}, {"extra": {"a": -0.0}}),
        ({"extra": {"a": 1}}, {"extra": {"a": 1.0}}),
        ({"extra": {"a": 1}}, {"extra": {"a": True}}),
        ({"extra": {"a": None}}, {"extra": {}}),
        ({"output_items": [{"a": 1}, {"b": 2}]}, {"output_items": [{"b": 2}, {"a": 1}]}),
        ({"routed_experts": np.array([1, 2], np.uint8)}, {"routed_experts": np.array([1, 2], np.uint16)}),
        ({"routed_experts": np.array([1, 2], np.uint8)}, {"routed_experts": np.array([1, 2], np.int8)}),
        ({"routed_experts": np.array([1, 2], np.uint8)}, {"routed_experts": np.array([[1, 2]], np.uint8)}),
        ({"routed_experts": np.array([0.0])}, {"routed_experts": np.array([-0.0])}),
        ({"routed_experts": np.empty((0, 2))}, {"routed_experts": np.empty((2, 0))}),
        ({"model": "ab", "response_id": "c"}, {"model": "a", "response_id": "bc"}),
        ({"pieces": [b"ab", b""]}, {"pieces": [b"a", b"b"]}),
    ],
)
def test_near_equality_is_not_identity(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert not identical(entry(**one), entry(**other))
    assert not identical(entry(**other), entry(**one))


@given(st.lists(st.floats() | st.none(), min_size=1), st.data())
def test_log_probs_are_identical_if_and_only_if_their_bits_are(values: list[float | None], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.floats() | st.none(), min_size=len(values), max_size=len(values)))
    one, other = with_log_probs(values), with_log_probs(others)
    assert identical(one, with_log_probs(values))
    assert identical(one, other) == (bits(one.generation_log_probs) == bits(other.generation_log_probs))


def test_entry_is_equal_to_nothing_but_an_entry() -> None:
    assert entry() != "entry"
    assert entry() != tuple(getattr(entry(), field) for field in TokenEntry.__struct_fields__)


def full() -> TokenEntry:
    return entry(
        **arrays(),
        choice_index=1,
        output_items=[{"type": "message", "arguments": 2**70, "\udc80": ["\ud800", math.nan]}],
        token_item_index=0,
        model="m",
        response_id="chatcmpl-1",
        finish_reason="stop",
        created_at=1.5,
        policy_versions=[("v7", 0, 1), ("v8", 1, 2)],
        sampling={"temperature": 1.0},
        pieces=[b"a", b"\xff"],
        extra={"a": {"b": [1, None]}},
    )


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda made: pickle.loads(pickle.dumps(made)),
        lambda made: msgspec.structs.replace(made),
        lambda made: TokenEntry(**{field: getattr(made, field) for field in made.__struct_fields__}),
    ],
    ids=["copy", "deepcopy", "pickle", "replace", "made again"],
)
def test_copy_of_any_kind_is_identical_and_read_only(again: Callable[[TokenEntry], TokenEntry]) -> None:
    made = again(full())
    assert identical(made, full())
    for field in ARRAY_FIELDS:
        assert not getattr(made, field).flags.writeable


def test_repr_of_an_entry_can_be_printed() -> None:
    assert "r-1" in repr(full())


# ---- error messages


def test_message_names_rollout_call_choice_field_position_and_value() -> None:
    with pytest.raises(InvalidEntryError) as caught:
        entry(rollout_id="r-9", model_call_id="c-9", choice_index=3, prompt_token_ids=[1, 2, "x"])
    assert str(caught.value) == (
        "rollout r-9, call c-9, choice 3: prompt_token_ids[2] is 'x', a token id is an integer "
        "(not a bool, a string or a float)"
    )


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (np.array([1, -7]), "prompt_token_ids[1] is -7, outside 0..2147483647"),
        ([1, 2**40], "prompt_token_ids[1] is 1099511627776, outside 0..2147483647"),
        (np.array([1, 2**63], np.uint64), "prompt_token_ids[1] is 9223372036854775808, outside 0..2147483647"),
        (np.array([1.5]), "prompt_token_ids has dtype float64, token ids are integers"),
        (np.array([[1], [2]]), "prompt_token_ids has shape (2, 1), expected one dimension"),
        (DeviceTensor([1]), "can't convert cuda:0 device type tensor"),
    ],
)
def test_message_shows_what_is_wrong_with_the_ids(ids: Any, shown: str) -> None:
    with pytest.raises(InvalidEntryError) as caught:
        entry(prompt_token_ids=ids)
    assert shown in str(caught.value)


@pytest.mark.parametrize("wrong", ["x" * 100_000, [0] * 100_000, Hostile(), HUGE])
def test_message_stays_short_whatever_the_value(wrong: Any) -> None:
    for fields in ({"prompt_token_ids": [wrong]}, {"choice_index": wrong}, {"model": [wrong]}, {"created_at": [wrong]}):
        with pytest.raises(InvalidEntryError) as caught:
            entry(**fields)
        assert len(str(caught.value)) < 300


def test_refusal_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids"):
        entry(prompt_token_ids=["1"])


def test_equal_and_unequal_never_both_hold() -> None:
    one, same = (TokenEntry("rollout", "call", [1, 2], [3], [None]) for _ in range(2))
    other = TokenEntry("rollout", "call", [1, 2], [3], [-0.5])
    for right, equal in ((same, True), (other, False), ("something else", False)):
        assert operator.eq(one, right) is equal
        assert operator.ne(one, right) is not equal
