"""agl: train LLM agents that already exist, by reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_core import kinds
    from agl_core.capture import agent, attach, prompt, reward, state, tool
    from agl_core.decorators import (
        adapter,
        algorithm,
        credit_rule,
        endless_task_source,
        group_reward_rule,
        reward_rule,
        task_source,
        tracker,
    )
    from agl_core.hooks import hookimpl
    from agl_core.kinds import Capability
    from agl_core.learning.transitions import load_episodes, save_episodes
    from agl_core.types import CreditKind, Episode, Reward, Task, Transition, discounted_returns, episode_return

__version__ = "0.1.0"

__all__ = [
    "Capability",
    "CreditKind",
    "Episode",
    "Reward",
    "Task",
    "Transition",
    "__version__",
    "adapter",
    "agent",
    "algorithm",
    "attach",
    "credit_rule",
    "discounted_returns",
    "endless_task_source",
    "episode_return",
    "group_reward_rule",
    "hookimpl",
    "kinds",
    "load_episodes",
    "prompt",
    "reward",
    "reward_rule",
    "save_episodes",
    "state",
    "task_source",
    "tool",
    "tracker",
]

_MODULES = ("hooks", "types", "kinds", "decorators", "capture", "learning.transitions")
"""Modules with these names, imported on first use: the help of `agl` needs none, and agents few."""


def __getattr__(name: str) -> Any:
    if name == "kinds":
        return importlib.import_module(f"{__name__}.kinds")
    if name in __all__:
        for module in _MODULES:
            names = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
