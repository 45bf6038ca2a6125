"""A plugin: each rollout is trained on as one sequence of all its calls, in which only sampled tokens are in the loss.

It is what transitions are compared with in docs/experiments.md. Where a call's prompt continues what came before, only
what is new is appended. Where it does not (another agent, a rewritten context), the whole prompt is: a response is then
trained in a context that it was not sampled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import agl_core
from agl_core.types import Episode, Transition


@agl_core.hookimpl
def episode_built(episode: Episode) -> Episode | None:
    usable = [t for t in episode.transitions if t.has_ids and t.logprobs is not None]
    return replace(episode, transitions=(concatenated(usable),)) if usable else None


def concatenated(transitions: Sequence[Transition]) -> Transition:
    """One transition, whose response is everything after the first prompt."""
    first = transitions[0]
    tokens = np.asarray(first.prompt_ids, np.int32)
    start = len(tokens)
    logprobs, sampled = [np.zeros(start)], [np.zeros(start, np.bool_)]
    for t in transitions:
        prompt, response = np.asarray(t.prompt_ids, np.int32), np.asarray(t.response_ids, np.int32)
        continues = np.array_equal(prompt[: len(tokens)], tokens)
        between = prompt[len(tokens) :] if continues else prompt
        tokens = np.concatenate([tokens, between, response])
        logprobs += [np.zeros(len(between)), np.asarray(t.logprobs)]
        sampled += [np.zeros(len(between), np.bool_), np.ones(len(response), np.bool_)]
    return replace(
        first,
        response_ids=tokens[start:],
        logprobs=np.concatenate(logprobs)[start:].astype(np.float32),
        mask=np.concatenate(sampled)[start:],
        tool_results=tuple(result for t in transitions for result in t.tool_results),
        rewards=tuple(reward for t in transitions for reward in t.rewards),
    )
