"""The keys of `[policies.NAME]`: the agents it answers, its weights, and how it learns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import Field

from agl_core.config.sections import PluginChoice, Section, is_among


class LoraSection(Section):
    """Train a low-rank adapter instead of all weights."""

    rank: int = Field(16, ge=1, description="Rank of the update.")
    alpha: float = Field(32.0, gt=0, description="Scale: the update is multiplied by alpha / rank.")
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Names of the linear layers to adapt.",
    )


class ModelSection(Section):
    """The weights to start from."""

    path: str = Field(description="A folder (relative to this file) or a Hugging Face hub name.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: as saved. The torch engine takes float32 for bfloat16 on a CPU without instructions for it, "
        "where float32 is several times as fast.",
    )
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with the weights.")
    lora: LoraSection | None = Field(None, description="Train a LoRA adapter; absent: all weights.")


class OptimizerSection(Section):
    """AdamW's settings; its moments decay by 0.9 and 0.999."""

    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Step size after the warm-up; absent: by the model's size, 4e-4 for a million weights, 2e-5 for "
        "135 million, 2e-6 for 7 billion, and ten times as much for a LoRA adapter (veRL: 1e-6 and 1e-5).",
    )
    schedule: Literal["constant", "cosine"] = Field(
        "constant",
        description="The step size over the run's train.steps: it stays constant, or falls to 0 along a cosine, so "
        "that the policy settles and does not keep drifting.",
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps over which the step size grows linearly.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")


def policy_of(
    agent: str | None, model: str, agents: Mapping[str, Sequence[str]], policies: Collection[str]
) -> str | None:
    """Which of the policies answers a call: the agent's own (by `agents`), else the one that is named like the model,
    else 'default', else the only one; None if it is none of these.

    Of the policies that an agent's name fits, the first wins. So an agent that adapters recognise need not know what
    policies there are.
    """
    for policy, patterns in agents.items():
        if is_among(agent, patterns):
            return policy
    if model in policies:
        return model
    if "default" in policies:
        return "default"
    return next(iter(policies)) if len(policies) == 1 else None


class PolicySection(Section):
    """A policy: the agents that it answers, its weights, and how it learns."""

    agents: tuple[str, ...] = Field(
        (),
        description="Names or patterns of the agents that it answers, whatever model they ask for. If several policies "
        "name an agent, the first in the file answers it. Any other agent gets the policy whose name is the model that "
        "it asks for, else 'default', else the only one.",
    )
    model: ModelSection
    optimizer: OptimizerSection = OptimizerSection()
    algorithm: PluginChoice | None = Field(
        None, description="This policy's own algorithm and its settings, like [algorithm]; absent: the run's."
    )
    credit: PluginChoice | None = Field(
        None, description="This policy's own credit rule and its settings, like [credit]; absent: the run's."
    )
