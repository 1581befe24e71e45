"""What is recorded: what two or three store objects on one directory do, each as a process of its own would.

Small scripts, each about one thing, show more than a long one: their states can be made all of them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import numpy as np

from tests.faulty_files import Fault
from tests.state_model import Operation
from tokcap import TokenEntry
from tokcap.store.layout import Layout

from .crash_stage import Stage

__all__ = ("AFTERWARDS", "DEATHS", "ROLLOUTS", "SCRIPTS", "NotReachedError", "Script", "death", "random_script")

Script = Callable[[Stage], None]
_SHARD = Layout("").shard
NEIGHBOURS = [name for name in (f"r-{number}" for number in range(2000)) if _SHARD(name) == _SHARD("r")][:2]
"""Rollouts in the same shard as `r`."""
MOST = ("r", "q", "s")
ROLLOUTS = (*MOST, *NEIGHBOURS)
SEGMENT_BYTES = 1200


def turn(rollout: str, number: int, *, choice: int = 0, other: int = 0, width: int = 24, call: str = "") -> TokenEntry:
    """The answer of a turn; its prompt goes on where that of the turn before ended. `other`: another content."""
    ids = np.random.default_rng(list(rollout.encode())).integers(0, 150_000, width * 40, dtype=np.int32)
    prompt = ids[: width * (number + 1)]
    answer = ids[len(prompt) : len(prompt) + 6] + choice + 10 * other
    return TokenEntry(rollout, call or f"turn-{number}", prompt, answer, -np.arange(6) / 7.0, choice_index=choice)


def put(rollout: str, number: int, **how: int) -> Operation:
    return Operation("put", rollout, entries=(turn(rollout, number, **how),))  # type: ignore[arg-type]


def group(rollout: str, number: int, choices: int) -> Operation:
    """All choices of a call at once."""
    return Operation("put", rollout, entries=tuple(turn(rollout, number, choice=choice) for choice in range(choices)))


def begin(rollout: str, number: int, choices: int = 1) -> Operation:
    digests = tuple(bytes([number]) * 16 for number in range(number + 1))
    return Operation("begin", rollout, f"turn-{number}", number=choices, digests=digests)


def settle(rollout: str, number: int, word: str) -> Operation:
    return Operation("settle", rollout, f"turn-{number}", word=word)


def deliver(rollout: str, number: int, word: str = "full") -> Operation:
    return Operation("deliver", rollout, f"turn-{number}", word=word)


def finish(rollout: str, reward: float = 1.0) -> Operation:
    return Operation("finish", rollout, meta={"reward": reward})


def freeze(rollout: str) -> Operation:
    return Operation("freeze", rollout)


def reset(rollout: str) -> Operation:
    return Operation("reset", rollout)


# ---- scripts


def making_the_directory(stage: Stage) -> None:
    """The store's directory and its parent are missing; one process dies while it makes them, another goes on."""
    for after in range(60):
        if stage.open("a", dying=after):
            break
    stage.do("a", put("r", 0))
    stage.do("a", freeze("q"))


def records(stage: Stage) -> None:
    """Two writers of one rollout, with everything that a record can be."""
    _open_both(stage)
    stage.do("a", begin("r", 0))
    stage.do("a", put("r", 0))
    stage.do("b", put("r", 1))
    stage.do("a", deliver("r", 0))
    stage.do("b", begin("r", 2, choices=2))
    stage.do("b", group("r", 2, 2))
    stage.do("a", put("r", 2))
    stage.do("a", put("r", 1, other=1))
    stage.do("b", put("r", 1, other=1))
    stage.do("b", settle("r", 3, "lost"))
    stage.do("a", settle("r", 4, "no_generation"))
    stage.do("a", finish("r"))
    stage.do("b", put("r", 5))


def rotation(stage: Stage) -> None:
    """Segments fill up, of two writers."""
    _open_both(stage, segment_bytes=600)
    for number in range(6):
        stage.do("ab"[number % 2], put("r", number))
    stage.do("a", freeze("r"))


def space(stage: Stage) -> None:
    """Records are written into space that was written ahead."""
    _open_both(stage, space=True, segment_bytes=2000)
    for number in range(5):
        stage.do("ab"[number % 3 == 2], put("r", number))
    stage.do("b", settle("r", 5, "lost"))
    stage.close("a")
    stage.do("b", put("r", 6))
    stage.do("b", freeze("r"))


def a_wide_record(stage: Stage) -> None:
    """A record of many sectors."""
    _open_both(stage, space=True)
    stage.do("a", put("r", 0))
    stage.do("a", put("r", 1, width=800))
    stage.do("b", put("r", 2, width=800))
    stage.do("b", freeze("r"))


def at_the_same_time(stage: Stage) -> None:
    """Several operations on several rollouts of one object at once: the kernel does their syncs, in any order."""
    _open_both(stage, kernel=True)
    stage.do("a", *(put(rollout, 0) for rollout in MOST), asynchronous=True)
    stage.do("a", put("r", 1), put("r", 2), begin("r", 3), put("q", 1), group("s", 1, 2), asynchronous=True)
    stage.together([("a", put("r", 3)), ("b", put("r", 4)), ("b", put("q", 2))])
    stage.freeze_many("b", MOST)
    stage.do("a", settle("r", 0, "lost"), settle("q", 0, "aborted"), asynchronous=True)


def versions(stage: Stage) -> None:
    """Freezes, and what is said of a rollout afterwards."""
    _open_both(stage)
    stage.do("a", put("r", 0))
    stage.do("b", begin("r", 1))
    stage.do("a", freeze("r"))
    stage.do("b", put("r", 1))
    stage.do("b", settle("r", 1, "lost"))
    stage.do("b", deliver("r", 0))
    stage.do("a", deliver("r", 0))
    stage.do("a", deliver("r", 0, "partly"))
    stage.do("a", put("r", 0, other=1))
    stage.do("b", freeze("r"))


def the_end(stage: Stage) -> None:
    """Retirements, marks that come too late for anything, and sweeps."""
    _open_both(stage)
    stage.do("a", put("r", 0))
    stage.do("b", put("q", 0))
    stage.freeze_many("a", ["r", "q", "s"])
    stage.do("a", stage.retire("a", "r"))
    stage.do("b", settle("r", 1, "lost"))
    stage.do("b", settle("r", 1, "lost"))
    stage.do("b", stage.retire("b", "q"))
    stage.do("b", stage.retire("b", "q"))
    stage.do("a", deliver("q", 0))
    stage.sweep("b")
    stage.do("a", put("r", 1))
    stage.do("a", stage.retire("a", "s"))
    stage.sweep("a")


def another_attempt(stage: Stage) -> None:
    """Resets from every state, and what follows."""
    _open_both(stage)
    stage.do("a", begin("r", 0))
    stage.do("a", put("r", 0))
    stage.do("b", reset("r"))
    stage.do("a", put("r", 0))
    stage.do("b", put("r", 1))
    stage.do("b", freeze("r"))
    stage.do("a", reset("r"))
    stage.do("a", put("r", 2))
    stage.do("a", freeze("r"))
    stage.do("a", stage.retire("a", "r"))
    stage.do("a", reset("r"))
    stage.do("b", put("r", 3))


def nothing_recorded(stage: Stage) -> None:
    """Freezes of rollouts that nobody wrote."""
    _open_both(stage)
    stage.do("a", freeze("r"))
    stage.freeze_many("b", ["q", "s"])
    stage.do("b", settle("q", 0, "lost"))
    stage.do("b", reset("r"))
    stage.do("a", freeze("r"))


def closing(stage: Stage) -> None:
    """Objects are closed and opened again."""
    _open_both(stage)
    stage.do("a", put("r", 0))
    stage.do("b", put("q", 0))
    stage.do("b", put("r", 1))
    stage.close("a")
    stage.close("b")
    stage.open("c")
    stage.do("c", put("r", 2))
    stage.close("c")
    stage.open("d", require_intent=True)
    stage.do("d", begin("r", 3))
    stage.do("d", put("r", 3))
    stage.do("d", put("q", 3))
    stage.do("d", freeze("r"))
    stage.close("d")


def a_shard_made_anew(stage: Stage) -> None:
    """A shard is removed by somebody whose first put failed, made again by somebody who died, and used by a third."""
    _open_both(stage)
    stage.open("c", segment_bytes=SEGMENT_BYTES)
    stage.recording.settle()
    first, second = NEIGHBOURS
    stage.do("b", put(first, 0))
    stage.do("b", reset(first))
    with stage.failing("a", Fault(1, errno.EIO, kinds=["fdatasync"])):
        stage.do("a", put("r", 0))
    stage.die("c", put(second, 0), 3)
    stage.do("b", put(first, 1))


def a_failed_sync(stage: Stage) -> None:
    """The device fails once, in a first and in a later batch: what was refused is never shown."""
    _open_both(stage)
    for number in range(3):
        with stage.failing("a", Fault(1, errno.EIO, kinds=["fdatasync"])):
            stage.do("a", put("r", number))
        stage.do("b", put("r", number + 3))
    stage.do("a", put("r", 0))
    stage.close("a")
    stage.do("b", put("r", 1))


def by_hand(stage: Stage) -> None:
    """Somebody removed directories of the store, and put a file of his own into one."""
    _open_both(stage)
    files = stage.files("a")
    root = stage.store("a")._layout.root
    files.rmdir(f"{root}/rollouts")
    stage.recording.settle()
    stage.open("c")
    stage.do("c", put("r", 0))
    stage.do("c", freeze("r"))
    files.close(files.create(f"{stage.store('a')._layout.rollout('r')}/not-ours"))
    stage.recording.settle()
    stage.do("a", stage.retire("a", "r"))
    stage.sweep("b")
    stage.do("b", put("r", 1))


def _open_both(stage: Stage, *, kernel: bool = False, space: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
    stage.open("a", kernel=kernel, space=space, segment_bytes=segment_bytes)
    stage.open("b", kernel=kernel, space=space, segment_bytes=segment_bytes)
    stage.recording.settle()


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        making_the_directory,
        records,
        rotation,
        space,
        a_wide_record,
        at_the_same_time,
        versions,
        the_end,
        another_attempt,
        nothing_recorded,
        closing,
        a_shard_made_anew,
        a_failed_sync,
        by_hand,
    )
}


# ---- somebody dies in the middle of an operation, and somebody else does it again


def _nothing(stage: Stage) -> None:
    """The rollout is absent."""


def _open(stage: Stage) -> None:
    stage.do("c", put("r", 0))


def _frozen(stage: Stage) -> None:
    _open(stage)
    stage.do("c", freeze("r"))


def _marked(stage: Stage) -> None:
    _frozen(stage)
    stage.do("c", settle("r", 1, "lost"))


def _retired(stage: Stage) -> None:
    _frozen(stage)
    stage.do("c", stage.retire("c", "r"))


DEATHS: dict[str, tuple[Script, Callable[[Stage], Operation]]] = {
    "first put": (_nothing, lambda stage: put("r", 0)),
    "put": (_open, lambda stage: put("r", 1)),
    "put of two": (_open, lambda stage: group("r", 1, 2)),
    "begin": (_nothing, lambda stage: begin("r", 0)),
    "freeze": (_open, lambda stage: freeze("r")),
    "first freeze": (_nothing, lambda stage: freeze("r")),
    "late mark": (_frozen, lambda stage: settle("r", 1, "lost")),
    "delivery": (_frozen, lambda stage: deliver("r", 0)),
    "late conflict": (_frozen, lambda stage: put("r", 0, other=1)),
    "retire": (_frozen, lambda stage: stage.retire("c", "r")),
    "retire the second version": (
        _marked,
        lambda stage: Operation("retire", "r", word=stage.seen["r"].snapshot_id, number=2),
    ),
    "note beside a tombstone": (_retired, lambda stage: settle("r", 1, "lost")),
    "reset": (_open, lambda stage: reset("r")),
    "reset of a frozen one": (_frozen, lambda stage: reset("r")),
    "reset of a retired one": (_retired, lambda stage: reset("r")),
}
"""Name -> what comes before, and the operation in which somebody dies."""

AFTERWARDS: tuple[Callable[[Stage, Operation], object], ...] = (
    lambda stage, operation: stage.do("b", operation),
    lambda stage, operation: stage.sweep("b", older_than_s=1e9),
    lambda stage, operation: stage.do("b", put("r", 7)),
    lambda stage, operation: stage.do("b", freeze("r")),
)
"""What somebody else does after a death: the same again, tidy up, a put, a freeze."""


def death(name: str, after: int, then: int) -> Script:
    """Die in the operation `name` after so many changes and syncs; `then` says what somebody else does first."""

    def script(stage: Stage) -> None:
        before, what = DEATHS[name]
        stage.open("c", segment_bytes=SEGMENT_BYTES)
        stage.open("b", segment_bytes=SEGMENT_BYTES)
        before(stage)
        stage.recording.settle()
        stage.open("a", segment_bytes=SEGMENT_BYTES)
        operation = what(stage)
        if not stage.die("a", operation, after):
            raise NotReachedError
        AFTERWARDS[then](stage, operation)
        stage.do("c", deliver("r", 0))

    script.__name__ = f"{name} dies after {after}, then {then}"
    return script


class NotReachedError(Exception):
    """The operation was done before so many changes and syncs."""


# ---- anything


def random_script(seed: int, steps: int = 14) -> Script:
    """Operations of any kind on a few rollouts, by two objects, some at the same time; sometimes somebody dies."""

    def script(stage: Stage) -> None:
        chance = random.Random(seed)
        how = {"kernel": chance.random() < 0.4, "space": chance.random() < 0.4}
        _open_both(stage, segment_bytes=chance.choice((500, 1200, 4000)), **how)
        alive = ["a", "b"]
        for _ in range(steps):
            who = chance.choice(alive)
            kind = chance.random()
            if kind < 0.15:
                stage.together(
                    [(chance.choice(alive), _any(stage, chance)) for _ in range(2)],
                    asynchronous=chance.random() < 0.5,
                )
            elif kind < 0.22:
                stage.freeze_many(who, [r for r in MOST if not _is_retired(stage, r)])
            elif kind < 0.28:
                stage.sweep(who, older_than_s=chance.choice((0, 1e9)))
            elif kind < 0.36:
                operation, after = _any(stage, chance), chance.randrange(12)
                if stage.die(who, operation, after):
                    alive.remove(who)
                    alive.append(f"x{len(stage.recording.events)}")
                    stage.open(alive[-1], segment_bytes=SEGMENT_BYTES)
            elif kind < 0.4:
                stage.close(who)
                stage.open(who, segment_bytes=SEGMENT_BYTES, **how)
            else:
                stage.do(who, _any(stage, chance))

    script.__name__ = f"random {seed}"
    return script


def _is_retired(stage: Stage, rollout: str) -> bool:
    """Whether it may be."""
    return any(state.life is not None and state.life.retired for state in stage.states[rollout])


def _any(stage: Stage, chance: random.Random) -> Operation:
    rollout = chance.choice(MOST)
    number = chance.randrange(6)
    retired = _is_retired(stage, rollout)
    match chance.choices(
        ("put", "group", "other", "begin", "settle", "deliver", "finish", "freeze", "retire", "reset"),
        (10, 3, 2, 4, 4, 3, 1, 4, 6 if rollout in stage.seen else 0, 8 if retired else 2),
    )[0]:
        case "put":
            return put(rollout, number)
        case "group":
            return group(rollout, number, 2)
        case "other":
            return put(rollout, number, other=1)
        case "begin":
            return begin(rollout, number, chance.choice((1, 1, 2)))
        case "settle":
            return settle(rollout, number, chance.choice(("lost", "aborted", "no_generation")))
        case "deliver":
            return deliver(rollout, number, chance.choice(("full", "partly")))
        case "finish":
            return finish(rollout, chance.choice((0.0, 1.0)))
        case "freeze":
            return freeze(rollout)
        case "retire":
            return stage.retire("", rollout)
        case _:
            return reset(rollout)
