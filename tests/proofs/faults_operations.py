"""The operations of a store that are disturbed, each with what is there before."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tokcap import FileStore, TokenEntry
from tokcap.errors import ConflictError, FrozenError

__all__ = ("OPERATIONS", "ROLLOUTS", "Operation", "entry")

ROLLOUTS = ("r", "s", "other")
"""`r` and `s` are worked on, `other` is not."""

Errors = Mapping[str, BaseException | None]
"""What each rollout's part of an operation raised."""


def entry(rollout: str, call: str, *, choice: int = 0, tokens: int = 6, first: int = 7) -> TokenEntry:
    return TokenEntry(
        rollout,
        call,
        np.arange(tokens, dtype=np.int32),
        np.array([first, 8, 9], np.int32),
        np.array([-0.5, -0.25, np.nan]),
        choice_index=choice,
        output_items=[{"type": "message", "text": f"{rollout} {call} {choice}"}],
    )


@dataclass(frozen=True)
class Operation:
    name: str
    prepare: Callable[[FileStore], object]
    """What it returns is closed at the end, if it is a store."""
    act: Callable[[FileStore], object]
    names_rollout: bool = True
    """Its errors name the rollout."""
    writes_records: bool = False
    """What it adds is in the log of an open rollout: a failed sync leaves nothing of it."""
    in_parts: bool = False
    """Of several rollouts, each of which succeeds or fails for itself; `act` may return the error of each."""
    best_effort: bool = False
    """It goes on if a part of it fails, and leaves the rest to the next time."""
    ends_store: bool = False
    polls: bool = False
    """How many calls it makes depends on how long it has to wait."""

    def __str__(self) -> str:
        return self.name


def directory_of(store: FileStore) -> str:
    """The directory of a rollout `r`, however the store lays them out."""
    return store._layout.rollout("r")


def _put(*entries: TokenEntry) -> Callable[[FileStore], None]:
    def put(store: FileStore) -> None:
        for one in entries:
            store.put_now(one)

    return put


def _then(*steps: Callable[[FileStore], object]) -> Callable[[FileStore], object]:
    def run(store: FileStore) -> object:
        return [step(store) for step in steps][-1]

    return run


def _freeze(store: FileStore) -> None:
    store.freeze_now("r").close()


def _freeze_while_a_call_is_open(store: FileStore) -> None:
    store.freeze_now("r", wait_open_s=0.001).close()


def _freeze_many(store: FileStore) -> None:
    for snapshot in store.freeze_many_now(["r", "s"]):
        snapshot.close()


def _freeze_many_in_loop(store: FileStore) -> None:
    async def freeze() -> None:
        for snapshot in await store.freeze_many(["r", "s"]):
            snapshot.close()

    asyncio.run(freeze())


def _retire(store: FileStore) -> None:
    stat = store.stat_now("r")
    assert store.retire_now("r", snapshot_id=stat.snapshot_id, version=stat.version)


def _conflict(store: FileStore) -> None:
    with contextlib.suppress(ConflictError):
        store.put_now(entry("r", "a", first=1))


def _late_conflict(store: FileStore) -> None:
    with contextlib.suppress(FrozenError):
        store.put_now(entry("r", "a", first=1))


def _put_together(store: FileStore) -> Errors:
    async def put() -> list[BaseException | None]:
        puts = [store.put(entry(rollout, "first")) for rollout in ("r", "s")]
        return list(await asyncio.gather(*puts, return_exceptions=True))

    return dict(zip(("r", "s"), asyncio.run(put()), strict=True))


def _by_another_store(call: str) -> Callable[[FileStore], FileStore]:
    """Another store object goes on with the same segment, and stays open."""

    def put(store: FileStore) -> FileStore:
        other = FileStore(store._layout.root, sweep_every_s=0)
        other.put_now(entry("r", call))
        return other

    return put


def _while_held(act: Callable[[FileStore], object]) -> Callable[[FileStore], object]:
    """Somebody else holds the fence of `r` when the operation begins, and lets go of it soon."""

    def run(store: FileStore) -> object:
        fd = os.open(directory_of(store), os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        release = threading.Timer(0.003, os.close, [fd])
        release.start()
        try:
            return act(store)
        finally:
            release.join()

    return run


def _aged(store: FileStore) -> None:
    """Nobody touched `r` for long."""
    for folder, _, names in os.walk(directory_of(store)):
        for path in folder, *(f"{folder}/{name}" for name in names):
            os.utime(path, (1, 1))


def _left_half_done(store: FileStore) -> None:
    """A retirement that was interrupted before it removed anything."""
    path = directory_of(store)
    (tombstone,) = os.listdir(path)
    os.mkdir(f"{path}/{tombstone}/v1")
    for name in "manifest", "000001-40.seg":
        with open(f"{path}/{tombstone}/v1/{name}", "wb") as file:
            file.write(bytes(40))


def _half_built(store: FileStore) -> None:
    """A snapshot whose builder died."""
    path = directory_of(store)
    (incarnation,) = os.listdir(path)
    os.mkdir(f"{path}/{incarnation}/tmp-0123456789abcdef")
    with open(f"{path}/{incarnation}/tmp-0123456789abcdef/manifest", "wb") as file:
        file.write(bytes(40))


BEGUN = _put(entry("other", "o"), entry("r", "a"), entry("r", "b", tokens=9))
BOTH = _then(BEGUN, _put(entry("s", "a")))
CALLED = _then(BEGUN, lambda store: store.begin_call_now("r", "c"))
FROZEN = _then(CALLED, _freeze)
RETIRED = _then(BEGUN, _freeze, _retire)
NOTED = _then(RETIRED, lambda store: store.mark_incomplete_now("r", "c"))
LARGE = _then(BEGUN, _put(entry("r", "large", tokens=60_000)))

OPERATIONS = [
    Operation("first put", _put(entry("other", "o")), _put(entry("r", "a")), writes_records=True),
    Operation("later put", BEGUN, _put(entry("r", "c")), writes_records=True),
    Operation("asynchronous put", BEGUN, lambda store: asyncio.run(store.put(entry("r", "c"))), writes_records=True),
    Operation("put of what is stored", BEGUN, _put(entry("r", "a")), writes_records=True),
    Operation(
        "put_many",
        BEGUN,
        lambda store: store.put_many_now(
            [entry("r", "c"), entry("r", "c", choice=1), entry("s", "d"), entry("r", "e"), entry("s", "f")]
        ),
        names_rollout=False,
        writes_records=True,
        in_parts=True,
    ),
    Operation(
        "first puts together",
        _put(entry("other", "o")),
        _put_together,
        names_rollout=False,
        writes_records=True,
        in_parts=True,
    ),
    Operation("later puts together", BOTH, _put_together, names_rollout=False, writes_records=True, in_parts=True),
    Operation("put after another store's", _then(BEGUN, _by_another_store("x")), _put(entry("r", "c"))),
    Operation(
        "put that waits for the fence", BEGUN, _while_held(_put(entry("r", "c"))), writes_records=True, polls=True
    ),
    Operation("begin", BEGUN, lambda store: store.begin_call_now("r", "c"), writes_records=True),
    Operation(
        "first begin", _put(entry("other", "o")), lambda store: store.begin_call_now("r", "c"), writes_records=True
    ),
    Operation("settle", BEGUN, lambda store: store.settle_call_now("r", "c", "aborted", "why"), writes_records=True),
    Operation("mark", BEGUN, lambda store: store.mark_incomplete_now("r", "c"), writes_records=True),
    Operation("finish", BEGUN, lambda store: store.finish_now("r", {"reward": 1.0}), writes_records=True),
    Operation("delivery", BEGUN, lambda store: store.note_delivery_now("r", "a", "full"), writes_records=True),
    Operation("conflict", BEGUN, _conflict, writes_records=True),
    Operation(
        "rotation",
        _then(BEGUN, *[_put(entry("r", f"more{i}", tokens=900)) for i in range(2)]),
        _put(entry("r", "c")),
        writes_records=True,
    ),
    Operation("freeze", BEGUN, _freeze),
    Operation("freeze of a large rollout", LARGE, _freeze),
    Operation("freeze of nothing", _put(entry("other", "o")), _freeze),
    Operation("freeze again", FROZEN, _freeze),
    Operation("freeze that waits for a call", CALLED, _freeze_while_a_call_is_open, polls=True),
    Operation("freeze that waits for the fence", BEGUN, _while_held(_freeze), polls=True),
    Operation("freeze_many", BOTH, _freeze_many, names_rollout=False, in_parts=True),
    Operation("asynchronous freeze_many", BOTH, _freeze_many_in_loop, names_rollout=False, in_parts=True),
    Operation("late mark", FROZEN, lambda store: store.mark_incomplete_now("r", "c")),
    Operation("late mark of a large rollout", _then(LARGE, _freeze), lambda store: store.mark_incomplete_now("r", "c")),
    Operation("late settle", FROZEN, lambda store: store.settle_call_now("r", "c", "aborted")),
    Operation("late conflict", FROZEN, _late_conflict),
    Operation("late delivery", FROZEN, lambda store: store.note_delivery_now("r", "a", "partly")),
    Operation("retire", _then(BEGUN, _freeze), _retire),
    Operation("retire again", RETIRED, _retire),
    Operation("mark of a retired rollout", RETIRED, lambda store: store.mark_incomplete_now("r", "c")),
    Operation("reset of an open rollout", BEGUN, lambda store: store.reset_now("r")),
    Operation("reset of a frozen rollout", FROZEN, lambda store: store.reset_now("r")),
    Operation("reset of a retired rollout", NOTED, lambda store: store.reset_now("r")),
    Operation(
        "reset of several",
        _then(BOTH, lambda store: store.freeze_now("s").close()),
        lambda store: store.reset_now("r", "s"),
        names_rollout=False,
        in_parts=True,
    ),
    Operation("expire", _then(BEGUN, _aged), lambda store: store.expire_now(3600), names_rollout=False),
    Operation("sweep", RETIRED, lambda store: store.sweep_now(0), names_rollout=False, best_effort=True),
    Operation(
        "sweep of a tombstone with a note",
        NOTED,
        lambda store: store.sweep_now(0),
        names_rollout=False,
        best_effort=True,
    ),
    Operation(
        "sweep of half a retirement",
        _then(RETIRED, _left_half_done),
        lambda store: store.sweep_now(10_000),
        names_rollout=False,
        best_effort=True,
    ),
    Operation(
        "sweep of half a snapshot",
        _then(BEGUN, _half_built),
        lambda store: store.sweep_now(10_000),
        names_rollout=False,
        best_effort=True,
    ),
    Operation("close", BEGUN, lambda store: store.close_now(), names_rollout=False, ends_store=True),
    Operation("close with a call open", CALLED, lambda store: store.close_now(), names_rollout=False, ends_store=True),
]
"""Of every kind that a store knows; names of rollouts as in `ROLLOUTS`."""
