"""Recorded experience and the batch that a run makes of it: ragged, several agents, and rows of every kind left out.

Groups of three rollouts of one to four calls, through agl's own `without_stale` and `make_batches`. In them are

- an episode with a call that is too many updates old (STALE), which leaves its group;
- calls of a second agent that is not trained (UNTRAINED): what they earned is in the return, they are in no loss;
- a call whose log-probability is not finite (DROPPED), which the run drops;
- one with a token that the model has not (UNKNOWN) and one longer than `TOO_LONG` (LONG): the engines drop them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from agl_core.builtin.credit import identical, immediate
from agl_core.learning import BatchPlan, PolicyCredit, make_batches, without_stale
from agl_core.types import (
    Batch,
    CreditKind,
    Ending,
    Episode,
    FinishReason,
    Mode,
    Reward,
    Task,
    TrainingRecord,
    Transition,
    TransitionKey,
)

VERSION, MAX_STALENESS = 3, 1
"""The trainer's version, and how old an episode may be: some are of this version, some one older, one two older."""
TRAINED, SECOND = "writer", "reviewer"
TOO_LONG = 200
"""A context that one transition exceeds."""
WEIGHTS = (1.0, 0.5, 2.0)
"""Of the groups, in turns."""


class Kind(StrEnum):
    """What becomes of a call."""

    KEPT = "kept"
    STALE = "stale"
    UNTRAINED = "untrained agent"
    DROPPED = "dropped"
    UNKNOWN = "unknown token"
    LONG = "too long"


@dataclass(frozen=True)
class Recorded:
    """What a run makes of the episodes."""

    batch: Batch
    dropped: tuple[TrainingRecord, ...]
    """What is left out before an engine sees the batch."""
    kinds: dict[TransitionKey, Kind]
    """Of every call."""


def record(
    vocabulary: int,
    kind: CreditKind = CreditKind.RETURN,
    seed: int = 0,
    rollouts: int = 9,
    *,
    others: Collection[Kind] = (),
    stale: bool = True,
    agents: Sequence[str] = (TRAINED,),
) -> Recorded:
    """`others`: calls of these kinds have other tokens and log-probabilities, of the same lengths; stale ones also earn
    something else. `stale` and `agents` are for what happens if nobody leaves out the stale and the untrained."""
    random = np.random.default_rng(seed)
    kinds: dict[TransitionKey, Kind] = {}
    episodes = [_episode(random, rollout, rollouts, vocabulary, kinds) for rollout in range(rollouts)]
    if others:
        changed = np.random.default_rng(seed + 1000)
        episodes = [_with_others(changed, each, others, vocabulary, kinds) for each in episodes]
    groups = [episodes[start : start + 3] for start in range(0, rollouts, 3)]
    if stale:
        groups = without_stale(groups, {"default": VERSION}, MAX_STALENESS)
    rule = identical if kind is CreditKind.RETURN else immediate
    weights = [WEIGHTS[place % len(WEIGHTS)] for place in range(len(groups))]
    credit = {"default": PolicyCredit(rule.__name__, rule, kind)}
    made = make_batches(groups, BatchPlan(credit, agents), weights=weights)
    return Recorded(made.batches["default"], made.dropped, kinds)


def _episode(
    random: np.random.Generator, rollout: int, rollouts: int, vocabulary: int, kinds: dict[TransitionKey, Kind]
) -> Episode:
    name, turns = f"r{rollout}", int(random.integers(2, 5))
    versions = [VERSION - rollout % 2] * turns
    if rollout % 9 == 4:
        versions[0] = VERSION - MAX_STALENESS - 1
    transitions = []
    for turn in range(turns):
        key = TransitionKey(name, 0, f"c{turn}", 0)
        second = turn == 1 and rollout % 3 != 0
        kinds[key] = (
            Kind.STALE
            if rollout % 9 == 4
            else Kind.UNTRAINED
            if second
            else {(1, 0): Kind.DROPPED, (2, 0): Kind.UNKNOWN, (rollouts - 1, 0): Kind.LONG}.get(
                (rollout, turn), Kind.KEPT
            )
        )
        prompt = random.integers(0, vocabulary, int(random.integers(3, 30)))
        response = random.integers(0, vocabulary, int(random.integers(1, 20)))
        mask = random.random(len(response)) > 0.15
        mask[0] = True
        logprobs = -np.log(vocabulary) + 0.3 * random.normal(size=len(response))
        earned = float(random.normal())
        if kinds[key] is Kind.DROPPED:
            logprobs[0] = np.nan
        if kinds[key] is Kind.UNKNOWN:
            prompt[0] = vocabulary + 3
        if kinds[key] is Kind.LONG:
            prompt = np.concatenate([prompt, random.integers(0, vocabulary, TOO_LONG)])
        transitions.append(
            Transition(
                key=key,
                agent=SECOND if second else TRAINED,
                turn=turn,
                agent_turn=turn,
                policy="default",
                version=versions[turn],
                messages=(),
                response={"role": "assistant", "content": ""},
                finish_reason=FinishReason.STOP,
                temperature=0.8,
                prompt_ids=prompt.astype(np.int32),
                response_ids=response.astype(np.int32),
                logprobs=logprobs.astype(np.float32),
                mask=mask,
                rewards=(Reward(name, 0, "step", earned, "recorded", call=key.call),),
            )
        )
    return Episode(
        rollout=name,
        attempt=0,
        group=f"g{rollout // 3}",
        member=rollout % 3,
        task=Task(f"t{rollout // 3}", None),
        mode=Mode.TRAIN,
        ending=Ending.FINISHED,
        transitions=tuple(transitions),
        terminal=float(random.normal()),
    )


def _with_others(
    random: np.random.Generator,
    episode: Episode,
    chosen: Collection[Kind],
    vocabulary: int,
    kinds: dict[TransitionKey, Kind],
) -> Episode:
    """With other tokens in the calls of the chosen kinds; what makes them be left out stays."""
    transitions = []
    for each in episode.transitions:
        if kinds[each.key] not in chosen:
            transitions.append(each)
            continue
        assert each.prompt_ids is not None
        assert each.response_ids is not None
        assert each.logprobs is not None
        prompt = random.integers(0, vocabulary, len(each.prompt_ids)).astype(np.int32)
        prompt = np.where(each.prompt_ids < vocabulary, prompt, each.prompt_ids)
        transitions.append(
            replace(
                each,
                prompt_ids=prompt,
                response_ids=random.integers(0, vocabulary, len(each.response_ids)).astype(np.int32),
                logprobs=(each.logprobs + 0.3 * random.normal(size=len(each.logprobs))).astype(np.float32),
                rewards=() if kinds[each.key] is Kind.STALE else each.rewards,
            )
        )
    return replace(episode, transitions=tuple(transitions))
