"""The soak in small: large numbers, long runs and slow disks cost what they should, and whoever breaks that is seen.

`scripts/prove soak` runs the same at full length.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.proofs.part import Outcome
from tests.proofs.soak_files import few_descriptors, files_open_elsewhere, no_descriptors
from tests.proofs.soak_load import mixed_load
from tests.proofs.soak_million import many_rollouts
from tests.proofs.soak_reading import Sizes, read_back
from tests.proofs.soak_slow_disk import slow_disk
from tests.proofs.soak_watch import CountedFiles, slope
from tests.store_worker import UnsyncedFiles
from tokcap import FileStore, TokenEntry
from tokcap.errors import BusyError
from tokcap.store import sweep as sweep_module
from tokcap.store.engine import Engine
from tokcap.store.files import Files
from tokcap.store.looking import Looker

from .children import Channel, Nursery, fast_directory
from .children import nursery as _nursery

directory = pytest.fixture(fast_directory)
nursery = pytest.fixture(scope="module")(_nursery)

pytestmark = pytest.mark.filterwarnings("ignore:.*tmpfs.*")


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()


def expect(outcome: Outcome, *patterns: str) -> None:
    """Of each kind one problem at least, and no others."""
    for pattern in patterns:
        assert any(re.search(pattern, problem) for problem in outcome.problems), (pattern, outcome.problems[:10])
    others = [problem for problem in outcome.problems if not re.search("|".join(patterns), problem)]
    assert not others


# ---- many rollouts


WAVES = [20, 80, 400]


class UnsyncedCounted(CountedFiles, UnsyncedFiles):
    """Counted, and waits for no device."""


def test_what_a_rollout_costs_does_not_grow_with_their_number(outcome: Outcome, directory: Path) -> None:
    many_rollouts(outcome, directory / "s", WAVES, 1, files=UnsyncedCounted)
    assert not outcome.problems
    assert len(outcome.figures) == 6 * len(WAVES)


class Listing(UnsyncedCounted):
    """Looks at all rollouts whenever one is made."""

    def __init__(self) -> None:
        super().__init__()
        make = self.mkdir

        def mkdir(path: str) -> None:
            make(path)
            top, _, below = path.partition("/rollouts/")
            if below.count("/") == 1:
                for shard in self.listdir(f"{top}/rollouts"):
                    self.listdir(f"{top}/rollouts/{shard}")

        self.mkdir = mkdir  # type: ignore[method-assign]


def test_a_look_at_all_rollouts_for_each_is_seen(outcome: Outcome, directory: Path) -> None:
    many_rollouts(outcome, directory / "s", [10, 100], 1, files=Listing)
    expect(outcome, "^put asked .* of the kernel per rollout with 100 of them")


KEPT: list[object] = []


class Keeping(UnsyncedCounted):
    """Never forgets a rollout that was made."""

    def mkdir(self, path: str) -> None:
        KEPT.extend((path, path.upper(), path.lower(), path.title()))
        super().mkdir(path)


def test_objects_that_stay_for_each_rollout_are_seen(outcome: Outcome, directory: Path) -> None:
    try:
        many_rollouts(outcome, directory / "s", WAVES, 1, files=Keeping)
    finally:
        KEPT.clear()
    expect(outcome, "more objects are left after 400 rollouts")


def test_a_sweep_that_leaves_things_behind_is_seen(
    outcome: Outcome, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep_module._remove_empty

    def half(files: Files, old: list[Any]) -> list[Any]:
        return real(files, old[::2])

    monkeypatch.setattr(sweep_module, "_remove_empty", half)
    many_rollouts(outcome, directory / "s", [300], 1, files=UnsyncedCounted)
    expect(outcome, "names are left")


# ---- descriptors


def test_files_that_are_open_elsewhere_change_nothing(outcome: Outcome, directory: Path, nursery: Nursery) -> None:
    files_open_elsewhere(outcome, directory, nursery, 20_000, 30)
    assert not outcome.problems


def test_more_rollouts_are_open_than_there_are_descriptors(outcome: Outcome, directory: Path, nursery: Nursery) -> None:
    few_descriptors(outcome, directory, nursery, 600, 2, limit=200)
    assert not outcome.problems


def keep_every_descriptor() -> None:
    """In a child: the bound on descriptors is gone."""
    Engine._has_too_many = lambda self: False  # type: ignore[method-assign]


def test_a_store_without_a_bound_on_its_descriptors_is_seen(
    outcome: Outcome, directory: Path, nursery: Nursery
) -> None:
    few_descriptors(outcome, directory, nursery, 600, 2, limit=200, broken_by=f"{__name__}.keep_every_descriptor")
    expect(outcome, r"600 rollouts at a limit of 200 descriptors: DurabilityError\(24", "200 descriptors were in use")


def test_without_descriptors_operations_fail_with_a_typed_error_and_heal(
    outcome: Outcome, directory: Path, nursery: Nursery
) -> None:
    no_descriptors(outcome, directory, nursery, 6)
    assert not outcome.problems


def look_with_the_kernels_errors() -> None:
    """In a child: an error of the kernel comes through as it is."""

    def rollouts(self: Looker) -> Iterator[tuple[str, Any]]:
        for shard in os.listdir(self._layout.rollouts):
            for name in os.listdir(f"{self._layout.rollouts}/{shard}"):
                yield name, "open"

    Looker.rollouts = rollouts  # type: ignore[method-assign]


def test_an_untyped_error_without_descriptors_is_seen(outcome: Outcome, directory: Path, nursery: Nursery) -> None:
    no_descriptors(outcome, directory, nursery, 0, broken_by=f"{__name__}.look_with_the_kernels_errors")
    expect(outcome, "^rollouts with 0 descriptors left: OSError.* is not a TokcapError")


# ---- captures read back


SMALL = Sizes(prompt=2000, generated=3000, experts=2000)


def test_captures_are_read_back_exactly_in_flat_memory(outcome: Outcome, directory: Path) -> None:
    read_back(outcome, directory, 10_000_000, 1, SMALL)
    assert not outcome.problems


class Changing(FileStore):
    """Stores one log-prob of one call a little differently."""

    async def put(self, entry: TokenEntry) -> None:
        if (entry.rollout_id, entry.model_call_id) == ("capture-00003", "call-05"):
            log_probs = entry.generation_log_probs.copy()
            log_probs[17] = np.nextafter(log_probs[17], -1.0)
            entry = TokenEntry(
                entry.rollout_id,
                entry.model_call_id,
                entry.prompt_token_ids,
                entry.generation_token_ids,
                log_probs,
                routed_experts=entry.routed_experts,
            )
        await super().put(entry)


def test_one_changed_bit_is_seen(outcome: Outcome, directory: Path) -> None:
    read_back(outcome, directory, 3_000_000, 1, SMALL, store=Changing)
    expect(outcome, "^capture-00003, call-05: not the arrays that were put")


class Hoarding(FileStore):
    """Never lets go of an entry."""

    async def put(self, entry: TokenEntry) -> None:
        KEPT.append((entry, entry.generation_log_probs.tobytes(), bytes(np.random.default_rng(1).bytes(100_000))))
        await super().put(entry)


def hoard(channel: Channel, path: str) -> None:
    outcome = Outcome()
    read_back(outcome, Path(path), 15_000_000, 1, SMALL, store=Hoarding)
    channel.send(outcome)


def test_memory_that_grows_with_what_is_written_is_seen(directory: Path, nursery: Nursery) -> None:
    (outcome,) = nursery.start(hoard, str(directory)).end()  # a process that has no freed memory to use up first
    expect(outcome, "^writing: .* MiB in the first half")


# ---- mixed load


SMALL_LOAD: dict[str, Any] = {"writers": 1, "open_rollouts": 8, "tombstone_age_s": 1.0}


def test_mixed_load_loses_nothing_and_leaves_nothing_behind(
    outcome: Outcome, directory: Path, nursery: Nursery
) -> None:
    mixed_load(outcome, directory, nursery, 2 / 60, 1, least=100, **SMALL_LOAD)
    assert not outcome.problems


class Leaky(FileStore):
    """Loses every fortieth put, keeps memory for each, and every second time a descriptor."""

    _count = 0

    async def put(self, entry: TokenEntry) -> None:
        self._count += 1
        KEPT.append(os.urandom(2 << 20))
        if self._count % 2:
            os.dup(0)
        if self._count % 40:
            await super().put(entry)


def test_mixed_load_sees_what_is_lost_and_what_grows(outcome: Outcome, directory: Path, nursery: Nursery) -> None:
    mixed_load(outcome, directory, nursery, 2 / 60, 1, least=100, store=f"{__name__}.Leaky", **SMALL_LOAD)
    expect(
        outcome,
        "^writer 0: memory rose",
        "^writer 0: descriptors rose",
        "^consumer that compares: writer-0-.*(0 entries, not those that were put|outcomes)",
        # What follows from the same.
        "^consumer that builds: .*(sampled, expected|other ids are trained)",
        "^writer 0: (Python objects grew|writer-0-.* was (taken without a word|heard))",
    )


def test_a_straight_line_is_found_through_what_jumps_about() -> None:
    chance = np.random.default_rng(3)
    times = [100.0 + number for number in range(1000)]
    steady = (5e6 + chance.normal(0, 1e5, 1000)).tolist()
    growing = [value + 300 * number for number, value in enumerate(steady)]
    assert abs(slope(times, steady)) < 50
    assert 250 < slope(times, growing) < 350
    assert slope([1.0], [2.0]) == 0.0


# ---- a disk that can't follow


QUICK: dict[str, Any] = {
    "callers": 120,
    "sync_s": 0.02,
    "entry_ids": 20_000,
    "stall_s": 0.7,
    "lock_timeout_s": 0.3,
    "pending_bytes": 2 << 20,
}


def test_a_disk_that_can_not_follow_bounds_what_waits_and_drops_nothing(outcome: Outcome, directory: Path) -> None:
    slow_disk(outcome, directory, 1.0, 1, **QUICK)
    assert not outcome.problems


class Dropping(FileStore):
    """Tells nobody what it had no room for."""

    async def put(self, entry: TokenEntry) -> None:
        try:
            await super().put(entry)
        except BusyError:
            return


class Boundless(FileStore):
    """Takes everything in."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"max_pending_bytes": 1 << 40})


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        (Dropping, "its put returned, and nothing is stored|the disk was never too slow"),
        (Boundless, "bytes waited, more than|the disk was never too slow"),
    ],
)
def test_a_store_that_drops_or_takes_in_everything_is_seen(
    store: Callable[..., FileStore], problem: str, outcome: Outcome, directory: Path
) -> None:
    slow_disk(outcome, directory, 1.0, 1, store=store, rounds=2, **QUICK)  # type: ignore[arg-type]
    first, second = problem.split("|")
    expect(outcome, first, second)
