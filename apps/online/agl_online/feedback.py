"""Feedback on sessions: what users said, and the reward that it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from agl_core.decorators import reward_rule
from agl_core.protocols import RewardValue
from agl_core.types import Annotation, AttemptKey, Episode, TransitionKey


@dataclass(frozen=True, slots=True)
class Feedback:
    """A judgement by a user, or by a system beside the agent, on a session or one of its calls."""

    session: str
    id: str
    """Unique in its session: feedback that is sent twice under one id is recorded once."""
    received: float
    """Unix seconds."""
    rewards: Mapping[str, float]
    """Numbers by name."""
    call: str | None = None
    """None: it is about the whole session."""
    note: str | None = None

    @property
    def annotation(self) -> Annotation:
        """It, as the store has it, with the session's only attempt."""
        content = {"rewards": dict(self.rewards), "note": self.note}
        return Annotation(*AttemptKey(self.session, 0), self.id, self.received, content, self.call)


def said_of(annotations: Iterable[Annotation]) -> list[Feedback]:
    """The feedback that these annotations are; others are left out."""
    feedback = []
    for annotation in annotations:
        said: Mapping[str, Any] = annotation.said
        if said.keys() == {"rewards", "note"}:
            key = annotation.rollout, annotation.id, annotation.received
            feedback.append(Feedback(*key, call=annotation.call, **said))
    return feedback


@reward_rule(name="feedback")
def users_said(
    episode: Episode,
    *,
    weights: Annotated[
        Mapping[str, NonNegativeFloat],
        Field(description="Weights by name, for instance `thumbs`; other names weigh 1."),
    ] = {},
) -> RewardValue:
    """The reward by users of a session or a call: the weighted mean of their numbers. A missing one is not 0.

    Of a session it is the terminal reward, of a call the reward of that call.

    Of several names it is the mean, weighted by `weights`, where a name that is not listed has the weight 1; of each
    name the latest number counts. What was not said does not count: without any number there is no reward.
    """
    latest: dict[str | None, dict[str, float]] = {}
    for feedback in said_of(episode.annotations):
        latest.setdefault(feedback.call, {}).update(feedback.rewards)
    keys: dict[str | None, str | TransitionKey] = {t.key.call: t.key for t in reversed(episode.transitions)}
    keys[None] = "session"
    given: dict[str | TransitionKey, float] = {}
    for call, rewards in latest.items():
        total = math.fsum(weights.get(name, 1.0) for name in rewards)
        if total > 0 and call in keys:
            given[keys[call]] = math.fsum(weights.get(name, 1.0) * value for name, value in rewards.items()) / total
    return given or None
