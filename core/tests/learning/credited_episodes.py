"""Episodes for the tests of credit rules: calls with rewards, states, agents and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.types import Episode, Reward, ToolStatus, Transition

REWARDS = st.floats(-2, 2, width=32)


@dataclass(frozen=True)
class Step:
    """One call of a test's episode."""

    reward: float = 0.0
    state: int = 0
    """Calls of one state have one prompt."""
    agent: str = "solver"
    tool_results: tuple[ToolStatus, ...] = ()
    parse_error: str | None = None


STEPS = st.builds(
    Step,
    REWARDS,
    st.integers(0, 3),
    st.sampled_from(["solver", "critic"]),
    st.lists(st.sampled_from(ToolStatus), max_size=3).map(tuple),
    st.sampled_from([None, "no closing brace"]),
)
EPISODES = st.tuples(st.lists(STEPS, min_size=1, max_size=5), REWARDS)
GROUPS = st.lists(EPISODES, min_size=1, max_size=4)


def episode(member: int, steps: Sequence[Step], terminal: float) -> Episode:
    """The episode of these steps."""
    name = f"r{member}"
    calls = [
        make.call(
            i,
            make.choice(tool_calls=[f"{i}.{n}" for n in range(len(step.tool_results))], parse_error=step.parse_error),
            rollout=name,
            agent=step.agent,
            prompt_ids=np.full(3, step.state, np.int32),
        )
        for i, step in enumerate(steps)
    ]
    tool_results = [
        make.tool_result(f"o{i}.{n}", f"{i}.{n}", rollout=name, status=status)
        for i, step in enumerate(steps)
        for n, status in enumerate(step.tool_results)
    ]
    built = build_episode(make.rollout(name, member=member), make.attempt(name), calls, tool_results)
    by_call = {call.id: step.reward for call, step in zip(calls, steps, strict=True)}
    transitions = tuple(rewarded(t, by_call[t.key.call]) for t in built.transitions)
    return replace(built, transitions=transitions, terminal=terminal)


def rewarded(transition: Transition, value: float) -> Transition:
    """The transition that earned this."""
    key = transition.key
    return replace(transition, rewards=(Reward(key.rollout, 0, "step", value, "test", key.call, key.choice),))


def group(members: Sequence[tuple[Sequence[Step], float]]) -> list[Episode]:
    return [episode(i, steps, terminal) for i, (steps, terminal) in enumerate(members)]
