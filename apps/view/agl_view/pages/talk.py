"""A conversation with the policy that is served now, with the agent's own system prompt and tools; it is not stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agl_core.errors import AglError
from agl_core.protocols import Upstream
from agl_core.server.errors import ApiError
from agl_core.server.upstream import UpstreamClient
from agl_core.types import Call, Json, RolloutState
from agl_view.pages.base import BadQueryError, Pages, number

_LONGEST = 300.0
"""Seconds that a reply may take."""
_MOST_BYTES = 2 << 20
_MOST_TOKENS = 512
"""Of a reply, where no recorded call says how many the agent gets."""
_LOOKED_INTO = 8
"""So many of the newest finished rollouts are looked into for the prompts of agents."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an agent sends with each of its calls."""

    system: str = ""
    tools: str = ""
    """A JSON list of definitions, empty without any."""
    max_tokens: int = _MOST_TOKENS


async def talk_page(pages: Pages, request: Request) -> Response:
    """The form holds the whole conversation: what it sends is answered with the same page, one reply longer."""
    _, folder = pages.found(request)
    served = pages.served()
    if served is None:
        raise BadQueryError(
            "No policy is served here now. `agl train` serves one while it runs, as `agl policy serve`."
        )
    prompts = await _prompts(pages, folder)
    form = await _form(request) if request.method == "POST" else {}
    agent = form.get("agent") or request.query_params.get("agent") or next(iter(prompts), "")
    prompt = prompts.get(agent, Prompt())
    policy = form.get("policy") or next(iter(served.models))
    system, tools = form.get("system", prompt.system), form.get("tools", prompt.tools)
    temperature = form.get("temperature", "0")
    messages, problem, said = _conversation(form), None, ""
    if form:
        asked = [*messages, *_results(form, messages), *_said(form)]
        try:
            body = _body(system, asked, tools, number(temperature, "temperature"), prompt.max_tokens)
            messages = [*asked, await _reply(served, policy, body)]
        except (ApiError, BadQueryError) as error:
            problem, said = str(error), form.get("said", "")
    return pages.render(
        request,
        "talk.html",
        policies=list(served.models),
        policy=policy,
        agents=list(prompts),
        agent=agent,
        system=system,
        tools=tools,
        temperature=temperature,
        messages=messages,
        conversation=json.dumps(messages),  # In ASCII: pages replace the characters that could mislead a reader.
        waiting=_tool_calls(messages),
        said=said,
        problem=problem,
    )


async def _prompts(pages: Pages, folder: Path) -> dict[str, Prompt]:
    """By agent, of the newest rollouts; an agent without a name is the empty text."""
    calls: list[Call] = []
    with suppress(AglError):  # A policy can be talked with without its run's store.
        async with pages.folders.open_store(folder) as store:
            newest = await store.rollouts(newest=_LOOKED_INTO, state=RolloutState.DONE)
            keys = [attempt.key for attempt in await store.attempts(*(rollout.id for rollout in reversed(newest)))]
            calls = await store.calls(keys)
    found: dict[str, Prompt] = {}
    for call in calls:
        messages: list[Any] = list(call.request.get("messages") or ())
        system = [m for m in messages if isinstance(m, dict) and m.get("role") in ("system", "developer")]
        tools = call.request.get("tools")
        found.setdefault(
            call.agent or "",
            Prompt(
                "\n".join(str(message.get("content") or "") for message in system),
                orjson.dumps(tools, option=orjson.OPT_INDENT_2).decode() if tools else "",
                call.effective.max_tokens or _MOST_TOKENS,
            ),
        )
    return found


async def _form(request: Request) -> dict[str, str]:
    """The fields of the form. BadQueryError if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise BadQueryError(f"The conversation is over {_MOST_BYTES >> 20} MiB. Start another one.")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


def _conversation(form: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages so far, as the page wrote them."""
    try:
        messages = orjson.loads(form.get("messages") or "[]")
    except ValueError:
        messages = None
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise BadQueryError("The conversation in the form cannot be read. Open the page anew.")
    return messages


def _tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls that wait for their results."""
    calls = messages[-1].get("tool_calls") if messages else None
    return [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []


def _results(form: Mapping[str, str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": str(call.get("id")), "content": _text(form, f"result.{at}")}
        for at, call in enumerate(_tool_calls(messages))
    ]


def _said(form: Mapping[str, str]) -> list[dict[str, Any]]:
    said = _text(form, "said")
    return [{"role": "user", "content": said}] if said.strip() else []


def _text(form: Mapping[str, str], field: str) -> str:
    """What was typed; browsers end its lines with CR and LF."""
    return form.get(field, "").replace("\r\n", "\n")


def _body(
    system: str, messages: list[dict[str, Any]], tools: str, temperature: float, max_tokens: int
) -> dict[str, Json]:
    """The chat completion. BadQueryError if there is nothing to send, or the tools are no JSON."""
    if not messages or messages[-1].get("role") == "assistant":
        raise BadQueryError("Say something first.")
    before = [{"role": "system", "content": system}] if system.strip() else []
    body: dict[str, Any] = {"messages": before + messages, "temperature": temperature, "max_tokens": max_tokens}
    if tools.strip():
        try:
            body["tools"] = orjson.loads(tools)
        except ValueError as error:
            raise BadQueryError(f"The tools are not JSON ({error}); chat completions take a list.") from None
    return body


async def _reply(served: Upstream, policy: str, body: Mapping[str, Json]) -> dict[str, Any]:
    """The policy's message. ApiError if the model server fails or refuses."""
    if policy not in served.models:
        raise BadQueryError(f"No policy {policy!r} is served here. There are: {', '.join(served.models)}.")
    with closing(UpstreamClient(served, _LONGEST)) as client:
        reply, _ = await client.complete({**body, "model": served.models[policy]}, None)
    try:
        message = orjson.loads(reply)["choices"][0]["message"]
        kept = {key: message[key] for key in ("content", "tool_calls") if message.get(key) is not None}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BadQueryError("The model server's reply has no message.") from None
    return {"role": "assistant", **kept}
