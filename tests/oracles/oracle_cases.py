"""The mapping: what of agl is to equal what of veRL and TRL, on which batches, and where it is not to.

Used on the committed fixtures in the ordinary environment, and on fresh batches beside the real functions in theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import oracle_ours as ours
from .oracle_batches import Batch, draw

Outputs = Mapping[str, Tensor]


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
        found: Outputs = getattr(importlib.import_module(f".{module}", __package__), function)(batch, **self.arguments)
        return found

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
            msg=lambda found, name=name: f"{case.name}: {name}: {found}",
        )
    if case.differs:
        off = max(_relative(own[name], expected[name]) for name in case.differs)
        assert off > 1e-3, f"{case.name}: {case.differs} were meant to differ and do not"


def _relative(own: Tensor, expected: Tensor) -> float:
    difference = (own - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    return float(difference.nan_to_num(nan=torch.inf))


def _grpo(**options: Any) -> dict[str, Any]:
    return {"name": "grpo", "options": {"beta": 0.0} | options}


def _verl_advantages() -> list[Case]:
    def grpo(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.advantages, **_grpo(**options))

    def reinforce(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.advantages, name="reinforce++", options=options)

    def ppo(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.advantages, name="ppo", options=options)

    def targets(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.critic_targets, options=options)

    time = {"gamma": 0.9, "lam": 0.7}
    calls = {"across_calls": True, **time}
    by_call = {"step": "call", **time}
    advantages = ("advantages",)
    return [
        Case("verl-grpo", "single", grpo(), "oracle_verl.grpo"),
        Case("verl-grpo-without-std", "single", grpo(std_normalization=False), "oracle_verl.grpo", {"by_std": False}),
        Case("verl-grpo-epsilon", "single", grpo(epsilon=0.1), "oracle_verl.grpo", {"epsilon": 0.1}),
        Case("verl-grpo-by-rollout", "episodes", grpo(), "oracle_verl.grpo", {"step": "rollout"}),
        Case("verl-grpo-by-transition", "episodes", grpo(), "oracle_verl.grpo", differs=advantages),
        Case("verl-grpo-lone-rollout", "lone", grpo(), "oracle_verl.grpo", differs=advantages),
        Case("verl-reinforce++", "episodes", reinforce(), "oracle_verl.reinforce_plus_plus"),
        Case(
            "verl-reinforce++-transitions",
            "episodes",
            reinforce(whitening="transitions"),
            "oracle_verl.reinforce_plus_plus",
            {"step": "transition"},
        ),
        Case(
            "verl-reinforce++-across-calls",
            "rewards",
            reinforce(across_calls=True, gamma=0.9, whitening="transitions"),
            "oracle_verl.reinforce_plus_plus",
            {"step": "call", "gamma": 0.9},
        ),
        Case(
            "verl-reinforce++-discount-by-token",
            "episodes",
            reinforce(),
            "oracle_verl.reinforce_plus_plus",
            {"gamma": 0.9},
            differs=advantages,
        ),
        Case("verl-gae", "episodes", ppo(**time), "oracle_verl.gae", time),
        Case("verl-gae-undiscounted", "episodes", ppo(), "oracle_verl.gae", {"gamma": 1.0, "lam": 1.0}),
        Case("verl-gae-plain", "rewards", ppo(whitening="off", **time), "oracle_verl.gae", {"whitened": False, **time}),
        Case("verl-gae-across-calls", "rewards", ppo(whitening="transitions", **calls), "oracle_verl.gae", by_call),
        Case("verl-critic-targets", "episodes", targets(**time), "oracle_verl.critic_targets", time),
        Case("verl-critic-targets-across-calls", "rewards", targets(**calls), "oracle_verl.critic_targets", by_call),
    ]


def _verl_losses() -> list[Case]:
    def loss(_per_response: bool = False, **options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.policy_loss, **_grpo(**options), per_response=_per_response)

    def case(name: str, kind: str, own: Callable[[Batch], Outputs], **more: Any) -> Case:
        return Case(name, kind, own, "oracle_verl.policy_loss", **more)

    def of_values(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.value_loss, options=options)

    token, sequence = {"aggregation": "token-mean"}, {"aggregation": "sequence-mean"}
    mean_of_means = {"aggregation": "seq-mean-token-mean"}
    gspo = {"ratio": "sequence", "clip": 0.1, "clip_high": 0.2, **sequence}
    their_gspo = {"mode": "gspo", "low": 0.1, "high": 0.2, "per_response": True, **mean_of_means}
    both = ("loss", "gradient")
    return [
        case("verl-loss", "episodes", loss(**token)),
        case(
            "verl-loss-clip-range",
            "episodes",
            loss(clip=0.1, clip_high=0.28, **token),
            arguments={"low": 0.1, "high": 0.28},
        ),
        case("verl-loss-sequence-mean", "hollow-episodes", loss(**sequence), arguments=mean_of_means),
        Case("verl-loss-by-rollout", "hollow-episodes", loss(), "oracle_verl.policy_loss_by_rollout"),
        case("verl-loss-of-transitions", "episodes", loss(), arguments=mean_of_means, differs=both),
        Case("verl-loss-token-sum", "episodes", loss(**token), "oracle_verl.policy_loss_summed_in_responses"),
        Case(
            "verl-loss-unequal-groups",
            "single",
            loss(drop_equal_groups=True, **token),
            "oracle_verl.policy_loss_of_unequal_groups",
        ),
        case("verl-loss-kl", "episodes", loss(beta=0.1, **token), arguments={"beta": 0.1}),
        case("verl-loss-kl-bounded", "far", loss(beta=0.1, **token), arguments={"beta": 0.1}, differs=both),
        case("verl-loss-far", "far", loss(**token)),
        case("verl-loss-dual-clip", "far", loss(**token), arguments={"dual": 3.0}, differs=both),
        case("verl-loss-impossible-token", "impossible", loss(**token)),
        case(
            "verl-loss-importance",
            "episodes",
            loss(importance_cap=1.1, **token),
            arguments={"importance": ("token", 1.1)},
        ),
        case(
            "verl-loss-importance-sequence",
            "episodes",
            loss(importance_cap=1.2, importance_level="sequence", **token),
            arguments={"importance": ("sequence", 1.2)},
        ),
        case("verl-gspo", "hollow-episodes", loss(True, **gspo), arguments=their_gspo),
        case(
            "verl-gspo-importance-sequence",
            "episodes",
            loss(True, importance_cap=1.2, importance_level="sequence", **gspo),
            arguments={"importance": ("sequence", 1.2), **their_gspo},
        ),
        case(
            "verl-gspo-importance",
            "episodes",
            loss(True, importance_cap=1.1, **gspo),
            arguments={"importance": ("token", 1.1), **their_gspo},
            differs=("gradient",),
        ),
        Case(
            "verl-value-loss",
            "episodes",
            of_values(value_clip=0.2, **token),
            "oracle_verl.value_loss",
            {"aggregation": "token-mean", "clip": 0.2},
        ),
        Case(
            "verl-value-loss-unclipped",
            "hollow-episodes",
            of_values(value_clip=None, **sequence),
            "oracle_verl.value_loss",
            mean_of_means,
        ),
    ]


def _trl() -> list[Case]:
    def whole(**options: Any) -> Callable[[Batch], Outputs]:
        return partial(ours.advantages_and_loss, **_grpo(epsilon=1e-4, **options))

    def case(
        name: str, own: Callable[[Batch], Outputs], kind: str = "uniform", differs: Any = (), **theirs: Any
    ) -> Case:
        return Case(name, kind, own, "oracle_trl.grpo", theirs, differs)

    token, sequence = {"aggregation": "token-mean"}, {"aggregation": "sequence-mean"}
    gspo = {"ratio": "sequence", "clip": 0.1, "clip_high": 0.2, **sequence}
    their_gspo = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2, "loss_type": "grpo"}
    their_kl = {"beta": 0.1, "use_bias_correction_kl": False}
    both = ("loss", "gradient")
    without_std = partial(ours.advantages_and_loss, **_grpo(std_normalization=False, **token))
    return [
        case("trl-grpo", whole(), loss_type="grpo"),
        case("trl-grpo-kl", whole(beta=0.1, **sequence), loss_type="grpo", **their_kl),
        case("trl-kl-by-ratio", whole(beta=0.1, **sequence), differs=both, loss_type="grpo", beta=0.1),
        case("trl-dapo", whole(clip_high=0.28, **token), loss_type="dapo", epsilon_high=0.28),
        case("trl-bnpo", whole(clip=0.1, beta=0.1, **token), loss_type="bnpo", epsilon=0.1, **their_kl),
        Case("trl-dr-grpo", "uniform", without_std, "oracle_trl.grpo_summed", {"scale_rewards": "none"}),
        case("trl-gspo", whole(**gspo), **their_gspo),
        case(
            "trl-gspo-importance",
            whole(importance_cap=1.1, **gspo),
            importance=("token_truncate", 1.1),
            **their_gspo,
        ),
        case(
            "trl-importance",
            whole(importance_cap=1.1, beta=0.1, **token),
            importance=("token_truncate", 1.1),
            loss_type="dapo",
            **their_kl,
        ),
        case(
            "trl-importance-sequence",
            whole(importance_cap=1.2, importance_level="sequence", **token),
            importance=("sequence_truncate", 1.2),
            loss_type="dapo",
        ),
        case("trl-masked-response", whole(**sequence), "hollow", differs=both, loss_type="grpo"),
        case("trl-impossible-token", whole(**token), "impossible", differs=both, loss_type="dapo"),
    ]


def every_case() -> list[Case]:
    return [*_verl_advantages(), *_verl_losses(), *_trl()]
