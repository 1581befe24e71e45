"""Recorded traffic of a real model, from its bodies to trajectories: every sampled id is accounted for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import recordings
from tests.recordings import RecordedCall, RecordedRollout
from tokcap import FileStore, Snapshot, TokenEntry
from tokcap.capture import capture_tokens, captured_call
from tokcap.capture.shapes import StreamJoiner
from tokcap.trajectory import Build, build, rebuild_from
from tokcap.trajectory.verdicts import CATEGORIES

NAMES = [name for name in recordings.names() if name != "edges-0"]


def stored(directory: Path, recorded: RecordedRollout) -> Snapshot:
    """The calls of a recording, put in the order in which the client sent them, without intents."""
    store = FileStore(directory)
    for call in recorded.calls:
        if call.entries:
            store.put_many_now(call.entries)
    return store.freeze_now(recorded.rollout_id)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[RecordedRollout, Build]]]:
    directory = tmp_path_factory.mktemp("traffic")
    found = {}
    for name in NAMES:
        recorded = recordings.load(name)
        with stored(directory, recorded) as snapshot:
            found[name] = recorded, build(snapshot)
    yield found


Built = dict[str, tuple[RecordedRollout, Build]]


def common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def sequence(entry: TokenEntry) -> np.ndarray:
    return np.concatenate([entry.prompt_token_ids, entry.generation_token_ids])


def test_6815_ids_were_sampled_of_which_6562_are_trained_122_abandoned_and_131_ambiguous(built: Built) -> None:
    totals: Counter[str] = Counter()
    for recorded, found in built.values():
        assert found.metrics["sampled"] == sum(len(entry.generation_token_ids) for entry in recorded.entries)
        assert found.metrics["sampled"] == sum(found.metrics[category] for category in CATEGORIES)
        totals.update({name: found.metrics[name] for name in ("sampled", *CATEGORIES)})
    expected = {"sampled": 6815, "trained": 6562, "abandoned": 122, "ambiguous": 131}
    assert {name: count for name, count in totals.items() if count} == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_id_is_trained_once_with_its_recorded_context_and_log_prob(name: str, built: Built) -> None:
    recorded, found = built[name]
    entries = {entry.model_call_id: entry for entry in recorded.entries}
    seen: Counter[str] = Counter()
    in_masks = 0
    for trajectory in found.trajectories:
        in_spans = np.zeros(len(trajectory), np.bool_)
        for span in trajectory.calls:
            (call_id,) = span.model_call_ids
            entry = entries[call_id]
            assert (span.start, span.end) == (len(entry.prompt_token_ids), len(sequence(entry)))
            assert np.array_equal(trajectory.token_ids[: span.end], sequence(entry))
            mask = trajectory.loss_mask[span.start : span.end]
            assert mask.all() or not mask.any()
            if mask.any():
                seen[call_id] += 1
                in_spans[span.start : span.end] = True
                log_probs = trajectory.log_probs[span.start : span.end]
                assert log_probs.tobytes() == entry.generation_log_probs.tobytes()
        assert np.array_equal(in_spans, trajectory.loss_mask)
        in_masks += int(in_spans.sum())
    assert set(seen.values()) == {1}
    notes = {call.model_call_id: call.note for call in recorded.calls}
    dropped = {call_id for call_id, note in notes.items() if note.startswith("abandoned")}
    assert seen.keys() == entries.keys() - dropped
    assert in_masks == found.metrics["trained"]


def test_what_the_client_dropped_is_abandoned_and_an_unknown_last_answer_ambiguous(built: Built) -> None:
    for recorded, found in built.values():
        verdicts = {judged.call.model_call_id: judged.verdict for judged in found.judged.values()}
        for call in recorded.calls:
            expected = "trained"
            if call.note.startswith("abandoned or kept"):
                expected = "ambiguous"
            elif call.note.startswith("abandoned"):
                expected = "abandoned"
            assert verdicts[call.model_call_id] == expected, (recorded.rollout_id, call.seq)


def turns(recorded: RecordedRollout) -> Iterator[tuple[RecordedCall, RecordedCall]]:
    """Chat calls with the call whose answer the client had sent before, by what it noted, not by ids.

    Left out: first turns of a conversation, a history that was replaced, parallel calls, and answers that the client
    dropped or of which nobody says whether it did.
    """
    last: dict[bool, RecordedCall] = {}
    for call in recorded.calls:
        if not call.path.endswith("chat/completions") or "parallel" in call.note or "unknown" in call.note:
            continue
        helper = call.note == "sub-agent"
        before = last.get(helper)
        compacted = before is not None and (before.note, call.note) == ("before", "after compaction")
        if call.note.startswith("abandoned"):
            continue
        if before is not None and not compacted:
            yield before, call
        last[helper] = call


def test_drift_is_found_in_50_of_143_chat_turns_each_with_its_index(built: Built) -> None:
    seen = drifted = 0
    for recorded, found in built.values():
        reports = {drift.call[0]: drift for drift in found.drifts if not drift.before_answer}
        for before, call in turns(recorded):
            seen += 1
            (earlier,), (later,) = before.entries, call.entries
            index = common(sequence(earlier), later.prompt_token_ids)
            report = reports.pop(call.model_call_id, None)
            if index == len(sequence(earlier)):
                assert report is None
                continue
            drifted += 1
            assert report is not None
            assert report.nearest == (before.model_call_id, 0)
            assert report.index == index
            assert report.kept == max(index - len(earlier.prompt_token_ids), 0)
            assert report.kept + report.lost == len(earlier.generation_token_ids)
        assert not reports
    assert (seen, drifted) == (143, 50)


# ---- the same through the capture point


async def captured(directory: Path, recorded: RecordedRollout) -> Snapshot:
    """The bodies as a server has them, one call after another, with intents."""
    store = FileStore(directory, require_intent=True)
    for call in recorded.calls:
        if not call.generates:
            continue  # no context, no trace
        async with captured_call(store, recorded.rollout_id, call.model_call_id, request=call.request, path=call.path):
            if call.sse is None:
                await capture_tokens(call.response, status=call.status)
            else:
                joiner = StreamJoiner()
                joiner.feed("".join(f"{line}\n\n" for line in call.sse).encode())
                await capture_tokens(joiner)
    return await store.freeze(recorded.rollout_id)


EDGES = {
    # seq: outcome, verdict of each choice, what is odd
    0: ("recorded", ["ambiguous"], "one token"),
    1: ("recorded", ["ambiguous", "ambiguous"], "two choices"),
    2: ("recorded", ["ambiguous"], "stop strings"),
    3: ("lost", [], "no token ids asked for"),
    4: ("recorded", ["ambiguous"], "no logprobs asked for"),
    5: ("recorded", ["ambiguous"], "top logprobs"),
    6: ("recorded", ["ambiguous"], "tokens as ids"),
    7: ("no_generation", [], "context overflow: error"),
    8: ("recorded", ["trained"], "bad message: error"),  # vLLM answered it all the same
    9: ("no_generation", [], "unknown model: error"),
    10: ("lost", [], "responses: no ids on the wire"),
    11: ("lost", [], "messages: no ids on the wire"),
    12: (None, [], "no generation"),  # count_tokens
    13: (None, [], "no generation"),  # tokenize
    14: ("recorded", ["ambiguous"], "stream"),
    15: ("recorded", ["trained"], "text prompt"),
    16: ("recorded", ["repeated"], "completions stream"),  # same seed: the same ids as the call before
}


def test_the_outcome_of_each_call_of_edges_0(tmp_path: Path) -> None:
    recorded = recordings.load("edges-0")
    with asyncio.run(captured(tmp_path, recorded)) as snapshot:
        found = build(snapshot)
        records = {record.model_call_id: record for record in snapshot.calls}
        entries = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
    table = {}
    for call in recorded.calls:
        record = records.get(call.model_call_id)
        verdicts = []
        for answer in found.recorded.calls:
            if answer.model_call_id == call.model_call_id:
                representative = found.links.representative[answer.number]
                merged = representative != answer.number
                verdicts.append("repeated" if merged else found.judged[representative].verdict)
        table[call.seq] = (record and record.outcome, verdicts, call.note)
    assert table == EDGES
    assert np.isnan(entries["call-0004", 0].generation_log_probs).all()
    assert snapshot.incomplete
    assert found.metrics["sampled"] == sum(found.metrics[category] for category in CATEGORIES) == 51
    assert {name: found.metrics[name] for name in CATEGORIES if found.metrics[name]} == {
        "trained": 10,
        "abandoned": 6,
        "ambiguous": 35,
    }


def test_captured_traffic_gives_the_same_account_as_the_recorded_entries(tmp_path: Path, built: Built) -> None:
    for name, (recorded, expected) in built.items():
        with asyncio.run(captured(tmp_path, recorded)) as snapshot:
            found = build(snapshot)
        assert {c: found.metrics[c] for c in ("sampled", *CATEGORIES)} == {
            c: expected.metrics[c] for c in ("sampled", *CATEGORIES)
        }, name
        ids = [trajectory.token_ids.tolist() for trajectory in found.trained]
        assert ids == [trajectory.token_ids.tolist() for trajectory in expected.trained]
        assert found.metrics["drifted_calls"] == expected.metrics["drifted_calls"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("linear", "long", "token", "stream"))])
def test_one_conversation_is_rebuilt_up_to_its_last_drift(name: str, built: Built) -> None:
    _, found = built[name]
    rebuilt = rebuild_from(found)
    assert rebuilt.response is not None
    last = found.trained[-1].calls[-1].model_call_ids if len(found.trained) == 1 else None
    assert last is None or rebuilt.calls[-1][0] in last
    assert rebuilt.metrics["segments"] == found.metrics["drifted_calls"] + 1
    assert (rebuilt.metrics["delivered_fraction"] == 1.0) is (found.metrics["drifted_calls"] == 0)
