"""What a run says of capture: the block, and the two keys beside it that evaluation capture owns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..installed import installed_token_sink
from ..protocol import TokenSink
from . import values
from .block import TOKEN_ID_CAPTURE_BLOCK, TokenIdCaptureSettings, read_block
from .endpoint import build_endpoint
from .values import accepted, refusal, shown

__all__ = ("TokenIdCaptureConfig", "logger")

logger = logging.getLogger("tokcap.config")

RULES = {"model_call_capture_dir": values.PATH, "observability_enabled": values.BOOL}


class TokenIdCaptureConfig(msgspec.Struct, frozen=True):
    """The capture settings of a run; checked when it is made, also from a plain mapping in place of the block.

    Training capture (`token_id_capture.enabled`) and evaluation capture (`evaluation_enabled`) are independent.
    Raises `ConfigError` for a setting that can't be. Settings of a block that is off are kept, and only their types
    are checked.
    """

    token_id_capture: TokenIdCaptureSettings = TokenIdCaptureSettings()
    model_call_capture_dir: str | None = None
    """Directory of evaluation records, and of the file store if the block names none."""
    observability_enabled: bool = False
    """Turns evaluation capture on."""

    def __post_init__(self) -> None:
        block: Any = self.token_id_capture
        if not isinstance(block, TokenIdCaptureSettings):
            msgspec.structs.force_setattr(self, TOKEN_ID_CAPTURE_BLOCK, read_block(block, TOKEN_ID_CAPTURE_BLOCK))
        for name, rule in RULES.items():
            msgspec.structs.force_setattr(self, name, accepted(name, getattr(self, name), rule))
        self._validate()

    def _validate(self) -> None:
        """Check what settings mean together. Raises `ConfigError`; warns of settings that have no effect."""
        block = self.token_id_capture
        if not block.enabled:
            return
        if block.sink is not None:
            if block.dir is not None:
                logger.warning(
                    "token_id_capture.dir (%s) has no effect beside token_id_capture.sink (%s): nothing will be "
                    "written there",
                    shown(block.dir),
                    shown(block.sink),
                )
            return
        if block.sink_kwargs:
            logger.warning("token_id_capture.sink_kwargs has no effect without token_id_capture.sink")
        if block.dir is not None:
            _check_directory(f"{TOKEN_ID_CAPTURE_BLOCK}.dir", block.dir)
            self._refuse_evaluation_directory(block.dir)
        elif self.model_call_capture_dir is not None:
            _check_directory(
                "model_call_capture_dir (the directory, as token_id_capture.dir is not set)",
                self.model_call_capture_dir,
            )
        elif block.rebuild_response and installed_token_sink() is None:
            raise ConfigError(
                "token_id_capture.enabled is true, but there is nowhere to write: set token_id_capture.dir to an "
                "absolute path on a local disk, or token_id_capture.sink; or install_token_sink(...) in this process "
                "beforehand; or set token_id_capture.rebuild_response: false if a framework writes and reads by itself"
            )

    def _refuse_evaluation_directory(self, directory: str) -> None:
        if self.model_call_capture_dir is None:
            return
        evaluation = os.path.join(self.model_call_capture_dir, "evaluation")
        if os.path.normpath(directory) == os.path.normpath(evaluation):
            raise ConfigError(
                f"{TOKEN_ID_CAPTURE_BLOCK}.dir is {shown(directory)}, where evaluation capture keeps its records "
                "(model_call_capture_dir); give training capture another directory"
            )

    @property
    def enabled(self) -> bool:
        """Whether training capture is on."""
        return self.token_id_capture.enabled

    @property
    def evaluation_enabled(self) -> bool:
        """Whether evaluation capture is on, which records requests and responses: it needs its directory, too."""
        return self.observability_enabled and bool(self.model_call_capture_dir)

    def resolved_dir(self) -> Path | None:
        """The directory of the file store: the block's own, else `model_call_capture_dir`."""
        chosen = self.model_call_capture_dir if self.token_id_capture.dir is None else self.token_id_capture.dir
        return None if chosen is None else Path(str(chosen))

    def build_sink(self) -> TokenSink | None:
        """A new instance of the configured sink; None if capture is off or the file store is in use.

        Serving processes call `process_sink`, which builds it once. Raises `ConfigError` with the reason if it can't
        be built.
        """
        block = self.token_id_capture
        if not block.enabled or block.sink is None:
            return None
        sink: TokenSink = self._build_endpoint(block.sink, block.sink_kwargs, TokenSink, "sink")
        return sink

    @staticmethod
    def _build_endpoint(target: str, kwargs: Mapping[str, Any], protocol: type, kind: str) -> Any:
        """See `build_endpoint`."""
        return build_endpoint(target, kwargs, protocol, kind)


def _check_directory(path: str, directory: str) -> None:
    if not os.path.isabs(directory):
        hint = " (~ is not expanded)" if directory.startswith("~") else ""
        raise refusal(path, shown(directory), f"an absolute path{hint}")
    if "${" in directory:
        raise refusal(
            path, shown(directory), "a path without ${...}: outside of sink_kwargs only OmegaConf resolves it"
        )
    if "\0" in directory:
        raise refusal(path, shown(directory), "a path without NUL")
