"""The consumer that the configuration of a run asks for."""

from __future__ import annotations

from typing import Any

from .consumer import consume
from .guard import MaskGuard
from .rollouts import Rollouts
from .wanted import Given

__all__ = ("consume_from_config",)


def consume_from_config(config: Any, rollouts: Given | None = None, **options: Any) -> Rollouts:
    """`consume` with the source of this process and the mask guard that the `token_id_capture` block describes.

    If capture is off, or `rebuild_response` is false because a framework reads by itself, nothing is frozen, built or
    retired: no rollout comes out. (`finalize_rollout(record, process_source(config))` does nothing then, either.)

    Takes what `tokcap.config.token_id_capture_config` takes; `options` are those of `consume` and win over the
    configuration. Raises `ConfigError`, `InvalidOptionError`, and what `FileStore` raises for its directory.
    """
    from ..config import process_source, token_id_capture_config

    settings = token_id_capture_config(config)
    source = process_source(settings)
    options.setdefault("guard", MaskGuard.from_config(settings))
    return consume(source, rollouts, **options)
