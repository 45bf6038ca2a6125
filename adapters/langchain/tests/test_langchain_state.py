"""The channel values of a LangGraph graph travel with the calls of its nodes, as the state of their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

import agl_core
from agl_core.capture import running, unpack_variables


class Draft(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    query: str
    attempts: int


@dataclass
class DraftObject:
    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)
    query: str = ""
    attempts: int = 0


def states(server: Any) -> list[Mapping[str, Any] | None]:
    return [unpack_variables(request.headers.get("x-agl-state")) for request in server.received]


@pytest.mark.parametrize("schema", [Draft, DraftObject])
def test_each_call_carries_the_channels_that_its_node_starts_from(
    schema: Any, server: Any, attempt: Any, config: dict[str, Any]
) -> None:
    llm = ChatOpenAI(model="m")

    def write(state: Any) -> dict[str, Any]:
        # A chain inside the node has inputs of its own, which are no channel values.
        reply = (RunnableLambda(lambda text: f"write {text}") | llm).invoke("it")
        return {"messages": [reply], "query": "SELECT 1", "attempts": 1}

    def check(state: Any) -> dict[str, Any]:
        agl_core.state(attempts="two", verdict="unknown")
        return {"messages": [llm.invoke("check")]}

    graph = StateGraph(schema)
    graph.add_node("write", write)
    graph.add_node("check", check)
    graph.add_edge(START, "write")
    graph.add_edge("write", "check")
    graph.add_edge("check", END)
    with running(attempt()):
        graph.compile().invoke({"messages": [], "query": "none", "attempts": 0}, config)
        llm.invoke("afterwards", config)
    assert states(server) == [
        {"query": "none", "attempts": 0},
        {"query": "SELECT 1", "attempts": "two", "verdict": "unknown"},
        None,
    ]


def test_an_agent_without_channels_of_its_own_has_no_state(server: Any, attempt: Any, config: dict[str, Any]) -> None:
    from langchain.agents import create_agent

    with running(attempt()):
        create_agent(ChatOpenAI(model="m"), []).invoke({"messages": [{"role": "user", "content": "a"}]}, config)
    assert states(server) == [None]
