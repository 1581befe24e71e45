"""Many rollouts looked at by several processes. Each is a plain `python` that is told ids and answers with rows."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from ..store import FileStore
from .cache import Kept, decode_rows, encode_rows
from .keeping import kept_of

__all__ = ("looked_at", "main")

_AT_ONCE = 100
"""Ids that a process is told at a time."""

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[list[str], bool]).decode


def looked_at(
    store: FileStore, ids: Sequence[str], workers: int, whole: bool
) -> Iterator[tuple[list[str], list[Kept]]]:
    """Look at `ids`, some at a time, in no order: the ids, and what was found; nothing is found of what is not there.

    What a process that dies leaves undone is done here.
    """
    parts = [list(ids[first : first + _AT_ONCE]) for first in range(0, len(ids), _AT_ONCE)]
    if workers > 1 and len(parts) > 1:
        parts.reverse()  # they are taken off its end
        yield from _by_workers(store.directory, parts, workers, whole)
    for part in parts:  # what is left
        found = [kept_of(store, rollout_id, whole) for rollout_id in part]
        yield part, [kept for kept in found if kept is not None]


def _by_workers(
    directory: str, parts: list[list[str]], workers: int, whole: bool
) -> Iterator[tuple[list[str], list[Kept]]]:
    """Take parts off the end of `parts` until none is left, or no worker is."""
    done: queue.Queue[tuple[list[str], list[Kept]] | None] = queue.Queue(4 * workers)
    processes: list[subprocess.Popen[bytes]] = []
    stop = threading.Event()
    threads = []
    try:
        for _ in range(min(workers, len(parts))):
            try:
                process = _started(directory)
            except OSError:  # no more processes: those that there are have to do
                break
            processes.append(process)
            thread = threading.Thread(target=_serve, args=(process, parts, whole, done, stop), daemon=True)
            threads.append(thread)
            thread.start()
        running = len(threads)
        while running:
            answer = done.get()
            if answer is None:
                running -= 1
            else:
                yield answer
    finally:
        stop.set()
        for process in processes:
            process.kill()
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(queue.Empty):
                done.get(timeout=0.01)
        for process in processes:
            process.communicate()


def _started(directory: str) -> subprocess.Popen[bytes]:
    # As the modules are found here, so there; and nothing is imported from where the process happens to run.
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1])"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _serve(
    process: subprocess.Popen[bytes],
    parts: list[list[str]],
    whole: bool,
    done: queue.Queue[tuple[list[str], list[Kept]] | None],
    stop: threading.Event,
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    while not stop.is_set():
        try:
            part = parts.pop()
        except IndexError:
            break
        try:
            _send(process.stdin, _encode((part, whole)))
            answer = _receive(process.stdout)
            found = None if answer is None else list(decode_rows(answer))
        except (OSError, ValueError, IndexError, msgspec.DecodeError):
            found = None
        if found is None:
            parts.append(part)
            break
        done.put((part, found))
    done.put(None)


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """What was sent; None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    data = pipe.read(length)
    return data if len(data) == length else None


def main(directory: str) -> None:
    """Answer until nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    store = FileStore(directory, read_only=True)
    pipe_in, pipe_out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (asked := _receive(pipe_in)) is not None:
        ids, whole = _decode(asked)
        found = [kept_of(store, rollout_id, whole) for rollout_id in ids]
        try:
            _send(pipe_out, encode_rows([kept for kept in found if kept is not None]))
        except BrokenPipeError:
            return
