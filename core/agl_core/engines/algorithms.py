"""The algorithm that an update names, found and built in the engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Component, Plugins


def find_algorithm(plugins: Plugins, name: str, options: Mapping[str, Any]) -> tuple[Component, BaseModel]:
    """What a plugin registered under the name, and the options as its settings; `component.build(settings)` builds it.

    PluginError if no plugin brings it, ConfigError for options that it does not have.
    """
    component = plugins.component(kinds.ALGORITHM, name, "algorithm.name")
    try:
        return component, component.options.model_validate(dict(options))
    except ValueError as error:
        raise ConfigError(f"algorithm.{name}: {error}") from error
