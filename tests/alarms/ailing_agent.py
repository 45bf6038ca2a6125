"""An agent with a tool, which answers as the policy tells it to."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx

import agl_core
from agl_core.wire.headers import HEADER_AGENT
from agl_core.worker import AgentContext

PLACES = {"table": "5 apples"}


async def solve(task_input: Any, context: AgentContext) -> Any:
    """Look where the policy wants to, and say what it says; "crash" and "report" are done instead."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task_input["question"]}]
    async with httpx.AsyncClient(base_url=context.base_url, trust_env=False, verify=False, timeout=60) as client:
        while True:
            asked = {"model": "default", "messages": messages}
            headers = {"Authorization": f"Bearer {context.api_key}", HEADER_AGENT: "solver"}
            answered = await client.post("chat/completions", json=asked, headers=headers)
            reply = answered.raise_for_status().json()["choices"][0]["message"]
            tool_calls = reply.get("tool_calls") or ()
            if not tool_calls:
                break
            for each in tool_calls:
                if each["function"]["arguments"] == "denied":
                    await client.post("traces", json=_success(each), headers=headers)
            messages += [
                reply,
                *({"role": "tool", "tool_call_id": each["id"], "content": _look(each)} for each in tool_calls),
            ]
    if reply["content"] == "crash":
        raise RuntimeError("the agent's own fault")
    return 1.0 if reply["content"] == "report" else reply["content"]


def _success(tool_call: Any) -> Any:
    """What OpenTelemetry would export of a tool that found something."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": tool_call["id"],
        "gen_ai.tool.call.result": "5 apples",
    }
    span = {
        "traceId": os.urandom(16).hex(),
        "spanId": os.urandom(8).hex(),
        "name": "look",
        "startTimeUnixNano": str(time.time_ns()),
        "endTimeUnixNano": str(time.time_ns()),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def _look(tool_call: Any) -> str:
    place = tool_call["function"]["arguments"]
    if place == "denied":
        return "Error: KeyError: 'denied'"
    try:
        with agl_core.tool("look", call_id=tool_call["id"], arguments={"at": place}) as run:
            run.result = PLACES[place]
            return str(run.result)
    except KeyError as error:
        return f"Error: KeyError: {error}"
