"""Writes a summary of every model call, beside the call and never in its way.

What fails here fails no call: it is logged once per kind, counted, and the summary is missing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..capture.statements import described
from ..errors import ClosedError
from ..store import FileStore
from ..store.base import raise_first
from ..store.waiters import in_thread
from .entries import OCCURRENCES, entry_of, evaluation_directory
from .summary import ModelCallSummary, begun, ended

__all__ = ("CallObservation", "EvaluationRecorder")

logger = logging.getLogger("tokcap.evaluation")

_MOST_INTENTS = 2_000
"""Writes that may wait at a time; an intent beyond them is left out."""
_MOST_WRITES = 2 * _MOST_INTENTS
"""The same for summaries: one whose intent was let in has a place."""
_OPEN_AGAIN_S = 10.0
"""How long a store that could not be opened is left alone."""
_CLOSE_PATIENCE_S = 10.0
"""How long `close` waits for what is being written."""


class _TooManyWritesError(RuntimeError):
    """The disk takes records more slowly than calls come."""


class EvaluationRecorder:
    """Observes model calls and stores their summaries under `<directory>/evaluation/`.

    directory: `model_call_capture_dir`. The store in it is opened, and made (0700) if it is missing, when the first
    call begins, and anew after a fork. patience_s: how long the end of a call waits for its record to be durable; one
    that takes longer is written all the same. clock, now: monotonic and unix seconds.

    Nothing here raises, and `begin` does not block: writes go on in tasks of the running event loop.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        patience_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.directory = evaluation_directory(directory)
        """Of the store."""
        self._patience_s, self._clock, self._now = patience_s, clock, now
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Everything that a fork must not share."""
        self._pid = os.getpid()
        self._guard = threading.Lock()
        """Held while the store is opened, which may take long: never taken by an event loop."""
        self._counting = threading.Lock()
        self._store: FileStore | None = None
        self._opening: asyncio.Task[FileStore | Exception] | None = None
        self._refused: Exception | None = None
        self._refused_until = 0.0
        self._writing: set[asyncio.Task[None]] = set()
        self.failures: Counter[str] = Counter()
        """How often a record could not be written, by kind: the name of the error, and what the system calls it."""

    def begin(
        self,
        rollout_id: str,
        model_call_id: str,
        *,
        method: str,
        path: str,
        dialect: str,
        request: Mapping[str, Any] | None,
        request_bytes: int,
        training: bool,
        retry_count: int = 0,
        engine: str = "",
    ) -> CallObservation:
        """A call begins. What the request asks for is taken from it now; its intent is written in the background.

        path: without the capture prefix. request: its decoded body, as the client sent it; None if it has none.
        engine: name and version.
        """
        if self._pid != os.getpid():
            self._start()
        began, began_at = self._clock(), self._now()
        try:
            summary = begun(
                rollout_id,
                model_call_id,
                began_at=began_at,
                method=method,
                path=path,
                dialect=dialect,
                engine=engine,
                request=request,
                request_bytes=request_bytes,
                training=training,
                retry_count=retry_count,
            )
        except Exception as error:
            self.failed(error)
            summary = ModelCallSummary(
                rollout_id=rollout_id, model_call_id=model_call_id, began_at=began_at, outcome="open"
            )
        observation = CallObservation(self, summary, began, self._clock, self._patience_s)
        observation.intent = self.write(summary, observation.occurrence, _MOST_INTENTS)
        return observation

    def write(
        self,
        summary: ModelCallSummary,
        occurrence: int,
        most: int = _MOST_WRITES,
        after: asyncio.Task[None] | None = None,
    ) -> asyncio.Task[None] | None:
        """Begin to write a summary, after another write; None if that can't be, which is counted."""
        try:
            if len(self._writing) >= most:
                raise _TooManyWritesError(f"{most} writes wait for {self.directory} already")
            loop = asyncio.get_running_loop()
        except Exception as error:
            self.failed(error)
            return None
        task = loop.create_task(self._write(summary, occurrence, after))
        self._writing.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._writing.discard)
        return task

    async def _write(self, summary: ModelCallSummary, occurrence: int, after: asyncio.Task[None] | None) -> None:
        try:
            if after is not None and after.get_loop() is asyncio.get_running_loop():
                await asyncio.wait({after})
            store = await self._opened()
            entry = entry_of(summary, occurrence)
            if not summary.is_open:
                await store.put(entry)
                return
            intent = store.begin_call(
                summary.rollout_id, summary.model_call_id, choices=2, retry_count=summary.retry_count
            )
            # At once, so that one sync does for both.
            raise_first(await asyncio.gather(intent, store.put(entry), return_exceptions=True))
        except Exception as error:
            self.failed(error)

    async def _opened(self) -> FileStore:
        """The store. Raises what `FileStore` raises; not tried again for some seconds then."""
        if self._store is not None:
            return self._store
        if self._refused is not None and self._clock() < self._refused_until:
            raise self._refused.with_traceback(None)
        loop = asyncio.get_running_loop()
        opening = self._opening
        if opening is None or opening.done() or opening.get_loop() is not loop:
            # One thread, however many calls begin meanwhile.
            opening = self._opening = loop.create_task(in_thread(self._open))
        await asyncio.wait({opening})
        store = opening.result()
        if isinstance(store, Exception):
            raise store.with_traceback(None)
        return store

    def _open(self) -> FileStore | Exception:
        with self._guard:
            try:
                if self._store is None and not self._closed:
                    self._store = FileStore(self.directory)
                store = self._store
                if store is not None and not self._closed:
                    return store
                self._store = None
                if store is not None:  # it was closed meanwhile
                    store.close_now()
                raise ClosedError("the recorder is closed")
            except Exception as error:
                self._refused, self._refused_until = error, self._clock() + _OPEN_AGAIN_S
                return error

    def failed(self, error: Exception) -> None:
        """Count what could not be recorded, and log the first of its kind."""
        kind = type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            kind = f"{kind} {errno.errorcode.get(error.errno, error.errno)}"
        with self._counting:
            self.failures[kind] += 1
            first = self.failures[kind] == 1
        if first:
            logger.warning(
                "a call could not be recorded for evaluation, further ones are only counted: %s", described(error)
            )

    async def close(self) -> None:
        """Write what is begun, for some seconds at most, and close the store. Repeatable; later calls are counted as
        failures."""
        if self._pid != os.getpid():
            self._start()
        loop = asyncio.get_running_loop()
        writing = [task for task in self._writing if task.get_loop() is loop]
        if writing:
            await asyncio.wait(writing, timeout=_CLOSE_PATIENCE_S)
        self._closed = True  # before the store is taken: one that is being opened is closed by whoever opens it
        store, self._store = self._store, None
        if store is not None:
            try:
                await store.close()
            except Exception as error:
                self.failed(error)


class CallObservation:
    """One model call, while it is observed. Made by `EvaluationRecorder.begin`; used by one event loop."""

    __slots__ = (
        "_answer_bytes",
        "_began",
        "_clock",
        "_ending",
        "_first_token_s",
        "_is_over",
        "_patience_s",
        "_pid",
        "_recorder",
        "_status",
        "intent",
        "occurrence",
        "summary",
    )

    def __init__(
        self,
        recorder: EvaluationRecorder,
        summary: ModelCallSummary,
        began: float,
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self.summary = summary
        """What is known of the call: all of it, once it has ended."""
        self.occurrence = uuid.uuid4().int % OCCURRENCES
        self.intent: asyncio.Task[None] | None = None
        """The write of the intent."""
        self._recorder, self._began, self._clock, self._patience_s = recorder, began, clock, patience_s
        self._pid = os.getpid()
        self._status = self._answer_bytes = 0
        self._first_token_s: float | None = None
        self._ending: asyncio.Task[None] | None = None
        self._is_over = False

    def status(self, status: int) -> None:
        """The answer begins, with this HTTP status."""
        self._status = status

    def first_token(self) -> None:
        """The first event with content was passed on. Only the first time counts."""
        if self._first_token_s is None:
            self._first_token_s = self._clock() - self._began

    def answered(self, byte_count: int) -> None:
        """So many more bytes of the answer were sent."""
        self._answer_bytes += byte_count

    async def end(
        self,
        *,
        answer: Mapping[str, Any] | list[Any] | None,
        error: object = None,
        outcome: str = "",
        detail: str = "",
        client_gone: bool = False,
    ) -> None:
        """The call is over: store its summary. Only the first time counts.

        answer: the whole answer, decoded, as the client saw it, of a stream what `StreamJoiner.answer()` gives; None
        if there is none that can be read. error: the exception, or the body of the error, that ended it.
        outcome, detail: of the training record, where there is one. Returns once the summary is durable, or after the
        recorder's patience; a caller that is cancelled leaves the write running.
        """
        if self._pid != os.getpid():
            return  # in a forked child: the parent has the call
        if not self._is_over:
            self._is_over = True
            self._end(answer, error, outcome, detail, client_gone)
        ending = self._ending
        if ending is not None and ending.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({ending}, timeout=self._patience_s)

    def _end(
        self,
        answer: Mapping[str, Any] | list[Any] | None,
        error: object,
        outcome: str,
        detail: str,
        client_gone: bool,
    ) -> None:
        try:
            self.summary = ended(
                self.summary,
                answer=answer,
                error=error,
                status=self._status,
                latency_s=self._clock() - self._began,
                first_token_s=self._first_token_s,
                answer_bytes=self._answer_bytes,
                client_gone=client_gone,
                outcome=outcome,
                detail=detail,
            )
        except Exception as failure:
            self._recorder.failed(failure)
        else:
            self._ending = self._recorder.write(self.summary, self.occurrence, after=self.intent)
        self.intent = None
