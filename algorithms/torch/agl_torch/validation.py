"""What of a batch can be trained on: the defined treatment of bad input."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch, DropReason


def unusable(batch: Batch, *, context_length: int, vocabulary: int) -> list[DropReason | None]:
    """[N] why each transition cannot be trained on, or None.

    - an empty response, or an empty prompt (nothing predicts the first token): EMPTY_RESPONSE;
    - no unmasked token: FULLY_MASKED;
    - longer than the model's context: TOO_LONG;
    - a log-probability of an unmasked token, credited value, score, weight or temperature that is not finite, a
      temperature that is not positive, a weight below 0, a token id the model does not have: NON_FINITE.
    """
    lengths = np.diff(batch.offsets)
    responses = batch.response_lengths_N
    empty = (responses == 0) | (batch.prompt_lengths_N == 0)
    masked = _per_transition(batch, batch.mask_R) == 0
    wrong = batch.mask_R & ~np.isfinite(batch.behaviour_logprobs_R)
    unknown_T = (batch.tokens_T < 0) | (batch.tokens_T >= vocabulary)
    broken = (
        (_per_transition(batch, wrong) > 0)
        | ~np.isfinite(batch.values_N)
        | ~np.isfinite(batch.scores_N)
        | ~(np.isfinite(batch.temperature_N) & (batch.temperature_N > 0))
        | ~(np.isfinite(batch.weight_N) & (batch.weight_N >= 0))
        | (_sums(unknown_T, batch.offsets) > 0)
    )
    reasons: list[DropReason | None] = []
    for i in range(len(batch)):
        if empty[i]:
            reasons.append(DropReason.EMPTY_RESPONSE)
        elif masked[i]:
            reasons.append(DropReason.FULLY_MASKED)
        elif lengths[i] > context_length:
            reasons.append(DropReason.TOO_LONG)
        elif broken[i]:
            reasons.append(DropReason.NON_FINITE)
        else:
            reasons.append(None)
    return reasons


def subset(batch: Batch, chosen: NDArray[np.int64]) -> Batch:
    """The transitions `chosen`, in this order."""
    if len(chosen) == len(batch) and (chosen == np.arange(len(batch))).all():
        return batch
    tokens, offsets = _ranges(batch.offsets, chosen)
    responses, response_offsets = _ranges(batch.response_offsets, chosen)
    return Batch(
        tokens_T=batch.tokens_T[tokens],
        offsets=offsets,
        prompt_lengths_N=batch.prompt_lengths_N[chosen],
        response_offsets=response_offsets,
        behaviour_logprobs_R=batch.behaviour_logprobs_R[responses],
        mask_R=batch.mask_R[responses],
        temperature_N=batch.temperature_N[chosen],
        values_N=batch.values_N[chosen],
        kind=batch.kind,
        group_N=batch.group_N[chosen],
        rollout_N=batch.rollout_N[chosen],
        turn_N=batch.turn_N[chosen],
        version_N=batch.version_N[chosen],
        scores_N=batch.scores_N[chosen],
        keys=tuple(batch.keys[i] for i in chosen),
        weight_N=batch.weight_N[chosen],
    )


def _ranges(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the items of the chosen segments lie, and the offsets of those segments put one after the other."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return items.astype(np.int64), new_offsets


def _sums(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    totals = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.asarray(totals[offsets[1:]] - totals[offsets[:-1]])


def _per_transition(batch: Batch, flags_R: NDArray[np.bool_]) -> NDArray[np.int64]:
    return _sums(flags_R, batch.response_offsets)
