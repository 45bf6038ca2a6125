"""A scripted model that does what a request asks for: it calls the tools that it may, and answers by the schema."""

from __future__ import annotations

import json
import re
from typing import Any

from agl_core.testing.scripts import CallTools, Received, Say

_DEPTH = 8


def obey(received: Received) -> CallTools | Say:
    """A tool call where tools are offered and none has answered yet, an instance where a schema is asked for, or text.

    >>> add = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
    >>> asked = {"messages": [{"role": "user", "content": "3"}], "tools": [{"type": "function", "function": add}]}
    >>> obey(Received(asked, {}))
    CallTools(calls=[('add', {'a': 3})], text=None)
    """
    body, said = received.body, str(next((i["content"] for i in reversed(received.items) if i["role"] != "tool"), ""))
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if "function" in tool}
    choice = body.get("tool_choice") or "auto"
    answered = received.items[-1]["role"] == "tool"
    if isinstance(choice, dict):
        tools = {name: tool for name, tool in tools.items() if name == choice["function"]["name"]}
    if tools and choice != "none" and (not answered or choice != "auto"):
        (name, tool) = next(iter(tools.items()))
        return CallTools([(name, instance(tool.get("parameters") or {}, said))])
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        return Say(json.dumps(instance(form["json_schema"].get("schema") or {}, said)))
    if form.get("type") == "json_object":
        return Say(json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", said) or ["answer"], said)))
    return Say(f"You said: {said[:200]}. I answer in more than eighty characters, so that it takes several pieces.")


def instance(schema: Any, said: str, root: Any = None, depth: int = 0) -> Any:
    """A value that fits a schema; numbers and texts are taken from what the user said."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > _DEPTH:
        return None
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return instance(found, said, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return instance(schema[several][0], said, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    numbers = re.findall(r"-?\d+", said) or ["1"]
    number = min(max(int(numbers[0]), schema.get("minimum", -(10**9))), schema.get("maximum", 10**9))
    match kind:
        case "object":
            fields = schema.get("properties") or {}
            return {name: instance(field, said, root, depth + 1) for name, field in fields.items()}
        case "array":
            return [instance(schema.get("items") or {}, said, root, depth + 1)] * max(1, schema.get("minItems", 1))
        case "integer":
            return number
        case "number":
            return float(number)
        case "boolean":
            return True
        case "null":
            return None
    return said[:80]
