"""What writers do while they are killed, and what may be found of it: calls, their contents, their outcomes."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tokcap.conformance.samples import entry_of, ids_of
from tokcap.content import encode_content
from tokcap.entry import TokenEntry
from tokcap.store.files import Files

__all__ = (
    "GROUP",
    "PUTS",
    "STATEMENTS",
    "CallState",
    "Plan",
    "SlowFiles",
    "Step",
    "digest_of",
    "plan_of",
    "possible_states",
    "trained_digest",
)

PROMPT = 300
GROUP = 3
"""Choices of a `put_many`."""

PUTS = frozenset(("put", "put_many", "conflict"))
STATEMENTS = frozenset(("mark", "aborted", "no_generation"))
"""What may still be said of a frozen rollout, in a new version."""

Step = tuple[str, str]
"""What is done, and to which call."""


class SlowFiles(Files):
    """Stays a little in system calls, so that kills strike between a write, its sync and its acknowledgement too."""

    between_writes_s = 0.0003

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self._chance = random.Random(seed)

    def _stay(self) -> None:
        if self._chance.random() < 0.3:
            time.sleep(0.0003)

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if self._chance.random() < 0.3:  # a write that is done in two, torn at any byte
            data = b"".join(buffers)
            cut = self._chance.randint(0, len(data))
            if cut:
                super().write(fd, [data[:cut]], offset)
            time.sleep(self.between_writes_s)
            return cut + (super().write(fd, [data[cut:]], offset + cut) if cut < len(data) else 0)
        return super().write(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._stay()
        super().fdatasync(fd)
        self._stay()

    def rename(self, source: str, target: str) -> None:
        self._stay()
        super().rename(source, target)
        self._stay()

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._stay()

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._stay()

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._stay()


_SHAPES: dict[str, tuple[str, ...]] = {
    "put": ("put",),
    "many": ("begin", "put_many"),
    "begun": ("begin", "put"),
    "settled": ("begin", "no_generation"),
    "mark": ("mark",),
    "twice": ("put", "put"),
    "conflict": ("put", "conflict"),
    "aborted": ("begin", "put", "aborted"),
    "open": ("begin",),
}
_ALWAYS_BEGUN: tuple[str, ...] = ("begun", "many", "settled", "aborted")
_GOES_ON = frozenset(("put", "begun", "twice"))
"""Calls that later prompts contain."""


@dataclass(frozen=True)
class Plan:
    """The steps of one writer in one rollout. Each call belongs to one writer, so that none depends on their order."""

    steps: tuple[Step, ...]
    entries: Mapping[Step, tuple[TokenEntry, ...]]
    """What a step puts."""

    def numbers_by_call(self, numbers: Iterable[int]) -> list[list[int]]:
        """The same numbers, those of one call together."""
        found: dict[str, list[int]] = {}
        for number in numbers:
            found.setdefault(self.steps[number][1], []).append(number)
        return list(found.values())


@functools.lru_cache(maxsize=256)
def plan_of(rollout_id: str, writer: int, owner: bool, always_begun: bool) -> Plan:
    """Follows from its arguments alone. The prompts of a conversation contain what was sampled before; the owner says
    that the rollout is finished."""
    chance = random.Random(f"{rollout_id}/{writer}")
    shapes = _ALWAYS_BEGUN if always_begun else (*_SHAPES, "put", "put", "begun", "many")
    history = ids_of(rollout_id, PROMPT) + ids_of(f"{rollout_id}/{writer}", 20)
    steps: list[Step] = []
    entries: dict[Step, tuple[TokenEntry, ...]] = {}
    for number in range(chance.randint(3, 9)):
        call = f"w{writer}-{number}"
        shape = chance.choice(shapes)
        prompt = history + ids_of(f"{rollout_id}/{call}", 12)
        for what in _SHAPES[shape]:
            steps.append((what, call))
            if what == "put_many":
                made = [entry_of(rollout_id, call, prompt=prompt, choice_index=choice) for choice in range(GROUP)]
                entries[what, call] = tuple(made)
            elif what in PUTS:
                content = "other" if what == "conflict" else ""
                entries[what, call] = (entry_of(rollout_id, call, prompt=prompt, content=content),)
        if shape in _GOES_ON:
            history = prompt + entries["put", call][0].generation_token_ids.tolist()
    if owner:
        steps.append(("finish", ""))
    return Plan(tuple(steps), entries)


def digest_of(entry: TokenEntry) -> str:
    """Of everything that an entry of these plans says."""
    made = blake2b(digest_size=12)
    for array in (entry.prompt_token_ids, entry.generation_token_ids, entry.generation_log_probs):
        made.update(f"{array.dtype}{array.shape}".encode())
        made.update(array.tobytes())
    made.update(encode_content([entry.output_items, entry.extra, entry.finish_reason, entry.model]))
    return made.hexdigest()


def trained_digest(pieces: Iterable[tuple[Any, Any]]) -> str:
    """Of ids and their log-probs, whatever their order: equal if exactly the same were trained, equally often."""
    pairs = sorted(
        (int(token), float(log_prob))
        for ids, log_probs in pieces
        for token, log_prob in zip(ids, log_probs, strict=True)
    )
    return blake2b(np.array(pairs, np.float64).tobytes(), digest_size=12).hexdigest() + f"-{len(pairs)}"


@dataclass
class CallState:
    """What was done to one call, and what must therefore be seen of it."""

    begun: bool = False
    contents: dict[int, set[str]] = field(default_factory=dict)
    """Digests by choice; several are a conflict."""
    settled: set[str] = field(default_factory=set)

    def apply(self, what: str, entries: Sequence[TokenEntry]) -> None:
        """Do a step."""
        if what == "begin":
            self.begun = True
        elif what == "mark":
            self.settled.add("lost")
        elif what in STATEMENTS:
            self.settled.add(what)
        elif what in PUTS or (what == "late conflict" and self.contents):  # too late, it only adds to what is there
            for entry in entries:
                self.contents.setdefault(entry.choice_index, set()).add(digest_of(entry))

    @property
    def outcome(self) -> str | None:
        """None: nothing is to be seen."""
        if any(len(contents) > 1 for contents in self.contents.values()):
            return "conflict"
        if "aborted" in self.settled:
            return "aborted"
        if self.contents:
            return "recorded"
        return next((one for one in ("lost", "no_generation") if one in self.settled), "open" if self.begun else None)

    def is_seen_as(self, outcome: str | None, seen: Mapping[int, str]) -> bool:
        """Whether exactly this was found: the outcome, and by choice the digest of the entry."""
        return (
            self.outcome == outcome
            and self.contents.keys() == seen.keys()
            and all(seen[choice] in contents for choice, contents in self.contents.items())
        )


def possible_states(steps: Sequence[tuple[str, Sequence[TokenEntry], bool]]) -> Iterator[CallState]:
    """Every state that the steps of one call can have left: (what, entries, whether it was certainly done)."""
    doubtful = [place for place, (_, _, certain) in enumerate(steps) if not certain]
    for done in itertools.product((True, False), repeat=len(doubtful)):
        left_out = {place for place, was_done in zip(doubtful, done, strict=True) if not was_done}
        state = CallState()
        for place, (what, entries, _) in enumerate(steps):
            if place not in left_out:
                state.apply(what, entries)
        yield state
