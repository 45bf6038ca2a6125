"""The kinds of components, what a plugin says about one, and `register`, which it calls for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, Concatenate, NewType, ParamSpec, TypeAlias

from pydantic import BaseModel, ConfigDict

from agl_core.types import CreditKind

P = ParamSpec("P")


class Capability(StrEnum):
    """A need of a component, or its offer to the rest of the run; checked before anything starts."""

    TOKEN_IDS = "token ids"
    """Engines provide these nine."""
    CRITIC = "critic"
    REFERENCE = "reference model"
    TARGET_KL = "target KL"
    """An engine that makes no more of an update's optimizer steps once the policy has moved so far."""
    RESCORE = "scores before the update"
    """An engine that lets an algorithm make its advantages of log-probabilities before the update (`rescore`)."""
    TEACHER = "teacher"
    """An engine that computes, or gets, log-probabilities of what a policy sampled under another model."""
    POLICIES = "saved policies"
    """An engine that serves what was saved, without a run (`agl_core.protocols.Engine.load_policy`)."""
    RECORDED_TEXTS = "recorded texts"
    """An engine that tokenises recorded replies, trains on them without the log-probabilities of their sampling, and
    says how likely they are (`agl_core.protocols.Engine.tokenize` and `logprobs`). An algorithm that never asks for
    those log-probabilities provides it too."""
    DEMONSTRATIONS = "demonstrations"
    """Recorded rollouts as tasks of training, whose replies are imitated. A task source provides them."""
    GROUPS = "groups"
    """Several rollouts of each task, to compare. The run's settings provide these two."""
    UNIT_TEMPERATURE = "temperature 1"
    """Tokens sampled at temperature 1, the one at which a server gives log-probabilities."""
    NAMED_REWARDS = "named rewards"
    """Terminal rewards whose named parts are normalised within the group, then added. Training provides it."""
    TOOL_RESULTS = "tool results"
    """Tool results as part of the return. One component of a run may provide it, for a tool result counts once."""


Kind = NewType("Kind", str)
"""A kind of component, by its word in files and messages; its builder makes one (`agl_core.protocols`) of settings."""

ADAPTER = Kind("adapter")
ALGORITHM = Kind("algorithm")
CONFIG_TABLE = Kind("table")
"""A table of a run's file by the component's name, for a plugin of its own; its options are the keys."""
CREDIT = Kind("credit")
ENGINE = Kind("engine")
"""Its builder also gets the run's `EngineContext`."""
HARNESS = Kind("harness")
"""Its builder also gets the run's configuration; None: it works in the current folder, for `agl run`."""
REWARD = Kind("reward")
"""Its builder also gets the run's configuration; None: there is no run, for `agl reward try`."""
STORE = Kind("store")
"""Its builder also gets the run's folder, and whether the store is only read."""
TASK_SOURCE = Kind("task source")
"""Its builder also gets the folder that paths are relative to, and the run's seed."""
TRACKER = Kind("tracker")
"""Its builder also gets the run's folder."""

KINDS = (ADAPTER, ALGORITHM, ENGINE, HARNESS, REWARD, CREDIT, STORE, TASK_SOURCE, TRACKER, CONFIG_TABLE)


CreditKinds: TypeAlias = CreditKind | Collection[CreditKind]


class NoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, eq=False)
class Component:
    """One thing that a plugin brought, and what it says about it; some of it may depend on the settings."""

    origin: str
    """The distribution and version, or the file, that it came from."""
    kind: Kind
    name: str
    build: Callable[..., Any]
    """Makes it of its settings, and of what else its kind gets."""
    _: KW_ONLY
    options: type[BaseModel] = NoOptions
    """The model of its settings."""
    doc: str | None = None
    """Absent: the builder's docstring."""
    needs: Collection[Capability] | Callable[[Any], Collection[Capability]] = ()
    provides: Collection[Capability] = ()
    takes: CreditKinds | Callable[[Any], CreditKinds] = CreditKind.RETURN
    """The values that an algorithm takes; none: rewards mean nothing to it."""
    yields: CreditKinds | Callable[[Any], CreditKinds] = ()
    """The kinds as which a credit rule's values can be read."""
    status_rules: Sequence[Any] = ()
    """The words in which an adapter's framework tells a model that a tool failed."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """An engine's own, for the settings of algorithms."""

    def __post_init__(self) -> None:
        if self.kind == CREDIT and not self.yields:
            raise TypeError(f"{self.kind} '{self.name}' must say what its values are: yields=CreditKind.RETURN")

    @property
    def summary(self) -> str:
        return (self.doc or self.build.__doc__ or "").strip().split("\n", 1)[0]

    @property
    def label(self) -> str:
        return f"{self.kind} '{self.name}' ({self.origin})"


def _registering(make: Callable[Concatenate[str, P], Component]) -> Callable[Concatenate[Register, P], None]:
    def register(self: Register, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.components.append(make(self.origin, *args, **kwargs))

    return register


class Register:
    """The argument of `register_components`: call it as `Component`, without the origin, for each component."""

    def __init__(self, origin: str) -> None:
        self.origin, self.components = origin, list[Component]()

    __call__ = _registering(Component)
