"""AutoGen's messages, tools and replies in agl's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema

from agl_core.capture import ids_of
from agl_core.types import Choice, FinishReason, Json, Tokens


def request_body(
    messages: Sequence[LLMMessage], tools: Sequence[Tool | ToolSchema], settings: Mapping[str, Any]
) -> dict[str, Json]:
    """A call as a chat completion request: model and sampling beside messages and tools."""
    body = {**settings, "messages": [each for message in messages for each in _openai_messages(message)]}
    if tools:
        schemas = [tool.schema if isinstance(tool, Tool) else tool for tool in tools]
        body["tools"] = [{"type": "function", "function": schema} for schema in schemas]
    return body


def choice(result: CreateResult, reply: Mapping[str, Any]) -> Choice:
    """The response of a call, with its token ids if `reply`, the endpoint's own, has them.

    Log-probabilities that are not one per token id are left out.
    """
    ids = ids_of((reply.get("choices") or [{}])[0].get("token_ids"))
    fit = result.logprobs and (ids is None or len(result.logprobs) == len(ids))
    return Choice(
        index=0,
        message=_assistant_message(result.content, result.thought),
        finish_reason=FinishReason.read(result.finish_reason, calls_tools=False),
        response_ids=ids,
        logprobs=np.array([each.logprob for each in result.logprobs or ()], np.float32) if fit else None,
    )


def prompt_ids(reply: Mapping[str, Any]) -> Tokens | None:
    """The token ids of the prompt, if the endpoint returned them."""
    return ids_of(reply.get("prompt_token_ids"))


def _openai_messages(message: LLMMessage) -> Iterator[dict[str, Json]]:
    match message:
        case SystemMessage():
            yield {"role": "system", "content": message.content}
        case UserMessage(content=str()):
            yield {"role": "user", "content": message.content}
        case UserMessage():
            parts = [
                {"type": "text", "text": p} if isinstance(p, str) else p.to_openai_format() for p in message.content
            ]
            yield {"role": "user", "content": parts}
        case AssistantMessage():
            yield _assistant_message(message.content, message.thought)
        case FunctionExecutionResultMessage():
            for result in message.content:
                yield {"role": "tool", "tool_call_id": result.call_id, "content": result.content}


def _assistant_message(content: str | list[FunctionCall], thought: str | None) -> dict[str, Json]:
    if isinstance(content, str):
        reasoning = {"reasoning_content": thought} if thought else {}
        return {"role": "assistant", "content": content, **reasoning}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in content
    ]
    return {"role": "assistant", "content": thought, "tool_calls": calls}
