"""The application of an engine as it stands in the scope, with what its state tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ("state_of_vllm",)


def state_of_vllm(**args: Any) -> SimpleNamespace:
    """The app as vLLM has it in the scope, with what its state says of keys, log-probs and sampling."""
    mode = args.pop("logprobs_mode", "raw_logprobs")
    defaults = args.pop("default_sampling_params", {})
    model_config = SimpleNamespace(logprobs_mode=mode, get_diff_sampling_param=lambda: dict(defaults))
    config = SimpleNamespace(model_config=model_config)
    serving = SimpleNamespace(default_sampling_params=defaults, model_config=config.model_config)
    return SimpleNamespace(
        state=SimpleNamespace(
            args=SimpleNamespace(logprobs_mode=mode, **args),
            vllm_config=config,
            openai_serving_chat=serving,
            openai_serving_completion=serving,
        )
    )
