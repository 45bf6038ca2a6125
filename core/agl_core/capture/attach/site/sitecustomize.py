"""Attaches agl in the Python processes of a command that agl runs: this folder is put on its PYTHONPATH.

A process that imports nothing that agl could attach to is left as it is. Python imports one sitecustomize only, so the
one that it would have imported without agl is imported from here. This file may be run by any Python, with or without
agl installed, and must never fail.
"""

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


def _import_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [each for each in sys.path if os.path.abspath(each) != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Attaching:
    """Attaches agl when the first of some modules is about to be imported."""

    def __init__(self, triggers, reports) -> None:  # type: ignore[no-untyped-def]
        self._triggers, self._reports = triggers, reports
        self._asked = False

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname.split(".")[0] in getattr(sys, "stdlib_module_names", ()):
            return None  # A process that needs nothing else is not slowed down.
        if not self._asked:
            self._asked = True
            self._triggers = self._triggers | _frameworks()
        if fullname not in self._triggers:
            return None
        sys.meta_path.remove(self)
        self._attach()
        if fullname in sys.modules:  # agl itself has imported it
            # Taken out, for Python would load it again by the spec of a module that it finds there.
            return ModuleSpec(fullname, _Imported(sys.modules.pop(fullname)))  # type: ignore[arg-type]
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        return next((spec for spec in specs if spec is not None), None)

    def _attach(self) -> None:
        try:
            from agl_core.capture.attach.environment import attach_to_attempt

            attach_to_attempt(os.environ)
        except Exception as error:
            problem = (
                f"agl could not attach to {sys.executable}: {type(error).__name__}: {error}. Its LLM calls are "
                "recorded, but not who made them and what the tools did: install agl-core and the adapters there."
            )
            try:
                with open(os.path.join(self._reports, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as spool:
                    spool.write(json.dumps({"problem": problem}) + "\n")
            except OSError:
                sys.stderr.write(problem + "\n")


def _frameworks() -> "frozenset[str]":
    """The frameworks that adapters of this Python name, which agl's own Python may not have."""
    try:
        from importlib.metadata import entry_points

        return frozenset(entry.name for entry in entry_points(group="agl.frameworks"))
    except Exception:
        return frozenset()


class _Imported:
    """Loads a module that is there already, and leaves it as it is."""

    def __init__(self, module) -> None:  # type: ignore[no-untyped-def]
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._module

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        module.__spec__ = self._spec


try:
    _import_next()
finally:
    if "AGL_REPORTS" in os.environ and "AGL_TRIGGERS" in os.environ:
        sys.meta_path.insert(0, _Attaching(frozenset(os.environ["AGL_TRIGGERS"].split(",")), os.environ["AGL_REPORTS"]))
