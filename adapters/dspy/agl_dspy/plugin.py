"""What this package registers, and attaching without code."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


class DSPyAdapter:
    """DSPy: the names of modules, and the results of tools. In a rollout, DSPy's cache is off."""

    framework = "dspy"

    def attach(self) -> None:
        from agl_dspy import cache, http, modules, tools

        modules.watch_modules()
        tools.watch_tools()
        cache.watch_cache()
        http.watch_client()


def attach() -> None:
    """See every DSPy program of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([DSPyAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("dspy", lambda options: DSPyAdapter(), doc=DSPyAdapter.__doc__)
