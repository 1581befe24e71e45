"""A workload on a recorded disk, and every state in which a power cut could have left that disk.

Everything that was written before the last flush that was done is there. Of what was written after it, a disk may keep
anything: nothing, all, the first writes, or any of the blocks of 4 kB.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tests.children import Child, Nursery

from .power_checks import problems_after
from .power_disk import FILE_SYSTEMS, FLUSH, HEAD, WRITE, FileSystem, disk, formatted, mounted, run
from .power_workload import FATES, Step, work

__all__ = ("UNMOUNTABLE", "Recording", "State", "check_states", "gather", "record")

BLOCK = 4096
UNMOUNTABLE = "it can't be mounted: "
"""How the problem begins that a state has whose file system the kernel does not mount."""
Keeps = Literal["nothing", "everything", "first writes", "some writes", "some blocks"]
"""What the disk has of that which was not flushed."""


class State(NamedTuple):
    """A power cut: where in the log, and what the disk kept."""

    operation: int
    """How many writes and flushes the disk was told before."""
    keeps: Keeps
    seed: int

    def __str__(self) -> str:
        return f"--at {self.operation} --keeps '{self.keeps}' --chance {self.seed}"


class Recording:
    """What a disk was told, and what a workload said meanwhile."""

    def __init__(self, fs: FileSystem, place: Path, steps: Sequence[Step], mounted_at: int) -> None:
        self.fs, self.place, self.steps = fs, place, steps
        self.begin = place / "begin"
        """The image before the log."""
        self.mounted_at = mounted_at
        """Position in the log at which the file system was mounted: the power is cut later."""
        self._log = (place / "log").read_bytes()
        self.operations: list[tuple[bytes, int, int, int]] = []
        """Kind, offset on the disk, and where in the log the data is."""
        at = 0
        while at + HEAD.size <= len(self._log):
            kind, offset, length = HEAD.unpack_from(self._log, at)
            at += HEAD.size + length
            self.operations.append((kind, offset, at - length, at))
        self.ends = [end for *_, end in self.operations]

    @classmethod
    def kept(cls, source: Path, place: Path) -> Recording:
        """One that was kept because something was found."""
        name, steps, mounted_at = pickle.loads((source / "steps").read_bytes())
        shutil.copy(source / "log", place / "log")
        _copy_sparse(source / "begin", place / "begin", digging=True)
        return cls(FILE_SYSTEMS[name], place, steps, mounted_at)

    def keep(self, target: Path) -> None:
        """Copy what is needed to see a state again."""
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.place / "log", target / "log")
        _copy_sparse(self.begin, target / "begin", digging=True)
        (target / "steps").write_bytes(pickle.dumps((self.fs.name, list(self.steps), self.mounted_at)))

    @property
    def flushes(self) -> int:
        return sum(kind == FLUSH for kind, *_ in self.operations)

    def position(self, state: State) -> int:
        """How much of the log is before the cut."""
        return self.ends[state.operation - 1] if state.operation else 0

    def choose(self, count: int, chance: random.Random) -> list[State]:
        """States in the order of the log: half of the cuts come right after something was acknowledged."""
        first = bisect_right(self.ends, self.mounted_at)
        done = [step.done for step in self.steps if step.done is not None and step.done >= self.mounted_at]
        states = []
        for number in range(count):
            if number % 2 and done:
                operation = bisect_right(self.ends, chance.choice(done))
            else:
                operation = chance.randrange(first, len(self.ends) + 1)
            keeps: Keeps = chance.choice(get_args(Keeps))
            states.append(State(operation, keeps, chance.getrandbits(32)))
        return sorted(states)

    def right_after(self, names: Sequence[str]) -> list[State]:
        """The power goes right after steps of these names were acknowledged, and the disk keeps nothing unflushed."""
        done = [step.done for step in self.steps if step.done is not None and step.name in names]
        return sorted({State(bisect_right(self.ends, position), "nothing", 0) for position in done})

    def images(self, states: Sequence[State], target: Path) -> Iterator[State]:
        """Build the image of each state in `target`, one after another."""
        durable = self.place / "durable"
        _copy_sparse(self.begin, durable)
        unflushed: list[tuple[int, int, int]] = []
        done = 0
        with open(durable, "r+b", buffering=0) as file:
            for state in states:
                while done < state.operation:
                    kind, offset, start, end = self.operations[done]
                    done += 1
                    if kind == WRITE:
                        unflushed.append((offset, start, end))
                        continue
                    for offset, start, end in unflushed:
                        self._write(file, offset, start, end)
                    unflushed.clear()
                _copy_sparse(durable, target)
                with open(target, "r+b", buffering=0) as image:
                    for offset, start, end in self._kept(unflushed, state):
                        self._write(image, offset, start, end)
                yield state

    def _write(self, file: Any, offset: int, start: int, end: int) -> None:
        file.seek(offset)
        file.write(self._log[start:end])

    @staticmethod
    def _kept(unflushed: list[tuple[int, int, int]], state: State) -> list[tuple[int, int, int]]:
        chance = random.Random(state.seed)
        if state.keeps == "nothing":
            return []
        if state.keeps == "everything":
            return unflushed
        if state.keeps == "first writes":
            return unflushed[: chance.randrange(len(unflushed) + 1)]
        if state.keeps == "some writes":
            return [write for write in unflushed if chance.random() < 0.5]
        return [
            (offset + at, start + at, min(start + at + BLOCK, end))
            for offset, start, end in unflushed
            for at in range(0, end - start, BLOCK)
            if chance.random() < 0.5
        ]


def _copy_sparse(source: Path, target: Path, *, digging: bool = False) -> None:
    """Copy what is in a file and leave the holes out; `digging`: zeros, too, and to any file system."""
    with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as written:
        size = os.fstat(read.fileno()).st_size
        written.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # only a hole is left
            end = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            while at < end:
                if digging:
                    data = os.pread(read.fileno(), min(BLOCK, end - at), at)
                    if data.strip(b"\0"):
                        os.pwrite(written.fileno(), data, at)
                    at += len(data)
                else:
                    at += os.copy_file_range(read.fileno(), written.fileno(), end - at, at, at)


def gather(child: Child) -> list[Step]:
    """The steps that a workload tells of, until it ends."""
    steps: dict[int, Step] = {}
    for message in child.end():
        note(steps, message)
    return list(steps.values())


def note(steps: dict[int, Step], message: Any) -> None:
    """Add what a workload said."""
    if isinstance(message, Step):
        steps[message.number] = message
    else:
        number, position, result = message
        steps[number].done, steps[number].result = position, result


def record(
    fs: FileSystem,
    place: Path,
    nursery: Nursery,
    *,
    seed: int,
    rollouts: int,
    fates: Sequence[str] = FATES,
    without: str = "",
) -> Recording:
    """Let a workload run on a file system of this kind, all of whose writes and flushes are recorded."""
    formatted(fs, place / "image")
    _copy_sparse(place / "image", place / "begin", digging=True)
    with disk(place) as recorded:
        with mounted(fs, recorded.file, place / "recorded") as point:
            mounted_at = recorded.position
            child = nursery.start(work, str(point / "store"), str(recorded.log), seed, rollouts, fates, without)
            steps = gather(child)
            nursery.forget(child)
            end = recorded.position
        # What unmounting writes is no part of it.
        with open(recorded.log, "r+b") as log:
            log.truncate(end)
    return Recording(fs, place, steps, mounted_at)


def check_states(recording: Recording, states: Sequence[State]) -> Iterator[tuple[State, list[str]]]:
    """Mount the file system of each state and check the store on it."""
    place, fs = recording.place, recording.fs
    image = place / "cut"
    for state in recording.images(states, image):
        if fs.repair:
            run(*fs.repair, str(image), allowed=(0, 1))
        with contextlib.ExitStack() as stack:
            try:
                point = stack.enter_context(mounted(fs, image, place / "again"))
            except OSError as error:
                yield state, [f"{UNMOUNTABLE}{error}"]
                continue
            position = recording.position(state)
            yield state, problems_after(point / "store", recording.steps, position, seed=state.seed)
