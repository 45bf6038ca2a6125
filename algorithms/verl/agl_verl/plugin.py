"""The parts of this package for agl: the engine with its settings, and the algorithm `verl`, which is veRL's own.

Importing it imports neither veRL, Ray, vLLM nor torch, so that a configuration can be checked without them.

The algorithm `verl` combines an estimator and a loss of veRL's registries. veRL computes everything then, by its own
rules and keys: a row is a transition, whose reward is its credited value, at its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core import Capability, CreditKind, hookimpl, kinds
from agl_core.kinds import Register

if TYPE_CHECKING:
    from agl_core.protocols import Engine, EngineContext


class VerlOptions(BaseModel):
    """Settings of the distributed engine; what veRL can do beyond them is said by `overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = Field(
        None,
        description="The Ray cluster to join: 'auto' on one of its nodes, or HOST:PORT; absent: a local Ray starts.",
    )
    nodes: int = Field(1, ge=1, le=1024, description="Nodes that train, and serve by turns unless `serving_gpus` do.")
    gpus_per_node: int = Field(1, ge=1, le=64, description="GPUs of each of them; on a CPU, worker processes.")
    serving_gpus: int = Field(
        0,
        ge=0,
        le=65536,
        description="GPUs that only serve, beside nodes x gpus_per_node, which then only train: rollouts go on during "
        "updates ([async] max_staleness). 0: training and serving share the GPUs, and take turns.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: GPUs if this node has one or a cluster is joined, otherwise the CPU, for tiny models.",
    )
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs that one serving replica spreads its weights over.")
    start_timeout: float = Field(
        3600.0,
        gt=0,
        description="Seconds that Ray, the training workers and vLLM may take until they serve.",
    )
    max_context: int | None = Field(
        None, ge=16, description="Longest prompt and response together, in tokens; absent: the model's own limit."
    )
    max_rows: int = Field(256, ge=1, le=4096, description="Replies decoded at the same time, in each serving replica.")
    serving_memory: float = Field(
        0.5, gt=0, lt=1, description="Share of a GPU's memory that serving takes: weights, and keys and values."
    )
    cache_mib: int = Field(1024, ge=16, description="On a CPU: memory for keys and values of a replica, in MiB.")
    tokens_per_micro_batch: int = Field(
        16384,
        ge=1,
        description="Tokens of one training pass on one GPU; no transition may be longer. Fewer take less memory.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs that training spreads each transition's tokens over, which may then have as many times "
        "`tokens_per_micro_batch`.",
    )
    offload: bool = Field(
        False, description="Keep weights and optimizer state in the nodes' memory while they are not in use."
    )
    gradient_checkpointing: bool = Field(
        True, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto",
        description="How training computes attention. auto: flash_attention_2 on GPUs, where flash-attn has to be "
        "installed, sdpa on a CPU. With sdpa and eager a policy and a reference need no flash-attn, and pads are "
        "computed too.",
    )
    overrides: tuple[str, ...] = Field(
        (),
        description="Hydra overrides of veRL's own configuration, as on veRL's command line: KEY=VALUE, or +KEY=VALUE "
        "for a key that it does not have. What agl decides itself is refused. `model_engine=megatron` and others: see "
        "the README.",
    )

    @model_validator(mode="after")
    def _fills_the_gpus(self) -> Self:
        training = (self.nodes * self.gpus_per_node, "nodes x gpus_per_node")
        serving = (self.serving_gpus, "serving_gpus") if self.serving_gpus else training
        for name, (gpus, where) in {"sequence_parallel": training, "tensor_parallel": serving}.items():
            if gpus % getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, which does not divide the {gpus} GPUs ({where}).")
        return self


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
"""veRL's estimators that compare the rows of a group."""
_NO_VARIANCE = "it needs the sums of squared probabilities (sum_pi_squared), which veRL's V1 trainer does not hand over"
UNUSABLE: Mapping[str, str] = {
    "remax": "it needs the reward of a greedy rollout of each prompt, and agl makes none",
    "gdpo": "it needs the components of each reward, which veRL's V1 trainer does not hand over; their weights are in "
    "[rewards]",
    "optimal_token_baseline": _NO_VARIANCE,
    "tir_optimal_token_baseline": _NO_VARIANCE,
    "bypass_mode": "it takes the log-probabilities of serving for the old ones, and agl has these computed anew",
}
"""veRL's estimators and losses that cannot be used, and why."""


class NativeOptions(BaseModel):
    """An algorithm of veRL itself; how it computes is said by `engine.verl.overrides`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: str = Field("grpo", description="veRL's advantage estimator (algorithm.adv_estimator).")
    loss: str = Field("vanilla", description="veRL's policy loss (actor.policy_loss.loss_mode).")
    modules: tuple[str, ...] = Field(
        (),
        description="Python modules that register estimators or losses of yours with veRL; every process of the engine "
        "imports them, on every node.",
    )
    epochs: int = Field(1, ge=1, le=100, description="Passes over the batch in one update.")
    minibatches: int = Field(1, ge=1, le=10_000, description="Optimizer steps in one pass.")

    @property
    def needs_critic(self) -> bool:
        return self.estimator == "gae"

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        for name in (self.estimator, self.loss):
            if name in UNUSABLE:
                raise ValueError(f"veRL's '{name}' cannot be used here: {UNUSABLE[name]}.")
        return self


def needs(options: NativeOptions) -> frozenset[Capability]:
    """This engine and ids; groups and a critic where the estimator asks for them."""
    wanted = {Capability.OWN_ALGORITHMS, Capability.TOKEN_IDS}
    if options.estimator in GROUPED:
        wanted.add(Capability.GROUPS)
    if options.needs_critic:
        wanted.add(Capability.CRITIC)
    return frozenset(wanted)


def build_native(options: NativeOptions) -> NativeOptions:
    """An algorithm of veRL itself, by its names there; with engine.name = "verl" only."""
    return options


def build_engine(options: VerlOptions, context: EngineContext) -> Engine:
    """veRL on Ray with vLLM serving: one machine or a cluster."""
    from agl_verl.engine import VerlEngine

    return VerlEngine(options, context)


@hookimpl
def register_components(register: Register) -> None:
    provides = {Capability.TOKEN_IDS, Capability.REFERENCE, Capability.CRITIC, Capability.OWN_ALGORITHMS}
    # vLLM samples in other kernels, and often in another precision, than FSDP trains in.
    defaults = {"importance_cap": 2.0}
    register(kinds.ENGINE, "verl", build_engine, options=VerlOptions, provides=provides, defaults=defaults)
    register(kinds.ALGORITHM, "verl", build_native, options=NativeOptions, needs=needs, takes=CreditKind.RETURN)
