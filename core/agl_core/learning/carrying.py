"""Rewards of one step that the trained transitions inherit from calls that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch


def carry_rewards(turns: Sequence[int], values: Sequence[float], trained: Sequence[int]) -> list[float]:
    """Rewards of one step for the `trained` transitions (their places), who see the others as their environment.

    What a call without a trained transition earned (its choices' mean) goes, undiscounted, to the trained
    transitions of the call before it; what was earned before the first of them is no consequence of theirs, and is
    left out, as is what is not finite. `turns` ascend; choices of one call share theirs.

    A writer and a critic by turns, only the writer trained:

    >>> carry_rewards([0, 1, 2, 3], [0.125, 0.25, 0.5, 1.0], [0, 2])
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

    An engine leaves out what it cannot compute (the last call of a long episode, which has the terminal reward, say);
    what it earned still came of the calls before it.
    """
    values = batch.values_N.copy()
    kept = set(usable.tolist())
    order = np.lexsort((batch.turn_N, batch.rollout_N)).tolist()
    for _, of_rollout in groupby(order, key=lambda i: int(batch.rollout_N[i])):
        places = list(of_rollout)
        trained = [n for n, place in enumerate(places) if place in kept]
        values[places] = carry_rewards(batch.turn_N[places].tolist(), batch.values_N[places].tolist(), trained)
    return values
