"""Long prompt ids out of the bytes of an answer as an array, without a Python integer for each of them.

The ids of a prompt are most of an answer: of 16,000 a list takes more time to be made, read and freed than everything
else. They are only lifted where they stand as engines write them; everything else is decoded as usual, with the same
result.
"""

from __future__ import annotations

from typing import Any

from .events import decode_json
from .id_texts import ids_of
from .recent import PromptReader

__all__ = ("decode_answer", "lift")

_MEMBER = b'"prompt_token_ids":'
_IN_PLACE = "ids were here"
_LEAST = 4096
"""Bytes below which a list is as fast."""


def decode_answer(body: bytes, read: PromptReader = ids_of) -> Any:
    """The value of a JSON document as `decode_json` gives it, but for long `prompt_token_ids` of the root or of its
    choices, which are a read-only int32 array. Raises `ValueError`."""
    return lift(body, read)[0]


def lift(body: bytes, read: PromptReader = ids_of) -> tuple[Any, bytes]:
    """`decode_answer`, and the document without the ids that were lifted: all else that it says."""
    # Within a string the quote would have a backslash before it.
    at = body.find(_MEMBER)
    start = at + len(_MEMBER)
    if at < 1 or body[at - 1] not in b"{," or body[start : start + 1] != b"[":
        return decode_json(body), body
    end = body.find(b"]", start)
    if end - start < _LEAST or body.find(_MEMBER, end) >= 0:
        return decode_json(body), body
    ids = read(body[start + 1 : end])
    if ids is None:
        return decode_json(body), body
    rest = b'%b"%b"%b' % (body[:start], _IN_PLACE.encode(), body[end + 1 :])
    payload = decode_json(rest)
    choices = payload.get("choices") if isinstance(payload, dict) else None
    for owner in (payload, *(choices if isinstance(choices, list) else ())):
        if isinstance(owner, dict) and owner.get("prompt_token_ids") == _IN_PLACE:
            owner["prompt_token_ids"] = ids
            return payload, rest
    return decode_json(body), body
