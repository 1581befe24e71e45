"""Several workers, one set of rollouts: who takes which."""

from __future__ import annotations

from zlib import crc32

__all__ = ("share_of",)


def share_of(rollout_id: str, workers: int) -> int:
    """The worker, 0 to workers - 1, that takes a rollout: the same in every process and after every restart."""
    return crc32(rollout_id.encode()) % workers
