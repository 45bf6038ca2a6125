"""New algorithms as a user writes them: the advantages, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agl_algorithms import PolicyGradient, PolicyGradientOptions, Samples, group_statistics
from agl_algorithms.grpo import Grpo
from agl_algorithms.options import GrpoOptions
from agl_core import Capability, CreditKind, kinds
from agl_core.plugins import Plugins

from . import rloo_plugin
from .conftest import Row, make_logprobs, make_samples
from .rloo_plugin import Rloo


class DrGrpo(PolicyGradient):
    def advantages(self, samples, values_R=None):
        return samples.at_tokens(group_statistics(samples).deviation_N)


class MaxRl(PolicyGradient):
    def advantages(self, samples, values_R=None):
        group = group_statistics(samples)
        return samples.at_tokens(torch.where(group.mean_N > 0, group.deviation_N / group.mean_N, 0.0))


def samples_of(*groups: list[float]) -> Samples:
    """One transition of two tokens, the second one masked, for each value."""
    numbered = [(group, value) for group, values in enumerate(groups) for value in values]
    return make_samples([Row(group, i, value, (True, False)) for i, (group, value) in enumerate(numbered)])


def at_first_tokens(algorithm: PolicyGradient, samples: Samples) -> list[float]:
    advantages_R = algorithm.advantages(samples)
    assert not advantages_R[~samples.mask_R].any()
    return advantages_R[samples.mask_R].tolist()


OPTIONS = PolicyGradientOptions()


def test_rloo_by_hand() -> None:
    # Rewards 1, 0, 0.5: the others' means are 0.25, 0.75 and 0.5. A group of one has nothing to compare with.
    found = at_first_tokens(Rloo(OPTIONS), samples_of([1.0, 0.0, 0.5], [0.7], [2.0, 4.0]))
    assert found == pytest.approx([0.75, -0.75, 0.0, 0.0, -2.0, 2.0])


def test_rloo_is_each_reward_minus_the_mean_of_the_others() -> None:
    """The formula as TRL and veRL have it: (r·G − Σ r) / (G − 1) = r·G/(G−1) − mean·G/(G−1)."""
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = (rewards * 8 - rewards.sum()) / 7
    assert at_first_tokens(Rloo(OPTIONS), samples_of(rewards.tolist())) == pytest.approx(expected.tolist())


def test_dr_grpo_is_grpo_without_the_deviation() -> None:
    samples = samples_of([1.0, 0.0, 0.5], [0.7], [2.0, 4.0])
    grpo = Grpo(GrpoOptions(beta=0, std_normalization=False))
    assert at_first_tokens(DrGrpo(OPTIONS), samples) == at_first_tokens(grpo, samples)


def test_maxrl_by_hand() -> None:
    # One success of four: the success gets (1 − 1/4) / (1/4), a failure −1; without a success nothing is learnt.
    assert at_first_tokens(MaxRl(OPTIONS), samples_of([1.0, 0.0, 0.0, 0.0], [0.0, 0.0])) == pytest.approx(
        [3.0, -1.0, -1.0, -1.0, 0.0, 0.0]
    )


def test_the_rest_is_what_grpo_does() -> None:
    """Weights, what is kept, and the loss with every setting that they share."""
    samples = samples_of([1.0, 0.0, 0.5], [2.0, 2.0])
    shared = {"beta": 0.1, "clip": 0.1, "clip_high": 0.3, "importance_cap": 1.1, "aggregation": "token-mean"}
    mine, grpo = Rloo(PolicyGradientOptions(**shared)), Grpo(GrpoOptions(**shared))
    logprobs = make_logprobs(len(samples.mask_R), seed=1)
    advantages_R, weights_R = mine.advantages(samples), mine.weights(samples)
    assert torch.equal(weights_R, grpo.weights(samples))
    for algorithm in (mine, grpo):
        assert algorithm.keep(samples, advantages_R).all(), "the KL term counts for each"
    loss, metrics = mine.loss(samples, logprobs, advantages_R, weights_R)
    expected, expected_metrics = grpo.loss(samples, logprobs, advantages_R, weights_R)
    assert loss == expected
    assert metrics == expected_metrics
    assert Rloo(OPTIONS).keep(samples, advantages_R).tolist() == [True, True, False, False, False]


def test_the_page_on_plugins_shows_the_plugin_that_is_tested() -> None:
    file = Path(__file__).parent / "rloo_plugin.py"
    assert file.read_text() in (file.parents[3] / "docs" / "plugins.md").read_text()


def test_needs_follow_the_settings() -> None:
    plugins = Plugins()
    plugins.register(rloo_plugin, "here")
    component = plugins.components(kinds.ALGORITHM)["rloo"]
    always = {Capability.TOKEN_IDS, Capability.GROUPS}
    assert component.needs(PolicyGradientOptions()) == always
    assert component.takes(PolicyGradientOptions()) is CreditKind.RETURN
    assert component.needs(PolicyGradientOptions(beta=0.1)) == always | {Capability.REFERENCE}
    assert component.build(PolicyGradientOptions(beta=0.1)).needs_reference
