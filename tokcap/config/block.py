"""The `token_id_capture` block: its settings, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ConfigError
from . import values
from .arguments import copied
from .references import keys_of, look_up
from .values import Rule, accepted, nearest, refusal, shown

__all__ = ("TOKEN_ID_CAPTURE_BLOCK", "TokenIdCaptureSettings", "read_block")

TOKEN_ID_CAPTURE_BLOCK = "token_id_capture"
"""The key of the block in the global config dict, and of an agent's own flag."""

RULES: dict[str, Rule] = {
    "enabled": values.BOOL,
    "all_agents": values.BOOL,
    "dir": values.PATH,
    "sink": values.TEXT,
    "sink_kwargs": values.ARGUMENTS,
    "rebuild_response": values.BOOL,
    "max_mask_fraction": values.FRACTION,
    "mask_fraction_min_samples": values.COUNT,
    "min_free_bytes": values.FLOOR,
    "min_free_inodes": values.FLOOR,
    "max_pending_bytes": values.COUNT,
}


class TokenIdCaptureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of training capture. Raises `ConfigError` for one of the wrong type or out of range.

    The text `${oc.env:NAME}` stays as it is until the sink is built, and values of `sink_kwargs` are never shown.
    """

    enabled: bool = False
    all_agents: bool = False
    """Whether every agent takes part; otherwise each by its own flag."""
    dir: str | None = None
    """Directory of the file store, absolute, on a disk of this node."""
    sink: str | None = None
    """`module.path:ClassName`, in place of the file store; built once in each serving process."""
    sink_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of that class."""
    rebuild_response: bool = True
    """Whether finished rollouts are read back here and rebuilt; False if a framework reads them by itself."""
    max_mask_fraction: float | None = None
    """From 0 to 1: the run stops if a larger part of its rollouts delivers nothing to train on. None: no limit."""
    mask_fraction_min_samples: int = 50
    """How many finished rollouts it takes before that limit applies."""
    min_free_bytes: int | None = None
    """Of the file store: no call begins while less is free on its disk. None: a hundredth of it, 64 MB at most."""
    min_free_inodes: int | None = None
    """Likewise. None: a hundredth, 1,000 at most."""
    max_pending_bytes: int = 1 << 30
    """Of the file store of each process: no call begins while as much waits for the disk, and records wait for room."""

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = accepted(f"{TOKEN_ID_CAPTURE_BLOCK}.{name}", getattr(self, name), rule)
            if name == "sink_kwargs":
                value = copied(value, f"{TOKEN_ID_CAPTURE_BLOCK}.{name}")
            elif name == "max_mask_fraction" and value is not None:
                value = float(value)  # type: ignore[arg-type]
            msgspec.structs.force_setattr(self, name, value)

    def __repr__(self) -> str:
        return f"TokenIdCaptureSettings({', '.join(f'{name}={text}' for name, text in self._shown())})"

    def __rich_repr__(self) -> Any:
        for name, text in self._shown():
            yield name, _Verbatim(text)

    def _shown(self) -> list[tuple[str, str]]:
        hidden = ", ".join(f"{name!r}: ..." for name in self.sink_kwargs)
        return [
            (name, f"{{{hidden}}}" if name == "sink_kwargs" else shown(getattr(self, name)))
            for name in self.__struct_fields__
        ]


class _Verbatim(str):
    def __repr__(self) -> str:
        return str(self)


def read_block(block: object, path: str) -> TokenIdCaptureSettings:
    """Settings from a mapping or an OmegaConf one. None, an empty block, gives the defaults.

    path: where the block stands, for messages. Raises `ConfigError` for unknown keys, wrong types, values out of range.
    """
    if block is None:
        return TokenIdCaptureSettings()
    if not isinstance(block, Mapping):
        raise refusal(path, shown(block), "a mapping of settings")
    settings: dict[str, Any] = {}
    for key in keys_of(block):
        if key not in RULES:
            valid = ", ".join(RULES)
            raise ConfigError(f"{path} has no setting {shown(key)}{nearest(key, list(RULES))} There are: {valid}")
        value, raw = look_up(block, key, f"{path}.{key}")
        settings[key] = accepted(f"{path}.{key}", value, RULES[key], raw)
    return TokenIdCaptureSettings(**settings)
