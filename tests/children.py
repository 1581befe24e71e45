"""Child processes for tests: forked from a process that has imported everything and made no thread."""

from __future__ import annotations

import array
import contextlib
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ("Channel", "Child", "Nursery", "fast_directory", "nursery")

Channel = Connection
"""What a child and its test send each other: any object that can be pickled, in order."""

_PATIENCE_S = 60.0
"""After this long without a word a child counts as hung; generous, because no test is about speed."""

_ROOT = Path(__file__).resolve().parent.parent


class ChildError(AssertionError):
    """A child raised; the message is its traceback."""


class Child:
    """A child as its test sees it: a channel, and a descriptor that can't be confused with another process."""

    def __init__(self, channel: Channel, pidfd: int, pid: int) -> None:
        self.channel, self.pidfd, self.pid = channel, pidfd, pid

    def send(self, message: object) -> None:
        self.channel.send(message)

    def receive(self, within_s: float = _PATIENCE_S) -> Any:
        """The next message. Raises `EOFError` if the child is gone, `ChildError` if it raised."""
        if not self.channel.poll(within_s):
            raise AssertionError(f"child {self.pid} said nothing for {within_s:g} s")
        message = self.channel.recv()
        if isinstance(message, _Failure):
            raise ChildError(f"in child {self.pid}:\n{message.text}")
        return message

    def rest(self) -> list[Any]:
        """Everything that it said until it ended."""
        messages = []
        while True:
            try:
                messages.append(self.receive())
            except (EOFError, ConnectionResetError):
                return messages

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, within_s: float = _PATIENCE_S) -> None:
        """Until it is gone, and with it its locks."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(within_s * 1000):
            raise AssertionError(f"child {self.pid} still runs after {within_s:g} s")

    def kill(self) -> None:
        """`kill -9`, and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> list[Any]:
        """What it had left to say; it ends by itself."""
        messages = self.rest()
        self.wait()
        return messages

    def close(self) -> None:
        if self.pidfd >= 0:
            self.kill()
            self.channel.close()
            os.close(self.pidfd)
            self.pidfd = -1


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


class Nursery:
    """Starts children. Closing it kills those that still run."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", f"from tests.children import _serve; _serve({theirs.fileno()})"],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
            )
        self._children: list[Child] = []

    def start(self, function: Callable[..., None], *arguments: object) -> Child:
        """Run `function(channel, *arguments)` in a child of its own; it is found by its name."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = pickle.dumps((function.__module__, function.__qualname__, arguments))
            socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], [theirs.fileno()])
            self._socket.sendall(request)
        answer, descriptors, _, _ = socket.recv_fds(self._socket, 8, 1)
        if not answer:
            raise AssertionError("the process that starts children is gone")
        child = Child(Channel(ours.detach()), descriptors[0], int.from_bytes(answer, "little"))
        self._children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """It is over, and nobody asks for it any more."""
        child.close()
        self._children.remove(child)

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(OSError):
                child.close()
        self._socket.close()
        self._server.wait(_PATIENCE_S)


def nursery() -> Iterator[Nursery]:
    """For a fixture of a test module."""
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def fast_directory() -> Iterator[Path]:
    """For a fixture: a directory in memory if there is such a file system, so that tests don't wait for a disk."""
    memory = "/dev/shm"
    place = memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tokcap-test-", dir=place, ignore_cleanup_errors=True) as path:
        yield Path(path)


# ---- in the process that starts children


def _serve(number: int) -> None:
    """Fork a child for each request, until the test's end of the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the kernel may clear them away
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    requests = socket.socket(fileno=number)
    while True:
        size, descriptors = _request_size(requests)
        if not size:
            return
        module, name, arguments = pickle.loads(_exactly(requests, size))
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        may_run, go = os.pipe()
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.close(go)
            os.read(may_run, 1)  # not before its descriptor is open: it could be over and its number used again
            os.close(may_run)
            _run(function, Channel(descriptors[0]), arguments)
        pidfd = os.pidfd_open(pid)
        for fd in (*descriptors, may_run, go):
            os.close(fd)
        requests.sendmsg(
            [pid.to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
        )
        os.close(pidfd)


def _request_size(requests: socket.socket) -> tuple[int, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(requests, 8, 1)
    return int.from_bytes(head, "little"), list(descriptors)


def _exactly(requests: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += requests.recv(size - len(data))
    return data


def _run(function: Callable[..., None], channel: Channel, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = 0
    try:
        function(channel, *arguments)
    except BaseException:
        status = 1
        with contextlib.suppress(OSError):
            channel.send(_Failure(traceback.format_exc()))
    os._exit(status)
