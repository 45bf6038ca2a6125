"""agl's algorithms inside veRL, as the losses of its training workers.

veRL calls the losses that `worker_group.set_loss_fn(partial(actor_loss, chosen))` gave it with a micro-batch; its rows
are flattened to the ragged tensors of `agl_algorithms`, so that these are the very functions that the torch
engine runs. Token weights come with the rows, already normalised over the whole optimizer step and corrected, and so
does everything that needs the whole batch; a pad row's weights are zero. veRL averages gradients over its data-parallel
workers, so a sum over all rows is each worker's sum times their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from agl_algorithms.policy_gradient import Logprobs, Samples
from agl_algorithms.ppo import Ppo
from agl_core.errors import ConfigError
from agl_verl.plugin import UNUSABLE, NativeOptions

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
        return Samples(
            transition_R=self.transition_R,
            mask_R=self.mask_R,
            behaviour_R=behaviour_R,
            values_N=nothing_B,
            group_N=row_B,
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
    loss, measured = cast(Ppo, algorithm).value_loss(
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


def check_registered(options: NativeOptions) -> None:
    """ConfigError unless veRL has this estimator and this loss: its own, or what `modules` registered."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for what, name, registry in (
        ("estimator", options.estimator, ADV_ESTIMATOR_REGISTRY),
        ("policy loss", options.loss, POLICY_LOSS_REGISTRY),
    ):
        if name not in registry:
            raise ConfigError(
                f"No {what} '{name}' is registered with veRL, after importing "
                f"{' and '.join(options.modules) or 'veRL'}: {', '.join(sorted({*registry} - {*UNUSABLE}))}."
            )
