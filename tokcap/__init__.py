"""tokcap: the exact token ids and log-probs of every model call of a rollout, from the engine to the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .entry import TokenEntry
from .protocol import CallRecord, TokenCaptureSnapshot, TokenSink, TokenSource
from .version import __version__

if TYPE_CHECKING:
    from .store import FileStore, RolloutStat, Snapshot

__all__ = (
    "CallRecord",
    "FileStore",
    "RolloutStat",
    "Snapshot",
    "TokenCaptureSnapshot",
    "TokenEntry",
    "TokenSink",
    "TokenSource",
    "__version__",
)

_STORE_NAMES = ("FileStore", "RolloutStat", "Snapshot")


def __getattr__(name: str) -> Any:
    # A server that only checks whether capture is on need not load the engine.
    if name in _STORE_NAMES:
        from . import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
