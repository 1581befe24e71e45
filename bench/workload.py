"""The workloads: what agents do to a store, as arrays, the same for every candidate.

| | rollouts | turns | first prompt | more a turn | of which sampled | |
|---|---|---|---|---|---|---|
| W1 | 64 | 20 | 1,500 | 300 | 200 | short |
| W2 | 8 | 60 | 2,048 | 2,176 | 512 | long: grows to a context of 128k ids |
| W3 | 2,000 | 3 | 1,500 | 300 | 200 | wide |
| W4 | 100 | as recorded | | | | the exchanges in `tests/traffic`, repeated under other rollout ids |
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokcap.capture.shapes import ParsedChoice, StreamJoiner, parse_answer
from tokcap.errors import UnusableAnswerError

from .places import UnavailableError

__all__ = (
    "FULL",
    "QUICK",
    "SMOKE",
    "WORKLOADS",
    "Call",
    "Scale",
    "Workload",
    "calls",
    "distinct_ids",
    "handed_in",
    "named",
)

VOCABULARY = 150_000
TRAFFIC = Path(__file__).parent.parent / "tests" / "traffic"


class Scale(msgspec.Struct, frozen=True):
    """By how much a workload is larger or smaller than its definition."""

    name: str
    rollouts: float = 1.0
    turns: float = 1.0
    bulk: float = 1.0
    """For what is counted by the ten thousand, such as tombstones to be swept."""


FULL = Scale("full")
QUICK = Scale("quick", bulk=0.1)
"""For the table of the README: W1 and W2 as they are defined; fewer rounds and fewer of what is beside them."""
SMOKE = Scale("smoke", rollouts=1 / 32, turns=1 / 10, bulk=1 / 1000)
"""To see that it runs; the figures mean nothing."""


class Workload(msgspec.Struct, frozen=True):
    """`rollouts` conversations of `turns` calls: a first prompt, and so many new ids per turn."""

    rollouts: int = 64
    turns: int = 20
    first_prompt: int = 1_500
    per_turn: int = 300
    """Ids by which the prompt grows from turn to turn, the sampled ones included."""
    sampled: int = 200
    recorded: float = 0.0
    """Above 0: recorded conversations instead, this share of the calls of each, but at least two."""

    def scaled(self, scale: Scale) -> Workload:
        """With so many times the rollouts and the turns; a recorded conversation can be cut, not lengthened."""
        return msgspec.structs.replace(
            self,
            rollouts=max(1, round(self.rollouts * scale.rollouts)),
            turns=max(2, round(self.turns * scale.turns)),
            recorded=min(1.0, self.recorded * scale.turns),
        )

    def __str__(self) -> str:
        """What was varied, for the name of a row."""
        return f"{self.rollouts:,} x {'recorded' if self.recorded else self.turns}"


WORKLOADS = {
    "W1": Workload(),
    "W2": Workload(rollouts=8, turns=60, first_prompt=2_048, per_turn=2_176, sampled=512),
    "W3": Workload(rollouts=2_000, turns=3),
    "W4": Workload(rollouts=100, recorded=1.0),
}
"""At full scale."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """One model call as a serving process has it."""

    rollout_id: str
    model_call_id: str
    prompt: npt.NDArray[np.int32]
    """A view of one array per conversation, which is writable: who keeps it has to copy it."""
    generated: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float64]
    parent: str = ""
    """The call whose prompt and answer this prompt begins with; empty at the root of a conversation."""
    shared: int = 0
    """How many ids of the prompt an earlier call of the rollout has had in the same places."""


def named(name: str, scale: Scale = FULL) -> Workload:
    """`W1` ... `W4` at that scale."""
    return WORKLOADS[name].scaled(scale)


def calls(workload: Workload, seed: int = 0, first: int = 0) -> list[list[Call]]:
    """The calls of each rollout, in order, of the rollouts from number `first`.

    Each rollout has a seed of its own, so that several processes can make their share each. Raises `UnavailableError`
    for recorded conversations that are not there.
    """
    numbers = range(first, first + workload.rollouts)
    if workload.recorded:
        recorded = _recorded()
        return [
            _repeated(recorded[number % len(recorded)], workload.recorded, _rollout_id(number)) for number in numbers
        ]
    return [list(_conversation(workload, _rollout_id(number), seed, number)) for number in numbers]


def handed_in(conversations: Iterable[Iterable[Call]]) -> int:
    """Bytes of the arrays that a store is given."""
    return sum(
        call.prompt.nbytes + call.generated.nbytes + call.log_probs.nbytes
        for conversation in conversations
        for call in conversation
    )


def distinct_ids(conversations: Iterable[Iterable[Call]]) -> int:
    """Ids that no earlier call of the rollout had in the same place: what a store can't help storing."""
    return sum(
        len(call.prompt) - call.shared + len(call.generated) for conversation in conversations for call in conversation
    )


def _rollout_id(number: int) -> str:
    return f"rollout-{number:05d}"


def _conversation(workload: Workload, rollout_id: str, seed: int, number: int) -> Iterator[Call]:
    random = np.random.default_rng([seed, number])
    total = workload.first_prompt + workload.turns * workload.per_turn
    sequence = random.integers(0, VOCABULARY, total, dtype=np.int32)
    # Engines compute log-probs in float32 and say them as JSON numbers.
    log_probs = -random.exponential(1.0, (workload.turns, workload.sampled)).astype(np.float32).astype(np.float64)
    parent, shared = "", 0
    for turn in range(workload.turns):
        end = workload.first_prompt + turn * workload.per_turn
        generated = sequence[end : end + workload.sampled]
        call = Call(rollout_id, f"call-{turn:04d}", sequence[:end], generated, log_probs[turn], parent, shared)
        yield call
        parent, shared = call.model_call_id, end + workload.sampled


def _repeated(recorded: list[Call], share: float, rollout_id: str) -> list[Call]:
    kept = recorded[: max(2, round(len(recorded) * share))]
    return [msgspec.structs.replace(call, rollout_id=rollout_id) for call in kept]


@functools.cache
def _recorded() -> list[list[Call]]:
    """Every recorded rollout, as tokcap captures its bodies."""
    if not TRAFFIC.is_dir():
        raise UnavailableError("the recorded exchanges in tests/traffic are not there")
    return [_conversation_of(path) for path in sorted(TRAFFIC.glob("*.jsonl.gz"))]


def _conversation_of(path: Path) -> list[Call]:
    with gzip.open(path, "rb") as lines:
        exchanges = [msgspec.json.decode(line) for line in lines][1:]
    found: list[Call] = []
    sequences: list[npt.NDArray[np.int32]] = []
    for exchange in exchanges:
        for choice in _choices(exchange):
            # No candidate but tokcap has a place for a second choice: each is a call of its own.
            call_id = f"call-{exchange['seq']:04d}-{choice.choice_index}"
            prompt = np.array(choice.prompt_token_ids, np.int32)
            generated = np.array(choice.generation_token_ids, np.int32)
            common = [_common(prompt, sequence) for sequence in sequences]
            whole = [at for at, length in enumerate(common) if length == len(sequences[at])]
            parent = found[max(whole, key=common.__getitem__)].model_call_id if whole else ""
            log_probs = np.array(choice.generation_log_probs, np.float64)
            found.append(Call(path.name, call_id, prompt, generated, log_probs, parent, max(common, default=0)))
            sequences.append(np.concatenate([prompt, generated]))
    return found


def _choices(exchange: dict[str, Any]) -> list[ParsedChoice]:
    """What can be stored of one exchange. Without log-probs nothing: the peers have no value for an unknown one."""
    asked = int(exchange["request"].get("n") or 1)
    try:
        if exchange.get("sse"):
            joiner = StreamJoiner(choices=asked)
            joiner.feed("".join(f"{line}\n\n" for line in exchange["sse"]).encode())
            body = joiner.answer()
        else:
            body = exchange.get("response")
        answer = parse_answer(body, choices=asked, path=exchange["path"])
    except UnusableAnswerError:
        return []
    return [choice for choice in answer.choices if choice.log_probs_present and len(choice.generation_token_ids)]


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
