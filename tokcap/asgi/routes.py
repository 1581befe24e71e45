"""Which requests may make the model generate, and in which dialect they speak: one table per engine.

Read off the route decorators of vLLM 0.10.2 to 0.33 and SGLang 0.4.10 to 0.5.23, TGI 3 and TensorRT-LLM's server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

import msgspec

__all__ = ("CHAT_PATH", "Dialect", "Route", "Routes")

_T = TypeVar("_T")

Dialect = Literal["chat", "completions", "responses", "messages", "vllm-generate", "native-generate", "other"]

CHAT_PATH = "/v1/chat/completions"
"""Where the dialects without ids are asked instead."""


class Route(msgspec.Struct, frozen=True):
    """What is known of one method and path."""

    may_generate: bool
    dialect: Dialect = "other"
    known: bool = True
    """False: no table says anything of it; what it answers shows what it is."""
    listed: bool = False
    """Whether it is a generating route of the table, and so the engine's own."""


_OPENAI: dict[str, Dialect] = {CHAT_PATH: "chat", "/v1/completions": "completions", "/v1/responses": "responses"}
_GENERATING: dict[str, dict[str, Dialect]] = {
    "vllm": {
        **_OPENAI,
        "/v1/messages": "messages",
        "/v1/chat/completions/batch": "other",
        "/inference/v1/generate": "vllm-generate",
        "/generate": "native-generate",  # of the demonstration server, up to 0.24
        "/cohere/v2/chat": "other",
        "/v1/audio/transcriptions": "other",
        "/v1/audio/translations": "other",
        "/invocations": "other",
    },
    "sglang": {
        **_OPENAI,
        "/v1/messages": "messages",
        "/generate": "native-generate",
        "/generate_from_file": "other",
        "/api/chat": "other",
        "/api/generate": "other",
        "/invocations": "other",
        "/vertex_generate": "other",
        "/v1/audio/transcriptions": "other",
    },
    "tgi": {
        **_OPENAI,
        "/": "native-generate",
        "/generate": "native-generate",
        "/generate_stream": "native-generate",
        "/invocations": "native-generate",
        "/vertex": "other",
    },
    "trtllm": {**_OPENAI, "/v1/chat/completions/harmony": "other"},
}
"""What generates if it is asked with POST; `/generate` of SGLang also with PUT."""

_CONTROL = (
    "/tokenize /detokenize /v1/embeddings /classify /v1/classify /score /v1/score /rerank /v1/rerank /v2/rerank "
    "/v1/messages/count_tokens /health /ping /metrics /version /invocations/ping "
    "/v1/load_lora_adapter /v1/unload_lora_adapter /start_profile /stop_profile /update_weight_version "
    "/v1/decisions /v1/systemone"
)
_OTHER: dict[str, frozenset[str]] = {
    "vllm": frozenset(
        (
            f"{_CONTROL} / /pooling /v2/embed /load /server_info /generative_scoring "
            "/v1/chat/completions/render /v1/completions/render /v1/messages/render /v1/responses/render "
            "/cohere/v2/chat/render /v1/chat/completions/derender /v1/completions/derender "
            "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache /sleep /wake_up /collective_rpc "
            "/release_kv_cache_memory /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply "
            "/pause /resume /init_weight_transfer_engine /shutdown_weight_transfer_engine /update_weights "
            "/start_weight_update /finish_weight_update /start_draft_weight_update /weight_checker "
            "/abort_requests /inference/v1/abort_requests"
        ).split()
    ),
    "sglang": frozenset(
        (
            f"{_CONTROL} / /encode /v1/tokenize /v1/detokenize /api/show /abort_request /pause_generation "
            "/continue_generation /parse_function_call /separate_reasoning /flush_cache "
            "/clear_hicache_storage_backend /hicache/storage-backend /hicache/storage-backend/clear /freeze_gc "
            "/configure_logging /open_session /close_session /slow_down /release_memory_occupation "
            "/resume_memory_occupation /get_weights_by_name /weights_checker /set_trace_level "
            "/start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record "
            "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed "
            "/update_weights_from_ipc /begin_weight_update /end_weight_update /init_weights_update_group "
            "/destroy_weights_update_group /init_weights_send_group_for_remote_instance "
            "/send_weights_to_remote_instance /load_lora_adapter /load_lora_adapter_from_tensors "
            "/unload_lora_adapter /set_internal_state /add_external_corpus /remove_external_corpus "
            "/pd_role_switch /scale_elastic_ep"
        ).split()
    ),
    "tgi": frozenset(f"{_CONTROL} /info /chat_tokenize".split()),
    "trtllm": frozenset(
        f"{_CONTROL} / /kv_cache_events /perf_metrics /release_memory /resume_memory /update_weights".split()
    ),
}
"""What generates nothing, also with POST."""


class Routes:
    """The tables, with what the configuration adds to them (`POST /path` -> `generating` or `other`)."""

    def __init__(self, added: Mapping[str, str] | None = None) -> None:
        self._added = {_normal(route): said for route, said in (added or {}).items()}

    def find(self, method: str, path: str, engine: str) -> Route:
        """What is known of a request. path: decoded, below `root_path`. engine: empty or a stranger: any of them.

        Only POST generates, and PUT at SGLang's `/generate`, unless the configuration says otherwise. A trailing
        slash makes no other route of it: servers redirect it. The tables are exact: `/v1/models/x` is in none.
        """
        path = path.rstrip("/") or "/"
        generating = next((table[path] for table in _tables(_GENERATING, engine) if path in table), None)
        said = self._added.get(f"{method} {path}")
        if said is not None:
            return Route(said == "generating", generating or _dialect_by_end(path))
        if method == "PUT" and generating == "native-generate":
            return Route(True, generating, listed=True)
        if method != "POST":
            return Route(False)
        # An engine that isn't known may be any: whatever one of them generates at may generate.
        if generating is not None and (path != "/" or engine == "tgi"):
            return Route(True, generating, listed=True)
        if any(path in table for table in _tables(_OTHER, engine)) or _cancels(path):
            return Route(False)
        return Route(True, known=False)


def _tables(tables: dict[str, _T], engine: str) -> Iterator[_T]:
    return iter((tables[engine],) if engine in tables else tables.values())


def _dialect_by_end(path: str) -> Dialect:
    """Of a route that only the configuration knows: that of the route by whose path it ends, as behind a gateway."""
    ends = (
        known for known in (*_OPENAI, "/v1/messages", "/inference/v1/generate", "/generate") if path.endswith(known)
    )
    longest = max(ends, key=len, default="")
    return next((table[longest] for table in _GENERATING.values() if longest in table), "other")


def _cancels(path: str) -> bool:
    """Whether a stored response is stopped, which samples nothing new."""
    return path.startswith("/v1/responses/") and path.endswith("/cancel")


def _normal(route: str) -> str:
    method, _, path = route.partition(" ")
    return f"{method} {path.rstrip('/') or '/'}"
