"""The step size by the run's training steps: veRL's own scheduler counts updates, and not every step makes one."""

from __future__ import annotations

from typing import Any

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
