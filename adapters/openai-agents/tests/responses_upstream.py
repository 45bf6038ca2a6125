"""A scripted model server that also speaks the Responses API, which is the default of the SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agl_core.testing.scripts import Received, Step
from agl_core.testing.upstream import Reply, ScriptedUpstream


class ResponsesUpstream(ScriptedUpstream):
    paths = (*ScriptedUpstream.paths, "responses")

    def encode(self, received: Received, completion: Reply, streamed: bool) -> str:
        if not is_responses(received):
            return super().encode(received, completion, streamed)
        response = _response(received.body, completion, len(self.received))
        return _events(response) if streamed else json.dumps(response)


def is_responses(received: Received) -> bool:
    return received.path.endswith("/responses")


def by_agent(**answers: Callable[[Received], Step]) -> Callable[[Received], Step]:
    """Each agent, whose name is its system prompt, has answers of its own."""

    def answer(received: Received) -> Step:
        prompts = [item["content"] for item in received.items if item.get("role") == "system"]
        return answers[received.body.get("instructions") or prompts[0]](received)

    return answer


def _response(body: Mapping[str, Any], completion: Reply, number: int) -> Reply:
    """A chat completion's first choice as a reply of the Responses API."""
    (choice, *_), usage = completion["choices"], completion["usage"]
    message, done = choice["message"], {"status": "completed"}
    output: list[Reply] = [
        {"type": "function_call", "id": f"fc-{number}-{n}", "call_id": call["id"], **call["function"], **done}
        for n, call in enumerate(message["tool_calls"] or ())
    ]
    if message["content"] is not None:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append({"type": "message", "id": f"msg-{number}", "role": "assistant", "content": [part], **done})
    response: Reply = {
        "id": f"resp-{number}",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        **done,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": None,
        "instructions": body.get("instructions"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    if "token_ids" in choice:
        response |= {"prompt_token_ids": completion["prompt_token_ids"], "token_ids": choice["token_ids"]}
    return response


def _events(response: Reply) -> str:
    """A reply of the Responses API as its stream: each item in one piece."""
    events: list[Reply] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": []}}
    ]
    for index, item in enumerate(response["output"]):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response})
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': index})}\n\n"
        for index, event in enumerate(events)
    )
