"""Credited episodes become ragged training batches, one per policy; what is left out is counted with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

import numpy as np

from agl_core.types import Batch, CreditKind, DropReason, Episode, Transition, Use

Credit = Callable[[Sequence[Episode]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step's episodes give to train on."""

    batches: Mapping[str, Batch]
    """By policy; a policy without a transition to train on has none."""
    dropped: tuple[Use, ...]
    """Every transition that was left out, with the reason."""
    episodes_dropped: Mapping[DropReason, int]


@dataclass(frozen=True, slots=True)
class _Row:
    transition: Transition
    value: float
    score: float
    group: int
    rollout: int


def prepare(
    groups: Sequence[Sequence[Episode]],
    credit: Credit,
    kind: CreditKind,
    *,
    agents: Sequence[str] = ("*",),
    min_group_size: int = 1,
    step: int = 0,
) -> Prepared:
    """Credit every group and lay its trainable transitions out as batches.

    An episode that was dropped leaves its group; a group with fewer than `min_group_size` members left is dropped
    whole. Untrained agents take part in credit and are left out of the batch; where credit yields rewards of one step,
    theirs go to the trained transitions before (`carry_rewards`), so that they stay in the return.
    """
    rows: dict[str, list[_Row]] = {}
    dropped: list[Use] = []
    episodes_dropped: dict[DropReason, int] = {}
    rollouts = 0
    for group_index, group in enumerate(groups):
        left = [episode for episode in group if _episode_fault(episode) is None]
        too_small = len(left) < min_group_size
        for episode in group:
            fault = _episode_fault(episode) or (DropReason.GROUP_TOO_SMALL if too_small else None)
            if fault is not None:
                episodes_dropped[fault] = episodes_dropped.get(fault, 0) + 1
                dropped += [_use(t, step, None, fault) for t in episode.transitions]
        if too_small:
            continue
        for episode, values in zip(left, credit(left), strict=True):
            trained: dict[str, list[int]] = {}
            for i, (transition, value) in enumerate(zip(episode.transitions, values, strict=True)):
                reason = transition_fault(transition, agents)
                if reason is None:
                    trained.setdefault(transition.policy, []).append(i)
                else:
                    dropped.append(_use(transition, step, value, reason))
            for policy, kept in trained.items():
                earned = carry_rewards(episode.transitions, values, kept) if kind is CreditKind.REWARD else values
                for i in kept:
                    if math.isfinite(earned[i]):
                        row = _Row(episode.transitions[i], earned[i], episode.terminal or 0.0, group_index, rollouts)
                        rows.setdefault(policy, []).append(row)
                    else:
                        dropped.append(_use(episode.transitions[i], step, values[i], DropReason.NON_FINITE))
            rollouts += 1
    return Prepared(
        batches={policy: _batch(of_policy, kind) for policy, of_policy in rows.items()},
        dropped=tuple(dropped),
        episodes_dropped=episodes_dropped,
    )


def transition_fault(transition: Transition, agents: Sequence[str] = ("*",)) -> DropReason | None:
    """Why this transition cannot be trained on, if it cannot."""
    if not any(fnmatchcase(transition.agent or "", pattern) for pattern in agents):
        return DropReason.UNTRAINED_AGENT
    if transition.prompt_ids is None or transition.response_ids is None:
        return DropReason.NO_TOKEN_IDS
    if len(transition.response_ids) == 0 or len(transition.prompt_ids) == 0:
        return DropReason.EMPTY_RESPONSE
    if transition.logprobs is None or len(transition.logprobs) != len(transition.response_ids):
        return DropReason.NO_LOGPROBS
    if not np.isfinite(transition.logprobs).all():
        return DropReason.NON_FINITE
    if transition.mask is not None and not transition.mask.any():
        return DropReason.FULLY_MASKED
    return None


def carry_rewards(transitions: Sequence[Transition], values: Sequence[float], trained: Sequence[int]) -> list[float]:
    """Rewards of one step for the `trained` transitions (their places), who see the others as their environment.

    What a call without a trained transition earned (its choices' mean) goes, undiscounted, to the trained
    transitions of the call before it; what was earned before the first of them is no consequence of theirs, and is
    left out. Rewards 0.1, 0.2, 0.3, 1.0 of a writer and a critic by turns become 0.3 and 1.3 for the writer alone.
    """
    earned = list(values)
    kept = set(trained)
    before: list[int] = []
    for _, same_call in groupby(range(len(transitions)), key=lambda i: transitions[i].turn):
        places = list(same_call)
        here = [i for i in places if i in kept]
        if here:
            before = here
            continue
        carried = sum(values[i] for i in places) / len(places)
        for i in before:
            earned[i] += carried
    return earned


def _episode_fault(episode: Episode) -> DropReason | None:
    if episode.dropped is not None:
        return episode.dropped
    return None if episode.transitions else DropReason.NO_TRANSITION


def _use(transition: Transition, step: int, credit: float | None, reason: DropReason) -> Use:
    return Use(*transition.key, step=step, credit=credit, advantage=None, weight=0.0, dropped=reason)


def _batch(rows: Sequence[_Row], kind: CreditKind) -> Batch:
    transitions = [row.transition for row in rows]
    prompts = [np.asarray(t.prompt_ids, np.int32) for t in transitions]
    responses = [np.asarray(t.response_ids, np.int32) for t in transitions]
    prompt_lengths = np.array([len(p) for p in prompts], np.int64)
    response_lengths = np.array([len(r) for r in responses], np.int64)
    masks = [
        np.ones(len(r), np.bool_) if t.mask is None else t.mask for t, r in zip(transitions, responses, strict=True)
    ]
    return Batch(
        tokens_T=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]),
        offsets=_offsets(prompt_lengths + response_lengths),
        prompt_lengths_N=prompt_lengths,
        response_offsets=_offsets(response_lengths),
        behaviour_logprobs_R=np.concatenate([np.asarray(t.logprobs, np.float32) for t in transitions]),
        mask_R=np.concatenate(masks),
        temperature_N=np.array([t.temperature for t in transitions], np.float32),
        values_N=np.array([row.value for row in rows], np.float64),
        kind=kind,
        group_N=_dense([row.group for row in rows]),
        rollout_N=_dense([row.rollout for row in rows]),
        turn_N=np.array([t.turn for t in transitions], np.int64),
        version_N=np.array([-1 if t.version is None else t.version for t in transitions], np.int64),
        scores_N=np.array([row.score for row in rows], np.float64),
        keys=tuple(t.key for t in transitions),
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _dense(labels: Sequence[int]) -> np.ndarray:
    return np.unique(np.array(labels, np.int64), return_inverse=True)[1].astype(np.int64)
