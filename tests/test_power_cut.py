"""A file system that goes away without flushing anything, as at a power cut: what was acknowledged is there afterwards.

Each round shuts a journalled ext4 down while a writer puts to many rollouts at once, mounts it again, and reads with
the eyes of a later boot. Only what the writer had said before the shutdown is demanded: a sync that overlaps the
shutdown may return success and still lose its record, which is the kernel's doing.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import booted_as
from tokcap import FileStore, TokenEntry

SHUT_DOWN, WITHOUT_FLUSHING = 0x8004587D, 2
ANOTHER_BOOT = "00000000-0000-0000-0000-00000000b002"
ROLLOUTS = 24

WRITER = """
import asyncio, os, sys
from tests.test_power_cut import ROLLOUTS, entry
from tokcap import FileStore

async def main():
    store = FileStore(sys.argv[1], sweep_every_s=0)
    async def client(number):
        for turn in range(1000):
            if turn % 3 == 0:
                await store.begin_call(f"r{number}", f"c{turn}")
            await store.put(entry(number, turn))
            os.write(1, f"{number} {turn}\\n".encode())
    await asyncio.gather(*(client(number) for number in range(ROLLOUTS)))

asyncio.run(main())
"""


def entry(number: int, turn: int) -> TokenEntry:
    ids = np.random.default_rng(number).integers(0, 150_000, 60 + 40 * turn, dtype=np.int32)
    return TokenEntry(f"r{number}", f"c{turn}", ids, ids[:20], -ids[:20].astype(np.float64))


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't {' '.join(words[:2])}: {done.stderr.strip()}")


@pytest.fixture
def disk() -> Iterator[Path]:
    """A journalled ext4 in a file, mounted; `mount` and `umount` may be repeated."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    base = Path(tempfile.mkdtemp(prefix="tokcap-power-"))
    point = base / "disk"
    point.mkdir()
    with open(base / "image", "wb") as image:
        image.truncate(96 << 20)
    try:
        run("mkfs.ext4", "-q", str(base / "image"))
        run("mount", "-o", "loop", str(base / "image"), str(point))
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True)
        shutil.rmtree(base, ignore_errors=True)


def cut_while_writing(disk: Path, directory: Path, seconds: float) -> dict[str, set[str]]:
    """Calls of each rollout that were acknowledged before the file system went away."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    said = writer.stdout.fileno()
    try:
        told = os.read(said, 1)  # it has begun
        time.sleep(seconds)
        fd = os.open(disk, os.O_RDONLY)
        waiting = struct.unpack("i", fcntl.ioctl(said, termios.FIONREAD, bytes(4)))[0]
        while len(told) < waiting + 1:
            told += os.read(said, waiting + 1 - len(told))
        fcntl.ioctl(fd, SHUT_DOWN, struct.pack("I", WITHOUT_FLUSHING))
        os.close(fd)
    finally:
        writer.kill()
        writer.communicate()
    acknowledged: dict[str, set[str]] = {}
    for line in told.decode().split("\n")[:-1]:
        number, turn = line.split()
        acknowledged.setdefault(f"r{number}", set()).add(f"c{turn}")
    return acknowledged


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_survives_a_power_cut(disk: Path, seed: int) -> None:
    chance = random.Random(seed)
    directory = disk / "store"
    acknowledged = cut_while_writing(disk, directory, 0.02 + 0.3 * chance.random())
    subprocess.run(["umount", str(disk)], check=True)
    subprocess.run(["mount", "-o", "loop", str(disk.parent / "image"), str(disk)], check=True)
    assert sum(map(len, acknowledged.values())) > 1
    with booted_as(ANOTHER_BOOT), FileStore(directory, sweep_every_s=0) as store:
        for rollout_id, calls in acknowledged.items():
            with store.read_now(rollout_id) as snapshot:
                found = {stored.model_call_id: stored for stored in snapshot.entries}
                assert calls <= set(found), f"{rollout_id} lost {sorted(calls - set(found))}"
                for call, stored in found.items():
                    assert stored == entry(int(rollout_id[1:]), int(call[1:]))
                assert not snapshot.damage
            # The rollout lives on.
            fresh = next(turn for turn in range(2000) if f"c{turn}" not in found)
            store.put_now(entry(int(rollout_id[1:]), fresh))
            with store.freeze_now(rollout_id) as snapshot:
                assert calls | {f"c{fresh}"} <= {stored.model_call_id for stored in snapshot.entries}
