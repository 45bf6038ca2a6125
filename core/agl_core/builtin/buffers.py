"""The experience buffers "fifo", on-policy, and "prioritised", which trains on groups again (arXiv 1511.05952).

Prioritised experience replay (Schaul, Quan, Antonoglou and Silver, 2016, section 3), of groups instead of transitions:

    p_i = 1/G · Σ_m |R_m − mean R|        the priority of group i: how far apart its rollouts' returns R lie
    P(i) = p_i^α / Σ_k p_k^α              how often it is drawn, as a share of all that is drawn (equation 1)
    w_i = 1 / (N · P(i)) / max_k w_k      its weight in the loss (section 3.4, with β = 1)

over the N groups that could be drawn. The paper's priority is what a transition last taught, its temporal-difference
error; p_i is the mean size of the advantages that the members of a group have (GRPO's, not divided by their
deviation). It stands for the size of the group's gradient, and drawing in proportion to that is what makes the estimate
of the mean gradient least noisy (Alain et al. 2015, arXiv 1511.06481). A group whose returns are equal has nothing to
compare, and is not drawn. The paper gives new transitions the highest priority, so that each is seen once;
here an update gets every new group as "fifo" gives them, with weight 1, and the replays beside them.

Draws are with replacement: a group that is drawn twice has twice its weight. So the weighted sum over what was drawn
is, up to the constant max w, an unbiased estimate of the sum over all N.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from agl_core.kinds import Capability
from agl_core.learning.batch import staleness
from agl_core.protocols import DrawContext, DrawnGroup
from agl_core.types import Episode, are_equal, episode_return

_ALPHA = 0.6
"""How much the priority counts in what is drawn: the paper's value for proportional priorities."""
_CAPACITY = 256
"""Groups kept to be replayed; the oldest leave first. Staleness ends most of them before."""


class Fifo:
    """Groups in the order in which they were completed, each for one update.

    It is as on-policy as the run allows: with `async.max_staleness = 0` an update gets what the weights that it
    changes have sampled.
    """

    def __init__(self) -> None:
        self._groups: deque[Sequence[Episode]] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def pending(self) -> list[str]:
        return [group[0].group for group in self._groups]

    def add(self, group: Sequence[Episode]) -> None:
        self._groups.append(group)

    def draw(self, count: int, context: DrawContext) -> list[DrawnGroup] | None:
        """The first `count` groups, or None if there are fewer."""
        if len(self._groups) < count:
            return None
        return [DrawnGroup(self._groups.popleft()) for _ in range(count)]


class PrioritisedOptions(BaseModel):
    """Settings of prioritised replay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(
        1.0, gt=0, le=100, description="Groups replayed in an update for each new one, if there are enough."
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    episodes: Sequence[Episode]
    priority: float

    def too_old(self, context: DrawContext) -> bool:
        return any(staleness(episode, context.versions) > context.max_staleness for episode in self.episodes)


class Prioritised(Fifo):
    """Every new group once, in the order of completion; beside them those of earlier updates, by priority.

    A group can be replayed until an episode of it is older than `async.max_staleness`, or 256 groups
    came after it. What is drawn is a function of the run's seed, the step and the groups that it has.
    """

    def __init__(self, options: PrioritisedOptions) -> None:
        super().__init__()
        self._options = options
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        """How many groups wait to be trained on, or can be replayed."""
        return super().__len__() + len(self._kept)

    def draw(self, count: int, context: DrawContext) -> list[DrawnGroup] | None:
        """The first `count` new groups and up to `ratio · count` others, or None if there are fewer new ones."""
        new = super().draw(count, context)
        if new is None:
            return None
        replays = self._replays(math.ceil(self._options.ratio * count), context)
        # Not in the order of completion, which depends on time.
        by_name = sorted(new, key=lambda group: group.episodes[0].group)
        # Without dropped episodes: those were recorded the first time.
        usable = ([e for e in group.episodes if e.dropped is None and e.transitions] for group in by_name)
        kept = [_Kept(group, spread(group)) for group in usable if len(group) >= context.min_group_size]
        self._kept = [*self._kept, *kept][-_CAPACITY:]
        return [*new, *replays]

    def _replays(self, count: int, context: DrawContext) -> list[DrawnGroup]:
        self._kept = [group for group in self._kept if not group.too_old(context)]
        priorities = np.array([group.priority for group in self._kept]) ** _ALPHA
        if not priorities.any():
            return []
        shares = priorities / priorities.sum()
        draws = min(count, int(np.count_nonzero(shares)))
        times = np.random.default_rng([context.seed, context.step]).multinomial(draws, shares)
        least = shares[shares > 0].min()
        return [DrawnGroup(self._kept[i].episodes, float(times[i] * least / shares[i])) for i in np.flatnonzero(times)]


PRIORITISED_NEEDS = frozenset({Capability.REPLAY, Capability.GROUPS})
"""Old experience, corrected; and several rollouts of each task, whose returns make the priority."""


def spread(group: Sequence[Episode]) -> float:
    """p of the module's formulas: the mean absolute deviation of the returns; 0 if that is not finite."""
    returns = [episode_return(episode) for episode in group]
    if are_equal(returns):
        return 0.0
    middle = mean(returns)
    deviation = mean(abs(value - middle) for value in returns)
    return deviation if math.isfinite(deviation) else 0.0
