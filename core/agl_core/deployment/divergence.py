"""How far a new version is from the served one, by the recorded replies of the served one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agl_core.learning.batch import PolicyCredit, make_batches
from agl_core.protocols import ScoringEngine
from agl_core.types import CreditKind, Episode

_NO_CREDIT = PolicyCredit(
    "none", lambda group: [[0.0] * len(each.transitions) for each in group], kind=CreditKind.RETURN
)
"""What is only scored earns nothing."""


async def divergence(
    engine: ScoringEngine, policy: str, episodes: Sequence[Episode], agents: Sequence[str]
) -> dict[str, float]:
    """KL(served ‖ new) in nats per token, by held-out set: `eval/sampled/kl`.

    `episodes` are of the served version, and the engine holds the weights of the new one. For a recorded token with
    d = log π_new − log π_served it is the mean of exp(d) − 1 − d, which is never negative (k3 of Schulman,
    "Approximating KL divergence", 2020). A greedy reply is no sample of a distribution, and so is not counted; nor is
    one without exact log-probabilities. A set without any other reply has no figure.
    """
    found = {}
    for name in dict.fromkeys(each.task.split for each in episodes):
        of_set = [[each] for each in episodes if each.task.split == name]
        batch = make_batches(of_set, {policy: _NO_CREDIT}, agents=agents).batches.get(policy)
        if batch is not None:
            served_R = batch.behaviour_logprobs_R[batch.mask_R].astype(np.float64)
            change_R = (await engine.logprobs(policy, batch))[batch.mask_R] - served_R
            found[f"{name}/sampled/kl"] = float(np.mean(np.expm1(change_R) - change_R))
    return found
