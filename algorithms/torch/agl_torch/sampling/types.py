"""What a sampler takes and gives: requests and generations of token ids, nothing of text or HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from agl_core.types import FinishReason, Logprobs, TokenMask, Tokens


class SampledModel(Protocol):
    """What the sampler needs of a loaded model."""

    @property
    def model(self) -> Any:
        """A Hugging Face causal LM in eval mode, possibly wrapped by peft."""

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """A response ends at any of these."""

    @property
    def context_length(self) -> int:
        """Prompt and response together have at most this many tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to answer, `n` times."""

    id: str
    prompt_ids: Tokens
    """[P] int32, not empty and shorter than the context."""
    max_tokens: int
    """Limit of each response; the context's end limits it too."""
    n: int = 1
    temperature: float = 1.0
    """0 takes the likeliest token; its log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    seed: int = 0
    """What is drawn depends on the seed, the choice's index and the position only."""
    forced_ids: tuple[int, ...] = ()
    """Tokens that every response starts with, whatever the policy prefers; they are masked."""
    stop: Callable[[Sequence[int]], bool] | None = None
    """Asked after each sampled token, with the response so far: whether it is complete."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response, all of it from one version of the weights."""

    ids: Tokens
    """[T] int32, exactly as sampled, the end token included."""
    logprobs: Logprobs
    """[T] float32, log-softmax(logits / temperature) at each id, over the full vocabulary."""
    mask: TokenMask | None
    """[T] bool, False where a token was forced; None: all sampled."""
    finish_reason: FinishReason
    """STOP or LENGTH."""


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """The responses to one request."""

    request: Request
    responses: tuple[Response, ...]
    version: int
    prefilled: int
    """Prompt tokens computed, summed over the responses."""
    reused: int
    """Prompt tokens taken from the cache, summed over the responses."""


@dataclass(slots=True)
class Counters:
    """Tokens since the sampler was made."""

    prefilled: int = 0
    """Prompt tokens that were computed (again, for a response that had to give up its slot)."""
    reused: int = 0
    """Prompt tokens taken from the cache."""
    decoded: int = 0
    """Response tokens, forced ones included."""
    preempted: int = 0
    """How often a response in progress gave up its slot."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
