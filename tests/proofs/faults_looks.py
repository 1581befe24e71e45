"""Faults while a store is opened, and while somebody only looks."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterable, Iterator

from tests.faulty_files import Fault, FaultyFiles, Reach, view
from tokcap import FileStore
from tokcap.errors import DurabilityError, TokcapError

from .faults_disturbed import descriptors, leftovers, open_store
from .faults_operations import entry

__all__ = ("LOOKS", "STATES", "disturb_look", "disturb_opening")

STATES = ("missing", "empty", "in use")
"""Of the directory, when a store is opened."""


def _ends_of_rollouts(store: FileStore) -> list[tuple[str, str]]:
    return sorted((rollout, str(state)) for rollout, state in store.rollouts())


LOOKS: dict[str, Callable[[FileStore], object]] = {
    "read of an open rollout": lambda store: view(store, "r"),
    "read of a frozen rollout": lambda store: view(store, "frozen"),
    "read of a retired rollout": lambda store: view(store, "retired"),
    "list": _ends_of_rollouts,
    "usage": lambda store: list(store.usage_now()),  # which leaves out what it can't read
}


def faults_of(calls: int, errors: Iterable[int]) -> Iterator[Fault]:
    reaches: tuple[Reach, ...] = ("once", "kind")
    for number in range(1, calls + 1):
        for error in errors:
            for reach in reaches:
                yield Fault(number, error, reach)


# ---- opening


def _prepare(root: str, state: str) -> None:
    if state != "missing":
        os.makedirs(root, 0o700)
    if state == "in use":
        with open_store(root) as store:
            store.put_now(entry("r", "a"))


def disturb_opening(state: str, directory: str, errors: Iterable[int]) -> tuple[int, list[str]]:
    """Open a store with a fault at every call: how many calls were made to fail, and what did not hold."""
    _prepare(f"{directory}/expected/s", state)
    files = FaultyFiles()
    open_store(f"{directory}/expected/s", files).close_now()
    opened = descriptors()
    injected, problems = 0, []
    for number, fault in enumerate(faults_of(len(files.trace), errors)):
        root = f"{directory}/{number}/s"
        _prepare(root, state)
        struck, problem = _open_disturbed(root, state, fault)
        injected += struck
        if descriptors() > opened:
            problem = "descriptors are left open"
        if problem:
            problems.append(f"opening, directory {state}: {fault}: {problem}")
        shutil.rmtree(os.path.dirname(root))
    return injected, problems


def _open_disturbed(root: str, state: str, fault: Fault) -> tuple[int, str]:
    files = FaultyFiles()
    problem = ""
    with files.failing(fault) as plan:
        try:
            open_store(root, files).close_now()
        except TokcapError as failure:
            if not isinstance(failure, OSError) or failure.errno != fault.error or root not in str(failure):
                problem = f"raised {failure!r}"
        except Exception as failure:
            problem = f"raised {failure!r}"
    with open_store(root) as store:
        store.put_now(entry("r", "b"))
        if view(store, "r").calls != ({"a", "b"} if state == "in use" else {"b"}):
            problem = f"shows {view(store, 'r')}"
    if leftovers(root) and "unlink" not in {call.kind for call in plan.hits}:
        problem = f"left behind: {leftovers(root)}"
    return len(plan.hits), problem


# ---- looking


def disturb_look(name: str, directory: str, errors: Iterable[int], *, read_only: bool = True) -> tuple[int, list[str]]:
    """Look with a fault at every call: what is shown is what is there, or nothing is; never damage."""
    look = LOOKS[name]
    with open_store(f"{directory}/s") as store:
        for rollout in "r", "frozen", "retired":
            for one in entry(rollout, "a"), entry(rollout, "large", tokens=60_000):
                store.put_now(one)
            store.settle_call_now(rollout, "b", "aborted")
        store.freeze_now("frozen").close()
        with store.freeze_now("retired") as snapshot:
            pass
        assert store.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=1)
        store.mark_incomplete_now("retired", "c")
    opened = descriptors()
    files = FaultyFiles()
    injected, problems = 0, []
    with open_store(f"{directory}/s", files, read_only=read_only) as store:
        files.trace.clear()
        expected = look(store)
        for fault in faults_of(len(files.trace), errors):
            shown: object = None
            failure: Exception | None = None
            with files.failing(fault) as plan:
                try:
                    shown = look(store)
                except Exception as error:
                    failure = error
            injected += len(plan.hits)
            if failure is None and shown != expected:
                problems.append(f"{name}: {fault}: shows {shown}, not {expected}")
            elif failure is not None and (not isinstance(failure, DurabilityError) or failure.errno != fault.error):
                problems.append(f"{name}: {fault}: raised {failure!r}")
    gc.collect()
    if descriptors() > opened:
        problems.append(f"{name}: descriptors are left open")
    shutil.rmtree(f"{directory}/s")
    return injected, problems
