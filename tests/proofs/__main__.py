"""`scripts/prove`: run one part of the proofs at full length, and print its figures as Markdown."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

from bench.machine import look

from .part import Part

PARTS: dict[str, tuple[str, str]] = {
    "crash-states": (
        "crash_states",
        "every state a crash can leave: acknowledged records are there, the rest whole",
    ),
    "faults": ("faults", "every file-system call of every operation fails in turn; then a disk that is full"),
    "kills": ("kills", "writers, consumers and a sweeper are killed at any moment; every put counts exactly once"),
    "power": ("power", "power cuts and failing disks under real file systems, from recorded block writes"),
    "histories": ("histories", "what many processes saw of put, freeze, retire, mark and reset is linearizable"),
    "fuzz": ("fuzz", "coverage-guided hostile bytes into every reader of files, bodies and streams"),
    "security": ("security", "other users, malicious agents, hostile model output"),
    "signals": ("signals", "a signal handler raises, uses the store, or closes it, at every point of the main thread"),
    "soak": ("soak", "a million rollouts, 100,000 open files, 10 GB read back, mixed load with flat memory"),
}
"""Name -> the module that has its `PART`; what it shows."""


def main(words: list[str]) -> int:
    """Exit status: 0 if everything held, 1 if something did not."""
    listing = "\n".join(f"  {name:13} {shows}" for name, (_, shows) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/prove",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run one part of the proofs at full length, and print its figures as Markdown. Exit status: 0 if "
        f"everything held, 1 if something did not.\n\n{listing}",
    )
    parser.add_argument("part", choices=PARTS, metavar="PART")
    parser.usage = "%(prog)s PART [options of the part: PART --help]"
    chosen = parser.parse_args(words[:1])
    module, shows = PARTS[chosen.part]
    part: Part = importlib.import_module(f"{__package__}.{module}").PART
    options = argparse.ArgumentParser(
        prog=f"scripts/prove {chosen.part}",
        description=shows,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    part.arguments(options)
    arguments = options.parse_args(words[1:])

    started = time.monotonic()
    outcome = part.run(arguments)
    print(f"\n| {chosen.part} | |\n|---|---|")
    for what, figure in outcome.figures:
        print(f"| {what} | {figure} |")
    print(f"| time | {time.monotonic() - started:,.0f} s |\n")
    for reason in outcome.left_out:
        print(f"left out: {reason}")
    print("\n".join(look((), {}).lines()[:1]))
    if outcome.problems:
        print(f"\n{len(outcome.problems)} problems:\n" + "\n".join(outcome.problems[:100]))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
