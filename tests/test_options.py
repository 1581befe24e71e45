"""What a store is told when it is made, and what it costs to be wrong about it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tokcap import FileStore, TokenEntry
from tokcap.errors import InvalidOptionError, StoreNotFoundError, TokcapError
from tokcap.store.rollout import Rollout
from tokcap.store.root import sync_threads_for


def entry(call: str, rollout: str = "rollout") -> TokenEntry:
    return TokenEntry(rollout, call, [1, 2, 3], [4, 5], [-0.5, -0.25])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment_bytes", "64MB"),
        ("segment_bytes", 0),
        ("segment_bytes", True),
        ("max_entry_bytes", None),
        ("cache_bytes", -1),
        ("cache_bytes", 1.5),
        ("sync_threads", 0),
        ("lock_timeout_s", "30"),
        ("lock_timeout_s", float("nan")),
        ("sweep_every_s", -1),
        ("tombstone_age_s", "a day"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name_and_value(tmp_path: Path, name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOptionError, match=rf"{name} is .*expected"):
        FileStore(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_an_empty_path_is_refused_rather_than_taken_for_the_present_directory() -> None:
    with pytest.raises(InvalidOptionError, match="dir is empty"):
        FileStore("")


def test_a_read_only_store_that_is_not_there_is_an_error_and_not_an_empty_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreNotFoundError, match="no tokcap store"):
            FileStore(path, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_syncs_in_flight_are_chosen_by_file_system() -> None:
    assert sync_threads_for("ext4") == sync_threads_for("xfs") == 16
    assert sync_threads_for("btrfs") == sync_threads_for("tmpfs") == 1


@pytest.mark.parametrize("name", ["needs_new_segment", "append", "sync", "acknowledge", "is_current"])
def test_a_defect_costs_one_put_and_never_the_thread_that_serves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with FileStore(tmp_path / "store", sweep_every_s=0) as store:
        for rollout in ("rollout", "other"):
            store.put_now(entry("first", rollout))

        def broken(*_: object) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as patch:
            patch.setattr(Rollout, name, broken)
            outcome: list[BaseException | None] = []
            waiter = threading.Thread(target=lambda: outcome.append(_error_of(store, entry("second"))), daemon=True)
            waiter.start()
            waiter.join(30)
            assert len(outcome) == 1, "the put never came back"
            assert isinstance(outcome[0], (RuntimeError, TokcapError))
        store.put_now(entry("second"))
        store.put_now(entry("second", "other"))
        with store.freeze_now("rollout") as snapshot:
            assert {e.model_call_id for e in snapshot.entries} == {"first", "second"}


def _error_of(store: FileStore, put: TokenEntry) -> BaseException | None:
    import asyncio

    try:
        asyncio.run(store.put(put))
    except BaseException as error:
        return error
    return None


def test_the_first_entry_of_a_process_imports_nothing_slow() -> None:
    code = (
        "import sys, numpy\n"
        "from tokcap import TokenEntry\n"
        "before = set(sys.modules)\n"
        "TokenEntry('r', 'c', [1], numpy.array([2]), [-0.5])\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
