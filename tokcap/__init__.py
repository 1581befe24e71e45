"""tokcap: the exact token ids and log-probs of every model call of a rollout, from the engine to the trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .version import __version__

if TYPE_CHECKING:
    from .capture import capture_tokens, captured_call
    from .config import (
        TokenIdCaptureConfig,
        TokenIdCaptureSettings,
        process_sink,
        process_source,
        token_id_capture_config,
        token_id_capture_enabled_for_agent,
    )
    from .delivery import consume, consume_from_config, finalize_rollout, retire_rollout
    from .entry import TokenEntry
    from .installed import install_token_sink, install_token_source, installed_token_sink, installed_token_source
    from .protocol import CallRecord, TokenCaptureSnapshot, TokenSink, TokenSource
    from .store import FileStore, RolloutStat, Snapshot
    from .trajectory import Build, Rebuild, Trajectory, build, rebuild_response

__all__ = (
    "Build",
    "CallRecord",
    "FileStore",
    "Rebuild",
    "RolloutStat",
    "Snapshot",
    "TokenCaptureSnapshot",
    "TokenEntry",
    "TokenIdCaptureConfig",
    "TokenIdCaptureSettings",
    "TokenSink",
    "TokenSource",
    "Trajectory",
    "__version__",
    "build",
    "capture_tokens",
    "captured_call",
    "consume",
    "consume_from_config",
    "errors",
    "finalize_rollout",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
    "process_sink",
    "process_source",
    "rebuild_response",
    "retire_rollout",
    "token_id_capture_config",
    "token_id_capture_enabled_for_agent",
)

_HOMES = {
    "capture": ("capture_tokens", "captured_call"),
    "config": (
        "TokenIdCaptureConfig",
        "TokenIdCaptureSettings",
        "process_sink",
        "process_source",
        "token_id_capture_config",
        "token_id_capture_enabled_for_agent",
    ),
    "delivery": ("consume", "consume_from_config", "finalize_rollout", "retire_rollout"),
    "entry": ("TokenEntry",),
    "installed": ("install_token_sink", "install_token_source", "installed_token_sink", "installed_token_source"),
    "protocol": ("CallRecord", "TokenCaptureSnapshot", "TokenSink", "TokenSource"),
    "store": ("FileStore", "RolloutStat", "Snapshot"),
    "trajectory": ("Build", "Rebuild", "Trajectory", "build", "rebuild_response"),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a server that only checks whether capture is on needs neither the engine nor the builder.
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
