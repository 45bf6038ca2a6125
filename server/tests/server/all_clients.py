"""One call by each API's own client, whole and streamed: the text, reasoning and arguments of tools that it gets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import anthropic
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion

from agl_core.types import AttemptKey
from agl_server.testing import Stack

from .server_aids import HELLO, client_of

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
Gets: TypeAlias = tuple[str, str, list[Any]]
Ask: TypeAlias = Callable[[Stack, AttemptKey], Awaitable[Gets]]


async def chat(stack: Stack, key: AttemptKey) -> Gets:
    completion = await stack.client(key).chat.completions.create(model="m", messages=HELLO, tools=[TOOL])
    # The SDK does not check what it gets; frameworks do.
    return of_completion(ChatCompletion.model_validate(completion.to_dict()))


async def chat_stream(stack: Stack, key: AttemptKey) -> Gets:
    state = ChatCompletionStreamState()
    async for chunk in await stack.client(key).chat.completions.create(
        model="m", messages=HELLO, tools=[TOOL], stream=True
    ):
        state.handle_chunk(chunk)
    return of_completion(state.current_completion_snapshot)


async def responses(stack: Stack, key: AttemptKey) -> Gets:
    return of_response(await stack.client(key).responses.create(model="m", input="hello"))


async def responses_stream(stack: Stack, key: AttemptKey) -> Gets:
    async with stack.client(key).responses.stream(model="m", input="hello") as stream:
        last: Any = [event async for event in stream][-1]
    return of_response(last.response)


async def messages(stack: Stack, key: AttemptKey) -> Gets:
    return of_blocks(await client_of(stack, key).messages.create(model="m", max_tokens=9, messages=HELLO))


async def messages_stream(stack: Stack, key: AttemptKey) -> Gets:
    async with client_of(stack, key).messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
        return of_blocks(await stream.get_final_message())


def of_completion(completion: ChatCompletion) -> Gets:
    (choice,) = completion.choices
    message, calls = choice.message, choice.message.tool_calls or ()
    extra = message.model_extra or {}
    reasoning = "".join(extra.get(name) or "" for name in ("reasoning_content", "reasoning"))
    arguments = [json.loads(call.function.arguments) for call in calls if call.type == "function"]
    return message.content or message.refusal or "", reasoning, arguments


def of_response(response: Any) -> Gets:
    reasoning = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content)
    calls = [json.loads(item.arguments) for item in response.output if item.type == "function_call"]
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    refusal = "".join(part.refusal for part in parts if part.type == "refusal")
    return response.output_text + refusal, reasoning, calls


def of_blocks(message: anthropic.types.Message) -> Gets:
    content = "".join(block.text for block in message.content if block.type == "text")
    reasoning = "".join(block.thinking for block in message.content if block.type == "thinking")
    return content, reasoning, [block.input for block in message.content if block.type == "tool_use"]


STREAMING: list[Ask] = [chat_stream, responses_stream, messages_stream]
CLIENTS = [chat, responses, messages, *STREAMING]
