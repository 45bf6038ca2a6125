"""How the adapter is found and attached without code; the README's snippets run as they stand."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from testing_aids import blocks, run_snippets

from agl_core.testing.scripts import CallTools, Say, in_turn


def run(program: str, server: Any) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), server.root], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unmodified_agent_is_seen_after_agl_attaches(server: Any) -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import ActiveAttempt, Recording, running

        attachment = agl_core.attach()
        assert "langchain_core" not in sys.modules

        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI

        agent = create_agent(ChatOpenAI(model="m"), name="solver")
        with running(ActiveAttempt("r1", 0, sys.argv[1], "key", Recording())):
            agent.invoke({"messages": [("user", "hello")]})
        assert not attachment.failed
    """
    run(program, server)
    assert [(request.rollout, request.agent) for request in server.received] == [("r1/0", "solver")]


def test_the_core_does_without_the_framework_and_the_adapter_without_langgraph(server: Any) -> None:
    program = """
        import sys

        for absent in ("langgraph", "langchain", "langchain_openai", "openai", "torch"):
            sys.modules[absent] = None
        from agl_langchain import AglCallback
        from langchain_core.language_models import FakeListChatModel

        callback = AglCallback()
        FakeListChatModel(responses=["hi"]).invoke("hello", {"callbacks": [callback]})
        (transition,) = callback.transitions()
        assert transition.response["content"] == "hi"
    """
    run(program, server)


README = Path(__file__).parent.parent / "README.md"


def test_the_snippets(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    assert len(blocks(README, "python")) == 3
    names = run_snippets(README)
    assert names["result"]["messages"][-1].content == "3"
    assert capsys.readouterr().out == blocks(README)[-1]
