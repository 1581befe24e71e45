"""The accounts of all rollouts: what children said goes in, what does not fit comes out as problems."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokcap.conformance.samples import difference, entry_of
from tokcap.store import FileStore

from .kills_account import Account, Pair, Seen, Try
from .kills_consumers import look_at

__all__ = ("STEPS", "Books", "fingerprint")

STEPS = frozenset(("begin", "put", "put_many", "conflict", "mark", "aborted", "no_generation", "finish"))


class Books:
    """Of one store."""

    def __init__(self, path: str, seed: int) -> None:
        self.path, self.seed = path, seed
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self.accounts: dict[str, Account] = {}
        self.closed: dict[str, dict[Pair, str]] = {}
        """Of each rollout that came to its end, what was handed over."""
        self.emptied: dict[str, Account] = {}
        """Those of them that were reset: a consumer may still hold what it froze before, or freeze an empty one."""
        self.tombs: list[str] = []
        """Rollouts that came to their end, of which a tombstone may be left."""

    def is_in_hands(self, rollout_id: str) -> bool:
        """Whether a consumer is at it."""
        raise NotImplementedError

    def read_hand_overs(self) -> None:
        """Enter what consumers wrote and have not said yet."""
        raise NotImplementedError

    def problem(self, text: str) -> None:
        self.problems.append(f"seed {self.seed}: {text}")

    # ---- what children say

    def enter(self, kind: str, about: tuple[Any, ...], attempt: Try) -> None:
        if kind in ("reset", "expire", "freeze_many"):
            for rollout_id in about:
                account = self.accounts.get(rollout_id)
                if account is not None:
                    (account.freezes if kind == "freeze_many" else account.resets).append(attempt)
            return
        account = self.accounts.get(about[0]) if about else None
        if account is None:
            return
        if kind in STEPS:
            account.tries.setdefault((about[1], about[2]), []).append(attempt)
        elif "retire" in kind:
            account.retires.setdefault((about[1], about[2]), []).append(attempt)
        elif "freeze" in kind:
            account.freezes.append(attempt)

    def expired(self, rollout_ids: tuple[str, ...], attempt: Try) -> None:
        """Its result says which are gone; the others were touched by somebody who sealed his segments."""
        for rollout_id in set(rollout_ids).difference(attempt.reply):
            account = self.accounts.get(rollout_id)
            if account is not None:
                account.resets.remove(attempt)
        attempt.reply = "ack"

    def handed_over(self, rollout_id: str, pair: Pair, seen: Seen) -> None:
        self.counts["hand-overs"] += 1
        self.counts["torn tails that were dropped"] += seen.torn
        account = self.accounts.get(rollout_id)
        if account is not None:
            copies = account.handed.setdefault(pair, [])
            self.counts["of them again, after a kill or by the other consumer"] += bool(copies)
            copies.append(seen)
            return
        known = self.closed.get(rollout_id)
        if known is None:
            self.problem(f"{rollout_id} was handed over, and nobody made it")
        elif pair in known:
            if known[pair] != fingerprint(seen):
                self.problem(f"{rollout_id} {pair} was handed over again with another content by {seen.source}")
        elif rollout_id in self.emptied:
            for one in self.emptied[rollout_id].problems_of(pair, seen):
                self.problem(f"{rollout_id} {pair}, handed over by {seen.source} after its end: {one}")
        elif not any(pair[0] == identity and pair[1] < version for identity, version in known):
            self.problem(f"{rollout_id} {pair} was handed over by {seen.source} after its end, which was {list(known)}")

    def swept(self, rollout_ids: list[str]) -> None:
        """They were reset or expired: for good, if that began after their writers had ended."""
        for rollout_id in rollout_ids:
            account = self.accounts.get(rollout_id)
            if account is not None and account.is_written:
                account.is_away = any(
                    one.reply == "ack" and one.start > account.written * 1e9 for one in account.resets
                )
        self.settle(rollout_ids)

    def settle(self, rollout_ids: list[str]) -> None:
        """Close the accounts of those that have come to their end."""
        for rollout_id in dict.fromkeys(rollout_ids):
            account = self.accounts.get(rollout_id)
            if account is None or not account.is_written or not account.is_gone or self.is_in_hands(rollout_id):
                continue
            self.read_hand_overs()
            self.close(account, account.problems())
            self.tombs.append(rollout_id)

    def close(self, account: Account, problems: Iterable[str]) -> None:
        """It came to its end: say what was wrong with it, and remember what was handed over."""
        self.problems += [f"seed {self.seed}: {account.rollout_id}: {one}" for one in problems]
        self.counts["rollouts"] += 1
        self.counts["pairs handed over"] += len(account.handed)
        self.closed[account.rollout_id] = {pair: fingerprint(copies[0]) for pair, copies in account.handed.items()}
        if account.is_reset:
            self.emptied[account.rollout_id] = account
        del self.accounts[account.rollout_id]

    # ---- check points

    def check(self) -> None:
        """All are dead: what lies in the store is what the account says, and nothing is damaged."""
        self.counts["check points"] += 1
        with FileStore(self.path, read_only=True) as store:
            for rollout_id, account in list(self.accounts.items()):
                stat = store.stat_now(rollout_id)
                if stat.state in ("open", "frozen"):
                    with store.read_now(rollout_id) as snapshot:
                        seen = Seen.of(look_at(snapshot), "the store")
                    problems = list(account.problems_of(None, seen))
                elif stat.state == "retired":
                    pair = (stat.snapshot_id, stat.version)
                    problems = [] if pair in account.handed else [f"{pair} is retired, and nobody had handed it over"]
                else:
                    problems = [] if account.is_reset or account.handed else list(account.problems())
                self.problems += [
                    f"seed {self.seed}: {rollout_id}, {stat.state}, after all were killed: {one}" for one in problems
                ]

    def check_new(self, path: str, *, certain: bool) -> None:
        """A store whose process was killed while it made it, or put the first entry into it."""
        entry = entry_of("r", "c")
        try:
            with FileStore(path, sweep_every_s=0.0) as store:
                with store.read_now("r") as before:
                    if certain and not len(before.entries):
                        self.problem(f"{path}: the first put is lost")
                store.put_now(entry)
                with store.freeze_now("r") as snapshot:
                    entries = list(snapshot.entries)
                    if snapshot.damage or len(entries) != 1 or difference(entries[0], entry):
                        self.problem(f"{path}: found {entries}, damage {snapshot.damage}")
        except Exception as error:
            self.problem(f"{path}, whose process was killed while it was new: {error!r}")
        shutil.rmtree(path.split("/nested")[0], ignore_errors=True)


def fingerprint(seen: Seen) -> str:
    """Of what a hand-over said."""
    said = json.dumps([seen.entries, seen.calls, seen.trained], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
