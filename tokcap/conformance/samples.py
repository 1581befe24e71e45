"""Entries to write, and how to say in what two entries differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..entry import TokenEntry, canonical_contents, identical

__all__ = ("difference", "entry_of", "full_entry", "ids_of", "key_of", "log_probs_of")

VOCABULARY = 150_000
_ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")


def ids_of(name: str, count: int) -> list[int]:
    """`count` token ids that are the same for the same name, and others for another name."""
    numbers: list[int] = np.random.default_rng(zlib.crc32(name.encode())).integers(2, VOCABULARY, count).tolist()
    return numbers


def log_probs_of(name: str, count: int) -> list[float]:
    """`count` log-probs, the same for the same name; as most engines give them, float32 holds them exactly."""
    numbers: list[float] = np.random.default_rng(zlib.crc32(name.encode()) ^ 1).random(count, np.float32).tolist()
    return [-number for number in numbers]


def entry_of(
    rollout_id: str,
    model_call_id: str,
    *,
    content: str = "",
    prompt: Sequence[int] | npt.NDArray[Any] | None = None,
    generation: Sequence[int] | npt.NDArray[Any] | None = None,
    log_probs: Sequence[float | None] | npt.NDArray[Any] | None = None,
    **fields: Any,
) -> TokenEntry:
    """An entry whose tokens follow from its ids and `content`, unless they are given."""
    name = f"{rollout_id}/{model_call_id}/{fields.get('choice_index', 0)}/{content}"
    generated = ids_of(f"{name}/generation", 8) if generation is None else generation
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=ids_of(f"{name}/prompt", 24) if prompt is None else prompt,
        generation_token_ids=generated,
        generation_log_probs=log_probs_of(name, len(generated)) if log_probs is None else log_probs,
        **fields,
    )


def full_entry(rollout_id: str, model_call_id: str) -> TokenEntry:
    """An entry with every field set to something that a careless codec changes."""
    return entry_of(
        rollout_id,
        model_call_id,
        routed_experts=np.arange(8 * 3 * 2, dtype=np.uint8).reshape(8, 3, 2),
        choice_index=3,
        output_items=[
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "message", "content": [{"type": "output_text", "text": 'tab\t quote" nul\x00 é \U0001f600'}]},
        ],
        token_item_index=1,
        model="policy/step-17",
        response_id="resp_0123",
        finish_reason="stop",
        created_at=1_700_000_000.123456,
        policy_versions=[("17", 0, 5), ("18", 5, 8)],
        sampling={"temperature": 1.0, "top_k": -1, "top_p": 0.1 + 0.2, "log_probs": "raw", "stop": []},
        pieces=[b"", b"\x00", b"\xff\xfe", b"\xf0\x9f", b"\x98\x80", b" a", b"\n", b"</s>"],
        extra={"nested": {"list": [1, 2.5, None, True, {"deep": []}]}, "": "empty key", "float": 1.0, "int": 1},
    )


def key_of(entry: TokenEntry) -> tuple[str, int]:
    """What identifies an entry in its rollout."""
    return entry.model_call_id, entry.choice_index


def difference(seen: TokenEntry, expected: TokenEntry) -> str:
    """In what `seen` differs from `expected`, in words; empty if they are identical."""
    if identical(seen, expected):
        return ""
    for field in _ARRAYS:
        found = _array_difference(field, getattr(seen, field), getattr(expected, field))
        if found:
            return found
    for field in TokenEntry.__struct_fields__:
        if field not in _ARRAYS and getattr(seen, field) != getattr(expected, field):
            return f"{field} is {_shown(getattr(seen, field))} instead of {_shown(getattr(expected, field))}"
    if canonical_contents(seen) != canonical_contents(expected):
        return "the contents (output_items, policy_versions, sampling, extra ...) encode to other bytes"
    return "the entries are not identical"


def _array_difference(field: str, seen: Any, expected: Any) -> str:
    if seen is None or expected is None:
        return "" if seen is expected else f"{field} is {_shown(seen)} instead of {_shown(expected)}"
    if not isinstance(seen, np.ndarray):
        return f"{field} is a {type(seen).__name__} instead of an array"
    if seen.dtype != expected.dtype or seen.shape != expected.shape:
        return f"{field} is {seen.dtype} {seen.shape} instead of {expected.dtype} {expected.shape}"
    if seen.size == 0:
        return ""
    rows = seen.reshape(-1), expected.reshape(-1)
    size = seen.dtype.itemsize
    bits = [np.ascontiguousarray(row).view(np.uint8).reshape(-1, size) for row in rows]
    wrong = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    if not wrong.size:
        return ""
    first = int(wrong[0])
    return (
        f"{field} differs at {wrong.size} of {seen.size} positions, first at {first}: "
        f"{rows[0][first].item()!r} instead of {rows[1][first].item()!r}"
    )


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 160 else f"{text[:140]}... ({len(text)} characters)"
