"""Freezing several rollouts at once: the same promises as one by one, and no rollout pays for another."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import Call, Fault, FaultyFiles, View, view
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError, RetiredError
from tokcap.store import Snapshot, fence
from tokcap.store import base as store_module
from tokcap.store.layout import Layout
from tokcap.store.together import Together

ROLLOUTS = [f"r{number}" for number in range(7)]
ROLLOUT = re.compile(r"/(r[0-9])\b")


def entry(rollout_id: str, call: str) -> TokenEntry:
    return TokenEntry(rollout_id, call, np.arange(300, dtype=np.int32), [7, 8], [-0.5, -1.0])


@pytest.fixture(params=["kernel", "one after another"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """Of a file system whose syncs are waited for in either way."""
    in_kernel = request.param == "kernel"
    monkeypatch.setattr(store_module, "kernel_syncs_for", lambda kind: 4 if in_kernel else 0)
    monkeypatch.setattr(store_module, "sync_threads_for", lambda kind: 8 if in_kernel else 1)
    return FaultyFiles(in_kernel=in_kernel)


@pytest.fixture
def store(store_dir: Path, files: FaultyFiles) -> Iterator[FileStore]:
    with FileStore(store_dir, files=files, sweep_every_s=0) as store:
        for rollout_id in ROLLOUTS[:-1]:  # the last one is absent
            store.put_now(entry(rollout_id, "a"))
            store.put_now(entry(rollout_id, "b"))
        files.trace.clear()
        yield store


def of(files: FaultyFiles, rollout_id: str) -> list[Call]:
    return [call for call in files.trace if (found := ROLLOUT.search(call.path)) and found[1] == rollout_id]


def test_it_is_what_freezing_one_by_one_gives(store: FileStore) -> None:
    for snapshot, rollout_id in zip(asyncio.run(store.freeze_many(ROLLOUTS)), ROLLOUTS, strict=True):
        with snapshot, store.read_now(rollout_id) as again:
            assert snapshot._index == again._index
            assert snapshot._paths == again._paths
            assert snapshot._buffers == again._buffers
            assert [one.model_call_id for one in snapshot.entries] == (["a", "b"] if rollout_id != "r6" else [])
        assert store.stat_now(rollout_id).state == "frozen"


def test_each_rollout_is_synced_before_its_rename_and_after_it(store: FileStore, files: FaultyFiles) -> None:
    for snapshot in store.freeze_many_now(ROLLOUTS):
        snapshot.close()
    for rollout_id in ROLLOUTS:
        (renamed,) = (call for call in of(files, rollout_id) if call.kind == "rename")
        rename = files.trace.index(renamed)
        temporary = files.trace[rename].path
        parent = os.path.dirname(temporary)
        before = {(call.kind, call.path) for call in files.trace[:rename]}
        assert {("fdatasync", f"{temporary}/manifest"), ("fsync", temporary)} <= before
        after = [(call.kind, call.path) for call in files.trace[rename:]]
        assert after.index(("fsync", parent)) < after.index(("unlock", os.path.dirname(parent)))


def test_syncs_are_shared(store: FileStore, files: FaultyFiles) -> None:
    for snapshot in store.freeze_many_now(ROLLOUTS[:5]):
        snapshot.close()
    kinds = [call.kind for call in files.trace if call.kind in ("rename", "fdatasync", "link")]
    assert kinds == ["link"] * 5 + ["fdatasync"] * 5 + ["rename"] * 5


@pytest.mark.parametrize(
    "kind", ["mkdir", "link", "create", "pwritev", "fdatasync", "fsync", "rename", "listdir", "read"]
)
def test_what_fails_for_one_rollout_costs_the_others_nothing(store: FileStore, files: FaultyFiles, kind: str) -> None:
    wanted = {rollout_id: view(store, rollout_id) for rollout_id in ROLLOUTS}
    rollouts, number = ROLLOUTS[-3:], 1
    while True:
        files.trace.clear()
        with files.failing(Fault(number, errno.EIO, kinds=[kind])) as plan:
            done = freeze_all(store, rollouts)
        if plan.hit is None:
            break
        found = ROLLOUT.search(plan.hit.path)
        hit = found[1] if found else ROLLOUTS[-1]  # of which also the directory above is synced
        for rollout_id, result in done.items():
            if isinstance(result, BaseException):
                assert rollout_id == hit and isinstance(result, DurabilityError)
                assert rollout_id in str(result)
            else:
                result.close()
                assert store.stat_now(rollout_id).state == "frozen"
            now = view(store, rollout_id)
            assert View(wanted[rollout_id].state, now.entries, now.outcomes) == wanted[rollout_id]
        number += 1
        for rollout_id in rollouts:  # as they were
            store.reset_now(rollout_id)
            if rollout_id != ROLLOUTS[-1]:
                store.put_now(entry(rollout_id, "a"))
                store.put_now(entry(rollout_id, "b"))
    assert number > 2


def freeze_all(store: FileStore, rollouts: list[str]) -> dict[str, Snapshot | BaseException]:
    from tokcap.store.lifecycle import Freeze

    results = store._running().call_many([Freeze(rollout_id) for rollout_id in rollouts])
    return dict(zip(rollouts, results, strict=True))


def test_one_that_is_refused_fails_alone(store: FileStore) -> None:
    with store.freeze_now("r2") as snapshot:
        store.retire_now("r2", snapshot_id=snapshot.snapshot_id, version=1)
    done = freeze_all(store, ROLLOUTS)
    assert isinstance(done.pop("r2"), RetiredError)
    for result in done.values():
        assert isinstance(result, Snapshot)
        result.close()


def test_a_fence_that_somebody_holds_keeps_only_its_own_rollout_waiting(store: FileStore, store_dir: Path) -> None:
    fd = os.open(Layout(str(store_dir)).rollout("r3"), os.O_RDONLY)
    assert fence.lock(store._files, fd)

    async def main() -> list[Snapshot]:
        freezing = asyncio.ensure_future(store.freeze_many(ROLLOUTS))
        while any(store.stat_now(rollout_id).state != "frozen" for rollout_id in ROLLOUTS if rollout_id != "r3"):
            await asyncio.sleep(0.001)
        assert store.stat_now("r3").state == "open"
        await store.put(entry("other", "a"))
        os.close(fd)
        return await freezing

    for snapshot, rollout_id in zip(asyncio.run(main()), ROLLOUTS, strict=True):
        assert snapshot.rollout_id == rollout_id
        snapshot.close()


def test_what_else_is_asked_of_a_rollout_meanwhile_is_done(store: FileStore) -> None:
    async def main() -> None:
        puts = [asyncio.ensure_future(store.put(entry(rollout_id, "c"))) for rollout_id in ROLLOUTS[:3]]
        await asyncio.sleep(0)
        many = asyncio.ensure_future(store.freeze_many([*ROLLOUTS, "r1", "r1"]))
        await asyncio.sleep(0)
        notes = [store.note_delivery(rollout_id, "a", "full") for rollout_id in ROLLOUTS]
        snapshots = await many
        await asyncio.gather(*puts, *notes)
        assert [len(snapshot.entries) for snapshot in snapshots] == [3, 3, 3, 2, 2, 2, 0, 3, 3]
        for snapshot in snapshots:
            snapshot.close()

    asyncio.run(main())


def test_two_calls_at_once_both_get_everything(store: FileStore) -> None:
    async def main() -> None:
        one, other = await asyncio.gather(store.freeze_many(ROLLOUTS), store.freeze_many(reversed(ROLLOUTS)))
        assert [snapshot.rollout_id for snapshot in one] == ROLLOUTS
        assert [snapshot.rollout_id for snapshot in reversed(other)] == ROLLOUTS
        for snapshot in one + other:
            snapshot.close()

    asyncio.run(main())


def test_something_unheard_of_leaves_nobody_waiting(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("tokcap.store.together._Syncs.sync", fails)
        assert {type(result) for result in freeze_all(store, ROLLOUTS).values()} == {MemoryError}
    for snapshot in store.freeze_many_now(ROLLOUTS):
        snapshot.close()


def test_without_a_thread_they_are_frozen_one_by_one(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tokcap-freeze":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(Together, "freeze", lambda *_: pytest.fail("there is no thread for it"))
    for snapshot in store.freeze_many_now(ROLLOUTS):
        snapshot.close()


def test_many_are_frozen_in_turns(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    together = store._running()._together
    assert together is not None
    monkeypatch.setattr(together, "_most", 2)
    assert [snapshot.rollout_id for snapshot in store.freeze_many_now(ROLLOUTS)] == ROLLOUTS
