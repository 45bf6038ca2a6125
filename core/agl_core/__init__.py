"""agl: train LLM agents that already exist, by reinforcement learning."""

from agl_core.capture import agent, attach, reward, state, tool
from agl_core.hooks import hookimpl, hookspec
from agl_core.plugins import Need
from agl_core.rules import credit_rule, reward_rule

__version__ = "0.1.0"

__all__ = [
    "Need",
    "__version__",
    "agent",
    "attach",
    "credit_rule",
    "hookimpl",
    "hookspec",
    "reward",
    "reward_rule",
    "state",
    "tool",
]
