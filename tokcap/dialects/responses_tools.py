"""The tools of a Responses request as chat functions, and the names that their calls have in an answer.

Chat knows functions only. As in vLLM, a function of a namespace is shown to the model as `<namespace>__<name>`, and a
custom tool, whose input is free text, as a function with the one string `input`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from .chat import json_object
from .fields import Fields, kind_of, objects

__all__ = ("ToolNames", "custom_arguments", "custom_input", "flat_name", "read_tools")

_INPUT = "input"
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [_INPUT],
    "additionalProperties": False,
}
"""The words are vLLM's: the model reads them, so that others would be another prompt."""

_REFUSED = {
    "defer_loading": "local engines don't search for tools",
    "async": "chat has no asynchronous tools",
    "output_schema": "chat functions have no output schema",
}


class ToolNames(msgspec.Struct, frozen=True):
    """What the tools that the model saw are called by the client."""

    functions: frozenset[str] = frozenset()
    """The names in chat, of all tools."""
    namespaced: dict[str, tuple[str, str]] = {}
    """Namespace and name, by the name in chat."""
    custom: frozenset[str] = frozenset()

    def named(self, name: str) -> str | None:
        """The name in chat of the tool that a client calls `name`; None if there is none, or more than one."""
        if name in self.functions:
            return name
        found = [flat for flat, (_, local) in self.namespaced.items() if local == name]
        return found[0] if len(found) == 1 else None


def read_tools(value: Any, at: str) -> tuple[list[dict[str, Any]], ToolNames]:
    """The chat tools, and their names. value: `tools` of the request, or None. Raises `UntranslatableError`."""
    tools: list[dict[str, Any]] = []
    namespaced: dict[str, tuple[str, str]] = {}
    custom: set[str] = set()
    for tool in [] if value is None else objects(value, at):
        kind = tool.text("type", needed=True)
        if kind == "function":
            tools.append(_function(tool))
        elif kind == "custom":
            tools.append(_custom(tool))
            custom.add(tools[-1]["function"]["name"])
        elif kind == "namespace":
            namespace = tool.text("name", needed=True)
            tool.text("description")  # vLLM shows none of a namespace
            for inner in objects(tool.take("tools", needed=True), tool.path("tools")):
                if inner.text("type", needed=True) != "function":
                    raise inner.refuse("type", "only functions can be shown out of a namespace")
                shown = _function(inner)
                local = shown["function"]["name"]
                shown["function"]["name"] = flat_name(namespace, local)
                namespaced[flat_name(namespace, local)] = (namespace, local)
                tools.append(shown)
            tool.done({})
        else:
            raise tool.refuse("type", f"{kind} is a tool that the server would have to know or run")
    return tools, ToolNames(frozenset(tool["function"]["name"] for tool in tools), namespaced, frozenset(custom))


def _function(tool: Fields) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.text("name", needed=True)}
    for key in ("description", "parameters", "strict"):
        value = tool.take(key)
        if value is not None:
            function[key] = value
    if not isinstance(function.get("parameters", {}), Mapping):
        raise tool.refuse("parameters", f"expected an object, not {kind_of(function['parameters'])}")
    _close(tool)
    return {"type": "function", "function": function}


def _custom(tool: Fields) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.text("name", needed=True)}
    description = tool.take("description")
    if description is not None:
        function["description"] = description
    function["parameters"] = _INPUT_SCHEMA
    form = tool.take("format")
    if form is not None and form != {"type": "text"}:
        raise tool.refuse("format", "chat has no functions whose arguments follow a grammar")
    _close(tool)
    return {"type": "function", "function": function}


def _close(tool: Fields) -> None:
    callers = tool.take("allowed_callers")
    if callers not in (None, [], ["direct"]):
        raise tool.refuse("allowed_callers", "only the model itself calls tools here")
    tool.done({}, _REFUSED)


def flat_name(namespace: str, name: str) -> str:
    """The name in chat of a function of a namespace."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """The input of a custom tool as the arguments that its function has."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that the model wrote; as they are if there is none in them."""
    value = (json_object(arguments) or {}).get(_INPUT)
    return value if isinstance(value, str) else arguments
