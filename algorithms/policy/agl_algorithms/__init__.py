"""Policy-gradient algorithms, and what a new one is made of. A name here brings torch only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_algorithms.grpo import group_statistics
    from agl_algorithms.interface import Algorithm, CriticAlgorithm, Logprobs, Samples
    from agl_algorithms.plugin import PolicyGradientOptions
    from agl_algorithms.policy_gradient import PolicyGradient, whitened

__all__ = [
    "Algorithm",
    "CriticAlgorithm",
    "Logprobs",
    "PolicyGradient",
    "PolicyGradientOptions",
    "Samples",
    "group_statistics",
    "whitened",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"PolicyGradientOptions": "plugin", "PolicyGradient": "policy_gradient", "whitened": "policy_gradient"}
    module = "grpo" if name == "group_statistics" else modules.get(name, "interface")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
