"""The callback used alone: no server of agl's, any endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from testing_aids import run_python

from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_core.types import Ending, FinishReason
from agl_langchain import AglCallback

QUESTION = {"messages": [{"role": "user", "content": "1 + 2?"}]}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_with_a_tool(asynchronous: bool, streaming: bool, server: Any) -> None:
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    agent = create_agent(ChatOpenAI(model="m", streaming=streaming), [add], name="solver")
    callback = AglCallback()
    config: Any = {"callbacks": [callback]}
    asyncio.run(agent.ainvoke(QUESTION, config)) if asynchronous else agent.invoke(QUESTION, config)

    (episode,) = callback.episodes()
    assert episode.ending is Ending.FINISHED
    assert episode.unjoined == ()
    first, second = episode.transitions
    assert [(t.agent, t.agent_turn) for t in (first, second)] == [("solver", 0), ("solver", 1)]
    assert [(o.tool, o.result, str(o.status)) for o in first.tool_results] == [("add", "3", "ok")]
    assert (second.response["content"], second.finish_reason) == ("3", FinishReason.STOP)
    assert callback.transitions()[0].response == first.response


def test_an_agent_that_crashes(server: Any) -> None:
    def fail(state: MessagesState) -> Any:
        raise ZeroDivisionError("bad")

    callback = AglCallback()
    graph = StateGraph(MessagesState).add_node("fail", fail).add_edge(START, "fail").compile()
    with pytest.raises(ZeroDivisionError):
        graph.invoke(QUESTION, {"callbacks": [callback]})
    assert [e.ending for e in callback.episodes()] == [Ending.CRASHED]


def test_only_the_latest_runs_are_kept(server: Any) -> None:
    callback = AglCallback(keep=2)
    for question in ("a", "b", "c"):
        ChatOpenAI(model="m").invoke(question, {"callbacks": [callback]})
    assert [t.messages[0]["content"] for t in callback.transitions()] == ["b", "c"]
    callback.clear()
    assert callback.episodes() == []


@pytest.mark.parametrize("streaming", [False, True])
def test_an_endpoint_that_gives_every_reply_the_same_id(streaming: bool, server: Any) -> None:
    server.more = {"id": "chatcmpl-same"}
    callback = AglCallback()
    llm = ChatOpenAI(model="m", streaming=streaming)
    RunnableLambda(lambda _: [llm.invoke(question) for question in "abc"]).invoke("", {"callbacks": [callback]})
    assert [t.messages[0]["content"] for t in callback.transitions()] == ["a", "b", "c"]


def test_the_core_does_without_the_framework_and_the_adapter_without_langgraph(server: Any) -> None:
    program = """
        import sys

        for absent in ("langgraph", "langchain", "langchain_openai", "openai", "torch"):
            sys.modules[absent] = None
        import os

        import httpx
        from agl_langchain import AglCallback
        from langchain_core.runnables import RunnableLambda

        def ask(question):
            request = {"model": "m", "messages": [{"role": "user", "content": question}]}
            return httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=request).json()

        callback = AglCallback()
        RunnableLambda(ask).invoke("hello", {"callbacks": [callback]})
        (transition,) = callback.transitions()
        assert transition.response["content"] == "done"
    """
    run_python(program)
