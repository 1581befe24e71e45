"""What is measured: tokcap, and what somebody would build instead. Each stores every call durably before it answers.

All run as asyncio clients in one process, one client per rollout, the next call only after the last was durable.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tokcap import FileStore, TokenEntry

from .workload import Call

__all__ = ("CANDIDATES", "Measured", "run")

Put = Callable[[Call], Awaitable[None]]


@dataclass
class Measured:
    """One run of one candidate."""

    puts: int
    seconds: float
    cpu_seconds: float
    latencies: list[float] = field(repr=False)
    """Seconds of each put, in no particular order."""
    bytes_on_disk: int = 0

    @property
    def per_second(self) -> float:
        return self.puts / self.seconds


async def _drive(conversations: list[list[Call]], put: Put, latencies: list[float]) -> None:
    async def client(conversation: list[Call]) -> None:
        for call in conversation:
            begun = time.perf_counter()
            await put(call)
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(client(conversation) for conversation in conversations))


def _measure(conversations: list[list[Call]], put: Put) -> Measured:
    async def main() -> Measured:
        latencies: list[float] = []
        begun, cpu = time.perf_counter(), time.process_time()
        await _drive(conversations, put, latencies)
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
        return Measured(len(latencies), seconds, cpu_seconds, latencies)

    return asyncio.run(main())


def tokcap_store(directory: Path, conversations: list[list[Call]]) -> Measured:
    """`FileStore`, entries made from the arrays inside the measured time."""
    store = FileStore(directory / "store")

    async def put(call: Call) -> None:
        entry = TokenEntry(call.rollout_id, call.model_call_id, call.prompt, call.generated, call.log_probs)
        await store.put(entry)

    measured = _measure(conversations, put)
    store.close_now()
    return measured


def sqlite_rows(directory: Path, conversations: list[list[Call]]) -> Measured:
    """SQLite, WAL, synchronous=FULL, one row and one commit per call, in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    path = directory / "calls.sqlite"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(
            "CREATE TABLE calls (rollout TEXT, call TEXT, prompt BLOB, generated BLOB, log_probs BLOB, "
            "PRIMARY KEY (rollout, call))"
        )
        return connection

    connection = thread.submit(connect).result()

    def insert(call: Call) -> None:
        row = (call.rollout_id, call.model_call_id, call.prompt.data, call.generated.data, call.log_probs.data)
        connection.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", row)

    async def put(call: Call) -> None:
        await asyncio.get_running_loop().run_in_executor(thread, insert, call)

    measured = _measure(conversations, put)
    thread.submit(connection.close).result()
    thread.shutdown()
    return measured


def _record(call: Call, before: Call | None) -> bytes:
    """The bytes that a suffix store has to write for a call: what is new in it, ids as int32, log-probs as float32."""
    shared = 0 if before is None else len(before.prompt) + len(before.generated)
    return msgspec.msgpack.encode(
        (call.model_call_id, call.prompt[shared:].data, call.generated.data, call.log_probs.astype("<f4").data)
    )


def bare_sequential(directory: Path, conversations: list[list[Call]]) -> Measured:
    """`write` and `fdatasync` of the same bytes, ready made, one after another in one thread: no store at all."""
    files = [
        os.open(directory / f"{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND) for number in range(len(conversations))
    ]
    records = [
        [_record(call, before) for call, before in zip(conversation, [None, *conversation], strict=False)]
        for conversation in conversations
    ]
    latencies = []
    start, cpu = time.perf_counter(), time.process_time()
    for turn in range(len(records[0])):
        for fd, own in zip(files, records, strict=True):
            begun = time.perf_counter()
            os.write(fd, own[turn])
            os.fdatasync(fd)
            latencies.append(time.perf_counter() - begun)
    measured = Measured(len(latencies), time.perf_counter() - start, time.process_time() - cpu, latencies)
    for fd in files:
        os.close(fd)
    return measured


def bare_threads(directory: Path, conversations: list[list[Call]]) -> Measured:
    """The same bytes from asyncio clients, own file per rollout, `write` and `fdatasync` in 16 threads."""
    pool = ThreadPoolExecutor(16)
    files = {
        conversation[0].rollout_id: os.open(directory / f"{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for number, conversation in enumerate(conversations)
    }
    records = {
        (call.rollout_id, call.model_call_id): _record(call, before)
        for conversation in conversations
        for call, before in zip(conversation, [None, *conversation], strict=False)
    }

    def write(fd: int, data: bytes) -> None:
        os.write(fd, data)
        os.fdatasync(fd)

    async def put(call: Call) -> None:
        record = records[call.rollout_id, call.model_call_id]
        await asyncio.get_running_loop().run_in_executor(pool, write, files[call.rollout_id], record)

    measured = _measure(conversations, put)
    pool.shutdown()
    for fd in files.values():
        os.close(fd)
    return measured


CANDIDATES: dict[str, Callable[[Path, list[list[Call]]], Measured]] = {
    "tokcap": tokcap_store,
    "SQLite": sqlite_rows,
    "bare write+fdatasync": bare_sequential,
    "bare, 16 threads": bare_threads,
}


def run(name: str, directory: Path, conversations: list[list[Call]]) -> Measured:
    """Run one candidate in an empty directory and weigh what it leaves there."""
    directory.mkdir(parents=True, exist_ok=True)
    measured = CANDIDATES[name](directory, conversations)
    measured.bytes_on_disk = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return measured
