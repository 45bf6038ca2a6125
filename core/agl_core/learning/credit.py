"""LightningRL's first level: how an episode's rewards are shared among its transitions.

Each rule is a small pure function over a group of episodes; it says whether it yields returns or rewards (or what can
be read as either), and what it conserves. In the formulas

    r_t   the intermediate rewards of transition t; the terminal reward is added at the last call
    R     the episode's return: the terminal reward and every r_t, undiscounted
    G_t   what came from t on: r_t + γ · G_{t+1}

Time goes by calls. The choices of one call (`n` > 1) stand side by side: none is in another's future, what comes
after the call comes after each of them, and each choice of the last call carries the terminal reward. What a rule
conserves is said of calls with one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import mean
from typing import Annotated, TypeAlias

import numpy as np
from pydantic import Field

from agl_core.errors import PluginError
from agl_core.plugins import Need
from agl_core.protocols import CreditRule
from agl_core.rules import credit_rule
from agl_core.types import Episode, Transition

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1, description="γ: what a reward is worth one call earlier.")]
_State: TypeAlias = tuple[str, bytes]
"""A policy and the token ids of a prompt."""


@credit_rule(kind=Need.RETURNS)
def identical(episodes: Sequence[Episode]) -> list[list[float]]:
    """Every transition gets the whole return: R_t = R plus all intermediate rewards (Agent Lightning, section 3.3).

    Conserves: the mean over an episode's transitions is its return.
    """
    return [[episode_return(episode)] * len(episode.transitions) for episode in episodes]


@credit_rule(kind={Need.REWARDS, Need.RETURNS})
def immediate(episodes: Sequence[Episode]) -> list[list[float]]:
    """Every transition gets its own reward, the last one the terminal reward too: r_t (Agent Lightning, section 3.1).

    To an algorithm that owns the time axis (GAE across calls, say) these are rewards, which it adds up itself. To one
    that takes returns they are myopic returns, `discounted` with γ = 0: what a step led to is not in them.

    Conserves: the sum over an episode's transitions is its return.
    """
    return [discounted_returns(episode, gamma=0.0) for episode in episodes]


@credit_rule(kind=Need.RETURNS)
def discounted(episodes: Sequence[Episode], *, gamma: Discount = 0.9) -> list[list[float]]:
    """Later rewards count less the later they come: G_t = Σ_k γ^k · r_{t+k} (Sutton and Barto 2018, equation 3.8).

    Rewards 0.3, 0.2 and 1.0 give, with γ = 0.9, the returns 1.29, 1.10 and 1.00.

    Conserves: G_t − γ · G_{t+1} = r_t, so every reward can be read off again; with γ = 1 the first transition's value
    is the episode's return.
    """
    return [discounted_returns(episode, gamma) for episode in episodes]


@credit_rule(kind=Need.RETURNS, needs={Need.GROUPS, Need.TOKEN_IDS})
def stepwise(episodes: Sequence[Episode], *, gamma: Discount = 1.0) -> list[list[float]]:
    """Where rollouts of a group meet in one state, each is judged against the others there (GiGPO, arXiv 2505.10978).

    A state s is a token-identical prompt of one policy. If at least two rollouts of the group met it,

        R_t = b + (G_t − mean over those rollouts of G at s)        b = the group's mean return

    and R_t = R, the rollout's return, where a state was met by one rollout only. In GiGPO the term in brackets is an
    advantage of its own; here b puts it on the scale of returns, beside R of the other transitions, whose advantage
    is R − b. So an algorithm that subtracts the group's mean is left with both, up to one constant per group (that
    mean is b where rollouts meet in all states or in none), and one with a critic or no baseline sees returns.

    A rollout that met s several times counts once, with the mean of its visits.

    Conserves: at every shared state the mean over its rollouts is b: having come to a good or bad state is no merit
    of what is done there. Where all rollouts meet (the first call of a task) and γ = 1, the values are the returns
    themselves; without a shared state the rule is `identical`.
    """
    if not episodes:
        return []
    returns = [discounted_returns(episode, gamma) for episode in episodes]
    visits: dict[_State, dict[int, list[float]]] = {}
    for i, episode in enumerate(episodes):
        for transition, value in zip(episode.transitions, returns[i], strict=True):
            state = _state(transition)
            if state is not None:
                visits.setdefault(state, {}).setdefault(i, []).append(value)
    # `statistics.mean` is exact: equal returns must not differ in the last bit after a baseline is moved.
    baseline = mean(episode_return(episode) for episode in episodes)
    shift: dict[_State | None, float] = {
        state: baseline - mean(mean(values) for values in by_rollout.values())
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


def episode_return(episode: Episode) -> float:
    """The undiscounted return: the terminal reward plus every intermediate one."""
    return _terminal(episode) + sum(t.reward for t in episode.transitions)


def discounted_returns(episode: Episode, gamma: float) -> list[float]:
    """G_t of every transition; the terminal reward comes with the last call."""
    values: list[float] = []
    after = _terminal(episode)
    for _, choices in groupby(reversed(episode.transitions), key=lambda t: t.turn):
        rewards = [choice.reward for choice in choices]
        values += [reward + after for reward in rewards]
        after = gamma * (sum(rewards) + after)
    return values[::-1]


def credit_group(rule: CreditRule, name: str, episodes: Sequence[Episode]) -> list[list[float]]:
    """The credited values of one group, checked: one for each transition. PluginError names a rule that fails."""
    try:
        values = rule(episodes)
    except Exception as error:
        group = episodes[0].group if episodes else "without episodes"
        raise PluginError(
            f"The credit rule '{name}' failed on group {group}: {type(error).__name__}: {error}. Mend the rule."
        ) from error
    expected = [len(episode.transitions) for episode in episodes]
    if [len(of_episode) for of_episode in values] != expected:
        raise PluginError(
            f"The credit rule '{name}' gave {[len(v) for v in values]} values for episodes of {expected} transitions. "
            f"It must return one value per transition, in order."
        )
    return values


def _terminal(episode: Episode) -> float:
    return episode.terminal or 0.0


def _state(transition: Transition) -> _State | None:
    if transition.prompt_ids is None:
        return None
    return transition.policy, np.asarray(transition.prompt_ids, np.int32).tobytes()
