"""The command `tokcap`: its options, the server processes that it starts, and how they stop."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, Notebook
from tests.fake_script import Script, choice
from tests.proxy_harness import PATIENCE_S, Answer, Background, ask, client, in_time, is_closed, read_answer, serving
from tokcap import FileStore
from tokcap.cli.group import VERBS
from tokcap.command import main
from tokcap.version import __version__

ROOT = Path(__file__).parent.parent
CHAT = "/ng-rollout/r-1/training-token-capture/v1/chat/completions"
BODY = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
STREAM = BODY[:-1] + b', "stream": true}'


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


class Proxy:
    """A `tokcap serve` in front of a scripted engine."""

    def __init__(self, url: str, notes: Notebook, directory: Path) -> None:
        self.url, self.notes, self.store = url, notes, directory / "store"
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self.log = ""
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str, open_files: int = 4096, **variables: str) -> None:
        """Until it serves. open_files: the soft limit that it finds."""
        left_out = ("TOKCAP_CONFIG", "TOKCAP_API_KEY", "PROMETHEUS_MULTIPROC_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self.process = subprocess.Popen(
            [
                *(
                    "/bin/sh",
                    "-c",
                    f'ulimit -Sn {open_files} && exec "$0" "$@"',
                    sys.executable,
                    "-m",
                    "tokcap.command",
                ),
                *("serve", "--upstream", self.url, "--port", "0", *options),
            ],
            cwd=ROOT,
            env={**environment, "TOKCAP_DIR": str(self.store), "TMPDIR": str(self.temporary), **variables},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        found = None
        while found is None:
            assert self._read(), f"it ended with status {self.process.wait(PATIENCE_S)}: {self.log}"
            found = re.search(r"tokcap serves http://127\.0\.0\.1:(\d+), for ", self.log)
        self.port = int(found[1])

    def _read(self) -> str:
        assert self.process is not None
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.log += line
        return line

    def read_until(self, words: str) -> None:
        while words not in self.log:
            assert self._read(), f"it ended without saying {words!r}: {self.log}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit status, once it and all its workers are gone."""
        assert self.process is not None
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def workers(self) -> list[int]:
        """The processes that serve, by the identity that they show to the engine of their parent."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {}
        for child in children:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
                commands[child] = Path(f"/proc/{child}/cmdline").read_bytes()
        return [int(child) for child, command in commands.items() if b"spawn_main" in command]

    def outcomes(self) -> list[str]:
        with FileStore(self.store, read_only=True) as store:
            return sorted(call.outcome for call in store.read_now("r-1").calls)

    def counted(self, series: str) -> float:
        text = ask(self.port, "/tokcap/metrics").body.decode()
        (line,) = [line for line in text.splitlines() if line.startswith(series + " ")]
        return float(line.removeprefix(series))

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own: it and its workers
            self.process.wait(PATIENCE_S)
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.fixture
def proxy(background: Background, tmp_path: Path) -> Iterator[Proxy]:
    notes = Notebook(tmp_path / "notes")
    with serving(background, FakeEngine(notes)) as port:
        made = Proxy(f"http://127.0.0.1:{port}", notes, tmp_path)
        try:
            yield made
        finally:
            made.close()


def send_call(connection: socket.socket, label: str, body: bytes = BODY, **script: Any) -> None:
    name, value = Script(label=label, **script).header()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


@contextlib.contextmanager
def open_call(proxy: Proxy, label: str = "open", body: bytes = BODY, **script: Any) -> Iterator[socket.socket]:
    """A call that the engine has, and does not answer before it is told `open-answer`."""
    with client(proxy.port) as connection:
        send_call(connection, label, body, **(script or {"waits": ["answer"]}))
        in_time(lambda: proxy.notes.read(label), "the call at the engine")
        yield connection


def answered(connection: socket.socket) -> Answer:
    return read_answer(connection, "POST")


def refuses(port: int) -> bool:
    try:
        with client(port):
            return False
    except ConnectionRefusedError:
        return True


# ---- stopping


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_lets_open_calls_finish_and_takes_no_new_ones(proxy: Proxy, number: int, workers: str) -> None:
    proxy.start("--workers", workers)
    with open_call(proxy) as first, open_call(proxy, "stream", STREAM, waits=["2"]) as second:
        proxy.signal(number)
        in_time(lambda: refuses(proxy.port), "the end of new calls")
        proxy.notes.tell("open-answer")
        proxy.notes.tell("stream-2")
        assert answered(first).status == 200
        stream = answered(second)
        assert (stream.status, stream.whole, stream.body.endswith(b"data: [DONE]\n\n")) == (200, True, True)
    assert proxy.ended() == 0
    assert proxy.outcomes() == ["recorded", "recorded"]
    assert list(proxy.temporary.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
def test_second_signal_stops_at_once_and_leaves_open_intents(
    proxy: Proxy, numbers: tuple[int, int], workers: str
) -> None:
    proxy.start("--workers", workers)
    with open_call(proxy) as first, open_call(proxy, "stream", STREAM, waits=["2"]) as second:
        proxy.signal(numbers[0])
        in_time(lambda: refuses(proxy.port), "the end of new calls")
        proxy.signal(numbers[1])
        assert proxy.ended() == 128 + numbers[1]
        assert is_closed(first)
        assert is_closed(second)
    assert proxy.outcomes() == ["open", "open"]
    assert list(proxy.temporary.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_signals_that_come_together_are_one(proxy: Proxy, workers: str) -> None:
    proxy.start("--workers", workers)
    with open_call(proxy) as connection:
        proxy.signal(signal.SIGTERM)
        proxy.signal(signal.SIGINT)
        in_time(lambda: refuses(proxy.port), "the end of new calls")
        proxy.notes.tell("open-answer")
        assert answered(connection).status == 200
    assert proxy.ended() == 0


def test_signal_to_the_whole_group_counts_once(proxy: Proxy) -> None:
    proxy.start("--workers", "2")
    proxy.read_until("Application startup complete")
    with open_call(proxy) as connection:
        assert proxy.process is not None
        for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal does it, then for workers once more
            for worker in proxy.workers():
                os.kill(worker, number)
        proxy.signal(signal.SIGINT)
        in_time(lambda: refuses(proxy.port), "the end of new calls")
        proxy.notes.tell("open-answer")
        assert answered(connection).status == 200
    assert proxy.ended() == 0
    assert proxy.outcomes() == ["recorded"]


def test_calls_that_take_longer_than_the_graceful_timeout_are_aborted(proxy: Proxy) -> None:
    proxy.start("--graceful-timeout", "0.3")
    with open_call(proxy) as connection:
        proxy.signal(signal.SIGTERM)
        assert proxy.ended() == 0
        assert is_closed(connection)
    assert proxy.outcomes() == ["aborted"]


def test_workers_end_with_their_parent_and_finish_their_calls(proxy: Proxy) -> None:
    proxy.start("--workers", "2")
    with open_call(proxy) as connection:
        proxy.signal(signal.SIGKILL)
        in_time(lambda: refuses(proxy.port), "the end of new calls")
        proxy.notes.tell("open-answer")
        assert answered(connection).status == 200
    assert proxy.ended() == -signal.SIGKILL
    assert proxy.outcomes() == ["recorded"]


# ---- workers


def test_workers_count_together_and_one_that_dies_is_replaced(proxy: Proxy) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed, and counts what is counted")
    proxy.start("--workers", "2")
    in_time(lambda: len(proxy.workers()) == 2, "two workers")
    for number in range(8):
        name, value = Script(label=f"call-{number}").header()
        assert ask(proxy.port, CHAT, "POST", {name: value}, BODY).status == 200
    recorded = 'tokcap_calls_total{outcome="recorded"}'
    in_time(lambda: proxy.counted(recorded) == 8, "eight calls")
    assert proxy.counted('tokcap_tokens_total{kind="sampled"}') == 32
    with open_call(proxy) as connection:
        in_time(lambda: proxy.counted("tokcap_open_calls") == 1, "an open call")
        before = proxy.workers()
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        assert is_closed(connection)
    in_time(lambda: len(set(proxy.workers()) - set(before)) == 2, "two new workers")
    # What was counted stays; what died has no open calls, though its intent tells of one.
    in_time(lambda: proxy.counted("tokcap_open_calls") == 0, "the end of the open call")
    assert proxy.counted(recorded) == 8
    assert proxy.outcomes() == ["open", *["recorded"] * 8]
    proxy.signal(signal.SIGTERM)
    assert proxy.ended() == 0
    assert list(proxy.temporary.iterdir()) == []


def test_directory_of_metrics_that_is_given_is_left_as_it_is(proxy: Proxy, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed, and writes there")
    given = tmp_path / "metrics"
    given.mkdir()
    proxy.start("--workers", "2", PROMETHEUS_MULTIPROC_DIR=str(given))
    in_time(lambda: ask(proxy.port, "/tokcap/health").status == 200, "an answer")
    proxy.signal(signal.SIGTERM)
    assert proxy.ended() == 0
    assert list(given.glob("*.db"))


def test_workers_that_can_not_start_end_the_command(proxy: Proxy, tmp_path: Path) -> None:
    configuration = tmp_path / "run.json"
    configuration.write_text('{"token_id_capture": {"enabled": true, "sink": "no.such.module:Sink"}}')
    proxy.start("--workers", "2", "--config", str(configuration), TOKCAP_DIR="")
    assert proxy.ended() == 3
    assert "no.such.module" in proxy.log
    assert "failed to start" in proxy.log


def test_more_calls_are_open_at_a_time_than_files_by_default(proxy: Proxy) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("the hard limit of open files is too low to be raised to")
    proxy.start(open_files=256)
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(client(proxy.port)) for _ in range(200)]
        for call in calls:
            send_call(call, "many", waits=["answer"])
        in_time(lambda: len(proxy.notes.read("many")) == 200, "two hundred calls at the engine")
        proxy.notes.tell("many-answer")
        assert {answered(call).status for call in calls} == {200}
    assert proxy.outcomes() == ["recorded"] * 200


# ---- options


def test_key_in_the_environment_is_checked(proxy: Proxy) -> None:
    proxy.start(TOKCAP_API_KEY="one two")
    assert ask(proxy.port, CHAT, "POST", {"authorization": "Bearer three"}, BODY).status == 401
    assert ask(proxy.port, CHAT, "POST", {"authorization": "Bearer two"}, BODY).status == 200
    assert "two" not in proxy.log


def test_engine_and_store_can_be_given(proxy: Proxy, tmp_path: Path) -> None:
    store = tmp_path / "other"
    proxy.start("--engine", "vllm", "--engine-version", "0.11.2", "--dir", str(store), TOKCAP_DIR="")
    assert ask(proxy.port, "/tokcap/health").json["engine_version"] == "0.11.2"
    name, value = Script(choices=[choice(7000, 2)]).header()
    assert ask(proxy.port, CHAT, "POST", {name: value}, BODY).status == 200
    with FileStore(store, read_only=True) as opened:
        (entry,) = opened.read_now("r-1").entries
    assert entry.extra["engine"] == {"name": "vllm", "version": "0.11.2"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what the environment says of capture, and with what the command sets taken back."""
    for name in ("DIR", "CONFIG", "UPSTREAM", "ENGINE", "ENGINE_VERSION", "API_KEY", "TIMEOUT"):
        monkeypatch.setenv(f"TOKCAP_{name}", "")
    return monkeypatch


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of the command, and what it says."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    said = capsys.readouterr()
    return status, said.out + said.err


def test_port_that_is_taken_is_said(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("serve", "--upstream", "http://127.0.0.1:9", "--dir", str(tmp_path / "store"), "--port", port)
        status, said = run(capsys, *options)
    assert status == 2
    assert f"can't listen on 127.0.0.1 port {port}: Address already in use" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--upstream", "http://127.0.0.1:9"], "nothing says where to capture"),
        (["--upstream", "http://user:secret@127.0.0.1:9", "--dir", "store"], "holds credentials"),
        (["--upstream", "127.0.0.1:9", "--dir", "store"], "expected a URL"),
        (["--upstream", "http://127.0.0.1:9", "--dir", "store", "--workers", "0"], "workers is 0"),
        (["--upstream", "http://127.0.0.1:9", "--dir", "store", "--port", "x"], "'x' is not a valid integer"),
        (["--upstream", "http://127.0.0.1:9", "--dir", "store", "--log-level", "loud"], "log_level is 'loud'"),
        (["--upstream", "http://127.0.0.1:9", "--config", "no-such-file.json"], "no-such-file.json"),
        (["--dir", "store"], "--upstream"),
    ],
)
def test_option_that_can_not_be_is_said_in_a_line(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str, tmp_path: Path
) -> None:
    alone.chdir(tmp_path)
    status, said = run(capsys, "serve", *options)
    assert (status, words in said) == (2, True)
    assert "Traceback" not in said
    assert ":secret" not in said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("lacking", ["uvicorn", "h11", "prometheus_client"])
def test_library_that_is_not_installed_is_named_with_what_brings_it(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    find = importlib.util.find_spec
    alone.setattr(importlib.util, "find_spec", lambda name, *more: None if name == lacking else find(name, *more))
    status, said = run(capsys, "serve", "--upstream", "http://127.0.0.1:9")
    assert (status, said) == (2, f'tokcap serve needs {lacking}: pip install "tokcap[serve]"\n')


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"tokcap {__version__}\n")
    status, said = run(capsys, "serve", "--help")
    assert (status, "second one stops at once" in " ".join(said.split())) == (0, True)
    assert run(capsys)[0] == 2


def test_command_without_its_libraries_says_what_brings_them(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    alone.setattr("tokcap.command.find_spec", lambda name: None if name == "click" else find(name))
    assert run(capsys, "--version") == (0, f"tokcap {__version__}\n")
    assert run(capsys, "ls") == (2, 'tokcap\'s commands need two libraries more: pip install "tokcap[cli]"\n')


def test_a_verb_without_the_library_of_its_tables_says_what_brings_it(
    tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path / "store") as store:
        store.mark_incomplete_now("r-1")
    alone.setitem(sys.modules, "rich.table", None)
    alone.setattr(sys.stdout, "isatty", lambda: True)
    status, said = run(capsys, "ls", "--dir", str(tmp_path / "store"))
    assert (status, said) == (2, 'tokcap: this needs the library rich: pip install "tokcap[cli]"\n')


def test_an_option_before_the_verb_is_told_to_stand_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dir", "store", "ls"]) == 2
    assert "tokcap ls --dir ..." in capsys.readouterr().err


@pytest.mark.parametrize("given", [".", "store/rollouts"])
def test_a_store_beside_the_directory_that_is_given_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    with FileStore(tmp_path / "store") as store:
        store.begin_call_now("r", "c")
    assert main(["ls", "--dir", str(tmp_path / given)]) == 3
    said = capsys.readouterr().err
    assert f"there is one in {tmp_path / 'store'}\n" in said
    assert "Errno" not in said


def test_verb_that_is_not_there_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "shwo", "r-1")
    assert (status, "there is no verb 'shwo'; did you mean 'show'?" in said) == (2, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_the_command(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    status, said = run(capsys, "completion", shell)
    assert (status, "_TOKCAP_COMPLETE" in said) == (0, True)


def completed(words: str, store: Path) -> list[str]:
    """What a bash that completes the last of `words` is offered."""
    variables = {
        "TOKCAP_DIR": str(store),
        "_TOKCAP_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tokcap.command"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_verbs_options_and_rollout_ids_are_completed(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        for name in ("task-1-0", "task-1-1", "other"):
            store.mark_incomplete_now(name)
    assert completed("tokcap ver", tmp_path / "store") == ["verify"]
    assert completed("tokcap show task", tmp_path / "store") == ["task-1-0", "task-1-1"]
    assert "--upstream" in completed("tokcap serve --", tmp_path / "store")
    for begun in ("reset", "diff", "diff other", "ls", "report other"):
        assert completed(f"tokcap {begun} task-1", tmp_path / "store") == ["task-1-0", "task-1-1"], begun
    assert completed("tokcap show *", tmp_path / "store") == []
    assert completed("tokcap show task", tmp_path / "nothing") == []


@pytest.mark.parametrize("verb", [verb for verb, _ in VERBS])
def test_every_verb_has_help_with_examples_and_imports_little_for_it(verb: str) -> None:
    probe = (
        "import sys; from tokcap.command import main; status = main(sys.argv[1:]); "
        "print([name for name in ('numpy', 'rich', 'msgspec', 'asyncio', 'uvicorn') if name in sys.modules], status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, verb, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert re.search(r"^  Examples?:\n    tokcap ", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.endswith("[] 0\n")


def test_command_alone_imports_no_library_of_its_sub_commands() -> None:
    probe = "import sys, tokcap.command; print([name for name in sys.modules if name in sys.argv])"
    needed = ["uvicorn", "h11", "prometheus_client", "asyncio", "tokcap.asgi", "tokcap.serve"]
    done = subprocess.run([sys.executable, "-c", probe, *needed], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"
