"""The whole way on recorded traffic, in real processes: serve, capture, freeze, build, compare, hand over, retire.

Uvicorn serves an engine that replays recorded answers, behind the capture middleware, in two spawned workers. Agents
ask it over HTTP, streamed and not, through the capture URLs of 25 recorded rollouts. They don't ask for token ids, and
have to see exactly what the engine alone would have answered. One worker is killed with SIGKILL in the middle of a
generation; who was waiting for it asks again. As soon as a rollout is finished, a trainer freezes it, builds its
trajectories, compares every id and log-prob with the recording, writes them to a file and retires the rollout. The exit
status is 0 only if all was exact.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from scripts import demo_trainer
from scripts.demo_server import GATE, ROLLOUT, SEQ, SHOWN_FIRST, WORKER, events_told, told
from scripts.demo_trainer import Row
from tests import recordings
from tokcap import FileStore
from tokcap.asgi import rollout_base_url

WORKERS = 2
DOOMED = ("stream-1", 3)
"""The recorded call in the middle of whose answer its worker is killed."""
AT_ONCE = 6
"""Rollouts in flight."""

PATIENCE_S = 120.0
LINE_LIMIT = 1 << 20
"""Bytes of a line of the trainer, problems included."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="put store and hand-over files there and keep them")
    commands = parser.add_subparsers(dest="role", title="roles that the demo starts by itself", metavar="")
    trainer = commands.add_parser("trainer")
    trainer.add_argument("handover", type=Path)
    options = parser.parse_args()
    if options.role == "trainer":
        return demo_trainer.main(options.handover)
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(asyncio.wait_for(conduct(options.dir.resolve()), PATIENCE_S))
    with tempfile.TemporaryDirectory(prefix="tokcap-demo-") as directory:
        return asyncio.run(asyncio.wait_for(conduct(Path(directory)), PATIENCE_S))


async def conduct(directory: Path) -> int:
    """Start server and trainer, let the agents run, print what the trainer found."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKCAP_CONFIG"}
    environment["TOKCAP_DIR"] = str(directory / "store")
    port = free_port()
    serve = f"-m uvicorn --factory scripts.demo_server:app --workers {WORKERS} --host 127.0.0.1 --port {port}"
    quiet = "--log-level warning --timeout-graceful-shutdown 5"
    train = [__file__, "trainer", str(directory / "handover")]
    async with (
        running(train, environment, stdout=asyncio.subprocess.PIPE) as trainer,
        running(f"{serve} {quiet}".split(), environment) as server,
    ):
        rows = asyncio.create_task(read_rows(trainer))
        agents = Agents(f"http://127.0.0.1:{port}", directory, server)
        await agents.run()
        server.terminate()
        if await server.wait() != 0:
            print(f"the server ended with status {server.returncode}", file=sys.stderr)
            return 1
        found = await rows
        if await trainer.wait() != 0:
            print(f"the trainer ended with status {trainer.returncode}", file=sys.stderr)
            return 1
    return report(found, agents)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(
    arguments: list[str], environment: dict[str, str], *, stdout: int | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process that ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=stdout, limit=LINE_LIMIT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


class Agents:
    """The clients: they send the recorded requests, one after another, and ask again where a connection breaks."""

    def __init__(self, base: str, directory: Path, server: asyncio.subprocess.Process) -> None:
        self.base, self.directory, self.server = base, directory, server
        self.store = FileStore(directory / "store")
        self.client = httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False)
        self.workers: set[str] = set()
        """The process ids of those that have answered."""
        self.answered = 0
        self.retried = 0
        self.killed = ""
        """What became of the doomed call's worker, in words."""
        self.problems: list[str] = []
        """What agents saw and should not have seen."""

    async def run(self) -> None:
        """Play all recordings."""
        (self.directory / "gates").mkdir(exist_ok=True)
        slots = asyncio.Semaphore(AT_ONCE)
        async with self.client:
            await self._meet(WORKERS)
            async with asyncio.TaskGroup() as group:
                for recorded in recordings.rollouts():
                    group.create_task(self._rollout(recorded, slots))
        await self.store.close()
        print(self.killed)

    async def _meet(self, count: int) -> None:
        """Wait until so many different workers have answered, each on a connection of its own."""
        while len(self.workers) < count:
            self._check_server()
            with suppress(httpx.TransportError):  # not there yet, or just killed
                response = await self.client.get(f"{self.base}/health", headers={"connection": "close"})
                self.workers.add(response.headers[WORKER])
            await asyncio.sleep(0.01)

    def _check_server(self) -> None:
        if self.server.returncode is not None:
            raise RuntimeError(f"the server ended with status {self.server.returncode}")

    async def _rollout(self, recorded: recordings.RecordedRollout, slots: asyncio.Semaphore) -> None:
        async with slots:
            if recorded.shape == "parallel":
                await asyncio.gather(*map(self._call, recorded.calls))
            else:
                for call in recorded.calls:
                    await self._call(call)
            meta = {"reward": len(recorded.calls) / 10, "group": recorded.shape}
            await self.store.finish(recorded.rollout_id, meta=meta)

    async def _call(self, call: recordings.RecordedCall) -> None:
        """Ask until an answer came whole. It must be the one that the engine alone would have given."""
        request = plain(call.request)
        for retry in itertools.count():
            try:
                status, seen = await self._ask(call, request, retry)
            except httpx.TransportError:
                self._check_server()
                self.retried += 1
            else:
                break
        self.answered += 1
        expected: Any = (
            told(call.response or {}, request) if call.sse is None else [*events_told(call.sse, request), "[DONE]"]
        )
        if (status, seen) != (call.status, expected):
            self.problems.append(f"{call.rollout_id} {call.seq}: the agent got {status} {json.dumps(seen)[:500]}")

    async def _ask(self, call: recordings.RecordedCall, request: dict[str, Any], retry: int) -> tuple[int, Any]:
        """The status, and the answer or the events of its stream, decoded."""
        url = rollout_base_url(self.base, call.rollout_id) + call.path
        gate = self.directory / "gates" / f"{call.rollout_id}-{call.seq}-{retry}"
        headers = {ROLLOUT: call.rollout_id, SEQ: str(call.seq), GATE: str(gate)}
        headers |= {"idempotency-key": call.model_call_id, "x-stainless-retry-count": str(retry)}
        doomed = (call.rollout_id, call.seq) == DOOMED and not self.killed
        events: list[Any] = []
        async with self.client.stream("POST", url, json=request, headers=headers) as response:
            if call.sse is None:
                return response.status_code, decoded((await response.aread()).decode())
            async for line in response.aiter_lines():
                if not line:
                    continue
                events.append(decoded(line.removeprefix("data: ")))
                # What was sent up to here has come, although the engine is still in the middle: it waits for the gate.
                if len(events) == SHOWN_FIRST and doomed:
                    await self._kill(response.headers[WORKER])
                elif len(events) == SHOWN_FIRST:
                    gate.touch()
        return response.status_code, events

    async def _kill(self, worker: str) -> None:
        """Kill a worker in the middle of its generation, and wait until uvicorn has started another one."""
        os.kill(int(worker), signal.SIGKILL)
        self.killed = f"worker {worker} got SIGKILL in the middle of a generation, after {self.answered} answers"
        known = set(self.workers)
        await self._meet(WORKERS + 1)
        self.killed += f"; uvicorn started {', '.join(self.workers - known)}"


def plain(request: dict[str, Any]) -> dict[str, Any]:
    """A recorded request as an agent sends it: without what was asked only to have ids and log-probs."""
    request = dict(request)
    captured = request.pop("return_token_ids", False)
    request.pop("return_tokens_as_token_ids", None)
    request.pop("stream_options", None)
    if captured and "top_logprobs" not in request:  # who wants alternatives wants log-probs
        request.pop("logprobs", None)
    return request


def decoded(text: str) -> Any:
    """What is no JSON stays as it is: `[DONE]`, or the error of a server."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def read_rows(trainer: asyncio.subprocess.Process) -> list[Row]:
    assert trainer.stdout is not None
    rows = []
    while line := await trainer.stdout.readline():
        rows.append(msgspec.json.decode(line, type=Row))
    return rows


# ---- the report

HEADINGS = (
    "rollout",
    "calls",
    "sampled",
    "trained",
    "trajectories",
    "drifted",
    "replay",
    "in one response",
    "not trained, and why",
    "flags",
    "exact",
)


def report(rows: list[Row], agents: Agents) -> int:
    """Print the table and the summary; the exit status."""
    rows.sort(key=lambda row: row.rollout)
    cells = [HEADINGS, *map(cells_of, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    for line in cells:
        aligned = (
            cell.rjust(width) if 0 < column < 7 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(aligned).rstrip())
    problems = [*agents.problems, *(f"{row.rollout}: {problem}" for row in rows for problem in row.problems)]
    for problem in problems:
        print(problem, file=sys.stderr)
    untrained: Counter[str] = Counter()
    for row in rows:
        untrained.update(row.untrained)
    exact = not problems and len(rows) == len(recordings.names()) and all(row.retired for row in rows)
    print(
        f"{'exact' if exact else 'NOT EXACT'}: {len(rows)} rollouts, {agents.answered} calls answered, "
        f"{agents.retried} of them asked again after the kill; {sum(row.captured for row in rows):,} sampled ids "
        f"captured, {sum(row.delivered for row in rows):,} trained ({counted(untrained)}); {len(problems)} problems"
    )
    return 0 if exact else 1


def cells_of(row: Row) -> tuple[str, ...]:
    outcomes = f" ({counted(row.outcomes)})" if row.outcomes else ""
    return (
        row.rollout,
        f"{row.calls}{outcomes}",
        f"{row.captured:,}",
        f"{row.delivered:,}",
        f"{row.trajectories}",
        f"{row.drifted}",
        f"{row.replay:.1f}x",
        row.rebuilt,
        counted(row.untrained) or "-",
        counted(row.flags) or "-",
        "yes" if not row.problems and row.retired else "NO",
    )


def counted(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
