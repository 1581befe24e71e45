"""Long prompt ids out of the bytes of an answer as an array, without a Python integer for each of them.

The ids of a prompt are most of an answer: of 16,000 a list takes more time to be made, read and freed than everything
else. They are only lifted where they stand as engines write them; everything else is decoded as usual, with the same
result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays import IdArray
from .events import decode_json

__all__ = ("decode_answer",)

_MEMBER = b'"prompt_token_ids":'
_IN_PLACE = "ids were here"
_LEAST = 4096
"""Bytes below which a list is as fast."""
_MOST_DIGITS = 10
_LARGEST = 2**31 - 1


def decode_answer(body: bytes) -> Any:
    """The value of a JSON document as `decode_json` gives it, but for long `prompt_token_ids` of the root or of its
    choices, which are a read-only int32 array. Raises `ValueError`."""
    # Within a string the quote would have a backslash before it.
    at = body.find(_MEMBER)
    start = at + len(_MEMBER)
    if at < 1 or body[at - 1] not in b"{," or body[start : start + 1] != b"[":
        return decode_json(body)
    end = body.find(b"]", start)
    if end - start < _LEAST or body.find(_MEMBER, end) >= 0:
        return decode_json(body)
    ids = _ids_of(body[start + 1 : end])
    if ids is None:
        return decode_json(body)
    payload = decode_json(b'%b"%b"%b' % (body[:start], _IN_PLACE.encode(), body[end + 1 :]))
    choices = payload.get("choices") if isinstance(payload, dict) else None
    for owner in (payload, *(choices if isinstance(choices, list) else ())):
        if isinstance(owner, dict) and owner.get("prompt_token_ids") == _IN_PLACE:
            owner["prompt_token_ids"] = ids
            return payload
    return decode_json(body)


def _ids_of(text: bytes) -> IdArray | None:
    """int32 [N] of digits and commas; None for anything that isn't exactly a list of ids as JSON has them."""
    if text.translate(None, b"0123456789,"):
        return None
    characters = np.frombuffer(text, dtype=np.uint8)
    commas = np.flatnonzero(characters == ord(","))
    starts = np.concatenate(([0], commas + 1))
    digits = np.concatenate((commas, [len(text)])) - starts
    if digits.min() < 1 or digits.max() > _MOST_DIGITS:
        return None
    if ((characters[starts] == ord("0")) & (digits > 1)).any():
        return None
    ids = np.fromstring(text, dtype=np.int64, sep=",")
    if len(ids) != len(starts) or ids.max() > _LARGEST:
        return None
    lifted: IdArray = ids.astype(np.int32)
    lifted.flags.writeable = False
    return lifted
