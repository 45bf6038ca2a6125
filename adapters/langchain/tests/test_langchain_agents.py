"""Who makes a call, with which state, and what the tools did, in real agents; and episodes without a server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import before_model
from langchain_core.messages import AnyMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import InjectedToolCallId, ToolException, tool
from langchain_core.tracers import context as langchain_context
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models import _client_utils
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import create_react_agent
from langgraph.types import interrupt
from pydantic import BaseModel
from running_servers import attempt_maker, scripted_server  # noqa: F401
from testing_aids import run_python

import agl_core
from agl_core.capture import running, unpack_variables
from agl_core.testing.scripts import CallTools, Say, in_turn
from agl_core.types import Ending, ToolStatus
from agl_langchain import AglCallback, callback
from agl_server.testing import no_problems  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what attaches in a test.

    LangChain shares the connections of all clients of one address: another test's server may have had this port, and
    those of an async client belong to an event loop that is closed.
    """
    for cached in (_client_utils._cached_sync_httpx_client, _client_utils._cached_async_httpx_client):
        cached.cache_clear()
    monkeypatch.setattr(langchain_context, "_configure_hooks", list(langchain_context._configure_hooks))
    yield
    agl_core.attach([]).detach()
    callback.attach.cache_clear()


@pytest.fixture(params=["callback", "attach"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The callbacks that the user passes to the agent, in each way to observe it; every way has to see the same."""
    if request.param == "callback":
        return {"callbacks": [AglCallback()]}
    agl_core.attach()
    return {}


QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("way", ["invoke", "astream", "abatch"])
async def test_agents_of_langgraphs_own_prebuilt(way: str, config: Any, server: Any, attempt: Any) -> None:
    """As a node under another name, called in a node, without a name, and all that in a graph in a graph."""
    llm = ChatOpenAI(model="m")
    bob = create_react_agent(llm, [], name="bob")
    team = StateGraph(MessagesState)
    team.add_node("first", create_react_agent(llm, [], name="alice"))
    team.add_node("second", lambda state: bob.invoke(state))
    team.add_node("third", create_react_agent(llm, []))
    team.add_node("fourth", create_agent(llm, []))
    team.add_node("agent", lambda state: {"messages": [llm.invoke(state["messages"])]})
    team.add_edge(START, "first")
    for before, after in itertools.pairwise(("first", "second", "third", "fourth", "agent")):
        team.add_edge(before, after)
    nested = StateGraph(MessagesState).add_node("team", team.compile(name="team")).add_edge(START, "team").compile()
    with running(attempt()):
        if way == "invoke":
            nested.invoke(QUESTION, config)
        elif way == "abatch":
            await nested.abatch([QUESTION], config)
        else:
            _ = [part async for part in nested.astream(QUESTION, config, stream_mode="messages")]
    assert server.agents() == ["alice", "bob", "third", "fourth", "agent"]


@pytest.mark.parametrize("make", [create_agent, create_react_agent])
def test_everything_in_a_prebuilt_agent_has_its_name(make: Any, config: Any, server: Any, attempt: Any) -> None:
    """Its tools, its hooks and its structured answer ask the model too."""
    llm = ChatOpenAI(model="m")

    class Answer(BaseModel):
        text: str

    @tool
    def summary(text: str) -> str:
        """Make it shorter."""
        return str(llm.invoke(text).content)

    def hook(state: Any) -> Any:
        llm.invoke("before")
        return {}

    if make is create_agent:
        before = before_model(lambda state, runtime: hook(state))
        agent = create_agent(llm, [summary], middleware=[before], name="solver")
    else:
        agent = create_react_agent(llm, [summary], pre_model_hook=hook, response_format=Answer, name="solver")
    server.answer = lambda received: (
        CallTools([("summary", {"text": "long"}, "c1")])
        if received.body.get("tools") and not received.turns
        else Say('{"text": "done"}')
    )
    with running(attempt()):
        agent.invoke(QUESTION, config)
    assert len(server.received) >= 5
    assert set(server.agents()) == {"solver"}


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


class QueryDraft(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    query: str
    attempts: int


@dataclass
class QueryObject:
    messages: Annotated[list[AnyMessage], add_messages] = field(default_factory=list)
    query: str = ""
    attempts: int = 0


@pytest.mark.parametrize("schema", [QueryDraft, QueryObject])
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
    assert [unpack_variables(request.headers.get("x-agl-state")) for request in server.received] == [
        {"query": "none", "attempts": 0},
        {"query": "SELECT 1", "attempts": "two", "verdict": "unknown"},
        None,
    ]


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


@tool
def refusing() -> str:
    """Refuse politely."""
    raise ToolException("not allowed")


refusing.handle_tool_error = True


@pytest.mark.parametrize(
    ("tool", "arguments", "status"),
    [
        (unfound, {}, ToolStatus.ERROR),
        (unfound_message, {}, ToolStatus.ERROR),
        (quoting, {}, ToolStatus.OK),
        (refusing, {}, ToolStatus.ERROR),
        (add, {"a": "two"}, ToolStatus.ERROR),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_text_decides_where_the_tools_author_told_no_status(
    tool: Any, arguments: dict[str, Any], status: ToolStatus, config: Any, server: Any, attempt: Any
) -> None:
    server.answer = in_turn(CallTools([(tool.name, arguments, "c1")]), Say("done"))
    active = attempt()
    with running(active):
        create_agent(ChatOpenAI(model="m"), [tool], name="solver").invoke(QUESTION, config)
    (tool_result,) = active.recording.tool_results
    assert (tool_result.tool, tool_result.status, tool_result.tool_call_id) == (tool.name, status, "c1")


def test_several_callbacks_and_attach_see_each_thing_once(server: Any, attempt: Any) -> None:
    agl_core.attach()
    inner = create_agent(ChatOpenAI(model="m"), [add], name="solver")

    def solve(state: MessagesState) -> Any:
        return inner.invoke(state, {"callbacks": [AglCallback(), AglCallback()]})

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


def test_an_agent_that_crashes(server: Any) -> None:
    def fail(state: MessagesState) -> Any:
        raise ZeroDivisionError("bad")

    callback = AglCallback(keep=1)
    ChatOpenAI(model="m").invoke("an earlier run", {"callbacks": [callback]})
    graph = StateGraph(MessagesState).add_node("fail", fail).add_edge(START, "fail").compile()
    with pytest.raises(ZeroDivisionError):
        graph.invoke(QUESTION, {"callbacks": [callback]})
    assert [e.ending for e in callback.episodes()] == [Ending.CRASHED]


def test_the_callback_may_be_imported_first_and_does_without_langgraph(server: Any) -> None:
    program = """
        import sys

        for absent in ("langgraph", "langchain", "langchain_openai", "openai", "torch"):
            sys.modules[absent] = None
        import os

        import agl_core
        import httpx

        attachment = agl_core.attach()
        from agl_langchain import AglCallback
        from langchain_core.runnables import RunnableLambda

        def ask(question):
            request = {"model": "m", "messages": [{"role": "user", "content": question}]}
            return httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=request).json()

        callback = AglCallback()
        RunnableLambda(ask).invoke("hello", {"callbacks": [callback]})
        (transition,) = callback.transitions()
        assert transition.response["content"] == "done"
        assert not attachment.failed, attachment.failed
    """
    run_python(program)
