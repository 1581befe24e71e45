"""Durable puts, candidate by candidate and place by place, with pytest-benchmark.

    python -m pytest bench --benchmark-group-by=param:where

Nothing here asserts on time. `python -m bench.report` prints the same as a table with ratios.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .candidates import CANDIDATES, run
from .places import UnavailableError, place
from .workload import Call, Workload, calls


@pytest.fixture(scope="module", params=["ext4", "disk", "tmpfs"])
def where(request: pytest.FixtureRequest) -> Generator[Path, None, None]:
    try:
        with place(request.param) as directory:
            yield directory
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def conversations() -> list[list[Call]]:
    return calls(Workload())


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_durable_puts_of_64_rollouts(
    benchmark: BenchmarkFixture, where: Path, candidate: str, conversations: list[list[Call]]
) -> None:
    numbers = itertools.count()
    measured = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: run(candidate, where / f"{candidate}-{next(numbers)}", conversations), rounds=3, warmup_rounds=1
    )
    benchmark.extra_info["puts_per_second"] = round(measured.per_second)
    benchmark.extra_info["bytes_on_disk"] = measured.bytes_on_disk
