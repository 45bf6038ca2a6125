"""What the tools did, from the events of real agents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

import agl_langchain
from agl_core.capture import running
from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_core.types import ToolStatus

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def refuse() -> str:
    """Refuse politely."""
    raise ToolException("not allowed")


@wrap_tool_call
def tell_the_model(request: Any, handler: Any) -> Any:
    """What LangChain's documentation shows for tool errors: the model is told, and goes on."""
    try:
        return handler(request)
    except ValueError as error:
        return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")


@pytest.fixture
def run(config: Any, server: Any, attempt: Any) -> Callable[..., list[Any]]:
    """Runs an agent whose model asks for the given tools, and gives the tool results."""

    def run(*calls: tuple[str, str, dict[str, Any]], tools: Any) -> list[Any]:
        server.answer = in_turn(CallTools([(name, arguments, id) for id, name, arguments in calls]), Say("done"))
        agent = create_agent(ChatOpenAI(model="m"), tools, name="solver", middleware=[tell_the_model])
        active = attempt()
        with running(active):
            agent.invoke(QUESTION, config)
        return list(active.recording.tool_results)

    return run


def test_a_handled_tool_exception_is_an_error(run: Any) -> None:
    refusing = tool(refuse)
    refusing.handle_tool_error = True
    (tool_result,) = run(("c1", "refuse", {}), tools=[refusing])
    assert (tool_result.status, tool_result.result) == (ToolStatus.ERROR, "not allowed")


def test_arguments_that_are_not_valid_are_one_error(run: Any) -> None:
    (tool_result,) = run(("c1", "add", {"a": "two"}), tools=[add])
    assert (tool_result.tool, tool_result.status, tool_result.tool_call_id) == ("add", ToolStatus.ERROR, "c1")


def test_a_tool_called_in_a_node_without_an_id_shares_the_calls_parent(config: Any, server: Any, attempt: Any) -> None:
    llm = ChatOpenAI(model="m")

    def react(state: MessagesState) -> Any:
        llm.invoke(state["messages"])
        add.invoke({"a": 1, "b": 1})
        return {"messages": []}

    active = attempt()
    with running(active):
        StateGraph(MessagesState).add_node("react", react).add_edge(START, "react").compile().invoke(QUESTION, config)
    (tool_result,) = active.recording.tool_results
    assert tool_result.tool_call_id is None
    assert tool_result.parent_span == server.received[0].headers["x-agl-parent-span"]


def test_several_callbacks_and_attach_see_each_thing_once(
    seen_by_agl: None, attached: None, server: Any, attempt: Any
) -> None:
    inner = create_agent(ChatOpenAI(model="m"), [add], name="solver")

    def solve(state: MessagesState) -> Any:
        return inner.invoke(state, {"callbacks": [agl_langchain.AglCallback(), agl_langchain.AglCallback()]})

    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    active = attempt()
    with running(active):
        StateGraph(MessagesState).add_node("solve", solve).add_edge(START, "solve").compile().invoke(QUESTION)
    assert sorted(str(o.tool_call_id) for o in active.recording.tool_results) == ["c1"]
    assert server.agents() == ["solver", "solver"]


def test_an_interrupt_is_no_failure(config: Any, server: Any, attempt: Any) -> None:
    @tool
    def approve() -> str:
        """Ask a human."""
        return str(interrupt("ok?"))

    server.answer = in_turn(CallTools([("approve", {}, "c1")]), Say("done"))
    agent = create_agent(ChatOpenAI(model="m"), [approve], checkpointer=InMemorySaver())
    active = attempt()
    with running(active):
        agent.invoke(QUESTION, {**config, "configurable": {"thread_id": "1"}})
    assert active.recording.tool_results == ()


@pytest.mark.expects_problems
def test_an_adapter_that_fails_does_not_break_the_agent(
    config: Any, server: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(agl_langchain.callback._Handler, "_tool_result", fail)
    monkeypatch.setattr("agl_langchain.callback.enter_identity", fail)
    server.answer = in_turn(CallTools([("add", {"a": 1, "b": 2}, "c1")]), Say("3"))
    active = attempt()
    with running(active):
        result = create_agent(ChatOpenAI(model="m"), [add], name="solver").invoke(QUESTION, config)
    assert result["messages"][-1].content == "3"
    assert any("on_tool_end failed: KeyError" in problem for problem in active.recording.problems)
    assert {request.rollout for request in server.received} == {"r1/0"}


@tool
def unfound() -> str:
    """Say in words that it failed."""
    return "Error: no such city"


@tool
def unfound_message(tool_call_id: Annotated[str, InjectedToolCallId]) -> ToolMessage:
    """Say in a message that it failed, without a status."""
    return ToolMessage("Error: no such city", tool_call_id=tool_call_id)


@tool
def quoting(tool_call_id: Annotated[str, InjectedToolCallId]) -> ToolMessage:
    """Quote a log, and say that all went well."""
    return ToolMessage("Error: disk full", tool_call_id=tool_call_id, status="success")


@pytest.mark.parametrize(
    ("said", "status"),
    [(unfound, ToolStatus.ERROR), (unfound_message, ToolStatus.ERROR), (quoting, ToolStatus.OK)],
)
def test_the_text_decides_where_the_tools_author_told_no_status(said: Any, status: ToolStatus, run: Any) -> None:
    (tool_result,) = run(("c1", said.name, {}), tools=[said])
    assert tool_result.status is status
