"""The dialects of model APIs, and OpenAI's chat completions, to which the others translate.

A dialect honours a field, refuses it by name if it needs a service that is not here, or ignores it, with a note on the
reply and in the log, if it only tunes a hosted service. All other fields go to the model server, which checks them:
only fields that the gateway and readers of records rely on are checked here.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

import msgspec
import orjson
from msgspec import Meta, Struct
from msgspec.structs import replace

from agl_core.apis.answered import Message, ReplyCache
from agl_core.apis.errors import ApiError, openai_problem
from agl_core.apis.reply import Reply
from agl_core.apis.streams import ChatChunks, Renderer, TextChunks, text_choice
from agl_core.capture.requests import HEADER_IGNORED
from agl_core.types import Json, Sampling
from agl_core.types.forms import parse_json

_MAX_NOTE = 1000
"""Characters of the header that names ignored fields."""
OWN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"}
)
"""Fields of a chat completion that the gateway sets."""
_STREAM_OPTIONS = frozenset({"include_usage"})

_SYSTEM = frozenset({"system", "developer"})
"""Roles of messages with instructions to the model."""

_MISSING = re.compile("field `(.*)`")
_Count = Annotated[int, Meta(ge=1)]


class _CommonFields(Struct, gc=False):
    """The fields of any API that the gateway reads; null is absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Json] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None
    return_token_ids: bool | None = None


class _ChatMessage(Struct, gc=False):
    role: str
    content: str | list[dict[str, Json]] | None = None
    tool_calls: list[dict[str, Json]] | None = None


class _Chat(Struct, gc=False):
    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]
    tools: list[dict[str, Json]] | None = None


class ModelRequest(Struct, frozen=True, eq=False):
    body: Mapping[str, Json]
    """As the agent sent it."""
    chat: Mapping[str, Json]
    """A chat completion for the upstream, without model, streaming and sampling parameters."""
    recorded: Mapping[str, Json]
    """The request on record: the body with conversation, tools and format of a chat completion, so that readers of
    `messages` (tool results, transitions, rewards) need not know the API."""
    model: str
    """Empty if the request names none."""
    stream: bool
    logprobs: bool
    """True if the agent wants to see log-probabilities."""
    requested: Sampling
    conversation: Sequence[Message] | None
    """The messages that a later request may continue by the reply's id; None if none may."""
    ignored: Collection[str]

    def named(self, deployment: str | None, models: Collection[str]) -> ModelRequest:
        """The same with a model: the path's, or the only one served. ApiError 400 without one."""
        model = deployment or (next(iter(models)) if len(models) == 1 else None)
        if model is None:
            raise wrong("model", "is missing", code="missing_required_parameter")
        return replace(self, model=model)

    def with_system_texts(self, texts: Mapping[str, str]) -> ModelRequest:
        """The same, also on record, with each text that is a key replaced by its value in system messages."""
        return replace(self, chat=_with_texts(self.chat, texts), recorded=_with_texts(self.recorded, texts))

    def notes(self, of_server: str | None) -> dict[str, str]:
        """Headers for the reply with the fields ignored here and by the model server (`of_server`)."""
        if not (self.ignored or of_server):
            return {}
        own = quote(", ".join(sorted(self.ignored)), safe=", ")  # A name may be anything, and a header may not.
        notes = ", ".join(filter(None, (own, of_server)))[:_MAX_NOTE]
        return {HEADER_IGNORED: notes} if notes else {}


class Translation(Struct, frozen=True, eq=False):
    """A request in the fields of a chat completion."""

    fields: Mapping[str, Json]
    """None: not set."""
    max_tokens: int | None
    logprobs: bool = False
    conversation: Sequence[Message] | None = None
    recorded: Mapping[str, Json] = {}
    """Fields that are recorded otherwise than forwarded."""


class Dialect(ABC):
    """Translates one API from and to chat completions."""

    api: str
    id_prefix: ClassVar[str]
    echoes = True
    """True if requests write earlier replies in another form, so that they have to be remembered."""
    counts = False
    """True if it only counts a prompt's tokens: by a reply of one token, which no agent sees."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields of other APIs, or for a provider's own servers: refused unless null or empty."""
    rewritten: ClassVar[frozenset[str]] = frozenset()
    """Fields recorded as a chat completion has them."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that tune a hosted service."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Further fields not passed on under their own names."""
    _own: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        cls._own = cls.rewritten | cls.ignored | cls.kept | cls.refused | OWN_FIELDS

    def parse(self, raw: bytes, answered: ReplyCache) -> ModelRequest:
        """Check a request body and translate it; ApiError 400 names the wrong field.

        Echoes of replies in `answered` become the upstream's own messages again.
        """
        try:
            return self._parse(json_object(raw, answered.sent.parse), answered)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            missing = _MISSING.search(problem)
            param = re.sub(r"\W+", ".", f"{path}.{missing[1] if missing else ''}").strip(".")
            raise wrong(param, f"will not do: {problem}") from error
        except KeyError as error:
            raise wrong(str(error.args[0]), "is missing", code="missing_required_parameter") from error
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise ApiError(400, f"This is no request of the API {self.api}: {error}.", code="invalid_type") from error

    def _parse(self, body: dict[str, Any], answered: ReplyCache) -> ModelRequest:
        common = msgspec.convert(body, _CommonFields)
        for name in self.refused & body.keys():
            if body[name]:
                raise unsupported(name, f"is not served here in {self.api}: leave it out")
        if common.prompt_logprobs is not None and common.stream:
            raise unsupported("prompt_logprobs", "is for replies that are not streamed")
        ignored = {name for name in self.ignored if body.get(name) not in (None, "disabled")}
        translation = self.translate(body, answered, ignored)
        passed = {name: value for name, value in body.items() if name not in self._own}
        chat = without_none({**passed, **translation.fields})
        _check(chat, answered.sent.n_known if chat.get("messages") is body.get("messages") else 0)
        unrewritten = {name: value for name, value in body.items() if name not in self.rewritten}
        options = common.stream_options or {}
        return ModelRequest(
            body=body,
            chat=chat,
            recorded={**unrewritten, **chat, **translation.recorded},
            model=common.model or "",
            stream=bool(common.stream),
            logprobs=translation.logprobs,
            requested=Sampling(common.temperature, common.top_p, translation.max_tokens, common.seed),
            conversation=translation.conversation,
            ignored={*ignored, *(f"stream_options.{name}" for name in options.keys() - _STREAM_OPTIONS)},
        )

    @abstractmethod
    def translate(self, body: Mapping[str, Any], answered: ReplyCache, ignored: set[str]) -> Translation:
        """The fields of a body that chat completions name or write differently; adds to `ignored`.

        A KeyError names a missing field; other standard errors say that the body is not of this API.
        """

    @abstractmethod
    def chunk(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """An event of a reply in this API, or a whole reply, as a chunk of a chat completion."""

    @abstractmethod
    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        """The body of an unstreamed reply in this API, without agl's extras."""

    @abstractmethod
    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        """The writer of a streamed reply."""

    def problem(self, error: ApiError) -> Mapping[str, Json]:
        return openai_problem(error)


def _with_texts(fields: Mapping[str, Json], texts: Mapping[str, str]) -> Mapping[str, Json]:
    def replaced(value: Json) -> Json:
        match value:
            case str():
                return functools.reduce(lambda text, old: text.replace(old, texts[old]), texts, value)
            case list():  # Parts, some of them text.
                return [{**part, "text": replaced(part["text"])} if "text" in part else part for part in value]
        return value

    messages = [
        {**message, "content": replaced(message.get("content"))} if message["role"] in _SYSTEM else message
        for message in fields["messages"]
    ]
    return {**fields, "messages": messages}


def wrong(param: str, problem: str, code: str = "invalid_type") -> ApiError:
    return ApiError(400, f"'{param}' {problem}.", param=param, code=code)


def unsupported(param: str, problem: str) -> ApiError:
    """The error for a value that the API allows and agl cannot serve."""
    return wrong(param, problem, code="unsupported_parameter")


def without_none(values: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in values.items() if value is not None}


def joined_parts(parts: list[dict[str, Any]]) -> Json:
    """The content of a chat message; a single text part, or none, becomes a text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def json_object(raw: bytes, parse: Callable[[bytes], Any] = parse_json) -> dict[str, Any]:
    """A request body as a dict; ApiError 400."""
    try:
        body = parse(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    return body


def _check(chat: Mapping[str, Any], n_known: int) -> None:
    """Check a chat, whose first `n_known` messages are checked already; ValidationError names the wrong field."""
    try:
        msgspec.convert({**chat, "messages": chat["messages"][n_known:]} if n_known else chat, _Chat)
    except msgspec.ValidationError:
        msgspec.convert(chat, _Chat)  # Counts all messages; there may be no new one.


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`, which the upstream speaks itself."""

    api, id_prefix, echoes = "chat.completions", "chatcmpl-", False

    def translate(self, body: Mapping[str, Any], answered: ReplyCache, ignored: set[str]) -> Translation:
        logprobs = body.get("logprobs")
        if not isinstance(logprobs, bool | None) or (body.get("top_logprobs") is not None and not logprobs):
            raise wrong("logprobs", "must be true or false, and true where there are 'top_logprobs'")
        limit = body.get("max_completion_tokens")
        return Translation({}, body.get("max_tokens") if limit is None else limit, bool(logprobs))

    def chunk(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        whole = {"message": "delta"}
        choices = event.get("choices") or ()
        return {**event, "choices": [{whole.get(k, k): v for k, v in choice.items()} for choice in choices]}

    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        of_prompt, of_choices = _returned(request, reply)
        choices: Any = reply.completion["choices"]
        return {
            **reply.completion,
            "model": request.model,
            "choices": [{**choice, **more} for choice, more in zip(choices, of_choices, strict=True)],
            **of_prompt,
        }

    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        return ChatChunks(request.model, reply_id, request.body, logprobs=request.logprobs)


class Completions(Dialect):
    """`POST /v1/completions`, OpenAI's legacy.

    **A prompt becomes the one user message of a chat**, for the upstream and on record: the model answers it in its
    chat template, as a text ReAct loop needs, and does not continue a bare text. Token ids and log-probabilities are
    exactly those of the model's input and output. Fields of a continuation (`echo`, `suffix`, prompts of token ids) are
    refused, and so are several prompts and `best_of`, which samples more than it returns. Without `max_tokens` the
    run's limit holds, not the 16 tokens of OpenAI's servers.
    """

    api, id_prefix, echoes = "completions", "cmpl-", False
    refused = frozenset({"echo", "suffix", "max_completion_tokens", "messages", "tools"})
    rewritten = frozenset({"prompt"})
    kept = frozenset({"logprobs", "best_of"})

    def translate(self, body: Mapping[str, Any], answered: ReplyCache, ignored: set[str]) -> Translation:
        prompt, logprobs = body["prompt"], body.get("logprobs")
        if isinstance(prompt, list) and len(prompt) == 1:  # Clients that can send several send a list of one.
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise unsupported("prompt", "must be one text: each of several needs a request of its own")
        if body.get("best_of") not in (None, 1):
            raise unsupported("best_of", "samples more than it returns: use 'n', and choose among the choices")
        if logprobs is not None and (type(logprobs) is not int or not 0 <= logprobs <= 5):
            raise wrong("logprobs", "must be an integer from 0 to 5")
        chat: dict[str, Json] = {"messages": [{"role": "user", "content": prompt}]}
        if logprobs is not None:
            chat |= {"logprobs": True, "top_logprobs": logprobs}
        return Translation(chat, body.get("max_tokens"), logprobs is not None)

    def chunk(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        of_prompt, choices = {}, []
        for choice in event.get("choices") or ():
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            of_prompt = {"prompt_token_ids": choice.get("prompt_token_ids")}
            choices.append(
                {
                    **choice,
                    "delta": {"content": choice["text"]},
                    "logprobs": {"content": [{"logprob": logprob} for logprob in logprobs]},
                }
            )
        return {**of_prompt, **event, "choices": choices}

    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        of_prompt, of_choices = _returned(request, reply)
        raw: Any = reply.completion["choices"]
        choices = [{**text_choice(choice), **of_prompt, **more} for choice, more in zip(raw, of_choices, strict=True)]
        return {**reply.completion, "object": "text_completion", "model": request.model, "choices": choices}

    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        return TextChunks(request.model, reply_id, request.body, logprobs=request.logprobs)


def _returned(request: ModelRequest, reply: Reply) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    """Token ids and log-probabilities of the prompt, and ids of each choice, if asked for; null if there are none."""
    of_prompt: dict[str, Json] = {}
    of_choices: list[dict[str, Json]] = [{} for _ in reply.choices]
    if request.body.get("return_token_ids"):
        of_prompt["prompt_token_ids"] = None if reply.prompt_ids is None else reply.prompt_ids.tolist()
        of_choices = [
            {"token_ids": None if choice.response_ids is None else choice.response_ids.tolist()}
            for choice in reply.choices
        ]
    if request.body.get("prompt_logprobs") is not None:
        of_prompt["prompt_logprobs"] = reply.prompt_logprobs
    return of_prompt, of_choices
