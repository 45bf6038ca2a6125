"""The interfaces that plugins implement, and the values that cross them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agl_core.errors import EngineError
from agl_core.types import (
    Batch,
    Call,
    Episode,
    Identity,
    Json,
    Logprobs,
    RecordedRollout,
    Reward,
    Task,
    TransitionKey,
)

RewardValue: TypeAlias = (
    float
    | Mapping[str, float]
    | Mapping[TransitionKey, float]
    | Mapping[str | TransitionKey, float]
    | Sequence[Reward]
    | None
)
"""One terminal reward; or a mapping, from names to components of it and from `transition.key` to rewards of single
calls; or rewards with names of their own; or None where the rule has nothing to say."""

RewardRule: TypeAlias = Callable[[Episode], RewardValue | Awaitable[RewardValue]]
"""Rewards a recorded episode; runs on the trainer's side and may be run again later."""


@dataclass(frozen=True)
class GroupRewardRule:
    """Rewards the episodes of a group together, each in relation to the others."""

    reward: Callable[[Sequence[Episode]], Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]]
    """One value per episode, in their order. An evaluation's group has one episode."""


CreditRule: TypeAlias = Callable[[Sequence[Episode]], list[list[float]]]
"""Shares the rewards of a group of episodes: one value per transition, in their order."""


class TaskSource(Protocol):
    """Where tasks come from. Random access makes resuming trivial."""

    @property
    def size(self) -> int | None:
        """How many tasks there are; None if it makes new ones without end."""

    def task(self, index: int) -> Task:
        """The task at this index; the same for the same index, always."""


def train_index(source: TaskSource, position: int, seed: int) -> int:
    """The task at a position of training: endless sources continue; finite ones are shuffled each epoch."""
    if source.size is None:
        return position
    epoch, index = divmod(position, source.size)
    return _order(source.size, f"{seed}:{epoch}")[index]


@lru_cache(maxsize=2)  # Two epochs meet in a step; to shuffle 100,000 tasks takes as long as a small step.
def _order(size: int, seed: str) -> Sequence[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order


@runtime_checkable
class RecordedTasks(TaskSource, Protocol):
    """Tasks that come with rollouts. As the tasks of training, these are trained on, and the agent is not run."""

    size: int

    without_logprobs: bool
    """Calls without log-probabilities are trained on, and those without token ids tokenised."""

    has_preferences: bool
    """Somebody said which rollouts are better: that is their reward, and no rule of the run is asked."""

    def members(self, index: int) -> int:
        """How many rollouts there are of the task at this index."""

    async def groups(self, indices: Sequence[int]) -> list[list[RecordedRollout]]:
        """The rollouts of the tasks at these indices."""


class Tracker(Protocol):
    """Where metrics go besides `metrics.jsonl`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepingTracker(Tracker, Protocol):
    """A tracker that also keeps rollouts."""

    def keep(self, step: int, best: Sequence[Mapping[str, Json]]) -> None:
        """A checkpoint was made after a step; `best` are rollouts of the step with high rewards, the best first.

        Each has `rollout`, `reward`, `ending`, `task` and `result`.
        """


class Buffer(Protocol):
    """Where complete groups wait for an update, and which of them it gets.

    A run that is resumed begins with an empty one: the groups that were pending are rolled out again.
    """

    @property
    def pending(self) -> Collection[str]:
        """The names of the groups that it may still give out.

        They count as in flight: while there are as many as the run may have, no new group is begun.
        """

    def add(self, group: Sequence[Episode]) -> None:
        """All rollouts of a group are done; its episodes have their rewards, in the order of the members."""

    def draw(self, count: int) -> list[Sequence[Episode]] | None:
        """The groups of one update, `count` as a rule, which no other update gets.

        None as long as it has too few; asked again after every `add`.
        """


class Adapter(Protocol):
    """Reports who made a call and what the tools did, for one agent framework."""

    framework: str
    """The module whose import shows that an agent uses the framework, for instance `langchain_core`."""

    def attach(self) -> Callable[[], Identity | None] | None:
        """Install the framework's hooks in this process; calling it again changes nothing.

        It is called when `framework` is imported. Where the framework has no hook around a call, it may return a
        function that says who makes the request that is being sent.
        """


@dataclass(frozen=True)
class PolicySpec:
    """One policy as an engine needs to know it."""

    model: str
    """A folder or a hub name."""
    dtype: str = "auto"
    trust_remote_code: bool = False
    lora: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = ""
    """The algorithm that trains it; without one it is only served."""
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """The model as the configuration names it; `model` is where that is on this machine."""
    adapter: str | None = None
    """A folder with a saved adapter to put on the model, which is then served, and not trained."""
    version: int = 0
    """The version that replies name if the policy is served, and not trained."""


@dataclass(frozen=True)
class EngineContext:
    """The run as an engine needs to know it."""

    run_dir: Path
    seed: int
    policies: Mapping[str, PolicySpec]
    deterministic: bool
    plugin_files: tuple[Path, ...]
    """The user's own plugin files, so that the engine's processes find the user's algorithm."""
    api_key: str
    """The bearer token of the gateway's requests."""
    steps: int = 0
    """How many training steps the run is to make: schedules of the step size end there. 0: none is made."""


@dataclass(frozen=True)
class Upstream:
    """Where the gateway forwards to."""

    urls: tuple[str, ...]
    """OpenAI-compatible base URLs, each ending in /v1."""
    models: Mapping[str, str]
    """The served model name of each policy."""
    api_key: str
    returns_ids: bool = True
    """Replies carry token ids and log-probabilities."""
    context_length: int | None = None
    streams: bool = False
    """Its servers answer `stream: true` as tokens are sampled; with ids, each chunk has those of its tokens."""
    continues_ids: bool = True
    """Its servers put the ids of a reply into the prompt of what echoes it."""


@dataclass(frozen=True)
class UpdateResult:
    """The result of one update of one policy."""

    version: int
    """The policy version that is served from now on."""
    metrics: Mapping[str, float]
    advantage_N: NDArray[np.float64]
    """Mean advantage of each transition over its trainable tokens."""
    weight_N: NDArray[np.float64]
    """Summed token weights of each transition in the loss; 0 if dropped."""
    dropped: tuple[str | None, ...]
    """Why a transition was dropped by the engine or algorithm (a `DropReason`), or None."""
    logprobs_N: Sequence[Logprobs | None] = ()
    """Of each transition in the loss the log-probabilities of its response tokens before the update, NaN at tokens
    without a weight; None of the others. Empty: the engine does not say, and no token is proved exact."""
    precision: str = "float32"
    """The numbers that sampling and training compute with: float32, bfloat16, …"""


@dataclass(frozen=True)
class ResponseScores:
    """How likely the response tokens of a batch are."""

    logprobs_R: NDArray[np.float64]
    is_top_R: NDArray[np.bool_] | None = None
    """True where no token is more likely; None if the engine does not know."""


Progress: TypeAlias = Callable[[float], None]
"""Called with the share done, 0 … 1."""

StageReport: TypeAlias = Callable[[str, float], None]
"""Called with the stage of a start that begins, and the seconds since the start began."""


class Engine(ABC):
    """Holds the weights: serves the current policy and applies updates. It knows nothing of agents.

    What a run relies on, and `agl_core.testing.engines` checks of a real engine:

    **Replies.** The URLs serve OpenAI's chat completions by the policies' served names, to requests with the key of the
    context (`Authorization: Bearer`); others get 401. A request with `return_token_ids` and `logprobs` gets
    `prompt_token_ids` beside the choices, `token_ids` in each choice, and one log-probability for each of them, at the
    sampling temperature. The header `x-agl-policy-version` is the version that sampled the whole reply, from its first
    token to its last. With `stream: true` (`Upstream.streams`) the first chunk has `prompt_token_ids`, each choice of a
    chunk has the ids and log-probabilities of its tokens, also of those whose text comes later, and the last chunk
    before `[DONE]` has `usage` and `agl`. The deltas of a choice add up to the message of the whole reply.

    **Updates.** `update` trains a policy by the algorithm of its `PolicySpec`, built at the start from the installed
    plugins and the files of the context, with the options as its settings (`agl_core.training.child`). The engine asks
    what was built for what it needs: epochs, minibatches, a critic, a reference. It does not read the options, whose
    names are the algorithm's own. Transitions that cannot be trained on are left out, each with a `DropReason`
    (`agl_core.learning.batch`), as are those that the algorithm does not keep; their weight is 0. The result has
    the mean advantage and the summed weight of every other transition, the log-probabilities that its tokens had in
    training, which prove that they are those that were sampled, and metrics: what the algorithm's loss measured, `loss`
    and `grad_norm` among others. `progress` is called with growing shares, at the end with 1.

    **Versions.** They begin at 0. Each update makes the next one, also if it could train on nothing, and serves it at
    once and whole. An update runs to its end even if its caller is cancelled; updates, saves and loads come one after
    the other.

    **Checkpoints.** `load` restores what `save` wrote: weights, optimiser, critic, random state and version, so that
    the same update gives the same result as before. A folder without a checkpoint is a CheckpointError.

    **Errors.** A mistake (an unknown policy or checkpoint) is an `AglError` that names it, changes nothing, and leaves
    the engine usable. An engine that lost a part of itself raises EngineError at once, from what was asked and from
    everything after that, with the reason, the remedy and the way to resume.

    **The end.** `stop` ends all processes, and may be called again and after a failed start. Whatever is asked after it
    is an EngineError. An engine does not outlive its run, however that ended.

    An engine in a process of its own derives from `agl_core.training.host.ProcessEngine`.
    """

    @abstractmethod
    async def start(self) -> Upstream:
        """Load the weights, start serving, return where. Once for each engine."""

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        """Train on a batch; the new version is served, whole, when this returns. Some engines only serve."""
        raise self._not_supported("update")

    async def save(self, folder: Path) -> None:
        """Write weights, optimiser and random state of every policy below `folder`.

        `folder/POLICY/model` has the weights as transformers loads them.
        """
        raise self._not_supported("save")

    async def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        raise self._not_supported("load")

    async def versions(self) -> Mapping[str, int]:
        """The version being served of each policy; none where weights have no versions."""
        return {}

    async def stats(self) -> Mapping[str, float]:
        """Counters since the start: `tokens_prefilled`, `tokens_reused`, `tokens_decoded`, and others of the engine.

        The memory of its process is `peak_rss_bytes`. They may be asked during an update.
        """
        return {}

    @abstractmethod
    async def stop(self) -> None:
        """End all its processes; calling it again changes nothing."""

    def report_stages(self, report: StageReport) -> None:
        """Call `report` at the beginning of each stage of `start`, which comes afterwards; few engines do."""
        return

    def check(self) -> None:
        """Raise EngineError with the reason if it is known to be lost, without asking it; few engines know.

        A run looks while it waits for rollouts, which would end one after the other as lost.
        """
        return

    def describe(self) -> str:
        """Its configuration, where that differs from defaults, and the resources that it would take.

        Nothing is started (`agl train --dry-run`).
        """
        return f"The engine {type(self).__name__} starts one process on this machine.\n"

    async def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        """Recorded calls with the token ids of their texts; without any where the chat template cannot write them.

        An engine that has it and `logprobs` trains on recorded texts and declares `Capability.RECORDED_TEXTS`: in an
        update it takes the policy's own log-probabilities for those of a batch that are not known.
        """
        raise self._not_supported("tokenize")

    async def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        """The log-probability of each response token under the current weights, at the transition's temperature.

        It changes nothing. The batch has only what the model could be trained on; what the engine cannot take all the
        same is NaN.
        """
        raise self._not_supported("logprobs")

    async def publish(self, name: str, spec: PolicySpec) -> None:
        """Load a saved policy and serve it by this name. Meanwhile the others are answered; adapters share their bases.

        An engine that has this and `withdraw` works without a run and declares `Capability.POLICIES`: its
        context may name no policies, then it serves those that are published. Mistakes are errors as for every engine:
        an adapter of other weights than those of the spec is an EngineError.
        """
        raise self._not_supported("publish")

    async def withdraw(self, name: str) -> None:
        """Serve a policy no longer; what it is answering now is answered, and its memory is then free."""
        raise self._not_supported("withdraw")

    def _not_supported(self, method: str) -> EngineError:
        return EngineError(f"The engine {type(self).__name__} does not support '{method}'.")
