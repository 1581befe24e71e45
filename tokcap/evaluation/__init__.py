"""Evaluation capture: a summary of every model call, without its content and its tokens.

`EvaluationRecorder` writes them, `summaries` reads them; `join` finds the training records of the same calls.
"""

from __future__ import annotations

from .error_class import ERROR_CLASSES
from .reading import join, summaries, summaries_of
from .recorder import CallObservation, EvaluationRecorder
from .summary import ModelCallSummary, TokenUsage

__all__ = (
    "ERROR_CLASSES",
    "CallObservation",
    "EvaluationRecorder",
    "ModelCallSummary",
    "TokenUsage",
    "join",
    "summaries",
    "summaries_of",
)
