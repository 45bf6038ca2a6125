"""What an API dialect is to the gateway: chat completions now; each further API is one more module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response

from agl_core.server.faults import ApiError
from agl_core.server.reply import Reply
from agl_core.types import Json, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequest:
    """One request of an agent, checked."""

    body: Mapping[str, Json]
    """As the agent sent it."""
    chat: Mapping[str, Json]
    """The same as a chat completion for the upstream, without model, streaming and sampling parameters."""
    model: str
    stream: bool
    logprobs: bool
    """Whether the agent wants to see log-probabilities."""
    requested: Sampling


class Dialect(Protocol):
    """Translates one API from and to chat completions."""

    api: str
    """Its name, as recorded with each call."""

    def parse(self, raw: bytes) -> ModelRequest:
        """Check a request body; ApiError 400 names the field that is wrong."""

    def render(self, request: ModelRequest, reply: Reply) -> Response:
        """The reply as this API's clients expect it, streamed if they asked for it; no extras of agl are in it."""

    def refuse(self, error: ApiError) -> Response:
        """The error in this API's shape."""
