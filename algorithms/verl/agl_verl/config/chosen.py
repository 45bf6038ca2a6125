"""The run's algorithm: one that a plugin brings, agl's own among them, or one of veRL itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext
from agl_core.training.child import find_algorithm
from agl_verl.config.native import NativeOptions

if TYPE_CHECKING:
    from agl_algorithms.interface import Algorithm

BuiltAlgorithm: TypeAlias = "Algorithm | NativeOptions"
"""What can be asked for epochs, minibatches, and whether it needs a critic and a reference."""


@dataclass(frozen=True, slots=True)
class ChosenAlgorithm:
    """A plugin's algorithm and its options, in a form that crosses to other processes."""

    name: str
    options: bytes
    """JSON."""
    plugin_files: tuple[Path, ...]
    """The user's own, which every node finds at the same path."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], plugin_files: tuple[Path, ...] = ()) -> ChosenAlgorithm:
        return cls(name, orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS), plugin_files)

    def build(self) -> Algorithm:
        """The algorithm; made once in each process."""
        return _build(self)


@lru_cache(maxsize=8)
def _build(chosen: ChosenAlgorithm) -> Algorithm:
    plugins = Plugins.load(chosen.plugin_files)
    component, options = find_algorithm(plugins, chosen.name, orjson.loads(chosen.options))
    algorithm: Algorithm = component.build(options)
    return algorithm


def choose(context: EngineContext) -> ChosenAlgorithm | NativeOptions:
    """What the run's one policy is trained with."""
    (spec,) = context.policies.values()
    _, options = find_algorithm(Plugins.load(context.plugin_files), spec.algorithm, spec.algorithm_options)
    if isinstance(options, NativeOptions):
        return options
    return ChosenAlgorithm.of(spec.algorithm, spec.algorithm_options, context.plugin_files)


def built(chosen: ChosenAlgorithm | NativeOptions) -> BuiltAlgorithm:
    """What veRL is configured for."""
    return chosen.build() if isinstance(chosen, ChosenAlgorithm) else chosen
