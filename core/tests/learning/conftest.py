"""Makers of records for the learning tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    FinishReason,
    Mode,
    Rollout,
    Sampling,
    Task,
    ToolResult,
    ToolStatus,
)


class Records:
    """Makes records of one rollout with as little said as a test needs."""

    def rollout(self, name: str = "r", group: str = "g", member: int = 0) -> Rollout:
        return Rollout(name, "run", 0, group, Task("t", "question"), Mode.TRAIN, 1, member)

    def attempt(self, rollout: str = "r", number: int = 0, ending: Ending = Ending.FINISHED) -> Attempt:
        return Attempt(rollout, number, "w", 0.0, 1.0, ending, result="answer")

    def choice(self, index: int = 0, tool_calls: Sequence[str] = (), tokens: int = 3, **changes: Any) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": "hi"}
        if tool_calls:
            message["tool_calls"] = [
                {"id": each, "type": "function", "function": {"name": "look", "arguments": "{}"}} for each in tool_calls
            ]
        fields: dict[str, Any] = {
            "response_ids": np.arange(tokens, dtype=np.int32),
            "logprobs": np.full(tokens, -0.5, np.float32),
        }
        return Choice(index, message, FinishReason.STOP, **(fields | changes))

    def call(self, sequence: int, *choices: Choice, rollout: str = "r", **changes: Any) -> Call:
        fields: dict[str, Any] = {
            "id": f"{rollout}-c{sequence}",
            "attempt": 0,
            "policy": "default",
            "version": 3,
            "request": {"messages": [{"role": "user", "content": f"turn {sequence}"}]},
            "choices": choices or (self.choice(),),
            "started": float(sequence),
            "ended": sequence + 0.5,
            "prompt_ids": np.arange(4 + sequence, dtype=np.int32),
            "effective": Sampling(temperature=0.7, top_p=1.0, max_tokens=8, seed=1),
        }
        return Call(rollout=rollout, sequence=sequence, **(fields | changes))

    def tool_result(self, name: str, tool_call_id: str | None = None, **changes: Any) -> ToolResult:
        fields: dict[str, Any] = {"rollout": "r", "attempt": 0, "tool": "look", "status": ToolStatus.OK}
        return ToolResult(id=name, tool_call_id=tool_call_id, **(fields | changes))


@pytest.fixture(scope="session")
def make() -> Records:
    return Records()
