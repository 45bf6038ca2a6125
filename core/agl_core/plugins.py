"""Finding plugins and asking them: installed ones by entry point (group `agl`), and the user's own files."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import pluggy
from pydantic import BaseModel

from agl_core import hooks
from agl_core.errors import PluginError, nearest
from agl_core.kinds import KINDS, AnyKind, Capability, Declared, NoOptions, Register
from agl_core.protocols import RunPages
from agl_core.run_hooks import RunHooks
from agl_core.types import CreditKind

ENTRY_POINT_GROUP = "agl"
DECORATED = "__agl_plugin__"
"""The attribute of a decorated function or class that registers the component made of it."""


def lazily(package: str, **places: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when they are first used: the module of each, by name.

    A plugin's package is imported in every agl process, also where its framework is not used.

        __getattr__ = lazily(__name__, MyCallback=".callback", attach=".plugin")
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name], package), name)

    return get


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An installed plugin that cannot be used, so that what it would bring is missing."""

    name: str
    origin: str
    """Its distribution and version."""
    error: str

    def __str__(self) -> str:
        return f"The plugin '{self.name}' of {self.origin} cannot be used ({self.error}). Reinstall or uninstall it."


@dataclass(frozen=True)
class Component:
    """One thing that a plugin brought, with what it declares (`agl_core.kinds.Declared`)."""

    kind: AnyKind
    name: str
    build: Callable[..., Any]
    """Makes it from its settings, and from what `agl_core.kinds` names beside them for its kind."""
    origin: str
    """The distribution and version, or the file, that it came from."""
    doc: str = ""
    options: type[BaseModel] = NoOptions
    """The settings that it honours."""
    needs: Callable[[Any], frozenset[Capability]] = lambda options: frozenset()
    provides: frozenset[Capability] = frozenset()
    yields: frozenset[CreditKind] = frozenset()
    takes: Callable[[Any], CreditKind | None] = lambda options: None
    status_rules: tuple[Any, ...] = ()


class Plugins:
    """All plugins of a process, and the components they brought."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("agl")
        self._manager.add_hookspecs(hooks)
        self._origins: dict[Any, str] = {}
        self.hook = RunHooks(self._manager, self._origins.__getitem__)
        """Calls the hooks that follow a run."""
        self._decorated: dict[Callable[[Register], None], Any] = {}
        """What decorators made in the plugins, with the first plugin that has it."""
        self._installed: dict[Any, str] = {}
        """The names of the plugins that were found by entry point."""
        self._broken: dict[tuple[str, str], BrokenPlugin] = {}
        self._components: list[Component] | None = None
        """What the plugins brought, once they were asked."""

    @classmethod
    def load(cls, files: Sequence[Path] = ()) -> Plugins:
        """What is installed, and the user's own plugin files.

        An installed plugin that fails is among the `broken` ones, because most runs do not need it; a file that fails
        is a PluginError, because it was asked for.
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
                plugins._installed[plugin] = entry.name
        for file in files:
            plugins.register(import_file(file), str(file))
        return plugins

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """The installed plugins that failed so far: when imported, or when asked what they bring."""
        return tuple(self._broken.values())

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
        for thing in vars(plugin).values() if isinstance(plugin, ModuleType) else ():
            if bring := getattr(thing, "__dict__", {}).get(DECORATED):
                self._decorated.setdefault(bring, plugin)
        self._components = None

    def components(self, kind: AnyKind) -> dict[str, Component]:
        """What all plugins brought of one kind, by name."""
        components: dict[str, Component] = {}
        for component in self._all_components():
            if component.kind is kind:
                first = components.setdefault(component.name, component)
                if first is not component:
                    raise PluginError(
                        f"Two plugins bring the {kind} '{component.name}': {first.origin} and {component.origin}. "
                        f"Rename one or uninstall it."
                    )
        return components

    def show_run(
        self, run: Path, host: str, port: int, operator_key: str | None
    ) -> AbstractAsyncContextManager[RunPages] | None:
        """The pages of a run, as the hook `show_run` has them; None if no plugin shows runs."""
        pages: AbstractAsyncContextManager[RunPages] | None = self._manager.hook.show_run(
            run=run, host=host, port=port, operator_key=operator_key
        )
        return pages

    @property
    def kinds(self) -> tuple[AnyKind, ...]:
        """The kinds of components: agl's own, and those that plugins have beside them."""
        return tuple(dict.fromkeys((*KINDS, *(component.kind for component in self._all_components()))))

    def component(self, kind: AnyKind, name: str, where: str) -> Component:
        """One component; `where` is the place in the configuration that asks for it."""
        known = self.components(kind)
        if name not in known:
            raise PluginError(f"{where}: {self.unknown(kind, name)}")
        return known[name]

    def unknown(self, kind: AnyKind, name: str) -> str:
        """What to say of a component that no plugin brings: the nearest names, and the plugins that may have it."""
        message = f"there is no {kind} '{name}'. {nearest(name, self.components(kind))}"
        if self.broken:
            return " ".join((message, *(f"It may be in a plugin that is broken. {plugin}" for plugin in self.broken)))
        return (
            f"{message} It may be in a package that is not installed here, or in a file that `plugins` does not name."
        )

    def _all_components(self) -> list[Component]:
        if self._components is None:
            implementations = self._manager.hook.register_components.get_hookimpls()
            sources: list[tuple[Any, Any]] = [(each.function, each.plugin) for each in implementations]
            sources += self._decorated.items()
            self._components = [component for source in sources for component in self._brought(*source)]
        return self._components

    def _brought(self, bring: Callable[[Register], None], plugin: Any) -> list[Component]:
        components = []

        def register(kind: AnyKind, name: str, build: Callable[..., Any], **declared: Any) -> None:
            components.append(_component(kind, name, build, self._origins[plugin], **declared))

        with self._blaming(plugin):
            bring(register)
        return components

    @contextmanager
    def _blaming(self, plugin: Any) -> Iterator[None]:
        """A plugin that fails when asked what it brings is broken; PluginError if it is a file of the user's."""
        try:
            yield
        except Exception as error:
            if plugin not in self._installed:
                raise PluginError(
                    f"The plugin {self._origins[plugin]} failed when asked what it brings: {_described(error)}"
                ) from error
            self._broke(self._installed[plugin], self._origins[plugin], error)

    def _broke(self, name: str, origin: str, error: Exception) -> None:
        self._broken.setdefault((origin, name), BrokenPlugin(name, origin, _described(error)))


def add_to_path(folder: Path) -> None:
    """Make the modules of a user's folder importable.

    They come before installed packages, but after the standard library: a `glob.py` there would break whatever imports
    Python's.
    """
    path = str(folder.resolve())
    if path not in sys.path:
        installed = (place for place, each in enumerate(sys.path) if each.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, 0), path)


def import_file(file: Path) -> ModuleType:
    """Import a user's own plugin file; its folder is importable from it."""
    if not file.is_file():
        raise PluginError(
            f"The plugin file {file} does not exist. Paths are relative to the configuration file, or to its `folder`."
        )
    add_to_path(file.parent)
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


def _component(
    kind: AnyKind,
    name: str,
    build: Callable[..., Any],
    origin: str,
    options: type[BaseModel] = NoOptions,
    **declared: Unpack[Declared],
) -> Component:
    """A component, from what `register` was called with. TypeError for what its kind cannot declare."""
    said = {key for key, value in declared.items() if value}
    if wrong := ", ".join(sorted(said - kind.declares - {"doc", "needs"})):
        raise TypeError(f"{kind} '{name}' cannot declare {wrong}")
    if "yields" in kind.declares - said:
        raise TypeError(f"{kind} '{name}' must say what its values are: yields=agl_core.CreditKind.RETURN or REWARD")
    needs, takes, yields = declared.get("needs", ()), declared.get("takes"), declared.get("yields", ())
    return Component(
        kind=kind,
        name=name,
        build=build,
        origin=origin,
        doc=(declared.get("doc") or build.__doc__ or "").strip().split("\n", 1)[0],
        options=options,
        needs=lambda chosen: frozenset(needs(chosen) if callable(needs) else needs),
        provides=frozenset(declared.get("provides", ())),
        yields=frozenset({yields} if isinstance(yields, CreditKind) else yields),
        takes=lambda chosen: takes(chosen) if callable(takes) else takes,
        status_rules=tuple(declared.get("status_rules", ())),
    )
