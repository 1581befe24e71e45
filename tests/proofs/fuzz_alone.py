"""Searching without atheris: seeds, kept inputs, and what chance makes of them, in a forked child with a watchdog."""

from __future__ import annotations

import os
import pickle
import select
import signal
import traceback
import warnings
from collections.abc import Callable

from .fuzz_bombs import BOMBS, exploded, forked
from .fuzz_input import made_up
from .fuzz_mutants import MUTANTS
from .fuzz_targets import TARGETS, corpus_of

__all__ = ("first_problem", "in_a_child", "noticed")

_PATIENCE_S = 120
_FAILED = "the child failed"


def first_problem(name: str, seed: int, count: int) -> tuple[bytes, str] | None:
    """The first input of a target that lets something out, and what; None if none does."""
    target = TARGETS[name]
    kept = [path.read_bytes() for path in corpus_of(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in made_up(target, kept, seed, count * target.weight):
            try:
                target.run(data)
            except Exception as error:
                return data, "".join(traceback.format_exception(error)[-3:])
    return None


def noticed(mutant: str, seed: int = 1, count: int = 1000) -> str:
    """What is seen of a mutant; empty if nothing is."""
    found_by = MUTANTS[mutant].found_by
    bombs = [bomb for bomb in BOMBS if bomb.name == found_by]

    def search() -> str:
        MUTANTS[mutant].apply()
        if bombs:
            return exploded(bombs[0])
        found = first_problem(found_by, seed, count)
        return "" if found is None else f"{found[0].hex()}: {found[1]}"

    seen = in_a_child(search)
    if seen.startswith(_FAILED):
        raise RuntimeError(seen)
    return seen


def in_a_child(function: Callable[[], str]) -> str:
    """What it returns, from a forked child: what it changes is gone with it. One that hangs is ended."""
    reading, writing = os.pipe()
    pid = forked()
    if pid == 0:
        os.close(reading)
        try:
            told = function()
        except BaseException:
            told = f"{_FAILED}: {traceback.format_exc()}"
        try:
            with open(writing, "wb") as pipe:
                pickle.dump(told, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        if not select.select([pipe], [], [], _PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        data = pipe.read()
    os.waitpid(pid, 0)
    return str(pickle.loads(data)) if data else f"not over after {_PATIENCE_S} s, or ended the process"
