"""What is stored with a call beside its tokens: from settings, from the state of a server, from files and headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_script import Script
from tests.serving_harness import Exchange, InProcess, ask, harnesses
from tests.serving_lines import covers
from tests.serving_state import state_of_vllm
from tests.serving_steps import CHAT, COMPLETIONS, assert_recorded, call, target


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InProcess]]:
    """Harnesses, and nothing in the environment that would configure them."""
    for name in ("TOKCAP_DIR", "TOKCAP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield from harnesses(tmp_path)


@pytest.fixture
def harness(make: Callable[..., InProcess]) -> InProcess:
    return make()


# ---- lines 16 to 19: what is stored with a call


@covers(16)
def test_the_header_with_the_call_can_be_switched_off(make: Callable[..., InProcess]) -> None:
    harness = make(call_id_header=False)
    for stream in (False, True):
        rollout = harness.new_rollout()
        answer = call(harness, rollout, Script(), stream=stream)
        assert answer.header("x-tokcap-call-id") is None
        assert harness.outcomes(rollout) == ["recorded"]


@covers(17)
def test_the_mode_of_log_probs_and_the_defaults_of_the_server_come_from_its_state(harness: InProcess) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    harness.scope["app"] = state_of_vllm(
        api_key=None, logprobs_mode="processed_logprobs", default_sampling_params=defaults
    )
    for path in (CHAT, COMPLETIONS):
        rollout = harness.new_rollout()
        call(harness, rollout, Script(), path, top_p=0.5)
        sampling = harness.entries(rollout)[0].sampling
        assert sampling["logprobs_mode"] == "processed_logprobs"
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.6, 0.5, 20)


@covers(17)
def test_elsewhere_they_come_from_configuration(make: Callable[..., InProcess]) -> None:
    harness = make(
        engine="sglang", logprobs_mode="processed_logprobs", sampling_defaults={"temperature": 0.6, "top_p": 0.95}
    )
    rollout = harness.new_rollout()
    call(harness, rollout, Script(engine="sglang"), temperature=0.1)
    sampling = harness.entries(rollout)[0].sampling
    assert sampling["logprobs_mode"] == "processed_logprobs"
    assert (sampling["temperature"], sampling["top_p"]) == (0.1, 0.95)


@covers(17)
def test_what_nobody_says_is_unknown(harness: InProcess) -> None:
    rollout = harness.new_rollout()
    call(harness, rollout, Script())
    assert harness.entries(rollout)[0].sampling["logprobs_mode"] == "unknown"


@covers(17)
def test_overrides_pin_parameters_of_captured_requests_only(make: Callable[..., InProcess]) -> None:
    harness = make(sampling_overrides={"temperature": 1.0, "top_p": 1.0, "top_k": -1})
    for stream in (False, True):
        rollout, script = harness.new_rollout(), Script()
        call(harness, rollout, script, temperature=0.2, stream=stream)
        (seen,) = harness.notes.read(rollout)
        assert (seen.json["temperature"], seen.json["top_p"], seen.json["top_k"]) == (1.0, 1.0, -1)
        assert seen.body is not None
        assert seen.body.count(b'"temperature"') == 1
        sampling = harness.entries(rollout)[0].sampling
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)
    for path, url in ((CHAT, CHAT), (CHAT, target("r-9", training=False)), ("/tokenize", target("r-9", "/tokenize"))):
        script = Script(label=harness.new_rollout())
        content = ask(path, temperature=0.2)
        harness.request("POST", url, headers=[script.header()], body=content)
        assert harness.notes.read(script.label)[0].body == content


@covers(18)
def test_a_version_that_stays_the_same_is_stamped(make: Callable[..., InProcess], tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("v3\n")
    hows: list[tuple[dict[str, Any], list[tuple[str, str]], Any]] = [
        ({"policy_version": "v3"}, [], "v3"),
        ({"policy_version": lambda: "v3"}, [], "v3"),
        ({"policy_version_file": str(file)}, [], "v3"),
        ({"policy_version_header": "x-policy"}, [("x-policy", "v3")], "v3"),
    ]
    for settings, headers, version in hows:
        harness = make(**settings)
        for stream in (False, True):
            rollout, script = harness.new_rollout(), Script(headers=headers)
            call(harness, rollout, script, stream=stream)
            assert harness.entries(rollout)[0].policy_versions == [(version, 0, 4)], settings


@covers(18)
def test_a_version_that_changes_during_a_call_is_mixed(make: Callable[..., InProcess], tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("v3")
    asked = iter(f"v{number}" for number in range(3, 100))
    for settings in ({"policy_version": lambda: next(asked)}, {"policy_version_file": str(file)}):
        harness = make(**settings)
        rollout = harness.new_rollout()
        script = Script(label=rollout, waits=["answer"])

        async def play(harness: InProcess = harness, rollout: str = rollout, script: Script = script) -> Exchange:
            headers = [script.header(), ("content-type", "application/json")]
            client = asyncio.ensure_future(harness.exchange("POST", target(rollout), headers=headers, body=ask(CHAT)))
            while not harness.notes.read(rollout):
                await asyncio.sleep(0.001)
            file.write_text("v4")
            harness.notes.tell(f"{rollout}-answer")
            return await client

        assert harness.run(play()).status == 200
        assert harness.entries(rollout)[0].policy_versions == [("mixed", 0, 4)]
        file.write_text("v3")


@covers(18)
def test_a_version_that_can_not_be_told_costs_nothing(make: Callable[..., InProcess], tmp_path: Path) -> None:
    def fails() -> str:
        raise RuntimeError("no version today")

    for settings in ({"policy_version_file": str(tmp_path / "absent")}, {"policy_version": fails}):
        harness = make(**settings)
        rollout, script = harness.new_rollout(), Script()
        assert call(harness, rollout, script).status == 200
        assert_recorded(harness, rollout, script)
        assert harness.entries(rollout)[0].policy_versions == []


@covers(18)
def test_spans_of_the_engine_go_before_a_stamp(make: Callable[..., InProcess]) -> None:
    harness = make(policy_version="stamped", engine_version="0.33.0")
    spans = [{"version": "v7", "start": 0, "end": 4}]
    for stream in (False, True):
        rollout, script = harness.new_rollout(), Script(weight_versions=spans)
        answer = call(harness, rollout, script, stream=stream)
        assert b"v7" not in answer.body
        assert harness.entries(rollout)[0].policy_versions == [("v7", 0, 4)]


@covers(19)
def test_the_engine_and_its_version_are_stored(make: Callable[..., InProcess]) -> None:
    for engine, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        harness = make(engine=engine, engine_version=version)
        rollout = harness.new_rollout()
        call(harness, rollout, Script(engine=engine))
        said = json.dumps(harness.entries(rollout)[0].extra)
        assert engine in said
        assert version in said


@covers(12)
def test_an_engine_that_is_not_named_is_taken_for_one_and_its_answers_are_recorded(
    make: Callable[..., InProcess],
) -> None:
    harness = make(engine="")
    rollout, script = harness.new_rollout(), Script()
    call(harness, rollout, script)
    assert_recorded(harness, rollout, script)


@covers(12)
def test_a_known_dialect_can_be_passed_and_is_lost(make: Callable[..., InProcess]) -> None:
    harness = make(dialects="pass")
    for path in ("/v1/messages", "/v1/responses"):
        rollout = harness.new_rollout()
        answer = call(harness, rollout, Script(), path)
        assert answer.status == 200
        assert "native" in answer.json["id"]
        assert harness.notes.read(rollout)[0].path == path
        assert harness.settled(rollout) == ["lost"]
