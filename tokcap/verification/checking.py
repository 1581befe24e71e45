"""Checking a store: every byte of every file, every link, every manifest, and names that don't belong.

It works on a live store without a false alarm (what is seen twice counts), and on a copy. Every flipped bit of a file
is found, but for those of bytes that nobody can know: a torn tail, what a crash left (`tmp-...`, `.trash`, versions of
a snapshot before the last), and what `quarantine/` holds.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidIdError
from ..ids import check_rollout_id
from ..inspection.opening import open_to_look, store_directory
from ..store import FileStore
from ..store.files import Files
from ..store.layout import Layout
from ..store.root import boot_id, read_marker
from .finding import CheckSummary, Finding, FindingKind, Level, place_of
from .look import APART, OF_ANOTHER, READ_BY_OTHERS, WRITTEN_BY_OTHERS, Checked, Owner
from .misplaced import misplaced, out_of_place
from .quarantine import known_places
from .rollout import RolloutCheck

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ("CheckProgress", "check", "check_place", "is_meant")

CheckProgress = Callable[[int, int, CheckSummary], None]
"""Told how many rollouts were checked, of how many, and what was counted so far."""

_ALONE_S = 1.0
_PART = 32
"""Rollouts that a process checks before it reports."""
_SHARD = re.compile(r"[0-9a-f]{2}")
_OF_THE_STORE = ("FORMAT", "sweep.lock", "writers", "rollouts", "quarantine")
_OPENING = re.compile(r"(FORMAT|probe)-[0-9a-f]{16}(-link)?")
_WRITER = re.compile(r"[0-9a-f]{16}")

_TOLD: tuple[tuple[str, Level, FindingKind, str, str], ...] = (
    (
        WRITTEN_BY_OTHERS,
        "warning",
        "modes",
        "files or directories that others can write to",
        "chmod -R go-w; in a directory shared with one group (setgid, mode 2770) the group may write",
    ),
    (
        READ_BY_OTHERS,
        "warning",
        "modes",
        "files or directories that others can read",
        "chmod -R go-rx makes them private",
    ),
    (
        OF_ANOTHER,
        "warning",
        "modes",
        "files or directories that belong to another user than the store's directory",
        "chown -R, or find out who writes here; in a store that is shared with group= it is as it should be",
    ),
    (
        APART,
        "info",
        "apart",
        "segments that are no hard links to their snapshot any more: as a copy leaves them",
        "rsync -H or cp -a keep hard links, and half of the room",
    ),
)


def check(
    store: FileStore | str | os.PathLike[str] | None = None,
    globs: Collection[str] = (),
    *,
    quick: bool = False,
    workers: int = 1,
    summary: CheckSummary | None = None,
    progress: CheckProgress | None = None,
) -> Iterator[Finding]:
    """Everything that is wrong, odd, or worth a word in a store, as it is found. Nothing is written, no lock taken.

    store: a store or its directory; see `store_directory`. globs: rollout ids, or patterns of `fnmatch`; none: all.
    quick: names, manifests, links and lengths; no segment is read. workers: processes that check; 0: one per processor
    if it takes more than a second. summary: counts while it runs. Raises `ConfigError`, `StoreNotFoundError`, and
    `NewerFormatError` if a newer tokcap made the store; whatever is wrong inside is a finding.
    """
    place = check_place(store)
    summary = CheckSummary() if summary is None else summary
    begun = time.monotonic()
    known = known_places(place.layout)
    counted: dict[str, tuple[int, str]] = {}

    def take(checked: Checked) -> Iterator[Finding]:
        summary.files += checked.files
        summary.bytes += checked.bytes
        summary.frames += checked.frames
        for what, (number, path) in checked.counted.items():
            before, first = counted.get(what, (0, path))
            counted[what] = before + number, first
        for finding in checked.findings:
            if finding.level == "damage" and place_of(finding) in known:
                finding = msgspec.structs.replace(finding, level="known")
            setattr(summary, finding.level, getattr(summary, finding.level) + 1)
            yield finding

    outside, ids = _outside(place, globs)
    yield from take(outside)
    for done, checked in enumerate(_checked(place, ids, quick, workers), 1):
        summary.rollouts += 1
        summary.seconds = time.monotonic() - begun
        yield from take(checked)
        if progress is not None:
            progress(done, len(ids), summary)
    yield from take(Checked(list(_told(counted))))
    summary.seconds = time.monotonic() - begun


class Place(msgspec.Struct, frozen=True):
    """Where a check looks."""

    files: Files
    layout: Layout
    boot_id: str
    owner: Owner

    def rollouts(self, *, quick: bool = False, fenced: bool = False) -> RolloutCheck:
        """What checks rollouts here."""
        return RolloutCheck(self.files, self.layout, self.boot_id, self.owner, quick=quick, fenced=fenced)


def check_place(store: FileStore | str | os.PathLike[str] | None) -> Place:
    """Where `store` is, ready to be checked. Raises as `open_to_look`."""
    if isinstance(store, FileStore):
        root = store.directory
    else:
        root = store_directory(store)
        open_to_look(root).close_now()
    return Place(Files(), Layout(root), boot_id(), Owner.of(os.stat(root)))


def is_meant(rollout_id: str, globs: Collection[str]) -> bool:
    """Whether one of `globs` names it; none name all."""
    return not globs or any(rollout_id == glob or fnmatchcase(rollout_id, glob) for glob in globs)


# ---- rollouts, in this process or in several


def _checked(place: Place, ids: list[str], quick: bool, workers: int) -> Iterator[Checked]:
    checker = place.rollouts(quick=quick)
    rest = iter(ids)
    if workers == 0:
        begun, left = time.monotonic(), len(ids)
        for rollout_id in rest:
            yield checker.check(rollout_id)
            left -= 1
            if time.monotonic() - begun > _ALONE_S and left > _PART:
                workers = len(os.sched_getaffinity(0))
                break
    if workers > 1:
        yield from _checked_together(place.layout.root, rest, quick, workers)
    else:
        yield from map(checker.check, rest)


def _checked_together(root: str, ids: Iterator[str], quick: bool, workers: int) -> Iterator[Checked]:
    import multiprocessing  # 20 ms, which the rest need not take
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def begun(count: int) -> list[Future[list[Checked]]]:
        parts = list(islice(_parts(ids), count))
        # A submission may start a process, and Ctrl-C reaches all of them: it is for this one, which ends the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            return [pool.submit(_check_part, root, part, quick) for part in parts]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        running = begun(4 * workers)
        while running:
            yield from running.pop(0).result()
            running += begun(1)
    finally:
        pool.shutdown(cancel_futures=True)


def _parts(ids: Iterator[str]) -> Iterator[list[str]]:
    while part := list(islice(ids, _PART)):
        yield part


def _check_part(root: str, ids: list[str], quick: bool) -> list[Checked]:
    checker = Place(Files(), Layout(root), boot_id(), Owner.of(os.stat(root))).rollouts(quick=quick)
    return [checker.check(rollout_id) for rollout_id in ids]


# ---- what belongs to no rollout


def _told(counted: dict[str, tuple[int, str]]) -> Iterator[Finding]:
    for what, level, kind, words, advice in _TOLD:
        if what in counted:
            number, path = counted[what]
            yield Finding(level, kind, path, f"{number:,} {words}, such as this", advice=advice)


def _outside(place: Place, globs: Collection[str]) -> tuple[Checked, list[str]]:
    """What is wrong outside of rollouts, and the ids of those that are meant."""
    found = Checked()
    files, layout = place.files, place.layout
    there = os.lstat(layout.root)
    if stat.S_ISLNK(there.st_mode):
        advice = "give the directory that it points to"
        found.findings.append(
            Finding("warning", "modes", layout.root, "a symbolic link; it is refused for writing", advice=advice)
        )
    else:
        place.owner.judge(there, layout.root, found)
    _check_marker(place, found)
    for name in sorted(files.listdir(os.path.realpath(layout.root))):
        path = f"{layout.root}/{name}"
        if _OPENING.fullmatch(name):
            found.findings.append(_leftover(path, "of a process that opens the store, or died while it did"))
        elif name not in _OF_THE_STORE:
            found.findings.append(Finding("info", "name", path, "a name that belongs to no store; it is left alone"))
        elif name in ("FORMAT", "sweep.lock"):
            _weigh(place, path, found)
    _check_writers(place, found)
    return found, sorted(_ids(place, globs, found))


def _leftover(path: str, whose: str) -> Finding:
    return Finding("info", "leftover", path, f"{whose}; a sweep removes it")


def _weigh(place: Place, path: str, found: Checked) -> None:
    try:
        there = place.files.stat(path)
    except FileNotFoundError:
        return
    place.owner.judge(there, path, found)
    found.files += 1
    found.bytes += there.st_size


def _check_marker(place: Place, found: Checked) -> None:
    layout = place.layout
    for attempt in range(2):
        if read_marker(place.files, layout) is not None:
            return
        if attempt == 0:
            time.sleep(0.002)  # somebody may be making it
    missing = not os.path.lexists(layout.marker)
    found.findings.append(
        Finding(
            "warning" if missing else "damage",
            "marker",
            layout.marker,
            "the file that marks a store is missing" if missing else "the file that marks a store is damaged",
            "nothing: it says the version of the format, and so does every segment",
            "whoever opens the store to write makes it again; tokcap verify --repair keeps the damaged one",
        )
    )


def _check_writers(place: Place, found: Checked) -> None:
    try:
        names = place.files.listdir(place.layout.writers)
    except FileNotFoundError:
        return
    except OSError as error:
        found.findings.append(_not_a_directory(place.layout.writers, error, "no call can begin"))
        return
    for name in names:
        if _WRITER.fullmatch(name):
            _weigh(place, f"{place.layout.writers}/{name}", found)
        else:
            found.findings.append(_strange(f"{place.layout.writers}/{name}"))


def _ids(place: Place, globs: Collection[str], found: Checked) -> Iterator[str]:
    files, layout = place.files, place.layout
    for shard in sorted(files.listdir(layout.rollouts)):
        path = f"{layout.rollouts}/{shard}"
        if not _SHARD.fullmatch(shard):
            found.findings.append(out_of_place(files, layout, path) or _strange(path))
            continue
        try:
            names = files.listdir(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            found.findings.append(_not_a_directory(path, error, "rollouts whose ids lead here can't be stored"))
            continue
        place.owner.judge(files.stat(path), path, found)
        for name in names:
            try:
                check_rollout_id(name)
            except InvalidIdError:
                odd = out_of_place(files, layout, f"{path}/{name}")
                found.findings.append(odd or _strange(f"{path}/{name}", "it is no rollout id"))
                continue
            if layout.shard(name) != path:
                odd = out_of_place(files, layout, f"{path}/{name}")
                found.findings.append(odd or misplaced(files, layout, f"{path}/{name}"))
            elif is_meant(name, globs):
                yield name


def _strange(path: str, why: str = "a name that belongs to no store") -> Finding:
    advice = "move it out of the store; tokcap verify --repair moves it to quarantine"
    return Finding("warning", "name", path, why, advice=advice)


def _not_a_directory(path: str, error: OSError, costs: str) -> Finding:
    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
        advice = "see to the permissions, or the disk, and check again"
        return Finding("damage", "unreadable", path, f"it can't be read: {error}", costs, advice)
    advice = "tokcap verify --repair moves it to quarantine"
    return Finding("damage", "not_a_directory", path, "a file, or a link, where a directory belongs", costs, advice)
