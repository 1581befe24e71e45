"""One vLLM server with the middleware, started and stopped by its own process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .wire import MODEL, ask

__all__ = ("Server", "serving")

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "8"),
    "--enable-scale-out",  # the routes that render
    *("--middleware", "tokcap.asgi.CaptureMiddleware"),
)
_START_S, _STOP_S = 300.0, 60.0


class Server:
    """A server that answers."""

    def __init__(self, base: str, process: subprocess.Popen[bytes]) -> None:
        self.base, self.process = base, process

    def writers(self, store: Path) -> set[int]:
        """The ids of the processes that have captured calls: each holds a file of its own in the store open."""
        found = set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # of another user, or gone
                if link.readlink().parent == store / "writers":
                    found.add(int(link.parts[2]))
        return found


@contextmanager
def serving(model: Path, directory: Path, options: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """Start a server whose log goes to `directory`; it ends with the block. Raises `RuntimeError` if it can't start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    vllm = str(Path(sys.executable).parent / "vllm")
    place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    log = directory / "server.log"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TOKCAP_", "VLLM_"))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [vllm, "serve", str(model), *place, *_OPTIONS, *options],
            env={**inherited, **_ENVIRONMENT, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            base = f"http://127.0.0.1:{port}"
            _wait(process, base, log)
            yield Server(base, process)
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if ask(base, "/health", None, method="GET").status == 200:
                return
        except OSError:  # not there yet
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
