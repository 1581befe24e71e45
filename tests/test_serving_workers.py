"""Every situation of serving over sockets, under uvicorn with two spawned workers that share one store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fake_engine import Notebook
from tests.fake_script import Script, choice
from tests.serving_harness import Exchange, ask
from tests.serving_lines import covers, covers_row
from tests.serving_network import Network
from tests.serving_servers import workers_server
from tests.serving_situations import PAIRS, SITUATIONS, Pair, Situation, see_no_difference
from tests.serving_steps import CHAT, call, target
from tokcap import FileStore

HERE = [each for each in SITUATIONS if "workers" in each.kinds]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    directory = tmp_path_factory.mktemp("workers")
    engine, store = directory / "engine", directory / "store"
    notes = Notebook(engine)
    with workers_server(engine, store) as server:
        yield Network(store, notes, server.port, "workers")


@pytest.mark.parametrize("situation", HERE, ids=[each.name for each in HERE])
def test_situation(situation: Situation, harness: Network) -> None:
    situation.run(harness)


@pytest.mark.parametrize("pair", PAIRS, ids=[each.name for each in PAIRS])
def test_the_client_sees_no_difference(pair: Pair, harness: Network) -> None:
    see_no_difference(harness, pair)


@covers(6)
def test_both_workers_write_one_rollout(harness: Network) -> None:
    rollout = harness.new_rollout()

    def one(number: int) -> Exchange:
        script = Script(choices=[choice(10_000 + 10 * number, 3)], label=f"{rollout}-{number}")
        return call(harness, rollout, script, stream=number % 2 == 0)

    pids: set[int] = set()
    count = 0
    with ThreadPoolExecutor(8) as threads:
        while len(pids) < 2:
            assert count < 400, "one worker got every connection"
            list(threads.map(one, range(count, count + 20)))
            count += 20
            pids.update(harness.notes.read(f"{rollout}-{number}")[0].pid for number in range(count))
    assert harness.outcomes(rollout) == ["recorded"] * count
    found = sorted(entry.generation_token_ids[0] for entry in harness.entries(rollout))
    assert found == [10_000 + 10 * number for number in range(count)]


@covers(15)
@covers_row("4xx, 429, context overflow, 5xx before anything was sampled")
def test_an_early_refusal_leaves_the_connection_usable(harness: Network) -> None:
    refuse_and_go_on(harness)


def refuse_and_go_on(harness: Network) -> None:
    """Refusals before and after the body was read, each followed by a good call on the same connection."""
    frozen = harness.new_rollout()
    with FileStore(harness.store_dir, sweep_every_s=0) as store:
        store.freeze_now(frozen).close()
    content = ask(CHAT, user="x" * 500_000)
    refused = Script(status=429, body="{}", reads="never")
    for expected, url, headers in (
        (400, target("bad%2Fid"), []),
        (409, target(frozen), []),
        (415, target(harness.new_rollout()), [("content-encoding", "x-strange")]),
        (429, target(harness.new_rollout()), [refused.header()]),
    ):
        with harness.connection() as connection:
            connection.connect()
            socket = connection.sock
            for _ in range(2):
                answer, good = Exchange(), Exchange()
                harness.send(connection, "POST", url, [("content-type", "application/json"), *headers], content)
                harness.read(connection, answer)
                assert answer.status == expected
                assert (answer.header("connection") or "").lower() != "close"
                rollout = harness.new_rollout()
                script = Script(label=rollout)
                harness.send(connection, "POST", target(rollout), [script.header()], ask(CHAT))
                harness.read(connection, good)
                assert good.status == 200
                assert connection.sock is socket
                assert harness.outcomes(rollout) == ["recorded"]


def test_the_store_directory_is_private(harness: Network) -> None:
    call(harness, harness.new_rollout(), Script())
    assert Path(harness.store_dir).stat().st_mode & 0o777 == 0o700
