"""Tables fit their terminal: what is empty goes, then what can be spared, and only what is long is folded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.pictures import on_a_terminal
from tokcap import FileStore, TokenEntry

DETAIL = "the engine gave no ids of sampled tokens, whatever it was asked for"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tables") / "store"
    with FileStore(directory) as made:
        for number in range(3):
            name = f"call-{number:04d}"
            made.begin_call_now("r-1", name)
            made.put_now(
                TokenEntry("r-1", name, [1] * 9, [2], [-0.5], model="m" * 12, response_id=f"chatcmpl-{number:016d}")
            )
        made.begin_call_now("r-1", "call-0003")
        made.settle_call_now("r-1", "call-0003", "lost", DETAIL)
    return directory


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return iter(())


@cache
def shown(columns: int, *arguments: str) -> list[str]:
    """What `tokcap` prints on a terminal of that width."""
    command = [sys.executable, "-m", "tokcap.command", *arguments]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_a_terminal(command, columns))
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("columns", [200, 120, 80])
def test_a_table_fits_its_terminal(store: Path, columns: int) -> None:
    heading, *lines = shown(columns, "calls", "--dir", str(store))
    assert max(map(len, (heading, *lines))) <= columns
    assert heading.split()[:4] == ["ROLLOUT", "#", "CALL", "OUTCOME"]
    whole = [line.split()[:4] for line in lines if line.startswith("r-1")]
    assert whole == [["r-1", str(n + 1), f"call-{n:04d}", "lost" if n == 3 else "recorded"] for n in range(4)]
    assert set(DETAIL.split()) <= set(" ".join(lines).split())


def test_a_wide_terminal_shows_more(store: Path) -> None:
    def headings(columns: int) -> set[str]:
        return set(shown(columns, "calls", "--dir", str(store))[0].split())

    assert headings(80) < headings(120) < headings(200)
    assert "RESPONSE" in headings(200)
    assert "UNKNOWN" not in headings(200)  # nothing stands in it
    assert "REASON" in headings(80)


@pytest.mark.parametrize("columns", [20, 30, 40])
def test_numbers_and_names_stay_in_one_piece_on_narrow_terminals(tmp_path: Path, columns: int) -> None:
    rollout, call, amount = "task-00012-sample-0003-attempt-1", "call-" + "0" * 32, 123_456
    with FileStore(tmp_path / "store") as made:
        made.put_now(TokenEntry(rollout, call, [1] * amount, [70_001], [-0.5], model="m" * 12))
        made.begin_call_now(rollout, "other")
        made.settle_call_now(rollout, "other", "lost", DETAIL)
        made.freeze_now(rollout).close()
    where = ("--dir", str(tmp_path / "store"))

    def words(*arguments: str) -> set[str]:
        return set(" ".join(shown(columns, *arguments, *where)).split())

    assert {rollout, call, "recorded"} <= words("calls")
    assert {rollout, "frozen", "lost"} <= words("ls")
    assert f"{amount + 1:,}" in words("show", rollout)
    assert {rollout, "frozen"} <= words("du")
    assert {str(amount), "70001", "-0.5000"} <= words("cat", rollout, call)
    assert {"m" * 12, "100.0%"} <= words("stats", "--by", "model")
    assert {"write", "amplification", "trained"} <= words("stats")


def test_a_pipe_gets_every_column(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokcap.command import main

    assert main(["calls", "--dir", str(store)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert {"UNKNOWN", "RESPONSE", "REASON"} < set(heading.split("\t"))
    assert {len(line.split("\t")) for line in lines} == {len(heading.split("\t"))}
