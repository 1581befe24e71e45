"""The file store: segment files per rollout, frozen by hard links and one rename, retired by another.

Reading order: `frame` (the bytes), `scan` (what wrong bytes mean), `records` (what frames say), `layout` (names and
states), `fence` (who may write), `rollout` (appending), `engine` (who does what when), `committer` and `syncs` (how
many become durable at once), `lifecycle` (freeze, retire, reset), `snapshot` (reading).
"""

from __future__ import annotations

from .looking import RolloutStat
from .snapshot import Snapshot
from .store import FileStore

__all__ = ("FileStore", "RolloutStat", "Snapshot")
