"""What a parser makes of an answer, and how a shape of answers describes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...arrays import IdArray

__all__ = ("Asked", "ParsedAnswer", "ParsedChoice", "Shape")


class Asked(msgspec.Struct, frozen=True):
    """What is known of the request while its answer is read."""

    choices: int = 1
    """How many choices were asked for: `n`, times the number of prompts."""
    path: str = ""
    """Where the request went; only for messages."""
    partial: bool = False
    """The answer was cut off: what is there counts, and nothing has to be complete."""


class ParsedChoice(msgspec.Struct, eq=False):
    """One choice of an answer, with everything that its training record needs."""

    choice_index: int
    prompt_token_ids: IdArray
    """int32 [P], as the engine reports them."""
    generation_token_ids: IdArray
    """int32 [G], as the engine reports them; the stop token is there if the engine gives it."""
    generation_log_probs: list[float | None]
    """[G]: of the sampled token at each position; None or NaN where the engine gives none. Never padded with 0.0."""
    log_probs_present: bool
    """False: the answer has no log-probs at all; then all of them are None."""
    finish_reason: str = ""
    """As the engine calls it: an open set. Empty if it gave none."""
    stop_reason: Any = None
    """What stopped it, where the engine tells: a token id, a string, or None."""
    output_items: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """The content as Responses output items, without token arrays."""
    token_item_index: int | None = None
    """Which of `output_items` carried the arrays, else the last one; None without items."""
    policy_versions: list[tuple[Any, int, int]] = msgspec.field(default_factory=list)
    """Spans (version, start, end) that cover the generation without gaps, as the engine reports them; else empty."""
    pieces: list[bytes] | None = None
    """[G]: the bytes of each sampled token, only if all of them can be trusted."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """Integers [rows, layers, k]; [N] where the engine gives no shape (then `extra` says so)."""
    clamped: list[int] = msgspec.field(default_factory=list)
    """Positions with the log-prob -9999.0, which stands for -inf or for a missing one."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """What else the engine tells: sampling masks, weight labels, notes on the routed experts."""


class ParsedAnswer(msgspec.Struct, eq=False):
    """An answer of a model server, read."""

    choices: list[ParsedChoice]
    """By `choice_index`; empty if the answer carries no ids."""
    model: str = ""
    response_id: str = ""
    """The id that the client sees."""
    created_at: float = 0.0
    """Unix seconds, 0.0 if the engine doesn't tell."""
    usage_completion_tokens: int | None = None
    """How many tokens the engine says it sampled, over all choices; None if it doesn't tell."""
    usage_prompt_tokens: int | None = None
    shape: str = ""
    """Name of the shape in `SHAPES`; empty without ids."""
    id_sources: tuple[str, ...] = ()
    """The places where ids were found; all of them agree."""
    evidence: str = "none"
    """`ids`, or `none`: then no record can be made of the answer, because ids are never made from text."""


class Shape(msgspec.Struct, frozen=True):
    """One way in which an engine puts ids into its answers."""

    name: str
    engine: str
    versions: str
    """First version in which it was seen."""
    route: str
    prompt_ids: str
    """Where the prompt ids are."""
    sampled_ids: str
    log_probs: str
    matches: Callable[[Any], bool]
    """Whether a payload has this shape. Takes anything that JSON can hold and never raises."""
    parse: Callable[[Any, Asked, str], ParsedAnswer]
    """Reads a payload that matches; the last argument is the name of the shape. Raises `UnusableAnswerError`."""
