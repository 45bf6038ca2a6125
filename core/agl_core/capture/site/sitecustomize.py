"""Attaches agl in the Python processes of a command that agl runs: this folder is put on its PYTHONPATH.

A process that imports neither a framework nor an HTTP library is left as it is. Python imports one sitecustomize only,
so the one that it would have imported without agl is imported from here. This file may be run by any Python, with or
without agl installed, and must never fail.
"""

import importlib.util
import json
import os
import sys
from importlib.machinery import PathFinder

_LIBRARIES = frozenset(os.environ.get("AGL_LIBRARIES", "").split(","))
"""The HTTP libraries whose requests agl stamps."""
_NEEDED = frozenset(
    {"agl_core", "annotated_types", "numpy", "orjson", "pluggy", "pydantic", "pydantic_core"}
    | {"typing_extensions", "typing_inspection", "wrapt"}
)
"""The modules that agl imports when it attaches, beside Python's own."""


def _import_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Attacher:
    """Attaches agl right after the import of a framework or of an HTTP library.

    It waits for the end of the outermost one, and of what agl itself needs: pydantic's plugins, for instance, are
    imported in the middle of pydantic's own import, and may import a framework.
    """

    def __init__(self, frameworks) -> None:  # type: ignore[no-untyped-def]
        self._frameworks, self._has_asked = frameworks, False
        self._open_imports, self._is_due = 0, False

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        top = fullname.partition(".")[0]
        if top in getattr(sys, "stdlib_module_names", ()):
            return None  # A process that needs nothing else is not slowed down.
        if not self._has_asked:
            self._has_asked = True
            self._frameworks = self._frameworks | _frameworks()
        is_trigger = fullname in self._frameworks or fullname in _LIBRARIES
        if not is_trigger and top not in _NEEDED:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._hook(spec.loader, is_trigger)
                return spec
        return None

    def _hook(self, loader, is_trigger) -> None:  # type: ignore[no-untyped-def]
        """Count the import as open until its module is there. The loader keeps its type."""
        if loader is None or isinstance(loader, type) or not hasattr(loader, "exec_module"):
            return
        execute = loader.exec_module

        def exec_module(module) -> None:  # type: ignore[no-untyped-def]
            self._open_imports += 1
            try:
                execute(module)
            finally:
                self._open_imports -= 1
            self._is_due |= is_trigger
            if self._is_due and not self._open_imports and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._attach()

        try:
            loader.exec_module = exec_module
        except Exception:
            return

    def _attach(self) -> None:
        try:
            from agl_core.capture.attaching import attach_to_attempt

            attach_to_attempt(os.environ)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and not self._frameworks & set(sys.modules):
                return  # Without a framework, nothing is missing that an adapter could have told.
            problem = (
                f"agl could not attach to {sys.executable}: {type(error).__name__}: {error}. Its LLM calls are "
                "recorded, but not who made them and what the tools did: install agl-core and the adapters there."
            )
            try:
                with open(os.path.join(os.environ["AGL_REPORTS"], f"{os.getpid()}.jsonl"), "a") as spool:
                    spool.write(json.dumps({"problem": problem}) + "\n")
            except OSError:
                sys.stderr.write(f"{problem}\n")


def _frameworks() -> "frozenset[str]":
    """The frameworks that adapters of this Python name, which agl's own Python may not have."""
    try:
        from importlib.metadata import entry_points

        return frozenset(entry.name for entry in entry_points(group="agl.frameworks"))
    except Exception:
        return frozenset()


try:
    _import_next()
finally:
    if "AGL_REPORTS" in os.environ and "AGL_TRIGGERS" in os.environ:
        sys.meta_path.insert(0, _Attacher(frozenset(os.environ["AGL_TRIGGERS"].split(","))))
