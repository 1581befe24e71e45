"""Where a build takes a shorter way for few calls, or for what is plain, it gives what the longer way gives."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rollout_examples import (
    Example,
    call,
    chains,
    drifting_rollouts,
    example,
    gapped_rollouts,
    questions,
    retried_rollouts,
    rollouts,
)
from tests.test_trajectory_oracle_agrees import Key, outcome, summary
from tokcap.trajectory import Build, build, drift, findings, prompts
from tokcap.trajectory.behaviour import unknown_log_probs
from tokcap.trajectory.links import link
from tokcap.trajectory.recorded import Call, read_snapshot
from tokcap.trajectory.verdicts import all_known

EXAMPLES = st.one_of(rollouts(), chains(), drifting_rollouts(), retried_rollouts(), gapped_rollouts())


def asked_about(question: tuple[Example, list[str] | None, Key | None]) -> Build:
    given, models, scored = question
    witness: dict[str, Any] = {} if scored is None else {"call_id": scored[0], "choice_index": scored[1]}
    return build(given, models=models, **witness)


def everything(built: Build) -> Any:
    arrays = [(t.token_ids.tobytes(), t.loss_mask.tobytes(), t.log_probs.tobytes()) for t in built.trajectories]
    fates = {number: (fate.verdict, fate.continued) for number, fate in built.fates.items()}
    found = summary(built)
    drifts = [(d.call, d.nearest, d.index, d.kept, d.lost, d.before_answer, d.kind) for d in built.drifts]
    return found, built.scored, built.metrics, built.reasons, arrays, fates, drifts


@contextmanager
def few(number: int) -> Iterator[None]:
    """As if so many calls were few."""
    with mock.patch.object(drift, "FEW", number), mock.patch.object(prompts, "FEW", number):
        yield


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(questions(EXAMPLES), st.sampled_from([0, 1, 2, 4]))
def test_few_calls_are_compared_as_many_are(
    question: tuple[Example, list[str] | None, Key | None], number: int
) -> None:
    with few(1000):
        expected = everything(asked_about(question))
    with few(number):
        assert everything(asked_about(question)) == expected


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(questions(EXAMPLES))
def test_a_scored_call_that_changes_nothing_is_not_looked_at_twice(
    question: tuple[Example, list[str] | None, Key | None],
) -> None:
    found = everything(asked_about(question))
    plain = findings._Linked.__init__

    def twice(self: Any, *given: Any) -> None:
        plain(self, *given)
        self.scored_matters = True

    with mock.patch.object(findings._Linked, "__init__", twice):
        assert everything(asked_about(question)) == found


def test_of_a_plain_conversation_links_are_made_once_although_a_call_was_scored() -> None:
    given = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]))
    with mock.patch("tokcap.trajectory.findings.link", side_effect=link) as linked:
        assert build(given, call_id="b").scored.number == 1
    assert linked.call_count == 1


_LOG_PROBS = st.sampled_from([-0.5, 0.0, -0.0, 1e-6, 1e-5, 1.1e-5, 3.0, -9998.9, -9999.0, -1e6, math.nan, math.inf])


@given(st.lists(st.lists(_LOG_PROBS | st.just(-math.inf), min_size=1, max_size=5), max_size=6))
def test_known_log_probs_of_many_calls_are_told_at_once(log_probs: list[list[float]]) -> None:
    given = example(*(call(f"c{i}", [i], [7] * len(known), known) for i, known in enumerate(log_probs)))
    calls: list[Call] = read_snapshot(given).calls
    assert all_known(calls) == [not unknown_log_probs(one.generation_log_probs).any() for one in calls]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(drifting_rollouts(), st.randoms(use_true_random=False))
def test_ids_are_the_same_whichever_trajectories_somebody_still_has(given: Example, chance: Any) -> None:
    alone = []
    for i in range(len(build(given).trajectories)):
        alone.append(build(given).trajectories[i].token_ids.tolist())  # noqa: PERF401  (one build for each)
    built = build(given)
    kept: list[Any] = []
    for i in [chance.randrange(len(alone)) for _ in range(3 * len(alone))]:
        trajectory = built.trajectories[i]
        assert trajectory.token_ids.tolist() == alone[i]
        assert not trajectory.token_ids.flags.writeable
        if chance.random() < 0.5:
            kept.append(trajectory.token_ids)
        elif kept:
            kept.pop()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_builds_and_trajectories_can_be_copied_and_sent_elsewhere(copied: Callable[[Any], Any]) -> None:
    built = build(example(call("a", [1, 2, 3], [4, 5]), call("b", [1, 2, 3, 4, 6], [7])))
    held = [trajectory.token_ids for trajectory in built.trajectories]
    sent = copied(built)
    assert [t.token_ids.tolist() for t in sent.trajectories] == [ids.tolist() for ids in held]
    assert copied(built.trajectories[1]).token_ids.tolist() == held[1].tolist()


def test_ids_of_a_trajectory_begin_as_those_that_are_there() -> None:
    given = example(call("a", [1, 2, 3], [4, 5]), call("b", [1, 2, 3, 4, 6], [7]))
    first, second = list(build(given).trajectories)
    ids = [first.token_ids.tolist(), second.token_ids.tolist()]
    assert second.prefix_of == 0
    built = build(given)
    held = built.trajectories[0].token_ids
    with mock.patch.object(type(built.recorded.tree), "ids_to") as walked:
        _ = built.trajectories[1].token_ids
    assert len(walked.call_args.args[1]) == len(ids[1]) - second.shared  # only the rest is looked for
    assert held.tolist() == ids[0]


@pytest.mark.parametrize("limit", [0, 1000])
def test_of_earlier_prompts_that_began_at_the_same_time_the_first_by_its_ids_is_the_nearest(limit: int) -> None:
    given = example(
        call("b", [1, 3], [5], begun=1.0, ended=2.0),
        call("a", [1, 2], [5], begun=1.0, ended=2.0),
        call("on", [1, 4], [6], begun=7.0, ended=8.0),
    )
    with few(limit):
        assert [(found.call[0], found.nearest[0], found.index) for found in build(given).drifts] == [("on", "a", 1)]


def test_a_prompt_that_stops_in_a_cut_off_answer_drifts_although_it_begins_with_a_whole_one() -> None:
    given = example(call("a", [1], [2]), call("cut", [1, 2], [3, 4, 5], outcome="aborted"), call("on", [1, 2, 3], [9]))
    (found,) = build(given).drifts
    assert (found.call, found.nearest, found.index, found.kept, found.lost) == (("on", 0), ("cut", 0), 3, 1, 2)


@pytest.mark.parametrize("number", [3, prompts.FEW + 3])
def test_outcomes_do_not_depend_on_how_many_answers_run_through_a_place(number: int) -> None:
    """More answers to one prompt than are few, then a prompt that leaves one of them."""
    retries = [call(f"r{i}", [1], [2, 3, 10 + i], begun=float(i), ended=i + 0.5) for i in range(number)]
    given = example(*retries, call("on", [1, 2, 3, 9], [4], begun=90.0, ended=91.0))
    expected = outcome(given)
    for limit in (0, 1000):
        with few(limit):
            assert outcome(given) == expected
    drifts = build(given).drifts
    assert [(found.call, found.index, found.kept) for found in drifts if not found.before_answer] == [(("on", 0), 3, 2)]


def test_an_answer_that_only_the_engine_says_was_cut_off_is_not_trained() -> None:
    built = build(example(call("a", [1], [2]), call("b", [1, 2], [3, 4], finish_reason="aborted")))
    assert (built.metrics["trained"], built.metrics["aborted"], built.metrics["aborted_calls"]) == (1, 2, 0)
