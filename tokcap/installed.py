"""The sink and the source that a program installs in its own process.

What is installed here is seen by this process and by children forked from it afterwards. Spawned processes, such as the
workers of uvicorn, start empty: name a sink for them in the configuration (`token_id_capture.sink`), so that every one
builds its own.
"""

from __future__ import annotations

from typing import Any

from .errors import InvalidOptionError
from .protocol import TokenSink, TokenSource

__all__ = (
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
    "protocol_problem",
)

_sink: TokenSink | None = None
_source: TokenSource | None = None


def install_token_sink(sink: TokenSink | None) -> TokenSink | None:
    """Make this the sink of this process; None takes it away. Returns what was installed before.

    Raises `InvalidOptionError`, and changes nothing, if a method of `TokenSink` is missing or can't be called.
    """
    global _sink
    _refuse(sink, TokenSink, "install_token_sink")
    previous, _sink = _sink, sink
    return previous


def installed_token_sink() -> TokenSink | None:
    """The sink that was installed in this process, or in one that this process was forked from."""
    return _sink


def install_token_source(source: TokenSource | None) -> TokenSource | None:
    """Make this the source of this process; None takes it away. Returns what was installed before.

    Raises `InvalidOptionError`, and changes nothing, if a method of `TokenSource` is missing or can't be called.
    """
    global _source
    _refuse(source, TokenSource, "install_token_source")
    previous, _source = _source, source
    return previous


def installed_token_source() -> TokenSource | None:
    """The source that was installed in this process, or in one that this process was forked from."""
    return _source


def protocol_problem(endpoint: object, protocol: type) -> str:
    """Why an object can't serve as a `TokenSink` or `TokenSource`, in words; empty if it can."""
    if isinstance(endpoint, type):
        return f"is the class {endpoint.__name__}, expected an instance of it"
    absent: Any = object()
    methods = {name: getattr(endpoint, name, absent) for name in _method_names(protocol)}
    missing = [name for name, method in methods.items() if method is absent]
    uncallable = [name for name, method in methods.items() if method is not absent and not callable(method)]
    problems = [f"lacks {', '.join(missing)}"] * bool(missing)
    problems += [f"has something in place of {', '.join(uncallable)} that can't be called"] * bool(uncallable)
    return f"is a {type(endpoint).__name__} that {' and '.join(problems)}" if problems else ""


def _refuse(endpoint: object, protocol: type, function: str) -> None:
    problem = "" if endpoint is None else protocol_problem(endpoint, protocol)
    if problem:
        raise InvalidOptionError(f"{function}: what was given {problem}; {protocol.__name__} needs all of its methods")


def _method_names(protocol: type) -> list[str]:
    # `__protocol_attrs__` says the same, but only from Python 3.12 on.
    protocols = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    return sorted({name for base in protocols for name in vars(base) if not name.startswith("_")})
