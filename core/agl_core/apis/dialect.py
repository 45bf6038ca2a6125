"""The dialects of model APIs: what each is to the gateway, and OpenAI's chat completions, to which others translate.

A dialect honours a field, refuses it by name if it asks for a service that is not here, or ignores it if it only tunes
a hosted service. What is ignored is noted, on the reply and in the log. All other fields go to the model server, which
checks them; here only that is checked which the gateway, or what reads records, relies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Required
from urllib.parse import quote

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from starlette.responses import Response
from typing_extensions import TypedDict

from agl_core.apis.answered import Answered, Message
from agl_core.apis.errors import ApiError, openai_error, openai_problem
from agl_core.apis.reply import Reply
from agl_core.apis.streams import Delta, Renderer
from agl_core.types import Json, Sampling
from agl_core.types.forms import parse_json
from agl_core.wire.headers import HEADER_IGNORED

_MAX_NOTE = 1000
"""Characters of the header that says what was ignored."""
OWN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"}
)
"""Fields of a chat completion that the gateway sets itself."""
_CHUNK_FIELDS = ("created", "system_fingerprint", "service_tier")
_STREAM_OPTIONS = frozenset({"include_usage"})

_Count = Annotated[int, Field(ge=1)]


class _CommonFields(TypedDict, total=False):
    """The fields of any API that the gateway itself reads; null is absent."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    model: str | None
    stream: bool | None
    stream_options: dict[str, Any] | None
    temperature: Annotated[float, Field(ge=0, le=2)] | None
    top_p: Annotated[float, Field(ge=0, le=1)] | None
    seed: int | None
    max_tokens: _Count | None
    max_completion_tokens: _Count | None
    max_output_tokens: _Count | None
    n: Annotated[int, Field(ge=1, le=128)] | None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None
    return_token_ids: bool | None


class _ChatMessage(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    role: Required[str]
    content: str | list[dict[str, Any]] | None
    tool_calls: list[dict[str, Any]] | None


class _Chat(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    messages: Required[Annotated[list[_ChatMessage], Field(min_length=1)]]
    tools: list[dict[str, Any]] | None


_BODY, _CHAT = TypeAdapter(_CommonFields), TypeAdapter(_Chat)


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequest:
    """One request of an agent, checked."""

    body: Mapping[str, Json]
    """As the agent sent it."""
    chat: Mapping[str, Json]
    """The same as a chat completion for the upstream, without model, streaming and sampling parameters."""
    recorded: Mapping[str, Json]
    """The request on record: the body with its conversation, tools and format as a chat completion has them, so that
    whatever reads `messages` of a recorded request (tool results, transitions, rewards) need not know the API."""
    model: str
    """Empty if the request names none."""
    stream: bool
    logprobs: bool
    """True if the agent wants to see log-probabilities."""
    requested: Sampling
    conversation: Sequence[Message] | None
    """The messages that a later request may continue by the reply's id; None if none may."""
    ignored: Collection[str]
    """The fields that only tune a hosted service."""

    def named(self, deployment: str | None, models: Collection[str]) -> ModelRequest:
        """The same with a model: that of its path, or the only one that is served. ApiError 400 without any."""
        model = deployment or (next(iter(models)) if len(models) == 1 else None)
        if model is None:
            raise wrong("model", "is missing", code="missing_required_parameter")
        return replace(self, model=model)

    def notes(self, of_server: str | None) -> dict[str, str]:
        """Headers for the reply that say what was ignored, here and by the model server (`of_server`)."""
        own = quote(", ".join(sorted(self.ignored)), safe=", ")  # A name may be anything, and a header may not.
        notes = ", ".join(filter(None, (own, of_server)))[:_MAX_NOTE]
        return {HEADER_IGNORED: notes} if notes else {}


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """A request in the fields of a chat completion."""

    fields: Mapping[str, Json]
    """By their names there; None: not set."""
    max_tokens: int | None
    logprobs: bool = False
    conversation: Sequence[Message] | None = None
    recorded: Mapping[str, Json] = field(default_factory=dict)
    """The fields that are recorded otherwise than they are forwarded."""


class Dialect(ABC):
    """Translates one API from and to chat completions."""

    api: str
    """Its name, as recorded with each call."""
    id_prefix: ClassVar[str]
    """The prefix of its replies' ids."""
    counts = False
    """True if it only counts the tokens of a prompt: by a reply of one token, which no agent sees."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Fields of other APIs, or that need a provider's own servers: refused unless they ask for nothing."""
    rewritten: ClassVar[frozenset[str]] = frozenset()
    """Fields that are recorded as a chat completion has them."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that tune a hosted service."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are not passed on under their own names."""
    _own: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        cls._own = cls.rewritten | cls.ignored | cls.kept | cls.refused | OWN_FIELDS

    def parse(self, raw: bytes, answered: Answered) -> ModelRequest:
        """Check a request body and translate it; ApiError 400 names the field that is wrong.

        `answered` has the replies of the attempt so far: an echo of one becomes the upstream's own message again.
        """
        try:
            return self._parse(_json_object(raw), answered)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise wrong(".".join(map(str, problem["loc"])), f"will not do: {problem['msg']}") from error
        except KeyError as error:
            raise wrong(str(error.args[0]), "is missing", code="missing_required_parameter") from error
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise ApiError(400, f"This is no request of the API {self.api}: {error}.", code="invalid_type") from error

    def _parse(self, body: dict[str, Any], answered: Answered) -> ModelRequest:
        _BODY.validate_python(body)
        for name in self.refused & body.keys():
            if body[name]:
                raise unsupported(name, f"is not served here in {self.api}: leave it out")
        if body.get("prompt_logprobs") is not None and body.get("stream"):
            raise unsupported("prompt_logprobs", "is for replies that are not streamed")
        ignored = {name for name in self.ignored if body.get(name) not in (None, "disabled")}
        translation = self.translate(body, answered, ignored)
        passed = {name: value for name, value in body.items() if name not in self._own}
        chat = without_none({**passed, **translation.fields})
        _CHAT.validate_python(chat)
        unrewritten = {name: value for name, value in body.items() if name not in self.rewritten}
        options = body.get("stream_options") or {}
        return ModelRequest(
            body=body,
            chat=chat,
            recorded={**unrewritten, **chat, **translation.recorded},
            model=body.get("model") or "",
            stream=bool(body.get("stream")),
            logprobs=translation.logprobs,
            requested=Sampling(body.get("temperature"), body.get("top_p"), translation.max_tokens, body.get("seed")),
            conversation=translation.conversation,
            ignored={*ignored, *(f"stream_options.{name}" for name in options.keys() - _STREAM_OPTIONS)},
        )

    @abstractmethod
    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        """The fields of a body that chat completions name or write differently; adds to what is `ignored`.

        A KeyError names what is missing; other standard errors say that the body is not of this API.
        """

    @abstractmethod
    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        """The body of a reply that is not streamed, as this API's clients expect it; no extras of agl are in it."""

    @abstractmethod
    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        """The writer of a reply that is streamed."""

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        """A whole reply, streamed if the client asked for it."""
        if request.stream and not self.counts:
            return self.renderer(request, reply.id).stream(reply)
        return rendered(self.whole(request, reply))

    def refuse(self, error: ApiError) -> Response:
        """The error in this API's shape."""
        return openai_error(error)


def wrong(param: str, problem: str, code: str = "invalid_type") -> ApiError:
    """The refusal of a value."""
    return ApiError(400, f"'{param}' {problem}.", param=param, code=code)


def unsupported(param: str, problem: str) -> ApiError:
    """The refusal of what the API allows and agl cannot do."""
    return wrong(param, problem, code="unsupported_parameter")


def without_none(values: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in values.items() if value is not None}


def joined_parts(parts: list[dict[str, Any]]) -> Json:
    """Parts as a chat message has them; one that is text, or none, becomes a text."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def rendered(body: Mapping[str, Json]) -> Response:
    """A reply that is not streamed."""
    return Response(orjson.dumps(body), media_type="application/json")


def _json_object(raw: bytes) -> dict[str, Any]:
    """A request body as a dict; ApiError 400 if it is none."""
    try:
        body = parse_json(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_json")
    return body


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`, which the upstream speaks itself."""

    api, id_prefix = "chat.completions", "chatcmpl-"

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        logprobs = body.get("logprobs")
        if not isinstance(logprobs, bool | None) or (body.get("top_logprobs") is not None and not logprobs):
            raise wrong("logprobs", "must be true or false, and true where there are 'top_logprobs'")
        limit = body.get("max_completion_tokens")
        return Translation({}, body.get("max_tokens") if limit is None else limit, bool(logprobs))

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
        return _ChatChunks(request, reply_id)


class Completions(Dialect):
    """`POST /v1/completions`, OpenAI's legacy.

    **A prompt becomes the one user message of a chat**, for the upstream and in what is recorded. The model therefore
    sees its chat template around the prompt and answers it; it does not continue a bare text. This is what an agent
    needs that puts everything into one prompt, for example a text ReAct loop. Token ids and log-probabilities are
    exactly those of the model's input and output. What only a continuation could mean (`echo`, `suffix`, prompts of
    token ids) is refused, and so are several prompts in one request and `best_of`, which samples more than it returns.
    Without `max_tokens` the run's limit holds, not the 16 tokens of OpenAI's servers.
    """

    api, id_prefix = "completions", "cmpl-"
    refused = frozenset({"echo", "suffix", "max_completion_tokens", "messages", "tools"})
    rewritten = frozenset({"prompt"})
    kept = frozenset({"logprobs", "best_of"})

    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
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

    def whole(self, request: ModelRequest, reply: Reply) -> Mapping[str, Json]:
        of_prompt, of_choices = _returned(request, reply)
        raw: Any = reply.completion["choices"]
        choices = [{**_text_choice(choice), **of_prompt, **more} for choice, more in zip(raw, of_choices, strict=True)]
        return {**reply.completion, "object": "text_completion", "model": request.model, "choices": choices}

    def renderer(self, request: ModelRequest, reply_id: str) -> Renderer:
        return _TextChunks(request, reply_id)


def _returned(request: ModelRequest, reply: Reply) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    """The token ids and the prompt's log-probabilities, if the agent asks for them: of the prompt, and of each choice.

    They are null where the model server gave none.
    """
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


class _Chunks(Renderer):
    """Server-sent chunks without names and a last `[DONE]`, as chat completions and completions have them."""

    object: ClassVar[str]

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        self._head: dict[str, Json] = {"id": reply_id, "object": self.object, "model": request.model}
        self._usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
        self.logprobs, self.ids = request.logprobs, bool(request.body.get("return_token_ids"))
        self.of_prompt: dict[str, Any] = {}
        """It goes into the first chunk."""

    def start(self, head: Mapping[str, Any]) -> bytes:
        self._head.update({name: head[name] for name in _CHUNK_FIELDS if name in head})
        if self.ids:
            self.of_prompt = {"prompt_token_ids": head.get("prompt_token_ids")}
        return b""

    def chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        """One chunk of one choice."""
        usage = {"usage": None} if self._usage else {}
        return _data({**self._head, **usage, **more, "choices": [choice]})

    def of_tokens(self, delta: Delta) -> dict[str, Any]:
        """A delta's token ids, if the client wants them."""
        return {"token_ids": delta.token_ids} if self.ids and len(delta.token_ids) else {}

    def last(self, usage: Json) -> bytes:
        """The end of a stream."""
        return (_data({**self._head, "choices": [], "usage": usage}) if self._usage else b"") + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return _data(openai_problem(error))


def _data(chunk: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY)


class _ChatChunks(_Chunks):
    object = "chat.completion.chunk"

    def feed(self, delta: Delta) -> bytes:
        logprobs = {"content": delta.logprobs} if self.logprobs and delta.logprobs else None
        tokens = self.of_tokens(delta)
        *earlier, last = _one_by_one(delta.message) or [{}]
        chunks = [self._chunk(delta.index, piece, None) for piece in earlier]
        if last or logprobs or tokens:
            chunks.append(self._chunk(delta.index, last, logprobs, **tokens))
        return b"".join(chunks)

    def _chunk(self, index: int, piece: Mapping[str, Json], logprobs: Json, **more: Any) -> bytes:
        of_prompt, self.of_prompt = self.of_prompt, {}
        choice = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": None, **more}
        return self.chunk(choice, **of_prompt)

    def finish(self, reply: Reply) -> bytes:
        choices: Any = reply.completion["choices"]
        ended: dict[str, Json] = {"delta": {}, "logprobs": None}
        return b"".join(
            self.chunk({"index": choice["index"], **ended, "finish_reason": choice["finish_reason"]})
            for choice in choices
        ) + self.last(reply.completion.get("usage"))


def _one_by_one(message: Mapping[str, Any]) -> list[dict[str, Json]]:
    """The role, texts and tool calls of a delta, apart: some clients take the first that they find."""
    content = message.get("content")
    pieces: list[dict[str, Json]] = []
    if "role" in message:
        pieces.append({"role": "assistant", "content": None if content is None else ""})
    others = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
    pieces += [{name: value} for name, value in others.items() if value not in (None, "", [], {})]
    if content:
        pieces.append({"content": content})
    return [*pieces, *({"tool_calls": [call]} for call in message.get("tool_calls") or ())]


class _TextChunks(_Chunks):
    object = "text_completion"

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._offsets: dict[int, int] = {}
        """By choice, the characters of its tokens so far."""

    def feed(self, delta: Delta) -> bytes:
        text = delta.message.get("content") or delta.message.get("refusal") or ""
        logprobs = None
        if self.logprobs and delta.logprobs:
            offset = self._offsets.get(delta.index, 0)
            logprobs = _text_logprobs(delta.logprobs, offset)
            self._offsets[delta.index] = offset + sum(map(len, logprobs["tokens"]))
        tokens = self.of_tokens(delta)
        if not (text or logprobs or tokens):
            return b""
        of_prompt, self.of_prompt = self.of_prompt, {}
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self.chunk({**choice, **of_prompt, **tokens})

    def finish(self, reply: Reply) -> bytes:
        choices: Any = reply.completion["choices"]
        ended = [{**_text_choice(choice), "text": "", "logprobs": None} for choice in choices]
        return b"".join(map(self.chunk, ended)) + self.last(reply.completion.get("usage"))


def _text_choice(choice: Mapping[str, Any]) -> dict[str, Json]:
    reason = choice["finish_reason"]
    return {
        "index": choice["index"],
        "text": choice["message"].get("content") or choice["message"].get("refusal") or "",
        "logprobs": choice["logprobs"] and _text_logprobs(choice["logprobs"].get("content") or ()),
        "finish_reason": reason if reason in ("length", "content_filter") else "stop",
    }


def _text_logprobs(entries: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, list[Any]]:
    """In the older shape: one list per kind of value; `offset` is where the first token's text begins."""
    tokens = [entry.get("token") or "" for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {other.get("token") or "": other.get("logprob") for other in entry.get("top_logprobs") or ()}
            for entry in entries
        ],
        "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)] if tokens else [],
    }
