"""The engine process: `python -m agl_torch`, started by `agl_torch.plugin.TorchEngine`.

transformers imports one helper of `torch._dynamo` with every model, and marks functions for it: importing the compiler
takes a third of the CPU of the engine's start, and agl compiles nothing. So it is loaded when something asks for more
than the marks, as `torch.compile` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_HELPER = f"{_COMPILER}._trace_wrapped_higher_order_op"


class _DeferredPackage(ModuleType):
    """A package whose own code runs at the first use of a name that it lacks. The first import of a submodule asks for
    one, `__path__`."""

    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        return getattr(self, name)


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Stands for what the compiler is told of a function, as a decorator with and without arguments."""
    return _unmarked if function is None else function


def defer_compiler() -> None:
    """Has an effect only before transformers is imported."""
    spec = importlib.util.find_spec(_COMPILER)
    if spec is None or _COMPILER in sys.modules:
        return
    package = sys.modules[_COMPILER] = importlib.util.module_from_spec(spec)
    for name in ("allow_in_graph", "assume_constant_result", "disable", "graph_break"):
        setattr(package, name, _unmarked)
    importlib.import_module(_HELPER)
    del package.__path__
    package.__class__ = _DeferredPackage


if __name__ == "__main__":
    defer_compiler()
    from agl_torch.process import main

    main()
