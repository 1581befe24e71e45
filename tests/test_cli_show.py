"""`tokcap show` and `tokcap calls`: on recorded, damaged, open, retired and huge rollouts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import recordings
from tests.damage_by_hand import one, replace_by_file
from tests.looked_at_stores import recorded_store
from tokcap import FileStore, TokenEntry
from tokcap.command import main

ROOT = Path(__file__).parent.parent
HOSTILE = "\x1b[31mred\x1b]0;title\x07\nnext\tline\u202e\ud800\u2028"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield recorded_store(tmp_path_factory.mktemp("recorded") / "store")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def entry(rollout: str, call: str, prompt: list[int], answer: list[int], **fields: Any) -> TokenEntry:
    return TokenEntry(rollout, call, prompt, answer, [-0.5] * len(answer), **({"model": "m"} | fields))


def on_a_terminal(*arguments: str, columns: int = 200) -> str:
    """What somebody sees who calls the command."""
    theirs, ours = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tokcap.command", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=ours,
        stderr=ours,
    )
    os.close(ours)
    seen = b""
    while True:
        try:
            part = os.read(theirs, 65536)
        except OSError:  # it is how a terminal says that nobody writes any more
            break
        if not part:
            break
        seen += part
    os.close(theirs)
    assert process.wait(60) == 0, seen
    return seen.decode()


# ---- show


def test_a_sub_agent_is_shown_as_a_conversation_of_its_own(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "show", "sub-agent-0", "--dir", recorded)
    assert (status, err) == (0, "")
    assert "sub-agent-0  frozen, version 1, finished" in out
    lines = out.splitlines()
    places = [next(i for i, line in enumerate(lines) if f"call-000{n}" in line) for n in (0, 1, 4, 5, 2, 3)]
    assert places == sorted(places)
    assert "conversation of 4 calls" in out and "conversation of 2 calls" in out
    assert "begins another conversation: only its first 6 ids are those of #2" in lines[places[4]]
    assert "drifted at 179 from #5: keeps 22 of its ids, lost 19" in lines[places[3]]
    assert "2 drifted turns" in out


def test_what_is_not_trained_is_said_with_advice_once(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "show", "retry-mid-0", "--dir", recorded)
    assert status == 0
    assert "not trained: abandoned, the client went on with #3" in out
    assert out.count("Usually: the client asked again") == 1
    assert "abandoned (36 ids)" in out
    indented = [line for line in out.splitlines() if line.startswith("│  └─ ")]
    assert [line.split()[2] for line in indented] == ["#2", "#5"]


@pytest.mark.parametrize("name", recordings.names())
def test_every_call_of_every_recorded_rollout_is_shown(
    recorded: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    status, out, err = run(capsys, "show", name, "--dir", recorded)
    assert (status, err) == (0, "")
    for call in recordings.load(name).calls:
        assert (f" {call.model_call_id} " in out) == call.generates
    status, out, _ = run(capsys, "show", name, "--dir", recorded, "--json")
    shown = json.loads(out)
    assert (status, shown["rollout_id"], shown["state"]) == (0, name, "frozen")
    assert sum(call["trained"] for call in shown["calls"]) == shown["metrics"]["trained"]
    assert sum(trajectory["trained"] for trajectory in shown["trajectories"]) == shown["metrics"]["trained"]
    assert set(shown["advice"]) >= set(shown["reasons"])


def test_lost_and_open_calls_damage_and_late_notes_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as store:
        for call, prompt in (("one", [1]), ("two", [1, 2, 3, 4]), ("three", [9, 9])):
            store.begin_call_now("r", call)
            store.put_now(entry("r", call, prompt, [2, 3], output_items=[{"text": "x" * 200}]))
        store.begin_call_now("r", "gone")
        store.settle_call_now("r", "gone", "lost", f"no ids: {HOSTILE}")
        store.begin_call_now("r", "waiting")
        store.freeze_now("r").close()
        store.note_delivery_now("r", "one", "full")
        store.begin_call_now("killed", "only")  # as a process leaves it that dies now
        status, out, _ = run(capsys, "show", "killed", "--dir", tmp_path / "store")
        assert status == 0
        assert "killed  open, not finished by its owner" in out
        assert "only  open: it began and nothing was said of it since" in out
    (segment,) = (tmp_path / "store").rglob("v1/*.seg")
    data = bytearray(segment.read_bytes())
    data[data.rindex(b"x" * 50)] ^= 1  # in the record of `three`, the last one
    segment.write_bytes(data)
    status, out, err = run(capsys, "show", "r", "--dir", tmp_path / "store")
    assert (status, err) == (0, "")
    assert "gone" in out and "lost: no ids: \\x1b[31mred\\x1b]0;title\\x07\\nnext\\tline\\u202e" in out
    assert "open: it began" in out
    assert "incomplete" in out and "damage" in out and segment.name[:6] in out
    assert "three" in out and "nothing tells where these lie" in out
    assert "lost_call" in out
    assert "late         call one: delivered: full" in out
    assert "\x1b" not in out


def test_the_advice_on_a_call_that_a_dead_server_left_open_names_a_command_that_lists_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with FileStore(root) as store:
        store.begin_call_now("r", "one")
        store.put_now(entry("r", "one", [1], [2, 3]))
        store.begin_call_now("r", "cut-short")
        _, out, _ = run(capsys, "show", "r", "--dir", root)
        (command,) = re.findall("`tokcap (calls [^`]*)`", " ".join(out.split()))
        status, out, err = run(capsys, *command.split(), "--dir", root)
    assert (status, err) == (0, "")
    assert [line.split("\t")[2] for line in out.splitlines()[1:]] == ["cut-short"]


def test_a_call_whose_record_is_damaged_is_not_said_to_run_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with FileStore(root) as store:
        for call, prompt in (("one", [1]), ("two", [1, 2, 3, 4]), ("three", [1, 2, 3, 4, 2, 3])):
            store.begin_call_now("r", call)
            store.put_now(entry("r", call, prompt, [2, 3], finish_reason=f"finish-{call}"))
        store.freeze_now("r").close()
    (segment,) = root.glob("rollouts/*/r/*/v1/*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(b"finish-two")] ^= 1
    segment.write_bytes(data)
    for verb in ("show", "calls"):
        status, out, _ = run(capsys, verb, "r", "--dir", root)
        lines = [line for line in out.splitlines() if " two " in line or "\ttwo\t" in line]
        assert status == 0 and len(lines) == 1
        assert "open" in lines[0] and "its record may have been in the damaged bytes" in lines[0]
        (lost,) = [line for line in out.splitlines() if "(nameless)" in line]
        assert f"v1/{segment.name}: bytes " in lost and str(tmp_path) not in lost
    assert "`tokcap verify r` what is damaged" in run(capsys, "show", "r", "--dir", root)[1]
    assert "in the damaged bytes" in run(capsys, "cat", "r", "two", "--dir", root)[1]


def test_what_is_in_the_way_of_a_rollout_is_said_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with FileStore(root) as store:
        for name in ("file", "link"):
            store.put_now(entry(name, "one", [1], [2]))
    replace_by_file(one("rollouts/*/file", root))
    link = one("rollouts/*/link", root)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        status, out, err = run(capsys, "show", name, "--dir", root)
        assert (status, out) == (4, "")
        assert "a file, or a link, is where a directory belongs; see tokcap verify" in err
        assert "tried again" not in err


def test_a_rollout_where_nobody_looks_for_it_is_not_offered_as_its_own_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "store"
    with FileStore(root) as store:
        for name in ("task-1", "task-2"):
            store.begin_call_now(name, "c")
    (rollout,) = root.glob("rollouts/*/task-1")
    rollout.parent.rename(root / "rollouts" / "moved")
    status, _, err = run(capsys, "show", "task-1", "--dir", root)
    assert status == 3
    assert "tokcap verify says where it belongs" in err and "did you mean" not in err
    _, out, _ = run(capsys, "ls", "--dir", root)
    (row,) = [line.split("\t") for line in out.splitlines() if line.startswith("task-1\t")]
    assert (row[1], row[5]) == ("unreadable", "")


def test_the_calls_that_show_counts_are_those_of_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(tmp_path / "store") as store:
        store.put_now(entry("r", "a", [1], [2]))
        store.put_now(entry("r", "b", [1], [3]))
        store.mark_incomplete_now("r")
        store.freeze_now("r").close()
    (segment,) = (tmp_path / "store").glob("rollouts/*/r/*/v1/*.seg")
    with segment.open("r+b") as file:
        data = bytearray(file.read())
        data[data.rindex(b"tokcapOK") - 9] ^= 1  # of the last record, which is the loss
        file.seek(0)
        file.write(data)
    (row,) = map(json.loads, run(capsys, "ls", "--json", "--dir", tmp_path / "store")[1].splitlines())
    assert row["damage"] and row["outcomes"] == {"recorded": 2}
    assert "calls        2: 2 recorded\n" in run(capsys, "show", "r", "--dir", tmp_path / "store")[1]


def test_a_retired_rollout_says_when_and_which_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(tmp_path / "store") as store:
        store.put_now(entry("r", "one", [1], [2]))
        with store.freeze_now("r") as snapshot:
            assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=1)
        store.mark_incomplete_now("r", "straggler")
    status, out, _ = run(capsys, "show", "r", "--dir", tmp_path / "store")
    assert status == 0
    assert "retired, version 1" in out and snapshot.snapshot_id in out and " ago" in out
    assert "late         call straggler: lost" in out
    status, out, _ = run(capsys, "show", "r", "--dir", tmp_path / "store", "--json")
    shown = json.loads(out)
    assert (shown["state"], shown["version"], shown["snapshot_id"]) == ("retired", 1, snapshot.snapshot_id)
    assert shown["retired_at"] > 1e9 and len(shown["late"]) == 1


def test_a_rollout_that_is_not_there_is_not_there_and_near_names_are_told(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "show", "sub-agent", "--dir", recorded)
    assert (status, out) == (3, "")
    assert "there is no rollout sub-agent" in err and "sub-agent-0 or sub-agent-1" in err
    assert run(capsys, "show", "no id!", "--dir", recorded)[0] == 2
    assert run(capsys, "show", "x", "--dir", recorded / "absent")[0] == 3


def test_what_a_record_holds_never_reaches_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as store:
        hostile: dict[str, Any] = {
            "finish_reason": HOSTILE,
            "response_id": HOSTILE,
            "model": HOSTILE,
            "sampling": {HOSTILE: HOSTILE},
        }
        hostile |= {"policy_versions": [(HOSTILE, 0, 1)], "extra": {HOSTILE: HOSTILE}, "output_items": [{"t": HOSTILE}]}
        store.put_now(entry("r", "one", [1], [2], pieces=[HOSTILE.encode("utf-8", "surrogatepass")], **hostile))
        store.finish_now("r", meta={HOSTILE: HOSTILE})
        store.freeze_now("r").close()
    verbs = ["show", "r"], ["calls"], ["cat", "r", "1"]
    for arguments in (*verbs, ["cat", "r", "1", "--text"], *([*verb, "--json"] for verb in verbs)):
        status, out, err = run(capsys, *arguments, "--dir", tmp_path / "store")
        assert (status, err) == (0, "")
        assert not set(out) & set("\x1b\x07\u202e\ud800\u2028")
        if arguments[-1] == "--json":
            json.loads(out)


def test_on_a_terminal_long_chains_are_shortened_and_all_of_it_is_there_with_all(tmp_path: Path) -> None:
    store_directory = str(tmp_path / "store")
    with FileStore(store_directory) as store:
        prompt = [1]
        for number in range(60):
            store.put_now(entry("r", f"call-{number:02}", prompt, [2, 3]))
            prompt = [*prompt, 2, 3, 4]
    seen = on_a_terminal("show", "r", "--dir", store_directory)
    assert "55 calls that only continue" in seen
    assert "call-02" in seen and "call-30" not in seen and "call-59" in seen
    assert "call-30" in on_a_terminal("show", "r", "--dir", store_directory, "--all")


def test_a_drifted_turn_is_classed_by_what_other_rollouts_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as store:
        for call, prompt, answer in (("a", [1], [3, 4]), ("b", [1, 5, 8], [6])):
            store.begin_call_now("r", call)
            pieces = {3: b"y", 4: b"es", 6: b"!"}
            store.put_now(entry("r", call, prompt, answer, pieces=[pieces[token] for token in answer]))
        store.freeze_now("r").close()
    out = run(capsys, "show", "r", "--dir", tmp_path / "store")[1]
    assert "drifted at 1 from #1: keeps 0 of its ids, lost 2 (how is unknown)" in out
    with FileStore(tmp_path / "store") as store:
        store.put_now(entry("another", "c", [9], [5], pieces=[b"yes"]))
    out = run(capsys, "show", "r", "--dir", tmp_path / "store")[1]
    assert "lost 2 (retokenised)" in out
    for verb in (("calls",), ("calls", "r"), ("cat", "r", "b")):
        (told,) = [
            call
            for call in map(json.loads, run(capsys, *verb, "--json", "--dir", tmp_path / "store")[1].splitlines())
            if call["name"] == "b"
        ]
        assert (told["drift"]["kind"], "lost 2 (retokenised)" in told["tie"]) == ("retokenised", True), verb
    assert "lost 2 (retokenised)" in run(capsys, "cat", "r", "b", "--dir", tmp_path / "store")[1]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("show", "calls", "cat", "diff", "drift"):
        status, out, _ = run(capsys, verb, "--help")
        assert status == 0 and "Examples:" in out and f"tokcap {verb} " in out


# ---- calls


def rows_of(out: str) -> list[dict[str, str]]:
    head, *rows = (line.split("\t") for line in out.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_calls_are_one_a_line_with_the_reason_of_a_loss(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "calls", "edges-0", "retry-*", "--dir", recorded)
    rows = rows_of(out)
    assert status == 0
    assert {row["ROLLOUT"] for row in rows} == {"edges-0", "retry-last-0", "retry-last-1", "retry-mid-0", "retry-mid-1"}
    lost = {row["CALL"]: row["REASON"] for row in rows if row["OUTCOME"] == "lost"}
    assert lost["call-0003"] == "no token ids asked for"
    abandoned = next(row for row in rows if row["VERDICT"] == "abandoned")
    assert abandoned["REASON"] == "holds an answer that the client did not go on with"


def test_calls_are_filtered(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(*options: str) -> list[dict[str, Any]]:
        status, out, _ = run(capsys, "calls", *options, "--dir", recorded, "--json")
        assert status == (0 if out else 1)
        return [json.loads(line) for line in out.splitlines()]

    everything = found()
    assert found("--outcome", "lost", "--outcome", "no_generation") == [
        call for call in everything if call["outcome"] in ("lost", "no_generation")
    ]
    assert found("--verdict", "ambiguous") == [call for call in everything if call["verdict"] == "ambiguous"]
    assert found("--drifted") == [call for call in everything if call["relation"] == "drifted"]
    assert len(found("--drifted")) == 50
    assert found("--unknown-log-probs") == [call for call in everything if call["unknown_log_probs"]]
    assert found("--unknown-log-probs") and not found("--model", "another")
    assert found("--model", "smollm2") == [call for call in everything if call["relation"] != "unrecorded"]
    assert found("--model", "smol*", "--model", "none") == found("--model", "smollm2")
    assert len(found("--limit", "3")) == 3


def test_one_rollout_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(tmp_path / "store") as store:
        for name in ("a", "b", "c"):
            store.put_now(entry(name, "one", [1], [2]))
            store.freeze_now(name).close()
    (path,) = (tmp_path / "store" / "rollouts").glob("*/b")
    (path / ("0" * 32)).mkdir()  # a second incarnation
    status, out, err = run(capsys, "calls", "--dir", tmp_path / "store")
    rows = {row["ROLLOUT"]: row for row in rows_of(out)}
    assert (status, err) == (4, "")
    assert (rows["a"]["OUTCOME"], rows["b"]["OUTCOME"], rows["c"]["OUTCOME"]) == ("recorded", "unreadable", "recorded")
    assert "two incarnations" in rows["b"]["REASON"]
    status, out, err = run(capsys, "calls", "b", "--dir", tmp_path / "store")
    assert (status, err, rows_of(out)[0]["OUTCOME"]) == (4, "", "unreadable")
    status, _, err = run(capsys, "show", "b", "--dir", tmp_path / "store")
    assert status == 4 and "two incarnations" in err
    status, out, _ = run(capsys, "drift", "--dir", tmp_path / "store", "--json")
    assert status == 4 and [json.loads(line).get("rollout_id") for line in out.splitlines()] == ["b", None]


def test_nothing_that_matches_is_no(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "calls", "--outcome", "conflict", "--dir", recorded)
    assert (status, err) == (1, "tokcap: no call matches\n")
    assert run(capsys, "calls", "absent", "--dir", recorded)[0] == 3
    assert run(capsys, "calls", "--limit", "-1", "--dir", recorded)[0] == 2


def test_an_open_rollout_without_anything_recorded_is_masked_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as store:
        store.begin_call_now("fresh", "a")
    for verb in ("ls", "show"):
        status, out, _ = run(capsys, verb, "fresh", "--dir", tmp_path / "store", "--json")
        assert (status, json.loads(out)["masked"]) == (0, False), verb


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_has_seen_enough_is_no_failure(recorded: Path, unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tokcap.command", "calls", "--dir", str(recorded)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)
    process.stderr.close()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_write_is_escaped(tmp_path: Path, encoding: str) -> None:
    text = "caf\u00e9 \u20ac \U0001f600"
    with FileStore(tmp_path / "store") as store:
        store.put_now(entry("r", "a", [1], [2], pieces=[text.encode()]))
        store.put_now(entry("r", "b", [1, 3], [2], pieces=[text.encode()]))

    def told(*arguments: str) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "tokcap.command", *arguments, "--dir", str(tmp_path / "store")],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    assert told("show", "r")
    assert text.encode(encoding, "backslashreplace") in told("cat", "r", "a")
    assert [json.loads(line)["text"] for line in told("tail", "--json").decode("ascii").splitlines()] == [text, text]


def test_without_a_standard_output_it_is_quiet(recorded: Path) -> None:
    for verb in ("ls", "show linear-0"):
        command = f"exec {sys.executable} -m tokcap.command {verb} --dir {recorded} >&-"
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
