"""What an API dialect is to the gateway; each API is a module of its own.

A dialect honours a field, refuses it by name if it asks for a service that is not here, or ignores it if it only tunes
a hosted service. What is ignored is noted, on the reply and in the log. All other fields go to the model server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote

import orjson
from starlette.responses import Response

from agl_core.server.dialects import fields
from agl_core.server.dialects.replies import Message, ReplyMemory
from agl_core.server.errors import ApiError
from agl_core.server.gateway.reply import Reply
from agl_core.types import Json, Sampling
from agl_core.wire.headers import HEADER_IGNORED

_LONGEST_NOTE = 1000
"""Characters."""
OWN_FIELDS = frozenset(
    {"model", "stream", "stream_options", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed"}
)
"""Fields of a chat completion that the gateway sets itself."""
_RETURNED = ("return_token_ids", "prompt_logprobs")
"""Fields that ask for more in a reply than only chat completions and completions have room for."""
_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})


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
    conversation: Sequence[Message] | None = None
    """The messages that a later request may continue by the reply's id; None if none may."""
    ignored: Collection[str] = ()
    """The fields that only tune a hosted service."""

    def named(self, deployment: str | None, models: Collection[str]) -> ModelRequest:
        """The same with a model: that of its path, or the only one that is served. ApiError 400 without any."""
        only = next(iter(models)) if len(models) == 1 else None
        return replace(self, model=deployment or only or fields.need(self.body, "model"))

    def notes(self, reply: Reply) -> dict[str, str]:
        """Headers for the reply that say what was ignored, here and by the model server."""
        own = quote(", ".join(sorted(self.ignored)), safe=", ")  # A name may be anything, and a header may not.
        notes = ", ".join(filter(None, (own, reply.ignored)))[:_LONGEST_NOTE]
        return {HEADER_IGNORED: notes} if notes else {}


def asked(
    body: Mapping[str, Any],
    chat: Mapping[str, Json],
    recorded: Mapping[str, Json],
    *,
    max_tokens: int | None,
    logprobs: bool = False,
    conversation: Sequence[Message] | None = None,
    ignored: Collection[str] = (),
    returns: bool = False,
) -> ModelRequest:
    """A checked request whose sampling is that of its body; of `chat` what the gateway sets itself is left out.

    `returns`: whether a reply has room for token ids and the prompt's log-probabilities.
    """
    for name in _RETURNED:
        if body.get(name) and not returns:
            raise fields.unsupported(name, "is for chat completions and completions alone. Leave it out")
    if body.get("prompt_logprobs") is not None and body.get("stream"):
        raise fields.unsupported("prompt_logprobs", "is for replies that are not streamed")
    options = body.get("stream_options") or {}
    return ModelRequest(
        body=body,
        chat={name: value for name, value in chat.items() if name not in OWN_FIELDS and value is not None},
        recorded=recorded,
        model=body.get("model") or "",
        stream=bool(body.get("stream")),
        logprobs=logprobs,
        requested=Sampling(body.get("temperature"), body.get("top_p"), max_tokens, body.get("seed")),
        conversation=conversation,
        ignored={*ignored, *(f"stream_options.{name}" for name in options if name not in _STREAM_OPTIONS)},
    )


def returned(request: ModelRequest, reply: Reply) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    """The token ids and the prompt's log-probabilities, if the agent asks for them: of the prompt, and of each choice.

    They are null where the model server gave none.
    """
    of_prompt: dict[str, Json] = {}
    of_choices: list[dict[str, Json]] = [{} for _ in reply.choices]
    if request.body.get("return_token_ids"):
        of_prompt["prompt_token_ids"] = None if reply.prompt_ids is None else reply.prompt_ids.tolist()
        ids = [choice.response_ids for choice in reply.choices]
        of_choices = [{"token_ids": None if each is None else each.tolist()} for each in ids]
    if request.body.get("prompt_logprobs") is not None:
        of_prompt["prompt_logprobs"] = reply.prompt_logprobs
    return of_prompt, of_choices


def usages(request: ModelRequest, usage: Json) -> tuple[dict[str, Json], bool]:
    """What each chunk of a stream says about tokens, and whether the last one has them: the whole reply is known."""
    options: Any = request.body.get("stream_options") or {}
    if not options.get("include_usage"):
        return {}, False
    return {"usage": usage if options.get("continuous_usage_stats") else None}, True


def rendered(body: Mapping[str, Json]) -> Response:
    """A reply that is not streamed."""
    return Response(orjson.dumps(body), media_type="application/json")


class Dialect(Protocol):
    """Translates one API from and to chat completions."""

    api: str
    """Its name, as recorded with each call."""
    id_prefix: str
    """What the ids of its replies begin with."""
    counts: bool
    """Whether it only counts the tokens of a prompt: by a reply of one token, which no agent sees."""

    def parse(self, raw: bytes, memory: ReplyMemory) -> ModelRequest:
        """Check a request body and translate it; ApiError 400 names the field that is wrong.

        `memory` has the replies of the attempt so far: an echo of one becomes the upstream's own message again.
        """

    def render(self, request: ModelRequest, reply: Reply, memory: ReplyMemory) -> Response:
        """The reply as this API's clients expect it, streamed if they asked for it; no extras of agl are in it.

        `memory` has the reply, and keeps what its client may fetch later.
        """

    def refuse(self, error: ApiError) -> Response:
        """The error in this API's shape."""
