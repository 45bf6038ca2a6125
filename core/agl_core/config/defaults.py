"""What a configuration leaves to the model."""

from __future__ import annotations

SMALLEST, LARGEST = 1e-6, 1e-3
_RATE, _WEIGHTS, _EXPONENT = 2e-5, 135e6, 0.6
"""A step size that suits a model of so many weights, and how it falls with the size: tiny models of 0.85 million
weights bear 4e-4, those of billions about 1e-6."""
_ADAPTER = 10
"""What a LoRA adapter takes against all weights: it starts without effect, and has few weights to make one."""


def usual_learning_rate(weights: int | None, *, adapter: bool) -> float:
    """A step size for reinforcement learning of a model of so many weights; None: of billions.

    >>> [usual_learning_rate(weights, adapter=False) for weights in (850_000, 135_000_000, 3_000_000_000)]
    [0.0004, 2e-05, 3e-06]
    >>> usual_learning_rate(135_000_000, adapter=True)
    0.0002
    """
    rate = SMALLEST if weights is None else _RATE * (_WEIGHTS / max(1, weights)) ** _EXPONENT
    rate = min(LARGEST, max(SMALLEST, rate))
    return float(f"{rate * (_ADAPTER if adapter else 1):.0e}")
