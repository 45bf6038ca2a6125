"""The credit rules "identical", "immediate" and "discounted"; those that compare calls are a plugin's.

Each is a small pure function over a group of episodes; it says whether it yields returns or rewards (or what can be
read as either), and what it conserves. `agl_core.types.episodes` explains the symbols r_t, R and G_t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Field

from agl_core.decorators import credit_rule
from agl_core.types import CreditKind, Episode, discounted_returns, episode_return

Discount: TypeAlias = Annotated[float, Field(ge=0, le=1, description="γ: the worth of a reward one call earlier.")]


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
