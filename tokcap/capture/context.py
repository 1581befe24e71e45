"""Which model call is being answered: known to whatever runs inside the request, and to nothing outside it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any

from ..entry import TokenEntry
from ..errors import InvalidEntryError
from ..ids import check_model_call_id, check_rollout_id
from ..protocol import Outcome, TokenSink
from .request import requested_choices

__all__ = (
    "CaptureContext",
    "begin_block",
    "current_capture_context",
    "end_block",
    "leave_block",
    "reset_capture_context",
    "set_capture_context",
    "target_of",
)

logger = logging.getLogger("tokcap.capture")


class CaptureContext:
    """One model call that is to be captured, and what became of it so far. Mutable, used by one event loop.

    Raises `InvalidIdError` for an id that does not match the rule of `tokcap.ids`, `InvalidEntryError` for a number of
    choices below 1.
    """

    __slots__ = (
        "block",
        "choices",
        "ended",
        "error_status",
        "extra",
        "idempotency_key",
        "intent_registered",
        "interleaved",
        "model",
        "model_call_id",
        "outcome",
        "path",
        "policy_version",
        "reason",
        "request",
        "request_digests",
        "response_id",
        "retry_count",
        "rollout_id",
        "sampling",
        "sink",
        "stored",
        "stored_choices",
        "writing",
    )

    def __init__(
        self,
        rollout_id: str,
        model_call_id: str,
        sink: TokenSink | None,
        *,
        choices: int | None = None,
        model: str = "",
        request: Mapping[str, Any] | None = None,
        path: str = "",
        request_digests: Iterable[bytes] | None = None,
        retry_count: int = 0,
        idempotency_key: str = "",
        sampling: Mapping[str, Any] | None = None,
        policy_version: str | int | None = None,
        response_id: str = "",
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.rollout_id = check_rollout_id(rollout_id)
        self.model_call_id = check_model_call_id(model_call_id, rollout_id=rollout_id)
        self.sink = sink
        """None: another process stores the record; then only the identity is of use, and nothing is written here."""
        if choices is not None and (type(choices) is not int or choices < 1):
            raise InvalidEntryError(
                f"rollout {rollout_id}, call {model_call_id}: choices is {choices!r}, expected an integer from 1"
            )
        self.choices = requested_choices(request) if choices is None else choices
        """How many answers the call has; by default as many as the request asks for."""
        self.model = model
        """The model's name for the record; if empty, the one that the answer gives."""
        self.request = request
        """The JSON body as the engine got it: for the digests of its messages and the sampling parameters."""
        self.path = path
        """Of the route that was asked, for answers whose shape alone doesn't say what they are."""
        self.request_digests = None if request_digests is None else tuple(request_digests)
        """16 bytes per message; None: taken from `request` when the intent is written."""
        self.retry_count = retry_count
        self.idempotency_key = idempotency_key
        self.sampling = dict(sampling or {})
        """Sampling defaults of the server and its `logprobs_mode`; what `request` says itself goes before them."""
        self.policy_version = policy_version
        """The policy that answers, for engines that don't tell; may be set until the answer is captured."""
        self.response_id = response_id
        """The id of the answer as the client sees it; if empty, the one in the answer."""
        self.extra = dict(extra or {})
        """What else is to be stored with the record: the engine's name and version, for example."""
        self.intent_registered = False
        """Whether the sink holds an intent of this call; False with a sink that knows none."""
        self.stored_choices: set[int] = set()
        """The indexes of the choices whose entries are durable."""
        self.stored: dict[int, TokenEntry] = {}
        """Those entries, to tell a repetition from another content."""
        self.outcome: Outcome | None = None
        """What a durable settlement said last, or `conflict` if the sink refused the record for that; else None."""
        self.reason = ""
        """Why the call has no record, or none that is whole."""
        self.error_status: int | None = None
        """Of an answer that was no answer but an error: its HTTP status, 0 if it tells none."""
        self.writing: asyncio.Task[Any] | None = None
        """The write that was begun last. It goes on when its caller is cancelled."""
        self.block: Block | None = None
        """Where its `captured_call` was entered; None without one."""
        self.ended = False
        """Whether its `captured_call` was left: then nothing more is said of this call."""
        self.interleaved = False
        """Whether an answer came that may be of this call or of another one that was open in the same task."""

    @property
    def committed(self) -> bool:
        """Whether the entries of all choices are stored, or are stored by another process."""
        return self.sink is None or len(self.stored_choices) >= self.choices

    def __repr__(self) -> str:
        # Without the request: contexts are logged, and content must not be.
        said = "recorded" if self.committed else self.outcome or "open"
        return f"CaptureContext({self.rollout_id!r}, {self.model_call_id!r}, choices={self.choices}, {said})"


class Block:
    """Where a `captured_call` was entered."""

    __slots__ = ("generator", "parent", "task")

    def __init__(self, task: asyncio.Task[Any] | None, generator: int | None, parent: CaptureContext | None) -> None:
        self.task = task
        self.generator = generator
        """The frame of the async generator that it was entered in; None outside of one."""
        self.parent = parent
        """The call that was current before: an enclosing one, or one of another generator of the same task."""


_current: ContextVar[CaptureContext | None] = ContextVar("tokcap_capture_context", default=None)


def set_capture_context(context: CaptureContext) -> Token[CaptureContext | None]:
    """Make `context` that of the running task and of tasks it starts; others don't see it.

    Returns what `reset_capture_context` takes.
    """
    return _current.set(context)


def reset_capture_context(token: Token[CaptureContext | None]) -> None:
    """Back to what was current before. Raises `ValueError` in a task that did not set it."""
    _current.reset(token)


def current_capture_context() -> CaptureContext | None:
    """The call that the running task answers; None for traffic that is not captured.

    A call that has ended is none: then it is the nearest enclosing one that has not, for the task that entered it; a
    task that is left over from it answers no call.
    """
    context = _current.get()
    if context is None or not context.ended or context.block is None:
        return context
    return _enclosing(context) if context.block.task is _task() else None


def begin_block(context: CaptureContext) -> None:
    """Enter a block: `context` is the current one until `leave_block`."""
    context.block = Block(_task(), next(_generators(), None), current_capture_context())
    _current.set(context)


def end_block(context: CaptureContext) -> None:
    """From now on nothing but the end of the block speaks for this call."""
    context.ended = True


def leave_block(context: CaptureContext) -> None:
    """The call before is current again. In any order, and in another task than the one that entered."""
    context.ended = True
    block = context.block
    if block is None:
        return
    block.parent = _enclosing(context)  # so that no chain of ended calls grows
    # Blocks of generators that take turns end in any order: only who is current gives back.
    if _current.get() is context:
        _current.set(block.parent)


def target_of(context: CaptureContext | None, what: str) -> CaptureContext | None:
    """The call to which `what` belongs: the given one, else the current one. None: to none, or it can't be told."""
    found = _current.get() if context is None else context
    if found is not None and found.ended:
        enclosing = current_capture_context() if context is None else None
        if enclosing is None:
            logger.warning("%r has ended: %s for it was dropped", found, what)
            return None
        found = enclosing
    if context is None and found is not None:
        mixed = _mixed_with(found)
        if mixed:
            for each in mixed:
                each.interleaved = True
            logger.error(
                "%s was dropped: blocks of captured_call take turns in one task, so it may be of any of %r; "
                "pass context= in async generators",
                what,
                mixed,
            )
            return None
    return found


def _mixed_with(context: CaptureContext) -> list[CaptureContext]:
    """The calls that the running code may be answering, if `context` is current but need not be the one.

    A context variable belongs to the task that iterates a generator, not to the generator. So if blocks of different
    generators are open in one task, the running generator has to be that of the current call.
    """
    block = context.block
    if block is None or block.task is None:
        return []
    # Whoever enters a block finds those that are open in its task before it, whether they enclose it or not.
    opened = [context]
    while (outer := _enclosing(opened[-1])) is not None and outer.block is not None and outer.block.task is block.task:
        opened.append(outer)
    owners = {each.block.generator for each in opened if each.block is not None}
    if len(owners) < 2:
        return []
    if block.task is _task():
        running = next((frame for frame in _generators() if frame in owners), None)
        if running == block.generator:
            return []
    # Else a task that one of them started, and nothing tells which.
    return opened


def _generators() -> Iterator[int]:
    """The async generators that are running, the innermost first; without those that are context managers.

    By the ids of their frames: a frame that is held keeps alive what it refers to.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR and (
            caller is None or caller.f_globals.get("__name__") != "contextlib"
        ):
            yield id(frame)
        frame = caller


def _enclosing(context: CaptureContext) -> CaptureContext | None:
    """The nearest call around `context` that has not ended."""
    found = context.block.parent if context.block is not None else None
    while found is not None and found.ended:
        found = found.block.parent if found.block is not None else None
    return found


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop
        return None
