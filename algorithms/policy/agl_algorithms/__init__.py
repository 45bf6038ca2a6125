"""Policy-gradient algorithms, and what a new one is made of. A name here brings torch only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_algorithms.interface import Algorithm, CriticAlgorithm, Logprobs, Samples
    from agl_algorithms.options import PolicyGradientOptions
    from agl_algorithms.policy_gradient import PolicyGradient
    from agl_algorithms.statistics import group_statistics, whitened

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

_HOMES = {
    **dict.fromkeys(("Algorithm", "CriticAlgorithm", "Logprobs", "Samples"), "interface"),
    "PolicyGradient": "policy_gradient",
    "PolicyGradientOptions": "options",
    **dict.fromkeys(("group_statistics", "whitened"), "statistics"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
