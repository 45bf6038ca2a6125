"""Training data for other trainers: conversations to imitate, and pairs of replies of which one is better.

Both are what TRL takes: conversational prompts and completions, arguments of tool calls as objects, tools as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl_core.analysis.export.selecting import Exported, Selection
from agl_core.analysis.export.tables import Row
from agl_core.returns import are_equal
from agl_core.types import Json, Transition


def sft_rows(exported: Exported, selection: Selection) -> Iterator[Row]:
    """What was asked and what was replied, for each transition: `prompt`, `completion` and `tools`."""
    for transition in _usable(exported, selection):
        yield {**_prompt(transition), "completion": [_message(transition.response)], **_tools(transition)}


def preference_rows(group: Sequence[Exported], selection: Selection) -> Iterator[Row]:
    """`prompt`, `chosen`, `rejected` and `tools`, for each prompt that members of a group share.

    A reply is worth the mean terminal reward of the rollouts that gave it. The best reply is chosen over the worst;
    where all are worth the same there is no pair.
    """
    asked: dict[str, list[tuple[Transition, float]]] = {}
    for each in group:
        if each.entry.reward is not None:
            for transition in _usable(each, selection):
                prompt = json.dumps([transition.agent, _prompt(transition), _tools(transition)], sort_keys=True)
                asked.setdefault(prompt, []).append((transition, each.entry.reward))
    for same in asked.values():
        replies: dict[str, list[tuple[Transition, float]]] = {}
        for transition, reward in same:
            replies.setdefault(_said(transition.response), []).append((transition, reward))
        worth = {said: sum(reward for _, reward in found) / len(found) for said, found in replies.items()}
        best, worst = max(worth, key=worth.__getitem__), min(worth, key=worth.__getitem__)
        if not are_equal(worth.values()):
            first = same[0][0]
            yield {
                **_prompt(first),
                "chosen": [_message(replies[best][0][0].response)],
                "rejected": [_message(replies[worst][0][0].response)],
                **_tools(first),
            }


def _usable(exported: Exported, selection: Selection) -> Iterator[Transition]:
    """The selected transitions that have a conversation and a reply: not those that were pruned."""
    for transition in exported.report.episode.transitions:
        says = transition.response.get("content") or transition.response.get("tool_calls")
        if selection.has(transition) and not exported.report.pruned and transition.messages and says:
            yield transition


def _prompt(transition: Transition) -> Row:
    return {"prompt": [_message(message) for message in transition.messages]}


def _tools(transition: Transition) -> Row:
    return {"tools": json.dumps(list(transition.tools)) if transition.tools else None}


def _message(message: Mapping[str, Json]) -> dict[str, Json]:
    """A message as chat templates take it: without keys that say nothing, and arguments as objects."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_tool_call(each) for each in kept["tool_calls"]]
    return kept


def _tool_call(tool_call: Any) -> Json:
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return tool_call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return tool_call
    return {**tool_call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else tool_call


def _said(response: Mapping[str, Json]) -> str:
    """What makes two replies the same: their text and tool calls, without the ids of these."""
    message = _message(response)
    calls = message.get("tool_calls")
    functions = [each.get("function") if isinstance(each, Mapping) else each for each in calls or ()]
    return json.dumps([message.get("content"), functions], sort_keys=True)
