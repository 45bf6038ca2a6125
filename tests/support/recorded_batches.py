"""Recorded experience and the batch that a run makes of it: ragged, several agents, and rows of every kind left out.

Groups of three rollouts of two to four calls, through agl's own `make_batches`. Most calls continue
the conversation of the call before, of any agent; some begin anew. In them are

- an episode with a call that is too many updates old (STALE), which leaves its group;
- calls of a second agent that is not trained (UNTRAINED): what they earned is in the return, they are in no loss;
- a call whose log-probability is not finite (DROPPED), which the run drops;
- one with a token that the model has not (UNKNOWN) and one longer than `TOO_LONG` (LONG): the engines drop them.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

import numpy as np

from agl_core.builtin import identical, immediate
from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.testing import episodes as make
from agl_core.types import Batch, CreditKind, Episode, Reward
from agl_rewards.group_credit import gigpo

VERSION, MAX_STALENESS = 3, 1
"""The trainer's version, and how old an episode may be: some are of this version, some one older, one two older."""
TRAINED, SECOND = "writer", "reviewer"
TOO_LONG = 200
"""A context that one transition exceeds."""
AFRESH = 0.25
"""The share of calls that do not continue the one before."""
WEIGHTS = (1.0, 0.5, 2.0)
"""Of the groups, in turns."""
RULES = {CreditKind.RETURN: identical, CreditKind.REWARD: immediate, CreditKind.ADVANTAGE: gigpo}


class Kind(StrEnum):
    """The fate of a call."""

    KEPT = "kept"
    STALE = "stale"
    UNTRAINED = "untrained agent"
    DROPPED = "dropped"
    UNKNOWN = "unknown token"
    LONG = "too long"


def record(
    vocabulary: int,
    kind: CreditKind = CreditKind.RETURN,
    seed: int = 0,
    rollouts: int = 9,
    *,
    others: Collection[Kind] = (),
    temperature: float = 0.8,
) -> Batch:
    """`others`: calls of these kinds have other tokens and log-probabilities, of the same lengths; stale ones also earn
    something else."""
    random, changed = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    episodes = [
        _episode(random, changed, rollout, rollouts, vocabulary, others, temperature) for rollout in range(rollouts)
    ]
    groups = [episodes[start : start + 3] for start in range(0, rollouts, 3)]
    rule = RULES[kind]
    weights = [WEIGHTS[n % len(WEIGHTS)] for n in range(len(groups))]
    credit = {"default": PolicyCredit(rule.__name__, rule, kind)}
    plan = BatchPlan(credit, (TRAINED,), max_staleness=MAX_STALENESS)
    return make_batches(groups, plan, weights=weights, versions={"default": VERSION}).batches["default"]


def _episode(
    random: np.random.Generator,
    changed: np.random.Generator,
    rollout: int,
    rollouts: int,
    vocabulary: int,
    others: Collection[Kind],
    temperature: float,
) -> Episode:
    """`changed` makes the calls of the kinds in `others`."""
    name, turns = f"r{rollout}", int(random.integers(2, 5))
    transitions = []
    conversation = np.zeros(0, np.int64)
    for turn in range(turns):
        kind = _kind(rollout, turn, rollouts)
        news = random.integers(0, vocabulary, int(random.integers(3, 30)))
        prompt = news if random.random() < AFRESH else np.concatenate([conversation, news])
        response = random.integers(0, vocabulary, int(random.integers(1, 20)))
        conversation = np.concatenate([prompt, response])
        mask = random.random(len(response)) > 0.15
        mask[0] = True
        logprobs = -np.log(vocabulary) + 0.3 * random.normal(size=len(response))
        earned = float(random.normal())
        if kind is Kind.DROPPED:
            logprobs[0] = np.nan
        if kind is Kind.UNKNOWN:
            prompt = np.concatenate([[vocabulary + 3], prompt[1:]])
        if kind is Kind.LONG:
            prompt = np.concatenate([prompt, random.integers(0, vocabulary, TOO_LONG)])
        if kind in others:  # What makes them be left out stays.
            prompt = np.where(prompt < vocabulary, changed.integers(0, vocabulary, len(prompt)), prompt)
            response = changed.integers(0, vocabulary, len(response))
            logprobs += 0.3 * changed.normal(size=len(response))
            earned += kind is Kind.STALE
        transition = make.transition(
            turn,
            rollout=name,
            agent=SECOND if turn == 1 and rollout % 3 else TRAINED,
            version=VERSION - MAX_STALENESS - 1 if kind is Kind.STALE and turn == 0 else VERSION - rollout % 2,
            temperature=temperature,
            prompt_ids=prompt.astype(np.int32),
            response_ids=response.astype(np.int32),
            logprobs=logprobs.astype(np.float32),
            mask=mask,
            rewards=(Reward(name, 0, "step", earned, "recorded", call=f"{name}-c{turn}"),),
        )
        transitions.append(transition)
    terminal = float(random.normal())
    return make.episode(*transitions, rollout=name, group=f"g{rollout // 3}", member=rollout % 3, terminal=terminal)


def _kind(rollout: int, turn: int, rollouts: int) -> Kind:
    if rollout % 9 == 4:
        return Kind.STALE
    if turn == 1 and rollout % 3:
        return Kind.UNTRAINED
    kinds = {(1, 0): Kind.DROPPED, (2, 0): Kind.UNKNOWN, (rollouts - 1, 0): Kind.LONG}
    return kinds.get((rollout, turn), Kind.KEPT)
