"""Two groups of three rollouts as they are recorded, each of two calls with a tool between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agl_core.store import Record
from agl_core.testing import episodes as make
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Task,
    ToolResult,
    ToolStatus,
)

GROUPS, MEMBERS = 2, 3


@dataclass
class Data:
    """Records by kind. The first rollout, its second call and that call's choice are the ones that get faults."""

    prefix: str
    rollouts: list[Rollout]
    attempts: list[Attempt]
    calls: list[Call]
    tool_results: list[ToolResult]
    rewards: list[Reward]
    """The rewards that the agents reported."""

    @classmethod
    def sound(cls, prefix: str) -> Data:
        """Nothing is wrong with any of it: every transition can be trained on."""
        data = cls(prefix, [], [], [], [], [])
        rng = np.random.default_rng(0)
        for number in range(GROUPS * MEMBERS):
            data._add(f"{prefix}{number}", number // MEMBERS, number % MEMBERS, rng)
        return data

    def _add(self, name: str, group: int, member: int, rng: np.random.Generator) -> None:
        rollout = {"group": f"{self.prefix}g{group}", "task": Task(f"t{group}", "6 * 7"), "member": member, "step": 1}
        ended = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
        self.rollouts.append(make.rollout(name, **rollout, **ended))
        self.attempts.append(make.attempt(name, result=(0.5, 1.0, 0.25)[member]))
        prompt = rng.integers(1, 60, 5).astype(np.int32)
        for sequence, tool_calls in enumerate(([f"{name}-t"], [])):
            tokens = rng.integers(1, 60, 4).astype(np.int32)
            choice = make.choice(tool_calls=tool_calls, response_ids=tokens, logprobs=np.full(4, -4.0, np.float32))
            call = make.call(
                *(sequence, choice),
                rollout=name,
                agent="solver",
                parent_span=f"{name}-s{sequence}",
                prompt_ids=prompt if sequence == 0 else np.append(prompt, [7, 8]).astype(np.int32),
                effective=Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=1),
            )
            self.calls.append(call)
        status = ToolStatus.OK if member else ToolStatus.ERROR
        fields = {"rollout": name, "status": status, "arguments": {"x": 1}, "result": "42"}
        self.tool_results.append(make.tool_result(f"{name}-o", f"{name}-t", **fields))
        self.rewards.append(Reward(name, 0, "effort", 0.125, "agent"))

    @property
    def records(self) -> list[Record]:
        return [*self.rollouts, *self.attempts, *self.calls, *self.tool_results, *self.rewards]

    def change(self, kind: type, field: str, value: Any) -> None:
        """Give the record that gets faults another value in one field."""
        if kind is Choice:
            self.change(Call, "choices", (replace(self.calls[1].choices[0], **{field: value}),))
            return
        records, key = {
            Rollout: (self.rollouts, 0),
            Attempt: (self.attempts, 0),
            Call: (self.calls, 1),
            ToolResult: (self.tool_results, 0),
            Reward: (self.rewards, 0),
        }[kind]
        records[key] = replace(records[key], **{field: value})  # type: ignore[type-var]
