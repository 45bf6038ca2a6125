"""The records of rollouts as the gateway makes them of the scripted upstream's replies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import numpy as np
from server_load import chat
from server_upstream import PROMPT_IDS, RESPONSE_IDS, SAID

from agl_core.store.interface import Record
from agl_core.types import Attempt, Call, Choice, Ending, FinishReason, Mode, Rollout, RolloutState, Sampling, Task

GROUP = 8
"""Rollouts of one task."""


def some_rollouts(n_rollouts: int) -> list[Rollout]:
    """New rollouts, in groups."""
    return [_rollout(group, member) for group, member in _members(n_rollouts)]


def _members(n_rollouts: int) -> Iterator[tuple[str, int]]:
    for start in range(0, n_rollouts, GROUP):
        group = uuid4().hex
        yield from ((group, member) for member in range(min(GROUP, n_rollouts - start)))


def _rollout(group: str, member: int) -> Rollout:
    task = Task(group, {"question": f"When does my train leave? Question {group}"}, metadata={"answer": "09:30"})
    return Rollout(uuid4().hex, "benchmark", 0, group, task, Mode.TRAIN, step=1, member=member)


def recorded_call(rollout: Rollout, turn: int) -> Call:
    """One turn; the rollouts of a group ask the same, and are answered each in its own words."""
    now = time.time()
    choice = Choice(
        index=0,
        message={"role": "assistant", "content": f"{SAID} {rollout.id} {turn}"},
        finish_reason=FinishReason.STOP,
        response_ids=np.arange(RESPONSE_IDS, dtype=np.int32),
        logprobs=np.linspace(-1, 0, RESPONSE_IDS, dtype=np.float32),
    )
    return Call(
        id=f"chatcmpl-{uuid4().hex}",
        rollout=rollout.id,
        attempt=0,
        sequence=turn,
        policy="default",
        version=1,
        request=chat(turn, rollout.group),
        choices=(choice,),
        started=now,
        ended=now,
        prompt_ids=np.arange(PROMPT_IDS, dtype=np.int32),
        requested=Sampling(temperature=1.0),
        effective=Sampling(temperature=1.0, top_p=1.0, max_tokens=512, seed=turn),
    )


def stored_rollout(rollout: Rollout, turns: int) -> list[Record]:
    """Everything of a rollout that is done."""
    now = time.time()
    attempt = Attempt(rollout.id, 0, "worker", started=now, ended=now, ending=Ending.FINISHED, result="09:30")
    done = replace(rollout, state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED)
    return [done, attempt, *(recorded_call(rollout, turn) for turn in range(turns))]
