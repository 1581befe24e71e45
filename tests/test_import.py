"""What the imports write is what the source says, each rollout whole; repeating them changes nothing."""

from __future__ import annotations

import asyncio
import grp
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import recordings
from tests.nemo_gym_directory import unpacked
from tokcap import FileStore, TokenEntry
from tokcap.command import main
from tokcap.errors import StoreNotFoundError
from tokcap.transfer import Imported, ImportedRollout, import_nemo_gym, import_traffic, importing, nemo_gym
from tokcap.transfer.nemo_gym import lineage_digest

ROOT = Path(__file__).parent.parent
TRAFFIC = sorted(recordings.TRAFFIC.glob("*.jsonl.gz"))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with FileStore(tmp_path / "store") as made:
        yield made


@pytest.fixture
def gym(tmp_path: Path) -> Path:
    """A directory that NeMo Gym wrote; see `tests.nemo_gym_directory.ROLLOUTS`."""
    (tmp_path / "gym").mkdir()
    return unpacked(tmp_path / "gym")


def contents(store: FileStore) -> dict[str, Any]:
    """What there is of every rollout, without times."""
    found: dict[str, Any] = {}
    for rollout_id, state in store.rollouts():
        if state == "retired":
            found[rollout_id] = (state,)
            continue
        with store.read_now(rollout_id) as snapshot:
            entries = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
            calls = sorted((call.model_call_id, call.outcome, call.detail) for call in snapshot.calls)
            found[rollout_id] = (state, snapshot.finished, snapshot.meta, entries, calls)
    return found


def same_tokens(entry: TokenEntry, other: TokenEntry) -> bool:
    return all(
        getattr(entry, field).tobytes() == getattr(other, field).tobytes()
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    )


def outcomes(store: FileStore, rollout_id: str) -> dict[str, str]:
    return {call.model_call_id: call.outcome for call in store.stat_now(rollout_id).calls}


def details(store: FileStore, rollout_id: str) -> dict[str, str]:
    return {call.model_call_id: call.detail for call in store.stat_now(rollout_id).calls if call.outcome == "lost"}


# ---- recorded traffic


def test_recorded_traffic_gives_the_recorded_entries_id_by_id(store: FileStore) -> None:
    done = import_traffic(TRAFFIC, store, finish=True, freeze=True)
    assert (done.imported, done.frozen, done.refused) == (25, 25, {})
    compared = 0
    for rollout in recordings.rollouts():
        with store.read_now(rollout.rollout_id) as snapshot:
            found = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
            for entry in rollout.entries:
                imported = found.pop((entry.model_call_id, entry.choice_index))
                assert same_tokens(imported, entry)
                for field in ("model", "response_id", "finish_reason", "created_at", "pieces"):
                    assert getattr(imported, field) == getattr(entry, field), field
                compared += 1
            assert not found
            assert snapshot.version == 1
            assert snapshot.meta == {"shape": rollout.shape, "model": rollout.model}
            expected = {call.model_call_id: call.outcome for call in rollout.calls if call.generates}
            assert {call.model_call_id: call.outcome for call in snapshot.calls} == expected
    assert compared == done.entries == 243


def test_importing_traffic_twice_is_a_no_op(store: FileStore) -> None:
    import_traffic(TRAFFIC[:3], store, finish=True, freeze=True)
    before = contents(store)
    done = import_traffic(TRAFFIC[:3], store, finish=True, freeze=True)
    assert (done.imported, done.unchanged) == (0, 3)
    assert contents(store) == before


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_errors_before_sampling_are_no_generation_and_cut_streams_aborted(store: FileStore, tmp_path: Path) -> None:
    head, *calls = lines_of(recordings.TRAFFIC / "stream-0.jsonl.gz")
    calls[1] = {**calls[1], "status": 429, "sse": None, "response": {"error": {"message": "slow down", "code": 429}}}
    calls[2] = {**calls[2], "status": 500, "sse": None, "response": {"error": {"message": "oh", "code": 500}}}
    calls[3] = {**calls[3], "sse": calls[3]["sse"][:9]}
    asked = {"request": {"prompt": "x"}, "status": 200}
    calls.append({"seq": 90, "path": "/tokenize", "response": {"tokens": [1]}, **asked})
    calls.append({"seq": 91, "path": "/v1/completions", "response": None, **asked})
    path = written(tmp_path / "t.jsonl", [head, *calls])
    done = import_traffic(path, store)
    assert done.imported == 1
    assert outcomes(store, "stream-0") == {
        **{f"call-{number:04d}": "recorded" for number in range(len(calls) - 2)},
        "call-0001": "no_generation",
        "call-0002": "lost",
        "call-0003": "aborted",
        "call-0091": "lost",
    }
    with store.read_now("stream-0") as snapshot:
        (cut,) = [entry for entry in snapshot.entries if entry.model_call_id == "call-0003"]
    whole = recordings.load("stream-0").calls[3].entries[0]
    assert 0 < len(cut.generation_token_ids) < len(whole.generation_token_ids)
    assert np.array_equal(cut.generation_token_ids, whole.generation_token_ids[: len(cut.generation_token_ids)])
    before = contents(store)
    assert import_traffic(path, store).unchanged == 1
    assert contents(store) == before


def test_an_answer_that_does_not_say_when_it_was_made_is_the_same_every_time(store: FileStore, tmp_path: Path) -> None:
    head, call, *_ = lines_of(recordings.TRAFFIC / "linear-0.jsonl.gz")
    del call["response"]["created"]
    path = written(tmp_path / "t.jsonl", [head, {**call, "note": "kept"}])
    assert import_traffic(path, store).imported == 1
    with store.read_now("linear-0") as snapshot:
        assert (snapshot.entries[0].created_at, snapshot.entries[0].extra["note"]) == (0.0, "kept")
    assert import_traffic(path, store).unchanged == 1


def test_traffic_is_imported_where_a_loop_runs_already(store: FileStore) -> None:
    async def in_a_notebook() -> Imported:
        return import_traffic(TRAFFIC[3], store)

    assert asyncio.run(in_a_notebook()).imported == 1


def test_streams_with_named_events_are_put_together(store: FileStore, tmp_path: Path) -> None:
    head, call, *_ = lines_of(recordings.TRAFFIC / "stream-0.jsonl.gz")
    named = [part for line in call["sse"] for part in ("event: message", line)]
    import_traffic(written(tmp_path / "t.jsonl", [head, {**call, "sse": named}]), store)
    with store.read_now("stream-0") as snapshot:
        (entry,) = snapshot.entries
    assert same_tokens(entry, recordings.load("stream-0").calls[0].entries[0])


def other_content(store: FileStore) -> None:
    entry = recordings.load("linear-0").entries[0]
    store.put_now(TokenEntry("linear-0", entry.model_call_id, entry.prompt_token_ids, [1], [-1.0]))


def other_call(store: FileStore) -> None:
    store.put_now(TokenEntry("linear-0", "mine", [1], [2], [-1.0]))


def other_outcome(store: FileStore) -> None:
    store.begin_call_now("linear-0", "call-0001")
    store.settle_call_now("linear-0", "call-0001", "no_generation", "refused")


def frozen_part(store: FileStore) -> None:
    store.freeze_now("linear-0").close()


def retired(store: FileStore) -> None:
    with store.freeze_now("linear-0") as snapshot:
        store.retire_now("linear-0", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def test_what_is_damaged_here_is_refused_and_left_alone(store: FileStore) -> None:
    import_traffic(recordings.TRAFFIC / "linear-0.jsonl.gz", store, freeze=True)
    (segment,) = Path(store.directory).rglob("v1/0*")
    data = segment.read_bytes()
    name = recordings.load("linear-0").entries[3].response_id.encode()
    segment.write_bytes(data.replace(name, name[::-1]))
    before = contents(store)
    done = import_traffic(recordings.TRAFFIC / "linear-0.jsonl.gz", store, freeze=True)
    assert "damaged here" in done.refused["linear-0"]
    assert segment.name in done.refused["linear-0"]
    assert contents(store) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_content, "another content of call call-0000"),
        (other_call, "another content of call mine"),
        (other_outcome, "call-0001 is no_generation"),
        (frozen_part, "frozen here"),
        (retired, "retired here"),
    ],
)
@pytest.mark.parametrize("kind", ["traffic", "nemo-gym"])
def test_a_rollout_that_is_there_with_other_contents_is_refused_and_left_alone(
    kind: str, change: Callable[[FileStore], None], words: str, store: FileStore, gym: Path
) -> None:
    change(store)
    before = contents(store)["linear-0"]
    told: list[ImportedRollout] = []
    if kind == "traffic":
        done = import_traffic(TRAFFIC, store, freeze=True, finish=True, told=told.append)
        assert done.imported == 24
    else:
        done = import_nemo_gym(gym, store, freeze=True, finish=True, told=told.append)
        assert done.imported == 4
    assert list(done.refused) == ["linear-0"]
    assert words in done.refused["linear-0"]
    assert contents(store)["linear-0"] == before
    assert [rollout.rollout_id for rollout in told if rollout.status == "refused"] == ["linear-0"]


def test_files_that_are_no_traffic_are_refused_by_name_and_stop_no_other(store: FileStore, tmp_path: Path) -> None:
    good = TRAFFIC[5]
    call = {"seq": 0, "path": "/v1/completions", "request": {}, "status": 400, "response": {}}
    bad = {
        "empty.jsonl": b"",
        "no-json.jsonl": b"{\n",
        "no-id.jsonl": b'{"rollout": "../x"}\n',
        "no-call.jsonl": b'{"rollout": "r"}\n{"seq": "x"}\n',
        "twice.jsonl": "\n".join(json.dumps(line) for line in ({"rollout": "r"}, call, call)).encode(),
        "cut.jsonl.gz": good.read_bytes()[:-20],
        "no-gzip.jsonl.gz": b"x" * 100,
        "deep.jsonl": b'{"rollout": "r", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    done = import_traffic([*(tmp_path / name for name in bad), good], store)
    assert set(done.refused) == set(bad)
    assert done.imported == 1
    assert len(contents(store)) == 1
    with pytest.raises(FileNotFoundError):
        import_traffic(tmp_path / "nowhere.jsonl", store)


def test_a_rollout_without_model_calls_is_skipped(store: FileStore, tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [{"rollout": "r"}])
    assert import_traffic(path, store, freeze=True).skipped == {"r": "it has no model calls"}
    assert not contents(store)


# ---- NeMo Gym


def test_nemo_gym_records_come_back_id_by_id_deltas_included(store: FileStore, gym: Path) -> None:
    before = {path.name: path.read_bytes() for path in gym.iterdir()}
    done = import_nemo_gym(gym, store)
    assert (done.imported, done.frozen, done.refused) == (5, 3, {})
    assert done.skipped == {"linear-2": "it was consumed and retired there"}
    assert {path.name: path.read_bytes() for path in gym.iterdir()} == before
    deltas = 0
    for name in ("linear-0", "linear-1", "long-token-in-0", "token-in-0", "token-in-1"):
        with store.read_now(name) as snapshot:
            entries = {entry.model_call_id: entry for entry in snapshot.entries}
        recorded = recordings.load(name).entries
        assert len(entries) == len(recorded)
        for entry in recorded:
            imported = entries[entry.model_call_id]
            assert same_tokens(imported, entry)
            for field in ("model", "response_id", "created_at", "output_items", "token_item_index"):
                assert getattr(imported, field) == getattr(entry, field), field
            theirs = imported.extra["nemo_gym"]
            assert theirs["cum_len"] == len(entry.prompt_token_ids) + len(entry.generation_token_ids)
            assert theirs["parent_resolution"] == ("resolved" if "parent_call_id" in imported.extra else "root")
            assert "prompt_token_ids" not in theirs
            deltas += theirs["prompt_is_delta"]
    assert deltas > 30
    assert dict(store.rollouts()) == {
        "linear-0": "frozen",
        "linear-1": "open",
        "long-token-in-0": "frozen",
        "token-in-0": "frozen",
        "token-in-1": "open",
    }
    assert details(store, "token-in-0") == {"call-never-came-back": "it began, and has no record"}
    assert details(store, "token-in-1") == {
        "call-that-failed": "it was marked incomplete",
        "": "marked incomplete",
    }
    assert not store.stat_now("linear-0").incomplete


def test_importing_nemo_gym_twice_is_a_no_op_and_finish_notes_their_state(store: FileStore, gym: Path) -> None:
    import_nemo_gym(gym, store, finish=True, freeze=True)
    before = contents(store)
    assert {state for state, *_ in before.values()} == {"frozen"}
    meta = store.stat_now("linear-0").meta["nemo_gym"]
    assert meta == {
        **{key: value for key, value in state_of(gym, "linear-0").items() if key in ("snapshot_id", "version")},
        "frozen": True,
        "incomplete": False,
    }
    done = import_nemo_gym(gym, store, finish=True, freeze=True)
    assert (done.imported, done.unchanged) == (0, 5)
    assert contents(store) == before


def state_of(gym: Path, rollout_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((gym / f"{rollout_id}.tokens.state.json").read_bytes())
    return found


def records_of(gym: Path, rollout_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (gym / f"{rollout_id}.tokens.jsonl").read_bytes().splitlines()]


def rewrite(gym: Path, rollout_id: str, records: list[Any], **state: Any) -> None:
    """Other records, and a state that knows no digests of them."""
    data = b"".join(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n" for record in records)
    (gym / f"{rollout_id}.tokens.jsonl").write_bytes(data)
    (gym / f"{rollout_id}.tokens.intents").unlink(missing_ok=True)
    (gym / f"{rollout_id}.tokens.incomplete").unlink(missing_ok=True)
    (gym / f"{rollout_id}.tokens.state.json").write_text(json.dumps(state))
    for path in gym.iterdir():
        if not path.name.startswith(f"{rollout_id}."):
            path.unlink()


CHAIN = "token-in-0"


def test_a_delta_without_its_parent_is_lost_with_all_that_hang_on_it(store: FileStore, gym: Path) -> None:
    records = records_of(gym, CHAIN)
    assert [record["prompt_is_delta"] for record in records] == [False] + [True] * (len(records) - 1)
    names = [record["model_call_id"] for record in records]
    rewrite(gym, CHAIN, records[:3] + records[4:])
    done = import_nemo_gym(gym, store)
    with store.read_now(CHAIN) as snapshot:
        assert [entry.model_call_id for entry in snapshot.entries] == names[:3]
    lost = details(store, CHAIN)
    assert lost[names[4]] == f"it is a delta, and its parent '{names[3]}' isn't there"
    assert lost[names[5]] == f"it is a delta, and its parent '{names[4]}' has no exact record"
    assert set(lost) == set(names[4:])
    assert done.lost == len(names) - 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record["prompt_token_ids"].__setitem__(0, record["prompt_token_ids"][0] + 1), "digest"),
        (lambda record: record["generation_token_ids"].__setitem__(-1, 5), "digest"),
        (lambda record: record["prompt_token_ids"].pop(), "cum_len says"),
        (lambda record: record["prompt_token_ids"].__setitem__(0, True), "no list of token ids"),
        (lambda record: record["prompt_token_ids"].__setitem__(0, 2**31), "no list of token ids"),
        (lambda record: record.pop("prompt_token_ids"), "no list of token ids"),
        (lambda record: record["generation_log_probs"].pop(), "generation_log_probs"),
        (lambda record: record.__setitem__("schema_version", 2), "schema_version is 2"),
        (lambda record: record.__setitem__("rollout_id", "other"), "of rollout 'other'"),
        (lambda record: record.__setitem__("parent_call_id", None), "names no parent"),
        (lambda record: record.__setitem__("parent_call_id", record["model_call_id"]), "its own ancestor"),
        (lambda record: record.__setitem__("token_item_index", 7), "token_item_index"),
    ],
)
def test_a_record_that_does_not_hold_is_lost_with_the_reason(
    change: Callable[[dict[str, Any]], object], words: str, store: FileStore, gym: Path
) -> None:
    records = records_of(gym, CHAIN)[:2]
    change(records[1])
    rewrite(gym, CHAIN, records)
    import_nemo_gym(gym, store)
    name = records[1]["model_call_id"]
    assert outcomes(store, CHAIN) == {records[0]["model_call_id"]: "recorded", name: "lost"}
    assert words in details(store, CHAIN)[name]


def test_a_cycle_of_parents_is_lost_and_ends(store: FileStore, gym: Path) -> None:
    records = records_of(gym, CHAIN)[:4]
    records[1]["parent_call_id"] = records[3]["model_call_id"]
    rewrite(gym, CHAIN, records)
    import_nemo_gym(gym, store)
    assert sorted(outcomes(store, CHAIN).values()) == ["lost", "lost", "lost", "recorded"]


def test_parents_may_stand_behind_their_children(store: FileStore, gym: Path) -> None:
    rewrite(gym, CHAIN, records_of(gym, CHAIN)[::-1])
    import_nemo_gym(gym, store)
    with store.read_now(CHAIN) as snapshot:
        found = {entry.model_call_id: entry for entry in snapshot.entries}
    for entry in recordings.load(CHAIN).entries:
        assert same_tokens(found[entry.model_call_id], entry)


def test_a_long_chain_of_deltas_is_expanded(store: FileStore, tmp_path: Path) -> None:
    gym = tmp_path / "chain"
    gym.mkdir()
    records = [
        {
            "rollout_id": "r",
            "model_call_id": f"c{number}",
            "prompt_token_ids": [number],
            "generation_token_ids": [1],
            "generation_log_probs": [-1.0],
            "prompt_is_delta": number > 0,
            "parent_call_id": f"c{number - 1}" if number else None,
            "parent_resolution": "resolved" if number else "root",
        }
        for number in range(3000)
    ]
    rewrite(gym, "r", records[::-1])
    assert import_nemo_gym(gym, store).outcomes == {"recorded": 3000}
    with store.read_now("r") as snapshot:
        last = max(snapshot.entries, key=lambda entry: len(entry.prompt_token_ids))
    assert last.prompt_token_ids.tolist() == [token for number in range(3000) for token in (number, 1)][:-1]


def test_a_flipped_byte_is_found_by_the_digest_of_the_state_file(store: FileStore, gym: Path) -> None:
    path = gym / "linear-0.tokens.jsonl"
    data = path.read_bytes()
    # A log-prob: none of the digests over ids sees it.
    at = data.index(b'"generation_log_probs":[-') + len(b'"generation_log_probs":[-')
    path.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
    import_nemo_gym(gym, store)
    assert [call for call, outcome in outcomes(store, "linear-0").items() if outcome == "lost"] == ["call-0000"]
    assert "it is damaged" in details(store, "linear-0")["call-0000"]


def test_torn_and_unreadable_lines(store: FileStore, gym: Path) -> None:
    records: list[Any] = records_of(gym, "linear-1")
    records[2] = b'{"model_call_id": "call-0002", "prompt_tok\n'
    records[3] = json.dumps({**records[3], "model_call_id": "a/b"}).encode() + b"\n"
    torn = json.dumps(records[-1]).encode()[:-30]
    rewrite(gym, "linear-1", [*records[:-1], torn])
    import_nemo_gym(gym, store)
    found = outcomes(store, "linear-1")
    # What was cut off was never acknowledged; nobody knows of it.
    assert len(found) == len(records) - 1
    assert "line 3 of" in details(store, "linear-1")["line-3"]
    assert "a/b" in details(store, "linear-1")["line-4"]


def test_an_indexed_record_that_is_gone_is_lost(store: FileStore, gym: Path) -> None:
    # NeMo Gym was killed between the two steps of a drop.
    (gym / "linear-0.tokens.jsonl").unlink()
    import_nemo_gym(gym, store)
    assert set(outcomes(store, "linear-0").values()) == {"lost"}
    assert len(outcomes(store, "linear-0")) == 8


def test_a_rollout_that_is_dropped_while_it_is_read_has_no_lost_calls(
    store: FileStore, gym: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = nemo_gym._content

    def dropping(path: str) -> bytes:
        if path.endswith("linear-0.tokens.jsonl") and os.path.exists(path):
            os.unlink(path)
            (gym / "linear-0.tokens.state.json").write_text('{"frozen": true, "retired": true, "entry_digests": {}}')
        return content(path)

    monkeypatch.setattr(nemo_gym, "_content", dropping)
    assert import_nemo_gym(gym, store).skipped["linear-0"] == "it was consumed and retired there"
    assert "linear-0" not in contents(store)


def test_two_records_of_one_call_are_a_conflict_and_repetitions_are_not(store: FileStore, gym: Path) -> None:
    records = records_of(gym, "linear-1")
    other = {**records[1], "generation_log_probs": [-9.0] * len(records[1]["generation_token_ids"])}
    rewrite(gym, "linear-1", [records[0], records[0], records[1], other])
    done = import_nemo_gym(gym, store)
    assert outcomes(store, "linear-1") == {"call-0000": "recorded", "call-0001": "conflict"}
    assert done.outcomes == {"recorded": 1, "conflict": 1}
    before = contents(store)
    assert import_nemo_gym(gym, store).unchanged == 1
    assert contents(store) == before


def test_an_incomplete_rollout_that_says_no_more_has_an_unnamed_lost_call(store: FileStore, gym: Path) -> None:
    rewrite(gym, "linear-1", records_of(gym, "linear-1"), incomplete=True, frozen=True)
    import_nemo_gym(gym, store)
    stat = store.stat_now("linear-1")
    assert (stat.state, stat.incomplete) == ("frozen", True)
    assert [call.outcome for call in stat.calls if not call.model_call_id] == ["lost"]


def test_fields_that_only_they_have_are_kept(store: FileStore, gym: Path) -> None:
    record = records_of(gym, "linear-1")[0]
    experts = [[[1, 2]] for _ in record["generation_token_ids"]]
    record.update(routed_experts=experts, continuation_fingerprint="f", something_new={"a": [1.5, None]})
    record["generation_log_probs"][0] = None
    rewrite(gym, "linear-1", [record])
    import_nemo_gym(gym, store)
    with store.read_now("linear-1") as snapshot:
        (entry,) = snapshot.entries
    assert entry.routed_experts is not None
    assert entry.routed_experts.tolist() == experts
    assert np.isnan(entry.generation_log_probs[0])
    assert entry.extra["nemo_gym"]["continuation_fingerprint"] == "f"
    assert entry.extra["nemo_gym"]["something_new"] == {"a": [1.5, None]}
    assert entry.extra["nemo_gym"]["digest"] == record["digest"]


def test_what_its_owner_noted_is_not_replaced(store: FileStore, gym: Path) -> None:
    records = records_of(gym, CHAIN)
    rewrite(gym, CHAIN, records, version=0)
    import_nemo_gym(gym, store, finish=True)
    rewrite(gym, CHAIN, records, version=1)
    assert import_nemo_gym(gym, store, finish=True).imported == 1
    assert store.stat_now(CHAIN).meta == {"nemo_gym": {"version": 1}}, "an import may say more than an earlier one"

    store.finish_now(CHAIN, {"reward": 1.0})
    before = contents(store)
    done = import_nemo_gym(gym, store, finish=True)
    assert done.refused == {CHAIN: "its owner finished it here, with another meta"}
    assert import_nemo_gym(gym, store).unchanged == 1
    assert contents(store) == before


def test_a_reward_is_not_replaced_by_what_traffic_says(store: FileStore) -> None:
    import_traffic(TRAFFIC[5], store, finish=True)
    ((rollout_id, _),) = store.rollouts()
    store.finish_now(rollout_id, {"reward": 1.0})
    assert set(import_traffic(TRAFFIC[5], store, finish=True).refused) == {rollout_id}
    assert store.stat_now(rollout_id).meta == {"reward": 1.0}


def test_a_call_that_is_called_as_a_line_hides_no_lost_one(store: FileStore, gym: Path) -> None:
    record = {**records_of(gym, "linear-1")[0], "model_call_id": "line-2"}
    rewrite(gym, "linear-1", [record, b"{broken\n"])
    for _ in range(2):
        assert not import_nemo_gym(gym, store).refused
        assert sorted(outcomes(store, "linear-1").values()) == ["lost", "recorded"]


def test_the_same_import_in_another_process_is_no_reason_to_refuse(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importing._write

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(importing, "_write", real)
        import_traffic(TRAFFIC[5], store, freeze=True)
        real(*arguments)

    monkeypatch.setattr(importing, "_write", late)
    done = import_traffic(TRAFFIC[5], store, freeze=True)
    assert (done.refused, done.unchanged) == ({}, 1)


def test_hostile_files_stop_no_other(store: FileStore, gym: Path) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    (gym / "deep.tokens.jsonl").write_bytes(b'{"model_call_id": "a", "x": ' + deep + b"}\n")
    (gym / "state.tokens.jsonl").write_bytes(b"{}\n")
    (gym / "state.tokens.state.json").write_bytes(b'{"x": ' + deep + b"}")
    os.mkfifo(gym / "fifo.tokens.jsonl")
    (gym / "endless.tokens.jsonl").symlink_to("/dev/zero")
    record = records_of(gym, "linear-1")[0]
    del record["generation_log_probs"]
    (gym / "less.tokens.jsonl").write_text(json.dumps({**record, "rollout_id": "less"}) + "\n")
    done = import_nemo_gym(gym, store)
    assert set(done.refused) == {"state", "fifo", "endless"}
    assert set(outcomes(store, "deep").values()) == set(outcomes(store, "less").values()) == {"lost"}
    assert done.imported == 7


def test_what_has_come_since_is_added_to_what_is_open(store: FileStore, gym: Path) -> None:
    records = records_of(gym, CHAIN)
    rewrite(gym, CHAIN, records[:3])
    assert import_nemo_gym(gym, store).entries == 3
    rewrite(gym, CHAIN, records, frozen=True)
    assert import_nemo_gym(gym, store).entries == len(records)
    assert store.stat_now(CHAIN).state == "frozen"
    assert set(outcomes(store, CHAIN).values()) == {"recorded"}


def test_a_directory_without_their_files_is_named(store: FileStore, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StoreNotFoundError, match="check the path"):
            import_nemo_gym(path, store)


def test_rollouts_whose_files_cannot_be_read_stop_no_other(store: FileStore, gym: Path) -> None:
    (gym / "linear-0.tokens.state.json").write_text("{")
    (gym / "-x.tokens.jsonl").write_text("{}\n")
    done = import_nemo_gym(gym, store)
    assert set(done.refused) == {"linear-0", "-x"}
    assert done.imported == 4


def test_the_digest_of_a_sequence_is_theirs(gym: Path) -> None:
    record = records_of(gym, "linear-0")[0]
    ids = np.array(record["prompt_token_ids"] + record["generation_token_ids"], np.int32)
    assert lineage_digest(ids) == record["digest"]
    assert lineage_digest(ids[:-1]) != record["digest"]


# ---- kills


KILLED = """
import os, signal, sys
at = int(sys.argv[1])
calls = 0
real = os.fsync, os.fdatasync

def killing(function):
    def called(fd):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(fd)
    return called

os.fsync, os.fdatasync = map(killing, real)
from tokcap.transfer import import_nemo_gym, import_traffic
kind, store, *sources = sys.argv[2:]
if kind == "traffic":
    import_traffic(sources, store, finish=True, freeze=True)
else:
    import_nemo_gym(sources[0], store, finish=True, freeze=True)
"""


@pytest.mark.parametrize("kind", ["traffic", "nemo-gym"])
def test_an_import_killed_anywhere_and_repeated_gives_the_same_store(kind: str, gym: Path, tmp_path: Path) -> None:
    sources = [str(gym)] if kind == "nemo-gym" else [str(TRAFFIC[0]), str(TRAFFIC[2])]

    def run(store: Path) -> Imported:
        return (
            import_traffic(sources, store, finish=True, freeze=True)
            if kind == "traffic"
            else import_nemo_gym(gym, store, finish=True, freeze=True)
        )

    run(tmp_path / "undisturbed")
    kills, point = 0, 7
    while True:
        command = [sys.executable, "-c", KILLED, str(point), kind, str(tmp_path / "killed"), *sources]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        kills += 1
        point += 9
    assert kills >= 3
    again = run(tmp_path / "killed")
    assert again.imported == 0
    assert not again.refused
    with FileStore(tmp_path / "undisturbed") as one, FileStore(tmp_path / "killed") as other:
        assert contents(one) == contents(other)
    assert os.path.isdir(tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed")


@pytest.mark.parametrize("kind", ["nemo-gym", "traffic"])
def test_a_store_that_a_unix_group_shares_is_imported_into(kind: str, gym: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    group = grp.getgrgid(os.getgid()).gr_name
    if kind == "traffic":
        import_traffic(recordings.TRAFFIC / "linear-1.jsonl.gz", shared, group=group)
    else:
        import_nemo_gym(gym, shared, group=group)
    assert shared.stat().st_mode & 0o7777 == 0o2770
    source = str(gym if kind == "nemo-gym" else recordings.TRAFFIC / "linear-1.jsonl.gz")
    assert main(["import", kind, source, "--unix-group", group, "--dir", str(shared)]) == 0
