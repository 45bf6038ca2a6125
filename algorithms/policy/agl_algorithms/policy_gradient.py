"""An algorithm, and the update of every policy-gradient algorithm: token weights, clipped surrogate, KL, whitening.

    r    = exp(log π − log π_old)
    loss = Σ_tokens w · ( −min(r·A, clip(r, 1 − low, 1 + high)·A) · ρ  +  β · k3(π ‖ π_initial)  −  c · H(π) )

with token weights w (`token_weights`), the importance weight ρ (`truncated_importance`; 1 without a cap), and the
entropy H of π's distribution at the token (PPO's bonus, arXiv 1707.06347, equation 9; c is `entropy`). With
`surrogate = "cispo"` the first term is −sg(clip(r, 1 − low, 1 + high))·A·log π·ρ, where sg is without gradient: a large
ratio is bounded, and no token loses its gradient (CISPO, arXiv 2506.13585, equation 4). Algorithms differ in the
advantages A alone.

Tensors are flat (ragged data without pads). Axis suffixes: _N transitions, _R response tokens of all transitions, one
after the other. An engine with padded rows first selects tokens by mask, so both engines run the same functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean

import torch
from torch import Tensor

from agl_algorithms.plugin import Aggregation, AlgorithmOptions, PolicyGradientOptions, RatioLevel, WhiteningUnit
from agl_core.types import rounding
from agl_core.types.episodes import Moment

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before exp, so a token that became impossible cannot overflow the sum."""
WHITENING_EPSILON = 1e-8
"""Added to the variance, as veRL's `masked_whiten` does."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The data that advantages are computed from. All tensors share one device."""

    transition_R: Tensor
    """[R] int64: the transition that each response token belongs to, 0 … N-1, ascending."""
    mask_R: Tensor
    """[R] bool: True where a token takes part in the loss."""
    behaviour_R: Tensor
    """[R] log-probabilities as recorded when the tokens were sampled; NaN where they are not known."""
    values_N: Tensor
    """[N] credited values (rewards or returns)."""
    group_N: Tensor
    """[N] int64: 0 … groups-1."""
    rollout_N: Tensor
    """[N] int64: 0 … rollouts-1, unique over groups."""
    turn_N: Tensor
    """[N] int64: the transition's place in its episode."""
    absent_values_A: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """[A] the credited values of rollouts that have no transition here and are compared all the same."""
    absent_groups_A: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[A] their groups."""
    calls: Sequence[Sequence[Moment]] = ()
    """As `Batch.calls`; none: each rollout is its transitions, one after the other."""

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
    entropy_R: Tensor | None = None
    """Entropy of its distribution, in nats; carries the gradient. None unless the algorithm needs it."""
    teacher_R: Tensor | None = None
    """Under the algorithm's teacher; None without one, and in the loss."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model, with the tokens of the policy, that scores what the policy sampled."""

    place: str
    """A folder, a hub name, or a server's base URL, ending in /v1."""
    model: str | None = None
    """Its name on the server; None if it is not served."""
    key_env: str | None = None
    """The environment variable with the server's key."""


class Algorithm(ABC):
    """An algorithm with its options; holds no state between updates. Subclasses define its advantages and its loss.

    Engines read these members, never the options. One that needs a critic also has those of `agl_algorithms.ppo.Ppo`.
    """

    needs_critic = False
    needs_reference = False
    """The loss gets log-probabilities under the initial weights."""
    needs_entropy = False
    """The loss gets entropies."""
    target_kl: float | None = None
    """An optimizer step whose metric `kl_old` is above this is not made, nor are the later ones of its update."""
    needs_scores = False
    """`rescore` makes the advantages, so the log-probabilities that it gets are computed before the first step."""
    teacher: Teacher | None = None
    """`rescore` gets its log-probabilities."""

    def __init__(self, options: AlgorithmOptions) -> None:
        self.options = options
        self.epochs = options.epochs
        """Passes over the batch in one update."""
        self.minibatches = options.minibatches
        """Optimizer steps in one pass."""

    @abstractmethod
    def advantages(self, samples: Samples, values_R: Tensor | None = None) -> Tensor:
        """[R] advantages, 0 at masked tokens; `Samples.at_tokens` makes them from one number per transition.

        `values_R` are the critic's, if there is one.
        """

    def keep(self, samples: Samples, advantages_R: Tensor) -> Tensor:
        """[N] bool: transitions worth computing, which have a weighted token with an advantage; with a KL or an entropy
        term, or if advantages come later, any weighted token."""
        counts_R = self.weights(samples) > 0
        of_all = self.needs_reference or self.needs_entropy or self.needs_scores
        return samples.sums(counts_R if of_all else counts_R & (advantages_R != 0)) > 0

    def weights(self, samples: Samples) -> Tensor:
        """[R] token weights over the whole batch by `aggregation`, before corrections (`Batch.weight_N`)."""
        return token_weights(samples, self.options.aggregation)

    def rescore(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[R] advantages of the whole batch from log-probabilities before the update, and metrics of them.

        Called if `needs_scores`. `advantages_R` come from `advantages`; current log-probabilities are the old ones, and
        0 at tokens without a weight.
        """
        return advantages_R, {}

    @abstractmethod
    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The sum over tokens of weight × loss; metrics are such sums too, or (`…_max`) the largest value.

        The sums of micro-batches add up. Their samples have a meaning in `transition_R`, `mask_R`, `behaviour_R` alone.
        """


class PolicyGradient(Algorithm):
    """Clipped surrogate, importance weights and a KL term. Subclasses define the advantages."""

    options: PolicyGradientOptions
    ratio: RatioLevel = "token"
    """One ratio for each token, or one for each transition."""

    def __init__(self, options: PolicyGradientOptions) -> None:
        super().__init__(options)
        self.needs_reference = options.beta > 0
        self.needs_entropy = options.entropy > 0
        self.target_kl = options.target_kl
        self.clip = options.clip_range
        """The bounds of the ratio below and above 1."""

    def surrogate(self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R] the ratio, [R] the policy's loss before importance, KL and weights, and [R] bool where it is clipped."""
        ratio_R = policy_ratio(samples, logprobs, self.ratio)
        if self.options.surrogate == "cispo":
            bounded_R = ratio_R.detach().clamp(1 - self.clip[0], 1 + self.clip[1])
            return ratio_R, -bounded_R * advantages_R * logprobs.current_R, bounded_R != ratio_R
        return ratio_R, *clipped_surrogate(ratio_R, advantages_R, *self.clip)

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `Algorithm.loss`.

        Metrics: policy_loss, kl_behaviour (k3 of KL(behaviour ‖ current), because the behaviour policy sampled the
        tokens), ratio_mean, ratio_max, clip_fraction; with `beta` kl_reference (k3 of KL(current ‖ initial), as in the
        loss), with `importance_cap` importance_mean, with `target_kl` kl_old (k3 of KL(old ‖ current)).
        """
        ratio_R, policy_R, clipped_R = self.surrogate(samples, logprobs, advantages_R)
        per_token = {
            "kl_behaviour": kl_k3(logprobs.behaviour_R, logprobs.current_R),
            "ratio_mean": ratio_R,
            "clip_fraction": clipped_R.to(ratio_R.dtype),
        }
        if self.target_kl is not None:
            per_token["kl_old"] = kl_k3(logprobs.old_R, logprobs.current_R)
        if self.options.importance_cap:
            importance_R = truncated_importance(
                samples,
                logprobs,
                self.options.importance_cap,
                self.options.importance_level,
                self.options.importance_floor,
            )
            policy_R = policy_R * importance_R
            per_token["importance_mean"] = importance_R
        loss_R = per_token["policy_loss"] = policy_R
        if self.needs_reference:
            assert logprobs.reference_R is not None, "needs_reference asks for it"
            kl_R = per_token["kl_reference"] = kl_k3(logprobs.current_R, logprobs.reference_R)
            loss_R = loss_R + self.options.beta * kl_R
        if self.needs_entropy:
            assert logprobs.entropy_R is not None, "needs_entropy asks for it"
            loss_R = loss_R - self.options.entropy * logprobs.entropy_R
        loss, metrics = weighted(loss_R, per_token, weights_R)
        metrics["ratio_max"] = torch.where(weights_R > 0, ratio_R, 0.0).max().detach()
        return loss, metrics


def weighted(loss_R: Tensor, per_token: Mapping[str, Tensor], weights_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and its metrics as sums over tokens of weight × value."""
    metrics = {name: (weights_R * value_R).sum().detach() for name, value_R in per_token.items()}
    return (weights_R * loss_R).sum(), metrics


# Token weights.


def token_weights(samples: Samples, aggregation: Aggregation) -> Tensor:
    """[R] weights of the response tokens, which sum to 1; 0 where masked.

    With a_t the response of transition t, |a_t| its unmasked tokens, T_i the transitions of rollout i that have
    some, G_g the rollouts of group g that have some:

    - "rollout": 1 / (groups · G_g · T_i · |a_t|), so that groups, rollouts and transitions each share equally;
    - "sequence-mean": 1 / (transitions · |a_t|);
    - "token-mean": 1 / (all unmasked tokens of the batch).

    If a rollout is one transition, "rollout" is GRPO's objective (arXiv 2402.03300, equation 3): the mean over
    questions of the mean over each question's answers. "sequence-mean" is the same if all groups have one size. DAPO
    (arXiv 2503.14476, equation 8) divides by the tokens of each question's answers and takes the mean over questions;
    "token-mean" divides by the tokens of the whole batch, as veRL and TRL do, so a group of long answers weighs more.

    Corrections (`Batch.weight_N`) come after (`agl_algorithms.prepared`): what one takes from a transition, none gets.
    """
    tokens_N = samples.sums(samples.mask_R)
    trained_N = tokens_N > 0
    if aggregation == "token-mean":
        share_N = (1.0 / tokens_N.sum().clamp(min=1)).expand(len(samples))
    elif aggregation == "sequence-mean":
        share_N = 1.0 / (trained_N.sum().clamp(min=1) * tokens_N.clamp(min=1))
    else:
        turns_N, rollouts_N, groups = count_rollouts(samples, trained_N)
        share_N = 1.0 / (groups * rollouts_N * turns_N * tokens_N).clamp(min=1)
    return (share_N[samples.transition_R] * samples.mask_R).to(samples.behaviour_R.dtype)


def count_rollouts(samples: Samples, taking_part_N: Tensor) -> tuple[Tensor, Tensor, int]:
    """[N] float64 the transitions in `taking_part_N` of each one's rollout, [N] float64 the rollouts with such a
    transition of each one's group, and the number of groups with one."""
    group_N, groups = _dense(samples.group_N)
    rollout_N, rollouts = _dense(samples.rollout_N)
    turns = segment_sum(taking_part_N.to(torch.float64), rollout_N, rollouts)
    group_of_rollout = torch.zeros(rollouts, dtype=torch.int64, device=group_N.device).scatter(0, rollout_N, group_N)
    per_group = segment_sum((turns > 0).to(torch.float64), group_of_rollout, groups)
    return turns[rollout_N], per_group[group_N], int((per_group > 0).sum())


def ranked_returns(samples: Samples) -> list[dict[int, float]]:
    """For each group: rollout number → mean credited value of its unmasked transitions, best first, then by number."""
    groups: dict[int, dict[int, list[float]]] = {}
    columns = (samples.group_N, samples.rollout_N, samples.values_N, samples.sums(samples.mask_R) > 0)
    for group, rollout, value, counted in sorted(zip(*(column.tolist() for column in columns), strict=True)):
        if counted:
            groups.setdefault(group, {}).setdefault(rollout, []).append(value)
    returns = [{rollout: fmean(values) for rollout, values in group.items()} for group in groups.values()]
    return [dict(sorted(group.items(), key=itemgetter(1), reverse=True)) for group in returns]


def segment_sum(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """[segments] sums of `values` [K] by `segment` [K] int64.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
    [3.0, 0.0, 4.0]
    """
    return values.new_zeros(segments).index_add(0, segment, values)


def _dense(labels: Tensor) -> tuple[Tensor, int]:
    """Labels renumbered 0 … K-1, and K."""
    values, inverse = torch.unique(labels, return_inverse=True)
    return inverse, values.numel()


# The ratio, and the comparison of two policies from the log-probabilities of what was sampled.


def clipped_surrogate(ratio_R: Tensor, advantages_R: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[R] −min(ratio · A, clip(ratio, 1 − low, 1 + high) · A) (PPO, arXiv 1707.06347, equation 7), and [R] bool where
    the clipped term counts, so that the token has no gradient.

    >>> clipped_surrogate(torch.tensor([1.5]), torch.tensor([2.0]), 0.2, 0.2)
    (tensor([-2.4000]), tensor([True]))
    """
    plain_R = ratio_R * advantages_R
    bounded_R = ratio_R.clamp(1 - low, 1 + high) * advantages_R
    return -torch.minimum(plain_R, bounded_R), bounded_R < plain_R


def log_ratio(current_R: Tensor, other_R: Tensor) -> Tensor:
    """[R] current − other, clamped to ±`MAX_LOG_RATIO`."""
    return (current_R - other_R).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_ratio(samples: Samples, logprobs: Logprobs, level: RatioLevel = "token") -> Tensor:
    """[R] current / old: of each token, or of each transition and repeated over its tokens.

    By transition it is the geometric mean over the unmasked tokens (GSPO, arXiv 2507.18071, equation 7):
    exp(1/|a_t| · Σ (current − old)).
    """
    log_ratio_R = log_ratio(logprobs.current_R, logprobs.old_R)
    if level == "token":
        return log_ratio_R.exp()
    mean_N = samples.sums(log_ratio_R * samples.mask_R) / samples.sums(samples.mask_R).clamp(min=1)
    return mean_N.exp()[samples.transition_R].to(log_ratio_R.dtype)


def truncated_importance(
    samples: Samples, logprobs: Logprobs, cap: float, level: RatioLevel = "token", floor: float | None = None
) -> Tensor:
    """[R] min(exp(old − behaviour), cap), without gradient: of each token, or the product over a transition's.

    With a floor, 0 where it is below the floor or above the cap, and not truncated (IcePop, arXiv 2510.18855).

    Truncation bounds the variance (Ionides, 2008; IMPALA, arXiv 1802.01561, section 4.1). By transition it is the exact
    correction for a response as one action, and varies more the longer that is; by token it is biased, since it leaves
    out the probability of the tokens before.
    """
    log_ratio_R = log_ratio(logprobs.old_R, logprobs.behaviour_R)
    if level == "sequence":
        sum_N = samples.sums(log_ratio_R.masked_fill(~samples.mask_R, 0.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_ratio_R = sum_N[samples.transition_R].to(log_ratio_R.dtype)
    ratio_R = log_ratio_R.exp().detach()
    if floor is None:
        return ratio_R.clamp(max=cap)
    return torch.where((ratio_R >= floor) & (ratio_R <= cap), ratio_R, 0.0)


def kl_k3(sampling_R: Tensor, other_R: Tensor) -> Tensor:
    """[R] Schulman's k3 estimate of KL(sampling ‖ other), never negative (arXiv 2402.03300, equation 4).

        k3 = exp(other − sampling) − (other − sampling) − 1

    Its mean is this KL if the tokens were drawn from the first policy. For tokens of another policy it is biased, and
    for tokens of `other_R` the exponential has no bound.

    >>> kl_k3(torch.tensor([0.0]), torch.tensor([0.0])).item()
    0.0
    """
    difference_R = log_ratio(other_R, sampling_R)
    return torch.expm1(difference_R) - difference_R


# Normalisation over the batch.


def whitened(values_R: Tensor, samples: Samples, over: WhiteningUnit) -> Tensor:
    """[R] float64 `values_R` of the unmasked tokens, shifted and scaled to mean 0 and variance 1; 0 where masked.

    With K units, of which token r is the share s_r (over "tokens": each is one unit; over "transitions": 1/|a_t|):

        μ  = 1/K · Σ_r s_r · v_r
        σ² = 1/(K−1) · Σ_r s_r · (v_r − μ)²
        (v_r − μ) / √(σ² + 1e-8)

    Values that are equal (`agl_core.types.rounding`), and those of a single unit, become exactly zero.
    """
    mask_R, tokens_N = samples.mask_R, samples.sums(samples.mask_R)
    share_R = mask_R.to(torch.float64)
    if over == "transitions":
        share_R = share_R / tokens_N.clamp(min=1)[samples.transition_R]
    units = tokens_N.sum() if over == "tokens" else (tokens_N > 0).sum()
    if units < 2:
        return torch.zeros_like(share_R)
    unmasked_R = values_R.to(torch.float64).masked_fill(~mask_R, 0.0)
    shifted_R = torch.where(mask_R, unmasked_R - unmasked_R[mask_R].min(), 0.0)
    if shifted_R.max() <= rounding(unmasked_R.abs().max()):
        return torch.zeros_like(share_R)
    deviation_R = torch.where(mask_R, shifted_R - (share_R * shifted_R).sum() / units, 0.0)
    variance = (share_R * deviation_R.square()).sum() / (units - 1)
    return deviation_R * torch.rsqrt(variance + WHITENING_EPSILON)
