"""Feedback on sessions: what users said, as a reward, and whether it contradicts itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from agl_core.decorators import reward_rule
from agl_core.protocols import RewardValue
from agl_core.types import Annotation, AttemptKey, Episode, Json, TransitionKey


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a user, or a system beside the agent, said of a session or of one of its calls."""

    session: str
    id: str
    """Unique in its session: feedback that is sent twice under one id is recorded once."""
    received: float
    """Unix seconds."""
    rewards: Mapping[str, float]
    """Numbers by name."""
    call: str | None = None
    """None: it is about the whole session."""
    correction: Json = None
    """What the answer should have been."""
    note: str | None = None

    @property
    def key(self) -> AttemptKey:
        """The session's only attempt."""
        return AttemptKey(self.session, 0)

    @property
    def annotation(self) -> Annotation:
        """It, as the store has it."""
        said = {"rewards": dict(self.rewards), "correction": self.correction, "note": self.note}
        return Annotation(*self.key, self.id, self.received, said, self.call)


def said_of(annotations: Iterable[Annotation]) -> list[Feedback]:
    """The feedback that these annotations are; others are left out."""
    found = []
    for annotation in annotations:
        said: Mapping[str, Any] = annotation.said
        if said.keys() == {"rewards", "correction", "note"}:
            found.append(Feedback(annotation.rollout, annotation.id, annotation.received, call=annotation.call, **said))
    return found


def said(feedback: Sequence[Feedback]) -> dict[str | None, dict[str, list[float]]]:
    """The numbers that were given, by call (None: the whole session) and name, the earliest first."""
    found: dict[str | None, dict[str, list[float]]] = {}
    for each in feedback:
        for name, value in each.rewards.items():
            found.setdefault(each.call, {}).setdefault(name, []).append(float(value))
    return found


def contradicts(feedback: Sequence[Feedback]) -> bool:
    """Whether a number changed more than once, or a reply got a thumbs up and a correction.

    To change one's mind once is no contradiction: the later number counts.
    """
    numbers = said(feedback)
    if any(
        sum(a != b for a, b in itertools.pairwise(values)) > 1
        for names in numbers.values()
        for values in names.values()
    ):
        return True
    corrected = {each.call for each in feedback if each.correction is not None}
    return any(numbers.get(call, {}).get("thumbs", [0.0])[-1] > 0 for call in corrected)


@reward_rule(name="feedback")
def users_said(
    episode: Episode,
    *,
    weights: Annotated[
        Mapping[str, NonNegativeFloat],
        Field(description="Weights by name (`thumbs`, `feedback`, or a part); other names weigh 1."),
    ] = {},
) -> RewardValue:
    """What users said about a session or a call: the weighted mean of their numbers. A missing one is not 0.

    Of a session it is the terminal reward, of a call the reward of that call.

    Of several names (`thumbs`, `feedback`, parts) it is the mean, weighted by `weights`, where a name that is not
    listed has the weight 1. What was not said does not count: without any number there is no reward. Where only a
    correction was given, the reply was wrong: 0.
    """
    feedback = said_of(episode.annotations)
    numbers = said(feedback)
    for each in feedback:
        if each.correction is not None and each.call not in numbers:
            numbers[each.call] = {"thumbs": [0.0]}
    found: list[tuple[str | None, float]] = []
    for call, names in numbers.items():
        heard = [(weights.get(name, 1.0), values[-1]) for name, values in names.items()]
        total = math.fsum(weight for weight, _ in heard)
        if total > 0:
            found.append((call, math.fsum(weight * value for weight, value in heard) / total))
    transitions = {t.key.call: t.key for t in reversed(episode.transitions)}
    given: dict[str | TransitionKey, float] = {}
    for call, value in found:
        if call is None or call in transitions:
            given["session" if call is None else transitions[call]] = value
    return given or None
