"""agl's side of each comparison: the algorithm as an engine builds it, called as an engine calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from agl_algorithms import plugin
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_core import kinds
from agl_core.plugins import Plugins

from .oracle_batches import Batch

Options = Mapping[str, Any]
Outputs = dict[str, Tensor]


def build(name: str, options: Options) -> Ppo:
    """The registered algorithm of that name; only one with a critic has the critic's methods."""
    plugins = Plugins()
    plugins.register(plugin, "agl-algorithms")
    component = plugins.components(kinds.ALGORITHM)[name]
    return component.build(component.options(**options))


def samples_of(batch: Batch) -> Samples:
    lengths = torch.tensor([len(row.mask) for row in batch.transitions])
    return Samples(
        transition_R=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        mask_R=batch.flat("mask").bool(),
        behaviour_R=batch.flat("behaviour"),
        values_N=torch.tensor(batch.of_each("value"), dtype=torch.float64),
        group_N=torch.tensor(batch.of_each("group")),
        rollout_N=torch.tensor(batch.of_each("rollout")),
        turn_N=torch.tensor(batch.of_each("turn")),
    )


def advantages(batch: Batch, name: str, options: Options) -> Outputs:
    return {"advantages": build(name, options).advantages(samples_of(batch), batch.flat("values"))}


def critic_targets(batch: Batch, options: Options) -> Outputs:
    """Where the value loss has a weight; elsewhere they mean nothing."""
    ppo, samples = build("ppo", options), samples_of(batch)
    counted_R = ppo.value_weights(samples) > 0
    return {"targets": ppo.value_targets(samples, batch.flat("values")) * counted_R}


def policy_loss(batch: Batch, name: str, options: Options, per_response: bool = False) -> Outputs:
    """With the batch's own advantages, one by token or (`per_response`) that of the first token throughout."""
    algorithm, samples = build(name, options), samples_of(batch)
    advantages_R = batch.flat("advantages")
    if per_response:
        advantages_R = torch.tensor([row[0] for row in batch.of_each("advantages")]).double()[samples.transition_R]
    return _loss(batch, algorithm, samples, advantages_R * samples.mask_R)


def advantages_and_loss(batch: Batch, name: str, options: Options) -> Outputs:
    """From credited values to the gradient."""
    algorithm, samples = build(name, options), samples_of(batch)
    advantages_R = algorithm.advantages(samples, batch.flat("values"))
    return {"advantages": advantages_R} | _loss(batch, algorithm, samples, advantages_R)


def value_loss(batch: Batch, options: Options) -> Outputs:
    ppo = build("ppo", options)
    current_R = batch.flat("new_values").requires_grad_()
    weights_R = ppo.value_weights(samples_of(batch))
    loss, _ = ppo.value_loss(current_R, batch.flat("values"), batch.flat("targets"), weights_R)
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, current_R)[0]}


def _loss(batch: Batch, algorithm: Ppo, samples: Samples, advantages_R: Tensor) -> Outputs:
    current_R = batch.flat("current").requires_grad_()
    logprobs = Logprobs(current_R, batch.flat("old"), batch.flat("behaviour"), batch.flat("reference"))
    loss, _ = algorithm.loss(samples, logprobs, advantages_R, algorithm.weights(samples))
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, current_R)[0]}
