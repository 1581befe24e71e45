"""Whatever a crash leaves, what was acknowledged is there, the rest is whole or absent, and life goes on.

The short form of `scripts/prove crash-states`: the same scripts, fewer states of each crash point.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_files import Fault
from tests.proofs.crash_checks import AFTER_A_CRASH
from tests.proofs.crash_missing import first_problem_without, lines_that_sync, sites_of
from tests.proofs.crash_recording import Recording, RecordingFiles
from tests.proofs.crash_scripts import AFTERWARDS, DEATHS, SCRIPTS, NotReachedError, death, put, random_script
from tests.proofs.crash_stage import Stage
from tests.proofs.crash_states import PART, Budget, Explorer, scratch_directory
from tests.proofs.crash_tree import Disk, Image, Model

REDUNDANT = {
    ("_mark", "files.fdatasync(fd) [the marker]"): "a marker that is damaged is written anew",
    ("_mark", "files.fsync_directory(layout.root) [a directory above]"): "a marker that is missing is written anew",
}
"""Syncs that nothing rests on: the beginning and the end of their site, and why."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tokcap.store")  # a store in memory warns that it is one


@pytest.fixture
def explorer() -> Iterator[Explorer]:
    scratch = scratch_directory()
    explorer = Explorer(scratch, Budget(states=6, again=80, states_again=12))
    yield explorer
    explorer.close()
    shutil.rmtree(scratch)


def with_budget(explorer: Explorer, budget: Budget) -> Explorer:
    explorer.budget = budget
    return explorer


def nothing_wrong(explorer: Explorer) -> None:
    assert not explorer.tally.problems, "\n".join(explorer.tally.problems[:5])


# ---- every state


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_state_of_a_crash_is_explained_by_the_state_table(explorer: Explorer, name: str) -> None:
    explorer.explore(SCRIPTS[name])
    nothing_wrong(explorer)
    assert explorer.tally.states > 10


@pytest.mark.parametrize("name", DEATHS)
def test_what_a_dead_process_left_half_done_is_finished_or_removed_durably(explorer: Explorer, name: str) -> None:
    with_budget(explorer, Budget(states=2, again=0, models=("weak",)))
    for number, after in enumerate(range(0, 30, 3)):
        try:
            explorer.explore(death(name, after, number % len(AFTERWARDS)))
        except NotReachedError:
            break
    nothing_wrong(explorer)
    assert explorer.tally.states > 10


@pytest.mark.parametrize(("seed", "model", "unit"), [(0, "weak", 64), (1, "ordered", 512)])
def test_every_state_of_anything_is_explained_by_the_state_table(
    explorer: Explorer, seed: int, model: Model, unit: int
) -> None:
    with_budget(explorer, Budget(states=2, again=100, states_again=12, models=(model,), unit=unit))
    explorer.explore(random_script(seed))
    nothing_wrong(explorer)


# ---- what was found in this way


@pytest.mark.parametrize("seed", [1_000_074, 1_000_050])
def test_a_record_of_a_dead_process_that_only_a_later_boot_believes_is_explained(explorer: Explorer, seed: int) -> None:
    with_budget(explorer, Budget(states=0, again=0, models=("weak",))).explore(random_script(seed))
    assert explorer.tally.killed > 80
    nothing_wrong(explorer)


def test_a_put_into_a_shard_that_others_removed_and_made_anew_is_durable(explorer: Explorer) -> None:
    """One remembers a shard as durable; another removes it, a third makes it again and dies before its sync."""
    with_budget(explorer, Budget(states=100, again=0)).explore(SCRIPTS["a_shard_made_anew"])
    nothing_wrong(explorer)


def test_a_segment_whose_writer_died_before_its_name_was_durable_does_not_pass_for_a_lost_one(
    explorer: Explorer,
) -> None:
    with_budget(explorer, Budget(states=100, again=0))
    for after in 7, 8:
        explorer.explore(death("first put", after, 0))
    nothing_wrong(explorer)


@pytest.mark.parametrize("then", [2, 3], ids=["put", "freeze"])
def test_whoever_was_told_that_a_rollout_is_retired_finds_it_retired_after_a_power_cut(
    explorer: Explorer, then: int
) -> None:
    """Also if the process that retired it died before its rename was durable."""
    with_budget(explorer, Budget(states=100, again=0)).explore(death("retire the second version", 1, then))
    nothing_wrong(explorer)


def test_a_sweep_that_is_cut_short_leaves_no_tombstone_without_its_notes(explorer: Explorer) -> None:
    def script(stage: Stage) -> None:
        DEATHS["note beside a tombstone"][0](_with_object(stage, "c"))
        stage.do("c", DEATHS["note beside a tombstone"][1](stage))
        stage.recording.settle()
        stage.sweep("c")

    with_budget(explorer, Budget(states=100, again=0)).explore(script)
    nothing_wrong(explorer)


def _with_object(stage: Stage, name: str) -> Stage:
    stage.open(name)
    return stage


# ---- that it would be seen


def test_each_sync_that_is_left_out_is_missed(explorer: Explorer) -> None:
    stages = [explorer.record(script) for script in SCRIPTS.values()]
    for then in range(len(AFTERWARDS)):
        for name in DEATHS:
            for after in range(30):
                try:
                    stages.append(explorer.record(death(name, after, then)))
                except NotReachedError:
                    break
    nothing_wrong(explorer)

    places = {event.place for stage in stages for event in stage.recording.events}
    for module, calls in lines_that_sync().items():
        for lines in calls:
            covered = any(module == name and line in lines for name, line in places)
            assert covered, f"{module}, line {lines.start}: a sync that nothing here leads to; record what does"

    by_site: dict[str, list[Stage]] = {}
    for stage in stages:
        for site in sites_of(stage):
            by_site.setdefault(site, []).append(stage)
    assert len(by_site) > 50
    unseen = [site for site, own in by_site.items() if first_problem_without(site, own, explorer.checker) is None]
    redundant = [site for site in unseen if any(site.startswith(a) and site.endswith(b) for a, b in REDUNDANT)]
    assert unseen == redundant, "nothing is lost without: " + "; ".join(set(unseen) - set(redundant))
    assert len(redundant) == len(REDUNDANT), "one of those is needed after all"


@pytest.mark.parametrize("change", ["a byte", "a record", "a name"])
def test_a_state_that_no_crash_may_leave_is_seen(explorer: Explorer, change: str) -> None:
    def script(stage: Stage) -> None:
        stage.open("a")
        for number in range(2):
            stage.do("a", put("r", number))

    stage = explorer.record(script)
    disk = Disk.of(stage.recording, unit=512)
    for event in stage.recording.events:
        disk.apply(event)
    whole = disk.pending().everything
    expected = stage.expected(len(stage.recording.events))
    assert explorer.checker.check(whole, expected, boot_id=AFTER_A_CRASH, variant=1) is None
    (segment,) = (number for number, data in whole.contents.items() if len(data) > 200)
    data = whole.contents[segment]
    changed = {
        "a byte": data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
        "a record": data[: len(data) // 2],
        "a name": data,
    }[change]
    shape = whole.shape if change != "a name" else ()
    image = Image(shape, {**whole.contents, segment: changed}, (), False)
    problem = explorer.checker.check(image, expected, boot_id=AFTER_A_CRASH, variant=1)
    assert problem is not None and "r: found" in problem


# ---- that the states are those that they should be


def states_of(base: Path, model: Model, *, synced: bool = False) -> set[tuple[tuple[str, bytes | None], ...]]:
    """Of a file of two sectors in a new directory, written and renamed, at the end of it all."""
    recording = Recording(str(base))
    files = RecordingFiles(recording)
    files.mkdir(f"{base}/d")
    fd = files.create(f"{base}/d/new")
    files.write(fd, [b"a" * 512 + b"b" * 512], 0)
    if synced:
        files.fdatasync(fd)
    files.rename(f"{base}/d/new", f"{base}/d/file")
    files.close(fd)
    disk = Disk.of(recording, unit=512)
    for event in recording.events:
        disk.apply(event)
    pending = disk.pending()
    found = {flat(image) for image in pending.images(model, random.Random(0))}
    assert pending.is_exhaustive
    return found


def flat(image: Image) -> tuple[tuple[str, bytes | None], ...]:
    found: list[tuple[str, bytes | None]] = []
    waiting = [("", image.shape)]
    while waiting:
        path, shape = waiting.pop()
        for name, node, below in shape:
            found.append((f"{path}{name}", None if below is not None else image.contents[node]))
            if below is not None:
                waiting.append((f"{path}{name}/", below))
    return tuple(sorted(found, key=lambda one: one[0]))


NOTHING, ZEROS, A, B = b"", bytes(512), b"a" * 512, b"b" * 512
CONTENTS = {NOTHING, ZEROS + ZEROS, A + ZEROS, ZEROS + B, A + B}


def test_what_was_not_synced_may_be_there_or_not_in_any_order(tmp_path: Path) -> None:
    found = states_of(tmp_path, "weak")
    named = {(("d", None), (f"d/{name}", data)) for name in ("new", "file") for data in CONTENTS}
    assert found == {(), (("d", None),), *named}


def test_a_journal_keeps_the_order_of_names_and_sizes(tmp_path: Path) -> None:
    found = states_of(tmp_path, "ordered")
    full = {(("d", None), (name, data)) for name in ("d/new", "d/file") for data in CONTENTS - {NOTHING}}
    assert found == {(), (("d", None),), (("d", None), ("d/new", NOTHING)), *full}


def test_a_sync_of_a_file_keeps_its_bytes_and_not_its_name(tmp_path: Path) -> None:
    assert states_of(tmp_path, "weak", synced=True) == {
        (),
        (("d", None),),
        (("d", None), ("d/new", A + B)),
        (("d", None), ("d/file", A + B)),
    }


def test_a_journal_takes_names_along_with_a_size(tmp_path: Path) -> None:
    found = states_of(tmp_path, "ordered", synced=True)
    assert found == {(("d", None), ("d/new", A + B)), (("d", None), ("d/file", A + B))}


def test_a_dead_process_writes_no_more(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path))
    files = RecordingFiles(recording)
    fd = files.create(f"{tmp_path}/file")
    with files.dying(1):
        files.write(fd, [b"1234"], 0)
        with pytest.raises(OSError, match="dead"):
            files.write(fd, [b"5678"], 4)
    with pytest.raises(OSError, match="dead"):
        files.mkdir(f"{tmp_path}/d")
    files.close(fd)
    assert os.listdir(tmp_path) == ["file"]
    # Death cut its last write in the middle.
    assert (tmp_path / "file").read_bytes() == b"123456"
    assert [event.data for event in recording.events if event.kind == "write"] == [b"1234", b"56"]


def test_a_call_that_fails_is_not_recorded(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path))
    files = RecordingFiles(recording)
    for kind in "mkdir", "create":
        with files.failing(Fault(1, errno.ENOSPC)), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            getattr(files, kind)(f"{tmp_path}/d")
    assert recording.events == []


# ---- the long form


def test_the_long_form_counts_what_it_looked_at() -> None:
    parser = argparse.ArgumentParser()
    PART.arguments(parser)
    options = parser.parse_args(["--only", "nothing_recorded", "--states", "1", "--again", "0", "--workers", "1"])
    outcome = PART.run(options)
    assert not outcome.problems
    figures = dict(outcome.figures)
    assert int(figures["states checked"]) > 10 and figures["recordings"] == "1"


@pytest.mark.torture
@pytest.mark.parametrize("model", ["weak", "ordered"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_state_of_a_crash_is_explained_by_the_state_table_for_long(
    explorer: Explorer, name: str, model: Model
) -> None:
    with_budget(explorer, Budget(states=300, again=100, models=(model,), unit=128)).explore(SCRIPTS[name])
    nothing_wrong(explorer)
