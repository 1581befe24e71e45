"""Pairs of exchanges with vLLM 0.32, as a client asked and with what capture adds, under the same seed.

One JSON object a line in `tests/exchanges/*.jsonl.gz`: `name`, `path`, `request` and `plain`; pairs also have
`request_with_flags` and `with_flags`. An answer has `status`, `headers` and `body`, or the `chunks` of a stream.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokcap.capture.shapes import EventSplitter

__all__ = ("comparable", "events_of", "exchange", "names", "pairs")

DIRECTORY = Path(__file__).parent / "exchanges"

_OF_ONE_CALL = ("id", "created", "created_at", "request_id")


@cache
def _load(file: str) -> dict[str, dict[str, Any]]:
    with gzip.open(DIRECTORY / f"vllm-0.32-{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return {each["name"]: each for each in map(json.loads, lines)}


def exchange(file: str, name: str) -> dict[str, Any]:
    """One of them."""
    return _load(file)[name]


def names(file: str) -> list[str]:
    """Of everything in a file: `chat`, `completions`, `generate`, `dialects`, `errors`."""
    return list(_load(file))


def pairs(*files: str) -> Iterator[tuple[str, str]]:
    """File and name of every pair."""
    for file in files:
        yield from ((file, name) for name, each in _load(file).items() if "with_flags" in each)


def events_of(chunks: list[str]) -> list[Any]:
    """The decoded events of a stream, `[DONE]` as text."""
    splitter = EventSplitter()
    payloads = [payload for chunk in chunks for _, payload in splitter.feed(chunk.encode())]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def comparable(value: Any) -> Any:
    """With the order of members, without what differs between any two calls."""
    if isinstance(value, dict):
        return [(key, comparable(each)) for key, each in value.items() if key not in _OF_ONE_CALL]
    if isinstance(value, list):
        return [comparable(each) for each in value]
    return value
