"""The interface of an algorithm: LightningRL's second level, as pure functions over tensors.

Tensors are flat (ragged data without pads). Axis suffixes: _N transitions, _R response tokens of all transitions, one
after the other. An engine with padded rows first selects tokens by mask, so both engines run the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """What advantages are computed from. All tensors share one device."""

    transition_R: Tensor
    """[R] int64: the transition that each response token belongs to, 0 … N-1, ascending."""
    mask_R: Tensor
    """[R] bool: True where a token takes part in the loss."""
    behaviour_R: Tensor
    """[R] log-probabilities as recorded when the tokens were sampled; NaN where they are not known."""
    values_N: Tensor
    """[N] credited values (rewards or returns)."""
    scores_N: Tensor
    """[N] the terminal reward of each transition's rollout."""
    group_N: Tensor
    """[N] int64: 0 … groups-1."""
    rollout_N: Tensor
    """[N] int64: 0 … rollouts-1, unique over groups."""
    turn_N: Tensor
    """[N] int64: the transition's place in its episode."""

    def __len__(self) -> int:
        """N."""
        return self.values_N.numel()

    def sums(self, values_R: Tensor) -> Tensor:
        """[N] float64 sums of `values_R` over each transition's response tokens."""
        totals = torch.zeros(len(self), dtype=torch.float64, device=values_R.device)
        return totals.index_add(0, self.transition_R, values_R.to(torch.float64))

    def at_tokens(self, values_N: Tensor) -> Tensor:
        """[R] each transition's value at its unmasked tokens, 0 at masked ones."""
        return (values_N[self.transition_R] * self.mask_R).to(self.behaviour_R.dtype)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log-probabilities that a loss compares, each [R]."""

    current_R: Tensor
    """Under the weights being trained; carries the gradient."""
    old_R: Tensor
    """Recomputed at the start of the update."""
    behaviour_R: Tensor
    """As recorded when sampled; the same as `old_R` where that is not known."""
    reference_R: Tensor | None = None
    """Under the initial weights; None unless the algorithm needs a reference."""


class Algorithm(Protocol):
    """One algorithm with its options; holds no state between updates."""

    epochs: int
    """Passes over the batch in one update."""
    minibatches: int
    """Optimizer steps in one pass."""
    needs_reference: bool
    needs_critic: bool
    """True: the algorithm is a `CriticAlgorithm`."""

    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] advantages; `values_R` are the critic's, if it has one."""

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: False for transitions that need not be computed (zero advantage, no KL)."""

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights of the loss over the whole batch, before corrections (`Batch.weight_N`); 0 where masked."""

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens and its metrics (each a sum over tokens of weight × value).

        Sums, not means: the losses of micro-batches add up to the loss of the whole. A metric whose name ends
        in `_max` is the largest value over tokens instead.
        """


class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm whose advantages come from a critic, which the engine holds and trains.

    Values are aligned with response tokens: a token has the value of the state before it, so the first value of a
    response is that of its prompt.
    """

    critic_learning_rate: float
    critic_epochs: int
    """The critic's passes over the batch in one update, each of `minibatches` optimizer steps."""

    def value_targets(self, samples: Samples, values_R: Tensor) -> Tensor:
        """[R] targets of the values that have a weight; `values_R` are the values before the update."""

    def value_weights(self, samples: Samples) -> Tensor:
        """[R] weights of the value loss over the whole batch, also before corrections."""

    def value_loss(
        self, current_R: Tensor, old_R: Tensor, targets_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum over tokens and its metrics, as in `loss`; `old_R` are the values before the update."""
