"""Finding plugins and asking them: installed ones by entry point (group `agl`), and the user's own files."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar

import pluggy

from agl_core import hooks
from agl_core.errors import PluginError, nearest
from agl_core.kinds import ALGORITHM, ENGINE, REWARD, Component, Kind, Register
from agl_core.types import DropReason, Episode

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Result = TypeVar("Result")

DECORATED = "__agl_plugin__"
"""The attribute of a decorated function or class that registers the component made of it."""


def lazily(package: str, framework: str | None = None, **modules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that imports each name from its module at its first use.

    Every agl process imports the packages of all plugins, also where their frameworks are not used.

        __getattr__ = lazily(__name__, "my_framework", MyCallback=".callback")

    The `framework` is imported first: that attaches an adapter, which must not find its own module half imported.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if framework is not None:
            importlib.import_module(framework)
        return getattr(importlib.import_module(modules[name], package), name)

    return get


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    name: str
    origin: str
    """Its distribution and version."""
    error: str

    def __str__(self) -> str:
        return f"The plugin '{self.name}' of {self.origin} cannot be used ({self.error}). Reinstall or uninstall it."


class Plugins:
    """All plugins of a process, and the components they brought."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("agl")
        self._manager.add_hookspecs(hooks)
        self._origins: dict[Any, str] = {}
        self.hook = RunHooks(self._manager, self._origins)
        self.broken: list[BrokenPlugin] = []
        self._components: list[Component] = []
        self._decorated: set[Any] = set()
        """The components that decorators made, each once: a plugin may import those of another."""

    @classmethod
    def load(cls, files: Sequence[Path] = ()) -> Plugins:
        """The installed plugins, and the user's own plugin files.

        An installed plugin that fails is among the `broken` ones, since most runs do not need it; a file that fails is
        a PluginError, since it was asked for.
        """
        plugins = cls()
        for entry in importlib.metadata.entry_points(group="agl"):
            origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            try:
                plugins.register(entry.load(), origin)
            except Exception as error:
                plugins.broken.append(BrokenPlugin(entry.name, origin, _described(error.__cause__ or error)))
        for file in files:
            plugins.register(import_file(file), str(file))
        return plugins

    def register(self, plugin: object, origin: str) -> None:
        """Add a module or object whose methods are hook implementations. PluginError if it cannot be used."""
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
            components = self._brought(plugin, origin)
        except Exception as error:
            self._manager.unregister(plugin)
            raise PluginError(f"The plugin {origin} cannot be used: {_described(error)}") from error
        self._components += components
        self._origins[plugin] = origin

    def _brought(self, plugin: object, origin: str) -> list[Component]:
        register = Register(origin)
        for hook in self._manager.hook.register_components.get_hookimpls():
            if hook.plugin is plugin:
                hook.function(register)
        for thing in vars(plugin).values() if isinstance(plugin, ModuleType) else ():
            bring = getattr(thing, "__dict__", {}).get(DECORATED)
            if bring is not None and bring not in self._decorated:
                self._decorated.add(bring)
                bring(register)
        return register.components

    def components(self, kind: Kind) -> dict[str, Component]:
        components: dict[str, Component] = {}
        for component in self._components:
            if component.kind == kind and (first := components.setdefault(component.name, component)) is not component:
                raise PluginError(
                    f"Two plugins bring the {kind} '{component.name}': {first.origin} and {component.origin}. "
                    f"Rename one, uninstall the package, or do not name the file."
                )
        return components

    def component(self, kind: Kind, name: str, where: str) -> Component:
        """One component; `where` is the place in the configuration that asks for it."""
        known = self.components(kind)
        if name not in known:
            raise PluginError(f"{where}: {self.unknown(kind, name)}")
        return known[name]

    def unknown(self, kind: Kind, name: str) -> str:
        """The message about a component that no plugin brings: the nearest names, and the plugins that may have it."""
        package = {ENGINE: f"agl-{name}", ALGORITHM: f"agl-{kind}s", REWARD: f"agl-{kind}s"}.get(kind)
        is_absent = package and not any(component.origin.startswith(package) for component in self._components)
        absent = f"{package}, which" if is_absent else "a package that"
        elsewhere = [f"It may be in a plugin that is broken. {plugin}" for plugin in self.broken] or [
            f"It may be in {absent} is not installed here, or in a file that `plugins` does not name."
        ]
        return " ".join((f"there is no {kind} '{name}'. {nearest(name, self.components(kind))}", *elsewhere))

    def show_run(
        self, run: Path, host: str, port: int, operator_key: str | None
    ) -> AbstractAsyncContextManager[str] | None:
        """The pages of a run, as the hook `show_run` has them; None if no plugin shows runs."""
        pages: AbstractAsyncContextManager[str] | None = self._manager.hook.show_run(
            run=run, host=host, port=port, operator_key=operator_key
        )
        return pages


class RunHooks:
    """Calls the hooks that serve a run, in the order of registration; what one plugin raises is logged and counted."""

    def __init__(self, manager: pluggy.PluginManager, origins: Mapping[Any, str]) -> None:
        self._manager, self._origins = manager, origins
        self.failures: Counter[tuple[str, str]] = Counter()
        """By plugin and hook."""

    def call(self, hook: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Results of the plugins for a hook, a function of `agl_core.hooks`. They cannot change a mapping."""
        bound = inspect.signature(hook).bind(*args, **kwargs).arguments
        arguments = {k: MappingProxyType(v) if isinstance(v, Mapping) else v for k, v in bound.items()}
        results: list[Any] = []
        for implementation in self._implementations(hook.__name__):
            with self._guard(implementation):
                results.append(implementation.function(**{name: arguments[name] for name in implementation.argnames}))
        return results

    def episode_built(self, episode: Episode) -> Episode:
        """The episode as the plugins leave it; each gets what the one before it returned."""
        for hook in self._implementations("episode_built"):
            with self._guard(hook):
                episode = _returned(episode, hook.function(*(episode for _ in hook.argnames)))
        return episode

    def _implementations(self, name: str) -> list[pluggy.HookImpl]:
        """In the order of registration, but for those that ask to be first or last."""
        implementations = getattr(self._manager.hook, name).get_hookimpls()
        return sorted(implementations, key=lambda hook: hook.trylast - hook.tryfirst)

    @contextmanager
    def _guard(self, hook: pluggy.HookImpl) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = self._origins[hook.plugin], hook.function.__name__
            self.failures[failed] += 1
            if self.failures[failed] == 1:
                logger.warning(
                    "The plugin %s failed in %s: %r. The run goes on without it; further failures are only counted.",
                    *failed,
                    error,
                    exc_info=error,
                )


def _returned(before: Episode, episode: object) -> Episode:
    """The episode as a plugin returned it, with the reason for which it dropped it, if it did."""
    if episode is None:
        return before
    if not isinstance(episode, Episode):
        raise TypeError(f"episode_built returned {type(episode).__name__}; it must return an Episode or None")
    if (episode.rollout, episode.attempt, episode.group) != (before.rollout, before.attempt, before.group):
        raise ValueError(f"episode_built returned an episode of {episode.rollout} for one of {before.rollout}")
    dropped = episode.dropped not in (None, before.dropped)
    emptied = bool(before.transitions) and not episode.transitions and episode.dropped is None
    return replace(episode, dropped=DropReason.PLUGIN) if dropped or emptied else episode


def add_to_path(folder: Path) -> None:
    """Make a user's modules importable before installed packages, but no `glob.py` in place of Python's own."""
    path = str(folder.resolve())
    if path not in sys.path:
        installed = (n for n, entry in enumerate(sys.path) if entry.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, 0), path)


def import_file(file: Path) -> ModuleType:
    """Import a user's own plugin file; its folder is importable from it."""
    if not file.is_file() or file.suffix != ".py":
        raise PluginError(f"There is no Python file {file}. Paths in a configuration are relative to it or `folder`.")
    if file.stem in sys.stdlib_module_names:
        raise PluginError(f"{file} has the name of one of Python's own modules, whose place it would take. Rename it.")
    add_to_path(file.parent)
    path = str(file.resolve())
    for name, known in [*sys.modules.items()]:  # An installed plugin may have it under another name.
        if name != "__main__" and getattr(known, "__dict__", {}).get("__file__") == path:
            return known
    spec = importlib.util.spec_from_file_location(file.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[file.stem]
        raise PluginError(f"The plugin file {file} cannot be imported: {_described(error)}") from error
    return module


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
