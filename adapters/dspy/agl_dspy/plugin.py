"""The adapter that this package registers."""

from __future__ import annotations

import agl_core


@agl_core.adapter("dspy")
def dspy() -> None:
    """DSPy: the names of modules, and the results of tools. In a rollout, DSPy's cache is off."""
    from agl_dspy.programs import watch

    watch()
