"""tokcap: the exact token ids and log-probs of every model call of a rollout, from the engine to the trainer."""

from __future__ import annotations

from .entry import TokenEntry
from .protocol import CallRecord, TokenCaptureSnapshot, TokenSink, TokenSource
from .store import FileStore, RolloutStat, Snapshot
from .version import __version__

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
