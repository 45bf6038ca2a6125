"""The reward rule "feedback"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from agl_core.decorators import reward_rule
from agl_core.learning.feedback import users_said
from agl_core.protocols import RewardValue
from agl_core.types import Episode


@reward_rule
def feedback(
    episode: Episode,
    *,
    weights: Annotated[
        Mapping[str, NonNegativeFloat],
        Field(description="Weights by name (`thumbs`, `feedback`, or a part); other names weigh 1."),
    ] = {},
) -> RewardValue:
    """What users said about a session or a call: the weighted mean of their numbers. A missing one is not 0."""
    return users_said(episode, weights=weights)
