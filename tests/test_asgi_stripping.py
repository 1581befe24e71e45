"""What the client sees is what it would have seen: on pairs of exchanges with a real engine, with and without flags."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from tests import exchanges
from tokcap.asgi.asks import Asked, asked_of
from tokcap.asgi.engines import Server
from tokcap.asgi.routes import Routes
from tokcap.asgi.strip import Stripper
from tokcap.capture.shapes import StreamJoiner, parse_answer

ALL = list(exchanges.pairs("chat", "completions", "generate"))


def server_of(name: str) -> Server:
    return Server("vllm", "0.32.0", has_parser=not name.startswith(("no-parser", "force-include-usage")))


def asked_for(pair: dict[str, Any], name: str) -> Asked:
    route = Routes().find("POST", pair["path"], "vllm")
    return asked_of(server_of(name), route.dialect, pair["request"])


def is_like_the_recording(asked: Asked, pair: dict[str, Any]) -> bool:
    plain = pair["request"]
    added = {key: value for key, value in pair["request_with_flags"].items() if plain.get(key, msgspec.UNSET) != value}
    return asked.members == added


def stripped(pair: dict[str, Any], asked: Asked) -> tuple[Any, Any]:
    """What the client gets of the flagged answer, and the plain one."""
    stripper = Stripper(asked)
    if "body" in pair["plain"]:
        return stripper.answer(json.loads(pair["with_flags"]["body"])), json.loads(pair["plain"]["body"])
    events = exchanges.events_of(pair["with_flags"]["chunks"])
    for event in events:
        stripper.learn(event)
    shown = [stripper.chunk(event) for event in events]
    return [event for event in shown if event is not None], exchanges.events_of(pair["plain"]["chunks"])


def by_choice(events: list[Any]) -> dict[Any, list[Any]]:
    """How choices of one stream take turns is another matter every time."""
    found = defaultdict(list)
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        found[choices[0]["index"] if choices else None].append(exchanges.comparable(event))
    return found


# What these pairs ask isn't what capture asks: `echo` of ids is left alone, continuous usage is kept off, and so are
# the calls in which a grammar begins behind the reasoning that the client did not ask for.
ECHOES_OF_IDS = ("no-parser/echo/token-ids", "no-parser/echo-ids-as-tokens")
ASKED_OTHERWISE = ("client-continuous-usage-only", "no-reasoning/json-schema", "no-reasoning/tools-")


def is_asked_otherwise(name: str) -> bool:
    server, _, what = name.partition("/")
    if "no-reasoning/tools-auto" in name:
        return False
    return (
        name.startswith(ECHOES_OF_IDS)
        or what.startswith(ASKED_OTHERWISE)
        or (server == "no-parser" and what.startswith("no-reasoning"))
    )


OTHERWISE = [pair for pair in ALL if is_asked_otherwise(pair[1])]
# The engine itself cut this stream into other chunks the second time.
OTHER_CHUNKS = [("chat", "force-include-usage/plain/stream"), ("chat", "force-include-usage/coalesced/stream")]


@pytest.mark.parametrize(("file", "name"), [pair for pair in ALL if pair not in OTHERWISE + OTHER_CHUNKS])
def test_an_answer_is_what_it_would_have_been(file: str, name: str) -> None:
    pair = exchanges.exchange(file, name)
    asked = asked_for(pair, name)
    assert is_like_the_recording(asked, pair)
    shown, plain = stripped(pair, asked)
    if isinstance(shown, list):
        assert by_choice(shown) == by_choice(plain)
    else:
        assert exchanges.comparable(shown) == exchanges.comparable(plain)


def test_nearly_all_recorded_pairs_are_compared() -> None:
    assert len(ALL) > 200
    assert len(OTHERWISE) < 40
    assert {
        pair
        for pair in OTHERWISE
        if is_like_the_recording(asked_for(exchanges.exchange(*pair), pair[1]), exchanges.exchange(*pair))
    } == set()


# `max_tokens: 0` with `echo` samples a token that the answer then leaves out of its log-probs: such a call is lost.
ANSWERED = [
    pair for pair in ALL if exchanges.exchange(*pair)["plain"]["status"] == 200 and "echo/max-tokens-0" not in pair[1]
]


@pytest.mark.parametrize(("file", "name"), [pair for pair in ANSWERED if pair not in OTHERWISE])
def test_stripping_takes_nothing_from_what_is_captured(file: str, name: str) -> None:
    pair = exchanges.exchange(file, name)
    asked = asked_for(pair, name)
    flagged = pair["with_flags"]
    choices = pair["request"].get("n", 1) * (2 if "batch" in name else 1)
    if "body" in flagged:
        assert parse_answer(json.loads(flagged["body"]), choices=choices).evidence == "ids"
        return
    untouched, shared, stripper = StreamJoiner(choices=choices), StreamJoiner(choices=choices), Stripper(asked)
    for event in exchanges.events_of(flagged["chunks"]):
        if isinstance(event, dict):
            untouched.feed_event(json.loads(json.dumps(event)))
            shared.feed_event(event)
            stripper.learn(event)
            stripper.chunk(event)
    one, other = parse_answer(untouched.answer(), choices=choices), parse_answer(shared.answer(), choices=choices)
    assert one.evidence == "ids"
    assert [choice.generation_token_ids.tolist() for choice in one.choices] == [
        choice.generation_token_ids.tolist() for choice in other.choices
    ]
    assert [choice.generation_log_probs for choice in one.choices] == [
        choice.generation_log_probs for choice in other.choices
    ]
