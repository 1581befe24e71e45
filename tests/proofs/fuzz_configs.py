"""Target: configurations of a run, as text, as mappings and as OmegaConf objects; environment variables in them."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import omegaconf
import yaml

from tokcap.asgi.settings import ServingSettings, serving_settings
from tokcap.config import config_from_environment, load_config, token_id_capture_config
from tokcap.config import token_id_capture_enabled_for_agent as enabled_for_agent
from tokcap.config.arguments import resolved
from tokcap.errors import ConfigError

from .fuzz_input import HOSTILE, Choices, Target, as_json, changed, require

__all__ = ("TARGETS",)

_SECRET = "s3cret-value-of-a-key"
_ENVIRONMENT = {"FUZZ_KEY": _SECRET, "FUZZ_DIR": "/nowhere"}

_DOCUMENTS: tuple[dict[str, Any], ...] = (
    {
        "token_id_capture": {
            "enabled": True,
            "all_agents": False,
            "dir": "${oc.env:FUZZ_DIR}",
            "sink": None,
            "sink_kwargs": {"key": "${oc.env:FUZZ_KEY}", "deep": [{"x": ["${oc.env:GONE,1}"]}]},
            "max_mask_fraction": 0.5,
            "mask_fraction_min_samples": 10,
        },
        "model_call_capture_dir": "/data",
        "observability_enabled": True,
        "tokcap_serving": {
            "engine": "vllm",
            "api_keys": ["${oc.env:FUZZ_KEY}"],
            "routes": {"POST /x": "generating"},
            "sampling_overrides": {"temperature": 1.0},
            "max_body_bytes": 1000,
        },
        "agent": {"responses_api_agents": {"simple": {"token_id_capture": True}}},
    },
    {"env": {"nemo_gym": {"token_id_capture": {"enabled": True, "sink": "a.b:C"}, "tokcap_serving": {}}}},
    {"enabled": True, "dir": "/x"},
)

_ODD_TEXT = (
    *(
        "a: &a [*a]",
        "a: &a {b: *a}",
        "<<: {a: 1}",
        "? [1]\n: 2",
        "- 1\n- 2",
        "token_id_capture: !!python/name:os.system",
    ),
    *("1: 2\n1: 3", "a: 12:30:45", "a: 2001-01-01", "a: 0x" + "f" * 5000, "a: " + "9" * 5000, "a: ~", "---\n---", "\t"),
    *("a: !!binary aGk=", "a: !!set {x}", "a: .nan", "null", "'", "[[[[[[[[", "%YAML 9.9\n--- a", "a: |\n  x\n b"),
    '{"a": 1, "a": 2}',
    "&a [1]: *a",
)


@cache
def _folder() -> Path:
    directory = tempfile.TemporaryDirectory(prefix="tokcap-fuzz-")
    atexit.register(directory.cleanup)
    return Path(directory.name)


def _text(choices: Choices, ending: str) -> bytes:
    way = choices.byte() % 6
    if way == 0:
        return choices.rest()
    if way == 1:
        return choices.one_of(_ODD_TEXT).encode()
    document: Any = choices.one_of(_DOCUMENTS)
    for _ in range(choices.byte() % 4):
        document = changed(choices, document)
    text = as_json(document) if ending == "json" else yaml.safe_dump(document).encode()
    if way == 2:
        at = choices.number(len(text) + 1)
        text = text[:at] + choices.some(10) + text[at + choices.byte() % 10 :]
    return text


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """The only error that may be raised, without a secret in it."""
    try:
        yield
    except ConfigError as error:
        require(_SECRET not in str(error) and _SECRET not in repr(error.__cause__), "a secret in a message")
        require(len(str(error)) < 20_000, "a message without an end")


def _configs(data: bytes) -> None:
    choices = Choices(data)
    ending = choices.one_of(("yaml", "json"))
    path = _folder() / f"run.{ending}"
    path.write_bytes(_text(choices, ending))
    content: Any = None
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        with _refused():
            content = load_config(path)
        if choices.byte() % 4 == 0:
            content = changed(choices, choices.one_of(_DOCUMENTS), [*HOSTILE, {1: 2}, b"x", 2**20_000, {None: 1}])
        _read(content)
        with _refused():
            _read(_as_omegaconf(content))
        with mock.patch.dict(os.environ, {"TOKCAP_CONFIG": str(path)}), _refused():
            config_from_environment()
            serving_settings()


def _as_omegaconf(content: Any) -> Any:
    try:
        return omegaconf.OmegaConf.create(content)
    except Exception:  # what OmegaConf itself refuses never gets here
        return {}


def _read(content: Any) -> None:
    with _refused():
        config = token_id_capture_config(content)
        require(type(config.enabled) is bool, "enabled is true or false")
        with _refused():
            resolved(config.token_id_capture.sink_kwargs, "sink_kwargs")
            config.resolved_dir()
    with _refused():
        require(type(enabled_for_agent(content, "agent")) is bool, "an agent's flag is true or false")
    with _refused():
        require(type(serving_settings(content)) is ServingSettings, "settings")


def _seeds() -> Sequence[bytes]:
    plain = [bytes([ending, way, place, 1, 3, 5, 9, 1]) for ending in (0, 1) for way in (2, 3) for place in range(3)]
    return [*plain, *(bytes([0, 1, place]) for place in range(0, len(_ODD_TEXT), 3)), b"\0\0a: [1, {b: c}]"]


TARGETS = (Target("configs", "configurations: YAML, JSON, mappings, OmegaConf", _configs, _seeds),)
