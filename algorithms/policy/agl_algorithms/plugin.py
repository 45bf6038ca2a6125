"""The algorithms that this package registers, and their settings; one that would have no effect is refused.

Importing it imports no torch, so that a configuration can be checked without; building an algorithm does.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core import Capability, CreditKind, hookimpl, kinds
from agl_core.config.sections import ModelPlace
from agl_core.kinds import Register

Aggregation = Literal["rollout", "token-mean", "sequence-mean"]
RatioLevel = Literal["token", "sequence"]
WhiteningUnit = Literal["tokens", "transitions"]


class Settings(BaseModel):
    """Settings of an algorithm, and what follows from them; a setting without effect is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def needs(self) -> frozenset[Capability]:
        """Capabilities that the engine and the run must have."""
        return frozenset({Capability.TOKEN_IDS})

    def takes(self) -> frozenset[CreditKind]:
        """The credited values that the algorithm reads."""
        return frozenset({CreditKind.RETURN})

    def without_effect(self) -> dict[str, str]:
        """Names of settings that change nothing beside the others, each with the remedy."""
        return {}

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> Self:
        for name, remedy in self.without_effect().items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"'{name}' has no effect here: {remedy}")
        return self


class AlgorithmOptions(Settings):
    """Settings of `agl_algorithms.Algorithm`."""

    aggregation: Aggregation = "rollout"
    """'rollout': every group weighs the same, in it every rollout, in it every transition, in it every token;
    'token-mean': every token weighs the same; 'sequence-mean': every transition."""
    epochs: int = Field(1, ge=1, le=100)
    """Passes over the batch in one update."""
    minibatches: int = Field(1, ge=1, le=10_000)
    """Optimizer steps in one pass."""


class PolicyGradientOptions(AlgorithmOptions):
    """Settings of `agl_algorithms.PolicyGradient`."""

    surrogate: Literal["clip", "cispo"] = "clip"
    """'clip': a token whose ratio is outside the clip range has no gradient; 'cispo': its weight is bounded instead
    (arXiv 2506.13585)."""
    clip: float | None = Field(None, gt=0, lt=1)
    """The ratio is clipped to [1 - clip, 1 + clip_high]; absent: 0.2, of GRPO's ratio per transition 3e-4 and 4e-4."""
    clip_high: float | None = Field(None, gt=0, le=10)
    """Upper clip range (DAPO); by default the lower one."""
    beta: float = Field(0.0, ge=0, le=10)
    """Weight of the KL to the initial weights; 0: no reference model."""
    entropy: float = Field(0.0, ge=0, le=10)
    """Weight of a bonus for the entropy of the policy's distribution at each token, in nats: keeps it exploring (0.001
    to 0.01 are usual); 0: none."""
    target_kl: float | None = Field(None, gt=0, le=10)
    """For several optimizer steps in an update: the first one on whose tokens KL(old ‖ current) is above this (k3, mean
    by weight) is not made, nor are those after it (0.01 to 0.05 are usual)."""
    importance_cap: float | None = Field(None, ge=0, le=1000)
    """Truncate importance weights old/behaviour here; 0: no weights. Absent: 2 with the engine 'verl', whose servers
    compute otherwise than its training, else 0."""
    importance_floor: float | None = Field(None, gt=0, le=1)
    """With importance_cap: a token whose weight is below this, or above the cap, is left out of the loss instead of
    truncated (IcePop; 0.5 with a cap of 5 is usual)."""
    importance_level: RatioLevel = "token"
    """One importance weight per token, or one per transition: the product over its tokens."""

    def needs(self) -> frozenset[Capability]:
        reference = {Capability.REFERENCE} if self.beta > 0 else set()
        return super().needs() | reference | ({Capability.TARGET_KL} if self.target_kl is not None else set())

    @model_validator(mode="after")
    def _leaves_tokens(self) -> Self:
        if self.importance_cap and self.importance_floor and self.importance_floor > self.importance_cap:
            raise ValueError("'importance_floor' is above 'importance_cap', which leaves no token.")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1, and rise above it."""
        low = 0.2 if self.clip is None else self.clip
        return low, low if self.clip_high is None else self.clip_high

    def without_effect(self) -> dict[str, str]:
        capped = ("importance_level", "importance_floor")
        unused = {} if self.importance_cap else dict.fromkeys(capped, "set importance_cap (2 is usual).")
        if self.epochs * self.minibatches == 1:
            unused["target_kl"] = "an update has one step. Set epochs or minibatches to 2 or more."
        return unused


class GrpoOptions(PolicyGradientOptions):
    """Advantages relative to the group, clipped ratio, KL to the initial weights (arXiv 2402.03300)."""

    std_normalization: bool = True
    """Divide advantages by the group's standard deviation."""
    ratio: RatioLevel = "token"
    """One ratio per token, or one per transition (GSPO)."""
    normalize: Literal["sum", "each"] = "sum"
    """'each': every named reward is normalised within its group before the weighted sum, and the sums over the batch
    (GDPO, arXiv 2601.05242); 'sum': the sum within its group."""

    def needs(self) -> frozenset[Capability]:
        named = {Capability.NAMED_REWARDS} if self.normalize == "each" else set()
        return super().needs() | {Capability.GROUPS} | named

    def takes(self) -> frozenset[CreditKind]:
        """Advantages are trained on as they are, so that a way of its own to make them has no effect."""
        is_usual = self.std_normalization and self.normalize == "sum"
        return super().takes() | ({CreditKind.ADVANTAGE} if is_usual else set())

    def without_effect(self) -> dict[str, str]:
        unused = {"std_normalization": "normalize is 'each'."} if self.normalize == "each" else {}
        return super().without_effect() | unused

    @property
    def clip_range(self) -> tuple[float, float]:
        """A ratio per transition has about a thousandth of the range of a ratio per token, as in GSPO."""
        if self.ratio == "token" or self.clip is not None:
            return super().clip_range
        return 3e-4, 4e-4 if self.clip_high is None else self.clip_high


class TimeOptions(PolicyGradientOptions):
    """Settings of an algorithm that can own the time axis; if it does, credit must yield rewards."""

    across_calls: bool = False
    """Add up what came after a call inside the algorithm: credit must then yield rewards, not returns. One trained call
    to the next is one step; what was earned between them belongs to the first."""

    def takes(self) -> frozenset[CreditKind]:
        return frozenset({CreditKind.REWARD}) if self.across_calls else super().takes()


class ReinforceOptions(TimeOptions):
    """Returns normalised over the batch, clipped ratio, neither critic nor groups (arXiv 2501.03262)."""

    gamma: float = Field(1.0, ge=0, le=1)
    """With across_calls: what a reward is worth one call earlier."""
    whitening: WhiteningUnit | Literal["off"] = "tokens"
    """The unit that counts once in the batch's mean and deviation of the returns; 'off': neither, and the return is the
    advantage. Recorded replies are then imitated in proportion to their rewards."""

    def takes(self) -> frozenset[CreditKind]:
        """Advantages are trained on as they are: the batch's mean and deviation have no effect."""
        is_usual = not self.across_calls and self.whitening == "tokens"
        return super().takes() | ({CreditKind.ADVANTAGE} if is_usual else set())

    def without_effect(self) -> dict[str, str]:
        unused = {} if self.across_calls else {"gamma": "set across_calls = true, or leave time to credit."}
        return super().without_effect() | unused


class PpoOptions(TimeOptions):
    """A learned critic, advantages by GAE, clipped ratio and clipped value loss (arXiv 1707.06347)."""

    gamma: float = Field(1.0, ge=0, le=1)
    """The worth of a value one step earlier: a token, or with across_calls a call."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's λ: 0 trusts the critic one step ahead, 1 only what was observed."""
    whitening: WhiteningUnit | Literal["off"] = "tokens"
    """The unit that counts once in the batch's mean and deviation of the advantages; 'off': neither."""
    critic_learning_rate: float = Field(1e-5, gt=0, le=1)
    """The critic's step size; its other optimizer settings are the policy's."""
    critic_epochs: int = Field(1, ge=1, le=100)
    """The critic's passes over the batch in one update."""

    def needs(self) -> frozenset[Capability]:
        return super().needs() | {Capability.CRITIC}


class DistillOptions(PolicyGradientOptions):
    """The policy's own replies made as likely as a teacher finds them, token by token (arXiv 2306.13649)."""

    teacher: ModelPlace
    """The model to learn from, with the policy's tokenizer: a folder or a hub name, or the base URL of an
    OpenAI-compatible server, ending in /v1, that returns `prompt_logprobs` as vLLM does."""
    teacher_model: str | None = None
    """The name of a served teacher on its server."""
    teacher_key_env: str | None = None
    """The environment variable that holds the key of a served teacher's server; absent: no key."""
    reward_weight: float = Field(0.0, ge=0, le=1000)
    """How much GRPO's advantage of the credited return counts beside the teacher's log-ratio; 0: no reward is looked
    at."""

    def needs(self) -> frozenset[Capability]:
        groups = {Capability.GROUPS} if self.reward_weight > 0 else set()
        temperature = {Capability.UNIT_TEMPERATURE} if self.teacher_model is not None else set()
        return super().needs() | {Capability.RESCORE, Capability.TEACHER} | groups | temperature

    def takes(self) -> frozenset[CreditKind]:
        return super().takes() if self.reward_weight > 0 else frozenset()

    @property
    def _is_served(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))

    def without_effect(self) -> dict[str, str]:
        served = () if self._is_served else ("teacher_model", "teacher_key_env")
        return super().without_effect() | dict.fromkeys(served, "the teacher is no address of a server.")

    @model_validator(mode="after")
    def _named_where_served(self) -> Self:
        if self._is_served and self.teacher_model is None:
            raise ValueError("'teacher_model' is missing: the name of the teacher on its server.")
        return self


class DpoOptions(Settings):
    """Better rollouts of a group made likelier than worse ones, without a reward model (arXiv 2305.18290)."""

    beta: float = Field(0.1, gt=0, le=100)
    """How strongly the policy is held to the initial weights: a larger one, the more."""

    def needs(self) -> frozenset[Capability]:
        return super().needs() | {Capability.GROUPS, Capability.REFERENCE, Capability.RESCORE}


class SftOptions(AlgorithmOptions):
    """Recorded replies are made more likely; needs no rewards (maximum likelihood)."""

    def needs(self) -> frozenset[Capability]:
        return super().needs() | {Capability.DEMONSTRATIONS, Capability.RECORDED_TEXTS}

    def takes(self) -> frozenset[CreditKind]:
        return frozenset()  # What is imitated need not have been rewarded.


class RftOptions(AlgorithmOptions):
    """The best of the policy's own rollouts are made more likely (arXiv 2304.06767, 2308.08998).

    Exactly one of `threshold` and `top_k` says which rollouts are imitated.
    """

    threshold: float | None = None
    """Imitate the rollouts with at least this return."""
    top_k: int | None = Field(None, ge=1)
    """Imitate so many rollouts of each group, those of highest return."""

    def needs(self) -> frozenset[Capability]:
        return super().needs() | ({Capability.GROUPS} if self.threshold is None else set())

    @model_validator(mode="after")
    def _has_one_choice(self) -> Self:
        if (self.threshold is None) == (self.top_k is None):
            given = "does not say which rollouts are good" if self.top_k is None else "has both threshold and top_k"
            raise ValueError(f"{given}; set either threshold = RETURN or top_k = ROLLOUTS OF EACH GROUP")
        return self


ALGORITHMS: Mapping[str, tuple[str, type[Settings]]] = {
    "grpo": ("grpo.Grpo", GrpoOptions),
    "reinforce++": ("reinforce.Reinforce", ReinforceOptions),
    "ppo": ("ppo.Ppo", PpoOptions),
    "distill": ("distill.Distill", DistillOptions),
    "dpo": ("dpo.Dpo", DpoOptions),
    "sft": ("imitation.Sft", SftOptions),
    "rft": ("imitation.Rft", RftOptions),
}
"""By name: the class in this package, and its settings, whose docstring begins with what the algorithm does."""
_OFFLINE = ("dpo", "sft", "rft")
"""Algorithms whose loss has no log-probabilities of sampling."""


@hookimpl
def register_components(register: Register) -> None:
    for name, (path, options) in ALGORITHMS.items():
        register(
            kinds.ALGORITHM,
            name,
            partial(_build, path),
            options=options,
            doc=options.__doc__,
            needs=options.needs,
            takes=options.takes,
            provides={Capability.RECORDED_TEXTS} if name in _OFFLINE else (),
        )


def _build(path: str, options: Settings) -> Any:
    return pkgutil.resolve_name(f"agl_algorithms.{path}")(options)
