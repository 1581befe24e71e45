"""The store's own directory: made safely, refused where it would not be safe, marked with its format."""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import stat
from collections.abc import Iterator
from zlib import crc32

import msgspec

from ..errors import DurabilityError, UnsafeDirectoryError, UnsafeFilesystemError
from .files import Files, durability_error
from .frame import FORMAT_VERSION, LAST_IN_BATCH, Kind, frame_header, newer_format
from .layout import Layout
from .records import RootMarker, encode_record
from .scan import scan

__all__ = (
    "boot_id",
    "check_directory",
    "file_system_of",
    "group_id_of",
    "is_faster_with_space",
    "is_memory",
    "kernel_syncs_for",
    "open_root",
    "read_marker",
    "sync_threads_for",
)

logger = logging.getLogger("tokcap.store")

_MARKER_SEED = 0x746F6B63
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_REFUSED = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse",
    "fuseblk",
    "9p",
    "ceph",
    "lustre",
    "afs",
    "gfs2",
    "vfat",
    "exfat",
)
"""Known for locks that are local to one client, or for hard links that are copies or missing."""
_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL, errno.ENOLCK)
"""What a file system says of a call that it doesn't have."""
_VOLATILE = ("tmpfs", "ramfs", "overlay")
_WARNED: set[str] = set()
"""What this process has warned of: stores because of their file system, directories because of their owner."""
_MOST_COMPONENTS = 1000
_decode_marker = msgspec.msgpack.Decoder(RootMarker).decode


def boot_id() -> str:
    """Identity of the running kernel's boot; CLOCK_BOOTTIME is comparable within it.

    There is nothing to fall back to: whether bytes that nobody acknowledged are to be believed depends on it, so all
    processes of a node have to agree. Raises `DurabilityError` where it can't be read.
    """
    try:
        with open(_BOOT_ID) as file:
            found = file.read().strip()
        if not found:
            raise OSError(errno.ENODATA, "the file is empty")
    except OSError as error:
        doing = "can't tell which boot of the machine this is; mount /proc in this container as usual"
        raise durability_error(error, doing, _BOOT_ID) from error
    return found


def group_id_of(group: str | int | None) -> int | None:
    """The id of a group given by name or number."""
    if group is None or isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UnsafeDirectoryError(f"group={group!r}: there is no such group on this machine") from None


def file_system_of(path: str) -> str:
    """Type of the file system that holds `path`, as in /proc/self/mountinfo; empty if unknown."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo") as file:
            lines = file.readlines()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
            raise  # it could be told, and may be one that is refused
        return ""
    for line in lines:
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), fields[fields.index("-") + 1]
    return kind


def sync_threads_for(kind: str) -> int:
    """How many syncs to keep in flight on a file system of this type (measured, see CHANGELOG).

    ext4 and xfs merge concurrent syncs into one journal commit; btrfs answers them with full commits, several times
    slower than one after another; where a sync is free, threads only get into each other's way.
    """
    return {"btrfs": 1, "tmpfs": 1, "ramfs": 1}.get(kind, 16)


def is_memory(kind: str) -> bool:
    """Whether a sync has nothing to wait for on a file system of this type."""
    return kind in ("tmpfs", "ramfs")


def kernel_syncs_for(kind: str) -> int:
    """How many syncs the kernel is given at once on a file system of this type; 0: none.

    Measured on ext4, with a journal and without: throughput grows up to about 64 files and stays there up to 256.
    """
    return 0 if sync_threads_for(kind) == 1 else 192


def is_faster_with_space(kind: str) -> bool:
    """Whether a sync is faster inside space that was written ahead: where a longer file takes a commit of a journal.

    Measured on ext4, 0.17 ms instead of 0.35, and 0.09 instead of 0.18 without a journal; xfs 0.16 instead of 0.32. On
    btrfs, which never writes in place, there is no difference, and tmpfs has nothing to wait for.
    """
    return kind in ("ext2", "ext3", "ext4", "xfs")


def open_root(files: Files, layout: Layout, *, allow_unsafe_fs: bool) -> str:
    """Make or check the store's directory; the type of its file system.

    Raises `UnsafeDirectoryError`, `UnsafeFilesystemError`, `NewerFormatError`, `DurabilityError`.
    """
    root = layout.root
    try:
        _check_parent(root)
        _make(files, root)
        _check_root(files, root)
        kind = _check_file_system(files, layout, allow_unsafe_fs)
        for path in (layout.rollouts, layout.writers):
            if os.path.islink(path):
                raise UnsafeDirectoryError(
                    errno.ELOOP, f"{path} is a symbolic link, which leads out of the store: remove it"
                )
            if not os.path.isdir(path):
                _make(files, path)
        _mark(files, layout)
    except OSError as error:
        if isinstance(error, (UnsafeDirectoryError, UnsafeFilesystemError, DurabilityError)):
            raise
        raise durability_error(error, f"can't open the store directory {root}", root) from error
    return kind


def check_directory(files: Files, root: str) -> None:
    """Refuse what `open_root` refuses of a directory that is there; nothing is made. Raises `UnsafeDirectoryError`."""
    _check_parent(root)
    _check_root(files, root)


def _make(files: Files, path: str) -> None:
    """`path` and its missing parents, private and durable."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.mkdir(name)
        try:
            files.fsync_directory(os.path.dirname(name))
        except OSError:
            with contextlib.suppress(OSError):
                files.rmdir(name)
            raise


def _check_parent(root: str) -> None:
    parent = os.path.dirname(root)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    for path in _way_to(parent):
        there = os.stat(path)
        if there.st_mode & stat.S_IWOTH and not there.st_mode & stat.S_ISVTX:
            raise UnsafeDirectoryError(
                errno.EPERM,
                f"{path} can be written by everybody and is not sticky, so that anybody could replace the store in it: "
                f"chmod o-w {path}, or chmod +t {path}, or use another directory",
            )
        if there.st_uid not in (0, os.geteuid()) and path not in _WARNED:
            _WARNED.add(path)
            logger.warning("%s belongs to user %d, who could replace the store in it", path, there.st_uid)


def _way_to(path: str) -> Iterator[str]:
    """The directories that lead to `path`, and `path`, with every symlink followed.

    Raises `UnsafeDirectoryError` for a symlink that another user made where everybody may make one, as the kernel does
    with `fs.protected_symlinks`: it could lead elsewhere tomorrow.
    """
    at, rest = "/", [part for part in path.split("/") if part]
    yield at
    for _ in range(_MOST_COMPONENTS):
        if not rest:
            return
        name = f"{at.rstrip('/')}/{rest.pop(0)}"
        there = os.lstat(name)
        if not stat.S_ISLNK(there.st_mode):
            at = os.path.normpath(name)  # `..` of a link, whose way was followed
            yield at
            continue
        around = os.stat(at)
        if around.st_mode & stat.S_IWOTH and there.st_uid not in (os.geteuid(), around.st_uid):
            raise UnsafeDirectoryError(
                errno.ELOOP,
                f"{name} is a symbolic link that user {there.st_uid} made in a directory that everybody can write to: "
                f"give the directory that it points to ({os.path.realpath(name)})",
            )
        target = os.readlink(name)
        at = "/" if target.startswith("/") else at
        rest = [part for part in target.split("/") if part and part != "."] + rest
    raise UnsafeDirectoryError(errno.ELOOP, f"{path} has more symbolic links than can be followed")


def _check_root(files: Files, root: str) -> None:
    there = os.lstat(root)
    if stat.S_ISLNK(there.st_mode):
        raise UnsafeDirectoryError(
            errno.ELOOP, f"{root} is a symbolic link; give the directory that it points to ({os.path.realpath(root)})"
        )
    if not stat.S_ISDIR(there.st_mode):
        raise UnsafeDirectoryError(errno.ENOTDIR, f"{root} is not a directory; give a directory for the store")
    mode = stat.S_IMODE(there.st_mode)
    shared = files.modes.group_id is not None
    if shared and there.st_gid != files.modes.group_id:
        raise UnsafeDirectoryError(
            errno.EPERM,
            f"{root} belongs to group {there.st_gid}, not {files.modes.group_id}: chgrp it, or give its group",
        )
    if there.st_uid != os.geteuid() and not shared:
        raise UnsafeDirectoryError(
            errno.EPERM,
            f"{root} belongs to user {there.st_uid}, this process runs as {os.geteuid()}: use a directory of your own, "
            "share one with group=..., or open it with read_only=True",
        )
    unwanted = mode & (stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH)
    if unwanted:
        raise UnsafeDirectoryError(
            errno.EPERM,
            f"{root} has mode {mode:04o}, others can write to it: chmod {files.modes.directory:04o} {root}"
            + ("" if shared else ", or share it with one group: group=..."),
        )
    if mode & (stat.S_IROTH | stat.S_IXOTH) or (not shared and mode & (stat.S_IRGRP | stat.S_IXGRP)):
        logger.warning(
            "%s has mode %04o: others can read what the policy said; chmod 0700 makes it private", root, mode
        )


def _check_file_system(files: Files, layout: Layout, allow_unsafe: bool) -> str:
    kind = file_system_of(layout.root)
    if not allow_unsafe:
        if kind in _REFUSED or kind.startswith("fuse."):
            raise UnsafeFilesystemError(
                errno.EOPNOTSUPP,
                f"{layout.root} is on {kind}, where hard links or locks don't hold what tokcap needs: "
                "use a local disk, or allow_unsafe_fs=True at your own risk",
            )
        if read_marker(files, layout) is None:  # a marked store was probed when it was made
            _probe(files, layout)
    if kind in _VOLATILE and layout.root not in _WARNED:
        _WARNED.add(layout.root)
        logger.warning(
            "%s is on %s: records survive a killed process, but %s",
            layout.root,
            kind,
            "nothing survives a power cut" if kind != "overlay" else "not the removal of the container",
        )
    if kind == "ext4" and layout.root not in _WARNED and files.lacks_journal(layout.root):
        _WARNED.add(layout.root)
        logger.warning(
            "%s is on an ext4 without a journal: after a power cut e2fsck may give what is durable to files that were "
            "removed shortly before; tune2fs -O has_journal gives it one",
            layout.root,
        )
    return kind


def _probe(files: Files, layout: Layout) -> None:
    """Try what the store lives on: a hard link, and a lock that excludes a second holder."""
    name = f"{layout.root}/probe-{os.urandom(8).hex()}"
    made: list[str] = []
    descriptors: list[int] = []
    try:
        descriptors.append(files.create(name))
        made.append(name)
        try:
            files.link(name, f"{name}-link")
            made.append(f"{name}-link")
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise UnsafeFilesystemError(
                error.errno,
                f"{layout.root} is on a file system without hard links ({error.strerror}), "
                "which snapshots are made of: use a local disk (ext4, xfs, btrfs)",
            ) from error
        try:
            descriptors.append(files.open_directory(layout.root))
            descriptors.append(files.open_directory(layout.root))
            locked = files.try_lock(descriptors[1]) or None
            excluded = locked is None or not files.try_lock(descriptors[2])
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            raise UnsafeFilesystemError(
                error.errno,
                f"{layout.root} is on a file system without working locks ({error.strerror}): use a local disk",
            ) from error
        if not excluded:
            raise UnsafeFilesystemError(
                errno.EOPNOTSUPP, f"{layout.root} is on a file system whose locks exclude nobody: use a local disk"
            )
    finally:
        for fd in descriptors:
            with contextlib.suppress(OSError):
                files.close(fd)
        for path in made:
            with contextlib.suppress(OSError):
                files.unlink(path)


def read_marker(files: Files, layout: Layout) -> RootMarker | None:
    """The marker, or None if it is missing or damaged. Raises `NewerFormatError` for an intact newer one."""
    try:
        fd = files.open(layout.marker)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO):
            raise  # it may be there, whole, and a newer one
        return None
    try:
        data = files.read(fd, 4096, 0)
    finally:
        files.close(fd)
    found = scan(data, _MARKER_SEED, limit=len(data), sealed_end=len(data))
    if len(found.frames) != 1:
        return None
    if found.frames[0].format > FORMAT_VERSION:
        raise newer_format(layout.marker, found.frames[0].format)
    if found.frames[0].kind != Kind.MARKER:
        return None
    try:
        marker = _decode_marker(data[found.frames[0].body_start : found.frames[0].body_end])
    except (msgspec.DecodeError, RecursionError):
        return None
    if marker.format > FORMAT_VERSION:
        raise newer_format(layout.marker, marker.format)
    return marker


def _sync_ancestors(files: Files, layout: Layout) -> None:
    """Whoever made the directory and its parents may have died before they were durable. Once marked, they are."""
    path = layout.root
    while True:
        with contextlib.suppress(PermissionError):  # what we may not read, we did not make
            files.fsync_directory(path)
        if path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def _mark(files: Files, layout: Layout) -> None:
    if read_marker(files, layout) is not None:
        return
    _sync_ancestors(files, layout)
    body = encode_record(RootMarker(FORMAT_VERSION))
    header = frame_header(Kind.MARKER, LAST_IN_BATCH, len(body), 0, 0, 0, crc32(body, _MARKER_SEED), _MARKER_SEED)
    temporary = f"{layout.root}/FORMAT-{os.urandom(8).hex()}"
    fd = files.create(temporary)
    try:
        try:
            files.write(fd, [header, body], 0)
            files.fdatasync(fd)
        finally:
            files.close(fd)
        files.rename(temporary, layout.marker)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
        raise
    try:
        files.fsync_directory(layout.root)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(layout.marker)
        raise
