"""A disk that remembers every write and flush, and fails on demand: one file in FUSE, below a loop device.

The file systems on it are the kernel's own. The image of the disk is a plain file in memory, which a process serves as
`disk`; beside it, whatever is written to `control` says which reads and writes fail from then on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = (
    "FILE_SYSTEMS",
    "Disk",
    "FileSystem",
    "disk",
    "extents",
    "formatted",
    "mounted",
    "reason_against",
    "workplace",
)

MEGABYTE: Final = 1 << 20
HEAD: Final = struct.Struct("<cQI")
"""What stands before the data of each record of the log: W or F, offset, length."""
WRITE, FLUSH = b"W", b"F"


class FileSystem(NamedTuple):
    """A kind of file system, as it is made and mounted here."""

    name: str
    kind: str
    """As `mount -t` calls it."""
    size: int
    make: tuple[str, ...]
    options: str
    repair: tuple[str, ...] = ()
    """What has to be run on it after a power cut, before it is mounted."""


FILE_SYSTEMS: Final[Mapping[str, FileSystem]] = {
    fs.name: fs
    for fs in (
        FileSystem(
            "ext4",
            "ext4",
            64 * MEGABYTE,
            ("mkfs.ext4", "-q", "-F", "-b", "4096", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
            "commit=1",
        ),
        FileSystem(
            "ext4-without-journal",
            "ext4",
            64 * MEGABYTE,
            ("mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=0"),
            "defaults",
            ("e2fsck", "-fy"),
        ),
        FileSystem("xfs", "xfs", 320 * MEGABYTE, ("mkfs.xfs", "-q", "-f", "-K"), "nouuid"),
        FileSystem("btrfs", "btrfs", 128 * MEGABYTE, ("mkfs.btrfs", "-q", "-f", "-K"), "commit=1,nodiscard"),
    )
}


def reason_against(fs: FileSystem, *, recording: bool = True) -> str:
    """Why this file system can't be mounted here, `recording` on a disk in FUSE; empty if it can."""
    if os.geteuid() != 0:
        return f"{fs.name}: only root can mount"
    for device in ("/dev/loop-control", *(("/dev/fuse",) if recording else ())):
        if not os.path.exists(device):
            return f"{fs.name}: there is no {device}"
    for command in (fs.make[0], *fs.repair[:1], "mount", "umount", *(("fusermount3",) if recording else ())):
        if shutil.which(command) is None:
            return f"{fs.name}: there is no {command}"
    if recording and importlib.util.find_spec("mfusepy") is None:
        return f"{fs.name}: mfusepy is not installed"
    with open("/proc/filesystems") as file:
        if fs.kind not in file.read().split():
            return f"{fs.name}: this kernel has no {fs.kind}"
    return ""


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory in memory if there is such a file system: images and logs are written there."""
    memory = "/dev/shm"
    place = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tokcap-power-", dir=place, ignore_cleanup_errors=True) as path:
        yield Path(path)


def formatted(fs: FileSystem, image: Path) -> Path:
    """Make an empty file system in a file."""
    with open(image, "wb") as file:
        file.truncate(fs.size)
    run(*fs.make, str(image))
    return image


def run(*words: str, allowed: Sequence[int] = (0,)) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in allowed:
        raise OSError(errno.EIO, f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


# ---- loop devices and mounts

_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_CLEAR_WITH_LAST_USER = 4


def _attach(path: str) -> int:
    """A descriptor of a loop device on a file. The device is free again once nobody has it open or mounted."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    backing = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    settings = bytearray(304)
    struct.pack_into("I", settings, 0, backing)
    struct.pack_into("I", settings, 8 + 52, _CLEAR_WITH_LAST_USER)
    try:
        for _ in range(100):
            number = fcntl.ioctl(control, _GET_FREE)
            node = f"/dev/loop{number}"
            if not os.path.exists(node):
                os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(7, number))
            device = os.open(node, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, bytes(settings))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.01)  # somebody else was faster
                continue
            return device
        raise OSError(errno.EBUSY, "there is no free loop device")
    finally:
        os.close(backing)
        os.close(control)


@contextlib.contextmanager
def mounted(fs: FileSystem, image: Path, point: Path) -> Iterator[Path]:
    """The file system in `image`, at `point`."""
    point.mkdir(exist_ok=True)
    device = _attach(str(image))
    try:
        run("mount", "-t", fs.kind, "-o", fs.options, os.readlink(f"/proc/self/fd/{device}"), str(point))
    finally:
        os.close(device)
    try:
        yield point
    finally:
        _unmount(point)


def _unmount(point: Path) -> None:
    for _ in range(50):
        done = subprocess.run(["umount", str(point)], capture_output=True, text=True)
        if not done.returncode:
            return
        time.sleep(0.02)  # a process that was killed has not let go yet
    subprocess.run(["umount", "--lazy", str(point)], capture_output=True)
    raise OSError(errno.EBUSY, f"can't unmount {point}: {done.stderr.strip()}")


_FIEMAP = 0xC020660B
_FIEMAP_HEAD, _FIEMAP_EXTENT = struct.Struct("QQIIII"), struct.Struct("QQQ")
_EXTENT_SIZE = 56


def extents(path: Path) -> list[tuple[int, int]]:
    """Where on its disk the bytes of a file are: offset and end of each stretch."""
    most = 64
    answer = bytearray(_FIEMAP_HEAD.pack(0, 1 << 60, 1, 0, most, 0) + bytes(_EXTENT_SIZE * most))
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FIEMAP, answer)
    finally:
        os.close(fd)
    found = []
    for number in range(_FIEMAP_HEAD.unpack_from(answer)[3]):
        _, physical, length = _FIEMAP_EXTENT.unpack_from(answer, _FIEMAP_HEAD.size + _EXTENT_SIZE * number)
        found.append((physical, physical + length))
    return found


# ---- the disk


class Disk:
    """The disk from outside."""

    def __init__(self, place: Path) -> None:
        self.image, self.log = place / "image", place / "log"
        self.file, self._control = place / "fuse" / "disk", place / "fuse" / "control"

    @property
    def position(self) -> int:
        """How much of the log is written: everything that the disk was told so far lies below."""
        return self.log.stat().st_size

    def fail(
        self, what: str, *, ranges: Sequence[tuple[int, int]] = (), holding: str = "", times: int | None = None
    ) -> None:
        """From now on calls of this kind (`read`, `write`, `flush`) that touch a range, or write those words, fail.

        `times`: so many of them, then no more; None: for ever.
        """
        self._tell({"what": what, "ranges": list(ranges), "holding": holding, "left": times})

    def heal(self) -> None:
        """Nothing fails any more."""
        self._tell({})

    @property
    def failed(self) -> int:
        """How many calls were made to fail."""
        return int(self._control.read_bytes())

    def _tell(self, rule: dict[str, Any]) -> None:
        fd = os.open(self._control, os.O_WRONLY)
        try:
            os.write(fd, json.dumps(rule).encode())
        finally:
            os.close(fd)


@contextlib.contextmanager
def disk(place: Path, *, recording: bool = True) -> Iterator[Disk]:
    """Serve `place/image` as a disk; what it is told goes to `place/log`."""
    made = Disk(place)
    point = place / "fuse"
    point.mkdir(exist_ok=True)
    made.log.write_bytes(b"")
    words = [sys.executable, "-m", __name__, str(point), str(made.image), str(made.log) if recording else ""]
    server = subprocess.Popen(words, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    try:
        while not made.file.exists():
            if server.poll() is not None:
                assert server.stderr is not None
                raise OSError(errno.EIO, f"the disk can't be served: {server.stderr.read().decode().strip()}")
            time.sleep(0.005)
        yield made
    finally:
        for patience in ("--quiet", "-z"):
            if not subprocess.run(["fusermount3", "-u", patience, str(point)], capture_output=True).returncode:
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        if server.poll() is None:
            server.kill()
            server.wait()
        assert server.stderr is not None
        server.stderr.close()


def _serve(point: str, image: str, log: str) -> None:
    """In a process of its own: the files `disk` and `control`."""
    fuse: Any = importlib.import_module("mfusepy")
    size = os.stat(image).st_size
    held = os.open(image, os.O_RDWR)
    logged = os.open(log, os.O_WRONLY | os.O_APPEND) if log else -1

    class Served(fuse.Operations):  # type: ignore[misc]
        use_ns = True
        rule: dict[str, Any]
        failed: int

        def __init__(self) -> None:
            self.rule, self.failed = {}, 0

        def init_with_config(self, connection: Any, config: Any) -> None:
            if config is not None:
                config.direct_io = 1  # what is read comes from here, and from no cache

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
            if path not in ("/disk", "/control"):
                raise OSError(errno.ENOENT, path)
            length = size if path == "/disk" else 20
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": length}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", "disk", "control"]

        def open(self, path: str, flags: int) -> int:
            return 0

        def read(self, path: str, length: int, offset: int, fh: int) -> bytes:
            if path == "/control":
                return str(self.failed).rjust(20).encode()[offset : offset + length]
            self._may_fail("read", offset, length, b"")
            return os.pread(held, length, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if path == "/control":
                self.rule = json.loads(data)
                return len(data)
            self._may_fail("write", offset, len(data), data)
            os.pwrite(held, data, offset)
            if logged >= 0:
                os.writev(logged, [HEAD.pack(WRITE, offset, len(data)), data])
            return len(data)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            self._may_fail("flush", 0, 0, b"")
            if logged >= 0:
                os.write(logged, HEAD.pack(FLUSH, 0, 0))
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            return 0

        def _may_fail(self, what: str, offset: int, length: int, data: bytes) -> None:
            rule = self.rule
            if not rule or rule["what"] != what or rule["left"] == 0:
                return
            touched = any(offset < end and offset + length > begin for begin, end in rule["ranges"])
            if what == "flush" or touched or (rule["holding"] and rule["holding"].encode() in data):
                if rule["left"] is not None:
                    rule["left"] -= 1
                self.failed += 1
                raise OSError(errno.EIO, "the disk was told to fail")

    fuse.FUSE(Served(), point, foreground=True, nothreads=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
