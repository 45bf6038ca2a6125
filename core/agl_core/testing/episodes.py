"""Sample records of one rollout and what is made of them, with as little said as a test needs.

Each function makes one sound record; keyword arguments change its fields.

>>> from agl_core.learning.transitions import build_episode
>>> from agl_core.testing import episodes as make
>>> calls = [make.call(0, make.choice(tool_calls=["c1"])), make.call(1)]
>>> episode = build_episode(make.rollout(), make.attempt(), calls, [make.tool_result("o1", "c1")])
>>> [len(transition.tool_results) for transition in episode.transitions]
[1, 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    FinishReason,
    Mode,
    Rollout,
    Sampling,
    Task,
    ToolResult,
    ToolStatus,
    Transition,
    TransitionKey,
)

_TASK = Task("t", {"question": "?"})


def rollout(id: str = "r", **changes: Any) -> Rollout:
    sample = Rollout(id, "run", restart=0, group="g", task=_TASK, mode=Mode.TRAIN, step=0, member=0)
    return replace(sample, **changes)


def attempt(rollout: str = "r", number: int = 0, **changes: Any) -> Attempt:
    sample = Attempt(rollout, number, "w", started=0.0, ended=1.0, ending=Ending.FINISHED, result="answer")
    return replace(sample, **changes)


def choice(index: int = 0, tool_calls: Sequence[str] = (), tokens: int = 3, **changes: Any) -> Choice:
    """A response of so many tokens, which asks for the tool `look` once for each of these tool call ids."""
    message: dict[str, Any] = {"role": "assistant", "content": "hi"}
    if tool_calls:
        function = {"name": "look", "arguments": "{}"}
        message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id in tool_calls]
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
    return replace(Choice(index, message, FinishReason.STOP, ids, logprobs), **changes)


def call(sequence: int = 0, *choices: Choice, rollout: str = "r", **changes: Any) -> Call:
    """The call with this place in its rollout, named `r-c0`, `r-c1` and so on."""
    fields: dict[str, Any] = {
        "id": f"{rollout}-c{sequence}",
        "attempt": 0,
        "policy": "default",
        "version": 3,
        "request": {"messages": [{"role": "user", "content": f"turn {sequence}"}]},
        "choices": choices or (choice(),),
        "started": float(sequence),
        "ended": sequence + 0.5,
        "prompt_ids": np.arange(4 + sequence, dtype=np.int32),
        "effective": Sampling(temperature=0.7, top_p=1.0, max_tokens=8, seed=1),
    }
    return Call(rollout=rollout, sequence=sequence, **(fields | changes))


def tool_result(id: str, tool_call_id: str | None = None, **changes: Any) -> ToolResult:
    return replace(ToolResult(id, "r", 0, "look", ToolStatus.OK, tool_call_id), **changes)


def transition(
    turn: int = 0, *tool_results: ToolResult, rollout: str = "r", choice: int = 0, **changes: Any
) -> Transition:
    """Without token ids unless they are given."""
    fields: dict[str, Any] = {
        "agent": "solver",
        "turn": turn,
        "agent_turn": turn,
        "policy": "default",
        "version": 0,
        "messages": (),
        "response": {"role": "assistant", "content": ""},
        "finish_reason": FinishReason.STOP,
        "temperature": 1.0,
        "tool_results": tool_results,
    }
    return Transition(key=TransitionKey(rollout, 0, f"{rollout}-c{turn}", choice), **(fields | changes))


def episode(*transitions: Transition, rollout: str = "r", **changes: Any) -> Episode:
    sample = Episode(rollout, 0, "g", 0, _TASK, Mode.TRAIN, Ending.FINISHED, transitions)
    return replace(sample, **changes)
