"""Whether the facts of a rollout's directory are still those that a mark was made of.

It needs nothing but Python itself, so that a second process that looks at half of a large store is there at once
(`unchanged`): run as a program it reads lines of questions and answers each with a letter.
"""

import contextlib
import os
import sys
from operator import attrgetter

FACTS = attrgetter("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
SEPARATOR = "|"
"""Between names that a mark covers; in no name that the store gives."""
YES, NO = b"1", b"0"

_stat = os.stat


def is_unchanged(rollouts: int, path: str, mark: int, folder: str, names: str) -> bool:
    """Whether the facts below `path`, which is relative to the open directory `rollouts`, are those of `mark`.

    mark: hash of the facts; 0: never. folder: the one directory in it, or empty. names: the paths below `folder` that
    the mark covers, joined by `SEPARATOR`.
    """
    if not mark:
        return False
    try:
        facts: tuple[int, ...] = FACTS(_stat(path, dir_fd=rollouts, follow_symlinks=False))
        if folder:
            path = f"{path}/{folder}"
            facts += FACTS(_stat(path, dir_fd=rollouts, follow_symlinks=False))
        if names:
            for name in names.split(SEPARATOR):
                facts += FACTS(_stat(f"{path}/{name}", dir_fd=rollouts, follow_symlinks=False))
    except OSError:
        return False
    return hash(facts) == mark


def main(directory: str) -> None:
    """Answer the questions on standard input about the rollouts in `directory`."""
    rollouts = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    answers = bytearray()
    for line in sys.stdin.buffer.read().decode("ascii").split("\n")[:-1]:
        path, mark, folder, names = line.split("\t")
        answers += YES if is_unchanged(rollouts, path, int(mark), folder, names) else NO
    with contextlib.suppress(OSError):  # nobody waits for it any more
        sys.stdout.buffer.write(answers)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1])
