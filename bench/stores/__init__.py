"""What is measured: tokcap, what somebody would use instead, and what the file system could do at best.

Each makes every call durable before its put returns; all are driven by the same asyncio clients.
"""

from __future__ import annotations

from typing import Any

from ..figures import OURS
from ..peer import PEER
from ..places import UnavailableError
from .base import Candidate, WithIntents
from .databases import DiskCache, Lmdb, Sqlite
from .floors import OwnFiles, SharedLog, WriteAndSync
from .nemo_gym import NemoGym, NemoGymDelta
from .ours import Tokcap, TokcapLists

__all__ = (
    "CANDIDATES",
    "FLOORS",
    "OURS_LISTS",
    "OWN_FILES",
    "PEER_DELTA",
    "SHARED_LOG",
    "WRITE_AND_SYNC",
    "Candidate",
    "WithIntents",
    "missing",
)

OURS_LISTS = "tokcap, lists"
PEER_DELTA = f"{PEER}, delta records"
WRITE_AND_SYNC = "write + fdatasync"
OWN_FILES = "own files, 16 threads"
SHARED_LOG = "one log, group commit"

FLOORS = (WRITE_AND_SYNC, OWN_FILES, SHARED_LOG)
"""Not stores: they write the bytes and that is all."""

CANDIDATES: dict[str, type[Candidate[Any]]] = {
    OURS: Tokcap,
    OURS_LISTS: TokcapLists,
    PEER: NemoGym,
    PEER_DELTA: NemoGymDelta,
    "SQLite": Sqlite,
    "LMDB": Lmdb,
    "diskcache": DiskCache,
    WRITE_AND_SYNC: WriteAndSync,
    OWN_FILES: OwnFiles,
    SHARED_LOG: SharedLog,
}
"""By the name in every figure, in the order in which they take turns."""


def missing() -> dict[str, str]:
    """The candidates that can't be measured here, and why."""
    absent = {}
    for name, candidate in CANDIDATES.items():
        try:
            candidate.require()
        except UnavailableError as error:
            absent[name] = str(error)
    return absent
