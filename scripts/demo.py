"""The whole way on recorded traffic, in real processes: capture, freeze, build, compare, hand over, retire.

Three model servers answer the recorded calls of 25 agent rollouts and capture what they answer. Half-way one of them
is killed with SIGKILL in the middle of a generation; its clients ask another server again. As soon as a rollout is
finished, a trainer freezes it, builds its trajectories, compares every id and log-prob with the recording, writes them
to a file and retires the rollout. The exit status is 0 only if all was exact.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import msgspec

from scripts import demo_server, demo_trainer
from scripts.demo_server import Job, Line
from scripts.demo_trainer import Row
from tests import recordings
from tokcap import FileStore

SERVERS = 3
DOOMED = 1
AT_ONCE = 6
"""Rollouts in flight; each of them has one call at a time."""

PATIENCE_S = 120.0
LINE_LIMIT = 1 << 20
"""Bytes of a line of the trainer, problems included."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="put store and hand-over files there and keep them")
    commands = parser.add_subparsers(dest="role", title="roles that the demo starts by itself", metavar="")
    server = commands.add_parser("server")
    server.add_argument("store")
    trainer = commands.add_parser("trainer")
    trainer.add_argument("store")
    trainer.add_argument("handover", type=Path)
    options = parser.parse_args()
    if options.role == "server":
        return demo_server.main(options.store)
    if options.role == "trainer":
        return demo_trainer.main(options.store, options.handover)
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        return asyncio.run(asyncio.wait_for(conduct(options.dir.resolve()), PATIENCE_S))
    with tempfile.TemporaryDirectory(prefix="tokcap-demo-") as directory:
        return asyncio.run(asyncio.wait_for(conduct(Path(directory)), PATIENCE_S))


class DiedError(Exception):
    """The server was killed before it answered."""


class Server:
    """One model server, and who waits for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.waiting: dict[tuple[str, str], tuple[asyncio.Event, asyncio.Future[None]]] = {}
        self.reading = asyncio.create_task(self._read())

    def begin(self, job: Job) -> tuple[asyncio.Event, asyncio.Future[None]]:
        """Set when the call began, and resolved when its answer is released; `DiedError` if the server goes first."""
        if self.reading.done():
            raise DiedError
        pair = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.waiting[job.rollout_id, job.model_call_id] = pair
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")
        return pair

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while text := await self.process.stdout.readline():
            line = msgspec.json.decode(text, type=Line)
            begun, answered = self.waiting[line.rollout_id, line.model_call_id]
            if not line.answered:
                begun.set()
            elif not answered.done():
                answered.set_result(None)
        for _, answered in self.waiting.values():
            if not answered.done():
                answered.set_exception(DiedError())
                answered.exception()  # it is no mistake if nobody waits


async def start(role: str, *arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        role,
        *map(str, arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )


async def conduct(directory: Path) -> int:
    """Start the processes, play the recordings, kill one server half-way, print what the trainer found."""
    store = directory / "store"
    trainer = await start("trainer", store, directory / "handover")
    rows = asyncio.create_task(read_rows(trainer))
    recorded = list(recordings.rollouts())
    half = sum(call.generates for rollout in recorded for call in rollout.calls) // 2
    servers = [Server(await start("server", store)) for _ in range(SERVERS)]
    play = Play(servers, store, half)
    slots = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for number, rollout in enumerate(recorded):
            group.create_task(play.rollout(number, rollout, slots))
    print(play.killed)
    for server in servers:
        assert server.process.stdin is not None
        server.process.stdin.close()
        await server.reading
        if await server.process.wait() != 0:
            print(f"a server ended with status {server.process.returncode}", file=sys.stderr)
            return 1
    await play.store.close()
    found = await rows
    if await trainer.wait() != 0:
        print(f"the trainer ended with status {trainer.returncode}", file=sys.stderr)
        return 1
    return report(found, play)


class Play:
    """The clients: agents that send the recorded requests, one after another, and retry where a server died."""

    def __init__(self, servers: list[Server], directory: Path, half: int) -> None:
        self.servers, self.directory, self.half = servers, directory, half
        self.store = FileStore(directory)
        self.answered = 0
        self.retried = 0
        self.killed = ""
        """What became of the doomed server, in words."""
        self._replaced = asyncio.Event()

    async def rollout(self, number: int, recorded: recordings.RecordedRollout, slots: asyncio.Semaphore) -> None:
        async with slots:
            for call in recorded.calls:
                if call.generates:
                    await self._call((number + call.seq) % SERVERS, call)
            meta = {"reward": len(recorded.calls) / 10, "group": recorded.shape}
            await self.store.finish(recorded.rollout_id, meta=meta)

    async def _call(self, place: int, call: recordings.RecordedCall) -> None:
        doomed = place == DOOMED and self.answered >= self.half and not self.killed
        job = Job(call.rollout_id, call.seq, call.model_call_id, hangs=doomed)
        try:
            begun, answered = self.servers[place].begin(job)
            if doomed:
                await self._kill(begun)
            await answered
        except DiedError:
            await self._replaced.wait()
            self.retried += 1
            again = Job(call.rollout_id, call.seq, f"{call.model_call_id}.retry", retry_count=1)
            _, answered = self.servers[place].begin(again)
            await answered
        self.answered += 1

    async def _kill(self, begun: asyncio.Event) -> None:
        """Kill the doomed server when a generation has begun there, and start another one in its place."""
        self.killed = "the doomed server never began"
        await begun.wait()
        process = self.servers[DOOMED].process
        process.kill()
        await self.servers[DOOMED].reading
        status = await process.wait()
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        self.killed = f"server {DOOMED} ended with {name} in the middle of a generation, after {self.answered} answers"
        self.servers[DOOMED] = Server(await start("server", self.directory))
        self._replaced.set()


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


def report(rows: list[Row], play: Play) -> int:
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
    for row in rows:
        for problem in row.problems:
            print(f"{row.rollout}: {problem}", file=sys.stderr)
    untrained: Counter[str] = Counter()
    for row in rows:
        untrained.update(row.untrained)
    problems = sum(len(row.problems) for row in rows)
    exact = not problems and len(rows) == len(recordings.names()) and all(row.retired for row in rows)
    print(
        f"{'exact' if exact else 'NOT EXACT'}: {len(rows)} rollouts, {play.answered} calls answered, "
        f"{play.retried} of them asked again after the kill; {sum(row.captured for row in rows):,} sampled ids "
        f"captured, {sum(row.delivered for row in rows):,} trained ({counted(untrained)}); {problems} problems"
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
