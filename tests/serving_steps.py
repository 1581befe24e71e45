"""How situations of serving are written: a call of a rollout, what is to be found of it, and the list of all.

A situation is a function of a `Harness` and says by its name what holds. `tests.serving_lines.covers` tells which lines
and rows it is about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.fake_script import Script, choices_of
from tests.serving_harness import Exchange, Harness, ask, ordered, plain_answer, same_log_probs

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
ROUTES = (CHAT, COMPLETIONS, TOKENS)
NAMES = {CHAT: "chat", COMPLETIONS: "completions", TOKENS: "generate"}


EVERYTHING: dict[str, Any] = {
    "return_token_ids": True,
    "logprobs": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
}
"""What a client asks for from whose answer nothing needs to be taken."""


@dataclass(frozen=True)
class Situation:
    """One function of this module."""

    run: Callable[[Harness], None]
    engine: str
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.run.__name__


SITUATIONS: list[Situation] = []

EVERYWHERE = ("in process", "workers", "proxy")


def situation(
    *, engine: str = "vllm", kinds: tuple[str, ...] = EVERYWHERE
) -> Callable[[Callable[[Harness], None]], Callable[[Harness], None]]:
    """Put a function on the list. kinds: where it makes sense."""

    def add(function: Callable[[Harness], None]) -> Callable[[Harness], None]:
        SITUATIONS.append(Situation(function, engine, kinds))
        return function

    return add


# ---- how a call is made, and what is to be found of it


def target(rollout_id: str, path: str = CHAT, *, training: bool = True) -> str:
    return f"/ng-rollout/{rollout_id}{'/training-token-capture' if training else ''}{path}"


def call(
    harness: Harness,
    rollout_id: str,
    script: Script,
    path: str = CHAT,
    *,
    headers: Iterable[tuple[str, str]] = (),
    content: bytes | None = None,
    then: Callable[[], None] | None = None,
    disconnect_after: int | None = None,
    disconnect_when: Callable[[], bool] | None = None,
    **body: Any,
) -> Exchange:
    """One call of a rollout, as a client makes it that knows nothing of capture."""
    script.label = script.label or rollout_id
    return harness.request(
        "POST",
        target(rollout_id, path),
        headers=[("content-type", "application/json"), script.header(), *headers],
        body=ask(path, **body) if content is None else content,
        then=then,
        disconnect_after=disconnect_after,
        disconnect_when=disconnect_when,
    )


def plain(harness: Harness, script: Script, path: str = CHAT, *, content: bytes | None = None, **body: Any) -> Exchange:
    """What the engine alone answers to the same request."""
    headers = [("content-type", "application/json"), script.header()]
    content = ask(path, **body) if content is None else content
    return plain_answer(harness.store_dir.parent, "POST", path, headers=headers, body=content)


def assert_recorded(
    harness: Harness, rollout_id: str, script: Script, *, count: int = 1, log_probs: bool = True, response_id: str = ""
) -> None:
    """Nothing but one call, recorded, and of each choice exactly what the engine sampled."""
    assert harness.outcomes(rollout_id) == ["recorded"]
    entries = harness.entries(rollout_id)
    assert [entry.choice_index for entry in entries] == list(range(count))
    for entry, sampled in zip(entries, choices_of(script, count), strict=True):
        assert entry.prompt_token_ids.tolist() == script.prompt
        assert entry.generation_token_ids.tolist() == sampled.ids
        assert same_log_probs(entry, sampled.log_probs if log_probs else [None] * len(sampled.ids))
        assert entry.finish_reason == sampled.finish_reason
        assert not response_id or entry.response_id == response_id


def assert_same_view(seen: Exchange, expected: Exchange) -> None:
    """The client sees what the engine says without tokcap: equal as JSON, key order, null and absent included."""
    assert seen.status == expected.status
    assert seen.header("content-type") == expected.header("content-type")
    length = seen.header("content-length")
    assert length is None or int(length) == len(seen.body)
    if (expected.header("content-type") or "").startswith("text/event-stream"):
        assert list(map(read_json, _fair(seen.events))) == list(map(read_json, _fair(expected.events)))
    else:
        assert (length is None) == (expected.header("content-length") is None)
        assert read_json(seen.body.decode()) == read_json(expected.body.decode())


def _fair(events: list[str]) -> list[str]:
    """Events less what can't be known: when the first of several choices ends, vLLM names its fingerprint there, unless
    the usage was asked for; then it comes after all of them, when the chunk of the first has long been passed on.
    """
    ends = [place for place, event in enumerate(events) if '"finish_reason":"' in event]
    for place in ends[:-1]:
        events[place] = re.sub(r',"system_fingerprint":"[^"]*"', "", events[place])
    return events


def read_json(text: str) -> Any:
    """A JSON text so that order and kinds count; another text as it is."""
    try:
        return ordered(text)
    except (ValueError, RecursionError):
        return text


def assert_no_trace(harness: Harness, rollout_id: str) -> None:
    assert not harness.exists(rollout_id)
    if harness.kind == "in process":  # where there are not many others
        assert rollout_id not in harness.remains()


def assert_aborted(h: Harness, rollout: str, script: Script, seen: int) -> None:
    assert h.settled(rollout) == ["aborted"]
    h.until(lambda: bool(h.entries(rollout)))  # stored after that was said
    (entry,) = h.entries(rollout)
    assert entry.generation_token_ids.tolist() == script.choices[0].ids[:seen]
    assert same_log_probs(entry, script.choices[0].log_probs[:seen])
    assert entry.prompt_token_ids.tolist() == script.prompt
    assert entry.finish_reason == "aborted"


def read_by_engine(h: Harness, label: str) -> Callable[[], bool]:
    """Whether the engine has read the whole request."""
    return lambda: any(each.body is not None for each in h.notes.read(label))
