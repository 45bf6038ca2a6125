"""The same recorded transitions in an update, laid out in four ways: what each computes, and what gradient it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from concatenated import concatenated
from first_step import first_step
from transformers import AutoModelForCausalLM

from agl_core.builtin.credit import identical
from agl_core.config import CONFIG_FILE, load
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.types import Batch, CreditKind, Episode
from agl_torch import attention
from agl_torch.training.batching import Limits, MicroBatch, micro_batches, score

TOKENS = 16_384
"""Of a pass."""
ROUNDS = 3

Passes: TypeAlias = Callable[[], Iterator[MicroBatch]]


def layouts(run: Path) -> dict[str, Any]:
    """Of all calls of the first step: tokens computed, CPU seconds forward and backward, the better of some rounds.

    Also by how much probabilities of sampled tokens differ from those that were recorded when they were sampled, and
    the cosine of the gradient with that of separate transitions. Every rollout has the same advantages in all layouts:
    its answers' rewards do not matter for that, so they are drawn, +1 or -1.
    """
    torch.set_num_threads(1)
    weights = load(run / CONFIG_FILE, needs=()).weights("default")
    model = AutoModelForCausalLM.from_pretrained(weights, attn_implementation="sdpa")
    attention.use(model.train())
    episodes = [each for each in first_step(run) if each.transitions]
    calls, whole = batch_of(episodes), batch_of([in_one(each) for each in episodes])
    trees = Limits.of(model, TOKENS)
    rows = replace(trees, hidden_size=None)
    found: dict[str, Any] = {}
    truth = None
    for name, batch, passes in (
        ("separate", calls, lambda: one_by_one(calls, rows)),
        ("chains", calls, lambda: every(calls, rows)),
        ("trees", calls, lambda: every(calls, trees)),
        ("concatenated", whole, lambda: every(whole, rows)),
    ):
        found[name], gradient = measured(model, batch, passes)
        truth = gradient if truth is None else truth
        found[name]["cosine"] = float(torch.nn.functional.cosine_similarity(gradient, truth, dim=0))
    return {"layouts": found, "calls": len(calls), "sequences": len(whole)}


def in_one(episode: Episode) -> Episode:
    return replace(episode, transitions=(concatenated(episode.transitions),))


def batch_of(episodes: Sequence[Episode]) -> Batch:
    """All calls of all agents."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(replace(episode, terminal=0.0))
    credit = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}
    return make_batches(list(groups.values()), BatchPlan(credit)).batches["default"]


def every(batch: Batch, limits: Limits) -> Iterator[MicroBatch]:
    return micro_batches(batch, np.arange(len(batch)), limits, torch.device("cpu"))


def one_by_one(batch: Batch, limits: Limits) -> Iterator[MicroBatch]:
    """Calls of the same turn do not continue each other."""
    for turn in np.unique(batch.turn_N):
        yield from micro_batches(batch, np.flatnonzero(batch.turn_N == turn), limits, torch.device("cpu"))


def measured(model: Any, batch: Batch, passes: Passes) -> tuple[dict[str, float], torch.Tensor]:
    """What a layout costs and says, and the gradient of the mean over sampled tokens of advantage · log-probability."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], int(batch.rollout_N.max()) + 1)
    weights_N = signs[batch.rollout_N] / batch.mask_R.sum()
    weights_R = torch.from_numpy(np.repeat(weights_N, batch.response_lengths_N) * batch.mask_R).float()
    recorded_R, sampled_R = torch.from_numpy(batch.behaviour_logprobs_R), torch.from_numpy(batch.mask_R)
    best, computed, gaps = float("inf"), 0, torch.zeros(0)
    for _ in range(ROUNDS):
        model.zero_grad()
        start, computed, gaps = time.process_time(), 0, torch.zeros(0)
        for micro in passes():
            logprobs_R = score(model, micro).logprobs_R
            (logprobs_R * weights_R[micro.tokens_R]).sum().backward()
            computed += micro.computed
            apart = (logprobs_R.detach().exp() - recorded_R[micro.tokens_R].exp()).abs()
            gaps = torch.cat([gaps, apart[sampled_R[micro.tokens_R]]])
        best = min(best, time.process_time() - start)
    gradient = torch.cat([each.grad.flatten().double() for each in model.parameters() if each.grad is not None])
    return {"tokens": computed, "seconds": best, "gap": float(gaps.mean()), "gap_most": float(gaps.max())}, gradient
