"""The kinds of tables in a run's file, those of its server, and those of a policy: agents, weights, how it learns."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""A model's name on the Hugging Face hub, as a whole match."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The name of a run or a policy, as a whole match: folders are named so."""


class ModelPlace(str):
    """The type of a plugin's setting for a model: a folder, or else a name or an address for the plugin."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema(min_length=1))


def is_among(agent: str | None, patterns: Sequence[str]) -> bool:
    """True if an agent has one of these names; `*`, `?` and `[…]` are wildcards, upper case counts, None is unnamed.

    >>> is_among("editor-2", ["writer", "editor*"]), is_among("critic", ["writer"]), is_among(None, ["*"])
    (True, False, True)
    """
    return any(fnmatchcase(agent or "", pattern) for pattern in patterns)


class Section(BaseModel):
    """A table of the file; unknown keys are errors. The docstring of a key describes it to users."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class OpenSection(BaseModel):
    """A table whose further keys are a plugin's settings, which the plugin checks."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PluginChoice(OpenSection):
    """`name`, or a text alone, chooses a plugin; a table of that name holds its settings. A table alone is chosen too.

    `settings` are the tables by plugin name, as written in the file.
    """

    name: str
    """The plugin to use; its settings are in the table of this name. Not needed beside one table alone."""

    @model_validator(mode="before")
    @classmethod
    def _name_by_table(cls, section: Any) -> Any:
        if not isinstance(section, dict) or "name" in section:
            return {"name": section} if isinstance(section, str) else section
        tables = [name for name, value in section.items() if isinstance(value, dict)]
        return {"name": tables[0], **section} if len(tables) == 1 else section


class ServerSection(Section):
    """The Lightning Server: where agents and workers reach the run."""

    host: str = Field("127.0.0.1", min_length=1)
    """The address to listen on. An address that other machines can reach requires a worker key of your choice in
    AGL_WORKER_KEY. Traffic is not encrypted."""
    port: int = Field(0, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    view_port: int = Field(0, ge=0, le=65535)
    """The port of the pages in the browser; 0 takes a free one. They are for this machine alone, unless `host` can be
    reached from others and AGL_OPERATOR_KEY is set: it is their password."""


class PassthroughSection(Section):
    """The server of requests that no policy answers and that are not recorded: embeddings, moderations, audio,
    images."""

    url: str | None = Field(None, pattern=r"^https?://[^\s?#]+$")
    """An OpenAI-compatible base URL, ending in /v1; absent: the model server that also answers the model calls."""
    api_key_env: str | None = Field(None, min_length=1)
    """The environment variable with that server's key. It is taken out of the server's environment, so that agents do
    not have it."""


class GatewaySection(Section):
    """Requests of agents besides model calls."""

    passthrough: PassthroughSection = PassthroughSection()


class LoraSection(Section):
    """Train a low-rank adapter instead of all weights."""

    rank: int = Field(16, ge=1)
    """Rank of the update."""
    alpha: float = Field(32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers to adapt."""


class ModelSection(Section):
    """The weights to start from."""

    path: str
    """A folder (relative to this file) or a Hugging Face hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: as saved. The torch engine takes float32 for bfloat16 on a CPU without instructions for it, where float32
    is several times as fast."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the weights."""
    lora: LoraSection | None = None
    """Train a LoRA adapter; absent: all weights."""


class OptimizerSection(Section):
    """AdamW's settings; its moments decay by 0.9 and 0.999."""

    learning_rate: float | None = Field(None, gt=0)
    """Step size after the warm-up; absent: by the model's size, 4e-4 for a million weights, 2e-5 for 135 million, 2e-6
    for 7 billion, and ten times as much for a LoRA adapter (veRL: 1e-6 and 1e-5)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The step size over the run's train.steps: it stays constant, or falls to 0 along a cosine, so that the policy
    settles and does not keep drifting."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the step size grows linearly."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""


def rate_share(schedule: str, warmup_steps: int, steps: int, training_step: int, training_steps: int) -> float:
    """The share of the step size after `steps` optimizer steps, in a training step (1, 2, …): warm-up times schedule.

    >>> [rate_share("constant", 4, n, 1, 10) for n in (0, 3, 9)]
    [0.25, 1.0, 1.0]
    """
    warm = min(1.0, (steps + 1) / warmup_steps) if warmup_steps > 0 else 1.0
    if schedule == "constant":
        return warm
    done = min(1.0, max(0, training_step - 1) / max(1, training_steps))
    return warm * (1 + math.cos(math.pi * done)) / 2


def policy_of(
    agent: str | None, model: str, agents: Mapping[str, Sequence[str]], policies: Collection[str]
) -> str | None:
    """The policy that answers a call: the agent's first (by `agents`), else the one that is named like the model, else
    'default', else the only one; None if it is none of these."""
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

    agents: tuple[str, ...] = ()
    """Names or patterns of the agents that it answers, whatever model they ask for. If several policies name an agent,
    the first in the file answers it. Any other agent gets the policy whose name is the model that it asks for, else
    'default', else the only one."""
    model: ModelSection
    optimizer: OptimizerSection = OptimizerSection()
    algorithm: PluginChoice | None = None
    """This policy's own algorithm and its settings, like [algorithm]; absent: the run's."""
    credit: PluginChoice | None = None
    """This policy's own credit rule and its settings, like [credit]; absent: the run's."""


SMALLEST, LARGEST = 1e-6, 1e-3
_RATE, _WEIGHTS, _EXPONENT = 2e-5, 135e6, 0.6
"""A step size for a model of so many weights, and the exponent by which it falls with the size."""
_ADAPTER = 10
"""Times the rate of all weights for a LoRA adapter: it starts without effect, and has few weights to make one."""


def usual_learning_rate(weights: int | None, *, adapter: bool) -> float:
    """A step size for reinforcement learning of a model of so many weights; None: of billions.

    >>> [usual_learning_rate(weights, adapter=False) for weights in (850_000, 135_000_000, 3_000_000_000)]
    [0.0004, 2e-05, 3e-06]
    >>> usual_learning_rate(135_000_000, adapter=True)
    0.0002
    """
    rate = SMALLEST if weights is None else _RATE * (_WEIGHTS / max(1, weights)) ** _EXPONENT
    rate = min(LARGEST, max(SMALLEST, rate))
    return float(f"{rate * (_ADAPTER if adapter else 1):.0e}")
