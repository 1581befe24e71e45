"""The options of `tokcap serve`. What a worker needs reaches it by environment variables, since workers are spawned.

| variable | what |
|---|---|
| `TOKCAP_UPSTREAM` | where the engine is |
| `TOKCAP_ENGINE`, `TOKCAP_ENGINE_VERSION` | which one it is, if it is not to be asked |
| `TOKCAP_API_KEY` | the keys that it expects, separated by spaces |
| `TOKCAP_TIMEOUT` | seconds that an answer may pause |
| `TOKCAP_CLIENT_TIMEOUT` | seconds that a client may take over its request, 60 without; 0: for ever |
| `TOKCAP_ROLLOUT_SECRET`, `TOKCAP_ROLLOUT_SECRET_FILE` | what makes rollout tokens: see `tokcap.asgi.capability` |
| `TOKCAP_DIR`, `TOKCAP_CONFIG` | where and how is captured: see `tokcap.config` |

So `uvicorn --factory tokcap.serve.app:make_app` with these set is the same proxy without the command. The command
itself takes keys, secrets and places from the environment, and sets the others from its options.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import ClassVar

from ..asgi.discreet import Discreet
from ..errors import ConfigError, InvalidOptionError
from .address import upstream_address

__all__ = ("LOG_LEVELS", "ServeOptions", "options_from_environment")

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


class ServeOptions(Discreet, frozen=True, kw_only=True):
    """One proxy. Raises `InvalidOptionError` for what can't be."""

    _hidden: ClassVar[tuple[str, ...]] = ("api_keys",)

    upstream: str
    """URL of the engine: scheme, host, port, and a path if it lies under one."""
    host: str = "127.0.0.1"
    port: int = 8900
    """0: a free one, which the log names."""
    workers: int = 1
    """Processes that serve."""
    engine: str = ""
    """`vllm`, `sglang` or another name; empty: the engine is asked."""
    engine_version: str = ""
    api_keys: tuple[str, ...] = ()
    """Keys that the engine expects: a captured request without one of them leaves no trace."""
    timeout_s: float | None = None
    """How long an answer may pause; None: for ever."""
    client_timeout_s: float | None = 60.0
    """How long a client may take over the head and the body of its request (see `tokcap.serve.patience`); None: for
    ever."""
    graceful_timeout_s: float | None = None
    """How long open calls may take after the first signal; None: as long as they need."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        upstream_address(self.upstream)
        if not 0 <= self.port <= 65535:
            raise InvalidOptionError(f"port is {self.port}, expected a number from 0 to 65535")
        if self.workers < 1:
            raise InvalidOptionError(f"workers is {self.workers}, expected a number from 1")
        for name in ("timeout_s", "client_timeout_s", "graceful_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                raise InvalidOptionError(f"{name} is {seconds}, expected a number of seconds above 0")
        if self.log_level not in LOG_LEVELS:
            raise InvalidOptionError(f"log_level is {self.log_level!r}, expected one of {', '.join(LOG_LEVELS)}")
        if any(not key or not key.isprintable() or len(key.split()) != 1 for key in self.api_keys):
            raise InvalidOptionError("an API key is empty, or holds spaces or control characters")
        if self.engine_version and not self.engine:
            raise InvalidOptionError(f"engine_version is {self.engine_version!r}, but of no engine: say which")

    def environment(self) -> dict[str, str]:
        """What `options_from_environment` reads, for the processes that serve."""
        return {
            "TOKCAP_UPSTREAM": self.upstream,
            "TOKCAP_ENGINE": self.engine,
            "TOKCAP_ENGINE_VERSION": self.engine_version,
            "TOKCAP_API_KEY": " ".join(self.api_keys),
            "TOKCAP_TIMEOUT": "" if self.timeout_s is None else repr(self.timeout_s),
            "TOKCAP_CLIENT_TIMEOUT": repr(self.client_timeout_s or 0.0),
        }


def options_from_environment(environment: Mapping[str, str] | None = None) -> ServeOptions:
    """The options that the environment names. Raises `ConfigError` without an upstream, and `InvalidOptionError`."""
    found = os.environ if environment is None else environment
    upstream = found.get("TOKCAP_UPSTREAM", "")
    if not upstream:
        raise ConfigError("TOKCAP_UPSTREAM is not set: it names the engine, as in http://127.0.0.1:8000")
    return ServeOptions(
        upstream=upstream,
        engine=found.get("TOKCAP_ENGINE", ""),
        engine_version=found.get("TOKCAP_ENGINE_VERSION", ""),
        api_keys=tuple(found.get("TOKCAP_API_KEY", "").split()),
        timeout_s=_seconds(found, "TOKCAP_TIMEOUT", None),
        client_timeout_s=_seconds(found, "TOKCAP_CLIENT_TIMEOUT", 60.0) or None,
    )


def _seconds(environment: Mapping[str, str], name: str, default: float | None) -> float | None:
    text = environment.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise InvalidOptionError(f"{name} is {text!r}, expected a number of seconds above 0") from None
