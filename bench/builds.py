"""How long it takes to build the trajectories of one rollout, and whether that grows with its size alone.

python -m bench.builds
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.trajectory import build

from .places import place

__all__ = ("SHAPES", "Measured", "Shape", "main", "measure")

VOCABULARY = 150_000
ROUNDS = 7


class Shape(msgspec.Struct, frozen=True):
    """One conversation: `turns` calls that together have `ids` ids, two fifths of them sampled."""

    turns: int
    ids: int
    drift_every: int = 0
    """Every so many turns the answer comes back changed in its middle; 0: never."""

    def times(self, factor: int) -> Shape:
        return Shape(self.turns * factor, self.ids * factor, self.drift_every)

    def __str__(self) -> str:
        drift = f", one turn in {self.drift_every} drifts" if self.drift_every else ""
        return f"{self.turns:,} calls, {self.ids:,} ids{drift}"


SHAPES = (Shape(1250, 100_000), Shape(1250, 100_000, 3), Shape(200, 50_000), Shape(200, 50_000, 3))
"""At size 1; the last ones are 800 turns and 200,000 ids at size 4, the first 5,000 calls."""


class Measured(msgspec.Struct, frozen=True):
    """Medians of one size."""

    shape: Shape
    open_s: float
    """Opening the frozen snapshot, every checksum verified."""
    build_s: float
    peak_bytes: int
    """Most memory that a build held at once."""
    arrays_s: float
    """Making token ids, mask and log-probs of every trajectory, one after another."""
    trajectories: int
    replay_factor: float


def measure(directory: Path, shape: Shape, rounds: int = ROUNDS) -> Measured:
    """Store the conversation, freeze it, and build it `rounds` times."""
    store = FileStore(directory)
    rollout_id = f"rollout-{shape.turns}-{shape.ids}-{shape.drift_every}"
    _store(store, rollout_id, shape)
    store.freeze_now(rollout_id).close()
    opened, built, arrays = [], [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        with store.freeze_now(rollout_id) as snapshot:
            at_open = time.perf_counter()
            found = build(snapshot)
            done = time.perf_counter()
        trained = sum(int(t.loss_mask.sum()) for t in found.trajectories if len(t.token_ids) == len(t.log_probs))
        if trained != found.metrics["sampled"]:
            raise AssertionError(f"{trained} of {found.metrics['sampled']} sampled ids are trained")
        arrays.append(time.perf_counter() - done)
        opened.append(at_open - begun)
        built.append(done - at_open)
    with store.freeze_now(rollout_id) as snapshot:
        tracemalloc.start()
        found = build(snapshot)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    store.close_now()
    return Measured(
        shape,
        statistics.median(opened),
        statistics.median(built),
        peak,
        statistics.median(arrays),
        len(found.trajectories),
        found.metrics["replay_factor"],
    )


def _store(store: FileStore, rollout_id: str, shape: Shape) -> None:
    chance = np.random.default_rng(shape.turns)
    per_turn = shape.ids // shape.turns
    sampled = per_turn * 2 // 5
    context = chance.integers(3, VOCABULARY, per_turn - sampled, dtype=np.int32)
    for turn in range(shape.turns):
        answer = chance.integers(3, VOCABULARY, sampled, dtype=np.int32)
        log_probs = -chance.exponential(1.0, sampled).astype(np.float32).astype(np.float64)
        call_id = f"call-{turn:05d}"
        store.begin_call_now(rollout_id, call_id)
        store.put_now(
            TokenEntry(rollout_id, call_id, context, answer, log_probs, model="m", sampling={"temperature": 1.0})
        )
        if shape.drift_every and turn % shape.drift_every == 0:
            answer = answer.copy()
            answer[sampled // 2] = 1
        reply = chance.integers(3, VOCABULARY, per_turn - sampled, dtype=np.int32)
        context = np.concatenate([context, answer, reply])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this")
    options = parser.parse_args()
    print("| rollout | open ms | build ms | against size 1 | peak MB | all arrays ms | trajectories | replay |")
    print("|---|---|---|---|---|---|---|---|")
    with place("disk") as directory:
        for shape in SHAPES:
            small = Shape(shape.turns // options.shrink, shape.ids // options.shrink, shape.drift_every)
            first: Measured | None = None
            for factor in (1, 2, 4):
                found = measure(directory, small.times(factor), options.rounds)
                first = first or found
                print(
                    f"| {found.shape} | {found.open_s * 1e3:.2f} | {found.build_s * 1e3:.1f} "
                    f"| {found.build_s / first.build_s:.1f}x for {factor}x | {found.peak_bytes / 1e6:.1f} "
                    f"| {found.arrays_s * 1e3:.0f} | {found.trajectories:,} | {found.replay_factor:.1f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
