"""The trainer of the demo: it follows the store, checks every trajectory against the recording, and hands it over.

Writes one line of JSON for each rollout that came.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests import recordings
from tokcap import Build, TokenEntry, Trajectory, consume, process_source, token_id_capture_config
from tokcap.arrays import FloatArray, IdArray
from tokcap.delivery import Delivery
from tokcap.trajectory import rebuild_from

from .demo_server import configuration

__all__ = ("Row", "main", "original")


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


def original(model_call_id: str) -> str:
    """The name of the recorded call, without the mark of a retry."""
    return model_call_id.partition(".")[0]


async def train(directory: str, handover: Path) -> None:
    """Follow the `finish` notes until every recorded rollout came."""
    source = process_source(token_id_capture_config(configuration(directory)))
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
        problems=[*wrong_captures(build, recorded), *wrong_trajectories(build, recorded)],
    )


def wrong_captures(build: Build, recorded: recordings.RecordedRollout) -> Iterator[str]:
    """Every answer whose ids were in a body has to be there, with the same ids and log-probs to the bit."""
    expected = {(entry.model_call_id, entry.choice_index): entry for entry in recorded.entries}
    found = {
        (original(call.model_call_id), call.choice_index): (
            build.recorded.prompt_token_ids(call),
            call.generation_token_ids,
            call.generation_log_probs,
        )
        for call in build.recorded.calls
    }
    yield from (f"{key} is not in both" for key in sorted(expected.keys() ^ found.keys()))
    for key in expected.keys() & found.keys():
        if not same_tokens(expected[key], *found[key]):
            yield f"{key} was captured with other tokens"


def same_tokens(entry: TokenEntry, prompt: IdArray, ids: IdArray, log_probs: FloatArray) -> bool:
    return (
        np.array_equal(entry.prompt_token_ids, prompt)
        and np.array_equal(entry.generation_token_ids, ids)
        and entry.generation_log_probs.tobytes() == log_probs.tobytes()
    )


def wrong_trajectories(build: Build, recorded: recordings.RecordedRollout) -> Iterator[str]:
    """Every trained id is trained once, after the context that the engine saw, with its log-prob."""
    expected = {(entry.model_call_id, entry.choice_index): entry for entry in recorded.entries}
    seen: Counter[tuple[str, int]] = Counter()
    for trajectory in build.trained:
        for key, start, end in trained_spans(trajectory):
            seen[key] += 1
            yield from wrong_span(expected[key], key, start, end, trajectory)
    yield from (f"{key} is trained {count} times" for key, count in seen.items() if count > 1)
    if recorded.shape != "edges":  # whose calls ask the same thing many times, and nobody says what was kept
        dropped = {call.model_call_id for call in recorded.calls if call.note.startswith("abandoned")}
        missing = {key for key in expected if key[0] not in dropped} - seen.keys()
        yield from (f"{key} is not trained" for key in sorted(missing))


def trained_spans(trajectory: Trajectory) -> Iterator[tuple[tuple[str, int], int, int]]:
    for span in trajectory.calls:
        if span.owned and span.trained:
            yield (original(span.model_call_ids[0]), span.choice_index), span.start, span.end


def wrong_span(entry: TokenEntry, key: tuple[str, int], start: int, end: int, trajectory: Trajectory) -> Iterator[str]:
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


def main(directory: str, handover: Path) -> int:
    handover.mkdir(mode=0o700, exist_ok=True)
    asyncio.run(train(directory, handover))
    return 0
