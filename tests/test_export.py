"""What `tokcap.transfer.export` writes is what was captured, bit for bit, whole or not at all."""

from __future__ import annotations

import base64
import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import recordings
from tests.damage_by_hand import replace_by_file
from tests.exported import SUFFIXES, read
from tokcap import FileStore, TokenEntry, build
from tokcap.errors import BusyError, InvalidOptionError
from tokcap.transfer import Exported, export
from tokcap.transfer.parquet import Parquet
from tokcap.transfer.parts import PROGRESS, Part, Parts
from tokcap.transfer.schema import LEVELS, Level
from tokcap.transfer.whole_file import WholeFile, temporary_of

ROOT = Path(__file__).parent.parent
NAMES = ("linear-0", "retry-mid-0", "sub-agent-0", "edges-0", "parallel-0")


def odd_entry(rollout_id: str) -> TokenEntry:
    """Every field, with values that formats like to lose."""
    return TokenEntry(
        rollout_id,
        "odd",
        [0, 2**31 - 1, 7],
        [5, 6, 7, 8, 9, 10, 11, 12],
        [0.0, -0.0, None, float("-inf"), -9999.0, -5e-324, -0.1 - 0.2, float("inf")],
        choice_index=0,
        routed_experts=np.arange(16, dtype=np.int8).reshape(8, 2),
        output_items=[{"type": "message", "content": "tab\t\u202e \U0001f600 \x1b[31m"}, {}],
        token_item_index=1,
        model="a model\n\udc80",
        response_id="\x00r",
        finish_reason="stop",
        created_at=1.7e9 + 0.1,
        policy_versions=[("v1", 0, 3), (2, 3, 8)],
        sampling={"temperature": 0.7, "seed": 2**64 + 1},
        pieces=[b"", b"\xff\xfe", b"a", b"b", b"c", b"d", b"e", b"f"],
        extra={"nan": math.nan, "big": -(2**70), "surrogate": "\ud800", "deep": [[[None, True, 1.5]]]},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileStore]:
    """Recorded rollouts, an odd one, a masked one, one in conflict; one open, one retired."""
    with FileStore(tmp_path_factory.mktemp("export") / "store") as made:
        for name in NAMES:
            made.put_many_now(recordings.load(name).entries)
            made.finish_now(name, {"reward": 0.25, "who": "\u00fc", "of": [1, None]})
        made.put_now(odd_entry("odd-1"))
        made.begin_call_now("odd-1", "never-came-back", request_digests=[b"0" * 16], retry_count=3, idempotency_key="k")
        made.mark_incomplete_now("odd-1")
        made.put_now(TokenEntry("masked-1", "c", [1], [2], [None]))
        made.put_now(TokenEntry("empty-1", "c", [1], [], []))
        for name in (*NAMES, "odd-1", "masked-1", "empty-1"):
            made.freeze_now(name).close()
        made.put_now(TokenEntry("open-1", "c", [1], [2], [-0.5]))
        made.put_now(TokenEntry("gone-1", "c", [1], [2], [-0.5]))
        with made.freeze_now("gone-1") as snapshot:
            made.retire_now("gone-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        yield made


def frozen_names() -> list[str]:
    return sorted((*NAMES, "odd-1", "masked-1", "empty-1"))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for record, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            assert same(record[name], value), (wanted["rollout_id"], name, record[name], value)


def lists(value: Any) -> Any:
    return [lists(part) for part in value] if isinstance(value, (list, tuple)) else value


def trajectories(store: FileStore, *, untrained: bool = False, **options: Any) -> list[dict[str, Any]]:
    expected = []
    for name in frozen_names():
        with store.read_now(name) as snapshot:
            built = build(snapshot, **options)
            for trajectory in built.trajectories if untrained else built.trained:
                told = trajectory.as_dict()
                told.update(flags=lists(told["flags"]), policy_versions=lists(told["policy_versions"]))
                told.update(snapshot_id=snapshot.snapshot_id, version=1, meta=snapshot.meta)
                expected.append(told)
    return expected


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("untrained", [False, True])
def test_trajectories_come_back_bit_for_bit(suffix: str, untrained: bool, store: FileStore, tmp_path: Path) -> None:
    expected = trajectories(store, untrained=untrained)
    done = export(store, tmp_path / f"out{suffix}", untrained=untrained)
    check(read(tmp_path / f"out{suffix}", "trajectory"), expected)
    assert (done.rollouts, done.records) == (len(frozen_names()), len(expected))
    assert done.skipped == {"open": 1, "retired": 1}
    assert done.without_records == (1 if untrained else 2)  # that of which nothing was sampled; the masked one
    assert done.bytes == (tmp_path / f"out{suffix}").stat().st_size
    assert os.listdir(tmp_path) == [f"out{suffix}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_calls_come_back_bit_for_bit_with_everything_that_was_put(
    suffix: str, store: FileStore, tmp_path: Path
) -> None:
    export(store, tmp_path / f"out{suffix}", by="call")
    found = read(tmp_path / f"out{suffix}", "call")
    entries = {}
    outcomes: Counter[tuple[str, str]] = Counter()
    for name in frozen_names():
        with store.read_now(name) as snapshot:
            entries.update({(name, entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries})
            outcomes.update((name, call.outcome) for call in snapshot.calls)
    recorded = [record for record in found if record["recorded"]]
    assert len(recorded) == len(entries)
    for record in recorded:
        entry = entries.pop((record["rollout_id"], record["model_call_id"], record["choice_index"]))
        for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            assert same(record[field], getattr(entry, field)), (entry, field)
        for field in ("output_items", "token_item_index", "finish_reason", "response_id", "created_at", "sampling"):
            assert record[field] == getattr(entry, field)
        assert record["policy_versions"] == lists(entry.policy_versions)
        pieces = record["pieces"]
        assert (None if pieces is None else [base64.b64decode(piece) for piece in pieces]) == entry.pieces
        assert len(record["loss_mask"]) == len(record["generation_token_ids"])
        if entry.model_call_id != "odd":
            assert (record["model"], record["extra"]) == (entry.model, entry.extra)
    assert not entries
    by_call = {(record["rollout_id"], record["model_call_id"]): record["outcome"] for record in found}
    assert Counter((name, outcome) for (name, _), outcome in by_call.items()) == outcomes


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_odd_values_survive(suffix: str, store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / f"out{suffix}", "odd-1", by="call")
    odd, *unrecorded = sorted(read(tmp_path / f"out{suffix}", "call"), key=lambda record: not record["recorded"])
    entry = odd_entry("odd-1")
    assert odd["generation_log_probs"].tobytes() == entry.generation_log_probs.tobytes()
    assert odd["loss_mask"].tolist() == [True, True, False, False, False, True, True, False]
    assert odd["extra"] == {**entry.extra, "nan": {"__tokcap_unstorable__": "nan"}}
    # UTF-8 has no lone surrogates; JSON has.
    assert odd["model"] == (entry.model if "jsonl" in suffix else "a model\n\\udc80")
    experts = np.frombuffer(odd["routed_experts"], odd["routed_experts_dtype"]).reshape(odd["routed_experts_shape"])
    assert same(experts, np.arange(16, dtype=np.int8).reshape(8, 2))
    open_call = next(record for record in unrecorded if record["model_call_id"] == "never-came-back")
    assert (open_call["outcome"], open_call["retry_count"], open_call["idempotency_key"]) == ("open", 3, "k")
    assert open_call["begun_at"] > 0
    assert math.isnan(open_call["ended_at"])
    assert open_call["pieces"] is None
    lost = next(record for record in unrecorded if not record["model_call_id"])
    assert (lost["outcome"], lost["generation_token_ids"].dtype) == ("lost", np.int32)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rollouts_hold_all_their_trajectories(suffix: str, store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / f"out{suffix}", by="rollout")
    found = read(tmp_path / f"out{suffix}", "rollout")
    assert [record["rollout_id"] for record in found] == frozen_names()
    parts = []
    for record in found:
        offsets = record["trajectory_offsets"]
        assert offsets.dtype == np.int64
        assert len(offsets) == len(record["trajectories"]) + 1
        for told, start, end in zip(record["trajectories"], offsets[:-1], offsets[1:], strict=True):
            arrays = {name: record[name][start:end] for name in ("token_ids", "loss_mask", "log_probs")}
            parts.append({"rollout_id": record["rollout_id"], **told, **arrays})
    check(parts, [{name: told[name] for name in parts[0]} for told in trajectories(store)])
    masked = next(record for record in found if record["rollout_id"] == "masked-1")
    assert masked["masked"]
    assert masked["reasons"] == ["unknown"]
    assert masked["metrics"]["unknown"] == 1


def test_the_options_of_a_build_are_those_of_build(store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / "strict.jsonl", strict=True, exclude_not_behaviour=True)
    expected = trajectories(store, strict=True, exclude_not_behaviour=True)
    assert len(expected) < len(trajectories(store))
    check(read(tmp_path / "strict.jsonl", "trajectory"), expected)
    export(store, tmp_path / "models.jsonl", models="no-such-model", untrained=True)
    assert {record["trained"] for record in read(tmp_path / "models.jsonl", "trajectory")} == {0}


def test_what_is_open_is_exported_if_asked_for(store: FileStore, tmp_path: Path) -> None:
    done = export(store, tmp_path / "out.jsonl", state="open")
    assert [(record["rollout_id"], record["version"]) for record in read(tmp_path / "out.jsonl", "trajectory")] == [
        ("open-1", 0)
    ]
    assert done.skipped == {"frozen": len(frozen_names()), "retired": 1}
    assert export(store, tmp_path / "any.jsonl", state="any").rollouts == len(frozen_names()) + 1


def test_globs_and_ids_choose(store: FileStore, tmp_path: Path) -> None:
    done = export(store, tmp_path / "out.jsonl", ["linear-*", "odd-1", "nobody"])
    assert {record["rollout_id"] for record in read(tmp_path / "out.jsonl", "trajectory")} == {"linear-0", "odd-1"}
    assert done.missing == ("nobody",)
    assert not done.complete


def test_nothing_to_export_replaces_nothing(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious\n")
    assert export(store, tmp_path / "out.jsonl", "nobody-*").rollouts == 0
    assert export(store, tmp_path / "parts", "nobody-*", format="npz").rollouts == 0
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_rollout_that_cannot_be_read_is_named_and_stops_no_other(store: FileStore, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as other:
        for name in ("a", "b", "c"):
            other.put_now(TokenEntry(name, "call", [1], [2], [-0.5]))
            other.freeze_now(name).close()
    (directory,) = (tmp_path / "store" / "rollouts").glob("*/b")
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
    directory.write_text("in the way")
    done = export(tmp_path / "store", tmp_path / "out.jsonl")
    assert [record["rollout_id"] for record in read(tmp_path / "out.jsonl", "trajectory")] == ["a", "c"]
    assert done.skipped == {"unreadable": 1}
    assert len(done.unreadable) == 1


def test_every_rollout_whose_directory_cannot_be_read_is_named(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as other:
        for name in ("a", "b", "c", "d"):
            other.put_now(TokenEntry(name, "call", [1], [2], [-0.5]))
            other.freeze_now(name).close()
    for name in ("b", "d"):
        (directory,) = (tmp_path / "store" / "rollouts").glob(f"*/{name}")
        replace_by_file(directory)
    for globs in ((), ("*",), ("b", "?")):
        done = export(tmp_path / "store", tmp_path / "out.jsonl", globs)
        assert done.rollouts == 2
        assert done.skipped == {"unreadable": 2}
        assert sorted(done.unreadable) == ["b", "d"]
    assert sorted(export(tmp_path / "store", tmp_path / "other.jsonl", "[a-c]").unreadable) == ["b"]


def test_a_damaged_rollout_gives_what_is_whole_and_is_named(tmp_path: Path) -> None:
    entries = recordings.load("linear-0").entries
    with FileStore(tmp_path / "store") as made:
        for entry in entries:
            made.put_now(entry)
        made.freeze_now("linear-0").close()
    (segment,) = (tmp_path / "store").rglob("v1/0*")
    data = bytearray(segment.read_bytes())
    data[data.index(entries[3].response_id.encode())] ^= 1
    segment.write_bytes(data)
    done = export(tmp_path / "store", tmp_path / "out.jsonl", by="call")
    assert list(done.damaged) == ["linear-0"]
    assert segment.name in done.damaged["linear-0"]
    assert not done.complete
    records = read(tmp_path / "out.jsonl", "call")
    recorded = {record["model_call_id"]: record for record in records if record["recorded"]}
    assert 0 < len(recorded) < len(entries)
    for entry in entries:
        if entry.model_call_id in recorded:
            assert same(recorded[entry.model_call_id]["prompt_token_ids"], entry.prompt_token_ids)
    lost = [record["detail"] for record in records if record["outcome"] == "lost"]
    assert any(segment.name in detail for detail in lost), lost


def test_what_a_killed_writer_left_is_exported(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom tokcap import FileStore, TokenEntry\nstore = FileStore(sys.argv[1])\n"
        "store.begin_call_now('r', 'a')\nstore.put_now(TokenEntry('r', 'a', [1], [2, 3], [-0.5, -0.25]))\n"
        "store.begin_call_now('r', 'b')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert export(tmp_path / "store", tmp_path / "no.jsonl").skipped == {"open": 1}
    assert export(tmp_path / "store", tmp_path / "out.jsonl", by="call", state="any").records == 2
    first, second = read(tmp_path / "out.jsonl", "call")
    assert (first["outcome"], first["generation_token_ids"].tolist()) == ("recorded", [2, 3])
    assert (second["outcome"], second["recorded"]) == ("open", False)


def test_parquet_is_written_in_row_groups(store: FileStore, tmp_path: Path) -> None:
    import importlib

    from tokcap.transfer.records import Asked, records_of

    path = tmp_path / "out.parquet"
    with path.open("wb") as file:
        writer = Parquet(file, "trajectory", row_group_bytes=2000)
        for name in ("linear-0", "sub-agent-0"):
            with store.read_now(name) as snapshot:
                for record in records_of(snapshot, Asked()):
                    writer.write(record)
        writer.close()
    assert importlib.import_module("pyarrow.parquet").ParquetFile(path).num_row_groups > 2
    check(
        read(path, "trajectory"),
        [told for told in trajectories(store) if told["rollout_id"] in ("linear-0", "sub-agent-0")],
    )


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_rollouts_give_the_same_bytes(suffix: str, by: Level, store: FileStore, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}{suffix}" for number in (1, 2)]
    for file in files:
        export(store, file, by=by)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_options_that_cannot_be_are_refused(store: FileStore, tmp_path: Path) -> None:
    options: Any
    for to, options, words in (
        ("parts", {}, "say which format"),
        ("out.npz", {"format": "parquet"}, "says npz"),
        ("out.npz", {"by": "token"}, "by is 'token'"),
        ("out.npz", {"state": "retired"}, "state is"),
        ("out.npz", {"part_bytes": 0}, "part_bytes is 0"),
        ("parts", {"format": "csv"}, "format is 'csv'"),
        ("nowhere/out.npz", {}, "there is no directory"),
    ):
        with pytest.raises(InvalidOptionError, match=words):
            export(store, tmp_path / to, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_single_file_that_memory_must_hold_is_bounded(suffix: str, store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="name a directory"):
        export(store, tmp_path / f"out{suffix}", part_bytes=1000)
    assert not list(tmp_path.iterdir())
    assert export(store, tmp_path / "out.jsonl", part_bytes=1000).parts == [str(tmp_path / "out.jsonl")]


# ---- parts


def in_parts(store: FileStore | Path, to: Path, rollouts: Any = (), **options: Any) -> Exported:
    return export(store, to, rollouts, **{"format": "jsonl", "part_bytes": 8000, **options})


def ids_in(directory: Path, suffix: str = ".jsonl") -> list[str]:
    """The rollouts in all parts, each as often as it is there."""
    found = []
    for part in sorted(directory.glob("part-*")):
        assert part.name.endswith(suffix)
        found += list(dict.fromkeys(record["rollout_id"] for record in read(part, "rollout")))
    return sorted(found)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_parts_hold_whole_rollouts_each_once(suffix: str, store: FileStore, tmp_path: Path) -> None:
    done = in_parts(store, tmp_path / "parts", format=suffix[1:], by="rollout")
    assert len(done.parts) > 2
    assert sorted(os.path.basename(part) for part in done.parts) == sorted(
        path.name for path in (tmp_path / "parts").iterdir() if path.name != PROGRESS
    )
    assert ids_in(tmp_path / "parts", suffix) == frozen_names()
    again = in_parts(store, tmp_path / "parts", format=suffix[1:], by="rollout")
    assert (again.rollouts, again.already, again.parts) == (0, len(frozen_names()), [])
    assert ids_in(tmp_path / "parts", suffix) == frozen_names()


def test_an_export_goes_on_with_what_is_new_and_names_what_changed(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as made:
        for number in range(4):
            made.put_now(TokenEntry(f"r-{number}", "call", [1], [2], [-0.5]))
            made.freeze_now(f"r-{number}").close()
        options: Any = {"format": "jsonl", "by": "rollout", "part_bytes": 1}
        assert export(made, tmp_path / "parts", **options).rollouts == 4
        made.mark_incomplete_now("r-1", "late")  # a new version
        made.reset_now("r-2")
        made.put_now(TokenEntry("r-2", "call", [1], [3], [-0.5]))
        made.freeze_now("r-2").close()
        made.put_now(TokenEntry("r-4", "call", [1], [2], [-0.5]))
        made.freeze_now("r-4").close()
        done = export(made, tmp_path / "parts", **options)
        assert (done.rollouts, done.already) == (1, 4)
        assert done.changed == {"r-1": "part-00001.jsonl", "r-2": "part-00002.jsonl"}
        assert not done.complete
        assert ids_in(tmp_path / "parts") == [f"r-{number}" for number in range(5)]
        # As the message says: without the part its rollouts are exported again.
        for name in done.changed.values():
            (tmp_path / "parts" / name).unlink()
        done = export(made, tmp_path / "parts", **options)
        assert (done.rollouts, done.changed) == (2, {})
        assert ids_in(tmp_path / "parts") == [f"r-{number}" for number in range(5)]
        (record,) = read(tmp_path / "parts" / "part-00001.jsonl", "rollout")
        assert record["version"] == 2


def test_what_finished_parts_hold_is_not_read_again(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts(store, tmp_path / "parts", ["linear-0", "odd-1"])
    read_ids = []

    def noted(self: FileStore, rollout_id: str, function: Any = FileStore.read_now) -> Any:
        read_ids.append(rollout_id)
        return function(self, rollout_id)

    monkeypatch.setattr(FileStore, "read_now", noted)
    assert in_parts(store, tmp_path / "parts").already == 2
    assert sorted(read_ids) == [name for name in frozen_names() if name not in ("linear-0", "odd-1")]


def test_what_was_exported_and_then_retired_is_not_left_out(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as made:
        for number in range(2):
            made.put_now(TokenEntry(f"r-{number}", "call", [1], [2], [-0.5]))
        made.freeze_now("r-0").close()
        assert in_parts(made, tmp_path / "parts", by="rollout").skipped == {"open": 1}
        for name in ("r-0", "r-1"):
            with made.freeze_now(name) as snapshot:
                made.retire_now(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        done = in_parts(made, tmp_path / "parts", by="rollout")
        assert (done.already, done.skipped, done.rollouts) == (1, {"retired": 1}, 0)
        assert ids_in(tmp_path / "parts") == ["r-0"]
        done = in_parts(made, tmp_path / "parts", "r-0", by="rollout")
        assert (done.already, done.skipped, done.complete) == (1, {}, True)
        assert not export(made, tmp_path / "other", format="npz").already
        assert not (tmp_path / "other").exists()


def test_a_live_store_is_exported_rollout_by_rollout_each_once(tmp_path: Path) -> None:
    names = [f"r-{number:03d}" for number in range(120)]
    with FileStore(tmp_path / "store") as made:

        def work() -> None:
            for number, name in enumerate(names):
                made.put_now(TokenEntry(name, "call", [number], [number, 1], [-0.5, -0.25]))
                made.freeze_now(name).close()

        writer = threading.Thread(target=work)
        writer.start()
        found, rounds, alive = 0, 0, True
        while alive:
            alive = writer.is_alive()  # whether there may be more after this round
            found += export(tmp_path / "store", tmp_path / "parts", format="jsonl", by="rollout").rollouts
            rounds += 1
        writer.join()
    assert found == len(names)
    assert rounds > 1
    assert ids_in(tmp_path / "parts") == names


def test_another_export_into_the_same_parts_is_refused(store: FileStore, tmp_path: Path) -> None:
    in_parts(store, tmp_path / "parts", "linear-0")
    before = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    for options in ({"by": "call"}, {"format": "npz"}, {"untrained": True}, {"models": ["m"]}, {"strict": True}):
        with pytest.raises(InvalidOptionError, match="holds an export with"):
            in_parts(store, tmp_path / "parts", **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(InvalidOptionError, match="other files"):
        in_parts(store, tmp_path / "mine")
    (tmp_path / "parts" / PROGRESS).write_text("{}\nnonsense\n")
    with pytest.raises(InvalidOptionError):
        in_parts(store, tmp_path / "parts")


def test_two_exports_at_once_do_not_mix(store: FileStore, tmp_path: Path) -> None:
    file = WholeFile(str(tmp_path / "out.jsonl"))
    with pytest.raises(BusyError, match="another process"):
        export(store, tmp_path / "out.jsonl")
    file.discard()
    assert not list(tmp_path.iterdir())
    in_parts(store, tmp_path / "parts", "linear-0")
    script = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'rb')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "parts" / PROGRESS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BusyError, match="another process"):
            in_parts(store, tmp_path / "parts")
        other.communicate(b"")


def test_what_another_export_finishes_meanwhile_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got its name after this one opened the file, and before this one locked it."""
    path = tmp_path / "out.jsonl"
    first = WholeFile(str(path))
    first.file.write(b"whole\n")
    first.sync()
    real = fcntl.flock

    def late(fd: Any, operation: int) -> None:
        first.publish()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(BusyError, match="another process"):
        WholeFile(str(path))
    assert path.read_bytes() == b"whole\n"


def test_links_planted_for_an_export_are_not_followed(store: FileStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for plant in (os.symlink, os.link):
        plant(victim, temporary_of(str(tmp_path / "out.jsonl")))
        with pytest.raises(OSError):
            export(store, tmp_path / "out.jsonl")
        os.unlink(temporary_of(str(tmp_path / "out.jsonl")))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / PROGRESS).symlink_to(victim)
    with pytest.raises(OSError):
        in_parts(store, tmp_path / "parts")
    assert victim.read_bytes() == b"precious"


def test_a_last_line_that_a_kill_cut_off_is_no_obstacle(store: FileStore, tmp_path: Path) -> None:
    in_parts(store, tmp_path / "parts", "linear-0", by="rollout")
    with (tmp_path / "parts" / PROGRESS).open("ab") as progress:
        progress.write(b'{"file":"part-000')
    in_parts(store, tmp_path / "parts", "odd-1", by="rollout")
    assert in_parts(store, tmp_path / "parts", by="rollout").already == 2
    assert ids_in(tmp_path / "parts") == frozen_names()


def test_no_part_appears_before_it_is_told_of(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Parts, value: Any, append: Any = Parts._append) -> None:
        if isinstance(value, Part):
            raise OSError(28, "no space")
        append(self, value)

    with monkeypatch.context() as patched:
        patched.setattr(Parts, "_append", full)
        with pytest.raises(OSError, match="no space"):
            in_parts(store, tmp_path / "parts", by="rollout")
    assert os.listdir(tmp_path / "parts") == [PROGRESS]
    in_parts(store, tmp_path / "parts", by="rollout")
    assert ids_in(tmp_path / "parts") == frozen_names()


KILLED = """
import os, signal, sys
from tokcap.transfer import export
at = int(sys.argv[1])
calls = 0

def killing(function):
    def called(*arguments, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return called

# Before everything that the file system may be left in the middle of.
for name in ("fsync", "rename", "ftruncate", "open"):
    setattr(os, name, killing(getattr(os, name)))
from tokcap.transfer import parts, jsonl
jsonl.JsonLines.write = killing(jsonl.JsonLines.write)
parts.Parts._append = killing(parts.Parts._append)
export(sys.argv[2], sys.argv[3], format="jsonl", by="rollout", part_bytes=8000)
"""


def killed_at(point: int, store: Path, to: Path) -> bool:
    """Export in a process that dies at a point; whether it did."""
    command = [sys.executable, "-c", KILLED, str(point), str(store), str(to)]
    status = subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.fixture(scope="module")
def copied(store: FileStore) -> Path:
    return Path(store._layout.root)


@pytest.mark.parametrize("target", ["parts", "out.jsonl"])
def test_an_export_killed_anywhere_and_repeated_has_each_rollout_once(
    target: str, copied: Path, tmp_path: Path
) -> None:
    undisturbed, to = tmp_path / "undisturbed" / target, tmp_path / "killed" / target
    for path in (undisturbed, to):
        path.parent.mkdir()
    export(copied, undisturbed, format="jsonl", by="rollout", part_bytes=8000)
    kills, point = 0, 3
    while killed_at(point, copied, to):
        kills += 1
        if target == "out.jsonl" and to.exists():  # whole, or not at all
            assert to.read_bytes() == undisturbed.read_bytes()
        point += 5 + kills  # ever later, so that a run that goes on gets further
        assert kills < 100
    assert kills > 4
    export(copied, to, format="jsonl", by="rollout", part_bytes=8000)
    if target == "out.jsonl":
        assert to.read_bytes() == undisturbed.read_bytes()
        assert os.listdir(to.parent) == [target]
        return
    found = {path.name: path.read_bytes() for path in to.glob("part-*")}
    assert found == {path.name: path.read_bytes() for path in undisturbed.glob("part-*")}
    assert ids_in(to) == frozen_names()
    assert not list(to.glob(".*"))


def test_a_part_that_was_told_of_and_not_renamed_is_finished(copied: Path, tmp_path: Path) -> None:
    in_parts(copied, tmp_path / "parts", by="rollout")
    last = max((tmp_path / "parts").glob("part-*"))
    data = last.read_bytes()
    last.rename(temporary_of(str(last)))
    done = in_parts(copied, tmp_path / "parts", by="rollout")
    assert done.rollouts == 0
    assert last.read_bytes() == data
    last.write_bytes(data[:-1])  # nothing of ours, and not whole
    assert in_parts(copied, tmp_path / "parts", by="rollout").rollouts > 0
    assert last.read_bytes() == data
