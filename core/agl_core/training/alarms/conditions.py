"""Conditions on the numbers of the steps so far: each says what it saw, or nothing, and describes itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol, TypeAlias

Numbers: TypeAlias = Mapping[str, float]
"""The metrics of one training step (docs/metrics.md)."""
Steps: TypeAlias = Sequence[Numbers]
"""Those of the steps so far, the latest last."""

FIRST = 5
"""The steps at the start of a run that later ones are compared with."""


@dataclass(frozen=True)
class Measure:
    """A number of a step that a condition looks at."""

    words: str
    """With `{}` where the value stands."""
    key: str
    """The metric, or several that are added up."""
    per: Sequence[str] = ()
    """Metrics whose product it is divided by; without any it is taken as it is."""
    plus: Sequence[str] = ()
    """Metrics that are added to the divisor."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.per, *self.plus)

    def of(self, numbers: Numbers) -> float | None:
        """Its value in a step; None if it has none. An absent count is 0 if there is what to divide by."""
        if not self.per:
            return numbers.get(self.key)
        if any(key not in numbers for key in self.per):
            return None
        divisor = math.prod(numbers[key] for key in self.per) + sum(numbers.get(key, 0.0) for key in self.plus)
        return numbers.get(self.key, 0.0) / divisor if divisor else None

    def last(self, steps: Steps, count: int) -> list[float] | None:
        """The values of the last steps; None unless all of them have one."""
        values = [self.of(each) for each in steps[-count:]]
        known = [value for value in values if value is not None]
        return known if len(known) == count == len(values) else None

    def first(self, steps: Steps) -> float | None:
        """The mean over the first steps that have a value; None if there are no later ones."""
        known = [value for each in steps if (value := self.of(each)) is not None]
        return fmean(known[:FIRST]) if len(known) > FIRST else None


class Condition(Protocol):
    """When an alarm is raised."""

    @property
    def limit(self) -> float:
        """The threshold, unless the run has one of its own."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The metrics that it reads."""

    @property
    def words(self) -> str:
        """When it holds, with `{}` where the threshold stands."""

    def seen(self, steps: Steps, limit: float) -> str | None:
        """What was seen, if the condition holds after the latest of these steps."""


@dataclass(frozen=True)
class Above:
    """The mean over the last steps is at least the limit; `rise`: and this much more than in the first steps."""

    measure: Measure
    limit: float
    over: int = 3
    rise: float | None = None
    reduce: Callable[[Sequence[float]], float] = fmean

    @property
    def keys(self) -> tuple[str, ...]:
        return self.measure.keys

    @property
    def words(self) -> str:
        kind = "median" if self.reduce is median else "mean"
        rise = "" if self.rise is None else f", and {self.rise:g} more than in the first {FIRST} steps"
        return f"{self.measure.words.replace('{}', '≥ {}')}: {kind} of {self.over} steps{rise}"

    def seen(self, steps: Steps, limit: float) -> str | None:
        values = self.measure.last(steps, self.over)
        if values is None or (value := self.reduce(values)) < limit:
            return None
        said = f"{self.measure.words.format(f'{value:.3g}')} over the last {self.over} steps"
        if self.rise is None:
            return said
        first = self.measure.first(steps)
        return None if first is None or value < first + self.rise else f"{said}, and {first:.3g} in the first {FIRST}"


@dataclass(frozen=True)
class Collapsed:
    """The mean reward of the last steps lost so large a part of what the best steps had; noise does not count."""

    limit: float
    over: int = 3
    keys: tuple[str, ...] = ("reward/mean", "reward/std", "rollouts")

    @property
    def words(self) -> str:
        return (
            f"the mean reward of {self.over} steps is below that of the best {self.over} by {{}} of what the best are "
            f"above the worst step (or above 0), and by 4 standard errors"
        )

    def seen(self, steps: Steps, limit: float) -> str | None:
        found = [each for each in steps if "reward/mean" in each]
        if len(found) < 2 * self.over:
            return None
        rewards = [each["reward/mean"] for each in found]
        windows = [fmean(rewards[i : i + self.over]) for i in range(len(rewards) - self.over + 1)]
        best, last = max(windows), windows[-1]
        place = windows.index(best)
        variance = fmean(
            [
                each.get("reward/std", 0.0) ** 2 / max(each.get("rollouts", 1.0), 1.0)
                for each in found[place : place + self.over]
            ]
        )
        noise = 4 * math.sqrt(variance / self.over)
        if best - last < max(limit * (best - min(0.0, *rewards)), noise) or best == last:
            return None
        return f"the mean reward fell from {best:.3g} to {last:.3g}, each over {self.over} steps"


@dataclass(frozen=True)
class CertainWithoutLearning:
    """The entropy fell below this share of what it was in the first steps, and the reward is no higher."""

    limit: float
    over: int = 5
    keys: tuple[str, ...] = ("update/entropy", "reward/mean")

    @property
    def words(self) -> str:
        return (
            f"the entropy of {self.over} steps is below {{}} of that of the first {FIRST}, and the mean reward is no "
            f"higher"
        )

    def seen(self, steps: Steps, limit: float) -> str | None:
        entropy, reward = Measure("", "update/entropy"), Measure("", "reward/mean")
        before, now = entropy.first(steps), entropy.last(steps, self.over)
        if before is None or now is None or fmean(now) >= limit * before:
            return None
        rewards, first = reward.last(steps, self.over), reward.first(steps)
        if rewards is None or first is None or fmean(rewards) > first:
            return None
        return f"the entropy fell from {before:.3g} to {fmean(now):.3g} nats per token, and the reward did not rise"


@dataclass(frozen=True)
class Exploded:
    """The entropy is so many times what it was in the first steps, and above `least` nats."""

    limit: float
    least: float
    over: int = 3
    keys: tuple[str, ...] = ("update/entropy",)

    @property
    def words(self) -> str:
        return f"the entropy of {self.over} steps is {{}} times that of the first {FIRST}, and above {self.least:g}"

    def seen(self, steps: Steps, limit: float) -> str | None:
        entropy = Measure("", "update/entropy")
        before, now = entropy.first(steps), entropy.last(steps, self.over)
        if before is None or now is None or fmean(now) < max(limit * before, self.least):
            return None
        return f"the entropy rose from {before:.3g} to {fmean(now):.3g} nats per token"


@dataclass(frozen=True)
class Spiked:
    """The latest value is so many times the median of the values before it, and above `least`."""

    measure: Measure
    limit: float
    least: float
    over: int = 10

    @property
    def keys(self) -> tuple[str, ...]:
        return self.measure.keys

    @property
    def words(self) -> str:
        return (
            f"{self.measure.words.replace('{}', '≥ {}')} times the median of the {self.over} steps before, and above "
            f"{self.least:g}"
        )

    def seen(self, steps: Steps, limit: float) -> str | None:
        now = self.measure.of(steps[-1]) if steps else None
        before = [value for each in steps[:-1] if (value := self.measure.of(each)) is not None][-self.over :]
        if now is None or len(before) < FIRST or now < max(limit * median(before), self.least):
            return None
        return f"{self.measure.words.format(f'{now:.3g}')}; the median of the steps before is {median(before):.3g}"
