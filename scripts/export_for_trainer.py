"""Frozen rollouts as padded batches, in the form that trainers with a response mask take (verl, TRL and their like).

Reads the published snapshots, retires nothing, leaves out what is open, retired, masked or unreadable (and says so).
Each file `batch-00000.npz` holds B sequences, prompts padded on the left to P ids, responses on the right to R. What
comes before the first trained id of a trajectory is its prompt, the rest its response: tool results, and what is not
trained, are inside, under a mask of 0.

prompts, responses      int64 [B, P], [B, R]: exactly what the engine saw and the policy sampled
input_ids, attention_mask, position_ids     int64 [B, P + R]: both together
response_mask           int64 [B, R]: 1 where trained (verl's response_mask, TRL's completion_mask)
rollout_log_probs       float32 [B, R]: as captured, 0 where the mask is 0 (TRL's sampling_per_token_logps)
rewards, advantages     float32 [B]: meta["reward"]; that less the mean of its group, over its deviation; NaN without
weights                 float32 [B]: this sequence's share in the trained ids of its rollout
uid, rollout_id         str [B]: the group, and the rollout

A rollout that splits into several sequences counts once in its group; multiply the mean loss of a sequence by its
weight, and it weighs no more than another. Advantages are those of GRPO; put your own in their place. Exit status: 0,
1 if nothing was written, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokcap import FileStore, Trajectory, build
from tokcap.errors import RetiredError, TokcapError
from tokcap.inspection import open_to_look, wanted_ids
from tokcap.trajectory import group_of

Arrays = dict[str, npt.NDArray[Any]]
Frozen = dict[str, tuple[str, float]]
"""Group and reward of each rollout; NaN if its owner gave none."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="*", metavar="ROLLOUT|GLOB", help="which ones (default: all)")
    parser.add_argument("-d", "--dir", help="the store (default: TOKCAP_DIR, or that of the file of TOKCAP_CONFIG)")
    parser.add_argument("-o", "--out", type=Path, required=True, help="directory for the files; must be empty")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a file (default: 64)")
    parser.add_argument("--pad", type=int, default=0, metavar="ID", help="what to pad with (default: 0)")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty")
    left_out: Counter[str] = Counter()
    try:
        store = open_to_look(options.dir)
        frozen = frozen_rollouts(store, wanted_ids(store, options.rollouts), left_out)
    except TokcapError as error:
        parser.error(str(error))
    advantages = advantages_of(frozen)
    trained = trained_trajectories(store, frozen, left_out)
    files = sequences = 0
    while batch := list(islice(trained, options.batch)):
        arrays = padded(batch, options.pad)
        arrays["rewards"] = np.array([frozen[one.rollout_id][1] for one in batch], np.float32)
        arrays["advantages"] = np.array([advantages[one.rollout_id] for one in batch], np.float32)
        write_whole(options.out / f"batch-{files:05d}.npz", arrays)
        files, sequences = files + 1, sequences + len(batch)
    told = ", ".join(f"{count:,} {why}" for why, count in sorted(left_out.items()))
    print(f"{sequences:,} sequences in {files:,} files; rollouts left out: {told or 'none'}")
    return 0 if files else 1


def frozen_rollouts(store: FileStore, wanted: Sequence[str], left_out: Counter[str]) -> Frozen:
    found: Frozen = {}
    for rollout_id in wanted:
        try:
            with store.read_now(rollout_id) as snapshot:
                if snapshot.version == 0:
                    left_out["open"] += 1
                    continue
                meta = snapshot.meta
        except RetiredError:
            left_out["retired"] += 1
        except TokcapError as error:
            left_out["unreadable"] += 1
            print(f"left out: {error}", file=sys.stderr)
        else:
            reward = meta.get("reward")
            found[rollout_id] = group_of(rollout_id, meta), reward if isinstance(reward, (int, float)) else float("nan")
    return found


def advantages_of(frozen: Frozen) -> dict[str, float]:
    """Of each rollout, as in GRPO, over the rollouts of its group: each counts once, however it splits."""
    groups: dict[str, list[float]] = defaultdict(list)
    for group, reward in frozen.values():
        if reward == reward:
            groups[group].append(reward)
    return {
        rollout_id: (reward - float(np.mean(groups[group]))) / (float(np.std(groups[group])) + 1e-6)
        if reward == reward
        else reward
        for rollout_id, (group, reward) in frozen.items()
    }


def trained_trajectories(store: FileStore, frozen: Frozen, left_out: Counter[str]) -> Iterator[Trajectory]:
    for rollout_id in frozen:
        try:
            with store.read_now(rollout_id) as snapshot:
                built = build(snapshot)
        except TokcapError:  # meanwhile
            left_out["gone"] += 1
            continue
        left_out.update(["masked"] * built.masked)
        yield from built.trained


def padded(batch: Sequence[Trajectory], pad: int) -> Arrays:
    first = [int(one.loss_mask.argmax()) for one in batch]
    prompts, responses = max(first), max(len(one) - start for one, start in zip(batch, first, strict=True))
    size = (len(batch), prompts + responses)
    ids, attention, mask = np.full(size, pad, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    log_probs = np.zeros(size, np.float32)
    for row, (one, start) in enumerate(zip(batch, first, strict=True)):
        here = slice(prompts - start, prompts - start + len(one))
        ids[row, here], attention[row, here], mask[row, here] = one.token_ids, 1, one.loss_mask
        log_probs[row, here] = np.where(one.loss_mask, one.log_probs, 0.0)
    return {
        "prompts": ids[:, :prompts], "responses": ids[:, prompts:], "input_ids": ids, "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(1) - 1, 0), "response_mask": mask[:, prompts:],
        "rollout_log_probs": log_probs[:, prompts:],
        "weights": np.array([one.trained / one.rollout_trained for one in batch], np.float32),
        "uid": np.array([one.group for one in batch]), "rollout_id": np.array([one.rollout_id for one in batch]),
    }  # fmt: skip


def write_whole(path: Path, arrays: Arrays) -> None:
    """The file is there as a whole or not at all, also after a power cut."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal can't show is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
