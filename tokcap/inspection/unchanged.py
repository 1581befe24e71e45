"""Which rollouts of a large store are what they were: half of them are looked at by a second process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

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
        with _asked(directory, questions[:half]) as answered:
            rest = [is_unchanged(rollouts, *question) for question in questions[half:]]
            first = answered()
        if len(first) != half:
            first = [is_unchanged(rollouts, *question) for question in questions[:half]]
        return first + rest
    finally:
        os.close(rollouts)


def _is_worth_it(questions: Sequence[Question]) -> bool:
    return len(questions) >= _WORTH_A_PROCESS and len(os.sched_getaffinity(0)) > 1 and bool(sys.executable)


@contextlib.contextmanager
def _asked(directory: str, questions: Sequence[Question]) -> Iterator[Callable[[], list[bool]]]:
    """Ask another process; what waits for its answers, of which there are none if it can't be asked."""
    lines = "".join([f"{path}\t{mark}\t{folder}\t{names}\n" for path, mark, folder, names in questions])
    # Names that a store doesn't give are nobody's but ours.
    is_plain = lines.isascii() and lines.count("\n") == len(questions) and lines.count("\t") == 3 * len(questions)
    with contextlib.ExitStack() as stack:
        yield _told(stack, directory, lines.encode()) if questions and is_plain else list


def _told(stack: contextlib.ExitStack, directory: str, lines: bytes) -> Callable[[], list[bool]]:
    """Start the process; it ends with `stack`, at the latest.

    It is told by a file in memory and answers in another one: what a process has that is forked meanwhile can't keep
    these open, as it could a pipe, and nobody waits for somebody who reads no more.
    """
    try:
        asked, answers = _memory(stack), _memory(stack)
        _write(asked, lines)
        os.lseek(asked, 0, os.SEEK_SET)
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", marks.__file__, directory],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, asked, 0),
                (os.POSIX_SPAWN_DUP2, answers, 1),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),  # if it can't, we can
            ],
            setsigmask=[signal.SIGINT],  # who interrupts us means us
        )
    except OSError:
        return list
    stack.callback(_end, process)

    def answered() -> list[bool]:
        with contextlib.suppress(ChildProcessError):  # somebody, or the kernel, collects our children
            os.waitpid(process, 0)
        return [letter == YES[0] for letter in os.pread(answers, len(lines), 0)]

    return answered


def _memory(stack: contextlib.ExitStack) -> int:
    fd = os.memfd_create("tokcap")
    stack.callback(os.close, fd)
    return fd


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _end(process: int) -> None:
    with contextlib.suppress(OSError):
        if os.waitpid(process, os.WNOHANG) == (0, 0):  # or its number may be somebody else's by now
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
