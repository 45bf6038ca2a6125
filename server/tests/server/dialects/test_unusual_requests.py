"""Requests of common agents beside text and functions: hosted and custom tools, summaries of reasoning, images, tools
and blocks of Anthropic's, settings that only tune a hosted service, and what is refused."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import openai
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.beta import BetaMemoryTool20250818Command
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai import AsyncOpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from agl_core.capture.requests import HEADER_AGENT, HEADER_IGNORED
from agl_core.testing.scripts import CallTools, Fail, Say
from agl_core.types import AttemptKey, Housekeeping, Mode
from agl_server.testing import Stack, running_stack

from ..server_aids import GOOD, HELLO, SMALLEST, assistant, call, client_of, closed, forwarded, post, reply

HOSTED: Any = {"type": "file_search", "vector_store_ids": ["v"]}
SHELL: dict[str, Any] = {"name": "shell", "description": "Runs a command."}
GRAMMAR = {"definition": "start: /.+/", "syntax": "lark"}
REQUEST: dict[str, Any] = {"model": "default", "input": "hello"}
CALLED = {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
FOUND_TOOL = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "add"}]}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
USES_CUSTOM = reply(assistant(None, CALLED))


async def test_hosted_tools_are_the_model_servers_affair(stack: Stack, client: AsyncOpenAI) -> None:
    stack.upstream.script(Say("found"), Fail(400, {"error": {"message": "no such tool."}}))
    response = await client.responses.create(**REQUEST, tools=[HOSTED], tool_choice={"type": "file_search"})
    assert response.output_text == "found"
    assert stack.upstream.received[0].body["tools"] == [HOSTED]
    assert stack.upstream.received[0].body["tool_choice"] == {"type": "file_search"}
    with pytest.raises(openai.BadRequestError, match="no such tool"):
        await client.responses.create(**REQUEST, tools=[HOSTED])


OF_OPENAI = ("file_search_call", "code_interpreter_call", "mcp_list_tools", "apply_patch_call_output", "later_call")


async def test_a_session_of_codex_is_served_without_what_only_its_own_servers_know(
    stack: Stack, key: AttemptKey
) -> None:
    run: Any = {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}}}
    others = [{"type": kind} for kind in ("web_search", "tool_search", "shell", "local_shell")]
    docs = {"type": "namespace", "name": "docs", "description": "Pages.", "tools": [{**run, "name": "find"}]}
    session: Any = [
        {"role": "user", "content": "hello"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {"type": "function_call", "call_id": "c2", "namespace": "docs", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "none"},
        {"type": "compaction_trigger"},
        *({"type": kind, "id": "x"} for kind in OF_OPENAI),
    ]
    stack.upstream.script(CallTools([("docs__find", {}), ("exec_command", {}), ("unknown__find", {})]))
    raw = await stack.client(key).responses.with_raw_response.create(
        model="default", input=session, tools=[run, *others, docs]
    )
    assert set(raw.headers[HEADER_IGNORED].split(", ")) == {
        *("tools.web_search", "tools.tool_search", "tools.shell", "tools.local_shell"),
        *("input.compaction", "input.web_search_call", "input.compaction_trigger"),
        *(f"input.{kind}" for kind in OF_OPENAI),
    }
    assert [call.ignored for call in await stack.calls(key)] == [raw.headers[HEADER_IGNORED]]
    (received,) = stack.upstream.received
    function = {"name": "docs__find", "parameters": run["parameters"]}
    assert received.body["tools"][1] == {"type": "function", "function": function}
    assert [tool["function"]["name"] for tool in received.body["tools"]] == ["exec_command", "docs__find"]
    _, patched, done, found, none = received.body["messages"]
    function = {"name": "apply_patch", "arguments": '{"input":"*** Begin"}'}
    assert patched["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert found["tool_calls"][0]["function"] == {"name": "docs__find", "arguments": "{}"}
    assert [(m["tool_call_id"], m["content"]) for m in (done, none)] == [("c1", "Done"), ("c2", "none")]
    called = [(item.name, item.to_dict().get("namespace")) for item in raw.parse().output]
    assert called == [("find", "docs"), ("exec_command", None), ("unknown__find", None)]


OPENCODE = "You are a title generator. You output ONLY a thread title. Nothing else."
CLAUDE = (
    "Generate a concise, sentence-case title (3-7 words) that captures the main topic or goal of this coding session."
)
AIDER = "You are an expert software engineer that generates concise, one-line Git commit messages based on the diffs."


@pytest.mark.parametrize(
    ("route", "change"),
    [
        ("chat/completions", {"messages": [{"role": "system", "content": OPENCODE}, *HELLO]}),
        ("chat/completions", {"messages": [{"role": "system", "content": AIDER}, *HELLO]}),
        ("messages", {"system": [{"type": "text", "text": text} for text in ("You are Claude Code.", CLAUDE)]}),
        ("responses", {"instructions": OPENCODE}),
    ],
)
async def test_what_a_program_asks_for_itself_is_housekeeping(
    stack: Stack, key: AttemptKey, route: str, change: Any
) -> None:
    own = {"messages": [{"role": "system", "content": f"Do not say: {OPENCODE}"}, *HELLO]}
    stack.upstream.script(Say("3"), Say("A title"), Say("4"))
    await post(stack, key, {**GOOD, **own}, **{"User-Agent": "opencode/1.18.33 bun"})
    await post(stack, key, {**SMALLEST[route], **change}, route)
    await post(stack, key, {**SMALLEST[route], **change}, route, **{HEADER_AGENT: "titles"})
    main, aside, named = await stack.calls(key)
    assert [(call.program, call.housekeeping) for call in (main, aside)] == [
        ("opencode", None),
        (None, Housekeeping.PROGRAM),
    ]
    assert (named.agent, named.housekeeping) == ("titles", None), "the agent's own name for it counts"


async def test_codex_says_which_agent_asks_and_for_what(stack: Stack, key: AttemptKey) -> None:
    kinds = (
        {"request_kind": "turn", "agent_name": "/root/reader"},
        {"request_kind": "turn", "agent_name": "/root", "thread_source": "subagent"},
        {"request_kind": "memory", "agent_name": "/root"},
    )
    for kind in kinds:
        metadata = {"x-codex-turn-metadata": json.dumps(kind)}
        await post(
            stack, key, {**REQUEST, "client_metadata": metadata}, "responses", **{"User-Agent": "codex_exec/0.171"}
        )
    said = [(call.program, call.agent, call.housekeeping) for call in await stack.calls(key)]
    own = ("codex", None, Housekeeping.PROGRAM)
    assert said == [("codex", "/root/reader", None), ("codex", "sub-agent", None), own]


async def test_claude_code_says_which_agent_asks_and_for_what(stack: Stack, key: AttemptKey) -> None:
    for kind in ("main", "subagent", "auxiliary", "compaction"):
        headers = {"x-claude-code-request-class": kind}
        if kind == "subagent":
            headers["x-claude-code-agent-type"] = "Explore"
        await post(stack, key, SMALLEST["messages"], "messages", **headers)
    said = [(call.agent, call.housekeeping) for call in await stack.calls(key)]
    assert said == [(None, None), ("Explore", None), (None, Housekeeping.PROGRAM), (None, None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_chat_completions(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI, stream: bool
) -> None:
    tools: Any = [{"type": "custom", "custom": SHELL}]
    stack.upstream.script(USES_CUSTOM)
    request: Any = {**GOOD, "tools": tools, "stream": stream}
    if stream:
        chunks = [chunk async for chunk in await client.chat.completions.create(**request)]
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        parts: list[Any] = [(delta.model_extra or {})["custom"] for delta in deltas]
        assert (parts[0]["name"], "".join(part["input"] for part in parts)) == ("shell", "ls -l")
    else:
        calls: Any = (await client.chat.completions.create(**request)).choices[0].message.tool_calls
        assert (calls[0].type, calls[0].custom.name, calls[0].custom.input) == ("custom", "shell", "ls -l")
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "total 0"}
    again: Any = [*HELLO, assistant(None, CALLED), answer]
    await client.chat.completions.create(model="default", messages=again, tools=tools)
    assert stack.upstream.received[0].body["tools"] == tools
    episode = await closed(stack, key)
    (result,) = episode.transitions[0].tool_results
    assert (result.tool, result.arguments, result.result) == ("shell", "ls -l", "total 0")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{ "input": "ls -l"}', '{"cmd": ["ls"]}', '{"input": 3'])
async def test_custom_tools_of_the_responses_api(
    stack: Stack, key: AttemptKey, client: AsyncOpenAI, stream: bool, arguments: str
) -> None:
    """The model sees a function; its own arguments come back to it, also those that are no text `input`."""
    tools: Any = [{"type": "custom", **SHELL, "format": {"type": "grammar", **GRAMMAR}}]
    own = assistant(None, call("call_1", "shell", arguments))
    stack.upstream.script(reply(own), Say("done"))
    request: Any = {**REQUEST, "tools": tools, "tool_choice": {"type": "custom", "name": "shell"}}
    written = "ls -l" if "ls -l" in arguments else arguments
    if stream:
        events = [event async for event in await client.responses.create(**request, stream=True)]
        response = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == written
    else:
        response = await client.responses.create(**request)
    item: Any = response.output[0]
    assert (item.type, item.call_id, item.name, item.input) == ("custom_tool_call", "call_1", "shell", written)
    first = stack.upstream.received[0].body
    (function,) = (tool["function"] for tool in first["tools"])
    assert {name: function[name] for name in SHELL} == SHELL
    assert function["parameters"]["required"] == ["input"]
    assert GRAMMAR["definition"] in function["parameters"]["properties"]["input"]["description"]
    assert first["tool_choice"] == {"type": "function", "function": {"name": "shell"}}
    output: Any = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "total 0"}
    echo = {name: value for name, value in item.to_dict().items() if name != "id"}
    raw = await client.responses.with_raw_response.create(**{**REQUEST, "input": [HELLO[0], echo, output]}, tools=tools)
    assert raw.headers[HEADER_IGNORED] == "tools.shell.format"
    assert forwarded(stack)[1] == own
    edited = [HELLO[0], {**echo, "input": "ls"}, output]
    await client.responses.create(**{**REQUEST, "input": edited}, tools=tools)
    assert forwarded(stack)[1]["tool_calls"][0]["function"]["arguments"] == '{"input":"ls"}'
    episode = await closed(stack, key)
    assert [result.tool for result in episode.transitions[0].tool_results] == ["shell"]


async def test_a_tool_that_anthropic_runs_is_left_out(stack: Stack, key: AttemptKey) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    request = {**SMALLEST["messages"], "tools": [search], "tool_choice": {"type": "tool", "name": "web_search"}}
    response = await post(stack, key, request, "messages")
    assert (response.status_code, response.headers[HEADER_IGNORED]) == (200, "tools.web_search")
    assert not {"tools", "tool_choice"} & stack.upstream.received[0].body.keys()


CLAUDE_CODES: dict[str, Any] = {
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 64_000}},
    "tools": [{"name": "add", "input_schema": {"type": "object"}, "defer_loading": True}],
    "messages": [{"role": "user", "content": "hello"}, {"role": "system", "content": "Agents: none."}],
}


async def test_what_tunes_anthropics_service_is_ignored_and_noted(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    key = await stack.lease(mode=Mode.EVAL_SAMPLED)
    client = client_of(stack, key)
    for _ in range(2):
        raw = await client.beta.messages.with_raw_response.create(model="claude", max_tokens=9, **CLAUDE_CODES)
    noted = "context_management, output_config.task_budget, thinking, tools.defer_loading"
    assert raw.headers[HEADER_IGNORED] == noted
    assert [message.count(noted) for message in caplog.messages if "requests of messages" in message] == [1], (
        "once in the log"
    )
    body = stack.upstream.received[0].body
    assert body["messages"] == CLAUDE_CODES["messages"], "the system may speak in mid-conversation"
    assert body["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    assert body["reasoning_effort"] == "high"
    assert not {"thinking", "context_management", "output_config"} & body.keys()
    assert [call.request["thinking"] for call in await stack.calls(key)] == [{"type": "adaptive"}] * 2
    assert [call.ignored for call in await stack.calls(key)] == [noted] * 2
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    await client.messages.create(model="claude", max_tokens=2048, messages=CLAUDE_CODES["messages"], thinking=thinking)


async def test_what_tunes_openais_service_is_ignored_and_noted(client: AsyncOpenAI) -> None:
    request: Any = {"truncation": "auto", "context_management": [{"type": "compaction"}], "max_tool_calls": 3}
    raw = await client.responses.with_raw_response.create(**REQUEST, **request)
    assert raw.headers[HEADER_IGNORED] == "context_management, max_tool_calls, truncation"
    assert raw.parse().truncation == "disabled"
    plain = await client.responses.with_raw_response.create(**REQUEST, truncation="disabled")
    assert HEADER_IGNORED not in plain.headers


async def test_no_field_of_a_client_reaches_a_model_server_that_does_not_know_it(stack: Stack, key: AttemptKey) -> None:
    """Each field of the clients' own types is translated, refused by name, ignored, or one of chat completions."""
    known = {*get_type_hints(CompletionCreateParamsBase), "stream", "top_k", "return_token_ids"}
    for route, params in (("messages", MessageCreateParamsBase), ("responses", ResponseCreateParamsBase)):
        for name in get_type_hints(params).keys() - SMALLEST[route].keys() - {"betas"}:
            for value in ("x", {"type": "x"}, [{"type": "x"}], 1):
                stack.upstream.received.clear()
                response = await post(stack, key, {**SMALLEST[route], name: value}, route)
                if stack.upstream.received:
                    assert stack.upstream.received[0].body.keys() <= known, name
                else:
                    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bash_20250124", "bash"),
        ("text_editor_20250728", "str_replace_based_edit_tool"),
        ("memory_20250818", "memory"),
    ],
)
async def test_tools_that_anthropic_defines_and_the_agent_runs(
    stack: Stack, key: AttemptKey, kind: str, name: str
) -> None:
    tools: Any = [{"type": kind, "name": name}]
    arguments = {"command": "view", "path": "/memories"}
    stack.upstream.script(CallTools([(name, arguments)]))
    client = client_of(stack, key)
    message = await client.beta.messages.create(model="m", max_tokens=90, messages=HELLO, tools=tools)
    (block,) = message.content
    assert (block.type, block.name, block.input) == ("tool_use", name, arguments)
    (tool,) = stack.upstream.received[0].body["tools"]
    assert tool["function"]["name"] == name
    assert tool["function"]["description"]
    schema = tool["function"]["parameters"]["properties"]
    assert "command" in schema
    if name == "memory":
        commands = get_args(get_args(BetaMemoryTool20250818Command)[0])
        assert {*schema} == {name for command in commands for name in command.model_fields}
        assert {*schema["command"]["enum"]} == {
            get_args(command.model_fields["command"].annotation)[0] for command in commands
        }


async def test_documents_images_and_results_of_searches_are_passed_on(stack: Stack, claude: AsyncAnthropic) -> None:
    content: Any = [
        {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}},
        {"type": "document", "source": {"type": "content", "content": "whole"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "part"}]}},
        {"type": "search_result", "title": "S", "source": "here", "content": [{"type": "text", "text": "hit"}]},
        {"type": "document", "title": "p.pdf", "citations": {"enabled": True}, "source": PDF},
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    ]
    messages: Any = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "ok"}]},
        {"role": "user", "content": [FOUND_TOOL]},
    ]
    raw = await claude.messages.with_raw_response.create(model="m", max_tokens=9, messages=messages)
    assert raw.headers[HEADER_IGNORED] == "citations, redacted_thinking"
    question, answered, tool = stack.upstream.received[0].body["messages"]
    assert [part["text"] for part in question["content"][:-3]] == ["T", "C", "D", "whole", "part", "S", "here", "hit"]
    file = {"filename": "p.pdf", "file_data": "data:application/pdf;base64,AAAA"}
    assert question["content"][-3:] == [
        {"type": "file", "file": file},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    assert answered == {"role": "assistant", "content": "ok"}
    assert tool == {"role": "tool", "tool_call_id": "c", "content": "add"}


async def test_a_model_need_not_be_named_where_there_is_one(stack: Stack, key: AttemptKey) -> None:
    bodies = {route: {n: v for n, v in body.items() if n != "model"} for route, body in SMALLEST.items()}
    for route, body in bodies.items():
        response = await post(stack, key, body, route)
        assert (response.status_code, response.json()["model"]) == (200, "default"), route
    two = {"models": {"one": "a", "two": "b"}}
    async with running_stack(upstream_fields=lambda _: two) as several:
        key = await several.lease()
        for route, body in bodies.items():
            response = await post(several, key, body, route)
            assert (response.status_code, "'model' is missing" in response.text) == (400, True), route


# Requests that cannot be read, or ask for what is not here: 400 in the API's own shape, and no call.


def blocks(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [content]}, *HELLO]}


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


REFUSED: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {"messages": "hello"},
        {"messages": []},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        {"tools": [3]},
        {"logprobs": 3},
        {"top_logprobs": 2},
        {"prompt_logprobs": 1, "stream": True},
    ],
    "completions": [
        {"prompt": None},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": [1, 2, 3]},
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 3},
        {"messages": HELLO},
        {"logprobs": 6},
    ],
    "responses": [
        {"input": None},
        {"input": []},
        {"input": ["x"]},
        item(),
        item(type="file_search_call", id="fs_1"),
        item(type="item_reference", id="msg_1"),
        item(type="item_reference", id=f"fc_{32 * '0'}_0"),
        item(role="user"),
        item(role="user", content=3),
        item(role="user", content=[{"type": "input_text"}]),
        item(role="user", content=[{"type": "input_image", "file_id": "x"}]),
        item(type="function_call", name="f", arguments="{}"),
        item(type="function_call_output", call_id="c"),
        {"instructions": 3},
        {"previous_response_id": "resp_unknown"},
        {"tools": [{"name": "f"}]},
        {"text": {"format": "json"}},
        {"include": ["file_search_call.results"]},
        {"background": True},
        {"conversation": "c"},
        {"n": 2},
    ],
    "messages": [
        {"messages": "hello"},
        {"messages": []},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "I"}]},
        blocks("x"),
        blocks({"type": "text"}),
        blocks({"type": "document", "source": {"type": "url", "url": "x"}}),
        blocks({"type": "image", "source": {"type": "base64", "data": "x"}}),
        blocks({"type": "tool_result", "content": "x"}),
        blocks({"type": "server_tool_use"}, "assistant"),
        blocks({"type": "tool_use", "name": "f", "input": {}}, "assistant"),
        {"system": 3},
        {"tools": [{"name": "f"}]},
        {"tool_choice": {"type": "sometimes"}},
        {"output_config": {"format": {"type": "xml"}}},
        {"container": "x"},
        {"thread": {"type": "create"}},
        {"stop": ["x"]},
    ],
}
EVERYWHERE: list[dict[str, Any]] = [
    {"model": 3},
    {"temperature": 3},
    {"top_p": "x"},
    {"max_tokens": 0},
    {"seed": True},
    {"stream": "yes"},
    {"stream_options": 1},
]


@pytest.mark.parametrize("route", SMALLEST)
async def test_what_cannot_be_read_or_served_is_refused(stack: Stack, key: AttemptKey, route: str) -> None:
    for change in [*REFUSED[route], *EVERYWHERE]:
        response = await post(stack, key, {**SMALLEST[route], **change}, route)
        body = response.json()
        error = body["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), change
        if route == "messages":
            assert (body["type"], set(error)) == ("error", {"type", "message", "details"}), change
        else:
            assert set(error) == {"message", "type", "param", "code"}, change
    assert stack.upstream.received == []
