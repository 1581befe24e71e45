"""The scripts that users copy: they use public names only, and tell what is so of every kind of store."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from scripts import (
    drift_rate,
    export_for_trainer,
    masked_rollouts,
    pictures,
    planted_defects,
    rescored_log_probs,
    store_health,
)
from scripts.planted_defects import Planted
from tokcap import FileStore, TokenEntry, build
from tokcap.inspection import open_to_look

from . import recordings
from .looked_at_stores import recorded_store

ROOT = Path(__file__).parent.parent
COPIED = ("masked_rollouts", "rescored_log_probs", "drift_rate", "export_for_trainer", "store_health")
PUBLIC = {
    "tokcap",
    "tokcap.inspection",
    "tokcap.verification",
    "tokcap.trajectory",
    "tokcap.delivery",
    "tokcap.evaluation",
    "tokcap.errors",
}

Main = Callable[[list[str]], int]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_store(tmp_path_factory.mktemp("recorded") / "store")


@pytest.fixture(scope="module")
def practice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Planted]]:
    directory = tmp_path_factory.mktemp("practice") / "store"
    return directory, {planted.name: planted for planted in planted_defects.plant_all(directory, seed=3)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return iter(())


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


# ---- all of them


@pytest.mark.parametrize("script", COPIED)
def test_a_script_uses_public_names_and_what_the_core_needs_only(script: str) -> None:
    used = list(names_of(ROOT / "scripts" / f"{script}.py"))
    assert any(module.startswith("tokcap") for module, _ in used)
    for module, name in used:
        top = module.partition(".")[0]
        assert top in {*sys.stdlib_module_names, "numpy", "tokcap"}, module
        if top == "tokcap":
            assert module in PUBLIC, module
            assert name in import_module(module).__all__, (module, name)


@pytest.mark.parametrize("script", (*COPIED, "planted_defects", "pictures"))
def test_a_script_helps(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    docstring = ast.get_docstring(ast.parse((ROOT / "scripts" / f"{script}.py").read_text()))
    assert docstring is not None
    assert docstring.splitlines()[0] in done.stdout


@pytest.mark.parametrize("script", COPIED)
def test_a_store_that_is_not_there_is_said_so(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main: Main = import_module(f"scripts.{script}").main
    more = {"export_for_trainer": ["-o", str(tmp_path / "out")], "rescored_log_probs": [str(tmp_path / "no.jsonl")]}
    with pytest.raises(SystemExit) as ended:
        main(["--dir", str(tmp_path / "nowhere"), *more.get(script, [])])
    assert ended.value.code == (3 if script == "store_health" else 2)
    assert "nowhere" in "".join(capsys.readouterr())


@pytest.mark.parametrize("script", COPIED)
def test_nothing_is_written_into_the_store(
    script: str, practice: tuple[Path, dict[str, Planted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def everything() -> list[tuple[str, int, int, int]]:
        found = [(path, path.lstat()) for path in sorted(practice[0].rglob("*"))]
        return [(str(path), there.st_ino, there.st_size, there.st_mtime_ns) for path, there in found]

    before = everything()
    template = ["--write-template", str(tmp_path / "ids.jsonl")]
    more = {"export_for_trainer": ["-o", str(tmp_path / "out")], "rescored_log_probs": template}
    main: Main = import_module(f"scripts.{script}").main
    main(["--dir", str(practice[0]), *more.get(script, [])])
    assert everything() == before
    assert capsys.readouterr() is not None


def test_what_a_model_or_a_harness_wrote_moves_no_terminal(
    store_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;evil\x07\u202e\n\x9b31m"
    with FileStore(store_dir) as store:
        for number, ids in enumerate(([1, 2], [1, 2, 3, 4], [1, 2, 9, 4])):
            entry = TokenEntry("r", f"c{number}", ids, [3], [-0.5], model=evil, finish_reason=evil,
                               policy_versions=[(evil, 0, 1)], sampling={"logprobs_mode": evil})  # fmt: skip
            store.begin_call_now("r", f"c{number}")
            store.put_now(entry)
        store.begin_call_now("r", "c9")
        store.settle_call_now("r", "c9", "lost", evil)
        store.finish_now("r", meta={"group": evil})
        store.freeze_now("r").close()
    file = tmp_path / "scored.jsonl"
    file.write_text(json.dumps({"rollout_id": "r", "model_call_id": "c0", "log_probs": [-1.0]}))
    for main, more in (
        (masked_rollouts.main, []),
        (drift_rate.main, []),
        (rescored_log_probs.main, [str(file)]),
        (store_health.main, ["--drift", "0", "--lost", "0", "--unconsumed", "0s"]),
        (export_for_trainer.main, ["-o", str(tmp_path / "out")]),
    ):
        main(["--dir", str(store_dir), *more])
        printed = "".join(capsys.readouterr())
        assert printed
        assert [line for line in printed.split("\n") if not line.isprintable()] == []


# ---- masked rollouts


def test_a_template_that_nobody_has_scored_is_said_to_be_one(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids.jsonl"
    where = ("--dir", str(recorded))
    assert rescored_log_probs.main([*where, "--write-template", str(file), "--rollout", "linear-0"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rescored_log_probs.main([*where, str(file)]) == 1
    assert f"problem: nothing is scored in {file}" in capsys.readouterr().err


def test_masked_rollouts_of_the_recorded_traffic(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert masked_rollouts.main(["--dir", str(recorded), "--json"]) == 0
    found = {line["rollout_id"]: line["ids"] for line in told(capsys)}
    # retry-last-*: the final call twice; retry-mid-*: what the client dropped; edges-0 asks the same thing many times.
    assert set(found) == {"retry-last-0", "retry-last-1", "retry-mid-0", "retry-mid-1", "edges-0"}
    assert (found["retry-last-0"], found["retry-mid-0"]) == ({"ambiguous": 68}, {"abandoned": 36})


def test_masked_rollouts_tells_the_worst_first_and_what_to_do(
    practice: tuple[Path, dict[str, Planted]], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, planted = practice
    assert masked_rollouts.main(["--dir", str(directory)]) == 1  # one trains nothing: its agent used a wrong URL
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.startswith("task-")]
    expected = {"wrong-url", "ambiguous", "aborted", "no-log-probs", "conflict", "lost", "flipped"}
    assert {line[0] for line in lines} == {planted[name].rollout_id for name in expected}
    assert lines[0][0] == planted["wrong-url"].rollout_id
    assert lines[1][0] == planted["ambiguous"].rollout_id
    for words in ("rollout_base_url", "68 ids ambiguous", "x-tokcap-call-id", "damaged", "calls lost: 1"):
        assert words in printed
    assert "unreadable" not in printed  # what is damaged is read all the same


def test_a_rollout_that_is_still_at_work_is_not_masked(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("r", "c")
        assert masked_rollouts.main(["--dir", str(store_dir), "--json"]) == 0
        assert told(capsys) == []
        store.finish_now("r")
        assert masked_rollouts.main(["--dir", str(store_dir), "--json"]) == 1
        assert [line["reasons"] for line in told(capsys)] == [["nothing_recorded"]]


# ---- drift


def test_the_drift_rate_of_the_recorded_traffic(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift_rate.main(["--dir", str(recorded), "--json", "--most", "0.3"]) == 0
    (run,) = told(capsys)
    drifts = 0
    for rollout_id in recordings.names():
        with open_to_look(recorded).read_now(rollout_id) as snapshot:
            built = build(snapshot)
        drifts += sum(not drift.before_answer for drift in built.drifts)
    assert run["drifted_calls"] == drifts == 50
    assert run["by_group"]["token-in"][1] == 0  # prompts given as ids
    assert sum(turns for turns, _ in run["by_turn"].values()) == run["turns"]
    assert sum(run["kinds"].values()) == drifts
    assert drift_rate.main(["--dir", str(recorded), "--most", "0.1"]) == 1
    assert "50 of " in capsys.readouterr().out
    assert drift_rate.main(["--dir", str(recorded), "token-in-*"]) == 0
    assert "0 of " in capsys.readouterr().out


def test_a_directory_that_cannot_be_listed_stops_no_drift_rate(
    store_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(store_dir) as store:
        for name in ("a", "b"):
            store.put_now(TokenEntry(name, "c", [1], [2], [-0.5]))
            store.freeze_now(name).close()
    shard = next(store_dir.glob("rollouts/*/b")).parent
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if path == str(shard):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert drift_rate.main(["--dir", str(store_dir)]) == 1
    said = capsys.readouterr()
    assert "in 1 rollouts" in said.out
    assert f"can't read rollouts/{shard.name}: " in said.err


@pytest.mark.parametrize(
    "command", [["masked_rollouts"], ["drift_rate"], ["store_health"], ["export_for_trainer", "--out", "größe"]]
)
def test_names_are_printed_whatever_the_terminal_takes(command: list[str], store_dir: Path, tmp_path: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(TokenEntry("r", "c", [1], [2], [float("nan")], model="modèle"))
        store.put_now(TokenEntry("r", "d", [1, 2, 3], [4], [-0.5], model="modèle"))
        store.finish_now("r", {"group": "größe"})
        store.freeze_now("r").close()
    (store_dir / "rollouts" / "00").mkdir(exist_ok=True)
    (store_dir / "rollouts" / "00" / "größe-\u6f22").mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{command[0]}.py", *command[1:], "--dir", store_dir],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}, capture_output=True, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.stdout


# ---- re-scored log-probs


def scored(template: Path, change: Callable[[dict[str, Any], list[float | None]], Any], directory: Path) -> list[str]:
    """The lines of a template with the captured log-probs, changed."""
    store, lines = open_to_look(directory), []
    for line in map(json.loads, template.read_text().splitlines()):
        with store.read_now(line["rollout_id"]) as snapshot:
            entries = {(entry.model_call_id, entry.choice_index): entry for entry in snapshot.entries}
        entry = entries[line["model_call_id"], line["choice_index"]]
        assert line["generation_token_ids"] == entry.generation_token_ids.tolist()
        assert line["prompt_token_ids"] == entry.prompt_token_ids.tolist()
        line["log_probs"] = change(line, [None if x != x else x for x in entry.generation_log_probs.tolist()])
        lines.append(json.dumps(line))
    return lines


def test_log_probs_that_were_scored_again_are_compared(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template, file = tmp_path / "ids.jsonl", tmp_path / "scored.jsonl"
    where = ["--dir", str(recorded)]
    assert rescored_log_probs.main([*where, "--write-template", str(template), "--rollout", "linear-*"]) == 0
    file.write_text("\n".join(scored(template, lambda _, same: same, recorded)))
    assert rescored_log_probs.main([*where, str(file), "--json"]) == 0
    *calls, last = told(capsys)
    assert len(calls) == 48
    assert last["sums"]["all"] | {"ids": 0} == {"ids": 0, "mean |d|": 0, "max |d|": 0, "k1": 0, "k3": 0, "over": 0}
    assert last["sums"]["all"]["ids"] == 1423

    def off(line: dict[str, Any], log_probs: list[float | None]) -> list[float | None]:
        if (line["rollout_id"], line["model_call_id"]) == ("linear-3", "call-0002"):
            log_probs[1] = (log_probs[1] or 0.0) - 2.0
        return log_probs

    file.write_text("\n".join(scored(template, off, recorded)))
    assert rescored_log_probs.main([*where, str(file), "--json", "--share", "0"]) == 1
    worst, *_, last = told(capsys)
    assert (worst["call"], worst["worst"][0]) == ("linear-3 call-0002", [1, pytest.approx(2.0)])
    assert worst["k1"] * worst["ids"] == pytest.approx(2.0)
    assert worst["k3"] * worst["ids"] == pytest.approx(np.exp(-2.0) - 1 + 2.0)
    assert last["sums"]["all"]["over"] * last["sums"]["all"]["ids"] == pytest.approx(1)


def test_scores_that_belong_to_nothing_are_problems(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = recordings.load("linear-1").calls[0].entries
    log_probs = entry.generation_log_probs
    file = tmp_path / "scored.npz"
    np.savez(
        file,
        rollout_id=np.array(["linear-1", "linear-1", "linear-1", "other"]),
        model_call_id=np.array(["call-0000", "call-0001", "call-0099", "call-0000"]),
        choice_index=np.zeros(4, np.int64),
        log_probs=np.concatenate([log_probs, [-1.0], [-1.0], [-1.0]]),
        log_probs_offsets=np.cumsum([0, len(log_probs), 1, 1, 1]),
    )
    assert rescored_log_probs.main(["--dir", str(recorded), str(file)]) == 1
    shown = capsys.readouterr()
    assert "1 calls compared" in shown.out
    assert "call-0001: 1 scores for" in shown.err
    assert "linear-1 call-0099 is not in the store" in shown.err
    assert "other call-0000 is not in the store" in shown.err


def test_differences_are_told_by_policy_version_and_mode(
    tmp_path: Path, store_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(store_dir) as store:
        sampling = {"logprobs_mode": "raw_logprobs", "temperature": 0.7}
        versions = [("7", 0, 1), ("8", 1, 3)]
        store.put_now(
            TokenEntry("r", "c", [1], [2, 3, 4], [-1.0, -2.0, None], policy_versions=versions, sampling=sampling)
        )
    file = tmp_path / "scored.jsonl"
    file.write_text(json.dumps({"rollout_id": "r", "model_call_id": "c", "log_probs": [-1.0, -2.25, -3.0]}))
    assert rescored_log_probs.main(["--dir", str(store_dir), str(file), "--json"]) == 0
    _, last = told(capsys)
    assert last["sums"]["policy version '7'"]["max |d|"] == 0.0
    assert last["sums"]["policy version '8'"]["max |d|"] == 0.25
    assert last["sums"]["policy version '8'"]["ids"] == 1
    assert last["notes"]["ids have no log-prob on one side"] == 1
    assert any("are not of the sampling distribution" in note and "0.7" in note for note in last["notes"])


# ---- export for a trainer


def test_a_trainer_gets_every_trained_id_once(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export_for_trainer.main(["--dir", str(recorded), "-o", str(out), "--batch", "16", "--pad", "9"]) == 0
    assert "rollouts left out: none" in capsys.readouterr().out
    trained, weights = 0, dict.fromkeys(recordings.names(), 0.0)
    expected = [one for name in recordings.names() for one in trajectories(recorded, name)]
    found = iter(expected)
    for path in sorted(out.iterdir()):
        with np.load(path) as file:
            batch = dict(file)
        width = batch["prompts"].shape[1]
        for row, rollout_id in enumerate(batch["rollout_id"]):
            one = next(found)
            there = batch["attention_mask"][row] == 1
            assert (str(rollout_id), str(batch["uid"][row])) == (one.rollout_id, one.group)
            assert batch["input_ids"][row][there].tolist() == one.token_ids.tolist()
            assert set(batch["input_ids"][row][~there].tolist()) <= {9}
            assert batch["position_ids"][row][there].tolist() == list(range(len(one)))
            mask = batch["response_mask"][row] == 1
            assert batch["responses"][row][mask].tolist() == one.token_ids[one.loss_mask].tolist()
            assert np.array_equal(
                batch["rollout_log_probs"][row][mask], one.log_probs[one.loss_mask].astype(np.float32)
            )
            assert not batch["rollout_log_probs"][row][~mask].any()
            assert not one.loss_mask[: int(there[:width].sum())].any()
            trained += int(mask.sum())
            weights[one.rollout_id] += float(batch["weights"][row])
    assert next(found, None) is None
    assert trained == 6572
    assert list(weights.values()) == pytest.approx([1.0] * 25)


def trajectories(directory: Path, rollout_id: str) -> Any:
    with open_to_look(directory).read_now(rollout_id) as snapshot:
        return build(snapshot).trained


def test_advantages_count_a_rollout_once_however_it_splits(
    practice: tuple[Path, dict[str, Planted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, planted = practice
    out = tmp_path / "out"
    assert export_for_trainer.main(["--dir", str(directory), "-o", str(out)]) == 0
    assert "1 masked, 1 open, 1 retired" in capsys.readouterr().out
    with np.load(out / "batch-00000.npz") as file:
        rollouts, groups = file["rollout_id"].tolist(), file["uid"].tolist()
        rewards, advantages = file["rewards"], file["advantages"]
    assert planted["retired"].rollout_id not in rollouts
    assert rollouts.count(planted["drift"].rollout_id) == 2  # it split, with the same advantage
    for group in set(groups):
        frozen = {name for name in (f"{group}-{n}" for n in range(4)) if state(directory, name) == "frozen"}
        all_rewards = [float(name[-1] in "02") for name in frozen]
        for position in (i for i, other in enumerate(groups) if other == group):
            wanted = (rewards[position] - np.mean(all_rewards)) / (np.std(all_rewards) + 1e-6)
            assert advantages[position] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(SystemExit):
        export_for_trainer.main(["--dir", str(directory), "-o", str(out)])  # which is not empty any more


def test_a_rollout_without_a_reward_has_no_advantage_and_moves_no_other(
    store_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(store_dir) as store:
        for name, meta in (("g-0", {"reward": 1.0}), ("g-1", {}), ("g-2", {"reward": 0})):
            store.put_now(TokenEntry(name, "c", [1, 2], [3], [-0.5]))
            store.finish_now(name, meta=meta)
            store.freeze_now(name).close()
    assert export_for_trainer.main(["--dir", str(store_dir), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("3 sequences in 1 files")
    with np.load(tmp_path / "out" / "batch-00000.npz") as file:
        assert file["advantages"].tolist() == [pytest.approx(1, abs=1e-4), pytest.approx(float("nan"), nan_ok=True),
                                               pytest.approx(-1, abs=1e-4)]  # fmt: skip


def state(directory: Path, rollout_id: str) -> str:
    return open_to_look(directory).stat_now(rollout_id).state


# ---- health


def problems(capsys: pytest.CaptureFixture[str]) -> tuple[str, set[tuple[str, str]], str]:
    (line,) = told(capsys)
    found = {(problem["level"], problem["check"]) for problem in line["problems"]}
    return line["level"], found, " ".join(problem["message"] for problem in line["problems"])


def health(directory: Path, *more: str) -> int:
    return store_health.main(["--dir", str(directory), "--json", *more])


NO_SHARES = ("--masked", "1", "--lost", "1", "--drift", "1")


def test_a_store_that_is_well(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert health(recorded, "--masked", "0.1", "--lost", "0.05") == 0
    assert problems(capsys) == ("OK", set(), "")
    assert store_health.main(["--dir", str(recorded), "--lost", "0.05"]) == 0
    assert capsys.readouterr().out.startswith("TOKCAP OK: 0 problems; 25 rollouts: 0 open, 25 frozen")


def test_damage_is_critical(practice: tuple[Path, dict[str, Planted]], capsys: pytest.CaptureFixture[str]) -> None:
    directory, planted = practice
    assert health(directory, *NO_SHARES) == 2
    level, found, messages = problems(capsys)
    assert level == "CRITICAL"
    assert found == {("CRITICAL", "damage"), ("WARNING", "open call")}
    assert f"/{planted['flipped'].rollout_id}/" in messages
    assert "damage: damage" not in messages and not messages.startswith("damage: ")
    assert "call-0004, call-0005, call-0006, call-0007" in messages  # what it costs
    assert f"{planted['died'].rollout_id} {planted['died'].call}: its server is gone" in messages


def test_verify_finds_damage_that_rows_dont_show(
    practice: tuple[Path, dict[str, Planted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(practice[0], directory)
    (segment,) = directory.glob(f"rollouts/*/{practice[1]['flipped'].rollout_id}/*/v1/*.seg")
    shutil.rmtree(segment.parent.parent.parent)
    assert health(directory, *NO_SHARES) == 1
    assert problems(capsys)[1] == {("WARNING", "open call")}
    (manifest,) = directory.glob(f"rollouts/*/{practice[1]['lost'].rollout_id}/*/v1/manifest")
    data = bytearray(manifest.read_bytes())
    data[-1] ^= 1  # it is made again from the segments when the snapshot is opened
    manifest.write_bytes(data)
    assert health(directory, "--verify", *NO_SHARES) == 2
    _, found, messages = problems(capsys)
    assert ("CRITICAL", "damage") in found
    assert str(manifest) in messages


def test_a_rollout_that_cant_be_read_is_critical_and_stops_no_other(
    practice: tuple[Path, dict[str, Planted]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(practice[0], directory)
    rollout_id = practice[1]["lost"].rollout_id
    (path,) = directory.glob(f"rollouts/*/{rollout_id}")
    shutil.rmtree(path)
    path.write_text("a file")
    assert health(directory, *NO_SHARES) == 2
    _, found, messages = problems(capsys)
    assert ("CRITICAL", "unreadable") in found
    assert rollout_id in messages
    assert ("CRITICAL", "damage") in found
    assert masked_rollouts.main(["--dir", str(directory), "--json"]) == 1
    assert rollout_id in {line["rollout_id"] for line in told(capsys) if line["state"] == "unreadable"}
    assert drift_rate.main(["--dir", str(directory), "--json"]) == 1
    assert set(told(capsys)[0]["unreadable"]) == {rollout_id}


def test_what_waits_too_long_and_shares_are_warnings(
    practice: tuple[Path, dict[str, Planted]], capsys: pytest.CaptureFixture[str]
) -> None:
    at_once = ("--unfinished", "0s", "--unconsumed", "0s", "--tombstones", "0s")
    assert health(practice[0], *at_once, "--masked", "0", "--lost", "0", "--drift", "0") == 2
    _, found, messages = problems(capsys)
    assert {check for _, check in found} >= {"unfinished", "unconsumed", "tombstone", "masked", "lost", "drift"}
    assert ("CRITICAL", "masked") in found
    assert "1 of 15 ended rollouts" in messages  # 14 frozen and 1 retired; the other one is open


def test_a_live_store_with_an_open_call_is_well(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("live-1", "call-1")
        assert health(store_dir) == 0
        assert problems(capsys)[1] == set()
        assert health(store_dir, "--open-call", "0s") == 1
        assert problems(capsys)[2].startswith("live-1 call-1: open for ")
    assert health(store_dir) == 1
    assert problems(capsys)[2] == "live-1 call-1: its server is gone"


def test_scripts_look_while_a_writer_is_at_work(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = recordings.load("linear-5").entries
    going, begun = threading.Event(), threading.Event()
    going.set()

    def write() -> None:
        with FileStore(store_dir, require_intent=True) as store:
            for number in range(10_000):
                if number > 2:
                    begun.set()
                if not going.is_set():
                    break
                for entry in entries:
                    rollout_id = f"live-{number}"
                    mine = TokenEntry(rollout_id, entry.model_call_id, entry.prompt_token_ids,
                                      entry.generation_token_ids, entry.generation_log_probs)  # fmt: skip
                    store.begin_call_now(rollout_id, entry.model_call_id)
                    store.put_now(mine)
                store.finish_now(rollout_id, meta={"reward": 1.0})
                store.freeze_now(rollout_id).close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(60)
        for _ in range(3):
            assert health(store_dir) == 0, capsys.readouterr().out
            assert masked_rollouts.main(["--dir", str(store_dir)]) == 0
            assert drift_rate.main(["--dir", str(store_dir)]) == 0
    finally:
        going.clear()
        writer.join()
    assert "drifted (0.0%)" in capsys.readouterr().out


# ---- pictures


def test_a_picture_of_a_terminal_is_whole_and_asks_no_network() -> None:
    picture = pictures.as_svg("plain <&>\n\x1b[31mred\x1b[0m\n", "tokcap show x")
    text = "".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    for words in ("tokcap show x", "plain <&>", "red"):
        assert words in text
    assert "url(http" not in picture
    assert "@font-face" not in picture


def test_what_a_command_prints_on_a_terminal_is_seen() -> None:
    code = "import os, sys; print(sys.stdout.isatty(), os.environ['COLUMNS'])"
    assert pictures.on_a_terminal([sys.executable, "-c", code], 77) == "True 77\n"
    with pytest.raises(SystemExit, match="status 4"):
        pictures.on_a_terminal([sys.executable, "-c", "import sys; sys.exit(4)"])
