"""The data between a run and its engine: training batches, replies that are known as texts alone, and the workload.

A batch is ragged from the store to the loss: flat arrays and offsets, no pads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agl_core.types.names import CreditKind
from agl_core.types.records import Json, Tokens, TransitionKey


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N transitions of one policy. Axis suffixes: _N transitions, _T all tokens, _R response tokens."""

    tokens_T: NDArray[np.int32]
    """Prompt and response of every transition, one after the other."""
    offsets: NDArray[np.int64]
    """[N+1]; transition i owns tokens_T[offsets[i]:offsets[i+1]]."""
    prompt_lengths_N: NDArray[np.int64]
    """The first prompt_lengths_N[i] tokens of transition i are its prompt."""
    response_offsets: NDArray[np.int64]
    """[N+1]; transition i owns the response-aligned arrays' [response_offsets[i]:response_offsets[i+1]]."""
    behaviour_logprobs_R: NDArray[np.float32]
    """Log-probabilities as recorded when the tokens were sampled; NaN where they are not known."""
    mask_R: NDArray[np.bool_]
    """True where a token takes part in the loss."""
    temperature_N: NDArray[np.float32]
    values_N: NDArray[np.float64]
    """Credited values."""
    kind: CreditKind
    """The kind of `values_N`: rewards or returns."""
    group_N: NDArray[np.int64]
    """0 … groups-1."""
    rollout_N: NDArray[np.int64]
    """0 … rollouts-1, unique over groups."""
    turn_N: NDArray[np.int64]
    version_N: NDArray[np.int64]
    """The policy version that sampled each transition; -1 if unknown."""
    keys: tuple[TransitionKey, ...]
    weight_N: NDArray[np.float64]
    """A factor of at least 0 on each transition's share in the loss (`agl_core.protocols.DrawnGroup`)."""
    sampled_N: NDArray[np.bool_]
    """True if the log-probabilities are known. Where not, an engine takes the policy's own from
    before the update for them, so that importance weights are 1."""
    grammar_N: NDArray[np.object_]
    """The form that each response had to have (`agl_core.learning.transitions.grammar_of`), or None.
    Log-probabilities are then those among the tokens that this form allows."""
    step: int = 0
    """The training step (1, 2, …) of the batch. Schedules use it, because not every policy has a batch in each step."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def response_lengths_N(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = np.diff(self.response_offsets)
        return lengths


@dataclass(frozen=True, slots=True, eq=False)
class RecordedReply:
    """A reply that was recorded as text, and what it was a reply to."""

    messages: Sequence[Mapping[str, Json]]
    tools: Sequence[Mapping[str, Json]]
    response: Mapping[str, Json]
    is_complete: bool = True
    """True if it ended by itself, so that an end token belongs to it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedReply:
    """The token ids that a policy's tokenizer and chat template make of a reply."""

    prompt_ids: Tokens
    response_ids: Tokens


@dataclass(frozen=True)
class Workload:
    """The work that a run asks of its engine, in rollouts of one call each."""

    steps: int
    groups: int
    """Per step."""
    group_size: int
    evaluated: int
    """Rollouts of all its evaluations together."""
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Needs:
    """The memory and time of a workload, by the engine's own arithmetic: the order of magnitude."""

    memory_bytes: int
    """At most, of its process and its devices."""
    available_bytes: int
    """Of all memory that there is for it, used or free."""
    seconds: float
    """Of sampling and training, if nothing else runs on this machine and agents and tools take no time."""
