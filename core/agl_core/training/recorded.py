"""Recorded rollouts in the place of new ones: those of training, and held-out ones of which replies are scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from agl_core.config.load import LoadedConfig
from agl_core.config.models import RunConfig
from agl_core.config.sections import policy_of
from agl_core.errors import ConfigError, nearest
from agl_core.learning.batch import NO_CREDIT, BatchPlan, filter_trainable, make_batches
from agl_core.learning.rewards import AGENT_SOURCE, reported
from agl_core.learning.tool_results import messages_of, tools_of
from agl_core.learning.transitions import build_episode
from agl_core.protocols import Engine, RecordedTasks
from agl_core.store.interface import Record, Store
from agl_core.training.rollouts import train_index
from agl_core.types import Batch, Call, Episode, RecordedReply, RecordedRollout, Rollout, RolloutState


class Recordings:
    """Rollouts of a source, as this run has them: calls of its policies, with token ids.

    Calls have no version, since the policy of this run did not answer them. They have log-probabilities only if the
    other rollout was one of training, since elsewhere nothing sees to it that tokens are drawn from the distribution
    that these are of; and none if they are `imitated`: imitation does not need them.
    """

    def __init__(
        self,
        source: RecordedTasks,
        config: RunConfig,
        engine: Engine,
        *,
        imitated: bool = False,
        on_texts: bool = False,
    ) -> None:
        self.source, self._config, self._imitated = source, config, imitated
        self._on_texts = on_texts or imitated or source.without_logprobs
        self._agents = {name: policy.agents for name, policy in config.policies.items()}
        self._engine = engine if engine.supports("tokenize") else None
        self._has_own_ids: dict[str, bool] = {}
        """By policy, whether the recorded ids are those of its own tokenizer, once that is known."""

    async def adopt(self, pairs: Sequence[tuple[RecordedRollout, Rollout]]) -> list[RecordedRollout]:
        """What was recorded, each as the rollout of this run beside it, with the rewards that the agent reported."""
        own = [
            self._own(call, rollout.id, keeps_logprobs=recorded.rollout.mode.trains and not self._imitated)
            for recorded, rollout in pairs
            for call in recorded.calls
        ]
        calls = iter(await self._with_ids(own))
        return [
            RecordedRollout(
                replace(
                    rollout,
                    task=recorded.rollout.task,
                    state=RolloutState.DONE,
                    counted_attempt=recorded.attempt.attempt,
                    ending=recorded.rollout.ending,
                ),
                replace(recorded.attempt, rollout=rollout.id),
                [*islice(calls, len(recorded.calls))],
                [replace(result, rollout=rollout.id) for result in recorded.tool_results],
                [replace(reward, rollout=rollout.id) for reward in recorded.rewards if reward.source == AGENT_SOURCE],
                recorded.terminal,
            )
            for recorded, rollout in pairs
        ]

    def _own(self, call: Call, rollout: str, *, keeps_logprobs: bool) -> Call:
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
            effective=replace(call.effective, temperature=self._config.sampling.temperature),
        )

    async def _with_ids(self, calls: Sequence[Call]) -> list[Call]:
        """The calls with token ids of their policies, made of their texts if they may be.

        ConfigError if some have those of another model, and they may not.
        """
        engine = self._engine
        if engine is None:
            return list(calls)
        by_text: dict[str, dict[int, list[RecordedReply]]] = defaultdict(dict)
        """By policy and position: the replies of the calls that get other ids."""
        for position, call in enumerate(calls):
            has_ids = call.prompt_ids is not None and all(choice.response_ids is not None for choice in call.choices)
            if has_ids and await self._are_own(engine, call):
                continue
            if self._on_texts:
                messages, tools = messages_of(call), tools_of(call)
                by_text[call.policy][position] = [
                    RecordedReply(messages, tools, c.message, not c.finish_reason.is_cut) for c in call.choices
                ]
            elif has_ids:
                raise ConfigError(
                    f"[tasks.train]: the recorded token ids are not those that the tokenizer and the chat template of "
                    f"the policy '{call.policy}' make of the same prompt: another model was recorded. To train on the "
                    f"texts instead, set without_logprobs = true (docs/data.md, Training on recorded data)."
                )
        complete = list(calls)
        for policy, replies in by_text.items():
            tokenized = iter(await engine.tokenize(policy, [reply for of in replies.values() for reply in of]))
            for position in replies:
                call = calls[position]
                choices = [*zip(call.choices, islice(tokenized, len(call.choices)), strict=True)]
                complete[position] = replace(
                    call,
                    prompt_ids=next((reply.prompt_ids for _, reply in choices if reply is not None), None),
                    choices=tuple(
                        replace(choice, response_ids=None if r is None else r.response_ids, logprobs=None, mask=None)
                        for choice, r in choices
                    ),
                )
        return complete

    async def _are_own(self, engine: Engine, call: Call) -> bool:
        """True if the ids are the policy's own. A prompt without earlier replies shows it, and without settings."""
        if call.policy not in self._has_own_ids:
            messages, request = messages_of(call), call.request
            replied = any(message.get("role") == "assistant" for message in messages)
            if not messages or replied or "chat_template_kwargs" in request or request.get("tool_choice") == "none":
                return True
            reply = RecordedReply(messages, tools_of(call), call.choices[0].message if call.choices else {})
            [tokenized] = await engine.tokenize(call.policy, [reply])
            if tokenized is None or call.prompt_ids is None:
                return True
            self._has_own_ids[call.policy] = bool(np.array_equal(tokenized.prompt_ids, call.prompt_ids))
        return self._has_own_ids[call.policy]


class RecordedQueue:
    """A `Queue` of a `Collector` in which each rollout is done as soon as it is added.

    What was recorded of another rollout of its task becomes its own, in the run's store.
    """

    def __init__(self, recordings: Recordings, seed: int, store: Store) -> None:
        self._recordings, self._seed, self._store = recordings, seed, store
        self._done: dict[str, Rollout] = {}
        self._terminal: dict[str, float | None] = {}

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        source = self._recordings.source
        wanted = [(train_index(source, rollout.position, self._seed), rollout.member) for rollout in rollouts]
        adopted = await self._recordings.adopt([*zip(await source.recorded(wanted), rollouts, strict=True)])
        records: list[Record] = []
        for own, rollout in zip(adopted, rollouts, strict=True):
            records += own.rollout, own.attempt, *own.calls, *own.tool_results, *own.rewards
            self._done[rollout.id], self._terminal[rollout.id] = own.rollout, own.terminal
        await self._store.put(*records)

    async def done(self, ids: Collection[str]) -> list[Rollout]:
        return [self._done[id] for id in ids]

    async def cancel(self, ids: Collection[str]) -> None:
        """Nothing: they are done."""

    def reward(self, episode: Episode) -> float | None:
        """The reward rule of a run that names none: the terminal reward that was recorded."""
        del self._done[episode.rollout]  # It is scored once, and then nothing asks for it.
        terminal = self._terminal.pop(episode.rollout)
        return reported(episode) if terminal is None else terminal


@dataclass
class HeldOutReplies:
    """A held-out set of recorded rollouts. No agent runs for it: the likelihood of its replies is measured.

    The calls of trained agents count, in the rollouts of as many tasks as an evaluation has.
    """

    name: str
    recordings: Recordings
    loaded: LoadedConfig
    engine: Engine
    context_length: int | None
    _batches: Mapping[str, Batch] | None = field(default=None, init=False)
    """By policy; None as long as they were not read."""

    async def measure(self) -> dict[str, float]:
        """loss (nats per response token), accuracy (the share of tokens that are the most likely ones; absent if an
        engine does not know), and the tokens that count, all under the weights as they are. ConfigError without any."""
        if self._batches is None:
            self._batches = await self._read()
        nats = 0.0
        tokens, hits, knows = 0, 0, True
        for policy, batch in self._batches.items():
            scores = await self.engine.logprobs(policy, batch)
            is_scored_R = batch.mask_R & ~np.isnan(scores.logprobs_R)
            nats -= float(scores.logprobs_R[is_scored_R].sum())
            tokens += int(is_scored_R.sum())
            knows = knows and scores.is_top_R is not None
            hits += 0 if scores.is_top_R is None else int(scores.is_top_R[is_scored_R].sum())
        if not tokens:
            raise ConfigError(
                f"[tasks.{self.name}]: none of the recorded calls can be scored. Those of the agents in train.agents "
                f"count, if their texts can be tokenised, and fit into the model's context."
            )
        return {"loss": nats / tokens, **({"accuracy": hits / tokens} if knows else {}), "tokens": float(tokens)}

    async def _read(self) -> dict[str, Batch]:
        config, source = self.loaded.config, self.recordings.source
        wanted = [(i, n) for i in range(min(config.eval.tasks, source.size)) for n in range(source.members(i))]
        pairs = [(recorded, recorded.rollout) for recorded in await source.recorded(wanted)]
        groups = [
            [build_episode(own.rollout, own.attempt, own.calls, own.tool_results)]
            for own in await self.recordings.adopt(pairs)
        ]
        credit = dict.fromkeys(config.policies, NO_CREDIT)
        made = make_batches(groups, BatchPlan(credit, config.train.agents, without_logprobs=True))
        return {
            policy: usable
            for policy, batch in made.batches.items()
            if len(usable := filter_trainable(batch, context_length=self.context_length).batch)
        }
