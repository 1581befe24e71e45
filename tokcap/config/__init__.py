"""The configuration of capture: the block of a run, who takes part, and the sink and source of this process.

    token_id_capture:
      enabled: true
      all_agents: false             # else by flag: <agent>.responses_api_agents.<name>.token_id_capture
      dir: /tmp/ng_tokcap           # on this node, shared by writers and consumer; absolute
      sink: my_pkg.sinks:MySink     # optional, replaces the file store
      sink_kwargs: {token: "${oc.env:MY_TOKEN}"}
      rebuild_response: true        # false: a framework reads by itself
      max_mask_fraction: null       # stop the run above this part of masked rollouts
      mask_fraction_min_samples: 50
      min_free_bytes: null          # no call begins while less is free; null: 1% of the disk, 64 MB at most
      min_free_inodes: null         # likewise; null: 1%, 1,000 at most
      max_pending_bytes: 1073741824 # no call begins while as much waits for the disk
    model_call_capture_dir: /data   # evaluation records; the directory if the block has none
    observability_enabled: false    # evaluation capture; independent of the block

All of it at the top level or under `env.nemo_gym`. `token_id_capture_config` reads it from a mapping or an OmegaConf
object, `load_config` reads a file, `config_from_environment` what `TOKCAP_CONFIG` or `TOKCAP_DIR` name. A serving
process then calls `process_sink(config)`, a consumer `process_source(config)`.

Uvicorn workers are spawned: they don't have what a launcher installed with `install_token_sink`. A sink that is named
in the block is built by each of them. Programs that install one must do so in the serving process itself.
"""

from __future__ import annotations

from ..installed import install_token_sink, install_token_source, installed_token_sink, installed_token_source
from .block import TOKEN_ID_CAPTURE_BLOCK, TokenIdCaptureSettings
from .files import config_from_environment, load_config
from .process import close_process_endpoints, process_sink, process_source
from .reading import token_id_capture_config, token_id_capture_enabled_for_agent
from .run import TokenIdCaptureConfig, logger

__all__ = (
    "TOKEN_ID_CAPTURE_BLOCK",
    "TokenIdCaptureConfig",
    "TokenIdCaptureSettings",
    "close_process_endpoints",
    "config_from_environment",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
    "load_config",
    "logger",
    "process_sink",
    "process_source",
    "token_id_capture_config",
    "token_id_capture_enabled_for_agent",
)
