"""Chat requests: the fields that are honoured, those that are refused, and messages as templates want them.

A field that changes what the model reads, what it samples or what the reply has is honoured, or refused by name. All
others tune somebody else's service: they are ignored and noted (`ChatRequest.unknown`).

A client may write one message in many ways: content as None, a string or a list of parts; tool arguments as any JSON
text of the same value; keys that are null. Templates want one way (`normalise`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agl_chat.parsing import Message, arguments_text
from agl_core.apis.dialect import json_object, unsupported, wrong
from agl_core.apis.errors import ApiError
from agl_core.learning.transitions import DISTORTING, FORMATS, distorting, grammar_of
from agl_core.types.forms import parse_if_json

MAX_CHOICES = 128
MAX_FORM_CHARACTERS = 1 << 17
"""JSON of the form that replies must have, with the schemas of tools. A compiled one takes up to 70 MB."""
_Few = Field(max_length=1024)
_TokenNumber = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_StopString = Annotated[str, Field(max_length=256)]


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(min_length=1)


class Tool(BaseModel):
    """One entry of `tools`, and a `tool_choice` that names one."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"] = "function"
    function: FunctionTool


class ChatRequest(BaseModel):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[_TokenNumber, Annotated[float, Field(ge=-100, le=100)]], _Few] | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], _Few] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: Annotated[
        Annotated[list[_StopString], Field(max_length=32)] | None,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = Field(None, description="Reply with token ids, and with agl's extras.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the chat template.")

    @property
    def unknown(self) -> dict[str, Any]:
        """The fields that ask for something and are not honoured here."""
        given = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, "", [], {})}
        return {name: value for name, value in given.items() if name not in (*_NOT_SERVED, *DISTORTING, *FORMATS)}

    @property
    def distortions(self) -> dict[str, Any]:
        """The fields that change the distribution tokens are drawn from. In training the gateway drops them."""
        return {name: getattr(self, name) for name in distorting(dict(self))}

    @property
    def grammar(self) -> str | None:
        """The form that replies must have, if there is one. ApiError if it is too large."""
        form = grammar_of({**(self.model_extra or {}), "tools": self.shown_tools, "tool_choice": self.tool_choice})
        if form and len(form) > MAX_FORM_CHARACTERS:
            problem = f"has {len(form)} characters; a form may have {MAX_FORM_CHARACTERS}. Ask for a simpler one"
            raise wrong("response_format", problem, code="invalid_value")
        return form

    @property
    def limit(self) -> int | None:
        """The most tokens a response may have; None: as many as the context has room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, self.stop or ()))

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model sees: none when it must not call any."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or []]

    @property
    def forces_tool(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def forced_tool(self) -> str | None:
        """The one tool that must be called; None if any will do. The only tool there is, when one is required."""
        if isinstance(self.tool_choice, Tool):
            return self.tool_choice.function.name
        return self.tools[0].function.name if self.tools and len(self.tools) == 1 else None


def parse_request(body: bytes) -> ChatRequest:
    """Check a request's body. Raises ApiError that names the field and what to do."""
    try:
        fields = json_object(body)
        _refuse_unsupported(fields)
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise wrong(".".join(map(str, first["loc"])), f"will not do: {first['msg']}", code="invalid_value") from None
    names = [tool.function.name for tool in request.tools or []]
    if request.forces_tool and not names:
        raise wrong("tool_choice", "asks for a tool call, but there are no tools")
    if isinstance(request.tool_choice, Tool) and request.forced_tool not in names:
        raise wrong("tool_choice", f"names {request.forced_tool!r}, which is not among the tools: {', '.join(names)}")
    return request


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name in distorting(fields):
        if name not in ChatRequest.model_fields:
            raise unsupported(name, f"= {fields[name]!r} is not supported: nothing samples like that. Leave it out")
    for name, (neutral, reason) in _NOT_SERVED.items():
        value = fields.get(name)
        if value is not None and value is not False and value not in (neutral, "", [], {}):
            raise unsupported(name, f"= {str(value)[:60]} is not supported: {reason}. Leave it out")


_TEXT_ALONE = "this engine reads and writes text alone"
_ENDS = "a response ends at the model's own end token, at 'stop' or at 'max_tokens'"
_OWN_TEMPLATE = "messages are rendered by the model's own chat template, up to where its reply begins"
_NOT_SERVED: Mapping[str, tuple[Any, str]] = {
    "prompt_logprobs": (None, "log-probabilities are returned of responses alone"),
    "functions": ([], "it is the older form of tools. Send 'tools'"),
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
"""Fields that ask for what this engine does not do, the value with which they do not, and why or what instead."""


_ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for templates: text content, tool arguments as values, no null keys. ApiError for anything else."""
    if not messages:
        raise wrong("messages", "is empty: send at least one message")
    names: dict[str, str] = {}
    return [_normalise(message, f"messages[{index}]", names) for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, Any], field: str, names: dict[str, str]) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise wrong(f"{field}.role", f"is {role!r}; it must be one of {', '.join(_ROLES)}")
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if not isinstance(message.get(key), str | None):
            raise wrong(f"{field}.{key}", "is no text")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        raise wrong(f"{field}.tool_calls", "is no list")
    text, thinking = _texts(message.get("content"), f"{field}.content")
    normal: Message = {"role": "system" if role == "developer" else role, "content": text}
    if message.get("name") is not None:
        normal["name"] = message["name"]
    # Servers and clients name it differently; this is the name that chat templates know.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or thinking
    if reasoning:
        normal["reasoning_content"] = reasoning
    if calls:
        normal["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
        names.update((call["id"], call["function"]["name"]) for call in normal["tool_calls"] if "id" in call)
    if message.get("tool_call_id") is not None:
        normal["tool_call_id"] = message["tool_call_id"]
        # Some templates show a tool's name, which the OpenAI API does not repeat on its result.
        if message["tool_call_id"] in names:
            normal.setdefault("name", names[message["tool_call_id"]])
    return normal


def _texts(content: Any, field: str) -> tuple[str, str]:
    """The text of a message's content, and the thinking that is in it."""
    if content is None or isinstance(content, str):
        return content or "", ""
    texts = {"text": "", "thinking": ""}
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "thinking", "refusal") else None
        if kind == "thinking" and isinstance(text, list):
            text, _ = _texts(text, field)
        if not isinstance(text, str):
            raise wrong(field, f"has a part of type {kind!r}; this engine takes text only", code="unsupported_content")
        texts["thinking" if kind == "thinking" else "text"] += text
    return texts["text"], texts["thinking"]


def _tool_call(call: Any, field: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(field, "is no function call: it needs function.name and function.arguments")
    arguments = parse_if_json(function.get("arguments") or {})
    normal: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        normal["id"] = call["id"]
    return normal


def with_short_ids(message: Message, length: int) -> Message:
    """A message for templates that refuse longer ids of calls."""
    calls = [{**call, "id": call["id"][-length:]} if "id" in call else call for call in message.get("tool_calls", ())]
    changed: Message = {"tool_calls": calls} if calls else {}
    if "tool_call_id" in message:
        changed["tool_call_id"] = message["tool_call_id"][-length:]
    return {**message, **changed}


@dataclass(frozen=True, slots=True)
class RoleRules:
    """The messages that a chat template takes."""

    systems: int
    """System messages shown where they stand: none, the first alone, or any number (2)."""
    joined: frozenset[str]
    """Roles right after which no user's message may stand."""


def find_rules(render: Callable[[Sequence[Message]], str]) -> RoleRules:
    """The rules of a template, by trying: it may refuse a message (ApiError), drop its text, or move it."""

    def shows(*kinds: str) -> bool:
        messages = [_sample(kind, f"7{place}31") for place, kind in enumerate(kinds)]
        try:
            text = render(messages)
        except ApiError:
            return False
        places = [text.find(message["content"]) for message in messages if message["content"]]
        return min(places) >= 0 and places == sorted(places)

    results = ("user", "call", "tool") if shows("user", "call", "tool") else ("user",)
    anywhere = shows("system", "system", "user", "system", "assistant", "system", "user")
    first = shows("system", "user", "assistant", "user") and shows("system", *results)
    befores = {"user": ("user",), results[-1]: results}
    joined = frozenset(role for role, before in befores.items() if not shows(*before, "user"))
    return RoleRules(2 if anywhere and shows("system", *results, "system") else int(first), joined)


def _sample(kind: str, content: str) -> Message:
    """A message of a role, or the assistant's with a tool call (`call`)."""
    if kind != "call":
        return {"role": kind, "content": content, **({"tool_call_id": "call00001"} if kind == "tool" else {})}
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def fold(messages: Sequence[Message], rules: RoleRules) -> tuple[list[Message], list[int]]:
    """Messages as a template takes them, and the places of those that are no messages of their own there.

    The text of a system message joins the message before it, unless that is the assistant's, else the user's after it.
    A user's message joins the one before it. Nothing depends on what comes after the next reply.
    """
    folded: list[Message] = []
    places: list[int] = []
    begun: Message | None = None  # A user's message that has only texts of system messages so far.
    for place, message in enumerate(messages):
        before, is_user = (folded[-1] if folded else None), message["role"] == "user"
        is_extra = message["role"] == "system" and rules.systems < 2 and bool(folded or not rules.systems)
        may_join = is_extra and before and before["role"] != "assistant"
        if before and (may_join or (is_user and (before is begun or before["role"] in rules.joined))):
            places += [place] if is_extra or before is not begun else []
            folded[-1] = {**before, "content": f"{before['content']}\n\n{message['content']}"}
            begun = folded[-1] if is_extra and before is begun else None
        elif is_extra:
            places.append(place)
            folded.append(begun := {**message, "role": "user"})
        else:
            folded.append(message)
    return folded, places


def with_text_arguments(messages: Sequence[Message]) -> Sequence[Message]:
    """Messages for templates that add the arguments of calls to their own text (DeepSeek V3 and R1)."""

    def write(call: Message) -> Message:
        return {**call, "function": {**call["function"], "arguments": arguments_text(call)}}

    return [
        {**message, "tool_calls": [*map(write, message["tool_calls"])]} if "tool_calls" in message else message
        for message in messages
    ]


def meaning(message: Message) -> str:
    """The content of a normalised message, whatever its spacing and call ids: equal for a reply and its echo."""
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True, ensure_ascii=False)
