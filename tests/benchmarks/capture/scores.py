"""What was sampled and done in a cell, what a recorder says of it, and how far the two agree."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agl_core.testing.adapters.driver import Scenario, Turn
from agl_core.testing.adapters.playing import Play
from agl_core.testing.scripts import CallTools, Received, Say
from agl_core.types import Evidence

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


@dataclass
class Score:
    """Counts over one or several cells. `of_X` is how many there are of what `X` counts."""

    cells: int = 0
    failed: int = 0
    """Cells in which the agent did not do what the script says; what it did is scored."""
    of_responses: int = 0
    responses: int = 0
    """Responses that were recorded."""
    extra: int = 0
    """Recorded responses that no agent got: doubled, or given up."""
    tokens: int = 0
    """Responses whose prompt and response token ids are exactly those that were sampled."""
    names: int = 0
    """Responses with the right agent."""
    misnamed: int = 0
    """Responses with another agent."""
    of_tools: int = 0
    joins: int = 0
    """Tool results at the response that asked for them."""
    false_joins: int = 0
    """Tool results at a response that did not ask for them, or once too often."""
    statuses: int = 0
    """Tool results with the right status."""
    misjudged: int = 0
    """Tool results with another status."""
    missing: int = 0
    """Facts that were not recorded: responses, token ids, names, tool results, statuses."""
    unobserved: int = 0
    """Those of them that the recorder says are missing."""

    def __add__(self, other: Score) -> Score:
        names = [field.name for field in dataclasses.fields(self)]
        return Score(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def perfect(self) -> bool:
        """Whether everything was recorded, and nothing else."""
        whole = (self.of_responses, self.of_responses, self.of_responses, self.of_tools, self.of_tools)
        found = (self.responses, self.tokens, self.names, self.joins, self.statuses)
        return whole == found and not (self.extra or self.false_joins or self.failed)


def score(truth: Sequence[Response], recorded: Recorded) -> tuple[Score, list[str]]:
    """The counts, and each fault in words."""
    made = _Counting(recorded.unobserved)
    left = list(recorded.responses)
    for response in truth:
        made.response(response, _taken(response, left))
    for response in left:
        made.extra(response)
    return made.score, made.faults


def _taken(wanted: Response, left: list[Response]) -> Response | None:
    """The record of a response, which is taken out of those that are left."""
    same = [each for each in left if each.said == wanted.said and each.rollout in (None, wanted.rollout)]
    # Two rollouts may get the same words; where a recorder has exact tokens, they tell which is which.
    same.sort(key=lambda each: each.prompt_ids != wanted.prompt_ids)
    if same:
        left.pop(next(place for place, each in enumerate(left) if each is same[0]))
    return same[0] if same else None


class _Counting:
    def __init__(self, unobserved: frozenset[str]) -> None:
        self.score, self.faults, self._unobserved = Score(cells=1), [], unobserved

    def response(self, wanted: Response, found: Response | None) -> None:
        score = self.score
        score.of_responses += 1
        score.of_tools += len(wanted.tools)
        if found is None:
            self._missing("the response", wanted, None)
            return
        score.responses += 1
        if found.prompt_ids is None or found.response_ids is None:
            self._missing("the token ids", wanted, Evidence.TOKEN_IDS)
        elif (found.prompt_ids, found.response_ids) == (wanted.prompt_ids, wanted.response_ids):
            score.tokens += 1
        else:
            self.faults.append(f"wrong token ids of {_shown(wanted)}")
        if found.agent == wanted.agent:
            score.names += 1
        elif found.agent is None:
            self._missing("the agent", wanted, Evidence.AGENT_NAMES)
        else:
            score.misnamed += 1
            self.faults.append(f"{found.agent!r} as the agent of {_shown(wanted)}")
        self._tools(wanted, found)

    def extra(self, response: Response) -> None:
        self.score.extra += 1
        self.score.false_joins += len(response.tools)
        self.faults.append(f"one response too many: {_shown(response)}")

    def _tools(self, wanted: Response, found: Response) -> None:
        left = list(found.tools)
        for tool in wanted.tools:
            same = next((each for each in left if _same(tool, each)), None)
            if same is None:
                self._missing(f"the result of {tool.name}", wanted, Evidence.TOOL_RESULTS)
                continue
            left.remove(same)
            self.score.joins += 1
            if same.status == tool.status:
                self.score.statuses += 1
            elif same.status is None:
                self._missing(f"the status of {tool.name}", wanted, Evidence.TOOL_RESULTS)
            else:
                self.score.misjudged += 1
                self.faults.append(f"{same.status!r} as the status of {tool.name}, which is {tool.status!r}")
        self.score.false_joins += len(left)
        self.faults += [f"a result of {tool.name} joined with {_shown(wanted)}" for tool in left]

    def _missing(self, what: str, wanted: Response, evidence: Evidence | None) -> None:
        self.score.missing += 1
        self.score.unobserved += evidence in self._unobserved
        self.faults.append(f"not recorded: {what} of {_shown(wanted)}")


def _same(wanted: Tool, found: Tool) -> bool:
    if wanted.tool_call_id is not None:
        return found.tool_call_id == wanted.tool_call_id
    return (found.name, found.arguments) == (wanted.name, wanted.arguments)


def _shown(response: Response) -> str:
    said = repr(response.text[:40]) if response.text else f"a request for {len(response.tool_calls)} tools"
    return f"{response.agent}'s {said}"


def share(part: int, whole: int) -> str:
    """A share as a percentage, which is 100 only if nothing is missing.

    >>> share(2, 3), share(9999, 10000), share(0, 0)
    ('66.7 %', '99.9 %', '–')
    """
    if not whole:
        return "–"
    return "100 %" if part == whole else f"{int(1000 * part / whole) / 10} %"
