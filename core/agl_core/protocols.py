"""The interfaces that plugins implement, and the values that cross them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pydantic
from numpy.typing import NDArray

from agl_core.config.sections import LoraSection, OptimizerSection
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
from agl_core.wire import Assignment

RewardValue: TypeAlias = (
    float
    | Mapping[str, float]
    | Mapping[TransitionKey, float]
    | Mapping[str | TransitionKey, float]
    | Sequence[Reward]
    | None
)
"""One terminal reward; or a mapping, from names to components of it and from `transition.key` to rewards of single
calls; or rewards with names of their own; or None, if the rule has nothing to say."""

RewardRule: TypeAlias = Callable[[Episode], RewardValue | Awaitable[RewardValue]]
"""Rewards a recorded episode; runs on the trainer's side and may be run again later."""


@dataclass(frozen=True)
class GroupRewardRule:
    """Rewards the episodes of a group together, each in relation to the others."""

    reward: Callable[[Sequence[Episode]], Sequence[RewardValue] | Awaitable[Sequence[RewardValue]]]
    """One value per episode, in their order. An evaluation's group has one episode."""


CreditRule: TypeAlias = Callable[[Sequence[Episode]], list[list[float]]]
"""Shares the rewards of a group of episodes: one value per transition, in their order."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A program about to run for an attempt."""

    command: Sequence[str]
    folder: Path
    """Its working folder."""
    variables: Mapping[str, str]
    """Its environment, beside that of every agent (`agl_core.client.agent.attempt_variables`)."""
    result: Callable[[Json], Json] = field(default=lambda printed: printed)
    """The attempt's result, of what the program printed; called once it has ended."""


class Harness(Protocol):
    def launch(self, assignment: Assignment, base_url: str, folder: Path) -> AbstractAsyncContextManager[Launch]:
        """Prepare an attempt, whose model calls go to `base_url`; `folder` is the attempt's own, and empty."""


class TaskSource(Protocol):
    """Tasks by index, so that resuming is trivial."""

    @property
    def size(self) -> int | None:
        """The number of tasks; None if there is no end."""

    def task(self, index: int) -> Task:
        """The task at this index, always the same."""


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
    """Tasks with recorded rollouts: training is on these, and the agent is not run."""

    size: int
    without_logprobs: bool
    """Calls without log-probabilities are trained on, and those without token ids tokenised."""
    has_preferences: bool
    """Somebody said which rollouts are better: that is their reward, and no rule of the run is asked."""

    def members(self, index: int) -> int:
        """The number of rollouts of the task at this index."""

    async def groups(self, indices: Sequence[int]) -> list[list[RecordedRollout]]: ...


class Tracker(Protocol):
    """Receives metrics, as `metrics.jsonl` does."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class KeepingTracker(Tracker, Protocol):
    def keep(self, step: int, best: Sequence[Mapping[str, Json]]) -> None:
        """A checkpoint was made after a step, whose `best` rollouts these are, the best first.

        Each has `rollout`, `reward`, `ending`, `task` and `result`.
        """


class Adapter(Protocol):
    """Reports who made a call and what the tools did, for one agent framework."""

    framework: str
    """The module whose import shows that an agent uses the framework, for instance `langchain_core`."""

    def attach(self) -> Callable[[], Identity | None] | None:
        """Install the framework's hooks in this process, once it is imported; calling it again changes nothing.

        For a framework without a hook around a call, it may return a function that says who makes the request that is
        being sent.
        """


@pydantic.dataclasses.dataclass(frozen=True)
class PolicySpec:
    """A policy, for an engine; settings are checked as it is made."""

    model: str
    """A folder or a hub name."""
    dtype: str = "auto"
    trust_remote_code: bool = False
    lora: LoraSection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    algorithm: str = ""
    """The algorithm that trains it; without one it is only served."""
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """The model as the configuration names it; `model` is its place on this machine."""
    adapter: str | None = None
    """A folder with a saved adapter of a policy that is only served."""
    version: int = 0
    """The version of a policy that is only served."""


@dataclass(frozen=True)
class EngineContext:
    run_dir: Path
    seed: int
    policies: Mapping[str, PolicySpec]
    deterministic: bool
    plugin_files: tuple[Path, ...]
    """Files that may have the user's algorithm."""
    api_key: str
    """The bearer token of the gateway's requests."""
    steps: int = 0
    """The run's training steps, after which schedules of the step size end."""


@dataclass(frozen=True)
class Upstream:
    """The gateway's model server."""

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
    version: int
    """The policy version that is served from now on."""
    metrics: Mapping[str, float]
    advantage_N: NDArray[np.float64]
    """Mean advantage of each transition over its trainable tokens."""
    weight_N: NDArray[np.float64]
    """Summed token weights of each transition in the loss; 0 if dropped."""
    dropped: tuple[str | None, ...]
    """The `DropReason` of each transition that the engine or algorithm dropped, None for the others."""
    logprobs_N: Sequence[Logprobs | None] = ()
    """Log-probabilities of response tokens before the update, NaN at tokens without a weight, for each transition; None
    for one outside the loss. Empty: the engine does not say, and no token is proved exact."""
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

    A run relies on this, and `agl_core.testing.engines` checks it:

    **Replies.** The URLs serve OpenAI's chat completions by the policies' served names, to requests with the key of the
    context (`Authorization: Bearer`); others get 401. A request with `return_token_ids` and `logprobs` gets
    `prompt_token_ids` beside the choices, `token_ids` in each choice, and one log-probability for each of them, at the
    sampling temperature. The header `x-agl-policy-version` is the version that sampled the whole reply, from its first
    token to its last. With `stream: true` (`Upstream.streams`) the first chunk has `prompt_token_ids`, each choice of a
    chunk has the ids and log-probabilities of its tokens, also of those whose text comes later, and the last chunk
    before `[DONE]` has `usage` and `agl`. The deltas of a choice add up to the message of the whole reply.

    **Updates.** `update` trains a policy by the algorithm of its `PolicySpec`, built at the start from the installed
    plugins and the files of the context, with the options as its settings (`agl_server.engines.child`). The engine asks
    the algorithm, and not the options, for what it needs: epochs, minibatches, a critic, a reference. Transitions that
    cannot be trained on (`agl_core.learning.batch`), or that the algorithm does not keep, are dropped, each with a
    `DropReason` and the weight 0. The metrics are those of the algorithm's loss, `loss`, and others; `grad_norm` if it
    is known.
    `progress` is called with growing shares, at the end with 1.

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

    An engine in a process of its own derives from `agl_server.engines.host.ProcessEngine`.
    """

    @abstractmethod
    async def start(self) -> Upstream:
        """Load the weights, start serving, return where. Once for each engine."""

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        """Train on a batch; the new version is served, whole, when this returns. Some engines only serve."""
        raise self._not_supported("update")

    async def save(self, folder: Path) -> None:
        """Write weights (`POLICY/model`, as transformers loads them), optimiser and random state of every policy."""
        raise self._not_supported("save")

    async def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        raise self._not_supported("load")

    async def versions(self) -> Mapping[str, int]:
        """The version being served of each policy; none if weights have no versions."""
        return {}

    async def stats(self) -> Mapping[str, float]:
        """Counters since the start: `tokens_prefilled`, `tokens_reused`, `tokens_decoded`, `tokens_trained` and others.

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
        """Raise EngineError with the reason if it is known to be lost; a run looks while it waits for rollouts."""
        return

    def describe(self) -> str:
        """Settings other than defaults, and the resources it would take (`agl train --dry-run`); starts nothing."""
        return f"The engine {type(self).__name__} starts one process on this machine.\n"

    async def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        """Recorded calls with the token ids of their texts, or without, if the chat template cannot write them.

        An engine with this and `logprobs` declares `Capability.RECORDED_TEXTS`: in an update it takes the policy's own
        log-probabilities for unknown ones.
        """
        raise self._not_supported("tokenize")

    async def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        """The log-probability of each response token under the current weights, at the transition's temperature.

        It changes nothing. The batch has only what the model could be trained on; NaN for what the engine cannot take.
        """
        raise self._not_supported("logprobs")

    async def load_policy(self, name: str, spec: PolicySpec) -> None:
        """Load a saved policy and serve it by this name, while others are answered; adapters share their bases.

        An engine with this and `unload_policy` works without a run, whose context may name no policies, and declares
        `Capability.POLICIES`. An adapter of other weights than those of the spec is an EngineError.
        """
        raise self._not_supported("load_policy")

    async def unload_policy(self, name: str) -> None:
        """Answer the policy's open requests, and no others, and free its memory."""
        raise self._not_supported("unload_policy")

    def _not_supported(self, method: str) -> EngineError:
        return EngineError(f"The engine {type(self).__name__} does not support '{method}'.")
