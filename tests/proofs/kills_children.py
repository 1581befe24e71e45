"""The processes that are killed: writers, a sweeper, and one that opens new stores (consumers: `kills_consumers`).

Each announces the start and the end of every operation on its own pipe, with the time of a clock that all processes of
the node share.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tokcap.conformance.samples import entry_of
from tokcap.errors import ConflictError, FrozenError, RetiredError, StaleAttemptError
from tokcap.store import FileStore

from ..children import Channel
from .kills_calls import GROUP, Plan, SlowFiles, Step, plan_of
from .kills_mutants import Behaviour, behaviour_of

__all__ = ("REFUSALS", "Job", "Life", "Teller", "begin", "open_store", "open_stores", "sweep", "write")

REFUSALS = (FrozenError, RetiredError, StaleAttemptError)


@dataclass(frozen=True)
class Life:
    """How one child lives, from its start until it is killed."""

    path: str
    seed: int
    slow: bool = False
    together: bool = False
    """Many operations at once, on an event loop."""
    strict: bool = False
    """The store asks for intents."""
    small: bool = False
    """Small segments: they are sealed often."""
    sweeps: bool = False
    """The store keeps house by itself, from a thread."""
    forks: bool = False
    """It makes children, which live on."""
    handed: str = ""
    """The file of a consumer's hand-overs."""
    mutant: str = ""


@dataclass(frozen=True)
class Job:
    """What a writer is to do in one rollout: those steps of its plan that are not done."""

    rollout_id: str
    writer: int
    owner: bool
    always_begun: bool
    todo: tuple[int, ...]

    @property
    def plan(self) -> Plan:
        return plan_of(self.rollout_id, self.writer, self.owner, self.always_begun)


class Teller:
    """The child's end of the pipe. Threads may use it together."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._guard = threading.Lock()
        self._number = 0

    def tell(self, *message: Any) -> None:
        with self._guard:
            self._channel.send(message)

    def start(self, kind: str, *about: Any) -> int:
        with self._guard:
            self._number += 1
            self._channel.send(("start", self._number, kind, about, time.monotonic_ns()))
            return self._number

    def end(self, number: int, reply: Any = "ack") -> None:
        self.tell("end", number, reply, time.monotonic_ns())

    @contextlib.contextmanager
    def operation(self, kind: str, *about: Any) -> Generator[list[Any], None, None]:
        """Announce it; a list takes its result. What refuses it is its reply, and goes on; others only go on."""
        number = self.start(kind, *about)
        result: list[Any] = []
        try:
            yield result
        except REFUSALS as error:
            self.end(number, type(error).__name__)
            raise
        self.end(number, result[0] if result else "ack")


def begin(channel: Channel, life: Life) -> tuple[Teller, Behaviour]:
    """What every child begins with."""
    return Teller(channel), behaviour_of(life.mutant)


def open_store(
    teller: Teller, life: Life, behaviour: Behaviour, kind: Callable[..., FileStore] = FileStore
) -> FileStore:
    """As this life has it; to open it is an operation, too."""
    files = behaviour.files(SlowFiles(life.seed)) if life.slow or behaviour.mutates_files else None
    with teller.operation("open"):
        return kind(
            life.path,
            files=files,
            sweep_every_s=0.2 if life.sweeps else 0.0,
            lock_timeout_s=behaviour.lock_timeout_s,
            require_intent=life.strict,
            segment_bytes=6_000 if life.small else 64 << 20,
        )


# ---- writers


def write(channel: Channel, life: Life) -> None:
    """Does the jobs that it is sent, and says when each is done."""
    teller, behaviour = begin(channel, life)
    store = open_store(teller, life, behaviour)
    forker = Forker(life, channel, store)
    rounds = 0
    while True:
        try:
            jobs: list[Job] = channel.recv()
        except EOFError:
            return
        if life.together:
            asyncio.run(_write_together(teller, store, jobs, forker))
        else:
            for job in jobs:
                for number in job.todo:
                    forker.maybe_fork()
                    _write_one(teller, store, job, number)
        for job in jobs:
            teller.tell("wrote", job.rollout_id, job.writer)
        rounds += 1
        if rounds % 4 == 0:
            with teller.operation("close"):
                store.close_now()
            store = forker.store = open_store(teller, life, behaviour)


def _call_of(plan: Plan, rollout_id: str, step: Step) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The method of a store that does a step, and its arguments."""
    what, call = step
    if what == "put_many":
        return "put_many", (plan.entries[step],), {}
    if what in ("put", "conflict"):
        return "put", (plan.entries[step][0],), {}
    if what == "begin":
        return "begin_call", (rollout_id, call), {"choices": GROUP if ("put_many", call) in plan.entries else 1}
    if what == "mark":
        return "mark_incomplete", (rollout_id, call), {}
    if what == "finish":
        return "finish", (rollout_id,), {"meta": {"reward": 1.0}}
    return "settle_call", (rollout_id, call, what), {}


def _write_one(teller: Teller, store: FileStore, job: Job, number: int) -> None:
    plan = job.plan
    method, arguments, named = _call_of(plan, job.rollout_id, plan.steps[number])
    about = (plan.steps[number][0], job.rollout_id, job.writer, number)
    with contextlib.suppress(*REFUSALS), teller.operation(*about), contextlib.suppress(ConflictError):
        getattr(store, f"{method}_now")(*arguments, **named)


async def _write_together(teller: Teller, store: FileStore, jobs: list[Job], forker: Forker) -> None:
    """Calls at the same time, the steps of each one after the other; the owner's word comes last."""

    async def one(job: Job, numbers: list[int]) -> None:
        plan = job.plan
        for number in numbers:
            method, arguments, named = _call_of(plan, job.rollout_id, plan.steps[number])
            about = (plan.steps[number][0], job.rollout_id, job.writer, number)
            with contextlib.suppress(*REFUSALS), teller.operation(*about), contextlib.suppress(ConflictError):
                await getattr(store, method)(*arguments, **named)
            forker.maybe_fork()

    async def all_of(job: Job) -> None:
        finish = [number for number in job.todo if job.plan.steps[number][0] == "finish"]
        calls = job.plan.numbers_by_call(number for number in job.todo if number not in finish)
        await asyncio.gather(*(one(job, numbers) for numbers in calls))
        await one(job, finish)

    await asyncio.gather(*(all_of(job) for job in jobs))


class Forker:
    """Forks children while operations are in flight: idle ones, and ones that use the store that they inherited.

    They hold, by their descriptor of a file outside the store, whoever waits for the end of all.
    """

    def __init__(self, life: Life, channel: Channel, store: FileStore) -> None:
        self.store = store
        self._life, self._channel = life, channel
        self._left, self._steps = (2 if life.forks else 0), 0
        if life.forks:
            alive = os.open(f"{os.path.dirname(life.path)}/forked", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(alive, fcntl.LOCK_SH)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def maybe_fork(self) -> None:
        self._steps += 1
        if not self._left or self._steps % 5:
            return
        self._left -= 1
        if os.fork() == 0:
            said = "forked children went on"
            try:
                self._channel.close()  # or the parent would not see that the writer is gone
                self._live_on()
            except BaseException:
                said = traceback.format_exc()
            with open(f"{os.path.dirname(self._life.path)}/forked-said", "a") as file:
                file.write(json.dumps(said) + "\n")
                file.flush()
                os._exit(0)

    def _live_on(self) -> None:
        if self._left:
            time.sleep(0.3)
            return
        rollout_id = f"forked-{os.getpid()}"
        self.store.begin_call_now(rollout_id, "c")
        self.store.put_now(entry_of(rollout_id, "c"))
        self.store.reset_now(rollout_id)


# ---- others


def sweep(channel: Channel, life: Life) -> None:
    """Sweeps, looks, resets and expires, as it is told."""
    teller, behaviour = begin(channel, life)
    store = open_store(teller, life, behaviour)
    while True:
        try:
            what, about = channel.recv()
        except EOFError:
            return
        if what == "sweep":  # what was retired before `about`
            with teller.operation("sweep"):
                store.sweep_now(max(0.001, time.time() - about))
        elif what == "look":
            for rollout_id in about:
                _look(teller, store, rollout_id)
            with teller.operation("look at all"):
                store.usage_now()
                list(store.rollouts())
        elif what == "reset":
            with teller.operation("reset", *about):
                store.reset_now(*about)
        else:
            for rollout_id in about:
                _make_old(store, rollout_id)
            with teller.operation("expire", *about) as result:
                store.expire_now(3600.0)
                about = [rollout_id for rollout_id in about if store.stat_now(rollout_id).state == "absent"]
                result.append(about)
        teller.tell("swept", what, about)


def _look(teller: Teller, store: FileStore, rollout_id: str) -> None:
    """Without a lock, while others write, freeze, retire and die."""
    with contextlib.suppress(*REFUSALS), teller.operation("look", rollout_id):
        stat = store.stat_now(rollout_id)
        with store.read_now(rollout_id) as snapshot:
            if stat.damage or snapshot.damage:
                teller.tell("problem", f"{rollout_id} looks damaged: {stat.damage} {snapshot.damage}")


def _make_old(store: FileStore, rollout_id: str) -> None:
    """As if nobody had touched it for two hours."""
    past = time.time() - 7200.0
    for folder, _, names in os.walk(store._layout.rollout(rollout_id), topdown=False):
        for name in (*names, ""):
            with contextlib.suppress(FileNotFoundError):
                os.utime(os.path.join(folder, name), (past, past))


def open_stores(channel: Channel, life: Life) -> None:
    """Makes store after store in new directories, and puts one entry into each."""
    teller, behaviour = begin(channel, life)
    for number in range(1_000_000):
        path = f"{life.path}/{life.seed}-{number}/nested/store"
        with teller.operation("open new", path):
            store = FileStore(path, files=behaviour.files(SlowFiles(life.seed)), sweep_every_s=0.0)
        with teller.operation("first put", path):
            store.put_now(entry_of("r", "c"))
        store.close_now()
        teller.tell("opened", path)
        time.sleep(0.02)
