"""agl's algorithms inside veRL: as the losses of its training workers, and in its registries.

veRL calls the losses that `worker_group.set_loss_fn(partial(actor_loss, chosen))` gave it with a micro-batch; its rows
are flattened to the ragged tensors of `agl_algorithms.interface`, so that these are the very functions that the torch
engine runs. Token weights come with the rows, already normalised over the whole optimizer step and corrected, and so
does everything that needs the whole batch; a pad row's weights are zero. veRL averages gradients over its data-parallel
workers, so a sum over all rows is each worker's sum times their number.

The registries are for runs that veRL's own trainer drives. It hands an estimator rows and their group: each row is a
rollout of its own there, and a group's statistics are over rows. An estimator that needs a critic's values gets none
from veRL, so PPO has no estimator here but a loss only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agl_algorithms.interface import Algorithm, CriticAlgorithm, Logprobs, Samples
from agl_algorithms.plugin import GrpoOptions, PpoOptions, ReinforceOptions, build_grpo, build_ppo, build_reinforce
from agl_core.errors import ConfigError
from agl_verl.plugin import UNUSABLE_ESTIMATORS, UNUSABLE_LOSSES, NativeOptions

if TYPE_CHECKING:
    from agl_verl.config import ChosenAlgorithm

STEP_WEIGHT = "step_weight"
"""Beside the rows: the weight of all tokens of an optimizer step together, the mean over an update's steps."""
TOTAL_LOSS = "total_loss"
"""The metric of the whole loss; veRL has one of its own called `loss`, of raw sums."""


class Ragged:
    """The response tokens of a micro-batch, row after row, without pads."""

    def __init__(self, response_mask: Any) -> None:
        """`response_mask`: nested, [B, lengths]; it also says how long each response is."""
        self.lengths_B = response_mask.offsets().diff()
        self.mask_R = response_mask.values() > 0
        places = torch.arange(len(self.lengths_B), device=self.mask_R.device)
        self.transition_R = torch.repeat_interleave(places, self.lengths_B)

    def flat(self, padded_BL: Tensor) -> Tensor:
        """[R] of a rectangle that is padded on the right."""
        columns = torch.arange(padded_BL.shape[1], device=padded_BL.device)
        return padded_BL[columns < self.lengths_B[:, None]]

    def samples(self, behaviour_R: Tensor) -> Samples:
        """What a loss may know of the rows; what only advantages need is not here."""
        nothing_B = torch.zeros(len(self.lengths_B), dtype=torch.float64, device=self.mask_R.device)
        row_B = torch.arange(len(self.lengths_B), device=self.mask_R.device)
        return _samples(self.transition_R, self.mask_R, behaviour_R, nothing_B, row_B)


def _samples(transition_R: Tensor, mask_R: Tensor, behaviour_R: Tensor, value_B: Tensor, group_B: Tensor) -> Samples:
    """Each row is a rollout of one call."""
    row_B = torch.arange(len(value_B), device=mask_R.device)
    values_N = value_B.to(torch.float64)
    return Samples(
        transition_R=transition_R,
        mask_R=mask_R,
        behaviour_R=behaviour_R,
        values_N=values_N,
        scores_N=values_N,
        group_N=group_B.to(mask_R.device),
        rollout_N=row_B,
        turn_N=torch.zeros_like(row_B),
    )


def actor_loss(
    chosen: ChosenAlgorithm, model_output: Mapping[str, Tensor], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss of one micro-batch, as veRL's `TrainingWorker` asks for it."""
    from verl.workers.utils.padding import no_padding_2_padding

    rows = Ragged(data["response_mask"])
    weights_R = data["loss_weights"].values()
    behaviour_R = data["rollout_log_probs"].values()
    current_R = rows.flat(no_padding_2_padding(model_output["log_probs"], data))
    reference = data.get("ref_log_prob", None)
    loss, measured = chosen.build().loss(
        rows.samples(behaviour_R),
        Logprobs(
            current_R=current_R,
            old_R=data["old_log_probs"].values(),
            behaviour_R=behaviour_R,
            reference_R=None if reference is None else reference.values(),
        ),
        data["advantages"].values(),
        weights_R,
    )
    measured = {TOTAL_LOSS: loss.detach(), **measured}
    if "entropy" in model_output:
        entropy_R = rows.flat(no_padding_2_padding(model_output["entropy"], data))
        measured["entropy"] = (weights_R * entropy_R).sum().detach()
    return loss * data["dp_size"], _metrics(measured, data)


def critic_loss(
    chosen: ChosenAlgorithm, model_output: Mapping[str, Tensor], data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """The value loss of one micro-batch, as veRL's `TrainingWorker` asks for it."""
    from verl.workers.utils.padding import no_padding_2_padding

    algorithm = chosen.build()
    assert algorithm.needs_critic
    critic: CriticAlgorithm = algorithm  # type: ignore[assignment]
    loss, measured = critic.value_loss(
        Ragged(data["response_mask"]).flat(no_padding_2_padding(model_output["values"], data)),
        data["values"].values(),
        data["returns"].values(),
        data["value_weights"].values(),
    )
    return loss * data["dp_size"], _metrics(measured, data)


def _metrics(measured: Mapping[str, Tensor], data: Any) -> dict[str, Any]:
    """Means over tokens by weight: veRL adds up over micro-batches, and averages over its workers and over steps."""
    from verl.utils.metric import AggregationType, Metric

    share = data["dp_size"] / data[STEP_WEIGHT]
    return {
        name: Metric(value=value, aggregation=AggregationType.MAX)
        if name.endswith("_max")
        else Metric(value=value * share, aggregation=AggregationType.SUM)
        for name, value in measured.items()
    }


TRAINING_STEP = "training_step"
"""Beside the rows: the run's, from 1."""


def follow_training_steps() -> None:
    """Make every worker's cosine schedule go by `TRAINING_STEP`, in this process; Megatron's is of another kind."""
    import verl.utils.tensordict_utils as tu
    from verl.workers.engine.base import BaseEngine

    train = BaseEngine.train_batch

    def train_in_step(self: Any, data: Any, loss_function: Any) -> Any:
        if getattr(self.optimizer_config, "lr_scheduler_type", "constant") != "constant":
            catch_up(self.lr_scheduler, tu.get(data, TRAINING_STEP, 0))
        return train(self, data, loss_function)

    BaseEngine.train_batch = train_in_step


def catch_up(scheduler: Any, training_step: int) -> None:
    """Bring a scheduler that made a step after every update to where it is when all steps before made one.

    A constant step size is left alone: its scheduler knows the warm-up only, which is the optimizer's own.
    """
    while scheduler.last_epoch < training_step - 1:
        scheduler.step()


def start_at_zero() -> None:
    """Make what veRL loads as a value model say zero at first, in this process."""
    import verl.utils.model as models

    load = models.load_valuehead_model

    def load_with_zero_head(*arguments: Any, **settings: Any) -> Any:
        model = load(*arguments, **settings)
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.", "v_head.")):
                parameter.data.zero_()
        return model

    models.load_valuehead_model = load_with_zero_head


PREFIX = "agl:"
AGGREGATIONS = ("token-mean", "seq-mean-token-mean")
"""veRL's ways to add up losses that token weights can express."""


def _grpo(clip: float, clip_high: float) -> Algorithm:
    return build_grpo(GrpoOptions(beta=0, clip=clip, clip_high=clip_high))


def _reinforce(clip: float, clip_high: float) -> Algorithm:
    return build_reinforce(ReinforceOptions(clip=clip, clip_high=clip_high))


def _ppo(clip: float, clip_high: float) -> Algorithm:
    return build_ppo(PpoOptions(clip=clip, clip_high=clip_high))


def register_algorithms() -> None:
    """Register the estimators and losses in this process."""
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    for name, build in (("grpo", _grpo), ("reinforce++", _reinforce)):
        register_adv_est(PREFIX + name)(partial(advantages, build))
    for name, build in (("grpo", _grpo), ("reinforce++", _reinforce), ("ppo", _ppo)):
        register_policy_loss(PREFIX + name)(partial(policy_loss, build))


def check_registered(options: NativeOptions) -> None:
    """ConfigError unless veRL has this estimator and this loss: its own, or what `modules` registered."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for what, name, registry, unusable in (
        ("estimator", options.estimator, ADV_ESTIMATOR_REGISTRY, UNUSABLE_ESTIMATORS),
        ("policy loss", options.loss, POLICY_LOSS_REGISTRY, UNUSABLE_LOSSES),
    ):
        if name not in registry:
            usable = ", ".join(sorted(each for each in registry if each not in unusable))
            raise ConfigError(
                f"No {what} '{name}' is registered with veRL, after importing "
                f"{' and '.join(options.modules) or 'veRL'}: {usable}."
            )


def advantages(
    build: Any,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    config: Any = None,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """[B, L] advantages and returns, as veRL asks its estimators for them; `index` [B] names each row's group."""
    mask_BL = response_mask.bool()
    group_of = {name: number for number, name in enumerate(dict.fromkeys(index))}
    score_B = (token_level_rewards * mask_BL).sum(-1)
    samples = _unmasked(mask_BL, score_B, torch.tensor([group_of[name] for name in index]))
    algorithm: Algorithm = build(clip=0.2, clip_high=0.2)
    advantage_BL = torch.zeros_like(token_level_rewards)
    advantage_BL[mask_BL] = algorithm.advantages(samples).to(advantage_BL.dtype)
    return advantage_BL, score_B[:, None] * mask_BL


def policy_loss(
    build: Any,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Mapping[str, float]]:
    """The loss of a micro-batch, as veRL asks its policy losses for it, and metrics.

    Clip ranges are veRL's `clip_ratio_low` and `clip_ratio_high`; `rollout_is_weights` [B, L] multiply the loss.
    """
    mask_BL = response_mask.bool()
    weight_BL = _weights(mask_BL, loss_agg_mode, config)
    if rollout_is_weights is not None:
        weight_BL = weight_BL * rollout_is_weights
    nothing_B = torch.zeros(len(mask_BL), device=mask_BL.device)
    samples = _unmasked(mask_BL, nothing_B, torch.arange(len(mask_BL), device=mask_BL.device))
    old_R = old_log_prob[mask_BL]
    algorithm: Algorithm = build(clip=float(config.clip_ratio_low), clip_high=float(config.clip_ratio_high))
    loss, measured = algorithm.loss(
        samples, Logprobs(log_prob[mask_BL], old_R, old_R), advantages[mask_BL], weight_BL[mask_BL]
    )
    return loss, {f"actor/{name}": float(value) for name, value in measured.items()}


def _weights(mask_BL: Tensor, mode: str, config: Any) -> Tensor:
    """[B, L] what each token counts, so that micro-batches and workers add up as veRL normalises them."""
    batch = dict(config.global_batch_info)
    workers = batch.get("dp_size") or 1
    if mode == "token-mean":
        return mask_BL * (workers / (batch.get("batch_num_tokens") or mask_BL.sum()))
    if mode == "seq-mean-token-mean":
        tokens_B = mask_BL.sum(-1, keepdim=True).clamp(min=1)
        return mask_BL / tokens_B * (workers / (batch.get("global_batch_size") or (mask_BL.any(-1)).sum()))
    raise ValueError(
        f"agl's losses are added up by {' or '.join(AGGREGATIONS)}, not '{mode}': set actor.loss_agg_mode to one."
    )


def _unmasked(mask_BL: Tensor, value_B: Tensor, group_B: Tensor) -> Samples:
    """The unmasked tokens of a rectangle."""
    row_BL = torch.arange(len(mask_BL), device=mask_BL.device)[:, None].expand_as(mask_BL)
    unmasked_R = torch.ones(int(mask_BL.sum()), dtype=torch.bool, device=mask_BL.device)
    behaviour_R = torch.zeros(len(unmasked_R), device=mask_BL.device)
    return _samples(row_BL[mask_BL], unmasked_R, behaviour_R, value_B, group_B)
