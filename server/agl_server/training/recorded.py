"""Recorded rollouts in the place of new ones: groups to train on, and held-out replies to score. No agent runs.

source ──▶ adopted: this run's ids, policies and token ids ──▶ stored, and episodes ──▶ scored ──▶ drawn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from agl_core.config.load import LoadedConfig
from agl_core.config.sections import policy_of
from agl_core.errors import ConfigError, nearest
from agl_core.kinds import Capability
from agl_core.learning.rewards import AGENT_SOURCE, ScoringRule, reported
from agl_core.learning.tool_results import messages_of
from agl_core.protocols import Engine, RecordedTasks, train_index
from agl_core.types import Call, Episode, RecordedRollout, Reward, Rollout, RolloutState
from agl_server.training.metrics import Advance
from agl_server.training.rollouts import (
    Collector,
    ScoredRollout,
    StepGroups,
    TrainingPlan,
    trained_episode,
    without_contrast,
)


class Recordings:
    """Rollouts of a source, as this run has them: calls of its policies, with token ids.

    Calls have no version: the policy of this run did not answer them. They keep log-probabilities only if they were
    recorded in training, where sampling follows the policy's own distribution, and are not `imitated`.
    """

    def __init__(self, source: RecordedTasks, loaded: LoadedConfig, engine: Engine, *, imitated: bool) -> None:
        self.source, self.config, self.engine, self._imitated = source, loaded.config, engine, imitated
        self._tokenizes = Capability.RECORDED_TEXTS in loaded.engine.component.provides
        self._on_texts = loaded.trains_on_texts or imitated or source.without_logprobs
        self._agents = {name: policy.agents for name, policy in self.config.policies.items()}
        self._has_own_ids: dict[str, bool] = {}
        """By policy, whether the recorded ids are those of its own tokenizer, once that is known."""

    async def adopt(self, recorded: RecordedRollout, rollout: Rollout) -> RecordedRollout:
        """The recorded rollout as this one of the run, with the rewards that the agent reported."""
        keeps_logprobs = recorded.rollout.mode.trains and not self._imitated
        return RecordedRollout(
            replace(
                rollout,
                task=recorded.rollout.task,
                state=RolloutState.DONE,
                counted_attempt=recorded.attempt.attempt,
                ending=recorded.rollout.ending,
            ),
            replace(recorded.attempt, rollout=rollout.id),
            [await self._with_ids(self._own(call, rollout.id, keeps_logprobs)) for call in recorded.calls],
            [replace(result, rollout=rollout.id) for result in recorded.tool_results],
            [replace(reward, rollout=rollout.id) for reward in recorded.rewards if reward.source == AGENT_SOURCE],
            terminal=recorded.terminal,
        )

    def _own(self, call: Call, rollout: str, keeps_logprobs: bool) -> Call:
        """The call as one of this run: of its rollout, and of the policy that its agent has here."""
        policy = policy_of(call.agent, call.policy, self._agents, self._agents)
        if policy is None:
            raise ConfigError(
                f"[tasks]: no policy is chosen for the recorded calls of {call.agent or 'an unnamed agent'}, "
                f"which '{call.policy}' answered. Name the agent in `agents` of a policy. "
                f"{nearest(call.policy, self._agents)}"
            )
        own = replace(call, rollout=rollout, policy=policy, version=None)
        if keeps_logprobs:
            return own
        return replace(
            own,
            choices=tuple(replace(choice, logprobs=None) for choice in call.choices),
            # It is trained on as if this run had sampled it.
            effective=replace(call.effective, temperature=self.config.sampling.temperature),
        )

    async def _with_ids(self, call: Call) -> Call:
        """The call with its policy's token ids, made of its texts if allowed; else ConfigError for another model's."""
        has_ids = call.prompt_ids is not None and all(choice.response_ids is not None for choice in call.choices)
        if not self._tokenizes or (has_ids and await self._are_own(call)):
            return call
        if self._on_texts:
            [call] = await self.engine.tokenize(call.policy, [call])
            return call
        if has_ids:
            raise ConfigError(
                f"[tasks.train]: the recorded token ids are not those that the tokenizer and the chat template of the "
                f"policy '{call.policy}' make of the same prompt: another model was recorded. To train on the texts "
                f"instead, set without_logprobs = true (docs/data.md, Training on recorded data)."
            )
        return call

    async def _are_own(self, call: Call) -> bool:
        """True if the ids are the policy's own, as the first prompt without replies or template settings shows."""
        if call.policy not in self._has_own_ids:
            messages, request = messages_of(call), call.request
            replied = any(message.get("role") == "assistant" for message in messages)
            if not messages or replied or "chat_template_kwargs" in request or request.get("tool_choice") == "none":
                return True
            [own] = await self.engine.tokenize(call.policy, [call])
            if own.prompt_ids is None or call.prompt_ids is None:
                return True
            self._has_own_ids[call.policy] = bool(np.array_equal(own.prompt_ids, call.prompt_ids))
        return self._has_own_ids[call.policy]


class RecordedGroups:
    """Draws recorded groups for updates, as `Experience` draws those that are run: in the order of the plan, at once.

    Their reward is the recorded one if no rule scores them, or if replies are imitated or preferred by somebody. The
    next groups replace up to `train.refill` groups of a step that have nothing to compare.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        source: RecordedTasks,
        engine: Engine,
        collector: Collector,
        plan: TrainingPlan,
        has_contrast: Callable[[Sequence[Episode]], bool],
        begun: int = 0,
    ) -> None:
        config, imitated = loaded.config, loaded.imitates
        self._recordings = Recordings(source, loaded, engine, imitated=imitated)
        is_scored = config.rewards and not imitated and not source.has_preferences
        rules = collector.rules if is_scored else [ScoringRule("recorded", self._recorded_reward)]
        self._collector, self._plan = replace(collector, rules=rules), plan
        self._has_contrast, self._refill = has_contrast, 0 if imitated else config.train.refill
        self.begun, self.unfinished = begun, list[int]()
        self._terminal: dict[str, float | None] = {}
        """The recorded rewards of the rollouts that are being scored."""

    async def draw(self, updates_left: int, advance: Advance) -> StepGroups:
        """The groups of the next update; see `Experience.draw`."""
        missing, refill, groups = self._plan.groups_per_step, self._refill, list[list[ScoredRollout]]()
        while missing:
            planned = [self._plan.group(position) for position in range(self.begun, self.begun + missing)]
            self.begun += missing
            for group in await self._scored(planned):
                if refill and not self._has_contrast([scored.episode for scored in group]):
                    groups.append(without_contrast(group))
                    refill -= 1
                else:
                    groups.append(group)
                    missing -= 1
        self._collector.warn_of_failed_rules([*chain.from_iterable(groups)])
        return StepGroups.of(groups, {"groups/replaced": float(self._refill - refill)})

    async def cancel(self) -> None:
        """Nothing: none of them runs."""

    async def _scored(self, planned: Sequence[Sequence[Rollout]]) -> list[list[ScoredRollout]]:
        """Groups of this run in the place of the planned ones: recorded in its store, and scored."""
        source, seed = self._recordings.source, self._plan.seed
        rollouts = [rollout for group in planned for rollout in group]
        groups = await source.groups([train_index(source, group[0].position, seed) for group in planned])
        pairs = zip(chain.from_iterable(groups), rollouts, strict=True)
        adopted = [await self._recordings.adopt(recorded, rollout) for recorded, rollout in pairs]
        await self._collector.store.put(*(record for own in adopted for record in own.records))
        self._terminal = {own.rollout.id: own.terminal for own in adopted}
        collector = self._collector
        episodes = [collector.hook.episode_built(trained_episode(own, collector.housekeeping)) for own in adopted]
        judged = await self._collector.judged([own.rollout for own in adopted], episodes)
        complete = iter(await self._collector.complete(judged))
        return [[*islice(complete, len(group))] for group in planned]

    def _recorded_reward(self, episode: Episode) -> list[Reward]:
        terminal, said = self._terminal[episode.rollout], reported(episode)
        if terminal is None:
            return said
        own = Reward(episode.rollout, episode.attempt, "recorded", terminal, "recorded")
        return [own, *(reward for reward in said if reward.call is not None)]
