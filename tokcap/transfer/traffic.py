"""Recorded HTTP traffic, through the same capture as live traffic.

A file is a rollout: JSON lines, compressed if its name ends in `.gz`. The first line names it (`rollout`, and whatever
else is to stand in its meta, such as `shape` and `model`); each of the others is an exchange, in the order in which the
client sent them: `seq`, `path`, `request` (the JSON body), `status`, and `response` (the JSON body) or `sse` (the lines
of a streamed answer that aren't empty); `note`, if it is there, is kept in `extra`.

The id of a call follows from its `seq` (`call-0007`). What generates nothing by its path is left out, as live; errors
before sampling are `no_generation`; an answer without exact ids is `lost`, with the reason.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import time
import zlib
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ..asgi.routes import Routes
from ..capture import capture_tokens, captured_call
from ..capture.shapes import StreamJoiner
from ..entry import TokenEntry
from ..errors import InvalidEntryError, InvalidIdError, TokcapError
from ..ids import check_rollout_id
from ..protocol import SettledOutcome
from ..store import FileStore
from .importing import Imported, ImportedRollout, Plan, PlannedCall, Told, import_plans

__all__ = ("import_traffic",)


def import_traffic(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    store: FileStore | str | os.PathLike[str],
    *,
    finish: bool = False,
    freeze: bool = False,
    group: str | int | None = None,
    told: Told | None = None,
) -> Imported:
    """Import recorded exchanges; a repetition changes nothing, and completes what was interrupted.

    finish: note the rollout as finished, with what its first line says as meta. freeze: freeze it. group: the Unix
    group that shares the store, as for `FileStore`. told: called for each rollout. A file that can't be read, or
    holds another rollout than the store has under this id, is in `refused` and changes nothing. Raises `OSError`s of
    the files, and what `FileStore` raises.
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    return import_plans(store, _plans(paths, finish, freeze), told, group)


def _plans(paths: Iterable[str | os.PathLike[str]], finish: bool, freeze: bool) -> Iterator[Plan | ImportedRollout]:
    for path in paths:
        try:
            head, exchanges = _read(os.fspath(path))
            plan = _run(_captured(head["rollout"], exchanges))
        except (TokcapError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield ImportedRollout(os.path.basename(path), "refused", reason=str(error))
            continue
        if finish:
            plan.meta = {key: value for key, value in head.items() if key != "rollout"}
        plan.freeze = freeze
        yield plan


def _run(capturing: Coroutine[Any, Any, Plan]) -> Plan:
    """In a loop of its own, also where one is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(capturing)
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, capturing).result()


class _Exchange(msgspec.Struct):
    seq: int
    path: str
    status: int
    request: Any = None
    response: Any = None
    sse: list[str] | None = None
    note: str = ""


def _read(path: str) -> tuple[dict[str, Any], list[_Exchange]]:
    """The first line, and the exchanges. Raises `InvalidEntryError` with file and line."""
    name = os.path.basename(path)
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        lines = file.read().splitlines()
    if not lines:
        raise InvalidEntryError(f"{name} is empty")
    head: Any = None
    exchanges: list[_Exchange] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if head is None:
                head = msgspec.json.decode(line, type=dict[str, Any])
                check_rollout_id(head.get("rollout"))
            else:
                exchanges.append(msgspec.json.decode(line, type=_Exchange))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidIdError) as error:
            raise InvalidEntryError(f"{name}, line {number}: {error}") from error
    if len({exchange.seq for exchange in exchanges}) != len(exchanges):
        raise InvalidEntryError(f"{name}: two exchanges have the same seq")
    return head, exchanges


class _Statements:
    """A sink that keeps what capture says of one call."""

    def __init__(self, call: PlannedCall) -> None:
        self.call = call

    async def begin_call(
        self, rollout_id: str, model_call_id: str, choices: int = 1, *, request_digests: Iterable[bytes] = ()
    ) -> None:
        self.call.begins, self.call.choices = True, choices
        self.call.request_digests = tuple(request_digests)

    async def put(self, entry: TokenEntry) -> None:
        self.call.entries.append(entry)

    async def put_many(self, entries: Iterable[TokenEntry]) -> None:
        self.call.entries.extend(entries)

    async def settle_call(self, rollout_id: str, model_call_id: str, outcome: SettledOutcome, detail: str = "") -> None:
        self.call.settled, self.call.detail = outcome, detail

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        self.call.settled = "lost"

    async def close(self) -> None:
        return None


async def _captured(rollout_id: str, exchanges: Iterable[_Exchange]) -> Plan:
    routes = Routes()
    calls = []
    for exchange in exchanges:
        route = routes.find("POST", exchange.path, "")
        if route.may_generate and (route.known or _answers(exchange)):
            calls.append(await _capture(rollout_id, exchange))
    return Plan(rollout_id, calls)


def _answers(exchange: _Exchange) -> bool:
    """Whether an answer of a path that no table knows looks like one of a model."""
    answer = exchange.response
    return exchange.sse is not None or (isinstance(answer, dict) and any(key in answer for key in _ANSWERS))


_ANSWERS = ("choices", "output", "output_ids", "meta_info", "generated_text")


async def _capture(rollout_id: str, exchange: _Exchange) -> PlannedCall:
    call = PlannedCall(f"call-{exchange.seq:04d}")
    request = exchange.request if isinstance(exchange.request, dict) else None
    began = time.time()
    async with captured_call(
        _Statements(call),
        rollout_id,
        call.model_call_id,
        request=request,
        path=exchange.path,
        extra={"note": exchange.note} if exchange.note else None,
    ) as context:
        answer: Any = exchange.response
        if exchange.sse is not None:
            answer = StreamJoiner(choices=context.choices)
            answer.feed(_stream_of(exchange.sse))
            answer.end_of_stream()
        await capture_tokens(answer, status=exchange.status)
    # An answer that doesn't say when it was made gets the time of its capture, and that is now.
    now = time.time()
    call.entries = [
        msgspec.structs.replace(entry, created_at=0.0) if began <= entry.created_at <= now else entry
        for entry in call.entries
    ]
    return call


def _stream_of(lines: Iterable[str]) -> bytes:
    """A stream again: an event ends with its data."""
    ends = {True: "\n\n", False: "\n"}
    return "".join(f"{line}{ends[line.startswith('data')]}" for line in lines).encode("utf-8", "surrogatepass")
