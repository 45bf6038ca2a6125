"""veRL's metrics by agl's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agl_verl.workers.losses import TOTAL_LOSS

_RENAMED = {"lr": "learning_rate", TOTAL_LOSS: "loss"}


def named(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What the workers and veRL's trainer measured, numbers only.

    `actor/policy_loss` is `policy_loss`, as under the torch engine; the critic's are `value_…` or `critic_…`; what veRL
    measures beyond that keeps its name, for instance `rollout_probs_diff_max` (by how much training's probabilities
    differ from serving's).

    >>> named({"actor/lr": 0.1, "critic/grad_norm": 2.0, "critic/value_loss": 3.0, "training/x": 1.0})
    {'learning_rate': 0.1, 'critic_grad_norm': 2.0, 'value_loss': 3.0, 'x': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not np.isscalar(value) or isinstance(value, str):
            continue
        role, _, rest = name.partition("/")
        if rest == "loss" and f"{role}/{TOTAL_LOSS}" in metrics:
            continue
        rest = _RENAMED.get(rest, rest)
        if role == "critic" and not rest.startswith("value_"):
            rest = f"critic_{rest}"
        found[rest if role in ("actor", "critic", "training") else name] = float(value)  # type: ignore[arg-type]
    return found
