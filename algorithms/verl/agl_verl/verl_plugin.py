"""What this package brings to veRL, in every process that imports it: veRL loads it by the entry point `verl.plugins`.

agl's algorithms under the names `agl:grpo`, `agl:ppo`, `agl:reinforce++` in veRL's registries of advantage estimators
and policy losses, so that they can be used from veRL's own configuration as well:

    algorithm.adv_estimator=agl:grpo actor_rollout_ref.actor.policy_loss.loss_mode=agl:grpo
"""

from __future__ import annotations

import os

from agl_verl.environment import CPU_VARIABLE, ENGINE_VARIABLE
from agl_verl.losses import register_algorithms

if os.environ.get(CPU_VARIABLE) == "1":
    from agl_verl.cpu import mend

    mend()
if os.environ.get(ENGINE_VARIABLE) == "1":
    from agl_verl.losses import follow_training_steps, start_at_zero

    start_at_zero()
    follow_training_steps()
register_algorithms()
