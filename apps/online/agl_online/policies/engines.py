"""What an engine needs to serve or merge a version, and which engine can."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agl_core import kinds
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.errors import ConfigError
from agl_core.kinds import Capability
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, EngineContext, PolicySpec
from agl_online.policies.naming import Version


@contextmanager
def log_folder() -> Iterator[Path]:
    """A folder for an engine's log, removed at the end. After an error a log stays: the error may name it."""
    folder = Path(tempfile.mkdtemp(prefix="agl-policy-"))
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # It is not empty.
            folder.rmdir()
        raise
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class Source:
    """The run that a version comes from, as far as its policies need it."""

    loaded: LoadedConfig

    @classmethod
    def of(cls, run: Path, overrides: Sequence[str] = (), plugins: Plugins | None = None) -> Source:
        """Read the run's configuration, with `KEY=VALUE` texts that override it."""
        return cls(load(run / CONFIG_FILE, overrides, needs=(), plugins=plugins or Plugins.load()))

    def spec(self, version: Version) -> PolicySpec:
        """What to load. ConfigError if the weights below an adapter are gone."""
        model = self.loaded.config.policies[version.policy].model
        saved, adapter = version.saved, None
        if saved is None or version.is_adapter:
            weights = self.loaded.weights(version.policy)
            adapter = None if saved is None else str(saved.resolve())
        else:
            weights = str(saved.resolve())
        return PolicySpec(
            weights, model.dtype, model.trust_remote_code, name=model.path, adapter=adapter, version=version.step
        )

    def engine(self, folder: Path, name: str | None = None) -> Engine:
        """An engine without policies: the one of this name, else the run's, else any that is installed.

        `folder` is for its log. ConfigError if there is none that serves and merges policies.
        """
        chosen = self.loaded.single["engine"]
        if name is not None or chosen is None or Capability.POLICIES not in chosen.component.provides:
            build, options = self._other(name)
        else:
            build, options = chosen.component.build, chosen.options
        context = EngineContext(folder, self.loaded.config.seed, {}, False, (), api_key=os.urandom(16).hex())
        engine: Engine = build(options, context)
        return engine

    def _other(self, name: str | None) -> tuple[Callable[..., Any], BaseModel]:
        known = self.loaded.plugins.components(kinds.ENGINE)
        able: Mapping[str, Any] = {each.name: each for each in known.values() if Capability.POLICIES in each.provides}
        found = able.get(name) if name is not None else next(iter(able.values()), None)
        if found is None:
            which = f"No engine '{name}' is installed here that" if name else "No engine is installed here that"
            listed = ", ".join(sorted(able)) or "none"
            raise ConfigError(f"{which} serves and merges policies without a run. Engines that can: {listed}.")
        own = self.loaded.config.engine.tables.get(found.name, {})
        return found.build, found.options.model_validate(own)
