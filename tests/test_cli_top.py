"""`tokcap tail` and `tokcap top` on a store that writers are at work on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokcap import FileStore, TokenEntry
from tokcap.command import main
from tokcap.inspection import following
from tokcap.inspection.events import CallEvent, last_calls
from tokcap.inspection.following import Disk, Follower
from tokcap.inspection.pulse import Pulse

from .looked_at_stores import recorded_store

PATIENCE_S = 60.0
"""No test is about speed."""


def entry(rollout_id: str, call: str, sampled: int = 2, **fields: Any) -> TokenEntry:
    return TokenEntry(rollout_id, call, [1, 2, 3], list(range(sampled)), [-0.5] * sampled, **fields)


def told(events: list[CallEvent]) -> list[tuple[str, str, str]]:
    return [(event.rollout_id, event.model_call_id, event.outcome) for event in events]


def until(follower: Follower, count: int) -> list[CallEvent]:
    """Look until so many calls were told."""
    found: list[CallEvent] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += follower.look()
    return found


# ---- following


def test_each_call_is_told_once_when_it_ends(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("before", "a"))
        follower = Follower(FileStore(store_dir, read_only=True))
        assert follower.look() == []
        store.begin_call_now("r", "a")
        assert follower.look() == []
        store.put_now(entry("r", "a", pieces=[b"He", b"llo"]))
        store.settle_call_now("r", "b", "aborted", "client went away")
        first, second = until(follower, 2)
        assert (first.prompt, first.sampled, first.mean_log_prob, first.text) == (3, 2, -0.5, "Hello")
        assert told([first, second]) == [("r", "a", "recorded"), ("r", "b", "aborted")]
        assert second.detail == "client went away"
        store.put_now(entry("before", "b"))
        assert told(until(follower, 1)) == [("before", "b", "recorded")]
        assert follower.look() == follower.look() == []


def test_following_survives_freeze_retire_and_reset(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        follower = Follower(FileStore(store_dir, read_only=True))
        store.put_now(entry("r", "a"))
        with store.freeze_now("r") as snapshot:
            assert told(until(follower, 1)) == [("r", "a", "recorded")]
            store.mark_incomplete_now("r", "late")
            assert told(until(follower, 1)) == [("r", "late", "lost")]
            assert follower.states() == {"frozen": 1}
            assert store.retire_now("r", snapshot_id=snapshot.snapshot_id, version=2)
        assert follower.look() == []
        assert follower.states() == {"retired": 1}
        store.reset_now("r")
        follower.look()
        assert follower.states() == {}
        store.put_now(entry("r", "a"))
        assert told(until(follower, 1)) == [("r", "a", "recorded")]
        assert follower.states() == {"open": 1}


def test_a_look_reads_no_more_than_it_may(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_BYTES_A_LOOK", 1)
    with FileStore(store_dir) as store:
        follower = Follower(FileStore(store_dir, read_only=True))
        for number in range(5):
            store.put_now(entry(f"r-{number}", "a"))
        first = follower.look()
        assert len(first) == 1 and follower.is_behind
        found = first + until(follower, 4)
        assert sorted(told(found)) == [(f"r-{number}", "a", "recorded") for number in range(5)]


def test_what_cannot_be_read_stops_nothing(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("good", "a"))
        store.put_now(entry("bad", "a"))
        store.freeze_now("bad").close()
        incarnation = next(store_dir.glob("rollouts/*/bad/*"))
        (incarnation.parent / ("0" * 32) / "v1").mkdir(parents=True)
        (incarnation.parent.parent / "no id at all").mkdir()
        follower = Follower(FileStore(store_dir, read_only=True), since=0.0)
        assert told(until(follower, 1)) == [("good", "a", "recorded")]
        assert set(follower.unreadable) == {"bad", "no id at all"}
        assert follower.states() == {"open": 1, "unreadable": 2}


def test_the_last_calls_are_those_that_ended_last(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        order = [(f"r-{number % 3}", f"call-{number}") for number in range(10)]
        for rollout, call in order:
            store.put_now(entry(rollout, call))
        store.freeze_now("r-1").close()
    looking = FileStore(store_dir, read_only=True)
    assert [(one.rollout_id, one.model_call_id) for one in last_calls(looking, 4)] == order[-4:]
    assert len(last_calls(looking, 100)) == 10
    assert last_calls(looking, 0) == []


def test_open_calls_of_the_dead_are_told_from_those_of_the_living(store_dir: Path) -> None:
    child = os.fork()
    if not child:
        FileStore(store_dir).begin_call_now("r", "dead")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    with FileStore(store_dir) as store:
        store.begin_call_now("r", "alive")
        pulse = Pulse(FileStore(store_dir, read_only=True))
        pulse.look()
        frame = pulse.frame()
        assert {call.model_call_id: call.alive for call in frame.oldest_open} == {"dead": False, "alive": True}
        assert (frame.open_calls, frame.dead_calls) == (2, 1)
        assert frame.oldest_open[0].model_call_id == "dead"
        ages = [call.age_s for call in frame.oldest_open]
        assert ages[0] is not None and ages[1] is not None and ages[0] > ages[1] > 0
        store.put_now(entry("r", "alive"))
        pulse.look()
        assert [call.model_call_id for call in pulse.frame().oldest_open] == ["dead"]
    pulse.look()


def test_calls_that_a_freeze_left_open_are_no_open_calls(store_dir: Path) -> None:
    """Nobody waits for them any more, whoever began them; which frozen rollouts were read doesn't matter, then."""
    with FileStore(store_dir) as store:
        store.begin_call_now("r", "left")
        pulse = Pulse(FileStore(store_dir, read_only=True))
        pulse.look()
        assert pulse.frame().open_calls == 1
        store.freeze_now("r").close()
        for _ in range(2):
            pulse.look()
            frame = pulse.frame()
            assert (frame.states, frame.open_calls, frame.dead_calls) == ({"frozen": 1}, 0, 0)
    again = Pulse(FileStore(store_dir, read_only=True))
    again.look()
    assert again.frame().open_calls == 0


def test_rates_count_calls_and_sampled_ids(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        pulse = Pulse(FileStore(store_dir, read_only=True))
        pulse.look()
        store.begin_call_now("r", "a", 2)
        store.put_many_now([entry("r", "a", 5), entry("r", "a", 7, choice_index=1)])
        store.settle_call_now("r", "b", "lost", "why")
        pulse.look()
        frame = pulse.frame()
        assert frame.calls_per_s * frame.window_s == pytest.approx(2)
        assert frame.sampled_per_s * frame.window_s == pytest.approx(12)
        assert frame.outcomes == {"recorded": 1, "lost": 1}
        store.finish_now("r")
        store.freeze_now("r").close()
        pulse.look()
        assert [one.rollout_id for one in pulse.frame().finished] == ["r"]


def test_the_floor_of_the_disk_is_seen_before_it_is_reached() -> None:
    assert Disk(100, 1000, 60, 0, 0, 0).is_near_floor
    assert not Disk(200, 1000, 60, 0, 0, 0).is_near_floor
    assert Disk(200, 1000, 60, 10, 100, 6).is_near_floor


# ---- the verbs

WRITER = """
import sys, time
from tokcap import FileStore, TokenEntry
with FileStore(sys.argv[1]) as store:
    print("ready", flush=True)
    number = 0
    while sys.stdin.readline():
        name = f"w-{number}"
        for call in ("a", "b"):
            store.begin_call_now(name, call)
            store.put_now(TokenEntry(name, call, [1, 2], [3, 4, 5], [-1.0] * 3, pieces=[b"x", b"\\x1b", b"z"]))
        store.finish_now(name)
        with store.freeze_now(name) as snapshot:
            print(name, flush=True)
            if number % 2:
                store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=1)
        number += 1
"""


@contextlib.contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def write_one(process: subprocess.Popen[str]) -> str:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    return process.stdout.readline().strip()


def test_tail_follows_a_writer_and_ends_quietly(store_dir: Path) -> None:
    with writer(store_dir) as process:
        write_one(process)
        command = [sys.executable, "-m", "tokcap", "tail", "-f", "-n1", "--interval=0.1", f"--dir={store_dir}"]
        tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert tail.stdout
        shown = b""
        try:
            while b"w-0" not in shown:
                shown += read(tail.stdout.fileno())
            for number in range(1, 7):
                assert write_one(process) == f"w-{number}"
                while number % 2 == 0 and shown.count(b"w-%d\t" % number) < 2:  # the others are retired at once
                    shown += read(tail.stdout.fileno())
        finally:
            tail.send_signal(signal.SIGINT)
            rest, errors = tail.communicate(timeout=PATIENCE_S)
        assert (tail.returncode, errors) == (0, b"")
        seen = [line.split("\t")[1:] for line in (shown + rest).decode().splitlines()]
        assert seen[0][:2] == ["w-0", "b"]
        for name in ("w-2", "w-4", "w-6"):
            assert [cells[1] for cells in seen if cells[0] == name] == ["a", "b"]
        assert all(cells[2:] == ["recorded", "2+3", "-1.00", "x\\x1bz"] for cells in seen)


def read(fd: int) -> bytes:
    """What comes next."""
    assert select.select([fd], [], [], PATIENCE_S)[0]
    return os.read(fd, 65536)


def test_tail_shows_the_last_ones(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_store(store_dir)
    assert main(["tail", "--dir", str(store_dir)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert main(["tail", "--dir", str(store_dir), "-n", "300", "--json"]) == 0
    calls = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({(call["rollout_id"], call["model_call_id"]) for call in calls}) == 247
    assert [call["at"] for call in calls] == sorted(call["at"] for call in calls)
    assert {call["outcome"] for call in calls} == {"recorded", "lost", "no_generation"}


@pytest.fixture
def partly_unreadable(store_dir: Path) -> Path:
    """One rollout is well, one is two at once, one has a damaged record."""
    with FileStore(store_dir) as store:
        for name in ("good", "bad", "damaged"):
            store.begin_call_now(name, "a")
            store.put_now(TokenEntry(name, "a", list(range(99)), [1], [-0.5], extra={"filler": "x" * 999}))
            store.put_now(TokenEntry(name, "b", [*range(99), 1, 2], [1], [-0.5]))  # its prompt runs through the other
            store.freeze_now(name).close()
    (two,) = store_dir.glob("rollouts/*/bad")
    (two / ("0" * 32) / "v1").mkdir(parents=True)
    for segment in store_dir.glob("rollouts/*/damaged/*/v1/*.seg"):
        data = bytearray(segment.read_bytes())
        data[data.index(b"xxxxx")] ^= 1
        segment.write_bytes(data)
    return store_dir


def test_tail_names_what_cannot_be_read_once(partly_unreadable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", "--dir", str(partly_unreadable)]) == 4
    told = capsys.readouterr()
    assert "good" in told.out and "bad" not in told.out
    assert told.err.count("tokcap: bad can't be read: ") == len(told.err.splitlines()) == 1
    (damaged,) = (line for line in told.out.splitlines() if "\tdamaged\tb\t" in line)
    assert ".seg" in damaged and str(partly_unreadable) not in damaged


def test_top_counts_what_cannot_be_read(
    partly_unreadable: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ["top", "--once", "--interval", "0.1", "--dir", str(partly_unreadable)]
    shard = next(partly_unreadable.glob("rollouts/*/good")).parent
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if path == str(shard):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    assert main(once) == 0
    assert " 1 can't be read" in capsys.readouterr().out
    monkeypatch.setattr(os, "listdir", listdir)
    assert main([*once, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unreadable"] == 2
    assert main(["tail", "--dir", str(partly_unreadable)]) == 4
    assert f"rollouts/{shard.name} can't be read: " in capsys.readouterr().err


def test_top_once(store_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("r", "a"))
        store.begin_call_now("r", "b")
        assert main(["top", "--once", "--interval", "0.1", "--dir", str(store_dir)]) == 0
        out = capsys.readouterr().out
        assert "1 open" in out and "r b" in out and "\x1b" not in out
        assert main(["top", "--once", "--interval", "0.1", "--json", "--dir", str(store_dir)]) == 0
        frame = json.loads(capsys.readouterr().out)
        assert frame["states"] == {"open": 1} and frame["open_calls"] == 1 and frame["disk"]["free_bytes"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_leaves_the_terminal_as_it_was(store_dir: Path, number: signal.Signals) -> None:
    with writer(store_dir) as process:
        write_one(process)
        ours, theirs = pty.openpty()
        before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "tokcap", "top", "--interval", "0.1", "--dir", str(store_dir)]
        top = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
        )
        shown = b""
        try:
            while shown.count(b"rollouts") < 3:  # it is drawn again and again
                shown += read(ours)
            write_one(process)
        finally:
            top.send_signal(number)
            until = time.monotonic() + PATIENCE_S
            while top.poll() is None:
                if time.monotonic() > until:
                    top.kill()
                if select.select([ours], [], [], 0.05)[0]:
                    shown += os.read(ours, 65536)
            while select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
            assert top.stderr
            errors = top.stderr.read()
            top.stderr.close()
        after = termios.tcgetattr(theirs)
        os.close(theirs)
        os.close(ours)
    assert (top.returncode, errors) == (0, b"")
    assert after == before
    assert shown.index(b"\x1b[?1049h") < shown.rindex(b"\x1b[?1049l")  # the screen that was there is there again
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")  # and the cursor
    assert b"1 frozen" in shown
