"""What capture costs a model server: the same client and the same engine with and without it, in one run.

    python -m bench.serving [--places disk,tmpfs] [--prompts 1024,16384,131072] [--callers 1,32,256] [--quick]

Every cell of the table is asked in three ways, in turn:

- *without*: the plain URL, and nothing but an answer is asked for;
- *ids*: the plain URL, but the client itself asks for ids and log-probs, so that the larger answer goes all the way:
  how much of the difference may be the engine's;
- *captured*: the capture URL, and the same request as *without*. The client gets the same answer, which is checked.

The engine has its answers ready as bytes, so the time in which a real one encodes ids is in none of them. Each caller
is one rollout, whose prompts grow, with one call at a time and no pause between calls: with 32 and 256 callers the
server is saturated, and what is added is the CPU of a call times those that wait for it. `--generation 2` makes the
engine take its time, as engines do. The first call of each rollout, which makes its directory, is not in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import multiprocessing
import os
import platform
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .places import UnavailableError, describe, place
from .serving_client import Connection, Reply, connected, read_chunks
from .serving_engine import Figures, Prepare, serve
from .serving_traffic import PER_TURN, SAMPLED, Conversation

__all__ = ("WAYS", "Cell", "Measured", "MeasuringError", "main", "measure", "server")

WAYS = ("without", "ids", "captured")
CHAT = "/v1/chat/completions"
PATIENCE_S = 300.0
"""After this long something hangs."""
ALLOWED_PUTS, ALLOWED_S = 1.3, 0.003
"""What a captured call of 16k ids that is not streamed may add to the median: so many puts, and so long."""

COLUMNS = (
    "prompt",
    "callers",
    "answer",
    "without",
    "ids",
    "captured",
    "added",
    "added to the first byte",
    "intent",
    "put",
    "added, in puts",
    "CPU: without, ids, captured",
    "longest callback: without, captured (collection)",
)


class Cell(msgspec.Struct, frozen=True):
    """One combination that is measured."""

    prompt: int
    """Ids of the first prompt of each rollout."""
    callers: int
    streamed: bool
    rounds: int
    """How often each way comes in turn."""
    calls: int
    """Of each caller in a round."""
    generation_s: float = 0.0

    @property
    def turns(self) -> int:
        """Calls of each rollout, the first one included."""
        return 1 + self.rounds * self.calls

    def rollout(self, caller: int) -> str:
        """The rollout of a caller."""
        return f"p{self.prompt}-c{self.callers}-{'streamed' if self.streamed else 'whole'}-{caller}"


class Measured(msgspec.Struct):
    """One way of one cell, all its rounds. Times are seconds, one of each call, in no particular order."""

    whole_s: list[float] = []
    """From the request to the end of its answer, as the client sees it."""
    first_s: list[float] = []
    """From the request to the first byte of the body."""
    intents_s: list[float] = []
    """Of `begin_call` of the store."""
    puts_s: list[float] = []
    first_intents_s: list[float] = []
    """Of the first call of each rollout."""
    cpu_s: float = 0.0
    """Of the server process, all calls together."""
    longest_callback_s: float = 0.0
    longest_collection_s: float = 0.0
    peak_bytes: int = 0
    """Most memory that the server had until then."""

    def add(self, replies: Iterable[Reply], figures: Figures) -> None:
        """One round more."""
        for reply in replies:
            self.whole_s.append(reply.whole_s)
            self.first_s.append(reply.first_s)
        self.intents_s += figures.intents
        self.puts_s += figures.puts
        self.cpu_s += figures.cpu_s
        self.longest_callback_s = max(self.longest_callback_s, figures.longest_callback_s)
        self.longest_collection_s = max(self.longest_collection_s, figures.longest_collection_s)
        self.peak_bytes = max(self.peak_bytes, figures.peak_bytes)


class MeasuringError(Exception):
    """What was measured is not what it should be; the message says why."""


def main() -> int:
    arguments = _arguments()
    cells = _cells(arguments)
    takes = f", which takes {arguments.generation:g} s for each" if arguments.generation else ""
    print(
        f"{SAMPLED} ids sampled, {PER_TURN} more in the prompt of each call; one uvicorn worker (asyncio, httptools) "
        f"around an engine with its answers ready{takes}; the client in a process of its own\n"
        f"{datetime.date.today()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}\n"
    )
    for name in arguments.places.split(","):
        try:
            with place(name) as directory:
                where = describe(directory) + (", loop" if name == "ext4" else "")
                asyncio.run(_measure_place(where, directory, cells))
        except UnavailableError as error:
            print(f"{name}: not measured: {error}\n")
    return 0


async def _measure_place(where: str, directory: Path, cells: Sequence[Cell]) -> None:
    print(f"{where}; milliseconds, as median / 99th percentile\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    measured: list[tuple[Cell, dict[str, Measured]]] = []
    async with server(directory / "store") as port:
        for cell in cells:
            results = await measure(cell, port)
            print(_row(cell, results), flush=True)
            measured.append((cell, results))
    print()
    for line in _said(measured):
        print(f"- {line}")
    print(flush=True)


@contextlib.asynccontextmanager
async def server(directory: Path) -> AsyncIterator[int]:
    """A server process that captures into `directory`; gives its port on this machine."""
    # The protocol is named, because without it asyncio leaves Nagle's algorithm on, and answers may wait 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(listening, str(directory)))
        process.start()
        port: int = listening.getsockname()[1]
    try:
        yield port
        control = await Connection.open(port)
        await control.ask("/bench/stop")
        control.close()
        await asyncio.to_thread(process.join, 60)
    finally:
        if process.exitcode is None:
            process.kill()


async def measure(cell: Cell, port: int) -> dict[str, Measured]:
    """Ask a server in all three ways, in turn.

    Raises `MeasuringError` if the answers or the number of records are not what they should be.
    """
    conversation = Conversation(cell.prompt, cell.turns)
    plain, asking = (
        [conversation.request(turn, streamed=cell.streamed, flags=flags) for turn in range(cell.turns)]
        for flags in (False, True)
    )
    bodies = {"without": plain, "ids": asking, "captured": plain}
    control, *connections = await connected(port, 1 + cell.callers)
    prepare = Prepare(cell.prompt, cell.turns, cell.streamed, cell.generation_s)
    await control.ask("/bench/prepare", msgspec.json.encode(prepare))

    async def ask(way: str, turns: Sequence[int]) -> tuple[list[Reply], Figures]:
        async def caller(number: int, connection: Connection) -> list[Reply]:
            # As they do where engines take their time: not all at once.
            await asyncio.sleep(cell.generation_s * number / cell.callers)
            prefix = f"/ng-rollout/{cell.rollout(number)}/training-token-capture" if way == "captured" else ""
            return [await connection.ask(prefix + CHAT, bodies[way][turn], turn=turn, keep=turn == 0) for turn in turns]

        async with asyncio.timeout(PATIENCE_S):
            await control.ask("/bench/begin")
            asked = await asyncio.gather(*(caller(number, each) for number, each in enumerate(connections)))
            end = await control.ask("/bench/end", method="GET", keep=True)
        figures = msgspec.json.decode(end.body, type=Figures)
        replies = [reply for each in asked for reply in each]
        expected = len(replies) if way == "captured" else 0
        if not len(figures.intents) == len(figures.puts) == expected:
            raise MeasuringError(f"{cell}: {len(figures.puts)} puts of {len(replies)} calls, {way}")
        return replies, figures

    results = {way: Measured() for way in WAYS}
    seen: dict[str, list[Any]] = {}
    for way in WAYS:
        replies, figures = await ask(way, [0])
        seen[way] = read_chunks(replies[0].body) if cell.streamed else [msgspec.json.decode(replies[0].body)]
        results[way].first_intents_s = figures.intents
    if seen["captured"] != seen["without"]:
        raise MeasuringError(f"{cell}: the captured answer is not the one that the client gets without capture")
    if seen["ids"][0].get("prompt_token_ids") != conversation.prompt(0):
        raise MeasuringError(f"{cell}: the engine did not give the ids that it was asked for")
    for number in range(cell.rounds):
        turns = range(1 + number * cell.calls, 1 + (number + 1) * cell.calls)
        for way in WAYS:
            results[way].add(*await ask(way, turns))
    for connection in [control, *connections]:
        connection.close()
    return results


def _row(cell: Cell, results: dict[str, Measured]) -> str:
    without, captured = results["without"], results["captured"]
    added = _added(results)
    first = [_at(captured.first_s, percent) - _at(without.first_s, percent) for percent in (50, 99)]
    columns = (
        f"{cell.prompt:,}",
        f"{cell.callers}",
        "streamed" if cell.streamed else "whole",
        *(_both(results[way].whole_s) for way in WAYS),
        f"{_ms(added)} / {_ms(_at(captured.whole_s, 99) - _at(without.whole_s, 99))}",
        f"{_ms(first[0])} / {_ms(first[1])}" if cell.streamed else "",
        _both(captured.intents_s),
        _both(captured.puts_s),
        f"{added / _at(captured.puts_s, 50):.1f}",
        ", ".join(_ms(results[way].cpu_s / len(results[way].whole_s)) for way in WAYS),
        f"{_ms(without.longest_callback_s)}, {_ms(captured.longest_callback_s)} ({_ms(captured.longest_collection_s)})",
    )
    return f"| {' | '.join(columns)} |"


def _said(measured: Sequence[tuple[Cell, dict[str, Measured]]]) -> list[str]:
    """What is promised, and what stands in no row."""
    said = []
    for cell, results in measured:
        captured = results["captured"]
        put, intent = _at(captured.puts_s, 50), _at(captured.intents_s, 50)
        if cell.callers == 1 and not cell.streamed and cell.prompt == 16384:
            added, allowed = _added(results), ALLOWED_PUTS * put + ALLOWED_S
            said.append(
                f"a whole answer, 16k ids, 1 caller: {_ms(added)} ms are added to the median; allowed are "
                f"{ALLOWED_PUTS} x the put of {_ms(put)} ms + {ALLOWED_S * 1e3:g} ms = {_ms(allowed)} ms: "
                f"{'met' if added <= allowed else 'NOT met'}"
            )
        if cell.callers == 1 and cell.streamed:
            first = _at(captured.first_s, 50) - _at(results["without"].first_s, 50)
            said.append(
                f"the first byte of a stream, {cell.prompt:,} ids, 1 caller: {_ms(first)} ms are added to the median, "
                f"{_ms(first - intent)} ms beside the intent of {_ms(intent)} ms; the put takes {_ms(put)} ms"
            )
    smallest = min(cell.prompt for cell, _ in measured)
    said += [
        f"the intent of the first call of a rollout, {cell.callers} at once: "
        f"{_both(results['captured'].first_intents_s)} ms"
        for cell, results in measured
        if cell.prompt == smallest and not cell.streamed
    ]
    peak = max(results[way].peak_bytes for _, results in measured for way in WAYS)
    said.append(f"most memory of the server process: {peak / 1e6:,.0f} MB")
    return said


def _added(results: dict[str, Measured]) -> float:
    """What capture adds to the median of the whole call."""
    return _at(results["captured"].whole_s, 50) - _at(results["without"].whole_s, 50)


def _at(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def _both(values: Sequence[float]) -> str:
    return f"{_ms(_at(values, 50))} / {_ms(_at(values, 99))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if abs(seconds) < 0.09995 else f"{seconds * 1e3:,.0f}"


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    cells = []
    for prompt in map(int, arguments.prompts.split(",")):
        for callers in map(int, arguments.callers.split(",")):
            for streamed in (False, True):
                rounds, calls = (1, 2) if arguments.quick else _size(prompt, callers, streamed)
                cells.append(Cell(prompt, callers, streamed, rounds, calls, arguments.generation))
    return cells


def _size(prompt: int, callers: int, streamed: bool) -> tuple[int, int]:
    """Rounds, and calls of each caller in one: enough for a percentile, few enough for a run of minutes."""
    if callers <= 4:
        return (10, 10) if prompt < 100_000 else (6, 6)
    if callers <= 32:
        return (2, 3) if prompt < 100_000 else (2, 2)
    return (1, 2) if prompt < 100_000 and not streamed else (1, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default="disk,tmpfs", help="where to capture to: %(default)s, or ext4")
    parser.add_argument("--prompts", default="1024,16384,131072", help="ids of the first prompt (%(default)s)")
    parser.add_argument("--callers", default="1,32,256", help="concurrent calls (%(default)s)")
    parser.add_argument("--generation", type=float, default=0.0, help="seconds that the engine takes (0)")
    parser.add_argument("--quick", action="store_true", help="two calls of each caller, to see that it runs")
    arguments = parser.parse_args()
    numbers = [*arguments.prompts.split(","), *arguments.callers.split(",")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers) or arguments.generation < 0:
        parser.error("--prompts and --callers are numbers from 1, --generation is seconds")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
