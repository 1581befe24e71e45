"""The demo runs the whole way, with a real server and a real SIGKILL, and finds every answer and trajectory exact."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from . import recordings

ROOT = Path(__file__).parent.parent


def test_the_demo_serves_and_trains_every_recorded_id_exactly_once_although_a_worker_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", "--dir", tmp_path / "demo"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed, heading, *table, summary = done.stdout.splitlines()
    workers = re.fullmatch(
        r"worker (\d+) got SIGKILL in the middle of a generation, after \d+ answers; uvicorn started (\d+)", killed
    )
    assert workers is not None, killed
    assert workers[1] != workers[2]

    # All 249 recorded requests are answered. 247 of them may generate; the other two, which leave no trace, are the
    # tokenisation and the token count of edges-0.
    found = re.fullmatch(
        r"exact: 25 rollouts, 249 calls answered, ([\d,]+) of them asked again after the kill; "
        r"([\d,]+) sampled ids captured, 6,572 trained \(([\d,]+) abandoned, 166 ambiguous\); 0 problems",
        summary,
    )
    assert found is not None, summary
    again, captured, abandoned = (int(number.replace(",", "")) for number in found.groups())
    # At least the call in the middle of whose answer the worker was killed.
    assert again >= 1
    # 6,572 ids are trained: 6,562 of the files other than edges-0, and 10 of edges-0 (a prompt that is its own, and
    # one of two completions that are the same). 166 are ambiguous: the last two answers of retry-last-0 and -1
    # (68, 63), and 35 of edges-0, whose calls ask the same thing. 128 are abandoned: 36 and 86 of retry-mid-0 and -1,
    # and the other completion of edges-0. An answer that was stored when its worker was killed, but not released, is
    # captured once more and abandoned once. So nothing that was recorded is left:
    recorded = [entry for rollout in recordings.rollouts() for entry in rollout.entries]
    assert captured - (abandoned - 128) == sum(len(entry.generation_token_ids) for entry in recorded) == 6_866
    assert abandoned >= 128

    assert heading.split()[0] == "rollout"
    rows = {row.split()[0]: re.split(" {2,}", row) for row in table}
    assert sorted(rows) == recordings.names()
    # The middleware asks for ids in every call, but one answer of edges-0 was recorded without, and Responses and
    # messages have none; two of its requests were refused.
    assert "3 lost, 2 no_generation" in rows["edges-0"][1]
    # Of the doomed call only the intent is left; what the next worker answered is trained, after the gap.
    assert rows["stream-1"][1:5] == ["7 (1 open)", "135", "135", "2"]
    assert len(list((tmp_path / "demo" / "handover").glob("*.npz"))) == 25
