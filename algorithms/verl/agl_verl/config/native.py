"""veRL's own algorithms by name: `algorithm.name = "verl:gspo"`. Imports no veRL, so that they can be listed anywhere.

An estimator of veRL goes with its clipped loss, a loss of veRL with its GRPO estimator (`verl:gpg` is both);
`estimator` and `loss` combine them otherwise, and name what `modules` register with veRL. veRL computes everything
then, by its own rules: a row is a transition, whose reward is its credited value, at its last token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from agl_core import Capability
from agl_core.errors import ConfigError

PREFIX = "verl:"
GROUPED = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "reinforce_plus_plus_baseline",
    }
)
"""Estimators that compare the rows of a group."""
ESTIMATORS = frozenset({*GROUPED, "gae", "reinforce_plus_plus"})
"""Those of veRL 0.9 that need nothing but rows, groups and a critic."""
LOSSES = frozenset(
    {"vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo", "dppo_tv", "dppo_kl"}
)
_NO_VARIANCE = "it needs the sums of squared probabilities (sum_pi_squared), which veRL's V1 trainer does not hand over"
UNUSABLE_ESTIMATORS: Mapping[str, str] = {
    "remax": "it needs the reward of a greedy rollout of each prompt, and agl makes none",
    "gdpo": "it needs the components of each reward, which veRL's V1 trainer does not hand over; their weights are in "
    "[rewards]",
    "optimal_token_baseline": _NO_VARIANCE,
    "tir_optimal_token_baseline": _NO_VARIANCE,
}
UNUSABLE_LOSSES: Mapping[str, str] = {
    "bypass_mode": "it takes the log-probabilities of serving for the old ones, and agl has these computed anew",
}
"""What veRL 0.9 has besides, and why it cannot be used."""
_OF_CRITIC = ("critic_learning_rate", "critic_epochs")
_OF_GAE = ("lam", *_OF_CRITIC)
_CLIPS = ("clip", "clip_high")
IGNORED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "estimator": {
        "": _OF_CRITIC,
        "gae": (),
        "reinforce_plus_plus": _OF_GAE,
        **dict.fromkeys(GROUPED, ("gamma", *_OF_GAE)),
    },
    "loss": {
        "": (),
        **dict.fromkeys(("gpg", "kl_cov", "dro"), _CLIPS),
        "sapo": ("aggregation", *_CLIPS),
        "geo_mean": ("aggregation",),
    },
}
"""Settings that have no effect with an estimator or a loss; by "" with any other."""
NAMES = tuple(sorted(f"{PREFIX}{name}" for name in ESTIMATORS | LOSSES))


class NativeOptions(BaseModel):
    """Settings that veRL's own algorithms share; the rest is said by `engine.verl.overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: str = Field("grpo", description="veRL's advantage estimator (algorithm.adv_estimator).")
    loss: str = Field("vanilla", description="veRL's policy loss (actor.policy_loss.loss_mode).")
    modules: tuple[str, ...] = Field(
        (),
        description="Python modules that register estimators or losses of yours with veRL; every process of the engine "
        "imports them, on every node.",
    )
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="How veRL adds up the tokens' losses (actor.loss_agg_mode)."
    )
    clip: float = Field(0.2, gt=0, lt=1, description="Lower clip range of the ratio.")
    clip_high: float | None = Field(None, gt=0, le=10, description="Upper clip range; by default the lower one.")
    beta: float = Field(0.0, ge=0, le=10, description="Weight of the KL to the initial weights; 0: no reference model.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount inside a response.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's λ; of the estimator 'gae' only.")
    epochs: int = Field(1, ge=1, le=100, description="Passes over the batch in one update.")
    minibatches: int = Field(1, ge=1, le=10_000, description="Optimizer steps in one pass.")
    critic_learning_rate: float = Field(1e-5, gt=0, le=1, description="The critic's step size; of 'gae' only.")
    critic_epochs: int = Field(1, ge=1, le=100, description="The critic's passes over the batch; of 'gae' only.")

    @property
    def needs_critic(self) -> bool:
        return self.estimator == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check("estimator", self.estimator, ESTIMATORS, UNUSABLE_ESTIMATORS, any_other=bool(self.modules))
        _check("policy loss", self.loss, LOSSES, UNUSABLE_LOSSES, any_other=bool(self.modules))
        for part, ignored in IGNORED.items():
            for name in ignored.get(getattr(self, part), ignored[""]):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"'{name}' has no effect here: veRL's {part} '{getattr(self, part)}' ignores it.")
        return self


def _check(what: str, name: str, known: Collection[str], unusable: Mapping[str, str], *, any_other: bool) -> None:
    if name in unusable:
        raise ValueError(f"veRL's {what} '{name}' cannot be used here: {unusable[name]}.")
    if name not in known and not any_other:
        raise ValueError(
            f"veRL has no {what} '{name}' here: {', '.join(sorted(known))}. One of your own is registered by a module "
            f"that 'modules' names."
        )


def options_of(name: str) -> type[NativeOptions]:
    """The settings of `verl:…`: its own estimator or loss as the default."""
    own = name.removeprefix(PREFIX)
    fields: dict[str, Any] = {
        part: (str, Field(own, description=NativeOptions.model_fields[part].description))
        for part, known in (("estimator", ESTIMATORS), ("loss", LOSSES))
        if own in known
    }
    return create_model(f"NativeOptions_{own}", __base__=NativeOptions, __doc__=NativeOptions.__doc__, **fields)


def needs(options: NativeOptions) -> frozenset[Capability]:
    """This engine and ids; groups, a critic, a reference model where estimator or KL term ask for them."""
    wanted = {Capability.OWN_ALGORITHMS, Capability.TOKEN_IDS}
    if options.estimator in GROUPED:
        wanted.add(Capability.GROUPS)
    if options.needs_critic:
        wanted.add(Capability.CRITIC)
    if options.needs_reference:
        wanted.add(Capability.REFERENCE)
    return frozenset(wanted)


def build_native(options: NativeOptions) -> NoReturn:
    """An algorithm of veRL itself, by its name there; with engine.name = "verl" only."""
    raise ConfigError(
        f"The estimator '{options.estimator}' with the loss '{options.loss}' is veRL's own code: set engine.name to "
        f"'verl', or choose an algorithm of agl (grpo, ppo, reinforce++)."
    )
