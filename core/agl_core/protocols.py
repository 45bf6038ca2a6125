"""What the parts of agl are to each other: the interfaces that plugins implement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch, Episode, Identity, Reward, Task

RewardValue: TypeAlias = float | Mapping[str, float] | Sequence[Reward] | None
"""One terminal reward, several named components of it, rewards of single calls with their provenance, or None
where the rule has nothing to say."""

RewardRule: TypeAlias = Callable[[Episode], RewardValue | Awaitable[RewardValue]]
"""Judges a recorded episode; runs on the trainer's side and may be run again later."""

CreditRule: TypeAlias = Callable[[Sequence[Episode]], list[list[float]]]
"""Shares the rewards of a group of episodes: one value per transition, in their order."""


class TaskSource(Protocol):
    """Where tasks come from. Random access makes resuming trivial."""

    @property
    def size(self) -> int | None:
        """How many tasks there are; None if it makes new ones without end."""

    def task(self, index: int) -> Task:
        """The task at this index; the same for the same index, always."""


class Tracker(Protocol):
    """Where metrics go besides `metrics.jsonl`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class DrawContext:
    """What a buffer is told about the update that asks for groups."""

    step: int
    seed: int
    """The run's; with `step` it seeds whatever is random, so that a resumed run draws alike."""
    versions: Mapping[str, int]
    """Those that the update begins with, by policy."""
    max_staleness: int
    """Episodes older than that would be dropped (`agl_core.learning.staleness`),"""
    min_group_size: int
    """and groups with fewer episodes left."""


@dataclass(frozen=True)
class DrawnGroup:
    """A group for one update."""

    episodes: Sequence[Episode]
    weight: float = 1.0
    """What the share of each of its transitions in the loss is multiplied by, at least 0."""


class Buffer(Protocol):
    """Where complete groups wait for an update, and which of them it gets.

    A run that is resumed begins with an empty one: the groups that were pending are rolled out again.
    """

    def __len__(self) -> int:
        """How many groups it holds, those included that it has given out and may give out again."""

    @property
    def pending(self) -> Collection[str]:
        """The names of the groups that it holds, has never given out, and may still give out.

        They count as in flight: while there are as many as the run may have, no new group is begun.
        """

    def add(self, group: Sequence[Episode]) -> None:
        """All rollouts of a group are done; its episodes are judged, in the order of the members."""

    def draw(self, count: int, context: DrawContext) -> list[DrawnGroup] | None:
        """The groups of one update: `count` new ones, and any that earlier updates had; each once.

        None as long as it has too few; asked again after every `add`.
        """


class Adapter(Protocol):
    """Tells agl who made a call and what the tools did, for one agent framework."""

    framework: str
    """The module whose import tells that an agent uses the framework, `langchain_core` say."""

    def attach(self) -> Callable[[], Identity | None] | None:
        """Install the framework's hooks in this process; calling it again changes nothing.

        It is called when `framework` is imported. Where the framework has no hook around a call, it may return a
        function that is asked, when a request is sent, who makes it.
        """


@dataclass(frozen=True)
class PolicySpec:
    """What an engine needs to know of one policy."""

    model: str
    """A folder or a hub name."""
    dtype: str = "auto"
    trust_remote_code: bool = False
    lora: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = ""
    """What trains it, and with which options, as `Engine.update` will say: an engine may have to prepare for it."""
    algorithm_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineContext:
    """What a run tells its engine before it starts."""

    run_dir: Path
    seed: int
    policies: Mapping[str, PolicySpec]
    deterministic: bool
    plugin_files: tuple[Path, ...]
    """The user's own plugin files, so that the engine's processes find the user's algorithm."""
    api_key: str
    """What the gateway sends upstream as its bearer token."""
    updates: int = 0
    """How many updates of each policy the run is to make: schedules of the step size end there. 0: none is made."""


@dataclass(frozen=True)
class Upstream:
    """Where the gateway forwards to."""

    urls: tuple[str, ...]
    """OpenAI-compatible base URLs, each ending in /v1."""
    models: Mapping[str, str]
    """The served model name of each policy."""
    api_key: str
    returns_ids: bool = True
    """Whether replies carry token ids and log-probabilities."""
    context_length: int | None = None


@dataclass(frozen=True)
class UpdateResult:
    """What an engine says about one update of one policy."""

    version: int
    """The policy version that is served from now on."""
    metrics: Mapping[str, float]
    advantage_N: NDArray[np.float64]
    """Mean advantage of each transition over its trainable tokens."""
    weight_N: NDArray[np.float64]
    """Summed token weights of each transition in the loss; 0 if dropped."""
    dropped: tuple[str | None, ...]
    """Why a transition was dropped by the engine or algorithm (a `DropReason`), or None."""


Progress: TypeAlias = Callable[[float], None]
"""Called with the share done, 0 … 1."""


class Engine(Protocol):
    """Holds the weights: serves the current policy and applies updates. It knows nothing of agents."""

    async def start(self) -> Upstream:
        """Load the weights, start serving, return where."""

    async def update(
        self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], progress: Progress | None = None
    ) -> UpdateResult:
        """Train on a batch; the new version is served, whole, when this returns."""

    async def save(self, folder: Path) -> None:
        """Write weights, optimiser and random state of every policy below `folder`."""

    async def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""

    async def versions(self) -> Mapping[str, int]:
        """The version being served of each policy."""

    async def stats(self) -> Mapping[str, float]:
        """Counters since the start: tokens prefilled, reused, decoded; and memory (`peak_rss_bytes`)."""

    async def stop(self) -> None:
        """End all its processes; calling it again changes nothing."""


@runtime_checkable
class DescribedEngine(Protocol):
    """An engine that can tell what it would start: `agl train --dry-run`."""

    def describe(self) -> str:
        """Its resolved configuration and the resources that it would take; nothing is started."""
