"""Durable puts, candidate by candidate and place by place, with pytest-benchmark.

    python -m pytest bench/test_puts.py --benchmark-group-by=param:where

Nothing here asserts on time. `python -m bench.report` measures the same and more, in turns, and prints ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .clients import Measured, run
from .places import PLACES, UnavailableError, place
from .stores import CANDIDATES, missing
from .workload import Call, calls, named


@pytest.fixture(scope="module", params=PLACES)
def where(request: pytest.FixtureRequest) -> Generator[Path, None, None]:
    try:
        with place(request.param) as directory:
            yield directory
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def conversations() -> list[list[Call]]:
    return calls(named("W1"))


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_durable_puts_of_64_rollouts(
    benchmark: BenchmarkFixture, where: Path, candidate: str, conversations: list[list[Call]]
) -> None:
    absent = missing()
    if candidate in absent:
        pytest.skip(absent[candidate])
    numbers = itertools.count()
    measured: Measured = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: run(candidate, where / f"{candidate}-{next(numbers)}", conversations), rounds=3, warmup_rounds=1
    )
    benchmark.extra_info["puts_per_second"] = round(measured.puts / measured.seconds)
    benchmark.extra_info["bytes_on_disk"] = measured.file_bytes
