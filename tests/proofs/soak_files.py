"""Descriptors: 100,000 files open elsewhere, 10,000 open rollouts with 1,024 of them, and none left at all.

The first two must change nothing. Without a descriptor every operation succeeds or raises a `TokcapError`, loses
nothing that was acknowledged, and works again as soon as there is one.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.children import Channel, Nursery
from tokcap import FileStore
from tokcap.errors import TokcapError
from tokcap.store.snapshot import Snapshot

from .part import Outcome
from .soak_million import entry_of, rollout_id

__all__ = ("few_descriptors", "files_open_elsewhere", "no_descriptors")

SPARE = 500
"""Descriptors that a process that holds many keeps for itself."""
SOFT_LIMIT = 1024


# ---- many files open elsewhere


def hold_files(channel: Channel, path: str, count: int) -> None:
    """In a child: so many descriptors of a file, until it is told to end."""
    held = [os.open(path, os.O_RDONLY) for _ in range(count)]
    channel.send(len(held))
    with suppress(EOFError):
        channel.recv()


def _rate_of(store: FileStore, first: int, count: int, problems: list[str]) -> float:
    """Rollouts per second, from put to retirement; each is read back."""
    started = time.monotonic()
    numbers = range(first, first + count)
    store.put_many_now(map(entry_of, numbers))
    for number, snapshot in zip(numbers, store.freeze_many_now(map(rollout_id, numbers)), strict=True):
        with snapshot:
            if list(snapshot.entries) != [entry_of(number)]:
                problems.append(f"{rollout_id(number)} reads as something else with many files open elsewhere")
            if not store.retire_now(rollout_id(number), snapshot_id=snapshot.snapshot_id, version=1):
                problems.append(f"{rollout_id(number)} could not be retired with many files open elsewhere")
    return count / (time.monotonic() - started)


def files_open_elsewhere(outcome: Outcome, directory: Path, nursery: Nursery, files: int, rollouts: int) -> None:
    """Other processes hold so many files open while a store works."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = min(files, (hard if hard != resource.RLIM_INFINITY else files + SPARE) - SPARE)
    path = directory / "held"
    path.write_bytes(b"x")
    with FileStore(directory / "store", sweep_every_s=0) as store:
        before = _rate_of(store, 0, rollouts, outcome.problems)
        counts = [min(each, files - taken) for taken in range(0, files, each)]
        children = [nursery.start(raised, hold_files.__name__, str(path), count) for count in counts]
        try:
            held = sum(child.receive() for child in children)
            during = _rate_of(store, rollouts, rollouts, outcome.problems)
        finally:
            for child in children:
                nursery.forget(child)
        after = _rate_of(store, 2 * rollouts, rollouts, outcome.problems)
        if (swept := store.sweep_now(0)) != 3 * rollouts:
            outcome.problems.append(f"{swept} of {3 * rollouts} tombstones were swept after files were open elsewhere")
    if held < files:
        outcome.left_out.append(f"only {held:,} of {files:,} files could be held open")
    outcome.figure(
        "files open elsewhere; rollouts per second before, meanwhile, after",
        f"{held:,}; {before:,.0f}, {during:,.0f}, {after:,.0f}",
    )


def raised(channel: Channel, name: str, *arguments: Any) -> None:
    """In a child: a function of this module, with as many descriptors as the kernel allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    globals()[name](channel, *arguments)


def _break(broken_by: str) -> None:
    if broken_by:
        module, _, name = broken_by.rpartition(".")
        getattr(importlib.import_module(module), name)()


# ---- few descriptors


def work_with_few(channel: Channel, path: str, limit: int, rollouts: int, turns: int, broken_by: str) -> None:
    """In a child: more rollouts open than there are descriptors; tells the most that were in use, and problems."""
    _break(broken_by)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    most, problems = 0, []
    before = len(os.listdir("/proc/self/fd"))

    async def main(store: FileStore) -> None:
        nonlocal most
        for turn in range(turns):
            numbers = iter(range(rollouts))

            async def some(turn: int = turn, numbers: Iterator[int] = numbers) -> None:
                nonlocal most
                for number in numbers:
                    await store.put(_turn_of(number, turn))
                    if number % 50 == 0:
                        most = max(most, _in_use(limit))

            await asyncio.gather(*(some() for _ in range(200)))
        for first in range(0, rollouts, 100):
            numbers_here = range(first, min(first + 100, rollouts))
            for number, snapshot in zip(
                numbers_here, await store.freeze_many(map(rollout_id, numbers_here)), strict=True
            ):
                with snapshot:
                    expected = sorted((_turn_of(number, turn) for turn in range(turns)), key=lambda e: e.model_call_id)
                    if sorted(snapshot.entries, key=lambda entry: entry.model_call_id) != expected:
                        problems.append(f"{rollout_id(number)}: {len(snapshot.entries)} of {turns} entries read back")
            most = max(most, _in_use(limit))

    try:
        with FileStore(path, sweep_every_s=0) as store:
            asyncio.run(main(store))
    except TokcapError as error:
        problems.append(f"{rollouts} rollouts at a limit of {limit} descriptors: {error!r}")
    after = len(os.listdir("/proc/self/fd"))
    if after > before:
        problems.append(f"{after - before} descriptors are left open after the store was closed")
    channel.send((most, problems))


def _in_use(limit: int) -> int:
    """Descriptors of this process; all of them, if there is none left to look with."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return limit


def _turn_of(number: int, turn: int) -> Any:
    entry = entry_of(number)
    return type(entry)(
        entry.rollout_id,
        f"call-{turn}",
        [*entry.prompt_token_ids.tolist(), *range(turn)],
        entry.generation_token_ids,
        entry.generation_log_probs,
    )


def few_descriptors(
    outcome: Outcome,
    directory: Path,
    nursery: Nursery,
    rollouts: int,
    turns: int = 3,
    *,
    limit: int = SOFT_LIMIT,
    broken_by: str = "",
) -> None:
    """A process with a low soft limit keeps so many rollouts open at the same time.

    `broken_by` names a function that breaks the store in the child first: that must be found out.
    """
    started = time.monotonic()
    child = nursery.start(work_with_few, str(directory / "few"), limit, rollouts, turns, broken_by)
    most, problems = child.receive(3600.0)
    child.end()
    outcome.problems += problems
    outcome.figure(
        f"{rollouts:,} rollouts open at a limit of {limit:,} descriptors: most in use; calls per second",
        f"{most:,}; {rollouts * turns / (time.monotonic() - started):,.0f}",
    )
    if most >= limit:
        outcome.problems.append(f"{most} descriptors were in use at a limit of {limit}")


# ---- none left


@contextmanager
def only(free: int) -> Iterator[None]:
    """All descriptors of this process but so many are taken."""
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(min(free, len(taken))):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)


def _operations(store: FileStore, path: str, names: Iterator[int]) -> dict[str, Callable[[], object]]:
    """Every operation, each on a rollout that it can be done to; those are prepared here."""
    there = [next(names) for _ in range(9)]
    store.put_many_now(map(entry_of, there))
    frozen = [rollout_id(number) for number in there[:3]]
    snapshots = store.freeze_many_now(frozen)
    first, snapshot_id = frozen[0], snapshots[0].snapshot_id
    for snapshot in snapshots:
        snapshot.close()
    store.begin_call_now(rollout_id(there[3]), "begun")

    def reopen() -> None:
        with FileStore(path, sweep_every_s=0):
            pass

    return {
        "put, a new rollout": lambda: store.put_now(entry_of(next(names))),
        "put, more than one": lambda: store.put_many_now([entry_of(next(names)) for _ in range(4)]),
        "put, an open rollout": lambda: store.put_now(_turn_of(there[4], 1)),
        "begin_call": lambda: store.begin_call_now(rollout_id(there[4]), "call-new"),
        "begin_call, a new rollout": lambda: store.begin_call_now(rollout_id(next(names)), "call"),
        "settle_call": lambda: store.settle_call_now(rollout_id(there[3]), "begun", "aborted"),
        "mark_incomplete": lambda: store.mark_incomplete_now(rollout_id(there[4]), "lost"),
        "late mark": lambda: store.mark_incomplete_now(frozen[1], "late"),
        "finish": lambda: store.finish_now(rollout_id(there[5]), {"reward": 1.0}),
        "freeze": lambda: store.freeze_now(rollout_id(there[5])).close(),
        "freeze_many": lambda: _closed(store.freeze_many_now(map(rollout_id, there[6:8]))),
        "freeze, waiting": lambda: store.freeze_now(rollout_id(there[3]), wait_open_s=0.02).close(),
        "retire": lambda: store.retire_now(first, snapshot_id=snapshot_id, version=1),
        "reset": lambda: store.reset_now(rollout_id(there[8])),
        "read": lambda: store.read_now(frozen[2]).close(),
        "stat": lambda: store.stat_now(frozen[2]),
        "rollouts": lambda: list(store.rollouts()),
        "usage": lambda: store.usage_now(),
        "sweep": lambda: store.sweep_now(0),
        "expire": lambda: store.expire_now(3600.0),
        "another store": reopen,
    }


def _closed(snapshots: list[Snapshot]) -> None:
    for snapshot in snapshots:
        snapshot.close()


def run_out(channel: Channel, path: str, limit: int, most_free: int, broken_by: str) -> None:
    """In a child: every operation with 0, 1, 2 ... descriptors left, and again when there are enough."""
    _break(broken_by)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    FileStore(path, sweep_every_s=0).close_now()  # what is imported on first use is imported
    list(Path(path).glob("*"))
    numbers = iter(range(1_000_000))
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for free in range(most_free + 1):
        with FileStore(path, sweep_every_s=0) as store:
            operations = _operations(store, path, numbers)
            for what, act in operations.items():
                where = f"{what} with {free} descriptors left"
                with only(free):
                    failed = _try(act, where, counts, problems)
                if failed:
                    again = _try(act, f"{where}, tried again with enough of them", Counter(), problems)
                    if again is not None:
                        problems.append(f"{where}: fails for good: {again!r}")
            put = asyncio.run(_many_at_once(store, free, numbers, counts, problems))
        with FileStore(path, sweep_every_s=0) as store:
            for number in put:
                with store.read_now(rollout_id(number)) as snapshot:
                    if list(snapshot.entries) != [entry_of(number)]:
                        problems.append(f"{rollout_id(number)}: a put with {free} descriptors left was acknowledged")
            for name, _ in store.rollouts():
                stat = store.stat_now(name)
                if stat.damage:
                    problems.append(f"{name} is damaged after {free} descriptors were left: {stat.damage}")
            store.reset_now(*(name for name, _ in store.rollouts()))
            store.sweep_now(0)
    channel.send((dict(counts), problems))


async def _many_at_once(
    store: FileStore, free: int, numbers: Iterator[int], counts: Counter[str], problems: list[str]
) -> list[int]:
    """Puts of new rollouts, more than there are descriptors for; those that failed are put again."""
    some = [next(numbers) for _ in range(100)]
    with only(free):
        results = await asyncio.gather(*(store.put(entry_of(number)) for number in some), return_exceptions=True)
    for number, result in zip(some, results, strict=True):
        if result is None:
            counts["succeeded"] += 1
        elif isinstance(result, TokcapError):
            counts["typed error"] += 1
            await store.put(entry_of(number))
        else:
            problems.append(f"one of 100 puts with {free} descriptors left: {result!r} is not a TokcapError")
    return some


def _try(act: Callable[[], object], where: str, counts: Counter[str], problems: list[str]) -> Exception | None:
    """Its error, which has to be typed."""
    try:
        act()
        counts["succeeded"] += 1
        return None
    except TokcapError as error:
        counts["typed error"] += 1
        if isinstance(error, OSError) and error.errno != errno.EMFILE:
            problems.append(f"{where}: {error!r}, expected EMFILE")
        return error
    except Exception as error:
        problems.append(f"{where}: {error!r} is not a TokcapError")
        return error


def no_descriptors(
    outcome: Outcome, directory: Path, nursery: Nursery, most_free: int, *, limit: int = 200, broken_by: str = ""
) -> None:
    """Every operation, with 0 to `most_free` descriptors left in the process; `broken_by` as above."""
    child = nursery.start(run_out, str(directory / "none"), limit, most_free, broken_by)
    counts, problems = child.receive(3600.0)
    child.end()
    outcome.problems += problems
    total = sum(counts.values())
    outcome.figure(
        f"operations with 0 to {most_free} descriptors left: typed errors, all of them healed",
        f"{total:,}: {counts.get('typed error', 0):,}",
    )
    if not counts.get("typed error"):
        outcome.problems.append("no operation met the limit of descriptors: the run shows nothing")
