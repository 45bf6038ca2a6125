"""How transitions are laid out in forward passes, and what a pass yields: the one place that knows.

A `MicroBatch` is a rectangle of whole transitions of similar length, padded on the right (a causal model never looks
there, so no attention mask is needed) to its own longest. To compute shared prefixes once instead, make
`plan` return sets of transitions that share them, and `lay_out` and `score` another layout: nothing
outside this module sees input ids, positions or pads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_core.types import Batch

LOGITS_PER_MICRO_BATCH = 2**28
"""Response tokens × vocabulary of one pass: 1 GiB of float32 logits. Bounds memory with large vocabularies."""
SHORTEST_SHARE = 0.5
"""A transition shorter than this share of the longest goes to another micro-batch: at most half is pads."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass over n transitions. R counts their response tokens."""

    transitions_n: Tensor
    """[n] int64: which transitions of the batch."""
    tokens_R: Tensor
    """[R] int64: where their response tokens lie in the batch's response-aligned arrays."""
    transition_R: Tensor
    """[R] int64: 0 … n-1, the transition of each response token, ascending."""
    input_ids: Tensor
    """[n, L] int64, padded on the right."""
    positions_R: Tensor
    """[R] int64: the position in its row whose hidden state predicts the response token."""
    targets_R: Tensor
    """[R] int64: the response tokens."""
    temperature_R: Tensor
    """[R] float32."""
    tokens: int
    """Prompt and response tokens together, without pads."""


class TokenScores(NamedTuple):
    """What the model says about response tokens, under each transition's own temperature."""

    logprobs_R: Tensor
    """[R] at least float32; carries the gradient."""
    entropy_R: Tensor
    """[R] of the whole distribution, in nats; no gradient."""


def plan(batch: Batch, chosen: NDArray[np.int64], *, token_budget: int, vocabulary: int) -> list[NDArray[np.int64]]:
    """Split the `chosen` transitions into micro-batches, longest first.

    One holds as many as fit into `token_budget` (pads included); a transition that is longer goes alone.
    """
    lengths = np.diff(batch.offsets)[chosen]
    responses = batch.response_lengths_N[chosen]
    order = np.argsort(-lengths, kind="stable")
    parts: list[NDArray[np.int64]] = []
    start, longest, logits = 0, 0, 0
    for place, row in enumerate(order):
        length, row_logits = int(lengths[row]), int(responses[row]) * vocabulary
        if place > start and (
            (place - start + 1) * longest > token_budget
            or length < SHORTEST_SHARE * longest
            or logits + row_logits > LOGITS_PER_MICRO_BATCH
        ):
            parts.append(chosen[order[start:place]])
            start, logits = place, 0
        if place == start:
            longest = length
        logits += row_logits
    if start < len(order):
        parts.append(chosen[order[start:]])
    return parts


def lay_out(batch: Batch, transitions: NDArray[np.int64], device: torch.device) -> MicroBatch:
    """The micro-batch of these transitions, in this order."""
    starts, lengths = batch.offsets[transitions], np.diff(batch.offsets)[transitions]
    prompts, responses = batch.prompt_lengths_N[transitions], batch.response_lengths_N[transitions]
    ids = np.zeros((len(transitions), int(lengths.max())), dtype=np.int64)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        ids[row, :length] = batch.tokens_T[start : start + length]
    transition_R = np.repeat(np.arange(len(transitions)), responses)
    offset_R = np.arange(int(responses.sum())) - np.repeat(np.cumsum(responses) - responses, responses)
    column_R = prompts[transition_R] + offset_R

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        transitions_n=on_device(transitions),
        tokens_R=on_device(batch.response_offsets[transitions][transition_R] + offset_R),
        transition_R=on_device(transition_R),
        input_ids=on_device(ids),
        positions_R=on_device(column_R - 1),
        targets_R=on_device(ids[transition_R, column_R]),
        temperature_R=on_device(batch.temperature_N[transitions][transition_R].astype(np.float32)),
        tokens=int(lengths.sum()),
    )


def score(model: Any, micro: MicroBatch) -> TokenScores:
    """Log-probability and entropy of each response token.

    Hidden states are selected before the output layer, so logits exist at response positions only; what a model's
    own forward does to its logits afterwards (scaling, capping) still happens.
    """

    def select(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][micro.transition_R, micro.positions_R], *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        logits = model(input_ids=micro.input_ids, use_cache=False).logits
    finally:
        hook.remove()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / micro.temperature_R[:, None]
    normalizer_R = torch.logsumexp(logits, dim=-1)
    logprobs_R = logits.gather(-1, micro.targets_R[:, None])[:, 0] - normalizer_R
    with torch.no_grad():
        shifted = logits - normalizer_R[:, None]
        entropy_R = -(shifted.exp() * shifted).nan_to_num(0.0).sum(-1)
    return TokenScores(logprobs_R, entropy_R)


def read_values(backbone: Any, head: Any, micro: MicroBatch) -> Tensor:
    """[R] what `head` makes of the hidden states that predict the response tokens: one number each."""
    hidden = backbone(input_ids=micro.input_ids, use_cache=False).last_hidden_state
    selected = hidden[micro.transition_R, micro.positions_R]
    values: Tensor = head(selected.to(head.weight.dtype))
    return values[:, 0]
