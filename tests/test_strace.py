"""A real process in which `strace` fails system calls, or kills it in one: what it was told is durable is there."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.children import Channel, Nursery
from tests.proofs.faults_traced import Injection, Traced, calls_made, injections, unavailable, work
from tokcap import FileStore, TokenEntry
from tokcap.store.files import Files

RUNS = 32
SEED = 6


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    if reason := unavailable():
        pytest.skip(reason)
    made = Nursery()
    yield made
    made.close()


def traced(nursery: Nursery, directory: Path, injection: Injection) -> Traced:
    directory.mkdir()
    run = Traced(injection, str(directory))
    run.run(nursery)
    return run


def test_a_process_survives_what_its_system_calls_give_and_the_next_one_what_killed_it(
    nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    made = calls_made(nursery, str(tmp_path / "undisturbed"))
    planned = injections(made, random.Random(SEED))
    problems: list[str] = []
    seen: Counter[str] = Counter()
    for number in range(RUNS):
        injection = next(planned)
        run = traced(nursery, tmp_path / str(number), injection)
        problems += [f"{injection}: {problem}" for problem in run.problems]
        seen["injected"] += bool(run.injected)
        seen["failed"] += bool(run.failures)
        seen["killed in a step"] += injection.kills and bool(run.in_flight)
    assert not problems, "\n".join(problems)
    assert seen["injected"] > RUNS // 2 and seen["failed"] and seen["killed in a step"], seen


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_sync_that_always_fails_acknowledges_nothing(nursery: Nursery, tmp_path: Path, call: str) -> None:
    run = traced(nursery, tmp_path / "run", Injection(call, "EIO", 1, for_good=True))
    assert run.failures and not run.problems


def test_a_process_goes_on_when_its_collection_of_syncs_is_interrupted(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    if "io_getevents" not in calls_made(nursery, str(tmp_path / "undisturbed")):
        pytest.skip("the temporary directory is on a file system where the kernel is given no syncs")
    injected = 0
    for when in 1, 2, 3, 4:  # how many collections there are is chance: each may be of one sync or of many
        run = traced(nursery, tmp_path / str(when), Injection("io_getevents", "EINTR", when))
        assert not run.problems and not run.failures
        injected += bool(run.injected)
    assert injected


# ---- what this sees


def deaf(channel: Channel, directory: str) -> None:
    """A store that doesn't hear when a sync fails."""
    sync = Files.fdatasync

    def fdatasync(self: Files, fd: int) -> None:
        with contextlib.suppress(OSError):
            sync(self, fd)

    with patch.object(Files, "fdatasync", fdatasync):
        work(channel, directory)


def hasty(channel: Channel, directory: str) -> None:
    """One that answers before anything is written."""

    async def put(self: FileStore, entry: TokenEntry) -> None:
        threading.Timer(60, self.put_now, [entry]).start()

    with patch.object(FileStore, "put", put):
        work(channel, directory)


def vague(channel: Channel, directory: str) -> None:
    """One whose errors say nothing."""

    def put_now(self: FileStore, entry: TokenEntry) -> None:
        try:
            put(self, entry)
        except OSError as error:
            raise RuntimeError(str(error)) from error

    put = FileStore.put_now
    with patch.object(FileStore, "put_now", put_now):
        work(channel, directory)


@pytest.mark.parametrize(
    ("child", "injection", "expected"),
    [
        (deaf, Injection("fdatasync", "EIO", 1), "nobody was told"),
        (hasty, Injection("mkdir", "KILL", 5), "lost"),
        (vague, Injection("fdatasync", "EIO", 2, for_good=True), "not a DurabilityError"),
    ],
)
def test_a_store_that_is_wrong_is_found(
    nursery: Nursery,
    tmp_path: Path,
    child: Callable[[Channel, str], None],
    injection: Injection,
    expected: str,
) -> None:
    run = Traced(injection, str(tmp_path), child)
    run.run(nursery)
    assert any(expected in problem for problem in run.problems), run
