"""The log-probabilities of an update: those from before it, of sampling, and what they prove of the trained tokens."""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_core.config.sections import OptimizerSection
from agl_core.protocols import UpdateResult
from agl_core.testing import episodes as make
from agl_core.types import Batch, DropReason, TrainingRecord
from agl_server.health.certificate import Proof, certify, recomputed_in
from agl_torch.loading import LoadedModel
from agl_torch.sampler import Sampler

from .conftest import grpo, load, make_batch, mask_of, plain_logprobs, trainer_of, untrained, weights_of


class Recorder(Grpo):
    """GRPO that remembers what it was called with."""

    def __init__(self, **options: Any) -> None:
        super().__init__(GrpoOptions(**({"beta": 0.0} | options)))
        self.calls: list[tuple[Samples, Logprobs, Tensor, Tensor]] = []

    def loss(
        self, samples: Samples, logprobs: Logprobs, advantages_R: Tensor, weights_R: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        self.calls.append((samples, logprobs, advantages_R, weights_R))
        return super().loss(samples, logprobs, advantages_R, weights_R)


@pytest.mark.parametrize("epochs", [1, 2])
def test_unknown_log_probabilities_are_those_before_the_update(in_float64: LoadedModel, epochs: int) -> None:
    """The same update as if the policy itself had sampled; of the others, importance weights stay."""
    algorithm = grpo(importance_cap=1.05, epochs=epochs)
    own = make_batch(in_float64)
    known_N = np.arange(len(own)) % 2 == 0
    known_R = np.repeat(known_N, own.response_lengths_N)
    noisy = np.where(known_R, own.behaviour_logprobs_R - 0.5, own.behaviour_logprobs_R).astype(np.float32)
    before = copy.deepcopy(in_float64.model.state_dict())

    def trained(batch: Batch) -> tuple[dict[str, Tensor], Mapping[str, float], tuple[str | None, ...]]:
        in_float64.model.load_state_dict(before)
        result = trainer_of(in_float64, OptimizerSection(learning_rate=1e-2)).update(batch, algorithm)
        return weights_of(in_float64.model), result.metrics, result.dropped

    expected, _, dropped = trained(replace(own, behaviour_logprobs_R=noisy))
    unknown = np.where(known_R, noisy, np.nan).astype(np.float32)
    partly, metrics, also_dropped = trained(replace(own, behaviour_logprobs_R=unknown, sampled_N=known_N))

    torch.testing.assert_close(partly, expected, rtol=0, atol=1e-6)
    assert also_dropped == dropped
    assert all(math.isfinite(value) for value in metrics.values())
    assert 1 < metrics["importance_mean"] < 1.05


NOISY: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "seed_oss": {"residual_dropout": 0.5, "head_dim": 16},
    "biogpt": {"hidden_dropout_prob": 0.5},
    "gpt_bigcode": {"attn_pdrop": 0.5, "resid_pdrop": 0.5},
    "phimoe": {"router_jitter_noise": 0.5, "num_local_experts": 2},
}


@pytest.mark.parametrize("kind", NOISY)
def test_updates_have_no_noise_that_pretraining_had(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Of the first update, and of the next after the weights moved; also where layers are recomputed."""
    shutil.copytree(checkpoint, tmp_path / "m")
    untrained(kind, vocab_size=320, initializer_range=0.02, **NOISY[kind]).save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m")
    Sampler(loaded)
    trainer = trainer_of(loaded, gradient_checkpointing=True)
    for _ in range(2):
        algorithm = Recorder()
        trainer.update(make_batch(loaded), algorithm)
        for samples, logprobs, *_ in algorithm.calls:
            gap_R = (logprobs.current_R - samples.behaviour_R)[samples.mask_R]
            assert gap_R.abs().max() < 1e-4


def test_an_update_ends_before_the_first_step_beyond_its_target_kl(in_float64: LoadedModel) -> None:
    before = copy.deepcopy(in_float64.model.state_dict())
    batch = make_batch(in_float64)

    def updated(**options: Any) -> tuple[dict[str, Tensor], Mapping[str, float], Recorder]:
        in_float64.model.load_state_dict(before)
        algorithm = Recorder(**options)
        metrics = trainer_of(in_float64, OptimizerSection(learning_rate=3e-4)).update(batch, algorithm).metrics
        return weights_of(in_float64.model), metrics, algorithm

    _, metrics, recorded = updated(epochs=6, target_kl=10)
    assert (metrics["steps_applied"], metrics["stopped_early"]) == (6, 0)
    kls, total = [0.0], 0.0
    for _, logprobs, _, weights_R in recorded.calls:  # One or more for each step, whose weights are 1 together.
        ratio_R = (logprobs.current_R - logprobs.old_R).detach()
        kls[-1] += float((weights_R * (ratio_R.exp() - ratio_R - 1)).sum())
        total += float(weights_R.sum())
        if total == pytest.approx(len(kls)):
            kls.append(0.0)
    assert len(kls) == 7
    assert metrics["kl_old"] == pytest.approx(kls[5], rel=1e-6)

    assert kls[2] < kls[3]
    weights, metrics, _ = updated(epochs=6, target_kl=(kls[2] + kls[3]) / 2)
    assert (metrics["steps_applied"], metrics["stopped_early"], metrics["steps_skipped"]) == (3, 3, 0)
    assert metrics["kl_old"] == pytest.approx(kls[3], rel=1e-6)
    expected, metrics, _ = updated(epochs=3)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert metrics.keys().isdisjoint({"kl_old", "stopped_early"})


@pytest.mark.parametrize("epochs", [1, 2])
def test_every_token_in_the_loss_has_its_log_probability_from_before_the_update(
    loaded: LoadedModel, epochs: int
) -> None:
    good = make_batch(loaded)
    batch = replace(good, values_N=np.where(np.arange(len(good)) == 1, np.nan, good.values_N))
    expected = [plain_logprobs(loaded.model, batch, i).detach().numpy() for i in range(len(batch))]

    result = trainer_of(loaded).update(batch, grpo(epochs=epochs))

    assert result.precision == "float32"
    assert [logprobs is None for logprobs in result.logprobs_N] == [reason is not None for reason in result.dropped]
    assert result.dropped[1] == DropReason.NON_FINITE
    counted = 0
    for i, logprobs in enumerate(result.logprobs_N):
        if logprobs is not None:
            mask = mask_of(batch, i).numpy()
            np.testing.assert_allclose(logprobs, np.where(mask, expected[i], np.nan), rtol=0, atol=1e-5)
            counted += int(mask.sum())
    assert counted == result.metrics["tokens_trained"]


def proved(batch: Batch, result: UpdateResult) -> Counter[Proof]:
    """The trained tokens of an update by what is proved of them."""
    proofs: Counter[Proof] = Counter()
    for i, recomputed in enumerate(recomputed_in(batch, result)):
        start, prompt, end = batch.offsets[i], batch.offsets[i] + batch.prompt_lengths_N[i], batch.offsets[i + 1]
        transition = make.transition(
            i,
            version=int(batch.version_N[i]),
            temperature=float(batch.temperature_N[i]),
            prompt_ids=batch.tokens_T[start:prompt],
            response_ids=batch.tokens_T[prompt:end],
            logprobs=batch.behaviour_logprobs_R[batch.response_offsets[i] : batch.response_offsets[i + 1]],
        )
        record = TrainingRecord(*transition.key, 1, 0.0, 0.0, 0.0, result.dropped[i], recomputed)
        certificate = certify(transition, record)
        proofs += Counter() if certificate is None else certificate.counts
    return proofs


def test_what_was_not_sampled_so_is_not_proved(loaded: LoadedModel) -> None:
    batch, trainer = make_batch(loaded), trainer_of(loaded)
    batch = replace(batch, version_N=np.zeros_like(batch.version_N))
    first = trainer.update(batch, grpo())
    trained = first.metrics["tokens_trained"]
    assert proved(batch, first) == {Proof.EXACT: trained}

    # Now version 1 trains. What version 0 sampled is older, and is found out if it claims to be of version 1.
    second = trainer.update(batch, grpo())
    assert proved(batch, second) == {Proof.OTHER_VERSION: trained}
    claimed = replace(batch, version_N=np.ones_like(batch.version_N))
    assert proved(claimed, second)[Proof.DIFFERENT] > 0.9 * trained

    # One wrong id is seen there, and in what follows it; no other response is in doubt.
    i = int(np.flatnonzero([logprobs is not None for logprobs in first.logprobs_N])[0])
    tokens = batch.tokens_T.copy()
    tokens[batch.offsets[i] + batch.prompt_lengths_N[i]] += 1
    fresh = trainer_of(load(loaded.model.name_or_path))
    planted = replace(batch, tokens_T=tokens)
    seen = proved(planted, fresh.update(planted, grpo()))
    assert set(seen) == {Proof.EXACT, Proof.DIFFERENT}
    assert 1 <= seen[Proof.DIFFERENT] <= mask_of(batch, i).sum()


def test_probabilities_of_serving_are_compared_where_the_weights_are_the_same(loaded: LoadedModel) -> None:
    batch = make_batch(loaded)
    own = replace(batch, version_N=np.zeros_like(batch.version_N))
    equal = trainer_of(loaded).update(own, Recorder()).metrics
    assert equal["prob_gap_mean"] < 1e-5
    assert equal["prob_sampled_mean"] == pytest.approx(equal["prob_trained_mean"], abs=1e-5)

    others = replace(own, behaviour_logprobs_R=np.full_like(batch.behaviour_logprobs_R, np.log(0.99)))
    metrics = trainer_of(loaded).update(others, Recorder()).metrics
    assert metrics["prob_sampled_mean"] == pytest.approx(0.99)
    assert metrics["prob_gap_mean"] == pytest.approx(0.99 - metrics["prob_trained_mean"], abs=1e-5)

    older = replace(others, version_N=np.full_like(batch.version_N, -1))
    assert "prob_gap_mean" not in trainer_of(loaded).update(older, Recorder()).metrics, "they may differ"
