"""Every algorithm on every batch, made as a run makes it, and what each takes and needs."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agl_algorithms import Algorithm, plugin
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_core import Capability, CreditKind, kinds
from agl_core.config.resolve import ChosenComponent
from agl_core.plugins import Plugins

from .conftest import Row, batches, build, critic_values, make_logprobs, select

Change: TypeAlias = tuple[dict[str, Any], dict[str, Any]]

REGISTERED = Plugins()
REGISTERED.register(plugin, "test")


def choose(name: str, **options: Any) -> ChosenComponent:
    component = REGISTERED.components(kinds.ALGORITHM)[name]
    return ChosenComponent(component, component.options(**options))


def made(name: str, **options: Any) -> Algorithm:
    return choose(name, **options).build()


EVERY_KIND: list[Algorithm] = [
    made("grpo"),
    made("grpo", beta=0, std_normalization=False, aggregation="token-mean"),
    made("grpo", clip_high=0.28, aggregation="sequence-mean", entropy=0.1),
    made("grpo", ratio="sequence", clip=0.1, clip_high=0.2, importance_cap=1.1),
    made("grpo", surrogate="cispo", importance_cap=1.2, importance_floor=0.9),
    made("reinforce++"),
    made("reinforce++", across_calls=True, gamma=0.7, whitening="transitions", beta=0.1, clip_high=0.3),
    made("ppo", importance_cap=2, importance_level="sequence"),
    made("ppo", gamma=0.9, lam=0.8, whitening="off", importance_cap=1.1, aggregation="token-mean"),
    made("ppo", across_calls=True, gamma=0.9, lam=0.5, beta=0.2),
    made("sft"),
    made("rft", threshold=0.25, aggregation="token-mean"),
    made("rft", top_k=2),
]
WITH_DPO: list[Algorithm] = [*EVERY_KIND, made("dpo")]
"""DPO's weights do not sum to one."""
OF_ALL: list[Change] = [
    ({}, {"clip": 0.1}),
    ({}, {"clip_high": 0.4}),
    ({}, {"aggregation": "token-mean"}),
    ({}, {"aggregation": "sequence-mean"}),
    ({}, {"entropy": 0.1}),
    ({}, {"surrogate": "cispo"}),
    ({"surrogate": "cispo"}, {"clip": 0.1}),
    ({}, {"importance_cap": 1.05}),
    ({"importance_cap": 1.05}, {"importance_floor": 0.95}),
    ({"importance_cap": 1.05}, {"importance_level": "sequence"}),
]
ACROSS_CALLS: list[Change] = [
    ({}, {"beta": 0.1}),
    ({}, {"across_calls": True}),
    ({"across_calls": True}, {"gamma": 0.5}),
    ({}, {"whitening": "transitions"}),
    ({}, {"whitening": "off"}),
]
CHANGES: dict[str, list[Change]] = {
    "grpo": [
        ({}, {"beta": 0.1}),
        ({}, {"std_normalization": False}),
        ({}, {"normalize": "each"}),
        ({}, {"ratio": "sequence"}),
        ({"ratio": "sequence"}, {"clip": 0.2}),
        ({"ratio": "sequence"}, {"clip_high": 0.2}),
    ],
    "reinforce++": ACROSS_CALLS,
    "ppo": [*ACROSS_CALLS, ({}, {"gamma": 0.5}), ({}, {"lam": 0.5}), ({"across_calls": True}, {"lam": 0.5})],
}
"""Settings of each algorithm, and a change of them, beside those that all have."""
BEST = {"top_k": 1}
IMITATION: dict[str, list[Change]] = {
    "sft": [({}, {"aggregation": "token-mean"}), ({}, {"aggregation": "sequence-mean"})],
    "rft": [
        (BEST, {"top_k": 2}),
        (BEST, {"aggregation": "token-mean"}),
        ({"threshold": 0.9}, {"threshold": 0.2}),
    ],
}


def advantages_of(algorithm: Algorithm, samples: Samples, logprobs: Logprobs) -> Tensor:
    advantages_R = algorithm.advantages(samples, critic_values(samples) if algorithm.needs_critic else None)
    if algorithm.needs_scores:
        return algorithm.rescore(samples, logprobs, advantages_R, algorithm.weights(samples))[0]
    return advantages_R


def whole_loss(algorithm: Algorithm, samples: Samples, logprobs: Logprobs) -> Tensor:
    return algorithm.loss(samples, logprobs, advantages_of(algorithm, samples, logprobs), algorithm.weights(samples))[0]


@pytest.mark.parametrize(
    ("name", "base", "change"),
    [
        *((name, *change) for name, own in CHANGES.items() for change in (*OF_ALL, *own)),
        *((name, *change) for name, own in IMITATION.items() for change in own),
    ],
    ids=str,
)
def test_every_loss_option_changes_the_gradient(
    ragged: Samples, name: str, base: dict[str, Any], change: dict[str, Any]
) -> None:
    logprobs = make_logprobs(ragged.mask_R.numel(), seed=3)
    before, after = (
        torch.autograd.grad(whole_loss(made(name, **options), ragged, logprobs), logprobs.current_R)[0]
        for options in (base, base | change)
    )
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"normalize": "each", "std_normalization": False}),
        ("grpo", {"importance_level": "sequence"}),
        ("grpo", {"importance_floor": 0.5}),
        ("grpo", {"importance_cap": 0.5, "importance_floor": 0.8}),
        ("grpo", {"surrogate": "ppo"}),
        ("grpo", {"clip": 0}),
        ("grpo", {"klip": 1}),
        ("grpo", {"target_kl": 0.02}),
        ("grpo", {"target_kl": 0, "epochs": 2}),
        ("reinforce++", {"gamma": 0.9}),
        ("reinforce++", {"whitening": "no"}),
        ("sft", {"clip": 0.2}),
        ("rft", {"threshold": 0.5, "beta": 0.1}),
        ("rft", {}),
        ("rft", {"threshold": 0.5, "top_k": 1}),
        ("distill", {}),
        ("distill", {"teacher": "a/folder", "teacher_model": "name"}),
        ("distill", {"teacher": "a/folder", "teacher_key_env": "KEY"}),
        ("distill", {"teacher": "http://localhost:8000/v1"}),
    ],
)
def test_settings_without_effect_and_out_of_bounds_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        made(name, **settings)


@given(batches(), st.sampled_from(EVERY_KIND))
def test_weights_sum_to_one_and_no_token_is_masked_and_weighs(
    batch: tuple[list[Row], int], algorithm: Algorithm
) -> None:
    samples, _ = build(*batch)
    weights = algorithm.weights(samples)
    total = weights.sum().item()
    assert total == pytest.approx(1.0) or total == 0.0
    assert (weights[~samples.mask_R] == 0).all()


@given(batches(), st.sampled_from(WITH_DPO), st.randoms(use_true_random=False))
def test_order_of_transitions_does_not_matter(batch: tuple[list[Row], int], algorithm: Algorithm, rng: Any) -> None:
    samples, logprobs = build(*batch)
    order = list(range(samples.values_N.numel()))
    rng.shuffle(order)
    shuffled, compared, tokens = select(samples, logprobs, order)
    torch.testing.assert_close(
        advantages_of(algorithm, shuffled, compared),
        advantages_of(algorithm, samples, logprobs)[tokens],
        rtol=1e-9,
        atol=1e-9,
    )
    torch.testing.assert_close(whole_loss(algorithm, shuffled, compared), whole_loss(algorithm, samples, logprobs))


@given(batches(), st.sampled_from(WITH_DPO), st.integers(1, 4))
def test_micro_batches_add_up_to_the_whole(batch: tuple[list[Row], int], algorithm: Algorithm, size: int) -> None:
    samples, logprobs = build(*batch)
    advantages, weights = advantages_of(algorithm, samples, logprobs), algorithm.weights(samples)
    whole, metrics = algorithm.loss(samples, logprobs, advantages, weights)
    count = samples.values_N.numel()
    parts = []
    for start in range(0, count, size):
        picked, compared, tokens = select(samples, logprobs, list(range(start, min(start + size, count))))
        parts.append(algorithm.loss(picked, compared, advantages[tokens], weights[tokens]))
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for name, value in metrics.items():
        combine = max if name.endswith("_max") else sum
        torch.testing.assert_close(combine(part[1][name] for part in parts), value)


REWARD, RETURN, ADVANTAGE = CreditKind


@pytest.mark.parametrize(
    ("name", "options", "takes", "needs"),
    [
        ("grpo", {}, {RETURN, ADVANTAGE}, {Capability.GROUPS}),
        ("grpo", {"beta": 0.04}, {RETURN, ADVANTAGE}, {Capability.GROUPS, Capability.REFERENCE}),
        ("grpo", {"std_normalization": False}, {RETURN}, {Capability.GROUPS}),
        ("grpo", {"normalize": "each"}, {RETURN}, {Capability.GROUPS, Capability.NAMED_REWARDS}),
        ("grpo", {"target_kl": 0.02, "minibatches": 2}, {RETURN, ADVANTAGE}, {Capability.GROUPS, Capability.TARGET_KL}),
        ("reinforce++", {}, {RETURN, ADVANTAGE}, set()),
        ("reinforce++", {"whitening": "off"}, {RETURN}, set()),
        ("reinforce++", {"across_calls": True}, {REWARD}, set()),
        ("reinforce++", {"beta": 0.1}, {RETURN, ADVANTAGE}, {Capability.REFERENCE}),
        ("dpo", {}, {RETURN}, {Capability.GROUPS, Capability.REFERENCE, Capability.RESCORE}),
        ("distill", {"teacher": "a/b"}, set(), {Capability.RESCORE, Capability.TEACHER}),
        (
            "distill",
            {"teacher": "http://there/v1", "teacher_model": "big"},
            set(),
            {Capability.RESCORE, Capability.TEACHER, Capability.UNIT_TEMPERATURE},
        ),
        (
            "distill",
            {"teacher": "a/b", "reward_weight": 0.5},
            {RETURN},
            {Capability.GROUPS, Capability.RESCORE, Capability.TEACHER},
        ),
        ("ppo", {}, {RETURN}, {Capability.CRITIC}),
        ("ppo", {"across_calls": True}, {REWARD}, {Capability.CRITIC}),
        ("ppo", {"beta": 0.1}, {RETURN}, {Capability.CRITIC, Capability.REFERENCE}),
        ("sft", {}, set(), {Capability.DEMONSTRATIONS, Capability.RECORDED_TEXTS}),
        ("rft", {"threshold": 0.5}, {RETURN}, set()),
        ("rft", {"top_k": 1}, {RETURN}, {Capability.GROUPS}),
    ],
)
def test_each_is_registered_with_what_it_takes_and_needs(
    name: str, options: dict[str, Any], takes: set[CreditKind], needs: set[Capability]
) -> None:
    chosen = choose(name, **options)
    algorithm, component = chosen.build(), chosen.component
    assert chosen.needs == {Capability.TOKEN_IDS} | needs
    assert chosen.takes == takes
    # What it tells the engine is what the check goes by.
    assert algorithm.needs_critic == (Capability.CRITIC in needs)
    assert algorithm.needs_reference == (Capability.REFERENCE in needs)
    assert algorithm.needs_scores == (Capability.RESCORE in needs)
    assert all(field.description for field in component.options.model_fields.values())
    assert component.options(**chosen.options.model_dump()) == chosen.options
