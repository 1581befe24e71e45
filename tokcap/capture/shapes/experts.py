"""Routed experts of mixture models, in the envelopes in which engines send them.

They never cost the token record: what can't be read is left out, and a note says why.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .places import as_dict, count

__all__ = ("Experts", "read_experts")

_PREFIXED = re.compile(r"nrlre1:([a-z]+[0-9]+):([0-9]+(?:x[0-9]+)*):", re.ASCII)
_NPY = b"\x93NUMPY"


class Experts(msgspec.Struct, eq=False):
    """Routed experts as read: the array, or a note on why there is none."""

    array: npt.NDArray[Any] | None
    form: str
    """`npy`, `raw-int32`, `nested`, `nrlre1` or `envelope`."""
    start: int | None = None
    """The position of the sequence to which the first row belongs, if the envelope says so."""
    note: str = ""

    def notes(self, positions: int) -> dict[str, Any]:
        """What `extra` says about them, for a sequence of `positions` ids (prompt and generation)."""
        found: dict[str, Any] = {"routed_experts_form": self.form}
        if self.start is not None:
            found["routed_experts_start"] = self.start
        note = self.note
        if self.array is not None and self.array.ndim == 3:
            # The last sampled token went through no layer yet; some servers pad its row.
            rows = self.array.shape[0] + (self.start or 0)
            if self.start is not None and rows not in (positions - 1, positions):
                note = f"rows {self.start} to {rows} for {positions} ids"
            elif rows > positions:
                note = f"{rows} rows for {positions} ids"
        return {**found, "routed_experts_note": note} if note else found


def read_experts(value: object, prompt_part: object = None) -> Experts | None:
    """The array in any of the known envelopes; None if there is nothing.

    `prompt_part`: rows of the prompt, where the engine gives them apart (vLLM 0.21).
    """
    if value is None:
        return None
    form = _form(value)
    try:
        if form == "nested":
            array = _nested(value)
            if prompt_part is not None:
                array = np.concatenate([_nested(prompt_part), array])
            return Experts(array, form)
        if form == "envelope":
            envelope = as_dict(value)
            array = _shaped(str(envelope["data"]), str(envelope["dtype"]), envelope["shape"])
            return Experts(array, form, count(envelope.get("start")))
        if form == "nrlre1":
            head = _PREFIXED.match(str(value))
            if head is None:
                return Experts(None, form, note="the head of the string can't be read")
            shape = [int(number) for number in head[2].split("x")]
            return Experts(_shaped(str(value)[head.end() :], head[1], shape), form)
        data = base64.b64decode(str(value), validate=True)
        if data.startswith(_NPY):
            return Experts(_integers(np.load(io.BytesIO(data), allow_pickle=False)), "npy")
        if form == "base64":
            array = np.frombuffer(data, dtype="<i4")
            return Experts(array, "raw-int32", note="no shape given: reshape to (rows, layers, experts per token)")
    except Exception as error:  # whatever numpy says to bytes that are no array; the token record must not suffer
        return Experts(None, form, note=f"unreadable: {type(error).__name__}: {error}"[:200])
    return Experts(None, form, note="unknown form")


def _form(value: object) -> str:
    if isinstance(value, str):
        return "nrlre1" if value.startswith("nrlre1:") else "base64"
    if isinstance(value, list):
        return "nested"
    return "envelope" if isinstance(value, dict) else type(value).__name__


def _nested(value: object) -> npt.NDArray[Any]:
    array = _integers(np.asarray(value))
    narrow = array.astype(np.int32)
    return narrow if np.array_equal(narrow, array) else array


def _shaped(data: str, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    if not shape or any(count(size) is None for size in shape):  # numpy would fill in a negative size by itself
        raise ValueError(f"shape {shape}")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype=np.dtype(dtype))
    return _integers(array.reshape(shape))


def _integers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "iu":
        raise ValueError(f"dtype {array.dtype} instead of integers")
    return array
