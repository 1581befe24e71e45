"""The parent: starts writers, consumers and a sweeper on one directory, kills them at any moment, and keeps account."""

from __future__ import annotations

import json
import os
import random
import selectors
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..children import Child, ChildError, Nursery
from .kills_account import Account, Seen, Try
from .kills_books import STEPS, Books
from .kills_children import Job, Life, open_stores, sweep, write
from .kills_consumers import follow, take
from .kills_mutants import MUTANTS

__all__ = ("KINDS", "Torture")

KINDS = (
    *("open", "close", "open new", "first put"),
    *("begin", "put", "put_many", "conflict", "mark", "aborted", "no_generation", "finish"),
    *("freeze", "freeze_many", "freeze, waiting", "build", "hand over", "retire"),
    *("consume: freeze", "consume: retire"),
    *("sweep", "look", "look at all", "reset", "expire"),
)
"""What may be in flight."""

_MOST_ACTIVE = 40
"""Rollouts that are written or wait for a consumer."""

_HANGS_S = 60.0


@dataclass
class Member:
    """One of the children, through all of its lives."""

    name: str
    function: Callable[..., None]
    number: int = 0
    child: Child | None = None
    lives: int = 0
    in_flight: dict[int, tuple[str, tuple[Any, ...], Try]] = field(default_factory=dict)
    orders: Any = None
    """What it was sent and has not said to be done; sent again in its next life."""
    resumes_at: float = 0.0
    """It is stopped until then; 0 if it isn't."""
    handed: str = ""
    read_to: int = 0
    """Up to where its file of hand-overs was read."""

    @property
    def role(self) -> str:
        return self.function.__name__


class Torture(Books):
    """Everything on one directory, until so many kills have struck an operation in flight."""

    def __init__(
        self,
        nursery: Nursery,
        directory: Path,
        seed: int,
        *,
        mutant: str = "",
        enough: int = 20,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(str(directory / "store"), seed)
        self.directory, self.mutant, self.enough, self.say = directory, mutant, enough, say
        (directory / "new").mkdir(parents=True, exist_ok=True)
        self.nursery, self.chance = nursery, random.Random(seed)
        self.hit: Counter[str] = Counter()
        self._takes: deque[str] = deque()
        self._jobs: dict[int, deque[Job]] = {number: deque() for number in range(4)}
        self._made = 0
        self._lasting: dict[str, float] = dict.fromkeys(KINDS, 0.001)
        """About how many seconds each kind takes."""
        self._selector = selectors.DefaultSelector()
        self.members = [
            *(Member(f"writer {number}", write, number) for number in range(4)),
            *(Member("consumer", take), Member("follower", follow), Member("sweeper", sweep)),
            Member("opener", open_stores),
        ]
        self._writers = self.members[:4]
        self._consumer, self._follower, self._sweeper, self._opener = self.members[4:]
        self._sweeps_at = 0.0
        self._target = ""
        """What the next kill is to strike, for a while: the kind that was struck least often."""
        self._put_into = ""
        """The new store that has an acknowledged put and is not closed yet."""
        self._last_handed: dict[str, str] = {}
        """By consumer, the rollout that it handed over last."""

    # ---- the loop

    def run(self, kills: int, *, until: float = float("inf")) -> None:
        """Until so many kills were counted, or that time (CLOCK_MONOTONIC); the last ones strike all at once."""
        for member in self.members:
            self._start(member)
        next_kill, next_all, next_pause, target_until = 0.0, 60, time.monotonic(), 0.0
        while self.hit.total() < kills and len(self.problems) < self.enough and time.monotonic() < until:
            started = self._hear_all(0.005)
            now = time.monotonic()
            self._resume(now)
            self._give_orders(now)
            self._look_for_hanging(now)
            if now < next_kill:
                continue
            if not self._target:
                self._target, target_until = self._least_hit(), now + 0.08
            victims = [(member, kind) for member, kind in started if kind == self._target or now > target_until]
            if not victims:
                continue
            victim, self._target = min(victims, key=lambda one: self.hit[one[1]])
            if victim in self._writers and now > next_pause and not victim.resumes_at:
                self._pause(victim, now)
                next_pause = now + 0.7
            else:
                self._kill(victim, self._target)
                others = [member for member in self.members if member.in_flight and not member.resumes_at]
                if others and self.chance.random() < 0.3:
                    self._kill(self.chance.choice(others))
            if self.hit.total() >= next_all:
                self.say(f"{self.hit.total():,} kills, {len(self.problems)} problems")
                self.kill_all()
                self.check()
                next_all += 60
                for member in self.members:
                    self._start(member)
            self._target, next_kill = "", time.monotonic() + self.chance.expovariate(1 / 0.015)
        self.kill_all()

    def _least_hit(self) -> str:
        kinds = (MUTANTS[self.mutant].focus if self.mutant else ()) or KINDS
        weights = [1 / (1 + self.hit[kind]) ** 3 for kind in kinds]
        return self.chance.choices(kinds, weights)[0]

    def _hear_all(self, within_s: float) -> list[tuple[Member, str]]:
        """Everything that was said; who has just started what."""
        started: list[tuple[Member, str]] = []
        for key, _ in self._selector.select(within_s):
            member: Member = key.data
            child = member.child
            assert child is not None
            try:
                for _ in range(50):
                    if not child.channel.poll(0):
                        break
                    message = child.receive()
                    self._hear(member, message)
                    if message[0] == "start":
                        started.append((member, message[2]))
            except (EOFError, OSError, ChildError) as error:
                self._died(member, error)
        return [(member, kind) for member, kind in started if any(k == kind for k, _, _ in member.in_flight.values())]

    def _died(self, member: Member, error: Exception) -> None:
        self.problem(f"{member.name} ended by itself, in {self._kinds_of(member)}: {error}")
        self._bury(member)
        self._start(member)

    # ---- lives and deaths

    def _start(self, member: Member) -> None:
        member.lives += 1
        chance = self.chance
        member.handed, member.read_to = f"{self.directory}/handed-{member.role}-{member.lives}", 0
        roles = MUTANTS[self.mutant].roles if self.mutant else frozenset[str]()
        life = Life(
            path=f"{self.directory}/new" if member is self._opener else self.path,
            seed=chance.getrandbits(30),
            slow=chance.random() < 0.6,
            together=chance.random() < 0.5,
            strict=member in self._writers and member.number == 3,
            small=chance.random() < 0.4,
            sweeps=chance.random() < 0.3,
            forks=member in self._writers and chance.random() < 0.15,
            handed=member.handed,
            mutant=self.mutant if member.role in roles else "",
        )
        self.counts["forking lives"] += life.forks
        member.child = self.nursery.start(member.function, life)
        self._selector.register(member.child.channel, selectors.EVENT_READ, member)
        if member.orders is not None:
            self._send(member, self._again(member))

    def _again(self, member: Member) -> Any:
        if member not in self._writers:
            return member.orders
        return [account.todo(job) if (account := self.accounts.get(job.rollout_id)) else job for job in member.orders]

    def _send(self, member: Member, orders: Any) -> None:
        assert member.child is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # it is seen to be gone later
            member.child.send(orders)

    def _kinds_of(self, member: Member) -> list[str]:
        return [kind for kind, _, _ in member.in_flight.values()]

    def _kill(self, member: Member, target: str = "") -> None:
        """Let the operation go on for a moment, strike, and hear what was said until then."""
        assert member.child is not None
        pause = self.chance.random() ** 3 * min(0.02, self._lasting.get(target, 0.001))
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
        member.child.kill()
        self._bury(member, target)
        self._start(member)

    def kill_all(self) -> None:
        """Every child, before any of them is waited for."""
        members = [member for member in self.members if member.child is not None]
        for member in members:
            assert member.child is not None
            member.child.signal(signal.SIGKILL)
        self.counts["times all were killed at once"] += 1
        for member in members:
            self._bury(member)

    def _bury(self, member: Member, target: str = "") -> None:
        child = member.child
        assert child is not None
        child.kill()
        try:
            while True:
                self._hear(member, child.receive())
        except (EOFError, OSError):
            pass
        except ChildError as error:
            self.problem(f"{member.name}, in {self._kinds_of(member)}: {error}")
        self._selector.unregister(child.channel)
        self.nursery.forget(child)
        member.child, member.resumes_at = None, 0.0
        self._read_handed(member)
        if member is self._consumer or member is self._follower:
            self.counts["killed between hand-over and retirement"] += self._is_between(member)
        with suppress(FileNotFoundError):
            os.unlink(member.handed)
        hit = sorted(set(self._kinds_of(member)))
        if hit:
            self.hit[target if target in hit else self.chance.choice(hit)] += 1
        else:
            self.counts["kills between two operations"] += 1
        for kind, about, attempt in member.in_flight.values():
            attempt.end = time.monotonic_ns()
            if kind in ("open new", "first put"):
                self.check_new(about[0], certain=False)
        member.in_flight.clear()
        if member is self._opener and self._put_into:
            self.check_new(self._put_into, certain=True)
            self._put_into = ""

    def _is_between(self, member: Member) -> bool:
        """It has handed something over that is not retired."""
        last = self._last_handed.get(member.name)
        return last is not None and any(
            kind.endswith("retire") and about[0] == last for kind, about, _ in member.in_flight.values()
        )

    def _pause(self, member: Member, now: float) -> None:
        """Stop a writer in the middle of an operation, and have somebody freeze what it writes."""
        assert member.child is not None
        member.child.signal(signal.SIGSTOP)
        member.resumes_at = now + self.chance.uniform(0.1, 0.5)
        self.counts["writers stopped and continued"] += 1
        rollout_ids = {about[0] for kind, about, _ in member.in_flight.values() if kind in STEPS}
        self._takes.extendleft(sorted(one for one in rollout_ids if not self._is_expired(one)))

    def _is_expired(self, rollout_id: str) -> bool:
        account = self.accounts.get(rollout_id)
        return account is not None and account.is_expired

    def _resume(self, now: float) -> None:
        for member in self._writers:
            if member.resumes_at and now > member.resumes_at and member.child is not None:
                member.resumes_at = 0.0
                if self.chance.random() < 0.2:
                    self._kill(member)
                else:
                    member.child.signal(signal.SIGCONT)

    def close_children(self) -> None:
        """End those that still run."""
        for member in self.members:
            if member.child is not None:
                self.nursery.forget(member.child)
                member.child = None
        self._selector.close()

    def _look_for_hanging(self, now: float) -> None:
        """What takes twice as long as anybody waits for a lock will never end."""
        for member in self.members:
            hanging = [one for one in member.in_flight.values() if now - one[2].start / 1e9 > _HANGS_S]
            if hanging:
                self.problem(f"{member.name} hangs in {hanging}")
                self._kill(member)

    # ---- what they say

    def _hear(self, member: Member, message: tuple[Any, ...]) -> None:
        what, *rest = message
        if what == "start":
            number, kind, about, stamp = rest
            attempt = Try(stamp)
            member.in_flight[number] = (kind, about, attempt)
            self.enter(kind, about, attempt)
        elif what == "end":
            number, reply, stamp = rest
            kind, about, attempt = member.in_flight.pop(number)
            attempt.end, attempt.reply = stamp, reply
            self._ended(member, kind, about, attempt)
        elif what == "wrote":
            self._wrote(member, *rest)
        elif what == "took":
            member.orders = (member.orders[0], [one for one in member.orders[1] if one != rest[0]])
            if not member.orders[1]:
                member.orders = None
            self.settle(rest[:1])
        elif what == "final":
            account = self.accounts.get(rest[0])
            if account is not None:
                account.final.add((rest[1], rest[2]))
        elif what == "swept":
            member.orders = None
            if rest[0] in ("reset", "expire"):
                self.swept(rest[1])
        elif what == "opened":
            self._put_into = ""
            shutil.rmtree(rest[0].split("/nested")[0])
            self.counts["new stores opened"] += 1
        else:
            self.problem(f"{member.name}: {rest[0]}")

    def _ended(self, member: Member, kind: str, about: tuple[Any, ...], attempt: Try) -> None:
        self.counts[f"{kind}: {'done' if attempt.reply == 'ack' else attempt.reply}"] += 1
        if kind == "expire":
            self.expired(about, attempt)
        self._lasting[kind] += 0.1 * ((attempt.end or attempt.start) / 1e9 - attempt.start / 1e9 - self._lasting[kind])
        if kind == "first put":
            self._put_into = about[0]
        elif kind == "hand over":
            self._last_handed[member.name] = about[0]
            self._read_handed(member)
        elif "freeze" in kind and attempt.reply == "ack":
            paused = {a[0] for m in self._writers if m.resumes_at for k, a, _ in m.in_flight.values() if k in STEPS}
            self.counts["freezes across a stopped writer"] += bool(paused.intersection(about))
        if "freeze" in kind or "retire" in kind:
            self.settle([one for one in about if isinstance(one, str) and one in self.accounts])
        if kind in STEPS and attempt.reply == "ack":
            account = self.accounts.get(about[0])
            if account is not None and account.takes_after > 0:
                account.takes_after -= 1
                if not account.takes_after:
                    self._takes.append(about[0])

    def _wrote(self, member: Member, rollout_id: str, writer: int) -> None:
        if member.orders is not None:
            member.orders = [job for job in member.orders if job.rollout_id != rollout_id] or None
        account = self.accounts.get(rollout_id)
        if account is None:
            return
        account.done.add(writer)
        if account.is_written and not account.written:
            account.written = time.monotonic()
            if not account.is_expired and self.chance.random() < 0.4:
                self._takes.append(rollout_id)
        self.settle([rollout_id])

    def _read_handed(self, member: Member) -> None:
        """Lines of its file that are whole; one that was cut off was not handed over."""
        if not os.path.exists(member.handed):
            return
        with open(member.handed, "rb") as file:
            file.seek(member.read_to)
            lines, _, _ = file.read().rpartition(b"\n")
        if not lines:
            return
        member.read_to += len(lines) + 1
        for line in lines.split(b"\n"):
            plain = json.loads(line)
            self.handed_over(plain["rollout_id"], (plain["snapshot_id"], plain["version"]), Seen.of(plain, member.name))

    def read_hand_overs(self) -> None:
        self._read_handed(self._consumer)
        self._read_handed(self._follower)

    def is_in_hands(self, rollout_id: str) -> bool:
        orders = self._consumer.orders
        about = [about[0] for _, about, _ in self._follower.in_flight.values() if about]
        return rollout_id in self._takes or (orders is not None and rollout_id in orders[1]) or rollout_id in about

    # ---- what they are told

    def _give_orders(self, now: float) -> None:
        for member in self._writers:
            if member.orders is None and member.child is not None and not member.resumes_at:
                self._order_writer(member)
        if self._consumer.orders is None and self._takes:
            self._order_consumer()
        if self._sweeper.orders is None and now > self._sweeps_at:
            self._sweeps_at = now + 0.02
            self._order_sweeper(now)

    def _order_writer(self, member: Member) -> None:
        jobs = [self._jobs[member.number].popleft() for _ in range(min(2, len(self._jobs[member.number])))]
        if not jobs and len(self.accounts) < _MOST_ACTIVE:
            jobs = [self._new_rollout(member.number)]
        if jobs:
            member.orders = jobs
            self._send(member, jobs)

    def _new_rollout(self, owner: int) -> Job:
        self._made += 1
        chance, rollout_id = self.chance, f"r{self._made:06d}"
        fate = chance.random()
        is_expired, is_reset = fate < 0.08, fate < 0.20
        writers = [owner] if chance.random() < 0.6 else [owner, (owner + 1) % 4]
        jobs = []
        for writer in writers:
            owns = writer == owner and not is_expired
            job = Job(rollout_id, writer, owns, writer == 3, ())
            jobs.append(Job(rollout_id, writer, owns, writer == 3, tuple(range(len(job.plan.steps)))))
        account = Account(rollout_id, jobs, is_reset, is_expired, made=time.time())
        account.takes_after = 0 if is_expired or chance.random() < 0.6 else chance.randint(1, 12)
        if self.mutant and MUTANTS[self.mutant].early:
            account.takes_after = chance.randint(1, 4)
        self.accounts[rollout_id] = account
        for job in jobs[1:]:
            self._jobs[job.writer].append(job)
        return jobs[0]

    def _order_consumer(self) -> None:
        wanted = {"freeze_many": "many", "freeze, waiting": "wait"}.get(self._target)
        how = wanted or self.chance.choice(["one", "many", "wait"])
        taken = {self._takes.popleft() for _ in range(min(len(self._takes), self.chance.randint(1, 3)))}
        rollout_ids = [one for one in sorted(taken) if one in self.accounts]
        if rollout_ids:
            self._consumer.orders = (how, rollout_ids)
            self._send(self._consumer, self._consumer.orders)

    def _order_sweeper(self, now: float) -> None:
        chance = self.chance
        orders: tuple[str, Any] | None = None
        fate = {"expire": 0.0, "reset": 0.3, "look": 0.7, "look at all": 0.7}.get(self._target, chance.random())
        written = [one for one in self.accounts.values() if one.is_written]
        if fate < 0.25:
            expired = [one.rollout_id for one in written if one.is_expired]
            orders = ("expire", expired[:3]) if expired else None
        elif fate < 0.55:
            old = [self.tombs.pop(chance.randrange(len(self.tombs))) for _ in range(min(2, len(self.tombs)))]
            reset = [one.rollout_id for one in self.accounts.values() if one.is_reset and not one.is_expired]
            some = [one for one in reset if self.accounts[one].is_written or chance.random() < 0.1]
            orders = ("reset", (old + some)[:4]) if old or some else None
        elif fate < 0.65:
            late = [one for one in written if not one.is_reset and now - one.written > 3.0]
            self._takes.extend(one.rollout_id for one in late if chance.random() < 0.3)
        elif fate < 0.8 and self.accounts:
            orders = ("look", [chance.choice(list(self.accounts)) for _ in range(3)])
        if orders is None:
            # What was retired while somebody may still write it must stay: its tombstone is what refuses him.
            unwritten = [account.made for account in self.accounts.values()]
            limit = min(unwritten, default=time.time()) - 0.5
            orders = ("sweep", limit if chance.random() < 0.6 else time.time() - 3600.0)
        self._sweeper.orders = orders
        self._send(self._sweeper, orders)
