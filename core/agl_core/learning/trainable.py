"""Which transitions of a batch can be trained on, and what those inherit that cannot: the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch, CreditKind, DropReason


@dataclass(frozen=True, slots=True)
class Usable:
    """The M of N transitions that can be trained on."""

    batch: Batch
    """The M transitions."""
    places: NDArray[np.int64]
    """[M] their places among the N."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not among the M."""


def filter_trainable(batch: Batch, *, context_length: int | None = None, vocabulary: int | None = None) -> Usable:
    """Drop what cannot be trained on; its rewards of one step go to the calls before it.

    Without a model's limits, only what no model could be trained on is dropped.
    """
    dropped = unusable(batch, context_length=context_length, vocabulary=vocabulary)
    places = np.array([i for i, reason in enumerate(dropped) if reason is None], dtype=np.int64)
    if batch.kind is CreditKind.REWARD and len(places) < len(batch):
        batch = replace(batch, values_N=values_without(batch, places))
    return Usable(subset(batch, places), places, dropped)


def unusable(
    batch: Batch, *, context_length: int | None = None, vocabulary: int | None = None
) -> tuple[DropReason | None, ...]:
    """[N] why each transition cannot be trained on, or None.

    - an empty response, or an empty prompt (nothing predicts the first token): EMPTY_RESPONSE;
    - no unmasked token: FULLY_MASKED;
    - longer than the model's context: TOO_LONG;
    - a log-probability of an unmasked token (unless it is not known), credited value, score, weight or temperature
      that is not finite, a temperature that is not positive, a weight below 0, a token id the model does not have:
      NON_FINITE.
    """
    wrong_R = batch.mask_R & ~np.isfinite(batch.behaviour_logprobs_R)
    wrong_R &= np.repeat(batch.sampled_N, batch.response_lengths_N)
    unknown_T = batch.tokens_T < 0
    if vocabulary is not None:
        unknown_T |= batch.tokens_T >= vocabulary
    lengths_N = np.diff(batch.offsets)
    too_long_N = lengths_N > (lengths_N.max(initial=0) if context_length is None else context_length)
    broken = (
        (_counts(wrong_R, batch.response_offsets) > 0)
        | ~np.isfinite(batch.values_N)
        | ~np.isfinite(batch.scores_N)
        | ~(np.isfinite(batch.temperature_N) & (batch.temperature_N > 0))
        | ~(np.isfinite(batch.weight_N) & (batch.weight_N >= 0))
        | (_counts(unknown_T, batch.offsets) > 0)
    )
    reasons = np.select(
        [
            (batch.response_lengths_N == 0) | (batch.prompt_lengths_N == 0),
            _counts(batch.mask_R, batch.response_offsets) == 0,
            too_long_N,
            broken,
        ],
        [DropReason.EMPTY_RESPONSE, DropReason.FULLY_MASKED, DropReason.TOO_LONG, DropReason.NON_FINITE],
        default="",
    )
    return tuple(DropReason(reason) if reason else None for reason in reasons.tolist())


def subset(batch: Batch, chosen: NDArray[np.int64]) -> Batch:
    """The transitions `chosen`, in this order."""
    if len(chosen) == len(batch) and (chosen == np.arange(len(batch))).all():
        return batch
    tokens, offsets = _ranges(batch.offsets, chosen)
    responses, response_offsets = _ranges(batch.response_offsets, chosen)
    places = {"_N": chosen, "_T": tokens, "_R": responses}
    picked = {
        field.name: getattr(batch, field.name)[places[field.name[-2:]]]
        for field in fields(batch)
        if field.name[-2:] in places
    }
    keys = tuple(batch.keys[i] for i in chosen)
    return replace(batch, **picked, offsets=offsets, response_offsets=response_offsets, keys=keys)


def _ranges(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the items of the chosen segments lie, and the offsets of those segments put one after the other."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return items.astype(np.int64), new_offsets


def _counts(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many flags are set in each segment."""
    totals = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.asarray(totals[offsets[1:]] - totals[offsets[:-1]])


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
