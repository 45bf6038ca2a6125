"""What the rollout's mode makes of the sampling parameters that the agent's code asks for."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import orjson

from agl_core.config.models import SamplingSection
from agl_core.learning.distribution import DISTORTING
from agl_core.protocols import Upstream
from agl_core.types import Json, Mode, Rollout, Sampling


def effective_sampling(rollout: Rollout, requested: Sampling, settings: SamplingSection | None, seed: int) -> Sampling:
    """Temperature and top_p by the rollout's mode, this call's seed, and the smaller of both token limits.

    Without `settings` it is what the agent asks for: what is only recorded is sampled as it would be without agl. In
    real use it is that too, and what is not asked for is said, so that it is known.
    """
    if settings is None:
        return requested
    if rollout.mode is Mode.USE:
        return Sampling(
            temperature=settings.temperature if requested.temperature is None else requested.temperature,
            top_p=1.0 if requested.top_p is None else requested.top_p,
            max_tokens=settings.max_tokens if requested.max_tokens is None else requested.max_tokens,
            seed=requested.seed,
        )
    temperature = {
        Mode.TRAIN: settings.temperature,
        Mode.EVAL_SAMPLED: settings.eval_temperature,
        Mode.EVAL_GREEDY: 0.0,
    }[rollout.mode]
    limit = settings.max_tokens if requested.max_tokens is None else min(requested.max_tokens, settings.max_tokens)
    return Sampling(temperature=temperature, top_p=1.0, max_tokens=limit, seed=seed)


def call_seed(run_seed: int, rollout: Rollout, attempt: int, sequence: int) -> int:
    """A 63-bit sampling seed: the same for the same call of a repeated run, different for every other call.

    A task may be drawn twice in one step, so the group's position is part of it. The group's name is not, since it
    changes when a run is resumed.
    """
    place = [rollout.mode, rollout.step, rollout.position, rollout.task.id, rollout.member, attempt, sequence]
    return int.from_bytes(blake2b(orjson.dumps([run_seed, *place]), digest_size=8).digest(), "big") >> 1


def forwarded(
    upstream: Upstream, chat: Mapping[str, Json], effective: Sampling, policy: str, *, trains: bool
) -> dict[str, Json]:
    """The chat completion that the upstream gets."""
    body = {name: value for name, value in chat.items() if not (trains and name in DISTORTING)}
    if body.get("tools") == []:  # None are offered; chat templates may take an empty list for another thing.
        del body["tools"]
        if body.get("tool_choice") in ("auto", "none"):
            del body["tool_choice"]
    body["model"] = upstream.models[policy]
    sampling = {
        "temperature": effective.temperature,
        "top_p": effective.top_p,
        "max_tokens": effective.max_tokens,
        "seed": effective.seed,
    }
    body.update({name: value for name, value in sampling.items() if value is not None})
    if upstream.returns_ids:
        body["return_token_ids"] = True
        body["logprobs"] = True
    return body
