"""What a chat completion request may say.

A field that changes what the model reads, what it samples or what the reply has is honoured, or refused by name. All
others tune somebody else's service: they are ignored and noted (`ChatRequest.unknown`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_core.errors import nearest
from agl_core.learning.distribution import DISTORTING, distorting
from agl_torch.chat import ChatError

MAX_CHOICES = 128


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class FunctionTool(_Part):
    """A function that the model may call."""

    name: str = Field(min_length=1)


class Tool(_Part):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedTool(_Part):
    """A `tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: FunctionTool


class ChatRequest(BaseModel):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = Field(None, description="Reply with token ids, and with agl's extras.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")

    @property
    def unknown(self) -> Mapping[str, Any]:
        """The fields that ask for something and are not honoured here."""
        others = (self.model_extra or {}).items()
        return {name: value for name, value in others if value and name not in _NOT_SERVED and name not in DISTORTING}

    @property
    def limit(self) -> int | None:
        """The most tokens a response may have; None: as many as the context has room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model sees: none when it must not call any."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or []]

    @property
    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def forced_tool(self) -> str | None:
        """The one tool that must be called; None if any will do. The only tool there is, when one is required."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tools[0].function.name if self.tools and len(self.tools) == 1 else None


def parse_request(body: Any) -> ChatRequest:
    """Check a decoded JSON body. Raises ChatError that names the field and what to do."""
    if not isinstance(body, dict):
        raise ChatError("The request body is no JSON object.")
    _refuse_unsupported(body)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ChatError(f"{place}: {first['msg']}", param=str(first["loc"][0]), code="invalid_value") from None
    _check_tools(request)
    return request


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name in distorting(body):
        raise _unsupported(
            f"{name} = {body[name]!r} is not supported: log-probabilities are recorded of the unchanged distribution. "
            f"Leave {name} out.",
            name,
        )
    for name, (neutral, why) in _NOT_SERVED.items():
        value = body.get(name)
        if value is not None and value is not False and value not in (neutral, "", [], {}):
            raise _unsupported(f"{name} = {str(value)[:60]} is not supported: {why}.", name)


def _unsupported(message: str, param: str) -> ChatError:
    return ChatError(message, param=param, code="unsupported_parameter")


_TEXT_ALONE = "this engine reads and writes text alone"
_UNENFORCED = (
    "a format cannot be enforced by this engine. Ask for it in the prompt, or give the model a tool with this schema"
)
_ENDS = "a response ends at the model's own end token, at 'stop' or at 'max_tokens'"
_OWN_TEMPLATE = "messages are rendered by the model's own chat template, up to where its reply begins"
_NOT_SERVED: Mapping[str, tuple[Any, str]] = {
    "stream": (False, "this engine does not stream. Send stream=false, or ask agl's gateway, which streams replies"),
    "top_logprobs": (
        0,
        "this engine returns the log-probabilities of the sampled tokens, and of no others. Send logprobs=true alone "
        "(in /v1/completions, logprobs=0)",
    ),
    "prompt_logprobs": (None, "this engine returns the log-probabilities of responses alone. Leave it out"),
    "functions": ([], "it is the older form of tools. Send 'tools'"),
    "response_format": ({"type": "text"}, _UNENFORCED),
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None, _UNENFORCED)
    ),
    "audio": (None, _TEXT_ALONE),
    "modalities": (["text"], _TEXT_ALONE),
    "web_search_options": (None, "it needs OpenAI's own servers. Give the model a tool that searches"),
    "best_of": (1, "it samples more than it returns. Use 'n', and choose among the choices"),
    "ignore_eos": (False, _ENDS),
    "stop_token_ids": ([], _ENDS),
    "echo": (False, _OWN_TEMPLATE),
    "continue_final_message": (False, _OWN_TEMPLATE),
    "chat_template": (None, _OWN_TEMPLATE),
    "documents": ([], _OWN_TEMPLATE),
    "truncate_prompt_tokens": (None, "prompts are never cut: one that is too long is refused"),
}
"""Fields that ask for what this engine does not do, the value with which they do not, and what to do instead."""


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or []]
    if request.forces_tool and not names:
        raise ChatError("tool_choice asks for a tool call, but there are no tools.", param="tool_choice")
    if isinstance(request.tool_choice, NamedTool) and request.forced_tool not in names:
        raise ChatError(
            f"tool_choice names {request.forced_tool!r}, which is not among the tools. "
            f"{nearest(str(request.forced_tool), names)}",
            param="tool_choice",
        )
