"""What a request has that not every model server takes, named where one refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agl_core.server.errors import ApiError
from agl_core.types import Json

_OF_REQUESTS = (400, 404, 422, 501)
"""Statuses of refusals that may be for what a request has."""


def explained(refused: ApiError, chat: Mapping[str, Json]) -> ApiError:
    """The model server's refusal, with the tools and parts of the request that it may not take."""
    found = list(_unusual(chat))
    if not found or refused.status not in _OF_REQUESTS or refused.is_context_overflow:
        return refused
    message = (
        f"{refused.message.rstrip()} The request has what this model server may not take: {'; '.join(found)}. Leave it "
        "out, or use a model that takes it."
    )
    return ApiError(refused.status, message, type=refused.type, param=refused.param, code=refused.code)


def _unusual(chat: Mapping[str, Json]) -> Iterator[str]:
    """Tools that are no functions, and the first part of a message that is no text."""
    for place, tool in enumerate(chat.get("tools") or ()):
        if tool.get("type") != "function":
            yield f"tools[{place}] is of type {tool.get('type')!r}"
    for place, message in enumerate(chat["messages"]):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") not in ("text", "refusal"):
                yield f"messages[{place}].content[{index}] is of type {part.get('type')!r}"
                return
