"""Which policy answers a call, where the engine itself doesn't say: stamped when it begins and when it is answered.

Weights may change while a call runs. Spans that the engine gives go before these stamps; if both stamps differ, nobody
knows which token was sampled by which policy, and the version is `mixed`.
"""

from __future__ import annotations

import logging
import os

from ..capture import CaptureContext
from .interface import Headers
from .settings import ServingSettings

__all__ = ("MIXED", "PolicyStamp", "PolicyVersions")

logger = logging.getLogger("tokcap.asgi")

Version = str | int | None

MIXED = "mixed"
"""The version of an answer during which it changed."""

_LONGEST = 200


class PolicyVersions:
    """Where the version stands: a value or a function, else a file, which is read again when it has changed."""

    def __init__(self, settings: ServingSettings) -> None:
        self._given = settings.policy_version
        self._file = settings.policy_version_file
        self.header = settings.policy_version_header.lower().encode("latin-1")
        self._known: tuple[tuple[int, int, int], Version] | None = None

    def now(self) -> Version:
        """The version at this moment; None if nobody tells. Never raises: a stamp must not cost an answer."""
        try:
            if self._given is not None:
                given: Version = self._given() if callable(self._given) else self._given
                return given
            return self._in_file() if self._file else None
        except Exception as error:
            logger.warning("the policy version can't be told: %s: %s", type(error).__name__, error)
            return None

    def stamp(self) -> PolicyStamp:
        """For one call."""
        return PolicyStamp(self)

    def _in_file(self) -> Version:
        state = os.stat(self._file)
        mark = (state.st_ino, state.st_mtime_ns, state.st_size)
        if self._known is None or self._known[0] != mark:
            with open(self._file, encoding="utf-8") as file:
                self._known = mark, file.read(_LONGEST).strip() or None
        return self._known[1]


class PolicyStamp:
    """The versions at the two ends of one call."""

    def __init__(self, versions: PolicyVersions) -> None:
        self._versions = versions
        self._entry: Version = None

    def at_entry(self) -> Version:
        """When the call begins."""
        self._entry = self._versions.now()
        return self._entry

    def at_exit(self, context: CaptureContext, headers: Headers) -> None:
        """When the answer is whole, before it is recorded: what its header says, else the stamp of both ends."""
        said = (
            [value for name, value in headers if name.lower() == self._versions.header] if self._versions.header else []
        )
        if said:
            context.policy_version = said[-1].decode("latin-1")[:_LONGEST]
            return
        leaving = self._versions.now()
        if leaving != self._entry:
            context.policy_version = MIXED
            context.extra["policy_version_at_entry"], context.extra["policy_version_at_exit"] = self._entry, leaving
