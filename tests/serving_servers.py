"""Servers in processes of their own, for tests: each on a free port, and stopped by its own process id."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.fake_engine import DIRECTORY_VARIABLE
from tests.serving_harness import PATIENCE_S

__all__ = ("Server", "engine_server", "proxy_server", "workers_server")

_ROOT = Path(__file__).resolve().parent.parent


class Server:
    """A running server: its port and its process."""

    def __init__(self, arguments: Sequence[str], port: int, environment: Mapping[str, str], log: Path) -> None:
        self.port, self.log = port, log
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKCAP_")}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=_ROOT,
                env={**inherited, "PYTHONPATH": str(_ROOT), **environment},
                stdout=output,
                stderr=output,
            )

    def wait_until_it_serves(self, path: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
                with contextlib.closing(connection):
                    connection.request("GET", path)
                    if connection.getresponse().status == 200:
                        return
            assert self.process.poll() is None, f"the server has ended:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"the server does not answer:\n{self.log.read_text()}"
            time.sleep(0.02)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Until it has ended; its exit status."""
        return self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def _running(server: Server, path: str) -> Iterator[Server]:
    try:
        server.wait_until_it_serves(path)
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _uvicorn(factory: str, port: int, workers: int) -> list[str]:
    arguments = ["-m", "uvicorn", "--factory", factory, "--host", "127.0.0.1", "--port", str(port)]
    return [*arguments, "--workers", str(workers), "--log-level", "warning", "--no-access-log"]


@contextlib.contextmanager
def engine_server(directory: Path, **environment: str) -> Iterator[Server]:
    """The scripted engine alone, as the upstream of a proxy."""
    port = free_port()
    arguments = _uvicorn("tests.fake_engine:from_environment", port, 1)
    given = {DIRECTORY_VARIABLE: str(directory), **environment}
    with _running(Server(arguments, port, given, directory.parent / "engine.log"), "/health") as server:
        yield server


@contextlib.contextmanager
def workers_server(directory: Path, store_dir: Path, workers: int = 2) -> Iterator[Server]:
    """The middleware around the scripted engine, in spawned workers."""
    port = free_port()
    arguments = _uvicorn("tests.serving_workers_app:make", port, workers)
    given = {DIRECTORY_VARIABLE: str(directory), "TOKCAP_DIR": str(store_dir)}
    with _running(Server(arguments, port, given, directory.parent / "workers.log"), "/health") as server:
        yield server


@contextlib.contextmanager
def proxy_server(upstream: int, store_dir: Path, *options: str, up: bool = True) -> Iterator[Server]:
    """`tokcap serve` in front of a port. up: whether something listens there."""
    port = free_port()
    command = "import sys; from tokcap.command import main; sys.exit(main())"
    arguments = ["-c", command, "serve", "--upstream", f"http://127.0.0.1:{upstream}", "--port", str(port)]
    arguments += ["--dir", str(store_dir), "--log-level", "warning", *options]
    log = store_dir.parent / f"proxy-{port}.log"
    with _running(Server(arguments, port, {}, log), "/health" if up else "/tokcap/health") as server:
        yield server
