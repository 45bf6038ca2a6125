"""Statuses that tools' messages tell in words: failures are seen, and ordinary prose is none."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.capture import message_status, status_of

TIMEOUTS = [
    "timed out",
    "Timed out after 5 s",
    "Request timed out.",
    "The read operation timed out",
    "Tool 'look' timed out",
    "Request to https://example.org/a?b=1 timed out.",
    "Timeout: the search took too long",
    "Timeout 30000ms exceeded.",
    "504 Gateway Timeout",
    "TimeoutError()",
    "httpx.ReadTimeout: no answer",
    '{"error": {"code": 504, "message": "Gateway Timeout"}}',
]
ERRORS = [
    "Error",
    "Error 404: not found",
    "error 500 - internal server error",
    "Error 1045 (28000): Access denied",
    "404 Not Found",
    "404 Client Error: Not Found for url: https://example.org",
    "HTTPError 404",
    "KeyError('x')",
    "KeyError: 0",
    "ConnectionError",
    ' {"data": null, "error": {"type": "NotFound"}}\n',
    '{"error": 404}',
]
NO_FAILURES = [
    "Error rates fell in 2020",
    "Error: none",
    "Error bars show 95 % intervals.",
    "Error 404 is what a server answers where there is no page",
    "Error 404 - what it means and how to mend it",
    "404 Not Found pages are common",
    "500 errors were counted",
    "TypeError - MDN Web Docs",
    "HTTPErrors are rare",
    "Timeout settings are in the menu",
    "ReadTimeout: 30 s\nWriteTimeout: 5 s",
    "Request timeout is 30 s",
    "Timed out players wait for two minutes",
    "The request timed out in 3 of 100 cases",
    "No request timed out.",
    '{"error": null, "data": 3}',
    '{"error": ""}',
    '{"error": []}',
    '{"error": 0.05, "value": 3.1}',
    '{"errors": 3}',
    '[{"error": "of one of them"}]',
]
CODEX = "Chunk ID: 5f2a\nWall time: 0.0512 seconds\nProcess exited with code {}\nOriginal token count: 3\nOutput:\nx"
QWEN_CODE = (
    "Command: cat log\nDirectory: (root)\nOutput: \nExit Code: 3\nSignal: 9\nProcess Group PGID: 1\nError: (none)\n"
    "Exit Code: {}\nSignal: (none)\nProcess Group PGID: 42"
)
RULES = {
    "Error: look is not a valid tool, try one of [add].": ("error", "error"),
    "Unknown tool: look": ("error", "strands"),
    "Unknown tool: a hammer without a handle": ("ok", "ok"),
    "An error occurred while invoking the function town-look: no such city": ("error", "semantic-kernel"),
    "An error occurred while invoking the function look: the request timed out": ("timeout", "semantic-kernel"),
    "An error occurred while invoking the function of the kidneys": ("ok", "ok"),
    "The tool call with name `town-nope` is not part of the provided tools, please try again with a supplied tool call "
    "name and make sure to validate the name.": ("error", "semantic-kernel"),
    "The tool call arguments are malformed. Arguments must be in JSON format. Please try again.": (
        "error",
        "semantic-kernel",
    ),
    "There are `2` tool call arguments required and only `1` received. The required arguments are: ['a', 'b']. Please "
    "provide the required arguments and try again.": ("error", "semantic-kernel"),
    "Missing required argument(s): ['city']. Received unexpected argument(s): ['town']. Please revise the arguments to "
    "match the function signature.": ("error", "semantic-kernel"),
    "Missing required argument(s): ['city'] is how it begins": ("ok", "ok"),
    "Tool execution failed: Error executing tool 'look': Execution of function look failed with kwargs={'timeout': 5}. "
    "Error: no such city": ("error", "camel"),
    "Tool execution failed: Error executing async tool 'look': the request timed out": ("timeout", "camel"),
    "Tool execution failed: Tool 'nope' not found in registered tools": ("error", "camel"),
    "Tool execution failed: the screw broke": ("ok", "ok"),
    "Activity input JSON validation error: Missing key: 'city'": ("error", "griptape"),
    "action path not found": ("error", "griptape"),
    "Tool 'nope' not found in registered tools": ("error", "mirascope"),
    "Error while decoding function arguments: '{' was never closed (<unknown>, line 1)": ("error", "agno"),
    "Error while decoding is common": ("ok", "ok"),
    "Model tried to call unavailable tool 'look'. Available tools: weather.": ("error", "vercel"),
    "Model tried to call unavailable tool 'look'. No tools are available.": ("error", "vercel"),
    'Invalid input for tool look: Type validation failed: Value: {"town":1}.': ("error", "vercel"),
    "Invalid input for tools that cut": ("ok", "ok"),
    '{"error": "Invoking `look()` failed as no tool with that name is available."}': ("error", "error-field"),
    '{"status": "error", "error_message": "no city"}': ("error", "status-field"),
    "{'status': 'error', 'error_message': 'no city'}": ("error", "status-field"),
    "{'status': 'success', 'report': None}": ("ok", "ok"),
    "{'cut": ("ok", "ok"),
    '{"isError": true, "content": []}': ("error", "is-error-field"),
    '{"is_error": false, "raw_output": ""}': ("ok", "ok"),
    '{"result": "22"}': ("ok", "ok"),
    '{"result": ""}': ("empty", "empty"),
    '{"result": null}': ("empty", "empty"),
    '{"result": {"result": []}}': ("empty", "empty"),
    '{"result": "ValueError: no city"}': ("error", "exception"),
    '{"result": {"error": "no city"}}': ("error", "error-field"),
    '{"result": "", "rows": 3}': ("ok", "ok"),
    '{"status": "error", "error_message": "the request timed out"}': ("timeout", "status-field"),
    '{"status": "error", "content": [{"text": "Timeout: no answer"}]}': ("timeout", "status-field"),
    '{"status": "error"}': ("error", "status-field"),
    '{"status": "success", "report": "sunny"}': ("ok", "ok"),
    '{"job": {"status": "error"}}': ("ok", "ok"),
    "Failed to open the file": ("ok", "ok"),
    "Errors were found": ("ok", "ok"),
    '{"success": false, "reason": "no city"}': ("ok", "ok"),
    '{"success": true}': ("ok", "ok"),
    "sunny": ("ok", "ok"),
    CODEX.format(1): ("error", "exit-code"),
    CODEX.format(0): ("ok", "exit-0"),
    "Exit code: 2\nWall time: 0.1 seconds\nOutput:\nls: no such file": ("error", "exit-code"),
    "Wall time: 1.0 seconds\nProcess running with session ID 7\nOutput:\n": ("ok", "ok"),
    "Process exited with code 1": ("ok", "ok"),
    "The log says:\n" + CODEX.format(1): ("ok", "ok"),
    QWEN_CODE.format(1): ("error", "exit-code"),
    QWEN_CODE.format(0): ("ok", "exit-0"),
    "Output: x\nExit Code: 1\nSignal: (none)\nProcess Group PGID: 7": ("ok", "ok"),
    '{"returncode": 1}': ("error", "exit-code"),
    '{"returncode": 1, "output": "timed out"}': ("error", "exit-code"),
    '{"returncode": 0, "output": "Error: none of it"}': ("ok", "exit-0"),
    '{"returncode": 1, "job": 7}': ("ok", "ok"),
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def status_in(content: Any) -> str:
    return str(message_status(content).status)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        *((content, "empty") for content in (None, "", " \n", [], "null", "None", "[]", "{}")),
        *((content, "ok") for content in ("sunny", "0", "false", "Errors were rare.", "last_error: none")),
        ([{"type": "text", "text": ""}], "empty"),
        ([{"type": "text", "text": "sunny"}], "ok"),
        ([{"type": "image_url", "image_url": {"url": "…"}}], "ok"),
        ([{"type": "text", "text": "ValueError: bad"}], "error"),
        ([{"type": "text", "text": "MCP tool 'look' reported tool error for function call: {}"}], "error"),
        ('Tool "mcp__shop__price" not found on MCP server "shop". It may be disconnected.', "error"),
        ('Tool "mcp__shop__price" is unavailable: the MCP server "shop" was removed.', "error"),
        ('Tool "hammer" not found in the catalogue.', "ok"),
        (
            [{"type": "text", "text": "Wall time: 0.04 seconds\nOutput:"}, {"type": "text", "text": "Error: bad"}],
            "error",
        ),
        ([{"type": "text", "text": "Wall time: 0.04 seconds\nOutput:"}, {"type": "text", "text": "5 errors"}], "ok"),
        ("Traceback (most recent call last):\n  File …", "error"),
        ("An error occurred while running the tool. Please try again. Error: boom", "error"),
    ],
)
def test_contents_of_any_form_have_a_status(content: Any, status: str) -> None:
    assert status_in(content) == status


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (text, status)
        for status, texts in (("timeout", TIMEOUTS), ("error", ERRORS), ("ok", NO_FAILURES))
        for text in texts
    ],
)
def test_a_text_failed_if_it_begins_as_failures_do(text: str, status: str) -> None:
    assert status_in(text) == status_in([{"type": "text", "text": text}]) == status


@pytest.mark.parametrize("text", RULES)
def test_the_rule_that_decides_is_named(text: str) -> None:
    assert message_status(text) == RULES[text]


def test_a_dictionary_is_read_as_its_json() -> None:
    for text in filter(lambda content: content.startswith('{"'), RULES):
        assert status_of(json.loads(text)) == RULES[text]


@pytest.mark.parametrize("text", [*TIMEOUTS, *ERRORS])
def test_the_messages_own_status_goes_before_its_words(text: str) -> None:
    assert str(message_status(text, "success").status) == "ok"
    assert str(message_status(text, "error").status) in ("error", "timeout")
    assert str(message_status("", "success").status) == "empty"


@given(error=JSON, others=st.dictionaries(st.text().filter(lambda key: key != "error"), JSON, max_size=3))
def test_a_json_object_failed_if_there_is_something_under_error(error: Any, others: dict[str, Any]) -> None:
    is_nothing = isinstance(error, str) and error.strip().lower() in ("", "none", "null", "nil", "no", "false", "0")
    is_fraction = isinstance(error, float) and error != int(error)
    failed = bool(error) and not is_nothing and not is_fraction
    for indent in (None, 2):
        text = json.dumps({**others, "error": error}, indent=indent)
        assert (status_in(text) in ("error", "timeout")) == failed
    if others:
        assert status_in(json.dumps(others)) == "ok"


@pytest.mark.parametrize(
    "piece",
    ["A", "A.", "the ", "tool '", "tool to ", "{", '{"error":', "[", "Error ", "error\n", "1", "timeout\n", "[("],
)
def test_a_long_text_is_judged_at_once(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    message_status(text)
    message_status(f"{piece}{' ' * 1_000_000}x")
    assert time.process_time() - began < 2
