"""Every situation of serving in this process, message by message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving_harness import InProcess
from tests.serving_lines import LINES, ROWS, covered
from tests.serving_situations import PAIRS, SITUATIONS, Pair, Situation, see_no_difference


@pytest.fixture
def engine() -> str:
    return "vllm"


@pytest.fixture
def harness(tmp_path: Path, engine: str) -> Iterator[InProcess]:
    made = InProcess(tmp_path, engine=engine)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("situation", "engine"),
    [(each, each.engine) for each in SITUATIONS],
    ids=[each.name for each in SITUATIONS],
)
def test_situation(situation: Situation, harness: InProcess) -> None:
    situation.run(harness)


@pytest.mark.parametrize(("pair", "engine"), [(each, each.engine) for each in PAIRS], ids=[each.name for each in PAIRS])
def test_the_client_sees_no_difference(pair: Pair, harness: InProcess) -> None:
    see_no_difference(harness, pair)


def test_no_line_and_no_row_is_left_out() -> None:
    import tests.test_serving_middleware
    import tests.test_serving_proxy
    import tests.test_serving_records
    import tests.test_serving_release  # noqa: F401 - what they cover counts, too

    assert [line for line in LINES if line not in covered()] == []
    assert [row for row in ROWS if row not in covered()] == []
