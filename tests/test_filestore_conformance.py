"""`FileStore` passes every check of `tokcap.conformance`: in one process, and as processes that are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tokcap import CallRecord, TokenEntry
from tokcap.conformance import Report, check, check_names
from tokcap.errors import ClosedError
from tokcap.store import FileStore, Snapshot

from .children import Channel, Child, Nursery, fast_directory
from .children import nursery as _nursery

directory = pytest.fixture(fast_directory)
nursery = pytest.fixture(scope="module")(_nursery)


_GONE = "the process of this store is gone"


class CopiedSnapshot:
    """A snapshot as it came out of another process."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.rollout_id, self.incomplete = snapshot.rollout_id, snapshot.incomplete
        self.snapshot_id, self.version = snapshot.snapshot_id, snapshot.version
        self.calls: Sequence[CallRecord] = snapshot.calls
        self._entries: Sequence[TokenEntry] | None = tuple(snapshot.entries)

    @property
    def entries(self) -> Sequence[TokenEntry]:
        if self._entries is None:
            raise ClosedError("closed")
        return self._entries

    def close(self) -> None:
        self._entries = None

    def __enter__(self) -> CopiedSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _packed(message: object) -> bytes:
    data = pickle.dumps(message, 5)  # older protocols change the byte order of arrays
    return len(data).to_bytes(8, "little") + data


async def _received(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(8), "little")
    return pickle.loads(await reader.readexactly(size))


def serve(channel: Channel, path: str) -> None:
    """In a child: a store, and whoever calls its methods through the channel."""
    asyncio.run(_serve(channel, path))


async def _serve(channel: Channel, path: str) -> None:
    store = FileStore(path)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(channel.fileno())))
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            result = await getattr(store, method)(*arguments, **named)
            if isinstance(result, Snapshot):
                with result:
                    result = CopiedSnapshot(result)
            writer.write(_packed((number, result, None)))
        except Exception as error:
            writer.write(_packed((number, None, error)))
        finally:
            del running[number]

    while True:
        try:
            number, method, arguments, named = await _received(reader)
        except asyncio.IncompleteReadError:
            return
        if method == "cancel":
            if number in running:
                running[number].cancel()
        else:
            running[number] = asyncio.create_task(answer(number, method, arguments, named))


class Proxy:
    """A store in a process of its own, used from this one."""

    def __init__(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child, self._reader, self._writer = child, reader, writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._closed = False
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                number, result, error = await _received(self._reader)
                future = self._waiting.pop(number)
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError(_GONE))

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._closed:
            raise ClosedError("closed")
        if self._listening.done():
            raise ConnectionError(_GONE)
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(_packed((number, method, arguments, named)))
        try:
            return await future
        except asyncio.CancelledError:
            self._writer.write(_packed((number, "cancel", (), {})))
            raise

    async def put(self, entry: TokenEntry) -> None:
        await self._call("put", entry)

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        await self._call("put_many", list(entries))

    async def begin_call(self, rollout_id: str, model_call_id: str, choices: int = 1, **known: Any) -> None:
        await self._call("begin_call", rollout_id, model_call_id, choices, **known)

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: str, detail: str = "") -> None:
        await self._call("settle_call", rollout_id, model_call_id, outcome, detail)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._call("mark_incomplete", rollout_id, model_call_id)

    async def freeze(self, rollout_id: str) -> CopiedSnapshot:
        snapshot: CopiedSnapshot = await self._call("freeze", rollout_id)
        return snapshot

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        gone: bool = await self._call("retire", rollout_id, snapshot_id=snapshot_id, version=version)
        return gone

    async def reset(self, *rollout_ids: str) -> None:
        await self._call("reset", *rollout_ids)

    async def close(self) -> None:
        if not self._closed:
            await self._call("close")
            self._closed = True
            await self.die()

    async def die(self) -> None:
        """`kill -9` of the process."""
        self.child.kill()
        await self._listening
        self._writer.close()


def _passes_everything(report: Report) -> None:
    assert not report.failed, "\n\n".join(f"{name}\n{text}" for name, text in report.failed.items())


def test_a_file_store_passes_every_check_but_those_of_crashes(directory: Path) -> None:
    path = directory / "store"
    report = asyncio.run(check(lambda: FileStore(path), lambda: FileStore(path)))
    _passes_everything(report)
    assert all("crash" in name for name in report.skipped)
    assert len(report.passed) + len(report.skipped) == len(check_names())


def test_file_stores_in_processes_that_are_killed_pass_every_check(directory: Path, nursery: Nursery) -> None:
    path = str(directory / "store")

    async def opened() -> Proxy:
        child = nursery.start(serve, path)
        connection = socket.socket(fileno=os.dup(child.channel.fileno()))
        connection.setblocking(False)
        return Proxy(child, *await asyncio.open_connection(sock=connection))

    async def crash(instance: object) -> None:
        assert isinstance(instance, Proxy)
        await instance.die()

    async def main() -> Report:
        return await check(opened, opened, crash=crash)

    report = asyncio.run(main())
    _passes_everything(report)
    assert not report.skipped
    assert report.passed == list(check_names())
