"""Hostile bytes into every reader: of files, of bodies and streams, of URLs, of configurations.

Coverage-guided (atheris) over the targets of `fuzz_targets`, with a minute's watchdog and a bound on memory for each
input; then the bombs of `fuzz_bombs`, each in a child that may take 64 MB and 64 times the input. A finding is written
to a file whose name is printed; with it, `--again FILE` runs its target once more and shows the traceback.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .fuzz_bombs import BOMBS, exploded
from .fuzz_targets import TARGETS
from .part import Outcome, Part

__all__ = ("PART", "atheris_is_missing", "searched")

_ROOT = Path(__file__).parents[2]


def atheris_is_missing() -> str:
    """Why there is no search by coverage here; empty if there is."""
    if importlib.util.find_spec("atheris") is not None:
        return ""
    return "atheris is not installed: it has wheels for Linux and Python 3.11 to 3.13, pip install atheris"


def searched(names: Sequence[str], findings: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Fuzz targets in a child process; what it tells of each. Raises `RuntimeError` if it can't."""
    words = [sys.executable, "-m", f"{__package__}.fuzz_child", "--findings", str(findings), *options, *names]
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(words, cwd=_ROOT, stdout=subprocess.PIPE, stderr=said, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if child.wait():
            said.seek(0)
            raise RuntimeError(f"the search ended with {child.returncode}: {said.read()[-3000:]}")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=int, default=120, help="for each target")
    parser.add_argument("--runs", type=int, default=0, help="inputs for each target, in place of seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS), metavar="TARGET")
    parser.add_argument("--findings", type=Path, default=None, help="directory for what is found; else a new one")
    parser.add_argument("--again", type=Path, default=None, help="an input that was found: run its target with it")


def _run(arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    if arguments.again is not None:
        _again(arguments.again, outcome)
        return outcome
    findings: Path = arguments.findings or Path(tempfile.mkdtemp(prefix="tokcap-findings-"))
    findings.mkdir(parents=True, exist_ok=True)
    missing = atheris_is_missing()
    if missing:
        outcome.left_out.append(missing)
    else:
        _search(arguments, findings, outcome)
    problems = [problem for problem in map(exploded, BOMBS) if problem]
    outcome.problems += problems
    outcome.figure("length and nesting bombs refused within 64 MB and 64 times their size", len(BOMBS) - len(problems))
    if outcome.problems:
        print(f"inputs that were found: {findings}")
    return outcome


def _search(arguments: argparse.Namespace, findings: Path, outcome: Outcome) -> None:
    inputs = edges = 0
    slowest = 0
    options = [f"--seed={arguments.seed}", f"--jobs={arguments.jobs}", f"--seconds={arguments.seconds}"]
    for told in searched(arguments.targets, findings, *options, f"--runs={arguments.runs}"):
        name = told["target"]
        print(f"{name}: {told['inputs']:,} inputs, {told['edges']:,} edges, seed {arguments.seed}", flush=True)
        outcome.figure(f"{name}: {TARGETS[name].shows}", f"{told['inputs']:,} inputs, {told['edges']:,} edges")
        outcome.problems += [f"{name}: {problem}" for problem in told["problems"]]
        inputs, edges = inputs + told["inputs"], edges + told["edges"]
        slowest = max(slowest, told["slowest_s"])
    outcome.figure("inputs in all", inputs)
    outcome.figure("edges covered, summed over the targets", edges)
    outcome.figure("slowest input, in whole seconds", slowest)


def _again(path: Path, outcome: Outcome) -> None:
    names = [name for name in TARGETS if path.name.startswith(f"{name}-") or path.parent.name == name]
    for name in names:
        try:
            TARGETS[name].run(path.read_bytes())
        except Exception:
            traceback.print_exc()
            outcome.problems.append(f"{name}: {path}")
    outcome.figure("targets that were run again", ", ".join(names) or "none: the file is not named after one")


PART = Part(_arguments, _run)
