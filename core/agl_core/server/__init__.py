"""The Lightning Server: gateway, rollout queue and the routes of workers."""

from agl_core.server.keys import Keys
from agl_core.server.queue import RolloutQueue
from agl_core.server.server import LightningServer

__all__ = ["Keys", "LightningServer", "RolloutQueue"]
