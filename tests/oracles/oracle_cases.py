"""The mapping: what of agl is to equal what of veRL and TRL, on which batches, and where it is not to."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from agl_algorithms import plugin
from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_core import kinds
from agl_core.learning.rewards import normalized
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Reward
from agl_rewards.evaluators import overlong

from .oracle_batches import Batch, draw

Options = Mapping[str, Any]
Outputs = Mapping[str, Tensor]


def build(name: str, options: Options) -> Ppo:
    """The registered algorithm of that name; only one with a critic has the critic's methods.

    `epsilon` is GRPO's constant, which TRL has otherwise.
    """
    plugins = Plugins()
    plugins.register(plugin, "agl-algorithms")
    component = plugins.components(kinds.ALGORITHM)[name]
    algorithm = component.build(component.options(**{k: v for k, v in options.items() if k != "epsilon"}))
    algorithm.epsilon = options.get("epsilon", 1e-6)
    return algorithm


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


def by_named_rewards(batch: Batch, weights: Mapping[str, float]) -> Outputs:
    """Of rollouts of one call each."""
    terminals: list[float] = []
    for _, rows in groupby(range(len(batch.transitions)), key=lambda i: batch.transitions[i].group):
        group = [
            make.episode(
                rewards=tuple(Reward("r", 0, name, of_each[i], name) for name, of_each in batch.named().items())
            )
            for i in rows
        ]
        terminals += [episode.terminal or 0.0 for episode in normalized(group, weights)]
    samples = replace(samples_of(batch), values_N=torch.tensor(terminals, dtype=torch.float64))
    return {"advantages": build("grpo", {"normalize": "each"}).advantages(samples)}


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


def preferences(batch: Batch, options: Options) -> Outputs:
    """From log-probabilities before an update, here the current ones, to the gradient of its step."""
    dpo, samples = build("dpo", options), samples_of(batch)
    current_R = batch.flat("current").requires_grad_()
    logprobs = Logprobs(current_R, current_R.detach(), batch.flat("behaviour"), batch.flat("reference"))
    weights_R = dpo.weights(samples)
    advantages_R, measured = dpo.rescore(samples, logprobs, dpo.advantages(samples), weights_R)
    loss, _ = dpo.loss(samples, logprobs, advantages_R, weights_R)
    return {
        "loss": measured["loss"],
        "gradient": torch.autograd.grad(loss, current_R)[0],
        "accuracy": measured["pair_accuracy"],
        "margin": measured["pair_margin"],
    }


def imitation(batch: Batch, name: str, options: Options) -> Outputs:
    algorithm, samples = build(name, options), samples_of(batch)
    return _loss(batch, algorithm, samples, algorithm.advantages(samples))


def overlong_rewards(batch: Batch, limit: int, buffer: int) -> Outputs:
    rewards: list[float] = []
    for row in batch.transitions:
        long = make.transition(response_ids=[0] * len(row.mask))
        rewards.append(overlong(make.episode(long), limit=limit, buffer=buffer).get(long.key, 0.0))
    return {"rewards": torch.tensor(rewards, dtype=torch.float64)}


def _loss(batch: Batch, algorithm: Ppo, samples: Samples, advantages_R: Tensor) -> Outputs:
    current_R = batch.flat("current").requires_grad_()
    logprobs = Logprobs(current_R, batch.flat("old"), batch.flat("behaviour"), batch.flat("reference"))
    loss, _ = algorithm.loss(samples, logprobs, advantages_R, algorithm.weights(samples))
    return {"loss": loss.detach(), "gradient": torch.autograd.grad(loss, current_R)[0]}


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    kind: str
    """Of `oracle_batches.KINDS`."""
    ours: Callable[[Batch], Outputs]
    function: str
    """Theirs, as module.function; the module is imported where it can be."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    """The outputs of which some are meant to differ; docs/algorithms.md lists each such case by name."""

    def theirs(self, batch: Batch) -> Outputs:
        module, function = self.function.split(".")
        result: Outputs = getattr(importlib.import_module(f".{module}", __package__), function)(batch, **self.arguments)
        return result

    def batch(self, seed: int) -> Batch:
        return draw(self.kind, seed)


def check(case: Case, own: Outputs, expected: Outputs) -> None:
    """Equal to 1e-6 (relative, and 1e-7 absolute near zero); of what is meant to differ, something is off by 1e-3."""
    assert set(own) == set(expected)
    for name in expected.keys() - set(case.differs):
        torch.testing.assert_close(
            own[name],
            expected[name],
            rtol=1e-6,
            atol=1e-7,
            msg=lambda text, name=name: f"{case.name}: {name}: {text}",
        )
    if case.differs:
        off = max(_relative(own[name], expected[name]) for name in case.differs)
        assert off > 1e-3, f"{case.name}: {case.differs} were meant to differ and do not"


def _relative(own: Tensor, expected: Tensor) -> float:
    difference = (own - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return float(difference.nan_to_num(nan=torch.inf))


def _of(ours: Callable[..., Outputs], *algorithm: str, **defaults: Any) -> Callable[..., Callable[[Batch], Outputs]]:
    """The functions that make `Case.ours` of the options that a case has beside these."""
    return lambda **options: lambda batch: ours(batch, *algorithm, options=defaults | options)


TOKEN, SEQUENCE = {"aggregation": "token-mean"}, {"aggregation": "sequence-mean"}
GSPO = {"ratio": "sequence", "clip": 0.1, "clip_high": 0.2, **SEQUENCE}
LOSS = ("loss", "gradient")
BY_NAME = {"right": 1.0, "form": 0.5}


def _verl() -> list[Case]:
    def case(
        name: str, kind: str, own: Callable[[Batch], Outputs], function: str, differs: Any = (), **theirs: Any
    ) -> Case:
        return Case(name, kind, own, f"oracle_verl.{function}", theirs, differs)

    grpo, reinforce = _of(advantages, "grpo", beta=0.0), _of(advantages, "reinforce++")
    ppo, targets, value = _of(advantages, "ppo"), _of(critic_targets), _of(value_loss)
    loss, token = _of(policy_loss, "grpo", beta=0.0), _of(policy_loss, "grpo", beta=0.0, **TOKEN)
    gspo = _of(partial(policy_loss, per_response=True), "grpo", beta=0.0, **GSPO)
    time: Any = {"gamma": 0.9, "lam": 0.7}
    calls: Any = {"across_calls": True, **time}
    means: Any = {"aggregation": "seq-mean-token-mean"}
    their_gspo: Any = {"mode": "gspo", "low": 0.1, "high": 0.2, "per_response": True, **means}
    by_sequence: Any = {"importance_cap": 1.2, "importance_level": "sequence"}
    floored: Any = {"importance_cap": 1.2, "importance_floor": 0.9}
    cispo, their_cispo = token(surrogate="cispo", clip=0.1, clip_high=0.28), {"mode": "cispo", "low": 0.1, "high": 0.28}
    off, near_limit = ("advantages",), {"limit": 6, "buffer": 4}
    return [
        case("verl-grpo", "single", grpo(), "grpo"),
        case("verl-grpo-without-std", "single", grpo(std_normalization=False), "grpo", by_std=False),
        case("verl-gdpo", "single", partial(by_named_rewards, weights=BY_NAME), "gdpo", weights=BY_NAME),
        case("verl-grpo-by-rollout", "episodes", grpo(), "grpo", step="rollout"),
        case("verl-grpo-by-transition", "episodes", grpo(), "grpo", off),
        case("verl-grpo-lone-rollout", "lone", grpo(), "grpo", off),
        case("verl-reinforce++", "episodes", reinforce(), "reinforce_plus_plus"),
        case(
            "verl-reinforce++-transitions", "episodes", reinforce(whitening="transitions"), "reinforce_plus_plus",
            step="transition",
        ),
        case(
            "verl-reinforce++-across-calls", "rewards",
            reinforce(across_calls=True, gamma=0.9, whitening="transitions"), "reinforce_plus_plus",
            step="call", gamma=0.9,
        ),
        case("verl-reinforce++-discount-by-token", "episodes", reinforce(), "reinforce_plus_plus", off, gamma=0.9),
        case("verl-gae", "episodes", ppo(**time), "gae", **time),
        case("verl-gae-undiscounted", "episodes", ppo(), "gae", gamma=1.0, lam=1.0),
        case("verl-gae-plain", "rewards", ppo(whitening="off", **time), "gae", whitened=False, **time),
        case("verl-gae-across-calls", "rewards", ppo(whitening="transitions", **calls), "gae", step="call", **time),
        case("verl-critic-targets", "episodes", targets(**time), "critic_targets", **time),
        case("verl-critic-targets-across-calls", "rewards", targets(**calls), "critic_targets", step="call", **time),
        case("verl-loss", "episodes", token(), "policy_loss"),
        case("verl-loss-clip-range", "episodes", token(clip=0.1, clip_high=0.28), "policy_loss", low=0.1, high=0.28),
        case("verl-loss-sequence-mean", "hollow-episodes", loss(**SEQUENCE), "policy_loss", **means),
        case("verl-loss-by-rollout", "hollow-episodes", loss(), "policy_loss_by_rollout"),
        case("verl-loss-of-transitions", "episodes", loss(), "policy_loss", LOSS, **means),
        case("verl-loss-token-sum", "episodes", token(), "policy_loss_summed_in_responses"),
        case("verl-loss-kl", "episodes", token(beta=0.1), "policy_loss", beta=0.1),
        case("verl-loss-kl-bounded", "far", token(beta=0.1), "policy_loss", LOSS, beta=0.1),
        case("verl-loss-far", "far", token(), "policy_loss"),
        case("verl-loss-dual-clip", "far", token(), "policy_loss", LOSS, dual=3.0),
        case("verl-loss-impossible-token", "impossible", token(), "policy_loss"),
        case("verl-loss-importance", "episodes", token(importance_cap=1.1), "policy_loss", importance=("token", 1.1)),
        case(
            "verl-loss-importance-sequence", "episodes", token(**by_sequence), "policy_loss",
            importance=("sequence", 1.2),
        ),
        case("verl-icepop", "episodes", token(**floored), "policy_loss", importance=("token", "0.9_1.2")),
        case(
            "verl-icepop-sequence", "episodes", token(**floored, importance_level="sequence"), "policy_loss",
            importance=("sequence", "0.9_1.2"),
        ),
        case("verl-cispo", "episodes", cispo, "policy_loss", **their_cispo),
        case("verl-cispo-far", "far", cispo, "policy_loss", **their_cispo),
        case("verl-cispo-impossible-token", "impossible", cispo, "policy_loss", **their_cispo),
        case(
            "verl-cispo-icepop", "hollow-episodes", loss(surrogate="cispo", **SEQUENCE, **floored), "policy_loss",
            mode="cispo", importance=("token", "0.9_1.2"), **means,
        ),
        case("verl-overlong", "episodes", partial(overlong_rewards, **near_limit), "overlong", **near_limit),
        case("verl-gspo", "hollow-episodes", gspo(), "policy_loss", **their_gspo),
        case(
            "verl-gspo-importance-sequence", "episodes", gspo(**by_sequence), "policy_loss",
            importance=("sequence", 1.2), **their_gspo,
        ),
        case(
            "verl-gspo-importance", "episodes", gspo(importance_cap=1.1), "policy_loss", ("gradient",),
            importance=("token", 1.1), **their_gspo,
        ),
        case(
            "verl-value-loss", "episodes", value(**TOKEN), "value_loss",
            aggregation="token-mean", clip=0.2,
        ),
    ]  # fmt: skip


def _trl() -> list[Case]:
    def case(
        name: str, own: Callable[[Batch], Outputs], kind: str = "uniform", differs: Any = (), **theirs: Any
    ) -> Case:
        return Case(name, kind, own, "oracle_trl.grpo", theirs, differs)

    whole = _of(advantages_and_loss, "grpo", beta=0.0, epsilon=1e-4)
    their_gspo: Any = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2}
    their_gspo["loss_type"] = "grpo"
    their_kl: Any = {"beta": 0.1, "use_bias_correction_kl": False}
    importance, by_sequence = ("token_truncate", 1.1), ("sequence_truncate", 1.2)
    without_std = _of(advantages_and_loss, "grpo", beta=0.0, std_normalization=False, **TOKEN)
    floored = {"importance_cap": 1.2, "importance_floor": 0.9, **TOKEN}
    # It has no lower bound of the ratio, and its upper one is not beside 1.
    cispo = _of(
        advantages_and_loss, "grpo", beta=0.0, epsilon=1e-4, surrogate="cispo", clip=0.999, clip_high=0.1, **TOKEN
    )
    their_cispo: Any = {"loss_type": "cispo", "epsilon_high": 1.1}
    capped = whole(importance_cap=1.2, importance_level="sequence", **TOKEN)
    return [
        case("trl-grpo", whole(), loss_type="grpo"),
        case("trl-grpo-kl", whole(beta=0.1, **SEQUENCE), loss_type="grpo", **their_kl),
        case("trl-kl-by-ratio", whole(beta=0.1, **SEQUENCE), differs=LOSS, loss_type="grpo", beta=0.1),
        case("trl-dapo", whole(clip_high=0.28, **TOKEN), loss_type="dapo", epsilon_high=0.28),
        case("trl-bnpo", whole(clip=0.1, beta=0.1, **TOKEN), loss_type="bnpo", epsilon=0.1, **their_kl),
        Case("trl-dr-grpo", "uniform", without_std(), "oracle_trl.grpo_summed", {"scale_rewards": "none"}),
        case("trl-gspo", whole(**GSPO), **their_gspo),
        case("trl-gspo-importance", whole(importance_cap=1.1, **GSPO), importance=importance, **their_gspo),
        case(
            "trl-importance", whole(importance_cap=1.1, beta=0.1, **TOKEN), importance=importance, loss_type="dapo",
            **their_kl,
        ),
        case("trl-importance-sequence", capped, importance=by_sequence, loss_type="dapo"),
        case(
            "trl-icepop", whole(**floored), importance=("token_mask", 1.2), loss_type="dapo",
            vllm_importance_sampling_clip_min=0.9,
        ),
        case(
            "trl-icepop-sequence", whole(**floored, importance_level="sequence"), importance=("sequence_mask", 1.2),
            loss_type="dapo", vllm_importance_sampling_clip_min=0.9,
        ),
        case("trl-cispo", cispo(), **their_cispo),
        case("trl-cispo-sequence", cispo(ratio="sequence"), importance_sampling_level="sequence", **their_cispo),
        case("trl-masked-response", whole(**SEQUENCE), "hollow", LOSS, loss_type="grpo"),
        case("trl-impossible-token", whole(**TOKEN), "impossible", LOSS, loss_type="dapo"),
        Case("trl-sft", "episodes", _of(imitation, "sft", **TOKEN)(), "oracle_trl.sft"),
        Case(
            "trl-sft-of-good-rollouts", "episodes", _of(imitation, "rft", **TOKEN)(threshold=0.25), "oracle_trl.sft",
            {"threshold": 0.25},
        ),
        *(
            Case(name, "episodes", _of(preferences)(**settings), "oracle_trl.dpo", settings)
            for name, settings in {
                "trl-dpo": {"beta": 0.1},
                "trl-dpo-beta": {"beta": 1.5},
            }.items()
        ),
    ]  # fmt: skip


def every_case() -> list[Case]:
    return [*_verl(), *_trl()]
