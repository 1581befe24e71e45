"""The state table of a rollout, cell by cell, and the rules that come with it, on the file store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.state_model import exactly_equal
from tests.store_worker import RemoteObject
from tokcap import CallRecord, FileStore, TokenCaptureSnapshot, TokenEntry
from tokcap.errors import (
    BusyError,
    ClosedError,
    ConflictError,
    CorruptError,
    DurabilityError,
    FrozenError,
    InvalidEntryError,
    InvalidIdError,
    InvalidOutcomeError,
    ReadOnlyError,
    RetiredError,
    StaleAttemptError,
    TokcapError,
)
from tokcap.protocol import SettledOutcome
from tokcap.store import Snapshot, fence
from tokcap.store.files import Files

ROLLOUT = "r-1"
DAY = 86_400.0


def entry(
    call: str = "c-1", generated: tuple[int, ...] = (7, 8), *, rollout: str = ROLLOUT, **fields: Any
) -> TokenEntry:
    prompt = fields.pop("prompt", list(range(40)))
    return TokenEntry(rollout, call, prompt, list(generated), [-0.5] * len(generated), **fields)


FIRST, OTHER = entry(), entry(generated=(7, 9))


@pytest.fixture
def store(store_dir: Path) -> Iterator[FileStore]:
    with FileStore(store_dir, sweep_every_s=0) as store:
        yield store


@pytest.fixture
def second(store: FileStore, store_dir: Path) -> Iterator[FileStore]:
    """Another object on the same directory, as another process would have it."""
    with FileStore(store_dir, sweep_every_s=0) as second:
        yield second


def freeze(store: FileStore, rollout: str = ROLLOUT) -> Snapshot:
    """Freeze, for a look at properties that need no files."""
    with store.freeze_now(rollout) as snapshot:
        return snapshot


def retire(store: FileStore, rollout: str = ROLLOUT) -> Snapshot:
    snapshot = freeze(store, rollout)
    assert store.retire_now(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    return snapshot


def outcomes(snapshot: TokenCaptureSnapshot) -> dict[str, str]:
    return {call.model_call_id: call.outcome for call in snapshot.calls}


def outcome(store: FileStore, call: str = "c-1", rollout: str = ROLLOUT) -> str:
    with store.read_now(rollout) as snapshot:
        return outcomes(snapshot)[call]


def call_record(store: FileStore, call: str = "c-1", rollout: str = ROLLOUT) -> CallRecord:
    with store.read_now(rollout) as snapshot:
        return next(record for record in snapshot.calls if record.model_call_id == call)


def entries(store: FileStore, rollout: str = ROLLOUT) -> list[TokenEntry]:
    with store.read_now(rollout) as snapshot:
        return list(snapshot.entries)


def state(store: FileStore, rollout: str = ROLLOUT) -> str:
    return store.stat_now(rollout).state


def tree(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file and directory below, with its time and content; liveness files left out, they are no data."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if "writers" not in path.parts:
            there = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(directory))] = (there.st_mode, there.st_mtime_ns, content)
    return found


def versions(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("rollouts/*/*/*/v*"))


@contextlib.contextmanager
def nothing_changes(directory: Path) -> Iterator[None]:
    before = tree(directory)
    yield
    assert tree(directory) == before


def copy_of_what_is_on_disk(directory: Path, tmp_path: Path) -> FileStore:
    """A store on a copy of what is on disk now, as another process finds it."""
    copy = tmp_path / f"copy-{os.urandom(4).hex()}"
    shutil.copytree(directory, copy)
    return FileStore(copy, read_only=True)


class Gate(Files):
    """Syncs of data that wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.released.set()
        self.arrived = threading.Event()

    def shut(self) -> None:
        self.released.clear()
        self.arrived.clear()

    def fdatasync(self, fd: int) -> None:
        self.arrived.set()
        assert self.released.wait(30)
        super().fdatasync(fd)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(store: FileStore, store_dir: Path, gate: Gate) -> Iterator[FileStore]:
    """A store object whose syncs can be held up."""
    with FileStore(store_dir, sweep_every_s=0, files=gate) as gated:
        yield gated
        gate.released.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


# ---- put of something new


def test_a_put_creates_the_rollout(store: FileStore, second: FileStore) -> None:
    assert state(store) == "absent"
    store.put_now(FIRST)
    assert state(second) == "open"
    assert exactly_equal(entries(second)[0], FIRST)


def test_a_put_on_an_open_rollout_is_durable_when_it_returns(store: FileStore, store_dir: Path, tmp_path: Path) -> None:
    store.put_now(FIRST)
    store.put_now(entry("c-2"))
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy:
        assert [e.model_call_id for e in entries(copy)] == ["c-1", "c-2"]


def test_a_new_put_on_a_frozen_rollout_is_refused_and_writes_nothing(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    before = freeze(store)
    with nothing_changes(store_dir), pytest.raises(FrozenError):
        store.put_now(entry("c-2"))
    assert freeze(store).version == before.version
    assert outcomes(freeze(store)) == {"c-1": "recorded"}


def test_a_new_choice_of_a_stored_call_is_refused_on_a_frozen_rollout(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    freeze(store)
    with nothing_changes(store_dir), pytest.raises(FrozenError):
        store.put_now(entry(choice_index=1))


def test_a_new_put_on_a_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.put_now(entry("c-2"))


# ---- put of what is stored already


def test_an_identical_put_on_an_open_rollout_writes_nothing(
    store: FileStore, second: FileStore, store_dir: Path
) -> None:
    store.put_now(FIRST)
    with nothing_changes(store_dir):
        store.put_now(entry())
        second.put_now(entry())
    assert outcome(store) == "recorded"


def test_an_identical_put_on_a_frozen_rollout_is_no_error_and_writes_nothing(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    freeze(store)
    with nothing_changes(store_dir):
        store.put_now(entry())


def test_an_identical_put_on_a_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.put_now(entry())


def test_a_put_whose_sync_failed_is_written_again(store_dir: Path) -> None:
    class FailingOnce(Files):
        failing = False

        def fdatasync(self, fd: int) -> None:
            if self.failing:
                FailingOnce.failing = False
                raise OSError(5, "Input/output error")
            super().fdatasync(fd)

    with FileStore(store_dir, sweep_every_s=0, files=FailingOnce()) as store:
        store.put_now(FIRST)
        FailingOnce.failing = True
        with pytest.raises(DurabilityError):
            store.put_now(entry("c-2"))
        assert outcomes(store.read_now(ROLLOUT)) == {"c-1": "recorded"}
        store.put_now(entry("c-2"))
        assert outcomes(freeze(store)) == {"c-1": "recorded", "c-2": "recorded"}


# ---- put of another content


def test_another_content_on_an_open_rollout_is_a_conflict(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        store.put_now(OTHER)
    assert outcomes(freeze(store)) == {"c-1": "conflict"}
    assert freeze(store).incomplete


def test_another_content_that_came_through_another_object_is_a_conflict(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        second.put_now(OTHER)
    assert outcome(store) == "conflict"


def test_a_conflict_is_durable_before_the_error_is_raised(store: FileStore, store_dir: Path, tmp_path: Path) -> None:
    store.put_now(FIRST)
    try:
        store.put_now(OTHER)
    except ConflictError:
        copy = copy_of_what_is_on_disk(store_dir, tmp_path)
    assert outcome(copy) == "conflict"
    with copy.read_now(ROLLOUT) as snapshot:
        kept = [snapshot.entries.entry(node) for node in range(len(snapshot.entries.nodes))]
    assert len(kept) == 2
    assert exactly_equal(kept[0], FIRST)
    assert exactly_equal(kept[1], OTHER)


def test_another_content_on_a_frozen_rollout_is_refused_and_moves_the_version(store: FileStore) -> None:
    store.put_now(FIRST)
    store.put_now(entry("c-2"))
    before = freeze(store)
    with pytest.raises(FrozenError):
        store.put_now(OTHER)
    after = freeze(store)
    assert (after.snapshot_id, after.version) == (before.snapshot_id, before.version + 1)
    assert outcomes(after) == {"c-1": "conflict", "c-2": "recorded"}


def test_a_late_conflict_is_durable_before_the_error_is_raised(
    store: FileStore, store_dir: Path, tmp_path: Path
) -> None:
    store.put_now(FIRST)
    freeze(store)
    with pytest.raises(FrozenError):
        store.put_now(OTHER)
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy, copy.freeze_now(ROLLOUT) as snapshot:
        assert snapshot.version == 2
        assert outcomes(snapshot) == {"c-1": "conflict"}
        assert len(snapshot.entries.nodes) == 2


def test_a_second_late_conflict_of_the_same_call_changes_no_outcome_and_no_version(
    store: FileStore, store_dir: Path
) -> None:
    store.put_now(FIRST)
    freeze(store)
    with pytest.raises(FrozenError):
        store.put_now(OTHER)
    for late in (OTHER, entry(generated=(1, 1))):
        with nothing_changes(store_dir), pytest.raises(FrozenError):
            store.put_now(late)


def test_another_content_on_a_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.put_now(OTHER)


@pytest.mark.parametrize("late", [False, True], ids=["open", "frozen"])
def test_which_of_two_contents_is_shown_does_not_depend_on_the_order(store: FileStore, late: bool) -> None:
    shown = []
    for rollout, order in (("one", (7, 9)), ("other", (9, 7))):
        store.put_now(entry(rollout=rollout, generated=order[:1]))
        if late:
            freeze(store, rollout)
        with pytest.raises(FrozenError if late else ConflictError):
            store.put_now(entry(rollout=rollout, generated=order[1:]))
        with store.freeze_now(rollout) as snapshot:
            assert outcomes(snapshot) == {"c-1": "conflict"}
            shown.append([e.generation_token_ids.tolist() for e in snapshot.entries])
    assert shown[0] == shown[1]
    assert len(shown[0]) == 1


def test_equal_tokens_with_another_log_prob_are_a_conflict(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        store.put_now(TokenEntry(ROLLOUT, "c-1", FIRST.prompt_token_ids, [7, 8], [-0.5, -0.25]))


def test_repeating_either_side_of_a_conflict_gives_the_same_answer_and_writes_nothing(
    store: FileStore, store_dir: Path
) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        store.put_now(OTHER)
    with nothing_changes(store_dir):
        store.put_now(FIRST)
        with pytest.raises(ConflictError):
            store.put_now(OTHER)
    freeze(store)
    with nothing_changes(store_dir):
        store.put_now(FIRST)
        with pytest.raises(FrozenError):
            store.put_now(OTHER)


def test_a_third_content_is_kept_as_evidence_too(store: FileStore) -> None:
    contents = [entry(generated=(number,)) for number in range(5)]
    store.put_now(contents[0])
    for other in contents[1:]:
        with pytest.raises(ConflictError):
            store.put_now(other)
    with store.freeze_now(ROLLOUT) as snapshot:
        assert len(snapshot.entries) == 1
        assert len(snapshot.entries.nodes) == 5


def test_a_conflict_with_a_call_that_another_object_added_to_our_chain_is_seen(
    store: FileStore, second: FileStore
) -> None:
    chain = list(range(100))
    store.put_now(entry("c-1", prompt=chain))
    second.put_now(entry("c-2", prompt=[*chain, 7, 8, 9]))
    with pytest.raises(ConflictError):
        store.put_now(entry("c-2", (1,), prompt=[*chain, 7, 8, 9]))
    third = [*chain, 7, 8, 9, 7, 8, 5]
    second.put_now(entry("c-3", prompt=third))
    store.put_now(entry("c-3", prompt=third))
    assert outcomes(freeze(store)) == {"c-1": "recorded", "c-2": "conflict", "c-3": "recorded"}


# ---- begin_call


def test_begin_call_creates_the_rollout(store: FileStore, second: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    assert state(second) == "open"
    assert outcome(second) == "open"


def test_begin_call_on_an_open_rollout_is_a_durable_intent(store: FileStore, store_dir: Path, tmp_path: Path) -> None:
    store.put_now(FIRST)
    store.begin_call_now(ROLLOUT, "c-2")
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy:
        assert outcomes(copy.read_now(ROLLOUT)) == {"c-1": "recorded", "c-2": "open"}
        assert copy.read_now(ROLLOUT).incomplete


def test_begin_call_on_a_frozen_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    store.begin_call_now(ROLLOUT, "c-2")
    freeze(store)
    for call in ("c-2", "c-3"):
        with nothing_changes(store_dir), pytest.raises(FrozenError):
            store.begin_call_now(ROLLOUT, call)


def test_begin_call_on_a_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.begin_call_now(ROLLOUT, "c-2")


def test_repeating_begin_call_writes_nothing(store: FileStore, second: FileStore, store_dir: Path) -> None:
    store.begin_call_now(ROLLOUT, "c-1", retry_count=1)
    with nothing_changes(store_dir):
        store.begin_call_now(ROLLOUT, "c-1", retry_count=1)
        second.begin_call_now(ROLLOUT, "c-1", retry_count=1)


def test_a_call_has_no_end_before_all_its_choices_are_stored(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1", choices=2)
    store.put_now(FIRST)
    for look in (store.read_now(ROLLOUT), store.freeze_now(ROLLOUT)):
        with look as snapshot:
            assert [(call.outcome, call.ended_at) for call in snapshot.calls] == [("open", None)]


def test_what_begin_call_is_told_is_in_the_call_record(store: FileStore) -> None:
    digests = [bytes([n]) * 16 for n in range(5)]
    store.begin_call_now(ROLLOUT, "c-1", request_digests=digests, retry_count=2, idempotency_key="key-1")
    store.begin_call_now(ROLLOUT, "c-2", request_digests=[*digests, b"x" * 16])
    store.put_now(FIRST)
    for look in (store.read_now(ROLLOUT), store.freeze_now(ROLLOUT)):
        with look as snapshot:
            one, two = snapshot.calls
        assert (tuple(one.request_digests), one.retry_count, one.idempotency_key) == (tuple(digests), 2, "key-1")
        assert tuple(two.request_digests) == (*digests, b"x" * 16)
        assert one.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert one.begun_at is not None
        assert one.ended_at is not None
        assert one.begun_at <= one.ended_at <= time.clock_gettime(time.CLOCK_BOOTTIME)
        assert two.ended_at is None


@pytest.mark.parametrize(
    "known",
    [
        {"choices": 0},
        {"choices": True},
        {"choices": 1.0},
        {"retry_count": -1},
        {"idempotency_key": 5},
        {"request_digests": [b"short"]},
        {"request_digests": ["x" * 16]},
    ],
    ids=repr,
)
def test_begin_call_refuses_what_it_cannot_keep(store: FileStore, known: dict[str, Any]) -> None:
    with pytest.raises(InvalidEntryError, match="rollout r-1, call c-1"):
        store.begin_call_now(ROLLOUT, "c-1", **known)
    assert state(store) == "absent"


# ---- settle_call and mark_incomplete


def test_settle_call_creates_the_rollout(store: FileStore, second: FileStore) -> None:
    store.settle_call_now(ROLLOUT, "c-1", "no_generation", "status 503")
    assert state(second) == "open"
    record = call_record(second)
    assert (record.outcome, record.detail) == ("no_generation", "status 503")


def test_mark_incomplete_creates_the_rollout(store: FileStore, second: FileStore) -> None:
    store.mark_incomplete_now(ROLLOUT, "c-1")
    assert state(second) == "open"
    assert outcome(second) == "lost"


def test_settle_call_and_mark_incomplete_on_an_open_rollout_are_durable(
    store: FileStore, store_dir: Path, tmp_path: Path
) -> None:
    store.put_now(FIRST)
    store.settle_call_now(ROLLOUT, "c-2", "aborted")
    store.mark_incomplete_now(ROLLOUT, "c-3")
    store.mark_incomplete_now(ROLLOUT)
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy:
        assert outcomes(copy.read_now(ROLLOUT)) == {"c-1": "recorded", "c-2": "aborted", "c-3": "lost", "": "lost"}


@pytest.mark.parametrize("word", ["no_generation", "aborted", "lost"])
def test_settle_call_on_a_frozen_rollout_is_durable_in_a_new_version(
    store: FileStore, store_dir: Path, tmp_path: Path, word: SettledOutcome
) -> None:
    store.put_now(FIRST)
    store.begin_call_now(ROLLOUT, "c-2")
    before = freeze(store)
    store.settle_call_now(ROLLOUT, "c-2", word)
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy, copy.freeze_now(ROLLOUT) as after:
        assert (after.snapshot_id, after.version) == (before.snapshot_id, 2)
        assert outcomes(after) == {"c-1": "recorded", "c-2": word}
        assert [e.model_call_id for e in after.entries] == ["c-1"]


@pytest.mark.parametrize("call", ["c-2", ""], ids=["named", "unnamed"])
def test_mark_incomplete_on_a_frozen_rollout_is_durable_in_a_new_version(
    store: FileStore, store_dir: Path, tmp_path: Path, call: str
) -> None:
    store.put_now(FIRST)
    assert not freeze(store).incomplete
    store.mark_incomplete_now(ROLLOUT, call)
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy, copy.freeze_now(ROLLOUT) as after:
        assert after.version == 2
        assert after.incomplete
        assert outcomes(after) == {"c-1": "recorded", call: "lost"}


def test_a_late_mark_that_changes_no_outcome_makes_no_new_version(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    store.mark_incomplete_now(ROLLOUT, "c-2")
    freeze(store)
    store.mark_incomplete_now(ROLLOUT, "c-1")
    with nothing_changes(store_dir):
        store.mark_incomplete_now(ROLLOUT, "c-1")
        store.mark_incomplete_now(ROLLOUT, "c-2")
    after = freeze(store)
    assert after.version == 1
    assert outcomes(after) == {"c-1": "recorded", "c-2": "lost"}


def test_repeating_a_mark_or_settlement_writes_nothing(store: FileStore, second: FileStore, store_dir: Path) -> None:
    def say_everything() -> None:
        for object_ in (store, second):
            object_.mark_incomplete_now(ROLLOUT)
            object_.mark_incomplete_now(ROLLOUT, "c-2")
            object_.settle_call_now(ROLLOUT, "c-3", "aborted")

    say_everything()
    with nothing_changes(store_dir):
        say_everything()
    freeze(store)
    with nothing_changes(store_dir):
        say_everything()


@pytest.mark.parametrize("word", ["no_generation", "aborted", "lost"])
def test_settle_call_on_a_retired_rollout_is_noted_beside_the_tombstone(
    store: FileStore, store_dir: Path, tmp_path: Path, word: SettledOutcome
) -> None:
    store.put_now(FIRST)
    old = retire(store)
    store.settle_call_now(ROLLOUT, "c-late", word, "it came late")
    with copy_of_what_is_on_disk(store_dir, tmp_path) as copy:
        stat = copy.stat_now(ROLLOUT)
    assert stat.state == "retired"
    assert len(stat.late) == 1
    assert all(text in stat.late[0] for text in ("c-late", word, "it came late"))
    assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=old.version)


def test_mark_incomplete_on_a_retired_rollout_is_noted_once(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    retire(store)
    for object_ in (store, second):
        object_.mark_incomplete_now(ROLLOUT, "c-1")
        object_.mark_incomplete_now(ROLLOUT)
    late = second.stat_now(ROLLOUT).late
    assert len(late) == 2
    assert "c-1" in late[0]
    assert state(store) == "retired"


@pytest.mark.parametrize("word", ["recorded", "open", "conflict", "", None, "LOST"])
def test_settle_call_takes_no_other_outcome(store: FileStore, word: Any) -> None:
    with pytest.raises(ValueError, match="rollout r-1, call c-1") as caught:
        store.settle_call_now(ROLLOUT, "c-1", word)
    assert isinstance(caught.value, InvalidOutcomeError)
    assert state(store) == "absent"


# ---- outcomes and their precedence

PRECEDENCE = ("conflict", "aborted", "recorded", "lost", "no_generation")


def say(store: FileStore, rollout: str, call: str, statement: str) -> None:
    if statement == "recorded":
        store.put_now(entry(call, rollout=rollout))
    elif statement == "conflict":
        for generated in ((7, 8), (7, 9)):
            with contextlib.suppress(ConflictError):
                store.put_now(entry(call, generated, rollout=rollout))
    else:
        store.settle_call_now(rollout, call, statement)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_of_several_statements_the_first_in_precedence_holds_in_whatever_order(store: FileStore, count: int) -> None:
    expected = {}
    for number, statements in enumerate(itertools.permutations(PRECEDENCE, count)):
        call = f"c-{number}"
        for statement in statements:
            say(store, ROLLOUT, call, statement)
        expected[call] = min(statements, key=PRECEDENCE.index)
    with store.read_now(ROLLOUT) as look:
        assert outcomes(look) == expected
    assert outcomes(freeze(store)) == expected


@pytest.mark.parametrize(
    ("statement", "incomplete"),
    [
        ("recorded", False),
        ("aborted", False),
        ("no_generation", False),
        ("lost", True),
        ("conflict", True),
        ("open", True),
    ],
)
def test_which_outcomes_make_a_snapshot_incomplete(store: FileStore, statement: str, incomplete: bool) -> None:
    store.put_now(FIRST)
    if statement == "open":
        store.begin_call_now(ROLLOUT, "c-2")
    else:
        say(store, ROLLOUT, "c-2", statement)
    snapshot = freeze(store)
    assert outcomes(snapshot)["c-2"] == statement
    assert snapshot.incomplete is incomplete


@pytest.mark.parametrize("said", ["lost", "no_generation"])
def test_a_put_after_lost_or_no_generation_makes_the_call_recorded(store: FileStore, said: str) -> None:
    say(store, ROLLOUT, "c-1", said)
    store.put_now(FIRST)
    assert outcomes(freeze(store)) == {"c-1": "recorded"}


def test_an_aborted_call_keeps_its_tokens_and_stays_aborted(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    store.settle_call_now(ROLLOUT, "c-1", "aborted")
    seen = entry(generated=(7,), finish_reason="aborted")
    store.put_now(seen)
    with store.freeze_now(ROLLOUT) as snapshot:
        assert outcomes(snapshot) == {"c-1": "aborted"}
        assert exactly_equal(snapshot.entries[0], seen)
        assert not snapshot.incomplete


def test_a_call_that_never_came_back_is_open(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    snapshot = freeze(store)
    assert outcomes(snapshot) == {"c-1": "open"}
    assert snapshot.incomplete


# ---- several choices


def test_a_call_with_choices_is_open_until_all_are_stored(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1", choices=3)
    for choice, expected in enumerate(("open", "open", "recorded")):
        store.put_now(entry(choice_index=choice, generated=(choice,)))
        assert outcome(store) == expected
    assert [e.choice_index for e in entries(store)] == [0, 1, 2]


@pytest.mark.parametrize(("word", "expected"), [("lost", "lost"), ("aborted", "aborted")])
def test_a_call_with_choices_that_is_settled_is_not_open_any_more(
    store: FileStore, word: SettledOutcome, expected: str
) -> None:
    store.begin_call_now(ROLLOUT, "c-1", choices=2)
    store.put_now(FIRST)
    store.settle_call_now(ROLLOUT, "c-1", word)
    assert outcome(store) == expected


def test_no_generation_of_a_call_that_has_some_of_its_choices_counts_as_lost(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1", choices=2)
    store.put_now(FIRST)
    store.settle_call_now(ROLLOUT, "c-1", "no_generation")
    assert freeze(store).incomplete
    assert outcomes(freeze(store)) == {"c-1": "lost"}


def test_put_many_stores_the_choices_of_a_call(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1", choices=3)
    group = [entry(choice_index=choice, generated=(choice,)) for choice in range(3)]
    store.put_many_now(group)
    assert outcome(store) == "recorded"
    assert all(exactly_equal(stored, put) for stored, put in zip(entries(store), group, strict=True))


def test_put_many_of_nothing_is_nothing(store: FileStore, store_dir: Path) -> None:
    with nothing_changes(store_dir):
        store.put_many_now([])
        asyncio.run(store.put_many(iter(())))


def test_put_many_is_whole_or_absent_wherever_the_file_is_cut(
    store: FileStore, store_dir: Path, tmp_path: Path
) -> None:
    store.put_now(entry("c-0"))
    (segment,) = store_dir.glob("rollouts/*/*/*/*.open")
    before = segment.stat().st_size
    store.put_many_now([entry(choice_index=choice, generated=(choice,)) for choice in range(3)])
    whole = segment.stat().st_size
    copy = tmp_path / "copy"
    shutil.copytree(store_dir, copy)
    cut_file = copy / segment.relative_to(store_dir)
    with FileStore(copy, read_only=True) as reader:
        for end in range(whole - 1, before - 1, -3):
            os.truncate(cut_file, end)
            assert len(entries(reader)) in (1, 4)


def test_put_many_of_repeated_entries_stores_each_once(store: FileStore, store_dir: Path) -> None:
    store.put_many_now([FIRST, entry()])
    assert outcome(store) == "recorded"
    with nothing_changes(store_dir):
        store.put_now(FIRST)
    with store.freeze_now(ROLLOUT) as snapshot:
        assert len(snapshot.entries.nodes) == 1


def test_put_many_of_two_contents_for_one_choice_is_a_conflict(store: FileStore) -> None:
    with pytest.raises(ConflictError):
        store.put_many_now([FIRST, OTHER])
    assert outcomes(freeze(store)) == {"c-1": "conflict"}


def test_put_many_with_one_conflict_stores_the_other_choices(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        store.put_many_now([OTHER, entry(choice_index=1)])
    assert [e.choice_index for e in entries(store)] == [0, 1]
    assert outcome(store) == "conflict"


def test_put_many_takes_several_calls_and_raises_the_first_error_after_all_were_tried(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ConflictError):
        store.put_many_now([OTHER, entry("c-2"), entry("c-3", rollout="r-2")])
    assert outcomes(freeze(store)) == {"c-1": "conflict", "c-2": "recorded"}
    assert outcomes(freeze(store, "r-2")) == {"c-3": "recorded"}


@pytest.mark.parametrize("bad", [None, {"rollout_id": ROLLOUT}, "entry"])
def test_put_takes_only_entries(store: FileStore, bad: Any) -> None:
    with pytest.raises(InvalidEntryError):
        store.put_now(bad)
    with pytest.raises(InvalidEntryError):
        store.put_many_now([FIRST, bad])
    assert state(store) == "absent"


# ---- freeze


def test_freeze_of_an_absent_rollout_publishes_an_empty_snapshot_that_fences_late_writers(
    store: FileStore, second: FileStore
) -> None:
    with store.freeze_now(ROLLOUT) as snapshot:
        assert (len(snapshot.entries), snapshot.calls, snapshot.version) == (0, (), 1)
        assert not snapshot.incomplete
    assert state(second) == "frozen"
    with pytest.raises(FrozenError):
        second.put_now(FIRST)
    with pytest.raises(FrozenError):
        second.begin_call_now(ROLLOUT, "c-1")
    assert second.retire_now(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=1)


def test_freeze_of_an_open_rollout_publishes_what_was_put(store: FileStore, second: FileStore) -> None:
    put = [entry(f"c-{n}", (n,), prompt=list(range(20 * n))) for n in range(5)]
    for number, one in enumerate(put):
        (store, second)[number % 2].put_now(one)
    with second.freeze_now(ROLLOUT) as snapshot:
        assert isinstance(snapshot, TokenCaptureSnapshot)
        assert (snapshot.rollout_id, snapshot.version) == (ROLLOUT, 1)
        assert len(snapshot.snapshot_id) == 32
        assert re.fullmatch(r"[0-9a-f]{32}", snapshot.snapshot_id)
        assert all(exactly_equal(*pair) for pair in zip(snapshot.entries, put, strict=True))


def test_freeze_of_a_frozen_rollout_gives_the_same_snapshot(
    store: FileStore, second: FileStore, store_dir: Path
) -> None:
    store.put_now(FIRST)
    one = freeze(store)
    with nothing_changes(store_dir):
        again, elsewhere = freeze(store), freeze(second)
    assert (one.snapshot_id, one.version) == (again.snapshot_id, again.version)
    assert (one.snapshot_id, one.version) == (elsewhere.snapshot_id, elsewhere.version)


def test_freeze_of_a_frozen_rollout_gives_the_newest_version(store: FileStore) -> None:
    store.put_now(FIRST)
    assert freeze(store).version == 1
    store.mark_incomplete_now(ROLLOUT, "c-2")
    store.mark_incomplete_now(ROLLOUT, "c-3")
    assert freeze(store).version == 3


def test_freeze_of_a_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.freeze_now(ROLLOUT)


def test_freeze_many_gives_the_snapshots_in_the_order_of_the_ids(store: FileStore) -> None:
    ids = [f"r-{number}" for number in (5, 3, 9, 1, 7, 0)]
    for rollout in sorted(ids):
        store.put_now(entry(rollout=rollout))
    for snapshots in (store.freeze_many_now(ids), asyncio.run(store.freeze_many(ids))):
        assert [snapshot.rollout_id for snapshot in snapshots] == ids
        assert [len(snapshot.entries) for snapshot in snapshots] == [1] * 6
        for snapshot in snapshots:
            snapshot.close()
    assert store.freeze_many_now([]) == []


def test_freeze_many_with_one_that_fails_raises_and_freezes_the_others(store: FileStore) -> None:
    for rollout in ("r-1", "r-2"):
        store.put_now(entry(rollout=rollout))
    retire(store, "r-1")
    with pytest.raises(RetiredError, match="r-1"):
        store.freeze_many_now(["r-1", "r-2"])
    assert state(store, "r-2") == "frozen"


# ---- freeze that waits for open calls


def test_a_waiting_freeze_lets_open_calls_finish_and_new_ones_wait_in_vain(
    store: FileStore, second: FileStore, threads: ThreadPoolExecutor
) -> None:
    second.begin_call_now(ROLLOUT, "c-1")
    frozen = threads.submit(store.freeze_now, ROLLOUT, wait_open_s=30.0)
    with pytest.raises(FrozenError, match="don't generate"):
        for number in range(10_000):
            second.begin_call_now(ROLLOUT, f"c-new-{number}")
            second.settle_call_now(ROLLOUT, f"c-new-{number}", "no_generation")
    second.begin_call_now(ROLLOUT, "c-1")
    assert not frozen.done()
    assert state(second) == "open"
    second.put_now(FIRST)
    with frozen.result(20) as snapshot:
        assert outcomes(snapshot)["c-1"] == "recorded"
        assert not snapshot.incomplete


def test_a_waiting_freeze_on_an_event_loop_lets_open_calls_finish(store: FileStore) -> None:
    async def freeze_and_put() -> Snapshot:
        await store.begin_call(ROLLOUT, "c-1")
        waiting = asyncio.ensure_future(store.freeze(ROLLOUT, wait_open_s=30.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await store.put(FIRST)
        return await waiting

    with asyncio.run(freeze_and_put()) as snapshot:
        assert outcomes(snapshot) == {"c-1": "recorded"}


def test_a_waiting_freeze_gives_up_on_calls_that_stay_open(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    with store.freeze_now(ROLLOUT, wait_open_s=0.1) as snapshot:
        assert outcomes(snapshot) == {"c-1": "open"}
        assert snapshot.incomplete


def test_a_freeze_that_does_not_wait_takes_open_calls_as_they_are(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    assert outcomes(freeze(store)) == {"c-1": "open"}


def test_intents_of_a_dead_process_are_not_waited_for(store: FileStore, store_dir: Path) -> None:
    from tests.state_model import Operation

    worker = RemoteObject("worker")
    worker.open(str(store_dir))
    assert worker.start(Operation("begin", ROLLOUT, "c-1")).result(30) is None
    worker.kill()
    begun = time.monotonic()
    with store.freeze_now(ROLLOUT, wait_open_s=60.0) as snapshot:
        assert outcomes(snapshot) == {"c-1": "open"}
    assert time.monotonic() - begun < 30


def test_a_waiter_that_dies_leaves_the_rollout_open(store: FileStore, store_dir: Path) -> None:
    import multiprocessing

    store.begin_call_now(ROLLOUT, "c-1")
    waiter = multiprocessing.get_context("forkserver").Process(target=_freeze_for_ever, args=(str(store_dir),))
    waiter.start()
    with pytest.raises(FrozenError):
        for number in range(100_000):
            store.begin_call_now(ROLLOUT, f"c-new-{number}")
            store.settle_call_now(ROLLOUT, f"c-new-{number}", "no_generation")
    waiter.kill()
    waiter.join()
    waiter.close()
    assert state(store) == "open"
    store.begin_call_now(ROLLOUT, "c-2")


def _freeze_for_ever(directory: str) -> None:
    FileStore(directory, sweep_every_s=0).freeze_now(ROLLOUT, wait_open_s=600.0)


# ---- retire


def test_retire_of_an_absent_rollout_is_false(store: FileStore, store_dir: Path) -> None:
    with nothing_changes(store_dir):
        assert store.retire_now(ROLLOUT, snapshot_id="0" * 32, version=1) is False
    assert state(store) == "absent"


def test_retire_of_an_open_rollout_is_false_even_with_its_own_identity(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    identity = store.stat_now(ROLLOUT).snapshot_id
    with nothing_changes(store_dir):
        for version in (0, 1):
            assert store.retire_now(ROLLOUT, snapshot_id=identity, version=version) is False
    assert state(store) == "open"


def test_retire_of_the_exact_snapshot_removes_the_payload_and_leaves_a_tombstone(
    store: FileStore, store_dir: Path
) -> None:
    store.put_now(entry(prompt=list(range(10_000))))
    snapshot = freeze(store)
    assert store.retire_now(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=1) is True
    stat = store.stat_now(ROLLOUT)
    assert (stat.state, stat.snapshot_id, stat.version) == ("retired", snapshot.snapshot_id, 1)
    assert (stat.files, stat.bytes) == (0, 0)
    assert not [path for path in (store_dir / "rollouts").rglob("*") if path.is_file()]


def test_retire_again_with_the_same_pair_is_true_again(store: FileStore, second: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    snapshot = retire(store)
    with nothing_changes(store_dir):
        for object_ in (store, second):
            assert object_.retire_now(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=1) is True


def test_retire_of_a_stale_version_is_false_and_leaves_the_evidence(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    old = freeze(store)
    store.mark_incomplete_now(ROLLOUT, "c-2")
    with nothing_changes(store_dir):
        assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=1) is False
        assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=3) is False
    assert len(entries(store)) == 1
    assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=2) is True


def test_retire_of_a_foreign_snapshot_is_false_and_leaves_the_evidence(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    store.put_now(entry(rollout="r-2"))
    foreign = freeze(store, "r-2")
    freeze(store)
    with nothing_changes(store_dir):
        assert store.retire_now(ROLLOUT, snapshot_id=foreign.snapshot_id, version=1) is False
    assert state(store) == "frozen"


def test_retire_of_a_retired_rollout_with_another_pair_is_false(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    snapshot = retire(store)
    with nothing_changes(store_dir):
        assert store.retire_now(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=2) is False
        assert store.retire_now(ROLLOUT, snapshot_id="0" * 32, version=1) is False


def test_a_version_of_an_earlier_life_retires_nothing(store: FileStore) -> None:
    store.put_now(FIRST)
    old = freeze(store)
    store.reset_now(ROLLOUT)
    store.put_now(FIRST)
    new = freeze(store)
    assert new.version == old.version == 1
    assert new.snapshot_id != old.snapshot_id
    assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=1) is False
    assert len(entries(store)) == 1


# ---- reset


def test_reset_of_an_absent_rollout_is_a_no_op(store: FileStore, store_dir: Path) -> None:
    with nothing_changes(store_dir):
        store.reset_now(ROLLOUT)


@pytest.mark.parametrize("from_state", ["open", "frozen", "retired"])
def test_reset_brings_a_rollout_back_to_absent(store: FileStore, store_dir: Path, from_state: str) -> None:
    store.put_now(FIRST)
    if from_state == "frozen":
        freeze(store)
    elif from_state == "retired":
        retire(store)
    assert state(store) == from_state
    old = store.stat_now(ROLLOUT).snapshot_id
    store.reset_now(ROLLOUT)
    assert state(store) == "absent"
    assert not list(store_dir.glob("rollouts/*/*"))
    store.put_now(OTHER)
    assert [e.generation_token_ids.tolist() for e in entries(store)] == [[7, 9]]
    assert store.stat_now(ROLLOUT).snapshot_id != old


def test_reset_takes_many_rollouts(store: FileStore) -> None:
    ids = [f"r-{number}" for number in range(20)]
    for rollout in ids:
        store.put_now(entry(rollout=rollout))
    store.reset_now(*ids[:10], "r-unknown")
    asyncio.run(store.reset(*ids[10:19]))
    assert list(store.rollouts()) == [("r-19", "open")]
    store.reset_now()


def test_reset_with_one_invalid_id_resets_nothing(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(InvalidIdError):
        store.reset_now(ROLLOUT, "../r-2")
    assert state(store) == "open"


@pytest.mark.parametrize("then", ["put", "freeze", "retire", "reset", "settle"])
def test_what_follows_a_reset_at_once_finds_the_rollout_absent(gated: FileStore, gate: Gate, then: str) -> None:
    gated.put_now(FIRST)
    gate.shut()

    async def act() -> Any:
        running = asyncio.ensure_future(gated.put(entry("c-2")))
        await asyncio.sleep(0.01)
        reset = asyncio.ensure_future(gated.reset(ROLLOUT))
        await asyncio.sleep(0.01)
        following: dict[str, Callable[[], Any]] = {
            "put": lambda: gated.put(entry("c-3")),
            "freeze": lambda: gated.freeze(ROLLOUT),
            "retire": lambda: gated.retire(ROLLOUT, snapshot_id="0" * 32, version=1),
            "reset": lambda: gated.reset(ROLLOUT),
            "settle": lambda: gated.settle_call(ROLLOUT, "c-3", "aborted"),
        }
        last = asyncio.ensure_future(following[then]())
        await asyncio.sleep(0.01)
        gate.released.set()
        await running
        await reset
        return await last

    result = asyncio.run(act())
    if then == "freeze":
        assert (result.version, len(result.entries)) == (1, 0)
        result.close()
    expected = {"put": "open", "freeze": "frozen", "retire": "absent", "reset": "absent", "settle": "open"}
    assert state(gated) == expected[then]
    if expected[then] == "open":
        assert list(outcomes(gated.read_now(ROLLOUT))) == ["c-3"]


# ---- incarnations


def stale_operations(store: FileStore) -> list[Callable[[], None]]:
    return [
        lambda: store.put_now(FIRST),
        lambda: store.put_many_now([FIRST, entry(choice_index=1)]),
        lambda: store.settle_call_now(ROLLOUT, "c-1", "aborted"),
        lambda: store.settle_call_now(ROLLOUT, "c-1", "no_generation"),
        lambda: store.mark_incomplete_now(ROLLOUT, "c-1"),
        lambda: store.note_delivery_now(ROLLOUT, "c-1", "full"),
    ]


@pytest.mark.parametrize("ended", [False, True], ids=["open", "ended"])
def test_what_a_call_of_an_earlier_life_says_is_refused_while_the_rollout_is_absent(
    store: FileStore, second: FileStore, store_dir: Path, ended: bool
) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    if ended:
        store.put_now(FIRST)
    second.reset_now(ROLLOUT)
    for act in stale_operations(store):
        with pytest.raises(StaleAttemptError):
            act()
    assert state(store) == "absent"
    assert list(store.rollouts()) == []


@pytest.mark.parametrize("new_state", ["open", "frozen", "retired"])
def test_what_a_call_of_an_earlier_life_says_changes_nothing_in_the_next_life(
    store: FileStore, second: FileStore, store_dir: Path, new_state: str
) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    second.reset_now(ROLLOUT)
    second.put_now(entry("c-2"))
    if new_state == "frozen":
        freeze(second)
    elif new_state == "retired":
        retire(second)
    with nothing_changes(store_dir):
        for act in stale_operations(store):
            with pytest.raises(StaleAttemptError):
                act()


def test_a_call_that_begins_again_belongs_to_the_new_life(store: FileStore, second: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    second.reset_now(ROLLOUT)
    store.begin_call_now(ROLLOUT, "c-1")
    store.put_now(FIRST)
    assert outcomes(freeze(store)) == {"c-1": "recorded"}


def test_a_call_that_began_through_another_object_is_not_confused_with_ours(
    store: FileStore, second: FileStore
) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    second.reset_now(ROLLOUT)
    second.begin_call_now(ROLLOUT, "c-1")
    with pytest.raises(StaleAttemptError):
        store.put_now(FIRST)
    second.put_now(OTHER)
    assert outcomes(freeze(store)) == {"c-1": "recorded"}


def test_a_put_without_begin_call_belongs_to_the_current_life(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    second.reset_now(ROLLOUT)
    store.put_now(OTHER)
    assert outcomes(freeze(store)) == {"c-1": "recorded"}


def test_a_swept_tombstone_ends_a_life(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1")
    retire(store)
    assert store.sweep_now(0) == 1
    with pytest.raises(StaleAttemptError):
        store.put_now(FIRST)
    store.begin_call_now(ROLLOUT, "c-2")
    assert outcomes(freeze(store)) == {"c-2": "open"}


def test_require_intent_refuses_a_put_that_nobody_announced(store: FileStore, store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0, require_intent=True) as strict:
        with pytest.raises(StaleAttemptError, match="begin_call"):
            strict.put_now(FIRST)
        assert state(store) == "absent"
        store.put_now(entry("c-2"))
        with nothing_changes(store_dir), pytest.raises(StaleAttemptError):
            strict.put_now(FIRST)


def test_require_intent_takes_an_intent_of_another_object_but_not_of_another_life(
    store: FileStore, store_dir: Path
) -> None:
    with FileStore(store_dir, sweep_every_s=0, require_intent=True) as strict:
        store.begin_call_now(ROLLOUT, "c-1")
        strict.put_now(FIRST)
        store.begin_call_now(ROLLOUT, "c-2")
        store.reset_now(ROLLOUT)
        store.begin_call_now(ROLLOUT, "c-3")
        with pytest.raises(StaleAttemptError):
            strict.put_now(entry("c-2"))
        strict.begin_call_now(ROLLOUT, "c-4")
        strict.put_many_now([entry("c-4"), entry("c-4", choice_index=1)])
        assert outcomes(freeze(store)) == {"c-3": "open", "c-4": "recorded"}


# ---- versions


def test_the_version_moves_at_the_moment_a_late_mark_returns(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    old = freeze(store)
    late: tuple[Callable[[], None], ...] = (
        lambda: second.mark_incomplete_now(ROLLOUT, "c-2"),
        lambda: second.settle_call_now(ROLLOUT, "c-3", "aborted"),
        lambda: second.mark_incomplete_now(ROLLOUT),
        lambda: second.put_now(OTHER),
    )
    for number, act in enumerate(late, start=2):
        with contextlib.suppress(FrozenError):
            act()
        # Nobody froze again in between.
        assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=number - 1) is False
        assert store.stat_now(ROLLOUT).version == number
    assert store.retire_now(ROLLOUT, snapshot_id=old.snapshot_id, version=5) is True


def test_a_new_version_removes_the_directory_of_the_older_one(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    freeze(store)
    assert versions(store_dir) == ["v1"]
    for number in range(2, 12):
        store.mark_incomplete_now(ROLLOUT, f"c-{number}")
        assert versions(store_dir) == [f"v{number}"]
    assert freeze(store).version == 11


@pytest.mark.parametrize("size", [40, 100_000], ids=["small", "large"])
def test_an_open_reader_keeps_its_version_until_it_is_closed(store: FileStore, store_dir: Path, size: int) -> None:
    put = entry(prompt=[number * 20_000 for number in range(size)])
    store.put_now(put)
    old = store.freeze_now(ROLLOUT)
    store.mark_incomplete_now(ROLLOUT, "c-2")
    new = store.freeze_now(ROLLOUT)
    assert store.retire_now(ROLLOUT, snapshot_id=new.snapshot_id, version=new.version)
    store.reset_now(ROLLOUT)
    store.put_now(OTHER)
    assert exactly_equal(old.entries[0], put)
    kept = new.entries[0]
    assert (outcomes(old), outcomes(new)) == ({"c-1": "recorded"}, {"c-1": "recorded", "c-2": "lost"})
    for snapshot in (old, new):
        snapshot.close()
        snapshot.close()
        with pytest.raises(ClosedError, match=ROLLOUT):
            snapshot.entries[0]
    assert exactly_equal(kept, put)


def test_a_late_mark_after_a_segment_that_holds_nothing_is_no_damage(
    store: FileStore, store_dir: Path, second: FileStore
) -> None:
    store.put_now(entry(rollout="r-2"))  # only to have the directories
    store.reset_now("r-2")
    # What a writer leaves that died in its very first write.
    incarnation = Path(store.freeze_now(ROLLOUT)._index.snapshot_id)
    (rollout,) = store_dir.glob("rollouts/*/r-1")
    shutil.rmtree(rollout / incarnation / "v1")
    (rollout / incarnation / "000001.open").write_bytes(bytes(100))
    second.put_now(FIRST)
    assert freeze(second).version == 1
    second.settle_call_now(ROLLOUT, "c-2", "aborted")
    with second.freeze_now(ROLLOUT) as snapshot:
        assert outcomes(snapshot) == {"c-1": "recorded", "c-2": "aborted"}
        assert not snapshot.incomplete
        assert not snapshot.damage
        assert exactly_equal(snapshot.entries[0], FIRST)


# ---- the fence


def test_a_put_that_is_being_synced_is_in_the_snapshot_of_a_freeze_that_came_meanwhile(
    store: FileStore, gated: FileStore, gate: Gate, threads: ThreadPoolExecutor
) -> None:
    gated.put_now(FIRST)
    gate.shut()
    put = threads.submit(gated.put_now, entry("c-2"))
    assert gate.arrived.wait(20)
    frozen = threads.submit(store.freeze_now, ROLLOUT)
    time.sleep(0.05)
    assert not frozen.done()
    assert not put.done()
    gate.released.set()
    put.result(20)
    with frozen.result(20) as snapshot:
        assert outcomes(snapshot) == {"c-1": "recorded", "c-2": "recorded"}


def test_a_waiting_freeze_is_not_overtaken_by_new_puts(
    store: FileStore, second: FileStore, store_dir: Path, gated: FileStore, gate: Gate, threads: ThreadPoolExecutor
) -> None:
    gated.put_now(FIRST)
    gate.shut()
    running = threads.submit(gated.put_now, entry("c-2"))
    assert gate.arrived.wait(20)
    frozen = threads.submit(store.freeze_now, ROLLOUT)
    (rollout,) = store_dir.glob("rollouts/*/r-1")
    descriptor = os.open(rollout, os.O_RDONLY)
    while not fence.is_anybody_before(descriptor, fence.FREEZE_PLACE + 1):
        time.sleep(0.001)
    os.close(descriptor)
    late = [threads.submit(object_.put_now, entry(f"c-{n}")) for n, object_ in enumerate((gated, second), start=3)]
    time.sleep(0.05)
    gate.released.set()
    running.result(20)
    with frozen.result(20) as snapshot:
        assert list(outcomes(snapshot)) == ["c-1", "c-2"]
    for put in late:
        with pytest.raises(FrozenError):
            put.result(20)


def test_a_rollout_that_is_held_too_long_gives_busy_and_others_are_served_meanwhile(
    gated: FileStore, gate: Gate, store_dir: Path, threads: ThreadPoolExecutor
) -> None:
    gated.put_now(FIRST)
    gate.shut()
    running = threads.submit(gated.put_now, entry("c-2"))
    assert gate.arrived.wait(20)

    async def act(impatient: FileStore) -> list[Any]:
        waiting = [
            impatient.freeze(ROLLOUT),
            impatient.put(entry("c-3")),
            impatient.begin_call(ROLLOUT, "c-4"),
            impatient.mark_incomplete(ROLLOUT),
            impatient.reset(ROLLOUT),
        ]
        tasks = [asyncio.ensure_future(one) for one in waiting]
        await asyncio.gather(*(impatient.put(entry(rollout=f"r-other-{n}")) for n in range(30)))
        with await impatient.freeze("r-other-0") as snapshot:
            assert len(snapshot.entries) == 1
        assert not any(task.done() for task in tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with FileStore(store_dir, sweep_every_s=0, lock_timeout_s=1.0) as impatient:
        results = asyncio.run(act(impatient))
        with pytest.raises(BusyError) as caught:
            impatient.put_now(entry("c-3"))
    assert [type(result) for result in results] == [BusyError] * 5
    assert all(text in str(caught.value) for text in (ROLLOUT, "1 s", str(store_dir), "lock_timeout_s"))
    gate.released.set()
    running.result(20)
    assert outcomes(freeze(gated)) == {"c-1": "recorded", "c-2": "recorded"}


# ---- tombstones, sweep, expire, usage


def test_sweep_goes_by_the_age_that_the_tombstone_states(
    store: FileStore, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rollout in ("r-old", "r-new"):
        store.put_now(entry(rollout=rollout))
    with monkeypatch.context() as clock:
        now = time.time()
        clock.setattr(time, "time", lambda: now - 2 * DAY)
        retire(store, "r-old")
    retire(store, "r-new")
    # What the file system says of their age is the opposite.
    (old,), (new,) = store_dir.glob("rollouts/*/r-old/*"), store_dir.glob("rollouts/*/r-new/*")
    os.utime(old)
    os.utime(new, (now - 9 * DAY, now - 9 * DAY))
    retired_at = store.stat_now("r-old").retired_at
    assert retired_at is not None
    assert abs(retired_at - (now - 2 * DAY)) < 60
    assert store.sweep_now(3 * DAY) == 0
    assert store.sweep_now(DAY) == 1
    assert list(store.rollouts()) == [("r-new", "retired")]


def test_sweep_of_zero_seconds_removes_every_tombstone_and_nothing_else(store: FileStore, store_dir: Path) -> None:
    for number in range(6):
        store.put_now(entry(rollout=f"r-{number}"))
    for number in (2, 3):
        freeze(store, f"r-{number}")
    for number in (4, 5):
        retire(store, f"r-{number}")
    assert asyncio.run(store.sweep(0)) == 2
    assert sorted(store.rollouts()) == [("r-0", "open"), ("r-1", "open"), ("r-2", "frozen"), ("r-3", "frozen")]
    assert store.sweep_now(0) == 0
    assert not list(store_dir.glob("rollouts/*/r-4"))


def test_a_dry_run_counts_and_removes_nothing(store: FileStore, store_dir: Path) -> None:
    for number in range(3):
        store.put_now(entry(rollout=f"r-{number}"))
        retire(store, f"r-{number}")
    with nothing_changes(store_dir):
        assert store.sweep_now(0, dry_run=True) == 3
        assert store.sweep_now(DAY, dry_run=True) == 0


def test_one_broken_rollout_never_stops_the_sweep_of_the_others(
    store: FileStore, store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(9):
        store.put_now(entry(rollout=f"r-{number}"))
        if number != 4:
            retire(store, f"r-{number}")
    (broken,) = store_dir.glob("rollouts/*/r-4")
    (broken / ("f" * 32)).mkdir()
    assert store.sweep_now(0) == 8
    assert "r-4" in caplog.text
    assert store.usage_now()["retired"].rollouts == 0
    store.put_now(entry(rollout="r-9"))
    listed: list[tuple[str, str]] = []
    with pytest.raises(CorruptError, match="two incarnations"):
        listed += store.rollouts()
    store.reset_now("r-4")
    assert list(store.rollouts()) == [("r-9", "open")]


def test_the_store_sweeps_old_tombstones_by_itself(
    store: FileStore, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rollout in ("r-old", "r-new"):
        store.put_now(entry(rollout=rollout))
    with monkeypatch.context() as clock:
        now = time.time()
        clock.setattr(time, "time", lambda: now - 25 * 3600)
        retire(store, "r-old")
    retire(store, "r-new")
    with FileStore(store_dir):
        deadline = time.monotonic() + 20
        while state(store, "r-old") != "absent":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert list(store.rollouts()) == [("r-new", "retired")]


def test_expire_removes_old_open_and_frozen_rollouts_only_when_asked(store: FileStore, store_dir: Path) -> None:
    for rollout in ("r-open", "r-frozen", "r-retired", "r-fresh"):
        store.put_now(entry(rollout=rollout))
    freeze(store, "r-frozen")
    retire(store, "r-retired")
    assert store.expire_now(3600) == 0
    old = time.time() - 7200
    for rollout in ("r-open", "r-frozen", "r-retired"):
        (directory,) = store_dir.glob(f"rollouts/*/{rollout}")
        for path in (directory, *directory.rglob("*")):
            os.utime(path, (old, old))
    assert store.sweep_now(0, dry_run=True) == 1
    assert asyncio.run(store.expire(3600)) == 2
    assert sorted(store.rollouts()) == [("r-fresh", "open"), ("r-retired", "retired")]


def test_a_rollout_that_is_still_written_does_not_expire(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    old = time.time() - 7200
    for path in store_dir.glob("rollouts/*/*/*"):
        os.utime(path, (old, old))
    store.put_now(entry("c-2"))
    assert store.expire_now(3600) == 0


def test_usage_counts_rollouts_files_and_bytes_per_state(store: FileStore, store_dir: Path) -> None:
    assert all(usage.rollouts == 0 for usage in store.usage_now().values())
    for number in range(6):
        store.put_now(entry(rollout=f"r-{number}", prompt=list(range(1000 * (number + 1)))))
    for number in (3, 4):
        freeze(store, f"r-{number}")
    retire(store, "r-5")
    store.mark_incomplete_now("r-5", "c-2")
    usage = asyncio.run(store.usage())
    assert {name: value.rollouts for name, value in usage.items()} == {
        "open": 3,
        "frozen": 2,
        "retired": 1,
        "absent": 0,
    }
    files = {(s.st_ino, s.st_size) for p in (store_dir / "rollouts").rglob("*") if p.is_file() for s in [p.stat()]}
    assert sum(value.files for value in usage.values()) == len(files)
    assert sum(value.bytes for value in usage.values()) == sum(size for _, size in files)
    assert usage["retired"].files == 1  # the note
    assert usage["open"].bytes > 0
    stats = [store.stat_now(f"r-{number}") for number in range(3)]
    assert sum(stat.bytes for stat in stats) == usage["open"].bytes


# ---- finish and deliveries


def test_what_finish_says_reaches_the_consumer(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    assert not freeze_look(store).finished
    meta = {"reward": 0.5, "group": "g-1", "nested": {"list": [1, None, "\ud800"]}}
    store.finish_now(ROLLOUT, meta)
    meta["reward"] = 9.0
    stat = second.stat_now(ROLLOUT)
    assert stat.finished
    snapshot = freeze(second)
    assert snapshot.finished
    assert snapshot.meta == stat.meta == {"reward": 0.5, "group": "g-1", "nested": {"list": [1, None, "\ud800"]}}
    assert outcomes(snapshot) == {"c-1": "recorded"}


def freeze_look(store: FileStore) -> Snapshot:
    with store.read_now(ROLLOUT) as look:
        return look


def test_finish_survives_new_versions(store: FileStore) -> None:
    store.put_now(FIRST)
    asyncio.run(store.finish(ROLLOUT, meta={"reward": 1.0}))
    freeze(store)
    store.mark_incomplete_now(ROLLOUT, "c-2")
    assert freeze(store).meta == {"reward": 1.0}


def test_a_later_finish_replaces_an_earlier_one_and_a_repetition_writes_nothing(
    store: FileStore, store_dir: Path
) -> None:
    for reward in (0.0, 1.0, 0.0):
        store.finish_now(ROLLOUT, {"reward": reward})
    with nothing_changes(store_dir):
        store.finish_now(ROLLOUT, {"reward": 0.0})
    assert freeze(store).meta == {"reward": 0.0}


def test_finish_without_meta_only_says_that_the_rollout_is_finished(store: FileStore) -> None:
    store.finish_now(ROLLOUT)
    assert state(store) == "open"
    snapshot = freeze(store)
    assert (snapshot.finished, snapshot.meta, snapshot.incomplete) == (True, {}, False)


def test_finish_of_a_frozen_or_retired_rollout_is_refused(store: FileStore, store_dir: Path) -> None:
    store.finish_now(ROLLOUT, {"reward": 1.0})
    freeze(store)
    with nothing_changes(store_dir):
        store.finish_now(ROLLOUT, {"reward": 1.0})
        with pytest.raises(FrozenError):
            store.finish_now(ROLLOUT, {"reward": 2.0})
    retire(store)
    with nothing_changes(store_dir), pytest.raises(RetiredError):
        store.finish_now(ROLLOUT, {"reward": 1.0})


def test_finish_takes_only_a_dict(store: FileStore) -> None:
    with pytest.raises(InvalidEntryError, match=ROLLOUT):
        store.finish_now(ROLLOUT, [1])  # type: ignore[arg-type]


def test_note_delivery_is_in_the_call_record(store: FileStore, second: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    assert call_record(store).delivered == "unknown"
    for delivered in ("partly", "full", "no", "full"):
        store.note_delivery_now(ROLLOUT, "c-1", delivered)
        assert call_record(second).delivered == delivered
    with nothing_changes(store_dir):
        second.note_delivery_now(ROLLOUT, "c-1", "full")
    assert freeze(store).calls[0].delivered == "full"


def test_note_delivery_after_freeze_makes_no_new_version_and_the_next_one_takes_it_in(store: FileStore) -> None:
    store.put_now(FIRST)
    store.note_delivery_now(ROLLOUT, "c-1", "partly")
    old = freeze(store)
    for delivered in ("full", "partly", "full"):
        store.note_delivery_now(ROLLOUT, "c-1", delivered)
    assert freeze(store).version == old.version
    assert all("c-1" in note for note in store.stat_now(ROLLOUT).late)
    store.mark_incomplete_now(ROLLOUT, "c-2")
    new = freeze(store)
    assert (new.version, new.calls[0].delivered) == (2, "full")
    store.note_delivery_now(ROLLOUT, "c-1", "no")
    store.mark_incomplete_now(ROLLOUT, "c-3")
    assert freeze(store).calls[0].delivered == "no"


def test_note_delivery_after_retirement_is_shown_by_stat(store: FileStore) -> None:
    store.put_now(FIRST)
    retire(store)
    store.note_delivery_now(ROLLOUT, "c-1", "full")
    (late,) = store.stat_now(ROLLOUT).late
    assert "c-1" in late
    assert "full" in late


def test_note_delivery_of_a_call_that_nobody_knows_says_nothing(store: FileStore, store_dir: Path) -> None:
    with nothing_changes(store_dir):
        store.note_delivery_now(ROLLOUT, "c-1", "full")
    store.put_now(FIRST)
    with nothing_changes(store_dir):
        store.note_delivery_now(ROLLOUT, "c-9", "full")
    with pytest.raises(InvalidOutcomeError):
        store.note_delivery_now(ROLLOUT, "c-1", "half")  # type: ignore[arg-type]


# ---- looking


def test_read_of_an_absent_rollout_is_empty(store: FileStore, store_dir: Path) -> None:
    with nothing_changes(store_dir), store.read_now(ROLLOUT) as look:
        assert (look.version, len(look.entries), look.calls, look.incomplete) == (0, 0, (), False)


def test_read_of_an_open_rollout_has_version_zero_and_freezes_nothing(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    with nothing_changes(store_dir), store.read_now(ROLLOUT) as look:
        assert (look.rollout_id, look.version) == (ROLLOUT, 0)
        assert exactly_equal(look.entries[0], FIRST)
    store.put_now(entry("c-2"))
    assert freeze(store).snapshot_id == look.snapshot_id


def test_read_of_a_frozen_rollout_is_its_published_snapshot(store: FileStore) -> None:
    store.put_now(FIRST)
    frozen = freeze(store)
    with asyncio.run(store.read(ROLLOUT)) as look:
        assert (look.snapshot_id, look.version) == (frozen.snapshot_id, 1)


def test_read_of_a_retired_rollout_is_refused(store: FileStore) -> None:
    store.put_now(FIRST)
    retire(store)
    with pytest.raises(RetiredError):
        store.read_now(ROLLOUT)


def test_read_tolerates_a_torn_tail(store: FileStore, store_dir: Path) -> None:
    store.put_now(FIRST)
    (segment,) = store_dir.glob("rollouts/*/*/*/*.open")
    with segment.open("ab") as file:
        file.write(b"TKCF half a frame")
    with store.read_now(ROLLOUT) as look:
        assert exactly_equal(look.entries[0], FIRST)
        assert not look.incomplete
        assert len(look.torn) == 1
        assert look.torn[0].path == str(segment)
    assert len(store.stat_now(ROLLOUT).torn) == 1


def test_a_look_while_segments_are_renamed_and_versions_replaced_sees_no_damage(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0, segment_bytes=1) as writer, FileStore(store_dir) as reader:
        problems: list[object] = []
        ended = threading.Event()

        def look_again_and_again() -> None:
            most = 0
            while not ended.is_set():
                with reader.read_now(ROLLOUT) as look:
                    count = len(look.entries)
                if count < most or look.damage:
                    problems.append((count, most, look.damage))
                most = max(most, count)

        looking = threading.Thread(target=look_again_and_again)
        looking.start()
        for number in range(60):
            writer.put_now(entry(f"c-{number}", (number,)))
        freeze(writer)
        for number in range(20):
            writer.mark_incomplete_now(ROLLOUT, f"c-late-{number}")
        ended.set()
        looking.join()
        assert problems == []


def test_a_look_at_a_version_that_is_being_removed_shows_the_next_one(store_dir: Path) -> None:
    class Removing(Files):
        """Stops in the middle of removing a version: its manifest and its last segment are gone."""

        def unlink(self, path: str) -> None:
            if not (path.endswith(".seg") and "/v1/" in path) or "/000003-" in path:
                super().unlink(path)

    class Interrupted(Files):
        """When a reader is about to open a manifest, somebody publishes the next version."""

        def open(self, path: str, *, write: bool = False) -> int:
            if path.endswith("v1/manifest"):
                writer.mark_incomplete_now(ROLLOUT, "c-late")
            return super().open(path, write=write)

    with (
        FileStore(store_dir, sweep_every_s=0, segment_bytes=1, files=Removing()) as writer,
        FileStore(store_dir, sweep_every_s=0, files=Interrupted()) as reader,
    ):
        for number in range(3):
            writer.put_now(entry(f"c-{number}"))
        freeze(writer)
        with reader.read_now(ROLLOUT) as look:
            assert (look.version, len(look.entries), look.damage) == (2, 3, ())


def test_stat_of_each_state(store: FileStore) -> None:
    stat = store.stat_now(ROLLOUT)
    assert (stat.state, stat.snapshot_id, stat.version, stat.entries, stat.bytes) == ("absent", "", 0, 0, 0)
    store.put_now(FIRST)
    store.begin_call_now(ROLLOUT, "c-2")
    stat = store.stat_now(ROLLOUT)
    assert (stat.state, stat.version, stat.entries, stat.incomplete) == ("open", 0, 1, True)
    assert {call.model_call_id: call.outcome for call in stat.calls} == {"c-1": "recorded", "c-2": "open"}
    assert stat.files == 1
    assert stat.bytes > 0
    snapshot = freeze(store)
    stat = asyncio.run(store.stat(ROLLOUT))
    assert (stat.state, stat.version, stat.snapshot_id) == ("frozen", 1, snapshot.snapshot_id)
    retire(store)
    stat = store.stat_now(ROLLOUT)
    assert (stat.state, stat.version, stat.snapshot_id) == ("retired", 1, snapshot.snapshot_id)
    assert stat.retired_at is not None
    assert abs(stat.retired_at - time.time()) < 60


def test_rollouts_yields_every_rollout_that_is_not_absent(store: FileStore) -> None:
    assert list(store.rollouts()) == []
    for number in range(4):
        store.put_now(entry(rollout=f"r-{number}"))
    freeze(store, "r-1")
    retire(store, "r-2")
    store.reset_now("r-3")
    expected = [("r-0", "open"), ("r-1", "frozen"), ("r-2", "retired")]
    assert sorted(store.rollouts()) == expected
    assert sorted(store.rollouts_now()) == expected

    async def collect() -> list[tuple[str, str]]:
        return [pair async for pair in store.rollouts()]

    assert sorted(asyncio.run(collect())) == expected


# ---- read-only stores


@pytest.fixture
def copied(store: FileStore, store_dir: Path, tmp_path: Path) -> Path:
    """A copy of a store with a rollout in each state."""
    for rollout in ("r-open", "r-frozen", "r-retired"):
        store.put_now(entry(rollout=rollout))
    freeze(store, "r-frozen")
    retire(store, "r-retired")
    copy = tmp_path / "copy"
    shutil.copytree(store_dir, copy)
    return copy


def test_a_read_only_store_looks_at_everything_and_writes_nothing(copied: Path) -> None:
    copied.chmod(0o755)
    with nothing_changes(copied), FileStore(copied, read_only=True) as reader:
        assert sorted(reader.rollouts()) == [("r-frozen", "frozen"), ("r-open", "open"), ("r-retired", "retired")]
        for rollout in ("r-open", "r-frozen"):
            with reader.read_now(rollout) as look:
                assert exactly_equal(look.entries[0], entry(rollout=rollout))
        with reader.freeze_now("r-frozen") as one, asyncio.run(reader.freeze("r-frozen", wait_open_s=1.0)) as two:
            assert one.version == two.version == 1
        (many,) = reader.freeze_many_now(["r-frozen"])
        (others,) = asyncio.run(reader.freeze_many(["r-frozen"]))
        assert many.snapshot_id == others.snapshot_id == one.snapshot_id
        many.close()
        others.close()
        assert reader.stat_now("r-retired").state == "retired"
        assert reader.usage_now()["open"].rollouts == 1
        with pytest.raises(RetiredError):
            reader.read_now("r-retired")
        with pytest.raises(RetiredError):
            reader.freeze_now("r-retired")


def test_a_read_only_store_refuses_to_write(copied: Path) -> None:
    with nothing_changes(copied), FileStore(copied, read_only=True) as reader:
        writes: list[Callable[[], Any]] = [
            lambda: reader.put_now(entry(rollout="r-open")),
            lambda: reader.put_many_now([entry(rollout="r-open")]),
            lambda: reader.begin_call_now("r-open", "c-2"),
            lambda: reader.settle_call_now("r-open", "c-2", "lost"),
            lambda: reader.mark_incomplete_now("r-open"),
            lambda: reader.note_delivery_now("r-open", "c-1", "full"),
            lambda: reader.finish_now("r-open", {}),
            lambda: reader.freeze_now("r-open"),
            lambda: reader.freeze_now("r-absent"),
            lambda: reader.freeze_many_now(["r-frozen", "r-open"]),
            lambda: reader.retire_now("r-frozen", snapshot_id="0" * 32, version=1),
            lambda: reader.reset_now("r-open"),
            lambda: reader.sweep_now(0),
            lambda: reader.expire_now(0),
            lambda: asyncio.run(reader.put(entry(rollout="r-open"))),
            lambda: asyncio.run(reader.freeze("r-open")),
            lambda: asyncio.run(reader.reset("r-open")),
        ]
        for write in writes:
            with pytest.raises(PermissionError) as caught:
                write()
            assert isinstance(caught.value, ReadOnlyError)


# ---- the store object


def every_method(store: FileStore) -> dict[str, Callable[[], Any]]:
    return {
        "put": lambda: store.put_now(FIRST),
        "put_many": lambda: store.put_many_now([FIRST]),
        "begin_call": lambda: store.begin_call_now(ROLLOUT, "c-1"),
        "settle_call": lambda: store.settle_call_now(ROLLOUT, "c-1", "lost"),
        "mark_incomplete": lambda: store.mark_incomplete_now(ROLLOUT),
        "note_delivery": lambda: store.note_delivery_now(ROLLOUT, "c-1", "full"),
        "finish": lambda: store.finish_now(ROLLOUT),
        "freeze": lambda: store.freeze_now(ROLLOUT),
        "waiting freeze": lambda: store.freeze_now(ROLLOUT, wait_open_s=1.0),
        "freeze_many": lambda: store.freeze_many_now([ROLLOUT]),
        "retire": lambda: store.retire_now(ROLLOUT, snapshot_id="0" * 32, version=1),
        "reset": lambda: store.reset_now(ROLLOUT),
        "read": lambda: store.read_now(ROLLOUT),
        "stat": lambda: store.stat_now(ROLLOUT),
        "rollouts": lambda: list(store.rollouts()),
        "usage": lambda: store.usage_now(),
        "sweep": lambda: store.sweep_now(0),
        "expire": lambda: store.expire_now(0),
        "async put": lambda: asyncio.run(store.put(FIRST)),
        "async freeze": lambda: asyncio.run(store.freeze(ROLLOUT)),
        "async read": lambda: asyncio.run(store.read(ROLLOUT)),
    }


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
def test_a_closed_store_refuses_everything(copied: Path, read_only: bool) -> None:
    store = FileStore(copied, sweep_every_s=0, read_only=read_only)
    store.close_now()
    with nothing_changes(copied):
        for name, act in every_method(store).items():
            with pytest.raises(ClosedError, match="closed"):
                pytest.fail(f"{name} gave {act()!r}")


def test_close_may_be_repeated_and_mixed(store_dir: Path) -> None:
    store = FileStore(store_dir, sweep_every_s=0)
    store.put_now(FIRST)
    store.close_now()
    store.close_now()
    asyncio.run(store.close())
    with FileStore(store_dir, read_only=True) as reader:
        asyncio.run(reader.close())


def test_a_store_is_a_context_manager_of_both_kinds(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(FIRST)

    async def use() -> FileStore:
        async with FileStore(store_dir, sweep_every_s=0) as inner:
            with await inner.freeze(ROLLOUT) as snapshot:
                assert len(snapshot.entries) == 1
        return inner

    for closed in (store, asyncio.run(use())):
        with pytest.raises(ClosedError):
            closed.put_now(FIRST)


def test_close_lets_operations_under_way_finish(gated: FileStore, gate: Gate, threads: ThreadPoolExecutor) -> None:
    gated.put_now(FIRST)
    gate.shut()
    put = threads.submit(gated.put_now, entry("c-2"))
    assert gate.arrived.wait(20)
    closing = threads.submit(gated.close_now)
    time.sleep(0.02)
    assert not closing.done()
    gate.released.set()
    put.result(20)
    closing.result(20)


def test_close_seals_what_the_store_wrote(store_dir: Path) -> None:
    with FileStore(store_dir, sweep_every_s=0) as store:
        store.put_now(FIRST)
        store.put_now(entry(rollout="r-2"))
        assert len(list(store_dir.glob("rollouts/*/*/*/*.open"))) == 2
    assert len(list(store_dir.glob("rollouts/*/*/*/*.seg"))) == 2
    assert not list(store_dir.glob("rollouts/*/*/*/*.open"))


def test_many_event_loops_leave_nothing_behind_in_a_store(store: FileStore) -> None:
    import gc

    for number in range(20):
        asyncio.run(store.put(entry(f"c-{number}")))
    gc.collect()
    assert len(store._mailboxes) <= 1


# ---- errors


def test_errors_name_the_rollout_and_the_call_and_say_what_to_do(store: FileStore, second: FileStore) -> None:
    store.put_now(FIRST)
    store.begin_call_now("r-2", "c-1")
    second.reset_now("r-2")
    store.freeze_now("r-3").close()
    retire(store, "r-3")
    store.put_now(entry(rollout="r-4"))
    freeze(store, "r-4")
    expected: list[tuple[Callable[[], Any], type[TokcapError], tuple[str, ...]]] = [
        (lambda: store.put_now(OTHER), ConflictError, ("rollout r-1", "call c-1", "choice 0", "evidence")),
        (lambda: store.put_now(entry(rollout="r-2")), StaleAttemptError, ("rollout r-2", "call c-1", "drop")),
        (lambda: store.put_now(entry(rollout="r-3")), RetiredError, ("rollout r-3", "nothing was stored")),
        (lambda: store.freeze_now("r-3"), RetiredError, ("rollout r-3", "retired")),
        (lambda: store.put_now(entry("c-2", rollout="r-4")), FrozenError, ("rollout r-4", "c-2", "nothing was stored")),
        (lambda: store.begin_call_now("r-4", "c-2"), FrozenError, ("rollout r-4", "c-2")),
        (lambda: store.put_now(entry(rollout="r-4", generated=(1,))), FrozenError, ("rollout r-4", "c-1", "conflict")),
        (lambda: store.settle_call_now("r-5", "c-1", "x"), InvalidOutcomeError, ("rollout r-5", "c-1", "'x'")),  # type: ignore[arg-type]
        (lambda: store.freeze_now("r/5"), InvalidIdError, ("r/5", "must match")),
        (lambda: store.mark_incomplete_now("r-5", "c 1"), InvalidIdError, ("c 1", "r-5", "must match")),
    ]
    for act, kind, texts in expected:
        with pytest.raises(kind) as caught:
            act()
        assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_errors_are_caught_as_the_builtins_that_users_expect(store: FileStore) -> None:
    store.put_now(FIRST)
    with pytest.raises(ValueError, match="conflict"):
        store.put_now(OTHER)
    with pytest.raises(ValueError, match="must match"):
        store.read_now("")
    freeze(store)
    with pytest.raises(RuntimeError, match="frozen"):
        store.put_now(entry("c-2"))
    retire(store)
    with pytest.raises(RuntimeError, match="retired"):
        store.put_now(entry("c-2"))


def test_a_failed_file_system_call_names_the_rollout_the_file_and_what_to_do(store_dir: Path) -> None:
    class Full(Files):
        full = False

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().pwritev(fd, buffers, offset)

    with FileStore(store_dir, sweep_every_s=0, files=Full()) as store:
        store.put_now(FIRST)
        (segment,) = store_dir.glob("rollouts/*/*/*/*.open")
        Full.full = True
        with pytest.raises(OSError, match="free space") as caught:
            store.put_now(entry("c-2"))
        Full.full = False
    assert isinstance(caught.value, DurabilityError)
    assert (caught.value.errno, caught.value.filename) == (28, str(segment))
    assert ROLLOUT in str(caught.value)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "a\n", "-a", "x" * 201, None, 5])
def test_every_method_refuses_an_invalid_id(store: FileStore, bad: Any) -> None:
    acts: list[Callable[[], Any]] = [
        lambda: store.begin_call_now(bad, "c-1"),
        lambda: store.begin_call_now(ROLLOUT, bad),
        lambda: store.settle_call_now(bad, "c-1", "lost"),
        lambda: store.settle_call_now(ROLLOUT, bad, "lost"),
        lambda: store.mark_incomplete_now(bad),
        lambda: store.note_delivery_now(bad, "c-1", "full"),
        lambda: store.finish_now(bad),
        lambda: store.freeze_now(bad),
        lambda: store.freeze_now(bad, wait_open_s=1.0),
        lambda: store.freeze_many_now([ROLLOUT, bad]),
        lambda: store.retire_now(bad, snapshot_id="0" * 32, version=1),
        lambda: store.reset_now(bad),
        lambda: store.read_now(bad),
        lambda: store.stat_now(bad),
    ]
    if bad != "":
        acts.append(lambda: store.mark_incomplete_now(ROLLOUT, bad))
    for act in acts:
        with pytest.raises(InvalidIdError):
            act()
    assert list(store.rollouts()) == []


def test_every_async_method_has_a_blocking_twin() -> None:
    import inspect

    names = [name for name, value in vars(FileStore).items() if not name.startswith("_")]
    for name in names:
        method = getattr(FileStore, name)
        if inspect.iscoroutinefunction(method):
            twin = getattr(FileStore, f"{name}_now")
            assert inspect.signature(twin).parameters.keys() == inspect.signature(method).parameters.keys()


def test_call_records_are_plain_values(store: FileStore) -> None:
    store.begin_call_now(ROLLOUT, "c-1", request_digests=[b"x" * 16])
    (record,) = freeze(store).calls
    assert isinstance(record, CallRecord)
    assert msgspec.structs.asdict(record)["model_call_id"] == "c-1"


# ---- a freeze of one incarnation


def test_a_freeze_that_names_an_incarnation_never_freezes_another_one(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("r", "first")
        meant = store.stat_now("r").snapshot_id
        store.reset_now("r")
        with pytest.raises(StaleAttemptError, match="was reset"):
            store.freeze_now("r", snapshot_id=meant)
        assert store.stat_now("r").state == "absent"
        store.begin_call_now("r", "second")
        with pytest.raises(StaleAttemptError, match="nothing was frozen"):
            asyncio.run(store.freeze("r", snapshot_id=meant))
        assert store.stat_now("r").state == "open"
        with store.freeze_now("r", snapshot_id=store.stat_now("r").snapshot_id) as snapshot:
            assert [call.model_call_id for call in snapshot.calls] == ["second"]


@pytest.mark.parametrize("blocking", [True, False])
def test_hazard_16_a_freeze_that_waits_for_open_calls_never_freezes_the_attempt_after_a_reset(
    store_dir: Path, blocking: bool
) -> None:
    with FileStore(store_dir) as store, FileStore(store_dir) as owner:
        owner.begin_call_now("r", "first")
        errors: list[BaseException] = []

        def freeze() -> None:
            try:
                if blocking:
                    store.freeze_now("r", wait_open_s=30)
                else:
                    asyncio.run(store.freeze("r", wait_open_s=30))
            except StaleAttemptError as error:
                errors.append(error)

        waiting = threading.Thread(target=freeze)
        waiting.start()
        while True:  # until the door is closed: then it waits
            try:
                owner.begin_call_now("r", f"call-{time.monotonic_ns()}")
            except FrozenError:
                break
        owner.reset_now("r")
        owner.begin_call_now("r", "second")
        waiting.join(20)
        assert len(errors) == 1
        assert owner.stat_now("r").state == "open"
        assert [call.model_call_id for call in owner.stat_now("r").calls] == ["second"]
