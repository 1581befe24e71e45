"""The store's directory: who may use it, what it is made of, and on which file systems."""

from __future__ import annotations

import ast
import errno
import grp
import json
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tokcap
from tests.faulty_files import view
from tokcap import FileStore, TokenEntry
from tokcap.errors import (
    InvalidIdError,
    NewerFormatError,
    TokcapError,
    UnsafeDirectoryError,
    UnsafeFilesystemError,
)
from tokcap.store import root as root_module
from tokcap.store.files import Files, Modes
from tokcap.store.frame import FORMAT_VERSION, LAST_IN_BATCH, Kind, frame_header
from tokcap.store.layout import Layout
from tokcap.store.records import RootMarker, encode_record

ANYBODY, SOMEBODY, NOBODY = 65_532, 65_533, 65_534
GROUP = 65_531

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


def entry(rollout: str = "r", call: str = "a") -> TokenEntry:
    return TokenEntry(rollout, call, np.arange(5, dtype=np.int32), np.array([7, 8], np.int32), np.array([-0.5, -1.0]))


def open_store(path: str | os.PathLike[str], **options: object) -> FileStore:
    return FileStore(path, sweep_every_s=0, **options)  # type: ignore[arg-type]


def use(path: str | os.PathLike[str], **options: object) -> None:
    """Everything that makes a file or a directory."""
    with open_store(path, **options) as store:
        for rollout in "open", "frozen", "retired":
            store.begin_call_now(rollout, "a")
            store.put_now(entry(rollout))
        store.freeze_now("frozen").close()
        store.mark_incomplete_now("frozen", "late")
        store.note_delivery_now("frozen", "a", "full")
        with store.freeze_now("retired") as snapshot:
            pass
        assert store.retire_now("retired", snapshot_id=snapshot.snapshot_id, version=1)
        store.mark_incomplete_now("retired", "late")
        store._sweep_if_due()
        check_modes(path, 0o700 if not options.get("group") else 0o2770, 0o600 if not options.get("group") else 0o660)


def mode(path: str | os.PathLike[str]) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def check_modes(path: str | os.PathLike[str], directories: int, files: int) -> None:
    seen = 0
    for folder, _, names in os.walk(path):
        assert mode(folder) == directories, folder
        for name in names:
            assert mode(f"{folder}/{name}") == files, f"{folder}/{name}"
            seen += 1
    assert seen > 2


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="tokcap-shared-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_user(
    user: int, function: Callable[[], object], *, group: int | None = None, groups: tuple[int, ...] = ()
) -> str:
    """Run something in a child under another uid; the name of the error that it raised, or empty."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setgroups(groups)
            os.setgid(user if group is None else group)
            os.setuid(user)
            try:
                function()
                os.write(writer, b"")
            except TokcapError as error:
                os.write(writer, json.dumps([type(error).__name__, str(error)]).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child failed"
    return ": ".join(json.loads(answer)) if answer else ""


# ---- permissions


@pytest.mark.parametrize("bits", [0, 0o022, 0o077, 0o777])
def test_everything_is_private_whatever_the_umask(bits: int, tmp_path: Path) -> None:
    with umask(bits):
        use(tmp_path / "a" / "b" / "s")
    check_modes(tmp_path / "a", 0o700, 0o600)


def test_parents_that_exist_keep_their_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    use(tmp_path / "a" / "s")
    assert mode(tmp_path / "a") == 0o755


@pytest.mark.parametrize("name", ["link", "link/"])
@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_symlink_in_place_of_the_directory_is_refused(name: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(UnsafeDirectoryError, match="is a symbolic link; give the directory that it points to"):
        open_store(f"{tmp_path}/{name}")
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "there").iterdir()) == []


def test_a_symlink_further_up_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    use(tmp_path / "link" / "s")
    check_modes(tmp_path / "there" / "s", 0o700, 0o600)


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o770, 0o777, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(bits: int, store_dir: Path) -> None:
    store_dir.chmod(bits)
    with pytest.raises(UnsafeDirectoryError, match=f"{store_dir} has mode {bits:04o}, others can write.*chmod"):
        open_store(store_dir)
    assert list(store_dir.iterdir()) == []


@pytest.mark.parametrize("bits", [0o740, 0o750, 0o704, 0o755])
def test_extra_read_bits_are_kept_with_a_warning(bits: int, store_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    store_dir.chmod(bits)
    use_once(store_dir)
    assert mode(store_dir) == bits
    warnings = [record for record in caplog.records if "others can read" in record.getMessage()]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert str(store_dir) in warnings[0].getMessage()


def use_once(path: str | os.PathLike[str], **options: object) -> None:
    with open_store(path, **options) as store:
        store.put_now(entry(call=os.urandom(4).hex()))


@pytest.mark.parametrize(("bits", "fine"), [(0o1777, True), (0o755, True), (0o777, False), (0o703, False)])
@pytest.mark.parametrize("path", ["s", "new/s"])
def test_a_parent_that_everybody_can_write_to_must_be_sticky(bits: int, fine: bool, path: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(bits)
    if fine:
        use_once(parent / path)
    else:
        with pytest.raises(UnsafeDirectoryError, match=rf"{parent} can be written by everybody.*chmod \+t"):
            open_store(parent / path)
        assert list(parent.iterdir()) == []


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(UnsafeDirectoryError, match="is not a directory; give a directory"):
        open_store(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "mine"


@as_root
def test_a_directory_of_another_user_is_refused(shared: Path) -> None:
    use_once(shared / "s")
    os.chown(shared / "s", SOMEBODY, SOMEBODY)
    with pytest.raises(UnsafeDirectoryError, match=rf"belongs to user {SOMEBODY}, this process runs as 0: .*group="):
        open_store(shared / "s")
    os.chown(shared / "s", 0, 0)
    os.chmod(shared / "s", 0o755)
    problem = as_user(SOMEBODY, lambda: open_store(shared / "s"))
    assert problem.startswith("UnsafeDirectoryError") and "belongs to user 0" in problem


@as_root
def test_a_user_makes_and_uses_a_private_store_that_no_other_user_can_read(shared: Path) -> None:
    shared.chmod(0o1777)
    assert as_user(SOMEBODY, lambda: use(shared / "s")) == ""
    assert os.stat(shared / "s").st_uid == SOMEBODY
    assert as_user(NOBODY, lambda: open_store(shared / "s")).startswith("UnsafeDirectoryError")

    def peep() -> None:
        with pytest.raises(PermissionError):
            os.listdir(shared / "s")

    assert as_user(NOBODY, peep) == ""


@as_root
def test_a_copy_of_another_user_can_be_read_only(shared: Path) -> None:
    use_once(shared / "s")
    subprocess.run(["chmod", "-R", "a+rX", str(shared / "s")], check=True)

    def read() -> None:
        with open_store(shared / "s", read_only=True) as store:
            assert len(store.read_now("r").entries) == 1

    before = sorted(str(path) for path in (shared / "s").rglob("*"))
    assert as_user(NOBODY, read) == ""
    assert sorted(str(path) for path in (shared / "s").rglob("*")) == before


# ---- a group


@as_root
@pytest.mark.parametrize("bits", [0, 0o022, 0o077])
def test_a_group_shares_a_store(bits: int, shared: Path) -> None:
    shared.chmod(0o1777)
    path = shared / "s"

    def write() -> None:
        with umask(bits):
            use(path, group=GROUP)

    def consume() -> None:
        with umask(bits), open_store(path, group=GROUP) as store:
            store.put_now(entry("open", "b"))
            with store.freeze_now("open") as snapshot:
                assert len(snapshot.entries) == 2
                assert store.retire_now("open", snapshot_id=snapshot.snapshot_id, version=1)
            store.mark_incomplete_now("frozen", "later")
            store.reset_now("frozen")
            store.put_now(entry("frozen", "c"))
            store._sweep_if_due()
            assert os.stat(store._layout.sweep_lock).st_mtime > 1
            assert store.sweep_now(0) == 2
            check_modes(path, 0o2770, 0o660)

    def write_again() -> None:
        with umask(bits), open_store(path, group=GROUP) as store:
            store.put_now(entry("frozen", "d"))
            assert view(store, "frozen").calls == {"c", "d"}

    assert as_user(SOMEBODY, write, groups=(GROUP,)) == ""
    for folder, _, names in os.walk(path):
        assert {os.stat(f"{folder}/{name}").st_gid for name in [".", *names]} == {GROUP}
    os.utime(path / "sweep.lock", (1, 1))
    assert as_user(NOBODY, consume, groups=(GROUP,)) == ""
    assert as_user(SOMEBODY, write_again, groups=(GROUP,)) == ""
    assert as_user(ANYBODY, lambda: open_store(path, group=GROUP)) != ""
    assert as_user(ANYBODY, lambda: open_store(path)).startswith("UnsafeDirectoryError")


@as_root
def test_a_directory_of_another_group_is_refused(shared: Path) -> None:
    path = shared / "s"
    path.mkdir()
    path.chmod(0o2770)
    with pytest.raises(UnsafeDirectoryError, match=f"belongs to group 0, not {GROUP}: chgrp it"):
        open_store(path, group=GROUP)
    os.chown(path, -1, GROUP)
    path.chmod(0o2777)
    with pytest.raises(UnsafeDirectoryError, match="others can write"):
        open_store(path, group=GROUP)
    path.chmod(0o2770)
    use_once(path, group=GROUP)


def test_a_group_is_given_by_name_or_number(tmp_path: Path) -> None:
    own = grp.getgrgid(os.getegid())
    use_once(tmp_path / "by-name", group=own.gr_name)
    use_once(tmp_path / "by-number", group=own.gr_gid)
    assert mode(tmp_path / "by-name") == mode(tmp_path / "by-number") == 0o2770
    with pytest.raises(UnsafeDirectoryError, match="no such group"):
        open_store(tmp_path / "s", group="no-such-group-here")
    assert pwd.getpwuid(os.getuid()) is not None


# ---- file systems


class WithoutLinks(Files):
    number = errno.EPERM

    def link(self, source: str, target: str) -> None:
        raise OSError(self.number, os.strerror(self.number))


class WithUselessLocks(Files):
    def try_lock(self, fd: int) -> bool:
        return True


class WithoutLocks(Files):
    def try_lock(self, fd: int) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_is_refused(number: int, store_dir: Path) -> None:
    files = WithoutLinks()
    files.number = number
    with pytest.raises(UnsafeFilesystemError, match=r"without hard links .*use a local disk") as caught:
        open_store(store_dir, files=files)
    assert caught.value.errno == number
    assert list(store_dir.iterdir()) == []


@pytest.mark.parametrize("files", [WithUselessLocks(), WithoutLocks()], ids=["useless", "missing"])
def test_a_file_system_without_working_locks_is_refused(files: Files, store_dir: Path) -> None:
    with pytest.raises(UnsafeFilesystemError, match=r"locks.*use a local disk"):
        open_store(store_dir, files=files)
    assert list(store_dir.iterdir()) == []


def on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_module, "file_system_of", lambda path: kind)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "fuse", "fuseblk", "fuse.sshfs", "9p", "vfat"])
def test_a_file_system_known_to_break_locks_or_links_is_refused(
    kind: str, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(kind, monkeypatch)
    with pytest.raises(UnsafeFilesystemError, match=f"{store_dir} is on {kind}, .*allow_unsafe_fs=True"):
        open_store(store_dir)
    use_once(store_dir, allow_unsafe_fs=True)
    with pytest.raises(UnsafeFilesystemError):
        open_store(store_dir)
    with open_store(store_dir, read_only=True) as store:
        assert len(store.read_now("r").entries) == 1


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_file_system_that_forgets_warns_once(
    kind: str, store_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(kind, monkeypatch)
    with open_store(store_dir) as store:
        for call in "a", "b":
            store.put_now(entry("r", call))
        store.sweep_now(0)
    with FileStore(store_dir, sweep_every_s=0):  # once for a directory, not for each object
        pass
    assert len([record for record in caplog.records if f"is on {kind}" in record.getMessage()]) == 1


def test_the_file_system_of_a_directory_is_found() -> None:
    assert root_module.file_system_of("/proc") == "proc"
    assert root_module.file_system_of("/proc/self/fd") == "proc"


@as_root
def test_a_real_file_system_without_hard_links_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("mkfs.vfat") is None:
        pytest.skip("there is no mkfs.vfat")
    image, point = shared / "image", shared / "disk"
    image.write_bytes(bytes(4 << 20))
    point.mkdir()
    subprocess.run(["mkfs.vfat", str(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop,umask=077", str(image), str(point)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"can't mount: {done.stderr.strip()}")
    try:
        with pytest.raises(UnsafeFilesystemError, match="is on vfat"):
            open_store(point / "s")
        on("", monkeypatch)
        with pytest.raises(UnsafeFilesystemError, match="without hard links"):
            open_store(point / "s")
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


# ---- the marker


def marker(version: int) -> bytes:
    from zlib import crc32

    body, seed = encode_record(RootMarker(version)), root_module._MARKER_SEED
    return frame_header(Kind.MARKER, LAST_IN_BATCH, len(body), 0, 0, 0, crc32(body, seed), seed) + body


def test_a_missing_or_damaged_marker_is_rewritten(store_dir: Path) -> None:
    use_once(store_dir)
    path = store_dir / "FORMAT"
    whole = path.read_bytes()
    assert whole == marker(FORMAT_VERSION)
    damaged = [
        None,
        b"",
        whole[:-1],
        b"x" + whole[1:],
        bytes(len(whole)),
        b"x" * 100_000,
        marker(FORMAT_VERSION + 1)[:-1],
    ]
    for content in damaged:
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        use_once(store_dir)
        assert path.read_bytes() == whole
        assert mode(path) == 0o600
    path.unlink()
    path.symlink_to("/etc/passwd")
    use_once(store_dir)
    assert path.read_bytes() == whole
    assert not path.is_symlink()


def test_an_intact_newer_marker_is_refused(store_dir: Path) -> None:
    use_once(store_dir)
    newer = marker(FORMAT_VERSION + 1)
    (store_dir / "FORMAT").write_bytes(newer)
    for read_only in False, True:
        with pytest.raises(NewerFormatError, match=rf"{store_dir}.* format {FORMAT_VERSION + 1}.*upgrade tokcap"):
            open_store(store_dir, read_only=read_only)
    assert (store_dir / "FORMAT").read_bytes() == newer


# ---- names


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../r", "a/../../b", "/etc", "a/b", "a\x00b", ".hidden", "-r", "a\n", "%2e%2e/", "é", "a" * 201],
)
def test_an_id_can_t_lead_out_of_the_store(name: str, store_dir: Path) -> None:
    with open_store(store_dir) as store:
        before = sorted(path for path in store_dir.parent.rglob("*"))
        for operation in (
            lambda: store.put_now(entry(name)),
            lambda: store.mark_incomplete_now(name),
            lambda: store.freeze_now(name),
            lambda: store.retire_now(name, snapshot_id="0" * 32, version=1),
            lambda: store.reset_now(name),
            lambda: store.read_now(name),
            lambda: store.stat_now(name),
            lambda: store.finish_now(name),
            lambda: store.note_delivery_now(name, "a", "full"),
        ):
            with pytest.raises(InvalidIdError):
                operation()
        assert sorted(path for path in store_dir.parent.rglob("*")) == before


@pytest.mark.parametrize("name", ["a..", "a.trash", "tmp-1", "v1", "FORMAT", "manifest", "0" * 32, "Z" * 200])
def test_an_id_may_look_like_a_name_of_the_store_s_own(name: str, store_dir: Path) -> None:
    use_once(store_dir)
    with open_store(store_dir) as store:
        store.put_now(entry(name))
        with store.freeze_now(name) as snapshot:
            assert len(snapshot.entries) == 1
            assert store.retire_now(name, snapshot_id=snapshot.snapshot_id, version=1)
        assert store.sweep_now(0) == 1
        assert [rollout for rollout, _ in store.rollouts()] == ["r"]


def test_every_file_of_a_rollout_has_its_id_as_a_path_component(store_dir: Path) -> None:
    use(store_dir)
    ids = {"open", "frozen", "retired"}
    for path in (store_dir / "rollouts").rglob("*"):
        if path.is_file():
            assert len(ids & set(path.relative_to(store_dir).parts)) == 1, path
    others = [path.relative_to(store_dir).parts[0] for path in store_dir.rglob("*") if path.is_file()]
    assert set(others) <= {"rollouts", "FORMAT", "sweep.lock"}


def test_directories_stay_small_for_many_rollouts() -> None:
    layout = Layout("/s")
    shards: dict[str, int] = {}
    for number in range(20_000):
        shard = layout.shard(f"step-{number // 64:05d}-prompt-{number % 64:03d}-{number % 8}")
        shards[shard] = shards.get(shard, 0) + 1
    assert len(shards) == 256
    assert max(shards.values()) < 2 * 20_000 / 256


# ---- the code itself

PACKAGE = Path(tokcap.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CHANGING = {
    "chmod", "chown", "copy_file_range", "fallocate", "fchmod", "fchown", "fdatasync", "fsync", "ftruncate", "link",
    "makedirs", "mkdir", "mkfifo", "mknod", "open", "posix_fallocate", "pwrite", "pwritev", "remove", "removedirs",
    "rename", "renames", "replace", "rmdir", "sendfile", "symlink", "sync", "truncate", "unlink", "utime", "write",
    "writev",
}  # fmt: skip
ALLOWED = {
    ("store/store.py", "os.utime"),  # the sweep's lock file bears the time of the last sweep: nothing rests on it
    ("store/root.py", "open"),  # reads /proc
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def calls_that_change_files(source: str) -> Iterator[str]:
    """`os.rename` and the like, however imported, and every bare `open`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "os" and node.attr in CHANGING:
                yield f"os.{node.attr}"
            elif node.value.id in ("shutil", "tempfile"):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile", "pathlib", "fcntl"):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in ("shutil", "tempfile", "pathlib"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield "open"


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name == "store"], ids=name_of)
def test_only_one_module_of_the_store_changes_files(path: Path) -> None:
    found = {(name_of(path), call) for call in calls_that_change_files(path.read_text())}
    if path.name == "files.py":
        assert {("store/files.py", "os.rename"), ("store/files.py", "os.fsync")} <= found
    else:
        assert found <= ALLOWED


def test_the_search_for_calls_that_change_files_finds_them() -> None:
    for source in (
        "import os\nos.rename('a', 'b')",
        "import os as os\nf = os.unlink",
        "from os import rename",
        "import shutil",
        "from pathlib import Path",
        "open('x')",
    ):
        assert list(calls_that_change_files(source)), source


LAYERS = [
    {"errors", "version"},
    {"ids", "content", "arrays"},
    {"digests"},
    {"entry"},
    {"protocol"},
    {"installed", "foreign"},
    {"store"},
    {"config"},
    {"capture"},
    {"dialects"},
    {"evaluation"},
    {"asgi"},
    {"serve"},
    {"trajectory"},
    {"delivery"},
    {"inspection"},
    {"verification", "transfer", "report"},
    {"cli"},
    {"command"},
    {"__main__"},
]
"""What may import what: each only from those above it, and modules of one layer not from each other in a circle."""


def layer(module: str) -> int:
    for height, names in enumerate(LAYERS):
        if module in names:
            return height
    return len(LAYERS)


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a module imports, as dotted names below it."""
    package = [*path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            if node.module:
                yield ".".join([*base, *node.module.split(".")])
            else:
                yield from (".".join([*base, name.name]) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tokcap":
            yield (node.module or "").partition(".")[2]
        elif isinstance(node, ast.Import):
            yield from (name.name.partition(".")[2] for name in node.names if name.name.split(".")[0] == "tokcap")


def graph() -> dict[str, set[str]]:
    modules = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}
    return {name: {i for i in imports(path) if i in modules and i != name} for name, path in modules.items()}


def test_lower_layers_never_import_higher_ones() -> None:
    for module, imported in graph().items():
        if module == "__init__":
            continue
        for other in imported:
            low, high = layer(other.split(".")[0]), layer(module.split(".")[0])
            assert low <= high, f"{module} imports {other}"


def test_what_reads_rollouts_does_not_know_what_serves_them() -> None:
    serving = {"dialects", "evaluation", "asgi", "serve", "cli", "command"}
    for module, imported in graph().items():
        if module.split(".")[0] in ("trajectory", "delivery"):
            assert not {other.split(".")[0] for other in imported} & serving, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    remaining = {name: set(imported) for name, imported in graph().items()}
    while remaining:
        free = {name for name, imported in remaining.items() if not imported & remaining.keys()}
        assert free, f"these import each other: {sorted(remaining)}"
        remaining = {name: imported for name, imported in remaining.items() if name not in free}


def test_importing_the_package_touches_no_file_and_needs_no_directory(tmp_path: Path) -> None:
    code = "import tokcap, os; assert os.listdir('.') == []"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


def test_a_mode_is_private_or_shared_with_a_group() -> None:
    assert (Modes().directory, Modes().file) == (0o700, 0o600)
    assert (Modes(GROUP).directory, Modes(GROUP).file) == (0o2770, 0o660)
