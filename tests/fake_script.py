"""What the scripted engine is to do with one request: told by the request itself, so that it works over any transport.

A `Script` travels as JSON in the header `x-fake-script`, or as the text of the last message behind `fake-script:`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ("HEADER", "Choice", "Script", "choice", "script_of")

HEADER = "x-fake-script"
MARK = "fake-script:"

PROMPT = (151644, 872, 198, 13048)


class Choice(msgspec.Struct, omit_defaults=True):
    """One answer that the engine samples: as many texts and log-probs as ids."""

    ids: list[int]
    texts: list[str]
    log_probs: list[float | None]
    """None: the engine has NaN there; -9999.0 is written as it is."""
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    swallowed: list[int] = []
    """Positions whose text the tool or reasoning parser keeps back: their chunk has an empty delta."""
    reasoning: int = 0
    """How many tokens at the beginning are reasoning."""
    tool_calls: list[dict[str, Any]] = []
    missing: list[int] = []
    """Positions that the engine forgets when it reports ids, although it counts them in the usage."""


def choice(first: int = 1000, count: int = 4, **other: Any) -> Choice:
    """Tokens that tell where they are from: ids from `first` upwards, and a log-prob of their own each."""
    return Choice(
        ids=list(range(first, first + count)),
        texts=[f"w{first + i} " for i in range(count)],
        log_probs=[-(first % 97 + i + 1) / 64 for i in range(count)],
        **other,
    )


class Script(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """One request and what becomes of it. The defaults are an engine that behaves."""

    label: str = ""
    """Under this name the engine tells afterwards what it saw."""
    engine: str = "vllm"
    """Whose dialect and flags: vllm (0.32) or sglang (0.5.23)."""
    prompt: list[int] = msgspec.field(default_factory=lambda: list(PROMPT))
    choices: list[Choice] = msgspec.field(default_factory=lambda: [choice()])
    """For `n` choices they are taken in turn, with other ids when they are used up."""

    # ---- what it says
    ignores: list[str] = []
    """Flags that this engine does not know: `return_token_ids`, `logprobs`, `include_usage` ..."""
    ids_on: list[int] | None = None
    """Only these choices carry ids."""
    disagreeing: bool = False
    """A second source of ids, at the message, says others."""
    null_log_probs: bool = False
    """Log-probs are asked for and given as null as a whole."""
    literal_nan: bool = False
    """NaN is written as `NaN`, which is no JSON."""
    completion_tokens: int | None = None
    """What the usage says, in place of the count."""
    usage: bool = True
    order: list[int] = []
    """In which order the choices stand in an answer that is not streamed."""
    extra: dict[str, Any] = {}
    """Put into the root of an answer that is not streamed."""
    weight_versions: list[dict[str, Any]] = []
    """Spans, told on request only (vLLM from 0.33)."""

    # ---- another answer than that of the route
    status: int = 0
    """If it is not 0: this status, with `body`, after the request was read."""
    body: str | None = None
    """The body, as it is (UTF-8); with status 0, that of a 200 after generation."""
    content_type: str = "application/json"
    headers: list[tuple[str, str]] = []
    """Further headers of the answer."""
    redirect: str = ""
    """A 307 to there."""
    gzip: bool = False
    """The answer is compressed, whatever was accepted."""

    # ---- how a stream is made
    per_chunk: int = 1
    """Tokens in a chunk."""
    comments: bool = False
    """`: keep-alive` before the first event and between events."""
    empty_deltas: bool = False
    """A chunk without text and ids after each; a choice of no tokens has a chunk, too (vLLM sends none)."""
    incremental: bool = False
    """SGLang `/generate`: deltas in place of cumulative events."""
    line_end: str = "\n"
    cut: int = 0
    """Bytes in a body message; 0: an event in each; -1: everything in one message."""
    done: bool = True
    """Whether `[DONE]` is sent."""
    stops_after: int = -1
    """The stream just ends after so many events."""
    error_after: int = -1
    """An error event after so many events, then `[DONE]`."""
    raises_after: int = -1
    """The handler raises after so many events."""
    last_more: bool = True
    """Whether an empty last body message follows the last event."""

    # ---- when
    reads: str = "first"
    """The body of the request: first or never."""
    waits: list[str] = []
    """Where it stands still until it is told to go on (`Notebook.tell`): `body`, `answer`, or the number of events."""
    raises: str = ""
    """The handler raises: `early` (nothing was read) or `late` (it may have sampled)."""
    deaf: bool = False
    """It takes no notice of a client that goes away."""
    gone: str = ""
    """The body of the 200 that it makes when the client of a call that is not streamed goes away."""

    def header(self) -> tuple[str, str]:
        """As a header of a request."""
        return HEADER, json.dumps(msgspec.to_builtins(self))  # in ASCII, as headers are

    def waits_at(self, place: str | int) -> bool:
        return str(place) in self.waits


def script_of(headers: Mapping[str, str], body: Any = None) -> Script:
    """The script of a request: of its header, else of its last message; else the default."""
    text = headers.get(HEADER)
    if text is None and isinstance(body, Mapping):
        messages = body.get("messages") or [{}]
        said = messages[-1].get("content") if isinstance(messages[-1], Mapping) else None
        if isinstance(said, str) and said.startswith(MARK):
            text = said.removeprefix(MARK)
    return Script() if text is None else msgspec.json.decode(text, type=Script)


def choices_of(script: Script, count: int) -> list[Choice]:
    """So many answers: those of the script, and more of their kind."""
    found = []
    for index in range(count):
        kind = script.choices[index % len(script.choices)]
        shift = 5000 * (index // len(script.choices))
        found.append(msgspec.structs.replace(kind, ids=[each + shift for each in kind.ids]) if shift else kind)
    return found
