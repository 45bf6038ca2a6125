"""Where serving is, as two trainers of veRL's registry: an update is the same in both. Imports veRL."""

from __future__ import annotations

import logging

from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, register_trainer
from verl.workers.rollout.llm_server import LLMServerManager

from agl_verl.config.mapping import SEPARATE, SHARED
from agl_verl.driver.trainer import AglTrainer


@register_trainer(SHARED)
class SharedTrainer(AglTrainer, PPOTrainerColocateAsync):  # type: ignore[misc]
    """Training and serving share the GPUs.

    While weights are trained and exchanged the servers are asleep, and what they were asked meanwhile they answer
    afterwards, with the new weights (`agl_verl.serving.gate`).
    """

    @property
    def servers(self) -> LLMServerManager:
        """Those on the GPUs that train."""
        return self.llm_server_manager

    def on_sample_end(self) -> None:
        """From here to `on_step_end` nothing is served."""
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()


@register_trainer(SEPARATE)
class SeparateTrainer(AglTrainer, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """Servers have GPUs of their own.

    They answer with the weights that they have while others are trained. Nothing enters while these are brought to them
    (`on_step_end`); what was begun before is sampled anew with the new weights (`agl_verl.serving.gate`).
    """

    prev_step_profile = False  # veRL's own loop sets it; profiles are not taken here.
    # Weights are brought over after every update, so none have to be kept beside those that are trained.
    _init_resource_pool_mgr = PPOTrainer._init_resource_pool_mgr
    _compute_old_log_prob = PPOTrainer._compute_old_log_prob

    @property
    def servers(self) -> LLMServerManager:
        """Those on GPUs of their own."""
        return self.standalone_server_manager

    def on_sample_end(self) -> None:
        """Serving goes on."""

    def _setup(self) -> None:
        # veRL 0.9.1 ends this with a line for its log that logging refuses.
        logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()
