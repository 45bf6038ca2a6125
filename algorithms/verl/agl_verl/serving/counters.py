"""What vLLM's servers have counted, by agl's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import httpx

from agl_core.errors import EngineError

SECONDS_TO_ANSWER = 60.0
"""A server on a busy machine, or amid an exchange of weights, takes its time; one that is gone is missed at once."""
_COUNTERS = {
    "vllm:prompt_tokens_total": "tokens_prefilled",
    "vllm:prefix_cache_hits_total": "tokens_reused",
    "vllm:generation_tokens_total": "tokens_decoded",
}


def read_counters(urls: Iterable[str]) -> dict[str, float]:
    """tokens_prefilled, tokens_reused, tokens_decoded since the start, over all servers; EngineError if one is gone."""
    totals = dict.fromkeys(_COUNTERS.values(), 0.0)
    with httpx.Client(timeout=SECONDS_TO_ANSWER, trust_env=False) as client:
        for url in urls:
            try:
                reply = client.get(f"{url.removesuffix('/v1')}/metrics")
            except httpx.TransportError as error:
                raise EngineError(
                    f"The vLLM server at {url} does not answer ({type(error).__name__}). Resume the run from its last "
                    f"checkpoint."
                ) from error
            for name, value in _parsed(reply.text):
                totals[name] += value
    return totals


def _parsed(exposition: str) -> Iterator[tuple[str, float]]:
    """agl's names and values of the counters in Prometheus' text format."""
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        if name in _COUNTERS:
            yield _COUNTERS[name], float(rest.rpartition("}")[2].split()[0])
