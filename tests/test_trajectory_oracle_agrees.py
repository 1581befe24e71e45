"""`tokcap.trajectory` against the second opinion of `trajectory_oracle`, on rollouts made by chance."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import trajectory_oracle
from tests.rollout_examples import (
    Example,
    chains,
    drifting_rollouts,
    gapped_rollouts,
    questions,
    retried_rollouts,
    rollouts,
)
from tokcap import TokenCaptureSnapshot
from tokcap.trajectory import Build, build
from tokcap.trajectory.verdicts import CATEGORIES

EXAMPLES = st.one_of(rollouts(), chains(), drifting_rollouts(), retried_rollouts(), gapped_rollouts())

Key = tuple[str, int]


def summary(built: Build) -> dict[str, Any]:
    """A build in the words of the oracle."""
    calls, links = built.recorded.calls, built.links

    def key(number: int) -> Key:
        return calls[number].key

    return {
        "parent": {key(n): None if p < 0 else key(p) for n, p in links.parent.items()},
        "merged": {call.key: key(links.representative[call.number]) for call in calls},
        "status": {key(n): {c: k for c, k in found.counts.items() if k} for n, found in built.judged.items()},
        "trajectories": {(key(p.end), frozenset(map(key, p.owned))) for p in built._paths},
        "drifts": {
            key(n): (drift.nearest, drift.index) for n, drift in built.drift_of.items() if not drift.before_answer
        },
        "after_gap": set(map(key, built.gaps)),
        "sampled": {name: built.metrics[name] for name in ("sampled", *CATEGORIES) if name != "masked"},
    }


def opinion(given: TokenCaptureSnapshot, **asked: Any) -> dict[str, Any]:
    verdict = trajectory_oracle.judge(given.entries, given.calls, **asked)
    return {
        "parent": verdict.parent,
        "merged": verdict.merged,
        "status": {
            key: {name: count for name, count in counts.items() if count}
            for key, counts in verdict.status.items()
            if any(counts.values())
        },
        "trajectories": verdict.trajectories,
        "drifts": verdict.drifts,
        "after_gap": verdict.after_gap,
        "sampled": verdict.sampled,
    }


def compare(example: TokenCaptureSnapshot, given: TokenCaptureSnapshot, asked: dict[str, Any]) -> None:
    witness = {}
    if asked.get("scored") is not None:
        witness = {"call_id": asked["scored"][0], "choice_index": asked["scored"][1]}
    found = summary(build(given, models=asked.get("models"), **witness))
    expected = opinion(example, **asked)
    for name, value in expected.items():
        assert found[name] == value, (name, found[name], value)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(questions(EXAMPLES))
def test_builds_agree_with_the_plain_reading_of_the_rules(
    question: tuple[Example, list[str] | None, Key | None],
) -> None:
    example, models, scored = question
    compare(example, example, {"models": models, "scored": scored})
