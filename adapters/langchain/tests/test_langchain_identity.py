"""Who makes a call, and for which attempt, on every request of real agents."""

from __future__ import annotations

import asyncio
import itertools
import operator
import threading
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import before_model
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command, Send
from langgraph_supervisor import create_supervisor
from pydantic import BaseModel

from agl_core.capture import ActiveAttempt, current_identity, identify, running
from agl_core.testing.scripts import CallTools, Fail, Received, Say, Step
from agl_langchain import AglCallback

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


class Draft(TypedDict):
    question: str
    notes: Annotated[list[str], operator.add]


def two_nodes(llm: ChatOpenAI) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("write_query", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("check_query", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "check_query")
    graph.add_edge("check_query", END)
    return graph.compile()


def invoke(agent: Any, value: Any, config: Any) -> None:
    agent.invoke(value, config)


def stream(agent: Any, value: Any, config: Any) -> None:
    for _ in agent.stream(value, config, stream_mode="messages"):
        pass


def batch(agent: Any, value: Any, config: Any) -> None:
    agent.batch([value], config)


def ainvoke(agent: Any, value: Any, config: Any) -> None:
    asyncio.run(agent.ainvoke(value, config))


def astream(agent: Any, value: Any, config: Any) -> None:
    async def consume() -> None:
        async for _ in agent.astream(value, config, stream_mode="messages"):
            pass

    asyncio.run(consume())


def abatch(agent: Any, value: Any, config: Any) -> None:
    asyncio.run(agent.abatch([value], config))


@pytest.fixture(params=[invoke, ainvoke, stream, astream, batch, abatch])
def call(request: pytest.FixtureRequest) -> Any:
    """Each way to call a runnable, as `call(agent, input, config)`."""
    return request.param


def test_two_nodes_of_a_graph_are_told_apart(call: Any, config: Any, server: Any, attempt: Any) -> None:
    with running(attempt("r7")):
        call(two_nodes(ChatOpenAI(model="m")), QUESTION, config)
    assert server.agents() == ["write_query", "check_query"]
    assert {request.rollout for request in server.received} == {"r7/0"}
    assert current_identity() is None


def test_async_nodes(config: Any, server: Any, attempt: Any) -> None:
    llm = ChatOpenAI(model="m")

    async def plan(state: MessagesState) -> Any:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("plan", plan).add_edge(START, "plan").compile()
    with running(attempt()):
        asyncio.run(graph.ainvoke(QUESTION, config))
    assert server.agents() == ["plan"]


def test_a_named_agent(call: Any, config: Any, server: Any, attempt: Any) -> None:
    with running(attempt()):
        call(create_agent(ChatOpenAI(model="m"), name="solver"), QUESTION, config)
    assert server.agents() == ["solver"]


def test_agents_without_a_name_are_named_after_their_node(call: Any, config: Any, server: Any, attempt: Any) -> None:
    graph = StateGraph(MessagesState)
    inner = create_agent(ChatOpenAI(model="m"))
    graph.add_node("alice", create_agent(ChatOpenAI(model="m")))
    graph.add_node("bob", lambda state: inner.invoke(state))
    graph.add_edge(START, "alice")
    graph.add_edge("alice", "bob")
    with running(attempt()):
        call(graph.compile(), QUESTION, config)
    assert server.agents() == ["alice", "bob"]


def test_agents_of_langgraphs_own_prebuilt(call: Any, config: Any, server: Any, attempt: Any) -> None:
    """As a node under another name, called in a node, without a name, and all that in a graph in a graph."""
    llm = ChatOpenAI(model="m")
    bob = create_react_agent(llm, [], name="bob")
    team = StateGraph(MessagesState)
    team.add_node("first", create_react_agent(llm, [], name="alice"))
    team.add_node("second", lambda state: bob.invoke(state))
    team.add_node("third", create_react_agent(llm, []))
    team.add_node("agent", lambda state: {"messages": [llm.invoke(state["messages"])]})
    team.add_edge(START, "first")
    for before, after in itertools.pairwise(("first", "second", "third", "agent")):
        team.add_edge(before, after)
    nested = StateGraph(MessagesState).add_node("team", team.compile(name="team")).add_edge(START, "team").compile()
    with running(attempt()):
        call(nested, QUESTION, config)
    assert server.agents() == ["alice", "bob", "third", "agent"]


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


@pytest.mark.parametrize("outer", [create_agent, create_react_agent])
@pytest.mark.parametrize("inner", [create_agent, create_react_agent])
def test_the_innermost_named_agent_counts(outer: Any, inner: Any, config: Any, server: Any, attempt: Any) -> None:
    expert = inner(ChatOpenAI(model="m"), [], name="expert")

    @tool
    def consult(question: str) -> str:
        """Ask the expert."""
        return str(expert.invoke({"messages": [("user", question)]})["messages"][-1].content)

    server.answer = lambda received: (
        CallTools([("consult", {"question": "why"}, "c1")])
        if received.body.get("tools") and not received.turns
        else Say("because")
    )
    active = attempt()
    with running(active):
        outer(ChatOpenAI(model="m"), [consult], name="boss").invoke(QUESTION, config)
    assert server.agents() == ["boss", "expert", "boss"]
    assert [each.agent for each in active.recording.tool_results] == ["boss"]


def test_langgraph_supervisor(config: Any, server: Any, attempt: Any) -> None:
    """The team of its documentation: two experts, and a supervisor that hands over to them."""
    llm = ChatOpenAI(model="m")

    @tool
    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    @tool
    def web_search(query: str) -> str:
        """Search the web for information."""
        return "Apple has 164,000 employees."

    math = create_react_agent(llm, [add], name="math_expert", prompt="You are a math expert.")
    research = create_react_agent(llm, [web_search], name="research_expert", prompt="You are a researcher.")
    team = create_supervisor([research, math], model=llm, prompt="You manage a team.").compile()

    steps = iter(
        [
            CallTools([("transfer_to_research_expert", {})]),
            CallTools([("web_search", {"query": "Apple"})]),
            Say("164,000."),
            CallTools([("transfer_to_math_expert", {})]),
            CallTools([("add", {"a": 1, "b": 2})]),
            Say("3."),
            Say("All done."),
        ]
    )
    server.answer = lambda received: next(steps)
    active = attempt()
    with running(active):
        team.invoke(QUESTION, config)
    assert server.agents() == [
        "supervisor",
        "research_expert",
        "research_expert",
        "supervisor",
        "math_expert",
        "math_expert",
        "supervisor",
    ]
    assert [(each.tool, each.agent) for each in active.recording.tool_results] == [
        ("transfer_to_research_expert", "supervisor"),
        ("web_search", "research_expert"),
        ("transfer_to_math_expert", "supervisor"),
        ("add", "math_expert"),
    ]


def test_a_name_that_is_not_ascii(config: Any, server: Any, attempt: Any) -> None:
    with running(attempt()):
        create_agent(ChatOpenAI(model="m"), name="Übersetzer").invoke(QUESTION, config)
    assert server.agents() == ["%C3%9Cbersetzer"]


def overlapping(server: Any, parties: int) -> None:
    """No request is answered before `parties` of them have arrived."""
    barrier, reply = threading.Barrier(parties), server.answer

    def script(received: Received) -> Step:
        barrier.wait(20)
        return reply(received)

    server.answer = script


@pytest.mark.parametrize("asynchronous", [False, True])
def test_parallel_nodes_and_send(asynchronous: bool, config: Any, server: Any, attempt: Any) -> None:
    llm = ChatOpenAI(model="m")

    def speak(state: Draft) -> Draft:
        return {"question": state["question"], "notes": [str(llm.invoke(state["question"]).content)]}

    graph = StateGraph(Draft)
    for name in ("left", "right", "mapped"):
        graph.add_node(name, lambda state: {"notes": speak(state)["notes"]})
        graph.add_edge(name, END)
    graph.add_edge(START, "left")
    graph.add_edge(START, "right")
    graph.add_conditional_edges(
        START, lambda _: [Send("mapped", {"question": str(i), "notes": []}) for i in range(3)], ["mapped"]
    )
    overlapping(server, 5)
    agent, value = graph.compile(), {"question": "q", "notes": []}
    with running(attempt()):
        asyncio.run(agent.ainvoke(value, config)) if asynchronous else agent.invoke(value, config)
    assert Counter(server.agents()) == {"left": 1, "right": 1, "mapped": 3}


def test_a_handoff_is_followed_and_is_no_failure(config: Any, server: Any, attempt: Any) -> None:
    @tool
    def to_bob() -> Any:
        """Hand over to bob."""
        return Command(goto="bob", graph=Command.PARENT)

    graph = StateGraph(MessagesState)
    graph.add_node("alice", create_agent(ChatOpenAI(model="m"), [to_bob], name="alice"))
    graph.add_node("bob", create_agent(ChatOpenAI(model="m"), name="bob"))
    graph.add_edge(START, "alice")
    server.answer = lambda received: CallTools([("to_bob", {}, "c1")]) if received.body.get("tools") else Say("done")
    active = attempt()
    with running(active):
        graph.compile().invoke(QUESTION, config)
    assert server.agents() == ["alice", "bob"]
    assert [(o.tool, o.status, o.tool_call_id) for o in active.recording.tool_results] == [("to_bob", "ok", "c1")]


def test_an_agent_called_inside_a_tool(config: Any, server: Any, attempt: Any) -> None:
    expert = create_agent(ChatOpenAI(model="m"), name="expert", system_prompt="expert")

    @tool
    def consult(question: str) -> str:
        """Ask the expert."""
        return str(expert.invoke({"messages": [("user", question)]})["messages"][-1].content)

    boss = create_agent(ChatOpenAI(model="m"), [consult], name="boss")
    server.answer = lambda received: (
        CallTools([("consult", {"question": "why"}, "c1")])
        if received.body.get("tools") and not received.turns
        else Say("because")
    )
    with running(attempt()):
        boss.invoke(QUESTION, config)
    assert server.agents() == ["boss", "expert", "boss"]


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


def test_requests_to_another_host_are_not_stamped(config: Any, server: Any, other_host: Any, attempt: Any) -> None:
    with running(attempt()):
        create_agent(ChatOpenAI(model="m", base_url=other_host.url), name="judge").invoke(QUESTION, config)
        create_agent(ChatOpenAI(model="m"), name="solver").invoke(QUESTION, config)
    assert [name for name in other_host.received[0].headers if name.lower().startswith("x-agl")] == []
    assert server.agents() == ["solver"]


def test_outside_a_rollout_nothing_is_stamped(config: Any, server: Any) -> None:
    create_agent(ChatOpenAI(model="m"), name="solver").invoke(QUESTION, config)
    assert [name for name in server.received[0].headers if name.lower().startswith("x-agl")] == []


def test_retries_of_the_client_carry_one_marker(config: Any, server: Any, attempt: Any) -> None:
    server.script(Fail(500))
    agent = create_agent(ChatOpenAI(model="m", max_retries=2), name="solver")
    with running(attempt()):
        agent.invoke(QUESTION, config)
        agent.invoke(QUESTION, config)
    first, retry, second = [request.headers["x-agl-retry"] for request in server.received]
    assert first == retry != second


def test_text_completions(config: Any, server: Any, attempt: Any) -> None:
    llm = OpenAI(model="m")
    graph = StateGraph(MessagesState)
    graph.add_node("complete", lambda state: {"messages": [llm.invoke("once upon")]})
    graph.add_edge(START, "complete")
    with running(attempt()):
        graph.compile().invoke(QUESTION, config)
    assert server.agents() == ["complete"]


def test_concurrent_attempts_record_their_own_tool_results(
    config: Any, server: Any, attempt: Callable[..., ActiveAttempt]
) -> None:
    @tool
    def echo(text: str) -> str:
        """Say it again."""
        return text

    agent = create_agent(ChatOpenAI(model="m"), [echo], name="parrot")
    server.answer = lambda received: (
        CallTools([("echo", {"text": received.said}, "call_1")]) if not received.turns else Say("ok")
    )
    overlapping(server, 4)
    attempts = {name: attempt(name) for name in ("r1", "r2", "r3", "r4")}

    async def one(name: str) -> None:
        with running(attempts[name]):
            await agent.ainvoke({"messages": [("user", name)]}, config)

    async def together() -> None:
        await asyncio.gather(*(asyncio.create_task(one(name)) for name in attempts))

    asyncio.run(together())
    assert {name: [o.result for o in a.recording.tool_results] for name, a in attempts.items()} == {
        name: [name] for name in attempts
    }


def test_the_callback_is_shared_by_concurrent_threads(seen_by_agl: None, server: Any, attempt: Any) -> None:
    callback = AglCallback()
    agent = create_agent(ChatOpenAI(model="m"), name="shared").with_config({"callbacks": [callback]})
    with running(attempt()):
        agent.batch([QUESTION] * 20, {"max_concurrency": 10})
    assert server.agents() == ["shared"] * 20
    assert callback.transitions() == []
