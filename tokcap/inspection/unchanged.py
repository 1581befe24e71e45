"""Which rollouts of a large store are what they were: half of them are looked at by a second process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import IO

from . import marks
from .marks import YES, is_unchanged

__all__ = ("Question", "are_unchanged")

Question = tuple[str, int, str, str]
"""The arguments of `is_unchanged` but for the first."""

_WORTH_A_PROCESS = 20_000
"""Questions from which on it pays: each takes 10 us, the process 20 ms."""


def are_unchanged(directory: str, questions: Sequence[Question]) -> list[bool]:
    """`is_unchanged` of each question about the rollouts in `directory`. Raises `OSError` if that can't be opened."""
    rollouts = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        half = len(questions) // 2 if _is_worth_it(questions) else 0
        with _asked(directory, questions[:half]) as answers:
            rest = [is_unchanged(rollouts, *question) for question in questions[half:]]
            first = _read(answers, half)
        if first is None:
            first = [is_unchanged(rollouts, *question) for question in questions[:half]]
        return first + rest
    finally:
        os.close(rollouts)


def _is_worth_it(questions: Sequence[Question]) -> bool:
    return len(questions) >= _WORTH_A_PROCESS and len(os.sched_getaffinity(0)) > 1 and bool(sys.executable)


@contextlib.contextmanager
def _asked(directory: str, questions: Sequence[Question]) -> Iterator[IO[bytes] | None]:
    """Ask another process; where its answers will come from, or None if it can't be asked."""
    lines = "".join([f"{path}\t{mark}\t{folder}\t{names}\n" for path, mark, folder, names in questions])
    # Names that a store doesn't give are nobody's but ours.
    is_plain = lines.isascii() and lines.count("\n") == len(questions) and lines.count("\t") == 3 * len(questions)
    with contextlib.ExitStack() as stack:
        yield _told(stack, directory, lines.encode()) if questions and is_plain else None


def _told(stack: contextlib.ExitStack, directory: str, lines: bytes) -> IO[bytes] | None:
    """Start the process and tell it; it ends with `stack`, at the latest."""
    try:
        hearing, asking = _pipe(stack)
        answers, answering = _pipe(stack)
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", marks.__file__, directory],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, hearing.fileno(), 0), (os.POSIX_SPAWN_DUP2, answering.fileno(), 1)],
            setsigmask=[signal.SIGINT],  # who interrupts us means us
        )
        stack.callback(_end, process)
        hearing.close()
        answering.close()  # or there would be no end of the answers
        _write(asking, lines)
        asking.close()
    except OSError:
        return None
    return answers


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    read, written = os.pipe()
    return stack.enter_context(open(read, "rb")), stack.enter_context(open(written, "wb", buffering=0))


def _write(pipe: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _end(process: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGKILL)
    with contextlib.suppress(OSError):  # who lets the kernel collect its children
        os.waitpid(process, 0)


def _read(answers: IO[bytes] | None, count: int) -> list[bool] | None:
    """The answers that were given; None if there is not one for each question."""
    given = b"" if answers is None else answers.read()
    return [letter == YES[0] for letter in given] if len(given) == count else None
