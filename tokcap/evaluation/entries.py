"""How a summary lies in the evaluation store: an entry without tokens, whose `extra` holds it.

The store is a `FileStore` in the directory `evaluation` under `model_call_capture_dir`: its frames, durability, fences
and states are those of the token store, and neither looks into the other. A call gives two entries:

| `choice_index` | written | holds |
|---|---|---|
| 2 x | when the call begins, with its intent (`choices=2`) | what is known then, `outcome="open"` |
| 2 x + 1 | when it ends | all of it |

x is random, so that a model call id that comes twice gives two summaries in place of a conflict.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..entry import TokenEntry
from .summary import ModelCallSummary

__all__ = ("OCCURRENCES", "SUMMARY_KEY", "entry_of", "evaluation_directory", "occurrence_of", "summary_of")

logger = logging.getLogger("tokcap.evaluation")

SUMMARY_KEY = "model_call_summary"
"""Where in `extra` a summary is: its fields by name, without the two ids, and without those that have their default."""

OCCURRENCES = 2**30
"""x is below this."""

_NO_IDS = np.empty(0, np.int32)
_NO_LOG_PROBS = np.empty(0, np.float64)


def evaluation_directory(directory: str | os.PathLike[str]) -> Path:
    """Where evaluation records lie under `model_call_capture_dir`."""
    return Path(os.path.abspath(directory)) / "evaluation"


def entry_of(summary: ModelCallSummary, occurrence: int) -> TokenEntry:
    """What is stored of a summary. Raises `InvalidIdError` for ids that can't be."""
    fields: dict[str, Any] = msgspec.to_builtins(summary)
    del fields["rollout_id"], fields["model_call_id"]
    return TokenEntry(
        summary.rollout_id,
        summary.model_call_id,
        _NO_IDS,
        _NO_IDS,
        _NO_LOG_PROBS,
        choice_index=2 * occurrence + (not summary.is_open),
        created_at=summary.began_at,
        extra={SUMMARY_KEY: fields},
    )


def occurrence_of(entry: TokenEntry) -> int:
    """Which of the calls with this id it is of."""
    return entry.choice_index // 2


def summary_of(entry: TokenEntry) -> ModelCallSummary | None:
    """The summary in an entry; None, which is logged, if there is none, or none that this version can read."""
    ids = {"rollout_id": entry.rollout_id, "model_call_id": entry.model_call_id}
    try:
        return msgspec.convert({**entry.extra[SUMMARY_KEY], **ids}, ModelCallSummary)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        logger.warning(
            "rollout %s, call %s: an entry of the evaluation store holds no summary that can be read: %s",
            entry.rollout_id,
            entry.model_call_id,
            error,
        )
        return None
