"""The kinds of components: what builds one of each, and what a plugin says about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel, ConfigDict

from agl_core.protocols import (
    Adapter,
    Algorithm,
    Buffer,
    CreditRule,
    Engine,
    EngineContext,
    GroupRewardRule,
    RewardRule,
    TaskSource,
    Tracker,
)
from agl_core.store.interface import Store
from agl_core.types import CreditKind

Context = ParamSpec("Context")
Product = TypeVar("Product")
Options = TypeVar("Options", bound=BaseModel)


class Capability(StrEnum):
    """What a component needs of the rest of the run, or provides to it; checked before anything starts."""

    TOKEN_IDS = "token ids"
    """Engines provide these seven."""
    CRITIC = "critic"
    REFERENCE = "reference model"
    OWN_ALGORITHMS = "own algorithms"
    """An engine that computes the algorithm by itself, by its name there."""
    POLICIES = "saved policies"
    """An engine that serves and merges what was saved, without a run (`agl_core.protocols.Engine.publish`)."""
    RECORDED_TEXTS = "recorded texts"
    """An engine that tokenises recorded replies, and trains on them without knowing the log-probabilities that they
    were sampled with (`agl_core.protocols.Engine.tokenize`)."""
    GROUPS = "groups"
    """Several rollouts of each task, to compare. The run's settings provide these two."""
    REPLAY = "replay"
    """Training on what earlier weights sampled: staleness must be allowed, and corrected by importance weights."""
    TOOL_RESULTS = "tool results"
    """Tool results as part of the return. One component of a run may provide it, for a tool result counts once."""


@dataclass(frozen=True)
class Kind(Generic[Context, Product]):
    """A kind of component: `build(options, *Context) -> Product` makes one."""

    word: str
    """The word for it in configurations and messages."""
    declares: frozenset[str] = frozenset()
    """Which of `Declared` may be said of its components beside `doc` and `needs`."""

    def __str__(self) -> str:
        return self.word


ADAPTER = Kind[[], Adapter]("adapter", frozenset({"status_rules"}))
ALGORITHM = Kind[[], Algorithm]("algorithm", frozenset({"takes"}))
BUFFER = Kind[[], Buffer]("buffer")
CREDIT = Kind[[], CreditRule]("credit", frozenset({"yields", "provides"}))
ENGINE = Kind[[EngineContext], Engine]("engine", frozenset({"provides"}))
REWARD = Kind[[], RewardRule | GroupRewardRule]("reward", frozenset({"provides"}))
SECTION = Kind[[], BaseModel]("section")
"""A table of a run's file by the component's name, for a plugin of its own; its options are the keys."""
STORE = Kind[[Path, bool], Store]("store")
"""Its builder gets the run's folder, and whether the store is only read."""
TASK_SOURCE = Kind[[Path, int], TaskSource]("task source")
"""Its builder gets the folder that paths are relative to, and the run's seed."""
TRACKER = Kind[[Path], Tracker]("tracker")
"""Its builder gets the run's folder."""

AnyKind: TypeAlias = Kind[..., Any]
"""Plugins may have kinds of their own, which tables in a `SECTION` of theirs name."""
KINDS: tuple[AnyKind, ...] = (
    *(ADAPTER, ALGORITHM, ENGINE, REWARD, CREDIT, BUFFER, STORE, TASK_SOURCE, TRACKER, SECTION),
)


class NoOptions(BaseModel):
    """The settings of a component that has none."""

    model_config = ConfigDict(extra="forbid")


class Declared(TypedDict, total=False):
    """What a plugin says of a component beside its name, builder and options; `Kind.declares` has what its kind may."""

    doc: str | None
    """By default the first line of the builder's docstring."""
    needs: Iterable[Capability] | Callable[[Any], Iterable[Capability]]
    """Of the rest of the run, fixed or computed from the settings."""
    provides: Iterable[Capability]
    """What an engine, a reward or a credit rule offers the rest of the run."""
    takes: CreditKind | Callable[[Any], CreditKind | None] | None
    """Which credited values an algorithm takes, fixed or computed from the settings; by default either."""
    yields: CreditKind | Collection[CreditKind]
    """What the values of a credit rule are, or both if they can be read as either; required."""
    status_rules: Iterable[Any]
    """The words in which an adapter's framework tells a model that a tool failed, see `agl_core.adapter`."""


class Register(Protocol):
    """What `register_components` is called with; call it for each component.

    `options` is a pydantic model of the settings, which the builder gets.
    """

    @overload
    def __call__(
        self,
        kind: Kind[Context, Product],
        name: str,
        build: Callable[Concatenate[NoOptions, Context], Product],
        **declared: Unpack[Declared],
    ) -> None: ...

    @overload
    def __call__(
        self,
        kind: Kind[Context, Product],
        name: str,
        build: Callable[Concatenate[Options, Context], Product],
        *,
        options: type[Options],
        **declared: Unpack[Declared],
    ) -> None: ...
