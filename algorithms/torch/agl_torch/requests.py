"""Requests on their way through the sampler, and how a response's next token is chosen.

Log-probabilities are exact. Random numbers depend on the seed, the choice and the position alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agl_chat.backends import Request, Response, SampledToken
from agl_core.types import FinishReason, Tokens
from agl_torch.grammars import Constraint


@dataclass(slots=True, eq=False)
class Job:
    """A request and its rows."""

    request: Request
    rows: list[Row] = field(default_factory=list)
    prefilled: int = 0
    reused: int = 0

    @property
    def complete(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)


@dataclass(slots=True, eq=False)
class Row:
    """One response in the making."""

    job: Job
    choice: int
    limit: int
    """Tokens that the response may have: by the request and by the context."""
    sampled: list[SampledToken] = field(default_factory=list)
    constraint: Constraint | None = None
    """The form that the response must have, if any."""
    finish_reason: FinishReason | None = None
    started: bool = False
    uniforms: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = uniforms(self.request.seed, self.choice)

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def ids(self) -> list[int]:
        """Token ids of the response so far."""
        return [token.id for token in self.sampled]

    @property
    def tokens(self) -> Tokens:
        """Prompt and response."""
        return np.concatenate([self.request.prompt_ids, np.array(self.ids, np.int32)])

    def __len__(self) -> int:
        return len(self.request.prompt_ids) + len(self.sampled)

    @property
    def forced_id(self) -> int:
        """The token that must come next, or -1."""
        position, forced = len(self.sampled), self.request.forced_ids
        return forced[position] if position < len(forced) else -1

    @property
    def response(self) -> Response:
        assert self.finish_reason is not None
        return Response(self.sampled, self.finish_reason)

    @property
    def longest(self) -> int:
        """Tokens that may have to be cached for it: all but the last, which is never fed."""
        return len(self.request.prompt_ids) + self.limit - 1


_BLOCK = 64
_MAX_CDF_ENTRIES = 1 << 23
"""Rows are sampled in parts, so that the float64 tables of a large vocabulary stay small."""


def uniforms(seed: int, choice: int) -> Iterator[float]:
    """The random numbers in [0, 1) for the tokens of one response, in order: a function of these two and nothing else.

    >>> next(uniforms(7, choice=0)) == next(uniforms(7, choice=0))
    True
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, choice], np.uint64)))
    while True:
        yield from generator.random(_BLOCK).tolist()


def choose(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_p_B: Tensor,
    uniform_B: Tensor,
    forced_B: Tensor,
    distorted_BV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each row ([B] int64), its log-probability ([B] float32), and those of all tokens ([B, V]).

    `temperature_B` 0 means greedy, with the log-probability under temperature 1. With `top_p_B` below 1 the
    token is drawn from the smallest set of likeliest tokens that has this probability; with `distorted_BV`, by these
    logits (`distort`). The log-probability is that of the full distribution all the same. `uniform_B` (float64) are
    numbers in [0, 1); `forced_B` (int64) are the tokens to take instead, or -1.
    """
    greedy_B = temperature_B == 0
    scale_B = torch.where(greedy_B, torch.ones_like(temperature_B), temperature_B)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B[:, None], dim=-1)
    drawn_BV = logprobs_BV if distorted_BV is None else torch.log_softmax(distorted_BV / scale_B[:, None], dim=-1)
    ids_B = drawn_BV.argmax(-1)
    if not bool(greedy_B.all()):
        ids_B = torch.where(greedy_B, ids_B, _draw(drawn_BV, top_p_B, uniform_B))
    ids_B = torch.where(forced_B >= 0, forced_B, ids_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0], logprobs_BV


def distort(logits_V: Tensor, row: Row) -> Tensor:
    """[V] float32 logits to draw a row's next token from, by the fields of its request, in vLLM's order and meaning.

    The repetition penalty is about prompt and response, the other two about the response alone. Nothing is distorted if
    nothing would be left to draw from, as a grammar may have it.
    """
    request, asked = row.request, row.request.distortions
    if not asked:
        return logits_V.float()
    distorted_V = logits_V.float().clone()
    if allowed := asked.get("allowed_token_ids"):
        excluded_V = torch.ones_like(distorted_V, dtype=torch.bool)
        excluded_V[allowed] = False
        distorted_V[excluded_V] = -math.inf
    for token, bias in asked.get("logit_bias", {}).items():
        distorted_V[int(token)] += bias
    counts_V = torch.bincount(torch.tensor(row.ids, dtype=torch.int64), minlength=len(distorted_V)).to(logits_V.device)
    if penalty := asked.get("repetition_penalty"):
        repeated_V = counts_V > 0
        repeated_V[request.prompt_ids.tolist()] = True
        weaker_V = torch.where(distorted_V > 0, distorted_V / penalty, distorted_V * penalty)
        distorted_V = torch.where(repeated_V, weaker_V, distorted_V)
    distorted_V -= asked.get("frequency_penalty", 0.0) * counts_V + asked.get("presence_penalty", 0.0) * (counts_V > 0)
    if min_p := asked.get("min_p"):
        distorted_V[distorted_V < distorted_V.max() + request.temperature * math.log(min_p)] = -math.inf
    if (top_k := asked.get("top_k", 0)) > 0:
        distorted_V[distorted_V < distorted_V.topk(min(top_k, len(distorted_V))).values[-1]] = -math.inf
    return distorted_V if distorted_V.max() > -math.inf else logits_V.float()


def _draw(logprobs_BV: Tensor, top_p_B: Tensor, uniform_B: Tensor) -> Tensor:
    rows = max(1, _MAX_CDF_ENTRIES // logprobs_BV.shape[1])
    return torch.cat(
        [
            _inverse_cdf(_nucleus(logprobs.exp(), top_p), uniform)
            for logprobs, top_p, uniform in zip(
                torch.split(logprobs_BV, rows), torch.split(top_p_B, rows), torch.split(uniform_B, rows), strict=True
            )
        ]
    )


def _nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Probabilities outside of each row's nucleus set to 0 (not renormalised)."""
    if bool((top_p_B >= 1).all()):
        return probs_BV
    sorted_BV, order_BV = torch.sort(probs_BV.double(), dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    outside_BV = (before_BV >= top_p_B[:, None]) & (top_p_B < 1)[:, None]
    outside_BV[:, 0] = False
    return torch.zeros_like(sorted_BV).scatter_(1, order_BV, sorted_BV.masked_fill(outside_BV, 0.0))


def _inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds uniform × total: never one of weight 0."""
    cdf_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    return torch.searchsorted(cdf_BV, target_B1, right=True)[:, 0].clamp_(max=cdf_BV.shape[1] - 1)
