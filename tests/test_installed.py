"""What a program installs in its own process, and what other processes see of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.memory_store import MemoryState, MemoryStore
from tests.serving_app import report_to
from tokcap.errors import InvalidOptionError
from tokcap.installed import (
    install_token_sink,
    install_token_source,
    installed_token_sink,
    installed_token_source,
    protocol_problem,
)
from tokcap.protocol import TokenSink, TokenSource

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    sink, source = install_token_sink(None), install_token_source(None)
    yield
    install_token_sink(sink)
    install_token_source(source)


def store() -> MemoryStore:
    return MemoryStore(MemoryState())


class WithoutClose:
    async def put(self, entry: object) -> None: ...
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...
    async def freeze(self, rollout_id: str) -> None: ...


class WithTextForPut(MemoryStore):
    put = "not a method"  # type: ignore[assignment]


# ---- in one process


def test_nothing_is_installed_at_first() -> None:
    code = "import tokcap.installed as i; assert i.installed_token_sink() is None is i.installed_token_source()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_is_installed_is_handed_out() -> None:
    sink, source = store(), store()
    install_token_sink(sink)
    install_token_source(source)
    assert installed_token_sink() is sink
    assert installed_token_source() is source


def test_installing_returns_what_was_there_before() -> None:
    first, second = store(), store()
    for install in install_token_sink, install_token_source:
        previous: Any = [install(sink) for sink in (first, second, None, None)]
        assert previous == [None, first, second, None]


def test_none_takes_away_one_and_leaves_the_other() -> None:
    sink, source = store(), store()
    install_token_sink(sink)
    install_token_source(source)
    install_token_sink(None)
    assert (installed_token_sink(), installed_token_source()) == (None, source)
    install_token_sink(sink)
    install_token_source(None)
    assert (installed_token_sink(), installed_token_source()) == (sink, None)


def test_a_sink_that_lacks_a_method_is_refused_with_its_name() -> None:
    before = store()
    install_token_sink(before)
    with pytest.raises(InvalidOptionError, match=r"install_token_sink: .*a WithoutClose that lacks close; TokenSink"):
        install_token_sink(WithoutClose())  # type: ignore[arg-type]
    assert installed_token_sink() is before


def test_a_source_that_lacks_methods_is_refused_with_their_names() -> None:
    with pytest.raises(InvalidOptionError, match=r"install_token_source: .*lacks close, retire; TokenSource"):
        install_token_source(WithoutClose())  # type: ignore[arg-type]
    assert installed_token_source() is None


def test_a_method_that_can_t_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="in place of put that can't be called"):
        install_token_sink(WithTextForPut(MemoryState()))  # type: ignore[arg-type]


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="is the class MemoryStore, expected an instance"):
        install_token_sink(MemoryStore)  # type: ignore[arg-type]


def test_the_methods_that_are_checked_are_those_of_the_protocols() -> None:
    class Empty:
        pass

    assert protocol_problem(Empty(), TokenSink) == "is a Empty that lacks close, mark_incomplete, put"
    assert protocol_problem(Empty(), TokenSource) == "is a Empty that lacks close, freeze, retire"
    assert protocol_problem(store(), TokenSink) == protocol_problem(store(), TokenSource) == ""


# ---- in other processes


def configuration(directory: Path) -> Path:
    path = directory / "run.json"
    block = {"enabled": True, "sink": "tests.serving_app:CountingSink", "sink_kwargs": {"label": "ours"}}
    path.write_text(json.dumps({"token_id_capture": block}))
    return path


def test_a_spawned_process_has_nothing_installed_and_builds_the_configured_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKCAP_CONFIG", str(configuration(tmp_path)))
    install_token_sink(store())
    install_token_source(store())
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=report_to, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the process says nothing"
        seen = ours.recv()
        assert seen["pid"] == process.pid != os.getpid()
        assert not seen["installed"]
        assert seen["sinks"] == [["ours", process.pid]] * 2
        assert seen["made"] == 1
    finally:
        ours.close()
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def test_a_forked_process_has_what_was_installed_before() -> None:
    sink = store()
    install_token_sink(sink)
    child = os.fork()
    if child == 0:
        os._exit(0 if installed_token_sink() is sink else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_uvicorn_workers_have_nothing_installed_and_build_the_configured_sink(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "TOKCAP_CONFIG": str(configuration(tmp_path)), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TOKCAP_DIR", None)
    code = f"from tests.serving_app import launch; launch({port})"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, start_new_session=True)
    try:
        seen = reports(port, launcher, workers=2)
    finally:
        stop(launcher)
    assert len(seen) == 2
    assert launcher.pid not in seen
    for pid, said in seen.items():
        assert said["parent"] == launcher.pid
        assert not said["installed"]
        assert said["sinks"] == [["ours", pid]] * 2
        assert said["made"] == 1


def reports(port: int, launcher: subprocess.Popen[bytes], workers: int) -> dict[int, dict[str, Any]]:
    """What each worker says, by process id; asks until all have answered."""
    seen: dict[int, dict[str, Any]] = {}
    until = time.monotonic() + PATIENCE_S
    while len(seen) < workers and time.monotonic() < until:
        assert launcher.poll() is None, "the server ended by itself"
        connections = []
        # Several at once, so that no single worker takes them all.
        with contextlib.suppress(OSError, http.client.HTTPException):
            for _ in range(8):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connections.append(connection)
                connection.request("GET", "/")
            for connection in connections:
                said = json.loads(connection.getresponse().read())
                seen[said["pid"]] = said
        for connection in connections:
            connection.close()
        if len(seen) < workers:
            time.sleep(0.05)
    return seen


def stop(launcher: subprocess.Popen[bytes]) -> None:
    """The launcher stops its workers; if it doesn't, all of its own session is killed."""
    launcher.send_signal(signal.SIGTERM)
    try:
        launcher.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
