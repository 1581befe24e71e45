"""Several server processes on one socket, and the process that watches over them.

Workers are spawned, so each makes its own sink. A worker stops gracefully on SIGTERM, on SIGINT, and when its parent is
gone, however often it is told: a terminal and a service manager signal every process of a group, and the parent passes
its signal on as well. Only the parent counts signals; the second makes it kill them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from ..asgi.metrics import forget_dead_processes
from ..errors import TokcapError
from .app import make_app
from .options import ServeOptions
from .server import FAILED_TO_START, SAME_SIGNAL_S, ProxyServer, announce, listening_socket, server_of

__all__ = ("supervise",)

logger = logging.getLogger("tokcap.serve")

_METRICS = "PROMETHEUS_MULTIPROC_DIR"
_PAUSE_S = 1.0
"""Before a worker that died is replaced."""


def supervise(options: ServeOptions) -> int:
    """Run the workers until a signal; returns the exit status. Raises `TokcapError` if the socket can't be had."""
    logging.basicConfig(format="%(levelname)s:     %(message)s")
    logger.setLevel("DEBUG" if options.log_level == "trace" else options.log_level.upper())
    with listening_socket(options) as listening, _metrics_directory():
        announce(options, listening)
        return _Supervisor(options, listening).run()


class _Worker:
    """One process as its parent sees it."""

    def __init__(self, options: ServeOptions, listening: socket.socket) -> None:
        context = multiprocessing.get_context("spawn")
        self._news, theirs = context.Pipe(duplex=False)
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(
            target=_work, args=(options, listening, theirs, lifeline), name="tokcap-worker"
        )
        self.ready = False
        """Whether it has served."""
        self.process.start()
        theirs.close()
        lifeline.close()

    @property
    def waited_for(self) -> list[int | Connection]:
        """What becomes ready when there is news of it."""
        return [self.process.sentinel] if self.ready else [self.process.sentinel, self._news]

    def look(self) -> bool:
        """Take its news. Returns whether it has ended."""
        if not self.ready and self._news.poll():
            with suppress(EOFError):
                self.ready = bool(self._news.recv())
        return not self.process.is_alive()

    def close(self) -> None:
        """Of one that has ended."""
        self.process.join()
        self._news.close()
        self._lifeline.close()


class _Supervisor:
    def __init__(self, options: ServeOptions, listening: socket.socket) -> None:
        self._options = options
        self._listening = listening
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._asked = False
        self._status = 0
        self._stopping = False
        self._served = False
        self._start_at = 0.0

    def run(self) -> int:
        with _heard(self._signals) as wake:
            while True:
                self._start_missing()
                if self._stopping and not self._workers:
                    return self._status
                ready = wait(
                    [wake, *(each for worker in self._workers for each in worker.waited_for)], self._patience()
                )
                if wake in ready:
                    wake.recv(4096)
                if self._asked and self._signals:
                    return self._kill()
                if self._signals:
                    self._asked = True
                    time.sleep(SAME_SIGNAL_S)  # for those that are the same
                    self._signals.clear()
                    self._stop("asked to stop")
                for worker in list(self._workers):
                    ended = worker.look()
                    self._served = self._served or worker.ready
                    if ended:
                        self._ended(worker)

    def _start_missing(self) -> None:
        while (
            not self._stopping
            and len(self._workers) < self._options.workers
            and (not self._served or time.monotonic() >= self._start_at)
        ):
            self._workers.append(_Worker(self._options, self._listening))

    def _patience(self) -> float | None:
        """Until a worker may be replaced; None: until there is news."""
        if self._stopping or len(self._workers) == self._options.workers:
            return None
        return max(0.0, self._start_at - time.monotonic())

    def _ended(self, worker: _Worker) -> None:
        worker.close()
        self._workers.remove(worker)
        if self._stopping:
            return
        directory = os.environ.get(_METRICS)
        if directory:
            forget_dead_processes(directory)
        code = worker.process.exitcode
        if not self._served:
            self._status = FAILED_TO_START
            self._stop(f"worker {worker.process.pid} failed to start with status {code}")
        else:
            logger.error("worker %s ended with status %s and is replaced", worker.process.pid, code)
            self._start_at = time.monotonic() + _PAUSE_S

    def _stop(self, why: str) -> None:
        if not self._stopping:
            self._stopping = True
            logger.info("%s: %d workers finish their open calls", why, len(self._workers))
            self._listening.close()  # else connections would be accepted here, and wait for nobody
            for worker in self._workers:
                worker.process.terminate()

    def _kill(self) -> int:
        logger.warning("stopped at once; calls that were open stay open")
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()
        return 128 + self._signals[-1]


def _work(options: ServeOptions, listening: socket.socket, news: Connection, lifeline: Connection) -> None:
    """A worker process: serve on the socket until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server is there; before, there is nothing to finish
    try:
        server = server_of(options, make_app(), alone=False)
    except TokcapError as error:
        logging.basicConfig(format="%(levelname)s:     %(message)s")
        logger.error("a worker can't start: %s", error)
        raise SystemExit(FAILED_TO_START) from None
    threading.Thread(target=_tell, args=(server, news), daemon=True).start()
    threading.Thread(target=_follow, args=(server, lifeline), daemon=True).start()
    server.run([listening])
    raise SystemExit(0 if server.started else FAILED_TO_START)


def _tell(server: ProxyServer, news: Connection) -> None:
    """Let the parent know when the server has started."""
    while not server.started:
        time.sleep(0.02)
    with suppress(OSError):
        news.send(True)


def _follow(server: ProxyServer, lifeline: Connection) -> None:
    """Stop when the parent is gone: nobody would stop this process any more."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    server.should_exit = True


@contextmanager
def _heard(signals: list[int]) -> Iterator[socket.socket]:
    """Note signals in `signals`, and wake whoever waits for the socket."""
    awake, wake = socket.socketpair()

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    with awake, wake:
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield awake
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)


@contextmanager
def _metrics_directory() -> Iterator[None]:
    """Where the workers put what they count, so that each can show the sum; one that is set is left as it is."""
    if os.environ.get(_METRICS):
        yield
        return
    directory = tempfile.mkdtemp(prefix="tokcap-metrics-")
    os.environ[_METRICS] = directory
    try:
        yield
    finally:
        del os.environ[_METRICS]
        shutil.rmtree(directory, ignore_errors=True)
