"""What an API dialect is to the gateway; each API is a subclass of `Dialect`.

A dialect honours a field, refuses it by name if it asks for a service that is not here, or ignores it if it only tunes
a hosted service. What is ignored is noted, on the reply and in the log. All other fields go to the model server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import quote

import orjson
from starlette.responses import Response

from agl_core.server.answered import Answered, Message
from agl_core.server.dialects import fields
from agl_core.server.errors import ApiError, openai_error
from agl_core.server.reply import Reply
from agl_core.types import Json, Sampling
from agl_core.wire.headers import HEADER_IGNORED

_MAX_NOTE = 1000
"""Characters of the header that says what was ignored."""
OWN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"}
)
"""Fields of a chat completion that the gateway sets itself."""
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_PIECE = 80
"""Characters per streamed piece of text."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequest:
    """One request of an agent, checked."""

    body: Mapping[str, Json]
    """As the agent sent it."""
    chat: Mapping[str, Json]
    """The same as a chat completion for the upstream, without model, streaming and sampling parameters."""
    recorded: Mapping[str, Json]
    """What is recorded: the body with its conversation, tools and format as a chat completion has them, so that
    whatever reads `messages` of a recorded request (tool results, transitions, rewards) need not know the API."""
    model: str
    """Empty if the request names none."""
    stream: bool
    logprobs: bool
    """Whether the agent wants to see log-probabilities."""
    requested: Sampling
    conversation: Sequence[Message] | None
    """The messages that a later request may continue by the reply's id; None if none may."""
    ignored: Collection[str]
    """The fields that only tune a hosted service."""

    def named(self, deployment: str | None, models: Collection[str]) -> ModelRequest:
        """The same with a model: that of its path, or the only one that is served. ApiError 400 without any."""
        only = next(iter(models)) if len(models) == 1 else None
        return replace(self, model=deployment or only or fields.need(self.body, "model"))

    def notes(self, reply: Reply) -> dict[str, str]:
        """Headers for the reply that say what was ignored, here and by the model server."""
        own = quote(", ".join(sorted(self.ignored)), safe=", ")  # A name may be anything, and a header may not.
        notes = ", ".join(filter(None, (own, reply.ignored)))[:_MAX_NOTE]
        return {HEADER_IGNORED: notes} if notes else {}


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """What a request's fields become in a chat completion."""

    fields: Mapping[str, Json]
    """By their names there; None: not set."""
    max_tokens: int | None
    logprobs: bool = False
    conversation: Sequence[Message] | None = None
    recorded: Mapping[str, Json] = field(default_factory=dict)
    """What is recorded otherwise than it is forwarded."""


class Dialect(ABC):
    """Translates one API from and to chat completions."""

    api: str
    """Its name, as recorded with each call."""
    id_prefix: ClassVar[str]
    """What the ids of its replies begin with."""
    counts = False
    """Whether it only counts the tokens of a prompt: by a reply of one token, which no agent sees."""
    checked: ClassVar[fields.Fields]
    """Fields whose types are checked here; the others are the model server's affair."""
    refused: ClassVar[fields.Refusals] = {}
    rewritten: ClassVar[frozenset[str]] = frozenset()
    """Fields that are recorded as a chat completion has them."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that tune a hosted service."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are not passed on under their own names."""
    _own: ClassVar[frozenset[str]]

    def __init_subclass__(cls) -> None:
        cls._own = cls.rewritten | cls.ignored | cls.kept | cls.refused.keys() | OWN_FIELDS

    def parse(self, raw: bytes, answered: Answered) -> ModelRequest:
        """Check a request body and translate it; ApiError 400 names the field that is wrong.

        `answered` has the replies of the attempt so far: an echo of one becomes the upstream's own message again.
        """
        body = fields.json_object(raw)
        fields.check_fields(body, self.checked)
        fields.check_refused(body, self.refused)
        if body.get("prompt_logprobs") is not None and body.get("stream"):
            raise fields.unsupported("prompt_logprobs", "is for replies that are not streamed")
        ignored = {name for name in self.ignored if body.get(name) not in (None, "disabled")}
        translation = self.translate(body, answered, ignored)
        passed = {name: value for name, value in body.items() if name not in self._own}
        chat = fields.without_none({**passed, **translation.fields})
        options = body.get("stream_options") or {}
        return ModelRequest(
            body=body,
            chat=chat,
            recorded={
                **{name: value for name, value in body.items() if name not in self.rewritten},
                **chat,
                **translation.recorded,
            },
            model=body.get("model") or "",
            stream=bool(body.get("stream")),
            logprobs=translation.logprobs,
            requested=Sampling(
                body.get("temperature"),
                body.get("top_p"),
                translation.max_tokens,
                body.get("seed") if "seed" in self.checked else None,
            ),
            conversation=translation.conversation,
            ignored={*ignored, *(f"stream_options.{name}" for name in options if name not in _STREAM_OPTIONS)},
        )

    @abstractmethod
    def translate(self, body: Mapping[str, Any], answered: Answered, ignored: set[str]) -> Translation:
        """The fields of a body that chat completions name or write differently; adds to what is `ignored`."""

    @abstractmethod
    def render(self, request: ModelRequest, reply: Reply, answered: Answered) -> Response:
        """The reply as this API's clients expect it, streamed if they asked for it; no extras of agl are in it.

        `answered` has the reply, and keeps what its client may fetch later.
        """

    def refuse(self, error: ApiError) -> Response:
        """The error in this API's shape."""
        return openai_error(error)


def rendered(body: Mapping[str, Json]) -> Response:
    """A reply that is not streamed."""
    return Response(orjson.dumps(body), media_type="application/json")


def pieces(text: str) -> Iterator[str]:
    """A text as it is streamed. The upstream never streams: what a client streams is made of the whole reply."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def chunk_stream(chunks: Iterable[Mapping[str, Json]]) -> Response:
    """Server-sent chunks without names and a last `[DONE]`, as chat completions and completions have them."""
    return _stream([*(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]\n\n"])


def event_stream(events: Iterable[Mapping[str, Json]]) -> Response:
    """Server-sent events named by their `type`, as Responses and Messages have them."""
    return _stream(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


def _stream(parts: Iterable[bytes]) -> Response:
    return Response(b"".join(parts), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
