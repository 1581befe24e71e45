"""The consumer's loop: finished rollouts in, built ones out, retired exactly when it says so."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agent_runs import AgentRun, MakeStore, message
from tests.agent_runs import stores as _stores
from tests.children import Channel, Nursery
from tests.children import nursery as _nursery
from tests.rollout_examples import call, example
from tokcap import FileStore
from tokcap.config import close_process_endpoints
from tokcap.delivery import Delivery, MaskGuard, Rollouts, consume, consume_from_config, consume_now
from tokcap.delivery.handover import same_trained
from tokcap.delivery.identity import rollout_id_of
from tokcap.delivery.share import share_of
from tokcap.errors import BusyError, FrozenError, InvalidIdError, InvalidOptionError, MaskFractionError
from tokcap.trajectory import Build, build

stores = _stores
nursery = pytest.fixture(scope="module")(_nursery)

PATIENCE_S = 30.0


async def one_turn(store: Any, *rollout_ids: str) -> None:
    for rollout_id in rollout_ids:
        await AgentRun(store, rollout_id).call("c1", [message("hi")])


async def two_turns(store: Any, rollout_id: str) -> None:
    run = AgentRun(store, rollout_id)
    await run.call("c1", [message("hi")])
    run.read(7)
    await run.call("c2", [message("bye")])


async def conflict(store: Any, rollout_id: str, call_id: str) -> None:
    """Somebody stores another answer under the name of the second call of `two_turns`."""
    with pytest.raises(FrozenError):
        run = AgentRun(store, rollout_id, prompt=(1, 2, 3, 100, 101, 7))
        await run.answer(call_id, [message("other")], sampled=[900, 901])


async def taken(rollouts: Rollouts) -> list[Delivery]:
    return [rollout async for rollout in rollouts]


async def take_into(seen: list[str], rollouts: Rollouts) -> None:
    """The ids, also those before an error."""
    async for rollout in rollouts:
        seen += [rollout.rollout_id]


class Watched:
    """A source that counts."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.frozen: list[str] = []
        self.retired: list[str] = []
        self.open: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.errors_left = sys.maxsize
        self.entries_error: BaseException | None = None
        self.failing_late: tuple[str, int] | None = None
        """A property of its snapshots, and how often each of them tells it before it fails."""

    async def freeze(self, rollout_id: str) -> Any:
        if self.error is not None and rollout_id == "bad" and self.errors_left > 0:
            self.errors_left -= 1
            raise self.error
        self.frozen.append(rollout_id)
        return WatchedSnapshot(await self.store.freeze(rollout_id), self)

    async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        self.retired.append(rollout_id)
        return bool(await self.store.retire(rollout_id, snapshot_id=snapshot_id, version=version))

    async def close(self) -> None:
        await self.store.close()


class WatchedSnapshot:
    def __init__(self, snapshot: Any, source: Watched) -> None:
        self._snapshot, self._source, self._told = snapshot, source, 0
        source.open[snapshot.rollout_id] += 1

    def __getattr__(self, name: str) -> Any:
        if name == "entries" and self._source.entries_error is not None and self._snapshot.rollout_id == "bad":
            raise self._source.entries_error
        if self._source.failing_late is not None and name == self._source.failing_late[0]:
            self._told += 1
            if self._told > self._source.failing_late[1]:
                raise OSError("the other end is gone")
        return getattr(self._snapshot, name)

    def close(self) -> None:
        self._source.open[self._snapshot.rollout_id] -= 1
        self._snapshot.close()


# ---- what comes out


def test_every_finished_rollout_comes_out_built_and_is_retired_when_done(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"task-{i}" for i in range(9)]
        await one_turn(store, *ids)
        seen = []
        async with consume(store, ids) as rollouts:
            async for rollout in rollouts:
                [trajectory] = rollout.trajectories
                assert trajectory.token_ids.tolist() == [1, 2, 3, 100, 101]
                assert trajectory.loss_mask.tolist() == [False, False, False, True, True]
                np.testing.assert_array_equal(trajectory.log_probs, [np.nan, np.nan, np.nan, -0.5, -0.625])
                assert (rollout.group, rollout.version, rollout.replaces, rollout.masked) == ("task", 1, None, False)
                assert await rollout.done()
                assert await rollout.done()
                seen.append(rollout.rollout_id)
        assert sorted(seen) == ids
        async with consume(store, ids) as rollouts:
            assert await taken(rollouts) == []
        await store.close()

    asyncio.run(body())


def test_ids_may_come_as_records_and_from_an_async_iterable(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "3-0", "named")

        async def given() -> AsyncIterator[Any]:
            yield {"_ng_task_index": 3, "_ng_rollout_index": 0}
            await asyncio.sleep(0)
            yield "named"
            yield {"reward": 1.0}
            yield "mal/formed"

        async with consume(store, given()) as rollouts:
            found = {(one.rollout_id, one.metrics.get("error", "")[:10]): one for one in await taken(rollouts)}
        assert found.keys() == {("3-0", ""), ("named", ""), ("", "the record"), ("", "rollout_id")}
        assert found["3-0", ""].record == {"_ng_task_index": 3, "_ng_rollout_index": 0}
        assert found["", "the record"].reasons == ("no_rollout_id",)
        assert not await found["", "the record"].done(discard=True)
        await store.close()

    asyncio.run(body())


def test_an_error_of_the_given_iterable_comes_out_after_what_came_before(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "b")

        def given() -> Iterator[str]:
            yield "a"
            yield "b"
            raise LookupError("no more")

        seen: list[str] = []
        with pytest.raises(LookupError, match="no more"):
            async with consume(store, given()) as rollouts:
                await take_into(seen, rollouts)
        assert sorted(seen) == ["a", "b"]
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("blocking", ["queue", "generator"])
def test_what_was_given_comes_out_while_the_next_id_is_waited_for(stores: MakeStore, blocking: str) -> None:
    go_on = threading.Event()

    def given() -> Iterator[str]:
        yield "a"
        assert go_on.wait(PATIENCE_S)
        yield "b"

    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "b")
        ids: queue.Queue[str] = queue.Queue()
        ids.put("a")
        async with consume(store, given() if blocking == "generator" else iter(ids.get, "end")) as rollouts:
            first = await asyncio.wait_for(anext(rollouts), PATIENCE_S)
            assert first.rollout_id == "a"
            go_on.set()
            ids.put("b")
            ids.put("end")
            assert [one.rollout_id for one in await asyncio.wait_for(taken(rollouts), PATIENCE_S)] == ["b"]
        await store.close()

    asyncio.run(body())


def test_leaving_does_not_wait_for_an_iterator_of_ids_that_blocks(stores: MakeStore) -> None:
    store = stores()
    asyncio.run(one_turn(store, "a", "b"))
    ids: queue.Queue[str] = queue.Queue()
    ids.put("a")
    before = set(threading.enumerate())
    with consume_now(store, iter(ids.get, "end")) as rollouts:
        next(rollouts)
    # Reached at all; what the abandoned thread still gets disturbs nobody, and ends it.
    [waiting] = [one for one in set(threading.enumerate()) - before if one.name == "tokcap-ids"]
    ids.put("b")
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    asyncio.run(store.close())


def test_the_event_loop_goes_on_while_many_ids_of_other_workers_are_given() -> None:
    async def body() -> None:
        ids = [one for one in map(str, range(40_000)) if share_of(one, 8) != 3]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        async with consume(Watched(None), ids, worker=3, workers=8) as rollouts:
            assert await taken(rollouts) == []
        counting.cancel()
        assert turns > 100

    asyncio.run(body())


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, StopAsyncIteration])
def test_an_iterable_of_ids_that_raises_what_ends_tasks_does_not_end_quietly(error: type[BaseException]) -> None:
    def given() -> Iterator[str]:
        yield ""
        raise error

    async def given_async() -> AsyncIterator[str]:
        for one in given():
            yield one

    async def body(ids: Any) -> None:
        seen: list[str] = []
        with pytest.raises(RuntimeError, match=error.__name__):
            async with consume(Watched(None), ids) as rollouts:
                await take_into(seen, rollouts)
        assert seen == [""]

    asyncio.run(body(given()))
    if error is asyncio.CancelledError:
        asyncio.run(body(given_async()))


HUGE = 10**5000
ODD: list[Any] = [
    HUGE,
    {"rollout_id": HUGE},
    {"_ng_task_index": "9" * 5000, "_ng_rollout_index": 1},
    {"_ng_task_index": HUGE, "_ng_rollout_index": 1},
    {"_ng_task_index": -HUGE, "_ng_rollout_index": 1},
    {"_ng_task_index": 1e300, "_ng_rollout_index": 1},
    {"_ng_task_index": np.array([1, 2]), "_ng_rollout_index": 1},
    {"rollout_id": "a", "_ng_attempt_index": HUGE},
]


def test_an_odd_id_or_record_comes_out_masked_and_stops_nothing(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        for odd in ODD:
            async with consume(store, [odd, "a"]) as rollouts:
                found = {one.rollout_id: one for one in await taken(rollouts)}
            assert found.keys() == {"", "a"}
            assert found[""].reasons == ("no_rollout_id",)
            assert 0 < len(found[""].metrics["error"]) < 400
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("odd", ODD[1:])
def test_a_record_with_an_odd_index_or_id_is_refused_as_one(odd: dict[str, Any]) -> None:
    with pytest.raises(InvalidIdError):
        rollout_id_of(odd)


def test_an_id_that_is_given_twice_is_handed_over_once(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        async with consume(store, ["a", "a", "a"], ahead=1) as rollouts:
            assert len(await taken(rollouts)) == 1
        await store.close()

    asyncio.run(body())


def test_what_is_known_of_the_scored_answer_decides_what_is_trained(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store, "a")
        asked = []

        def scored(rollout_id: str, meta: Any) -> dict[str, Any]:
            asked.append((rollout_id, dict(meta), threading.current_thread()))
            return {"call_id": "c1"}

        async with consume(store, ["a"], scored=scored) as rollouts:
            [rollout] = await taken(rollouts)
        assert rollout.metrics["after_final"] == 2
        assert [(one[0], one[1]) for one in asked] == [("a", {})]
        assert asked[0][2] is not threading.current_thread()
        record = {"rollout_id": "a", "response": {"id": "resp_c1", "output": []}}
        async with consume(store, [record]) as rollouts:
            [rollout] = await taken(rollouts)
        assert rollout.metrics["after_final"] == 2
        async with consume(store, ["a"]) as rollouts:
            [rollout] = await taken(rollouts)
        assert rollout.metrics["after_final"] == 0
        await store.close()

    asyncio.run(body())


def test_models_and_strict_reach_the_build(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        async with consume(store, ["a"], models="another") as rollouts:
            assert (await taken(rollouts))[0].reasons == ("other_model",)
        await store.mark_incomplete("a")
        async with consume(store, ["a"], strict=True) as rollouts:
            assert "strict:incomplete" in (await taken(rollouts))[0].reasons
        await store.close()

    asyncio.run(body())


def test_the_group_is_the_noted_one_or_that_of_the_id_or_what_the_caller_says(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await one_turn(store, "t-1-a2", "noted-1")
            await store.finish("noted-1", {"group": "g", "reward": 2.0})
            async with consume(store, ["t-1-a2", "noted-1"]) as rollouts:
                found = {one.rollout_id: one for one in await taken(rollouts)}
            assert {name: one.group for name, one in found.items()} == {"t-1-a2": "t", "noted-1": "g"}
            assert found["noted-1"].meta == {"group": "g", "reward": 2.0}

            def group_of(rollout_id: str, meta: Any) -> str:
                return f"{rollout_id}/{meta.get('reward')}"

            async with consume(store, ["noted-1"], group_of=group_of) as rollouts:
                [one] = await taken(rollouts)
            assert one.group == one.trajectories[0].group == "noted-1/2.0"

    asyncio.run(body())


def test_hazard_30_a_call_that_is_about_to_be_stored_is_waited_for(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            run = AgentRun(store, "a")
            await store.begin_call("a", "c1")
            async with consume(store, ["a"]) as rollouts:
                await asyncio.sleep(0.05)
                await run.answer("c1", [message("hi")])
                [rollout] = await taken(rollouts)
                assert not rollout.masked
            await store.begin_call("b", "c1")
            async with consume(store, ["b"], wait_open_s=0) as rollouts:
                assert (await taken(rollouts))[0].masked

    asyncio.run(body())


def test_nothing_comes_out_without_a_source() -> None:
    async def body() -> None:
        for given in (None, ["a"]):
            async with consume(None, given) as rollouts:
                assert await taken(rollouts) == []

    asyncio.run(body())


# ---- back-pressure and sharing


def test_no_more_rollouts_are_frozen_ahead_than_asked_for(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"a{i}" for i in range(12)]
        await one_turn(store, *ids)
        source = Watched(store)
        async with consume(source, ids, ahead=3) as rollouts:
            for handed_over in range(len(ids)):
                for _ in range(20):
                    await asyncio.sleep(0.002)
                assert len(source.frozen) == min(handed_over + 3, len(ids))
                await anext(rollouts)
        await store.close()

    asyncio.run(body())


def test_the_event_loop_goes_on_while_a_rollout_is_built(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        go_on = threading.Event()

        def scored(rollout_id: str, meta: Any) -> None:
            assert go_on.wait(30)

        async with consume(store, ["a"], scored=scored) as rollouts:
            waiting = asyncio.ensure_future(taken(rollouts))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not waiting.done()
            go_on.set()
            assert len(await waiting) == 1
        await store.close()

    asyncio.run(body())


def test_every_id_belongs_to_exactly_one_worker(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"task-{i}" for i in range(20)]
        await one_turn(store, *ids)
        shares = []
        for worker in range(3):
            async with consume(store, ids, worker=worker, workers=3) as rollouts:
                shares.append([one.rollout_id for one in await taken(rollouts)])
        assert sorted(one for share in shares for one in share) == sorted(ids)
        assert all(shares)
        await store.close()

    asyncio.run(body())


def test_the_share_of_an_id_is_the_same_in_every_process_and_version() -> None:
    assert share_of("123456789", 1 << 32) == 0xCBF43926  # the check value of CRC-32
    assert share_of("123456789", 10) == 0xCBF43926 % 10


def test_several_tasks_may_take_rollouts_together(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"a{i}" for i in range(10)]
        await one_turn(store, *ids)
        async with consume(store, ids) as rollouts:
            found = await asyncio.gather(*(taken(rollouts) for _ in range(3)))
        assert sorted(one.rollout_id for share in found for one in share) == sorted(ids)
        await store.close()

    asyncio.run(body())


# ---- at least once


def _consume_and_wait(channel: Channel, directory: str) -> None:
    async def body() -> None:
        async with FileStore(directory) as store, consume(store, ["a"]) as rollouts:
            async for rollout in rollouts:
                channel.send((rollout.snapshot_id, rollout.version, rollout.trajectories[0].token_ids.tolist()))
                await asyncio.sleep(60)
                await rollout.done()

    asyncio.run(body())


def test_a_consumer_killed_between_hand_over_and_done_gets_the_same_again(store_dir: Path, nursery: Nursery) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await one_turn(store, "a")
            child = nursery.start(_consume_and_wait, str(store_dir))
            first = await asyncio.to_thread(child.receive)
            child.kill()
            async with consume(store, ["a"]) as rollouts:
                async for rollout in rollouts:
                    again = (rollout.snapshot_id, rollout.version, rollout.trajectories[0].token_ids.tolist())
                    assert again == first
                    assert await rollout.done()

    asyncio.run(body())


def test_a_consumer_that_raises_or_breaks_out_keeps_the_evidence(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "b", "c")
        with pytest.raises(ZeroDivisionError):
            async with consume(store, ["a", "b", "c"]) as rollouts:
                async for _ in rollouts:
                    raise ZeroDivisionError
        async with consume(store, ["a", "b", "c"]) as rollouts:
            async for _ in rollouts:
                break
        async with consume(store, ["a", "b", "c"]) as rollouts:
            assert len(await taken(rollouts)) == 3
        await store.close()

    asyncio.run(body())


def test_rule_26_masked_rollouts_keep_their_evidence_unless_discarded(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await AgentRun(store, "a").call("c1", log_probs=[None, None])
        async with consume(store, ["a"]) as rollouts:
            [rollout] = await taken(rollouts)
            assert rollout.masked
            assert rollout.reasons == ("unknown",)
            assert len(rollout.trajectories) == 0
            assert not await rollout.done()
        with await store.freeze("a") as snapshot:
            assert len(snapshot.entries) == 1
        assert await rollout.done(discard=True)
        async with consume(store, ["a"]) as rollouts:
            assert await taken(rollouts) == []
        await store.close()

    asyncio.run(body())


def test_arrays_stay_valid_after_everything_is_closed_and_retired(store_dir: Path) -> None:
    async def body() -> Delivery:
        async with FileStore(store_dir) as store:
            await two_turns(store, "a")
            async with consume(store, ["a"]) as rollouts:
                [rollout] = await taken(rollouts)
                assert await rollout.done()
                return rollout

    assert asyncio.run(body()).trajectories[0].token_ids.tolist() == [1, 2, 3, 100, 101, 7, 102, 103]


# ---- late marks


def test_a_late_mark_that_changes_nothing_of_what_is_trained_is_retired_with_it(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        async with consume(store, ["a"]) as rollouts:
            async for rollout in rollouts:
                await stores().mark_incomplete("a")
                await stores().settle_call("a", "c7", "aborted")
                assert await rollout.done()
        async with consume(store, ["a"]) as rollouts:
            assert await taken(rollouts) == []
        await store.close()

    asyncio.run(body())


def test_a_late_mark_that_changes_what_is_trained_brings_the_newer_version_out(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store, "a")
        guard = MaskGuard(None)
        seen = []
        async with consume(store, ["a"], guard=guard) as rollouts:
            async for rollout in rollouts:
                if rollout.replaces is None:
                    await conflict(stores(), "a", "c2")
                    assert not await rollout.done()
                else:
                    assert await rollout.done()
                seen.append((rollout.version, rollout.replaces, rollout.metrics["trained"]))
        assert seen == [(1, None, 4), (2, 1, 2)]
        assert guard.samples == 1
        await store.close()

    asyncio.run(body())


def test_the_newer_version_comes_out_once_however_often_the_older_one_is_done(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store, "a")
        async with consume(store, ["a"]) as rollouts:
            first = await anext(rollouts)
            await conflict(stores(), "a", "c2")
            assert await asyncio.gather(*(first.done() for _ in range(3))) == [False] * 3
            assert not await first.done()
            assert first.replaced
            [newer] = await taken(rollouts)
            assert (newer.version, newer.replaces) == (2, 1)
            assert await newer.done()
        await store.close()

    asyncio.run(body())


def test_the_loop_does_not_end_while_a_rollout_is_being_retired(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store, "a")
        async with consume(store, ["a"]) as rollouts:
            first = await anext(rollouts)
            await conflict(stores(), "a", "c2")
            done = asyncio.ensure_future(first.done())
            newer = await anext(rollouts)
            assert (newer.version, newer.replaces) == (2, 1)
            assert not await done
            with pytest.raises(StopAsyncIteration):
                await anext(rollouts)
        await store.close()

    asyncio.run(body())


def test_hazard_18_a_rollout_that_was_reset_meanwhile_is_neither_retired_nor_frozen(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await one_turn(store, "a")
            async with consume(store, ["a"]) as rollouts:
                async for rollout in rollouts:
                    await store.reset("a")
                    await one_turn(store, "a")
                    assert not await rollout.done()
            assert (await store.stat("a")).state == "open"

    asyncio.run(body())


def test_hazard_18_a_newer_version_of_another_life_replaces_nothing(store_dir: Path) -> None:
    async def body() -> None:
        async with FileStore(store_dir) as store:
            await one_turn(store, "a")
            async with consume(store, ["a"]) as rollouts:
                async for rollout in rollouts:
                    assert rollout.replaces is None
                    await store.reset("a")
                    await one_turn(store, "a")
                    (await store.freeze("a")).close()
                    await store.mark_incomplete("a")
                    assert not await rollout.done()
            stat = await store.stat("a")
            assert (stat.state, stat.version) == ("frozen", 2)

    asyncio.run(body())


def built(sampled: list[int], log_probs: list[float | None], version: str = "v1") -> Build:
    made = example(call("c1", [1, 2], sampled, log_probs, policy_versions=[(version, 0, len(sampled))]))
    return build(made)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (built([3, 4], [-0.5, -0.25]), True),
        (built([3, 5], [-0.5, -0.25]), False),
        (built([3, 4], [-0.5, -0.75]), False),
        (built([3, 4], [None, -0.25]), False),
        (built([3, 4, 5], [-0.5, -0.25, -0.5]), False),
        (built([3, 4], [-0.5, -0.25], "v2"), False),
        (built([3, 4], [None, None]), False),
        (None, False),
    ],
)
def test_two_builds_are_the_same_if_a_trainer_gets_the_same(other: Build | None, same: bool) -> None:
    one = built([3, 4], [-0.5, -0.25])
    assert same_trained(one, other) == same
    assert same_trained(other, one) == same


def test_masks_count_where_as_many_ids_are_trained() -> None:
    assert not same_trained(built([3, 4], [None, -0.5]), built([3, 4], [-0.5, None]))
    assert same_trained(built([3, 4], [None, -0.5]), built([3, 4], [None, -0.5]))


def test_a_newer_version_that_nobody_can_take_any_more_keeps_the_evidence(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await two_turns(store, "a")
        async with consume(store, ["a"]) as rollouts:
            [rollout] = await taken(rollouts)
        await conflict(stores(), "a", "c2")
        assert not await rollout.done()
        async with consume(store, ["a"]) as rollouts:
            [newer] = await taken(rollouts)
        assert (newer.version, newer.replaces) == (2, None)
        await store.close()

    asyncio.run(body())


def test_a_source_that_fails_to_retire_keeps_the_evidence_and_the_loop_goes_on(
    stores: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Watched):
        async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            raise OSError("the disk is gone")

    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "b")
        async with consume(Failing(store), ["a", "b"]) as rollouts:
            assert [await one.done() for one in await taken(rollouts)] == [False, False]
        assert "the disk is gone" in caplog.text
        async with consume(store, ["a", "b"]) as rollouts:
            assert [await one.done() for one in await taken(rollouts)] == [True, True]
        await store.close()

    asyncio.run(body())


# ---- what goes wrong


@pytest.mark.parametrize("failing", ["error", "entries_error", "scored"])
def test_a_rollout_that_cannot_be_read_comes_out_masked_and_stops_nothing(stores: MakeStore, failing: str) -> None:
    def scored(rollout_id: str, meta: Any) -> None:
        if rollout_id == "bad":
            raise OSError("the disk is gone")

    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "bad", "b")
        source = Watched(store)
        if failing != "scored":
            setattr(source, failing, OSError("the disk is gone"))
        async with consume(source, ["a", "bad", "b"], scored=scored if failing == "scored" else None) as rollouts:
            found = {one.rollout_id: one for one in await taken(rollouts)}
            assert not await found["bad"].done()
            assert await found["a"].done()
            assert await found["b"].done()
        bad = found["bad"]
        assert (bad.masked, bad.reasons, bad.build, len(bad.trajectories)) == (True, ("unreadable",), None, 0)
        assert "the disk is gone" in bad.metrics["error"]
        assert source.retired == ["a", "b"]
        assert set(source.open.values()) == {0}
        with await store.freeze("bad") as snapshot:
            assert len(snapshot.entries) == 1
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("failing", ["scored", "group_of", "entries"])
@pytest.mark.parametrize("error", [StopIteration, SystemExit, asyncio.CancelledError])
def test_what_no_future_carries_makes_a_rollout_unreadable(
    stores: MakeStore, failing: str, error: type[BaseException]
) -> None:
    def fail(rollout_id: str, meta: Any) -> Any:
        if rollout_id == "bad":
            raise error
        return None if failing == "scored" else "group"

    async def body() -> None:
        store = stores()
        await one_turn(store, "a", "bad", "b")
        source = Watched(store)
        options: dict[str, Any] = {failing: fail}
        if failing == "entries":
            source.entries_error, options = error(), {}
        async with consume(source, ["a", "bad", "b"], ahead=1, **options) as rollouts:
            found = {one.rollout_id: one for one in await asyncio.wait_for(taken(rollouts), PATIENCE_S)}
        assert found.keys() == {"a", "bad", "b"}
        assert (found["bad"].reasons, found["a"].masked) == (("unreadable",), False)
        assert error.__name__ in found["bad"].metrics["error"]
        assert set(source.open.values()) == {0}
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("answers", [0, 1, 2])
@pytest.mark.parametrize("name", ["version", "snapshot_id"])
def test_a_snapshot_whose_properties_fail_late_is_unreadable_and_holds_nothing_up(
    stores: MakeStore, caplog: pytest.LogCaptureFixture, name: str, answers: int
) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"a{i}" for i in range(4)]
        await one_turn(store, *ids)
        source = Watched(store)
        source.failing_late = (name, answers)
        async with consume(source, ids, ahead=1) as rollouts:
            found = await asyncio.wait_for(taken(rollouts), PATIENCE_S)
        assert sorted(one.rollout_id for one in found) == ids
        if answers < 2:
            assert all(one.reasons == ("unreadable",) for one in found)
            assert all(one.version == answers for one in found)  # known if it was told once
            assert caplog.text.count("can't be read") == 4
        assert set(source.open.values()) == {0}
        await store.close()

    asyncio.run(body())


def test_a_source_that_cancels_itself_loses_no_rollout(stores: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    class Cancelling(Watched):
        async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            raise asyncio.CancelledError("a connection of its own")

    async def body() -> None:
        store = stores()
        await one_turn(store, "bad", "b")
        source = Cancelling(store)
        source.error = asyncio.CancelledError("a connection of its own")
        async with consume(source, ["bad", "b"], ahead=1) as rollouts:
            bad, good = await asyncio.wait_for(taken(rollouts), PATIENCE_S)
            assert (bad.rollout_id, bad.reasons) == ("bad", ("unreadable",))
            assert not await good.done()
        assert caplog.text.count("a connection of its own") == 2
        await store.close()

    asyncio.run(body())


@pytest.mark.parametrize("error", [BusyError("held"), OSError("no descriptor"), TimeoutError("slow")])
def test_a_freeze_that_fails_for_a_moment_is_tried_again(
    stores: MakeStore, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokcap.delivery.reading._PAUSES_S", (0.0, 0.01))

    async def body() -> None:
        store = stores()
        await one_turn(store, "bad")
        source = Watched(store)
        source.error = error
        for failures in (2, 3):
            source.errors_left = failures
            async with consume(source, ["bad"]) as rollouts:
                [one] = await taken(rollouts)
            assert (one.masked, source.errors_left) == (failures == 3, 0)
        source.error, source.errors_left = LookupError("which no time heals"), 2
        async with consume(source, ["bad"]) as rollouts:
            [one] = await taken(rollouts)
        assert (one.masked, source.errors_left) == (True, 1)
        await store.close()

    asyncio.run(body())


def test_leaving_ends_the_pause_before_a_freeze_is_tried_again(
    stores: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokcap.delivery.reading._PAUSES_S", (3600.0,))

    async def body() -> None:
        source = Watched(stores())
        source.error = OSError("no descriptor")
        async with asyncio.timeout(PATIENCE_S), consume(source, ["bad"]):
            await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await source.close()

    asyncio.run(body())


def test_rule_27_the_guard_stops_the_loop(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        guard = MaskGuard(0.5, min_samples=3)
        seen: list[str] = []
        with pytest.raises(MaskFractionError, match="nothing_recorded: 2"):
            async with consume(store, ["a", "empty1", "empty2", "empty3"], ahead=1, guard=guard) as rollouts:
                await take_into(seen, rollouts)
        assert seen == ["a", "empty1"]
        await store.close()

    asyncio.run(body())


def test_leaving_ends_every_task_and_closes_every_snapshot_also_in_the_middle(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"a{i}" for i in range(8)]
        await one_turn(store, *ids)
        source = Watched(store)
        descriptors = len(os.listdir("/proc/self/fd"))
        for turns in (0, 1, 3, 8, 20):
            async with consume(source, ids) as rollouts:
                for _ in range(turns):
                    await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert set(source.open.values()) <= {0}
            with pytest.raises(StopAsyncIteration):
                await anext(rollouts)
        gc.collect()
        # What the store itself keeps open of rollouts grows with the rollouts, not with the rounds.
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * len(ids)
        await store.close()

    asyncio.run(body())


def test_consumers_leave_no_descriptor_behind(store_dir: Path) -> None:
    async def once(ids: list[str]) -> None:
        async with FileStore(store_dir) as store:
            async with consume(store, ids, poll_s=0.01) as rollouts:
                await anext(rollouts)
            async with consume(store, poll_s=0.01) as rollouts:
                await anext(rollouts)

    async def body() -> None:
        ids = [f"a{i}" for i in range(6)]
        async with FileStore(store_dir) as store:
            await one_turn(store, *ids)
        await once(ids)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            await once(ids)
        gc.collect()
        until = time.monotonic() + 60
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
            await asyncio.sleep(0.01)  # what other threads of this process have open for a moment
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(body())


def test_a_consumer_is_used_once_and_within_its_context(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        rollouts = consume(store, [])
        with pytest.raises(RuntimeError, match="async with"):
            await anext(rollouts)
        async with rollouts:
            pass
        with pytest.raises(RuntimeError, match="again"):
            await rollouts.__aenter__()
        await store.close()

    asyncio.run(body())


def test_stop_lets_out_what_is_frozen_and_ends(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        ids = [f"a{i}" for i in range(8)]
        await one_turn(store, *ids)
        source = Watched(store)
        async with consume(source, ids, ahead=3) as rollouts:
            first = await anext(rollouts)
            rollouts.stop()
            rest = await taken(rollouts)
        assert sorted([first.rollout_id, *(one.rollout_id for one in rest)]) == sorted(source.frozen)
        assert len(source.frozen) < len(ids)
        (stopped := consume(source, ids)).stop()
        async with stopped:
            assert await taken(stopped) == []
        async with (stopped := consume(source, ids)):
            stopped.stop()
            assert await taken(stopped) == []
        await store.close()

    asyncio.run(body())


def test_stop_from_another_thread_ends_a_loop_that_waits(stores: MakeStore) -> None:
    async def body() -> Rollouts:
        store = stores()
        await one_turn(store, "a")
        never = asyncio.Event()

        async def given() -> AsyncIterator[str]:
            yield "a"
            await never.wait()

        async with consume(store, given()) as rollouts:
            await anext(rollouts)
            # Idle for good: only what wakes the event loop ends it.
            threading.Timer(0.05, rollouts.stop).start()
            assert await asyncio.wait_for(taken(rollouts), PATIENCE_S) == []
        await store.close()
        return rollouts

    rollouts = asyncio.run(body())
    rollouts.stop()  # nothing to stop any more


@pytest.mark.parametrize(
    "options",
    [
        {"ahead": 0},
        {"ahead": True},
        {"worker": 2, "workers": 2},
        {"worker": -1},
        {"workers": 0},
        {"idle_s": -1.0},
        {"poll_s": float("nan")},
        {"rollouts": "one"},
        {"rollouts": {"rollout_id": "one"}},
        {"rollouts": None},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    source: Any = Watched(None)
    with pytest.raises(InvalidOptionError):
        consume(source, **{"rollouts": [], **options})


# ---- sweeping


def test_hazard_35_tombstones_are_swept_by_the_first_worker_again_and_again(stores: MakeStore) -> None:
    class Sweeping(Watched):
        def __init__(self, store: Any) -> None:
            super().__init__(store)
            self.swept: list[float] = []

        async def sweep(self, older_than_s: float) -> int:
            self.swept.append(older_than_s)
            raise OSError("which stops nothing")

    async def body() -> None:
        source = Sweeping(stores())
        given: asyncio.Queue[str] = asyncio.Queue()

        async def ids() -> AsyncIterator[str]:
            while True:
                yield await given.get()

        async with consume(source, ids(), sweep_every_s=0.01, tombstone_age_s=5.0):
            for _ in range(1000):
                await asyncio.sleep(0.005)
                if len(source.swept) > 2:
                    break
        assert set(source.swept) == {5.0}
        assert len(source.swept) > 2
        source.swept.clear()
        async with consume(source, ids(), sweep_every_s=0.0), consume(source, ids(), worker=1, workers=2):
            await asyncio.sleep(0.02)
        assert source.swept == []
        await source.close()

    asyncio.run(body())


# ---- without an event loop, and from a configuration


def test_trainers_without_an_event_loop_take_rollouts_from_a_plain_loop(stores: MakeStore) -> None:
    store = stores()
    ids = [f"a{i}" for i in range(6)]
    asyncio.run(one_turn(store, *ids))
    threads = set(threading.enumerate())
    with consume_now(store, ids, ahead=2) as rollouts:
        assert sorted(rollout.rollout_id for rollout in rollouts if rollout.done_now()) == ids
    with pytest.raises(ZeroDivisionError), consume_now(store, ["b"]) as rollouts:
        next(rollouts)
        raise ZeroDivisionError
    with pytest.raises(InvalidOptionError), consume_now(store, ["b"], ahead=0):
        pass
    ours = ("tokcap-consume", "asyncio_")
    assert {thread for thread in threading.enumerate() if thread.name.startswith(ours)} <= threads
    asyncio.run(store.close())


def test_a_plain_loop_is_stopped_from_another_thread(store_dir: Path) -> None:
    store = FileStore(store_dir)
    asyncio.run(one_turn(store, "a"))
    asyncio.run(store.finish("a"))
    with consume_now(store, poll_s=0.01) as rollouts:
        seen = []
        for rollout in rollouts:
            seen.append(rollout.rollout_id)
            threading.Timer(0.05, rollouts.stop).start()
    assert seen == ["a"]
    assert list(rollouts) == []
    rollouts.stop()
    asyncio.run(store.close())


def test_done_now_works_after_the_loop_has_ended(stores: MakeStore) -> None:
    store = stores()
    ids = ["a", "b", "c"]
    asyncio.run(one_turn(store, *ids))
    with consume_now(store, ids) as rollouts:
        first, second, third = list(rollouts)
    assert first.done_now()
    assert first.done_now()

    async def within_another_loop() -> bool:
        return second.done_now()

    assert asyncio.run(within_another_loop())
    asyncio.run(store.mark_incomplete(third.rollout_id))
    assert third.done_now()
    asyncio.run(store.close())


def test_done_now_of_another_thread_is_not_lost_when_the_loop_ends(stores: MakeStore) -> None:
    class Slow(Watched):
        async def retire(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
            begun.set()
            await asyncio.sleep(0.1)
            return await super().retire(rollout_id, snapshot_id=snapshot_id, version=version)

    begun = threading.Event()
    store = stores()
    asyncio.run(one_turn(store, "a"))
    answers: list[bool] = []
    with consume_now(Slow(store), ["a"]) as rollouts:
        rollout = next(rollouts)
        thread = threading.Thread(target=lambda: answers.append(rollout.done_now()))
        thread.start()
        assert begun.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert answers == [True]
    asyncio.run(store.close())


def test_done_now_refuses_to_block_its_own_event_loop(stores: MakeStore) -> None:
    async def body() -> None:
        store = stores()
        await one_turn(store, "a")
        async with consume(store, ["a"]) as rollouts:
            rollout = await anext(rollouts)
            with pytest.raises(RuntimeError, match="await done"):
                rollout.done_now()
            assert await asyncio.to_thread(rollout.done_now)
        await store.close()

    asyncio.run(body())


def test_the_configured_consumer_reads_the_directory_with_the_configured_guard(store_dir: Path) -> None:
    async def body() -> None:
        block = {"enabled": True, "dir": str(store_dir), "max_mask_fraction": 0.1, "mask_fraction_min_samples": 1}
        async with FileStore(store_dir) as store:
            await one_turn(store, "a", "b")
        async with consume_from_config({"token_id_capture": block}, ["a"]) as rollouts:
            assert [await one.done() for one in await taken(rollouts)] == [True]
        with pytest.raises(MaskFractionError):
            async with consume_from_config({"token_id_capture": block}, ["empty"]) as rollouts:
                await taken(rollouts)
        await close_process_endpoints()
        async with consume_from_config({"token_id_capture": {**block, "rebuild_response": False}}, ["b"]) as rollouts:
            assert await taken(rollouts) == []
        async with FileStore(store_dir) as store:
            assert (await store.stat("b")).state == "open"

    asyncio.run(body())


def test_names_are_loaded_when_they_are_asked_for() -> None:
    probe = (
        "import sys, tokcap.delivery as d; assert 'tokcap.trajectory' not in sys.modules; "
        "assert 'asyncio' not in sys.modules; [getattr(d, name) for name in d.__all__]; d.MaskGuard(None)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)
