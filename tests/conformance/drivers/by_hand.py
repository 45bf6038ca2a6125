"""Agents written from scratch: a loop around a vendor's client, which tells agl what it does in one of several ways."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import agl_core
from agl_core.capture.requests import HEADER_AGENT

from ..driver import CHAT, MESSAGES, RESPONSES, Agent, Driver, Gap, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action
from .conversations import CONVERSATIONS, Answer, Conversation, ModelReply, ToolCall, client_of

NO_CHOICES = Gap("three choices (n)", "Only chat completions have `n`.", apis=(RESPONSES, MESSAGES))


class Reporter(ABC):
    """How a loop tells who calls and what the tools did; by default it tells nothing."""

    def headers(self, agent: str) -> Mapping[str, str]:
        """Headers of the agent's requests."""
        return {}

    @abstractmethod
    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        """Around everything that an agent does."""

    def step(self, agent: str) -> AbstractContextManager[Any]:
        """Around one call and the tool that its text asks for."""
        return nullcontext()

    @contextlib.contextmanager
    def using(self, tool: str, arguments: Mapping[str, Any], id: str | None) -> Iterator[Callable[[str], None]]:
        """Around a tool; what it yields is called with the result."""
        yield lambda result: None

    async def called(self, call: Awaitable[ModelReply]) -> ModelReply:
        """Around a call."""
        return await call


class Loop:
    """The agents of one scenario for one client; they report tools as `Reporter` does."""

    def __init__(self, reporter: Reporter, client: Any, setting: Setting, scenario: Scenario) -> None:
        self._reporter, self._client, self._setting, self._scenario = reporter, client, setting, scenario

    async def run(self, question: str) -> None:
        """All agents that are asked, at the same time."""
        sampling = self._scenario.samples > 1 or self._scenario.choices > 1
        ask = self._sample if sampling else self._work
        await asyncio.gather(*(ask(agent, question) for agent in self._scenario.agents))

    async def _sample(self, agent: Agent, question: str) -> None:
        with self._reporter.speaking(agent.name):
            talks = [self._conversation(question) for _ in range(self._scenario.samples)]
            await asyncio.gather(*(self._reply(agent, talk) for talk in talks))

    async def _work(self, agent: Agent, question: str) -> str:
        talk, successor = self._conversation(question), agent
        while successor:
            reply, successor = await self._until_handoff(successor, talk)
        return reply.text

    def _conversation(self, question: str) -> Conversation:
        return CONVERSATIONS[self._setting.api](self._client, self._setting, question)

    async def _reply(self, agent: Agent, talk: Conversation) -> ModelReply:
        headers = self._reporter.headers(agent.name)
        return await self._reporter.called(talk.ask(agent, headers, self._scenario.choices))

    async def _until_handoff(self, agent: Agent, talk: Conversation) -> tuple[ModelReply, Agent | None]:
        with self._reporter.speaking(agent.name):
            while True:
                with self._reporter.step(agent.name) if self._scenario.react else nullcontext():
                    reply = await self._reply(agent, talk)
                    in_text = action(reply.text) if self._scenario.react else None
                    calls = (ToolCall(None, in_text[0], {"topic": in_text[1]}),) if in_text else reply.calls
                    answers = await asyncio.gather(*(self._use(agent, call) for call in calls))
                if not calls:
                    return reply, None
                if in_text:
                    talk.say(f"Observation: {answers[0].text}")
                else:
                    talk.tell(answers)
                names = {call.name for call in calls}
                for other in agent.handoffs:
                    if f"transfer_to_{other.name}" in names:
                        return reply, other

    async def _use(self, agent: Agent, call: ToolCall) -> Answer:
        try:
            with self._reporter.using(call.name, call.arguments, call.id) as tell:
                text = await self._result(agent, call)
                tell(text)
        except Exception as error:
            return Answer(call, f"{type(error).__name__}: {error}", failed=True)
        return Answer(call, text)

    async def _result(self, agent: Agent, call: ToolCall) -> str:
        for expert in agent.experts:
            if expert.name == call.name:
                return await self._work(expert, call.arguments["task"])
        if call.name in TOOLS:
            return str(TOOLS[call.name](**call.arguments))
        return "Transferred."


HEADERS = "headers, no agl in the process"


class Functions(Reporter):
    """`agl_core.agent` around an agent, `agl_core.tool` around its tools."""

    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        return agl_core.agent(agent)

    @contextlib.contextmanager
    def using(self, tool: str, arguments: Mapping[str, Any], id: str | None) -> Iterator[Callable[[str], None]]:
        with agl_core.tool(tool, tool_call_id=id, arguments=dict(arguments)) as run:
            yield lambda result: setattr(run, "result", result)


class _Headers(Reporter):
    """A header names the agent; the conversation tells what the tools did."""

    def headers(self, agent: str) -> Mapping[str, str]:
        return {HEADER_AGENT: agent}

    def speaking(self, agent: str) -> AbstractContextManager[Any]:
        return nullcontext()


class ByHand(Driver):
    """A loop around the vendor's client, with `agl_core.agent` and `agl_core.tool` around agents and tools."""

    name = "no framework, the clients of OpenAI and Anthropic (agl-core)"
    apis = (CHAT, RESPONSES, MESSAGES)
    gaps = (NO_CHOICES,)

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        loop = Loop(Functions(), client_of(setting, setting.root, setting.api_key), setting, scenario)

        async def program(question: Question) -> None:
            await loop.run(question.text)

        return program


class ByHeaders(Driver):
    """The same with nothing of agl in the process, as in any other language: the attempt's URL, and a header."""

    name = "any language, by headers"
    apis = (CHAT, RESPONSES, MESSAGES)
    forms = (HEADERS,)
    gaps = (
        NO_CHOICES,
        Gap("text ReAct", "Without tool call ids, the conversation does not show what a tool did; spans do."),
    )

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        yield

    def build(self, scenario: Scenario, setting: Setting) -> Program:
        async def program(question: Question) -> None:
            client = client_of(setting, question.root, question.api_key)
            await Loop(_Headers(), client, setting, scenario).run(question.text)

        return program
