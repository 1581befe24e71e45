"""What the README shows runs as it stands there, with stand-ins for an engine and a trainer."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import yaml
from starlette.applications import Starlette

from tests import recordings
from tokcap import FileStore, TokenEntry, Trajectory, token_id_capture_config
from tokcap.asgi import CaptureMiddleware, ServingSettings
from tokcap.asgi.settings import serving_settings
from tokcap.conformance import Report
from tokcap.evaluation import EvaluationRecorder

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_no_figure_is_left_out() -> None:
    assert re.findall(r"@[A-Z]+\b", README) == []


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block(*words: str) -> str:
    """The one Python block that has all these words."""
    (found,) = [code for code in blocks("python") if all(word in code for word in words)]
    return found


async def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block, which may await, and give back its names."""
    body = textwrap.indent(code, "    ")
    exec(f"async def shown():\n{body}\n    return dict(locals())", names)
    found: dict[str, Any] = await names["shown"]()
    return {**names, **found}


def test_capture_and_consume_in_five_lines(tmp_path: Path) -> None:
    call = recordings.load("linear-1").calls[0]
    taken: list[tuple[list[Trajectory], float]] = []

    async def engine(body: dict[str, Any]) -> Any:
        assert body is call.request
        return call.response

    async def both() -> None:
        def add_to_batch(trajectories: Iterable[Trajectory], reward: float) -> None:
            taken.append((list(trajectories), reward))

        names: dict[str, Any] = {"engine": engine, "body": call.request, "add_to_batch": add_to_batch}
        capture = block("captured_call(").replace("/var/lib/tokcap", str(tmp_path))
        names = await run(capture, names)
        await names["store"].finish("rollout-17", meta={"reward": 1.0})
        consuming = block("async with consume(FileStore").replace("/var/lib/tokcap", str(tmp_path))
        await run(consuming.rstrip() + "\n        rollouts.stop()", names)
        assert (await names["store"].stat("rollout-17")).state == "retired"
        await names["store"].close()

    asyncio.run(both())
    (((trajectory,), reward),) = taken
    (entry,) = call.entries
    assert trajectory.token_ids.tolist() == [*entry.prompt_token_ids.tolist(), *entry.generation_token_ids.tolist()]
    assert trajectory.log_probs[trajectory.loss_mask].tolist() == entry.generation_log_probs.tolist()
    assert reward == 1.0


def test_the_configuration_and_its_code(tmp_path: Path) -> None:
    (settings,) = [text for text in blocks("yaml") if "ng_tokcap" in text]
    shown = token_id_capture_config(yaml.safe_load(settings))
    assert shown.enabled
    assert str(shown.resolved_dir()) == "/tmp/ng_tokcap"
    path = tmp_path / "run.yaml"
    path.write_text(settings.replace("/tmp/ng_tokcap", str(tmp_path / "store")))
    code = block("consume_from_config").replace('"run.yaml"', repr(str(path))).replace("...", "rollouts.stop()")

    async def shown_code() -> None:
        names = await run(code, {})
        assert isinstance(names["sink"], FileStore)
        await names["sink"].close()

    asyncio.run(shown_code())


def test_the_finalized_record(tmp_path: Path) -> None:
    async def shown_code() -> None:
        store = FileStore(tmp_path)
        await store.put(TokenEntry("r-1", "c", [1, 2], [3], [-0.5]))
        record: dict[str, Any] = {"rollout_id": "r-1", "response": {"output": []}, "reward": 1.0}
        written: list[Any] = []
        await run(block("finalize_rollout("), {"store": store, "record": record, "write_durably": written.append})
        assert written == [record]
        assert record["response"]["output"][0]["generation_token_ids"] == [3]
        assert (await store.stat("r-1")).state == "retired"
        await store.close()

    asyncio.run(shown_code())


def test_the_store_without_asyncio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("put_now(TokenEntry").replace("tokcap-data", str(tmp_path / "data"))
    asyncio.run(run(code, {}))
    assert "rollout-17" in capsys.readouterr().out
    assert FileStore(tmp_path / "data").stat_now("rollout-17").state == "retired"


def test_the_conformance_kit_takes_sinks_and_sources(tmp_path: Path) -> None:
    code = block("check(")
    made: list[FileStore] = []

    def opened(url: str) -> FileStore:
        made.append(FileStore(tmp_path / url))
        return made[-1]

    names = asyncio.run(run(code, {"MySink": opened, "MySource": opened, "url": "store"}))
    assert isinstance(names["report"], Report)
    assert len(made) > 2


def test_an_agent_is_given_the_base_url_of_its_rollout() -> None:
    code = block("agent = OpenAI(")
    names = asyncio.run(run(code, {"OpenAI": lambda base_url: base_url}))
    assert names["agent"] == "http://127.0.0.1:8000/ng-rollout/rollout-17/training-token-capture/v1"


def test_the_middleware_is_added_to_an_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_DIR", str(tmp_path / "store"))
    app = Starlette()
    asyncio.run(run(block("app.add_middleware("), {"app": app, "CaptureMiddleware": CaptureMiddleware}))

    async def asked() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return (await client.post("/ng-rollout/bad%2Fid/v1/completions")).status_code

    assert asyncio.run(asked()) == 400


def test_summaries_of_evaluation_capture_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def both() -> None:
        recorder = EvaluationRecorder(tmp_path)
        call = recorder.begin(
            "rollout-17", "call-1", method="POST", path="/v1/chat/completions", dialect="chat", request={},
            request_bytes=2, training=False,
        )  # fmt: skip
        call.status(429)
        await call.end(answer=None, error={"error": {"message": "slow down"}})
        await recorder.close()
        await run(block("summaries(").replace("/data/calls", str(tmp_path)), {})

    asyncio.run(both())
    assert capsys.readouterr().out.startswith("429 rate_limited")


def test_the_configuration_of_serving_has_all_three_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret-key")
    (settings,) = [text for text in blocks("yaml") if "tokcap_serving" in text]
    config = token_id_capture_config(yaml.safe_load(settings))
    assert (config.enabled, config.evaluation_enabled) == (True, True)
    assert serving_settings(yaml.safe_load(settings)).api_keys == ("secret-key",)


def test_every_serving_setting_is_named() -> None:
    for setting in ServingSettings.__struct_fields__:
        assert f"`{setting}`" in README, setting


def commands() -> list[tuple[str, str]]:
    """Every call of the command that is shown: its verb, and the rest of the line or of the code span."""
    return re.findall(r"(?<!from )(?<![\w/.\"])tokcap ([a-z]+)\b([^`\n|#]*)", README)


def test_verbs_and_options_that_are_shown_are_there() -> None:
    from click import Context

    from tokcap.cli.group import VERBS, tokcap

    there = {verb: tokcap.get_command(Context(tokcap), verb) for verb, _ in VERBS}
    shown = [(verb, rest) for verb, rest in commands() if verb in there]
    assert {verb for verb, _ in shown} == set(there)
    for verb, rest in shown:
        command = there[verb]
        if isinstance(command, click.Group) and (name := rest.split()[:1]):
            command = command.get_command(Context(command), name[0])
        assert command is not None, f"tokcap {verb}{rest}"
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", rest):
            assert option in options, f"tokcap {verb}{rest}: {option}"
