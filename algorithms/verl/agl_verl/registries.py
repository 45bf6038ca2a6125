"""agl's algorithms in veRL's registries, for runs that veRL's own trainer drives.

veRL hands an estimator rows and their group: each row is a rollout of its own there, and a group's statistics are over
rows. An estimator that needs a critic's values gets none from veRL, so PPO has no estimator here but a loss only. Under
agl's engine (`agl_verl.trainer`) none of this holds: algorithms see the batch whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agl_algorithms.interface import Algorithm, Logprobs, Samples
from agl_algorithms.plugin import GrpoOptions, PpoOptions, ReinforceOptions, build_grpo, build_ppo, build_reinforce
from agl_core.errors import ConfigError
from agl_verl.config.native import UNUSABLE_ESTIMATORS, UNUSABLE_LOSSES, NativeOptions

PREFIX = "agl:"
AGGREGATIONS = ("token-mean", "seq-mean-token-mean")
"""veRL's ways to add up losses that token weights can express."""


def register_algorithms() -> None:
    """Register the estimators and losses in this process."""
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    for name, build in (("grpo", _grpo), ("reinforce++", _reinforce)):
        register_adv_est(PREFIX + name)(partial(advantages, build))
    for name, build in (("grpo", _grpo), ("reinforce++", _reinforce), ("ppo", _ppo)):
        register_policy_loss(PREFIX + name)(partial(policy_loss, build))


def check_registered(options: NativeOptions) -> None:
    """ConfigError unless veRL has this estimator and this loss: its own, or what `modules` registered."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for what, name, registry, unusable in (
        ("estimator", options.estimator, ADV_ESTIMATOR_REGISTRY, UNUSABLE_ESTIMATORS),
        ("policy loss", options.loss, POLICY_LOSS_REGISTRY, UNUSABLE_LOSSES),
    ):
        if name not in registry:
            usable = ", ".join(sorted(each for each in registry if each not in unusable))
            raise ConfigError(
                f"No {what} '{name}' is registered with veRL, after importing "
                f"{' and '.join(options.modules) or 'veRL'}: {usable}."
            )


def advantages(
    build: Any,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    config: Any = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """[B, L] advantages and returns, as veRL asks its estimators for them; `index` [B] names each row's group."""
    mask_BL = response_mask.bool()
    group_of = {name: number for number, name in enumerate(dict.fromkeys(index))}
    score_B = (token_level_rewards * mask_BL).sum(-1)
    samples = _samples(mask_BL, score_B, torch.tensor([group_of[name] for name in index]))
    algorithm: Algorithm = build(clip=0.2, clip_high=0.2)
    advantage_BL = torch.zeros_like(token_level_rewards)
    advantage_BL[mask_BL] = algorithm.advantages(samples).to(advantage_BL.dtype)
    return advantage_BL, score_B[:, None] * mask_BL


def policy_loss(
    build: Any,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Mapping[str, float]]:
    """The loss of a micro-batch, as veRL asks its policy losses for it, and metrics.

    Clip ranges are veRL's `clip_ratio_low` and `clip_ratio_high`; `rollout_is_weights` [B, L] multiply the loss.
    """
    mask_BL = response_mask.bool()
    weight_BL = _weights(mask_BL, loss_agg_mode, config)
    if rollout_is_weights is not None:
        weight_BL = weight_BL * rollout_is_weights
    nothing_B = torch.zeros(len(mask_BL), device=mask_BL.device)
    samples = _samples(mask_BL, nothing_B, torch.arange(len(mask_BL), device=mask_BL.device))
    old_R = old_log_prob[mask_BL]
    algorithm: Algorithm = build(clip=float(config.clip_ratio_low), clip_high=float(config.clip_ratio_high))
    loss, measured = algorithm.loss(
        samples, Logprobs(log_prob[mask_BL], old_R, old_R), advantages[mask_BL], weight_BL[mask_BL]
    )
    return loss, {f"actor/{name}": float(value) for name, value in measured.items()}


def _weights(mask_BL: Tensor, mode: str, config: Any) -> Tensor:
    """[B, L] what each token counts, so that micro-batches and workers add up as veRL normalises them."""
    batch = dict(config.global_batch_info)
    workers = batch.get("dp_size") or 1
    if mode == "token-mean":
        return mask_BL * (workers / (batch.get("batch_num_tokens") or mask_BL.sum()))
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BL.sum(-1, keepdim=True).clamp(min=1)
        return mask_BL / tokens_B * (workers / (batch.get("global_batch_size") or (mask_BL.any(-1)).sum()))
    raise ValueError(
        f"agl's losses are added up by {' or '.join(AGGREGATIONS)}, not '{mode}': set actor.loss_agg_mode to one."
    )


def _samples(mask_BL: Tensor, value_B: Tensor, group_B: Tensor) -> Samples:
    """The unmasked tokens of a rectangle; each row is a rollout of one call."""
    row_BL = torch.arange(len(mask_BL), device=mask_BL.device)[:, None].expand_as(mask_BL)
    unmasked_R = torch.ones(int(mask_BL.sum()), dtype=torch.bool, device=mask_BL.device)
    row_B = torch.arange(len(mask_BL), device=mask_BL.device)
    return Samples(
        transition_R=row_BL[mask_BL],
        mask_R=unmasked_R,
        behaviour_R=torch.zeros(len(unmasked_R), device=mask_BL.device),
        values_N=value_B.to(torch.float64),
        scores_N=value_B.to(torch.float64),
        group_N=group_B.to(mask_BL.device),
        rollout_N=row_B,
        turn_N=torch.zeros_like(row_B),
    )


def _grpo(clip: float, clip_high: float) -> Algorithm:
    return build_grpo(GrpoOptions(beta=0, clip=clip, clip_high=clip_high))


def _reinforce(clip: float, clip_high: float) -> Algorithm:
    return build_reinforce(ReinforceOptions(clip=clip, clip_high=clip_high))


def _ppo(clip: float, clip_high: float) -> Algorithm:
    return build_ppo(PpoOptions(clip=clip, clip_high=clip_high))
