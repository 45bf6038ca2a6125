"""What a chat completion request may say, and a clear refusal of what this engine cannot do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_core.errors import nearest
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


class ResponseFormat(_Part):
    type: str


class ChatRequest(BaseModel):
    """POST /v1/chat/completions. A key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    # Accepted only where they ask for nothing.
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    modalities: list[str] | None = None

    # For the caller's own bookkeeping; they change nothing in a reply.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

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
    for key in body.keys() - ChatRequest.model_fields.keys():
        raise ChatError(
            f"Unrecognized request argument: {key!r}. {nearest(str(key), ChatRequest.model_fields)}",
            param=str(key),
            code="unknown_parameter",
        )
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ChatError(f"{place}: {first['msg']}", param=str(first["loc"][0]), code="invalid_value") from None
    _refuse_unsupported(request)
    _check_tools(request)
    return request


def _refuse_unsupported(request: ChatRequest) -> None:
    if request.stream:
        raise ChatError(
            "This engine does not stream: send stream=false, or ask agl's gateway, which streams finished replies.",
            param="stream",
            code="unsupported_parameter",
        )
    if request.response_format is not None and request.response_format.type != "text":
        raise ChatError(
            f"response_format of type {request.response_format.type!r} cannot be enforced by this engine: use type "
            "'text' and ask for the format in the prompt, or give the model a tool with this schema.",
            param="response_format",
            code="unsupported_parameter",
        )
    neutral: dict[str, tuple[Any, ...]] = {
        "top_logprobs": (None, 0),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
        "repetition_penalty": (None, 1),
        "logit_bias": (None, {}),
        "top_k": (None, -1, 0),
        "min_p": (None, 0),
        "modalities": (None, ["text"]),
    }
    for key, values in neutral.items():
        if (value := getattr(request, key)) not in values:
            raise ChatError(
                f"{key} = {value!r} is not supported: log-probabilities are recorded of the unchanged distribution. "
                f"Leave {key} out.",
                param=key,
                code="unsupported_parameter",
            )


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
