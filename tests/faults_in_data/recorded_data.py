"""Two groups of three rollouts as they are recorded, each of two calls with a tool between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agl_core.store.interface import Record
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    FinishReason,
    Json,
    Mode,
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
    """What the agents reported."""

    @classmethod
    def sound(cls, prefix: str) -> Data:
        """Nothing is wrong with any of it: every transition can be trained on."""
        data = cls(prefix, [], [], [], [], [])
        rng = np.random.default_rng(0)
        for place in range(GROUPS * MEMBERS):
            data._add(f"{prefix}{place}", place // MEMBERS, place % MEMBERS, rng)
        return data

    def _add(self, name: str, group: int, member: int, rng: np.random.Generator) -> None:
        task = Task(f"t{group}", "6 * 7")
        self.rollouts.append(
            Rollout(
                id=name,
                run="run",
                restart=0,
                group=f"{self.prefix}g{group}",
                task=task,
                mode=Mode.TRAIN,
                step=1,
                member=member,
                state=RolloutState.DONE,
                counted_attempt=0,
                ending=Ending.FINISHED,
            )
        )
        self.attempts.append(Attempt(name, 0, "w", 0.0, 1.0, Ending.FINISHED, result=(0.5, 1.0, 0.25)[member]))
        asked = {"id": f"{name}-t", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        prompt = rng.integers(1, 60, 5).astype(np.int32)
        for sequence, message in enumerate(({"content": None, "tool_calls": [asked]}, {"content": "42"})):
            self.calls.append(
                Call(
                    id=f"{name}-c{sequence}",
                    rollout=name,
                    attempt=0,
                    sequence=sequence,
                    policy="default",
                    version=3,
                    request={"messages": [{"role": "user", "content": "6 * 7"}]},
                    choices=(self._choice({"role": "assistant", **message}, rng),),
                    started=float(sequence),
                    ended=sequence + 0.5,
                    agent="solver",
                    parent_span=f"{name}-s{sequence}",
                    prompt_ids=prompt if sequence == 0 else np.append(prompt, [7, 8]).astype(np.int32),
                    effective=Sampling(temperature=1.0, top_p=1.0, max_tokens=8, seed=1),
                )
            )
        status = ToolStatus.OK if member else ToolStatus.ERROR
        self.tool_results.append(ToolResult(f"{name}-o", name, 0, "look", status, f"{name}-t", {"x": 1}, "42"))
        self.rewards.append(Reward(name, 0, "effort", 0.125, "agent"))

    @staticmethod
    def _choice(message: dict[str, Json], rng: np.random.Generator) -> Choice:
        tokens = rng.integers(1, 60, 4).astype(np.int32)
        return Choice(0, message, FinishReason.STOP, tokens, np.full(4, -4.0, np.float32))

    @property
    def records(self) -> list[Record]:
        return [*self.rollouts, *self.attempts, *self.calls, *self.tool_results, *self.rewards]

    def change(self, kind: type, field: str, value: Any) -> None:
        """Give the record that gets faults another value in one field."""
        if kind is Choice:
            self.change(Call, "choices", (replace(self.calls[1].choices[0], **{field: value}),))
            return
        records, place = {
            Rollout: (self.rollouts, 0),
            Attempt: (self.attempts, 0),
            Call: (self.calls, 1),
            ToolResult: (self.tool_results, 0),
            Reward: (self.rewards, 0),
        }[kind]
        records[place] = replace(records[place], **{field: value})  # type: ignore[type-var]
