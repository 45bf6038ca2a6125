"""How the adapter is found and attached without code, whatever is imported first; the README's snippets."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from testing_aids import blocks, run_snippets

from agl_core.testing.scripts import CallTools, Say

AGENT = """
    import asyncio
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)

    def find() -> None:
        "Find nothing."

    async def main():
        client = OpenAIChatCompletionClient(model="m", model_info=info, base_url=url + "/v1", api_key=key)
        agents = [AssistantAgent(name, client, tools=[find]) for name in ("alice", "bob")]
        await RoundRobinGroupChat(agents, max_turns=2).run(task="hello")
"""


async def run(trial: Any, *parts: str) -> list[Any]:
    """Run a program with the server's URL and key; the tool results that it prints."""
    program = "\n".join(textwrap.dedent(part) for part in parts)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, trial.active.base_url, trial.active.api_key, *trial.key[:1]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, wrong = await process.communicate()
    assert process.returncode == 0, wrong.decode()
    return told.decode().split()


START = """
    import sys
    import agl_core
    from agl_core.capture import ActiveAttempt, Recording, running

    url, key, rollout = sys.argv[1:]
    active = ActiveAttempt(rollout, 0, url, key, Recording())
"""
END = """
    with running(active):
        asyncio.run(main())
    assert not active.recording.problems, active.recording.problems
    print(*(f"{r.agent}:{r.tool}:{r.status}" for r in active.recording.tool_results))
"""
CHECK = "assert not attachment.failed, attachment.failed"
ATTACHED = """
    attachment = agl_core.attach()
    assert "autogen_core" not in sys.modules
"""


@pytest.mark.parametrize("first", ["autogen_agentchat.messages", "autogen_ext.models.openai"])
async def test_an_unmodified_agent_is_seen_after_agl_attaches(first: str, trial: Any) -> None:
    told = await run(trial, START, ATTACHED, f"import {first}", AGENT, CHECK, END)
    assert told == ["alice:find:empty", "bob:find:empty"]
    assert await trial.agents() == ["alice", "bob"]


README = Path(__file__).parent.parent / "README.md"


async def test_the_snippets(
    world: Any, trial: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", world.stack.url(trial.key))
    monkeypatch.setenv("OPENAI_API_KEY", world.stack.key(trial.key))
    world.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    assert len(blocks(README, "python")) == 2
    # The snippets start an event loop of their own.
    await asyncio.to_thread(run_snippets, README)
    assert capsys.readouterr().out == blocks(README)[-1]
