"""The demo runs, with real processes and a real SIGKILL, and finds every record exact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import recordings

ROOT = Path(__file__).parent.parent


def test_demo_finds_every_record_exact_although_a_writer_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py", "--dir", tmp_path / "demo"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *table, summary = done.stdout.splitlines()
    assert summary.startswith("exact: 25 rollouts, ")
    assert {line.split()[0] for line in table} >= {"writer", *recordings.names()}
    assert len(list((tmp_path / "demo" / "handover").glob("*.npz"))) == 25
