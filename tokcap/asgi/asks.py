"""What an engine has to be asked so that its answer carries ids and log-probs, and how that shows in the answer.

One table, by engine, dialect and version; the facts are those of the sources of vLLM 0.10.2 to 0.33 and SGLang 0.4.10
to 0.5.23. A wish of the client itself is left as it is, and its effect is not taken out of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..capture.request import requested_choices
from .engines import Server
from .routes import Dialect

__all__ = ("Asked", "asked_of", "gives_ids")


def _is_true(value: object) -> bool:
    """As lenient as the engines, whose models are pydantic's: 1 and words such as "yes" ask for it, too."""
    return value == 1 or (isinstance(value, str) and value.lower() in _WORDS_FOR_TRUE)


def _is_count(value: object) -> bool:
    """Whether a number of log-probs was asked for: 0, and False that engines read as 0, ask for the sampled ones."""
    return value is not None


_WORDS_FOR_TRUE = ("true", "t", "yes", "y", "on", "1")


class Flag(msgspec.Struct, frozen=True):
    """One member of a request that makes the engine tell more."""

    member: str
    value: Any
    nulls: tuple[str, ...] = ()
    """Members of the answer that are null without this flag: of its root, or of each choice (`choices.`)."""
    removes: tuple[str, ...] = ()
    """Members of the answer that are not there without this flag."""
    wished: Callable[[Any], bool] = _is_true
    """Whether the client's own value asks for the same."""
    within: str = ""
    """The member that it stands in: `sampling_params`, `stream_options`."""
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    """The first version that doesn't take it, or has something better."""
    streamed: bool | None = None
    """Only for streams, or only for others."""
    drops: str = ""
    """Chunks of a stream that are only there because of it: `usage`, `empty` (deltas without content), `ids`."""


_STREAM_USAGE = Flag("include_usage", True, within="stream_options", streamed=True, drops="usage")

_REASONING = Flag(
    "include_reasoning", True, ("choices.logprobs", "choices.token_ids"), since=(0, 26), drops="reasoning"
)
"""vLLM from 0.26 on leaves out ids and log-probs together with the reasoning, also those that the client asked for."""
_IDS_SINCE = (0, 10, 2)
_KEEPS_EMPTY = (0, 31)
"""From here on vLLM streams also sends deltas without content if only log-probs were asked for."""

_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
)

_TABLE: dict[tuple[str, Dialect], tuple[Flag, ...]] = {
    ("vllm", "chat"): (
        Flag("return_token_ids", True, ("prompt_token_ids", "choices.token_ids"), since=(0, 10, 2), drops="empty"),
        Flag("logprobs", True, ("choices.logprobs",), drops="empty"),
        Flag("return_weight_versions", True, ("choices.weight_versions",), since=(0, 33)),
        _STREAM_USAGE,
    ),
    ("vllm", "completions"): (
        Flag("return_token_ids", True, ("choices.prompt_token_ids", "choices.token_ids"), since=(0, 10, 2)),
        Flag("logprobs", 0, ("choices.logprobs",), wished=_is_count),
        Flag("return_weight_versions", True, ("choices.weight_versions",), since=(0, 33)),
        _STREAM_USAGE,
    ),
    ("vllm", "vllm-generate"): (
        Flag("return_token_ids", True, ("prompt_token_ids", "mm_placeholders"), streamed=False),
        Flag("return_token_ids", True, removes=("prompt_token_ids", "mm_placeholders"), streamed=True),
        Flag("logprobs", 0, ("choices.logprobs",), wished=_is_count, within="sampling_params"),
        _STREAM_USAGE,
    ),
    ("sglang", "chat"): (
        Flag("logprobs", True, ("choices.logprobs",), drops="empty"),
        Flag(
            "return_token_ids",
            True,
            removes=("choices.prompt_token_ids", "choices.response_token_ids", "choices.token_ids"),
            since=(0, 5, 17),
            streamed=False,
        ),
        Flag(
            "return_prompt_token_ids",
            True,
            removes=("choices.prompt_token_ids",),
            since=(0, 5, 14),
            before=(0, 5, 17),
            streamed=False,
        ),
        Flag(
            "return_meta_info",
            True,
            removes=("choices.meta_info",),
            since=(0, 5, 14),
            before=(0, 5, 17),
            streamed=False,
        ),
        Flag("return_input_ids_in_sglext", True, removes=("sglext.input_ids",), since=(0, 5, 20), streamed=True),
        Flag(
            "return_output_ids_in_sglext",
            True,
            removes=("sglext.output_ids",),
            since=(0, 5, 20),
            streamed=True,
            drops="ids",
        ),
        _STREAM_USAGE,
        Flag("continuous_usage_stats", True, within="stream_options", streamed=True, drops="continuous"),
    ),
    ("sglang", "completions"): (
        Flag("return_token_ids", True, removes=("choices.prompt_token_ids", "choices.token_ids"), since=(0, 5, 17)),
        Flag("logprobs", 0, ("choices.logprobs",), wished=_is_count),
        _STREAM_USAGE,
    ),
    ("sglang", "native-generate"): (
        Flag(
            "return_logprob",
            True,
            removes=(
                "meta_info.input_token_logprobs",
                "meta_info.output_token_logprobs",
                "meta_info.output_token_logprobs_length",
            ),
        ),
        Flag("return_prompt_token_ids", True, removes=("prompt_token_ids",), since=(0, 5, 14)),
    ),
    ("tgi", "native-generate"): (
        Flag("details", True, removes=("details",), within="parameters"),
        Flag("decoder_input_details", True, within="parameters", streamed=False),
    ),
}
"""TensorRT-LLM refuses members that it doesn't know, and gives no ids on request: it is asked for nothing."""


class Asked(msgspec.Struct):
    """What is added to one request, and what that adds to its answer."""

    members: dict[str, Any]
    """Members of the body as the engine is to get them, in addition to the client's."""
    nulls: list[str]
    removes: list[str]
    drops: set[str]
    echoes: list[str] = []
    """Prompts that stand before the text of the answers, which the engine leaves out because of what is added."""
    choices_per_prompt: int = 1

    @property
    def hides_prompt_ids(self) -> bool:
        """Whether the client gets none of the prompt ids."""
        return any(place.endswith("prompt_token_ids") for place in (*self.nulls, *self.removes))

    @property
    def strips(self) -> bool:
        """Whether anything has to be taken out of the answer."""
        return bool(self.nulls or self.removes or self.drops or self.echoes)


def gives_ids(dialect: Dialect) -> bool:
    """Whether answers of this dialect can carry ids; messages and Responses can't, on any engine."""
    return dialect not in ("messages", "responses")


def asked_of(
    server: Server,
    dialect: Dialect,
    request: Mapping[str, Any],
    *,
    streams: bool | None = None,
) -> Asked:
    """What to add to a request of this dialect; nothing for a dialect that the table doesn't know.

    An engine that isn't known is asked as vLLM is, whose flags SGLang and TGI ignore; TensorRT-LLM refuses them, so it
    has to be named. streams: whether the answer is a stream, if not the body but the route says so.
    """
    engine, version = server.engine or "vllm", server.numbers
    streamed = _is_true(request.get("stream")) if streams is None else streams
    asked = Asked({}, [], [], set())
    if dialect == "completions" and request.get("echo") and engine == "vllm":
        return _asked_to_echo(asked, server, request, streamed)
    for flag in _TABLE.get((engine, dialect), ()):
        if (flag.streamed is not None and flag.streamed != streamed) or not _applies(flag, version):
            continue
        if flag.member == "logprobs" and dialect == "chat" and _needs_log_probs(request):
            continue
        _ask(asked, flag, request)
    if engine == "vllm" and dialect == "chat":
        _see_to_chat(asked, server, request)
    return asked


def _asked_to_echo(asked: Asked, server: Server, request: Mapping[str, Any], streamed: bool) -> Asked:
    """vLLM leaves the prompt out of the text if it is asked for ids. A prompt of text can be put back."""
    prompts = request.get("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        return asked
    if server.numbers and server.numbers < _IDS_SINCE:
        return asked
    if request.get("use_beam_search"):
        return asked  # refused together with log-probs
    for flag in _TABLE["vllm", "completions"]:
        if flag.streamed in (None, streamed) and _applies(flag, server.numbers):
            _ask(asked, flag, request)
    if not _is_true(request.get("return_token_ids")):
        asked.echoes, asked.choices_per_prompt = prompts, requested_choices(request) // max(len(prompts), 1) or 1
        if streamed:
            asked.nulls.remove("choices.prompt_token_ids")  # there without asking
    if "logprobs" in asked.members and request.get("prompt_logprobs") is None:
        asked.nulls.append("choices.prompt_logprobs")
    return asked


def _see_to_chat(asked: Asked, server: Server, request: Mapping[str, Any]) -> None:
    version = server.numbers
    wishes_log_probs = _is_true(request.get("logprobs")) and (not version or version >= _KEEPS_EMPTY)
    if wishes_log_probs or _is_true(request.get("return_token_ids")):
        asked.drops.discard("empty")
    hidden = request.get("include_reasoning") is False and _applies(_REASONING, version)
    # A grammar begins behind the reasoning if that is asked for, and at once if it isn't: that would sample otherwise.
    if hidden and server.has_parser is not False and not _has_grammar(request):
        _ask(asked, _REASONING, request)


def _has_grammar(request: Mapping[str, Any]) -> bool:
    return any(request.get(key) for key in _GRAMMARS) or request.get("tool_choice") not in (None, "none", "auto")


def _needs_log_probs(request: Mapping[str, Any]) -> bool:
    """Whether this is a request that is refused without log-probs of its own, which it must stay."""
    return not request.get("logprobs") and bool(request.get("top_logprobs") or request.get("logprob_token_ids"))


def _applies(flag: Flag, version: tuple[int, ...]) -> bool:
    """Unknown versions count as current ones."""
    return not version or (flag.since <= version and not (flag.before and version >= flag.before))


def _ask(asked: Asked, flag: Flag, request: Mapping[str, Any]) -> None:
    if flag.within:
        given = request.get(flag.within)
        outer = asked.members.get(flag.within, given if isinstance(given, Mapping) else {})
        if flag.wished(outer.get(flag.member)):
            return
        inner = {**outer, flag.member: flag.value}
        if flag.member == "include_usage" and inner.get("continuous_usage_stats"):
            inner["continuous_usage_stats"] = False  # it has no effect without the usage that we ask for
        asked.members[flag.within] = inner
    elif flag.wished(request.get(flag.member)):
        return
    else:
        asked.members[flag.member] = flag.value
    asked.nulls.extend(flag.nulls)
    asked.removes.extend(flag.removes)
    if flag.drops:
        asked.drops.add(flag.drops)
