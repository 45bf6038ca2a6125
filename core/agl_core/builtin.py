"""The credit rules "identical", "immediate", "discounted" and "stepwise".

Each is a small pure function over a group of episodes; it says whether it yields returns or rewards (or what can be
read as either), and what it conserves. `agl_core.types.episodes` explains the symbols r_t, R and G_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from agl_core.decorators import credit_rule
from agl_core.kinds import Capability
from agl_core.types import CreditKind, Episode, Transition, discounted_returns, episode_return

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1, description="γ: the worth of a reward one call earlier.")]
_State: TypeAlias = tuple[str, bytes]
"""A policy and the token ids of a prompt."""


@credit_rule(kind=CreditKind.RETURN)
def identical(episodes: Sequence[Episode]) -> list[list[float]]:
    """Every transition gets the whole return: R_t = R plus all intermediate rewards (Agent Lightning, section 3.3).

    Conserves: the mean over an episode's transitions is its return.
    """
    return [[episode_return(episode)] * len(episode.transitions) for episode in episodes]


@credit_rule(kind={CreditKind.REWARD, CreditKind.RETURN})
def immediate(episodes: Sequence[Episode]) -> list[list[float]]:
    """Every transition gets its own reward, the last one the terminal reward too: r_t (Agent Lightning, section 3.1).

    An algorithm that owns the time axis (for instance by GAE across calls) reads them as rewards and adds them up
    itself. An algorithm that takes returns reads them as myopic returns, `discounted` with γ = 0: they do not contain
    what a step led to.

    Conserves: the sum over an episode's transitions is its return.
    """
    return [discounted_returns(episode, gamma=0.0) for episode in episodes]


@credit_rule(kind=CreditKind.RETURN)
def discounted(episodes: Sequence[Episode], *, gamma: Discount = 0.9) -> list[list[float]]:
    """Later rewards count less the later they come: G_t = Σ_k γ^k · r_{t+k} (Sutton and Barto 2018, equation 3.8).

    Rewards 0.3, 0.2 and 1.0 give, with γ = 0.9, the returns 1.29, 1.10 and 1.00.

    Conserves: G_t − γ · G_{t+1} = r_t, so every reward can be recovered; with γ = 1 the first transition's value is the
    episode's return.
    """
    return [discounted_returns(episode, gamma) for episode in episodes]


@credit_rule(kind=CreditKind.RETURN, needs={Capability.GROUPS, Capability.TOKEN_IDS})
def stepwise(episodes: Sequence[Episode], *, gamma: Discount = 1.0) -> list[list[float]]:
    """At a state that several rollouts of a group meet, each is compared with the others (GiGPO, arXiv 2505.10978).

    A state s is a token-identical prompt of one policy. If at least two rollouts of the group met it,

        R_t = b + (G_t − mean over those rollouts of G at s)        b = the group's mean return

    and if only one rollout met the state, R_t = R, the rollout's return. b puts the term in brackets on the scale of
    returns, like R of the other transitions.

    GiGPO adds this term, as an advantage of the step, to the advantage of the episode, R − b. Here it replaces the
    episode's advantage at shared states: it does not contain what the rollout earned before s, or at other states.

    A rollout that met s several times counts once, with the mean of its visits.

    Conserves: at every shared state the mean over its rollouts is b, so a call gets no credit for the state that it
    starts from. A first call that all rollouts share, and that no rollout comes back to, has the returns themselves (γ
    = 1); without a shared state the rule is `identical`. The mean over all transitions, which a baseline of the group
    subtracts, is b if no state is shared, or if rollouts of one length share every state, once each. Otherwise it
    differs from b by the same amount for the whole group.
    """
    if not episodes:
        return []
    returns = [discounted_returns(episode, gamma) for episode in episodes]
    visits: dict[_State, dict[int, dict[int, list[float]]]] = {}
    """By state, rollout and turn: G of each choice."""
    for i, episode in enumerate(episodes):
        for transition, value in zip(episode.transitions, returns[i], strict=True):
            state = _state(transition)
            if state is not None:
                visits.setdefault(state, {}).setdefault(i, {}).setdefault(transition.turn, []).append(value)
    # `statistics.mean` is exact: equal returns must not differ in the last bit after a baseline is moved.
    baseline = mean(episode_return(episode) for episode in episodes)
    shift: dict[_State | None, float] = {
        state: baseline - mean(mean(map(mean, by_turn.values())) for by_turn in by_rollout.values())
        for state, by_rollout in visits.items()
        if len(by_rollout) > 1
    }
    return [
        [
            value + shift[state] if (state := _state(t)) in shift else episode_return(episode)
            for t, value in zip(episode.transitions, of_episode, strict=True)
        ]
        for episode, of_episode in zip(episodes, returns, strict=True)
    ]


def _state(transition: Transition) -> _State | None:
    if transition.prompt_ids is None:
        return None
    return transition.policy, np.asarray(transition.prompt_ids, np.int32).tobytes()
