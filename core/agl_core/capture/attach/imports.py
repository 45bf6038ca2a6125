"""Actions at the import of a module, now or later."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeAlias

from agl_core.capture.reports import report_problem

Action: TypeAlias = Callable[[ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls an action with a module right after it was imported, before the importer goes on.

    Actions must not raise: an exception would fail the user's own import.
    """

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}

    def do(self, module: str, action: Action) -> None:
        """Call `action` when `module` is imported; at once if it already is."""
        if module in sys.modules:
            action(sys.modules[module])
            return
        self._actions.setdefault(module, []).append(action)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Do nothing at later imports."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._actions:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._hook(spec)
                return spec
        return None

    def _hook(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if loader is None or isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self._actions.pop(module.__name__, ()):
                action(module)

        # On the instance, so that the loader keeps its type.
        try:
            loader.exec_module = exec_module
        except Exception as error:
            report_problem(f"Waiting for the import of {spec.name}", error)
