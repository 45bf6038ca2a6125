"""Applying a credit rule: LightningRL's first level, how a group's rewards are shared among its transitions."""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.errors import PluginError
from agl_core.protocols import CreditRule
from agl_core.types import Episode


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
