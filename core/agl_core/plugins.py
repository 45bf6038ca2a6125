"""Finding plugins and asking them: installed ones by entry point (group `agl`), and the user's own files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pluggy
from pydantic import BaseModel, ConfigDict

from agl_core import hooks
from agl_core.errors import PluginError, nearest

ENTRY_POINT_GROUP = "agl"


_ELSEWHERE = {
    "torch": "agl-torch",
    "verl": "agl-verl",
    **dict.fromkeys(("grpo", "ppo", "reinforce++"), "agl-algorithms"),
    **dict.fromkeys(("air", "tool_outcomes", "exact_match", "numeric_match", "judge"), "agl-rewards"),
}
"""Well-known components, and the packages of this project that bring them."""


class Kind(StrEnum):
    """What a plugin can bring; the values are the words of the configuration."""

    ADAPTER = "adapter"
    ALGORITHM = "algorithm"
    ENGINE = "engine"
    REWARD = "reward"
    CREDIT = "credit"
    BUFFER = "buffer"
    STORE = "store"
    TASK_SOURCE = "task source"
    TRACKER = "tracker"


class Need(StrEnum):
    """What one part of a run can need and another provide; checked before anything starts."""

    GROUPS = "groups"
    """Several rollouts of each task, to compare."""
    CRITIC = "critic"
    REFERENCE = "reference model"
    TOKEN_IDS = "token ids"
    OWN_ALGORITHMS = "own algorithms"
    """An engine that computes the algorithm by itself, by its name there."""
    RETURNS = "returns"
    """Credited values that already contain what came after."""
    REWARDS = "rewards"
    """Credited values of one step each: the algorithm owns the time axis."""
    OUTCOMES = "tool outcomes"
    """Tool outcomes as part of the return: one component of a run may bring them, for an outcome counts once."""
    REPLAY = "replay"
    """Training on what earlier weights sampled: staleness must be allowed, and corrected by importance weights."""


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An installed plugin that cannot be used, so that what it would bring is missing."""

    name: str
    origin: str
    """Its distribution and version."""
    error: str

    def __str__(self) -> str:
        return f"The plugin '{self.name}' of {self.origin} cannot be used ({self.error}). Reinstall or uninstall it."


class NoOptions(BaseModel):
    """The settings of a plugin that has none."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Component:
    """One thing that a plugin brought."""

    kind: Kind
    name: str
    build: Callable[..., Any]
    options: type[BaseModel]
    """The settings it honours, with defaults, bounds and a description each."""
    needs: Callable[[BaseModel], frozenset[Need]]
    provides: frozenset[Need]
    doc: str
    origin: str
    """The distribution and version, or the file, that it came from."""


class Register(Protocol):
    """What a `register_…` hook is called with."""

    def __call__(
        self,
        name: str,
        build: Callable[..., Any],
        *,
        options: type[BaseModel] = NoOptions,
        needs: Iterable[Need] | Callable[[Any], Iterable[Need]] = (),
        provides: Iterable[Need] = (),
        doc: str | None = None,
    ) -> None:
        """Bring one component.

        `options` is a pydantic model of the settings that it honours; `needs` what it needs of the rest of
        the run, fixed or computed from the options; `provides` what it offers. `doc` defaults to the first
        line of the builder's docstring.
        """


_REGISTER_HOOKS = {
    Kind.ADAPTER: "register_adapters",
    Kind.ALGORITHM: "register_algorithms",
    Kind.ENGINE: "register_engines",
    Kind.REWARD: "register_rewards",
    Kind.CREDIT: "register_credit_rules",
    Kind.BUFFER: "register_buffers",
    Kind.STORE: "register_stores",
    Kind.TASK_SOURCE: "register_task_sources",
    Kind.TRACKER: "register_trackers",
}


class Plugins:
    """All plugins of a process, and the components they brought."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("agl")
        self._manager.add_hookspecs(hooks)
        self._origins: dict[Any, str] = {}
        self._installed: dict[Any, str] = {}
        """The names of the plugins that were found by entry point."""
        self._broken: dict[tuple[str, str], BrokenPlugin] = {}

    @classmethod
    def load(cls, files: Sequence[Path] = ()) -> Plugins:
        """What is installed, and the user's own plugin files.

        An installed plugin that fails is among the `broken` ones, for most runs need it not; a file that fails is a
        PluginError, for it was asked for.
        """
        plugins = cls()
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            try:
                plugin = entry.load()
                plugins.register(plugin, origin)
            except Exception as error:
                plugins._broke(entry.name, origin, error)
            else:
                plugins._installed.update(dict.fromkeys((plugin, *collected_rules(plugin)), entry.name))
        for file in files:
            plugins.register(import_file(file), str(file))
        return plugins

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """The installed plugins that failed so far: when imported, or when asked what they bring."""
        return tuple(self._broken.values())

    @property
    def hook(self) -> Any:
        """pluggy's caller: `plugins.hook.rollout_started(rollout=…, attempt=…)`."""
        return self._manager.hook

    def register(self, plugin: object, origin: str) -> None:
        """Add a module or object whose methods are hook implementations."""
        version = getattr(plugin, "AGL_API_VERSION", hooks.API_VERSION)
        if version != hooks.API_VERSION:
            raise PluginError(
                f"The plugin from {origin} was written for plugin API {version}, this agl has {hooks.API_VERSION}. "
                f"Install a version of it that fits."
            )
        if self._manager.is_registered(plugin):
            return
        self._manager.register(plugin)
        try:
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._manager.unregister(plugin)
            raise PluginError(f"The plugin from {origin} implements an unknown hook: {error}") from error
        self._origins[plugin] = origin
        for rule in collected_rules(plugin):
            if self._manager.is_registered(rule):
                continue
            self._manager.register(rule)
            self._origins[rule] = origin

    def unregister(self, plugin: object) -> None:
        for each in (plugin, *collected_rules(plugin)):
            if self._manager.is_registered(each):
                self._manager.unregister(each)

    def components(self, kind: Kind) -> dict[str, Component]:
        """What all plugins brought of one kind, by name."""
        found: dict[str, Component] = {}
        for implementation in getattr(self._manager.hook, _REGISTER_HOOKS[kind]).get_hookimpls():
            origin = self._origins[implementation.plugin]

            def register(
                name: str,
                build: Callable[..., Any],
                *,
                options: type[BaseModel] = NoOptions,
                needs: Iterable[Need] | Callable[[Any], Iterable[Need]] = (),
                provides: Iterable[Need] = (),
                doc: str | None = None,
                origin: str = origin,
            ) -> None:
                if name in found:
                    raise PluginError(
                        f"Two plugins bring the {kind} '{name}': {found[name].origin} and {origin}. "
                        f"Rename one or uninstall it."
                    )
                wanted = needs if callable(needs) else (lambda _, fixed=frozenset(needs): fixed)
                summary = (doc or build.__doc__ or "").strip().split("\n", 1)[0]
                found[name] = Component(
                    kind, name, build, options, lambda o: frozenset(wanted(o)), frozenset(provides), summary, origin
                )

            try:
                implementation.function(register)
            except PluginError:
                raise
            except Exception as error:
                self._failed(implementation.plugin, error)
        return found

    def add_commands(self, cli: Any) -> None:
        """Let every plugin add its commands to the command line."""
        for implementation in self._manager.hook.register_commands.get_hookimpls():
            try:
                implementation.function(cli)
            except Exception as error:
                self._failed(implementation.plugin, error)

    def component(self, kind: Kind, name: str, where: str) -> Component:
        """One component; `where` is the place in the configuration that asks for it."""
        known = self.components(kind)
        if name not in known:
            raise PluginError(f"{where}: {self.unknown(kind, name)}")
        return known[name]

    def unknown(self, kind: Kind, name: str) -> str:
        """What to say of a component that no plugin brings: the nearest names, and the plugins that may have it."""
        said = f"there is no {kind} '{name}'. {nearest(name, self.components(kind))}"
        if name in _ELSEWHERE:
            said += f" {name} is in a package of its own: pip install {_ELSEWHERE[name]}."
        return " ".join((said, *(f"It may be in a plugin that is broken. {each}" for each in self.broken)))

    def _failed(self, plugin: Any, error: Exception) -> None:
        """A plugin failed when asked what it brings; PluginError if it is a file of the user's."""
        if plugin not in self._installed:
            raise PluginError(
                f"The plugin {self._origins[plugin]} failed when asked what it brings: {_described(error)}"
            ) from error
        self._broke(self._installed[plugin], self._origins[plugin], error)

    def _broke(self, name: str, origin: str, error: Exception) -> None:
        self._broken.setdefault((origin, name), BrokenPlugin(name, origin, _described(error)))


def import_file(file: Path) -> ModuleType:
    """Import a user's own plugin file; its folder is importable from it."""
    if not file.is_file():
        raise PluginError(f"The plugin file {file} does not exist. Paths are relative to the configuration file.")
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if file.stem in sys.modules and getattr(sys.modules[file.stem], "__file__", None) == str(file.resolve()):
        return sys.modules[file.stem]
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None or spec.loader is None:
        raise PluginError(f"The plugin file {file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[file.stem]
        raise PluginError(f"The plugin file {file} cannot be imported: {_described(error)}") from error
    return module


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"


def collected_rules(plugin: object) -> list[object]:
    """Plugins made by decorators (`@agl_core.reward_rule`, …) that a module defines."""
    if not isinstance(plugin, ModuleType):
        return []
    made = (getattr(value, "__agl_plugin__", None) for value in vars(plugin).values())
    return [each for each in made if each is not None]
