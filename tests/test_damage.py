"""Damaged stores: every offset at which a file can be cut, every bit that can flip, and what else happens to files.

Whatever is done to a file, a reader raises nothing but what the contract names, hands out no record that was not put
exactly so, and reports what is missing; earlier records, other chains and other rollouts are not affected; and the
rollout can still be written, frozen and retired.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.damage import (
    FROZEN,
    LATER_BOOT,
    OPEN,
    RETIRED,
    TRUNK,
    Bench,
    Broken,
    Case,
    Golden,
    MemoryFiles,
    Tree,
    Verdict,
    build_store,
    check,
    expect,
    fingerprint,
    flipped,
    live,
    live_through,
    look_at,
    look_at_every_bit,
    look_at_every_cut,
    make_entry,
    read_tree,
    verdict_of_cut,
    verdict_of_loss,
)
from tokcap.errors import ConflictError, NewerFormatError, RetiredError
from tokcap.store import FileStore
from tokcap.store.frame import ACKNOWLEDGED, TRAILER_SIZE
from tokcap.store.layout import Layout
from tokcap.store.looking import Looker
from tokcap.store.manifest import decode_manifest, encode_manifest
from tokcap.store.root import boot_id, read_marker

Store = tuple[dict[str, Golden], Tree]
Spread = Callable[..., Broken]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("golden") / "store"
    return build_store(root)


@pytest.fixture(scope="module")
def spread() -> Iterator[Spread]:
    """Calls a function with each of some arguments, in several processes, and joins what they found broken."""
    workers = min(8, len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=logging.disable, initargs=(logging.WARNING,)) as pool:

        def spread(function: Callable[..., Broken], jobs: list[tuple[Any, ...]], **options: Any) -> Broken:
            futures = [pool.submit(function, *job, **options) for job in jobs]
            return [what for future in futures for what in future.result()]

        yield spread


def assert_nothing_broken(broken: Broken) -> None:
    assert not broken, f"{len(broken)} broken, such as\n" + "\n".join(broken[:10])


def files_that_count(golden: Golden) -> list[str]:
    """The files that a reader of this rollout reads."""
    return [path for path in golden.tree if not golden.version or f"/v{golden.version}/" in path]


def files_to_damage(golden: Golden) -> list[str]:
    """Those that no other golden has just the same: it is enough to damage them once."""
    if golden.sealed and not golden.version:
        return [last_segment(golden)]
    return files_that_count(golden)


def last_segment(golden: Golden) -> str:
    return golden.segments()[-1]


def parts(golden: Golden, paths: list[str], size: int) -> list[tuple[Golden, str, int, int]]:
    return [
        (golden, path, start, min(start + size, len(golden.tree[path])))
        for path in paths
        for start in range(0, len(golden.tree[path]), size)
    ]


def chunks(cases: list[Case], number: int = 8) -> list[list[Case]]:
    return [part for start in range(number) if (part := cases[start::number])]


KINDS = pytest.mark.parametrize("kind", ["open", "closed", "whole", "frozen"])
BOOTS = pytest.mark.parametrize("later_boot", [False, True], ids=["same boot", "later boot"])


# ---- what the cases below start from


@KINDS
@BOOTS
def test_intact_rollout_is_read_exactly_and_nothing_is_called_damaged(
    store: Store, kind: str, later_boot: bool
) -> None:
    golden = store[0][kind]
    assert_nothing_broken(look_at(golden, {}, Verdict(expect(golden, lambda frame: True)), later_boot=later_boot))


def test_store_under_test_has_all_that_can_be_damaged(store: Store) -> None:
    goldens, _ = store
    suffixes = {path.rpartition(".")[2] for path in goldens["open"].segments()}
    assert suffixes == {"seg", "torn", "open"}
    for kind in ("open", "closed", "frozen"):
        assert len(goldens[kind].segments()) >= 3
    assert len(goldens["open"].contents) >= 12
    intact = expect(goldens["open"], lambda frame: True)
    assert set(intact.outcomes.values()) == {"conflict", "aborted", "recorded", "lost", "no_generation", "open"}
    assert goldens["frozen"].version == 2
    assert not set(expect(goldens["frozen"], lambda frame: True).outcomes.values()) & {"lost", "open", "conflict"}


# ---- cut at every offset


@KINDS
def test_cut_at_every_offset_costs_only_what_is_cut_off(store: Store, spread: Spread, kind: str) -> None:
    golden = store[0][kind]
    assert_nothing_broken(spread(look_at_every_cut, parts(golden, files_to_damage(golden), 256)))


def test_rollout_cut_at_any_offset_lives_on(store: Store, spread: Spread) -> None:
    goldens, rest = store
    golden = goldens["open"]
    cases = [Case(path, at) for path in golden.tree for at in range(len(golden.tree[path]))]
    assert_nothing_broken(spread(live_through, [(golden, rest, part) for part in chunks(cases)], later_boot=False))


@pytest.mark.parametrize(
    "kind, later_boot", [("open", True), ("closed", False), ("whole", False), ("whole", True), ("frozen", False)]
)
def test_rollout_cut_near_the_edge_of_a_frame_or_in_the_middle_lives_on(
    store: Store, spread: Spread, kind: str, later_boot: bool
) -> None:
    goldens, rest = store
    golden = goldens[kind]
    cases = []
    for path in files_to_damage(golden):
        size = len(golden.tree[path])
        edges = {edge for frame in golden.frames_of(path) for edge in (frame.offset, frame.body_end, frame.batch_end)}
        near = {edge + distance for edge in edges for distance in range(-1, 10)}
        cases += [Case(path, at) for at in sorted((near | set(range(0, size, 16))) & set(range(size)))]
    jobs = [(golden, rest, part) for part in chunks(cases)]
    assert_nothing_broken(spread(live_through, jobs, later_boot=later_boot))


# ---- every bit


@KINDS
def test_any_flipped_bit_costs_only_the_record_that_it_is_in(store: Store, spread: Spread, kind: str) -> None:
    golden = store[0][kind]
    assert_nothing_broken(spread(look_at_every_bit, parts(golden, files_to_damage(golden), 128)))


@KINDS
def test_rollout_with_a_flipped_bit_lives_on(store: Store, spread: Spread, kind: str) -> None:
    """A bit in every fifth byte, a header of 32 bytes therefore hit in each of its fields."""
    goldens, rest = store
    golden = goldens[kind]
    paths = files_to_damage(golden)
    cases = [Case(path, at, at // 5 % 8) for path in paths for at in range(0, len(golden.tree[path]), 5)]
    assert_nothing_broken(spread(live_through, [(golden, rest, part) for part in chunks(cases)], later_boot=False))


@pytest.mark.torture
@KINDS
@BOOTS
def test_rollout_with_any_flipped_bit_or_cut_lives_on(
    store: Store, spread: Spread, kind: str, later_boot: bool
) -> None:
    goldens, rest = store
    golden = goldens[kind]
    bits = [None, *range(8)]
    cases = [Case(p, at, bit) for p in files_that_count(golden) for at in range(len(golden.tree[p])) for bit in bits]
    jobs = [(golden, rest, part) for part in chunks(cases, 64)]
    assert_nothing_broken(spread(live_through, jobs, later_boot=later_boot))


def test_manifest_that_is_lost_costs_nothing(store: Store) -> None:
    goldens, rest = store
    golden = goldens["frozen"]
    manifest = next(path for path in golden.tree if path.endswith("/manifest"))
    with Bench(rest) as bench:
        bench.restore({path: data for path, data in golden.tree.items() if path != manifest})
        assert_nothing_broken(live(bench, golden, Verdict(expect(golden, lambda frame: True))))


def test_names_of_segments_outside_the_snapshot_cost_a_frozen_rollout_nothing(store: Store) -> None:
    goldens, rest = store
    golden = goldens["frozen"]
    with Bench(rest) as bench:
        bench.restore({path: data for path, data in golden.tree.items() if path in files_that_count(golden)})
        os.makedirs(f"{bench.root}/{os.path.dirname(golden.segments()[0])}/../000001.seg")
        assert_nothing_broken(live(bench, golden, Verdict(expect(golden, lambda frame: True))))


# ---- the marker of the store, and notes


def test_marker_with_any_bit_flipped_or_cut_anywhere_is_never_taken_for_another_format(store: Store) -> None:
    whole = store[1]["FORMAT"]
    intact = read_marker(MemoryFiles({"FORMAT": whole}), Layout(""))
    damaged = [flipped(whole, at, bit) for at in range(len(whole)) for bit in range(8)]
    damaged += [whole[:at] for at in range(len(whole))]
    for data in damaged:
        assert read_marker(MemoryFiles({"FORMAT": data}), Layout("")) in (None, intact)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "missing", "symlink", "FIFO"])
def test_damaged_marker_is_rewritten(store: Store, damage: str) -> None:
    goldens, rest = store
    golden = goldens["open"]
    whole = rest["FORMAT"]
    with Bench(rest) as bench:
        bench.restore(golden.tree)
        marker = bench.root / "FORMAT"
        marker.unlink()
        if damage in ("flipped", "cut", "empty"):
            marker.write_bytes({"flipped": flipped(whole, 9, 1), "cut": whole[:33], "empty": b""}[damage])
        elif damage == "symlink":
            marker.symlink_to(bench.root / "rollouts")
        elif damage == "FIFO":
            os.mkfifo(marker)
        with bench.store() as opened, opened.read_now(OPEN) as snapshot:
            assert_nothing_broken(check(snapshot, golden, Verdict(expect(golden, lambda frame: True))))
        assert marker.read_bytes() == whole
        assert not marker.is_symlink()
        assert not list(bench.root.glob("FORMAT-*"))


def test_damaged_note_beside_a_tombstone_is_reported_and_blocks_nothing(store: Store) -> None:
    golden = store[0]["retired"]
    (path,) = (path for path in golden.tree if "/note-" in path)
    whole = golden.tree[path]
    files = MemoryFiles(golden.tree)
    looker = Looker(files, Layout(""), boot_id())
    intact = looker.stat(RETIRED)
    assert len(intact.late) == 1
    damaged = [flipped(whole, at, bit) for at in range(len(whole)) for bit in range(8)]
    damaged += [whole[:at] for at in range(len(whole))]
    reported = 0
    for data in damaged:
        files.tree[f"/{path}"] = data
        stat = looker.stat(RETIRED)
        assert (stat.state, stat.version) == ("retired", intact.version)
        if stat.late != intact.late:
            reported += 1
            assert stat.late == ()
            assert [(d.path, d.offset) for d in stat.damage] == [(f"/{path}", 0)]
        else:
            assert stat.damage == ()
    assert reported > len(damaged) * 0.8  # all but padding


def test_retired_rollout_with_a_damaged_note_stays_retired_and_takes_notes(store: Store) -> None:
    goldens, rest = store
    golden = goldens["retired"]
    (path,) = (path for path in golden.tree if "/note-" in path)
    with Bench(rest) as bench:
        for data in (flipped(golden.tree[path], 40, 3), golden.tree[path][:20], b""):
            bench.restore(golden.tree | {path: data})
            with pytest.raises(RetiredError):
                bench.one.put_now(make_entry(RETIRED, "c0", TRUNK, [1]))
            with pytest.raises(RetiredError):
                bench.one.freeze_now(RETIRED)
            bench.one.mark_incomplete_now(RETIRED, "again")
            stat = bench.other.stat_now(RETIRED)
            assert len(stat.late) == 1 and "again" in stat.late[0]
            assert bench.one.retire_now(RETIRED, snapshot_id=stat.snapshot_id, version=stat.version)
            assert len(bench.other.stat_now(RETIRED).late) == 1


# ---- larger damage inside a file


@KINDS
def test_zeroed_sector_costs_the_records_in_it(store: Store, kind: str) -> None:
    golden = store[0][kind]
    broken: Broken = []
    for path in files_that_count(golden):
        data = golden.tree[path]
        for start in range(0, len(data), 256):
            end = min(start + 512, len(data))
            changed = {path: data[:start] + bytes(end - start) + data[end:]}
            if path.endswith(".open") and end == len(data):
                # With the last trailer gone, too, it looks like a write that was torn.
                for later_boot in (False, True):
                    verdict = verdict_of_cut(golden, path, start, later_boot=later_boot)
                    verdict.torn = None
                    broken += look_at(golden, changed, verdict, later_boot=later_boot)
                continue
            torn = None if path in golden.torn else False
            for later_boot in (False, True):
                verdict = verdict_of_loss(golden, path, start, end, torn)
                broken += look_at(golden, changed, verdict, later_boot=later_boot)
    assert_nothing_broken(broken)


@KINDS
def test_frame_copied_over_another_costs_the_records_that_it_covers(store: Store, kind: str) -> None:
    golden = store[0][kind]
    broken: Broken = []
    for path in golden.segments():
        data, frames = golden.tree[path], golden.frames_of(path)
        for source in golden.written:
            for target in frames:
                copied = golden.tree[source.path][source.offset : source.end]
                end = target.offset + len(copied)
                if source is target or end > frames[-1].end:
                    continue
                changed = {path: data[: target.offset] + copied + data[end:]}
                broken += look_at(golden, changed, verdict_of_loss(golden, path, target.offset, end))
    assert_nothing_broken(broken)


@KINDS
def test_frames_that_changed_places_are_lost_and_nothing_else(store: Store, kind: str) -> None:
    golden = store[0][kind]
    broken: Broken = []
    for path in golden.segments():
        data = golden.tree[path]
        for first, second in zip(golden.frames_of(path)[1:], golden.frames_of(path)[2:], strict=False):
            one, other = data[first.offset : first.end], data[second.offset : second.end]
            between = data[first.end : second.offset]
            changed = {path: data[: first.offset] + other + between + one + data[second.end :]}
            broken += look_at(golden, changed, verdict_of_loss(golden, path, first.offset, second.body_end))
    assert_nothing_broken(broken)


APPENDED = [b"\0", bytes(8), bytes(4096), b"\xff", b"TKCF" * 20, random.Random(5).randbytes(999)]


@KINDS
@BOOTS
@pytest.mark.parametrize("extra", APPENDED)
def test_bytes_appended_to_a_segment_cost_nothing_and_are_called_torn(
    store: Store, kind: str, later_boot: bool, extra: bytes
) -> None:
    golden = store[0][kind]
    torn = None if golden.version else True  # what a snapshot holds, its manifest says
    for path in golden.segments():
        verdict = Verdict(expect(golden, lambda frame: True), None, torn, path)
        assert_nothing_broken(look_at(golden, {path: golden.tree[path] + extra}, verdict, later_boot=later_boot))


@pytest.mark.parametrize("extra", [bytes(8), random.Random(6).randbytes(4096)], ids=["zeros", "garbage"])
@KINDS
def test_rollout_with_bytes_appended_to_a_segment_lives_on(store: Store, kind: str, extra: bytes) -> None:
    goldens, rest = store
    golden = goldens[kind]
    with Bench(rest) as bench:
        for path in golden.segments():
            torn = None if golden.version else True
            bench.restore(golden.tree | {path: golden.tree[path] + extra})
            assert_nothing_broken(live(bench, golden, Verdict(expect(golden, lambda frame: True), None, torn, path)))


# ---- whole files


def _lost_segment(golden: Golden, path: str, damaged: bool = True) -> Verdict:
    return Verdict(expect(golden, lambda frame: frame.path != path), (path, 0, 0) if damaged else None, None, path)


@KINDS
def test_segment_file_that_is_missing_costs_what_it_held(store: Store, kind: str) -> None:
    goldens, rest = store
    golden = goldens[kind]
    with Bench(rest) as bench:
        for path in golden.segments():
            bench.restore({name: data for name, data in golden.tree.items() if name != path})
            # Only a snapshot knows how many segments there were: of a log, the last may not have been started.
            damaged = bool(golden.version) or path != last_segment(golden)
            assert_nothing_broken(live(bench, golden, _lost_segment(golden, path, damaged)))


@KINDS
@pytest.mark.parametrize("thing", ["symlink", "FIFO", "directory", "full directory"])
def test_segment_replaced_by_something_that_is_no_file_costs_what_it_held(
    store: Store, tmp_path: Path, kind: str, thing: str
) -> None:
    goldens, rest = store
    golden = goldens[kind]
    with Bench(rest) as bench:
        for path in golden.segments():
            bench.restore(golden.tree)
            place = bench.root / path
            intact = tmp_path / place.name
            shutil.move(place, intact)
            if thing == "symlink":
                place.symlink_to(intact)
            elif thing == "FIFO":
                os.mkfifo(place)
            else:
                place.mkdir()
                if thing == "full directory":
                    (place / "file").write_bytes(b"x")
            assert_nothing_broken(live(bench, golden, _lost_segment(golden, path)))
            assert intact.read_bytes() == golden.tree[path]


@KINDS
def test_segment_of_another_rollout_is_never_read(store: Store, kind: str) -> None:
    goldens, rest = store
    golden = goldens[kind]
    foreign = goldens["whole" if golden.rollout_id == OPEN else "open"]
    with Bench(rest) as bench:
        for path in golden.segments():
            number = path.rpartition("/")[2][:6]
            data = next((foreign.tree[p] for p in foreign.segments() if f"/{number}." in p), None)
            if data is None:
                continue
            bench.restore(golden.tree | {path: data})
            assert_nothing_broken(live(bench, golden, _lost_segment(golden, path)))


@KINDS
def test_two_segments_that_changed_names_cost_what_they_held(store: Store, kind: str) -> None:
    golden = store[0][kind]
    one, other = golden.segments()[:2]
    changed = {one: golden.tree[other], other: golden.tree[one]}
    files = MemoryFiles(golden.tree | changed)
    expected = expect(golden, lambda frame: frame.path not in changed)
    with Looker(files, Layout(""), boot_id()).read(golden.rollout_id) as snapshot:
        keys = {(entry.model_call_id, entry.choice_index) for entry in snapshot.entries}
        assert keys == set(expected.entries)
        assert {call.model_call_id: call.outcome for call in snapshot.calls if call.model_call_id} == expected.outcomes
        assert {place.path[1:] for place in snapshot.damage} == set(changed)
        assert snapshot.incomplete


def test_second_file_of_a_segment_is_reported_and_never_mixed_with_the_first(store: Store) -> None:
    goldens, rest = store
    golden = goldens["open"]
    with Bench(rest) as bench:
        for path in golden.segments():
            double = path.rpartition(".")[0] + (".torn" if path.endswith(".seg") else ".seg")
            for data in (golden.tree[path], golden.tree[path][:300], b""):
                bench.restore(golden.tree | {double: data})
                with bench.one.read_now(OPEN) as snapshot:
                    found = {(e.model_call_id, e.choice_index): fingerprint(e) for e in snapshot.entries}
                    assert snapshot.incomplete
                for key, entry in found.items():
                    assert entry in golden.contents[key]
                bench.one.put_now(make_entry(OPEN, "after", TRUNK, [7]))
                with bench.one.freeze_now(OPEN) as snapshot:
                    assert snapshot.incomplete
                    assert "after" in {entry.model_call_id for entry in snapshot.entries}


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_large_segment_of_a_snapshot_is_checked_like_a_small_one(tmp_path: Path, damage: str) -> None:
    """Large enough to be mapped."""
    large = make_entry("r", "large", list(range(70_000, 170_000)), [1, 2])
    small = make_entry("r", "small", TRUNK, [3])
    with FileStore(tmp_path / "store", sweep_every_s=0) as opened:
        for entry in (small, large):
            opened.put_now(entry)
        with opened.freeze_now("r") as before:
            assert {fingerprint(entry)[1] for entry in before.entries} == {"small", "large"}
        (path,) = (tmp_path / "store").glob("rollouts/*/r/*/v1/*.seg")
        data = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(flipped(data, 300_000, 4) if damage == "flipped" else data[:300_000])
        with opened.freeze_now("r") as snapshot:
            left = [] if damage == "missing" else [fingerprint(small)]
            assert [fingerprint(entry) for entry in snapshot.entries] == left
            assert snapshot.incomplete
            assert any(path.name in call.detail for call in snapshot.calls)


# ---- other rollouts


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "zeroed", "FIFO"])
def test_damage_in_one_rollout_affects_no_other(store: Store, damage: str) -> None:
    goldens, rest = store
    victims = {"open": goldens["open"], "frozen": goldens["frozen"]}
    with Bench(rest) as bench:
        for victim, golden in victims.items():
            for path in files_that_count(golden):
                bench.restore(goldens["open"].tree | goldens["frozen"].tree | goldens["retired"].tree)
                place = bench.root / path
                data = place.read_bytes()
                place.unlink()
                if damage == "FIFO":
                    os.mkfifo(place)
                elif damage != "missing":
                    middle = len(data) // 2
                    changed = {"cut": data[:middle], "flipped": flipped(data, middle, 2), "zeroed": bytes(len(data))}
                    place.write_bytes(changed[damage])
                assert {name for name, _ in bench.one.rollouts()} == {OPEN, FROZEN, RETIRED}
                for kind in victims.keys() - {victim}:
                    with bench.one.read_now(goldens[kind].rollout_id) as snapshot:
                        intact = Verdict(expect(goldens[kind], lambda frame: True))
                        assert_nothing_broken(check(snapshot, goldens[kind], intact))
                assert len(bench.one.stat_now(RETIRED).late) == 1
                bench.other.stat_now(golden.rollout_id)
                assert bench.one.sweep_now(0) == 1
                with bench.one.freeze_many_now([OPEN, FROZEN])[0] as snapshot:
                    assert snapshot.rollout_id == OPEN


# ---- damage under the eyes of a writer


def test_segment_cut_while_a_writer_holds_it_open_is_read_again_before_the_next_put(store: Store) -> None:
    goldens, rest = store
    golden = goldens["open"]
    path = last_segment(golden)
    with Bench(rest) as bench:
        for at in range(0, len(golden.tree[path]), 23):
            bench.restore(golden.tree)
            bench.one.put_now(make_entry(OPEN, "before", TRUNK, [7]))
            bench.other.put_now(make_entry(OPEN, "before", TRUNK, [7]))
            os.truncate(bench.root / path, at)
            assert_nothing_broken(live(bench, golden, verdict_of_cut(golden, path, at, later_boot=False)))


# ---- damage is never forgotten


@pytest.mark.parametrize("at_boundary", [True, False])
def test_damage_found_by_a_freeze_is_reported_by_later_versions_and_without_the_manifest(
    store: Store, at_boundary: bool
) -> None:
    goldens, rest = store
    golden = goldens["closed"]
    path = last_segment(golden)
    frame = golden.frames_of(path)[3]
    cut = frame.batch_end + TRAILER_SIZE if at_boundary else frame.offset + 10
    with Bench(rest) as bench:
        bench.restore(golden.tree | {path: golden.tree[path][:cut]})
        bench.one.freeze_now(OPEN).close()
        bench.one.settle_call_now(OPEN, "late", "aborted")
        verdict = verdict_of_cut(golden, path, cut, later_boot=False)
        verdict.expected.outcomes["late"] = "aborted"
        with bench.one.freeze_now(OPEN) as snapshot:
            assert_nothing_broken(check(snapshot, golden, verdict))
        (manifest,) = bench.root.glob("rollouts/*/*/*/v2/manifest")
        manifest.write_bytes(flipped(manifest.read_bytes(), 50, 1))
        with bench.other.freeze_now(OPEN) as snapshot:
            assert snapshot.damage and snapshot.incomplete


@pytest.mark.parametrize("queued", [False, True], ids=["in this thread", "queued"])
@pytest.mark.parametrize("warm", [True, False], ids=["known to the writer", "found by it"])
def test_record_that_is_damaged_is_stored_again_when_it_is_put_again(store: Store, warm: bool, queued: bool) -> None:
    goldens, rest = store
    golden = goldens["whole"]
    with Bench(rest) as bench:
        bench.restore(golden.tree)
        entry = make_entry(FROZEN, "again", TRUNK, [41, 42])
        bench.one.put_now(entry)
        (path,) = bench.root.glob("rollouts/*/*/*/*.open")
        if not warm:
            bench.one.close_now()
            bench.one = bench.store()
            (path,) = bench.root.glob("rollouts/*/*/*/000003.seg")
        data = path.read_bytes()
        at = data.rindex(bytes((41, 42)))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        for _ in range(2):
            if queued:
                bench.one.put_many_now([entry])
            else:
                bench.one.put_now(entry)
        with bench.other.freeze_now(FROZEN) as snapshot:
            assert fingerprint(entry) in [fingerprint(found) for found in snapshot.entries]
            assert {call.outcome for call in snapshot.calls if call.model_call_id == "again"} == {"recorded"}
            assert snapshot.damage


def test_conflict_with_a_record_that_is_damaged_is_no_conflict_any_more(store: Store) -> None:
    goldens, rest = store
    golden = goldens["open"]
    second = [frame for frame in golden.written if frame.call == "k"][1]
    data = flipped(golden.tree[second.path], second.body_end - 1, 0)
    with Bench(rest) as bench:
        bench.restore(golden.tree | {second.path: data})
        bench.one.put_now(make_entry(OPEN, "k", TRUNK, [1]))
        with pytest.raises(ConflictError):
            bench.one.put_now(make_entry(OPEN, "k", TRUNK, [9]))


# ---- trailers and boots


def test_batch_without_its_trailer_is_believed_only_in_a_later_boot(store: Store) -> None:
    golden = store[0]["open"]
    path = last_segment(golden)
    data = golden.tree[path]
    assert data.endswith(ACKNOWLEDGED)
    changed = {path: data[:-TRAILER_SIZE] + bytes(TRAILER_SIZE)}
    dropped = verdict_of_cut(golden, path, len(data) - TRAILER_SIZE, later_boot=False)
    assert_nothing_broken(look_at(golden, changed, dropped))
    kept = Verdict(expect(golden, lambda frame: True), None, False, path)
    assert_nothing_broken(look_at(golden, changed, kept, later_boot=True))


@BOOTS
def test_trailer_is_not_needed_once_another_batch_follows(store: Store, later_boot: bool) -> None:
    golden = store[0]["open"]
    for path in golden.segments():
        data = golden.tree[path]
        for frame in golden.frames_of(path):
            at = frame.batch_end
            if at + TRAILER_SIZE >= len(data):
                continue
            changed = {path: data[:at] + bytes(TRAILER_SIZE) + data[at + TRAILER_SIZE :]}
            verdict = Verdict(expect(golden, lambda frame: True), None, path in golden.torn, path)
            assert_nothing_broken(look_at(golden, changed, verdict, later_boot=later_boot))


def test_writer_of_a_later_boot_leaves_the_segments_of_the_boot_before_alone(store: Store) -> None:
    goldens, rest = store
    golden = goldens["open"]
    with Bench(rest, later_boot=True) as bench:
        bench.restore(golden.tree)
        bench.one.put_now(make_entry(OPEN, "after", TRUNK, [7]))
        now = read_tree(bench.root)
        torn = last_segment(golden).replace(".open", ".torn")
        assert now[torn] == golden.tree[last_segment(golden)]
        with bench.other.freeze_now(OPEN) as snapshot:
            calls = {call.model_call_id: call.boot_id for call in snapshot.calls}
            assert calls["after"] == LATER_BOOT
            assert calls["t0"] == boot_id()


# ---- formats


_VERSIONED = ("frame", "batch", "manifest", "root", "log", "snapshot")


def _write_as_newer(function: Callable[[], Any]) -> Any:
    """Do something as a later tokcap would, whose format has a higher number."""
    patches = [mock.patch(f"tokcap.store.{module}.FORMAT_VERSION", 2) for module in _VERSIONED]
    try:
        for patch in patches:
            patch.start()
        return function()
    finally:
        for patch in patches:
            patch.stop()


def _newer_store(root: Path) -> None:
    with FileStore(root, sweep_every_s=0) as opened:
        opened.put_now(make_entry("newer", "c0", TRUNK, [1]))
        opened.put_now(make_entry("newer-frozen", "c0", TRUNK, [1]))
        opened.freeze_now("newer-frozen").close()


def test_intact_newer_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "store"
    _write_as_newer(lambda: _newer_store(root))
    before = read_tree(root)
    with pytest.raises(NewerFormatError, match=r"FORMAT.*upgrade"):
        FileStore(root, sweep_every_s=0)
    with pytest.raises(NewerFormatError):
        FileStore(root, read_only=True)
    assert read_tree(root) == before


def test_newer_segments_are_refused_by_name_when_only_the_marker_is_lost(tmp_path: Path) -> None:
    root = tmp_path / "store"
    _write_as_newer(lambda: _newer_store(root))
    (root / "FORMAT").unlink()
    before = {name: data for name, data in read_tree(root).items() if name.startswith("rollouts/")}
    with FileStore(root, sweep_every_s=0) as opened:
        for name in ("newer", "newer-frozen"):
            for attempt in (
                lambda name=name: opened.freeze_now(name),
                lambda name=name: opened.read_now(name),
                lambda name=name: opened.stat_now(name),
                lambda name=name: opened.mark_incomplete_now(name, "x"),
            ):
                with pytest.raises(NewerFormatError, match=name):
                    attempt()
        with pytest.raises(NewerFormatError, match="upgrade"):
            opened.put_now(make_entry("newer", "c1", TRUNK, [1]))
        opened.put_now(make_entry("older", "c0", TRUNK, [1]))
        assert opened.sweep_now(0) == 0
        with opened.freeze_now("older") as snapshot:
            assert len(snapshot.entries) == 1
    after = read_tree(root)
    assert {name: after[name] for name in before} == before


def test_newer_segment_that_is_damaged_beyond_recognition_is_damage_not_refused(tmp_path: Path) -> None:
    root = tmp_path / "store"
    _write_as_newer(lambda: _newer_store(root))
    (root / "FORMAT").unlink()
    (path,) = root.glob("rollouts/*/newer/*/*.seg")
    path.write_bytes(bytes(len(path.read_bytes())))
    with FileStore(root, sweep_every_s=0) as opened, opened.freeze_now("newer") as snapshot:
        assert snapshot.incomplete
        assert not len(snapshot.entries)


def test_single_newer_frame_in_an_older_segment_is_refused(tmp_path: Path) -> None:
    """Two versions of tokcap on one directory, during an upgrade."""
    root = tmp_path / "store"
    with FileStore(root, sweep_every_s=0) as older:
        older.put_now(make_entry("r", "c0", TRUNK, [1]))
        with mock.patch("tokcap.store.frame.FORMAT_VERSION", 2):
            older.put_now(make_entry("r", "c1", TRUNK, [2]))
        with FileStore(root, sweep_every_s=0) as opened, pytest.raises(NewerFormatError, match=r"000001\.open.*offset"):
            opened.read_now("r")


@pytest.mark.parametrize("module", ["root", "batch", "snapshot"], ids=["marker", "segment", "manifest"])
def test_format_that_stands_in_a_record_counts_like_the_one_in_its_frame(tmp_path: Path, module: str) -> None:
    root = tmp_path / "store"
    with (
        mock.patch(f"tokcap.store.{module}.FORMAT_VERSION", 2),
        contextlib.suppress(NewerFormatError),
        FileStore(root, sweep_every_s=0) as opened,
    ):
        opened.put_now(make_entry("newer", "c0", TRUNK, [1]))
        opened.freeze_now("newer").close()
    with pytest.raises(NewerFormatError), FileStore(root, sweep_every_s=0) as again:
        again.freeze_now("newer")


def test_intact_newer_manifest_is_refused_and_a_damaged_one_made_again(store: Store) -> None:
    goldens, _ = store
    golden = goldens["frozen"]
    path = next(path for path in golden.tree if path.endswith("/manifest"))
    index = decode_manifest(path, golden.tree[path], FROZEN, golden.incarnation, 2)
    assert index is not None
    index.format = 2
    newer = b"".join(_write_as_newer(lambda: encode_manifest(index)))
    with pytest.raises(NewerFormatError, match="manifest"):
        Looker(MemoryFiles(golden.tree | {path: newer}), Layout(""), boot_id()).read(FROZEN)
    for at in range(0, len(newer), 7):
        verdict = Verdict(expect(golden, lambda frame: True))
        assert_nothing_broken(look_at(golden, {path: flipped(newer, at, at % 8)}, verdict))
