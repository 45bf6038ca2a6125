"""Credited episodes become ragged training batches, one per policy; what is dropped is counted with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agl_core.config import PolicyPlan
from agl_core.config.sections import is_among
from agl_core.errors import PluginError
from agl_core.learning.trainable import filter_trainable, propagate_rewards
from agl_core.protocols import CreditRule
from agl_core.types import Batch, CreditKind, DropReason, Episode, FinishReason, Mode, TrainingRecord, Transition


@dataclass(frozen=True, slots=True)
class PolicyCredit:
    """How the transitions of one policy are credited."""

    name: str
    """The rule's name, for messages."""
    rule: CreditRule
    kind: CreditKind
    """Whether the policy's algorithm reads its values as rewards or as returns."""

    @classmethod
    def planned(cls, plan: PolicyPlan) -> PolicyCredit:
        """From the rule that the configuration chose."""
        return cls(plan.credit.component.name, plan.credit.build(), plan.credit_kind)

    def values(self, group: Sequence[Episode]) -> list[list[float]]:
        """The credited values of one group, one for each transition. PluginError if the rule fails."""
        try:
            values = self.rule(group)
        except Exception as error:
            name = group[0].group if group else "without episodes"
            raise PluginError(
                f"The credit rule '{self.name}' failed on group {name}: {type(error).__name__}: {error}. Fix the rule."
            ) from error
        expected = [len(episode.transitions) for episode in group]
        if [len(of_episode) for of_episode in values] != expected:
            raise PluginError(
                f"The credit rule '{self.name}' gave {[len(v) for v in values]} values for episodes of {expected} "
                f"transitions. It must return one value per transition, in order."
            )
        return values


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The training data of a step's episodes."""

    batches: Mapping[str, Batch]
    """By policy; a policy without a transition to train on has none."""
    dropped: tuple[TrainingRecord, ...]
    """Every dropped transition, with the reason."""
    episodes_dropped: Mapping[DropReason, int]


@dataclass(frozen=True, slots=True)
class _Row:
    transition: Transition
    value: float
    score: float
    group: int
    rollout: int
    weight: float


def make_batches(
    groups: Sequence[Sequence[Episode]],
    credit: Mapping[str, PolicyCredit],
    *,
    weights: Sequence[float] = (),
    agents: Sequence[str] = ("*",),
    min_group_size: int = 1,
    step: int = 0,
    without_logprobs: bool = False,
) -> StepBatches:
    """Credit every group and lay its trainable transitions out as batches, one per policy.

    An episode that was dropped leaves its group; a group with fewer than `min_group_size` members left is dropped
    whole. `credit` has a rule for each policy. The rule sees the whole group, including transitions of other policies
    and of untrained agents, and its values are used for the policy's own transitions. Untrained agents are in no batch.
    If credit yields rewards of one step, the rewards of other calls go to the policy's trained transitions before them
    (`propagate_rewards`), and so stay in the return. `weights` has the weight of each group in the loss; empty: all 1.
    Transitions without log-probabilities are dropped, unless `without_logprobs`.
    """
    rows: dict[str, list[_Row]] = {}
    dropped: list[TrainingRecord] = []
    episodes_dropped: dict[DropReason, int] = {}
    rollouts = 0
    for group_index, group in enumerate(groups):
        left = [episode for episode in group if _episode_fault(episode) is None]
        too_small = len(left) < min_group_size
        for episode in group:
            fault = _episode_fault(episode) or (DropReason.GROUP_TOO_SMALL if too_small else None)
            if fault is not None:
                episodes_dropped[fault] = episodes_dropped.get(fault, 0) + 1
                dropped += [_dropped(t, step, None, fault) for t in episode.transitions]
            dropped += [_dropped(t, step, None, DropReason.UNDELIVERED) for t in episode.undelivered]
        if too_small:
            continue
        taking_part = dict.fromkeys(t.policy for episode in left for t in episode.transitions)
        credited = {policy: credit[policy].values(left) for policy in taking_part}
        for member, episode in enumerate(left):
            trained: dict[str, list[int]] = {}
            for i, transition in enumerate(episode.transitions):
                reason = left_out(transition, agents, without_logprobs=without_logprobs)
                if reason is None:
                    trained.setdefault(transition.policy, []).append(i)
                else:
                    dropped.append(_dropped(transition, step, credited[transition.policy][member][i], reason))
            for policy, kept in trained.items():
                values = credited[policy][member]
                carries = credit[policy].kind is CreditKind.REWARD
                earned = propagate_rewards([t.turn for t in episode.transitions], values, kept) if carries else values
                for i in kept:
                    weight = weights[group_index] if weights else 1.0
                    score = episode.terminal or 0.0
                    row = _Row(episode.transitions[i], earned[i], score, group_index, rollouts, weight)
                    rows.setdefault(policy, []).append(row)
            rollouts += 1
    batches: dict[str, Batch] = {}
    for policy, of_policy in rows.items():
        usable = filter_trainable(_batch(of_policy, credit[policy].kind, step))
        if len(usable.batch):
            batches[policy] = usable.batch
        for row, fault in zip(of_policy, usable.dropped, strict=True):
            if fault is not None:
                dropped.append(_dropped(row.transition, step, row.value, fault))
    return StepBatches(batches, tuple(dropped), episodes_dropped)


def left_out(transition: Transition, agents: Sequence[str], *, without_logprobs: bool = False) -> DropReason | None:
    """Why a transition goes into no batch, if so; `filter_trainable` decides what a batch can hold."""
    if not is_among(transition.agent, agents):
        return DropReason.UNTRAINED_AGENT
    if transition.prompt_ids is None or transition.response_ids is None:
        return DropReason.NO_TOKEN_IDS
    if len(transition.response_ids) == 0:
        return DropReason.EMPTY_RESPONSE
    if transition.logprobs is None and without_logprobs:
        return None
    if transition.logprobs is None or len(transition.logprobs) != len(transition.response_ids):
        return DropReason.NO_LOGPROBS
    if transition.distorted:
        return DropReason.DISTORTED
    if transition.finish_reason is FinishReason.ABORTED:
        return DropReason.ABORTED
    return None


def _episode_fault(episode: Episode) -> DropReason | None:
    if episode.dropped is not None:
        return episode.dropped
    return None if episode.transitions else DropReason.NO_TRANSITION


def _dropped(transition: Transition, step: int, credit: float | None, reason: DropReason) -> TrainingRecord:
    return TrainingRecord(*transition.key, step=step, credit=credit, advantage=None, weight=0.0, dropped=reason)


def _batch(rows: Sequence[_Row], kind: CreditKind, step: int) -> Batch:
    transitions = [row.transition for row in rows]
    prompts = [np.asarray(t.prompt_ids, np.int32) for t in transitions]
    responses = [np.asarray(t.response_ids, np.int32) for t in transitions]
    prompt_lengths = np.array([len(p) for p in prompts], np.int64)
    response_lengths = np.array([len(r) for r in responses], np.int64)
    unknown = (np.full(len(r), np.nan, np.float32) for r in responses)
    logprobs = [nan if t.logprobs is None else t.logprobs for t, nan in zip(transitions, unknown, strict=True)]
    masks = [
        np.ones(len(r), np.bool_) if t.mask is None else t.mask for t, r in zip(transitions, responses, strict=True)
    ]
    return Batch(
        tokens_T=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]),
        offsets=_offsets(prompt_lengths + response_lengths),
        prompt_lengths_N=prompt_lengths,
        response_offsets=_offsets(response_lengths),
        behaviour_logprobs_R=np.concatenate([np.asarray(each, np.float32) for each in logprobs]),
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
        weight_N=np.array([row.weight for row in rows], np.float64),
        sampled_N=np.array([t.logprobs is not None for t in transitions], np.bool_),
        step=step,
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _dense(labels: Sequence[int]) -> np.ndarray:
    return np.unique(np.array(labels, np.int64), return_inverse=True)[1].astype(np.int64)


def staleness(episode: Episode, versions: Mapping[str, int]) -> int:
    """The updates since the episode's oldest transition was sampled; `versions` are the trainer's, by policy.

    V_p − v_t of transition t, which version v_t of policy p answered while the trainer holds V_p. An episode is as old
    as its oldest transition, because later decisions were made in a state that the old version led to. A transition
    whose version is not known counts as new.
    """
    ages = (versions.get(t.policy, t.version) - t.version for t in episode.transitions if t.version is not None)
    return max(ages, default=0)


def without_stale(
    groups: Sequence[Sequence[Episode]], versions: Mapping[str, int], max_staleness: int
) -> list[list[Episode]]:
    """The groups with every episode older than `max_staleness` marked as dropped; other reasons come first.

    Of rollouts that were opened from outside, their source says which are too old.

    `make_batches` removes marked episodes from their groups and compares those that are left.
    """
    return [
        [
            replace(episode, dropped=DropReason.STALE)
            if episode.dropped is None and episode.mode is not Mode.USE and staleness(episode, versions) > max_staleness
            else episode
            for episode in group
        ]
        for group in groups
    ]
