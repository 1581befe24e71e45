"""Straight conversations are built in one pass; the rules, one after another, give the same of them.

`straight` takes what it is sure of and leaves the rest to `Findings`. Both are asked about conversations out of a real
store that are straight or nearly so, and must agree on everything that a build shows.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store_worker import UnsyncedFiles
from tokcap import FileStore, TokenEntry
from tokcap.errors import ConflictError
from tokcap.store import Snapshot
from tokcap.trajectory import Build, build, rebuild_from
from tokcap.trajectory.findings import Asked, Findings
from tokcap.trajectory.recorded import read_snapshot
from tokcap.trajectory.scored import Witnesses
from tokcap.trajectory.straight import Straight


class Turn(msgspec.Struct):
    """One call of a conversation as it is put into a store."""

    name: str
    prompt: list[int]
    answer: list[int]
    log_probs: list[float | None]
    fields: dict[str, Any] = {}
    choices: int = 1
    settled: str = ""
    delivered: str = ""
    put: bool = True
    conflict: bool = False


Change = Callable[[list[Turn], int, random.Random], None]


def _log_prob(value: float | None) -> Change:
    def change(turns: list[Turn], at: int, chance: random.Random) -> None:
        if turns[at].answer:
            turns[at].log_probs[chance.randrange(len(turns[at].answer))] = value

    return change


def _field(**fields: Any) -> Change:
    def change(turns: list[Turn], at: int, chance: random.Random) -> None:
        turns[at].fields.update(fields)

    return change


def _everywhere(**fields: Any) -> Change:
    def change(turns: list[Turn], at: int, chance: random.Random) -> None:
        for turn in turns:
            turn.fields.update(fields)

    return change


def _from(at: int, turns: list[Turn], position: int, value: int) -> None:
    """From turn `at` on, prompts have another id at that position."""
    for turn in turns[at:]:
        if position < len(turn.prompt):
            turn.prompt[position] = value


def _drift(turns: list[Turn], at: int, chance: random.Random) -> None:
    _from(at + 1, turns, len(turns[at].prompt) + chance.randrange(max(1, len(turns[at].answer))), 999)


def _edited_history(turns: list[Turn], at: int, chance: random.Random) -> None:
    _from(max(at, 1), turns, chance.randrange(len(turns[at].prompt)), 999)


def _retry(turns: list[Turn], at: int, chance: random.Random) -> None:
    before = turns[at]
    answer = [998, *before.answer]
    turns.insert(
        at + chance.randrange(2), Turn(f"again-{len(turns)}", list(before.prompt), answer, [-0.25] * len(answer))
    )


def _repeated(turns: list[Turn], at: int, chance: random.Random) -> None:
    before = turns[at]
    turns.insert(
        at + 1, Turn(f"repeated-{len(turns)}", list(before.prompt), list(before.answer), list(before.log_probs))
    )


def _cut(turns: list[Turn], at: int, chance: random.Random) -> None:
    """A call that begins in the middle of an answer."""
    before, cut = turns[at], chance.randrange(len(turns[at].answer) + 1)
    prompt, answer = before.prompt + before.answer[:cut], before.answer[cut:]
    turns.insert(at + 1, Turn(f"cut-{len(turns)}", prompt, answer, before.log_probs[cut:]))


def _emptied(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].answer, turns[at].log_probs = [], []


def _choices(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].choices = 2


def _settled(outcome: str, *, put: bool) -> Change:
    def change(turns: list[Turn], at: int, chance: random.Random) -> None:
        turns[at].settled, turns[at].put = outcome, put

    return change


def _beside(outcome: str) -> Change:
    """A call more, of which there is no entry."""

    def change(turns: list[Turn], at: int, chance: random.Random) -> None:
        turns.insert(at + chance.randrange(2), Turn(f"beside-{len(turns)}", [], [], [], settled=outcome, put=False))

    return change


def _last_aborted(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[-1].settled, turns[-1].fields["finish_reason"] = "aborted", "aborted"


def _hint_of_the_one_before(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].fields["extra"] = {"parent_call_id": turns[at - 1].name if at else "nobody"}


def _wrong_hint(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].fields["extra"] = {"parent_call_id": chance.choice(turns).name}


def _conflict(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].conflict = True


def _delivered(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].delivered = chance.choice(["full", "partly", "no"])


def _swapped(turns: list[Turn], at: int, chance: random.Random) -> None:
    """What is put first needn't be what was asked first."""
    if at:
        turns[at - 1], turns[at] = turns[at], turns[at - 1]


def _no_names_for_it(turns: list[Turn], at: int, chance: random.Random) -> None:
    turns[at].fields["model"] = "m\ud800"


def _without_a_prompt(turns: list[Turn]) -> None:
    """The first call is asked with nothing, and answers with what was its prompt."""
    first = turns[0]
    first.answer = first.prompt + first.answer
    first.log_probs = [*(-0.5 for _ in first.prompt), *first.log_probs]
    first.prompt = []
    first.fields.pop("routed_experts", None)


RAW = {"logprobs_mode": "raw_logprobs", "temperature": 1}

PLAIN: dict[str, Change] = {
    "nothing": lambda turns, at, chance: None,
    "a log-prob of 0": _log_prob(0.0),
    "a log-prob of -0": _log_prob(-0.0),
    "positive by rounding": _log_prob(1e-6),
    "no float32": _log_prob(-0.1),
    "raw, as sampled": _everywhere(sampling=RAW),
    "raw, greedy": _field(sampling={**RAW, "temperature": 0.0}),
    "another mode": _field(sampling={"logprobs_mode": "processed_logprobs", "seed": 2**70}),
    "policy version": _field(policy_versions=[("v2", 0, 1)]),
    "policy versions that overlap": _field(policy_versions=[("v1", 0, 3), ["v2", 1, 2]]),
    "the same version everywhere": _everywhere(policy_versions=[["v1", 0, 10**6]]),
    "content": _field(output_items=[{"type": "message", "content": "\ud800"}], finish_reason="length", created_at=7.0),
    "extra": _field(extra={"turn": 3, "deep": {"parent": None}}),
    "pieces": _field(pieces=[b"a"]),
    "delivered": _delivered,
    "refused": _beside("no_generation"),
    "a response id": _field(response_id="r\ud800"),
    "experts": lambda turns, at, chance: turns[at].fields.update(
        routed_experts=np.zeros((len(turns[at].answer), 2), np.int16)
    ),
    "a first prompt without an id": lambda turns, at, chance: _without_a_prompt(turns),
}
"""What leaves a conversation a straight one."""

ODD: dict[str, Change] = {
    "unknown log-prob": _log_prob(None),
    "sentinel": _log_prob(-9999.0),
    "infinite": _log_prob(-math.inf),
    "positive": _log_prob(0.5),
    "retry": _retry,
    "repeated": _repeated,
    "cut elsewhere": _cut,
    "empty": _emptied,
    "another model": _field(model="x"),
    "a model without a name": _no_names_for_it,
    "cut off at the end": _last_aborted,
    "cut off": _settled("aborted", put=True),
    "cut off, says the engine": _field(finish_reason="aborted"),
    "open": lambda turns, at, chance: setattr(turns[at], "put", False),
    "lost": _settled("lost", put=False),
    "lost beside": _beside("lost"),
    "aborted beside": _beside("aborted"),
    "open beside": _beside(""),
    "drift": _drift,
    "edited history": _edited_history,
    "hint": _hint_of_the_one_before,
    "wrong hint": _wrong_hint,
    "two choices": _choices,
    "one of two choices": lambda turns, at, chance: turns[at].fields.update(choice_index=1),
    "conflict": _conflict,
    "in another order": _swapped,
}
"""What may need a closer look."""


@st.composite
def conversations(draw: st.DrawFn, changes: dict[str, Change], most: int = 2) -> list[Turn]:
    """Calls each of which extends the one before it, then changed in up to `most` places."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from([40, 300, 90_000]))
    context = [chance.randrange(largest) for _ in range(draw(st.integers(16, 24)))]
    turns: list[Turn] = []
    names = [f"c{chance.randrange(10**6)}-{i}" for i in range(draw(st.integers(1, 6)))]
    for name in names:
        sampled = chance.randrange(1, 6)
        answer = [chance.randrange(largest) for _ in range(sampled)]
        log_probs: list[float | None] = [-chance.randrange(1, 9) / draw(st.sampled_from([2, 3])) for _ in answer]
        turns.append(Turn(name, list(context), answer, log_probs, {"model": "m", "finish_reason": "stop"}))
        context += answer + [chance.randrange(largest) for _ in range(chance.randrange(4))]
    for change in draw(st.lists(st.sampled_from(sorted(changes)), max_size=most)):
        changes[change](turns, chance.randrange(len(turns)), chance)
    return turns


@contextlib.contextmanager
def stored(turns: list[Turn]) -> Iterator[Snapshot]:
    """The conversation as a store gives it back."""
    with tempfile.TemporaryDirectory() as directory:
        store = FileStore(Path(directory), files=UnsyncedFiles(), sweep_every_s=0)
        for turn in turns:
            store.begin_call_now("r", turn.name, turn.choices)
            entries = [
                TokenEntry("r", turn.name, turn.prompt, turn.answer, turn.log_probs, **_told(turn, choice))
                for choice in range(turn.choices)
            ]
            if turn.put:
                store.put_many_now(entries)
            if turn.conflict and turn.put:
                with contextlib.suppress(ConflictError):
                    store.put_now(
                        TokenEntry("r", turn.name, turn.prompt, [*turn.answer, 5], [*turn.log_probs, -1.0], model="m")
                    )
            if turn.settled:
                store.settle_call_now("r", turn.name, turn.settled)  # type: ignore[arg-type]
            if turn.delivered:
                store.note_delivery_now("r", turn.name, turn.delivered)  # type: ignore[arg-type]
        with store.freeze_now("r") as snapshot:
            yield snapshot
        store.close_now()


def _told(turn: Turn, choice: int) -> dict[str, Any]:
    return {**turn.fields, "choice_index": choice} if turn.choices > 1 else turn.fields


def by_the_rules(snapshot: Snapshot, group: str | None = None, **asked: Any) -> Build:
    """The build without a short cut."""
    witnesses = Witnesses(
        asked.get("call_id", ""), asked.get("choice_index"), asked.get("response_id", ""), asked.get("response")
    )
    question = Asked(
        asked.get("models"),
        witnesses,
        asked.get("strict", False),
        asked.get("exclude_not_behaviour", False),
        asked.get("token_bytes"),
    )
    return Build(snapshot, Findings(read_snapshot(snapshot), question, snapshot.incomplete), group)


def shown(built: Build) -> dict[str, Any]:
    """Everything that a build shows, in values that compare."""
    return {
        "facts": (built.rollout_id, built.snapshot_id, built.version, built.group, built.meta, built.incomplete),
        "masked": (built.masked, built.reasons),
        "metrics": list(built.metrics.items()),
        "types": [type(value) for value in built.metrics.values()],
        "scored": built.scored,
        "models": built.models,
        "drifts": [_drift_shown(drift) for drift in built.drifts],
        "repr": repr(built),
        "trained": len(built.trained),
        "trajectories": [_trajectory_shown(trajectory) for trajectory in built.trajectories],
    }


def _drift_shown(drift: Any) -> Any:
    names = ("call", "nearest", "index", "kept", "lost", "before_answer", "nearest_number", "kind")
    return [getattr(drift, name) for name in names]


def _trajectory_shown(trajectory: Any) -> dict[str, Any]:
    found: dict[str, Any] = {**trajectory.as_dict(), "shared": trajectory.shared, "prefix_of": trajectory.prefix_of}
    for name in ("token_ids", "loss_mask", "log_probs"):
        found[name] = _array_shown(found[name])
    return {**found, "length": len(trajectory), "calls": trajectory.calls, "repr": repr(trajectory)}


def _array_shown(array: Any) -> Any:
    flags = array.flags
    return array.dtype.str, array.shape, array.tobytes(), flags.writeable, flags.aligned, flags.c_contiguous


def inside(built: Build) -> dict[str, Any]:
    """What tools see that look inside."""
    recorded = built.recorded
    return {
        "calls": [_struct_shown(call) for call in recorded.calls],
        "records": recorded.records,
        "partly": recorded.partly_aborted,
        "prompts": [recorded.prompt_token_ids(call).tolist() for call in recorded.calls],
        "contents": [repr((call.contents, call.pieces)) for call in recorded.calls],
        "links": _struct_shown(built.links),
        "fates": {number: _struct_shown(fate) for number, fate in built.fates.items()},
        "judged": {number: _judged_shown(found) for number, found in built.judged.items()},
        "gaps": (built.gaps, sorted(built.drift_of)),
        "paths": [_struct_shown(path) for path in built.paths],
    }


def _struct_shown(struct: Any) -> dict[str, Any]:
    """Without vertices, which are numbered as they are made."""
    found = {name: getattr(struct, name) for name in struct.__struct_fields__ if not name.endswith("_vertex")}
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def _judged_shown(found: Any) -> Any:
    mask = None if found.mask is None else found.mask.tolist()
    return found.call.key, found.source.key, found.verdict, mask, found.trained, found.behaviour, found.counts


QUESTIONS = st.fixed_dictionaries(
    {},
    optional={
        "models": st.sampled_from([None, "m", "x", ["m", "x"], ["x"], []]),
        "strict": st.booleans(),
        "exclude_not_behaviour": st.booleans(),
        "group": st.sampled_from([None, "", "task"]),
        "choice_index": st.sampled_from([0, 1]),
        "response_id": st.sampled_from(["", "other"]),
        "response": st.sampled_from([None, {}]),
        "token_bytes": st.sampled_from([None, {1: b"a"}]),
    },
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations({**PLAIN, **ODD}), QUESTIONS)
def test_a_build_shows_what_the_rules_give_one_after_another(turns: list[Turn], asked: dict[str, Any]) -> None:
    with stored(turns) as snapshot:
        found, expected = build(snapshot, **asked), by_the_rules(snapshot, **asked)
        assert shown(found) == shown(expected)
        assert inside(found) == inside(expected)
        assert repr(rebuild_from(found)) == repr(rebuild_from(expected))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations(PLAIN, 4))
def test_a_straight_conversation_is_built_in_one_pass_and_stays_valid_when_the_snapshot_is_closed(
    turns: list[Turn],
) -> None:
    with stored(turns) as snapshot:
        expected = by_the_rules(snapshot)
        found = build(snapshot)
    assert isinstance(found._found, Straight)
    assert shown(found) == shown(expected)
    assert inside(found) == inside(expected)
    assert shown(found) == shown(expected)  # looking inside changed nothing
    sent = pickle.loads(pickle.dumps(build_again(turns)))
    assert [t.token_ids.tolist() for t in sent.trajectories] == [t.token_ids.tolist() for t in found.trajectories]
    assert sent.links.parent == expected.links.parent


def build_again(turns: list[Turn]) -> Build:
    with stored(turns) as snapshot:
        return build(snapshot)


def plain(turns: int = 4) -> list[Turn]:
    made: list[Turn] = []
    context = list(range(20))
    for i in range(turns):
        answer = [100 + i, 7, 8]
        made.append(Turn(f"c{i}", list(context), answer, [-0.5, -0.25, -1.0], {"model": "m", "finish_reason": "stop"}))
        context += [*answer, 50 + i]
    return made


@pytest.mark.parametrize("odd", sorted(ODD))
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_odd_about_one_call_is_judged_by_the_rules(odd: str, at: int) -> None:
    turns = plain()
    ODD[odd](turns, at, random.Random(1))
    with stored(turns) as snapshot:
        found, expected = build(snapshot), by_the_rules(snapshot)
    assert shown(found) == shown(expected)
    straight = isinstance(found._found, Straight)
    # A swap of the first call with itself is none, the end of a conversation has nobody who could drift from it, and
    # a choice that is the only one is an answer like others.
    assert straight == ((odd, at) in {("in another order", 0), ("drift", 3)} or odd == "one of two choices"), (
        "the short cut was taken, or not taken"
    )


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_what_is_plain_needs_no_rules(name: str) -> None:
    turns = plain()
    PLAIN[name](turns, 2, random.Random(1))
    with stored(turns) as snapshot:
        assert isinstance(build(snapshot)._found, Straight)


@pytest.mark.parametrize(
    "asked",
    [{"call_id": "c3"}, {"response_id": "r"}, {"response": {}}, {"models": "x"}, {"models": []}],
    ids=str,
)
def test_questions_that_need_a_closer_look_get_one(asked: dict[str, Any]) -> None:
    with stored(plain()) as snapshot:
        found = build(snapshot, **asked)
        assert not isinstance(found._found, Straight)
        assert shown(found) == shown(by_the_rules(snapshot, **asked))


@pytest.mark.parametrize("excluded", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_log_probs_that_are_not_those_of_sampling_are_left_out_if_asked_for(excluded: bool, at: int) -> None:
    turns = plain()
    PLAIN["raw, greedy"](turns, at, random.Random(1))
    with stored(turns) as snapshot:
        found = build(snapshot, exclude_not_behaviour=excluded)
        expected = by_the_rules(snapshot, exclude_not_behaviour=excluded)
    assert isinstance(found._found, Straight) != excluded
    assert shown(found) == shown(expected)
    assert found.metrics["trained"] == 12 - 3 * excluded


def test_of_a_rollout_without_calls_nothing_is_said_in_one_pass() -> None:
    with stored([]) as snapshot:
        found = build(snapshot)
    assert not isinstance(found._found, Straight)
    assert found.reasons == ("nothing_recorded",)
