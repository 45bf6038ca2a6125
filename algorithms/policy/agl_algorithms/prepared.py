"""The data of one update: the usable part of a batch, its advantages and weights, and what was dropped.

Here an algorithm sees the whole batch, once, so that statistics over rollouts and groups are right however an engine
splits the batch afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_algorithms.policy_gradient import Algorithm, Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_core.errors import PluginError
from agl_core.learning.batch import TrainableBatch
from agl_core.protocols import UpdateResult
from agl_core.types import Batch, CreditKind, DropReason

Chain: TypeAlias = NDArray[np.int64]
"""Transitions that continue each other, of which one row of tokens has all."""


@dataclass(frozen=True, slots=True)
class ValueTraining:
    """The training data of a critic."""

    values_R: Tensor
    """Before the update."""
    targets_R: Tensor
    weights_R: Tensor
    """Before corrections; 0 at every token of a transition that is not trained on."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The M usable of N transitions; batch, samples and tensors are over these M."""

    batch: Batch
    samples: Samples
    advantages_R: Tensor
    weights_R: Tensor
    """The algorithm's token weights, before corrections; 0 at every token that is not trained on."""
    usable: NDArray[np.int64]
    """[M] their places among the N."""
    trained: NDArray[np.int64]
    """The places among the M of the transitions in the loss."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not trained on."""
    value: ValueTraining | None = None
    """None without a critic."""

    @classmethod
    def of_nothing(cls, usable: TrainableBatch, samples: Samples) -> PreparedBatch:
        """No transition is trained on."""
        nothing = torch.zeros_like(samples.behaviour_R)
        return cls(usable.batch, samples, nothing, nothing, usable.places, np.zeros(0, dtype=np.int64), usable.dropped)

    def without(self, broken: NDArray[np.int64]) -> PreparedBatch:
        """The same, with these of the M transitions dropped as not finite."""
        dropped = list(self.dropped)
        for i in self.usable[broken]:
            dropped[i] = DropReason.NON_FINITE
        broken_R = torch.isin(self.samples.transition_R, torch.from_numpy(broken).to(self.weights_R.device))
        weights_R = self.weights_R.masked_fill(broken_R, 0.0)
        trained = np.setdiff1d(self.trained, broken)
        return replace(self, weights_R=weights_R, trained=trained, dropped=tuple(dropped))

    def rescored(self, algorithm: Algorithm, logprobs: Logprobs) -> tuple[PreparedBatch, dict[str, float]]:
        """The same with the advantages of `Algorithm.rescore`, without those that are not finite; and its metrics."""
        advantages_R, measured = algorithm.rescore(self.samples, logprobs, self.advantages_R, self.weights_R)
        broken_M = self.samples.sums(~torch.isfinite(advantages_R) & (self.weights_R > 0)) > 0
        rescored = replace(self, advantages_R=torch.where(torch.isfinite(advantages_R), advantages_R, 0.0))
        metrics = {name: float(value) for name, value in measured.items()}
        return rescored.without(np.flatnonzero(broken_M.cpu().numpy()).astype(np.int64)), metrics

    def corrected(self, weights_R: Tensor) -> Tensor:
        """[R] weights of the policy's or the value loss, multiplied by each transition's correction."""
        return self._scaled(weights_R, _corrections(self.batch, weights_R))

    def step_weights(self, weights_R: Tensor, steps: Sequence[NDArray[np.int64]]) -> Tensor:
        """[R] token weights in optimizer steps, each given by its transitions; 0 elsewhere.

        Before corrections a step weighs as much as the whole batch; these are multiplied in afterwards.
        """
        weight_M = self.samples.sums(weights_R)
        factor_M = torch.zeros_like(weight_M)
        for chosen in map(torch.from_numpy, steps):
            share = weight_M[chosen].sum() / weight_M.sum()
            factor_M[chosen] = torch.where(share > 0, 1 / share, 0.0)
        return self._scaled(weights_R, factor_M * _corrections(self.batch, weights_R))

    def result(
        self, version: int, metrics: Mapping[str, float], old_R: Tensor | None = None, precision: str = "float32"
    ) -> UpdateResult:
        """The result for all N transitions; `old_R` are training's log-probabilities before the update."""
        logprobs_N: list[NDArray[np.float32] | None] = [None] * len(self.dropped)
        if old_R is not None:
            # A log-probability that is missing or not finite is as far from the sampled one as can be.
            known_R = torch.where(torch.isfinite(old_R), old_R, -torch.inf)
            shown_R = known_R.masked_fill(self.weights_R <= 0, torch.nan).cpu().to(torch.float32).numpy()
            for i, place in zip(self.trained, self.usable[self.trained], strict=True):
                start, end = self.batch.response_offsets[i : i + 2]
                logprobs_N[place] = shown_R[start:end].copy()  # A view would be pickled with the whole array.
        advantage_N, weight_N = np.zeros(len(self.dropped)), np.zeros(len(self.dropped))
        advantage_N[self.usable] = self._advantage_M()
        weight_N[self.usable] = self.samples.sums(self.corrected(self.weights_R)).cpu().numpy()
        return UpdateResult(version, metrics, advantage_N, weight_N, self.dropped, logprobs_N, precision)

    def loss(
        self,
        algorithm: Algorithm,
        tokens_R: Tensor,
        weights_r: Tensor,
        current_r: Tensor,
        old_R: Tensor,
        reference_R: Tensor | None,
        entropy_r: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`Algorithm.loss` of the [r] tokens that `tokens_R` picks; behaviour that is not known counts as old."""
        samples, old_r, behaviour_r = self.samples, old_R[tokens_R], self.samples.behaviour_R[tokens_R]
        transition_r, mask_r = samples.transition_R[tokens_R], samples.mask_R[tokens_R]
        part = replace(samples, transition_R=transition_r, mask_R=mask_r, behaviour_R=behaviour_r)
        known_r = torch.where(behaviour_r.isnan(), old_r, behaviour_r)
        reference_r = None if reference_R is None else reference_R[tokens_R]
        logprobs = Logprobs(current_r, old_r, known_r, reference_r, entropy_r)
        return algorithm.loss(part, logprobs, self.advantages_R[tokens_R], weights_r)

    def metrics(self) -> dict[str, float]:
        """The metrics that do not come from optimizer steps."""
        advantage = self._advantage_M()[self.trained]
        return {
            "advantage_mean": float(advantage.mean()) if len(advantage) else 0.0,
            "advantage_std": float(advantage.std()) if len(advantage) else 0.0,
            "advantage_abs_max": float(np.abs(advantage).max(initial=0.0)),
            "tokens_trained": float((self.weights_R > 0).sum()),
            "transitions_trained": float(len(self.trained)),
            "transitions_dropped": float(len(self.dropped) - len(self.trained)),
        }

    def serving_gap(self, old_R: Tensor, version: int) -> dict[str, float]:
        """How far training's log-probabilities [R] before the update are from serving's, over the trained tokens.

        The `prob_…` are over the tokens that `version`, the weights before the update, sampled; absent without any.
        """
        # A skipped step leaves tokens that were not computed, and the probabilities of recorded texts are not known.
        known_R = (self.weights_R > 0) & torch.isfinite(old_R) & torch.isfinite(self.samples.behaviour_R)
        gap_R = (old_R - self.samples.behaviour_R)[known_R].abs()
        gap = {"logprob_gap_max": float(gap_R.max()) if gap_R.numel() else 0.0}
        own_M = torch.from_numpy(self.batch.version_N == version).to(known_R.device)
        own_R = known_R & own_M[self.samples.transition_R]
        if own_R.any():
            trained_R, sampled_R = (
                logprobs_R[own_R].double().exp() for logprobs_R in (old_R, self.samples.behaviour_R)
            )
            gap["prob_gap_mean"] = float((trained_R - sampled_R).abs().mean())
            gap["prob_sampled_mean"], gap["prob_trained_mean"] = float(sampled_R.mean()), float(trained_R.mean())
        return gap

    def _scaled(self, weights_R: Tensor, factor_M: Tensor) -> Tensor:
        return (weights_R * factor_M[self.samples.transition_R]).to(weights_R.dtype)

    def _advantage_M(self) -> NDArray[np.float64]:
        unmasked_R = self.samples.mask_R.to(self.advantages_R.dtype)
        total = self.samples.sums(self.advantages_R * unmasked_R)
        mean = total / self.samples.sums(unmasked_R).clamp(min=1)
        return np.asarray(mean.cpu().numpy(), dtype=np.float64)


def samples_of(batch: Batch, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Samples:
    """A batch as the algorithms see it; `dtype` is that of its log-probabilities."""

    def tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    return Samples(
        transition_R=tensor(np.repeat(np.arange(len(batch)), batch.response_lengths_N), torch.int64),
        mask_R=tensor(batch.mask_R, torch.bool),
        # The log-probability of a forced token has no meaning, and may not be finite.
        behaviour_R=tensor(np.where(batch.mask_R, batch.behaviour_logprobs_R, 0.0), dtype),
        values_N=tensor(batch.values_N, torch.float64),
        group_N=tensor(batch.group_N, torch.int64),
        rollout_N=tensor(batch.rollout_N, torch.int64),
        turn_N=tensor(batch.turn_N, torch.int64),
        absent_values_A=tensor(batch.absent_values_A, torch.float64),
        absent_groups_A=tensor(batch.absent_groups_A, torch.int64),
        calls=batch.calls,
    )


def prepare(
    usable: TrainableBatch, samples: Samples, algorithm: Algorithm, values_R: Tensor | None = None
) -> PreparedBatch:
    """Ask the algorithm for weights, and for advantages if credit does not yield them; `values_R` are the critic's.

    Transitions with an advantage or weight that is not finite, and those that the algorithm does not keep, are dropped.
    """
    if not len(usable.places):
        return PreparedBatch.of_nothing(usable, samples)
    is_advantage = usable.batch.kind is CreditKind.ADVANTAGE
    advantages_R = samples.at_tokens(samples.values_N) if is_advantage else algorithm.advantages(samples, values_R)
    weights_R = algorithm.weights(samples)
    for what, tensor in (("advantages", advantages_R), ("weights", weights_R)):
        if tensor.shape != samples.mask_R.shape:
            needed = f"one for each response token, [{len(samples.mask_R)}] (`samples.at_tokens` spreads [N] over them)"
            raise PluginError(f"{type(algorithm).__name__}.{what} returned {list(tensor.shape)}, not {needed}.")
    finite_R = torch.isfinite(advantages_R) & torch.isfinite(weights_R)
    value = None
    if values_R is not None:
        critic = cast(Ppo, algorithm)
        value = ValueTraining(values_R, critic.value_targets(samples, values_R), critic.value_weights(samples))
        finite_R = finite_R & torch.isfinite(value.targets_R) & torch.isfinite(value.weights_R)
    broken_M = samples.sums(~finite_R) > 0
    broken_R = broken_M[samples.transition_R]
    advantages_R, weights_R = advantages_R.masked_fill(broken_R, 0.0), weights_R.masked_fill(broken_R, 0.0)
    kept_M = algorithm.keep(samples, advantages_R) & (samples.sums(weights_R) > 0)
    kept_M &= _corrections(usable.batch, weights_R) > 0
    left_out_R = ~kept_M[samples.transition_R]
    weights_R = weights_R.masked_fill(left_out_R, 0.0)
    if value is not None:
        value = replace(
            value,
            targets_R=value.targets_R.masked_fill(left_out_R, 0.0),
            weights_R=value.weights_R.masked_fill(left_out_R, 0.0),
        )
    dropped = list(usable.dropped)
    for i, broken, kept in zip(usable.places, broken_M.tolist(), kept_M.tolist(), strict=True):
        if broken:
            dropped[i] = DropReason.NON_FINITE
        elif not kept:
            dropped[i] = DropReason.NO_ADVANTAGE
    trained = np.flatnonzero(kept_M.cpu().numpy()).astype(np.int64)
    return PreparedBatch(usable.batch, samples, advantages_R, weights_R, usable.places, trained, tuple(dropped), value)


def minibatches(batch: Batch, chosen: NDArray[np.int64], count: int, seed: Sequence[int]) -> list[NDArray[np.int64]]:
    """The transitions `chosen` in `count` parts, split between rollouts; fewer if there are fewer rollouts."""
    rollout_n = batch.rollout_N[chosen]
    shuffled = np.random.default_rng(seed).permutation(np.unique(rollout_n))
    parts = [chosen[np.isin(rollout_n, rollouts)] for rollouts in np.array_split(shuffled, count)]
    return [part for part in parts if len(part)]


def lineages(batch: Batch, chosen: NDArray[np.int64]) -> list[Chain]:
    """The `chosen` transitions in chains, each from its shortest transition to its longest.

    An agent sends its conversation again with each call, so the prompt of a turn usually begins with the prompt and the
    response of the turn before. The tokens of a chain's last transition contain all the others, and each response token
    has the same tokens before it as in its transition alone. One row of tokens therefore has the loss and the gradient
    of a chain, each response with its own advantage and weights. Sub-agents, edited histories and summaries begin new
    chains.

    A transition continues the longest chain whose prompt and response are exactly the beginning of its prompt. The next
    sibling begins another chain. A chain has one rollout, so one optimizer step (`minibatches`), and one temperature.
    """
    lengths_N = np.diff(batch.offsets)
    chains: list[list[int]] = []
    ends: dict[tuple[int, float], list[tuple[bytes, list[int]]]] = {}
    # By length: what a prompt may begin with comes before it, and of the ends that fit the last one is the longest.
    for i in chosen[np.argsort(lengths_N[chosen], kind="stable")].tolist():
        start, end = batch.offsets[i : i + 2]
        prompt = batch.tokens_T[start : start + batch.prompt_lengths_N[i]].tobytes()
        open_ends = ends.setdefault((int(batch.rollout_N[i]), float(batch.temperature_N[i])), [])
        continued = next((place for place in reversed(open_ends) if prompt.startswith(place[0])), None)
        if continued is None:
            chain = [i]
            chains.append(chain)
        else:
            open_ends.remove(continued)
            chain = continued[1]
            chain.append(i)
        open_ends.append((batch.tokens_T[start:end].tobytes(), chain))
    return [np.array(chain, np.int64) for chain in chains]


def places_of(batch: Batch, chain: Chain) -> NDArray[np.int64]:
    """Indices of a row's tokens after its prompt in the batch's response-aligned arrays; -1 between responses."""
    prompts = batch.prompt_lengths_N[chain] - batch.prompt_lengths_N[chain[0]]
    places = np.full(int(prompts[-1] + batch.response_lengths_N[chain[-1]]), -1, np.int64)
    for i, prompt in zip(chain, prompts, strict=True):
        start, end = batch.response_offsets[i : i + 2]
        places[prompt : prompt + end - start] = np.arange(start, end)
    return places


def _corrections(batch: Batch, beside: Tensor) -> Tensor:
    """[M] float64, on the device of `beside`."""
    return torch.from_numpy(batch.weight_N).to(beside.device)
