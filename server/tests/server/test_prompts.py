"""Named prompts: `agl_core.prompt`, and texts that the gateway replaces in system messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl_core
from agl_core.capture import AttemptContext, Recording, reports, running
from agl_core.config.models import PromptSection
from agl_core.errors import AgentError
from agl_server.testing import running_stack

from .server_aids import post

SYSTEM = "Today is Monday. Be brief. Use tools."


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(reports.PROMPTS, raising=False)
    yield
    reports._texts.cache_clear()


def attempt(**prompts: str) -> AttemptContext:
    return AttemptContext("r", 0, "http://127.0.0.1:9", "key", Recording(), prompts=prompts)


def test_a_rollouts_prompt_comes_before_the_files_and_the_agents_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.toml").write_text('[prompts.system]\ntext = "file"\n[prompts.other]\nreplace = "x"')

    assert agl_core.prompt("system", "own") == "own"
    monkeypatch.setenv(reports.PROMPTS, str(tmp_path / "prompts.toml"))
    assert [agl_core.prompt("system", "own"), agl_core.prompt("other", "own")] == ["file", "own"]
    active = attempt(system="tried")
    with running(active):
        assert agl_core.prompt("system", "own") == "tried"
        assert agl_core.prompt("sytem", "own") == "own"
    assert active.recording.problems == (
        "agl_core.prompt('sytem'): the run has no such prompt. Did you mean 'system'? Known: system.",
    )
    with running(attempt()):
        assert agl_core.prompt("system", "own") == "file"


@pytest.mark.parametrize(
    ("text", "says"), [(None, "nowhere.toml is no file"), ("prompts = 3", "is no file of prompts"), ("", "KeyError")]
)
def test_a_file_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    file = tmp_path / "nowhere.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(AgentError, match="Give it a default"):
        agl_core.prompt("system")
    monkeypatch.setenv(reports.PROMPTS, str(file))
    with pytest.raises(AgentError, match=says):
        agl_core.prompt("system", "own")


SAYING: list[Any] = [{"role": "user", "content": SYSTEM}]
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "developer", "content": [{"type": "text", "text": SYSTEM}]},
            *SAYING,
        ]
    },
    "responses": {"instructions": SYSTEM, "input": SYSTEM},
    "messages": {"system": SYSTEM, "max_tokens": 9, "messages": SAYING},
}


def texts(messages: Any) -> list[tuple[str, str]]:
    """Roles and texts, whatever form the contents have."""
    contents = [(m["role"], m["content"]) for m in messages]
    return [(role, c if isinstance(c, str) else "".join(part["text"] for part in c)) for role, c in contents]


@pytest.mark.parametrize("route", ASKED)
async def test_the_gateway_replaces_a_text_in_system_messages_of_every_api(route: str) -> None:
    prompts = {"system": PromptSection(replace="Be brief.", text="Be long.")}
    async with running_stack(prompts=prompts) as stack:
        of_run, of_candidate = await stack.lease(), await stack.lease(prompts={"system": "Be kind."})
        for key in (of_run, of_candidate):
            await post(stack, key, ASKED[route], route)
        calls = [call for key in (of_run, of_candidate) for call in await stack.calls(key)]

    sent = [texts(received.body["messages"]) for received in stack.upstream.received]
    for messages, instead in zip(sent, ("Be long.", "Be kind."), strict=True):
        *system, user = messages
        assert system
        assert {text for _, text in system} == {SYSTEM.replace("Be brief.", instead)}
        assert user == ("user", SYSTEM)
    assert [texts(call.request["messages"]) for call in calls] == sent


async def test_a_retried_call_is_the_same_call() -> None:
    """Its request is recognised, although the record has another text."""
    async with running_stack(prompts={"system": PromptSection(replace="Be brief.", text="Be long.")}) as stack:
        key = await stack.lease()
        for count in ("0", "1"):
            await post(stack, key, ASKED["chat/completions"], **{"x-stainless-retry-count": count})
        assert len(await stack.calls(key)) == 1
