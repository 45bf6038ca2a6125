"""Agents written from scratch: a loop around a vendor's client, which tells agl what it does in one of several ways."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, get_type_hints

import anthropic
import openai

import agl_core
from agl_core.capture.requests import HEADER_AGENT

from ..driver import CHAT, MESSAGES, RESPONSES, Agent, Driver, Gap, Program, Question, Scenario, Setting
from ..scenarios import TOOLS, action

NO_CHOICES = Gap("three choices (n)", "Only chat completions have `n`.", apis=(RESPONSES, MESSAGES))


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model asks for; in text, without an id."""

    id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The result of a tool, or its failure."""

    call: ToolCall
    text: str
    failed: bool = False


@dataclass(frozen=True)
class ModelReply:
    """A reply of the model."""

    id: str
    text: str
    calls: tuple[ToolCall, ...]


class Conversation(ABC):
    """A conversation about a question; several agents may have it one after the other."""

    def __init__(self, client: Any, setting: Setting, question: str) -> None:
        self.client, self.streaming = client, setting.streaming
        self.items: list[Any] = []
        self.say(question)

    async def ask(self, agent: Agent, headers: Mapping[str, str], choices: int = 1) -> ModelReply:
        """The model's next reply to this agent, which is added to the conversation; only chat completions have `n`."""
        question, *later = self.items
        kept = self.items if agent.keeps is None else [question, *later[-agent.keeps :]]
        options: dict[str, Any] = {"extra_headers": dict(headers)}
        if tools := [self.tool(name, parameters) for name, parameters in schemas(agent)]:
            options["tools"] = tools
        if agent.answers:
            options |= self.form(agent)
        if choices > 1:
            options["n"] = choices
        return await self.reply(agent.prompt, kept, options)

    def say(self, text: str) -> None:
        """Add a message of the user's."""
        self.items.append({"role": "user", "content": text})

    @abstractmethod
    def tool(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """A tool, as a request offers it."""

    @abstractmethod
    def form(self, agent: Agent) -> dict[str, Any]:
        """The field of a request that asks for an answer by the agent's schema."""

    @abstractmethod
    async def reply(self, prompt: str, items: list[Any], options: dict[str, Any]) -> ModelReply: ...

    @abstractmethod
    def tell(self, answers: Sequence[Answer]) -> None:
        """Add what the tools of the last reply told."""


class ChatConversation(Conversation):
    """OpenAI's chat completions."""

    def tool(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def form(self, agent: Agent) -> dict[str, Any]:
        return agent.response_format

    async def reply(self, prompt: str, items: list[Any], options: dict[str, Any]) -> ModelReply:
        messages = [{"role": "system", "content": prompt}, *items]
        reply = await self.client.chat.completions.create(
            model="default", messages=messages, stream=self.streaming, **options
        )
        id, message = await _joined(reply) if self.streaming else (reply.id, _plain(reply.choices[0].message))
        self.items.append(message)
        calls = [
            ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        return ModelReply(id, message["content"] or "", tuple(calls))

    def tell(self, answers: Sequence[Answer]) -> None:
        self.items += [{"role": "tool", "tool_call_id": answer.call.id, "content": answer.text} for answer in answers]


class ResponsesConversation(Conversation):
    """OpenAI's Responses."""

    def tool(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": parameters, "strict": False}

    def form(self, agent: Agent) -> dict[str, Any]:
        return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": agent.schema}}}

    async def reply(self, prompt: str, items: list[Any], options: dict[str, Any]) -> ModelReply:
        reply = await self.client.responses.create(
            model="default", instructions=prompt, input=items, stream=self.streaming, **options
        )
        if self.streaming:
            (reply,) = [event.response async for event in reply if event.type == "response.completed"]
        self.items += [item.model_dump(exclude_none=True, include=_ECHOED) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        return ModelReply(
            reply.id, reply.output_text, tuple(ToolCall(c.call_id, c.name, json.loads(c.arguments)) for c in calls)
        )

    def tell(self, answers: Sequence[Answer]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": answer.call.id, "output": answer.text} for answer in answers
        ]


class MessagesConversation(Conversation):
    """Anthropic's Messages."""

    def tool(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "input_schema": parameters}

    def form(self, agent: Agent) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": agent.schema}}}

    async def reply(self, prompt: str, items: list[Any], options: dict[str, Any]) -> ModelReply:
        request = {"model": "default", "max_tokens": 1000, "system": prompt, "messages": items, **options}
        if self.streaming:
            async with self.client.messages.stream(**request) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await self.client.messages.create(**request)
        self.items.append(
            {"role": "assistant", "content": [block.model_dump(include=_BLOCK) for block in reply.content]}
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        text = "".join(block.text for block in reply.content if block.type == "text")
        return ModelReply(reply.id, text, tuple(ToolCall(c.id, c.name, dict(c.input)) for c in calls))

    def tell(self, answers: Sequence[Answer]) -> None:
        results = [
            {"type": "tool_result", "tool_use_id": answer.call.id, "content": answer.text, "is_error": answer.failed}
            for answer in answers
        ]
        self.items.append({"role": "user", "content": results})


_ECHOED = {"type", "id", "role", "content", "call_id", "name", "arguments", "status"}
_BLOCK = {"type", "text", "id", "name", "input"}
CONVERSATIONS: Mapping[str, type[Conversation]] = {
    CHAT: ChatConversation,
    RESPONSES: ResponsesConversation,
    MESSAGES: MessagesConversation,
}


def client_of(setting: Setting, root: str, api_key: str) -> Any:
    """The vendor's client for an API, for the server or attempt at `root`."""
    if setting.api == MESSAGES:
        return anthropic.AsyncAnthropic(base_url=root, api_key=api_key, max_retries=setting.retries)
    return openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=api_key, max_retries=setting.retries)


def schemas(agent: Agent) -> list[tuple[str, dict[str, Any]]]:
    """The name of each tool of an agent and the schema of its arguments."""
    schemas = [(name, _schema(TOOLS[name])) for name in agent.tools]
    schemas += [(expert.name, _object({"task": "string"})) for expert in agent.experts]
    return schemas + [(f"transfer_to_{other.name}", _object({})) for other in agent.handoffs]


def _schema(function: Any) -> dict[str, Any]:
    hints, names = get_type_hints(function), inspect.signature(function).parameters
    return _object({name: {int: "integer", str: "string"}[hints[name]] for name in names})


def _object(types: Mapping[str, str]) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}


def _plain(message: Any) -> dict[str, Any]:
    calls = [_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


async def _joined(stream: Any) -> tuple[str, dict[str, Any]]:
    """The id of a streamed reply, and its first choice."""
    id, texts, calls = "", [], {}
    async for chunk in stream:
        id = chunk.id
        for choice in chunk.choices:
            if choice.index:
                continue
            texts.append(choice.delta.content or "")
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, _call("", "", ""))
                call["id"] += part.id or ""
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": "".join(texts) or None}
    return id, {**message, **({"tool_calls": list(calls.values())} if calls else {})}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


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
