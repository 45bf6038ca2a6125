"""Checkpoints: the weights of a run, and what it has done so far.

`folder` writes, keeps and removes them; `state` is what is in one besides the weights; `digests` show damage; `changes`
says what the configuration may change when a run is resumed.
"""

from agl_core.training.checkpoints.changes import changes, check_changes
from agl_core.training.checkpoints.digests import verify
from agl_core.training.checkpoints.folder import CHECKPOINTS, Checkpoints, model_links
from agl_core.training.checkpoints.state import HEADLINE_SET, RunState, read_state

__all__ = [
    "CHECKPOINTS",
    "HEADLINE_SET",
    "Checkpoints",
    "RunState",
    "changes",
    "check_changes",
    "model_links",
    "read_state",
    "verify",
]
