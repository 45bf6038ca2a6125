"""The components of this package: the tables `[online]` and `[learn]`, and the reward rule `feedback`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from agl_core import hookimpl
from agl_core.decorators import reward_rule
from agl_core.kinds import CONFIG_TABLE, Register
from agl_core.protocols import RewardValue
from agl_core.types import Episode, TransitionKey


@hookimpl
def register_components(register: Register) -> None:
    from agl_online.config import LearnSection, OnlineSection

    register(CONFIG_TABLE, "online", lambda options: options, options=OnlineSection, doc=OnlineSection.__doc__)
    register(CONFIG_TABLE, "learn", lambda options: options, options=LearnSection, doc=LearnSection.__doc__)


@reward_rule(name="feedback")
def users_said(
    episode: Episode,
    *,
    weights: Annotated[
        Mapping[str, NonNegativeFloat],
        Field(description="Weights by name, for instance `thumbs`; other names weigh 1."),
    ] = {},
) -> RewardValue:
    """The weighted mean of users' numbers on a session or a call. A missing number is not 0: it does not count.

    Session feedback becomes the terminal reward; call feedback becomes that call's reward. The latest number of each
    name counts, with its weight in `weights`, else 1. Without any number there is no reward.
    """
    latest: dict[str | None, dict[str, float]] = {}
    for annotation in episode.annotations:
        latest.setdefault(annotation.call, {}).update(annotation.said.get("rewards", {}))
    keys: dict[str | None, str | TransitionKey] = {t.key.call: t.key for t in reversed(episode.transitions)}
    keys[None] = "session"
    given: dict[str | TransitionKey, float] = {}
    for call, rewards in latest.items():
        total = math.fsum(weights.get(name, 1.0) for name in rewards)
        if total > 0 and call in keys:
            given[keys[call]] = math.fsum(weights.get(name, 1.0) * value for name, value in rewards.items()) / total
    return given or None
