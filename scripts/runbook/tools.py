"""What agents do with tools and with reasoning, in all three dialects, and with two processes and a key."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .drive import SYSTEM, Drive, at, begun, user
from .wire import MODEL

__all__ = ("processes", "reasoning", "strangers", "tools", "tools_after_reasoning")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Current weather of a city", "parameters": SCHEMA, "strict": True}
"""`strict`: else the arguments of a call that is forced may be anything."""
CHAT_TOOLS = [{"type": "function", "function": WEATHER}]
RESPONSES_TOOLS = [{"type": "function", **WEATHER}]
MESSAGES_TOOLS = [
    {"name": "get_weather", "description": "Current weather of a city", "input_schema": SCHEMA, "strict": True}
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

Turn = tuple[str, str, str]
"""Of an earlier conversation that shows the small model how it is done: question, reasoning, city."""
SHOWN: tuple[Turn, ...] = (
    ("Weather in Rome?", "The user asks about Rome.", "Rome"),
    ("Weather in Oslo?", "The user asks about Oslo.", "Oslo"),
)


def chat_call(city: str, number: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": f"call-{number}", "type": "function", "function": function}


def shown_in_chat(reasoning: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, (question, thought, city) in enumerate(SHOWN):
        called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [chat_call(city, number)]}
        if reasoning:
            called |= {"reasoning": thought, "reasoning_content": thought}
        result = {"role": "tool", "tool_call_id": f"call-{number}", "content": "sunny"}
        messages += [user(question), called, result, {"role": "assistant", "content": f"Sunny in {city}."}]
    return messages


def shown_in_messages(reasoning: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, (question, thought, city) in enumerate(SHOWN):
        thinking = [{"type": "thinking", "thinking": thought, "signature": "x"}] if reasoning else []
        call = {"type": "tool_use", "id": f"call-{number}", "name": "get_weather", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": f"call-{number}", "content": "sunny"}
        messages += [
            user(question),
            {"role": "assistant", "content": [*thinking, call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [{"type": "text", "text": f"Sunny in {city}."}]},
        ]
    return messages


def shown_in_responses() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for number, (question, _, city) in enumerate(SHOWN):
        call = {"type": "function_call", "call_id": f"call-{number}", "name": "get_weather"}
        items += [
            user(question),
            {**call, "arguments": json.dumps({"city": city})},
            {"type": "function_call_output", "call_id": f"call-{number}", "output": "sunny"},
            {"role": "assistant", "content": f"Sunny in {city}."},
        ]
    return items


# ---- tools


def tools(drive: Drive, forced: bool = True) -> None:
    """A tool parser reads the answers. forced: whether a call that is asked for by name has to come.

    With a reasoning parser vLLM lets the model reason first, and what comes after that may be cut off.
    """
    for stream in (False, True):
        _tool_loop(drive, f"tools-{'streamed' if stream else 'whole'}", stream, forced)
    _tools_of_chat(drive, "tools-chat-1")
    _tools_of_messages(drive, "tools-messages-1", forced)
    _tools_of_responses(drive, "tools-responses-1", forced)


def tools_after_reasoning(drive: Drive) -> None:
    """The same with a reasoning parser."""
    tools(drive, forced=False)


def _tool_loop(drive: Drive, rollout: str, stream: bool, forced: bool) -> None:
    """An agent: each question makes a call of a tool, whose result makes an answer."""
    client, messages = drive.clients.openai(rollout), [*begun(), *shown_in_chat()]
    for _ in range(2):
        messages.append(drive.weather())
        message = _asked(drive, client, messages, stream=stream, tools=CHAT_TOOLS, tool_choice=NAMED)
        calls = message.get("tool_calls", [])
        named = [call["function"]["name"] for call in calls]
        drive.check(named == ["get_weather"] or not forced, f"{rollout}: the calls are {calls}")
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny, 20 °C"} for call in calls]
        message = _asked(drive, client, messages, stream=stream, tools=CHAT_TOOLS, tool_choice="none")
        messages.append(message)
    drive.expect(rollout, recorded=4)


def _asked(drive: Drive, client: Any, messages: Iterable[Any], *, stream: bool, **asked: Any) -> dict[str, Any]:
    """One answer, as the message that goes into the history."""
    asked = {"max_tokens": 40, **drive.sampling(), **asked}
    if not stream:
        answer = client.chat.completions.create(messages=messages, **asked).choices[0].message
        calls = [call.model_dump() for call in answer.tool_calls or ()]
        message = {"role": "assistant", "content": answer.content or ""}
        return message | ({"tool_calls": calls} if calls else {})
    text, parts = "", dict[int, dict[str, Any]]()
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = parts.setdefault(
                    part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": text}
    return message | ({"tool_calls": list(parts.values())} if parts else {})


def _tools_of_chat(drive: Drive, rollout: str) -> None:
    """The model is left to itself: it calls a tool, or says something; of many seeds some do either."""
    client = drive.clients.openai(rollout)
    made = 0
    for stream in (False, True):
        for asked in ({}, {"tool_choice": "required"}, {"n": 2}, {"parallel_tool_calls": False}, {"max_tokens": 12}):
            messages = [*shown_in_chat(), drive.weather()]
            message = _asked(drive, client, messages, stream=stream, tools=CHAT_TOOLS, **asked)
            made += "tool_calls" in message
        birds = [user(f"Repeat{' once more' if stream else ''}: 🦜🦔🐙 你好世界 🦜🦔🐙")]
        _asked(drive, client, birds, stream=stream, tools=CHAT_TOOLS)
    drive.check(made, f"{rollout}: the model has called no tool at all")
    drive.expect(rollout, recorded=12)


def _tools_of_messages(drive: Drive, rollout: str, forced: bool) -> None:
    client = drive.clients.anthropic(rollout)
    asked = {"model": MODEL, "max_tokens": 40, "tools": MESSAGES_TOOLS, **at(0.0)}
    named = {"type": "tool", "name": "get_weather"}
    choices: tuple[dict[str, Any], ...] = (named, {"type": "auto"}, {"type": "any"}, {"type": "none"})
    for choice in choices:
        shown = [*shown_in_messages(), drive.weather()]
        answer = client.messages.create(messages=shown, tool_choice=choice, system=SYSTEM, **asked)
        with client.messages.stream(messages=shown, tool_choice=choice, **asked) as events:
            streamed = events.get_final_message()
        if forced and choice["type"] in ("tool", "any"):
            kinds = {block.type for block in (*answer.content, *streamed.content)}
            drive.check(kinds == {"tool_use"}, f"{rollout}: blocks are {kinds}")
    # The conversation goes on with what came, and a result.
    shown = [*shown_in_messages(), drive.weather()]
    content = client.messages.create(messages=shown, tool_choice=named, **asked).content
    client.messages.create(messages=_and_back(shown, content), **{**asked, **at(1.0)})
    drive.expect(rollout, recorded=10)


def _and_back(shown: list[dict[str, Any]], content: list[Any]) -> list[dict[str, Any]]:
    """A conversation, with the blocks of an answer and what its tools said, or another question."""
    blocks = [block.model_dump(exclude_none=True) for block in content]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "rainy"} for call in calls]
    new = [*results, {"type": "text", "text": "And in Bonn?"}]
    return [*shown, {"role": "assistant", "content": blocks}, {"role": "user", "content": new}]


def _tools_of_responses(drive: Drive, rollout: str, forced: bool) -> None:
    client = drive.clients.openai(rollout)
    asked = {"model": MODEL, "max_output_tokens": 40, "temperature": 0.0, "tools": RESPONSES_TOOLS, "store": False}
    named = {"type": "function", "name": "get_weather"}
    for choice in (named, "auto", "required", "none"):
        shown = [*shown_in_responses(), drive.weather()]
        client.responses.create(input=shown, tool_choice=choice, instructions=SYSTEM, **asked)
        *_, last = client.responses.create(input=shown, tool_choice=choice, stream=True, **asked)
        if forced and choice in (named, "required"):
            kinds = {item.type for item in last.response.output}
            drive.check(kinds == {"function_call"}, f"{rollout}: items are {kinds}")
    shown = [*shown_in_responses(), drive.weather()]
    output = client.responses.create(input=shown, tool_choice=named, **asked).output
    client.responses.create(input=_and_on(shown, output), **{**asked, "temperature": 1.0})
    drive.expect(rollout, recorded=10)


def _and_on(shown: list[dict[str, Any]], output: list[Any]) -> list[dict[str, Any]]:
    """The same with the items of a response."""
    items = [item.model_dump(exclude_none=True) for item in output]
    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "rainy"} for call in calls]
    return [*shown, *items, *results, user("And in Bonn?")]


# ---- reasoning


def reasoning(drive: Drive) -> None:
    """A reasoning parser and a tool parser read the answers."""
    _reasoning_of_chat(drive, "reasoning-chat-1")
    _reasoning_of_messages(drive, "reasoning-messages-1")
    _reasoning_of_responses(drive, "reasoning-responses-1")
    client = drive.clients.openai("evaluated-1", training=False)
    drive.chat(client, [user("Say hi to Ann")])
    drive.chat(client, [user("Say hi to Ann")], stream=True)
    drive.expect("evaluated-1")


def _reasoning_of_chat(drive: Drive, rollout: str) -> None:
    client = drive.clients.openai(rollout)
    for stream in (False, True):
        for hidden in ({}, {"extra_body": {"include_reasoning": False}}):
            for asked in ({"tools": CHAT_TOOLS}, {}, {"n": 2}, {"max_tokens": 8}):
                messages = [*shown_in_chat(reasoning=True), drive.weather()]
                _asked(drive, client, messages, stream=stream, **asked, **hidden)
    drive.expect(rollout, recorded=16)


def _reasoning_of_messages(drive: Drive, rollout: str) -> None:
    client = drive.clients.anthropic(rollout)
    shown = [*shown_in_messages(reasoning=True), drive.weather()]
    asked = {"model": MODEL, "max_tokens": 40, "messages": shown, **at(0.0)}
    client.messages.create(**asked)
    client.messages.create(**asked, tools=MESSAGES_TOOLS)
    with client.messages.stream(**asked, tools=MESSAGES_TOOLS) as events:
        answer = events.get_final_message()
    # Back into the history, as an agent does it, signature and all.
    asked["messages"] = _and_back(shown, answer.content)
    client.messages.create(**{**asked, **at(1.0)}, tools=MESSAGES_TOOLS, thinking={"type": "disabled"})
    drive.expect(rollout, recorded=4)


def _reasoning_of_responses(drive: Drive, rollout: str) -> None:
    client = drive.clients.openai(rollout)
    shown = [*shown_in_responses(), drive.weather()]
    asked = {"model": MODEL, "max_output_tokens": 40, "temperature": 0.0, "store": False}
    client.responses.create(input=shown, **asked)
    output = client.responses.create(input=shown, tools=RESPONSES_TOOLS, reasoning={"effort": "low"}, **asked).output
    list(client.responses.create(input=shown, tools=RESPONSES_TOOLS, stream=True, **asked))
    client.responses.create(input=_and_on(shown, output), tools=RESPONSES_TOOLS, **{**asked, "temperature": 1.0})
    drive.expect(rollout, recorded=4)


# ---- two processes and a key


def strangers(drive: Drive) -> None:
    """Without the right key nothing is answered, and nothing is written."""
    for key in ("wrong", ""):
        with drive.refused("AuthenticationError", f"openai with the key {key!r}"):
            drive.chat(drive.clients.openai("stranger-1", key=key), [user("Say hi")])
        with drive.refused("AuthenticationError", f"anthropic with the key {key!r}"):
            client = drive.clients.anthropic("stranger-1", key=key)
            client.messages.create(model=MODEL, max_tokens=4, messages=[user("Say hi")])
    drive.expect("stranger-1")


def processes(drive: Drive, at_once: int = 8, each: int = 3) -> None:
    """Agents at the same time, every call on a connection of its own, so that both processes get some of each."""

    def agent(number: int) -> None:
        # Two agents share a rollout.
        rollout, messages = f"many-{number // 2}", begun(f"You are agent {number}. Answer briefly.")
        for turn in range(each):
            messages.append(user(f"Say something about the number {turn}."))
            drive.chat(drive.clients.openai(rollout), messages, stream=bool(number % 2))

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(agent, range(at_once)))
    for pair in range(at_once // 2):
        drive.expect(f"many-{pair}", recorded=2 * each)
