"""LangChain's `create_agent` and LangGraph's `StateGraph`."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, wrap_model_call, wrap_tool_call
from langchain.agents.structured_output import ProviderStrategy
from langchain.tools import ToolRuntime
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command

from agl_langchain import AglCallback

from ..driver import ATTACH, CHAT, RESPONSES, Agent, Driver, Gap, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action

CALLBACK = "AglCallback()"


class LangChain(Driver):
    """Agents are made by `create_agent`. Handoffs, parallel agents and text agents are graphs of nodes."""

    name = "LangChain, LangGraph (agl-langchain)"
    apis = (CHAT, RESPONSES)
    forms = (ATTACH, CALLBACK)
    gaps = (
        Gap("three choices (n)", "The Responses API has no `n`.", apis=(RESPONSES,)),
        Gap("three choices (n)", "`ChatOpenAI` refuses `n` when it streams.", apis=(CHAT,), streaming=(True,)),
    )

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        graph = _graph(scenario, setting)

        async def program(question: Question) -> None:
            config: RunnableConfig = {"recursion_limit": 60}
            if setting.form == CALLBACK:
                config["callbacks"] = [AglCallback()]
            once = {"messages": [HumanMessage(question.text)]}
            await asyncio.gather(*(graph.ainvoke(once, config) for _ in range(scenario.samples)))

        return program


def _graph(scenario: Scenario, setting: Setting) -> Any:
    (first, *others) = scenario.agents
    if scenario.react:
        return _thinking(first, _model(setting))
    if not others and not first.handoffs:
        return _agent(first, setting, **scenario.sampling)
    graph = StateGraph(MessagesState)
    for agent in scenario.everyone():
        graph.add_node(agent.name, _agent(agent, setting))
    for agent in scenario.agents:
        graph.add_edge(START, agent.name)
    return graph.compile()


def _model(setting: Setting, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="default",
        base_url=setting.base_url,
        api_key=setting.api_key,
        max_retries=setting.retries,
        use_responses_api=setting.api == RESPONSES,
        streaming=setting.streaming,
        **options,
    )


def _agent(agent: Agent, setting: Setting, **sampling: int) -> Any:
    tools = [
        *(TOOLS[name] for name in agent.tools),
        *(_consulting(expert, setting) for expert in agent.experts),
        *(_handing_over(other.name) for other in agent.handoffs),
    ]
    return create_agent(
        _model(setting, **sampling),
        tools,
        system_prompt=agent.prompt,
        name=agent.name,
        response_format=ProviderStrategy(agent.answers) if agent.answers else None,
        middleware=[_telling_errors, *([_keeping(agent.keeps)] if agent.keeps else [])],
    )


def _consulting(expert: Agent, setting: Setting) -> BaseTool:
    graph = _agent(expert, setting)

    async def consult(task: str) -> str:
        answer = await graph.ainvoke({"messages": [HumanMessage(task)]})
        return str(answer["messages"][-1].text)

    return StructuredTool.from_function(coroutine=consult, name=expert.name, description=f"Ask the {expert.name}.")


def _handing_over(name: str) -> BaseTool:
    @tool(f"transfer_to_{name}")
    def transfer(runtime: ToolRuntime) -> Command[Any]:
        """Hand over."""
        answer = ToolMessage(f"Transferred to {name}.", tool_call_id=runtime.tool_call_id)
        return Command(goto=name, graph=Command.PARENT, update={"messages": [*runtime.state["messages"], answer]})

    return transfer


@wrap_tool_call
async def _telling_errors(request: Any, handler: Any) -> Any:
    try:
        return await handler(request)
    except Exception as error:
        return ToolMessage(f"{type(error).__name__}: {error}", tool_call_id=request.tool_call["id"], status="error")


def _keeping(count: int) -> AgentMiddleware[Any, Any]:
    @wrap_model_call
    async def keep(request: Any, handler: Any) -> Any:
        question, *later = request.messages
        return await handler(request.override(messages=[question, *later[-count:]]))

    return keep


def _thinking(agent: Agent, model: ChatOpenAI) -> Any:
    tools = {name: tool(TOOLS[name]) for name in agent.tools}

    async def think(state: MessagesState) -> Any:
        reply = await model.ainvoke([SystemMessage(agent.prompt), *state["messages"]])
        step = action(reply.text)
        if step is None:
            return Command(goto=END, update={"messages": [reply]})
        name, topic = step
        result = await tools[name].ainvoke({"topic": topic})
        return Command(goto=agent.name, update={"messages": [reply, HumanMessage(f"Observation: {result}")]})

    return StateGraph(MessagesState).add_node(agent.name, think).add_edge(START, agent.name).compile()
