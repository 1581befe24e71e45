"""Finding the settings of capture in the global config dict of a run."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import msgspec

from ..errors import ConfigError
from . import values
from .block import TOKEN_ID_CAPTURE_BLOCK, TokenIdCaptureSettings, read_block
from .references import keys_of, look_up
from .run import RULES, TokenIdCaptureConfig
from .values import accepted, below, refusal, shown

__all__ = ("token_id_capture_config", "token_id_capture_enabled_for_agent")

_NESTED = ("env", "nemo_gym")


def token_id_capture_config(global_config_dict: Any) -> TokenIdCaptureConfig:
    """The capture settings in a global config dict: a mapping, an OmegaConf one, or None for none at all.

    The block stands at the top level or under `env.nemo_gym`, and the two keys of evaluation capture there, too, or
    else at the other place. Of an OmegaConf object only what is read here is resolved. A `TokenIdCaptureConfig` is
    handed back. Raises `ConfigError`.
    """
    if isinstance(global_config_dict, TokenIdCaptureConfig):
        return global_config_dict
    places = _places(global_config_dict)
    blocks: dict[str, TokenIdCaptureSettings] = {}
    for prefix, place in places.items():
        path = prefix + TOKEN_ID_CAPTURE_BLOCK
        block, _ = look_up(place, TOKEN_ID_CAPTURE_BLOCK, path)
        if block is not msgspec.UNSET and block is not None:
            blocks[prefix] = read_block(block, path)
    if len(blocks) > 1 and not _same(*blocks.values()):
        paths = " and at ".join(prefix + TOKEN_ID_CAPTURE_BLOCK for prefix in blocks)
        raise ConfigError(f"the block stands at {paths}, with different content; keep one of the two")
    if not blocks:
        _refuse_the_block_itself(places)
    # The keys beside the block count first; without a block, those of the more special place.
    nearest_first = list(places.items()) if "" in blocks else list(places.items())[::-1]
    beside = {name: value for name in RULES if (value := _first(nearest_first, name)) is not None}
    return TokenIdCaptureConfig(next(iter(blocks.values()), TokenIdCaptureSettings()), **beside)


def token_id_capture_enabled_for_agent(global_config_dict: Any, agent_name: str | None) -> bool:
    """Whether an agent takes part in training capture: if the block is on, by its own flag or by `all_agents`.

    The flag is `<agent>.responses_api_agents.<name>.token_id_capture`, at the top level or under `env.nemo_gym`. None
    is an agent that nobody knows. Raises `ConfigError`, also for a flag that isn't true or false.
    """
    settings = token_id_capture_config(global_config_dict).token_id_capture
    flagged = False
    if isinstance(global_config_dict, TokenIdCaptureConfig):
        if settings.enabled and not settings.all_agents and agent_name is not None:
            raise ConfigError("the flags of agents are not in a TokenIdCaptureConfig; hand in the global config dict")
    elif agent_name is not None:
        flagged = _flagged(_places(global_config_dict), agent_name)
    return settings.enabled and (settings.all_agents or flagged)


def _refuse_the_block_itself(places: dict[str, Mapping[Any, Any]]) -> None:
    """A block that was handed in without its name would count as a config without any, and nothing be captured."""
    keys = set(keys_of(places[""])) if "" in places else set()
    if "enabled" in keys and keys & {"dir", "sink", "rebuild_response", "all_agents", "sink_kwargs"}:
        raise ConfigError(
            f"this looks like the {TOKEN_ID_CAPTURE_BLOCK} block itself; hand in the mapping that has it under "
            f"{TOKEN_ID_CAPTURE_BLOCK!r}"
        )


def _places(global_config: Any) -> dict[str, Mapping[Any, Any]]:
    """Where settings may stand, by the prefix of their paths: the top level first."""
    if global_config is None:
        return {}
    if isinstance(global_config, (str, PathLike)):
        raise ConfigError(
            f"the global config dict is {shown(global_config)}, a path or text; read it with "
            "tokcap.config.load_config(path)"
        )
    if not isinstance(global_config, Mapping):
        raise refusal("the global config dict", shown(global_config), "a mapping")
    nested: Any = global_config
    for depth, key in enumerate(_NESTED):
        nested, _ = look_up(nested, key, ".".join(_NESTED[: depth + 1]))
        if not isinstance(nested, Mapping):
            return {"": global_config}
    return {"": global_config, ".".join(_NESTED) + ".": nested}


def _first(places: list[tuple[str, Mapping[Any, Any]]], name: str) -> Any:
    for prefix, place in places:
        value, raw = look_up(place, name, prefix + name)
        if value is not msgspec.UNSET and value is not None:
            return accepted(prefix + name, value, RULES[name], raw)
    return None


def _same(one: TokenIdCaptureSettings, other: TokenIdCaptureSettings) -> bool:
    try:
        return bool(one == other)
    except Exception:  # values of sink_kwargs may be anything, also arrays
        return False


def _flagged(places: dict[str, Mapping[Any, Any]], agent_name: str) -> bool:
    if not isinstance(agent_name, str):
        raise refusal("the name of the agent", shown(agent_name), "text, or None")
    answers: dict[str, bool] = {}
    for prefix, place in places.items():
        path = prefix + agent_name
        agent, _ = look_up(place, agent_name, path)
        if not isinstance(agent, Mapping):
            continue
        path += ".responses_api_agents"
        servers, _ = look_up(agent, "responses_api_agents", path)
        if isinstance(servers, Mapping):
            flags = [_flag(servers, name, below(path, name)) for name in keys_of(servers)]
            answers |= {path: any(flags)} if any(flag is not None for flag in flags) else {}
    if len(set(answers.values())) > 1:
        raise ConfigError(f"the flags at {' and at '.join(answers)} contradict each other; keep one of the two")
    return any(answers.values())


def _flag(servers: Any, name: Any, path: str) -> bool | None:
    server, _ = look_up(servers, name, path)
    if not isinstance(server, Mapping):
        return None
    path = f"{path}.{TOKEN_ID_CAPTURE_BLOCK}"
    flag, raw = look_up(server, TOKEN_ID_CAPTURE_BLOCK, path)
    return None if flag is msgspec.UNSET else bool(accepted(path, flag, values.BOOL, raw))
