"""Failures seen elsewhere that have no better place among the tests of a part."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.workload import Workload, calls
from tokcap import FileStore, TokenEntry
from tokcap.store.files import Files


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf"), 0.25, -9999.0])
def test_an_odd_log_prob_never_makes_a_rollout_unreadable(tmp_path: Path, value: float | None) -> None:
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        store.put_now(TokenEntry("rollout", "before", [1, 2], [3], [-0.5]))
        odd = TokenEntry("rollout", "odd", [1, 2, 3], [4, 5, 6], [-0.5, value, -0.25])
        store.put_now(odd)
        store.put_now(odd)
        store.put_now(TokenEntry("rollout", "after", [1, 2, 3, 4], [7], [-0.5]))
        with FileStore(tmp_path / "store", sweep_every_s=0) as another, another.freeze_now("rollout") as snapshot:
            stored = {entry.model_call_id: entry for entry in snapshot.entries}
            assert stored.keys() == {"before", "odd", "after"}
            assert stored["odd"] == odd
            assert not snapshot.incomplete


class _StopsHalfWay(Files):
    """Writes the first half of a batch and waits to be let on."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = False
        self.half_written = threading.Event()
        self.go_on = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if not self.stop:
            return super().pwritev(fd, buffers, offset)
        whole = b"".join(buffers)
        half = len(whole) // 2
        super().pwritev(fd, [whole[:half]], offset)
        self.half_written.set()
        self.go_on.wait(30)
        return half + super().pwritev(fd, [whole[half:]], offset + half)


@pytest.mark.parametrize("prompt", [5, 50_000])
def test_a_reader_that_meets_a_tail_being_written_sees_what_was_acknowledged(tmp_path: Path, prompt: int) -> None:
    files = _StopsHalfWay()
    ids = np.arange(prompt, dtype=np.int32)
    with FileStore(tmp_path / "store", sweep_every_s=0, files=files) as store:
        store.put_now(TokenEntry("rollout", "first", [1, 2, 3], [4], [-0.5]))
        files.stop = True
        second = TokenEntry("rollout", "second", ids, [5], [-0.5])
        writer = threading.Thread(target=store.put_now, args=(second,))
        writer.start()
        assert files.half_written.wait(30)
        with FileStore(tmp_path / "store", sweep_every_s=0) as another:
            for _ in range(20):
                with another.read_now("rollout") as look:
                    assert [entry.model_call_id for entry in look.entries] == ["first"]
                    assert not look.damage
            files.go_on.set()
            writer.join()
            with another.read_now("rollout") as look:
                assert [entry.model_call_id for entry in look.entries] == ["first", "second"]
                assert look.entries[1] == second


def test_reading_800_turns_of_200k_ids_takes_memory_for_the_ids_and_not_for_each_turn(tmp_path: Path) -> None:
    workload = Workload(rollouts=1, turns=800, first_prompt=1_000, per_turn=250, sampled=100)
    conversation = calls(workload)[0]
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        for call in conversation:
            store.put_now(TokenEntry("rollout", call.model_call_id, call.prompt, call.generated, call.log_probs))
        del conversation
        store.freeze_now("rollout").close()
        tracemalloc.start()
        try:
            with store.read_now("rollout") as snapshot:
                entries = list(snapshot.entries)
                sampled = sum(len(entry.generation_token_ids) for entry in entries)
                prompts = sum(len(entry.prompt_token_ids) for entry in entries)
                _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sampled == workload.turns * workload.sampled
    # All prompts together hold 80 million ids, 320 MB if each had its own.
    assert prompts > 80_000_000
    assert peak < 12_000_000
