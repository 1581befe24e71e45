"""Measure every candidate in every place, in one run, and print the table of the README.

    python -m bench.report [--rounds 3] [--places ext4,disk,tmpfs] [--rollouts 64] [--turns 20]

Absolute figures move with the machine; the ratios of one run are what to look at.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys

from .candidates import CANDIDATES, Measured, run
from .places import PLACES, UnavailableError, describe, place
from .workload import Workload, calls


def main() -> int:
    arguments = _arguments()
    workload = Workload(rollouts=arguments.rollouts, turns=arguments.turns)
    conversations = calls(workload)
    print(
        f"{workload.rollouts} rollouts x {workload.turns} turns, first prompt {workload.first_prompt} ids, "
        f"{workload.per_turn} more a turn, {workload.sampled} sampled; asyncio, one process; "
        f"median of {arguments.rounds} rounds, candidates in turn\n"
        f"{datetime.date.today()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}\n"
    )
    print("| file system | candidate | puts/s | tokcap is | p50 ms | p99 ms | CPU s per 1,000 | MB on disk |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.places.split(","):
        try:
            with place(name) as directory:
                where = describe(directory) + (", loop" if name == "ext4" else "")
                rounds: dict[str, list[Measured]] = {candidate: [] for candidate in CANDIDATES}
                for number in range(arguments.rounds):
                    for candidate, results in rounds.items():
                        results.append(run(candidate, directory / f"{number}-{candidate}", conversations))
                _print_rows(where, rounds)
        except UnavailableError as error:
            print(f"| {name} | not measured: {error} | | | | | | |")
    return 0


def _print_rows(where: str, rounds: dict[str, list[Measured]]) -> None:
    ours = rounds["tokcap"]
    for candidate, results in rounds.items():
        # Pair by pair: neighbours in time saw the same machine.
        ratio = statistics.median(a.per_second / b.per_second for a, b in zip(ours, results, strict=True))
        latencies = sorted(latency for result in results for latency in result.latencies)
        print(
            f"| {where} | {candidate} | {statistics.median(r.per_second for r in results):,.0f} | {ratio:.1f}x "
            f"| {latencies[len(latencies) // 2] * 1e3:.2f} | {latencies[len(latencies) * 99 // 100] * 1e3:.2f} "
            f"| {statistics.median(r.cpu_seconds / r.puts for r in results) * 1e3:.2f} "
            f"| {results[0].bytes_on_disk / 1e6:.1f} |"
        )
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each candidate, in turn (3)")
    parser.add_argument("--places", default=",".join(PLACES), help="where to measure: %(default)s, or some of these")
    parser.add_argument("--rollouts", type=int, default=64, help="conversations at once (64)")
    parser.add_argument("--turns", type=int, default=20, help="calls of each conversation (20)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.rollouts, arguments.turns) < 1:
        parser.error("--rounds, --rollouts and --turns are numbers from 1")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
