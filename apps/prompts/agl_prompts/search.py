"""The search for better prompts: candidates, the rollouts that score them, and when it is over.

    candidate ──▶ rollouts with its texts ──▶ rewards ──▶ a minibatch's conversations ──▶ proposer ──▶ candidate
                                                    └──▶ mean over the validation tasks: the best one is chosen

The run's store has every rollout with its texts, and a file beside it every proposal. So a resumed run makes the same
search again, without repeating a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import orjson
import tomli_w

from agl_core import private
from agl_core.config.models import RunConfig
from agl_core.errors import AglError, ConfigError, TrainingError
from agl_core.protocols import RecordedTasks, train_index
from agl_core.types import Ending, Episode, Rollout, RolloutState, episode_return
from agl_prompts.config import OptimizeSection, Proposer
from agl_server.health.alarms import alarm_of_failures
from agl_server.health.rollouts import mean, show_message
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import group_of
from agl_server.training.session import Session

Candidate: TypeAlias = dict[str, str]
"""A text for each prompt, by name."""

_MAX_TEXT = 2000
"""Characters of one message, tool result or input that the proposer gets."""
_MINIBATCH = 3
"""Rollouts that the proposer sees at a time."""
_BUDGET_PER_VALIDATION_TASK = 15
_MAX_FEEDBACK_TASKS = 1000
"""Tasks of an endless source."""


class SearchOverError(AglError):
    """The search ended as it should; the message is the reason."""


class Search:
    """Scores candidates by rollouts, within the budget. `candidates` has all that were tried, the seed first."""

    def __init__(
        self,
        config: RunConfig,
        settings: OptimizeSection,
        session: Session,
        observer: Observer,
        proposer: Proposer,
        recorded: Sequence[Rollout],
    ) -> None:
        self.config, self.settings, self.session = config, settings, session
        self._observer, self._proposer = observer, proposer
        source = session.tasks["train"]
        size = source.size or _MAX_FEEDBACK_TASKS
        if isinstance(source, RecordedTasks) or size < 2:
            raise ConfigError("[tasks.train]: optimising prompts needs at least two tasks that are not recorded ones.")
        count = max(1, min(settings.budget // _BUDGET_PER_VALIDATION_TASK, size // 2))
        self.validation, self.feedback = list(range(count)), list(range(count, size))
        """Positions in training."""
        self.minibatch = min(_MINIBATCH, len(self.feedback))
        self.seed = {name: prompt.text or prompt.replace or "" for name, prompt in config.prompts.items()}
        self.candidates: list[Candidate] = []
        self.scores: dict[int, float] = {}
        """The mean return over the validation tasks, by number of the candidates that ran all of them."""
        self._recorded = {
            rollout.group.removesuffix(f"-r{rollout.restart}"): rollout
            for rollout in recorded
            if rollout.state is RolloutState.DONE and rollout.ending not in (Ending.LOST, Ending.CANCELLED)
        }
        """By group (`_name`), as are this search's episodes."""
        self._episodes: dict[str, Episode] = {}
        self.spent = 0
        """Rollouts of the budget so far, with those before a restart."""
        self._idle, self._known = 0, 0

    @property
    def best(self) -> Candidate:
        """The candidate with the highest score, the earliest of several; the seed before there is a score."""
        return max(self.candidates, key=self.score, default=self.seed)

    def score(self, candidate: Candidate) -> float:
        """Its score; the lowest of all if it has none."""
        return self.scores.get(self.candidates.index(candidate), -math.inf)

    async def begin(self) -> None:
        """Score the seed. TrainingError if the agent does not work, ConfigError if there is nothing to replace."""
        episodes = await self.evaluate(self.seed, self.validation)
        if fault := await alarm_of_failures(self.session.server.store, episodes):
            raise TrainingError(f"The search cannot begin: {fault.seen}. {fault.remedy} {fault.details}")
        for name, prompt in self.config.prompts.items():
            seen = {show_message(m) for e in episodes for t in e.transitions for m in t.messages}
            if prompt.replace is not None and not any(self.seed[name] in text for text in seen):
                raise ConfigError(
                    f"[prompts.{name}] replace: no message of {len(episodes)} rollouts had these words, so that there "
                    f"is nothing to replace. Copy them exactly from `agl show`."
                )

    async def evaluate(self, candidate: Candidate, positions: Sequence[int], split: str = "train") -> list[Episode]:
        """The episodes of a candidate on these tasks, recorded or run now. SearchOverError beyond the budget."""
        if candidate not in self.candidates:
            self.candidates.append(candidate)
        number, names = self.candidates.index(candidate), [_name(candidate, position, split) for position in positions]
        missing = {n: p for n, p in zip(names, positions, strict=True) if n not in self._episodes}
        if split == "train":
            self._check_budget(len(missing))
            self.spent += len(missing)
        groups = [
            [self._recorded[name]] if name in self._recorded else self._group(candidate, split, position)
            for name, position in missing.items()
        ]
        with self._observer.phase(f"candidate {number}, {split}", self.spent) as advance:
            self._episodes |= zip(missing, await self.session.collector.collect(groups, advance), strict=True)
        validated = [self._episodes.get(_name(candidate, position)) for position in self.validation]
        returns = [episode_return(episode) for episode in validated if episode is not None]
        if number not in self.scores and len(returns) == len(validated):
            self.scores[number] = mean(returns)
            self._observer.say(f"candidate {number}: reward {self.scores[number]:.3f} on {len(returns)} tasks")
        return [self._episodes[name] for name in names]

    async def propose(self, request: str) -> str:
        """The proposer's reply. SearchOverError if too few rollouts are left to try it and to give it a score."""
        self._check_budget(self.minibatch + len(self.validation))
        return await self._proposer.propose(request)

    async def held_out(self, candidate: Candidate) -> dict[str, float]:
        """Its mean return on each held-out set."""
        rewards = {}
        for name in self.session.evaluator.sets:
            size = min(self.config.eval.tasks, self.session.tasks[name].size or self.config.eval.tasks)
            rewards[name] = mean(map(episode_return, await self.evaluate(candidate, range(size), name)))
        return rewards

    async def check_progress(self, patience: int) -> None:
        """Called once a round; SearchOverError after so many rounds in a row without a new rollout."""
        known, self._known = self._known, len(self._episodes)
        self._idle = self._idle + 1 if known == self._known else 0
        if self._idle >= patience:
            raise SearchOverError("nothing new is proposed")

    def _check_budget(self, rollouts: int) -> None:
        budget, left = self.settings.budget, self.settings.budget - self.spent
        if rollouts > left:
            rest = f" but for {left}, too few to go on" if left else ""
            raise SearchOverError(f"the budget of {budget} rollouts is spent{rest}")

    def write(self, file: Path) -> None:
        prompts = {
            name: {**prompt.model_dump(mode="json", exclude_defaults=True), "text": self.best[name]}
            for name, prompt in self.config.prompts.items()
        }
        private.replace(file, tomli_w.dumps({"prompts": prompts}, multiline_strings=True))

    def _group(self, candidate: Candidate, split: str, position: int) -> list[Rollout]:
        """A new rollout on a task, as a group of one."""
        source = self.session.tasks[split]
        index = train_index(source, position, self.config.seed) if split == "train" else position
        first = Rollout(
            id="",
            run=self.session.run,
            restart=self.session.restart,
            group=_name(candidate, position, split),
            task=source.task(index),
            mode=self.config.eval.modes[0],
            step=self.candidates.index(candidate),
            member=0,
            position=position,
            prompts=candidate,
        )
        return group_of(first, 1)


def _name(candidate: Candidate, position: int, split: str = "train") -> str:
    """The group of a candidate's rollout on a task."""
    digest = blake2b(orjson.dumps(candidate, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()
    return f"{digest}-{position}-{split}"


def described(episode: Episode) -> dict[str, str]:
    """A rollout in words, for the proposer: the task, its metadata, which say what was expected, the conversation with
    tool results, and the rewards."""
    lines = []
    for transition in episode.transitions:
        lines.append(f"{transition.agent or 'assistant'}: {_cut(show_message(transition.response))}")
        lines += [f"tool {r.tool} ({r.status}): {_cut(r.error or r.result)}" for r in transition.tool_results]
    parts = ", ".join(f"{reward.name} {reward.value:.3g}" for reward in episode.rewards)
    expected = f" The task's metadata: {_cut(dict(episode.task.metadata))}." if episode.task.metadata else ""
    return {
        "Inputs": _cut(episode.task.input),
        "Generated Outputs": "\n".join(lines) or "none",
        "Feedback": f"The rollout {episode.ending}. Its reward is {episode_return(episode):.3g} ({parts}).{expected}",
    }


def _cut(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"
