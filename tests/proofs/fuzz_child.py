"""The process that fuzzes: imports everything once, with its coverage counted, and forks for each target.

`python -m tests.proofs.fuzz_child --findings DIR NAME...` prints a line of JSON for each target. What an input lets out
is written down once for each place, and the search goes on. libFuzzer watches for inputs that take a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["tokcap"]):
    from . import fuzz_targets
    from .fuzz_input import Target

__all__ = ("signature_of",)

_MEMORY = 1 << 30
"""Bytes of address space that an input may take more than the process has: none is larger than some kilobytes."""
_WATCHDOG_S = 60
_MOST_FINDINGS = 25


class _Formats(logging.Handler):
    """Takes what is logged, so that it can be formatted, and drops it."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


def signature_of(error: BaseException) -> str:
    """Which finding this is: the kind of error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "tokcap" in frame.filename.split(os.sep)[:-1]] or frames
    place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {place}" + (f": {error}"[:90] if isinstance(error, AssertionError) else "")


class _Search:
    """One target, and what was found in it."""

    def __init__(self, target: Target, findings: Path) -> None:
        self._target, self._findings = target, findings
        self._known: set[str] = set()

    def __call__(self, data: bytes) -> None:
        try:
            self._target.run(bytes(data))
        except Exception as error:
            self._note(bytes(data), error)

    def _note(self, data: bytes, error: Exception) -> None:
        signature = signature_of(error)
        if signature in self._known or len(self._known) >= _MOST_FINDINGS:
            return
        self._known.add(signature)
        name = f"{self._target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        (self._findings / name).write_bytes(data)
        (self._findings / f"{name}.txt").write_text(f"{signature}\n{''.join(traceback.format_exception(error))}")


def _fuzz(target: Target, options: argparse.Namespace, work: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    log = os.open(work / f"{target.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    seeds = work / target.name
    seeds.mkdir()
    for number, seed in enumerate(target.seeds()):
        (seeds / f"seed-{number:03d}").write_bytes(seed)
    for path in fuzz_targets.corpus_of(target.name):
        (seeds / path.name).write_bytes(path.read_bytes())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    words = [f"-seed={options.seed}", f"-timeout={_WATCHDOG_S}", "-rss_limit_mb=0", "-print_final_stats=1"]
    words += [f"-max_len={target.longest}", f"-artifact_prefix={options.findings}/{target.name}-"]
    words.append(f"-runs={options.runs}" if options.runs else f"-max_total_time={options.seconds}")
    atheris.Setup([sys.argv[0], *words, str(seeds)], _Search(target, Path(options.findings)))
    atheris.Fuzz()


def _figure(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _told(target: Target, status: int, options: argparse.Namespace, work: Path) -> dict[str, object]:
    log = (work / f"{target.name}.log").read_text(errors="replace")
    problems = []
    for path in sorted(Path(options.findings).glob(f"{target.name}-*")):
        if path.suffix != ".txt":
            said = path.with_name(f"{path.name}.txt")
            why = said.read_text().partition("\n")[0] if said.exists() else "it takes too long, or ends the process"
            problems.append(f"{why}: {path.name} ({path.read_bytes()[:60].hex()})")
    if status and not problems:
        problems.append(f"the process ended with {status}: {log[-1500:]}")
    return {
        "target": target.name,
        "inputs": _figure(r"stat::number_of_executed_units: (\d+)", log),
        "edges": _figure(r"cov: (\d+)", log),
        "kept": _figure(r"corp: (\d+)/", log),
        "slowest_s": _figure(r"stat::slowest_unit_time_sec: +(\d+)", log),
        "problems": problems,
    }


def main(words: list[str]) -> None:
    """Fuzz the named targets, some at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+", choices=list(fuzz_targets.TARGETS))
    parser.add_argument("--findings", required=True)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(words)
    warnings.simplefilter("error")
    logging.getLogger("tokcap").addHandler(_Formats())
    logging.getLogger("tokcap").propagate = False
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tokcap-fuzz-", dir=memory) as directory:
        work = Path(directory)
        tempfile.tempdir = directory  # also for what targets make: libFuzzer ends their process
        waiting = [fuzz_targets.TARGETS[name] for name in options.targets]
        running: dict[int, Target] = {}
        while waiting or running:
            while waiting and len(running) < options.jobs:
                target = waiting.pop(0)
                running[_forked(lambda target=target: _fuzz(target, options, work))] = target  # type: ignore[misc]
            pid, status = os.wait()
            print(json.dumps(_told(running.pop(pid), os.waitstatus_to_exitcode(status), options, work)), flush=True)


def _forked(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    return pid


if __name__ == "__main__":
    main(sys.argv[1:])
