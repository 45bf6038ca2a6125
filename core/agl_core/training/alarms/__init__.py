"""Alarms: what a person should know of a run, with why it matters and what to do.

`table` lists them all; `conditions` is what the numbers of a step are compared with; `watch` looks at each step.
"""

from agl_core.training.alarms.table import ALARMS, Alarm, raised
from agl_core.training.alarms.watch import Watch

__all__ = ["ALARMS", "Alarm", "Watch", "raised"]
