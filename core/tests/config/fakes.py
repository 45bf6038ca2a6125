"""A plugin file as a user would write it: one small component of every kind that a configuration chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

import agl_core
from agl_core import Capability, CreditKind, kinds
from agl_core.config.sections import ModelPlace, Section
from agl_core.kinds import Register


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ComparingOptions(Strict):
    beta: float = Field(0.04, ge=0, description="Weight of the distance to the reference; 0: no reference.")
    epsilon: float = Field(0.2, gt=0, description="Clip range.")


class EngineOptions(Strict):
    class Cache(Strict):
        slots: int = Field(4, ge=1, description="Sequences kept.")
        key: SecretStr = Field(SecretStr(""), description="A secret in a table.")

    cache: Cache = Field(Cache(), description="What is kept between calls.")
    threads: int | None = Field(None, description="Threads of the engine.")
    token: SecretStr = Field(SecretStr(""), description="A secret.")


class CountingOptions(Strict):
    limit: int = Field(10, ge=1, description="How far to count.")
    file: Path = Field(Path("numbers.txt"), description="A path.")


class PathOptions(Strict):
    class Nested(Strict):
        file: Path = Field(Path("nested.bin"), description="A path in a table.")

    one: Path = Field(Path("one.bin"), description="A path.")
    maybe: Path | None = Field(None, description="Perhaps a path.")
    many: tuple[Path, ...] = Field((), description="Several paths.")
    named: dict[str, Path] = Field({}, description="Paths by name.")
    models: tuple[ModelPlace, ...] = Field((), description="Places of models.")
    inside: Nested = Field(Nested(), description="A table with a path.")
    text: str = Field("one.bin", description="Text that looks like a path.")


class CarelessOptions(BaseModel):
    """Its author forgot to forbid unknown keys."""

    loud: bool = Field(False, description="Whether to shout.")


class NeedyOptions(Strict):
    url: str = Field(description="Where to send metrics.")


def built(options: BaseModel, *context: Any) -> Any:
    """A stand-in."""
    return (options, *context)


@agl_core.credit_rule(kind=CreditKind.RETURN)
def whole(episodes: Any) -> Any:
    """Everything to everyone."""


@agl_core.credit_rule(kind=CreditKind.REWARD)
def per_step(episodes: Any) -> Any:
    """Each step its own."""


@agl_core.reward_rule
def brevity(episode: Any, *, limit: int = 200) -> float:
    """1 if the answer is short."""
    return float(len(str(episode.result)) <= limit)


class GardenSection(Section):
    rows: int = Field(3, ge=1, description="How many there are.")


@agl_core.hookimpl
def register_components(register: Register) -> None:
    register(
        kinds.ALGORITHM,
        "comparing",
        built,
        options=ComparingOptions,
        needs=lambda options: {Capability.GROUPS, *([Capability.REFERENCE] if options.beta else [])},
        takes=CreditKind.RETURN,
    )
    needs = {Capability.CRITIC, Capability.TOKEN_IDS}
    register(kinds.ALGORITHM, "judging", built, needs=needs, takes=CreditKind.REWARD)
    register(kinds.ALGORITHM, "easy", built, takes=())
    provides = {Capability.REFERENCE, Capability.TOKEN_IDS}
    register(kinds.ENGINE, "pretending", built, options=EngineOptions, provides=provides)
    register(kinds.ENGINE, "poor", built)
    register(kinds.ENGINE, "rich", built, provides={*provides, Capability.CRITIC})
    register(kinds.CREDIT, "either", built, yields={CreditKind.REWARD, CreditKind.RETURN})
    register(kinds.CREDIT, "compared", built, yields=CreditKind.ADVANTAGE)
    register(kinds.CREDIT, "mixing", built, yields={CreditKind.RETURN}, provides={Capability.TOOL_RESULTS})
    register(kinds.STORE, "forgetting", built)
    register(kinds.TASK_SOURCE, "counting", built, options=CountingOptions)
    register(kinds.TRACKER, "shouting", built, options=CarelessOptions)
    register(kinds.TRACKER, "posting", built, options=NeedyOptions)

    class Clashing(Strict):
        weight: float = Field(1.0, description="Clashes with the table's own.")

    register(kinds.REWARD, "clashing", built, options=Clashing)
    register(kinds.REWARD, "filing", built, options=PathOptions)
    register(kinds.REWARD, "tool_counting", built, provides={Capability.TOOL_RESULTS})
    register(kinds.CONFIG_TABLE, "garden", built, options=GardenSection)
