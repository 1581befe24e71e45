"""Whether log-probs are those of the distribution that was sampled from (rule 21)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import FloatArray

__all__ = ("is_behaviour", "log_prob_mode", "unknown_log_probs")

SENTINEL = -9999.0
"""OpenAI-style servers write it for a clamped -inf and for a missing entry alike (vLLM's protocol default)."""

POSITIVE_BEYOND_ROUNDING = 1e-5
"""Natural log. A float32 softmax of a probability near 1 gives up to about 1e-6; more is no log-prob."""

_GRAMMAR = (
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
)
"""Parameters that forbid tokens or move their logits; values that mean "off" are in `_OFF`."""

_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_TRUNCATION = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}
_OFF: tuple[Any, ...] = (None, "", False, 0, (), [], {}, {"type": "text"})


def unknown_log_probs(log_probs: FloatArray) -> npt.NDArray[np.bool_]:
    """bool [G]: positions whose log-prob is unknown or can't be one.

    NaN, ±inf, the sentinel or below, positive beyond rounding.
    """
    with np.errstate(invalid="ignore"):
        return ~((log_probs > SENTINEL) & (log_probs <= POSITIVE_BEYOND_ROUNDING))


def log_prob_mode(sampling: Mapping[str, Any]) -> str:
    """The mode that was recorded with the call (`logprobs_mode`), or empty."""
    mode = sampling.get("logprobs_mode")
    return mode if isinstance(mode, str) and mode != "unknown" else ""


def is_behaviour(sampling: Mapping[str, Any]) -> bool | None:
    """True or False if it is known whether the log-probs are the sampling distribution; None if it isn't.

    Raw modes are taken before temperature, penalties, grammar and truncation (vLLM `--logprobs-mode`), so they are
    the distribution only where none of these is in use. `processed_logprobs` is taken after all of them. Logits are
    no log-probs. SGLang's default is taken after temperature alone.
    """
    mode = log_prob_mode(sampling)
    if not mode:
        return None
    if mode in ("raw_logits", "processed_logits"):
        return False
    if mode == "processed_logprobs":
        return True
    changed = any(sampling.get(key) not in _OFF for key in _GRAMMAR)
    changed |= any(sampling.get(key, off) not in (off, None) for key, off in _PENALTIES.items())
    changed |= any(sampling.get(key) not in (None, *off) for key, off in _TRUNCATION.items())
    if mode == "raw_logprobs":
        temperature = sampling.get("temperature")
        if changed or temperature not in (1, None):
            return False
        return None if temperature is None else True  # the server's default is not known here
    if mode == "sglang":
        return False if changed else None
    return None
