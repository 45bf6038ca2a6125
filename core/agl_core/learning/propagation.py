"""Rewards of one step that the trained transitions inherit from calls that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch


def propagate_rewards(turns: Sequence[int], values: Sequence[float], trained: Sequence[int]) -> list[float]:
    """Rewards of one step for the `trained` transitions (their places), for which the others are the environment.

    One step of time is from one trained call to the next. The rewards of the calls between them (the mean over each
    call's choices) belong to that step: they go, undiscounted, to each trained choice of the call before. Rewards
    before the first trained call are not its consequence and are left out, and so are rewards that are not finite. If
    only some choices of a call are trained, these stand for the call. `turns` ascend; choices of one call have the same
    turn.

    A writer and a critic by turns, only the writer trained:

    >>> propagate_rewards([0, 1, 2, 3], [0.125, 0.25, 0.5, 1.0], [0, 2])
    [0.375, 0.25, 1.5, 1.0]
    """
    earned = list(values)
    kept = set(trained)
    before: list[int] = []
    for _, same_call in groupby(range(len(turns)), key=lambda i: turns[i]):
        places = list(same_call)
        here = [i for i in places if i in kept]
        if here:
            before = here
            continue
        carried = sum(values[i] for i in places) / len(places)
        for i in before if math.isfinite(carried) else ():
            earned[i] += carried
    return earned


def values_without(batch: Batch, usable: NDArray[np.int64]) -> NDArray[np.float64]:
    """[N] the values of a batch of rewards when only the `usable` transitions are trained on.

    An engine drops what it cannot compute, for instance the last call of a long episode, which has the terminal reward.
    Its reward is still a consequence of the calls before it.
    """
    values = batch.values_N.copy()
    kept = set(usable.tolist())
    order = np.lexsort((batch.turn_N, batch.rollout_N)).tolist()
    for _, of_rollout in groupby(order, key=lambda i: int(batch.rollout_N[i])):
        places = list(of_rollout)
        trained = [n for n, place in enumerate(places) if place in kept]
        values[places] = propagate_rewards(batch.turn_N[places].tolist(), batch.values_N[places].tolist(), trained)
    return values
