"""The numbered lines and the table rows of the list of serving situations, and which test is about which.

The texts are the first words of each, for messages; the list itself is binding for the middleware and the proxy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ("LINES", "ROWS", "covered", "covers", "covers_row")

LINES = {
    1: "pattern of the URL, parsed on raw_path after root_path",
    2: "the URL decides about capture",
    3: "rollout_base_url",
    4: "redirects keep the prefix",
    5: "evaluation capture",
    6: "no lifespan event; the server's own key check",
    7: "one table of generating and non-generating routes",
    8: "intent, then forward; unknown routes",
    9: "the server's key is checked before the intent",
    10: "intent that can't be written, frozen, retired, bad id, body over the limit",
    11: "streams flow, and are held from the last finish reason on",
    12: "what is asked of the engine",
    13: "what the client sees",
    14: "encodings",
    15: "keep-alive and back-pressure",
    16: "x-tokcap-call-id",
    17: "sampling parameters and log-probs mode",
    18: "policy versions",
    19: "retry count, idempotency key, digests, pieces, response id, engine",
    20: "images",
    21: "routes and metrics of the proxy",
    22: "graceful stop",
}

ROWS = (
    "2xx with ids and log-probs",
    "4xx, 429, context overflow, 5xx before anything was sampled",
    "`usage.completion_tokens: 0`",
    "2xx without ids; ids on some choices only; two sources of ids that disagree; fewer ids than",
    "log-probs missing for some positions, null or NaN",
    "log-probs missing altogether",
    "500 after sampling",
    "answer that is not JSON, empty 200",
    "stream with an error event, or that just ends",
    "client disconnects while streaming",
    "client disconnects before the answer of a non-streamed call",
    "client seen gone only after the last body message",
    "put fails after generation",
    "handler raises",
    "After generation tokcap never turns an answer into an error.",
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_covered: dict[int | str, list[str]] = {}


def covers(*lines: int) -> Callable[[_Function], _Function]:
    """This test or situation is about these numbered lines."""
    return _note(*lines)


def covers_row(*rows: str) -> Callable[[_Function], _Function]:
    """This test or situation is about these rows of the table of answers."""
    return _note(*rows)


def covered() -> dict[int | str, list[str]]:
    """Line or row -> the names of what is about it, of the modules that were imported."""
    return _covered


def _note(*keys: int | str) -> Callable[[_Function], _Function]:
    for key in keys:
        if key not in LINES and key not in ROWS:
            raise ValueError(f"there is no line or row {key!r}")

    def note(function: _Function) -> _Function:
        for key in keys:
            _covered.setdefault(key, []).append(function.__name__)
        return function

    return note
