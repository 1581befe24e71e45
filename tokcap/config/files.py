"""Configurations in files, and the environment variables that name them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .block import TokenIdCaptureSettings
from .reading import token_id_capture_config
from .run import TokenIdCaptureConfig
from .values import refusal, shown

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("config_from_environment", "load_config")


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The global config dict in a file: JSON if its name ends in `.json`, else YAML. An empty file gives an empty one.

    References such as `${oc.env:NAME}` stay as they are. Raises `ConfigError` if the file can't be read, if a key
    stands twice in one mapping, or if PyYAML, which only YAML files need, isn't installed. No message shows content.
    """
    name = os.fsdecode(path)
    problem = ""
    try:
        with open(name, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except ValueError as error:
        problem = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "its name can't be one"
    if problem:
        raise ConfigError(f"the configuration {shown(name)} can't be read: {problem}")
    content = (_read_json if name.lower().endswith(".json") else _read_yaml)(text, name)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise refusal(f"the content of {shown(name)}", shown(content), "a mapping")
    return content


def config_from_environment() -> TokenIdCaptureConfig | None:
    """The capture settings that the environment names; None if it names none.

    `TOKCAP_CONFIG`: path of a YAML or JSON file. `TOKCAP_DIR`: capture is on, for every agent, in that directory
    (absolute). Both: the file counts, and `ConfigError` is raised if it leads to another directory.
    """
    path, directory = os.environ.get("TOKCAP_CONFIG"), os.environ.get("TOKCAP_DIR")
    if directory and not os.path.isabs(directory):
        raise refusal("the environment variable TOKCAP_DIR", shown(directory), "an absolute path (~ is not expanded)")
    if path:
        config = token_id_capture_config(load_config(path))
        if directory and _directory(config) != os.path.normpath(directory):
            written = _directory(config)
            raise ConfigError(
                f"TOKCAP_DIR is {shown(directory)}, but the configuration of TOKCAP_CONFIG ({shown(path)}) writes "
                f"to {shown(written) if written else 'no directory'}; set only one of them"
            )
        return config
    if directory:
        return TokenIdCaptureConfig(TokenIdCaptureSettings(enabled=True, all_agents=True, dir=directory))
    return None


def _directory(config: TokenIdCaptureConfig) -> str | None:
    directory = None if config.token_id_capture.sink else config.resolved_dir()
    return None if directory is None else os.path.normpath(directory)


def _read_json(text: str, name: str) -> Any:
    import json

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated([("", key) for key, _ in items], name)
        return dict(items)

    return _parsed(lambda: json.loads(text, object_pairs_hook=pairs) if text.strip() else None, name, "JSON")


def _read_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"reading the YAML file {shown(name)} needs PyYAML, which isn't installed: "
            'pip install "tokcap[yaml]", or write the configuration as JSON'
        ) from None

    class Loader(yaml.SafeLoader):
        """The safe one, which would let the last of several equal keys win."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            # Here, because what a merge (`<<`) brings later may be given again.
            node = super().compose_mapping_node(anchor)
            keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _refuse_repeated([key for key in keys if key[1] != "<<"], name)
            return node

    return _parsed(lambda: yaml.load(text, Loader), name, "YAML")


def _parsed(parse: Callable[[], Any], name: str, language: str) -> Any:
    problem = ""
    try:
        return parse()
    except ConfigError:
        raise
    except RecursionError:
        problem = "it is nested too deeply"
    except Exception as error:
        # Its text is left out, because it quotes the file.
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else getattr(error, "lineno", None)
        problem = f"it is not {language}" + (f", line {line}" if line else "")
    raise ConfigError(f"the configuration {shown(name)} can't be read: {problem}")


def _refuse_repeated(keys: list[tuple[str, str]], name: str) -> None:
    """keys: type and text of each."""
    seen = set()
    for key in keys:
        if key in seen:
            raise ConfigError(f"the configuration {shown(name)} has the key {shown(key[1])} twice in one mapping")
        seen.add(key)
