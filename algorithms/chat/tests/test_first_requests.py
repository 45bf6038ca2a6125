"""The first two requests of six programs, through the gateway and the chat layer, to models that take less than they
send: no request is refused, no text is lost, and calls come back as the program knows them."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from agl_chat.api import create_app
from agl_core.capture.requests import HEADER_IGNORED
from agl_core.types import AttemptKey
from agl_server.testing import Stack, running_stack

from .conftest import ScriptedBackend, ScriptedChat, ServedModel, listening, with_template
from .role_templates import TEMPLATES


def schema(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": [*names]}


def parts(kind: str, *texts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, **more} for text in texts]


def function(name: str, *arguments: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": f"Use {name}.", "parameters": schema(*arguments)},
    }


def item(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": parts("input_text", *texts)}


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "system": parts("text", "x-anthropic-billing-header: cc_version=2", "You are an agent.", **CACHED),
    "messages": [
        {"role": "user", "content": parts("text", "<system-reminder>CLAUDE.md</system-reminder>", "Fix the test.")},
        {"role": "system", "content": parts("text", "# Environment", **CACHED)},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": schema("command")},
        {"name": "Later", "defer_loading": True, "input_schema": schema()},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF hunk+'}
AGENTS = {"type": "function", "name": "wait_agent", "strict": False, "parameters": schema("id")}
CODEX: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x-codex-window-id": "w:0"},
    "input": [
        item("developer", "You are a coding agent in the Codex CLI."),
        item("developer", "<skills_instructions>none</skills_instructions>"),
        item("user", "# AGENTS.md instructions"),
        item("user", "Fix the failing test."),
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": schema("cmd")},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [AGENTS]},
        {"type": "web_search", "external_web_access": True},
        {"type": "tool_search"},
        {"type": "local_shell"},
    ],
}
OPENCODE: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "prompt_cache_key": "k",
    "input": [
        {"role": "developer", "content": "You are opencode."},
        {"role": "user", "content": parts("input_text", "Generate a title:")},
        {"role": "user", "content": parts("input_text", "fix the failing test")},
    ],
    "tools": [{"type": "function", "name": "bash", "parameters": schema("command", "description")}],
}
"""Two messages of a user in a row, as in its request for a title."""
QWEN_CODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "You are Qwen Code."},
        {"role": "user", "content": parts("text", "<system-reminder>no skills</system-reminder>", "Fix it.")},
    ],
    "tools": [function("run_shell_command", "command"), function("edit", "file_path")],
}
MINI: dict[str, Any] = {
    "model": "m",
    "temperature": 0.0,
    "messages": [
        {"role": "system", "content": "You can interact with a computer."},
        {"role": "user", "content": "Please solve this issue: a test fails."},
    ],
    "tools": [function("bash", "command")],
}
AIDER: dict[str, Any] = {
    "model": "m",
    "stream": False,
    "temperature": 0,
    "messages": [
        {"role": "system", "content": "Act as an expert software developer."},
        {"role": "user", "content": "I switched to a new code base."},
        {"role": "assistant", "content": "Ok."},
        {"role": "user", "content": "Here are the files: a.py"},
        {"role": "assistant", "content": "Ok, I will edit them."},
        {"role": "user", "content": "Fix the failing test."},
        {"role": "system", "content": "Every SEARCH/REPLACE block must use the full path."},
    ],
}
MESSAGES, RESPONSES, CHAT = "messages", "responses", "chat/completions"


@dataclass(frozen=True)
class Program:
    route: str
    first: Mapping[str, Any]
    call: tuple[str, dict[str, str]] | None
    """The tool and arguments as the model writes them; None: it answers in text."""
    named: Mapping[str, Any]
    """Fields of the call, or of the message, as the program gets it."""
    ignored: frozenset[str] = frozenset()
    """Beside fields and roles: what the reply says is left out of tools."""


PROGRAMS = {
    "Claude Code": Program(
        MESSAGES,
        CLAUDE_CODE,
        ("Bash", {"command": "ls"}),
        {"type": "tool_use", "name": "Bash", "input": {"command": "ls"}},
        frozenset({"tools.web_search", "tools.defer_loading"}),
    ),
    "Codex, a patch": Program(
        RESPONSES,
        CODEX,
        ("apply_patch", {"input": "*** Begin Patch"}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch"},
        frozenset({"tools.apply_patch.format", "tools.web_search", "tools.tool_search", "tools.local_shell"}),
    ),
    "Codex, a sub-agent": Program(
        RESPONSES,
        CODEX,
        ("multi_agent_v1__wait_agent", {"id": "x"}),
        {"type": "function_call", "name": "wait_agent", "namespace": "multi_agent_v1", "arguments": '{"id": "x"}'},
        frozenset({"tools.apply_patch.format", "tools.web_search", "tools.tool_search", "tools.local_shell"}),
    ),
    "opencode": Program(
        RESPONSES, OPENCODE, ("bash", {"command": "ls"}), {"type": "function_call", "arguments": '{"command": "ls"}'}
    ),
    "Qwen Code": Program(CHAT, QWEN_CODE, ("edit", {"file_path": "a.py"}), {"type": "function"}),
    "mini-swe-agent": Program(CHAT, MINI, ("bash", {"command": "ls"}), {"type": "function"}),
    "aider": Program(CHAT, AIDER, None, {"role": "assistant", "content": "a.py is fixed."}),
}
FAMILIES = ("Qwen2.5", "Qwen3.5 raises", "Gemma 3 alternates", "Mistral shows before the last user's")


@dataclass
class Served:
    stack: Stack
    key: AttemptKey
    chat: ScriptedChat
    backend: ScriptedBackend

    async def post(self, route: str, body: Mapping[str, Any], ids: Sequence[int] = ()) -> httpx.Response:
        """The answer, for which the model samples these tokens and its end."""
        self.backend.responses = [ids]
        headers = {"Authorization": f"Bearer {self.stack.key(self.key)}"}
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client:
            response = await client.post(f"{self.stack.url(self.key)}/{route}", json=body)
        assert response.status_code == 200, response.text
        return response


@asynccontextmanager
async def served(model: ServedModel) -> AsyncIterator[Served]:
    model, backend = replace(model, context_length=16384), ScriptedBackend()
    app = create_app({"m": model.server()}, backend, api_key="key")
    async with listening(app) as url:
        fields = {"urls": (f"{url}/v1",), "models": {"default": "m"}, "api_key": "key", "returns_ids": True}
        async with running_stack(upstream_fields=lambda _: fields) as stack:
            yield Served(stack, await stack.lease(), ScriptedChat(model), backend)


def output(route: str, response: httpx.Response) -> list[dict[str, Any]]:
    """The blocks, items or message of a reply, streamed or whole."""
    if "event-stream" not in response.headers["content-type"]:
        return [choice["message"] for choice in response.json()["choices"]]
    datas = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(data) for data in datas]
    if route == RESPONSES:
        return list(events[-1]["response"]["output"])
    if route == CHAT:
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        return [{"role": "assistant", "content": None, "tool_calls": calls}]
    blocks = {event["index"]: event["content_block"] for event in events if event["type"] == "content_block_start"}
    for event in events:
        if event["type"] == "content_block_delta" and "partial_json" in event["delta"]:
            blocks[event["index"]]["input"] = json.loads(event["delta"]["partial_json"])
    return [*blocks.values()]


def second(program: Program, answer: list[dict[str, Any]]) -> dict[str, Any]:
    """The program's next request, with what its tool did, if there was one, and a word of its user."""
    if program.route == RESPONSES:
        result = {"type": f"{answer[-1]['type']}_output", "call_id": answer[-1]["call_id"], "output": "1 failed"}
        return {**program.first, "input": [*program.first["input"], *answer, result, item("user", "Go on.")]}
    if program.route == MESSAGES:
        result = {"type": "tool_result", "tool_use_id": answer[-1]["id"], "content": "1 failed", "is_error": True}
        after = {"role": "user", "content": [result, *parts("text", "Go on.")]}
        messages = [*program.first["messages"], {"role": "assistant", "content": answer}, after]
        return {**program.first, "messages": messages}
    calls = answer[-1].get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1 failed"} for call in calls]
    asked = {"role": "user", "content": "Go on."}
    return {**program.first, "messages": [*program.first["messages"], *answer, *results, asked]}


def texts(value: Any) -> list[str]:
    """All texts of messages or items, and the names of tools that the model is to see."""
    if isinstance(value, list):
        return [text for entry in value for text in texts(entry)]
    if not isinstance(value, dict):
        return []
    own = [value[name] for name in ("text", "content") if isinstance(value.get(name), str)]
    return [*own, *itertools.chain.from_iterable(texts(value.get(name)) for name in ("content", "system"))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_is_served(qwen: ServedModel, name: str, family: str) -> None:
    program, (template, _) = PROGRAMS[name], TEMPLATES[family]
    async with served(with_template(qwen, template)) as model:
        reply = "a.py is fixed."
        if program.call:
            tool, arguments = program.call[0], json.dumps(program.call[1])
            reply = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
            if "Gemma" in family:
                reply = f"Action: {tool} {arguments}"
            if "Mistral" in family:
                reply = f'[TOOL_CALLS][{{"name": "{tool}", "arguments": {arguments}}}]'
        response = await model.post(program.route, program.first, model.chat.letters(reply)[:-1])
        answer = output(program.route, response)
        told = answer[-1]["tool_calls"][-1] if program.call and program.route == CHAT else answer[-1]
        assert {field: told.get(field) for field in program.named} == program.named
        ignored = response.headers.get(HEADER_IGNORED, "").split(", ")
        assert {field for field in ignored if field.startswith("tools")} == program.ignored
        following = second(program, answer)
        await model.post(program.route, following)
        first, last = await model.stack.calls(model.key)
        assert first.ignored == response.headers.get(HEADER_IGNORED)
        sampled = [*first.prompt_ids.tolist(), *first.choices[0].response_ids.tolist()]
        assert last.prompt_ids.tolist()[: len(sampled)] == sampled
        assert last.prefix_broken is None
        shown = model.chat.model.tokenizer.decode(last.prompt_ids.tolist())
        sent = texts([following.get("system"), following.get("messages"), following.get("input")])
        assert [text for text in (*sent, "Go on.") if text not in shown] == []
        assert program.call is None or "1 failed" in shown


@pytest.mark.parametrize("family", ["Qwen2.5", "Gemma 3 alternates"])
async def test_counted_tokens_are_those_that_the_request_costs(qwen: ServedModel, family: str) -> None:
    """Also after a reply whose ids are not those of its text; the count itself is not taken for a reply."""
    program, text = PROGRAMS["Claude Code"], "The answer is 42."
    async with served(with_template(qwen, TEMPLATES[family][0])) as model:
        usual, sampled = model.chat.encode(text), model.chat.letters(text)[:-1]
        assert usual != sampled
        body: dict[str, Any] = {**program.first, "stream": False}
        for _ in range(2):
            asked = {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "metadata")}
            before = await model.post("messages/count_tokens", asked, usual)
            message = (await model.post(MESSAGES, body, sampled)).json()
            after = await model.post("messages/count_tokens", asked, usual)
            cost = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
            assert before.json() == after.json() == {"input_tokens": cost}
            answer = {"role": "assistant", "content": message["content"]}
            body["messages"] = [*body["messages"], answer, {"role": "user", "content": "Go on."}]
        first, last = await model.stack.calls(model.key)
        recorded = [*first.prompt_ids.tolist(), *first.choices[0].response_ids.tolist()]
        assert last.prompt_ids.tolist()[: len(recorded)] == recorded
        assert len(last.prompt_ids) == cost
