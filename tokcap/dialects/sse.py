"""Server-sent events as both dialects write them: named, one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ("event",)


def event(data: Mapping[str, Any]) -> bytes:
    """One event under the name in `data["type"]`, with the blank line that ends it.

    Integers of any size and lone surrogates are written as JSON has them.
    """
    try:
        body = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8, but it has an escape
        body = json.dumps(data, separators=(",", ":")).encode()
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + body + b"\n\n"
