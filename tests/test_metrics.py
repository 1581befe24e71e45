"""What the serving path counts: shared by all who count in a process, summed over processes, and never in the way."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import tokcap.asgi.metrics
from tokcap.asgi.metrics import Metrics, forget_dead_processes
from tokcap.protocol import Outcome
from tokcap.serve.own_routes import metrics_text

prometheus_client = pytest.importorskip(
    "prometheus_client", reason="prometheus-client is not installed, and does the counting"
)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def value(registry: Any, name: str, **labels: str) -> float | None:
    found: float | None = registry.get_sample_value(name, labels)
    return found


def test_call_is_counted_from_its_intent_to_its_end(registry: Any) -> None:
    metrics = Metrics(registry)
    metrics.begun()
    metrics.begun()
    assert value(registry, "tokcap_open_calls") == 2
    metrics.ended("recorded", prompt_tokens=100, sampled_tokens=7)
    metrics.ended("lost")
    assert value(registry, "tokcap_open_calls") == 0
    assert value(registry, "tokcap_calls_total", outcome="recorded") == 1
    assert value(registry, "tokcap_calls_total", outcome="lost") == 1
    assert value(registry, "tokcap_tokens_total", kind="prompt") == 100
    assert value(registry, "tokcap_tokens_total", kind="sampled") == 7


def test_times_are_put_into_histograms_that_tell_a_fast_disk_from_a_slow_one(registry: Any) -> None:
    metrics = Metrics(registry)
    for seconds in (0.0004, 0.004, 4.0, 400.0):
        metrics.put_seconds(seconds)
    metrics.intent_seconds(0.002)
    assert value(registry, "tokcap_put_seconds_count") == 4
    assert value(registry, "tokcap_put_seconds_sum") == pytest.approx(404.0044)
    counts = [value(registry, "tokcap_put_seconds_bucket", le=bound) for bound in ("0.0005", "0.005", "5.0", "+Inf")]
    assert counts == [1, 2, 3, 4]
    assert value(registry, "tokcap_intent_seconds_count") == 1


def test_every_outcome_is_there_from_the_beginning(registry: Any) -> None:
    Metrics(registry)
    assert {value(registry, "tokcap_calls_total", outcome=outcome) for outcome in get_args(Outcome)} == {0}


def test_label_takes_no_value_that_nobody_knows(registry: Any) -> None:
    metrics = Metrics(registry)
    for number in range(100):
        metrics.begun()
        metrics.ended(f"r-{number}")
    assert value(registry, "tokcap_calls_total", outcome="other") == 100
    text = prometheus_client.generate_latest(registry).decode()
    assert "r-1" not in text


def test_all_who_count_in_a_process_count_together(registry: Any) -> None:
    first, second = Metrics(registry), Metrics(registry)
    first.begun()
    second.begun()
    assert value(registry, "tokcap_open_calls") == 2


def test_registry_of_the_process_is_the_default() -> None:
    before = value(prometheus_client.REGISTRY, "tokcap_calls_total", outcome="aborted") or 0
    for _ in range(2):
        metrics = Metrics()
        metrics.begun()
        metrics.ended("aborted")
    assert value(prometheus_client.REGISTRY, "tokcap_calls_total", outcome="aborted") == before + 2


def test_second_copy_of_the_module_counts_with_the_first(registry: Any) -> None:
    first = Metrics(registry)
    again = importlib.util.module_from_spec(tokcap.asgi.metrics.__spec__)
    assert tokcap.asgi.metrics.__spec__.loader is not None
    tokcap.asgi.metrics.__spec__.loader.exec_module(again)
    second = again.Metrics(registry)
    first.begun()
    second.begun()
    second.ended("recorded")
    assert value(registry, "tokcap_open_calls") == 1
    assert value(registry, "tokcap_calls_total", outcome="recorded") == 1


def test_name_that_somebody_else_has_taken_for_another_kind_is_an_error(registry: Any) -> None:
    prometheus_client.Gauge("tokcap_put_seconds", "Of somebody else.", registry=registry)
    with pytest.raises(ValueError, match="tokcap_put_seconds"):
        Metrics(registry)


def test_without_the_library_nothing_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = Metrics()
    metrics.begun()
    metrics.intent_seconds(0.1)
    metrics.put_seconds(0.1)
    metrics.ended("recorded", prompt_tokens=1, sampled_tokens=1)
    assert forget_dead_processes(str(tmp_path)) == []
    assert metrics_text() == (b"", "text/plain; version=0.0.4; charset=utf-8")


# ---- several processes

WORKER = """
import sys
from tokcap.asgi.metrics import Metrics
metrics = Metrics()
for _ in range(int(sys.argv[1])):
    metrics.begun()
for _ in range(int(sys.argv[2])):
    metrics.ended("recorded", prompt_tokens=10, sampled_tokens=1)
    metrics.put_seconds(0.25)
print("counted", flush=True)
sys.stdin.read()
"""


class Workers:
    """Processes that count in one directory, and live until they are told otherwise."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, begun: int, ended: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(begun), str(ended)],
            cwd=ROOT,
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self.directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()
        self._processes.remove(process)

    def close(self) -> None:
        for process in list(self._processes):
            self.end(process)


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    directory = tmp_path / "metrics"
    directory.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
    made = Workers(directory)
    yield made
    made.close()


def lines_of(text: bytes) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(number) for name, _, number in lines}


def test_processes_are_summed(workers: Workers) -> None:
    workers.start(3, 2)
    workers.start(5, 1)
    found = lines_of(metrics_text()[0])
    assert found["tokcap_open_calls"] == 5
    assert found['tokcap_calls_total{outcome="recorded"}'] == 3
    assert found['tokcap_calls_total{outcome="lost"}'] == 0
    assert found['tokcap_tokens_total{kind="prompt"}'] == 30
    assert found["tokcap_put_seconds_count"] == 3
    assert found["tokcap_put_seconds_sum"] == 0.75


def test_process_that_died_has_no_open_calls_any_more_but_what_it_counted_stays(workers: Workers) -> None:
    dies, lives = workers.start(3, 2), workers.start(1, 0)
    assert lines_of(metrics_text()[0])["tokcap_open_calls"] == 2
    workers.end(dies)
    found = lines_of(metrics_text()[0])
    assert found["tokcap_open_calls"] == 1
    assert found['tokcap_calls_total{outcome="recorded"}'] == 2
    assert found["tokcap_put_seconds_count"] == 2
    assert forget_dead_processes(str(workers.directory)) == []
    assert {path.name for path in workers.directory.glob("gauge_*")} == {f"gauge_livesum_{lives.pid}.db"}


def test_directory_that_is_gone_is_no_reason_to_fail(tmp_path: Path) -> None:
    assert forget_dead_processes(str(tmp_path / "none")) == []
