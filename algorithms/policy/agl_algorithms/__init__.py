"""Policy-gradient algorithms, and what a new one is made of. A name here brings torch only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_algorithms.grpo import group_statistics
    from agl_algorithms.plugin import PolicyGradientOptions
    from agl_algorithms.policy_gradient import Logprobs, PolicyGradient, Samples, policy_ratio, whitened

__all__ = [
    "Logprobs",
    "PolicyGradient",
    "PolicyGradientOptions",
    "Samples",
    "group_statistics",
    "policy_ratio",
    "whitened",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"PolicyGradientOptions": "plugin", "group_statistics": "grpo"}.get(name, "policy_gradient")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
