"""What the serving path needs to know beside the capture settings of a run.

In a configuration file, at the top level or under `env.nemo_gym`:

    tokcap_serving:
      engine: vllm                      # else found out: vllm, sglang, tgi, trtllm, other
      engine_version: "0.32.0"
      api_keys: ["${oc.env:API_KEY}"]   # that the server expects; strangers then leave no trace
      rollout_secret_file: /run/secrets/rollouts   # each rollout is then written to with its token only
      sampling_overrides: {temperature: 1.0}
      policy_version_file: /run/policy-version
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from ..capture.shapes import PROMPT_MEMORY_BYTES
from ..config import load_config
from ..config.arguments import resolved
from ..config.values import nearest
from ..errors import ConfigError
from .discreet import Discreet

__all__ = ("SERVING_BLOCK", "ServingSettings", "serving_settings")

_ENGINES = ("", "vllm", "sglang", "tgi", "trtllm", "other")

SERVING_BLOCK = "tokcap_serving"
"""The key of the block in a configuration file."""
_SECRETS = ("rollout_secret", "rollout_secret_file")


class ServingSettings(Discreet, frozen=True, kw_only=True):
    """Settings of `CaptureMiddleware`; each may also be given to it by name. Raises `ConfigError`."""

    _hidden: ClassVar[tuple[str, ...]] = ("api_keys", "rollout_secret")

    engine: str = ""
    """`vllm`, `sglang`, `tgi`, `trtllm`, or `other`, which is asked for nothing; empty: found out, and taken for vLLM
    if it can't be."""
    engine_version: str = ""
    """Decides which flags the engine knows; empty: found out, and taken for a current one if it can't be."""
    api_keys: tuple[str, ...] = ()
    """Keys that the server expects, beside those that its own state shows. A captured request without one of them, as
    `Authorization: Bearer` or `x-api-key`, is answered 401 before anything is written."""
    rollout_secret: str | tuple[str, ...] | None = None
    """Of which rollout tokens are made, 16 bytes or more; several: all are accepted, so that one can follow another.
    A request on a capture URL without the token of its rollout is answered 403 before anything is read or written; see
    `tokcap.asgi.capability`. None: what `TOKCAP_ROLLOUT_SECRET` holds, separated by spaces."""
    rollout_secret_file: str | None = None
    """A file that holds them, one in a line, read when the server starts; beside `rollout_secret`. None: what
    `TOKCAP_ROLLOUT_SECRET_FILE` names."""
    max_body_bytes: int = 256 * 2**20
    """Of a request body, decoded; a larger one is answered 413."""
    prompt_memory_bytes: int = PROMPT_MEMORY_BYTES
    """How much is kept of the prompts of recent answers, so that of the next one only what is new is read: a long one
    takes 10 bytes per id. 0: nothing."""
    call_id_header: bool = True
    """Whether captured answers carry `x-tokcap-call-id`."""
    routes: dict[str, Literal["generating", "other"]] = msgspec.field(default_factory=dict)
    """Routes beside those of the table, as `POST /path`."""
    sampling_overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    """Members of a request body that every captured request gets, whatever it says itself."""
    sampling_defaults: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the server samples with where a request says nothing; stored with each call."""
    logprobs_mode: str = ""
    """What the engine's log-probs are: `raw_logprobs`, `processed_logprobs` ...; empty: found out, else `unknown`."""
    policy_version: Any = None
    """The policy that answers, or a function that tells; asked when a call begins and when its answer is whole."""
    policy_version_file: str = ""
    """A file that holds it, in place of `policy_version`."""
    policy_version_header: str = ""
    """The header of an answer that tells it; what it says goes before the others."""
    dialects: Literal["translate", "pass"] = "translate"
    """What becomes of Anthropic messages and Responses on engines that give no ids for them: they are asked as chat
    and answered as themselves, or they pass as they are and the call is lost."""
    untranslatable: Literal["refuse", "pass"] = "refuse"
    """What becomes of a request that has no faithful translation: it is answered 422, or passes and is lost."""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"{SERVING_BLOCK}.max_body_bytes is {self.max_body_bytes}, expected a number from 1")
        if self.prompt_memory_bytes < 0:
            raise ConfigError(
                f"{SERVING_BLOCK}.prompt_memory_bytes is {self.prompt_memory_bytes}, expected a number from 0"
            )
        if self.rollout_secret is not None and not (self.rollout_secret and all(self.rollout_secret)):
            # Of a variable that isn't set, most likely: to take it for "no secret" would let everybody in.
            raise ConfigError(f"{SERVING_BLOCK}.rollout_secret is empty: leave it out, or give a secret")
        if self.rollout_secret_file == "":
            raise ConfigError(f"{SERVING_BLOCK}.rollout_secret_file is empty: leave it out, or name a file")
        version = self.policy_version
        if version is not None and type(version) not in (str, int) and not callable(version):
            raise ConfigError(
                f"{SERVING_BLOCK}.policy_version is a {type(version).__name__}, expected text or a number"
            )
        if self.engine not in _ENGINES:
            raise ConfigError(
                f"{SERVING_BLOCK}.engine is {self.engine!r}{nearest(self.engine, list(_ENGINES[1:]))} There are: "
                f"{', '.join(_ENGINES[1:])}; `other` is asked for nothing"
            )
        for route in self.routes:
            method, _, path = route.partition(" ")
            if not method.isupper() or not path.startswith("/"):
                raise ConfigError(f"{SERVING_BLOCK}.routes has {route!r}, expected a method and a path: POST /generate")


def serving_settings(config: Any = None, **given: Any) -> ServingSettings:
    """The settings in a configuration, with those replaced that are given by name.

    config: a mapping with the block, or None for the file that `TOKCAP_CONFIG` names, if it names one. Anything else
    has no block. Raises `ConfigError`, which never shows a key.
    """
    if config is None and os.environ.get("TOKCAP_CONFIG"):
        config = load_config(os.environ["TOKCAP_CONFIG"])
    block, of_environment = _block(config), _secrets_of_environment()
    values = {**block, **{name: value for name, value in given.items() if value is not None or name not in _SECRETS}}
    for name in _SECRETS:
        if values.get(name) is None and name in of_environment:
            values[name] = of_environment[name]
            if not values[name]:
                raise ConfigError(f"TOKCAP_{name.upper()} is empty: unset it, or give {SERVING_BLOCK}.{name} in it")
        elif name in block and values[name] is None:
            # As YAML reads a line with nothing behind the colon, of a variable that isn't set.
            raise ConfigError(f"{SERVING_BLOCK}.{name} is null: leave it out, or give one")
    try:
        settings = msgspec.convert(values, ServingSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SERVING_BLOCK}: {error}") from None
    unknown = sorted(set(values) - set(ServingSettings.__struct_fields__))
    if unknown:
        valid = list(ServingSettings.__struct_fields__)
        raise ConfigError(
            f"{SERVING_BLOCK} has no setting {unknown[0]}{nearest(unknown[0], valid)} There are: {', '.join(valid)}; "
            "what is captured, and where to, is another matter: the block token_id_capture of the configuration, or "
            'config={"token_id_capture": {"enabled": True, "dir": "/var/lib/tokcap"}}'
        )
    return settings


def _secrets_of_environment() -> dict[str, Any]:
    secrets, path = os.environ.get("TOKCAP_ROLLOUT_SECRET"), os.environ.get("TOKCAP_ROLLOUT_SECRET_FILE")
    found: dict[str, Any] = {} if secrets is None else {"rollout_secret": tuple(secrets.split())}
    return found if path is None else {**found, "rollout_secret_file": path}


def _block(config: Any) -> dict[str, Any]:
    places = [config]
    for key in ("env", "nemo_gym"):
        places.append(places[-1].get(key) if isinstance(places[-1], Mapping) else None)
    for place in (places[0], places[2]):
        block = place.get(SERVING_BLOCK) if isinstance(place, Mapping) else None
        if block is not None:
            if not isinstance(block, Mapping):
                raise ConfigError(f"{SERVING_BLOCK} is a {type(block).__name__}, expected a mapping of settings")
            return {str(key): resolved(value, f"{SERVING_BLOCK}.{key}") for key, value in block.items()}
    return {}
