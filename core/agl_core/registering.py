"""How components of each kind are registered: the signature of a builder, and what a component declares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from pydantic import BaseModel, ConfigDict

from agl_core.protocols import (
    Adapter,
    Algorithm,
    Buffer,
    CreditRule,
    Engine,
    EngineContext,
    GroupRewardRule,
    Redactor,
    ReleaseCheck,
    RewardRule,
    TaskSource,
    Tracker,
)
from agl_core.store.interface import Store
from agl_core.types import CreditKind


class Capability(StrEnum):
    """What a component needs of the rest of the run, or provides to it; checked before anything starts."""

    TOKEN_IDS = "token ids"
    """Engines provide these seven."""
    CRITIC = "critic"
    REFERENCE = "reference model"
    OWN_ALGORITHMS = "own algorithms"
    """An engine that computes the algorithm by itself, by its name there."""
    POLICIES = "saved policies"
    """An engine that serves and merges what was saved, without a run (`agl_core.protocols.PolicyEngine`)."""
    RECORDED_TEXTS = "recorded texts"
    """An engine that tokenises recorded replies, and trains on them without knowing the log-probabilities that they
    were sampled with (`agl_core.protocols.TokenizingEngine`)."""
    IMAGES = "images"
    """An engine whose models take images in messages, and that trains on replies to them."""
    GROUPS = "groups"
    """Several rollouts of each task, to compare. The run's settings provide these two."""
    REPLAY = "replay"
    """Training on what earlier weights sampled: staleness must be allowed, and corrected by importance weights."""
    TOOL_RESULTS = "tool results"
    """Tool results as part of the return. One component of a run may provide it, for a tool result counts once."""


class NoOptions(BaseModel):
    """The settings of a component that has none."""

    model_config = ConfigDict(extra="forbid")


Context = ParamSpec("Context")
"""What a builder is called with after the settings."""
Made = TypeVar("Made", contravariant=True)
Options = TypeVar("Options", bound=BaseModel)


class Register(Protocol[Context, Made]):
    """What a `register_…` hook is called with; call it for each component.

    `options` is a pydantic model of the settings, which the builder gets. `needs` is what the component needs of the
    rest of the run, fixed or computed from the settings; `provides` is what it offers. `doc` is by default the first
    line of the builder's docstring.

    `takes` is for algorithms alone: which credited values it takes, by default either. `kind` is for credit rules
    alone, and required there: what the values are, or both if they can be read as either. `status_rules` is for
    adapters alone: see `agl_core.adapter`.
    """

    @overload
    def __call__(
        self,
        name: str,
        build: Callable[Concatenate[NoOptions, Context], Made],
        *,
        needs: Iterable[Capability] = (),
        provides: Iterable[Capability] = (),
        takes: CreditKind | None = None,
        kind: CreditKind | Collection[CreditKind] = (),
        status_rules: Iterable[Any] = (),
        doc: str | None = None,
    ) -> None: ...

    @overload
    def __call__(
        self,
        name: str,
        build: Callable[Concatenate[Options, Context], Made],
        *,
        options: type[Options],
        needs: Iterable[Capability] | Callable[[Options], Iterable[Capability]] = (),
        provides: Iterable[Capability] = (),
        takes: CreditKind | Callable[[Options], CreditKind] | None = None,
        kind: CreditKind | Collection[CreditKind] = (),
        status_rules: Iterable[Any] = (),
        doc: str | None = None,
    ) -> None: ...


RegisterAlgorithm: TypeAlias = Register[[], Algorithm]
RegisterCreditRule: TypeAlias = Register[[], CreditRule]
RegisterAdapter: TypeAlias = Register[[], Adapter]
RegisterEngine: TypeAlias = Register[[EngineContext], Engine]
RegisterRedactor: TypeAlias = Register[[], Redactor]
RegisterReleaseCheck: TypeAlias = Register[[], ReleaseCheck]
RegisterReward: TypeAlias = Register[[], RewardRule | GroupRewardRule]
RegisterBuffer: TypeAlias = Register[[], Buffer]
RegisterStore: TypeAlias = Register[[Path, bool], Store]
"""Its builder gets the run's folder, and whether the store is only read."""
RegisterTaskSource: TypeAlias = Register[[Path, int], TaskSource]
"""Its builder gets the folder that paths are relative to, and the run's seed."""
RegisterTracker: TypeAlias = Register[[Path], Tracker]
"""Its builder gets the run's folder."""
