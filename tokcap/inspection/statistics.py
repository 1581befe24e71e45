"""What many rows say together: tokens, masking, drift, log-probs, sizes; and what in it looks wrong."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from ..trajectory.verdicts import CATEGORIES
from .row import LOG_PROB_EDGES, RolloutRow

__all__ = ("By", "Statistics", "statistics", "statistics_by")

By = Literal["group", "model", "state"]
BY: tuple[By, ...] = get_args(By)

_MANY_ZEROS = 0.8
"""Share of log-probs that are exactly 0.0. Of a sharp model in float32 a half is not rare; engines that give zeros for
what they did not compute give nearly nothing else."""


class Statistics(msgspec.Struct, frozen=True):
    """Sums over rollouts. Fractions are None where there is nothing to divide by."""

    rollouts: int
    states: dict[str, int]
    finished: int
    """Open and frozen ones whose owner said `finish`."""
    masked: int
    """Rollouts of which something was recorded and nothing is trained."""
    incomplete: int
    damaged: int
    unreadable: int
    calls: int
    outcomes: dict[str, int]
    """Calls by outcome."""
    sampled: int
    categories: dict[str, int]
    """What became of the sampled ids, by the names of `tokcap.trajectory.METRICS`; their sum is `sampled`."""
    delivered_fraction: float | None
    """trained / sampled."""
    reasons: dict[str, int]
    """Rollouts by reason why something of them is not trained."""
    turns: int
    """Calls whose prompt had an earlier answer to extend: those that do, and those that drifted."""
    drifted_calls: int
    restarted_calls: int
    drift_lost: int
    """Sampled ids that drifted prompts no longer hold."""
    drift_rate: float | None
    """drifted_calls / turns."""
    policy_versions: dict[str, int]
    """Sampled ids by version of the weights; under "" where the engine told none."""
    models: dict[str, int]
    """Rollouts by model."""
    log_probs: tuple[int, ...]
    """Sampled ids by bin of `LOG_PROB_EDGES`."""
    zero_log_probs: int
    """Log-probs that are exactly 0.0."""
    not_behaviour: int
    """Trained ids whose log-probs are known not to be the sampling distribution."""
    log_prob_modes: dict[str, int]
    """Recorded answers by log-prob mode."""
    mixed_log_prob_modes: int
    """Rollouts with more than one mode."""
    files: int
    bytes: int
    """Of all rollouts, each file once: what `ls` says they are long, space that is written ahead included."""
    payload_bytes: int
    """The least that the tokens need: 4 bytes for each distinct id of a rollout (a prefix that calls share counts once)
    and 8 for each sampled id's log-prob."""
    bytes_per_sampled: float | None
    """bytes / sampled, of rollouts that are open or frozen."""
    write_amplification: float | None
    """bytes / payload_bytes, of rollouts that are open or frozen. Below 1 is possible: ids and log-probs are stored as
    narrow as they can be. Contents of answers, intents and checksums are in it."""
    replay_factor: float | None
    """How often a trainer reads an id: lengths of all trajectories / distinct ids."""
    hints: tuple[str, ...]
    """What looks wrong, in words."""


def statistics(rows: Iterable[RolloutRow]) -> Statistics:
    """Add up `rows`."""
    rows = list(rows)
    collecting = gc.isenabled()
    gc.disable()  # there is no garbage, and the rows are many
    try:
        metrics, modes = _summed_metrics(rows)
        built = [row for row in rows if row.metrics]
        kept_bytes = sum(row.bytes for row in built)
        outcomes = _summed_counts(tuple(row.outcomes.items()) for row in rows)
        versions = _summed_counts(tuple(row.policy_versions.items()) for row in rows)
        reasons = Counter(chain.from_iterable(row.reasons for row in rows))
        models = Counter(chain.from_iterable(row.models for row in rows))
        states: Counter[str] = Counter(row.state for row in rows)
    finally:
        if collecting:
            gc.enable()
    binned = [row.log_probs for row in rows if row.log_probs]
    log_probs = np.array(binned, np.int64).sum(axis=0) if binned else np.zeros(len(LOG_PROB_EDGES), np.int64)
    sampled, distinct = metrics["sampled"], metrics["distinct_ids"]
    payload = 4 * distinct + 8 * sampled
    found = Statistics(
        rollouts=len(rows),
        states=_sorted(states),
        finished=sum(row.finished for row in rows),
        masked=sum(row.masked for row in rows),
        incomplete=sum(row.incomplete for row in rows),
        damaged=sum(bool(row.damage) for row in rows),
        unreadable=states["unreadable"],
        calls=sum(row.calls for row in rows),
        outcomes=_sorted(outcomes),
        sampled=sampled,
        categories={name: metrics[name] for name in CATEGORIES if metrics[name]},
        delivered_fraction=_fraction(metrics["trained"], sampled),
        reasons=_sorted(reasons),
        turns=metrics["turns"],
        drifted_calls=metrics["drifted_calls"],
        restarted_calls=metrics["restarted_calls"],
        drift_lost=metrics["drift_lost"],
        drift_rate=_fraction(metrics["drifted_calls"], metrics["turns"]),
        policy_versions=dict(sorted(versions.items(), key=lambda one: _by_numbers(one[0]))),
        models=_sorted(models),
        log_probs=tuple(log_probs.tolist()),
        zero_log_probs=metrics["zero_log_probs"],
        not_behaviour=metrics["not_behaviour"],
        log_prob_modes=_sorted(modes),
        mixed_log_prob_modes=metrics["mixed_log_prob_modes"],
        files=sum(row.files for row in rows),
        bytes=sum(row.bytes for row in rows),
        payload_bytes=payload,
        bytes_per_sampled=_fraction(kept_bytes, sampled),
        write_amplification=_fraction(kept_bytes, payload),
        replay_factor=_fraction(metrics["total_ids"], distinct),
        hints=(),
    )
    return msgspec.structs.replace(found, hints=tuple(_hints(found)))


def statistics_by(rows: Iterable[RolloutRow], by: By) -> dict[str, Statistics]:
    """The same for each group, model (several of one rollout are joined by ` + `) or state, in the order of names."""
    parts: dict[str, list[RolloutRow]] = defaultdict(list)
    key_of = _KEYS[by]
    for row in rows:
        parts[key_of(row)].append(row)
    return {key: statistics(parts[key]) for key in sorted(parts)}


_KEYS: dict[By, Callable[[RolloutRow], str]] = {
    "group": lambda row: row.group,
    "model": lambda row: " + ".join(row.models),
    "state": lambda row: row.state,
}


def _summed_metrics(rows: Sequence[RolloutRow]) -> tuple[Counter[str], Counter[str]]:
    """Metrics, and answers by log-prob mode. Rows have few different sets of metrics, so it goes by columns."""
    values: dict[tuple[str, ...], list[Collection[Any]]] = defaultdict(list)
    for row in rows:
        values[tuple(row.metrics)].append(row.metrics.values())
    metrics: Counter[str] = Counter()
    modes: list[tuple[tuple[str, int], ...]] = []
    for names, lines in values.items():
        for name, column in zip(names, zip(*lines, strict=True), strict=True):
            if name == "log_prob_modes":
                modes += [tuple(told.items()) for told in column]
            else:
                metrics[name] += sum(column)
    return metrics, _summed_counts(modes)


def _summed_counts(counts: Iterable[tuple[tuple[str, int], ...]]) -> Counter[str]:
    """Most rows say the same, so that each of those is added up once."""
    found: Counter[str] = Counter()
    for said, times in Counter(counts).items():
        for name, count in said:
            found[name] += count * times
    return found


def _by_numbers(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts step-9 before step-10: numbers by their value, and before other text."""
    parts = re.findall(r"0*([0-9]+)|([^0-9]+)", name)
    return [(len(digits), digits) if digits else (sys.maxsize, text) for digits, text in parts], name


def _sorted(counts: Counter[str]) -> dict[str, int]:
    """Most first, then by name; nothing that is 0."""
    return dict(sorted(((name, count) for name, count in counts.items() if count), key=lambda one: (-one[1], one[0])))


def _fraction(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _hints(found: Statistics) -> Sequence[str]:
    said = []
    known = sum(found.log_probs)
    if known and found.zero_log_probs / known >= _MANY_ZEROS:
        said.append(
            f"{found.zero_log_probs / known:.0%} of the log-probs are exactly 0.0: greedy sampling, or an engine that "
            "gives zeros for what it did not compute; compare with a re-scored file before you train on them"
        )
    if found.mixed_log_prob_modes or len(found.log_prob_modes) > 1:
        said.append(
            f"log-probs of several modes ({', '.join(found.log_prob_modes)}): they are not comparable; start every "
            "engine with the same --logprobs-mode"
        )
    if found.not_behaviour:
        said.append(
            f"{found.not_behaviour:,} trained ids have log-probs that are not those of the sampling distribution "
            "(raw mode with a temperature, a grammar or penalties): use processed_logprobs, or "
            "build(..., exclude_not_behaviour=True)"
        )
    if found.sampled and not known:
        said.append("no log-prob is known: the engine was not asked for them, or left them out")
    if found.outcomes.get("open", 0) and not found.states.get("open"):
        said.append("calls are open in frozen rollouts: their servers died, or the freeze did not wait for them")
    return said
