"""The service's samplers as the chat layer's back end: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tinker

from agl_chat.backends import Generation, Request, Response, SampledToken
from agl_core.apis.dialect import unsupported
from agl_core.errors import EngineError
from agl_core.types import FinishReason
from agl_tinker.service import Service


@dataclass(frozen=True)
class Served:
    """One version of a policy's weights: a saved sampler, which never changes."""

    version: int
    sampler: tinker.SamplingClient
    end_ids: frozenset[int]


class Samplers:
    """The versions that are served now, by policy. A reply is of one version, from its first token to its last.

    A service that does not answer is `lost`: agents would ask again and again.
    """

    def __init__(self, service: Service, lost: Callable[[str], object]) -> None:
        self._service, self._lost = service, lost
        self.served: dict[str, Served] = {}
        self.counters = Counter(tokens_prefilled=0, tokens_decoded=0)

    async def generate(self, request: Request) -> Generation:
        """See `agl_chat.backends.Backend`. ApiError for what the service cannot do."""
        foreign = {"response_format": request.grammar, "top_logprobs": request.top or None, **request.distortions}
        for name, value in foreign.items():
            if value is not None and name != "top_k":
                raise unsupported(name, "is not supported by a Tinker service. Leave it out")
        if request.temperature not in (0.0, 1.0):
            raise unsupported("temperature", "has to be 1, or 0: a Tinker service trains at 1. Set it")
        served = self.served[request.model]
        prompt = [*request.prompt_ids.tolist(), *request.forced_ids]
        try:
            with self._service.explained("asked for a reply"):
                replies = await asyncio.gather(*(self._sample(served, request, prompt, n) for n in range(request.n)))
        except EngineError as error:
            if isinstance(error.__cause__, (TimeoutError, tinker.APIConnectionError)):
                self._lost(str(error))
            raise
        responses = tuple(_response(request, served, choice, reply) for choice, reply in enumerate(replies))
        self.counters["tokens_prefilled"] += len(prompt) * request.n
        self.counters["tokens_decoded"] += sum(len(reply.tokens) for reply in replies)
        return Generation(request, responses, served.version, len(prompt) * request.n, 0)

    async def _sample(self, served: Served, request: Request, prompt: list[int], choice: int) -> tinker.SampledSequence:
        parameters = tinker.SamplingParams(
            max_tokens=max(1, request.max_tokens - len(request.forced_ids)),
            seed=(request.seed + choice) % 2**31,
            stop=sorted(served.end_ids),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=int(request.distortions.get("top_k", -1)),
        )
        async with asyncio.timeout(self._service.options.timeout):
            asked: Any = served.sampler.sample(tinker.ModelInput.from_ints(prompt), 1, parameters)
            reply: tinker.SampleResponse = await (asked if hasattr(asked, "__await__") else asyncio.wrap_future(asked))
        return reply.sequences[0]


def _response(request: Request, served: Served, choice: int, reply: tinker.SampledSequence) -> Response:
    """As sampled, up to a stop string: the service stops at tokens alone."""
    forced = [SampledToken(choice, token, 0.0, is_free=False) for token in request.forced_ids]
    tokens, said = list(forced), [*request.forced_ids]
    reason = FinishReason.LENGTH
    for token, logprob in zip(reply.tokens, reply.logprobs or (), strict=True):
        if len(tokens) == request.max_tokens:
            break
        tokens.append(SampledToken(choice, token, logprob))
        said.append(token)
        if token in served.end_ids or (request.stop is not None and request.stop(said)):
            reason = FinishReason.STOP
            break
    if request.watch is not None:
        for sampled in tokens:
            request.watch(sampled)
    return Response(tokens, reason)
