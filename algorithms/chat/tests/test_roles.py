"""No text of a message is lost, whatever a chat template thinks of its role and place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from .conftest import ScriptedChat, ServedModel, assert_continues, echo, parsed, with_template
from .role_templates import TEMPLATES


def says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CLAUDE_CODES = [says("system", "You edit files."), says("user", "Fix it."), says("system", "Today is Monday.")]
CODEXS = [
    says("developer", "You are a coding agent."),
    says("developer", "These are your skills."),
    says("user", "The page AGENTS.md says: be brief."),
    says("user", "Fix the failing test."),
]
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0123456789", "function": {"name": "bash"}}]}
GAVE = {"role": "tool", "tool_call_id": "call_0123456789", "content": "1 failed"}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("begun", [CLAUDE_CODES, CODEXS], ids=["Claude Code", "Codex"])
def test_no_text_is_lost(qwen: ServedModel, family: str, begun: list[dict[str, Any]]) -> None:
    template, rules = TEMPLATES[family]
    chat = ScriptedChat(with_template(replace(qwen, context_length=4096), template))
    assert chat.served.text.roles == rules
    reminded, asked = says("system", "Two calls are left."), says("user", "And now?")
    for messages in (begun, [*begun, CALLED, GAVE, reminded], [*begun, CALLED, GAVE, asked, reminded]):
        first = chat.ask(messages, chat.letters("so be it"))
        shown = chat.model.tokenizer.decode(first["prompt_token_ids"])
        places = [shown.find(message["content"]) for message in messages if message["content"]]
        assert min(places) >= 0
        assert places == sorted(places)
        messages = [*messages, echo(first), reminded, asked]
        second = chat.ask(messages, "x")
        assert_continues(first, second)
        assert_continues(second, chat.ask([*messages, echo(second), asked, CALLED, GAVE, reminded], "x"))


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_message_that_is_none_of_its_own_is_noted(qwen: ServedModel, family: str) -> None:
    template, rules = TEMPLATES[family]
    server = with_template(qwen, template).server()
    extra = {0: [0, 1, 3], 1: [1], 2: []}[rules.systems]
    places = sorted({*extra, 3}) if rules.joined else extra
    noted = server.begin(parsed({"model": "m", "messages": CODEXS}), None).ignored
    assert noted == tuple(f"messages.{place}.role" for place in places)
