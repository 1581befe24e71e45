"""A real process whose system calls fail or kill it: `strace` injects what no layer of Python can hide.

A child puts, begins calls, freezes, retires, marks and resets, and says before and after each step what it does. From
what it said the parent knows what must be there afterwards, what may be, and what must not.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.children import Channel, Child, Nursery
from tests.faulty_files import View, booted_as, view
from tokcap import FileStore
from tokcap.errors import DurabilityError, UnsafeFilesystemError

from .faults_operations import entry

__all__ = ("Injection", "Traced", "calls_made", "injections", "unavailable", "work")

_ANOTHER_BOOT = "00000000-0000-4000-8000-000000000000"
_KEPT = ("kept-0", "kept-1", "kept-2")
_FROZEN = ("frozen-0", "frozen-1")
_ALL = (*_KEPT, *_FROZEN, "consumed", "reset")

_FAILING: dict[str, tuple[str, ...]] = {
    "fdatasync": ("EIO", "ENOSPC", "EDQUOT"),
    "fsync": ("EIO", "ENOSPC"),
    "io_submit": ("EAGAIN", "EIO", "ENOMEM"),
    "io_getevents": ("EINTR",),
    "pwritev": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "pwrite64": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EIO", "ENOSPC", "EXDEV"),
    "linkat": ("EIO", "ENOSPC", "EMLINK", "EXDEV"),
    "mkdir": ("EIO", "ENOSPC", "EROFS", "EMLINK"),
    "unlink": ("EIO", "EACCES", "EROFS"),
    "rmdir": ("EIO", "EROFS"),
    "ftruncate": ("EIO", "EINTR"),
    "openat": ("EMFILE", "ENFILE", "EIO", "ENOMEM", "EINTR"),
    "flock": ("EINTR", "ENOLCK"),
    "fcntl": ("EINTR", "ENOLCK"),
    "getdents64": ("EIO",),
    "pread64": ("EIO", "EINTR"),
    "fstat": ("EIO", "ENOMEM"),
    "newfstatat": ("EIO", "ENOMEM"),
}
"""The system calls that a store makes, and what they may give. Not mmap: without memory Python itself is lost."""

_KILLED_IN = (
    *("fdatasync", "fsync", "io_submit", "io_getevents", "pwritev", "pwrite64", "rename", "linkat", "mkdir"),
    *("unlink", "rmdir", "ftruncate", "openat", "flock"),
)


@dataclass(frozen=True)
class Injection:
    """From the `when`-th call of one thread on, once or for good: an error, or SIGKILL."""

    call: str
    error: str
    when: int
    for_good: bool = False

    @property
    def kills(self) -> bool:
        return self.error == "KILL"

    def __str__(self) -> str:
        what = "signal=KILL" if self.kills else f"error={self.error}"
        return f"{self.call}:{what}:when={self.when}{'+' if self.for_good else ''}"


def unavailable() -> str:
    """Why nothing can be injected here; empty if it can."""
    if shutil.which("strace") is None:
        return "there is no strace"
    tried = subprocess.run(
        ["strace", "-f", "-e", "trace=getpid", "-e", "inject=getpid:error=EIO", "true"], capture_output=True, text=True
    )
    return f"strace can't trace here: {tried.stderr.strip()[:200]}" if tried.returncode else ""


def memory() -> str | None:
    """A directory in memory, if there is such a file system."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# ---- in the child


def work(channel: Channel, directory: str) -> None:
    """Warm up, wait for the word, then do everything once; a step that fails is tried once more."""
    with tempfile.TemporaryDirectory(dir=memory()) as warm:
        _Work(channel, warm, silent=True).run()
    channel.send("warm")
    channel.recv()
    _Work(channel, f"{directory}/store").run()
    channel.send("over")


class _Work:
    def __init__(self, channel: Channel, directory: str, *, silent: bool = False) -> None:
        self._channel, self._directory, self._silent = channel, directory, silent

    def _say(self, *words: object) -> None:
        if not self._silent:
            self._channel.send(words)

    def run(self) -> None:
        store: list[FileStore] = []
        if not self._step("open", "", lambda: store.append(FileStore(self._directory, sweep_every_s=0))):
            return
        asyncio.run(self._put_together(store[0]))
        self._one_by_one(store[0])
        self._step("close", "", store[0].close_now)

    async def _put_together(self, store: FileStore) -> None:
        for turn in range(2):
            await asyncio.gather(*(self._put(store, rollout, f"c{turn}") for rollout in (*_KEPT, *_FROZEN)))

    async def _put(self, store: FileStore, rollout: str, call: str) -> None:
        for _ in range(2):
            self._say("begin", "put", rollout, call)
            try:
                await store.put(entry(rollout, call))
            except Exception as error:
                self._failed("put", rollout, call, error)
            else:
                self._say("done", "put", rollout, call)
                return

    def _one_by_one(self, store: FileStore) -> None:
        self._step("begin_call", "kept-0", lambda: store.begin_call_now("kept-0", "open"))
        self._step("put", "kept-0", lambda: store.put_now(entry("kept-0", "late")), "late")
        for rollout in "consumed", "reset":
            self._step("put", rollout, lambda r=rollout: store.put_now(entry(r, "c0")), "c0")  # type: ignore[misc]
        self._freeze_together(store)
        self._step("mark", "frozen-1", lambda: store.mark_incomplete_now("frozen-1", "gone"))
        self._step("reset", "reset", lambda: store.reset_now("reset"))
        self._step("put", "reset", lambda: store.put_now(entry("reset", "fresh")), "fresh")
        if self._step("freeze", "consumed", lambda: store.freeze_now("consumed").close()):
            self._step("retire", "consumed", lambda: self._retire(store))

    def _freeze_together(self, store: FileStore) -> None:
        for _ in range(2):
            for rollout in _FROZEN:
                self._say("begin", "freeze together", rollout, "")
            try:
                for snapshot in store.freeze_many_now(_FROZEN):
                    snapshot.close()
            except Exception as error:
                for rollout in _FROZEN:
                    self._failed("freeze together", rollout, "", error)
            else:
                for rollout in _FROZEN:
                    self._say("done", "freeze together", rollout, "")
                return

    def _retire(self, store: FileStore) -> None:
        with store.freeze_now("consumed") as snapshot:
            pass
        assert store.retire_now("consumed", snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    def _step(self, kind: str, rollout: str, act: Callable[[], object], call: str = "") -> bool:
        for _ in range(2):
            self._say("begin", kind, rollout, call)
            try:
                act()
            except Exception as error:
                self._failed(kind, rollout, call, error)
            else:
                self._say("done", kind, rollout, call)
                return True
        return False

    def _failed(self, kind: str, rollout: str, call: str, error: Exception) -> None:
        number = error.errno if isinstance(error, OSError) else None
        # A new store tries a hard link, and a file system may have none.
        typed = isinstance(error, UnsafeFilesystemError if kind == "open" else DurabilityError)
        self._say("failed", kind, rollout, call, typed or isinstance(error, DurabilityError), number, repr(error))


# ---- in the parent


@dataclass
class _Rollout:
    """What must be there, what may be, and in which states."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    """Failed for good: a later boot may see them, if nothing could be said about them any more."""
    states: set[str] = field(default_factory=lambda: {"absent"})


@dataclass
class Traced:
    """One run of the child with one injection."""

    injection: Injection | None
    directory: str
    child: Callable[[Channel, str], None] = work
    injected: int = 0
    in_flight: list[tuple[str, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trace: str = ""

    def run(self, nursery: Nursery) -> None:
        child = nursery.start(self.child, self.directory)
        try:
            assert child.receive() == "warm"
            said = self._traced(child)
        finally:
            nursery.forget(child)
        self._replay(said)
        if self.injected and not self.failures and self._is_failed_sync():
            self.problems.append("the sync failed, and nobody was told")
        if not self.problems:
            self._check()

    def _is_failed_sync(self) -> bool:
        injection = self.injection
        return injection is not None and not injection.kills and injection.call in ("fdatasync", "fsync")

    def _traced(self, child: Child) -> list[tuple[object, ...]]:
        output = f"{self.directory}/trace"
        traced = ",".join(_FAILING) if self.injection is None else self.injection.call
        words = ["strace", "-f", "-p", str(child.pid), "-o", output, "-e", f"trace={traced}", "-e", "signal=none"]
        if self.injection is not None:
            words += ["-e", f"inject={self.injection}"]
        strace = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert strace.stderr is not None
        with strace, strace.stderr:
            first = strace.stderr.readline()
            if "attached" not in first:
                raise AssertionError(f"strace: {first}")
            child.send("go")
            said = child.rest()
            child.wait()
            strace.stderr.read()
        with open(output) as file:
            self.trace = file.read()
        self.injected = self.trace.count("(INJECTED)")
        if self.injection is not None and self.injection.kills:
            self.injected = int("over" not in said)
        if "over" in said:
            said.remove("over")
        elif not self.injected:
            self.problems.append("the child ended before it was over")
        return said

    def _replay(self, said: list[tuple[object, ...]]) -> None:
        """From what the child said to what must hold."""
        self._rollouts = {rollout: _Rollout() for rollout in _ALL}
        pending: Counter[tuple[str, str, str]] = Counter()
        for what, kind, rollout, call, *more in said:
            step = (str(kind), str(rollout), str(call))
            pending[step] += 1 if what == "begin" else -1
            if what == "failed":
                self._note_failure(step, *more)
            if what == "done" and rollout:
                self._done(*step)
            elif what == "failed" and rollout:
                self._maybe(*step, failed=True)
        self.in_flight = [step for step, count in pending.items() if count]
        for step in self.in_flight:
            if step[1]:
                self._maybe(*step, failed=False)

    def _note_failure(self, step: tuple[str, str, str], typed: object, number: object, text: object) -> None:
        self.failures.append(f"{step}: {text}")
        wanted = None if self.injection is None else getattr(errno, self.injection.error, None)
        if not typed or number != wanted:
            self.problems.append(f"{step} raised {text}, not a DurabilityError with the number of {self.injection}")
        elif step[1] and step[0] != "freeze together" and f"rollout {step[1]}:" not in str(text):
            self.problems.append(f"{step} raised {text}, which doesn't name the rollout")

    def _done(self, kind: str, rollout: str, call: str) -> None:
        known = self._rollouts[rollout]
        if kind == "put":
            known.must.add(call)
            known.states = {"open"}
        elif kind.startswith("freeze"):
            known.states = {"frozen"}
        elif kind == "retire":
            known.states = {"retired"}
        elif kind == "reset":
            self._rollouts[rollout] = _Rollout()

    def _maybe(self, kind: str, rollout: str, call: str, *, failed: bool) -> None:
        known = self._rollouts[rollout]
        if kind == "put":
            (known.doubtful if failed else known.may).add(call)
            known.states |= {"open"}
        elif kind.startswith("freeze"):
            known.states |= {"frozen"}
        elif kind == "retire":
            known.states |= {"retired"}
        elif kind == "reset":
            known.may |= known.must
            known.must = set()
            known.states |= {"absent"}

    def _check(self) -> None:
        directory = f"{self.directory}/store"
        if not os.path.isdir(f"{directory}/rollouts"):
            if any(known.must for known in self._rollouts.values()):
                self.problems.append("the store is gone")
            return
        for boot in "", _ANOTHER_BOOT:
            with booted_as(boot), FileStore(directory, read_only=True) as store:
                for rollout, known in self._rollouts.items():
                    self._check_seen(rollout, known, view(store, rollout), later_boot=bool(boot))
        self._check_goes_on(directory)

    def _check_seen(self, rollout: str, known: _Rollout, seen: View, *, later_boot: bool) -> None:
        where = f"{rollout}{', a later boot,' if later_boot else ''}"
        if seen.state not in known.states:
            self.problems.append(f"{where} is {seen.state}, not {sorted(known.states)}")
        if seen.damage:
            self.problems.append(f"{where} shows damage: {seen.damage}")
        if seen.state in ("retired", "absent"):
            return
        allowed = known.must | known.may
        if later_boot and self.injection is not None and (self.injection.for_good or self.injection.kills):
            allowed |= known.doubtful
        if not known.must <= seen.calls:
            self.problems.append(f"{where} lost {sorted(known.must - seen.calls)}")
        if not seen.calls <= allowed:
            self.problems.append(f"{where} shows {sorted(seen.calls - allowed)}, which failed")
        for call, choice, content in seen.entries:
            stored = entry(rollout, call, choice=choice)
            arrays = (stored.prompt_token_ids, stored.generation_token_ids, stored.generation_log_probs)
            if content != b"|".join(array.tobytes() for array in arrays):
                self.problems.append(f"{where} has another content for {call}")

    def _check_goes_on(self, directory: str) -> None:
        """The next process works on what is left."""
        with FileStore(directory, sweep_every_s=0) as store:
            store.sweep_now(10_000)
            for rollout, known in self._rollouts.items():
                state = store.stat_now(rollout).state
                if state in ("open", "absent"):
                    store.put_now(entry(rollout, "next"))
                if state == "retired":
                    continue
                with store.freeze_now(rollout) as snapshot:
                    found = {stored.model_call_id for stored in snapshot.entries}
                if not known.must - {"next"} <= found:
                    self.problems.append(f"{rollout}: the next process lost {sorted(known.must - found)}")


def calls_made(nursery: Nursery, directory: str) -> dict[str, int]:
    """How often the busiest thread of an undisturbed child makes each call: `strace` counts by thread."""
    undisturbed = Traced(None, directory)
    undisturbed.run(nursery)
    assert not undisturbed.problems and not undisturbed.failures, [*undisturbed.problems, *undisturbed.failures]
    by_thread: Counter[tuple[str, str]] = Counter()
    for line in undisturbed.trace.splitlines():
        if match := re.match(r"(\d+) +(\w+)\(", line):
            by_thread[match[1], match[2]] += 1
    most: dict[str, int] = {}
    for (_, call), count in by_thread.items():
        most[call] = max(count, most.get(call, 0))
    return most


def injections(made: dict[str, int], chance: random.Random) -> Iterator[Injection]:
    """Without end: every error of every call, at any time; every third kills, every fifth lasts."""
    while True:
        if chance.random() < 0.34:
            call = chance.choice([call for call in _KILLED_IN if call in made])
            yield Injection(call, "KILL", chance.randint(1, made[call]))
        else:
            call = chance.choice([call for call in _FAILING if call in made])
            name = chance.choice(_FAILING[call])
            # A call that is interrupted for ever is repeated for ever.
            yield Injection(call, name, chance.randint(1, made[call]), name != "EINTR" and chance.random() < 0.2)
