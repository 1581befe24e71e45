"""Other users on the node, and hostile members of a store's group: what they plant is not followed out of the store.

The long form is `scripts/prove security`. Who may open a directory, its modes and umasks: `test_directory.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.proofs import security, security_plants
from tests.proofs.security_plants import OPERATIONS, PLANTS, Case, Outside, entry, fill, played
from tests.test_directory import (
    ANYBODY,
    GROUP,
    NOBODY,
    SOMEBODY,
    as_root,
    as_user,
    open_store,
    shared,
    use,
    use_once,
)
from tokcap import FileStore
from tokcap.errors import DurabilityError, UnsafeDirectoryError
from tokcap.store import fence
from tokcap.store.files import Files, Modes
from tokcap.store.layout import Directory, look
from tokcap.store.rollout import Rollout

__all__ = ("shared",)  # a fixture

ALL = tuple(OPERATIONS)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, if that is there: nothing here is about what survives."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tokcap-security-", dir="/dev/shm") as path:
        yield Path(path)


def test_nothing_that_stands_in_for_a_file_of_the_store_leads_out_of_it(tmp_path: Path) -> None:
    """Symlinks, FIFOs, devices, sockets, hard links: drawn cases of those that the long run tries completely."""
    count, problems = security.plants(tmp_path, seed=20, count=40)
    assert (count, problems) == (40, [])


def number_of(tmp_path: Path, wanted: Callable[[str], bool], *, in_use: bool) -> int:
    """The number of a component in a store that is filled, and perhaps in use."""
    store = open_store(tmp_path / "sample")
    fill(str(tmp_path / "sample"), store)
    if not in_use:
        store.close_now()
    names = security_plants.components(str(tmp_path / "sample"))
    store.close_now()
    return next(number for number, name in enumerate(names) if wanted(name))


def is_shard_of_open(name: str) -> bool:
    return name == "rollouts/a4"


def is_trash(name: str) -> bool:
    return name.endswith(f"open/{security_plants.TRASH}")


def is_writers(name: str) -> bool:
    return name == "writers"


def is_tree(name: str) -> bool:
    return name == "rollouts"


@pytest.mark.parametrize(
    ("component", "plant", "moment"),
    [
        (is_trash, "a link to a directory elsewhere", "before"),
        (is_writers, "a link to a directory elsewhere", "during"),
        (is_writers, "a link to a directory elsewhere", "before"),
        (is_shard_of_open, "a link to nowhere", "during"),
        (is_shard_of_open, "a link to a directory elsewhere", "before"),
        (is_shard_of_open, "a link to a directory elsewhere", "during"),
        (is_tree, "a link to a directory elsewhere", "before"),
        (is_tree, "a link to nowhere", "during"),
    ],
)
def test_links_that_once_led_out_of_the_store_or_stopped_it_do_neither(
    component: Callable[[str], bool], plant: str, moment: str, tmp_path: Path
) -> None:
    number = number_of(tmp_path, component, in_use=moment == "during")
    for first in ("sweep", "put", "begin_call"):
        order = (first, *(each for each in ALL if each != first))
        assert played(Case(number, plant, moment, order), tmp_path / "case") == []


def follow(files: Files, path: str) -> list[str]:
    return os.listdir(path)


def look_anywhere(rollout: Rollout) -> Directory:
    return look(rollout.files, rollout.path)


@pytest.mark.parametrize(
    ("where", "name", "replacement", "component", "moment"),
    [
        (Files, "listdir", follow, is_trash, "before"),
        (fence, "_check_directory", lambda files, path: None, is_shard_of_open, "before"),
        (Rollout, "look", look_anywhere, is_shard_of_open, "during"),
        (os.path, "islink", lambda path: False, is_writers, "before"),
    ],
    ids=["what is listed", "the way to a rollout", "the way of a look", "the way when it is opened"],
)
def test_a_check_that_is_taken_out_is_missed(
    where: object,
    name: str,
    replacement: object,
    component: Callable[[str], bool],
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = number_of(tmp_path, component, in_use=moment == "during")
    if component is is_writers:
        monkeypatch.setattr("tokcap.store.liveness.stat", types.SimpleNamespace(S_ISLNK=lambda mode: False))
    monkeypatch.setattr(where, name, replacement)
    case = Case(
        number, "a link to a directory elsewhere", moment, ("put", "begin_call", "sweep", "freeze and retire", "reset")
    )
    assert any("changed" in problem for problem in played(case, tmp_path / "case"))


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_one_rollout_that_somebody_spoiled_stops_no_other(plant: str, tmp_path: Path) -> None:
    done: list[str] = []
    outside = Outside(tmp_path / "outside")
    root = str(tmp_path / "store")
    with contextlib.suppress(DurabilityError), open_store(root) as store:  # to close it seals what can't be found
        fill(root, store)
        security_plants._plant(f"{root}/rollouts/a4", plant, outside, tmp_path / "aside")
        for rollout in ("frozen", "bare", "new-1"):
            if rollout != "frozen":
                store.put_now(entry(rollout, "later"))
            with store.freeze_now(rollout) as snapshot:
                assert len(snapshot.entries) >= 1
        assert store.sweep_now(0) == 1
        done.append(plant)
    assert done == [plant]
    assert outside.changes() == []


# ---- the way to the directory


@pytest.mark.parametrize("path", ["s", "mine/s", "mine/too/s"])
def test_no_directory_on_the_way_may_be_written_by_everybody(path: str, tmp_path: Path) -> None:
    way = tmp_path / "open"
    (way / "mine" / "too").mkdir(parents=True)
    way.chmod(0o777)
    with pytest.raises(UnsafeDirectoryError, match=rf"{way} can be written by everybody and is not sticky"):
        open_store(way / path)
    way.chmod(0o1777)
    use_once(way / path)


def test_links_on_the_way_are_followed_to_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "open" / "mine").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "open" / "mine" / ".." / "mine")
    with pytest.raises(UnsafeDirectoryError, match=rf"{tmp_path}/open can be written by everybody"):
        open_store(tmp_path / "a" / "s")
    (tmp_path / "open").chmod(0o755)
    use_once(tmp_path / "a" / "s")
    assert (tmp_path / "open" / "mine" / "s" / "FORMAT").is_file()
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match=r"symbolic links"):
        open_store(tmp_path / "round" / "s")


@as_root
@pytest.mark.parametrize("last", [True, False])
def test_a_link_of_another_user_where_everybody_may_make_one_is_refused(last: bool, shared: Path) -> None:
    """What another user plants in /tmp under the name that a store will have."""
    shared.chmod(0o1777)
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", SOMEBODY, SOMEBODY)
    assert as_user(SOMEBODY, lambda: (shared / "runs").symlink_to(shared / "theirs")) == ""
    with pytest.raises(UnsafeDirectoryError, match="is a symbolic link"):
        open_store(shared / "runs" if last else shared / "runs" / "s")
    assert list((shared / "theirs").iterdir()) == []
    (shared / "own").symlink_to(shared / "theirs")
    use_once(shared / "own" / "s")  # a link of one's own, and of root, is what the kernel follows, too


@as_root
def test_what_another_user_made_before_under_the_name_of_the_store_is_refused(shared: Path) -> None:
    shared.chmod(0o1777)

    def plant() -> None:
        (shared / "directory").mkdir(mode=0o777)
        (shared / "file").write_text("")
        os.mkfifo(shared / "fifo", 0o666)

    assert as_user(SOMEBODY, plant) == ""
    for name in ("directory", "file", "fifo"):
        for user in (0, NOBODY):
            if user:
                assert as_user(user, lambda name=name: open_store(shared / name)).startswith("UnsafeDirectoryError")  # type: ignore[misc]
            else:
                with pytest.raises(UnsafeDirectoryError):
                    open_store(shared / name)


@as_root
def test_who_owns_a_directory_on_the_way_is_told(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shared / "theirs").mkdir()
    os.chown(shared / "theirs", SOMEBODY, SOMEBODY)
    for name in "s", "t":
        use_once(shared / "theirs" / name)
    assert caplog.text.count(f"{shared}/theirs belongs to user {SOMEBODY}, who could replace the store in it") == 1


# ---- a hostile member of the group


@as_root
def test_a_member_of_the_group_can_not_make_another_one_delete_what_is_his_own(shared: Path) -> None:
    shared.chmod(0o1777)
    path, precious = shared / "s", shared / "precious"

    def victim() -> None:
        precious.mkdir(mode=0o700)
        (precious / "key").write_text("mine")
        use(path, group=GROUP)

    def member() -> None:
        (home,) = path.glob("rollouts/*/open")
        (home / security_plants.TRASH).symlink_to(precious)
        for name in (path / "writers").iterdir():
            name.unlink()
        (path / "writers").rmdir()
        (path / "writers").symlink_to(precious)

    def victim_again() -> None:
        with pytest.raises(UnsafeDirectoryError, match="writers is a symbolic link"):
            open_store(path, group=GROUP)
        (path / "writers").unlink()
        with open_store(path, group=GROUP) as store:
            store.sweep_now(0)
            store.reset_now("open", "frozen")
        assert (precious / "key").read_text() == "mine"

    assert as_user(SOMEBODY, victim, groups=(GROUP,)) == ""
    assert as_user(ANYBODY, member, groups=(GROUP,)) == ""
    assert as_user(SOMEBODY, victim_again, groups=(GROUP,)) == ""


@as_root
def test_a_directory_that_is_exchanged_for_a_link_at_once_passes_no_rights_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making a directory and sharing it, a member of the group may put a link into its place."""
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    before = precious.stat()
    mkdir = os.mkdir

    def raced(path: str, mode: int = 0o777) -> None:
        mkdir(path, mode)
        os.rmdir(path)
        os.symlink(precious, path)

    monkeypatch.setattr(os, "mkdir", raced)
    with pytest.raises(OSError, match=r"directory|symbolic"):
        Files(Modes(GROUP)).mkdir(str(tmp_path / "new"))
    after = precious.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)


@as_root
@pytest.mark.parametrize("bits", [0, 0o077, 0o777])
def test_a_shared_directory_has_its_mode_whatever_the_umask(bits: int, tmp_path: Path) -> None:
    before = os.umask(bits)
    try:
        Files(Modes(GROUP)).mkdir(str(tmp_path / "new"))
    finally:
        os.umask(before)
    there = (tmp_path / "new").stat()
    assert (stat.S_IMODE(there.st_mode), there.st_gid) == (0o2770, GROUP)


def test_a_read_only_look_follows_no_plants_and_changes_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    fill(root)
    outside = Outside(tmp_path / "outside")
    (segment,) = Path(root).glob("rollouts/a4/open/*/000001.seg")
    segment.unlink()
    os.mkfifo(segment)
    (home,) = Path(root).glob("rollouts/*/frozen")
    (home / security_plants.TRASH).symlink_to(outside.directory)
    before = sorted(str(path) for path in Path(root).rglob("*"))
    with FileStore(root, read_only=True) as store:
        assert store.read_now("open").incomplete
        assert len(store.read_now("frozen").entries) == 1
        assert len(list(store.rollouts())) == 4
    assert sorted(str(path) for path in Path(root).rglob("*")) == before
    assert outside.changes() == []
