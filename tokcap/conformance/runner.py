"""Runs the checks one after the other, each with a time-out, and turns what happens into a `Report`."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from . import (
    checks_attempts,
    checks_calls,
    checks_chains,
    checks_conflict,
    checks_crash,
    checks_freeze,
    checks_interface,
    checks_marks,
    checks_puts,
    checks_retire,
    checks_values,
)
from .kit import Crash, Kit, SinkFactory, SourceFactory, ViolationError
from .registry import CHECKS, Check, Need
from .report import Report
from .watchdog import interrupting_a_blocked_loop

__all__ = ("check", "check_names")

_MODULES = (
    checks_interface,
    checks_values,
    checks_chains,
    checks_puts,
    checks_conflict,
    checks_freeze,
    checks_retire,
    checks_marks,
    checks_calls,
    checks_attempts,
    checks_crash,
)
"""Importing them fills `CHECKS`; listed so that the order of a report is that of this list."""

_GRACE_S = 1.0
_ABOUT_FACTORIES = "factories_give_a_new_instance_each_time"


def check_names() -> tuple[str, ...]:
    """The names of all checks, in the order in which they run."""
    return tuple(one.name for one in _in_order())


async def check(
    sink_factory: SinkFactory,
    source_factory: SourceFactory,
    *,
    crash: Crash | None = None,
    timeout_s: float = 30.0,
    only: Collection[str] | None = None,
) -> Report:
    """Check a sink and source pair against everything that tokcap promises of them.

    The factories take nothing, may be coroutine functions, and return a new instance on the same shared storage each
    time: the kit treats several instances as several processes. `crash` kills one instance (see `Crash`); without it
    the checks of what survives a crash are skipped by name, never passed. So are checks of optional methods that the
    sink doesn't have.

    Every check uses rollout ids of its own and may take `timeout_s`; a store that hangs fails that check. `only` names
    the checks to run, all by default. Nothing is raised for what the store does: see `Report.failed`. If the first call
    of a factory fails, that is the one failure in the report, and no check is run.
    """
    _refuse_instances(sink_factory, source_factory)
    selected = _in_order()
    if only is not None:
        unknown = sorted(set(only) - {one.name for one in selected})
        if unknown:
            raise ValueError(f"no such check: {', '.join(unknown)}; see check_names()")
        selected = [one for one in selected if one.name in only]
    report = Report()
    missing, no_instances = await _first_look(Kit(sink_factory, source_factory, crash), timeout_s)
    if crash is None:
        missing["crash"] = "needs the crash hook: pass crash= to check()"
    if no_instances:
        rule = "The factories make the instances that every check works with; without them no check was run."
        report.failed[_ABOUT_FACTORIES] = f"{no_instances}\nrule: {rule}"
        return report
    for one in selected:
        reasons = [missing[need] for need in one.needs if need in missing]
        if reasons:
            report.skipped[one.name] = "; ".join(reasons)
            continue
        text = await _failure(one, Kit(sink_factory, source_factory, crash), timeout_s)
        if text:
            report.failed[one.name] = f"{text}\nrule: {one.rule}"
        else:
            report.passed.append(one.name)
    return report


def _in_order() -> list[Check]:
    order = [module.__name__ for module in _MODULES]
    return sorted(CHECKS, key=lambda one: order.index(one.run.__module__))


def _refuse_instances(sink_factory: object, source_factory: object) -> None:
    for kind, method, given in (("sink", "put", sink_factory), ("source", "freeze", source_factory)):
        # Looked up on the type, because a class is a factory, too, and has the methods of its instances.
        if not callable(given) or hasattr(type(given), method):
            raise TypeError(
                f"{kind}_factory is an instance of {type(given).__name__}: "
                f"pass a function that makes a {kind}, not a {kind}"
            )


async def _first_look(kit: Kit, timeout_s: float) -> tuple[dict[Need, str], str]:
    """What the pair can't do, with the reason to skip; and what went wrong if a factory makes nothing."""
    found: dict[Need, str] = {}
    opened: list[object] = []

    async def look(_: Kit) -> None:
        sink, source = opened
        for need in get_args(Need):
            if need == "crash":
                continue
            places = (source, sink) if need == "reset" else (sink,)
            if not any(callable(getattr(place, need, None)) for place in places):
                found[need] = f"needs {need}, which the {'source' if need == 'reset' else 'sink'} doesn't have"

    for kind, opening in (("sink", kit.sink), ("source", kit.source)):
        task: asyncio.Future[object] = asyncio.ensure_future(opening())
        text = await _bounded(task, timeout_s, did=f"call the {kind} factory for the first time")
        if text:
            await _bounded(asyncio.ensure_future(kit.close()), min(timeout_s, 10.0))
            return found, text
        opened.append(task.result())
    await _failure(Check("look", "", (), look), kit, timeout_s)
    return found, ""


async def _failure(one: Check, kit: Kit, timeout_s: float) -> str:
    """Run one check; what went wrong, or an empty text."""
    text = await _bounded(asyncio.ensure_future(one.run(kit)), timeout_s)
    closing = await _bounded(asyncio.ensure_future(kit.close()), min(timeout_s, 10.0))
    return text or (closing and f"{closing}\nwhen: the check had passed, and its instances were closed")


async def _bounded(task: asyncio.Future[Any], timeout_s: float, *, did: str = "") -> str:
    """Wait for the task, no longer than it may take; what went wrong, or an empty text. `did`: unless a check tells."""
    with interrupting_a_blocked_loop(timeout_s + _GRACE_S):
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except BaseException:
            task.cancel()
            raise
        if not task.done():
            text = _waiting(task, timeout_s, did)
            task.cancel()
            # Not wait_for: a store that swallows the cancellation would hang the kit.
            await asyncio.wait({task}, timeout=_GRACE_S)
            return text
    if task.cancelled():
        return "expected: a result or an error\nseen: CancelledError out of the store, though nobody cancelled"
    error = task.exception()
    if error is None:
        return ""
    return str(error) if type(error) is ViolationError else _unexpected(error, did)


def _unexpected(error: BaseException, did: str) -> str:
    """An error that no check provided for: what the check was doing, and where the store raised."""
    frames = traceback.extract_tb(error.__traceback__)
    message = "".join(traceback.format_exception_only(error)).strip()
    return f"did: {did or _step(frames)}\nexpected: no error\nseen: {message}\n{_shown(frames[-3:])}"


def _waiting(task: asyncio.Future[Any], timeout_s: float, did: str) -> str:
    """A check that doesn't end: what it was doing, and the awaits below that, innermost last."""
    frames: list[traceback.FrameSummary] = []
    waiting: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    while waiting is not None:
        frame: FrameType | None = getattr(waiting, "cr_frame", None)
        if frame is not None:
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waiting = getattr(waiting, "cr_await", None)
    waits = _shown(frames[-3:])
    return f"did: {did or _step(frames)}\nexpected: an end within {timeout_s:g} s\nseen: waits at\n{waits}"


def _step(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a check; what helpers and the store do below it is shown with the error."""
    steps = [frame for frame in frames if Path(frame.filename).name.startswith("checks_")]
    return f"{steps[-1].line} (in {steps[-1].name})" if steps else "close the instances of the check"


def _shown(frames: Sequence[traceback.FrameSummary]) -> str:
    return "\n".join(f"  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in frames)
