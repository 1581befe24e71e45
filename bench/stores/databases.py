"""Embedded databases, set so that each put is durable: whole prompts as int32 bytes, a row or value per call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ..workload import Call
from .base import Candidate, peer_module

__all__ = ("DiskCache", "Lmdb", "Sqlite")

WAIT_S = 60.0
"""How long another process may hold the one lock for writing."""


class _InThread(Candidate[Call]):
    """Its calls block, so they run in one thread: each of these has one writer at a time anyway."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._thread = ThreadPoolExecutor(1)

    def prepared(self, conversation: list[Call]) -> list[Call]:
        return conversation

    async def _call(self, function: Callable[[Call], object], call: Call) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function, call)

    def close(self) -> None:
        self._thread.shutdown()


class Sqlite(_InThread):
    """SQLite with a write-ahead log, `synchronous=FULL`, one row and one commit per call."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._connection = self._thread.submit(self._connect).result()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.directory / "calls.sqlite", timeout=WAIT_S, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS calls "
            "(rollout TEXT, call TEXT, prompt BLOB, generated BLOB, log_probs BLOB, PRIMARY KEY (rollout, call))"
        )
        return connection

    def _insert(self, call: Call) -> None:
        row = (call.rollout_id, call.model_call_id, call.prompt.data, call.generated.data, call.log_probs.data)
        self._connection.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", row)

    async def put(self, item: Call) -> None:
        await self._call(self._insert, item)

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        super().close()


def _value(call: Call) -> bytes:
    return msgspec.msgpack.encode((call.prompt.data, call.generated.data, call.log_probs.data))


class Lmdb(_InThread):
    """LMDB with `sync=True`, one transaction per call."""

    packages = ("lmdb",)

    @classmethod
    def require(cls) -> None:
        peer_module("lmdb")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # An upper bound of the file, which is sparse.
        self._environment: Any = peer_module("lmdb").open(str(directory / "calls.lmdb"), map_size=16 << 30, sync=True)

    def _insert(self, call: Call) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.put(f"{call.rollout_id}/{call.model_call_id}".encode(), _value(call))

    async def put(self, item: Call) -> None:
        await self._call(self._insert, item)

    def close(self) -> None:
        super().close()
        self._environment.close()


class DiskCache(_InThread):
    """diskcache's `Cache`, its SQLite with `synchronous=FULL`, nothing evicted.

    Values stay inside the database whatever their size: the files that it makes for large ones are not synced.
    """

    packages = ("diskcache",)

    @classmethod
    def require(cls) -> None:
        peer_module("diskcache")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._cache: Any = peer_module("diskcache").Cache(
            str(directory / "cache"),
            timeout=WAIT_S,
            sqlite_synchronous=2,
            eviction_policy="none",
            cull_limit=0,
            size_limit=1 << 50,
            disk_min_file_size=1 << 40,
        )

    def _insert(self, call: Call) -> None:
        self._cache.set(f"{call.rollout_id}/{call.model_call_id}", _value(call), retry=True)

    async def put(self, item: Call) -> None:
        await self._call(self._insert, item)

    def close(self) -> None:
        self._thread.submit(self._cache.close).result()
        super().close()
        self._cache.close()
