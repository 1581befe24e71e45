"""Every sync that durability rests on happens, in the right order, before the operation returns.

A file is synced before the directory that names it, a directory before what makes its entries count; what is replaced
is removed only after its replacement is durable. Leaving out any one sync fails a test here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faulty_files import Fault, FaultyFiles
from tokcap import FileStore, TokenEntry
from tokcap.errors import DurabilityError
from tokcap.store import serving
from tokcap.store.files import Files

INCARNATION = re.compile(r"[0-9a-f]{32}")
RANDOM = re.compile(r"(tmp|FORMAT|probe)-[0-9a-f]{16}")
TIME = re.compile(r"(retired\.[0-9]+)\.[0-9]+")
LENGTH = re.compile(r"([0-9]{6})-[0-9]+\.seg")
SHARD = re.compile(r"rollouts/[0-9a-f]{2}\b")


def entry(call: str, tokens: int = 6) -> TokenEntry:
    return TokenEntry("r", call, np.arange(tokens, dtype=np.int32), np.array([7, 8], np.int32), np.array([-0.5, -1.0]))


class Recorded:
    """A store, and what it asked of the file system, in words without anything random."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory / "s")
        self.files = FaultyFiles()
        self.store = FileStore(self.directory, files=self.files, segment_bytes=4000, sweep_every_s=0)

    def steps(self) -> list[str]:
        words = []
        for call in self.files.trace:
            text = f"{call.kind} {call.path}" + (f" > {call.target}" if call.target else "")
            text = text.replace(f"{self.directory}/", "").replace(self.directory, ".")
            text = SHARD.sub("rollouts/hh", text).replace("rollouts/hh", "hh")
            text = LENGTH.sub(r"\1-n.seg", TIME.sub(r"\1", RANDOM.sub(r"\1", INCARNATION.sub("life", text))))
            words.append(text + (" fails" if call.error else ""))
        return words

    def does(self, operation: Callable[[FileStore], object]) -> Recorded:
        self.files.trace.clear()
        operation(self.store)
        return self

    def in_this_order(self, *expected: str) -> None:
        """`expected` are among the steps, in this order."""
        steps = self.steps()
        place = 0
        for step in expected:
            assert step in steps[place:], f"{step!r} is missing from {place} on in\n" + "\n".join(steps)
            place = steps.index(step, place) + 1

    def never(self, step: str) -> None:
        assert step not in self.steps()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path)
    yield recorded
    recorded.store.close_now()


def freeze(store: FileStore) -> None:
    store.freeze_now("r").close()


def retire(store: FileStore) -> None:
    stat = store.stat_now("r")
    assert store.retire_now("r", snapshot_id=stat.snapshot_id, version=stat.version)


def put(call: str, tokens: int = 6) -> Callable[[FileStore], None]:
    return lambda store: store.put_now(entry(call, tokens))


def test_a_new_directory_and_each_of_its_parents_is_durable_before_the_next(tmp_path: Path) -> None:
    files = FaultyFiles()
    FileStore(tmp_path / "a" / "b" / "s", files=files, sweep_every_s=0).close_now()
    recorded = Recorded(tmp_path)
    recorded.directory, recorded.files = str(tmp_path), files
    recorded.in_this_order(
        "mkdir a",
        "fsync .",
        "mkdir a/b",
        "fsync a",
        "mkdir a/b/s",
        "fsync a/b",
        "mkdir a/b/s/rollouts",
        "fsync a/b/s",
        "mkdir a/b/s/writers",
        "fsync a/b/s",
        "fsync a/b/s",  # once more with all parents: another process may have made them and died
        "fsync a/b",
        "fsync a",
        "fsync .",
        "fsync /",
        "create a/b/s/FORMAT",
        "pwritev a/b/s/FORMAT",
        "fdatasync a/b/s/FORMAT",
        "rename a/b/s/FORMAT > a/b/s/FORMAT",
        "fsync a/b/s",
    )
    recorded.store.close_now()


FIRST_PUT = (
    "mkdir hh",
    "mkdir hh/r",
    "mkdir hh/r/life",
    "create hh/r/life/000001.open",
    "pwritev hh/r/life/000001.open",
    "fdatasync hh/r/life/000001.open",
    "fsync hh/r/life",
    "fsync hh/r",
    "fsync hh",
    "fsync rollouts",
    "acknowledge hh/r/life/000001.open",
)
LATER_PUT = (
    "pwritev hh/r/life/000001.open",
    "fdatasync hh/r/life/000001.open",
    "acknowledge hh/r/life/000001.open",
)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_put_is_durable_with_every_name_that_leads_to_it(
    recorded: Recorded, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_TICK_NS", 0)

    def run(call: str) -> Callable[[FileStore], None]:
        return lambda store: asyncio.run(store.put(entry(call))) if asynchronous else store.put_now(entry(call))

    recorded.does(run("a")).in_this_order(*FIRST_PUT)
    recorded.does(run("b")).in_this_order(*LATER_PUT)
    recorded.does(lambda store: store.reset_now("r"))
    recorded.does(run("a")).in_this_order(*(step for step in FIRST_PUT if step not in ("mkdir hh", "fsync rollouts")))
    recorded.never("fsync rollouts")


@pytest.mark.parametrize(
    "say",
    [
        lambda store: store.begin_call_now("r", "c"),
        lambda store: store.settle_call_now("r", "c", "lost"),
        lambda store: store.mark_incomplete_now("r"),
        lambda store: store.finish_now("r", {"reward": 1}),
        lambda store: store.note_delivery_now("r", "a", "full"),
        lambda store: store.put_many_now([entry("c"), entry("d")]),
    ],
    ids=["begin", "settle", "mark", "finish", "delivery", "put_many"],
)
def test_every_statement_is_durable(recorded: Recorded, say: Callable[[FileStore], object]) -> None:
    recorded.does(put("a"))
    recorded.does(say).in_this_order(*LATER_PUT)


def test_what_another_process_began_and_did_not_sync_is_synced(recorded: Recorded) -> None:
    for name in "rollouts/9d", "rollouts/9d/r", "rollouts/9d/r/" + 32 * "a":
        Path(recorded.directory, name).mkdir(mode=0o700)
    recorded.does(put("a")).in_this_order(*FIRST_PUT[3:])


def test_a_full_segment_is_sealed_before_the_next_one_counts(recorded: Recorded) -> None:
    recorded.does(put("a", 4000))
    recorded.does(put("b", 10)).in_this_order(
        *LATER_PUT,
        "rename hh/r/life/000001.open > hh/r/life/000001.seg",
        "create hh/r/life/000002.open",
        "pwritev hh/r/life/000002.open",
        "fdatasync hh/r/life/000002.open",
        "fsync hh/r/life",
        "acknowledge hh/r/life/000002.open",
    )


def test_close_seals_durably(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(lambda store: store.close_now()).in_this_order(
        *LATER_PUT, "rename hh/r/life/000001.open > hh/r/life/000001.seg", "fsync hh/r/life"
    )


def test_the_end_of_a_segment_whose_sync_failed_is_stated_durably(recorded: Recorded) -> None:
    recorded.does(put("a"))
    with recorded.files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])), pytest.raises(DurabilityError):
        recorded.does(put("b"))
    recorded.in_this_order(
        "fdatasync hh/r/life/000001.open fails",
        "rename hh/r/life/000001.open > hh/r/life/000001.torn",
        "create hh/r/life/000002.open",
        "pwritev hh/r/life/000002.open",
        "fdatasync hh/r/life/000002.open",
        "fsync hh/r/life",
        "acknowledge hh/r/life/000002.open",
    )


def test_a_segment_whose_first_sync_failed_is_removed_durably(recorded: Recorded) -> None:
    with recorded.files.failing(Fault(1, errno.EIO, kinds=["fdatasync"])), pytest.raises(DurabilityError):
        recorded.does(put("a"))
    recorded.in_this_order("fdatasync hh/r/life/000001.open fails", "unlink hh/r/life/000001.open", "fsync hh/r/life")
    recorded.never("acknowledge hh/r/life/000001.open")


PUBLISH = (
    "mkdir hh/r/life/tmp",
    "create hh/r/life/tmp/manifest",
    "pwritev hh/r/life/tmp/manifest",
    "fdatasync hh/r/life/tmp/manifest",
    "fsync hh/r/life/tmp",
)


def test_a_freeze_is_durable(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze).in_this_order(
        "mkdir hh/r/life/tmp",
        "link hh/r/life/000001.open > hh/r/life/tmp/000001-n.seg",
        *PUBLISH[1:],
        "rename hh/r/life/tmp > hh/r/life/v1",
        "fsync hh/r/life",
    )


def test_the_freeze_of_an_absent_rollout_is_durable_with_every_name_that_leads_to_it(recorded: Recorded) -> None:
    recorded.does(freeze).in_this_order(
        "mkdir hh",
        "mkdir hh/r",
        "mkdir hh/r/life",
        "fsync hh/r",
        "fsync hh",
        "fsync rollouts",
        *PUBLISH,
        "rename hh/r/life/tmp > hh/r/life/v1",
        "fsync hh/r/life",
    )


def test_a_late_mark_is_durable_before_the_old_version_goes(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    recorded.does(lambda store: store.mark_incomplete_now("r", "c")).in_this_order(
        "mkdir hh/r/life/tmp",
        "link hh/r/life/v1/000001-n.seg > hh/r/life/tmp/000001-n.seg",
        "create hh/r/life/tmp/000002-n.seg",
        "pwritev hh/r/life/tmp/000002-n.seg",
        "fdatasync hh/r/life/tmp/000002-n.seg",
        *PUBLISH[1:],
        "rename hh/r/life/tmp > hh/r/life/v2",
        "fsync hh/r/life",
        "unlink hh/r/life/v1/manifest",
        "rmdir hh/r/life/v1",
    )


def note(where: str) -> tuple[str, ...]:
    return (
        f"create {where}/tmp",
        f"pwritev {where}/tmp",
        f"fdatasync {where}/tmp",
        f"rename {where}/tmp > {where}/note-000001",
        f"fsync {where}",
    )


def test_a_note_is_durable(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    recorded.does(lambda store: store.note_delivery_now("r", "a", "full")).in_this_order(*note("hh/r/life"))


def test_a_note_beside_a_tombstone_is_durable(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    recorded.does(retire)
    recorded.does(lambda store: store.mark_incomplete_now("r", "c")).in_this_order(*note("hh/r/life.retired.1"))


RETIRE = ("rename hh/r/life > hh/r/life.retired.1", "fsync hh/r")


def test_a_retirement_is_durable_before_the_payload_goes(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    recorded.does(retire).in_this_order(
        *RETIRE, "unlink hh/r/life.retired.1/v1/manifest", "rmdir hh/r/life.retired.1/v1"
    )


@pytest.mark.parametrize("state", ["open", "frozen", "retired"])
def test_a_reset_is_durable_before_anything_goes(recorded: Recorded, state: str) -> None:
    recorded.does(put("a"))
    name = "hh/r/life"
    if state != "open":
        recorded.does(freeze)
    if state == "retired":
        recorded.does(retire)
        name += ".retired.1"
    recorded.does(lambda store: store.reset_now("r")).in_this_order(
        f"rename {name} > hh/r/life.trash", "fsync hh/r", "rmdir hh/r/life.trash", "rmdir hh/r"
    )


# ---- what somebody else did and, for all we know, died before its sync


@pytest.mark.parametrize(
    ("prepare", "repeat", "sync"),
    [
        ([put("a"), freeze], freeze, "fsync hh/r/life"),
        ([put("a"), freeze], lambda store: store.note_delivery_now("r", "nobody", "full"), "fsync hh/r/life"),
        (
            [put("a"), freeze, lambda store: store.mark_incomplete_now("r", "c")],
            lambda store: store.mark_incomplete_now("r", "c"),
            "fsync hh/r/life",
        ),
        (
            [put("a"), freeze, lambda store: store.note_delivery_now("r", "a", "full")],
            lambda store: store.note_delivery_now("r", "a", "full"),
            "fsync hh/r/life",
        ),
        ([put("a"), freeze, retire], retire, "fsync hh/r"),
        (
            [put("a"), freeze, retire, lambda store: store.mark_incomplete_now("r", "c")],
            lambda store: store.mark_incomplete_now("r", "c"),
            "fsync hh/r/life.retired.1",
        ),
    ],
    ids=["freeze", "late delivery", "late mark", "note", "retire", "note beside a tombstone"],
)
def test_a_repetition_returns_only_when_the_first_is_durable(
    recorded: Recorded,
    prepare: list[Callable[[FileStore], object]],
    repeat: Callable[[FileStore], object],
    sync: str,
) -> None:
    for step in prepare:
        recorded.does(step)
    recorded.does(repeat).in_this_order(sync)


def test_the_reset_of_what_somebody_was_resetting_is_durable(recorded: Recorded) -> None:
    recorded.does(put("a"))
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        recorded.does(lambda store: store.reset_now("r"))
    recorded.does(lambda store: store.reset_now("r")).in_this_order("fsync hh/r", "rmdir hh/r/life.trash", "fsync hh/r")


@pytest.mark.parametrize("next_step", [freeze, lambda store: store.sweep_now(1000)], ids=["next operation", "sweep"])
def test_an_old_version_goes_only_when_the_new_one_is_durable(
    recorded: Recorded, next_step: Callable[[FileStore], object]
) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        recorded.does(lambda store: store.mark_incomplete_now("r", "c"))
    recorded.does(next_step).in_this_order("fsync hh/r/life", "unlink hh/r/life/v1/manifest", "rmdir hh/r/life/v1")


@pytest.mark.parametrize("next_step", [put("b"), lambda store: store.sweep_now(1000)], ids=["next operation", "sweep"])
def test_trash_goes_only_when_its_renaming_is_durable(
    recorded: Recorded, next_step: Callable[[FileStore], object]
) -> None:
    recorded.does(put("a"))
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        recorded.does(lambda store: store.reset_now("r"))
    recorded.does(next_step).in_this_order("fsync hh/r", "unlink hh/r/life.trash/000001.open", "rmdir hh/r/life.trash")


@pytest.mark.parametrize("next_step", [retire, lambda store: store.sweep_now(1000)], ids=["repeated", "sweep"])
def test_the_payload_of_a_tombstone_goes_only_when_the_retirement_is_durable(
    recorded: Recorded, next_step: Callable[[FileStore], object]
) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        recorded.does(retire)
    recorded.does(next_step).in_this_order("fsync hh/r", "unlink hh/r/life.retired.1/v1/manifest")


def test_leftovers_stay_while_nothing_can_be_synced(recorded: Recorded) -> None:
    recorded.does(put("a"))
    recorded.does(freeze)
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["unlink"])):
        recorded.does(lambda store: store.mark_incomplete_now("r", "c"))
    with recorded.files.failing(Fault(1, errno.EIO, "kind", ["fsync"])), contextlib.suppress(DurabilityError):
        recorded.does(freeze)
    recorded.never("unlink hh/r/life/v1/manifest")
    recorded.does(freeze).in_this_order("fsync hh/r/life", "unlink hh/r/life/v1/manifest")


def test_the_syncs_reach_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    for name in "fsync", "fdatasync":
        real = getattr(os, name)

        def note_and_sync(fd: int, name: str = name, real: Callable[[int], None] = real) -> None:
            asked.append((name, os.readlink(f"/proc/self/fd/{fd}")))
            real(fd)

        monkeypatch.setattr(os, name, note_and_sync)
    files = Files()
    files.fsync_directory(str(tmp_path))
    fd = files.create(str(tmp_path / "file"))
    files.fdatasync(fd)
    files.fsync(fd)
    files.close(fd)
    path = str(tmp_path)
    assert asked == [("fsync", path), ("fdatasync", f"{path}/file"), ("fsync", f"{path}/file")]
