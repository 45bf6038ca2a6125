"""Identity and results stay with their own rollout and call: threads, concurrency, failures, retries, other hosts."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from langgraph.graph import START, MessagesState, StateGraph

from agl_core.capture import current_identity, identify, running
from agl_core.testing.scripts import Received, Step
from agl_langchain import AglCallback

from .identity_cases import QUESTION, overlapping


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_concurrent_rollouts_share_one_client(
    asynchronous: bool, streaming: bool, config: Any, server: Any, attempt: Any
) -> None:
    llm = ChatOpenAI(model="m", streaming=streaming)
    agent = create_agent(llm, name="shared")
    names = [f"r{number}" for number in range(8)]
    overlapping(server, len(names))

    async def one(name: str) -> None:
        with running(attempt(name)):
            task = asyncio.ensure_future(agent.ainvoke({"messages": [("user", name)]}, config))
        await task

    def one_sync(name: str) -> None:
        with running(attempt(name)):
            agent.invoke({"messages": [("user", name)]}, config)

    async def together() -> None:
        await asyncio.gather(*map(one, names))

    if asynchronous:
        asyncio.run(together())
    else:
        threads = [threading.Thread(target=one_sync, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {(request.said, request.rollout, request.agent) for request in server.received} == {
        (name, f"{name}/0", "shared") for name in names
    }
    assert len(server.received) == len(names)


def test_batch_in_each_of_several_rollouts(config: Any, server: Any, attempt: Any) -> None:
    agent = create_agent(ChatOpenAI(model="m"), name="shared")
    overlapping(server, 6)

    def one(name: str) -> None:
        with running(attempt(name)):
            agent.batch([{"messages": [("user", name)]}] * 3, config)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("r1", "r2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter((request.said, request.rollout) for request in server.received) == {
        ("r1", "r1/0"): 3,
        ("r2", "r2/0"): 3,
    }


def test_a_bare_thread_inside_a_node_belongs_to_the_rollout_and_the_node(
    config: Any, server: Any, attempt: Any
) -> None:
    llm = ChatOpenAI(model="m")

    def think(state: MessagesState) -> Any:
        thread = threading.Thread(target=lambda: llm.invoke("in a thread"))
        thread.start()
        thread.join()
        return {"messages": []}

    graph = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think").compile()
    with running(attempt("r3")):
        graph.invoke(QUESTION, config)
    assert [(request.rollout, request.agent) for request in server.received] == [("r3/0", "think")]


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


def test_a_failed_call_leaves_no_identity(config: Any, server: Any, attempt: Any) -> None:
    def fail(received: Received) -> Step:
        raise RuntimeError("no model")

    server.answer = fail
    with running(attempt()), pytest.raises(openai.InternalServerError):
        create_agent(ChatOpenAI(model="m", max_retries=0), name="unlucky").invoke(QUESTION, config)
    assert current_identity() is None


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


def test_a_name_given_around_a_chain_without_names(config: Any, server: Any, attempt: Any) -> None:
    chain = ChatPromptTemplate.from_template("{q}") | ChatOpenAI(model="m")
    with running(attempt()), identify("critic"):
        chain.invoke({"q": "why"}, config)
    assert server.agents() == ["critic"]


def test_outside_a_rollout_nothing_is_stamped(config: Any, server: Any) -> None:
    create_agent(ChatOpenAI(model="m"), name="solver").invoke(QUESTION, config)
    assert [name for name in server.received[0].headers if name.lower().startswith("x-agl")] == []


def test_text_completions(config: Any, server: Any, attempt: Any) -> None:
    llm = OpenAI(model="m")
    graph = StateGraph(MessagesState)
    graph.add_node("complete", lambda state: {"messages": [llm.invoke("once upon")]})
    graph.add_edge(START, "complete")
    with running(attempt()):
        graph.compile().invoke(QUESTION, config)
    assert server.agents() == ["complete"]


def test_the_callback_is_shared_by_concurrent_threads(seen_by_agl: None, server: Any, attempt: Any) -> None:
    callback = AglCallback()
    agent = create_agent(ChatOpenAI(model="m"), name="shared").with_config({"callbacks": [callback]})
    with running(attempt()):
        agent.batch([QUESTION] * 20, {"max_concurrency": 10})
    assert server.agents() == ["shared"] * 20
    assert callback.transitions() == []
