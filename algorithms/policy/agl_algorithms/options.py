"""The settings of each algorithm. Imports no torch, so that a configuration can be checked without it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Aggregation = Literal["rollout", "token-mean", "sequence-mean"]
RatioLevel = Literal["token", "sequence"]


class GrpoOptions(BaseModel):
    """Settings of GRPO; a setting that another one would switch off is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip: float = Field(0.2, gt=0, lt=1, description="The token ratio is clipped to [1 - clip, 1 + clip_high].")
    clip_high: float | None = Field(None, gt=0, le=10, description="Upper clip range (DAPO); by default the lower one.")
    beta: float = Field(
        0.04, ge=0, le=10, description="Weight of the KL to the initial weights; 0: no reference model."
    )
    std_normalization: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    epsilon: float = Field(1e-6, gt=0, le=1, description="Added to the group's standard deviation.")
    ratio: RatioLevel = Field("token", description="One ratio per token, or one per transition (GSPO).")
    sequence_clip: float = Field(3e-4, gt=0, lt=1, description="Lower clip range of the ratio per transition (GSPO).")
    sequence_clip_high: float = Field(4e-4, gt=0, le=10, description="Upper clip range of the ratio per transition.")
    aggregation: Aggregation = Field(
        "rollout",
        description="'rollout': every group weighs the same, in it every rollout, in it every transition, in it every "
        "token; 'token-mean': every token weighs the same; 'sequence-mean': every transition.",
    )
    drop_equal_groups: bool = Field(
        False, description="Leave groups whose credited values are all equal out of the loss and its weights (DAPO)."
    )
    importance_threshold: float | None = Field(
        None, gt=0, le=1000, description="Truncate importance weights old/behaviour here; absent: no such weights."
    )
    epochs: int = Field(1, ge=1, le=100, description="Passes over the batch in one update.")
    minibatches: int = Field(1, ge=1, le=10_000, description="Optimizer steps in one pass.")

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> Self:
        def refuse(names: tuple[str, ...], remedy: str) -> None:
            for name in names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"'{name}' has no effect here: {remedy}")

        if self.ratio == "sequence":
            refuse(("clip", "clip_high"), "with ratio = 'sequence', set sequence_clip and sequence_clip_high.")
        else:
            refuse(("sequence_clip", "sequence_clip_high"), "set ratio = 'sequence', or use clip and clip_high.")
        if not self.std_normalization:
            refuse(("epsilon",), "std_normalization is off.")
        return self
