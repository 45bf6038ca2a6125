"""Server-sent events. The upstream never streams: what a client streams is made of the whole reply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import orjson
from starlette.responses import Response

from agl_core.types import Json

_PIECE = 80
"""Characters per streamed piece of text."""


def pieces(text: str) -> Iterator[str]:
    """A text as it is streamed."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def chunk_stream(chunks: Iterable[Mapping[str, Json]]) -> Response:
    """Chunks without names and a last `[DONE]`, as chat completions and completions have them."""
    return _stream([*(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]\n\n"])


def event_stream(events: Iterable[Mapping[str, Json]]) -> Response:
    """Events named by their `type`, as Responses and Messages have them."""
    return _stream(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)


def _stream(parts: Iterable[bytes]) -> Response:
    return Response(b"".join(parts), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
