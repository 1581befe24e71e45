"""Hazards that end in wrong training data, or throw healthy rollouts away; each by its number.

Those of the capture point stand in `test_capture`, those of parsing in `test_shapes`, those of delivery in
`test_delivery`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rollout_examples import Example, call, example, missing, reordered
from tests.test_trajectory_rules import of, scored, text, trained
from tokcap import CallRecord, FileStore, TokenEntry
from tokcap.errors import ConflictError, StaleAttemptError
from tokcap.trajectory import build, rebuild_response


def test_hazard_01_a_lost_call_in_the_middle_is_never_bridged_in_silence(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for call_id, prompt, answer in (("a", [1], [2]), ("lost", [1, 2, 3], [4]), ("b", [1, 2, 3, 4, 5], [6])):
        store.begin_call_now("r-1", call_id)
        if call_id == "lost":
            store.settle_call_now("r-1", call_id, "lost", "the record could not be written")
        else:
            store.put_now(TokenEntry("r-1", call_id, prompt, answer, [-0.5]))
    with store.freeze_now("r-1") as snapshot:
        built = build(snapshot)
        rebuilt = rebuild_response(snapshot)
    assert of(built, "b") is not of(built, "a")
    assert of(built, "b").flags == ("after_gap",)
    assert trained(built) == {"a": [2], "b": [6]}
    assert rebuilt.reasons == ("lost_call",)


@pytest.mark.parametrize("other", [([2, 3], [-0.5, -0.5]), ([2, 9], [-0.5, -0.1])], ids=["log-probs", "ids"])
def test_hazard_02_of_two_payloads_for_one_call_none_is_trained_whichever_came_first(
    tmp_path: Path, other: tuple[list[int], list[float]]
) -> None:
    payloads = [([2, 3], [-0.5, -0.25]), other]
    for name, order in (("one", payloads), ("other", payloads[::-1])):
        store = FileStore(tmp_path / name)
        store.put_now(TokenEntry("r-1", "a", [1], *order[0]))
        with pytest.raises(ConflictError):
            store.put_now(TokenEntry("r-1", "a", [1], *order[1]))
        store.put_now(TokenEntry("r-1", "b", [1, 2, 3, 4], [5], [-0.5]))
        with store.freeze_now("r-1") as snapshot:
            built = build(snapshot)
            assert trained(built) == {"b": [5]}
            assert (built.metrics["conflict"], built.metrics["conflict_calls"]) == (2, 1)
            if other[0] == [2, 3]:  # whichever content is shown, it is in the chain
                assert rebuild_response(snapshot).reasons == ("conflict",)


def test_hazard_03_parents_are_looked_up_in_the_whole_set_whatever_the_order() -> None:
    given = example(call("z", [1], [2]), call("m", [1, 2, 3], [4]), call("a", [1, 2, 3, 4, 5], [6]))
    for seed in range(6):
        built = build(reordered(given, random.Random(seed)))
        assert len(built.trajectories) == 1
        assert [span.model_call_ids[0] for span in built.trajectories[0].calls] == ["z", "m", "a"]


def test_hazard_04_the_text_of_an_earlier_answer_does_not_cut_the_chain_there() -> None:
    given = example(
        call("a", [1], [2], output_items=text("Done.")),
        call("b", [1, 2, 3], [4], output_items=text("Done.")),
    )
    assert scored(build(given, response={"output": text("Done.")})) == "b"
    rebuilt = rebuild_response(given, response={"output": text("Done.")})
    assert rebuilt.calls == (("a", 0), ("b", 0))


def test_hazard_05_a_rollout_id_that_is_used_again_never_shows_the_tokens_of_the_last_attempt(tmp_path: Path) -> None:
    store = FileStore(tmp_path, require_intent=True)
    store.begin_call_now("r-1", "a")
    store.put_now(TokenEntry("r-1", "a", [1, 2], [3], [-0.5]))
    store.begin_call_now("r-1", "straggler")
    with store.freeze_now("r-1") as first:
        before = build(first)
        store.reset_now("r-1")
        other = FileStore(tmp_path, require_intent=True)
        other.begin_call_now("r-1", "a")
        other.put_now(TokenEntry("r-1", "a", [7, 8], [9], [-0.25]))
        with pytest.raises(StaleAttemptError):
            store.put_now(TokenEntry("r-1", "straggler", [1, 2, 3], [4], [-0.5]))
        with other.freeze_now("r-1") as second:
            after = build(second)
    assert trained(before) == {"a": [3]}
    assert trained(after) == {"a": [9]}
    assert before.trajectories[0].token_ids.tolist() == [1, 2, 3]
    assert after.trajectories[0].token_ids.tolist() == [7, 8, 9]
    assert before.snapshot_id != after.snapshot_id


def test_hazard_07_after_a_compaction_every_context_is_trained_and_the_rebuild_says_how_much_it_holds() -> None:
    given = example(
        call("a", [1, 2], [3, 3], begun=0, ended=1),
        call("b", [1, 2, 3, 3, 4], [5, 5], begun=2, ended=3),
        call("compacted", [1, 9], [6], begun=4, ended=5),
        call("last", [1, 9, 6, 7], [8], begun=6, ended=7, response_id="r-last"),
    )
    built = build(given)
    assert trained(built) == {"a": [3, 3], "b": [5, 5], "compacted": [6], "last": [8]}
    assert (built.metrics["roots"], built.metrics["trained_trajectories"], built.metrics["restarted_calls"]) == (
        2,
        2,
        1,
    )
    assert all(trajectory.rollout_trained == 6 for trajectory in built.trajectories)
    assert all(trajectory.count == 2 for trajectory in built.trajectories)
    rebuilt = rebuild_response(given, response_id="r-last")
    assert rebuilt.calls == (("compacted", 0), ("last", 0))
    assert rebuilt.metrics["delivered_fraction"] == pytest.approx(2 / 6)


def test_hazard_21_an_error_that_was_followed_by_a_successful_retry_changes_nothing() -> None:
    chain = [call("a", [1], [2], begun=0, ended=1), call("b", [1, 2, 3], [4], begun=6, ended=7)]
    errors = [missing(f"e{i}", "no_generation", begun=2 + i / 10, ended=3 + i / 10) for i in range(4)]
    given = example(*chain, *errors)
    assert not given.incomplete
    built = build(given, strict=True)
    assert built.reasons == ()
    assert [trajectory.flags for trajectory in built.trajectories] == [()]
    assert not rebuild_response(given).masked


def test_hazard_23_few_shot_prompts_with_assistant_turns_are_no_gap() -> None:
    few_shot = [1, 50, 2, 51, 1, 52, 2, 53, 1, 54, 2]
    given = example(call("a", few_shot, [55]), call("b", [*few_shot, 55, 1, 56, 2], [57]))
    built = build(given, strict=True)
    assert not built.masked
    assert trained(built) == {"a": [55], "b": [57]}


def test_hazard_24_text_that_differs_is_no_drift_while_the_ids_extend() -> None:
    given = example(
        call("a", [1], [2], output_items=text('{"x": 1.0}\n')),
        call("b", [1, 2, 3], [4], output_items=text("done\n")),
    )
    rewritten = {"id": "mine", "output": text('{"x": 1}')}
    built = build(given, response=rewritten)
    assert built.drifts == ()
    assert trained(built) == {"a": [2], "b": [4]}
    assert not rebuild_response(given, response={"id": "mine", "output": text("done")}).masked


def test_hazard_25_the_same_visible_answer_with_other_hidden_tokens_is_told_apart_by_ids() -> None:
    given = example(
        call("a", [1], [70, 71, 2], output_items=text("yes")),
        call("b", [1], [80, 2], output_items=text("yes")),
        call("next", [1, 80, 2, 3], [4]),
    )
    assert trained(build(given)) == {"b": [80, 2], "next": [4]}
    assert build(given).metrics["abandoned"] == 3


def test_hazard_27_a_conflicting_call_leaves_every_other_call_of_its_rollout_trained() -> None:
    given = example(
        call("a", [1], [2]),
        call("bad", [1, 2, 3], [4], outcome="conflict"),
        call("after", [1, 2, 3, 4, 5], [6]),
        call("other", [8], [9]),
    )
    assert given.incomplete
    built = build(given)
    assert trained(built) == {"a": [2], "after": [6], "other": [9]}
    assert not built.masked


@pytest.mark.parametrize("title_model", ["policy", "small"])
def test_hazard_28_an_auxiliary_call_masks_nothing_and_is_not_taken_for_the_main_chain(title_model: str) -> None:
    given = example(
        call("a", [1], [2], begun=0, ended=1, model="policy", response_id="r-a"),
        call("b", [1, 2, 3], [4], begun=2, ended=3, model="policy", response_id="r-b", output_items=text("done")),
        call("title", [9, 9], [8, 8, 8, 8], begun=4, ended=5, model=title_model, output_items=text("A title")),
    )
    for witness in ({"response_id": "r-b"}, {"response": {"output": text("done")}}, {"call_id": "b"}):
        rebuilt = rebuild_response(given, **witness)
        assert rebuilt.calls == (("a", 0), ("b", 0))
    built = build(given, models="policy")
    assert trained(built) == {"a": [2], "b": [4], **({"title": [8] * 4} if title_model == "policy" else {})}
    # Without a witness nothing is guessed.
    assert rebuild_response(given, models="policy").masked is (title_model == "policy")


def test_hazard_29_retries_with_identical_tokens_are_not_ambiguous() -> None:
    given = example(
        call("a", [1], [2, 3], [-0.50, -0.25], begun=0, ended=1, delivered="no"),
        call("again", [1], [2, 3], [-0.52, -0.25], begun=2, ended=3, delivered="full"),
    )
    built = build(given)
    assert built.metrics["ambiguous"] == 0
    assert built.metrics["trained"] == 2
    assert built.trajectories[0].log_probs[1:].tolist() == [-0.52, -0.25]
    assert not rebuild_response(given).masked


def test_hazard_30_a_freeze_just_before_the_last_put_shows_the_call_as_open_and_splits_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.begin_call_now("r-1", "a")
    store.put_now(TokenEntry("r-1", "a", [1], [2], [-0.5]))
    store.begin_call_now("r-1", "b")
    with store.freeze_now("r-1") as snapshot:
        built = build(snapshot)
        rebuilt = rebuild_response(snapshot)
    assert trained(built) == {"a": [2]}
    assert [trajectory.flags for trajectory in built.trajectories] == [()]
    assert built.metrics["open_calls"] == 1
    assert rebuilt.reasons == ("lost_call",)  # it may have been the final one


def test_a_source_without_a_ledger_gives_trajectories_too() -> None:
    given = example(call("a", [1], [2]), call("b", [1, 2, 3], [4]))
    assert trained(build(Example(given.entries, ()))) == {"a": [2], "b": [4]}
    assert build(Example(given.entries, (CallRecord("a", "conflict"),))).metrics["conflict"] == 1
