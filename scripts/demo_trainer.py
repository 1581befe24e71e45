"""The trainer of the demo: it follows the store, checks every trajectory against the recording, and hands it over.

Writes one line of JSON for each rollout that came.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests import recordings
from tokcap import Build, TokenEntry, Trajectory, consume, process_source
from tokcap.arrays import FloatArray, IdArray
from tokcap.config import config_from_environment
from tokcap.delivery import Delivery
from tokcap.trajectory import rebuild_from

__all__ = ("Row", "main")

Key = tuple[str, int]
"""Identifies an answer in the recording and in the store: its id, which the agent saw, and the choice."""


class Row(msgspec.Struct):
    """What became of one rollout."""

    rollout: str
    reward: float
    calls: int
    outcomes: dict[str, int]
    captured: int
    """Ids that were sampled and recorded."""
    delivered: int
    """Ids that are trained, each once."""
    trajectories: int
    drifted: int
    replay: float
    rebuilt: str
    """How much of the trained ids one Responses payload could carry, or why there can be none."""
    untrained: dict[str, int]
    """Why the other sampled ids are not trained, and how many."""
    flags: dict[str, int]
    retired: bool = False
    problems: list[str] = []


async def train(handover: Path) -> None:
    """Follow the `finish` notes in the store that `TOKCAP_DIR` names, until every recorded rollout came."""
    source = process_source(config_from_environment())
    expected = {rollout.rollout_id: rollout for rollout in recordings.rollouts()}
    async with consume(source, poll_s=0.05) as rollouts:
        async for rollout in rollouts:
            assert rollout.build is not None, rollout.metrics
            path = save(rollout, handover / f"{rollout.rollout_id}.npz")
            recorded = expected.pop(rollout.rollout_id)
            row = checked(rollout, recorded)
            row.problems += wrong_file(path, rollout.build)
            row.retired = not row.problems and await rollout.done()
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
            sys.stdout.flush()
            if not expected:
                rollouts.stop()


def checked(rollout: Delivery, recorded: recordings.RecordedRollout) -> Row:
    build = rollout.build
    assert build is not None
    metrics, with_tokens = build.metrics, build.trained
    rebuilt = rebuild_from(build)
    return Row(
        rollout=rollout.rollout_id,
        reward=rollout.meta["reward"],
        calls=metrics["calls"],
        outcomes={
            name: metrics[f"{name}_calls"] for name in ("no_generation", "lost", "open") if metrics[f"{name}_calls"]
        },
        captured=metrics["sampled"],
        delivered=metrics["trained"],
        trajectories=len(with_tokens),
        drifted=metrics["drifted_calls"],
        replay=metrics["replay_factor"],
        rebuilt=", ".join(rebuilt.reasons) or f"{rebuilt.metrics['delivered_fraction']:.0%}",
        untrained={
            name: metrics[name]
            for name in ("abandoned", "ambiguous", "aborted", "unknown", "conflict", "other_model", "after_final")
            if metrics[name]
        },
        flags=dict(Counter(flag for trajectory in with_tokens for flag in trajectory.flags)),
        problems=[
            *wrong_outcomes(build, recorded),
            *wrong_captures(build, recorded),
            *wrong_trajectories(build, recorded),
        ],
    )


def wrong_outcomes(build: Build, recorded: recordings.RecordedRollout) -> Iterator[str]:
    """Every request that may generate has to be there with what became of it, and no other one.

    Agents send the same idempotency key again when they ask again. A killed worker leaves the call `open`.
    """
    expected = {call.model_call_id: call.outcome for call in recorded.calls if call.generates}
    found: dict[str, set[str]] = defaultdict(set)
    for record in build.recorded.records:
        found[record.idempotency_key].add(record.outcome)
    for key in sorted(expected.keys() | found.keys()):
        if found[key] - {"open"} != {expected.get(key)}:
            yield f"{key} is {sorted(found[key])}, expected {expected.get(key, 'no trace')}"


def wrong_captures(build: Build, recorded: recordings.RecordedRollout) -> Iterator[str]:
    """Every answer whose ids were recorded has to be there, with the same ids and log-probs to the bit."""
    expected = entries_by_key(recorded)
    found = [((call.response_id, call.choice_index), call) for call in build.recorded.calls]
    yield from (f"{key} is not in both" for key in sorted(expected.keys() ^ {key for key, _ in found}))
    for key, call in found:
        tokens = build.recorded.prompt_token_ids(call), call.generation_token_ids, call.generation_log_probs
        if key in expected and not same_tokens(expected[key], *tokens):
            yield f"{key} was captured with other tokens"


def entries_by_key(recorded: recordings.RecordedRollout) -> dict[Key, TokenEntry]:
    return {(entry.response_id, entry.choice_index): entry for entry in recorded.entries}


def same_tokens(entry: TokenEntry, prompt: IdArray, ids: IdArray, log_probs: FloatArray) -> bool:
    return (
        np.array_equal(entry.prompt_token_ids, prompt)
        and np.array_equal(entry.generation_token_ids, ids)
        and entry.generation_log_probs.tobytes() == log_probs.tobytes()
    )


def wrong_trajectories(build: Build, recorded: recordings.RecordedRollout) -> Iterator[str]:
    """Every trained id is trained once, after the context that the engine saw, with its log-prob."""
    expected = entries_by_key(recorded)
    answers = {call.model_call_id: call.response_id for call in build.recorded.calls}
    seen: Counter[Key] = Counter()
    for trajectory in build.trained:
        for key, start, end in trained_spans(trajectory, answers):
            seen[key] += 1
            yield from wrong_span(expected[key], key, start, end, trajectory)
    yield from (f"{key} is trained {count} times" for key, count in seen.items() if count > 1)
    if recorded.shape != "edges":  # whose calls ask the same thing many times, and nobody says what was kept
        dropped = {call.model_call_id for call in recorded.calls if call.note.startswith("abandoned")}
        kept = {key for key, entry in expected.items() if entry.model_call_id not in dropped}
        yield from (f"{key} is not trained" for key in sorted(kept - seen.keys()))


def trained_spans(trajectory: Trajectory, answers: dict[str, str]) -> Iterator[tuple[Key, int, int]]:
    for span in trajectory.calls:
        if span.owned and span.trained:
            yield (answers[span.model_call_ids[0]], span.choice_index), span.start, span.end


def wrong_span(entry: TokenEntry, key: Key, start: int, end: int, trajectory: Trajectory) -> Iterator[str]:
    sequence = np.concatenate([entry.prompt_token_ids, entry.generation_token_ids])
    if not np.array_equal(trajectory.token_ids[:end], sequence) or start != len(entry.prompt_token_ids):
        yield f"{key} is trained after another context"
    known = np.isfinite(entry.generation_log_probs)
    if not np.array_equal(trajectory.loss_mask[start:end], known):
        yield f"{key} has another mask"
    if trajectory.log_probs[start:end][known].tobytes() != entry.generation_log_probs[known].tobytes():
        yield f"{key} is trained with other log-probs"


def save(rollout: Delivery, path: Path) -> Path:
    """The trajectories in one file that is there as a whole or not at all, and stays after a power cut."""
    arrays: dict[str, Any] = {}
    for trajectory in rollout.trajectories:
        for field in ("token_ids", "loss_mask", "log_probs"):
            arrays[f"{trajectory.index}.{field}"] = getattr(trajectory, field)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def wrong_file(path: Path, build: Build) -> list[str]:
    """What was handed over must hold exactly the ids that are trained."""
    with np.load(path) as arrays:
        masks = [arrays[name] for name in arrays.files if name.endswith("loss_mask")]
    in_file = sum(int(mask.sum()) for mask in masks)
    return [] if in_file == build.metrics["trained"] else [f"{path.name} holds {in_file} trained ids"]


def main(handover: Path) -> int:
    handover.mkdir(mode=0o700, exist_ok=True)
    asyncio.run(train(handover))
    return 0
