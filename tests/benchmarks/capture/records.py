"""What was sampled and done in a cell, and what a recorder says of it: the two sides that `scores` compares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agl_core.testing.adapters.scenario import Scenario, Turn
from agl_core.testing.adapters.upstream import Play
from agl_core.testing.scripts import CallTools, Received, Say

TokenIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Tool:
    """What a tool did: as the script has it, or as a recorder has it."""

    tool_call_id: str | None
    name: str | None
    arguments: str
    """As JSON with sorted keys; tools without an id are known by their arguments."""
    status: str | None
    """None: the recorder does not say."""


@dataclass(frozen=True)
class Response:
    """One sampled response: as the model server sampled it, or as a recorder has it."""

    rollout: int | None
    """Which rollout of the cell; None: the recorder does not say."""
    text: str
    tool_calls: tuple[str, ...]
    """The ids of the tool calls that it asks for."""
    agent: str | None
    prompt_ids: TokenIds | None
    response_ids: TokenIds | None
    tools: tuple[Tool, ...] = ()
    """What came of the tools that it asked for."""

    @property
    def said(self) -> tuple[str, tuple[str, ...]]:
        """What tells it from the other responses of its rollout."""
        return self.text, self.tool_calls


@dataclass(frozen=True)
class Recorded:
    """Everything that a recorder has of one cell."""

    responses: tuple[Response, ...]
    unobserved: frozenset[str] = frozenset()
    """Which evidence it says is missing: names of `agl_core.types.Evidence`."""


def sampled(scenario: Scenario, play: Play, log: Sequence[tuple[Received, Mapping[str, Any]]]) -> list[Response]:
    """The truth: the replies of the model server's log that agents waited for, with what the script says of each."""
    turns = {(turn.agent, turn.number): turn for turn in scenario.turns()}
    replies: Counter[tuple[str, int]] = Counter()
    found = []
    for answered in play.answered:
        if not isinstance(answered.step, Say | CallTools):
            continue
        who = answered.agent, answered.rollout
        turn = turns[answered.agent, replies[who]]
        replies[who] += 1
        (completion,) = [made for received, made in log if received is answered.received]
        for choice in completion["choices"]:
            ids = tuple(call["id"] for call in choice["message"]["tool_calls"] or ())
            found.append(
                Response(
                    answered.rollout,
                    choice["message"]["content"] or "",
                    ids,
                    answered.agent,
                    token_ids(completion.get("prompt_token_ids")),
                    token_ids(choice.get("token_ids")),
                    tuple(_tools(turn, ids)),
                )
            )
    return found


def _tools(turn: Turn, ids: Sequence[str]) -> Iterable[Tool]:
    if isinstance(turn.reply, CallTools):
        for (name, status), id, (_, arguments, *_rest) in zip(turn.tool_results, ids, turn.reply.calls, strict=True):
            yield Tool(id, name, as_json(arguments), status)
        return
    for name, status in turn.tool_results:
        yield Tool(None, name, as_json({"topic": turn.reply.text.partition("[")[2].rstrip("]")}), status)


def token_ids(values: Any) -> TokenIds | None:
    """Token ids in a form that can be compared; None if there are none."""
    return None if values is None else tuple(int(value) for value in values)


def as_json(arguments: Any) -> str:
    """A tool's arguments in a form that can be compared."""
    return json.dumps(arguments, sort_keys=True)
