"""Policy-gradient algorithms, and what a new one is made of. A name here brings torch only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_algorithms.grpo import group_statistics
    from agl_algorithms.plugin import AlgorithmOptions, PolicyGradientOptions
    from agl_algorithms.policy_gradient import Algorithm, Logprobs, PolicyGradient, Samples, policy_ratio, whitened

__all__ = [
    "Algorithm",
    "AlgorithmOptions",
    "Logprobs",
    "PolicyGradient",
    "PolicyGradientOptions",
    "Samples",
    "group_statistics",
    "policy_ratio",
    "whitened",
]

__getattr__ = lazily(
    __name__,
    **{
        **dict.fromkeys(__all__, ".policy_gradient"),
        **dict.fromkeys(("AlgorithmOptions", "PolicyGradientOptions"), ".plugin"),
        "group_statistics": ".grpo",
    },
)
