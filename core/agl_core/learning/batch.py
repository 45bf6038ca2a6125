"""Credited episodes become ragged training batches, one per policy; what is dropped is counted with its reason."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agl_core.config.load import LoadedConfig
from agl_core.config.sections import is_among
from agl_core.errors import PluginError
from agl_core.kinds import Capability
from agl_core.learning.rewards import normalized
from agl_core.protocols import CreditRule
from agl_core.types import (
    Batch,
    CreditKind,
    DropReason,
    Episode,
    FinishReason,
    Mode,
    TrainingRecord,
    Transition,
    are_equal,
    episode_return,
)
from agl_core.types.episodes import Moment


@dataclass(frozen=True, slots=True)
class PolicyCredit:
    name: str
    rule: CreditRule
    kind: CreditKind
    """Rewards or returns, as the policy's algorithm reads its values."""
    weights: Mapping[str, float] | None = None
    """Weights of the reward rules, if each named reward is normalised (`normalized`) before credit."""

    def values(self, group: Sequence[Episode]) -> list[list[float]]:
        """The credited values of one group, one for each transition. PluginError if the rule fails."""
        try:
            values = self.rule(group if self.weights is None else normalized(group, self.weights))
        except Exception as error:
            raise PluginError(
                f"The credit rule '{self.name}' failed on group {group[0].group}: {type(error).__name__}: {error}. "
                "Fix the rule."
            ) from error
        expected = [len(episode.transitions) for episode in group]
        if [len(of_episode) for of_episode in values] != expected:
            raise PluginError(
                f"The credit rule '{self.name}' gave {[len(v) for v in values]} values for episodes of {expected} "
                f"transitions. It must return one value per transition, in order."
            )
        return values


@dataclass(frozen=True, slots=True)
class BatchPlan:
    credit: Mapping[str, PolicyCredit]
    """By policy; none: replies are imitated or measured, whatever they earned, and all values are 0."""
    agents: Sequence[str] = ("*",)
    """Names or patterns of the agents that are trained."""
    min_group_size: int = 1
    """A group with fewer members left is dropped whole."""
    without_logprobs: bool = False
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """As `TrainSection.truncated`."""
    max_staleness: int = 0
    """The updates that an episode may be old."""

    @classmethod
    def configured(cls, loaded: LoadedConfig, *, without_logprobs: bool) -> BatchPlan:
        train, weights = loaded.config.train, {name: section.weight for name, section in loaded.config.rewards.items()}
        if loaded.imitates:
            return cls({}, train.agents, without_logprobs=True, truncated=train.truncated)
        credit = {}
        for name, plan in loaded.policies.items():
            by_name = weights if Capability.NAMED_REWARDS in plan.algorithm.needs else None
            credit[name] = PolicyCredit(plan.credit.component.name, plan.credit.build(), plan.credit_kind, by_name)
        least, staleness = 2 if loaded.compares else 1, loaded.config.asynchronous.max_staleness
        return cls(credit, train.agents, least, without_logprobs, train.truncated, staleness)

    def drop_reason(self, episode: Episode, versions: Mapping[str, int] | None = None) -> DropReason | None:
        """Why a whole episode is not trained on, if so; `versions` are the trainer's, by policy.

        Episodes that were opened from outside are never stale: their source says which are too old.
        """
        if episode.dropped is not None or not episode.transitions:
            return episode.dropped or DropReason.NO_TRANSITION
        if episode.mode is not Mode.USE and staleness(episode, versions or {}) > self.max_staleness:
            return DropReason.STALE
        if self.truncated == "drop" and any(self.cuts(transition) for transition in episode.transitions):
            return DropReason.TRUNCATED
        return None

    def has_contrast(self, group: Sequence[Episode]) -> bool:
        """True if credited values of the group's trained calls differ; returns, where they are rewards of one step."""
        kept = [episode for episode in group if self.drop_reason(episode) is None]
        for policy, credit in self.credit.items():
            if credit.kind is CreditKind.REWARD:
                values = [episode_return(episode) for episode in kept]
            else:
                values = [
                    value
                    for episode, of_episode in zip(kept, credit.values(kept) if kept else (), strict=True)
                    for transition, value in zip(episode.transitions, of_episode, strict=True)
                    if transition.policy == policy and is_among(transition.agent, self.agents)
                ]
            if not are_equal(values):
                return True
        return False

    def cuts(self, transition: Transition) -> bool:
        """True if the limit cut a response of a trained agent off, and such are not kept."""
        is_cut = transition.finish_reason is FinishReason.LENGTH and is_among(transition.agent, self.agents)
        return is_cut and self.truncated != "keep"


@dataclass(frozen=True, slots=True)
class StepBatches:
    batches: Mapping[str, Batch]
    """By policy; a policy without a transition to train on has none."""
    dropped: tuple[TrainingRecord, ...]
    episodes_dropped: Mapping[DropReason, int]


def make_batches(
    groups: Sequence[Sequence[Episode]],
    plan: BatchPlan,
    *,
    weights: Sequence[float] = (),
    step: int = 0,
    versions: Mapping[str, int] | None = None,
) -> StepBatches:
    """Credit every group, if the plan does, and lay its trainable transitions out as batches, one per policy.

    A dropped episode leaves its group; a group that is then too small is dropped whole. A credit rule sees the whole
    group, other policies and untrained agents included, and its values count for the policy's own transitions. A
    rollout without a trainable transition is still compared with its group (`Batch.absent_values_A`). `weights` are the
    groups' in the loss; empty: all 1. With the trainer's `versions`, stale episodes are dropped.
    """
    rows = defaultdict[str, list[tuple[Transition, float, int, int]]](list)
    kinds = {policy: credit.kind for policy, credit in plan.credit.items()}
    absent, calls = defaultdict[str, list[tuple[int, float]]](list), defaultdict[str, list[list[Moment]]](list)
    dropped, episodes_dropped, rollouts = list[TrainingRecord](), Counter[DropReason](), 0
    for group_index, group in enumerate(groups):
        faults = [plan.drop_reason(episode, versions) for episode in group]
        if faults.count(None) < plan.min_group_size:
            faults = [fault or DropReason.GROUP_TOO_SMALL for fault in faults]
        for episode, fault in zip(group, faults, strict=True):
            if fault is not None:
                episodes_dropped[fault] += 1
                dropped += [_dropped(t, step, None, fault) for t in episode.transitions]
            dropped += [_dropped(t, step, None, DropReason.UNDELIVERED) for t in episode.undelivered]
            dropped += [_dropped(t, step, None, DropReason.HOUSEKEEPING) for t in episode.housekeeping]
        kept_episodes = [episode for episode, fault in zip(group, faults, strict=True) if fault is None]
        policies = dict.fromkeys(t.policy for episode in kept_episodes for t in episode.transitions)
        nothing = [[0.0] * len(episode.transitions) for episode in kept_episodes]
        credited = {p: plan.credit[p].values(kept_episodes) if plan.credit else nothing for p in policies}
        for member, episode in enumerate(kept_episodes):
            trained, untrainable = defaultdict[str, list[int]](list), defaultdict[str, list[float]](list)
            for i, transition in enumerate(episode.transitions):
                reason = left_out(transition, plan.agents, without_logprobs=plan.without_logprobs)
                if plan.cuts(transition):
                    reason = DropReason.TRUNCATED
                if reason is None:
                    trained[transition.policy].append(i)
                    continue
                value = credited[transition.policy][member][i]
                dropped.append(_dropped(transition, step, value, reason))
                if reason is not DropReason.UNTRAINED_AGENT:
                    untrainable[transition.policy].append(value)
            for policy in untrainable.keys() - trained.keys():
                absent[policy].append((group_index, fmean(untrainable[policy])))
            for policy, kept in trained.items():
                values = credited[policy][member]
                if kinds.get(policy) is CreditKind.REWARD:
                    of_episode = zip(episode.transitions, values, strict=True)
                    calls[policy].append([Moment(t.turn, t.lineage.thread, value) for t, value in of_episode])
                rows[policy] += [(episode.transitions[i], values[i], group_index, rollouts) for i in kept]
            rollouts += 1
    batches: dict[str, Batch] = {}
    for policy, of_policy in rows.items():
        transitions, credits, of_groups, of_rollouts = zip(*of_policy, strict=True)
        kind = kinds.get(policy, CreditKind.RETURN)
        batch = lay_out(transitions, credits, of_groups, of_rollouts, kind, step, absent[policy])
        batch = replace(batch, calls=calls[policy])
        if weights:
            batch = replace(batch, weight_N=np.take(np.asarray(weights, np.float64), of_groups))
        usable = filter_trainable(batch)
        if len(usable.batch):
            batches[policy] = usable.batch
        outcomes = zip(transitions, credits, usable.dropped, strict=True)
        dropped += [_dropped(t, step, value, reason) for t, value, reason in outcomes if reason is not None]
    return StepBatches(batches, tuple(dropped), episodes_dropped)


def left_out(transition: Transition, agents: Sequence[str], *, without_logprobs: bool = False) -> DropReason | None:
    """Why a transition goes into no batch, if so; `filter_trainable` decides what a batch can hold."""
    if not is_among(transition.agent, agents):
        return DropReason.UNTRAINED_AGENT
    if transition.prompt_ids is None or transition.response_ids is None:
        return DropReason.NO_TOKEN_IDS
    if transition.lacks_ids:
        return DropReason.INCOMPLETE_IDS
    if len(transition.response_ids) == 0:
        return DropReason.EMPTY_RESPONSE
    if transition.logprobs is None and without_logprobs:
        return None
    if transition.logprobs is None or len(transition.logprobs) != len(transition.response_ids):
        return DropReason.NO_LOGPROBS
    if transition.distorted:
        return DropReason.DISTORTED
    return DropReason.ABORTED if transition.finish_reason is FinishReason.ABORTED else None


def _dropped(transition: Transition, step: int, credit: float | None, reason: DropReason) -> TrainingRecord:
    return TrainingRecord(*transition.key, step=step, credit=credit, advantage=None, weight=0.0, dropped=reason)


def lay_out(
    transitions: Sequence[Transition],
    values: Sequence[float],
    groups: Sequence[int],
    rollouts: Sequence[int],
    kind: CreditKind,
    step: int = 0,
    absent: Sequence[tuple[int, float]] = (),
) -> Batch:
    """Transitions of one policy, all with token ids, as a batch; `absent` are groups and values of other rollouts."""
    known, group_N = np.unique(groups, return_inverse=True)
    compared = [(group, value) for group, value in absent if group in known and math.isfinite(value)]
    prompts = [np.asarray(t.prompt_ids, np.int32) for t in transitions]
    responses = [np.asarray(t.response_ids, np.int32) for t in transitions]
    prompt_lengths = np.array([len(p) for p in prompts], np.int64)
    response_lengths = np.array([len(r) for r in responses], np.int64)
    pairs = [*zip(transitions, responses, strict=True)]
    logprobs = [np.full(len(r), np.nan) if t.logprobs is None else t.logprobs for t, r in pairs]
    masks = [np.ones(len(r), np.bool_) if t.mask is None else t.mask for t, r in pairs]
    return Batch(
        tokens_T=np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]),
        offsets=_offsets(prompt_lengths + response_lengths),
        prompt_lengths_N=prompt_lengths,
        response_offsets=_offsets(response_lengths),
        behaviour_logprobs_R=np.concatenate(logprobs).astype(np.float32),
        mask_R=np.concatenate(masks),
        temperature_N=np.array([t.temperature for t in transitions], np.float32),
        values_N=np.array(values, np.float64),
        kind=kind,
        group_N=group_N.astype(np.int64),
        rollout_N=np.unique(rollouts, return_inverse=True)[1].astype(np.int64),
        turn_N=np.array([t.turn for t in transitions], np.int64),
        version_N=np.array([-1 if t.version is None else t.version for t in transitions], np.int64),
        keys=tuple(t.key for t in transitions),
        weight_N=np.ones(len(transitions)),
        sampled_N=np.array([t.logprobs is not None for t in transitions], np.bool_),
        grammar_N=np.array([t.grammar for t in transitions], np.object_),
        step=step,
        absent_values_A=np.array([value for _, value in compared], np.float64),
        absent_groups_A=np.searchsorted(known, [group for group, _ in compared]).astype(np.int64),
    )


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


@dataclass(frozen=True, slots=True)
class TrainableBatch:
    """The M of N transitions that can be trained on."""

    batch: Batch
    places: NDArray[np.int64]
    """[M] their places among the N."""
    dropped: tuple[DropReason | None, ...]
    """[N] why each is not among the M."""


def filter_trainable(
    batch: Batch, *, context_length: int | None = None, vocabulary: int | None = None, grammars: bool = True
) -> TrainableBatch:
    """Drop what cannot be trained on; its rewards of one step stay among `Batch.calls`.

    With returns, a rollout that has no transition left is still compared with its group. Without a model's limits, only
    what no model could be trained on is dropped. `grammars`: the engine knows which tokens a grammar allowed.
    """
    wrong_R = batch.mask_R & ~np.isfinite(batch.behaviour_logprobs_R)
    wrong_R &= np.repeat(batch.sampled_N, batch.response_lengths_N)  # Unknown log-probabilities are NaN.
    unknown_T = (batch.tokens_T < 0) | (batch.tokens_T >= (math.inf if vocabulary is None else vocabulary))
    reasons = {
        # After an empty prompt, nothing predicts the first token.
        DropReason.EMPTY_RESPONSE: (batch.response_lengths_N == 0) | (batch.prompt_lengths_N == 0),
        DropReason.FULLY_MASKED: _counts(batch.mask_R, batch.response_offsets) == 0,
        DropReason.TOO_LONG: np.diff(batch.offsets) > (math.inf if context_length is None else context_length),
        DropReason.CONSTRAINED: (batch.grammar_N != None) & (not grammars),  # noqa: E711, by element
        DropReason.NON_FINITE: (_counts(wrong_R, batch.response_offsets) > 0)
        | ~np.isfinite(batch.values_N)
        | ~(np.isfinite(batch.temperature_N) & (batch.temperature_N >= np.finfo(np.float32).tiny))
        | ~(np.isfinite(batch.weight_N) & (batch.weight_N >= 0))
        | (_counts(unknown_T, batch.offsets) > 0),
    }
    first = np.select([*reasons.values()], [*reasons], default="").tolist()
    dropped = tuple(DropReason(reason) if reason else None for reason in first)
    places = np.array([i for i, reason in enumerate(dropped) if reason is None], dtype=np.int64)
    if batch.kind is not CreditKind.REWARD and len(places) < len(batch):
        lost_N = ~np.isin(batch.rollout_N, batch.rollout_N[places]) & np.isfinite(batch.values_N)
        _, first, rollout = np.unique(batch.rollout_N[lost_N], return_index=True, return_inverse=True)
        means = np.bincount(rollout, batch.values_N[lost_N]) / np.bincount(rollout)
        batch = replace(
            batch,
            absent_values_A=np.concatenate([batch.absent_values_A, means]),
            absent_groups_A=np.concatenate([batch.absent_groups_A, batch.group_N[lost_N][first]]),
        )
    return TrainableBatch(subset(batch, places), places, dropped)


def subset(batch: Batch, chosen: NDArray[np.int64]) -> Batch:
    if len(chosen) == len(batch) and (chosen == np.arange(len(batch))).all():
        return batch
    tokens, offsets = _ranges(batch.offsets, chosen)
    responses, response_offsets = _ranges(batch.response_offsets, chosen)
    places = {"_N": chosen, "_T": tokens, "_R": responses}
    names = (field.name for field in fields(batch) if field.name[-2:] in places)
    picked = {name: getattr(batch, name)[places[name[-2:]]] for name in names}
    keys = tuple(batch.keys[i] for i in chosen)
    return replace(batch, **picked, offsets=offsets, response_offsets=response_offsets, keys=keys)


def _ranges(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the chosen segments' items, and the offsets of these segments put one after the other."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = _offsets(lengths)
    items = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return items.astype(np.int64), new_offsets


def _counts(flags: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many flags are set in each segment."""
    totals = _offsets(flags.astype(np.int64))
    return np.asarray(totals[offsets[1:]] - totals[offsets[:-1]])


def staleness(episode: Episode, versions: Mapping[str, int]) -> int:
    """The updates since the episode's oldest transition was sampled; `versions` are the trainer's, by policy.

    V_p − v_t for transition t, answered by version v_t of policy p while the trainer holds V_p. The oldest transition
    counts: its version led to the states of later ones. A transition of unknown version counts as new.
    """
    ages = (versions.get(t.policy, t.version) - t.version for t in episode.transitions if t.version is not None)
    return max(ages, default=0)
