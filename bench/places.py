"""Where it is measured: a journalled ext4, a disk of this machine, and memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from tokcap.store.root import file_system_of

__all__ = ("PLACES", "UnavailableError", "describe", "place")

PLACES = ("ext4", "disk", "tmpfs")

IMAGE_BYTES = 2 << 30


class UnavailableError(Exception):
    """This place can't be had here; the message says why."""


@contextlib.contextmanager
def place(name: str) -> Generator[Path, None, None]:
    """An empty directory on `ext4` (loop-mounted, with a journal), `disk` or `tmpfs`.

    The disk is the one with the temporary directory, or with `$TOKCAP_BENCH_DIR`.
    """
    if name == "ext4":
        with _loop_ext4() as path:
            yield path
        return
    if name not in PLACES:
        raise UnavailableError(f"there is no such place; known are {', '.join(PLACES)}")
    parent = "/dev/shm" if name == "tmpfs" else os.environ.get("TOKCAP_BENCH_DIR", tempfile.gettempdir())
    if (file_system_of(parent) == "tmpfs") != (name == "tmpfs"):
        raise UnavailableError(
            f"{parent} is on {file_system_of(parent)}; set TOKCAP_BENCH_DIR to a directory on a disk"
        )
    path = Path(tempfile.mkdtemp(prefix="tokcap-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _loop_ext4() -> Generator[Path, None, None]:
    if os.geteuid() != 0:
        raise UnavailableError("mounting a loop device needs root")
    work = Path(tempfile.mkdtemp(prefix="tokcap-ext4-"))
    image, mount = work / "image", work / "mount"
    mount.mkdir()
    try:
        with open(image, "wb") as file:
            # Written, not sparse: a hole would be allocated inside the measured time.
            for _ in range(IMAGE_BYTES >> 20):
                file.write(bytes(1 << 20))
        _command("mkfs.ext4", "-q", "-F", str(image))
        _command("mount", "-o", "loop", str(image), str(mount))
    except UnavailableError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    try:
        path = mount / "bench"
        path.mkdir(mode=0o700)
        yield path
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)
        shutil.rmtree(work, ignore_errors=True)


def _command(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UnavailableError(f"{words[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{' '.join(words)}: {error.stderr.strip()}") from None


def describe(path: Path) -> str:
    """Type of the file system under `path`, and whether it has a journal."""
    kind = file_system_of(str(path))
    if kind != "ext4":
        return kind
    number = path.stat().st_dev
    device = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    task = Path(f"/sys/fs/ext4/{os.path.basename(device)}/journal_task")
    try:
        journalled = "<none>" not in task.read_text()
    except OSError:
        return kind
    return f"{kind}, {'with' if journalled else 'without'} a journal"
