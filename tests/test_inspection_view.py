"""What is said of the calls of a rollout: it is what the notes of the recordings say, and what the ids prove."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from tests import recordings
from tests.looked_at_stores import recorded_store
from tests.rollout_examples import Made, call, example, missing, rollouts, samples, snapshot_of
from tokcap import FileStore, TokenEntry
from tokcap.digests import request_digests
from tokcap.inspection import RELATIONS, CallView, RolloutView, open_to_look, view_of
from tokcap.inspection.branches import Skipped, conversations, lines, shortened
from tokcap.inspection.telling import facts_of, fate_of, tie_of, why_untrained


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RolloutView]]:
    store = open_to_look(recorded_store(tmp_path_factory.mktemp("recorded") / "store"))
    views = {}
    for name in recordings.names():
        with store.read_now(name) as snapshot:
            views[name] = view_of(snapshot)
    yield views


def noted(view: RolloutView) -> list[tuple[CallView, str]]:
    """Each call with what its recording says that the client did with it."""
    notes = {call.model_call_id: call.note for call in recordings.load(view.rollout_id).calls}
    return [(call, notes[call.model_call_id]) for call in view.calls]


def of(view: RolloutView, name: str) -> CallView:
    (found,) = [each for each in view.calls if each.name == name]
    return found


def looked(*made: Made) -> RolloutView:
    return view_of(example(*made))


def asked(made: Made, *messages: str) -> Made:
    """The same call, with the digests of such a request."""
    return with_digests(made, {"messages": [{"role": "user", "content": message} for message in messages]})


def with_digests(made: Made, request: dict[str, Any]) -> Made:
    record = msgspec.structs.replace(made.record, request_digests=request_digests(request))
    return msgspec.structs.replace(made, record=record)


# ---- the recorded traffic


@pytest.mark.parametrize("name", recordings.names())
def test_the_ids_of_all_calls_add_up_to_the_account_of_the_build(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    counts = Counter[str]()
    for each in view.calls:
        counts.update(each.counts)
        assert sum(each.counts.values()) == each.sampled
        assert each.trained == int(view.loss_mask(each.key).sum())
    assert sum(counts.values()) == view.build.metrics["sampled"]
    assert all(view.build.metrics[category] == count for category, count in counts.items())


@pytest.mark.parametrize("name", recordings.names())
def test_ids_are_those_that_the_recording_holds(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    for entry in recordings.load(name).entries:
        key = entry.model_call_id, entry.choice_index
        assert view.prompt_token_ids(key).tolist() == entry.prompt_token_ids.tolist()
        assert view.generation_token_ids(key).tolist() == entry.generation_token_ids.tolist()
        assert view.log_probs(key).tobytes() == entry.generation_log_probs.tobytes()


@pytest.mark.parametrize("name", ["sub-agent-0", "sub-agent-1"])
def test_a_sub_agent_is_another_conversation(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    calls = {note: [call for call, said in noted(view) if said == note] for note in ("main", "sub-agent")}
    assert calls["sub-agent"][0].relation == "separate"
    for note in calls:
        for before, after in zip(calls[note], calls[note][1:], strict=False):
            assert after.relation in ("continues", "drifted")
            assert after.parent == before.key
    assert [conversation.calls for conversation in conversations(view)] == [4, 2]


@pytest.mark.parametrize("name", ["compaction-0", "compaction-1"])
def test_a_compacted_history_restarts_from_the_last_call_before_it(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    before = [call for call, note in noted(view) if note == "before"]
    after = [call for call, note in noted(view) if note == "after compaction"]
    assert (after[0].relation, after[0].parent) == ("restarted", before[-1].key)
    assert all(call.relation in ("continues", "drifted") for call in (*before[1:], *after[1:]))
    assert len(conversations(view)) == 1


@pytest.mark.parametrize("name", ["retry-mid-0", "retry-mid-1"])
def test_of_a_retry_it_is_said_which_answer_was_kept(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    retried = 0
    for each, note in noted(view):
        if note.startswith("abandoned"):
            retried += 1
            assert each.verdict == "abandoned"
            assert each.attempts == 2
            kept = [other for other, said in noted(view) if said == "kept" and other.prompt == each.prompt]
            assert [other.key for other in kept] == [each.instead]
            assert fate_of(view, each) == f"not trained: abandoned, the client went on with #{kept[0].number}"
        elif note == "kept":
            assert (each.verdict, each.trained) == ("trained", each.sampled)
    assert retried == 2


@pytest.mark.parametrize("name", ["retry-last-0", "retry-last-1"])
def test_a_last_call_that_was_sent_twice_is_ambiguous(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    doubtful = [each for each, note in noted(view) if note.endswith("unknown")]
    assert [(each.verdict, each.attempts, each.instead) for each in doubtful] == [("ambiguous", 2, None)] * 2


def test_parallel_calls_fork_from_a_common_history(recorded: dict[str, RolloutView]) -> None:
    view = recorded["parallel-0"]
    assert [each.relation for each in view.calls] == ["root", "forked", "forked", "forked"]
    assert len(conversations(view)) == 4


@pytest.mark.parametrize(
    "name", [name for name in recordings.names() if name.startswith(("linear", "long", "stream", "token"))]
)
def test_one_conversation_is_one_chain(recorded: dict[str, RolloutView], name: str) -> None:
    view = recorded[name]
    assert view.calls[0].relation == "root"
    for before, after in zip(view.calls, view.calls[1:], strict=False):
        assert after.relation in ("continues", "drifted")
        assert after.parent == before.key
    (conversation,) = conversations(view)
    assert [branch.call.number for branch in conversation.branches] == list(range(1, len(view.calls) + 1))


def test_the_odd_calls_are_what_their_notes_say(recorded: dict[str, RolloutView]) -> None:
    view = recorded["edges-0"]
    calls = {note: call for call, note in noted(view)}
    assert [call.outcome for note, call in calls.items() if "no ids" in note] == ["lost", "lost"]
    assert calls["no token ids asked for"].outcome == "lost"
    assert calls["context overflow: error"].outcome == calls["unknown model: error"].outcome == "no_generation"
    assert [each.samples for each in view.calls if each.model_call_id == "call-0001"] == [2, 2]
    assert calls["no logprobs asked for"].unknown_log_probs == 6
    assert calls["bad message: error"].relation == "separate"  # one message, and another one
    once, again = calls["text prompt"], calls["completions stream"]
    assert (again.relation, again.parent) == ("repeats", once.key)
    counted, other = (once, again) if once.trained else (again, once)
    assert (counted.trained, other.trained) == (6, 0)
    assert fate_of(view, other) == f"not trained again: the same answer counts as #{counted.number}"
    assert calls["stream"].relation == "root"  # the prompt of the first calls once more


# ---- how calls hang together


def test_a_call_that_continues_one_call_and_leaves_another_hangs_on_the_first() -> None:
    view = looked(
        call("a", [1, 2], [3], begun=0, ended=1),
        call("b", [1, 2, 3, 4, 5], [6], begun=2, ended=3),
        call("c", [1, 2, 3, 4, 9], [7], begun=4, ended=5),
    )
    c = of(view, "c")
    assert (c.relation, c.parent) == ("continues", ("a", 0))
    assert c.drift is not None and c.drift.nearest == ("b", 0)
    assert tie_of(view, c) == "continues #1; parts from the prompt of #2 at 4"


def test_without_digests_only_a_very_short_common_beginning_is_another_conversation() -> None:
    def relation(shared: int, length: int) -> str:
        prompt = list(range(length))
        other = [*prompt[:shared], *range(1000, 1000 + length - shared)]
        return of(
            looked(call("a", prompt, [7], begun=0, ended=1), call("b", other, [8], begun=2, ended=3)), "b"
        ).relation

    assert relation(0, 100) == "root"
    assert relation(16, 100) == "separate"
    assert relation(17, 100) == "restarted"
    assert relation(16, 60) == "restarted"


def test_digests_tell_another_conversation_from_a_compacted_one() -> None:
    prompt = list(range(100))
    first = asked(call("a", prompt, [7], begun=0, ended=1), "task")
    second = asked(call("b", [*prompt, 7, 8], [9], begun=2, ended=3), "task", "answer", "more")

    def relation(*messages: str, later: bool = False) -> str:
        third = asked(call("c", [*prompt[:50], 500, 501], [9], begun=4, ended=5), *messages)
        fourth = (call("d", [*prompt, 7, 8, 9, 10], [11], begun=6, ended=7),) if later else ()
        return of(looked(first, second, third, *fourth), "c").relation

    assert relation("another task") == "separate"
    assert relation("another task", "x", "y") == "separate"
    assert relation("task", "summary") == "restarted"
    assert relation("task", "summary", later=True) == "separate"  # the old one goes on: it was not replaced
    assert relation("task", "answer", "something else") == "forked"
    assert relation("task", "answer", "something else", later=True) == "forked"
    assert relation("task", "answer", "more") == "restarted"  # the same messages, rendered anew


def test_a_history_is_not_compacted_while_its_answer_is_still_being_sampled() -> None:
    def relation(ended: float) -> str:
        prompt = list(range(100))
        made = [
            asked(call("a", prompt, [7], begun=0, ended=1), "task"),
            asked(call("b", [*prompt, 7, 8], [9], begun=2, ended=ended), "task", "answer", "more"),
            asked(call("c", [*prompt[:50], 500], [9], begun=4, ended=5), "task", "summary"),
        ]
        return of(looked(*made), "c").relation

    assert (relation(3), relation(4.5)) == ("restarted", "forked")


def test_prompts_given_as_ids_have_no_messages_to_compare() -> None:
    def given(name: str, prompt: list[int], begun: float) -> Made:
        made = call(name, prompt, [7], begun=begun, ended=begun + 1)
        return with_digests(made, {"prompt": prompt})

    long = list(range(100))
    assert of(looked(given("a", long, 0), given("b", [*long[:60], 500], 2)), "b").relation == "restarted"
    assert of(looked(given("a", long, 0), given("b", [*long[:6], *range(500, 560)], 2)), "b").relation == "separate"


def test_identical_answers_count_once_and_the_others_say_as_which() -> None:
    view = looked(
        call("a", [1], [2, 3], begun=0, ended=1, delivered="no"),
        call("b", [1], [2, 3], begun=2, ended=3, delivered="full"),
        call("c", [1], [2, 3], begun=4, ended=5, outcome="conflict"),
    )
    assert [(each.relation, each.trained, each.verdict, each.instead) for each in view.calls] == [
        ("root", 0, "abandoned", ("b", 0)),
        ("repeats", 2, "trained", None),
        ("repeats", 0, "conflict", ("b", 0)),
    ]
    assert fate_of(view, view.calls[0]) == "not trained again: the same answer counts as #2"
    assert fate_of(view, view.calls[2]) == "not trained: conflict"


def test_samples_retries_gaps_and_models_are_said() -> None:
    view = looked(
        samples("s", [1], [[2], [3]], begun=0, ended=1),
        missing("gone", begun=2, ended=3),
        call("next", [1, 2, 4], [5], begun=4, ended=5),
        call("judge", [1, 2, 4], [6], begun=6, ended=7, model="other"),
    )
    assert [facts_of(each)[0] for each in view.calls if each.model_call_id == "s"] == ["one of 2 samples"] * 2
    assert "after a gap" in facts_of(of(view, "next"))
    assert of(view, "judge").relation == "root"
    assert of(view, "judge").verdict == "other_model"
    assert why_untrained(of(view, "judge")) == "sampled by a model that is not selected"


def test_partly_trained_answers_say_what_the_rest_is() -> None:
    view = looked(
        call("a", [1], [2, 3, 4], [-0.1, None, -0.2], begun=0, ended=1),
        call("b", [9], [5, 6, 7], begun=2, ended=3, outcome="aborted"),
        call("c", [9, 5, 8], [4], begun=4, ended=5),
    )
    assert fate_of(view, of(view, "a")) == "trained 2 of 3: 1 with unknown log-probs"
    assert fate_of(view, of(view, "b")) == "trained 1 of 3: 2 cut off; cut off"
    assert of(view, "b").counts == {"trained": 1, "aborted": 2}


# ---- order and names


def test_calls_stand_in_the_order_in_which_they_began() -> None:
    view = looked(
        call("z", [1], [2], begun=0, ended=9),
        call("y", [1, 2], [3], begun=None, ended=4, boot="boot"),
        call("x", [5], [3], begun=2, ended=3),
        call("w", [6], [3], begun=0, ended=1, boot="another", created_at=5.0),
        call("v", [7], [3]),
        missing("lost", ended=1),
    )
    assert [each.name for each in view.calls if each.name != "w"] == ["z", "x", "y", "lost", "v"]
    assert [each.number for each in view.calls] == [1, 2, 3, 4, 5, 6]


def test_an_earlier_boot_comes_first() -> None:
    view = looked(
        call("later", [1], [2], begun=0, ended=1, boot="second", created_at=2000.0),
        call("earlier", [3], [2], begun=500, ended=501, boot="first", created_at=1000.0),
    )
    assert [(each.name, each.began_s, each.took_s) for each in view.calls] == [
        ("earlier", 0.0, 1.0),
        ("later", None, 1.0),
    ]


def test_a_call_is_found_by_its_id_its_choice_its_response_its_beginning_and_its_number() -> None:
    view = looked(
        samples("alpha", [1], [[2], [3]], begun=0, ended=1),
        call("12", [1, 2], [3], begun=2, ended=3, response_id="resp-1"),
        call("alphabet", [1, 2, 3], [4], begun=4, ended=5, response_id="resp-22"),
    )
    found = {
        name: [each.name for each in view.named(name)] for name in ("alpha", "alpha#1", "alphab", "resp-2", "resp")
    }
    assert found["alpha"] == ["alpha", "alpha#1"]
    assert (found["alpha#1"], found["alphab"], found["resp-2"]) == (["alpha#1"], ["alphabet"], ["alphabet"])
    assert found["resp"] == ["12", "alphabet"]
    assert [each.name for each in view.named("12")] == ["12"]
    assert [each.name for each in view.named("4")] == [each.name for each in view.named("#4")] == ["alphabet"]
    assert view.named("1")[0].name == "alpha"
    assert view.named("") == view.named("nothing") == view.named("9") == view.named("#") == []


# ---- as a tree


def test_calls_without_ids_stand_behind_the_last_call_that_began_before_them() -> None:
    view = looked(
        missing("first", "no_generation", begun=0, ended=0.5),
        call("a", [1], [2], begun=1, ended=2),
        missing("between", "open", begun=3),
        call("b", [1, 2], [3], begun=4, ended=5),
        missing("", "lost"),
    )
    tree, rest = conversations(view)
    assert [branch.call.name for branch, _ in lines(tree.branches)] == ["first", "a", "between", "b"]
    assert [len(marks) for _, marks in lines(tree.branches)] == [1, 1, 2, 1]
    assert rest.first is None and [branch.call.name for branch in rest.branches] == [""]


def test_what_leaves_a_conversation_is_one_level_deeper_and_long_runs_can_be_left_out() -> None:
    made = []
    prompt = [1]
    for i in range(40):
        made.append(call(f"c{i:02}", prompt, [2, i], begun=i, ended=i + 0.5))
        if i == 20:
            made.append(call("retry", prompt, [3], begun=i + 0.6, ended=i + 0.7))
        prompt = [*prompt, 2, i]
    view = looked(*made)
    (tree,) = conversations(view)
    assert [branch.call.name for branch in tree.branches] == [f"c{i:02}" for i in range(40)]
    assert [branch.call.name for branch in tree.branches[19].leaving] == ["retry"]
    short = [
        branch.calls if isinstance(branch, Skipped) else branch.call.name
        for branch, _ in lines(shortened(tree.branches))
    ]
    assert short == ["c00", "c01", "c02", 14, "c17", "c18", "c19", "retry", "c20", "c21", "c22", 15, "c38", "c39"]


def test_a_call_behind_a_gap_is_never_left_out(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        prompt = [1]
        for number in range(40):
            if number == 20:
                store.begin_call_now("r", "gone")
                store.settle_call_now("r", "gone", "lost", "no ids")
                prompt = [*prompt, 7, 8]
            store.begin_call_now("r", f"c{number:02}")
            store.put_now(TokenEntry("r", f"c{number:02}", prompt, [2], [-0.5]))
            prompt = [*prompt, 2, 3]
        with store.read_now("r") as snapshot:
            view = view_of(snapshot)
    assert [each.name for each in view.calls if each.after_gap] == ["c20"]
    (tree,) = conversations(view)
    shown = [branch.call.name for branch, _ in lines(shortened(tree.branches)) if not isinstance(branch, Skipped)]
    assert shown == ["c00", "c01", "c02", "c17", "c18", "c19", "gone", "c20", "c21", "c22", "c38", "c39"]


@settings(max_examples=60, deadline=None)
@given(rollouts(max_calls=12))
def test_every_call_stands_in_the_tree_once_and_the_account_holds(given: Any) -> None:
    view = view_of(given)
    shown = [branch.call for conversation in conversations(view) for branch, _ in lines(conversation.branches)]
    assert (
        sorted(each.number for each in shown) == [each.number for each in view.calls] == list(range(1, len(shown) + 1))
    )
    counts = Counter[str]()
    for each in view.calls:
        counts.update(each.counts)
        assert each.relation in RELATIONS
        assert tie_of(view, each) and fate_of(view, each)
        if each.relation == "continues":
            assert each.parent is not None
            above = view.recorded(each.parent)
            assert above is not None
            whole = [*view.prompt_token_ids(each.parent), *view.generation_token_ids(each.parent)]
            assert view.prompt_token_ids(each.key)[: len(whole)].tolist() == whole
    assert all(view.build.metrics[category] == count for category, count in counts.items())
    assert sum(counts.values()) == view.build.metrics["sampled"]


def test_a_chain_of_thousands_stays_at_one_level_and_forks_go_no_deeper_than_the_logarithm() -> None:
    made, ends = [], [[1]]
    for i in range(500):  # a binary tree of prompts
        parent = ends[(i + 1) // 2 if i else 0]
        made.append(call(f"c{i:04}", [*parent, 5], [6, i % 2, i], begun=i, ended=i + 0.5))
        ends.append([*parent, 5, 6, i % 2, i])
    view = looked(*made)
    depth = max(len(marks) for conversation in conversations(view) for _, marks in lines(conversation.branches))
    assert depth <= math.log2(500) + 1
    prompt, made = [1], []
    for i in range(1000):
        made.append(call(f"c{i:04}", prompt, [2], begun=i, ended=i + 0.5))
        prompt = [*prompt, 2, i]
    (chain,) = conversations(looked(*made))
    assert len(chain.branches) == 1000
    assert sum(1 for _ in lines(shortened(chain.branches))) == 6


def test_a_view_outlives_its_snapshot(tmp_path: Path) -> None:
    snapshot = snapshot_of(example(call("a", [1], [2]), missing("gone", "open")), tmp_path / "store")
    view = view_of(snapshot)
    snapshot.close()
    assert view.generation_token_ids(("a", 0)).tolist() == [2]
    assert view.log_probs(("gone", 0)).tolist() == [] and view.recorded(("gone", 0)) is None
    assert [(each.name, each.outcome) for each in view.calls] == [("a", "recorded"), ("gone", "open")]
    assert view.incomplete and not view.finished
