"""Security, the long form: drawn attacks on the directory, on URLs and tokens, and on the wire of the proxy.

What is tried once, and by name, stands in `tests/test_security_*.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokcap.config import close_process_endpoints

from . import security_plants, security_urls, security_wire
from .part import Outcome, Part
from .security_corpora import answers, requests

__all__ = ("PART", "plants", "tokens", "urls", "wire_answers", "wire_requests")

_PARSERS = ("h11", "httptools")


def plants(where: Path, seed: int, count: int | None = None) -> tuple[int, list[str]]:
    """Every file of a store replaced by everything else, before and during use; cases and problems.

    count: so many of the cases, drawn; None: all.
    """
    security_plants.fill(str(where / "sample"))
    # While a store is open, its writer has a file of its own, too.
    cases = list(security_plants.every_case(len(security_plants.components(str(where / "sample"))) + 1, seed))
    if count is not None:
        cases = random.Random(f"plants/{seed}").sample(cases, count)
    return len(cases), [problem for case in cases for problem in security_plants.played(case, where / "case")]


def urls(seed: int, count: int) -> tuple[int, list[str]]:
    """Drawn paths, each read as the contract says or refused; cases and problems."""
    return count, [problem for number in range(count) for problem in security_urls.check_path(seed, number)]


def tokens(where: Path, seed: int, count: int) -> tuple[int, list[str]]:
    """Drawn tokens, of which the right ones alone reach the engine; cases and problems."""

    async def all_of_them() -> list[str]:
        served = security_urls.Served(where, rollout_secret=security_urls.SECRET)
        found = []
        for number in range(count):
            found += await security_urls.check_token(served, seed, number)
        await close_process_endpoints()
        return found

    return count, asyncio.run(all_of_them())


def wire_requests(where: Path, seed: int, numbers: Collection[int], parser: str) -> tuple[int, list[str]]:
    """Drawn requests that want to be two; cases and problems."""

    async def all_of_them() -> list[str]:
        found = []
        async with security_wire.through(parser, client_timeout_s=None) as line:
            for number in numbers:
                problems = await security_wire.exchanged(line, requests(seed, number))
                found += [f"request {number} of seed {seed}, {parser}: {problem}" for problem in problems]
        await close_process_endpoints()
        return found

    with _capturing_to(where):
        return len(numbers), asyncio.run(all_of_them())


def wire_answers(where: Path, seed: int, numbers: Collection[int], parser: str) -> tuple[int, list[str]]:
    """Drawn answers of an engine that want to be two, captured and not; cases and problems."""
    paths = (
        b"/last",
        b"/x",
        b"/ng-rollout/r-1/v1/completions",
        b"/ng-rollout/%d/training-token-capture/v1/completions",
    )
    current = b""

    def answering(request: security_wire.Strict) -> bytes:
        return security_wire.echo(request) if request.target == b"/innocent" else current

    async def all_of_them() -> list[str]:
        nonlocal current
        found = []
        async with security_wire.through(parser, answering, timeout_s=0.2) as line:
            for number in numbers:
                current = answers(seed, number)
                path = paths[number % len(paths)]
                problems = await security_wire.answered(line, path % number if b"%d" in path else path)
                found += [f"answer {number} of seed {seed}, {parser}: {problem}" for problem in problems]
        await close_process_endpoints()
        return found

    with _capturing_to(where):
        return len(numbers), asyncio.run(all_of_them())


@contextmanager
def _capturing_to(where: Path) -> Iterator[None]:
    before = os.environ.get("TOKCAP_DIR")
    os.environ["TOKCAP_DIR"] = str(where / "captured")
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKCAP_DIR"]
        else:
            os.environ["TOKCAP_DIR"] = before


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next")
    parser.add_argument("--rounds", type=int, default=3, help="how often all of it is drawn anew")
    parser.add_argument("--plants", type=int, default=0, help="files replaced in a round; 0: each by everything, 704")
    parser.add_argument("--urls", type=int, default=200_000, help="paths in a round")
    parser.add_argument("--tokens", type=int, default=3_000, help="in a round")
    parser.add_argument("--requests", type=int, default=20_000, help="in a round, for each parser")
    parser.add_argument("--answers", type=int, default=6_000, help="in a round, for each parser")
    parser.add_argument("--dir", default=None, help="where the stores are made (a temporary directory)")


def _run(arguments: argparse.Namespace) -> Outcome:
    outcome = Outcome()
    logging.disable(logging.CRITICAL)  # each attack is logged
    counts = dict.fromkeys(("plants in a store", "URLs", "tokens", "requests", "answers"), 0)

    def add(what: str, done: tuple[int, list[str]]) -> None:
        counts[what] += done[0]
        outcome.problems.extend(done[1])
        print(f"seed {seed}: {done[0]:,} {what}, {len(done[1])} problems", flush=True)

    print(f"seeds from {arguments.seed}; the plants take minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="tokcap-security-", dir=arguments.dir) as directory:
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            where = Path(directory) / str(seed)
            where.mkdir()
            add("plants in a store", plants(where, seed, arguments.plants or None))
            add("URLs", urls(seed, arguments.urls))
            add("tokens", tokens(where, seed, arguments.tokens))
            for parser in _PARSERS:
                add("requests", wire_requests(where, seed, range(arguments.requests), parser))
                add("answers", wire_answers(where, seed, range(arguments.answers), parser))
    for what, count in counts.items():
        outcome.figure(what, count)
    outcome.figure("problems", len(outcome.problems))
    logging.disable(logging.NOTSET)
    return outcome


PART = Part(_arguments, _run)
