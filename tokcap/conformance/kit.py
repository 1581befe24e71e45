"""What a check works with: instances from the factories, fresh rollout ids, expectations that explain themselves."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from ..entry import TokenEntry
from ..protocol import CallRecord, SettlingSink, TokenCaptureSnapshot, TokenSink, TokenSource
from .samples import difference, key_of

__all__ = ("Crash", "Kit", "SinkFactory", "SourceFactory", "ViolationError", "expect")

T = TypeVar("T")

SinkFactory = Callable[[], TokenSink | Awaitable[TokenSink]]
"""Returns a new sink on the same shared storage each time it is called; several sinks stand for several processes."""

SourceFactory = Callable[[], TokenSource | Awaitable[TokenSource]]
"""Returns a new source on that storage each time."""

Crash = Callable[[TokenSink | TokenSource], Awaitable[None] | None]
"""Kills the one instance that it is given, as `kill -9` of its process would. It may be a coroutine function.

From the moment that it is called,

- nothing of the instance is closed, flushed or otherwise brought to an orderly end;
- what the instance holds in memory is gone: buffers, queues, tasks, threads. If the author can also drop what was
  written but not synced (a copy of the directory as of the last sync, a device that forgets), all the better;
- an operation of the instance that is in flight never returns successfully. It may raise, or hang: the kit cancels it;
- what a kernel gives back is given back: locks, descriptors, connections;
- other instances on the same storage go on undisturbed.

The most honest hook runs the instance in a child process behind a proxy and sends it SIGKILL. In one process, it is
enough to make every later step of the instance raise, and to throw its buffers away. When the hook has returned, the
kit never touches the instance again, opens new ones through the factories and looks: every acknowledged record must be
there, and everything else whole or absent.
"""


class ViolationError(AssertionError):
    """A store did something else than it promised."""

    def __init__(self, did: str, expected: str, seen: str) -> None:
        super().__init__(f"did: {did}\nexpected: {expected}\nseen: {seen}")


def expect(condition: bool, *, did: str, expected: str, seen: str) -> None:
    """Fail the running check unless `condition` holds."""
    if not condition:
        raise ViolationError(did, expected, seen)


class Kit:
    """One per check. Opens instances, remembers them, and closes them after the check."""

    def __init__(self, sink_factory: SinkFactory, source_factory: SourceFactory, crash: Crash | None) -> None:
        self._sink_factory = sink_factory
        self._source_factory = source_factory
        self._crash = crash
        self._open: list[TokenSink | TokenSource] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._reader: TokenSource | None = None

    # ---- instances

    async def sink(self) -> SettlingSink:
        """A new sink. Only checks that ask for the optional methods call them."""
        made = await given(self._sink_factory())
        self._open.append(made)
        return cast(SettlingSink, made)

    async def source(self) -> TokenSource:
        """A new source."""
        made = await given(self._source_factory())
        self._open.append(made)
        return made

    async def reader(self) -> TokenSource:
        """The one source of this check for plain reading: never an instance that wrote."""
        if self._reader is None:
            self._reader = await self.source()
        return self._reader

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Freeze through the reader."""
        return await (await self.reader()).freeze(rollout_id)

    async def retire(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        """Retire through the reader."""
        return await (await self.reader()).retire(rollout_id, snapshot_id=snapshot_id, version=version)

    async def reset(self, *rollout_ids: str) -> None:
        """Reset through a new source, or a new sink if only sinks can."""
        for instance in (await self.source(), await self.sink()):
            method = getattr(instance, "reset", None)
            if callable(method):
                await method(*rollout_ids)
                return

    async def crash(self, instance: TokenSink | TokenSource) -> None:
        """Kill an instance by the hook of the author. Nothing touches it afterwards."""
        assert self._crash is not None
        self._open = [other for other in self._open if other is not instance]
        await given(self._crash(instance))

    async def close(self) -> None:
        """End what the check left running and close what it left open."""
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()
        opened, self._open = self._open, []
        for instance in opened:
            await instance.close()

    # ---- running things

    def rollout(self) -> str:
        """The id of a rollout that nobody has used before."""
        return f"conformance-{uuid.uuid4().hex}"

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something beside the check."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run things at the same time; the first error ends it."""
        tasks = [self.start(work) for work in works]
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        return [task.result() for task in tasks]

    async def put_in_order(self, sink: TokenSink, entries: Iterable[TokenEntry]) -> None:
        """Put one after the other, and let others run in between even if the puts never wait."""
        for entry in entries:
            await sink.put(entry)
            await asyncio.sleep(0)

    async def finished(self, tasks: Iterable[asyncio.Task[Any]], *, within_s: float = 1.0) -> None:
        """Wait for tasks of a crashed instance, which may hang for ever; then cancel what is left."""
        left = set(tasks)
        if left:
            _, left = await asyncio.wait(left, timeout=within_s)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=within_s)


# ---- expectations


async def given(value: T | Awaitable[T]) -> T:
    """What a factory or hook gave, sync or async."""
    return await value if inspect.isawaitable(value) else value


def returned(task: asyncio.Task[Any]) -> bool:
    """True if the operation returned: it is acknowledged."""
    return task.done() and not task.cancelled() and task.exception() is None


async def expect_refusal(work: Awaitable[object], error: type[Exception], *, did: str) -> None:
    """`work` must raise `error`."""
    try:
        result = await work
    except error:
        return
    except Exception as other:
        raise ViolationError(did, f"{error.__name__}", f"{type(other).__name__}: {other}") from other
    raise ViolationError(did, f"{error.__name__}", f"no error; it returned {result!r}")


def expect_entries(snapshot: TokenCaptureSnapshot, expected: Iterable[TokenEntry], *, did: str) -> None:
    """The snapshot must hold exactly these entries, each identical to what was put."""
    wanted = {key_of(entry): entry for entry in expected}
    seen = list(snapshot.entries)
    keys = [key_of(entry) for entry in seen]
    missing, surplus = wanted.keys() - keys, set(keys) - wanted.keys()
    expect(
        not missing and not surplus and len(keys) == len(set(keys)),
        did=did,
        expected=f"a snapshot of {snapshot.rollout_id} with exactly {len(wanted)} entries, one per call and choice",
        seen=f"{len(keys)} entries; missing: {_few(missing)}; nobody put: {_few(surplus)}; "
        f"twice: {_few({key for key in keys if keys.count(key) > 1})}",
    )
    for entry in seen:
        expect_same(entry, wanted[key_of(entry)], did=did)


def expect_same(seen: TokenEntry, expected: TokenEntry, *, did: str) -> None:
    """An entry must be identical to what was put."""
    found = difference(seen, expected)
    if found:
        call, choice = key_of(expected)
        raise ViolationError(did, f"the entry of call {call}, choice {choice}, exactly as it was put", found)


def expect_outcome(snapshot: TokenCaptureSnapshot, model_call_id: str, outcome: str, *, did: str) -> CallRecord:
    """`calls` must say exactly this of the call."""
    found = [call for call in snapshot.calls if call.model_call_id == model_call_id]
    expect(
        len(found) == 1 and found[0].outcome == outcome,
        did=did,
        expected=f"one record in snapshot.calls for {model_call_id or 'an unnamed call'!r}, outcome {outcome}",
        seen=f"{[call.outcome for call in found]}; all calls: {_few(c.model_call_id for c in snapshot.calls)}",
    )
    return found[0]


def expect_incomplete(snapshot: TokenCaptureSnapshot, incomplete: bool, *, did: str) -> None:
    """`incomplete` must be this."""
    expect(
        snapshot.incomplete is incomplete,
        did=did,
        expected=f"snapshot.incomplete is {incomplete}",
        seen=f"snapshot.incomplete is {snapshot.incomplete!r}; outcomes: "
        f"{_few((call.model_call_id, call.outcome) for call in snapshot.calls)}",
    )


def expect_pair(snapshot: TokenCaptureSnapshot, snapshot_id: str, version: int, *, did: str) -> None:
    """The snapshot must have this identity and version."""
    expect(
        (snapshot.snapshot_id, snapshot.version) == (snapshot_id, version),
        did=did,
        expected=f"snapshot_id {snapshot_id}, version {version}",
        seen=f"snapshot_id {snapshot.snapshot_id}, version {snapshot.version}",
    )


def expect_answer(answer: object, expected: bool, *, did: str) -> None:
    """retire must answer exactly True or False."""
    expect(answer is expected, did=did, expected=f"{expected}", seen=repr(answer))


def _few(items: Iterable[object]) -> str:
    listed = sorted(map(str, items))
    return f"{', '.join(listed[:5])} ... ({len(listed)})" if len(listed) > 5 else ", ".join(listed) or "none"
