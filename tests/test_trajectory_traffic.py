"""Recorded traffic of a real model, from its bodies to trajectories: every sampled id is accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import recordings
from tests.recordings import RecordedCall, RecordedRollout
from tokcap import FileStore, Snapshot, TokenEntry
from tokcap.trajectory import Build, build
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
