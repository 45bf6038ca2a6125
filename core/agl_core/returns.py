"""The return of an episode and of each of its transitions, which credit rules build on. In their formulas

    r_t   the intermediate rewards of transition t; the terminal reward is added at the last call
    R     the episode's return: the terminal reward and every r_t, undiscounted
    G_t   what came from t on: r_t + γ · G_{t+1}

Time is counted in calls, trained or not. The choices of one call (`n` > 1) are parallel: no choice is in another's
future, what comes after the call comes after each of them, and each choice of the last call has the terminal reward. To
the calls before it and to R, a call is worth the mean over its choices, so more choices do not earn more. What a rule
conserves is stated for calls with one choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from agl_core.types import Episode, Transition

EQUAL_WITHIN = 1e-9
"""Values are equal if they differ by no more than this share of the largest: 0.3 and 0.1 + 0.2 are one reward."""
ALMOST_ZERO = 1e-13
"""They may also differ by this: 0.1 + 0.2 - 0.3 and 0 are one reward, and differ by all that the largest is."""


def rounding(largest: Any) -> Any:
    """How much equal values may differ, of which the largest is this far from 0; floats, or tensors."""
    return largest * EQUAL_WITHIN + ALMOST_ZERO


def are_equal(values: Iterable[float]) -> bool:
    """True if all are equal but for rounding, so that a comparison has nothing to learn from.

    >>> are_equal([0.3, 0.1 + 0.2]), are_equal([0.3, 0.3001]), are_equal([0.1 + 0.2 - 0.3, 0]), are_equal([])
    (True, False, True, True)
    """
    listed = list(values)
    return not listed or max(listed) - min(listed) <= rounding(max(map(abs, listed)))


def episode_return(episode: Episode) -> float:
    """The undiscounted return: the terminal reward plus what every call earned, the mean over its choices."""
    return _terminal(episode) + sum(_mean_reward(choices) for _, choices in groupby(episode.transitions, key=_turn))


def discounted_returns(episode: Episode, gamma: float) -> list[float]:
    """G_t = r_t + γ · G_{t+1} of every transition, with G_{t+1} the mean over the next call's choices.

    Each choice of the last call has the terminal reward.
    """
    values: list[float] = []
    after = _terminal(episode)
    for _, same_call in groupby(reversed(episode.transitions), key=_turn):
        choices = list(same_call)
        values += [choice.reward + after for choice in choices]
        after = gamma * (_mean_reward(choices) + after)
    return values[::-1]


def _turn(transition: Transition) -> int:
    return transition.turn


def _mean_reward(choices: Iterable[Transition]) -> float:
    rewards = [choice.reward for choice in choices]
    return sum(rewards) / len(rewards)


def _terminal(episode: Episode) -> float:
    return episode.terminal or 0.0
