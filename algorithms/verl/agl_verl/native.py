"""veRL's own algorithms by name: `algorithm.name = "verl:gspo"`. Imports no veRL, so that they can be listed anywhere.

An estimator of veRL goes with its clipped loss, a loss of veRL with its GRPO estimator; `estimator` and `loss` combine
them otherwise. veRL computes everything then, by its own rules: a row is a transition, whose reward is its credited
value, at its last token.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from agl_core import Need
from agl_core.errors import ConfigError

PREFIX = "verl:"
GROUPED = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"})
"""Estimators that compare the rows of a group."""
ESTIMATORS = frozenset({*GROUPED, "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Those of veRL 0.9 that need nothing but rows, groups and a critic."""
LOSSES = frozenset({"vanilla", "gspo", "sapo", "clip_cov", "kl_cov", "geo_mean", "cispo", "dppo_tv", "dppo_kl"})
NAMES = tuple(sorted(f"{PREFIX}{name}" for name in ESTIMATORS | LOSSES))


class NativeOptions(BaseModel):
    """Settings that veRL's own algorithms share; the rest is said by `engine.verl.overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: str = Field("grpo", description="veRL's advantage estimator (algorithm.adv_estimator).")
    loss: str = Field("vanilla", description="veRL's policy loss (actor.policy_loss.loss_mode).")
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

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"'{self.estimator}' is none of veRL's estimators here: {', '.join(sorted(ESTIMATORS))}.")
        if self.loss not in LOSSES:
            raise ValueError(f"'{self.loss}' is none of veRL's policy losses here: {', '.join(sorted(LOSSES))}.")
        if self.estimator != "gae":
            for name in ("lam", "critic_learning_rate", "critic_epochs"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"'{name}' has no effect here: it is the estimator gae's.")
        return self


def options_of(name: str) -> type[NativeOptions]:
    """The settings of `verl:…`: its own estimator or loss as the default."""
    own = name.removeprefix(PREFIX)
    chosen = "estimator" if own in ESTIMATORS else "loss"
    described = NativeOptions.model_fields[chosen].description
    fields: dict[str, Any] = {chosen: (str, Field(own, description=described))}
    return create_model(f"NativeOptions_{own}", __base__=NativeOptions, __doc__=NativeOptions.__doc__, **fields)


def needs(options: NativeOptions) -> frozenset[Need]:
    """This engine, ids and returns; groups, a critic, a reference model where estimator or KL term ask for them."""
    wanted = {Need.OWN_ALGORITHMS, Need.TOKEN_IDS, Need.RETURNS}
    if options.estimator in GROUPED:
        wanted.add(Need.GROUPS)
    if options.estimator == "gae":
        wanted.add(Need.CRITIC)
    if options.beta > 0:
        wanted.add(Need.REFERENCE)
    return frozenset(wanted)


def build_native(options: NativeOptions) -> None:
    """An algorithm of veRL itself, by its name there; with engine.name = "verl" only."""
    raise ConfigError(
        f"The estimator '{options.estimator}' with the loss '{options.loss}' is veRL's own code: set engine.name to "
        f"'verl', or choose an algorithm of agl (grpo, ppo, reinforce++)."
    )
