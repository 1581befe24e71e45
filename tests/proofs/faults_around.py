"""Faults under what stands around the store's operations: consumers, the hourly sweep, readers meanwhile."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

from tests.faulty_files import Fault, FaultyFiles, view
from tokcap import FileStore, consume
from tokcap.delivery import reading
from tokcap.errors import DurabilityError, TokcapError

from .faults_disturbed import as_on, leftovers, open_store
from .faults_looks import faults_of
from .faults_operations import entry

__all__ = ("AROUND",)

Around = Callable[[str, Iterable[int], float, int], tuple[int, int, list[str]]]
"""(directory, errors, share of all faults, seed) -> runs, calls that were made to fail, what did not hold."""


def _chosen(calls: int, errors: Iterable[int], share: float, seed: int) -> Iterator[Fault]:
    chance = random.Random(seed)
    return (fault for fault in faults_of(calls, errors) if chance.random() < share)


# ---- a consumer


def _finished(store: FileStore) -> None:
    for rollout in "r", "other":
        for call in "a", "b":
            store.put_now(entry(rollout, call))
        store.finish_now(rollout, {"reward": 1.0})


async def _consume(store: FileStore, rollouts: list[str]) -> dict[str, tuple[int, bool]]:
    """How many ids of each rollout were handed over to be trained, and whether it is gone since."""
    taken: dict[str, tuple[int, bool]] = {}
    async with consume(store, rollouts, wait_open_s=0, sweep_every_s=0) as deliveries:
        async for delivery in deliveries:
            trained = sum(trajectory.trained for trajectory in delivery.trajectories)
            taken[delivery.rollout_id] = (trained, await delivery.done())
    return taken


def _consuming(directory: str, errors: Iterable[int], share: float, seed: int) -> tuple[int, int, list[str]]:
    """What a fault keeps from being handed over, or from being retired, comes again; nothing else does."""
    files = FaultyFiles()
    with open_store(f"{directory}/expected", files) as store:
        _finished(store)
        files.trace.clear()
        expected = asyncio.run(_consume(store, ["r", "other"]))
        calls = len(files.trace)
    runs, injected, problems = 0, 0, []
    with patch.object(reading, "_PAUSES_S", (0.0, 0.0)):
        for fault in _chosen(calls, errors, share, seed):
            files = FaultyFiles()
            with open_store(f"{directory}/run", files) as store:
                _finished(store)
                with files.failing(fault) as plan:
                    try:
                        first = asyncio.run(_consume(store, ["r", "other"]))
                    except Exception as error:
                        problems.append(f"consumer: {fault}: raised {error!r}")
                        first = {}
                second = asyncio.run(_consume(store, ["r", "other"]))
            runs, injected = runs + 1, injected + len(plan.hits)
            problems += [f"consumer: {fault}: {found}" for found in _wrongly_handed_over(expected, first, second)]
            shutil.rmtree(f"{directory}/run")
    return runs, injected, problems


def _wrongly_handed_over(
    expected: dict[str, tuple[int, bool]], first: dict[str, tuple[int, bool]], second: dict[str, tuple[int, bool]]
) -> Iterator[str]:
    for rollout, (trained, _) in expected.items():
        had, gone = first.get(rollout, (0, False))
        if had not in (0, trained):
            yield f"{rollout}: {had} ids handed over, not {trained}"
        if gone and not had:
            yield f"{rollout} is gone and was not handed over"
        if gone and rollout in second:
            yield f"{rollout} was retired, and comes again"
        if not gone and second.get(rollout) not in ((trained, True), None):
            yield f"{rollout} comes again as {second[rollout]}"
        if not gone and rollout not in second and not had:
            yield f"{rollout} was never handed over"


# ---- the hourly sweep


def _housekeeping(directory: str, errors: Iterable[int], share: float, seed: int) -> tuple[int, int, list[str]]:
    """A sweep that fails is logged by its thread; the next one does what is left."""

    def prepare(store: FileStore) -> None:
        for rollout in "r", "other":
            store.put_now(entry(rollout, "a"))
            with store.freeze_now(rollout) as snapshot:
                store.retire_now(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    files = FaultyFiles()
    with open_store(f"{directory}/expected", files, tombstone_age_s=0) as store:
        prepare(store)
        files.trace.clear()
        store._sweep_if_due()
        calls = len(files.trace)
    runs, injected, problems = 0, 0, []
    for fault in _chosen(calls, errors, share, seed):
        files = FaultyFiles()
        with open_store(f"{directory}/run", files, tombstone_age_s=0) as store:
            prepare(store)
            with files.failing(fault) as plan:
                try:
                    store._sweep_if_due()
                except TokcapError:
                    pass  # logged by the thread that calls it
                except Exception as error:
                    problems.append(f"hourly sweep: {fault}: raised {error!r}")
            store._sweep_if_due()
            left = [*store.rollouts(), *leftovers(f"{directory}/run")]
            problems += [f"hourly sweep: {fault}: left {left}"] if left else []
        runs, injected = runs + 1, injected + len(plan.hits)
        shutil.rmtree(f"{directory}/run")
    return runs, injected, problems


# ---- readers while a writer fails


class _Reader:
    """Reads all the time: what was acknowledged before is there, what had failed before is not."""

    def __init__(self, directory: str) -> None:
        self.acknowledged: set[str] = set()
        self.failed: set[str] = set()
        self.problems: list[str] = []
        self.reads = 0
        self._directory = directory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with open_store(self._directory, read_only=True) as store:
            while not self._over.is_set():
                try:
                    self._look(store)
                except Exception as error:
                    self.problems.append(f"a reader raised {error!r}")
                self.reads += 1

    def _look(self, store: FileStore) -> None:
        acknowledged, failed = set(self.acknowledged), set(self.failed)
        seen = view(store, "r")
        if not acknowledged <= seen.calls:
            self.problems.append(f"a reader misses {sorted(acknowledged - seen.calls)}")
        if failed & seen.calls:
            self.problems.append(f"a reader sees {sorted(failed & seen.calls)}, which had failed")
        if seen.damage:
            self.problems.append(f"a reader sees damage: {seen.damage}")
        if acknowledged and ("r", "open") not in list(store.rollouts()):
            self.problems.append("the rollout is not listed")
        if store.usage_now()["open"].rollouts > 1:
            self.problems.append("there are rollouts that nobody made")


def _reading_meanwhile(directory: str, errors: Iterable[int], share: float, seed: int) -> tuple[int, int, list[str]]:
    """Every put meets a fault, or not, while somebody reads; each has a call of its own, and none is repeated."""
    chance, numbers = random.Random(seed), list(errors)
    files = FaultyFiles(in_kernel=True)
    runs, injected = int(1000 * share) + 20, 0
    with as_on("ext4"), open_store(f"{directory}/run", files, segment_bytes=4000) as store:
        reader = _Reader(f"{directory}/run")
        try:
            for number in range(runs):
                with files.failing(Fault(chance.randint(1, 12), chance.choice(numbers), "once")) as plan:
                    try:
                        store.put_now(entry("r", f"c{number}"))
                    except DurabilityError:
                        reader.failed.add(f"c{number}")
                    else:
                        reader.acknowledged.add(f"c{number}")
                injected += len(plan.hits)
        finally:
            reader.end()
        last = view(store, "r").calls
    problems = [f"seed {seed}: {problem}" for problem in reader.problems]
    if last != reader.acknowledged:
        problems.append(f"seed {seed}: at last {sorted(last ^ reader.acknowledged)} differ from what was acknowledged")
    if not reader.reads:
        problems.append("nobody read")
    shutil.rmtree(f"{directory}/run")
    return runs, injected, problems


AROUND: dict[str, Around] = {
    "consumer": _consuming,
    "hourly sweep": _housekeeping,
    "readers meanwhile": _reading_meanwhile,
}
