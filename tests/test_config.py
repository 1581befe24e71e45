"""The configuration of capture: what is accepted, what it means, and what a process makes of it."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokcap.config
from tests.memory_store import MemoryState, MemoryStore
from tests.test_package import newly_imported
from tokcap import FileStore, TokenEntry, TokenSource
from tokcap.config import (
    TOKEN_ID_CAPTURE_BLOCK,
    TokenIdCaptureConfig,
    TokenIdCaptureSettings,
    close_process_endpoints,
    config_from_environment,
    load_config,
    process_sink,
    process_source,
    token_id_capture_config,
    token_id_capture_enabled_for_agent,
)
from tokcap.config import process as process_module
from tokcap.config.arguments import without_values
from tokcap.errors import ConfigError, NoSpaceError, StaleAttemptError, TokcapError
from tokcap.installed import install_token_sink, install_token_source

SECRET = "tr0ub4dor-and-3"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing installed, nothing built, nothing in the environment."""
    for name in "TOKCAP_CONFIG", "TOKCAP_DIR", "TOKCAP_TEST_TOKEN":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_module, "_process", process_module._Process())
    sink, source = install_token_sink(None), install_token_source(None)
    Sink.made = []
    yield
    asyncio.run(close_process_endpoints())
    install_token_sink(sink)
    install_token_source(source)


# ---- sinks that configurations name


class Sink:
    """Writes nothing, and knows what it was made with."""

    made: list[Sink] = []  # noqa: RUF012
    closed = False

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        type(self).made.append(self)

    async def put(self, entry: TokenEntry) -> None: ...
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...
    async def close(self) -> None:
        self.closed = True


class TokenOnlySink(Sink):
    def __init__(self, token: str, endpoint: str = "") -> None:
        super().__init__(token=token, endpoint=endpoint)


class RaisingSink(Sink):
    def __init__(self, token: str, **more: Any) -> None:
        raise RuntimeError(f"can't log in at {more} with <{token}> or {token[:9]} or {token.encode()!r}: denied")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class UnprintablyRaisingSink(Sink):
    def __init__(self) -> None:
        raise UnprintableError


class FailingToCloseSink(Sink):
    async def close(self) -> None:
        self.closed = True
        raise OSError("the network is gone")


class WithoutMark:
    async def put(self, entry: TokenEntry) -> None: ...
    async def close(self) -> None: ...


class WithNumberForMark(WithoutMark):
    mark_incomplete = 3


not_callable = "text"


def made_by_a_function(**arguments: Any) -> Sink:
    return Sink(**arguments)


def returns_a_class() -> type[Sink]:
    return Sink


def named(name: str) -> str:
    return f"tests.test_config:{name}"


def block(**values: Any) -> dict[str, Any]:
    return {"token_id_capture": {"enabled": True, **values}}


def read(**values: Any) -> TokenIdCaptureConfig:
    return token_id_capture_config(block(**values))


def nested(content: dict[Any, Any]) -> dict[str, Any]:
    return {"env": {"nemo_gym": content}}


def omega(content: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(content)


def named_by_type(value: Any) -> str:
    """Of a parameter in the name of a test; text of very large numbers can't be had."""
    return value if isinstance(value, str) else type(value).__name__


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tokcap.config"]


def refused(content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        token_id_capture_config(content)
    return str(caught.value)


# ---- defaults and shapes


@pytest.mark.parametrize("content", [None, {}, {"token_id_capture": None}, {"other": 3}, {"token_id_capture": {}}])
def test_nothing_configured_means_off(content: Any) -> None:
    config = token_id_capture_config(content)
    assert config == TokenIdCaptureConfig()
    assert not config.enabled
    assert not config.evaluation_enabled
    assert config.resolved_dir() is None


def test_the_defaults_are_the_documented_ones() -> None:
    defaults = TokenIdCaptureSettings()
    assert {name: getattr(defaults, name) for name in defaults.__struct_fields__} == {
        "enabled": False,
        "all_agents": False,
        "dir": None,
        "sink": None,
        "sink_kwargs": {},
        "rebuild_response": True,
        "max_mask_fraction": None,
        "mask_fraction_min_samples": 50,
        "min_free_bytes": None,
        "min_free_inodes": None,
        "max_pending_bytes": 1 << 30,
    }


def test_evaluation_is_off_by_default() -> None:
    assert TokenIdCaptureConfig().observability_enabled is False
    assert token_id_capture_config({"model_call_capture_dir": "/calls"}).observability_enabled is False


def test_every_setting_is_read() -> None:
    values = {
        "enabled": True,
        "all_agents": True,
        "dir": "/x/store",
        "sink": None,
        "sink_kwargs": {"a": [1, {"b": None}]},
        "rebuild_response": False,
        "max_mask_fraction": 0.25,
        "mask_fraction_min_samples": 7,
        "min_free_bytes": 1 << 30,
        "min_free_inodes": 0,
        "max_pending_bytes": 1,
    }
    config = token_id_capture_config(
        {TOKEN_ID_CAPTURE_BLOCK: values, "model_call_capture_dir": "/x/calls", "observability_enabled": True}
    )
    assert {name: getattr(config.token_id_capture, name) for name in values} == values
    assert (config.model_call_capture_dir, config.observability_enabled) == ("/x/calls", True)


def test_a_configuration_can_be_made_from_a_plain_mapping() -> None:
    made: Any = TokenIdCaptureConfig(token_id_capture={"enabled": True, "dir": "/x"})  # type: ignore[arg-type]
    assert made == read(dir="/x")
    assert made.token_id_capture == TokenIdCaptureSettings(enabled=True, dir="/x")


def test_no_block_given_directly_is_an_empty_one() -> None:
    assert TokenIdCaptureConfig(token_id_capture=None) == TokenIdCaptureConfig()  # type: ignore[arg-type]


def test_a_mapping_given_directly_is_checked_like_one_that_is_read() -> None:
    with pytest.raises(ConfigError, match="token_id_capture has no setting 'dirr'"):
        TokenIdCaptureConfig(token_id_capture={"dirr": "/x"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token_id_capture is 'on', expected a mapping"):
        TokenIdCaptureConfig(token_id_capture="on")  # type: ignore[arg-type]


def test_a_configuration_that_was_read_is_handed_back() -> None:
    config = read(dir="/x")
    assert token_id_capture_config(config) is config


@pytest.mark.parametrize("content", [3, "text", ["list"], True, b"", object()])
def test_a_global_config_that_isn_t_a_mapping_is_refused(content: Any) -> None:
    assert "the global config dict is" in refused(content)


@pytest.mark.parametrize("content", ["on", True, 1, [], [{"enabled": True}]])
def test_a_block_that_isn_t_a_mapping_is_refused(content: Any) -> None:
    assert "token_id_capture is" in refused({"token_id_capture": content})


def test_what_happens_to_the_mapping_afterwards_changes_nothing() -> None:
    arguments: dict[str, Any] = {"list": [1], "tuple": ([2],), "map": {"a": 1}}
    config = read(sink=named("Sink"), sink_kwargs=arguments)
    arguments["list"].append(2)
    arguments["tuple"][0].append(3)
    arguments["map"]["b"] = 2
    assert config.token_id_capture.sink_kwargs == {"list": [1], "tuple": ([2],), "map": {"a": 1}}


def test_a_configuration_can_t_be_changed() -> None:
    config: Any = read(dir="/x")
    with pytest.raises(AttributeError):
        config.token_id_capture.enabled = False
    with pytest.raises(AttributeError):
        config.observability_enabled = True


@pytest.mark.parametrize("kind", [dict, omega])
def test_a_configuration_can_be_sent_to_another_process(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", SECRET)
    text = "${oc.env:TOKCAP_TEST_TOKEN}"
    config = token_id_capture_config(kind(block(sink=named("Sink"), sink_kwargs={"token": text})))
    sent = pickle.dumps(config)
    assert SECRET.encode() not in sent
    arrived = pickle.loads(sent)
    assert arrived == config
    assert arrived.build_sink().arguments == {"token": SECRET}


# ---- types and ranges

TYPES: list[tuple[str, list[Any], str]] = [
    ("enabled", ["true", "false", 1, 0, 1.0, None, [], np.True_], "true or false"),
    ("all_agents", ["true", 1, None, {}], "true or false"),
    ("rebuild_response", ["false", 0, None, "no"], "true or false"),
    ("dir", [3, True, ["/x"], b"/x"], "the path of a directory"),
    ("sink", [3, True, ["a:b"], {}, Sink], "text"),
    ("sink_kwargs", ["a=b", 3, None, [], {3: 4}, {None: 1}], "a mapping of argument names"),
    (
        "max_mask_fraction",
        ["0.5", True, False, -0.01, 1.01, float("nan"), float("inf"), 10**5000, []],
        "a number from 0 to 1",
    ),
    ("mask_fraction_min_samples", [0, -1, True, 50.0, "50", None, float("inf"), -(10**5000)], "a whole number from 1"),
    ("min_free_bytes", [-1, True, 1e9, "1 GB", float("nan"), [], -(10**5000)], "a whole number from 0, or null"),
    ("min_free_inodes", [-1, False, 0.0, "0", {}], "a whole number from 0, or null"),
    ("max_pending_bytes", [0, -1, True, 1e9, "1 GB", None], "a whole number from 1"),
]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(name, value, expected) for name, bad, expected in TYPES for value in bad],
    ids=named_by_type,
)
def test_a_value_of_the_wrong_type_or_range_is_refused(name: str, value: Any, expected: str, enabled: bool) -> None:
    message = refused({"token_id_capture": {"enabled": enabled, "dir": "/x", name: value}})
    assert message.startswith(f"token_id_capture.{name} is ")
    assert f", expected {expected}" in message
    with pytest.raises(ConfigError, match=f"^token_id_capture.{name} is "):
        TokenIdCaptureSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("enabled", "true", "'true'"),
        ("max_mask_fraction", 1.5, "1.5"),
        ("mask_fraction_min_samples", True, "True"),
        ("dir", ["/x"], "a list"),
        ("mask_fraction_min_samples", -(10**5000), "a int that can't be shown"),
        ("enabled", "y" * 500, "'" + "y" * 199 + "..."),
    ],
    ids=named_by_type,
)
def test_a_refused_value_is_shown_shortly(name: str, value: Any, text: str) -> None:
    assert refused(block(**{name: value})).startswith(f"token_id_capture.{name} is {text}, expected")


@pytest.mark.parametrize("value", [0, 1, 0.0, 0.5, 1.0])
def test_a_mask_fraction_from_0_to_1_is_accepted(value: float) -> None:
    fraction = read(dir="/x", max_mask_fraction=value).token_id_capture.max_mask_fraction
    assert fraction == value
    assert type(fraction) is float


def test_one_sample_is_enough_for_a_mask_fraction_if_so_configured() -> None:
    assert read(dir="/x", mask_fraction_min_samples=1).token_id_capture.mask_fraction_min_samples == 1


class PathOfBytes:
    def __fspath__(self) -> bytes:
        return b"/x"


def test_a_path_object_of_bytes_is_refused() -> None:
    assert refused(block(dir=PathOfBytes())).startswith("token_id_capture.dir is ")


def test_a_path_object_becomes_text(tmp_path: Path) -> None:
    config = token_id_capture_config(block(dir=tmp_path) | {"model_call_capture_dir": tmp_path / "calls"})
    assert config.token_id_capture.dir == str(tmp_path)
    assert config.model_call_capture_dir == f"{tmp_path}/calls"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("name", "value"), [("model_call_capture_dir", 3), ("observability_enabled", "true")])
def test_the_keys_beside_the_block_are_strict_too(name: str, value: Any, enabled: bool) -> None:
    content = {"token_id_capture": {"enabled": enabled, "dir": "/x"}, name: value}
    assert refused(content).startswith(f"{name} is {value!r}, expected")
    assert refused(nested(content)).startswith(f"env.nemo_gym.{name} is {value!r}, expected")
    with pytest.raises(ConfigError, match=f"^{name} is"):
        TokenIdCaptureConfig(**{name: value})


@pytest.mark.parametrize("enabled", [True, False])
def test_an_unknown_key_is_refused_with_the_nearest_and_all_valid_ones(enabled: bool) -> None:
    message = refused({"token_id_capture": {"enabled": enabled, "dir": "/x", "rebuild_respones": True}})
    assert "token_id_capture has no setting 'rebuild_respones', did you mean rebuild_response? There are: " in message
    for name in TokenIdCaptureSettings.__struct_fields__:
        assert name in message.partition("There are: ")[2]


@pytest.mark.parametrize("key", [3, None, "zzzzzzzz", ("a",), 10**5000], ids=named_by_type)
def test_an_unknown_key_that_is_near_to_nothing_is_refused(key: Any) -> None:
    message = refused({"token_id_capture": {key: True}})
    assert "token_id_capture has no setting" in message
    assert "did you mean" not in message


def test_an_unknown_key_is_named_without_its_value() -> None:
    assert SECRET not in refused(block(dir="/x", sink_kwarg={"token": SECRET}))


def test_unknown_keys_beside_the_block_are_not_ours() -> None:
    content: dict[Any, Any] = block(dir="/x") | {"enabld": 3, "observability": "yes", 7: None}
    assert token_id_capture_config(content) == token_id_capture_config(nested(content)) == read(dir="/x")


def deep(levels: int, shell: Callable[[Any], Any], value: Any = 1) -> Any:
    for _ in range(levels):
        value = shell(value)
    return value


@pytest.mark.parametrize("shell", [lambda value: [value], lambda value: {"key": value}])
@pytest.mark.parametrize("inmost", [[1], {"key": 1}, omega([1]), omega({"key": 1})], ids=named_by_type)
def test_arguments_may_be_nested_to_a_hundred_levels(inmost: Any, shell: Any) -> None:
    sink: Any = read(sink=named("Sink"), sink_kwargs={"value": deep(98, shell, inmost)}).build_sink()
    assert sink.arguments == {"value": deep(98, shell, inmost)}
    content = block(sink="a:b", sink_kwargs={"value": deep(99, shell, inmost)})
    assert "... is nested deeper than 100 levels" in refused(content)


def test_arguments_in_a_circle_or_nested_without_end_are_refused() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = [circle]
    for value in circle, {"deep": deep(5000, lambda inner: [inner])}, {"deep": deep(5000, lambda inner: (inner,))}:
        assert "nested deeper than 100 levels" in refused(block(sink="a:b", sink_kwargs=value))


# ---- where the block stands


def test_the_block_may_stand_under_env_nemo_gym() -> None:
    content = block(dir="/x") | {"model_call_capture_dir": "/calls", "observability_enabled": True}
    config = token_id_capture_config(nested(content))
    assert config == token_id_capture_config(content)
    assert config.evaluation_enabled


def test_the_same_block_at_both_places_is_accepted() -> None:
    assert token_id_capture_config(block(dir="/x") | nested(block(dir="/x"))) == read(dir="/x")


def test_an_empty_block_at_one_place_leaves_the_other() -> None:
    empty: dict[str, Any] = {"token_id_capture": None}
    assert token_id_capture_config(empty | nested(block(dir="/x"))) == read(dir="/x")
    assert token_id_capture_config(block(dir="/x") | nested(empty)) == read(dir="/x")


@pytest.mark.parametrize("enabled", [True, False])
def test_different_blocks_at_both_places_are_refused(enabled: bool) -> None:
    other = {"token_id_capture": {"enabled": enabled, "dir": "/y"}}
    message = refused(block(dir="/x") | nested(other))
    assert "stands at token_id_capture and at env.nemo_gym.token_id_capture, with different content" in message


def test_blocks_that_can_t_be_compared_are_refused() -> None:
    def content() -> dict[str, Any]:
        return block(sink="a:b", sink_kwargs={"weights": np.zeros(3)})

    assert "with different content" in refused(content() | nested(content()))


def test_an_error_names_the_place_of_the_block() -> None:
    assert refused(nested(block(enabled="yes"))).startswith("env.nemo_gym.token_id_capture.enabled is 'yes'")
    assert "env.nemo_gym.token_id_capture has no setting 'dirr'" in refused(nested(block(dirr="/x")))
    assert refused(nested({"token_id_capture": "on"})).startswith("env.nemo_gym.token_id_capture is 'on'")


@pytest.mark.parametrize("env", [None, 3, "text", [], {"nemo_gym": None}, {"nemo_gym": "text"}, {"nemo_gym": [1]}])
def test_an_env_that_is_something_else_is_not_ours(env: Any) -> None:
    assert token_id_capture_config(block(dir="/x") | {"env": env}) == read(dir="/x")


@pytest.mark.parametrize("name", ["model_call_capture_dir", "observability_enabled"])
def test_a_key_beside_the_block_counts_before_the_other_place(name: str) -> None:
    near, far = {"model_call_capture_dir": ("/near", "/far"), "observability_enabled": (False, True)}[name]
    on_top = token_id_capture_config(block(dir="/x") | {name: near} | nested({name: far}))
    below = token_id_capture_config({name: far} | nested(block(dir="/x") | {name: near}))
    assert getattr(on_top, name) == getattr(below, name) == near


@pytest.mark.parametrize("empty", [{}, {"model_call_capture_dir": None}])
def test_the_keys_of_evaluation_fall_back_to_the_other_place(empty: dict[str, Any]) -> None:
    keys = {"model_call_capture_dir": "/calls", "observability_enabled": True}
    for content in keys | nested(block() | empty), block() | empty | nested(keys):
        config = token_id_capture_config(content)
        assert config.evaluation_enabled
        assert config.resolved_dir() == Path("/calls")


# ---- training and evaluation


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("evaluation", [True, False])
def test_training_and_evaluation_capture_are_independent(training: bool, evaluation: bool) -> None:
    config = token_id_capture_config(
        {
            "token_id_capture": {"enabled": training, "dir": "/x"},
            "observability_enabled": evaluation,
            "model_call_capture_dir": "/calls",
        }
    )
    assert (config.enabled, config.evaluation_enabled) == (training, evaluation)


def test_evaluation_needs_its_directory() -> None:
    assert not token_id_capture_config({"observability_enabled": True}).evaluation_enabled
    assert not token_id_capture_config(block(dir="/x") | {"observability_enabled": True}).evaluation_enabled
    config = token_id_capture_config({"observability_enabled": True, "model_call_capture_dir": "/calls"})
    assert config.evaluation_enabled


# ---- who takes part


def agent(flag: Any, name: str = "coder") -> dict[str, Any]:
    return {name: {"responses_api_agents": {"simple_agent": {"token_id_capture": flag, "port": 3}}}}


def on(**values: Any) -> dict[str, Any]:
    return block(dir="/x", **values)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        lambda flag: on() | agent(flag),
        lambda flag: nested(on() | agent(flag)),
        lambda flag: agent(flag) | nested(on()),
        lambda flag: on() | nested(agent(flag)),
        lambda flag: omega(on() | agent(flag)),
        lambda flag: omega(nested(on() | agent(flag))),
    ],
    ids=["on top", "below", "block below", "flag below", "omegaconf on top", "omegaconf below"],
)
def test_an_agent_takes_part_by_its_own_flag(place: Any, flag: bool) -> None:
    assert token_id_capture_enabled_for_agent(place(flag), "coder") is flag


def test_one_flag_among_several_servers_of_an_agent_is_enough() -> None:
    servers = {"one": {"token_id_capture": False}, "two": {"token_id_capture": True}, "three": {}, "four": None}
    assert token_id_capture_enabled_for_agent(on() | {"coder": {"responses_api_agents": servers}}, "coder")


def test_a_flag_of_one_agent_says_nothing_of_another() -> None:
    content = on() | agent(True) | agent(False, "other") | {"third": {"responses_api_agents": {"x": {}}}}
    for name in "other", "third", "missing", "token_id_capture", "":
        assert not token_id_capture_enabled_for_agent(content, name)


@pytest.mark.parametrize("name", ["coder", "missing", "", None])
def test_with_all_agents_everyone_takes_part(name: str | None) -> None:
    assert token_id_capture_enabled_for_agent(on(all_agents=True) | agent(False), name)


def test_an_unknown_agent_takes_part_only_through_all_agents() -> None:
    assert not token_id_capture_enabled_for_agent(on() | agent(True), None)


@pytest.mark.parametrize("off", [{}, {"enabled": False}, {"enabled": False, "all_agents": True}])
def test_flags_do_nothing_while_the_block_is_off(off: dict[str, Any]) -> None:
    assert not token_id_capture_enabled_for_agent({"token_id_capture": off} | agent(True), "coder")
    assert not token_id_capture_enabled_for_agent(agent(True), "coder")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("all_agents", [True, False])
@pytest.mark.parametrize("flag", ["false", "true", "", 0, 1, None, {}, []])
def test_a_flag_that_isn_t_a_bool_is_refused(flag: Any, enabled: bool, all_agents: bool) -> None:
    content = {"token_id_capture": {"enabled": enabled, "all_agents": all_agents, "dir": "/x"}} | agent(flag)
    path = r"coder\.responses_api_agents\.simple_agent\.token_id_capture"
    with pytest.raises(ConfigError, match=f"^{path} is .*, expected true or false"):
        token_id_capture_enabled_for_agent(content, "coder")
    with pytest.raises(ConfigError, match=rf"^env\.nemo_gym\.{path} is"):
        token_id_capture_enabled_for_agent(nested(content), "coder")


def test_a_wrong_flag_of_another_agent_is_not_looked_at() -> None:
    assert token_id_capture_enabled_for_agent(on() | agent(True) | agent("false", "other"), "coder")


@pytest.mark.parametrize("all_agents", [True, False])
def test_a_configuration_that_was_read_knows_no_flags(all_agents: bool) -> None:
    config = token_id_capture_config(on(all_agents=all_agents) | agent(True))
    if all_agents:
        assert token_id_capture_enabled_for_agent(config, "coder")
    else:
        with pytest.raises(ConfigError, match="hand in the global config dict"):
            token_id_capture_enabled_for_agent(config, "coder")


def test_flags_at_two_places_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at coder\.resp\w+ and at env\.nemo_gym\.coder\.resp\w+ contradict"):
        token_id_capture_enabled_for_agent(on() | agent(True) | nested(agent(False)), "coder")
    assert token_id_capture_enabled_for_agent(on() | agent(True) | nested(agent(True)), "coder")


@pytest.mark.parametrize(
    "entry", [None, 3, "true", [], {"responses_api_agents": 3}, {"responses_api_agents": {"a": "true", "b": None}}]
)
def test_an_agent_of_another_shape_has_no_flag(entry: Any) -> None:
    assert not token_id_capture_enabled_for_agent(on() | {"coder": entry}, "coder")


def test_a_name_of_an_agent_that_isn_t_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name of the agent is 3"):
        token_id_capture_enabled_for_agent(on(), 3)  # type: ignore[arg-type]


def test_whether_an_agent_takes_part_is_not_answered_from_a_wrong_block() -> None:
    with pytest.raises(ConfigError, match="has no setting 'dirr'"):
        token_id_capture_enabled_for_agent(block(dirr="/x") | agent(True), "coder")


# ---- where to write


def test_the_directory_is_the_block_s_own_else_that_of_evaluation() -> None:
    assert read(dir="/x").resolved_dir() == Path("/x")
    calls = {"model_call_capture_dir": "/calls"}
    assert token_id_capture_config(block() | calls).resolved_dir() == Path("/calls")
    assert token_id_capture_config(block(dir="/x") | calls).resolved_dir() == Path("/x")


def test_capture_with_nowhere_to_write_is_refused() -> None:
    message = refused(block())
    for way_out in "token_id_capture.dir", "token_id_capture.sink", "install_token_sink", "rebuild_response: false":
        assert way_out in message


def test_a_sink_that_is_configured_is_somewhere_to_write() -> None:
    assert read(sink=named("Sink")).enabled


def test_a_sink_that_is_installed_is_somewhere_to_write() -> None:
    install_token_sink(Sink())
    assert read().enabled
    install_token_sink(None)
    assert "nowhere to write" in refused(block())


def test_a_framework_that_reads_by_itself_may_write_by_itself() -> None:
    assert read(rebuild_response=False).enabled


@pytest.mark.parametrize("path", ["relative", "./x", "~/x", "", "???", "${oc.env:HOME}/x"])
def test_a_directory_that_isn_t_absolute_is_refused(path: str) -> None:
    assert refused(block(dir=path)).startswith(f"token_id_capture.dir is {path!r}, expected an absolute path")
    message = refused(block() | {"model_call_capture_dir": path})
    assert message.startswith("model_call_capture_dir (the directory, as token_id_capture.dir is not set) is ")
    assert "absolute path" in message


def test_the_error_says_that_a_tilde_is_not_expanded() -> None:
    assert refused(block(dir="~/x")).endswith("(~ is not expanded)")


def test_a_reference_in_a_plain_directory_is_refused() -> None:
    assert "a path without ${...}" in refused(block(dir="/x/${oc.env:USER}"))


def test_a_directory_with_nul_is_refused() -> None:
    assert "a path without NUL" in refused(block(dir="/x\0y"))


@pytest.mark.parametrize("key", ["dir", "model_call_capture_dir"])
def test_a_directory_that_isn_t_used_may_be_relative(key: str) -> None:
    off, beside_sink = {"enabled": False}, {"enabled": True, "sink": "a:b"}
    for settings_ in off, beside_sink:
        inside = {"dir": "relative"} if key == "dir" else {}
        outside = {} if key == "dir" else {key: "relative"}
        config = token_id_capture_config({"token_id_capture": settings_ | inside} | outside)
        assert config.resolved_dir() == Path("relative")


def test_a_relative_directory_of_evaluation_is_fine_where_the_block_has_its_own() -> None:
    config = token_id_capture_config(block(dir="/x") | {"model_call_capture_dir": "relative"})
    assert config.model_call_capture_dir == "relative"


def test_a_directory_beside_a_sink_warns_that_nothing_is_written_there(caplog: pytest.LogCaptureFixture) -> None:
    read(sink="a:b", dir="/x/y")
    assert len(warnings(caplog)) == 1
    assert "token_id_capture.dir ('/x/y') has no effect beside token_id_capture.sink ('a:b')" in warnings(caplog)[0]
    assert caplog.records[0].levelno == logging.WARNING


def test_the_directory_of_evaluation_beside_a_sink_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    token_id_capture_config(block(sink="a:b") | {"model_call_capture_dir": "/calls"})
    read(dir="/x")
    token_id_capture_config({"token_id_capture": {"dir": "/x", "sink": "a:b", "sink_kwargs": {"a": 1}}})
    assert warnings(caplog) == []


def test_arguments_without_a_sink_warn(caplog: pytest.LogCaptureFixture) -> None:
    read(dir="/x", sink_kwargs={"token": SECRET})
    assert warnings(caplog) == ["token_id_capture.sink_kwargs has no effect without token_id_capture.sink"]


def test_messages_go_through_the_logger_of_the_package() -> None:
    assert tokcap.config.logger is logging.getLogger("tokcap.config")


# ---- building the sink


def test_the_configured_sink_is_built_with_its_arguments() -> None:
    sink: Any = read(sink=named("Sink"), sink_kwargs={"endpoint": "here", "retries": 3}).build_sink()
    assert type(sink) is Sink
    assert sink.arguments == {"endpoint": "here", "retries": 3}


def test_a_function_may_make_the_sink() -> None:
    sink: Any = read(sink=named("made_by_a_function"), sink_kwargs={"a": 1}).build_sink()
    assert sink.arguments == {"a": 1}


def test_no_sink_is_built_where_the_file_store_is_used_or_capture_is_off() -> None:
    assert read(dir="/x").build_sink() is None
    off = token_id_capture_config({"token_id_capture": {"enabled": False, "sink": named("Sink")}})
    assert off.build_sink() is None
    assert Sink.made == []


def test_what_a_sink_does_to_its_arguments_stays_its_own_affair() -> None:
    config = read(sink=named("Sink"), sink_kwargs={"options": {"a": [1]}})
    sink: Any = config.build_sink()
    sink.arguments["options"]["a"].append(2)
    assert config.token_id_capture.sink_kwargs == {"options": {"a": [1]}}


def not_built(target: str, **kwargs: Any) -> str:
    config = read(sink=target, sink_kwargs=kwargs)
    with pytest.raises(ConfigError) as caught:
        config.build_sink()
    said = "".join(traceback.format_exception(caught.value))
    assert SECRET not in said
    assert str(caught.value).startswith("token_id_capture.sink ")
    return str(caught.value)


@pytest.mark.parametrize("target", ["", "no_colon", "a.b:", ":C", "a:b:c", ".a:b", "a..b:c", "a b:c", "a:b.c", "a/b:C"])
def test_a_sink_that_isn_t_module_and_class_is_refused(target: str) -> None:
    assert f"token_id_capture.sink is {target!r}, expected module.path:ClassName" in not_built(target)


def test_a_missing_module_is_refused() -> None:
    assert "No module named 'no_such_module'" in not_built("no_such_module.x:Sink")


def test_a_module_that_raises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokcap_test_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "ZeroDivisionError: division by zero" in not_built("tokcap_test_broken:Sink")


def test_a_missing_class_is_refused() -> None:
    assert "has no attribute 'NoSuchSink'" in not_built(named("NoSuchSink"))


def test_something_that_can_t_be_called_is_refused() -> None:
    assert "a str, which can't be called" in not_built(named("not_callable"))


def test_arguments_that_the_class_doesn_t_take_are_refused_by_name() -> None:
    message = not_built(named("TokenOnlySink"), token=SECRET, pasword=SECRET)
    assert "can't be made with token_id_capture.sink_kwargs (pasword, token): TypeError" in message
    assert "unexpected keyword argument 'pasword'" in message


def test_missing_arguments_are_refused() -> None:
    message = not_built(named("TokenOnlySink"))
    assert "(no arguments): TypeError" in message
    assert "'token'" in message


@pytest.mark.parametrize("reference", [True, False])
def test_a_constructor_that_raises_is_refused_without_its_secrets(
    reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", SECRET)
    token = "${oc.env:TOKCAP_TEST_TOKEN}" if reference else SECRET
    message = not_built(
        named("RaisingSink"), token=token, host="db9.example", port=6379, pin="q7", deep=[{"a": 77_123}]
    )
    assert "RuntimeError" in message
    assert f"{Path(__file__).name}:" in message
    assert "can't log in at" in message
    assert message.endswith(": denied")
    for value in SECRET[:9], SECRET[2:], "db9.example", "6379", "q7", "77123":
        assert value not in message


@pytest.mark.parametrize(
    ("message", "value", "left"),
    [
        ("no <swordfish> here", "swordfish", "no <***> here"),
        ("no <wordfi> here", "swordfish", "no <***> here"),
        ("no <word> here", "swordfish", "no <***> here"),
        ("no <wor> here", "swordfish", "no <wor> here"),
        ("the fish", "swordfish", "the ***"),
        ("the fis", "swordfish", "the fis"),
        ("fishfish", "swordfish", "******"),
        ("swo-swo", "swo", "***-***"),
        ("pin 77123, not 771", 77_123, "pin ***, not 771"),
        ("rate 0.125", 0.125, "rate ***"),
        ("bytes b'\\x00x'", b"\x00x", "bytes ***"),
        ("a\\tb or a\tb", "a\tb", "*** or ***"),
        ("at /secret/place", Path("/secret/place"), "at ***"),
        ("in swordfish", {"a": [("swordfish",)]}, "in ***"),
        ("True and None stay", [True, None, ""], "True and None stay"),
        ("a large number", 10**5000, "a large number"),
    ],
    ids=named_by_type,
)
def test_a_message_loses_what_it_has_in_common_with_a_secret(message: str, value: Any, left: str) -> None:
    assert without_values(message, value) == left


def test_a_long_message_is_cut() -> None:
    assert without_values("x" * 10_000) == "x" * 500


def test_an_error_that_can_t_be_shown_is_refused_too() -> None:
    assert "UnprintableError" in not_built(named("UnprintablyRaisingSink"))


def test_a_sink_that_lacks_a_method_is_refused() -> None:
    assert "a WithoutMark that lacks mark_incomplete; it can't be a TokenSink" in not_built(named("WithoutMark"))


def test_a_sink_with_something_else_in_place_of_a_method_is_refused() -> None:
    assert "in place of mark_incomplete that can't be called" in not_built(named("WithNumberForMark"))


def test_a_class_that_comes_out_in_place_of_a_sink_is_refused() -> None:
    assert "is the class Sink" in not_built(named("returns_a_class"))


def test_other_endpoints_are_built_in_the_same_way() -> None:
    build = TokenIdCaptureConfig._build_endpoint
    assert isinstance(build("tests.memory_store:MemoryStore", {"state": 3}, TokenSource, "source"), MemoryStore)
    with pytest.raises(ConfigError, match=r"token_id_capture\.source .* lacks freeze, retire; .* a TokenSource"):
        build(named("Sink"), {}, TokenSource, "source")
    with pytest.raises(ConfigError, match=r"with token_id_capture\.source_kwargs \(nope\)"):
        build("tests.memory_store:MemoryStore", {"nope": 3}, TokenSource, "source")


# ---- references and secrets


def built_with(text: Any) -> Any:
    sink: Any = read(sink=named("Sink"), sink_kwargs={"value": text}).build_sink()
    return sink.arguments["value"]


REFERENCES = [
    ("${oc.env:TOKCAP_TEST_TOKEN}", SECRET),
    ("Bearer ${oc.env:TOKCAP_TEST_TOKEN}!", f"Bearer {SECRET}!"),
    ("${oc.env:TOKCAP_TEST_TOKEN,other}", SECRET),
    ("${ oc.env: TOKCAP_TEST_TOKEN }", SECRET),
    ("${oc.env:'TOKCAP_TEST_TOKEN'}", SECRET),
    ("${oc.env:TOKCAP_TEST_NO, a b }", "a b"),
    ("${oc.env:TOKCAP_TEST_NO,'a, b'}", "a, b"),
    ("${oc.env:TOKCAP_TEST_NO,http://x:80/y}", "http://x:80/y"),
    ("${oc.env:TOKCAP_TEST_NO,10}", "10"),
    ("${oc.env:TOKCAP_TEST_NO,xyx}", "xyx"),
    ("${oc.env:TOKCAP_TEST_NO,''}", ""),
    ("${oc.env:TOKCAP_TEST_NO,null}", None),
    ("a${oc.env:TOKCAP_TEST_NO,null}", "aNone"),
    ("${oc.env:TOKCAP_TEST_NO,x}${oc.env:TOKCAP_TEST_TOKEN}", f"x{SECRET}"),
    ("\\${oc.env:TOKCAP_TEST_TOKEN}", "${oc.env:TOKCAP_TEST_TOKEN}"),
    ("plain", "plain"),
]


@pytest.mark.parametrize("kind", [dict, omega])
@pytest.mark.parametrize(("text", "value"), REFERENCES)
def test_references_to_the_environment_are_resolved_as_omegaconf_does(
    text: str, value: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", SECRET)
    arguments = {"value": text, "deep": [{"value": text}]}
    sink: Any = token_id_capture_config(kind(block(sink=named("Sink"), sink_kwargs=arguments))).build_sink()
    assert sink.arguments == {"value": value, "deep": [{"value": value}]}


def test_a_variable_set_to_nothing_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", "")
    assert built_with("${oc.env:TOKCAP_TEST_TOKEN,default}") == ""


@pytest.mark.parametrize("text", ["${HOME}/x", "$HOME", "{oc.env:HOME}", "${other:x}", "$${x}", "${"])
def test_other_text_in_plain_arguments_stays_as_it_is(text: str) -> None:
    assert built_with(text) == text


@pytest.mark.parametrize("default", ["'", "'x\"", "x'"])
def test_a_quote_that_isn_t_one_of_a_pair_belongs_to_the_default(default: str) -> None:
    assert built_with(f"${{oc.env:TOKCAP_TEST_NO,{default}}}") == default


def test_what_a_variable_contains_is_not_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", "${oc.env:HOME}")
    assert built_with("${oc.env:TOKCAP_TEST_TOKEN}") == "${oc.env:HOME}"


def test_a_missing_variable_is_named_when_the_sink_is_built() -> None:
    config = read(sink=named("Sink"), sink_kwargs={"auth": {"token": "${oc.env:TOKCAP_TEST_NO}"}})
    with pytest.raises(ConfigError, match=r"sink_kwargs\.auth\.token needs the environment variable TOKCAP_TEST_NO,"):
        config.build_sink()
    assert Sink.made == []


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:A,${oc.env:tr0ub4dor-and-3}}",
        "${oc.env:A",
        "tr0ub4dor-and-3 ${oc.env:}",
        "${oc.decode:tr0ub4dor-and-3}",
        "${oc.env:tr0ub4dor-and-3} ${oc.select:a}",
    ],
)
def test_a_reference_that_only_omegaconf_can_read_is_refused_without_showing_it(text: str) -> None:
    assert "has a reference that can't be read here" in not_built_value(text)


def not_built_value(text: str) -> str:
    config = read(sink=named("Sink"), sink_kwargs={"value": text})
    with pytest.raises(ConfigError, match=r"^token_id_capture\.sink_kwargs\.value ") as caught:
        config.build_sink()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


@pytest.mark.parametrize("kind", [dict, omega])
def test_a_configuration_never_holds_nor_shows_what_a_reference_leads_to(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    monkeypatch.setenv("TOKCAP_TEST_TOKEN", SECRET)
    arguments = {"token": "${oc.env:TOKCAP_TEST_TOKEN}", "list": ["x${oc.env:TOKCAP_TEST_TOKEN}"]}
    config = token_id_capture_config(kind(block(sink=named("Sink"), sink_kwargs=arguments)))
    sink: Any = config.build_sink()
    assert sink.arguments["token"] == SECRET
    assert config.token_id_capture.sink_kwargs == arguments
    for shown in repr(config), str(config), repr(vars_of(config)), str(msgspec.to_builtins(config, enc_hook=str)):
        assert SECRET not in shown


def vars_of(config: TokenIdCaptureConfig) -> list[Any]:
    inner = config.token_id_capture
    return [getattr(inner, name) for name in inner.__struct_fields__]


def test_a_configuration_shows_the_names_of_arguments_and_hides_their_values() -> None:
    config = read(sink=named("Sink"), sink_kwargs={"token": SECRET, "nested": {"inner": SECRET}})
    assert "sink_kwargs={'token': ..., 'nested': ...}" in repr(config)
    rich = dict(config.token_id_capture.__rich_repr__())
    for shown in repr(config), repr(config.token_id_capture), f"{config}", repr(rich):
        assert SECRET not in shown
        assert "inner" not in shown
        assert "tests.test_config:Sink" in shown


def test_arguments_that_aren_t_a_mapping_are_refused_without_showing_them() -> None:
    for value in f"token={SECRET}", [SECRET], {3: SECRET}:
        message = refused(block(sink=named("Sink"), sink_kwargs=value))
        assert message.startswith("token_id_capture.sink_kwargs is a ")
        assert SECRET not in message


# ---- OmegaConf


def test_an_omegaconf_object_reads_like_a_plain_one() -> None:
    content = block(dir="/x", max_mask_fraction=0.5) | {"observability_enabled": True, "model_call_capture_dir": "/c"}
    for shape in content, nested(content):
        assert token_id_capture_config(omega(shape)) == token_id_capture_config(content)
    assert token_id_capture_config({"token_id_capture": omega(content).token_id_capture}) == read(
        dir="/x", max_mask_fraction=0.5
    )
    assert token_id_capture_config({"env": omega(nested(content)).env}) == token_id_capture_config(content)


def test_settings_of_an_omegaconf_object_may_be_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", "/scratch")
    config = omega(
        {
            "training": {"on": True, "least": 9, "server": {"host": "h", "more": ["${training.least}"]}},
            "agents": {"a": {"token_id_capture": "${training.on}"}},
            "coder": {"responses_api_agents": "${agents}"},
            "token_id_capture": {
                "enabled": "${training.on}",
                "dir": "${oc.env:TOKCAP_TEST_TOKEN}/store",
                "mask_fraction_min_samples": "${.least}",
                "least": 3,
            },
        }
    )
    del config.token_id_capture["least"]
    config.token_id_capture.mask_fraction_min_samples = "${training.least}"
    read_ = token_id_capture_config(config)
    assert read_.enabled
    assert read_.resolved_dir() == Path("/scratch/store")
    assert read_.token_id_capture.mask_fraction_min_samples == 9
    assert token_id_capture_enabled_for_agent(config, "coder")


def test_the_block_itself_may_be_a_reference() -> None:
    config = omega({"shared": {"enabled": True, "dir": "/x"}, "token_id_capture": "${shared}"})
    assert token_id_capture_config(config) == read(dir="/x")


def test_arguments_may_refer_to_anything_in_the_configuration() -> None:
    shared = {"host": "h", "ports": [1, "${shared.last}"], "last": 2}
    arguments = {
        "server": "${shared}",
        "port": "${shared.ports[0]}",
        "list": ["${shared.host}", {"a": "${shared.last}"}],
    }
    values = block(sink=named("Sink"), sink_kwargs=arguments) | {"shared": shared}
    sink: Any = token_id_capture_config(omega(values)).build_sink()
    expected = {"host": "h", "ports": [1, 2], "last": 2}
    assert sink.arguments == {"server": expected, "port": 1, "list": ["h", {"a": 2}]}
    assert type(sink.arguments["server"]) is dict
    assert type(sink.arguments["server"]["ports"]) is list


def test_all_arguments_may_be_one_reference() -> None:
    values = block(sink=named("Sink"), sink_kwargs="${shared}") | {"shared": {"host": "h", "again": "${shared.host}"}}
    sink: Any = token_id_capture_config(omega(values)).build_sink()
    assert sink.arguments == {"host": "h", "again": "h"}


def test_references_elsewhere_that_can_t_be_resolved_don_t_matter() -> None:
    broken = {"value": "${no.such.key}", "other": "${oc.env:TOKCAP_TEST_NO}", "must": "???", "agent": {"x": "${nope}"}}
    content = block(sink=named("Sink")) | agent(True) | broken | {"env": broken | {"nemo_gym": broken}}
    config = omega(content)
    config.coder.other = "${nope}"
    config.coder.responses_api_agents.simple_agent.port = "${nope}"
    assert token_id_capture_config(config).enabled
    assert token_id_capture_enabled_for_agent(config, "coder")
    assert not token_id_capture_enabled_for_agent(config, "agent")


@pytest.mark.parametrize(
    ("content", "path"),
    [
        (block(dir="${nope}"), "token_id_capture.dir"),
        ({"token_id_capture": "${nope}"}, "token_id_capture"),
        ({"env": "${nope}"}, "env"),
        (block(dir="/x") | {"observability_enabled": "${nope}"}, "observability_enabled"),
        (nested({"token_id_capture": {"enabled": "${nope}"}}), "env.nemo_gym.token_id_capture.enabled"),
    ],
)
def test_a_setting_that_can_t_be_resolved_is_refused(content: Any, path: str) -> None:
    message = refused(omega(content))
    assert message.startswith(f"{path} is ${{nope}}, which OmegaConf can't resolve here (InterpolationKeyError)")


def test_a_flag_that_can_t_be_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"coder\.\S+\.token_id_capture is \$\{nope\}, which OmegaConf can't"):
        token_id_capture_enabled_for_agent(omega(on() | agent("${nope}")), "coder")


@pytest.mark.parametrize("where", ["${nope}", "${shared}"])
def test_an_argument_that_can_t_be_resolved_is_refused_when_the_sink_is_built(where: str) -> None:
    content = block(sink=named("Sink"), sink_kwargs={"a": [where]}) | {"shared": {"x": "${oc.env:TOKCAP_TEST_NO}"}}
    config = token_id_capture_config(omega(content))
    with pytest.raises(ConfigError, match=r"^token_id_capture\.sink_kwargs\.a\.0.* OmegaConf can't resolve"):
        config.build_sink()


def test_a_setting_that_must_be_given_is_refused_where_it_matters() -> None:
    assert "token_id_capture.enabled is '???', expected true or false" in refused(omega(block(enabled="???")))
    assert "token_id_capture.dir is '???', expected an absolute path" in refused(omega(block(dir="???")))
    assert not token_id_capture_config(omega(block(enabled=False, dir="???"))).enabled


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dir", "${oc.env:TOKCAP_TEST_TOKEN}", SECRET),
        ("enabled", "${oc.env:TOKCAP_TEST_TOKEN}", SECRET),
        ("max_mask_fraction", "${oc.decode:${oc.env:TOKCAP_TEST_TOKEN}}", "77123"),
        ("mask_fraction_min_samples", "${oc.decode:${oc.env:TOKCAP_TEST_TOKEN}}", "-77123"),
    ],
)
def test_a_refused_reference_is_shown_in_place_of_its_value(
    name: str, text: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", value)
    with pytest.raises(ConfigError, match=f"^token_id_capture.{name} is ") as caught:
        token_id_capture_config(omega(block(**{"dir": "/x", name: text})))
    assert f"is {text}, expected" in str(caught.value)
    assert value not in "".join(traceback.format_exception(caught.value))


def test_what_a_resolver_says_when_it_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", f"[{SECRET}")
    with pytest.raises(ConfigError, match="can't resolve here") as caught:
        token_id_capture_config(omega(block(dir="${oc.decode:${oc.env:TOKCAP_TEST_TOKEN}}")))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("target", ["no_such_module_{}:Sink", "tests.test_config:No{}", "tests {}"])
def test_a_sink_named_by_a_reference_is_shown_as_the_reference(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", target.format("Hidden"))
    config = token_id_capture_config(omega(block(sink="${oc.env:TOKCAP_TEST_TOKEN}")))
    with pytest.raises(ConfigError, match=r"token_id_capture\.sink is \$\{oc\.env:TOKCAP_TEST_TOKEN\}") as caught:
        config.build_sink()
    assert "Hidden" not in "".join(traceback.format_exception(caught.value))


def test_a_directory_from_a_reference_is_shown_as_the_reference(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", "/hidden")
    config = token_id_capture_config(omega(block(sink="a:b", dir="${oc.env:TOKCAP_TEST_TOKEN}")))
    assert config.resolved_dir() == Path("/hidden")
    assert "${oc.env:TOKCAP_TEST_TOKEN}" in warnings(caplog)[0]
    assert "hidden" not in warnings(caplog)[0] + repr(config) + repr(pickle.loads(pickle.dumps(config)))


@pytest.mark.parametrize("struct", [True, False])
def test_an_omegaconf_object_that_allows_no_new_keys_is_read(struct: bool) -> None:
    from omegaconf import OmegaConf

    config = omega({"a": 1, "coder": {}})
    OmegaConf.set_struct(config, struct)
    assert not token_id_capture_config(config).enabled
    assert not token_id_capture_enabled_for_agent(config, "coder")


def test_an_omegaconf_list_is_refused() -> None:
    assert "the global config dict is" in refused(omega([1]))
    assert "token_id_capture is" in refused(omega({"token_id_capture": [1]}))


# ---- files


YAML = """
token_id_capture:
  enabled: true
  all_agents: true
  dir: /x/store
  sink_kwargs: {}
  max_mask_fraction: null
model_call_capture_dir: /x/calls
observability_enabled: true
"""


def test_a_yaml_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    for path in tmp_path / "run.yaml", str(tmp_path / "run.yaml"):
        config = token_id_capture_config(load_config(path))
        assert config.resolved_dir() == Path("/x/store")
        assert config.evaluation_enabled
    assert token_id_capture_enabled_for_agent(load_config(path), None)


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.JSON"
    path.write_text("\ufeff" + json.dumps(on()), encoding="utf-8")
    assert token_id_capture_config(load_config(path)) == read(dir="/x")


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_file_is_an_empty_configuration(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert load_config(tmp_path / name) == {}


def without_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def importing(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "yaml":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    monkeypatch.setattr(builtins, "__import__", importing)


def test_a_missing_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    without_yaml(monkeypatch)
    with pytest.raises(ConfigError, match=r'pip install "tokcap\[yaml\]"'):
        load_config(tmp_path / "run.yaml")


def test_a_json_file_needs_no_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps(on()))
    without_yaml(monkeypatch)
    assert load_config(tmp_path / "run.json") == on()


def not_loaded(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def test_a_file_that_isn_t_there_is_refused(tmp_path: Path) -> None:
    assert "No such file or directory" in not_loaded(tmp_path / "run.yaml")
    assert "Is a directory" in not_loaded(tmp_path)
    with pytest.raises(ConfigError, match="can't be read"):
        load_config("a\0b")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.yaml", f"a: b\ntoken: [{SECRET}", "it is not YAML, line 2"),
        ("a.yaml", f"a: {SECRET}\n\tb: c", "it is not YAML, line 2"),
        ("a.yaml", f"a: !!python/object/apply:os.getenv [{SECRET}]", "it is not YAML, line 1"),
        ("a.yaml", f"{SECRET}: \x07", "it is not YAML"),
        ("a.json", f'{{"a":\n {SECRET}}}', "it is not JSON, line 2"),
        ("a.yaml", "[" * 20_000, "nested too deeply"),
        ("a.json", "[" * 200_000, "nested too deeply"),
        ("a.yaml", f"- {SECRET}", "is a list, expected a mapping"),
        ("a.json", "3", "is 3, expected a mapping"),
    ],
)
def test_a_file_of_other_content_is_refused_without_showing_it(
    name: str, content: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert problem in not_loaded(tmp_path / name)


def test_a_file_that_isn_t_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff")
    assert "it is not UTF-8" in not_loaded(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", "b:\n  enabled: true\n  dir: /x\n  enabled: false\n"),
        ("a.json", '{"b": {"enabled": true, "enabled": false}}'),
    ],
)
def test_a_key_that_stands_twice_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert "has the key 'enabled' twice in one mapping" in not_loaded(tmp_path / name)


def test_a_merged_key_of_yaml_may_be_given_again(tmp_path: Path) -> None:
    text = "a: &a {key: 1, last: 2}\nx: {y: &b {<<: *a, key: 3}}\nc: {<<: *b, last: 4}\n1: a\n'1': b\n"
    (tmp_path / "a.yaml").write_text(text)
    content: Any = load_config(tmp_path / "a.yaml")
    assert content["x"]["y"] == {"key": 3, "last": 2}
    assert content["c"] == {"key": 3, "last": 4}
    assert (content[1], content["1"]) == ("a", "b")


def test_references_in_a_file_are_resolved_when_the_sink_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text(
        f"token_id_capture:\n  enabled: true\n  sink: {named('Sink')}\n  sink_kwargs:\n"
        "    token: ${oc.env:TOKCAP_TEST_TOKEN}\n"
    )
    config = token_id_capture_config(load_config(tmp_path / "a.yaml"))
    monkeypatch.setenv("TOKCAP_TEST_TOKEN", SECRET)
    sink: Any = config.build_sink()
    assert sink.arguments == {"token": SECRET}


# ---- the environment


def test_an_environment_that_names_nothing_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_from_environment() is None
    monkeypatch.setenv("TOKCAP_CONFIG", "")
    monkeypatch.setenv("TOKCAP_DIR", "")
    assert config_from_environment() is None


def test_a_directory_in_the_environment_turns_capture_on_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_DIR", "/x")
    assert config_from_environment() == read(dir="/x", all_agents=True)


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_a_file_in_the_environment_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text(json.dumps(on()))
    monkeypatch.setenv("TOKCAP_CONFIG", str(tmp_path / name))
    assert config_from_environment() == read(dir="/x")


def test_a_relative_directory_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKCAP_DIR", "x")
    with pytest.raises(ConfigError, match="the environment variable TOKCAP_DIR is 'x', expected an absolute path"):
        config_from_environment()


@pytest.mark.parametrize(
    ("content", "other"),
    [
        (on(), ""),
        (block() | {"model_call_capture_dir": "/x/"}, ""),
        (block(dir="/y") | {"model_call_capture_dir": "/x"}, "'/y'"),
        (block(sink="a:b", dir="/x"), "no directory"),
        (block(rebuild_response=False), "no directory"),
    ],
)
def test_a_file_and_a_directory_in_the_environment_must_agree(
    content: Any, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(content))
    monkeypatch.setenv("TOKCAP_CONFIG", str(tmp_path / "run.json"))
    monkeypatch.setenv("TOKCAP_DIR", "/x")
    if not other:
        assert config_from_environment() == token_id_capture_config(content)
    else:
        with pytest.raises(
            ConfigError, match=rf"TOKCAP_DIR is '/x', but .*run\.json.* writes to {other}; set only one"
        ):
            config_from_environment()


def test_a_file_that_is_named_but_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKCAP_CONFIG", str(tmp_path / "no.yaml"))
    with pytest.raises(ConfigError, match="No such file"):
        config_from_environment()


# ---- the sink of a process


def both() -> MemoryStore:
    return MemoryStore(MemoryState())


def test_a_process_without_capture_has_no_sink_and_no_source(caplog: pytest.LogCaptureFixture) -> None:
    install_token_sink(both())
    install_token_source(both())
    off = {"token_id_capture": {"enabled": False, "sink": named("Sink"), "dir": "/x"}}
    assert process_sink(off) is None is process_source(off)
    assert Sink.made == []
    assert warnings(caplog) == []


def test_the_sink_of_a_process_is_the_configured_one() -> None:
    install_token_sink(both())
    sink: Any = process_sink(read(sink=named("Sink"), sink_kwargs={"a": 1}))
    assert type(sink) is Sink
    assert sink.arguments == {"a": 1}


def test_else_it_is_the_installed_one() -> None:
    sink = both()
    install_token_sink(sink)
    assert process_sink(read()) is sink


def test_an_installed_sink_counts_before_the_file_store_with_a_warning(
    store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = both()
    install_token_sink(sink)
    config = read(dir=str(store_dir))
    assert process_sink(config) is process_sink(config) is sink
    assert list(store_dir.iterdir()) == []
    said = "a sink is installed in this process: nothing is written to the configured directory"
    assert warnings(caplog) == [said]


def test_else_it_is_the_file_store(store_dir: Path) -> None:
    sink = process_sink(read(dir=str(store_dir / "s")))
    assert isinstance(sink, FileStore)
    assert (store_dir / "s" / "rollouts").is_dir()


def test_the_file_store_is_in_the_directory_of_evaluation_if_the_block_has_none(store_dir: Path) -> None:
    sink = process_sink(block() | {"model_call_capture_dir": str(store_dir)})
    assert isinstance(sink, FileStore)
    assert (store_dir / "rollouts").is_dir()


def test_the_file_store_of_a_process_refuses_a_put_without_an_intent(store_dir: Path) -> None:
    sink: Any = process_sink(read(dir=str(store_dir)))
    entry = TokenEntry("r", "a", [1, 2], [3], [-0.5])
    with pytest.raises(StaleAttemptError):
        sink.put_now(entry)
    sink.begin_call_now("r", "a")
    sink.put_now(entry)


def test_the_file_store_of_a_process_has_the_bounds_of_the_block(store_dir: Path) -> None:
    sink: Any = process_sink(read(dir=str(store_dir), min_free_bytes=1 << 62, max_pending_bytes=1000))
    with pytest.raises(NoSpaceError, match="min_free_bytes"):
        sink.begin_call_now("r", "a")
    again = pickle.loads(pickle.dumps(sink))
    assert again._settings["max_pending_bytes"] == 1000
    again.close_now()


def test_a_process_that_records_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    config = read(rebuild_response=False)
    assert warnings(caplog) == []
    assert process_sink(config) is None is process_sink(config)
    assert warnings(caplog) == ["token_id_capture has neither a directory nor a sink: this process records nothing"]


def test_a_sink_that_was_taken_away_again_is_missed() -> None:
    install_token_sink(both())
    config = read()
    install_token_sink(None)
    with pytest.raises(ConfigError, match=r"is gone: install_token_sink\(\.\.\.\) again"):
        process_sink(config)


def test_the_configured_sink_is_built_once_per_process() -> None:
    def config() -> TokenIdCaptureConfig:
        return read(sink=named("Sink"), sink_kwargs={"list": [1]})

    assert process_sink(config()) is process_sink(config()) is process_sink(block(**vars_as_dict(config())))
    assert len(Sink.made) == 1


def vars_as_dict(config: TokenIdCaptureConfig) -> dict[str, Any]:
    inner = config.token_id_capture
    return {name: getattr(inner, name) for name in inner.__struct_fields__}


def test_another_configuration_has_another_sink() -> None:
    configs = [
        read(sink=named("Sink"), sink_kwargs={"a": 1}),
        read(sink=named("Sink"), sink_kwargs={"a": 2}),
        read(sink=named("made_by_a_function"), sink_kwargs={"a": 1}),
        read(sink=named("Sink"), sink_kwargs={"a": np.zeros(2)}),
    ]
    sinks = [process_sink(config) for config in configs]
    assert len({id(sink) for sink in sinks}) == 4
    assert [process_sink(config) for config in configs] == sinks


def test_threads_that_ask_at_the_same_time_get_the_same_sink(store_dir: Path) -> None:
    barrier = threading.Barrier(8)
    custom, files = read(sink=named("Sink")), read(dir=str(store_dir))

    def ask(config: TokenIdCaptureConfig) -> Any:
        barrier.wait(30)
        return process_sink(config)

    with ThreadPoolExecutor(8) as pool:
        for config in custom, files:
            assert len({id(sink) for sink in pool.map(ask, [config] * 8)}) == 1
    assert len(Sink.made) == 1


def test_a_sink_that_can_t_be_built_is_tried_again() -> None:
    config = read(sink=named("TokenOnlySink"), sink_kwargs={"token": "${oc.env:TOKCAP_TEST_NO}"})
    for _ in range(2):
        with pytest.raises(ConfigError, match="TOKCAP_TEST_NO"):
            process_sink(config)
    os.environ["TOKCAP_TEST_NO"] = "x"
    try:
        assert isinstance(process_sink(config), TokenOnlySink)
    finally:
        del os.environ["TOKCAP_TEST_NO"]


def test_a_forked_process_builds_its_own(store_dir: Path) -> None:
    custom, files = read(sink=named("Sink")), read(dir=str(store_dir))
    before = process_sink(custom), process_sink(files)
    code = 1
    child = os.fork()
    if child == 0:
        try:
            after = process_sink(custom), process_sink(files)
            again = process_sink(custom), process_sink(files)
            own = all(x is not None and x is not y for x, y in zip(after, before, strict=True))
            code = 0 if own and all(x is y for x, y in zip(after, again, strict=True)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (process_sink(custom), process_sink(files)) == before


def test_a_fork_while_another_thread_builds_a_sink_doesn_t_block_the_child() -> None:
    here = process_module._here()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with here.guard:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)
        os._exit(0 if process_sink(read(sink=named("Sink"))) is not None else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


# ---- the source of a process


def test_the_source_of_a_process_is_the_installed_one(store_dir: Path) -> None:
    source = both()
    install_token_source(source)
    install_token_sink(both())
    for values in {"dir": str(store_dir)}, {"sink": named("Sink")}, {}:
        assert process_source(read(**values)) is source
    assert list(store_dir.iterdir()) == []


def test_else_it_is_the_file_store_that_the_sink_is(store_dir: Path) -> None:
    config = read(dir=str(store_dir))
    source: Any = process_source(config)
    assert isinstance(source, FileStore)
    assert source is process_sink(config)
    assert process_source(block() | {"model_call_capture_dir": f"{store_dir}/"}) is source
    source.begin_call_now("r", "a")
    source.put_now(TokenEntry("r", "a", [1], [2], [-0.5]))
    with source.freeze_now("r") as snapshot:
        assert len(snapshot.entries) == 1


def test_an_installed_sink_is_read_from_even_beside_a_directory_because_it_is_what_was_written_to(
    store_dir: Path,
) -> None:
    sink = both()
    install_token_sink(sink)
    assert process_source(read(dir=str(store_dir))) is sink
    install_token_sink(Sink())
    with pytest.raises(ConfigError, match="install_token_source"):
        process_source(read(dir=str(store_dir)))
    assert process_source(read(dir=str(store_dir), rebuild_response=False)) is None


def test_else_it_is_the_installed_sink_if_that_is_a_source() -> None:
    sink = both()
    install_token_sink(sink)
    assert process_source(read()) is sink
    with pytest.raises(ConfigError, match="install_token_source"):  # the configured one is what is written to
        process_source(read(sink=named("Sink")))


@pytest.mark.parametrize("values", [{"sink": named("Sink")}, {"sink": named("Sink"), "dir": "/x"}, {}])
def test_nothing_to_read_from_is_refused(values: dict[str, Any]) -> None:
    install_token_sink(Sink())
    with pytest.raises(ConfigError, match=r"install_token_source\(\.\.\.\).*rebuild_response: false"):
        process_source(read(**values))


def test_a_process_that_doesn_t_rebuild_has_no_source(store_dir: Path) -> None:
    install_token_source(both())
    for values in {"dir": str(store_dir)}, {"sink": named("Sink")}, {}:
        assert process_source(read(rebuild_response=False, **values)) is None
    assert list(store_dir.iterdir()) == []


def test_a_directory_that_can_t_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for ask in process_sink, process_source:
        with pytest.raises(TokcapError, match="is not a directory"):
            ask(read(dir=str(tmp_path / "file")))


# ---- the end of a process


def test_what_was_built_is_closed_and_built_anew_afterwards(store_dir: Path) -> None:
    custom, files = read(sink=named("Sink")), read(dir=str(store_dir))
    sinks: list[Any] = [process_sink(custom), process_sink(files)]
    asyncio.run(close_process_endpoints())
    assert sinks[0].closed
    assert sinks[1]._closed
    anew = [process_sink(custom), process_sink(files)]
    assert all(x is not y for x, y in zip(anew, sinks, strict=True))


def test_what_was_installed_is_not_closed() -> None:
    sink = Sink()
    install_token_sink(sink)
    process_sink(read())
    asyncio.run(close_process_endpoints())
    assert not sink.closed


def test_an_error_of_one_sink_doesn_t_keep_the_others_open(store_dir: Path) -> None:
    sinks: list[Any] = [process_sink(read(sink=named("FailingToCloseSink"))), process_sink(read(sink=named("Sink")))]
    files: Any = process_sink(read(dir=str(store_dir)))
    with pytest.raises(OSError, match="the network is gone"):
        asyncio.run(close_process_endpoints())
    assert [sink.closed for sink in sinks] == [True, True]
    assert files._closed


def test_a_file_store_that_somebody_closed_is_not_handed_out(store_dir: Path) -> None:
    config = read(dir=str(store_dir))
    first: Any = process_sink(config)
    first.close_now()
    second: Any = process_source(config)
    assert second is not first
    second.begin_call_now("r", "a")


# ---- what importing costs


def test_importing_the_configuration_loads_nothing_optional() -> None:
    added = newly_imported("tokcap.config", "tokcap.installed")
    optional = {"yaml", "omegaconf", "antlr4", "uvicorn", "filelock", "asyncio", "json", "multiprocessing", "difflib"}
    top_level = {name.partition(".")[0] for name in added}
    assert top_level & optional == set()
    assert not any(name.startswith(("tokcap.store", "tokcap.conformance")) for name in added)
    assert {name for name in top_level if name not in sys.stdlib_module_names} <= {"tokcap", "numpy", "msgspec"}


def test_reading_a_plain_configuration_loads_nothing_optional() -> None:
    code = (
        "import sys; from tokcap.config import *; from tokcap.config import token_id_capture_enabled_for_agent as e\n"
        "assert e({'token_id_capture': {'enabled': True, 'dir': '/x', 'all_agents': True}}, None)\n"
        "assert not {'yaml', 'omegaconf', 'asyncio', 'tokcap.store'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ---- anything at all

TEXT = st.text(max_size=8) | st.sampled_from(
    ["true", "false", "/x", "~/x", "a:b", "tests.test_config:Sink", "${oc.env:X}", "???", "\ud800", "\0"]
)
HUGE = st.just(5000).map(lambda digits: 10**digits)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=4) | HUGE
OURS = st.sampled_from(
    [
        "env",
        "nemo_gym",
        "token_id_capture",
        "model_call_capture_dir",
        "observability_enabled",
        "coder",
        "responses_api_agents",
        *TokenIdCaptureSettings.__struct_fields__,
    ]
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(OURS | TEXT | st.integers() | st.none(), inner, max_size=4)
        | st.tuples(inner)
    ),
    max_leaves=12,
)
LIKELY = {
    "enabled": st.booleans(),
    "all_agents": st.booleans(),
    "dir": st.just("/x"),
    "sink": st.just(named("Sink")),
    "sink_kwargs": st.dictionaries(st.sampled_from(["a", "b"]), JUNK, max_size=2),
    "max_mask_fraction": st.floats(0, 1),
}
BLOCKS = JUNK | st.fixed_dictionaries({}, optional={key: JUNK | likely for key, likely in LIKELY.items()})
AGENTS = st.dictionaries(st.just("responses_api_agents"), st.dictionaries(TEXT, st.fixed_dictionaries({}, optional={
    "token_id_capture": JUNK | st.booleans()
}) | JUNK, max_size=2) | JUNK)  # fmt: skip
PLACE = st.fixed_dictionaries(
    {},
    optional={
        "token_id_capture": BLOCKS,
        "coder": AGENTS | JUNK,
        "model_call_capture_dir": JUNK | st.just("/x"),
        "observability_enabled": JUNK | st.booleans(),
    },
)
CONTENT = JUNK | PLACE | st.tuples(PLACE, PLACE).map(lambda pair: pair[0] | nested(pair[1]))
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(CONTENT, st.sampled_from(["coder", None, ""]) | TEXT)
def test_any_content_is_read_or_refused_and_nothing_else(content: Any, name: str | None) -> None:
    try:
        config = token_id_capture_config(content)
        repr(config)
    except ConfigError as error:
        assert str(error)
    try:
        assert token_id_capture_enabled_for_agent(content, name) in (True, False)
    except ConfigError as error:
        assert str(error)


@QUICK
@given(st.dictionaries(OURS, JUNK | BLOCKS, max_size=4))
def test_any_omegaconf_content_is_read_or_refused_and_nothing_else(content: Any) -> None:
    try:
        config = omega(content)
    except Exception:  # it is OmegaConf that refuses it
        return
    for ask in (
        lambda: token_id_capture_config(config).build_sink(),
        lambda: token_id_capture_enabled_for_agent(config, "coder"),
    ):
        try:
            ask()
        except ConfigError as error:
            assert str(error)


@QUICK
@given(
    st.binary(max_size=60) | st.text(alphabet="ab:{}[]&*!<-?|>'\"\n #,1", max_size=60),
    st.sampled_from(["a.yaml", "a.json"]),
)
def test_any_file_is_read_or_refused_and_nothing_else(tmp_path_factory: Any, content: bytes | str, name: str) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        assert isinstance(load_config(path), dict)
    except ConfigError as error:
        assert str(error)


def test_a_block_handed_in_without_its_name_is_refused(tmp_path: Path) -> None:
    settings = {"enabled": True, "dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="the token_id_capture block itself"):
        token_id_capture_config(settings)
    assert not token_id_capture_config({"enabled": True}).enabled  # somebody else's key
    assert token_id_capture_config({**settings, "token_id_capture": settings}).enabled


@pytest.mark.parametrize("given", ["run.yaml", Path("run.yaml")])
def test_a_path_is_refused_with_the_name_of_what_reads_it(given: object) -> None:
    with pytest.raises(ConfigError, match="load_config"):
        token_id_capture_config(given)


def test_an_agent_is_not_looked_for_where_its_flag_cannot_be(tmp_path: Path) -> None:
    block = {"enabled": True, "dir": str(tmp_path)}
    parsed = token_id_capture_config({"token_id_capture": block})
    with pytest.raises(ConfigError, match="hand in the global config dict"):
        token_id_capture_enabled_for_agent(parsed, "agent")
    assert not token_id_capture_enabled_for_agent(parsed, None)
    everybody = token_id_capture_config({"token_id_capture": {**block, "all_agents": True}})
    assert token_id_capture_enabled_for_agent(everybody, "agent")
    assert not token_id_capture_enabled_for_agent(token_id_capture_config({}), "agent")


@pytest.mark.parametrize("secret", [{"hunter2-secret"}, frozenset({"hunter2-secret"}), bytearray(b"hunter2-secret")])
def test_secrets_in_sets_and_byte_arrays_are_not_shown_either(secret: Any) -> None:
    assert "hunter2" not in without_values(f"cannot connect with {secret!r}", secret)


def test_the_directory_of_evaluation_records_is_refused_for_training_capture(tmp_path: Path) -> None:
    def config(directory: str) -> dict[str, Any]:
        return {"token_id_capture": {"enabled": True, "dir": directory}, "model_call_capture_dir": str(tmp_path)}

    with pytest.raises(ConfigError, match="evaluation capture"):
        token_id_capture_config(config(f"{tmp_path}//evaluation/"))
    assert token_id_capture_config(config(str(tmp_path))).enabled
