"""GiGPO: credit that compares a group's rollouts, and their calls at states that several of them met.

It begins with the episode's advantage, GRPO's (arXiv 2402.03300, section 4.1.2): with the
returns R of the group's rollouts (`agl_core.types.episode_return`), their mean μ and unbiased standard deviation σ,

    z_i = (R_i − μ) / (σ + 1e-6)        0 if all R are equal, or there is one rollout

A state s, an *anchor*, is a token-identical prompt of one policy. A prompt that contains the conversation so far
rarely comes twice, so the agent's own variables can say what its state is: `agl_core.state(room="kitchen")` in the
agent, and `anchor = ["room"]` in the settings. The state is then these variables' values, for each agent and policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean, mean, stdev
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from agl_core import Capability, CreditKind, credit_rule
from agl_core.types import Episode, Transition, are_equal, discounted_returns, episode_return

EPSILON = 1e-6
"""Added to a group's standard deviation, as GRPO does."""

State: TypeAlias = tuple[str, ...] | tuple[str, bytes]

Anchor: TypeAlias = Annotated[
    tuple[str, ...],
    Field(description="Names of the agent's variables (`agl_core.state`) that make a state; none: its prompt does."),
]


@credit_rule(kind=CreditKind.ADVANTAGE, needs={Capability.GROUPS})
def gigpo(
    episodes: Sequence[Episode],
    *,
    omega: Annotated[float, Field(ge=0, description="ω: the weight of the comparison at states.")] = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1, description="γ: the worth of a reward one call earlier.")] = 0.95,
    anchor: Anchor = (),
) -> list[list[float]]:
    """A call's advantage is its rollout's, and ω times what came after it beside other calls at its state (GiGPO).

        A_t = z + ω · (G_t − mean of G over the group's calls at the state)        G_t of `discounted`

    By arXiv 2505.10978, equations 6 to 10, without the second division by a deviation.

    Conserves: the second term sums to 0 over each state's calls, so that it is 0 at a state that is met once; without
    a shared state the rule is `identical`. The choices of a call (`n` > 1) share its place.
    """
    returns = [discounted_returns(episode, gamma) for episode in episodes]
    means = {state: mean(met.values()) for state, met in _visits(episodes, returns, anchor).items()}
    return [
        [
            z + omega * (value - means[state] if (state := _state(transition, anchor)) is not None else 0.0)
            for transition, value in zip(episode.transitions, of_episode, strict=True)
        ]
        for episode, z, of_episode in zip(episodes, episode_advantages(episodes), returns, strict=True)
    ]


def episode_advantages(episodes: Sequence[Episode]) -> list[float]:
    """z of each rollout; see the module."""
    totals = [episode_return(episode) for episode in episodes]
    if len(totals) < 2 or are_equal(totals):
        return [0.0] * len(totals)
    center, deviation = fmean(totals), stdev(totals)
    return [(total - center) / (deviation + EPSILON) for total in totals]


def _visits(
    episodes: Sequence[Episode], returns: Sequence[Sequence[float]], anchor: Sequence[str]
) -> Mapping[State, Mapping[tuple[int, int], float]]:
    """By state, and there by rollout and turn: G, the mean over the call's choices."""
    visits: dict[State, dict[tuple[int, int], list[float]]] = {}
    for i, (episode, of_episode) in enumerate(zip(episodes, returns, strict=True)):
        for transition, value in zip(episode.transitions, of_episode, strict=True):
            if (state := _state(transition, anchor)) is not None:
                visits.setdefault(state, {}).setdefault((i, transition.turn), []).append(value)
    # `statistics.mean` is exact: equal values must not differ from their mean in the last bit.
    return {state: {call: mean(values) for call, values in met.items()} for state, met in visits.items()}


def _state(transition: Transition, anchor: Sequence[str]) -> State | None:
    """The state that a call was made in; None if it is not known."""
    if anchor:
        variables = transition.state or {}
        if not variables.keys() >= set(anchor):
            return None
        values = json.dumps([variables[name] for name in anchor], sort_keys=True)
        return transition.policy, transition.agent or "", values
    if transition.prompt_ids is None:
        return None
    return transition.policy, np.asarray(transition.prompt_ids, np.int32).tobytes()
