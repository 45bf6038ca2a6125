"""What this package changes in veRL, in each process of the engine: veRL loads it by the entry point `verl.plugins`."""

from __future__ import annotations

import os

from agl_verl.environment import CPU_VARIABLE, ENGINE_VARIABLE

if os.environ.get(CPU_VARIABLE) == "1":
    from agl_verl.cpu import mend

    mend()
if os.environ.get(ENGINE_VARIABLE) == "1":
    from agl_verl.losses import follow_training_steps, start_at_zero

    start_at_zero()
    follow_training_steps()
