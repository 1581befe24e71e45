"""Every situation of serving through the proxy `tokcap serve`, and what is its own."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_engine import Notebook
from tests.fake_script import Script
from tests.serving_harness import PATIENCE_S, Exchange, ask
from tests.serving_lines import covers, covers_row
from tests.serving_network import Network
from tests.serving_servers import Server, engine_server, free_port, proxy_server
from tests.serving_situations import PAIRS, SITUATIONS, Pair, Situation, see_no_difference
from tests.serving_steps import CHAT, call, target
from tests.test_serving_workers import refuse_and_go_on

HERE = [each for each in SITUATIONS if "proxy" in each.kinds]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxy")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Server]:
    (directory / "engine").mkdir()
    with engine_server(directory / "engine") as server:
        yield server


@pytest.fixture(scope="module")
def vllm(directory: Path, engine: Server) -> Iterator[Network]:
    store = directory / "store"
    with proxy_server(engine.port, store, "--workers", "2", "--engine", "vllm") as server:
        yield Network(store, Notebook(directory / "engine"), server.port, "proxy")


@pytest.fixture(scope="module")
def sglang(directory: Path, engine: Server) -> Iterator[Network]:
    store = directory / "store-of-sglang"
    with proxy_server(engine.port, store, "--engine", "sglang") as server:
        yield Network(store, Notebook(directory / "engine"), server.port, "proxy")


@pytest.mark.parametrize("situation", HERE, ids=[each.name for each in HERE])
def test_situation(situation: Situation, request: pytest.FixtureRequest) -> None:
    situation.run(request.getfixturevalue(situation.engine))


@pytest.mark.parametrize("pair", PAIRS, ids=[each.name for each in PAIRS])
def test_the_client_sees_no_difference(pair: Pair, request: pytest.FixtureRequest) -> None:
    see_no_difference(request.getfixturevalue(pair.engine), pair)


# ---- line 15


@covers(15)
def test_an_early_refusal_leaves_the_connection_usable(vllm: Network) -> None:
    refuse_and_go_on(vllm)


def _at_rest(vllm: Network, label: str) -> int:
    """How far the engine came, once it comes no further."""
    before = -1
    while True:
        seen = vllm.notes.read(label)
        now = seen[0].events if seen else -1
        if now == before and now >= 0:
            return now
        before = now
        time.sleep(0.3)


@covers(15)
@pytest.mark.parametrize("prefix", ["", "/ng-rollout/r-down/training-token-capture"])
def test_a_client_that_stops_reading_stops_the_engine(vllm: Network, prefix: str) -> None:
    label, pieces = f"down-{len(prefix)}", 1600  # 100 MB
    with vllm.connection() as connection:
        connection.request("GET", f"{prefix}/download?pieces={pieces}", headers=dict([Script(label=label).header()]))
        response = connection.getresponse()
        taken = len(response.read(65536))
        assert _at_rest(vllm, label) < pieces // 2
        while piece := response.read(1 << 20):
            taken += len(piece)
        assert taken == pieces * 65536


@covers(15)
def test_an_engine_that_stops_reading_stops_the_client(vllm: Network) -> None:
    label, total = "up", 100 << 20
    name, value = Script(label=label, reads="never", waits=["upload"]).header()
    with socket.create_connection(("127.0.0.1", vllm.port), timeout=PATIENCE_S) as client:
        head = f"POST /upload HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\ncontent-length: {total}\r\n\r\n"
        client.sendall(head.encode())
        sent = 0
        client.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while sent < total:
                sent += client.send(b"x" * min(65536, total - sent))
        assert sent < total // 2
        vllm.notes.tell(f"{label}-upload")
        client.settimeout(PATIENCE_S)
        while sent < total:
            sent += client.send(b"x" * min(65536, total - sent))
        answer = client.recv(65536)
        while b"taken" not in answer:
            answer += client.recv(65536)
        assert f'"taken":{total}'.encode() in answer


# ---- line 21


@covers(21)
def test_its_own_routes_lie_under_one_prefix_and_those_of_the_engine_stay_reachable(vllm: Network) -> None:
    assert vllm.request("GET", "/metrics").body == b"# engine metrics\n"
    assert vllm.request("GET", "/health").status == 200
    assert vllm.request("GET", "/tokcap/health").status == 200
    assert b"tokcap" in vllm.request("GET", "/tokcap/metrics").body
    before = len(vllm.notes.read(""))
    vllm.request("GET", "/tokcap/health")
    assert len(vllm.notes.read("")) == before


def _sums(text: str) -> dict[str, float]:
    """The samples of each metric, added up over its labels."""
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^(tokcap_\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", text, re.M):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@covers(21)
def test_metrics_are_summed_over_the_workers_and_name_no_rollout(directory: Path, engine: Server) -> None:
    store, count = directory / "store-of-metrics", 23
    with proxy_server(engine.port, store, "--workers", "2", "--engine", "vllm") as server:
        network = Network(store, Notebook(directory / "engine"), server.port, "proxy")
        rollouts = [network.new_rollout() for _ in range(count)]
        for rollout in rollouts:
            assert call(network, rollout, Script()).status == 200
        # Counted once the answer has left, so perhaps a moment after it has arrived.
        network.until(lambda: count in _calls(_metrics(network)))
        for _ in range(8):  # whichever worker answers
            text = _metrics(network)
            assert count in _calls(text)
            assert not any(rollout in text for rollout in rollouts)


def _metrics(network: Network) -> str:
    answer = network.request("GET", "/tokcap/metrics")
    assert answer.status == 200
    return answer.body.decode()


def _calls(text: str) -> list[float]:
    """What the counters of calls say, each added up over its labels."""
    return [value for name, value in _sums(text).items() if "call" in name and name.endswith("_total")]


# ---- line 22


def _begin(network: Network, rollout: str, script: Script) -> tuple[threading.Thread, Exchange]:
    """A call in a thread of its own; it has reached the engine when this returns."""
    answer = Exchange()

    def play() -> None:
        with network.connection() as connection:
            headers = [("content-type", "application/json"), script.header()]
            network.send(connection, "POST", target(rollout), headers, ask(CHAT, stream=True))
            try:
                network.read(connection, answer)
            except OSError as error:
                answer.error = error

    thread = threading.Thread(target=play)
    thread.start()
    network.until(lambda: bool(network.notes.read(script.label)) and network.notes.read(script.label)[0].events >= 2)
    return thread, answer


@covers(22)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_after_a_signal_no_call_begins_and_open_ones_finish_and_are_stored(
    directory: Path, engine: Server, workers: str
) -> None:
    store = directory / f"store-of-stops-{workers}"
    with proxy_server(engine.port, store, "--engine", "vllm", "--workers", workers) as server:
        network = Network(store, Notebook(directory / "engine"), server.port, "proxy")
        rollout, late = network.new_rollout(), network.new_rollout()
        script = Script(label=rollout, waits=["2"])
        thread, answer = _begin(network, rollout, script)
        server.signal(signal.SIGTERM)
        network.until(lambda: not _takes_calls(network, late))
        network.notes.tell(f"{rollout}-2")
        thread.join(PATIENCE_S)
        assert answer.ended
        assert answer.events[-1] == "[DONE]"
        assert server.wait() == 0
    assert network.outcomes(rollout) == ["recorded"]
    assert network.notes.read(late) == []
    assert not network.exists(late)


def _takes_calls(network: Network, rollout: str) -> bool:
    """Whether a call that begins now is served; one that waits in vain is not."""
    try:
        with network.connection(1.0) as connection:
            answer = Exchange()
            network.send(connection, "POST", target(rollout, "/tokenize"), [], b"{}")
            network.read(connection, answer)
            return answer.status == 200
    except OSError:
        return False


@covers(22)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_signal_stops_at_once_and_leaves_the_open_intent(
    directory: Path, engine: Server, workers: str
) -> None:
    store = directory / f"store-of-second-stops-{workers}"
    with proxy_server(engine.port, store, "--engine", "vllm", "--workers", workers) as server:
        network = Network(store, Notebook(directory / "engine"), server.port, "proxy")
        rollout = network.new_rollout()
        thread, answer = _begin(network, rollout, Script(label=rollout, waits=["2"]))
        server.signal(signal.SIGTERM)
        network.until(lambda: not _takes_calls(network, network.new_rollout()))
        server.signal(signal.SIGTERM)
        server.wait()
        thread.join(PATIENCE_S)
        assert not answer.ended
    assert network.outcomes(rollout) == ["open"]


# ---- an engine that isn't there


@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
def test_an_engine_that_can_not_be_reached_has_sampled_nothing(directory: Path) -> None:
    store = directory / "store-of-nobody"
    with proxy_server(free_port(), store, "--engine", "vllm", up=False) as server:
        network = Network(store, Notebook(directory / "nobody"), server.port, "proxy")
        rollout = network.new_rollout()
        assert call(network, rollout, Script()).status in (502, 503)
        assert network.settled(rollout) == ["no_generation"]
        assert network.request("GET", "/v1/models").status in (502, 503)


@covers_row("client disconnects while streaming")
def test_an_engine_that_dies_in_mid_stream_leaves_an_aborted_call(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with (
        engine_server(tmp_path / "engine") as engine,
        proxy_server(engine.port, tmp_path / "store", "--engine", "vllm") as server,
    ):
        network = Network(tmp_path / "store", Notebook(tmp_path / "engine"), server.port, "proxy")
        rollout = network.new_rollout()
        thread, answer = _begin(network, rollout, Script(label=rollout, waits=["3"]))
        engine.process.kill()
        thread.join(PATIENCE_S)
        assert not answer.ended
        assert network.settled(rollout) == ["aborted"]
        (entry,) = network.entries(rollout)
        assert entry.generation_token_ids.tolist() == [1000, 1001]
