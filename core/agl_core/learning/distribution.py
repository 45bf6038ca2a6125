"""Whether tokens were drawn from the distribution that their log-probabilities are of.

The recorded log-probabilities are those of the policy at the sampling temperature. Nucleus sampling, penalties and the
like draw from another distribution: importance weights of such tokens would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agl_core.types import Call, Json, Mode

_NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "use_beam_search": (False,),
}
"""The values of request fields that leave the distribution as it is; so does null."""

DISTORTING = frozenset(_NEUTRAL)
"""Request fields that change the distribution tokens are drawn from. In train mode the gateway drops them."""


def is_distorted(call: Call, mode: Mode) -> bool:
    """Whether the responses of a call were drawn from another distribution than the policy's own.

    A temperature of 0 is one: it always takes the most probable token.
    """
    if mode.trains:
        return False
    sampling = call.effective
    if sampling.temperature == 0 or sampling.top_p not in (None, 1):
        return True
    return any(distorting(call.request))


def distorting(asked: Mapping[str, Json]) -> Iterator[str]:
    """The fields of a request that change the distribution.

    >>> list(distorting({"top_k": 5, "min_p": 0, "logit_bias": None, "stop": "."}))
    ['top_k']
    """
    return (name for name, same in _NEUTRAL.items() if asked.get(name) is not None and asked[name] not in same)
