"""The trajectory rules 1 to 23, by number; 24 to 27 concern delivery and stand in `test_delivery`."""

from __future__ import annotations

import math
import random
import sys
import tracemalloc
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout_examples import Example, call, example, missing, questions, renamed, reordered, samples
from tokcap import CallRecord, FileStore, Snapshot, TokenEntry
from tokcap.digests import answer_digest, message_digest
from tokcap.errors import InvalidOptionError
from tokcap.trajectory import (
    FLAGS,
    METRICS,
    REASONS,
    Build,
    Trajectory,
    build,
    group_of,
    rebuild_from,
    rebuild_response,
)
from tokcap.trajectory.verdicts import CATEGORIES


def text(said: str) -> list[dict[str, object]]:
    """Output items of an answer that says that."""
    content = [{"type": "output_text", "text": said, "annotations": []}]
    return [{"type": "message", "role": "assistant", "content": content}]


def trained(built: Build) -> dict[str, list[int]]:
    """Call id -> the ids that are trained, wherever they are; each position must be trained once."""
    found: dict[str, list[int]] = {}
    for trajectory in built.trajectories:
        for span in trajectory.calls:
            mask = trajectory.loss_mask[span.start : span.end]
            if mask.any():
                assert span.model_call_ids[0] not in found
                found[span.model_call_ids[0]] = trajectory.token_ids[span.start : span.end][mask].tolist()
    return found


def of(built: Build, call_id: str) -> Trajectory:
    """The trajectory that owns the span of a call."""
    (found,) = [
        trajectory
        for trajectory in built.trajectories
        if any(call_id in span.model_call_ids and span.owned for span in trajectory.calls)
    ]
    return found


def ends(built: Build) -> list[str]:
    return sorted(trajectory.calls[-1].model_call_ids[0] for trajectory in built.trajectories)


# ---- linking


def test_rule_01_the_parent_is_the_longest_sequence_that_the_prompt_holds() -> None:
    built = build(
        example(
            call("a", [1, 2], [3]),
            call("b", [1, 2, 3, 4], [5]),
            call("c", [1, 2, 3, 4, 5], [6]),  # equal to b's sequence
            call("d", [1, 2, 3, 4, 5, 7], [8]),
        )
    )
    parents = {c.key[0]: built.links.parent[c.number] for c in built.recorded.calls}
    numbers = {c.key[0]: c.number for c in built.recorded.calls}
    assert parents == {"a": -1, "b": numbers["a"], "c": numbers["b"], "d": numbers["b"]}


def test_rule_01_ids_outrank_a_recorded_parent() -> None:
    refuted = example(
        call("a", [1, 2], [3]),
        call("b", [5, 6], [7]),
        call("c", [1, 2, 3, 4], [5], extra={"parent_call_id": "b"}),
    )
    built = build(refuted)
    assert of(built, "c") is not of(built, "b")
    assert [span.model_call_ids[0] for span in of(built, "c").calls] == ["a", "c"]
    assert built.metrics["hints_refuted"] == 1


def test_rule_01_a_hint_breaks_a_tie_between_equal_samples() -> None:
    for chosen in ("a", "b"):
        built = build(
            example(
                call("a", [1], [2], [-0.1], begun=0, ended=2, delivered="full"),
                call("b", [1], [2], [-0.2], begun=1, ended=3, delivered="full"),
                call("c", [1, 2, 3], [4], begun=4, ended=5, extra={"parent_call_id": chosen}),
            )
        )
        assert [span.model_call_ids[0] for span in of(built, "c").calls] == [chosen, "c"]
        assert built.metrics["hints_refuted"] == 0


def test_rule_02_order_of_entries_and_names_of_processes_decide_nothing() -> None:
    given = example(
        call("a", [1, 2], [3, 4], begun=0, ended=1),
        call("b", [1, 2], [5], begun=2, ended=3),
        call("c", [1, 2, 5, 6], [7], begun=4, ended=5),
        call("d", [1, 2, 5, 6], [8], begun=4.5, ended=6),
        call("e", [1, 2, 5, 6, 7, 1], [2], begun=7, ended=8),
    )
    expected = [(t.token_ids.tolist(), t.loss_mask.tolist(), t.flags) for t in build(given).trajectories]
    for seed in range(20):
        shuffled = reordered(given, random.Random(seed))
        assert [(t.token_ids.tolist(), t.loss_mask.tolist(), t.flags) for t in build(shuffled).trajectories] == expected
    other_names = renamed(given, {"a": "z", "b": "y", "c": "x", "d": "w", "e": "v"})
    assert [(t.token_ids.tolist(), t.loss_mask.tolist(), t.flags) for t in build(other_names).trajectories] == expected


def test_rule_02_times_of_different_boots_are_not_compared() -> None:
    def retried(boot_of_last: str) -> Example:
        return example(
            call("a", [1], [2], begun=0, ended=1, boot="one", delivered="full"),
            call("b", [1], [3], begun=5, ended=6, boot=boot_of_last, delivered="full"),
        )

    assert build(retried("one")).metrics["ambiguous"] == 2  # one ended before the other began: a retry
    assert build(retried("two")).metrics["trained"] == 2  # unknown order; both reached the client: samples


def test_rule_02_what_is_known_to_be_earlier_within_one_boot_may_be_later_across_boots() -> None:
    def given(boot: str) -> Example:
        return example(
            call("earlier", [1, 2, 9], [9], begun=0, ended=1, boot="one"),
            call("a", [1], [2], begun=2, ended=3, boot=boot),
            call("b", [1], [3], begun=4, ended=5, boot=boot),
        )

    assert build(given("one")).metrics["ambiguous"] == 2  # it can't have gone on with a
    assert trained(build(given("two"))) == {"earlier": [9], "a": [2]}


def test_rule_03_of_equal_sequences_the_later_cut_is_the_parent() -> None:
    built = build(example(call("a", [1], [2, 3]), call("b", [1, 2], [3]), call("c", [1, 2, 3, 4], [5])))
    assert "b" in {span.model_call_ids[0] for span in of(built, "c").calls}
    assert trained(built) == {"a": [2, 3], "b": [3], "c": [5]}


def test_rule_03_identical_calls_are_one_call_with_several_ids() -> None:
    built = build(example(call("a", [1], [2, 3]), call("b", [1], [2, 3]), call("c", [1, 2, 3, 4], [5])))
    (trajectory,) = built.trajectories
    assert [span.model_call_ids for span in trajectory.calls] == [("a", "b"), ("c",)]
    assert built.metrics["merged_calls"] == 1
    assert (built.metrics["sampled"], built.metrics["trained"], built.metrics["repeated"]) == (5, 3, 2)


def test_rule_03_a_witness_that_names_any_of_identical_calls_names_them_all() -> None:
    given = example(call("a", [1], [2]), call("b", [1], [2]), call("c", [1, 2, 3], [4]))
    assert {build(given, call_id=name).scored.number for name in ("a", "b")} == {
        build(given, call_id="a").scored.number
    }
    assert build(given, call_id="b").metrics["after_final"] == 1


def test_rule_03_the_log_probs_kept_are_those_of_the_call_that_the_client_received() -> None:
    for received in ("a", "b"):
        built = build(
            example(
                call("a", [1], [2], [-0.10], begun=0, ended=1, delivered="full" if received == "a" else "no"),
                call("b", [1], [2], [-0.14], begun=2, ended=3, delivered="full" if received == "b" else "no"),
                call("c", [1, 2, 3], [4], begun=4, ended=5),
            )
        )
        assert built.trajectories[0].log_probs[1] == {"a": -0.10, "b": -0.14}[received]
        assert built.metrics["largest_log_prob_difference"] == pytest.approx(0.04)


def test_rule_03_else_those_of_the_later_one_that_ended_before_the_next_call_began() -> None:
    built = build(
        example(
            call("a", [1], [2], [-0.10], begun=0, ended=1),
            call("b", [1], [2], [-0.14], begun=2, ended=3),
            call("late", [1], [2], [-0.12], begun=3.5, ended=9),
            call("c", [1, 2, 3], [4], begun=4, ended=5),
        )
    )
    assert built.trajectories[0].log_probs[1] == -0.14


def test_rule_03_else_those_with_the_smaller_content_digest_whatever_the_order() -> None:
    given = example(call("a", [1], [2], [-0.10]), call("b", [1], [2], [-0.14]))
    kept = {build(reordered(given, random.Random(seed))).trajectories[0].log_probs[1] for seed in range(10)}
    assert len(kept) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"log_probs": [-0.7]},
        {"policy_versions": [("v2", 0, 1)]},
        {"sampling": {"logprobs_mode": "processed_logprobs"}},
    ],
    ids=["a difference above 0.5", "another policy version", "another log-prob mode"],
)
def test_rule_03_identical_calls_that_mean_different_things_are_not_trained(other: dict[str, object]) -> None:
    first = call("a", [1], [2], [-0.1], policy_versions=[("v1", 0, 1)], sampling={"logprobs_mode": "raw_logprobs"})
    fields = {
        "log_probs": [-0.1],
        "policy_versions": [("v1", 0, 1)],
        "sampling": {"logprobs_mode": "raw_logprobs"},
        **other,
    }
    log_probs = fields.pop("log_probs")
    second = call("b", [1], [2], log_probs, **fields)  # type: ignore[arg-type]
    built = build(example(first, second, call("c", [1, 2, 3], [4])))
    assert trained(built) == {"c": [4]}
    assert built.metrics["unknown"] == 1
    close = build(example(call("a", [1], [2], [-0.1]), call("b", [1], [2], [-0.6])))
    assert close.metrics["trained"] == 1


def test_rule_03_of_identical_calls_all_are_asked_whatever_they_are_called() -> None:
    """Content, times, ids and texts of any of them count, not those of the one with the smallest name."""

    def pair(first: str, second: str) -> Example:
        return example(
            call(first, [1], [2], begun=1, ended=2, output_items=text("one"), response_id="r1", delivered="no"),
            call(second, [1], [2], begun=5, ended=6, output_items=text("two"), response_id="r2", delivered="full"),
            missing("l", begun=3, ended=4),
        )

    for rollout in (pair("a", "b"), pair("b", "a")):
        for said in ("one", "two"):
            assert build(rollout, response={"output": text(said)}).scored.spoke == ("content",)
        for declared in ("r1", "r2"):
            rebuilt = rebuild_response(rollout, response_id=declared)
            assert rebuilt.response is not None
            assert rebuilt.response["id"] == "r2"  # what the client received
        assert rebuild_response(rollout).reasons == ("lost_call",)


def test_rule_04_a_call_without_generated_tokens_is_never_a_parent_and_is_counted() -> None:
    built = build(example(call("a", [1], [2]), call("empty", [1, 2, 3], []), call("b", [1, 2, 3, 4], [5])))
    assert [span.model_call_ids[0] for span in of(built, "b").calls] == ["a", "b"]
    assert built.metrics["empty_generation_calls"] == 1
    assert len(built.trajectories) == 1


def test_rule_05_the_span_of_a_conflict_call_is_not_trained_the_rest_is() -> None:
    given = example(call("a", [1], [2]), call("b", [1, 2, 3], [4], outcome="conflict"), call("c", [1, 2, 3, 4, 5], [6]))
    for seed in range(6):
        built = build(reordered(given, random.Random(seed)))
        assert trained(built) == {"a": [2], "c": [6]}
        assert built.metrics["conflict"] == 1
        (trajectory,) = built.trajectories
        assert "conflict" in trajectory.flags


def stored_chain(directory: Path, turns: int, ids: int, drift_every: int = 0) -> Snapshot:
    """A frozen conversation of `turns` calls, half of the `ids` of a turn sampled; some answers come back changed."""
    chance = np.random.default_rng(turns)
    store = FileStore(directory)
    context = chance.integers(10, 1000, ids // 2).astype(np.int32)
    for turn in range(turns):
        sampled = chance.integers(10, 1000, ids // 2).astype(np.int32)
        store.put_now(TokenEntry("chain", f"c{turn:05d}", context, sampled, np.full(ids // 2, -0.5)))
        if drift_every and turn % drift_every == 0:
            sampled[ids // 4] = 1
        context = np.concatenate([context, sampled, chance.integers(10, 1000, ids // 2).astype(np.int32)])
    return store.freeze_now("chain")


def test_rule_06_a_chain_of_5000_calls_is_one_trajectory_without_recursion(tmp_path: Path) -> None:
    with stored_chain(tmp_path, 5000, 4) as snapshot:
        built = build(snapshot)
    (trajectory,) = built.trajectories
    assert len(trajectory) == 5000 * 4
    assert int(trajectory.loss_mask.sum()) == 5000 * 2 == built.metrics["trained"]
    assert len(trajectory.calls) == 5000


@pytest.mark.parametrize("drift_every", [0, 3])
def test_rule_06_work_grows_with_the_number_of_calls_and_not_with_its_square(tmp_path: Path, drift_every: int) -> None:
    def work(turns: int) -> int:
        """How many functions a build calls, in Python and in C."""
        count = 0

        def counted(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        with stored_chain(tmp_path / f"{turns}", turns, 40, drift_every) as snapshot:
            before = sys.getprofile()
            sys.setprofile(counted)
            try:
                build(snapshot)
            finally:
                sys.setprofile(before)
        return count

    work(3)
    assert work(400) < 4.4 * work(100)


def test_rule_06_memory_grows_with_distinct_tokens_and_not_with_the_length_of_prompts(tmp_path: Path) -> None:
    def peak(turns: int, drift_every: int) -> int:
        with stored_chain(tmp_path / f"{turns}-{drift_every}", turns, 100, drift_every) as snapshot:
            tracemalloc.start()
            built = build(snapshot)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert built.metrics["trained"] == turns * 50
        return most

    peak(5, 0)  # what is imported and cached once
    for drift_every in (0, 3):
        assert peak(400, drift_every) < 5 * peak(100, drift_every)


def test_rule_06_under_drift_arrays_are_made_on_access_and_say_what_they_share(tmp_path: Path) -> None:
    with stored_chain(tmp_path, 60, 100, 3) as snapshot:
        built = build(snapshot)
    assert len(built.trajectories) == 20 + 1
    assert built.metrics["total_ids"] == sum(map(len, built.trajectories))
    assert built.metrics["replay_factor"] == pytest.approx(built.metrics["total_ids"] / built.metrics["distinct_ids"])
    assert built.metrics["replay_factor"] > 5
    everything = [trajectory.token_ids for trajectory in built.trajectories]
    for trajectory in built.trajectories:
        if trajectory.prefix_of is not None:
            assert trajectory.prefix_of < trajectory.index
            other = everything[trajectory.prefix_of]
            assert np.array_equal(trajectory.token_ids[: trajectory.shared], other[: trajectory.shared])
            longest = max(
                int(np.argmin(np.append(trajectory.token_ids[: len(o)] == o[: len(trajectory)], False)))
                for o in everything[: trajectory.index]
            )
            assert trajectory.shared == longest
    assert sum(len(t) - t.shared for t in built.trajectories) == built.metrics["distinct_ids"]


# ---- siblings


def test_rule_07_choices_of_one_call_are_all_kept() -> None:
    built = build(example(samples("a", [1], [[2, 3], [4], [4]])))
    assert built.metrics["trained"] == 4
    assert len(built.trained) == 3  # equal choices are two samples


def test_rule_07_calls_that_overlap_and_were_both_delivered_are_all_kept() -> None:
    def parallel(delivered: str) -> Build:
        return build(
            example(
                call("a", [1], [2], begun=0, ended=2, delivered="full"),
                call("b", [1], [3], begun=1, ended=3, delivered=delivered),  # type: ignore[arg-type]
            )
        )

    assert parallel("full").metrics["trained"] == 2
    assert parallel("unknown").metrics["ambiguous"] == 2


def test_rule_07_without_times_delivery_decides_and_without_either_they_are_retries() -> None:
    def siblings(first: str, second: str) -> Build:
        return build(example(call("a", [1], [2], delivered=first), call("b", [1], [3], delivered=second)))  # type: ignore[arg-type]

    assert siblings("full", "full").metrics["trained"] == 2
    assert trained(siblings("no", "full")) == {"b": [3]}
    assert siblings("unknown", "unknown").metrics["ambiguous"] == 2


def test_rule_08_a_sibling_that_a_later_call_extends_is_kept_and_the_others_are_abandoned() -> None:
    built = build(
        example(
            call("first", [1], [2]),
            call("again", [1], [3]),
            call("next", [1, 3, 4], [5]),
            call("retried", [1, 3, 4], [6]),
            call("last", [1, 3, 4, 6, 7], [8]),
        )
    )
    assert trained(built) == {"again": [3], "retried": [6], "last": [8]}
    assert built.metrics["abandoned"] == 2
    assert of(built, "first").flags == ("abandoned",)


def test_rule_08_two_siblings_are_kept_if_two_are_extended() -> None:
    built = build(
        example(
            call("a", [1], [2]),
            call("b", [1], [3]),
            call("c", [1], [4]),
            call("after-a", [1, 2, 5], [6]),
            call("after-b", [1, 3, 5], [7]),
        )
    )
    assert set(trained(built)) == {"a", "b", "after-a", "after-b"}
    assert built.metrics["abandoned"] == 1


def test_rule_09_none_extended_the_longest_run_in_a_later_prompt_is_kept() -> None:
    built = build(
        example(
            call("a", [1], [5, 6, 7]),
            call("b", [1], [5, 8, 7]),
            call("next", [1, 5, 8, 9, 9], [3]),  # drifted at its third id
        )
    )
    assert trained(built) == {"b": [5, 8, 7], "next": [3]}
    assert built.metrics["abandoned"] == 3


def test_rule_09_a_run_that_several_share_tells_nothing() -> None:
    built = build(example(call("a", [1], [5, 6]), call("b", [1], [5, 8]), call("next", [1, 5, 9], [3])))
    assert built.metrics["ambiguous"] == 4
    assert trained(built) == {"next": [3]}


def test_rule_09_an_answer_that_stands_in_a_later_request_is_kept() -> None:
    digest = answer_digest(text("blue"))
    assert digest == message_digest({"role": "assistant", "content": " blue\n"})
    assert digest is not None
    first = call("a", [1], [2], output_items=text("red"))
    second = call("b", [1], [3], output_items=text("blue"))
    following = call("next", [7, 7], [8])
    given = example(first, second, following)
    assert build(given).metrics["ambiguous"] == 2
    calls = [
        CallRecord(
            record.model_call_id, "recorded", request_digests=(digest,) if record.model_call_id == "next" else ()
        )
        for record in given.calls
    ]
    assert trained(build(Example(given.entries, calls))) == {"b": [3], "next": [8]}
    # The same text in the request that asked for the answer is an earlier turn's.
    calls = [CallRecord(record.model_call_id, "recorded", request_digests=(digest,)) for record in given.calls]
    assert build(Example(given.entries, calls)).metrics["ambiguous"] == 2


def test_rule_09_ids_and_text_that_name_different_siblings_tell_nothing() -> None:
    digest = answer_digest(text("red"))
    assert digest is not None
    given = example(
        call("a", [1], [2, 3], output_items=text("red")),
        call("b", [1], [4, 5], output_items=text("blue")),
        call("next", [1, 4, 9], [8]),
    )
    assert trained(build(given)) == {"b": [4, 5], "next": [8]}
    calls = [
        CallRecord(
            record.model_call_id, "recorded", request_digests=(digest,) if record.model_call_id == "next" else ()
        )
        for record in given.calls
    ]
    assert build(Example(given.entries, calls)).metrics["ambiguous"] == 4


def test_rule_09_an_answer_that_was_cut_off_competes_if_the_client_went_on_with_it() -> None:
    built = build(
        example(call("a", [1], [2, 3, 4], outcome="aborted"), call("b", [1], [6, 7]), call("next", [1, 2, 3, 9], [8]))
    )
    assert trained(built) == {"a": [2, 3], "next": [8]}
    assert (built.metrics["abandoned"], built.metrics["aborted"]) == (2, 1)


def test_rule_09_the_texts_of_identical_siblings_all_count() -> None:
    digest = answer_digest(text("blue"))
    assert digest is not None
    for names in (("a", "b"), ("b", "a")):
        given = example(
            call(names[0], [1], [2], output_items=text("?")),
            call(names[1], [1], [2], output_items=text("blue")),
            call("other", [1], [3], output_items=text("red")),
            call("next", [7, 7], [8]),
        )
        calls = [
            msgspec.structs.replace(r, request_digests=(digest,) if r.model_call_id == "next" else ())
            for r in given.calls
        ]
        found = build(Example(given.entries, calls))
        assert (found.metrics["trained"], found.metrics["abandoned"], found.metrics["ambiguous"]) == (2, 2, 0)


def test_rule_08_a_call_that_came_before_does_not_extend() -> None:
    given = example(
        call("earlier", [1, 2, 9], [9], begun=0, ended=1),
        call("a", [1], [2], begun=2, ended=3),
        call("b", [1], [3], begun=4, ended=5),
        call("next", [1, 3, 4], [5], begun=6, ended=7),
    )
    built = build(given)
    assert trained(built) == {"earlier": [9], "b": [3], "next": [5]}


def test_rule_10_a_final_call_sent_twice_leaves_the_trunk_trained_and_its_answers_ambiguous() -> None:
    built = build(
        example(
            call("a", [1], [2]),
            call("b", [1, 2, 3], [4]),
            call("c", [1, 2, 3, 4, 5], [6]),
            call("d", [1, 2, 3, 4, 5], [7]),
        )
    )
    assert trained(built) == {"a": [2], "b": [4]}
    assert built.metrics["ambiguous"] == 2
    assert not built.masked
    assert built.reasons == ("ambiguous",)


# ---- branches, drift, gaps


def test_rule_11_every_span_is_owned_by_exactly_one_trajectory_and_is_context_elsewhere() -> None:
    built = build(
        example(
            call("main-1", [1, 1], [2]),
            call("sub-1", [8, 8], [3]),
            call("sub-2", [8, 8, 3, 4], [5]),
            call("main-2", [1, 1, 2, 6], [7]),
            call("fork", [1, 1, 2, 9], [7, 7]),
            call("compacted", [1, 4, 4], [2]),
            call("drifted", [1, 1, 2, 6, 5, 5], [4]),
        )
    )
    owners: dict[str, list[int]] = {}
    for trajectory in built.trajectories:
        for span in trajectory.calls:
            inside = trajectory.loss_mask[span.start : span.end]
            if span.owned:
                owners.setdefault(span.model_call_ids[0], []).append(trajectory.index)
                assert inside.all()
            else:
                assert not inside.any()
    assert {name: len(where) for name, where in owners.items()} == dict.fromkeys(
        ("main-1", "sub-1", "sub-2", "main-2", "fork", "compacted", "drifted"), 1
    )
    assert built.metrics["trained"] == built.metrics["sampled"] == 8
    assert ends(built) == ["compacted", "drifted", "fork", "main-2", "sub-2"]


def test_rule_12_the_trunk_belongs_to_the_child_with_the_most_trainable_tokens_below_it() -> None:
    built = build(
        example(
            call("trunk", [1], [2]),
            call("short", [1, 2, 3], [4]),
            call("long-1", [1, 2, 5], [6]),
            call("long-2", [1, 2, 5, 6, 7], [8]),
        )
    )
    assert of(built, "trunk").calls[-1].model_call_ids == ("long-2",)


def test_rule_12_the_scored_chain_owns_the_trunk() -> None:
    given = example(
        call("trunk", [1], [2]),
        call("scored", [1, 2, 3], [4]),
        call("long-1", [1, 2, 5], [6]),
        call("long-2", [1, 2, 5, 6, 7], [8]),
    )
    assert of(build(given, call_id="scored"), "trunk").calls[-1].model_call_ids == ("scored",)
    assert build(given, call_id="scored").trajectories[0].calls[-1].model_call_ids == ("scored",)


def test_rule_12_ties_are_broken_by_token_ids_never_by_names_or_clocks() -> None:
    def owner(names: dict[str, str], clock: dict[str, float]) -> list[int]:
        given = example(
            call(names["t"], [1], [2], begun=0, ended=0.5),
            call(names["x"], [1, 2, 3], [9], begun=clock["x"], ended=20),
            call(names["y"], [1, 2, 4], [8], begun=clock["y"], ended=20),
        )
        ids: list[int] = of(build(given), names["t"]).token_ids.tolist()
        return ids

    found = [
        owner({"t": "t", "x": "x", "y": "y"}, {"x": 1, "y": 2}),
        owner({"t": "t", "x": "y", "y": "x"}, {"x": 2, "y": 1}),
        owner({"t": "z", "x": "b", "y": "a"}, {"x": 2, "y": 1}),
    ]
    assert found == [[1, 2, 3, 9]] * 3


def test_rule_13_drift_names_the_nearest_call_the_first_index_and_what_is_lost() -> None:
    built = build(
        example(
            call("a", [1, 2], [3, 4, 5, 6], begun=0, ended=1),
            call("b", [1, 2, 3, 4, 9, 6, 7], [8], begun=2, ended=3),
        )
    )
    (drift,) = built.drifts
    assert (drift.call, drift.nearest) == (("b", 0), ("a", 0))
    assert (drift.index, drift.kept, drift.lost, drift.before_answer) == (4, 2, 2, False)
    assert of(built, "b").flags == ("drifted",)
    assert built.metrics["drifted_calls"] == 1
    assert trained(built) == {"a": [3, 4, 5, 6], "b": [8]}


def test_rule_13_a_prompt_that_parts_before_the_answer_keeps_none_of_it() -> None:
    built = build(
        example(
            call("a", [1, 2, 3, 4], [5, 6], begun=0, ended=1),
            call("b", [1, 2, 9, 9, 9], [8], begun=2, ended=3),  # compacted
        )
    )
    (drift,) = built.drifts
    assert (drift.index, drift.kept, drift.lost, drift.before_answer) == (2, 0, 2, True)
    assert built.metrics["restarted_calls"] == 1


def test_rule_13_the_last_id_of_a_prompt_may_merge_with_the_answer_behind_it() -> None:
    # No times: the longer prompt goes on, and one id at the border is not taken for another history.
    built = build(example(call("a", [1, 2, 3, 4], [5, 6]), call("b", [1, 2, 3, 45, 6, 7, 7], [8])))
    (drift,) = built.drifts
    assert (drift.nearest, drift.index, drift.kept, drift.lost, drift.before_answer) == (("a", 0), 3, 0, 2, False)


PIECES = {
    10: b"<think>", 11: b"hm", 12: b"</think>", 13: b"The", 14: b" answer", 15: b"<end>", 16: b" ans", 17: b"wer",
    18: b"\n", 19: b" other", 20: b"User", 21: b" is", 22: b" 42", 23: b"Sum",
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ([13, 14, 15], [13, 16, 17, 15, 20], "retokenised"),
        ([10, 11, 12, 13, 14, 15], [13, 14, 15, 20, 20, 20, 20], "stripped_reasoning"),
        ([13, 14, 18, 15], [13, 14, 15, 20, 20], "whitespace_or_stop"),
        ([13, 14, 15], [13, 14, 20, 20], "whitespace_or_stop"),
        ([13, 14, 21, 22, 15], [13, 14, 21, 19, 15, 20], "edited"),
        ([13, 14, 15], [20, 21, 22, 20, 20], "other"),
        ([13, 14, 21, 22, 15], [13, 14, 15, 20, 20, 20], "truncated_or_compacted"),
        ([13, 14, 15], [13, 99, 15, 20, 20], "unknown"),
    ],
)
def test_rule_13_the_kind_of_drift_is_told_by_bytes(before: list[int], after: list[int], kind: str) -> None:
    prompt = [1, 2]
    given = example(
        call("a", prompt, before, begun=0, ended=1), call("b", [*prompt, *after, 20, 20], [13], begun=2, ended=3)
    )
    (drift,) = build(given, token_bytes=PIECES).drifts
    assert drift.kind == kind
    assert build(given, token_bytes=PIECES.get).drifts[0].kind == kind
    assert build(given).drifts[0].kind == "unknown"


def test_rule_13_the_recorded_pieces_tell_it_too() -> None:
    def said(ids: list[int]) -> list[bytes]:
        return [PIECES[i] for i in ids]

    given = example(
        call("a", [1, 2], [13, 14, 15], begun=0, ended=1, pieces=said([13, 14, 15])),
        call("c", [5], [16, 17, 20], begun=1.2, ended=1.3, pieces=said([16, 17, 20])),
        call("b", [1, 2, 13, 16, 17, 15, 20, 20], [13], begun=2, ended=3),
    )
    kinds = {drift.call[0]: drift.kind for drift in build(given).drifts}
    assert kinds == {"b": "retokenised"}


def test_rule_13_a_piece_that_an_engine_tells_late_is_not_believed() -> None:
    smile = "é".encode()
    given = example(
        call("a", [1, 2], [13, 14, 15], begun=0, ended=1, pieces=[b"", smile, b"<end>"]),
        call("b", [1, 2, 14, 15, 15, 15, 15, 15, 15], [13], begun=2, ended=3),
    )
    (drift,) = build(given).drifts
    assert drift.kind == "unknown"


def test_rule_13_a_shorter_history_is_truncated_or_compacted() -> None:
    prompt = [20, 21, 22, 19, 21, 22]
    given = example(
        call("a", prompt, [13, 14, 15], begun=0, ended=1), call("b", [20, 21, 23, 20], [13], begun=2, ended=3)
    )
    (drift,) = build(given, token_bytes=PIECES).drifts
    assert (drift.kind, drift.before_answer) == ("truncated_or_compacted", True)


def test_rule_13_an_earlier_prompt_that_shares_more_is_nearer_than_an_answer_that_was_left() -> None:
    given = example(
        call("a", [1], [2, 3], begun=0, ended=1),
        call("b", [1, 2, 9, 9, 9, 9, 9], [4, 4], begun=2, ended=3),  # drifted from a
        call("c", [1, 2, 9, 9, 9, 8, 8], [5], begun=4, ended=5),  # forked from b's prompt
    )
    drifts = {drift.call[0]: drift for drift in build(given).drifts}
    assert (drifts["b"].nearest, drifts["b"].index, drifts["b"].before_answer) == (("a", 0), 2, False)
    assert (drifts["c"].nearest, drifts["c"].index, drifts["c"].before_answer) == (("b", 0), 5, True)
    assert build(given).metrics["drift_lost"] == 1


def test_rule_13_of_several_earlier_calls_the_latest_is_nearest() -> None:
    given = example(
        call("a", [1, 2, 3], [4], begun=0, ended=1),
        call("b", [1, 2, 3, 4, 5], [6], begun=2, ended=3),
        call("compacted", [1, 9], [7], begun=4, ended=5),
    )
    (drift,) = build(given).drifts
    assert (drift.nearest, drift.index, drift.kept, drift.lost) == (("b", 0), 1, 0, 1)


def test_rule_13_a_prompt_that_stops_within_a_cut_off_answer_holds_its_beginning() -> None:
    given = example(call("a", [1], [2, 3, 4, 5], outcome="aborted"), call("b", [1, 2, 3], [6]))
    built = build(given)
    (drift,) = built.drifts
    assert (drift.nearest, drift.index, drift.kept, drift.lost) == (("a", 0), 3, 2, 2)
    assert build(given, token_bytes=lambda i: bytes([i])).drifts[0].kind == "truncated_or_compacted"
    rebuilt = rebuild_response(given)
    assert rebuilt.calls == (("b", 0),)
    assert (rebuilt.metrics["segments"], rebuilt.metrics["delivered"], rebuilt.metrics["trained"]) == (2, 1, 3)
    assert rebuild_response(given, on_drift="mask").reasons == ("drift",)


def test_rule_14_a_prompt_that_holds_assistant_turns_before_the_first_call_is_a_root() -> None:
    built = build(example(call("a", [1, 5, 5, 1, 6, 6, 1], [2]), call("b", [1, 5, 5, 1, 6, 6, 1, 2, 3], [4])))
    (trajectory,) = built.trajectories
    assert trajectory.flags == ()
    assert built.metrics["roots"] == 1
    assert trained(built) == {"a": [2], "b": [4]}


@pytest.mark.parametrize("outcome", ["lost", "open"])
def test_rule_15_a_lost_or_open_call_splits_the_link_that_it_can_lie_in(outcome: str) -> None:
    built = build(
        example(
            call("a", [1], [2], begun=0, ended=1),
            call("b", [1, 2, 3], [4], begun=2, ended=3),
            missing("l", outcome, begun=4, ended=5 if outcome == "lost" else None),  # type: ignore[arg-type]
            call("c", [1, 2, 3, 4, 5], [6], begun=6, ended=7),
            call("d", [1, 2, 3, 4, 5, 6, 7], [8], begun=8, ended=9),
        )
    )
    assert ends(built) == ["b", "d"]
    assert of(built, "c").flags == ("after_gap",)
    assert of(built, "a").flags == ()
    assert of(built, "c") is not of(built, "b")
    assert trained(built) == {"a": [2], "b": [4], "c": [6], "d": [8]}  # nothing is masked


def test_rule_15_where_the_order_is_unknown_a_lost_call_can_lie_anywhere() -> None:
    built = build(example(call("a", [1], [2]), call("b", [1, 2, 3], [4]), missing("l")))
    assert [t.flags for t in built.trajectories] == [("after_gap",)] * 2
    assert trained(built) == {"a": [2], "b": [4]}


def test_rule_15_a_lost_call_after_the_last_one_splits_nothing() -> None:
    built = build(
        example(
            call("a", [1], [2], begun=0, ended=1),
            call("b", [1, 2, 3], [4], begun=2, ended=3),
            missing("l", begun=4, ended=5),
        )
    )
    assert [t.flags for t in built.trajectories] == [()]


def test_rule_15_the_rebuild_is_masked_if_the_lost_call_may_be_inside_or_the_last() -> None:
    chain = [call("a", [1], [2], begun=2, ended=3), call("b", [1, 2, 3], [4], begun=6, ended=7)]
    for begun, masked in ((0, False), (4, True), (8, True)):
        rebuilt = rebuild_response(example(*chain, missing("l", begun=begun, ended=begun + 0.5)))
        assert rebuilt.masked is masked, begun
        assert rebuilt.reasons == (("lost_call",) if masked else ())
    # Whoever names the scored call says that the lost one is not it.
    named = rebuild_response(example(*chain, missing("l", begun=8, ended=9)), call_id="b")
    assert not named.masked


def test_rule_15_text_alone_does_not_prove_that_the_lost_call_is_not_the_final_one() -> None:
    chain = [
        call("a", [1], [2], begun=2, ended=3, output_items=text("a"), response_id="r-a"),
        call("b", [1, 2, 3], [4], begun=6, ended=7, output_items=text("ok"), response_id="r-b"),
    ]
    given = example(*chain, missing("l", begun=8, ended=9))
    assert rebuild_response(given, response={"output": text("ok")}).reasons == ("lost_call",)
    assert not rebuild_response(given, response={"id": "r-b", "output": text("ok")}).masked


def test_rule_15_a_lost_call_between_two_segments_lies_inside_the_scored_chain() -> None:
    chain = [
        call("a", [1], [2], begun=0, ended=1),
        call("b", [1, 2, 3], [4, 5], begun=2, ended=3),
        call("c", [1, 2, 3, 4, 9, 9], [6], begun=6, ended=7),  # b drifted
    ]
    assert not rebuild_response(example(*chain)).masked
    for begun, masked in ((1.5, True), (4, True), (-1, False)):
        given = example(*chain, missing("l", begun=begun, ended=begun + 0.2))
        assert rebuild_response(given).masked is masked, begun


def test_rule_15_a_call_that_generated_nothing_changes_nothing() -> None:
    chain = [call("a", [1], [2], begun=0, ended=1), call("b", [1, 2, 3], [4], begun=6, ended=7)]
    built = build(example(*chain, missing("n", "no_generation", begun=3, ended=4)))
    assert [t.flags for t in built.trajectories] == [()]
    assert not rebuild_response(example(*chain, missing("n", "no_generation", begun=3, ended=4))).masked


def test_rule_16_of_an_aborted_answer_what_a_later_prompt_holds_is_trained() -> None:
    built = build(example(call("a", [1], [2, 3, 4, 5], outcome="aborted"), call("b", [1, 2, 3, 9, 9], [6])))
    assert trained(built) == {"a": [2, 3], "b": [6]}
    assert built.metrics["aborted"] == 2
    assert of(built, "a").loss_mask.tolist() == [False, True, True, False, False]


def test_rule_16_an_aborted_answer_that_is_continued_whole_is_trained_whole() -> None:
    built = build(example(call("a", [1], [2, 3], outcome="aborted"), call("b", [1, 2, 3, 9], [6])))
    assert trained(built) == {"a": [2, 3], "b": [6]}


def test_rule_16_an_aborted_answer_that_is_never_continued_affects_nothing_else() -> None:
    built = build(example(call("a", [1], [2, 3], outcome="aborted"), call("again", [1], [4])))
    assert trained(built) == {"again": [4]}
    assert built.metrics["aborted"] == 2
    assert built.metrics["ambiguous"] == 0


def test_rule_16_ids_that_a_kept_sibling_sampled_too_are_not_counted_for_the_aborted_one() -> None:
    built = build(
        example(
            call("a", [1], [2, 3, 9], outcome="aborted"),
            call("again", [1], [2, 3, 4]),
            call("next", [1, 2, 3, 4, 5], [6]),
        )
    )
    assert trained(built) == {"again": [2, 3, 4], "next": [6]}
    assert built.metrics["aborted"] == 3


def test_rule_16_an_aborted_last_answer_leaves_the_chain_before_it() -> None:
    rebuilt = rebuild_response(example(call("a", [1], [2]), call("b", [1, 2, 3], [4, 5], outcome="aborted")))
    assert rebuilt.calls == (("a", 0),)
    assert rebuild_response(example(call("a", [1], [2], outcome="aborted"))).reasons == ("aborted",)


def test_rule_16_of_several_choices_only_those_that_were_cut_off_are_aborted() -> None:
    entries = [
        call("a", [1], [2, 3], choice=0, finish_reason="stop").entries[0],
        call("a", [1], [4, 5], choice=1, finish_reason="aborted").entries[0],
    ]
    for outcome in ("aborted", "recorded"):
        built = build(Example(entries, [CallRecord("a", outcome)]))
        assert trained(built) == {"a": [2, 3]}
        assert built.metrics["aborted"] == 2


def test_rule_16_a_request_from_before_the_sibling_proves_it_though_an_identical_one_came_after() -> None:
    built = build(
        example(
            call("cut", [1], [2, 3], outcome="aborted", begun=1.0, ended=2.0),
            call("on", [1, 2, 5], [6], begun=3.0, ended=4.0),
            call("sibling", [1], [2, 4], begun=5.0, ended=6.0),
            call("on-again", [1, 2, 5], [6], begun=7.0, ended=8.0),
        )
    )
    assert trained(built) == {"cut": [2], "on": [6]}
    assert {name: built.metrics[name] for name in ("aborted", "ambiguous")} == {"aborted": 1, "ambiguous": 2}


def test_rule_16_a_sibling_that_is_the_beginning_of_the_aborted_answer_explains_the_prompt() -> None:
    built = build(
        example(call("a", [1], [2, 3, 4], outcome="aborted"), call("b", [1], [2, 3]), call("next", [1, 2, 3, 9], [6]))
    )
    assert trained(built) == {"b": [2, 3], "next": [6]}
    assert built.metrics["aborted"] == 3


def test_rule_17_calls_of_different_models_never_link() -> None:
    given = example(call("a", [1], [2], model="policy"), call("b", [1, 2, 3], [4], model="judge"))
    built = build(given, models=("policy", "judge"))
    assert len(built.trajectories) == 2
    assert trained(built) == {"a": [2], "b": [4]}


def test_rule_17_models_selects_and_else_the_model_of_the_scored_call_is_trained() -> None:
    given = example(call("a", [1], [2], model="policy"), call("t", [7], [8], model="title"))
    assert trained(build(given, models="policy")) == {"a": [2]}
    assert trained(build(given, call_id="a")) == {"a": [2]}
    undecided = build(given)
    assert undecided.masked
    assert undecided.reasons == ("several_models", "other_model")
    assert build(given, models="policy").metrics["other_model"] == 1


# ---- the scored answer


def scored(built: Build) -> str | None:
    return built.recorded.calls[built.scored.number].model_call_id if built.scored.number >= 0 else None


def conversation() -> Example:
    return example(
        call("a", [1], [2], response_id="r-a", output_items=text("yes")),
        call("b", [1, 2, 3], [4], response_id="r-b", output_items=text("no")),
        call("c", [1, 2, 3, 4, 5], [6], response_id="r-c", output_items=text("yes")),
    )


def test_rule_18_each_witness_names_the_scored_call() -> None:
    assert scored(build(conversation(), call_id="b")) == "b"
    assert scored(build(conversation(), response_id="r-b")) == "b"
    assert scored(build(conversation(), response={"id": "r-b"})) == "b"
    assert scored(build(conversation(), response={"output": text("yes")})) == "c"
    built = build(conversation(), call_id="c", response_id="r-c", response={"id": "r-c", "output": text("yes\n")})
    assert (scored(built), built.scored.spoke) == ("c", ("call_id", "response_id", "response.id", "content"))


def test_rule_18_witnesses_that_disagree_attribute_nothing() -> None:
    built = build(conversation(), call_id="b", response_id="r-c")
    assert (scored(built), built.scored.reason) == (None, "witnesses_disagree")
    assert "witnesses_disagree" in built.reasons
    assert built.metrics["trained"] == 3  # the trajectories are trained all the same
    assert rebuild_response(conversation(), call_id="b", response_id="r-c").reasons == ("witnesses_disagree",)


def test_rule_18_content_alone_never_cuts_a_chain_at_a_call_that_is_continued() -> None:
    assert scored(build(conversation(), response={"output": text("no")})) is None
    # The same text at two ends tells nothing.
    given = example(call("a", [1], [2], output_items=text("x")), call("b", [5], [6], output_items=text("x")))
    assert scored(build(given, response={"output": text("x")})) is None


def test_rule_18_content_alone_never_cuts_a_chain_at_a_call_whose_continuation_drifted() -> None:
    given = example(
        call("a", [1, 1], [2, 3], begun=0, ended=1, output_items=text("ok")),
        call("b", [1, 1, 2, 9, 9], [4], begun=2, ended=3, output_items=text("final")),
    )
    assert scored(build(given, response={"output": text("ok")})) is None
    assert trained(build(given, response={"output": text("ok")})) == {"a": [2, 3], "b": [4]}
    assert scored(build(given, response={"output": text("final")})) == "b"


def test_rule_18_an_unknown_id_of_the_response_itself_says_nothing() -> None:
    assert scored(build(conversation(), response={"id": "of-the-harness", "output": text("yes")})) == "c"


def test_rule_18_a_response_id_shared_by_choices_abstains_unless_content_or_an_index_picks_one() -> None:
    fields = [{"output_items": text("one")}, {"output_items": text("two")}]
    entries = [
        call("a", [1], [2 + i], choice=i, response_id="r", **fields[i]).entries[0]  # type: ignore[arg-type]
        for i in range(2)
    ]
    given = Example(entries, [CallRecord("a", "recorded")])
    assert build(given, response_id="r").scored.number < 0
    assert build(given, response_id="r", choice_index=1).recorded.calls[1].number == 1
    assert build(given, response_id="r", choice_index=1).scored.number == 1
    assert build(given, response_id="r", response={"output": text("one")}).scored.number == 0


def test_rule_19_what_comes_after_the_scored_call_is_kept_apart_and_not_trained() -> None:
    given = example(
        call("a", [1], [2], begun=0, ended=1),
        call("scored", [1, 2, 3], [4], begun=2, ended=3),
        call("more", [1, 2, 3, 4, 5], [6], begun=4, ended=5),
        call("title", [7, 7], [8], begun=6, ended=7),
    )
    built = build(given, call_id="scored")
    assert trained(built) == {"a": [2], "scored": [4]}
    assert built.metrics["after_final"] == 2
    assert "after_final" in of(built, "more").flags
    assert of(built, "more") is not of(built, "scored")
    assert "after_final" in of(built, "title").flags


def test_rule_19_the_attributed_call_is_always_kept() -> None:
    given = example(call("a", [1], [2]), call("b", [1], [3]))
    assert build(given).metrics["ambiguous"] == 2
    assert trained(build(given, call_id="a")) == {"a": [2]}
    assert trained(build(given, call_id="b")) == {"b": [3]}


def test_rule_19_a_declared_id_that_matches_no_call_masks_the_rebuild_only() -> None:
    assert rebuild_response(conversation(), response_id="elsewhere").reasons == ("no_such_call",)
    built = build(conversation(), response_id="elsewhere")
    assert not built.masked
    assert built.metrics["trained"] == 3


# ---- what comes out


def test_rule_20_a_trajectory_has_aligned_arrays_spans_and_the_facts_of_its_rollout() -> None:
    built = build(
        example(
            call("a", [1, 2], [3, 4], [-0.25, -0.5], policy_versions=[("v1", 0, 1), ("v2", 1, 2)]),
            call("b", [1, 2, 3, 4, 5], [6, 7], [-1.0, -2.0], policy_versions=[("v2", 0, 1)]),
        )
    )
    (trajectory,) = built.trajectories
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert trajectory.loss_mask.dtype == np.bool_
    expected = [math.nan, math.nan, -0.25, -0.5, math.nan, -1.0, -2.0]
    np.testing.assert_array_equal(trajectory.log_probs, expected)
    assert trajectory.policy_versions == (("v1", 2, 3), ("v2", 3, 4), ("v2", 5, 6), (None, 6, 7))
    spans = [(span.model_call_ids, span.start, span.end, span.owned) for span in trajectory.calls]
    assert spans == [(("a",), 2, 4, True), (("b",), 5, 7, True)]
    assert (trajectory.index, trajectory.count, trajectory.trained, trajectory.rollout_trained) == (0, 1, 4, 4)
    assert (trajectory.rollout_id, trajectory.group) == ("rollout", "rollout")
    for array in (trajectory.token_ids, trajectory.loss_mask, trajectory.log_probs):
        assert len(array) == len(trajectory)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert trajectory.as_dict()["token_ids"] is trajectory.token_ids


def test_rule_20_trained_trajectories_come_first_and_only_they_are_counted() -> None:
    built = build(
        example(call("a", [1], [2]), call("b", [1], [3]), call("c", [1, 2, 4], [5]), call("s", [7], [8, 9, 9]))
    )
    assert [(t.index, t.count, t.trained, t.rollout_trained) for t in built.trajectories] == [
        (0, 2, 3, 5),
        (1, 2, 2, 5),
        (2, 2, 0, 5),
    ]
    assert [t.index for t in built.trained] == [0, 1]
    assert [t.index for t in built.trajectories[1:]] == [1, 2]
    assert built.trajectories[-1].flags == ("abandoned",)


@pytest.mark.parametrize(
    ("rollout_id", "meta", "group"),
    [
        ("task7-3", {}, "task7"),
        ("task7-3-a2", {}, "task7"),
        ("7-3-a12", {}, "7"),
        ("plain", {}, "plain"),
        ("task7-3", {"group": "g"}, "g"),
        ("task7-3", {"group": 5}, "5"),
        ("task-7-a", {}, "task-7-a"),
    ],
)
def test_rule_20_the_group_is_the_meta_group_or_the_id_without_its_tail(
    rollout_id: str, meta: dict[str, object], group: str
) -> None:
    assert group_of(rollout_id, meta) == group


def test_rule_20_policy_versions_that_overlap_are_unknown() -> None:
    for versions in ([("a", 0, 2), ("b", 1, 3)], [("a", True, 2)], [("a", 0.0, 2)], ["a"], [("a", 0)]):
        built = build(example(call("x", [1], [2, 3, 4], policy_versions=versions)))
        assert built.trajectories[0].policy_versions == ((None, 1, 4),)


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, -math.inf, -9999.0, 0.5, 1e-3])
def test_rule_21_positions_with_unknown_log_probs_are_not_trained_and_counted(odd: float | None) -> None:
    built = build(example(call("a", [1], [2, 3, 4], [-0.5, odd, -0.25]), call("b", [1, 2, 3, 4, 5], [6])))
    (trajectory,) = built.trajectories
    assert trajectory.loss_mask.tolist() == [False, True, False, True, False, True]
    assert np.isnan(trajectory.log_probs[2])
    assert (built.metrics["unknown"], built.metrics["trained"]) == (1, 3)
    assert "unknown" in trajectory.flags


def test_rule_21_rounding_above_zero_is_no_reason_to_drop_a_position() -> None:
    assert build(example(call("a", [1], [2, 3], [1e-7, 0.0]))).metrics["trained"] == 2


@pytest.mark.parametrize(
    ("sampling", "known_wrong"),
    [
        ({"logprobs_mode": "raw_logprobs", "temperature": 0.7}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0}, False),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "presence_penalty": 0.5}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "repetition_penalty": 1.0}, False),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "guided_json": {"type": "object"}}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "response_format": {"type": "text"}}, False),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "top_p": 0.9}, True),
        ({"logprobs_mode": "raw_logprobs", "temperature": 1.0, "top_k": -1}, False),
        ({"logprobs_mode": "processed_logprobs", "temperature": 0.7, "top_p": 0.9}, False),
        ({"logprobs_mode": "raw_logits", "temperature": 1.0}, True),
        ({"logprobs_mode": "processed_logits"}, True),
        ({"temperature": 0.7}, False),
        ({"logprobs_mode": "unknown", "temperature": 0.7}, False),
    ],
)
def test_rule_21_spans_known_not_to_be_the_sampling_distribution_are_flagged_and_left_out_on_request(
    sampling: dict[str, object], known_wrong: bool
) -> None:
    given = example(call("a", [1], [2, 3], sampling=sampling))
    built = build(given)
    assert ("not_behaviour" in built.trajectories[0].flags) is known_wrong
    assert built.metrics["not_behaviour"] == (2 if known_wrong else 0)
    assert built.metrics["trained"] == 2
    without = build(given, exclude_not_behaviour=True)
    assert (without.metrics["trained"], without.metrics["unknown"]) == ((0, 2) if known_wrong else (2, 0))


def test_rule_21_mixed_log_prob_modes_are_reported() -> None:
    modes = [{"logprobs_mode": mode, "temperature": 1.0} for mode in ("raw_logprobs", "processed_logprobs")]
    built = build(example(call("a", [1], [2], sampling=modes[0]), call("b", [1, 2, 3], [4], sampling=modes[1])))
    assert built.metrics["mixed_log_prob_modes"]
    assert built.metrics["log_prob_modes"] == {"processed_logprobs": 1, "raw_logprobs": 1}


@given(questions())
def test_rule_22_the_account_is_exact_on_everything(
    question: tuple[Example, list[str] | None, tuple[str, int] | None],
) -> None:
    rollout, models, named = question
    for strict in (False, True):
        built = build(
            rollout,
            models=models,
            call_id=named[0] if named else "",
            choice_index=named[1] if named else None,
            strict=strict,
        )
        assert built.metrics["sampled"] == sum(len(entry.generation_token_ids) for entry in rollout.entries)
        assert built.metrics["sampled"] == sum(built.metrics[category] for category in CATEGORIES)
        in_masks = sum(int(trajectory.loss_mask.sum()) for trajectory in built.trajectories)
        assert in_masks == built.metrics["trained"] == sum(t.trained for t in built.trajectories)
        assert all(np.isfinite(t.log_probs[t.loss_mask]).all() for t in built.trajectories)
        assert all(np.isnan(t.log_probs[~t.loss_mask]).all() for t in built.trajectories)
        assert built.masked is (in_masks == 0)


def test_rule_22_strict_masks_whole_rollouts_and_says_why() -> None:
    ambiguous = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 3], [5]))
    built = build(ambiguous, strict=True)
    assert built.masked
    assert built.reasons[0] == "strict:ambiguous"
    assert (built.metrics["masked"], built.metrics["trained"], built.metrics["ambiguous"]) == (1, 0, 2)
    assert not any(t.loss_mask.any() for t in built.trajectories)
    clean = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]))
    assert build(clean, strict=True).metrics["trained"] == 2
    assert build(example(call("a", [1], [2]), missing("l")), strict=True).reasons[0] == "strict:incomplete"


def test_rule_23_the_rebuild_is_one_payload_with_tokens_in_order() -> None:
    tool_call = {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"}
    given = example(
        call("a", [1, 2], [3], [-0.5], output_items=[*text("let me see"), tool_call], token_item_index=1, model="m"),
        call("b", [1, 2, 3, 4], [5, 6], [-1.0, -2.0], output_items=text("done"), model="m", response_id="r-b"),
    )
    rebuilt = rebuild_response(given)
    assert not rebuilt.masked
    assert rebuilt.response is not None
    output = rebuilt.response["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert "generation_token_ids" not in output[0]
    assert output[1]["prompt_token_ids"] == [1, 2]
    assert output[1]["generation_token_ids"] == [3]
    assert output[1]["generation_log_probs"] == [-0.5]
    assert output[2]["prompt_token_ids"] == [1, 2, 3, 4]
    assert output[2]["generation_token_ids"] == [5, 6]
    assert rebuilt.response["usage"] == {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
    assert (rebuilt.response["id"], rebuilt.response["model"]) == ("r-b", "m")
    assert (rebuilt.metrics["delivered"], rebuilt.metrics["delivered_fraction"], rebuilt.metrics["segments"]) == (
        3,
        1.0,
        1,
    )
    assert rebuilt.calls == (("a", 0), ("b", 0))
    assert "generation_token_ids" not in given.entries[0].output_items[1]


def test_rule_23_prompts_of_a_rebuild_share_their_integers(tmp_path: Path) -> None:
    with stored_chain(tmp_path, 100, 200) as snapshot:
        built = build(snapshot)
    tracemalloc.start()
    rebuilt = rebuild_from(built)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rebuilt.response is not None
    repeated = sum(len(item["prompt_token_ids"]) for item in rebuilt.response["output"])
    assert repeated == sum(100 + 200 * turn for turn in range(100))
    assert held < 12 * repeated  # a pointer each; an integer of its own would be 28 bytes more


def test_rule_23_of_a_chain_that_drifted_the_last_segment_is_delivered_or_nothing() -> None:
    given = example(
        call("a", [1], [2, 3], output_items=text("a")),
        call("b", [1, 2, 9, 4], [5], output_items=text("b")),  # a drifted
        call("c", [1, 2, 9, 4, 5, 6], [7], output_items=text("c")),
    )
    rebuilt = rebuild_response(given)
    assert rebuilt.calls == (("b", 0), ("c", 0))
    assert (rebuilt.segments, rebuilt.metrics["segments"]) == (2, 2)
    assert (rebuilt.delivered_fraction, rebuilt.metrics["delivered_fraction"]) == (0.5, 0.5)
    assert rebuild_response(given, on_drift="mask").reasons == ("drift",)
    with pytest.raises(ValueError, match="last_segment"):
        rebuild_response(given, on_drift="first")  # type: ignore[arg-type]


def test_rule_23_each_prompt_of_a_rebuild_extends_all_tokens_before_it() -> None:
    given = example(
        call("a", [1], [2]),
        call("b", [1, 2, 3], [4, 4]),
        call("c", [1, 2, 3, 4, 9], [5]),  # b drifted, a is extended
    )
    rebuilt = rebuild_response(given)
    assert rebuilt.response is not None
    seen: list[int] = []
    for item in rebuilt.response["output"]:
        assert item["prompt_token_ids"][: len(seen)] == seen
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    assert rebuilt.calls == (("a", 0), ("c", 0))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (example(), "nothing_recorded"),
        (example(call("a", [1], [2]), call("b", [5], [6])), "several_conversations"),
        (example(call("a", [1], [2]), call("b", [1], [3])), "ambiguous"),
        (example(call("a", [1], [2], outcome="conflict")), "conflict"),
        (example(call("a", [1], [2, 3], [-0.5, None])), "unknown"),
        (example(call("a", [1], [2], model="x"), call("b", [1], [2], model="y")), "several_models"),
    ],
)
def test_rule_23_a_masked_rebuild_gives_reasons_and_never_raises(given: Example, reason: str) -> None:
    rebuilt = rebuild_response(given)
    assert rebuilt.masked
    assert rebuilt.response is None
    assert rebuilt.reasons == (reason,)
    assert rebuilt.metrics["delivered_fraction"] == 0.0


@given(questions())
def test_rule_23_a_rebuild_never_raises_and_is_contiguous_on_everything(
    question: tuple[Example, list[str] | None, tuple[str, int] | None],
) -> None:
    rollout, models, named = question
    rebuilt = rebuild_response(rollout, models=models, call_id=named[0] if named else "")
    assert rebuilt.masked is (rebuilt.response is None) is bool(rebuilt.reasons)
    if rebuilt.response is None:
        return
    entries = {(entry.model_call_id, entry.choice_index): entry for entry in rollout.entries}
    seen: list[int] = []
    carriers = [item for item in rebuilt.response["output"] if "generation_token_ids" in item]
    assert len(carriers) == len(rebuilt.calls)
    for item, key in zip(carriers, rebuilt.calls, strict=True):
        assert item["prompt_token_ids"] == entries[key].prompt_token_ids.tolist()
        assert item["generation_token_ids"] == entries[key].generation_token_ids.tolist()
        assert item["prompt_token_ids"][: len(seen)] == seen
        assert all(math.isfinite(value) for value in item["generation_log_probs"])
        seen = item["prompt_token_ids"] + item["generation_token_ids"]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["logprobs_mode", "temperature", "top_p", "top_k", "presence_penalty", "grammar", "stop"])


@given(
    st.dictionaries(KEYS, JUNK, max_size=4),
    st.lists(JUNK | st.tuples(JUNK, st.integers(), st.integers()), max_size=3),
    st.lists(JUNK, max_size=3),
    JUNK,
    JUNK,
)
def test_nothing_that_was_recorded_makes_a_build_raise(
    sampling: dict[str, object], versions: list[object], items: list[object], hint: object, scored_response: object
) -> None:
    fields: dict[str, Any] = {
        "sampling": sampling,
        "policy_versions": versions,
        "output_items": items,
        "extra": {"parent_call_id": hint},
    }
    given = example(
        call("a", [1], [2, 3], **fields), call("b", [1], [2, 3]), call("c", [1, 2, 3, 4], [5], **fields), missing("l")
    )
    response = scored_response if isinstance(scored_response, dict) else {"output": scored_response, "id": "x"}
    built = build(given, response=response)
    assert built.metrics["sampled"] == sum(built.metrics[category] for category in CATEGORIES) == 5
    assert [trajectory.policy_versions for trajectory in built.trajectories]
    rebuilt = rebuild_response(given, response=response)
    assert rebuilt.masked is (rebuilt.response is None)


def test_many_lost_calls_of_a_long_chain_are_placed_one_by_one() -> None:
    entries = [call(f"c{i:03d}", [1] * (2 * i + 1), [1], begun=2 * i, ended=2 * i + 0.5) for i in range(300)]
    lost = [missing(f"l{i:03d}", begun=2 * i + 1, ended=2 * i + 1.5) for i in range(0, 300, 3)]
    built = build(example(*entries, *lost))
    assert {built.recorded.calls[number].model_call_id for number in built.gaps} == {
        f"c{i + 1:03d}" for i in range(0, 299, 3)
    }


@pytest.mark.parametrize("given", [{}, [], None, "rollout", FileStore])
def test_something_that_is_no_snapshot_is_refused_by_name(given: object) -> None:
    with pytest.raises(InvalidOptionError, match="build takes a snapshot"):
        build(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"response": "text"}, {"response": []}, {"models": 5}])
def test_a_witness_or_model_of_another_kind_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=r"response is a|models is 5"):
        build(example(call("a", [1], [2])), **asked)


def test_hazard_02_a_source_that_hands_over_two_payloads_for_one_call_shows_a_conflict() -> None:
    one = call("a", [1], [2, 3], [-0.5, -0.5]).entries[0]
    ids = call("a", [1], [2, 4], [-0.5, -0.5]).entries[0]
    log_probs = call("a", [1], [2, 3], [-0.5, -0.25]).entries[0]
    after = call("b", [1, 2, 3, 9], [5]).entries[0]
    records = [CallRecord("a", "recorded"), CallRecord("b", "recorded")]
    for other in (ids, log_probs):
        for entries in ([one, other, after], [other, one, after]):
            built = build(Example(entries, records))
            assert trained(built) == {"b": [5]}
            assert (built.metrics["conflict"], built.metrics["conflict_calls"]) == (2, 1)
    assert trained(build(Example([one, one, after], records))) == {"a": [2, 3], "b": [5]}


def test_a_snapshot_without_meta_has_a_group_all_the_same() -> None:
    given = example(call("a", [1], [2]))
    given.meta = None  # type: ignore[attr-defined]
    assert build(given).group == "rollout"


def test_the_words_that_builds_speak_are_all_explained() -> None:
    given = example(
        call("a", [1], [2], sampling={"logprobs_mode": "raw_logits"}),
        call("b", [1], [3]),
        call("x", [4], [5, 6], outcome="aborted"),
        call("y", [4], [5], [None]),
        missing("l"),
    )
    built = build(given, strict=True, response_id="none")
    assert {flag for t in built.trajectories for flag in t.flags} <= FLAGS.keys()
    assert set(built.reasons) <= REASONS.keys()
    rebuilt = rebuild_response(given)
    assert set(rebuilt.reasons) <= REASONS.keys()
    assert rebuilt.metrics.keys() == METRICS.keys()


def test_a_build_stays_valid_when_its_snapshot_is_closed_and_its_rollout_retired(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put_now(TokenEntry("r-1", "a", [1, 2], [3], [-0.5]))
    with store.freeze_now("r-1") as snapshot:
        built = build(snapshot)
        store.retire_now("r-1", snapshot_id=built.snapshot_id, version=built.version)
    store.reset_now("r-1")
    assert built.trajectories[0].token_ids.tolist() == [1, 2, 3]
    assert built.trajectories[0].log_probs[2] == -0.5


def test_a_build_keeps_no_file_of_its_snapshot_open(tmp_path: Path) -> None:
    """A trainer may hold thousands of builds; a mapped segment costs a descriptor."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    with stored_chain(tmp_path, 100, 2000) as snapshot:
        assert snapshot.entries[0].generation_token_ids[0] >= 1
        assert mapped() > 0
        built = build(snapshot)
        rebuilt = rebuild_from(built)
    del snapshot
    assert mapped() == 0
    assert len(built.trajectories[0].token_ids) == 100 * 2000
    assert rebuilt.response is not None
