"""Which calls of an open rollout are open, and whether somebody still works on them."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokcap import FileStore, TokenEntry
from tokcap.errors import InvalidIdError

BEGINS = """
import os, signal, sys
from tokcap import FileStore
store = FileStore(sys.argv[1])
store.begin_call_now("r-1", "theirs")
print("begun", flush=True)
signal.pause()
"""


def test_an_open_call_is_somebodys_work_until_its_process_is_gone(store_dir: Path) -> None:
    watching = FileStore(store_dir)
    looking = FileStore(store_dir, read_only=True)
    with FileStore(store_dir) as ours:
        ours.begin_call_now("r-1", "ours")
        ours.begin_call_now("r-1", "answered")
        ours.put_now(TokenEntry("r-1", "answered", [1], [2], [-0.1]))
        theirs = subprocess.Popen([sys.executable, "-c", BEGINS, store_dir], stdout=subprocess.PIPE, text=True)
        try:
            assert theirs.stdout is not None
            assert theirs.stdout.readline() == "begun\n"
            for store in (ours, watching, looking):
                assert store.open_calls_now("r-1") == {"ours": True, "theirs": True}
                assert asyncio.run(store.open_calls("r-1")) == {"ours": True, "theirs": True}
        finally:
            theirs.send_signal(signal.SIGKILL)
            theirs.communicate()
        assert looking.open_calls_now("r-1") == {"ours": True, "theirs": False}
    assert looking.open_calls_now("r-1") == {"ours": False, "theirs": False}
    watching.close_now()


def test_in_a_copy_nobody_is_at_work(store_dir: Path, tmp_path: Path) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("r-1", "c-1")
        shutil.copytree(store_dir, tmp_path / "copy")
        assert FileStore(tmp_path / "copy", read_only=True).open_calls_now("r-1") == {"c-1": False}


def test_what_is_not_open_has_no_open_calls(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.begin_call_now("r-1", "c-1")
        store.freeze_now("r-1").close()
        assert store.open_calls_now("r-1") == {}
        assert store.open_calls_now("absent") == {}
        with pytest.raises(InvalidIdError):
            store.open_calls_now("../r-1")
