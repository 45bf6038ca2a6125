"""The versions that are served, by the names that requests may use; which versions these are may change meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agl_core.errors import AglError, ConfigError, did_you_mean
from agl_core.protocols import Engine
from agl_core.server.errors import ApiError
from agl_online.policies.engines import Source
from agl_online.policies.naming import ALIASES, Reference, Version, parse

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Served:
    """One version that the engine serves."""

    version: Version
    model: str
    """What the engine calls it."""
    max_tokens: int
    """The limit of a response where the request has none: that of training."""
    written: int
    """When its checkpoint was written: a run that is resumed may write a step again."""
    calls: int = 0
    """Calls that it is answering."""

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A call that it answers: until this ends, the version is kept."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reference to serve, and whether it has to be there from the start."""

    reference: Reference
    required: bool


def wanted_of(texts: Sequence[str]) -> list[Wanted]:
    """What the command line asks for; a name without a version means its latest, and its best and stable if any.

    ConfigError if two runs have one name.
    """
    found: dict[str, Wanted] = {}
    for text in texts:
        reference = parse(text)
        run, policy, name = reference.run, reference.policy, reference.name
        whichs = [reference.which] if "@" in text else list(ALIASES)
        for which in whichs:
            each = Reference(run, policy, name, which)
            before = found.setdefault(str(each), Wanted(each, required=which == reference.which))
            if before.reference.run.resolve() != run.resolve():
                raise ConfigError(f"Two runs are called '{name}': {before.reference.run} and {run}. Rename a folder.")
    return list(found.values())


@dataclass(eq=False)
class Shelf:
    """Keeps loaded what `wanted` means now; `refresh` looks again. Used from one event loop.

    `say` gets a line whenever what is served changes.
    """

    engine: Engine
    wanted: Sequence[Wanted]
    sources: Mapping[Path, Source]
    """By the run's folder."""
    say: Callable[[str], None]
    _names: dict[str, Served] = field(default_factory=dict, init=False)
    _loaded: list[Served] = field(default_factory=list, init=False)
    _said: dict[str, str] = field(default_factory=dict, init=False)
    """Of each reference that could not be followed, why."""
    _count: int = field(default=0, init=False)

    @property
    def names(self) -> Mapping[str, Served]:
        """What answers each name."""
        return self._names

    @property
    def problems(self) -> Mapping[str, str]:
        """Why the references that are not followed cannot be, by their names."""
        return self._said

    def served(self, model: str) -> Served:
        """What answers requests for this model. ApiError 404 with the nearest names.

        If one policy is served, any name without a version is its name: an agent need not know what it is called.
        """
        found = self._names.get(model)
        policies = {each.reference.name for each in self.wanted}
        if found is None and len(policies) == 1 and "@" not in model:
            found = self._names.get(next(iter(policies)))
        if found is None:
            raise ApiError(
                404,
                f"There is no model '{model}' here. {did_you_mean(model, self._names)}"
                f"Served: {', '.join(self._names)}.",
                param="model",
                code="model_not_found",
            )
        return found

    async def refresh(self) -> None:
        """Load what is wanted now, let names lead there, and then let go of what no name leads to.

        An AglError if something that is required cannot be loaded at first; later, what was served stays.
        """
        names: dict[str, Served] = {}
        for each in self.wanted:
            name = str(each.reference)
            try:
                served = await self._get(each.reference)
            except AglError as error:
                if each.required and name not in self._names:
                    raise
                self._complain(name, str(error), expected=not each.required and name not in self._names)
                if name not in self._names:
                    continue
                served = self._names[name]
            else:
                self._said.pop(name, None)
            names |= {name: served, str(served.version): served}
            names.setdefault(each.reference.name, served)
        for name, served in names.items():
            before = self._names.get(name)
            if before is not served and name != str(served.version):
                self.say(f"{name} is {served.version}" if before is None else f"{name} is now {served.version}")
        self._names = names
        kept = set(names.values())
        for served in [each for each in self._loaded if each not in kept and not each.calls]:
            self._loaded.remove(served)
            await self.engine.withdraw(served.model)
            self.say(f"{served.version} is no longer served")

    async def _get(self, reference: Reference) -> Served:
        version = await asyncio.to_thread(reference.resolve)
        state = None if version.checkpoint is None else version.checkpoint / "state.json"
        try:
            written = 0 if state is None else state.stat().st_mtime_ns
        except OSError as error:
            raise ConfigError(f"The checkpoint of {version} is gone: {error}.") from error
        for each in self._loaded:
            if (each.version, each.written) == (version, written):
                return each
        source = self.sources[version.run]
        self._count += 1
        limit = source.loaded.config.sampling.max_tokens
        served = Served(version, f"{version}/{self._count}", limit, written)
        await self.engine.publish(served.model, source.spec(version))
        self._loaded.append(served)
        return served

    def _complain(self, name: str, why: str, *, expected: bool) -> None:
        if not expected and self._said.get(name) != why:
            self.say(f"{name} stays as it is: {why}")
        self._said[name] = why
