"""The snapshot that a freeze returns is made from what it has in memory: it is the one that is opened afterwards."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damage import fingerprint
from tokcap import FileStore, TokenEntry
from tokcap.errors import TokcapError
from tokcap.store import Snapshot
from tokcap.store.frame import HEADER_SIZE

ROLLOUT = "rollout"


def entry(call: str, prompt: int = 30, seed: int = 1, choice: int = 0) -> TokenEntry:
    chance = np.random.default_rng(seed)
    return TokenEntry(
        ROLLOUT,
        call,
        np.arange(prompt, dtype=np.int32),
        chance.integers(0, 150_000, 7, np.int32),
        -chance.random(7),
        choice_index=choice,
        model="m",
        output_items=[{"text": f"{call} {seed}"}],
        policy_versions=[["7", 0, 7]],
        routed_experts=chance.integers(0, 9, (7, 2), np.int16) if seed % 2 else None,
    )


def shown(snapshot: Snapshot) -> object:
    """Everything that a snapshot says, but for what is only where it stands in memory."""
    return (
        snapshot.rollout_id,
        snapshot.snapshot_id,
        snapshot.version,
        snapshot.incomplete,
        snapshot.finished,
        snapshot.meta,
        snapshot.frozen_at,
        [fingerprint(one) for one in snapshot.entries],
        [tuple(getattr(call, name) for name in call.__struct_fields__[:-2]) for call in snapshot.calls],
        [(tuple(call.request_digests), call.detail) for call in snapshot.calls],
        snapshot.damage,
        snapshot.torn,
        snapshot._index,
        snapshot._paths,
        {
            number: bytes(memoryview(data)[:length])
            for (number, data), length in zip(
                snapshot._segments().items(), [one.length for one in snapshot._index.segments], strict=True
            )
        },
    )


def check(store: FileStore, other: FileStore) -> None:
    """Freeze, and compare with what the same store and another one open."""
    with store.freeze_now(ROLLOUT) as frozen:
        seen = shown(frozen)
        for again in (store.freeze_now(ROLLOUT), store.read_now(ROLLOUT), other.read_now(ROLLOUT)):
            with again:
                assert shown(again) == seen


def do(store: FileStore, chance: random.Random) -> None:
    call = f"c{chance.randrange(5)}"
    what = chance.randrange(8)
    if what < 3:
        store.put_now(entry(call, chance.choice([5, 30, 60, 40_000]), chance.randrange(3), chance.randrange(2)))
    elif what == 3:
        digests = [bytes([number] * 16) for number in range(chance.randrange(4))]
        store.begin_call_now(ROLLOUT, call, choices=2, request_digests=digests)
    elif what == 4:
        store.settle_call_now(ROLLOUT, call, chance.choice(["lost", "aborted", "no_generation"]), "why")
    elif what == 5:
        store.note_delivery_now(ROLLOUT, call, "full")
    elif what == 6:
        store.finish_now(ROLLOUT, {"reward": chance.random()})
    else:
        store.mark_incomplete_now(ROLLOUT)


@given(st.integers(0, 2**32))
def test_it_is_the_snapshot_that_is_opened_afterwards(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    chance = random.Random(seed)
    directory = tmp_path_factory.mktemp("store")
    size = chance.choice([900, 64 << 20])
    with FileStore(directory, segment_bytes=size) as one, FileStore(directory, segment_bytes=size) as other:
        for _ in range(chance.randrange(12)):
            try:
                do(chance.choice([one, other]), chance)
            except TokcapError:
                continue
        check(one, other)


def test_a_large_one_is_mapped_and_the_same(store_dir: Path) -> None:
    with FileStore(store_dir) as one, FileStore(store_dir) as other:
        one.put_now(entry("a", 400_000))
        one.put_now(entry("b", 400_100, 2))
        check(other, one)


@pytest.mark.parametrize("change", [lambda data: data[:-20], lambda data: b"", lambda data: data + b"torn" * 9])
def test_damage_is_in_it_as_in_what_is_opened(store_dir: Path, change: Callable[[bytes], bytes]) -> None:
    with FileStore(store_dir, segment_bytes=900) as one, FileStore(store_dir) as other:
        for number in range(4):
            one.put_now(entry(f"c{number}", 300 * number))
        for path in store_dir.glob(f"rollouts/*/{ROLLOUT}/*/*"):
            path.write_bytes(change(path.read_bytes()))
        check(other, one)


@pytest.mark.parametrize("tokens", [30, 200_000], ids=["read", "mapped"])
def test_what_is_damaged_between_its_put_and_its_freeze_is_never_served(store_dir: Path, tokens: int) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("a", tokens))
        store.put_now(entry("b", 5, 2))
        (path,) = store_dir.glob(f"rollouts/*/{ROLLOUT}/*/*.open")
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, 3 * HEADER_SIZE + 200)[0] ^ 4]), 3 * HEADER_SIZE + 200)
        os.close(fd)
        with store.freeze_now(ROLLOUT) as frozen:
            assert [one.model_call_id for one in frozen.entries] == ["b"]
            assert frozen.incomplete and len(frozen.damage) == 1
        check(store, store)


def test_space_behind_the_last_batch_is_not_kept_in_memory(store_dir: Path) -> None:
    with FileStore(store_dir) as store:
        store.put_now(entry("a"))
        with store.freeze_now(ROLLOUT) as frozen:
            assert [len(data) for data in frozen._segments().values()] == [one.length for one in frozen._index.segments]
