"""Whether an episode is exactly the expected one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from agl_core.testing.adapters.scenario import Expected, Parallel, Reply, Turn
from agl_core.testing.scripts import CallTools
from agl_core.testing.upstream import END_TOKEN, logprob
from agl_core.types import Episode, Transition


def tokens(reply: Reply, choice: int = 0) -> list[int]:
    """The ids that the upstream samples for a reply: its bytes, and the end."""
    if isinstance(reply, CallTools):
        calls = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments, *_ in reply.calls]
        text = reply.text or json.dumps(calls)
    else:
        text = f"{reply.text} ({choice})" if choice else reply.text
    return [*text.encode(), END_TOKEN]


def differences(expected: Expected, episode: Episode) -> list[str]:
    """What is wrong with the episode; nothing, if it is exactly as expected."""
    found = [list(call) for _, call in groupby(episode.transitions, key=lambda each: each.key.call)]
    turns = [call[0].turn for call in found]
    wrong = [] if turns == list(range(len(found))) else [f"the turns are numbered {turns}"]
    if episode.unjoined:
        wrong.append(f"tool results joined with no call: {[(o.tool, str(o.status)) for o in episode.unjoined]}")
    if len({call[0].key.call for call in found}) != len(found):
        wrong.append("a call's transitions are apart, or two calls have one id")
    for block in expected:
        size = 1 if isinstance(block, Turn) else sum(map(len, block.branches))
        taken, found = found[:size], found[size:]
        wrong += _of_turn(block, taken) if isinstance(block, Turn) else _of_block(block, taken)
    return wrong + [f"one call too many: {_shown(call)}" for call in found]


def _of_turn(turn: Turn, calls: Sequence[Sequence[Transition]]) -> list[str]:
    if not calls:
        return [f"no call for {turn}"]
    call = calls[0]
    numbers = {each.agent_turn for each in call}
    wrong = [] if numbers == {turn.number} else [f"turn {turn.number} of {turn.agent} is numbered {numbers}"]
    return wrong + _of_call(turn, call)


def _of_block(block: Parallel, calls: Sequence[Sequence[Transition]]) -> list[str]:
    """Calls that may come in any order that keeps the order of each branch."""
    ahead = [list(branch) for branch in block.branches]
    wrong = []
    for call in calls:
        tried = [(branch, _of_call(branch[0], call)) for branch in ahead if branch]
        fitting = next((branch for branch, differs in tried if not differs), None)
        if fitting is None:
            wrong += [f"fits no branch: {_shown(call)}", *(text for _, differs in tried for text in differs)]
        else:
            fitting.pop(0)
    wrong += [f"no call for {turn}" for branch in ahead for turn in branch]
    # Which of several branches of one agent came first is open, and so is who has which number.
    numbers = sorted((turn.agent, turn.number) for branch in block.branches for turn in branch)
    given = sorted((str(call[0].agent), call[0].agent_turn) for call in calls)
    return wrong + ([] if numbers == given else [f"agents and turns are {given}, not {numbers}"])


def _of_call(turn: Turn, call: Sequence[Transition]) -> list[str]:
    wrong = []

    def expect(what: str, given: Any, wanted: Any) -> None:
        if given != wanted:
            wrong.append(f"{what} of {_shown(call)} is {given!r}, not {wanted!r}")

    expect("the agent", [each.agent for each in call], [turn.agent] * turn.choices)
    expect("choices", [each.key.choice for each in call], list(range(turn.choices)))
    for choice, each in enumerate(call):
        ids = tokens(turn.reply, choice)
        prompt = "" if each.prompt_ids is None else bytes(each.prompt_ids.tolist()).decode()
        expect("the response's ids", _plain(each.response_ids), ids)
        expect("the log-probabilities", _plain(each.logprobs), _plain(np.array([logprob(i) for i in ids], np.float32)))
        expect("whose system prompt it is", f"You are {turn.agent}." in prompt, True)
        if turn.forgot:
            expect(f"{turn.forgot!r} in the prompt", turn.forgot in prompt, False)
        expect("the tool results", [(o.tool, str(o.status)) for o in each.tool_results], list(turn.tool_results))
        expect(
            "the agent of a tool result", [o.agent for o in each.tool_results], [turn.agent] * len(turn.tool_results)
        )
        if isinstance(turn.reply, CallTools):
            ids_asked = [asked["id"] for asked in each.response.get("tool_calls") or ()]
            expect("the tool calls of the tool results", [o.tool_call_id for o in each.tool_results], ids_asked)
            expect(
                "the arguments",
                [o.arguments for o in each.tool_results],
                [dict(given) for _, given, *_ in turn.reply.calls],
            )
    return wrong


def _plain(values: Any) -> list[Any] | None:
    return None if values is None else values.tolist()


def _shown(call: Iterable[Transition]) -> str:
    first = next(iter(call))
    said = first.response.get("content") or first.response.get("tool_calls")
    return f"call {first.turn} ({first.agent}: {said!r})"
