"""Every captured request once more without capture, while the server still runs: what its answer has to be.

The request as it is shows what a client sees that is not captured. Rendered, it shows the prompt, whatever its dialect.
With the flags that capture adds it shows the ids that the engine samples, from its own mouth.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tests.exchanges import comparable, events_of
from tokcap.dialects import dialect_of

from .wire import Answer, Clients, Exchange

__all__ = ("Again", "asked_again", "problems_of_sight", "said_in")

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class Again(msgspec.Struct):
    """One captured exchange, and what the engine says of the same request without capture."""

    exchange: Exchange
    prompts: list[list[int]]
    """As the server renders the client's own body, one for each prompt; none of a request that was refused."""
    grammar: dict[str, Any] | None = None
    """What forces the answer, as the server says."""
    translated: str = ""
    """What is not the same if the server renders our translation of the request instead; empty if nothing."""
    plain: Answer | None = None
    """None if the engine would sample otherwise."""
    flagged_request: dict[str, Any] = {}
    flagged: Answer | None = None
    """None also where the dialect gives no ids."""

    @property
    def sampled(self) -> dict[int, tuple[list[int], list[float]]]:
        """Ids and log-probs by choice, as `flagged` has them."""
        found: dict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for choice in _choices(self.flagged):
            ids, log_probs = found[choice["index"]]
            ids += choice.get("token_ids") or []
            told = choice.get("logprobs") or {}
            log_probs += [each["logprob"] for each in told.get("content") or []] or told.get("token_logprobs") or []
        return dict(found)


def asked_again(clients: Clients) -> list[Again]:
    """Ask again whatever was answered to its end, one request at a time."""
    found = []
    for exchange in clients.exchanges:
        status = exchange.answer.status
        if exchange.path in (CHAT, COMPLETIONS) and status >= 400 and status != 401:
            found.append(Again(exchange, [], plain=clients.ask(exchange.path, exchange.request)))
        elif status == 200 and exchange.training and exchange.whole and exchange.call_id:
            rendered = list(_rendered(clients, exchange.path, exchange.request))
            grammar = rendered[0]["sampling_params"].get("structured_outputs")
            again = Again(exchange, [each["token_ids"] for each in rendered], grammar)
            again.translated = _translated(clients, exchange, rendered[0])
            if exchange.can_be_repeated or exchange.path == GENERATE:
                again.plain = clients.ask(exchange.path, exchange.request)
                again.flagged_request = _flagged(exchange)
                if again.flagged_request:
                    again.flagged = clients.ask(exchange.path, again.flagged_request)
            found.append(again)
    return found


def _rendered(clients: Clients, path: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`token_ids` and `sampling_params` of each prompt."""
    if path == GENERATE:
        yield request
        return
    rendered = json.loads(clients.ask(f"{path}/render", request).body)
    yield from rendered if isinstance(rendered, list) else [rendered]


def _translated(clients: Clients, exchange: Exchange, rendered: dict[str, Any]) -> str:
    dialect = dialect_of(exchange.path.rpartition("/")[2])
    if dialect is None:
        return ""
    (ours,) = _rendered(clients, CHAT, dialect.chat_request(exchange.request))
    differs = ["the prompt"] if ours["token_ids"] != rendered["token_ids"] else []
    one, other = (each["sampling_params"] for each in (ours, rendered))
    # Null, empty and absent are the same to the engine.
    differs += [key for key in one.keys() | other.keys() if (one.get(key) or None) != (other.get(key) or None)]
    return ", ".join(sorted(differs))


def _flagged(exchange: Exchange) -> dict[str, Any]:
    """The request with what capture adds to it; empty for a dialect without ids."""
    request = dict(exchange.request)
    if exchange.path == GENERATE:
        request |= {"return_token_ids": True}
        request["sampling_params"] = {"logprobs": 0, **request["sampling_params"]}
    elif exchange.path == CHAT:
        request |= {"return_token_ids": True, "logprobs": True}
        if request.get("include_reasoning") is False:
            request["include_reasoning"] = True
    elif exchange.path == COMPLETIONS:
        request = {"logprobs": 0, **request, "return_token_ids": True}
    else:
        return {}
    if request.get("stream"):
        request["stream_options"] = {**request.get("stream_options", {}), "include_usage": True}
    return request


# ---- what the client saw


def problems_of_sight(found: Iterable[Again]) -> Iterator[str]:
    """Whatever a client saw that it would not have seen without capture."""
    for again in found:
        exchange = again.exchange
        yield from (f"{exchange}: the client sees {key}" for key in sorted(_unasked(exchange)))
        if again.translated:
            yield f"{exchange}: its translation changes {again.translated}"
        if again.plain is not None:
            seen, expected = _seen(exchange.path, exchange.answer), _seen(exchange.path, again.plain)
            if seen != expected:
                yield f"{exchange}: the client got\n    {seen}\n  and without capture\n    {expected}"


def _unasked(exchange: Exchange) -> set[str]:
    """Names of members with ids or log-probs that the client did not ask for."""
    request, hidden = exchange.request, {"token_ids", "prompt_token_ids", "logprobs"}
    if request.get("return_token_ids") or exchange.path == GENERATE:
        hidden -= {"token_ids", "prompt_token_ids"}
    if request.get("logprobs"):
        hidden -= {"logprobs"}

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (key for key, each in value.items() if key in hidden and each not in (None, []))
            value = list(value.values())
        for each in value if isinstance(value, list) else ():
            yield from walk(each)

    return set(walk(_decoded(exchange.answer)))


def _decoded(answer: Answer) -> Any:
    return events_of([answer.body.decode()]) if answer.is_stream else json.loads(answer.body)


def _choices(answer: Answer | None) -> Iterator[dict[str, Any]]:
    if answer is not None and answer.status == 200:
        decoded = _decoded(answer)
        for event in decoded if isinstance(decoded, list) else [decoded]:
            yield from event["choices"] if isinstance(event, dict) else ()


def said_in(exchange: Exchange) -> Iterator[str]:
    """The text of a chat stream, as far as it was read."""
    read, _, _ = exchange.answer.body.decode().rpartition("\n\n")
    for event in events_of([f"{read}\n\n"]):
        for choice in event["choices"] if isinstance(event, dict) else ():
            yield choice["delta"].get("content") or ""


def _seen(path: str, answer: Answer) -> Any:
    decoded = _decoded(answer)
    if path == MESSAGES:
        return answer.status, _message(_message_of(decoded) if answer.is_stream else decoded)
    if path == RESPONSES:
        return answer.status, _response(decoded[-1]["response"] if answer.is_stream else decoded)
    return answer.status, _merged(decoded) if answer.is_stream else comparable(decoded)


def _merged(events: list[Any]) -> dict[Any, list[Any]]:
    """The events of each choice, text that came in several of them in one: an engine cuts it as it has the time."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        choices = event.get("choices") if isinstance(event, dict) else None
        own = found[choices[0]["index"] if choices else None]
        last = own[-1] if own else None
        if isinstance(last, dict) and isinstance(event, dict):
            (one, said), (other, more) = _cut(last), _cut(event)
            if said is not None and more is not None and one == other:
                own[-1] = _with_text(last, said + more)
                continue
        own.append(event)
    return {index: [comparable(event) for event in own] for index, own in found.items()}


def _place(event: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Where the text of a chunk stands that says nothing else."""
    if len(event.get("choices") or ()) != 1 or event["choices"][0].get("finish_reason") is not None:
        return None
    choice = event["choices"][0]
    if "text" in choice:
        return choice, "text"
    delta = choice.get("delta") or {}
    if list(delta) in (["content"], ["reasoning"]):
        return delta, next(iter(delta))
    if list(delta) == ["tool_calls"] and len(delta["tool_calls"]) == 1:
        call = delta["tool_calls"][0]
        if set(call) <= {"index", "function"} and list(call["function"]) == ["arguments"]:
            return call["function"], "arguments"
    return None


def _cut(event: dict[str, Any]) -> tuple[Any, str | None]:
    """A chunk without its text, and the text."""
    copy = json.loads(json.dumps(event))
    place = _place(copy)
    if place is None or not isinstance(place[0][place[1]], str):
        return copy, None
    # What only one of several chunks has.
    for key in ("logprobs", "token_ids"):
        if copy["choices"][0].get(key) is not None:
            return copy, None
    owner, key = place
    return copy, str(owner.pop(key))


def _with_text(event: dict[str, Any], text: str) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(event))
    place = _place(copy)
    assert place is not None
    place[0][place[1]] = text
    return copy


def _message_of(events: list[Any]) -> dict[str, Any]:
    """The message that a stream of its dialect tells."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                for name, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if name in delta:
                        block[key] = block.get(key, "") + delta[name]
            case "message_delta":
                message |= event["delta"]
                message["usage"] = {**message["usage"], **event["usage"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            text = block.pop("json", "")
            try:
                block["input"] = json.loads(text or "{}")
            except ValueError:  # it was cut off
                block["input"] = text
    return message


def _message(message: dict[str, Any]) -> list[Any]:
    blocks = [
        (block["type"], block.get("text"), block.get("thinking"), block.get("name"), block.get("input"))
        for block in message["content"]
    ]
    # An empty text block says nothing.
    blocks = [block for block in blocks if block[0] != "text" or block[1]]
    return [blocks, message["stop_reason"], message.get("stop_sequence"), message["usage"]["output_tokens"]]


def _response(response: dict[str, Any]) -> list[Any]:
    def text(part: dict[str, Any]) -> Any:
        return part.get("text")

    items = [
        (item["type"], [text(part) for part in item.get("content") or ()], item.get("name"), item.get("arguments"))
        for item in response["output"]
    ]
    usage = response["usage"]
    return [
        items,
        response["status"],
        response.get("incomplete_details"),
        usage["input_tokens"],
        usage["output_tokens"],
    ]
