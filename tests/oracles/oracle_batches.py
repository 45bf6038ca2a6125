"""Random ragged batches, and the two layouts of one batch: agl's flat tensors and the oracles' padded rows.

Axis suffixes as in `agl_algorithms`: _N transitions, _R response tokens; _NL is a padded row for each transition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

REWARDS = (-1.0, -0.5, 0.0, 0.25, 1.0, 2.0)
"""Exact in float32, which TRL keeps rewards in."""


@dataclass(frozen=True)
class Transition:
    """One transition with all that an advantage or a loss can need; what is per token has one length."""

    group: int
    rollout: int
    turn: int
    value: float
    """Credited."""
    mask: tuple[bool, ...]
    current: tuple[float, ...]
    """Log-probabilities, like the next three."""
    old: tuple[float, ...]
    behaviour: tuple[float, ...]
    reference: tuple[float, ...]
    values: tuple[float, ...]
    """The critic's before the update."""
    new_values: tuple[float, ...]
    targets: tuple[float, ...]
    """For the critic."""
    advantages: tuple[float, ...]
    """For a loss that is compared on its own."""


@dataclass(frozen=True)
class Batch:
    """Transitions in the order of groups, rollouts and turns."""

    transitions: tuple[Transition, ...]

    def flat(self, name: str) -> Tensor:
        """[R] the field `name` of all tokens, float64."""
        return torch.tensor([float(x) for row in self.transitions for x in getattr(row, name)], dtype=torch.float64)

    def of_each(self, name: str) -> list[float]:
        """The field `name` of each transition."""
        return [getattr(row, name) for row in self.transitions]

    def padded(self, name: str) -> Tensor:
        """[N, L] the field `name`, float64, 0 in the pads."""
        rows = [torch.tensor([float(x) for x in getattr(row, name)]).double() for row in self.transitions]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def unpadded(self, rows_NL: Tensor) -> Tensor:
        """[R] the tokens of padded rows."""
        return torch.cat([row[: len(own.mask)] for row, own in zip(rows_NL, self.transitions, strict=True)])

    def spread(self, of_N: Tensor) -> Tensor:
        """[R] one number of each transition at each of its unmasked tokens."""
        return self.unpadded(of_N[:, None] * self.padded("mask"))

    def named(self) -> dict[str, list[float]]:
        """Two rewards of each transition, by name."""
        values = self.of_each("value")
        return {"right": values, "form": [float(i % 3 == 0) for i in range(len(values))]}

    def where(self, chosen: Callable[[Transition], bool]) -> list[int]:
        """Which transitions are chosen."""
        return [i for i, row in enumerate(self.transitions) if chosen(row)]

    def only(self, rows: Sequence[int]) -> Batch:
        """Some of the transitions."""
        return Batch(tuple(self.transitions[i] for i in rows))


@dataclass(frozen=True)
class Kind:
    """The shape of a kind of random batch; a number is drawn between the two of a pair, both included."""

    groups: int = 3
    members: tuple[int, int] = (2, 4)
    """Rollouts of a group."""
    calls: tuple[int, int] = (1, 1)
    """Transitions of a rollout."""
    own_rewards: bool = False
    """Each call has a value of its own, instead of that of its rollout."""
    alike: bool = True
    """The first group's values are all equal."""
    spread: float = 0.3
    """Standard deviation of log-ratios."""
    special: str = ""
    """'lone': the last group has one rollout; 'hollow': the last response is masked whole; 'far': one token's ratio is
    above 3 at a negative advantage, another's is so low that its KL to the reference is above 10; 'impossible': one
    token's log-ratio is 25."""


KINDS = {
    "single": Kind(),
    "uniform": Kind(members=(4, 4)),
    "episodes": Kind(calls=(1, 3)),
    "hollow-episodes": Kind(calls=(1, 3), special="hollow"),
    "rewards": Kind(calls=(1, 4), own_rewards=True, alike=False),
    "lone": Kind(special="lone"),
    "hollow": Kind(members=(4, 4), special="hollow"),
    "far": Kind(special="far"),
    "impossible": Kind(members=(4, 4), special="impossible"),
}


def draw(kind: str, seed: int) -> Batch:
    """A batch of that kind, the same for the same seed on every machine."""
    return Batch(tuple(_specialised(list(_transitions(KINDS[kind], random.Random(seed))), KINDS[kind].special)))


def _transitions(kind: Kind, rng: random.Random) -> list[Transition]:
    rows: list[Transition] = []
    for group in range(kind.groups):
        lone = kind.special == "lone" and group == kind.groups - 1
        members = 1 if lone else rng.randint(*kind.members)
        scores = rng.sample(REWARDS, members)
        if lone or (kind.alike and group == 0):
            scores = [0.25] * members
        for score in scores:
            rollout = rows[-1].rollout + 1 if rows else 0
            for turn in range(rng.randint(*kind.calls)):
                value = rng.choice(REWARDS) if kind.own_rewards else score
                rows.append(_transition(group, rollout, turn, value, kind.spread, rng))
    return rows


def _transition(group: int, rollout: int, turn: int, value: float, spread: float, rng: random.Random) -> Transition:
    length = rng.randint(1, 6)
    mask = [rng.random() < 0.8 for _ in range(length)]
    mask[rng.randrange(length)] = True
    old = [-0.2 - abs(rng.gauss(0, 1)) for _ in range(length)]

    def beside(numbers: list[float], deviation: float) -> tuple[float, ...]:
        return tuple(number + rng.gauss(0, deviation) for number in numbers)

    values = [rng.gauss(0, 1) for _ in range(length)]
    return Transition(
        group=group,
        rollout=rollout,
        turn=turn,
        value=value,
        mask=tuple(mask),
        current=beside(old, spread),
        old=tuple(old),
        behaviour=beside(old, spread),
        reference=beside(old, spread),
        values=tuple(values),
        new_values=beside(values, 0.3),
        targets=beside(values, 1.0),
        advantages=beside([0.0] * length, 1.0),
    )


def _specialised(rows: list[Transition], special: str) -> list[Transition]:
    first, last = rows[0], rows[-1]
    everything, length = (True,) * len(last.mask), len(last.mask)
    if special == "hollow":
        rows[-1] = replace(last, mask=(False,) * length)
    elif special == "far":
        rows[-1] = replace(
            last,
            mask=everything,
            current=(last.old[0] + math.log(5), *last.current[1:]),
            advantages=(-1.5, *last.advantages[1:]),
        )
        low = replace(first, mask=(True,) * len(first.mask), current=(first.reference[0] - 4, *first.current[1:]))
        rows[0] = replace(low, old=(low.current[0] + 0.1, *low.old[1:]))
    elif special == "impossible":
        # The worst of its group has a negative advantage, so that the ratio is not clipped.
        worst = min(range(len(rows) - 4, len(rows)), key=lambda i: rows[i].value)
        row = rows[worst]
        rows[worst] = replace(
            row,
            mask=(True,) * len(row.mask),
            current=(row.old[0] + 25, *row.current[1:]),
            advantages=(-1.0, *row.advantages[1:]),
        )
    return rows
