"""Requests and responses in the making, as the sampler keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agl_core.types import FinishReason, Tokens
from agl_torch.sampling.choose import Uniforms
from agl_torch.sampling.types import Request, Response


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
    uniforms: Uniforms
    limit: int
    """Tokens that the response may have: by the request and by the context."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started: bool = False

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([self.request.prompt_ids, np.array(self.ids, np.int32)])

    def __len__(self) -> int:
        return len(self.request.prompt_ids) + len(self.ids)

    @property
    def forced_id(self) -> int:
        """The token that must come next, or -1."""
        position, forced = len(self.ids), self.request.forced_ids
        return forced[position] if position < len(forced) else -1

    @property
    def response(self) -> Response:
        """What it came to; only of a row that is finished."""
        assert self.finish_reason is not None
        forced = len(self.request.forced_ids)
        return Response(
            ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            mask=np.arange(len(self.ids)) >= forced if forced else None,
            finish_reason=self.finish_reason,
        )

    @property
    def longest(self) -> int:
        """Tokens that may have to be cached for it: all but the last, which is never fed."""
        return len(self.request.prompt_ids) + self.limit - 1
