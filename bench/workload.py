"""The workloads: what agents do to a store, as arrays, the same for every candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ("Call", "Workload", "calls")

VOCABULARY = 150_000


@dataclass(frozen=True)
class Workload:
    """`rollouts` conversations of `turns` calls: a first prompt, and so many new ids per turn."""

    rollouts: int = 64
    turns: int = 20
    first_prompt: int = 1_500
    per_turn: int = 300
    """Ids by which the prompt grows from turn to turn, the sampled ones included."""
    sampled: int = 200

    @property
    def puts(self) -> int:
        return self.rollouts * self.turns


@dataclass(frozen=True)
class Call:
    """One model call as a serving process has it."""

    rollout_id: str
    model_call_id: str
    prompt: npt.NDArray[np.int32]
    generated: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float64]


def calls(workload: Workload, seed: int = 0) -> list[list[Call]]:
    """The calls of each rollout, in order; every prompt extends the sequence before it."""
    random = np.random.default_rng(seed)
    return [list(_conversation(workload, f"rollout-{number:05d}", random)) for number in range(workload.rollouts)]


def _conversation(workload: Workload, rollout_id: str, random: np.random.Generator) -> Iterator[Call]:
    sequence = random.integers(0, VOCABULARY, workload.first_prompt, dtype=np.int32)
    for turn in range(workload.turns):
        generated = random.integers(0, VOCABULARY, workload.sampled, dtype=np.int32)
        # Engines compute log-probs in float32 and say them as JSON numbers.
        log_probs = -random.exponential(1.0, workload.sampled).astype(np.float32).astype(np.float64)
        yield Call(rollout_id, f"call-{turn:04d}", sequence.copy(), generated, log_probs)
        reply = random.integers(0, VOCABULARY, workload.per_turn - workload.sampled, dtype=np.int32)
        sequence = np.concatenate([sequence, generated, reply])
