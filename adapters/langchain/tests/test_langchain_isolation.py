"""Identity and results stay with their own rollout and call: threads, concurrency, failures, retries, other hosts."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from agl_core.capture import current_identity, running

from .identity_cases import QUESTION


def test_the_openai_client_called_in_a_node(config: Any, server: Any, attempt: Any) -> None:
    client = openai.OpenAI()

    def raw(state: MessagesState) -> Any:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "raw"}])
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node("raw", raw).add_edge(START, "raw").compile()
    with running(attempt()):
        graph.invoke(QUESTION, config)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "outside"}])
    assert [(request.said, request.agent) for request in server.received] == [("raw", "raw"), ("outside", None)]


def test_identity_does_not_leak_from_one_call_to_the_next(config: Any, server: Any, attempt: Any) -> None:
    async def both() -> None:
        await create_agent(ChatOpenAI(model="m"), name="first").ainvoke(QUESTION, config)
        await ChatOpenAI(model="m").ainvoke("alone", config)
        create_agent(ChatOpenAI(model="m"), name="second").invoke(QUESTION, config)
        await openai.AsyncOpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "raw"}])

    with running(attempt()):
        asyncio.run(both())
    assert server.agents() == ["first", None, "second", None]


def test_a_stream_that_is_left_early_leaves_no_identity(config: Any, server: Any, attempt: Any) -> None:
    async def leave() -> None:
        chunks = create_agent(ChatOpenAI(model="m"), name="cut").astream(QUESTION, config, stream_mode="messages")
        async for _ in chunks:
            break
        await chunks.aclose()
        assert current_identity() is None

    with running(attempt()):
        for _ in ChatOpenAI(model="m").stream("hello", config):
            break
        assert current_identity() is None
        asyncio.run(leave())
    assert server.agents() == [None, "cut"]
