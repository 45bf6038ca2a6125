"""veRL's side of each comparison: its own functions on padded rows. Runs in the oracles' environment only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

from .oracle_batches import Batch

Outputs = dict[str, Tensor]
Step = Literal["token", "transition", "call", "rollout"]

NONE = 1e12
"""Where veRL wants a bound and there shall be none."""


@dataclass(frozen=True)
class Rows:
    """A batch as the rows and columns of veRL's advantage functions, [K, T] each."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    groups: np.ndarray
    """[K]"""
    spread: Callable[[Tensor], Tensor]
    """[K, T] numbers → [R], each at the tokens that its step stands for."""
    at_values: Callable[[Tensor], Tensor]
    """[K, T] numbers → [R], each at the token before which the critic is asked."""


def rows_of(batch: Batch, step: Step) -> Rows:
    """The meaning of a column: a token of a response, the whole response, a call of a rollout, or the whole rollout.

    The reward is at the last unmasked token; a rollout's is that of its first call.
    """
    values_N = torch.tensor(batch.of_each("value")).double()
    groups = np.array(batch.of_each("group"))
    mask_NL = batch.padded("mask")
    if step == "token":
        ends = [max([i for i, counts in enumerate(row.mask) if counts], default=0) for row in batch.transitions]
        rewards_NL = torch.zeros_like(mask_NL).scatter(1, torch.tensor(ends)[:, None], values_N[:, None])

        def of_tokens(numbers_NL: Tensor) -> Tensor:
            return batch.unpadded(numbers_NL * mask_NL)

        return Rows(rewards_NL, batch.padded("values"), mask_NL, groups, of_tokens, of_tokens)
    if step == "transition":

        def of_transitions(numbers_N1: Tensor) -> Tensor:
            return batch.spread(numbers_N1[:, 0])

        ones_N1 = torch.ones_like(values_N)[:, None]
        return Rows(values_N[:, None], torch.zeros_like(ones_N1), ones_N1, groups, of_transitions, of_transitions)
    rollouts = [list(rows) for _, rows in groupby(range(len(groups)), key=lambda i: batch.transitions[i].rollout)]
    if step == "rollout":
        rollouts = [calls[:1] for calls in rollouts]
    prompts_N = batch.padded("values")[:, 0]

    def columns(of_N: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([of_N[calls] for calls in rollouts], batch_first=True)

    row_of = {batch.transitions[calls[0]].rollout: k for k, calls in enumerate(rollouts)}

    def of_calls(numbers_KT: Tensor) -> Tensor:
        last = numbers_KT.shape[1] - 1
        numbers = [numbers_KT[row_of[row.rollout], min(row.turn, last)] for row in batch.transitions]
        return batch.spread(torch.stack(numbers))

    def at_prompts(numbers_KT: Tensor) -> Tensor:
        numbers_NL = torch.zeros_like(mask_NL)
        for k, calls in enumerate(rollouts):
            numbers_NL[calls, 0] = numbers_KT[k, : len(calls)]
        return batch.unpadded(numbers_NL)

    first = [calls[0] for calls in rollouts]
    mask_KT = columns(torch.ones_like(values_N))
    return Rows(columns(values_N), columns(prompts_N), mask_KT, groups[first], of_calls, at_prompts)


def grpo(batch: Batch, step: Step = "token", by_std: bool = True) -> Outputs:
    rows = rows_of(batch, step)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        rows.rewards, rows.mask, rows.groups, norm_adv_by_std_in_grpo=by_std
    )
    return {"advantages": rows.spread(advantages)}


def gdpo(batch: Batch, weights: Mapping[str, float]) -> Outputs:
    rows, named = rows_of(batch, "token"), batch.named()
    config = AlgoConfig(gdpo_reward_keys=[*weights], gdpo_reward_weights=[*weights.values()])
    prompts_N1 = torch.ones_like(rows.mask[:, :1])
    lengths = {"prompts": prompts_N1, "attention_mask": torch.cat([prompts_N1, torch.ones_like(rows.mask)], 1).long()}
    # It computes with single precision whatever it gets.
    with patch.object(torch, "float32", torch.float64), patch.object(np, "float32", np.float64):
        advantages, _ = core_algos.compute_gdpo_outcome_advantage(
            rows.rewards, rows.mask, rows.groups, config=config, non_tensor_batch=named, batch=lengths
        )
    return {"advantages": rows.spread(advantages)}


def reinforce_plus_plus(batch: Batch, step: Step = "token", gamma: float = 1.0) -> Outputs:
    rows = rows_of(batch, step)
    advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rows.rewards, rows.mask, AlgoConfig(gamma=gamma)
    )
    return {"advantages": rows.spread(advantages)}


def gae(batch: Batch, gamma: float, lam: float, step: Step = "token", whitened: bool = True) -> Outputs:
    rows = rows_of(batch, step)
    advantages, returns = core_algos.compute_gae_advantage_return(rows.rewards, rows.values, rows.mask, gamma, lam)
    return {"advantages": rows.spread(advantages if whitened else returns - rows.values)}


def critic_targets(batch: Batch, gamma: float, lam: float, step: Step = "token") -> Outputs:
    rows = rows_of(batch, step)
    _, returns = core_algos.compute_gae_advantage_return(rows.rewards, rows.values, rows.mask, gamma, lam)
    return {"targets": rows.at_values(returns)}


def value_loss(batch: Batch, aggregation: str, clip: float) -> Outputs:
    current_NL = batch.padded("new_values").requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        current_NL, batch.padded("targets"), batch.padded("values"), batch.padded("mask"), clip, aggregation
    )
    return _with_gradient(batch, loss, current_NL)


@dataclass(frozen=True)
class PolicyLoss:
    """The settings of one of veRL's policy losses, called with rows."""

    mode: str = "vanilla"
    aggregation: str = "token-mean"
    low: float = 0.2
    high: float = 0.2
    dual: float = NONE
    """`clip_ratio_c`."""
    beta: float = 0.0
    importance: tuple[str, float | str] | None = None
    """The level of the weights and where they are truncated; "lower_upper": outside of which they are 0."""
    per_response: bool = False
    """The advantage of a response's first token throughout."""

    def __call__(self, batch: Batch, current_NL: Tensor) -> Tensor:
        mask_NL = batch.padded("mask")
        advantages_NL = batch.padded("advantages")
        if self.per_response:
            advantages_NL = advantages_NL[:, :1].expand_as(mask_NL)
        weights_NL = None
        if self.importance is not None:
            level, threshold = self.importance
            log_ratio_NL = batch.padded("old") - batch.padded("behaviour")
            try:
                weights_NL, _ = compute_rollout_correction_weights(log_ratio_NL, mask_NL, level, threshold)
            except ZeroDivisionError:  # All weights are 0, and its metrics divide by their mean.
                weights_NL = torch.zeros_like(log_ratio_NL)
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=self.low,
            clip_ratio_low=self.low,
            clip_ratio_high=self.high,
            clip_ratio_c=self.dual,
        )
        loss, _ = core_algos.get_policy_loss_fn(self.mode)(
            batch.padded("old"), current_NL, advantages_NL, mask_NL, self.aggregation, config, weights_NL
        )
        kl_NL = core_algos.kl_penalty(current_NL, batch.padded("reference"), "low_var_kl")
        return loss + self.beta * core_algos.agg_loss(kl_NL, mask_NL, self.aggregation)


def policy_loss(batch: Batch, **settings: object) -> Outputs:
    current_NL = batch.padded("current").requires_grad_()
    return _with_gradient(batch, PolicyLoss(**settings)(batch, current_NL), current_NL)


def policy_loss_summed_in_responses(batch: Batch) -> Outputs:
    """seq-mean-token-sum, which is the token mean but for a factor: responses that count, by tokens that count."""
    current_NL = batch.padded("current").requires_grad_()
    tokens_N = batch.padded("mask").sum(1)
    factor = (tokens_N > 0).sum() / tokens_N.sum()
    return _with_gradient(batch, factor * PolicyLoss(aggregation="seq-mean-token-sum")(batch, current_NL), current_NL)


def policy_loss_by_rollout(batch: Batch) -> Outputs:
    """The mean over groups of the mean over rollouts of the loss of a rollout's rows."""
    current_NL = batch.padded("current").requires_grad_()
    loss = PolicyLoss(aggregation="seq-mean-token-mean")
    of_groups: dict[int, list[Tensor]] = {}
    counted = batch.where(lambda row: any(row.mask))
    for (group, _), rows in groupby(counted, key=lambda i: (batch.transitions[i].group, batch.transitions[i].rollout)):
        calls = list(rows)
        part = batch.only(calls)
        own_NL = current_NL[calls, : part.padded("mask").shape[1]]
        of_groups.setdefault(group, []).append(loss(part, own_NL))
    means = [torch.stack(losses).mean() for losses in of_groups.values()]
    return _with_gradient(batch, torch.stack(means).mean(), current_NL)


def overlong(batch: Batch, limit: int, buffer: int) -> Outputs:
    """The reward manager's, of responses that earn nothing else."""
    rows = batch.transitions
    attention_NL = torch.nn.utils.rnn.pad_sequence([torch.ones(1 + len(row.mask)) for row in rows], batch_first=True)
    responses_NL = torch.zeros_like(attention_NL[:, 1:]).long()
    of_rows = {"data_source": ["drawn"] * len(rows), "reward_model": [{"ground_truth": ""}] * len(rows)}
    data = DataProto.from_dict(
        {"prompts": responses_NL[:, :1], "responses": responses_NL, "attention_mask": attention_NL.long()},
        {name: np.array(values, dtype=object) for name, values in of_rows.items()},
    )
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "", eos_token="<eos>")
    buffered = SimpleNamespace(enable=True, len=buffer, penalty_factor=1.0, log=False)
    manager = DAPORewardManager(tokenizer, 0, lambda **_: 0.0, max_resp_len=limit, overlong_buffer_cfg=buffered)
    return {"rewards": manager(data).double().sum(1)}


def _with_gradient(batch: Batch, loss: Tensor, leaf_NL: Tensor) -> Outputs:
    return {"loss": loss.detach(), "gradient": batch.unpadded(torch.autograd.grad(loss, leaf_NL)[0])}
