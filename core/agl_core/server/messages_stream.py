"""A finished message of the Messages API as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from agl_core.server.streaming import pieces
from agl_core.types import Json


def message_events(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """From `message_start` to `message_stop`."""
    usage = message["usage"]
    started = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**started, "stop_sequence": None}}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        yield {"type": "content_block_start", "index": index, "content_block": _opened(block)}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _opened(block: Mapping[str, Any]) -> dict[str, Json]:
    return {**block, "input": {}} if block["type"] == "tool_use" else {**block, block["type"]: ""}


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    kind = block["type"]
    if kind == "tool_use":
        for piece in pieces(orjson.dumps(block["input"]).decode()):
            yield {"type": "input_json_delta", "partial_json": piece}
    else:
        for piece in pieces(block[kind]):
            yield {"type": f"{kind}_delta", kind: piece}
