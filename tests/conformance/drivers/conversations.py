"""The three model APIs as an agent written from scratch uses them, with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import anthropic
import openai

from ..driver import CHAT, MESSAGES, RESPONSES, Agent, Setting
from ..scenarios import TOOLS


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
