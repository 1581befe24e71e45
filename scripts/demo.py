"""The file store at work on recorded traffic, in real processes.

Three writers put the recorded calls of every rollout, the calls of one rollout spread over all of them. Half-way, one
writer is killed with SIGKILL in the middle of its work, and a replacement does what it left undone. Each writer notes
in a file of its own what the store acknowledged. Then a consumer freezes every rollout, checks each array of each
entry against the recording and each acknowledged record against the snapshot, hands the tokens over in a file, and
retires the rollout. The exit status is 0 only if all was exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tests import recordings
from tokcap import FileStore, Snapshot, TokenEntry
from tokcap.entry import identical
from tokcap.errors import FrozenError, RetiredError

WRITERS = 3
DOOMED = 1
AHEAD = 4
"""How many jobs the writer that will be killed knows of beyond its half; it never gets to see the rest."""

PATIENCE_S = 120.0

FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class Job(NamedTuple):
    """One recorded model call to put."""

    rollout_id: str
    seq: int


class Acknowledged(msgspec.Struct, frozen=True):
    """What the store said is durable, noted by the writer after the method returned."""

    what: str
    """begin, put or settle"""
    rollout_id: str
    seq: int
    choice_index: int = 0


class Line(msgspec.Struct):
    """What the consumer reports of one rollout."""

    rollout: str
    calls: int
    entries: int
    prompt_ids: int
    distinct_ids: int
    raw_bytes: int
    disk_bytes: int
    sampled_ids: int
    outcomes: dict[str, int]
    state: str = ""
    problems: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="put store and hand-over files there and keep them")
    commands = parser.add_subparsers(dest="role", title="roles that the demo starts by itself", metavar="")
    writer = commands.add_parser("writer")
    writer.add_argument("store", type=Path)
    writer.add_argument("acknowledged", type=Path)
    consumer = commands.add_parser("consumer")
    consumer.add_argument("store", type=Path)
    consumer.add_argument("handover", type=Path)
    consumer.add_argument("acknowledged", type=Path, nargs="+")
    options = parser.parse_args()
    if options.role == "writer":
        return asyncio.run(write(options.store, options.acknowledged))
    if options.role == "consumer":
        return consume(options.store, options.handover, options.acknowledged)
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
        return conduct(options.dir.resolve())
    with tempfile.TemporaryDirectory(prefix="tokcap-demo-") as directory:
        return conduct(Path(directory))


# ---- the conductor


def conduct(directory: Path) -> int:
    """Start the processes, kill one of them, print what the consumer found."""
    store = directory / "store"
    jobs: list[list[Job]] = [[] for _ in range(WRITERS)]
    for number, rollout in enumerate(recordings.rollouts()):
        for call in rollout.calls:
            if call.generates:
                jobs[(number + call.seq) % WRITERS].append(Job(rollout.rollout_id, call.seq))
    notes = [directory / f"acknowledged-{number}" for number in range(WRITERS)]
    writers = [start("writer", store, note) for note in notes]
    half = len(jobs[DOOMED]) // 2
    for number, writer in enumerate(writers):
        tell(writer, jobs[number][: half + AHEAD] if number == DOOMED else jobs[number], more=number == DOOMED)
    kill_when_begun(writers[DOOMED], notes[DOOMED], jobs[DOOMED][half])
    done = {Job(note.rollout_id, note.seq) for note in read(notes[DOOMED]) if note.what != "begin"}
    begun = {Job(note.rollout_id, note.seq) for note in read(notes[DOOMED])}
    print(
        f"writer {DOOMED} killed: {len(done)} of its {len(jobs[DOOMED])} calls acknowledged, "
        f"{len(begun - done)} begun and unfinished; a replacement does the rest"
    )
    notes.append(directory / "acknowledged-replacement")
    replacement = start("writer", store, notes[-1])
    tell(replacement, [job for job in jobs[DOOMED] if job not in done])
    for writer in [*writers, replacement]:
        status = writer.wait(PATIENCE_S)
        if status != (-signal.SIGKILL if writer is writers[DOOMED] else 0):
            print(f"a writer ended with status {status}", file=sys.stderr)
            return 1
    consumer = start("consumer", store, directory / "handover", *notes)
    output, _ = consumer.communicate(timeout=PATIENCE_S)
    if consumer.returncode != 0:
        print(f"the consumer ended with status {consumer.returncode}", file=sys.stderr)
        return 1
    lines = [msgspec.json.decode(line, type=Line) for line in output.splitlines()]
    acknowledged = sum(len(read(note)) for note in notes)
    return report(lines, acknowledged)


def start(role: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, role, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(writer: subprocess.Popen[str], jobs: Iterable[Job], *, more: bool = False) -> None:
    assert writer.stdin is not None
    writer.stdin.writelines(f"{json.dumps(job)}\n" for job in jobs)
    writer.stdin.flush()
    if not more:
        writer.stdin.close()


def kill_when_begun(writer: subprocess.Popen[str], note: Path, job: Job) -> None:
    wanted = Acknowledged("begin", *job)
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in read(note):
        if writer.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"writer {writer.pid} never came to {job}")
    writer.kill()
    writer.wait()


def read(note: Path) -> list[Acknowledged]:
    """What a writer noted so far; a line that is being written doesn't count."""
    if not note.exists():
        return []
    return [msgspec.json.decode(line, type=Acknowledged) for line in note.read_bytes().split(b"\n")[:-1]]


# ---- a writer


async def write(directory: Path, note: Path) -> int:
    """Put the calls named on standard input, one after another, and note what is acknowledged."""
    rollouts = {rollout.rollout_id: rollout for rollout in recordings.rollouts()}
    descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def acknowledged(what: str, job: Job, choice_index: int = 0) -> None:
        os.write(descriptor, msgspec.json.encode(Acknowledged(what, *job, choice_index)) + b"\n")

    async with FileStore(directory) as store:
        for line in sys.stdin:
            job = Job(*json.loads(line))
            call = rollouts[job.rollout_id].calls[job.seq]
            await store.begin_call(job.rollout_id, call.model_call_id, choices=call.choices)
            acknowledged("begin", job)
            if call.outcome == "recorded":
                await store.put_many(call.entries)
                for entry in call.entries:
                    acknowledged("put", job, entry.choice_index)
            else:
                await store.settle_call(job.rollout_id, call.model_call_id, call.outcome, detail=call.note)
                acknowledged("settle", job)
    return 0


# ---- the consumer


def consume(directory: Path, handover: Path, notes: Sequence[Path]) -> int:
    """Freeze, check, hand over and retire every rollout; one line of JSON each on standard output."""
    handover.mkdir(mode=0o700, exist_ok=True)
    acknowledged: dict[str, list[Acknowledged]] = {}
    for note in notes:
        for one in read(note):
            acknowledged.setdefault(one.rollout_id, []).append(one)
    with FileStore(directory) as store:
        for rollout in recordings.rollouts():
            line = consume_one(store, rollout, acknowledged.get(rollout.rollout_id, []), handover)
            print(msgspec.json.encode(line).decode(), flush=True)
    return 0


def consume_one(
    store: FileStore, rollout: recordings.RecordedRollout, acknowledged: list[Acknowledged], handover: Path
) -> Line:
    with store.freeze_now(rollout.rollout_id) as snapshot:
        entries = list(snapshot.entries)
        sequences = [[*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()] for entry in entries]
        line = Line(
            rollout=rollout.rollout_id,
            calls=len(snapshot.calls),
            entries=len(entries),
            prompt_ids=sum(len(entry.prompt_token_ids) for entry in entries),
            distinct_ids=distinct(sequences),
            raw_bytes=4 * sum(map(len, sequences)),
            disk_bytes=store.stat_now(rollout.rollout_id).bytes,
            sampled_ids=sum(len(entry.generation_token_ids) for entry in entries),
            outcomes=dict(Counter(call.outcome for call in snapshot.calls)),
        )
        problems = [*wrong_calls(rollout, snapshot), *wrong_entries(rollout, entries), *missing(acknowledged, snapshot)]
        path = hand_over(entries, handover / f"{rollout.rollout_id}.npz")
        problems += wrong_file(rollout, path)
        if not problems:
            problems += retire(store, snapshot, rollout)
        line.problems = problems
    line.state = store.stat_now(rollout.rollout_id).state
    return line


def wrong_calls(rollout: recordings.RecordedRollout, snapshot: Snapshot) -> list[str]:
    expected = {call.model_call_id: call.outcome for call in rollout.calls if call.generates}
    found = {call.model_call_id: call.outcome for call in snapshot.calls}
    problems = [
        f"{name}: {found.get(name, 'absent')} instead of {expected.get(name, 'absent')}"
        for name in sorted({*expected, *found})
        if found.get(name) != expected.get(name)
    ]
    if snapshot.incomplete != ("lost" in expected.values()):
        problems.append(f"incomplete is {snapshot.incomplete}")
    return problems


def wrong_entries(rollout: recordings.RecordedRollout, entries: list[TokenEntry]) -> list[str]:
    expected = {(entry.model_call_id, entry.choice_index): entry for entry in rollout.entries}
    found = {(entry.model_call_id, entry.choice_index): entry for entry in entries}
    problems = [f"{name}: not in both" for name in sorted(expected.keys() ^ found.keys())]
    if len(found) != len(entries):
        problems.append("an entry is there twice")
    for name in expected.keys() & found.keys():
        problems += [
            f"{name}: {field} differs"
            for field in FIELDS
            if not same_array(getattr(found[name], field), getattr(expected[name], field))
        ]
        if not identical(found[name], expected[name]):
            problems.append(f"{name}: not identical")
    return problems


def missing(acknowledged: list[Acknowledged], snapshot: Snapshot) -> list[str]:
    """Acknowledged records that the snapshot doesn't show."""
    entries = {(entry.model_call_id, entry.choice_index) for entry in snapshot.entries}
    calls = {call.model_call_id for call in snapshot.calls}
    problems = []
    for one in acknowledged:
        name = f"call-{one.seq:04d}"
        if name not in calls or (one.what == "put" and (name, one.choice_index) not in entries):
            problems.append(f"{name}: the acknowledged {one.what} is missing")
    return problems


def hand_over(entries: list[TokenEntry], path: Path) -> Path:
    """The arrays in one file that is there as a whole or not at all, and stays after a power cut."""
    arrays = {
        f"{entry.model_call_id}.{entry.choice_index}.{field}": getattr(entry, field)
        for entry in entries
        for field in FIELDS
    }
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def wrong_file(rollout: recordings.RecordedRollout, path: Path) -> list[str]:
    with np.load(path) as arrays:
        return [
            f"{path.name}: {name} differs"
            for entry in rollout.entries
            for field in FIELDS
            if (name := f"{entry.model_call_id}.{entry.choice_index}.{field}") not in arrays
            or not same_array(arrays[name], getattr(entry, field))
        ]


def retire(store: FileStore, snapshot: Snapshot, rollout: recordings.RecordedRollout) -> list[str]:
    """Retire what was handed over, and see that no late writer gets in before or after."""
    problems = []
    late = msgspec.structs.replace(rollout.entries[0], model_call_id="call-late")
    identity: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    if not refuses(store, late, FrozenError):
        problems.append("a frozen rollout took an entry")
    if not store.retire_now(rollout.rollout_id, **identity):
        problems.append("retire refused the snapshot that was consumed")
    if not refuses(store, late, RetiredError):
        problems.append("a retired rollout took an entry")
    return problems


def refuses(store: FileStore, entry: TokenEntry, error: type[Exception]) -> bool:
    try:
        store.put_now(entry)
    except error:
        return True
    return False


def same_array(one: Any, other: Any) -> bool:
    """Same dtype, shape and bits."""
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def distinct(sequences: list[list[int]]) -> int:
    """How many ids are left if every prefix that sequences share is counted once."""
    total = 0
    before: list[int] = []
    for sequence in sorted(sequences):
        shared = next((i for i, pair in enumerate(zip(before, sequence, strict=False)) if pair[0] != pair[1]), None)
        total += len(sequence) - (min(len(before), len(sequence)) if shared is None else shared)
        before = sequence
    return total


# ---- the report

HEADINGS = (
    "rollout",
    "calls",
    "entries",
    "prompt ids",
    "sampled ids",
    "distinct ids",
    "raw int32 bytes",
    "bytes on disk",
    "exact",
    "outcomes",
    "state after",
)


def report(lines: list[Line], acknowledged: int) -> int:
    """Print the table and the summary; the exit status."""
    rows = [HEADINGS, *(row(line) for line in lines), row(total(lines))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    for cells in rows:
        aligned = (
            cell.rjust(width) if 0 < column < 8 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        print("  ".join(aligned).rstrip())
    print("raw int32 bytes: all prompt and sampled ids, 4 bytes each; bytes on disk: log-probs and contents included")
    for line in lines:
        for problem in line.problems:
            print(f"{line.rollout}: {problem}", file=sys.stderr)
    everything = total(lines)
    exact = not everything.problems and len(lines) == len(recordings.names()) and everything.state == "retired"
    print(
        f"{'exact' if exact else 'NOT EXACT'}: {len(lines)} rollouts, {everything.calls} calls, "
        f"{everything.entries} entries, {everything.sampled_ids} sampled ids; "
        f"{acknowledged} acknowledged records, one writer killed, {len(everything.problems)} problems"
    )
    return 0 if exact else 1


def row(line: Line) -> tuple[str, ...]:
    return (
        line.rollout,
        f"{line.calls}",
        f"{line.entries}",
        f"{line.prompt_ids:,}",
        f"{line.sampled_ids:,}",
        f"{line.distinct_ids:,}",
        f"{line.raw_bytes:,}",
        f"{line.disk_bytes:,}",
        "no" if line.problems else "yes",
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(line.outcomes.items(), key=lambda item: -item[1])),
        line.state,
    )


def total(lines: list[Line]) -> Line:
    outcomes: Counter[str] = Counter()
    for line in lines:
        outcomes.update(line.outcomes)
    return Line(
        rollout="all",
        calls=sum(line.calls for line in lines),
        entries=sum(line.entries for line in lines),
        prompt_ids=sum(line.prompt_ids for line in lines),
        distinct_ids=sum(line.distinct_ids for line in lines),
        raw_bytes=sum(line.raw_bytes for line in lines),
        disk_bytes=sum(line.disk_bytes for line in lines),
        sampled_ids=sum(line.sampled_ids for line in lines),
        outcomes=dict(outcomes),
        state=", ".join(sorted({line.state for line in lines})),
        problems=[problem for line in lines for problem in line.problems],
    )


if __name__ == "__main__":
    sys.exit(main())
