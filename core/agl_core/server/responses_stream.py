"""A finished response of the Responses API as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl_core.server.streaming import pieces
from agl_core.types import Json

_NOT_YET = ("usage", "incomplete_details")


def response_events(response: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """From `response.created` to `response.completed` or `response.incomplete`, numbered."""
    for number, event in enumerate(_events(response)):
        yield {**event, "sequence_number": number}


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    started = {**response, "status": "in_progress", "output": [], **dict.fromkeys(_NOT_YET)}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(response["output"]):
        empty: dict[str, Json] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        opened = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}
        else:
            for content_index, part in enumerate(item["content"]):
                yield from _part_events({**place, "content_index": content_index}, part)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _part_events(place: Mapping[str, Json], part: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    """A part of an item's content, its text in pieces; log-probabilities go with the first piece."""
    kind, is_output = f"response.{part['type']}", part["type"] == "output_text"
    told: dict[str, Json] = {"logprobs": _of_event(part["logprobs"])} if is_output else {}
    none: dict[str, Json] = {"logprobs": []} if is_output else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": "", **none}}
    carried = told
    for piece in pieces(part["text"]):
        yield {"type": f"{kind}.delta", **place, "delta": piece, **carried}
        carried = none
    yield {"type": f"{kind}.done", **place, "text": part["text"], **told}
    yield {"type": "response.content_part.done", **place, "part": part}


def _of_event(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Log-probabilities as events have them: without bytes."""
    return [{**_brief(each), "top_logprobs": [_brief(other) for other in each["top_logprobs"]]} for each in logprobs]


def _brief(logprob: Mapping[str, Json]) -> dict[str, Json]:
    return {"token": logprob["token"], "logprob": logprob["logprob"]}
