"""Changing the JSON of a request or an answer, and nothing in it that need not change."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ("encode_json", "with_members")

_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")


def encode_json(value: Any, original: bytes = b"") -> bytes:
    """JSON of what `decode_json` gave: numbers of any size, NaN and lone surrogates included.

    original: the JSON that it was made from, which shows whether numbers are in it that JSON has none for.
    """
    if b"NaN" not in original and b"Infinity" not in original:
        try:
            return msgspec.json.encode(value)
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError):
            pass
    return json.dumps(value, separators=(",", ":")).encode()


def with_members(body: bytes, request: Mapping[str, Any], members: Mapping[str, Any]) -> bytes:
    """The body of a request with these members set: before its own bytes if it has none of them, else made anew.

    request: the decoded body.
    """
    if not members:
        return body
    opening = _OPENING.match(body)
    if opening is not None and not any(key in request for key in members):
        added = encode_json(dict(members))[1:-1]
        return body[: opening.end()] + added + (b"," if request else b"") + body[opening.end() :]
    return encode_json({**request, **members}, body)
