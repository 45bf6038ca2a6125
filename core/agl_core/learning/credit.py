"""LightningRL's first level: how an episode's rewards are shared among its transitions.

Each rule is a small pure function over a group of episodes; it says whether it yields returns or rewards, and what
it conserves.
"""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.errors import PluginError
from agl_core.plugins import Need
from agl_core.protocols import CreditRule
from agl_core.rules import credit_rule
from agl_core.types import Episode


@credit_rule(kind=Need.RETURNS)
def identical(episodes: Sequence[Episode]) -> list[list[float]]:
    """Every transition gets the whole return: R_t = R plus all intermediate rewards (Agent Lightning, section 3.3).

    Conserves: the mean over an episode's transitions is its return.
    """
    return [[episode_return(episode)] * len(episode.transitions) for episode in episodes]


def episode_return(episode: Episode) -> float:
    """The undiscounted return: the terminal reward plus every intermediate one."""
    return (episode.terminal or 0.0) + sum(t.reward for t in episode.transitions)


def credit_group(rule: CreditRule, name: str, episodes: Sequence[Episode]) -> list[list[float]]:
    """The credited values of one group, checked: one for each transition."""
    values = rule(episodes)
    expected = [len(episode.transitions) for episode in episodes]
    if [len(of_episode) for of_episode in values] != expected:
        raise PluginError(
            f"The credit rule '{name}' gave {[len(v) for v in values]} values for episodes of {expected} transitions. "
            f"It must return one value per transition, in order."
        )
    return values
