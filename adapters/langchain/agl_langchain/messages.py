"""LangChain's messages, results and tool outputs in agl's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, Generation, LLMResult

from agl_core.capture import Decided, logprobs_of, message_status, status_of
from agl_core.types import Choice, FinishReason, Json

_NO_TOKENS = ("messages", "prompt", "stream", "stream_options")


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Json]]:
    """Messages as a chat completion request has them."""
    converted = convert_to_openai_messages(list(messages))
    return converted if isinstance(converted, list) else [converted]


def request_body(messages: list[dict[str, Json]], invocation: Mapping[str, Any]) -> dict[str, Json]:
    """The request as LangChain describes it (`invocation_params`): model, tools and sampling beside the messages."""
    settings = {k: v for k, v in invocation.items() if v is not None and not k.startswith("_") and k not in _NO_TOKENS}
    return {"messages": messages, **settings}


def choices(result: LLMResult) -> tuple[Choice, ...]:
    """The responses of one call: text, and log-probabilities where the agent asked for them."""
    return tuple(_choice(index, generation) for index, generation in enumerate(_generations(result)))


def tool_calls(result: LLMResult) -> Iterator[Mapping[str, Any]]:
    """The tools that a call's responses ask for: name, args and id each."""
    for generation in _generations(result):
        if isinstance(generation, ChatGeneration):
            yield from getattr(generation.message, "tool_calls", ())


def tool_result(output: Any, tool_call_id: str | None) -> tuple[Any, Decided]:
    """What `on_tool_end` was given: a ToolMessage, a Command that holds one, or what the tool returned."""
    message = next((m for m in tool_messages(output) if m.tool_call_id == tool_call_id), None)
    if message is None:
        return output, status_of(output)
    return message.content, message_status(message.content, _reported(message))


def _reported(message: ToolMessage) -> str | None:
    """A failure; a success only if the tool's author set it: LangChain sets it for everything that a tool returned."""
    # LangChain sets the artifact too in each message that it makes of what a tool returned.
    by_author = "status" in message.model_fields_set and "artifact" not in message.model_fields_set
    return message.status if message.status == "error" or by_author else None


def tool_messages(output: Any) -> Iterator[ToolMessage]:
    """The tool messages in what a tool or a node gave back."""
    if isinstance(output, ToolMessage):
        yield output
    elif isinstance(output, Mapping):
        yield from tool_messages(output.get("messages"))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from tool_messages(item)
    elif type(output).__name__ == "Command":  # LangGraph's; it need not be installed
        yield from tool_messages(getattr(output, "update", None))


def _generations(result: LLMResult) -> Sequence[Generation]:
    # Each call's end is reported by itself: one prompt, one or (n > 1) several responses.
    return [g for g in result.generations[0] if isinstance(g, Generation)] if result.generations else []


def _choice(index: int, generation: Generation) -> Choice:
    message: Mapping[str, Json] = {"role": "assistant", "content": generation.text}
    details: Mapping[str, Any] = generation.generation_info or {}
    if isinstance(generation, ChatGeneration):
        message = openai_messages([generation.message])[0]
        details = {**details, **generation.message.response_metadata}
    return Choice(
        index=index,
        message=message,
        finish_reason=FinishReason.read(details.get("finish_reason"), calls_tools=False),
        logprobs=logprobs_of(details.get("logprobs")),
    )
