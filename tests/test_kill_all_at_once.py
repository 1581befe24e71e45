"""Writers, consumers and a sweeper on one directory, killed at any moment; each acknowledged put counts exactly once.

The long form is `scripts/prove kills`. Here also what random kills meet too rarely: processes that are stopped, or that
fork, in the middle of a put.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tokcap.conformance.samples import difference, entry_of
from tokcap.errors import BusyError, FrozenError
from tokcap.store import FileStore
from tokcap.store.files import Files

from .children import Channel, ChildError, Nursery, fast_directory
from .children import nursery as _nursery
from .proofs.kills import torture
from .proofs.kills_mutants import MUTANTS

nursery = pytest.fixture(scope="module")(_nursery)
directory = pytest.fixture(fast_directory)

KILLS = 90
"""In each kind of directory; the long form has thousands."""


def _torture(nursery: Nursery, directory: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    run, waited = torture(nursery, directory, seed, KILLS)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{run.hit.total()} kills, {run.counts['rollouts']} rollouts, worst wait afterwards "
            f"{waited * 1000:.0f} ms: {dict(run.hit.most_common())}\n"
        )
    assert not run.problems, "\n".join(run.problems)
    assert run.hit.total() >= KILLS
    assert run.counts["pairs handed over"]
    for kinds in (("put", "put_many", "begin"), ("freeze", "consume: freeze"), ("retire", "consume: retire", "sweep")):
        assert any(run.hit[kind] for kind in kinds), f"no kill struck any of {kinds}: {run.hit}"


def test_all_are_killed_at_any_moment_and_every_put_counts_once(
    nursery: Nursery, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _torture(nursery, directory, 1, capsys)


def test_all_are_killed_at_any_moment_on_a_disk_and_every_put_counts_once(
    nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _torture(nursery, tmp_path, 2, capsys)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_torture_sees(mutant: str, nursery: Nursery, directory: Path) -> None:
    run, _ = torture(nursery, directory, 5, 600, mutant=mutant, enough=1)
    assert run.problems, f"not seen in {run.hit.total()} kills"


# ---- in the middle of a put


class HookedFiles(Files):
    """Does something once, in the middle of the first put: before its fence is taken, or before its sync."""

    def __init__(self, hook: Callable[[], None], *, before_the_fence: bool = False) -> None:
        super().__init__()
        self._hook: Callable[[], None] | None = hook
        self._before_the_fence = before_the_fence

    def arm(self, hook: Callable[[], None]) -> None:
        self._hook = hook

    def _call(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()

    def try_lock(self, fd: int) -> bool:
        if self._before_the_fence and "/rollouts/" in os.readlink(f"/proc/self/fd/{fd}"):
            self._call()
        return super().try_lock(fd)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        written = super().write(fd, buffers, offset)
        if not self._before_the_fence:
            self._call()
        return written


def stop_in_a_put(channel: Channel, path: str, before_the_fence: bool) -> None:
    """In a child: a put, in the middle of which the process stops (SIGSTOP)."""
    store = FileStore(path, sweep_every_s=0.0)
    store.put_now(entry_of("r", "first"))
    store.close_now()

    def stop() -> None:
        channel.send("stops")
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to the process, it may strike much later

    store = FileStore(path, files=HookedFiles(stop, before_the_fence=before_the_fence), sweep_every_s=0.0)
    try:
        store.put_now(entry_of("r", "second"))
    except FrozenError:
        channel.send("refused")
    else:
        channel.send("acknowledged")


def test_a_writer_that_was_stopped_before_its_fence_while_others_froze_is_refused(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    child = nursery.start(stop_in_a_put, path, True)
    assert child.receive() == "stops"
    store = FileStore(path, sweep_every_s=0.0)
    snapshot = store.freeze_now("r")
    child.signal(signal.SIGCONT)
    assert child.receive() == "refused"
    with snapshot, store.freeze_now("r") as again:
        assert [entry.model_call_id for entry in snapshot.entries] == ["first"]
        assert [entry.model_call_id for entry in again.entries] == ["first"]
        assert again.version == snapshot.version == 1
        assert not again.damage


def test_a_freeze_does_not_pass_a_writer_that_was_stopped_in_the_middle_of_a_put(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    child = nursery.start(stop_in_a_put, path, False)
    assert child.receive() == "stops"
    with FileStore(path, sweep_every_s=0.0, lock_timeout_s=0.2) as hasty, pytest.raises(BusyError):
        hasty.freeze_now("r")
    store = FileStore(path, sweep_every_s=0.0)
    frozen: list[list[str]] = []

    def freeze() -> None:
        with store.freeze_now("r") as snapshot:
            frozen.append(sorted(entry.model_call_id for entry in snapshot.entries))

    waiting = threading.Thread(target=freeze)
    waiting.start()
    child.signal(signal.SIGCONT)
    assert child.receive() == "acknowledged"
    waiting.join()
    assert frozen == [["first", "second"]]


def test_a_stopped_writer_that_is_killed_leaves_no_lock_and_no_part_of_its_put(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    child = nursery.start(stop_in_a_put, path, False)
    assert child.receive() == "stops"
    child.kill()
    with FileStore(path, sweep_every_s=0.0, lock_timeout_s=5.0) as store, store.freeze_now("r") as snapshot:
        assert [entry.model_call_id for entry in snapshot.entries] == ["first"]
        assert not difference(snapshot.entries[0], entry_of("r", "first"))
        assert not snapshot.damage
        assert snapshot.torn


def fork_in_a_put(channel: Channel, path: str, dies: bool) -> None:
    """In a child: a put, in the middle of which the thread that holds the fence forks. The forked child lives on, or it
    puts into the same rollout and is killed while it waits for its parent's fence."""
    forked: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            try:
                if dies:
                    store.put_now(entry_of("r", "of the forked"))
                else:
                    channel.recv()
            finally:
                os._exit(0)
        forked.append(pid)
        if dies:
            time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            channel.send("forked")
            time.sleep(60.0)

    files = HookedFiles(lambda: None)
    store = FileStore(path, files=files, sweep_every_s=0.0)
    store.put_now(entry_of("r", "first"))
    files.arm(fork)
    store.put_now(entry_of("r", "second"))
    assert forked
    store.put_now(entry_of("r", "third"))
    channel.send("acknowledged")


def test_a_child_forked_while_its_parent_holds_the_fence_does_not_keep_it_when_the_parent_is_killed(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    parent = nursery.start(fork_in_a_put, path, False)
    assert parent.receive() == "forked"
    parent.kill()
    store = FileStore(path, sweep_every_s=0.0, lock_timeout_s=5.0)
    store.put_now(entry_of("r", "after"))
    with store.freeze_now("r") as snapshot:
        assert sorted(entry.model_call_id for entry in snapshot.entries) == ["after", "first"]
        assert not snapshot.damage


def test_a_forked_child_that_dies_while_it_waits_takes_nothing_from_its_parent(
    directory: Path, nursery: Nursery
) -> None:
    path = str(directory / "store")
    parent = nursery.start(fork_in_a_put, path, True)
    try:
        assert parent.receive() == "acknowledged"
    except ChildError as error:
        pytest.fail(str(error))
    store = FileStore(path, sweep_every_s=0.0, lock_timeout_s=5.0)
    with store.freeze_now("r") as snapshot:
        assert sorted(entry.model_call_id for entry in snapshot.entries) == ["first", "second", "third"]
        assert not snapshot.damage
