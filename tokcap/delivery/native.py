"""Token ids that a record brought along itself, held against what was captured (rule 24)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray
from ..entry import TokenEntry

__all__ = ("carries_native_ids", "equal_capture", "native_items")

_TOLERANCE = 1e-6
"""Absolute and relative: what a log-prob loses when it is written as text."""

_Wide = npt.NDArray[np.int64]


class _Native(msgspec.Struct, eq=False):
    """One item with ids of its own."""

    prompt: _Wide
    generated: _Wide
    log_probs: FloatArray


def native_items(response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The output items, or chat messages, that carry sampled ids of their own; a single id is enough."""
    found = list(_mappings(response.get("output")))
    for choice in _mappings(response.get("choices")):
        message = choice.get("message")
        if isinstance(message, Mapping):
            found.append(message)
    return [item for item in found if _filled(item.get("generation_token_ids"))]


def carries_native_ids(response: object) -> bool:
    """Whether a record's response has any."""
    return isinstance(response, Mapping) and bool(native_items(response))


def equal_capture(
    items: Iterable[Mapping[str, Any]], entries: Iterable[TokenEntry], chain: Collection[tuple[str, int]]
) -> bool:
    """Whether every one of these items is a captured call, each another one, and no call of the chain is missing.

    Compared are prompt ids, sampled ids and log-probs (within 1e-6; unknown equals unknown).
    chain: (model_call_id, choice_index) of the calls that the record must show.
    """
    unmatched: dict[bytes, list[_Native]] = defaultdict(list)
    left = 0
    for item in items:
        native = _read(item)
        if native is None:
            return False
        unmatched[native.generated.tobytes()].append(native)
        left += 1
    all_natives = {key: list(natives) for key, natives in unmatched.items()}
    shown: set[tuple[str, int]] = set()
    for entry in entries:
        key = entry.generation_token_ids.astype(np.int64).tobytes()
        if key not in all_natives:
            continue
        prompt = entry.prompt_token_ids
        if any(np.array_equal(native.prompt, prompt) for native in all_natives[key]):
            shown.add((entry.model_call_id, entry.choice_index))
        for native in unmatched[key]:
            if np.array_equal(native.prompt, prompt) and _close(native.log_probs, entry.generation_log_probs):
                unmatched[key] = [other for other in unmatched[key] if other is not native]
                left -= 1
                break
    return left == 0 and shown.issuperset(chain)


def _read(item: Mapping[str, Any]) -> _Native | None:
    prompt, generated = _ids(item.get("prompt_token_ids")), _ids(item.get("generation_token_ids"))
    try:
        log_probs = np.array(item.get("generation_log_probs"), np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        return None
    if prompt is None or generated is None or log_probs.shape != generated.shape:
        return None
    return _Native(prompt, generated, log_probs)


def _ids(value: Any) -> _Wide | None:
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, (str, bytes)):
        return None
    try:
        ids = np.array(value)
    except (TypeError, ValueError):
        return None
    if not ids.size:
        return np.empty(0, np.int64)
    return ids.astype(np.int64) if ids.ndim == 1 and ids.dtype.kind in "iu" else None


def _close(one: FloatArray, other: FloatArray) -> bool:
    return len(one) == len(other) and bool(np.isclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True).all())


def _filled(value: Any) -> bool:
    # Schemas put an empty list, or null, where there is nothing.
    return len(value) > 0 if hasattr(value, "__len__") else value is not None and value is not False


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [item for item in value if isinstance(item, Mapping)]
    return []
