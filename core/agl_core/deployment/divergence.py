"""How far a new version is from the served one, by the recorded replies of the served one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agl_core.learning.batch import PolicyCredit, make_batches
from agl_core.protocols import ScoringEngine
from agl_core.types import CreditKind, Episode

_NO_CREDIT = PolicyCredit(
    "none", lambda group: [[0.0] * len(each.transitions) for each in group], kind=CreditKind.RETURN
)
"""What is only scored earns nothing."""


async def divergence(
    engine: ScoringEngine, policy: str, episodes: Mapping[str, Sequence[Episode]], agents: Sequence[str]
) -> dict[str, float]:
    """KL(served ‖ new) in nats per token, by held-out set and mode: `eval/sampled/kl`.

    `episodes` are of the served version, by set and mode, and the engine holds the weights of the new one. For a
    recorded token with d = log π_new − log π_served it is the mean of exp(d) − 1 − d, which is never negative (k3 of
    Schulman, "Approximating KL divergence", 2020). A greedy reply is no sample of a distribution, and so is not
    counted; nor is one without exact log-probabilities. Without any other reply there is no figure.
    """
    found = {}
    for place, evaluated in episodes.items():
        groups = [[each] for each in evaluated]
        batch = make_batches(groups, {policy: _NO_CREDIT}, agents=agents).batches.get(policy)
        if batch is not None:
            served_R = batch.behaviour_logprobs_R[batch.mask_R].astype(np.float64)
            change_R = (await engine.logprobs(policy, batch))[batch.mask_R] - served_R
            found[f"{place}/kl"] = float(np.mean(np.expm1(change_R) - change_R))
    return found
