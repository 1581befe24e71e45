"""A file system that goes away while a workload runs, as when the power is cut: FS_IOC_SHUTDOWN of ext4 and xfs.

Only what was acknowledged before the call is demanded: a sync that overlaps the shutdown may return success and still
lose its record, which is the kernel's doing.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.children import Child, Nursery

from .power_checks import ANOTHER_BOOT, problems_after
from .power_disk import FileSystem, formatted, mounted
from .power_recording import note
from .power_workload import Step, work

__all__ = ("SHUT_DOWN", "Cut", "cut_while_working")

SHUT_DOWN, FLUSHING_THE_LOG, FLUSHING_NOTHING = 0x8004587D, 1, 2


class Cut(NamedTuple):
    """What one cut gave."""

    acknowledged: int
    problems: list[str]


def cut_while_working(fs: FileSystem, place: Path, nursery: Nursery, *, seed: int, rollouts: int) -> Cut:
    """Let a workload run, shut its file system down, mount it again and check.

    The seed says when, whether the journal is flushed, and whether it is read with the eyes of a later boot or of the
    same one.
    """
    chance = random.Random(seed)
    formatted(fs, place / "image")
    point = place / "disk"
    steps: dict[int, Step] = {}
    with mounted(fs, place / "image", point):
        child = nursery.start(work, str(point / "store"), "", seed, rollouts)
        _listen(child, steps, 0.02 + 0.6 * chance.random())
        shut_down(point, chance.choice([FLUSHING_NOTHING, FLUSHING_NOTHING, FLUSHING_THE_LOG]))
        _hear_out(child, steps)
        nursery.forget(child)
    acknowledged = sum(step.done is not None for step in steps.values())
    with mounted(fs, place / "image", point):
        boot_id = chance.choice(["", ANOTHER_BOOT])
        problems = problems_after(point / "store", list(steps.values()), 1, boot_id=boot_id, seed=seed)
    return Cut(acknowledged, problems)


def shut_down(point: Path, how: int = FLUSHING_NOTHING) -> None:
    """From now on the file system answers EIO, as if its device were gone."""
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUT_DOWN, struct.pack("I", how))
    finally:
        os.close(fd)


def _listen(child: Child, steps: dict[int, Step], seconds: float) -> None:
    """What was said within that time, from the first word on; longer, until something was acknowledged."""
    note(steps, child.receive())
    until = time.monotonic() + seconds
    while True:
        waiting = max(0.0, until - time.monotonic())
        if not child.channel.poll(waiting):
            if any(step.done is not None for step in steps.values()):
                return
            until = time.monotonic() + 0.01
            continue
        try:
            note(steps, child.receive())
        except EOFError:
            return  # it did all that it had to do


def _hear_out(child: Child, steps: dict[int, Step]) -> None:
    """What it began, to the end; what was acknowledged by now is not counted."""
    while True:
        try:
            message: Any = child.channel.recv()
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, Step):
            note(steps, message)
