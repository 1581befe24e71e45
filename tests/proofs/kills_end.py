"""After the last kill: no lock stays, every rollout holds what the account says, and at the end nothing is left."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator

from filelock import FileLock

from tokcap.errors import TokcapError
from tokcap.store import FileStore
from tokcap.trajectory import build

from .kills_account import Account, Pair, Seen
from .kills_consumers import look_at, trained
from .kills_torture import Torture

__all__ = ("end",)

_LOCK_TIMEOUT_S = 20.0


def end(torture: Torture) -> float:
    """Close every account; the longest that an operation took, in seconds: a lock that stayed would show."""
    _await_forked(torture)
    worst = 0.0
    with FileStore(torture.path, sweep_every_s=0.0, lock_timeout_s=_LOCK_TIMEOUT_S) as store:
        for account in list(torture.accounts.values()):
            started = time.perf_counter()
            try:
                left = _take(store, account)
            except TokcapError as error:
                torture.close(account, [f"after the last kill: {error!r}"])
            else:
                torture.close(account, account.problems(left))
            worst = max(worst, time.perf_counter() - started)
        torture.problems += [f"seed {torture.seed}: {one}" for one in _take_rest(store, torture)]
        store.sweep_now(0)
        with FileLock(f"{torture.path}/sweep.lock", timeout=_LOCK_TIMEOUT_S):
            still = list(store.rollouts())
        if still:
            torture.problem(f"still there after a sweep: {still}")
    torture.problems += [f"seed {torture.seed}: {one}" for one in _left_behind(torture.path)]
    return worst


def _await_forked(torture: Torture) -> None:
    """Forked children of writers live on for a moment; they hold this file."""
    fd = os.open(torture.directory / "forked", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)
    said = torture.directory / "forked-said"
    for line in said.read_text().splitlines() if said.exists() else ():
        text = json.loads(line)
        if text.startswith("Traceback"):
            torture.problem(f"in a forked child: {text}")
        else:
            torture.counts[text] += 1


def _take(store: FileStore, account: Account) -> tuple[Pair, Seen] | None:
    """Freeze, read and retire what is left of a rollout."""
    stat = store.stat_now(account.rollout_id)
    if stat.state == "absent":
        return None
    if stat.state == "retired":
        account.retires.setdefault((stat.snapshot_id, stat.version), [])
        if (stat.snapshot_id, stat.version) not in account.handed:
            raise TokcapError(f"{stat.snapshot_id} {stat.version} is retired, and nobody had handed it over")
        return None
    started = time.monotonic_ns()
    with store.freeze_now(account.rollout_id) as snapshot:
        frozen = started, time.monotonic_ns()
        plain = {**look_at(snapshot), **trained(build(snapshot)), "frozen": frozen}
        pair = (snapshot.snapshot_id, snapshot.version)
    if not store.retire_now(account.rollout_id, snapshot_id=pair[0], version=pair[1]):
        raise TokcapError(f"{pair} could not be retired, though nobody else is there")
    return pair, Seen.of(plain, "the store")


def _take_rest(store: FileStore, torture: Torture) -> Iterator[str]:
    """What is still there of rollouts whose account is closed: nothing that holds a record."""
    for rollout_id, state in list(store.rollouts()):
        if state == "retired":
            continue
        with store.freeze_now(rollout_id) as snapshot:
            is_empty = not snapshot.calls and not len(snapshot.entries)
            known = rollout_id in torture.emptied and is_empty
            if not known and not rollout_id.startswith("forked-"):
                yield f"{rollout_id} is {state} after its end, with {[call.model_call_id for call in snapshot.calls]}"
        store.retire_now(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def _left_behind(path: str) -> Iterator[str]:
    """Names that should not be there once everything is retired and swept, and the store is closed."""
    for folder, folders, names in os.walk(path):
        below = os.path.relpath(folder, path)
        if below == ".":
            unknown = [*(set(folders) - {"rollouts", "writers"}), *(set(names) - {"FORMAT", "sweep.lock"})]
        elif below == "rollouts":
            unknown = names
        else:
            unknown = [*folders, *names]
        yield from (f"left behind: {below}/{name}" for name in unknown)
