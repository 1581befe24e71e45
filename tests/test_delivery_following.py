"""Following the finish notes of a store: what counts as finished, what is taken up again, what is left alone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.agent_runs import AgentRun, message
from tests.children import Channel, Nursery
from tests.children import nursery as _nursery
from tokcap import FileStore
from tokcap.delivery import MaskGuard, Rollouts, consume
from tokcap.delivery.following import Finished, follow
from tokcap.delivery.looks import Look, StoreLooks, looks_at

nursery = pytest.fixture(scope="module")(_nursery)

POLL_S = 0.01
PATIENCE_S = 30.0


def following(store: Any, **options: Any) -> Rollouts:
    return consume(store, **{"poll_s": POLL_S, "sweep_every_s": 0.0, **options})


async def finished_turn(store: Any, *rollout_ids: str) -> None:
    for rollout_id in rollout_ids:
        await AgentRun(store, rollout_id).call("c1", [message("hi")])
        await store.finish(rollout_id, {"reward": 1.0})


async def nothing_comes(rollouts: Rollouts, within_s: float = 0.15) -> None:
    waiting = asyncio.ensure_future(anext(rollouts))
    done, _ = await asyncio.wait([waiting], timeout=within_s)
    waiting.cancel()
    assert not done


async def next_of(rollouts: Rollouts) -> Any:
    return await asyncio.wait_for(anext(rollouts), PATIENCE_S)


def _finish_some(channel: Channel, directory: str) -> None:
    store = FileStore(directory)
    for name in channel.recv():
        asyncio.run(finished_turn(store, name))
    channel.send("done")
    channel.recv()


def test_finish_notes_of_another_process_are_picked_up(store_dir: Path, nursery: Nursery) -> None:
    async def body() -> None:
        child = nursery.start(_finish_some, str(store_dir))
        async with FileStore(store_dir) as store, following(store) as rollouts:
            await nothing_comes(rollouts)
            child.send(["a", "b", "c"])
            seen = []
            for _ in range(3):
                rollout = await next_of(rollouts)
                assert (rollout.meta, rollout.masked, rollout.resumed) == ({"reward": 1.0}, False, False)
                assert await rollout.done()
                seen.append(rollout.rollout_id)
            assert sorted(seen) == ["a", "b", "c"]
            await nothing_comes(rollouts)
            child.send("end")

    asyncio.run(body())


def test_a_rollout_without_a_note_is_left_open(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store, following(store) as rollouts:
            await AgentRun(store, "a").call("c1", [message("hi")])
            await nothing_comes(rollouts)
            assert (await store.stat("a")).state == "open"
            await store.finish("a")
            assert (await next_of(rollouts)).rollout_id == "a"

    asyncio.run(body())


def test_what_is_open_and_unchanged_is_not_read_again(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            read: list[str] = []
            stat_now = FileStore.stat_now

            def counted(self: FileStore, rollout_id: str) -> Any:
                read.append(rollout_id)
                return stat_now(self, rollout_id)

            monkeypatch.setattr(FileStore, "stat_now", counted)
            run = AgentRun(store, "a")
            await run.call("c1", [message("hi")])
            async with following(store) as rollouts:
                await nothing_comes(rollouts)
                assert read == ["a"]
                await run.call("c2", [message("ho")])
                await nothing_comes(rollouts)
                assert 2 <= len(read) <= 3

    asyncio.run(body())


def test_names_of_what_is_retired_are_not_read_again_until_they_change(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a")
            with await store.freeze("a") as snapshot:
                await store.retire("a", snapshot_id=snapshot.snapshot_id, version=1)
            directory = next(store_dir.glob("rollouts/*/a"))
            looks: Any = looks_at(store)
            assert await looks.all(lambda _: True) == []
            assert looks._retired == {}  # another change could fall into the same tick of the clock
            os.utime(directory, (time.time() - 10,) * 2)
            assert await looks.all(lambda _: True) == []
            assert list(looks._retired) == ["a"]
            looked = looks._one
            looks._one = None  # so that looking would raise
            assert await looks.all(lambda _: True) == []
            looks._one = looked
            await store.reset("a")
            await finished_turn(store, "a")
            assert [rollout_id for rollout_id, _ in await looks.all(lambda _: True)] == ["a"]
            assert looks._retired == {}

    asyncio.run(body())


def test_frozen_rollouts_are_taken_up_after_a_restart_but_not_counted_again(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a")
            await store.finish("empty")
            guard = MaskGuard(None)
            async with following(store, guard=guard) as rollouts:
                first = [await next_of(rollouts) for _ in range(2)]
                assert not any([await one.done() for one in first if one.masked])
                await nothing_comes(rollouts)
            assert (guard.samples, guard.masked) == (2, 1)
            async with following(store, guard=guard) as rollouts:
                again = {one.rollout_id: one for one in [await next_of(rollouts) for _ in range(2)]}
                for one in first:
                    same = again[one.rollout_id]
                    assert (same.snapshot_id, same.version, same.resumed) == (one.snapshot_id, one.version, True)
                assert await again["a"].done()
                await finished_turn(store, "b")
                assert not (await next_of(rollouts)).resumed
                await AgentRun(store, "c").call("c1", [message("hi")])
                (await store.freeze("c")).close()  # by somebody else, while we look
                fresh = await next_of(rollouts)
                assert (fresh.rollout_id, fresh.resumed) == ("c", False)
                assert await fresh.done()
            assert (guard.samples, guard.masked) == (4, 1)
            async with following(store) as rollouts:
                assert sorted([(await next_of(rollouts)).rollout_id for _ in range(2)]) == ["b", "empty"]
                await nothing_comes(rollouts)

    asyncio.run(body())


def test_hazard_05_a_new_attempt_under_the_same_id_is_followed_anew(store_dir: Path) -> None:
    async def body() -> None:
        # Slowly, so that mostly nobody looks between the end of one attempt and the begin of the next.
        async with FileStore(store_dir) as store, following(store, poll_s=0.2) as rollouts:
            seen = set()
            for _ in range(3):
                await store.reset("a")
                await finished_turn(store, "a")
                rollout = await next_of(rollouts)
                seen.add(rollout.snapshot_id)
                if len(seen) == 2:
                    await rollout.done()
            assert len(seen) == 3

    asyncio.run(body())


def test_a_rollout_that_is_reset_while_it_waits_to_be_taken_is_not_frozen(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a", "b", "c")
            async with following(store, ahead=1) as rollouts:
                first = await next_of(rollouts)
                await asyncio.sleep(0.2)  # the next one is frozen, the last one known
                [waiting] = [name async for name, state in store.rollouts() if state == "open"]
                await store.reset(waiting)
                await AgentRun(store, waiting).call("c1", [message("new attempt")])
                second = await next_of(rollouts)
                await nothing_comes(rollouts)
                assert {first.rollout_id, second.rollout_id, waiting} == {"a", "b", "c"}
                assert (await store.stat(waiting)).state == "open"

    asyncio.run(body())


def _die_in_the_middle(channel: Channel, directory: str) -> None:
    async def body() -> None:
        store = FileStore(directory)
        await AgentRun(store, "a").call("c1", [message("hi")])
        await store.begin_call("a", "c2")
        channel.send("begun")
        channel.recv()

    asyncio.run(body())


def test_a_rollout_whose_owner_died_counts_as_finished_when_idle(store_dir: Path, nursery: Nursery) -> None:
    async def body() -> None:
        child = nursery.start(_die_in_the_middle, str(store_dir))
        await asyncio.to_thread(child.receive)
        child.kill()
        async with FileStore(store_dir) as store:
            async with following(store) as rollouts:
                await nothing_comes(rollouts)
            began = time.monotonic()
            async with following(store, idle_s=0.3) as rollouts:
                rollout = await next_of(rollouts)
                assert time.monotonic() - began >= 0.3
                assert (rollout.rollout_id, rollout.metrics["trained"], rollout.metrics["open_calls"]) == ("a", 2, 1)

    asyncio.run(body())


def test_an_idle_rollout_waits_for_an_open_call_of_a_live_process(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            run = AgentRun(store, "a")
            await store.begin_call("a", "c1")
            async with following(store, idle_s=1.0, wait_open_s=0.0) as rollouts:
                await asyncio.sleep(1.4)  # it counts as idle, and its freeze waits
                await run.answer("c1", [message("late")])
                rollout = await next_of(rollouts)
                assert not rollout.masked

    asyncio.run(body())


def test_a_rollout_that_is_written_to_is_not_idle(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            run = AgentRun(store, "a")
            async with following(store, idle_s=1.0) as rollouts:
                for turn in range(8):
                    await run.call(f"c{turn}", [message("hi")])
                    await asyncio.sleep(0.2)
                assert (await store.stat("a")).state == "open"
                assert (await next_of(rollouts)).metrics["calls"] == 8

    asyncio.run(body())


async def told(finished: AsyncIterator[Finished]) -> str:
    return (await asyncio.wait_for(anext(finished), PATIENCE_S)).rollout_id


def test_an_idle_rollout_that_is_written_to_before_it_is_taken_is_not_idle_any_more(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            runs = {name: AgentRun(store, name) for name in ("a", "b")}
            for run in runs.values():
                await run.call("c1", [message("hi")])
            async with aclosing(follow(store, bool, idle_s=0.4, poll_s=POLL_S)) as finished:
                first = await told(finished)
                [second] = {"a", "b"} - {first}
                await runs[second].call("c2", [message("ho")])
                began = time.monotonic()
                assert await told(finished) == second
                assert time.monotonic() - began >= 0.4

    asyncio.run(body())


def test_every_rollout_is_told_once(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a", "b")
            (await store.freeze("b")).close()
            seen = []
            async with aclosing(follow(store, bool, idle_s=0.1, poll_s=POLL_S)) as finished:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        async for one in finished:
                            seen += [one.rollout_id]
            assert sorted(seen) == ["a", "b"]

    asyncio.run(body())


def test_a_rollout_that_could_not_be_looked_at_again_is_told_later(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a")
            one = StoreLooks.one
            failures: list[str] = []

            async def failing_once(self: StoreLooks, rollout_id: str) -> Look:
                if not failures:
                    failures.append(rollout_id)
                    raise OSError("too many open files")
                return await one(self, rollout_id)

            monkeypatch.setattr(StoreLooks, "one", failing_once)
            async with aclosing(follow(store, bool, idle_s=None, poll_s=POLL_S)) as finished:
                assert await told(finished) == "a"
            assert failures == ["a"]

    asyncio.run(body())


def test_workers_follow_their_shares(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            ids = [f"task-{i}" for i in range(12)]
            await finished_turn(store, *ids)
            seen: list[list[str]] = []
            for worker in range(3):
                async with following(store, worker=worker, workers=3) as rollouts:
                    seen.append([])
                    for _ in range(len([one for one in ids if _share(one) == worker])):
                        seen[-1].append((await next_of(rollouts)).rollout_id)
                    await nothing_comes(rollouts)
            assert sorted(one for share in seen for one in share) == sorted(ids)

    asyncio.run(body())


def _share(rollout_id: str) -> int:
    from zlib import crc32

    return crc32(rollout_id.encode()) % 3


def test_a_rollout_that_cannot_be_looked_at_stops_no_other(store_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a", "bad")
            directory = next(store_dir.glob("rollouts/*/bad"))
            (directory / ("0" * 32)).mkdir(mode=0o700)
            async with following(store) as rollouts:
                assert (await next_of(rollouts)).rollout_id == "a"
                await nothing_comes(rollouts)
            assert caplog.text.count("two incarnations") == 1
            (directory / ("0" * 32)).rmdir()

    asyncio.run(body())


def test_stop_ends_a_consumer_that_waits_for_notes(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await finished_turn(store, "a")
            async with following(store) as rollouts:
                assert (await next_of(rollouts)).rollout_id == "a"
                asyncio.get_running_loop().call_later(0.05, rollouts.stop)
                with pytest.raises(StopAsyncIteration):
                    await next_of(rollouts)

    asyncio.run(body())


class Plain:
    """A source of another make that can be followed."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.freeze, self.retire, self.stat, self.close = store.freeze, store.retire, store.stat, store.close

    async def rollouts(self) -> AsyncIterator[tuple[str, str]]:
        async for pair in self._store.rollouts():
            yield pair


def test_other_sources_are_followed_by_their_rollouts_and_stat(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            async with following(Plain(store), idle_s=0.3) as rollouts:
                await finished_turn(store, "a")
                rollout = await next_of(rollouts)
                assert rollout.rollout_id == "a"
                assert await rollout.done()
                await AgentRun(store, "b").call("c1", [message("hi")])
                assert (await next_of(rollouts)).rollout_id == "b"
                await nothing_comes(rollouts)
            async with following(Plain(store)) as rollouts:
                assert (await next_of(rollouts)).resumed

    asyncio.run(body())


@pytest.mark.parametrize("failing", ["rollouts", "stat"])
@pytest.mark.parametrize("error", [ConnectionError("a blip"), asyncio.CancelledError("a blip")])
def test_a_look_that_fails_is_logged_and_made_again(
    store_dir: Path, caplog: pytest.LogCaptureFixture, failing: str, error: BaseException
) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            source = Plain(store)
            rollouts_of, stat_of, failures = source.rollouts, source.stat, [0, 0]

            async def failing_rollouts() -> AsyncIterator[tuple[str, str]]:
                failures[0] += 1
                if failures[0] in (2, 3):
                    raise error
                async for pair in rollouts_of():
                    yield pair

            async def failing_stat(rollout_id: str) -> Any:
                failures[1] += 1
                if failures[1] <= 4:
                    raise error
                return await stat_of(rollout_id)

            setattr(source, failing, failing_rollouts if failing == "rollouts" else failing_stat)
            async with following(source) as rollouts:
                await asyncio.sleep(0.1)
                await finished_turn(store, "a")
                assert (await next_of(rollouts)).rollout_id == "a"
            assert max(failures) > 3
            assert "a blip" in caplog.text
            assert caplog.text.count("a blip") <= 2  # not at every look

    asyncio.run(body())
