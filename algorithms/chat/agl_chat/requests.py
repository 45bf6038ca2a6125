"""Requests and responses of token ids: what an engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agl_core.types import FinishReason, Logprobs, TokenMask, Tokens


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a response."""

    choice: int
    id: int
    logprob: float
    likeliest: Mapping[int, float]
    """The likeliest ids at its position and their log-probabilities, best first; empty if not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to answer, `n` times."""

    id: str
    prompt_ids: Tokens
    """[P] int32, not empty and shorter than the context."""
    max_tokens: int
    """Limit of each response, forced tokens included; the context has room for as many."""
    n: int = 1
    temperature: float = 1.0
    """0 takes the likeliest token; its log-probabilities are then those of temperature 1."""
    top_p: float = 1.0
    seed: int = 0
    """The draw depends on the seed, the choice's index and the position only."""
    forced_ids: tuple[int, ...] = ()
    """Tokens that every response starts with, whatever the policy prefers; they are masked."""
    top: int = 0
    """How many of the likeliest tokens are reported at each position."""
    stop: Callable[[Sequence[int]], bool] | None = None
    """Asked after each sampled token, with the response so far: whether it is complete."""
    stops: tuple[str, ...] = ()
    """The strings that `stop` looks for, for an engine that detokenises itself."""
    grammar: str | None = None
    """The form that every response must have (`agl_core.learning.transitions.grammar_of`)."""
    watch: Callable[[SampledToken], None] | None = None
    """Told of each token as it comes, on the engine's thread, by an engine that can."""
    model: str = "default"
    """The name of the model that answers."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """One sampled response, all of it from one version of the weights."""

    ids: Tokens
    """[T] int32, exactly as sampled, the end token included."""
    logprobs: Logprobs
    """[T] float32, log-softmax(logits / temperature) at each id, over all tokens that the grammar allows."""
    mask: TokenMask | None
    """[T] bool, False where a token was forced, or the only one that the grammar allows; None: all sampled."""
    finish_reason: FinishReason
    """STOP, LENGTH, or ABORTED by an engine of its own accord."""
    likeliest: tuple[dict[int, float], ...] = ()
    """Of each token's position, the likeliest ids and their log-probabilities, best first; empty if not asked for."""

    def tokens(self, choice: int) -> list[SampledToken]:
        """Its tokens, as those of this choice."""
        likeliest = self.likeliest or [dict[int, float]()] * len(self.ids)
        columns = zip(self.ids.tolist(), self.logprobs.tolist(), likeliest, strict=True)
        return [SampledToken(choice, token, logprob, others) for token, logprob, others in columns]


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


class Backend(Protocol):
    """An engine: tokens in, tokens out."""

    async def generate(self, request: Request) -> Generated:
        """Answer a request; cancelling it frees its place. EngineError if the engine cannot answer."""
