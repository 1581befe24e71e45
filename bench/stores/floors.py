"""What the file system can do: the bytes that a store of suffixes has to write, ready made, and nothing around them.

No store at all: no checks, no frames, no checksums, nothing that could be found again after a crash. Files are made
before the clock starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from ..workload import Call
from .base import Candidate

__all__ = ("OwnFiles", "SharedLog", "WriteAndSync")


class Record(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What is new in a call, and the file that it goes to."""

    fd: int
    data: bytes


def record_bytes(call: Call) -> bytes:
    """The new ids of a call as int32, its log-probs as float32."""
    suffix = call.prompt[call.shared :].data
    return msgspec.msgpack.encode((call.model_call_id, suffix, call.generated.data, call.log_probs.astype("<f4").data))


def _append(record: Record) -> None:
    written = os.write(record.fd, record.data)
    if written != len(record.data):
        raise OSError(f"only {written} of {len(record.data)} bytes were written")
    os.fdatasync(record.fd)


class _Files(Candidate[Record]):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._opened: list[int] = []

    def _open(self, name: str) -> int:
        fd = os.open(self.directory / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._opened.append(fd)
        return fd

    def prepared(self, conversation: list[Call]) -> list[Record]:
        fd = self._open(conversation[0].rollout_id)
        return [Record(fd, record_bytes(call)) for call in conversation]

    def close(self) -> None:
        for fd in self._opened:
            os.close(fd)


class WriteAndSync(_Files):
    """`write` and `fdatasync` in a file per rollout, one record after another, whoever else waits."""

    async def put(self, item: Record) -> None:
        _append(item)


class OwnFiles(_Files):
    """A file per rollout; `write` and `fdatasync` in a pool of 16 threads, so that the journal can join commits."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pool = ThreadPoolExecutor(16)

    async def put(self, item: Record) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, _append, item)

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


class SharedLog(_Files):
    """One log for all rollouts of a process; a thread takes whatever waits, writes it at once and syncs once."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._log = self._open(f"log-{os.getpid()}")
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._committer = threading.Thread(target=self._commit)
        self._committer.start()

    def prepared(self, conversation: list[Call]) -> list[Record]:
        return [Record(self._log, record_bytes(call)) for call in conversation]

    async def put(self, item: Record) -> None:
        durable = asyncio.get_running_loop().create_future()
        self._waiting.put((item.data, durable))
        await durable

    def _commit(self) -> None:
        while batch := self._taken():
            failed: OSError | None = None
            try:
                _append(Record(self._log, b"".join(data for data, _ in batch)))
            except OSError as error:
                failed = error
            futures = [future for _, future in batch]
            futures[0].get_loop().call_soon_threadsafe(_resolve, futures, failed)

    def _taken(self) -> list[tuple[bytes, asyncio.Future[None]]]:
        """Everything that waits; empty when the log is being closed, which nobody does who still waits for a put."""
        batch = [self._waiting.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                batch.append(self._waiting.get_nowait())
        return [waiting for waiting in batch if waiting is not None]

    def close(self) -> None:
        self._waiting.put(None)
        self._committer.join()
        super().close()


def _resolve(futures: list[asyncio.Future[None]], failed: OSError | None) -> None:
    for future in futures:
        if future.done():  # cancelled
            continue
        if failed is None:
            future.set_result(None)
        else:
            future.set_exception(failed)
