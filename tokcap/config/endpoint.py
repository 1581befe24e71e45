"""Building the object that a configuration names as `module.path:ClassName`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import TracebackType
from typing import Any

from ..errors import ConfigError
from ..installed import protocol_problem
from .arguments import resolved, without_values
from .block import TOKEN_ID_CAPTURE_BLOCK
from .references import ResolvedText
from .values import shown

__all__ = ("build_endpoint",)


def build_endpoint(target: str, kwargs: Mapping[str, Any], protocol: type, kind: str) -> Any:
    """Import the class, resolve the arguments, call it, and check that the result has the methods of the protocol.

    kind: "sink" or "source", for messages. Raises `ConfigError` with the reason; no message shows a value of `kwargs`.
    """
    where = f"{TOKEN_ID_CAPTURE_BLOCK}.{kind}"
    factory = _load(target, where)
    arguments = {name: resolved(value, f"{where}_kwargs.{name}") for name, value in kwargs.items()}
    problem = ""
    try:
        endpoint = factory(**arguments)
    except Exception as error:
        # Not chained: a traceback would show the text of the error, and that may hold a secret.
        reason = without_values(_said(error), arguments, dict(kwargs))
        problem = f"{type(error).__name__}{_line(error.__traceback__)}: {reason}"
    if problem:
        names = ", ".join(sorted(arguments)) or "no arguments"
        raise ConfigError(f"{where} {shown(target)} can't be made with {where}_kwargs ({names}): {problem}")
    lacking = protocol_problem(endpoint, protocol)
    if lacking:
        raise ConfigError(f"{where} {shown(target)} made something that {lacking}; it can't be a {protocol.__name__}")
    return endpoint


def _load(target: str, where: str) -> Any:
    module_path, _, name = target.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module_path.split("."))):
        raise ConfigError(f"{where} is {shown(target)}, expected module.path:ClassName")
    secret = [str(target)] if isinstance(target, ResolvedText) else []
    cause: Exception | None = None
    try:
        factory = getattr(import_module(module_path), name)
    except Exception as error:
        problem = f"it can't be imported: {type(error).__name__}: {without_values(_said(error), *secret)}"
        cause = None if secret else error
    else:
        if callable(factory):
            return factory
        problem = f"that is a {type(factory).__name__}, which can't be called"
    # Outside of the handler, so that no context leads to what is left out.
    raise ConfigError(f"{where} is {shown(target)}, but {problem}") from cause


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "an error that can't be shown"


def _line(trace: TracebackType | None) -> str:
    """Where an error was raised, since its traceback isn't kept; nothing if it was in the call itself."""
    trace = trace.tb_next if trace else None
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
