"""What is known of the server around the middleware: its engine, its keys, how it samples when nobody asks."""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .interface import Headers
from .settings import ServingSettings

__all__ = ("Server", "server_of", "version_of")


class Server(msgspec.Struct, frozen=True):
    """One server as its own state and the settings show it."""

    engine: str = ""
    version: str = ""
    keys: tuple[bytes, ...] = ()
    """SHA-256 of each key that it accepts; empty if none is known."""
    logprobs_mode: str = "unknown"
    sampling_defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    complete: bool = False
    """Whether its own state was there, so that nothing more will be found later."""
    keeps_metadata: bool = False
    """Whether the state of a request shows how far the engine came with it, as vLLM's does in its own process."""
    has_parser: bool | None = None
    """Whether a parser of reasoning or of tool calls reads the answers; None if that isn't known."""

    def admits(self, headers: Headers) -> bool:
        """Whether a request shows one of the keys, or none is known. Compared in constant time."""
        if not self.keys:
            return True
        shown = [hashlib.sha256(key).digest() for key in _shown_keys(headers)]
        found = False
        for one in shown:
            for key in self.keys:
                found |= secrets.compare_digest(one, key)
        return found

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version as numbers; empty if it isn't known, or is no release."""
        return version_of(self.version)


def version_of(text: str) -> tuple[int, ...]:
    """`0.32.0.post2+cpu` as (0, 32, 0)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def server_of(application: Any, settings: ServingSettings) -> Server:
    """What can be told now of the application in a scope (`scope["app"]`; None if there is none).

    vLLM keeps its arguments and its configuration in the state of its application; they are there from the first
    request on. SGLang keeps its arguments in the application itself.
    """
    state = getattr(application, "state", None)
    arguments, vllm_config = getattr(state, "args", None), getattr(state, "vllm_config", None)
    is_vllm = vllm_config is not None or hasattr(state, "engine_client")
    sglang_arguments = getattr(application, "server_args", None)
    engine = settings.engine or ("vllm" if is_vllm else "sglang" if sglang_arguments is not None else "")
    version = settings.engine_version
    if not version and is_vllm and engine == "vllm":
        version = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    elif not version and sglang_arguments is not None and engine == "sglang":
        version = str(getattr(sys.modules.get("sglang"), "__version__", ""))
    model_config = getattr(vllm_config, "model_config", None)
    mode = settings.logprobs_mode or _text(getattr(model_config, "logprobs_mode", "")) or "unknown"
    defaults: dict[str, Any] = {}
    with suppress(Exception):  # of the engine; it reads the files of the model
        found = model_config.get_diff_sampling_param() if model_config is not None else {}
        defaults = dict(found) if isinstance(found, Mapping) else {}
    keys = [*settings.api_keys, *(_keys_of(arguments, application) if is_vllm else ())]
    keys += [_text(getattr(sglang_arguments, name, "")) for name in ("api_key", "admin_api_key")]
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys if key)
    sampling = {**defaults, **settings.sampling_defaults}
    return Server(
        engine,
        version,
        digests,
        mode,
        sampling,
        complete=vllm_config is not None or sglang_arguments is not None,
        keeps_metadata=is_vllm,
        has_parser=_has_parser(arguments) if is_vllm else None,
    )


def _has_parser(arguments: Any) -> bool | None:
    """Of vLLM; None before 0.13, whose application doesn't keep its arguments."""
    if arguments is None:
        return None
    return bool(getattr(arguments, "reasoning_parser", None)) or bool(getattr(arguments, "tool_call_parser", None))


def _keys_of(arguments: Any, application: Any) -> Iterable[str]:
    """Of vLLM: those of the command line, else the one of the environment; or what it gave its own middleware."""
    for middleware in getattr(application, "user_middleware", None) or ():
        tokens = (getattr(middleware, "kwargs", None) or {}).get("tokens")
        if isinstance(tokens, list):
            return [token for token in tokens if isinstance(token, str)]
    given = getattr(arguments, "api_key", None)
    given = [given] if isinstance(given, str) else given
    if given:
        return [key for key in given if isinstance(key, str)]
    environment = getattr(sys.modules.get("vllm"), "envs", None)
    return [_text(getattr(environment, "VLLM_API_KEY", ""))]


def _shown_keys(headers: Headers) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key
        elif name == b"x-api-key":
            yield value


def _text(value: object) -> str:
    text = getattr(value, "value", value)  # an enumeration, in some versions
    return text if isinstance(text, str) else ""
