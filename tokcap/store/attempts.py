"""Attempts: in which life of its rollout a call began, so that a straggler of an earlier one is recognised."""

from __future__ import annotations

__all__ = ("Attempts",)

_REMEMBERED_ATTEMPTS = 10_000
"""Ended calls that are remembered in case a straggler says more of them."""


class Attempts:
    """In which incarnation this store object began its calls. Open calls are never forgotten."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], str] = {}
        self._ended: dict[tuple[str, str], str] = {}

    def incarnation(self, rollout_id: str, call: str) -> str | None:
        key = (rollout_id, call)
        return self._open.get(key) or self._ended.get(key)

    def began(self, rollout_id: str, call: str, incarnation: str) -> None:
        self._ended.pop((rollout_id, call), None)
        self._open[rollout_id, call] = incarnation

    def ended(self, rollout_id: str, call: str) -> None:
        incarnation = self._open.pop((rollout_id, call), None)
        if incarnation is not None:
            self._ended[rollout_id, call] = incarnation
            while len(self._ended) > _REMEMBERED_ATTEMPTS:
                try:
                    self._ended.pop(next(iter(self._ended)), None)
                except (StopIteration, RuntimeError):
                    return  # another thread is doing the same
