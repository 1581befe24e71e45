"""What went wrong with a call, as one word of a small closed vocabulary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from ..capture.answer import error_status
from ..errors import UnusableAnswerError
from .answer import AnswerFacts
from .bounds import name_of

__all__ = ("ERROR_CLASSES", "classify")

ERROR_CLASSES = {
    "": "answered",
    "client_error": "refused: a status from 400 to 499 that has no word of its own",
    "rate_limited": "refused for now: status 429, or an error that says so",
    "context_overflow": "refused because prompt and answer don't fit the context of the model",
    "server_error": "status 500 or above, or an error before the answer began",
    "timed_out": "status 408, 504 or 524, or a time-out before the answer began",
    "unreachable": "status 502, or no connection to the server",
    "stream_error": "a stream with an error in it, or without an end; an error after the answer had begun",
    "malformed": "an answer with status 2xx that can't be read",
    "client_gone": "the client left before it had the answer, or status 499",
    "cancelled": "cancelled by the server, as far as is known",
}
"""The words, and what they mean. A status of an error goes before a client that left: it is what the client met."""

_OF_STATUS = {408: "timed_out", 429: "rate_limited", 499: "client_gone", 502: "unreachable", 504: "timed_out"}
_OF_STATUS |= {524: "timed_out"}

_OVERFLOWS = (
    "context_length_exceeded",  # OpenAI, as a code
    "maximum context length",  # OpenAI, vLLM, SGLang
    "maximum model length",  # vLLM
    "max_model_len",  # vLLM, of max_tokens that are too many
    "model's context length",  # SGLang
    "prompt is too long",  # Anthropic
    "`inputs` tokens + `max_new_tokens` must be",  # TGI
    "`inputs` must have less than",  # TGI
    "available context size",  # llama.cpp
    "should not exceed max_num_tokens",  # TensorRT-LLM
)
"""What engines say of a request that does not fit; all of them give it the status of any bad request."""
_WORDS_SEARCHED = 4000
"""Characters of an error message: some engines quote the whole request in it."""

_GONE = ("ClientGoneError", "ClientDisconnect")
_UNREACHABLE = (
    "ConnectionError",
    "ConnectError",
    "NetworkError",
    "ProxyError",
    "RemoteProtocolError",
    "ClientConnectionError",
    "gaierror",
)
"""Names of exceptions of the usual clients, which need not be installed."""
_UNREADABLE = (UnusableAnswerError, msgspec.DecodeError, json.JSONDecodeError, UnicodeDecodeError)


def classify(
    status: int,
    answer: object,
    facts: AnswerFacts,
    error: object = None,
    *,
    known: bool = True,
    streamed: bool = False,
    client_gone: bool = False,
) -> tuple[str, str]:
    """The class of a call's end, and the name that the error gives itself: its type, or that of the exception.

    status: of the answer, 0 if none began. answer: its body, decoded, None if it could not be. facts: what it says.
    error: an exception, or the error in the answer. known: whether its dialect is one that can be read.
    """
    exception = error if isinstance(error, BaseException) else None
    body = answer if error is None else error
    named = _name(body) if exception is None else name_of(type(exception).__name__)
    if isinstance(exception, (asyncio.CancelledError, GeneratorExit)):
        return ("client_gone" if client_gone else "cancelled"), named
    if status >= 400:
        return _of_status(status, body), named
    if client_gone or (exception is not None and not _names(exception).isdisjoint(_GONE)):
        return "client_gone", named
    if exception is not None:
        return _of_exception(exception, status), named
    if error is not None:
        found = _of_body(error)
        return ("stream_error" if streamed and found in ("server_error", "client_error") else found), named
    if error_status(answer) is not None or (isinstance(answer, dict) and answer.get("status") == "failed"):
        return _of_body(answer), named
    if not status:
        return "server_error", ""
    if known and 200 <= status < 300 and status != 204:
        if answer is None:
            return "malformed", ""
        if streamed and not facts.finished:
            return "stream_error", ""
    return "", ""


def _of_status(status: int, body: object) -> str:
    if status in _OF_STATUS:
        return _OF_STATUS[status]
    if _overflows(body):
        return "context_overflow"
    return "client_error" if status < 500 else "server_error"


def _of_exception(error: BaseException, status: int) -> str:
    if isinstance(error, _UNREADABLE):
        return "malformed"
    if status:
        return "stream_error"
    names = _names(error)
    with suppress(Exception):  # properties of foreign errors
        for bearer in (error, getattr(error, "response", None)):
            for key in ("status_code", "status"):
                found = getattr(bearer, key, None)
                if type(found) is int and found >= 400:
                    return _of_status(found, str(error)[:_WORDS_SEARCHED])
    if any("Timeout" in name for name in names):
        return "timed_out"
    return "server_error" if names.isdisjoint(_UNREACHABLE) else "unreachable"


def _of_body(body: object) -> str:
    """Of an error that came with status 200."""
    if _overflows(body):
        return "context_overflow"
    if any("rate_limit" in word for word in _kinds(body)):
        return "rate_limited"
    status = error_status(body) or 0
    return _of_status(status if status >= 400 else 500, body)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _bodies(body: object) -> Iterator[Mapping[str, Any]]:
    """An error and what is around it."""
    for given in (body, body.get("response") if isinstance(body, dict) else None):
        if isinstance(given, dict):
            if isinstance(given.get("error"), dict):
                yield given["error"]
            yield given


def _kinds(body: object) -> Iterator[str]:
    for given in _bodies(body):
        for key in ("type", "code"):
            if isinstance(given.get(key), str):
                yield given[key]


def _name(body: object) -> str:
    """The type of an error, else its code."""
    for given in _bodies(body):
        if given is body and "message" not in given:
            continue  # an answer, or what is around an error
        kind = given.get("type")
        found = name_of(kind if kind != "error" else None, given.get("code"))
        if found:
            return found
    return ""


def _overflows(body: object) -> bool:
    return any(phrase in text for text in _texts(body) for phrase in _OVERFLOWS)


def _texts(body: object) -> Iterator[str]:
    """What an error says, in any of its shapes."""
    if isinstance(body, (bytes, bytearray)):
        body = bytes(body[:_WORDS_SEARCHED]).decode(errors="replace")
    if isinstance(body, BaseException):
        with suppress(Exception):
            body = str(body)
    if isinstance(body, str):
        yield body[:_WORDS_SEARCHED].lower()
    yield from (kind.lower() for kind in _kinds(body))
    for given in _bodies(body):
        for key in ("message", "error", "detail"):
            if isinstance(given.get(key), str):
                yield given[key][:_WORDS_SEARCHED].lower()
